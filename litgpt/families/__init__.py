# Licensed under the Apache License 2.0, see the LICENSE file.

"""Model families: sizes as data, and the reader of Hugging Face's `config.json`."""
