# Licensed under the Apache License 2.0, see the LICENSE file.

"""Rotary settings of a `config.json`, in the spellings of transformers 4 and 5.

Version 4 writes `rope_theta` and `rope_scaling`; version 5 writes `rope_parameters`, flat or one object per kind of
layer. The names of the scaling types and their defaults are those of
https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from litgpt.errors import UserError
from litgpt.families.keys import Keys, Kind, typed

logger = logging.getLogger(__name__)

# Key there -> key in `Config.rope_adjustments` and kind
_SCALING: dict[str, tuple[str, Kind]] = {
    "factor": ("factor", "positive"),
    "low_freq_factor": ("low_freq_factor", "positive"),
    "high_freq_factor": ("high_freq_factor", "positive"),
    "original_max_position_embeddings": ("original_max_seq_len", "size"),
    "beta_fast": ("beta_fast", "positive"),
    "beta_slow": ("beta_slow", "positive"),
    "mscale": ("mscale", "number"),
    "mscale_all_dim": ("mscale_all_dim", "number"),
    "truncate": ("truncate", "flag"),
    "attention_factor": ("attention_factor", "positive"),
}
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
_GROWTH = "llama_4_scaling_beta"
_ELSEWHERE = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "short_factor", "long_factor"}


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature for a context stretched by `factor`, https://arxiv.org/abs/2309.00071."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_fields(keys: Keys, fields: Mapping[str, Any], sliding: list[int] | None, model_type: str) -> dict[str, Any]:
    """The `Config` fields of the rotary embedding.

    Args:
        keys: the file.
        fields: the fields known so far: sizes.
        sliding: 1 for each layer with a sliding window, None for a type without one.
        model_type: which file this is; GPT-NeoX has names of its own.
    """
    by_kind = _by_layer_kind(keys)
    main = by_kind.get("full_attention", by_kind.get("", {}))
    neox = model_type == "gpt_neox"
    theta = _with_fallback(keys, main, "rope_theta", "rotary_emb_base" if neox else "rope_theta", 1e4, "positive")
    share = _with_fallback(
        keys, main, "partial_rotary_factor", "rotary_pct" if neox else "partial_rotary_factor", 1.0, "positive"
    )
    if share > 1:
        raise UserError(f"{keys.label}: partial_rotary_factor {share} is above 1")
    out: dict[str, Any] = {"rope_base": theta, "rotary_percentage": share}
    adjustments = _adjustments(keys, main, fields, share, model_type)
    if adjustments:
        out["rope_adjustments"] = adjustments

    local = by_kind.get("sliding_attention")
    if "rope_local_base_freq" in keys.defaults:
        local_theta = keys.get("rope_local_base_freq", "positive") or theta
        local = {"rope_theta": local_theta} | (local or {})
    if local is not None and local != main:
        _refuse_unknown(keys, local)
        if _kind(keys, local) != "default" or local.get("partial_rotary_factor", share) != share:
            raise UserError(f"{keys.label}: scaled or partial rotary embeddings on sliding layers are not supported")
        local_keys = Keys(local, {"rope_theta": theta}, label=f"{keys.label}: rope_parameters")
        local_theta = local_keys.get("rope_theta", "positive")
        if adjustments or local_theta != theta:
            out["rope_local_base_freq"] = local_theta
            out["rope_indices"] = sliding or [0] * fields["n_layer"]
    if _GROWTH in keys.defaults:
        inside = Keys(main, {_GROWTH: None}, label=f"{keys.label}: rope_parameters")
        out["query_growth"] = inside.get(_GROWTH, "number")
    return out


def _by_layer_kind(keys: Keys) -> dict[str, dict[str, Any]]:
    """The scaling object: under "" when there is one for all layers, otherwise by kind of layer."""
    flat, new = keys.take("rope_scaling"), keys.take("rope_parameters")
    for key, value in (("rope_scaling", flat), ("rope_parameters", new)):
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{keys.label}: {key} is {value!r}, expected an object")
    if flat and new and flat != new:
        raise UserError(f"{keys.label} has both rope_scaling and rope_parameters, and they differ")
    kinds = {k: v for k, v in (new or {}).items() if k in ("full_attention", "sliding_attention")}
    if kinds:
        for kind, value in kinds.items():
            if not isinstance(value, dict):
                raise UserError(f"{keys.label}: rope_parameters.{kind} is {value!r}, expected an object")
        if rest := sorted(set(new or {}) - set(kinds)):
            raise UserError(f"{keys.label}: unknown keys in rope_parameters: {', '.join(rest)}")
        return kinds
    return {"": dict(flat or new or keys.defaults.get("rope_parameters") or {})}


def _kind(keys: Keys, scaling: Mapping[str, Any]) -> str:
    return typed(f"{keys.label}: rope_type", scaling.get("rope_type") or scaling.get("type") or "default", "text")


def _refuse_unknown(keys: Keys, scaling: Mapping[str, Any]) -> None:
    present = {key for key, value in scaling.items() if value is not None}
    of_type = {_GROWTH, "max_position_embeddings"} if _GROWTH in keys.defaults else set()
    if unknown := sorted(present - set(_SCALING) - _ELSEWHERE - of_type):
        raise UserError(f"{keys.label}: unknown keys in the rope scaling: {', '.join(unknown)}")


def _with_fallback(keys: Keys, main: Mapping[str, Any], name: str, outer: str, default: float, kind: Kind) -> float:
    """The value inside the scaling object, else beside it, else the type's default."""
    beside = Keys(keys.raw, {outer: keys.defaults.get(name, default)}, label=keys.label).get(outer, kind)
    keys.asked.add(outer)
    return Keys(main, {name: beside}, label=f"{keys.label}: rope_parameters").get(name, kind)


