# Licensed under the Apache License 2.0, see the LICENSE file.

"""One table a family: Hugging Face's names and layouts of tensors <-> ours. `table.py` says how they are read."""

from __future__ import annotations

import re
from collections.abc import Iterable

from litgpt.checkpoint.table import (
    Link,
    Row,
    Rule,
    Table,
    by_row,
    concat_qkv,
    head_norm,
    interleaved_qkv,
    rename,
    separate_experts,
    split,
    stacked_experts,
    transposed,
)
from litgpt.checkpoint.views import EveryNth, OfExpert, Transposed
from litgpt.config import Config
from litgpt.errors import UserError

__all__ = ["LITGPT", "TABLES", "Link", "Row", "Rule", "Table", "by_row", "summarize", "table_for"]

_H, _L = "transformer.h.{i}.", "model.layers.{i}."

_ENDS = (
    rename("model.embed_tokens", "transformer.wte"),
    rename("model.norm", "transformer.ln_f"),
    rename("lm_head", "lm_head"),
)
_ATTENTION = (
    concat_qkv(_L + "self_attn.q_proj", _L + "self_attn.k_proj", _L + "self_attn.v_proj"),
    rename(_L + "self_attn.o_proj", _H + "attn.proj"),
    rename(_L + "self_attn.q_norm", _H + "attn.norm_q"),
    rename(_L + "self_attn.k_norm", _H + "attn.norm_k"),
)
_NORMS = (
    rename(_L + "input_layernorm", _H + "norm_1"),
    rename(_L + "post_attention_layernorm", _H + "norm_2"),
)
_SANDWICH_NORMS = (
    rename(_L + "input_layernorm", _H + "norm_1"),
    rename(_L + "post_attention_layernorm", _H + "post_attention_norm"),
    rename(_L + "pre_feedforward_layernorm", _H + "norm_2"),
    rename(_L + "post_feedforward_layernorm", _H + "post_mlp_norm"),
)
_MLP = (
    rename(_L + "mlp.gate_proj", _H + "mlp.fc_1"),
    rename(_L + "mlp.up_proj", _H + "mlp.fc_2"),
    rename(_L + "mlp.down_proj", _H + "mlp.proj"),
)
_FUSED_GATE_UP = (
    split(_L + "mlp.gate_up_proj", (_H + "mlp.fc_1", _H + "mlp.fc_2")),
    rename(_L + "mlp.down_proj", _H + "mlp.proj"),
)
_EXPERTS = (
    rename(_L + "mlp.gate", _H + "mlp.gate"),
    *separate_experts(_L + "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    *stacked_experts(_L + "mlp.experts.gate_up_proj", _L + "mlp.experts.down_proj"),
)

_LLAMA = Table((*_ENDS, *_ATTENTION, *_NORMS, *_MLP), drop=(r"\.rotary_emb\.inv_freq$",))
_GEMMA_2 = Table((*_ENDS, *_ATTENTION, *_SANDWICH_NORMS, *_MLP))
_MIXTRAL = Table(
    (
        *_ENDS,
        *_ATTENTION,
        *_NORMS,
        rename(_L + "block_sparse_moe.gate", _H + "mlp.gate"),
        *separate_experts(_L + "block_sparse_moe.experts", "w1", "w3", "w2"),
        *_EXPERTS,
    )
)
_QWEN3_MOE = Table((*_ENDS, *_ATTENTION, *_NORMS, *_MLP, *_EXPERTS))
_GPT_NEOX = Table(
    (
        rename("gpt_neox.embed_in", "transformer.wte"),
        rename("gpt_neox.final_layer_norm", "transformer.ln_f"),
        rename("embed_out", "lm_head"),
        rename("lm_head", "lm_head"),  # as transformers 5 calls it in memory
        rename("gpt_neox.layers.{i}.input_layernorm", _H + "norm_1"),
        rename("gpt_neox.layers.{i}.post_attention_layernorm", _H + "norm_2"),
        interleaved_qkv("gpt_neox.layers.{i}.attention.query_key_value"),
        rename("gpt_neox.layers.{i}.attention.dense", _H + "attn.proj"),
        rename("gpt_neox.layers.{i}.mlp.dense_h_to_4h", _H + "mlp.fc"),
        rename("gpt_neox.layers.{i}.mlp.dense_4h_to_h", _H + "mlp.proj"),
    ),
    prefix="gpt_neox.",
    drop=(r"\.rotary_emb\.inv_freq$", r"\.attention\.(masked_)?bias$"),
)
_PHI = Table(
    (
        rename("model.embed_tokens", "transformer.wte"),
        rename("model.final_layernorm", "transformer.ln_f"),
        rename("lm_head", "lm_head"),
        rename(_L + "input_layernorm", _H + "norm_1"),
        _ATTENTION[0],
        rename(_L + "self_attn.dense", _H + "attn.proj"),
        rename(_L + "mlp.fc1", _H + "mlp.fc"),
        rename(_L + "mlp.fc2", _H + "mlp.proj"),
    )
)
_PHI_3 = Table(
    (
        *_ENDS,
        *_NORMS,
        rename(_L + "self_attn.qkv_proj", _H + "attn.qkv"),
        rename(_L + "self_attn.o_proj", _H + "attn.proj"),
        *_FUSED_GATE_UP,
    )
)
_POST_NORM = Table(
    (
        *_ENDS,
        *_ATTENTION,
        rename(_L + "post_attention_layernorm", _H + "post_attention_norm"),
        rename(_L + "post_feedforward_layernorm", _H + "post_mlp_norm"),
        *_MLP,
    )
)
_STABLELM = Table(
    (
        head_norm(_L + "self_attn.q_layernorm.norms.{n}", _H + "attn.norm_q", lambda config: config.n_head),
        head_norm(
            _L + "self_attn.k_layernorm.norms.{n}", _H + "attn.norm_k", lambda config: config.n_query_groups or 0
        ),
        *_LLAMA.rules,
    ),
    drop=_LLAMA.drop,
)


def _has_two_parallel_norms(config: Config) -> bool:
    return config.parallel_residual and not config.shared_attention_norm


_FALCON = Table(
    (
        rename("transformer.word_embeddings", "transformer.wte"),
        rename("transformer.ln_f", "transformer.ln_f"),
        rename("lm_head", "lm_head"),
        rename("transformer.h.{i}.ln_attn", _H + "norm_1", when=_has_two_parallel_norms),
        rename("transformer.h.{i}.ln_mlp", _H + "norm_2", when=_has_two_parallel_norms),
        rename("transformer.h.{i}.input_layernorm", _H + "norm_1"),
        rename("transformer.h.{i}.post_attention_layernorm", _H + "norm_2"),
        interleaved_qkv("transformer.h.{i}.self_attention.query_key_value"),
        rename("transformer.h.{i}.self_attention.dense", _H + "attn.proj"),
        rename("transformer.h.{i}.mlp.dense_h_to_4h", _H + "mlp.fc"),
        rename("transformer.h.{i}.mlp.dense_4h_to_h", _H + "mlp.proj"),
    ),
    prefix="transformer.",
    drop=(r"\.rotary_emb\.inv_freq$", r"\.maybe_rotary\.inv_freq$"),
)
_GLM = Table((*_ENDS, *_ATTENTION, *_NORMS, *_FUSED_GATE_UP))
_GLM_4 = Table(
    (
        *_GLM.rules,
        rename(_L + "post_self_attn_layernorm", _H + "post_attention_norm"),
        rename(_L + "post_mlp_layernorm", _H + "post_mlp_norm"),
    )
)
_NEMOTRON = Table(
    (
        *_ENDS,
        *_ATTENTION,
        *_NORMS,
        rename(_L + "mlp.up_proj", _H + "mlp.fc"),
        rename(_L + "mlp.down_proj", _H + "mlp.proj"),
    )
)
_GPT_2 = Table(
    (
        rename("transformer.wte", "transformer.wte"),
        rename("transformer.wpe", "transformer.wpe"),
        rename("transformer.ln_f", "transformer.ln_f"),
        rename("lm_head", "lm_head"),
        rename("transformer.h.{i}.ln_1", _H + "norm_1"),
        rename("transformer.h.{i}.ln_2", _H + "norm_2"),
        transposed("transformer.h.{i}.attn.c_attn", _H + "attn.qkv"),
        transposed("transformer.h.{i}.attn.c_proj", _H + "attn.proj"),
        transposed("transformer.h.{i}.mlp.c_fc", _H + "mlp.fc"),
        transposed("transformer.h.{i}.mlp.c_proj", _H + "mlp.proj"),
    ),
    prefix="transformer.",
    drop=(r"\.attn\.(masked_)?bias$",),
)
_DEEPSEEK = Table(
    (
        *_ENDS,
        *_NORMS,
        *_MLP,
        *_EXPERTS,
        rename(_L + "mlp.gate.e_score_correction_bias", _H + "mlp.gate.e_score_correction_bias"),
        rename(_L + "mlp.shared_experts.gate_proj", _H + "mlp.shared_experts.fc_1"),
        rename(_L + "mlp.shared_experts.up_proj", _H + "mlp.shared_experts.fc_2"),
        rename(_L + "mlp.shared_experts.down_proj", _H + "mlp.shared_experts.proj"),
        rename(_L + "self_attn.q_proj", _H + "attn.q_proj"),
        rename(_L + "self_attn.q_a_proj", _H + "attn.q_a_proj"),
        rename(_L + "self_attn.q_a_layernorm", _H + "attn.q_a_norm"),
        rename(_L + "self_attn.q_b_proj", _H + "attn.q_b_proj"),
        rename(_L + "self_attn.kv_a_proj_with_mqa", _H + "attn.kv_a_proj_with_mqa"),
        rename(_L + "self_attn.kv_a_layernorm", _H + "attn.kv_a_norm"),
        rename(_L + "self_attn.kv_b_proj", _H + "attn.kv_b_proj"),
        rename(_L + "self_attn.o_proj", _H + "attn.proj"),
    ),
    drop_extra_layers=True,
)
_E = _H + "mlp.experts.{e}."
_GPT_OSS = Table(
    (
        *_ENDS,
        *_ATTENTION,
        *_NORMS,
        rename(_L + "self_attn.sinks", _H + "attn.sinks"),
        rename(_L + "mlp.router", _H + "mlp.gate"),
        (  # (E, C, 2I), gate and up in alternating columns
            Row(_L + "mlp.experts.gate_up_proj", _E + "fc_1.weight", (OfExpert(), Transposed(), EveryNth(0, 2))),
            Row(_L + "mlp.experts.gate_up_proj", _E + "fc_2.weight", (OfExpert(), Transposed(), EveryNth(1, 2))),
        ),
        (
            Row(_L + "mlp.experts.gate_up_proj_bias", _E + "fc_1.bias", (OfExpert(), EveryNth(0, 2))),
            Row(_L + "mlp.experts.gate_up_proj_bias", _E + "fc_2.bias", (OfExpert(), EveryNth(1, 2))),
        ),
        (Row(_L + "mlp.experts.down_proj", _E + "proj.weight", (OfExpert(), Transposed())),),
        (Row(_L + "mlp.experts.down_proj_bias", _E + "proj.bias", (OfExpert(),)),),
    )
)

TABLES: dict[str, Table] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _GEMMA_2,
    "gemma3_text": _GEMMA_2,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "gpt_neox": _GPT_NEOX,
    "phi": _PHI,
    "phi3": _PHI_3,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": _GPT_OSS,
    "cohere2": _LLAMA,
    "ernie4_5": _LLAMA,
    "exaone4": _POST_NORM,
    "falcon": _FALCON,
    "glm": _GLM,
    "glm4": _GLM_4,
    "gpt2": _GPT_2,
    "granite": _LLAMA,
    "helium": _LLAMA,
    "ministral3": _LLAMA,
    "nemotron": _NEMOTRON,
    "olmo": _LLAMA,
    "olmo2": _POST_NORM,
    "olmo3": _POST_NORM,
    "olmoe": _QWEN3_MOE,
    "seed_oss": _LLAMA,
    "smollm3": _LLAMA,
    "stablelm": _STABLELM,
}
# Our own files: the same names; early LitGPT versions ordered the fused attention weight by group and named it `attn`.
LITGPT = Table((interleaved_qkv(_H + "attn.attn"), rename("{name}", "{name}")), prefix="transformer.")


def table_for(family: str | None) -> Table:
    """The table of a family (Hugging Face's `model_type`).

    Raises:
        UserError: there is none.
    """
    if family not in TABLES:
        raise UserError(
            f"no table of tensor names for the model type {family!r}", f"known: {', '.join(sorted(TABLES))}"
        )
    return TABLES[family]


def summarize(names: Iterable[str], limit: int = 4) -> str:
    """Name all of `names` in short: long series that differ only in numbers become one entry with `*`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    parts = []
    for pattern, members in groups.items():
        parts += [f"{pattern} ({len(members)} tensors)"] if len(members) > limit else members
    return ", ".join(parts)
