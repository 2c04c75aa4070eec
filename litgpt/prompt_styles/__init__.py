# Licensed under the Apache License 2.0, see the LICENSE file.

"""Named prompt styles: `base` says what a style is, `formats` holds the classes; import from `litgpt.prompts`."""
