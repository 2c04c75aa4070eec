# Licensed under the Apache License 2.0, see the LICENSE file.

"""Checkpoints of every kind: opening, converting, exporting, downloading and safe writing."""
