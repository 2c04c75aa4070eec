# Licensed under the Apache License 2.0, see the LICENSE file.

"""Decoding: from token ids or text to the model's continuation."""
