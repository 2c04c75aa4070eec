# Licensed under the Apache License 2.0, see the LICENSE file.

"""The finetuning commands: each module states its flags and what its method differs in."""
