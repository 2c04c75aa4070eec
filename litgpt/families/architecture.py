# Licensed under the Apache License 2.0, see the LICENSE file.

"""How one `model_type` of Hugging Face is written down, and what many of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from litgpt.families.keys import Keys


@dataclass(frozen=True)
class Architecture:
    """How one `model_type` is read.

    Args:
        fixed: fields that the type implies and the file does not say.
        keys: the type's own keys and what each means when the file leaves it out.
        window: layers with the sliding window when `layer_types` is absent: "all", "tail" (from `max_window_layers`
            on), or a period of which the last layer is global ("alternate" = 2, "pattern" = `sliding_window_pattern`,
            "hybrid" the same, and none slides without `sliding_window`).
        ignored: keys that this type's files carry and nobody reads.
        must_be: keys that may be present with this value only.
        finish: reads what needs more than a rename.
        spellings: the type's own names of keys that others share.
    """

    fixed: dict[str, Any]
    keys: dict[str, Any]
    window: str = ""
    ignored: frozenset[str] = frozenset()
    must_be: dict[str, Any] = field(default_factory=dict)
    finish: Callable[[Keys, dict[str, Any]], None] | None = None
    spellings: dict[str, str] = field(default_factory=dict)


def experts_only(keys: Keys, fields: dict[str, Any]) -> None:
    """The experts' width is called `intermediate_size` where there is no dense layer."""
    fields["moe_intermediate_size"] = fields["intermediate_size"]


LLAMA = {
    "norm_class_name": "RMSNorm",
    "parallel_residual": False,
    "bias": False,
    "rotary_percentage": 1.0,
    "mlp_class_name": "LLaMAMLP",
}
MOE = LLAMA | {"mlp_class_name": "LLaMAMoE"}
SHARED = {"rms_norm_eps": 1e-6, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu"}