def _adjustments(
    keys: Keys, main: Mapping[str, Any], fields: Mapping[str, Any], share: float, model_type: str
) -> dict[str, Any] | None:
    _refuse_unknown(keys, main)
    kind = _kind(keys, main)
    if model_type == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # its names in the first files
    original = keys.take("original_max_position_embeddings") or keys.defaults.get("original_max_position_embeddings")
    if kind == "default":
        return None
    if kind not in _NEEDED:
        raise UserError(f"{keys.label}: rope_type {kind!r} is not supported", f"known types: {', '.join(_NEEDED)}")
    scaling = {key: value for key, value in main.items() if value is not None}
    if missing := [key for key in _NEEDED[kind] if key not in scaling]:
        raise UserError(f"{keys.label}: rope scaling of type {kind!r} lacks {', '.join(missing)}")
    read = Keys(scaling, {}, label=f"{keys.label}: rope scaling")
    out: dict[str, Any] = {"rope_type": kind}
    out |= {name: read.get(key, of) for key, (name, of) in _SCALING.items() if key in scaling}
    if kind == "linear":
        return {"rope_type": kind, "factor": out["factor"]}
    if kind == "dynamic":
        # It stretches only beyond max_position_embeddings, and that is where our context ends.
        logger.warning("%s: dynamic rope scaling is left out, the context ends at its trained length", keys.label)
        return None
    block_size = fields["block_size"]
    if original is not None:
        out["original_max_seq_len"] = Keys({"n": original}, {}, label=keys.label).get("n", "size")
    out.setdefault("original_max_seq_len", block_size)
    stretch = out.get("factor") or block_size / out["original_max_seq_len"]
    if kind == "yarn":
        out["factor"] = stretch
        out = {"beta_fast": 32.0, "beta_slow": 1.0} | out
        out.setdefault("attention_factor", _yarn_attention_factor(out))
    if kind == "longrope":
        out |= _long_factors(keys, scaling, fields, share)
        ratio = 1.0 if stretch <= 1 else 1 + math.log(stretch) / math.log(out["original_max_seq_len"])
        out.setdefault("attention_factor", math.sqrt(ratio))
    return out


def _yarn_attention_factor(rope: Mapping[str, Any]) -> float:
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_mscale(rope["factor"], rope["mscale"]) / yarn_mscale(rope["factor"], rope["mscale_all_dim"])
    return yarn_mscale(rope["factor"])


def _long_factors(keys: Keys, scaling: Mapping[str, Any], fields: Mapping[str, Any], share: float) -> dict[str, Any]:
    head_size = fields.get("head_size") or fields["n_embd"] // fields["n_head"]
    expected = int(share * head_size) // 2
    out = {}
    for key in ("short_factor", "long_factor"):
        values = scaling[key]
        if not isinstance(values, list) or not all(isinstance(v, int | float) and v > 0 for v in values):
            raise UserError(f"{keys.label}: {key} must be a list of numbers above 0")
        if len(values) != expected:
            raise UserError(f"{keys.label}: {key} has {len(values)} entries, {expected} rotated pairs need one each")
        out[key] = [float(v) for v in values]
    return out
