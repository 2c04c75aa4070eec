# Licensed under the Apache License 2.0, see the LICENSE file.

"""Training: the loss."""
