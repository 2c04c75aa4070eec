# Licensed under the Apache License 2.0, see the LICENSE file.

"""litgpt: readable GPT models that load, generate and finetune almost any open checkpoint."""
