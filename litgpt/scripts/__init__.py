# Licensed under the Apache License 2.0, see the LICENSE file.

"""Commands that prepare and check models: download, validate, and the demo model."""
