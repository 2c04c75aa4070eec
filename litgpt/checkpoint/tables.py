# Licensed under the Apache License 2.0, see the LICENSE file.

"""Hugging Face tensor names and layouts <-> ours: one table a family, read in both directions.

A table is a list of rules, a rule a tuple of rows, a row says which piece of their tensor is which piece of ours.
Names are patterns: `{i}` is a layer, `{e}` an expert, and a `.weight` or `.bias` at the end is carried over, so one
row serves both. The first rule that knows a name decides; when a family has several layouts on disk, the first one is
the one that is exported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from litgpt.checkpoint.views import QKV, At, EveryNth, GroupedQKV, Heads, OfExpert, Rows, Shape, Transposed, View
from litgpt.config import Config
from litgpt.errors import UserError

_PLACEHOLDERS = {"{i}": r"(?P<i>\d+)", "{e}": r"(?P<e>\d+)", "{name}": r"(?P<name>.+)"}


@dataclass(frozen=True)
class Row:
    """`their_views` of the tensor `theirs` are `our_views` of the tensor `ours`."""

    theirs: str
    ours: str
    their_views: tuple[View, ...] = ()
    our_views: tuple[View, ...] = ()


Rule = tuple[Row, ...]


@dataclass(frozen=True)
class Link:
    """A row for one pair of tensors."""

    theirs: str
    ours: str
    row: Row
    at: At

    def their_view(self, tensor: Tensor) -> Tensor:
        """The piece of their tensor."""
        return _apply(self.row.their_views, tensor, self.at)

    def our_view(self, tensor: Tensor) -> Tensor:
        """The piece of our tensor."""
        return _apply(self.row.our_views, tensor, self.at)

    def their_shape(self, piece: Shape) -> Shape:
        """The shape of their whole tensor, given that of the piece."""
        for view in reversed(self.row.their_views):
            piece = view.whole(piece, self.at)
        return piece


def _apply(views: tuple[View, ...], tensor: Tensor, at: At) -> Tensor:
    for view in views:
        tensor = view.view(tensor, at)
    return tensor


@dataclass(frozen=True)
class Table:
    """The rules of one family.

    Args:
        rules: see the module.
        prefix: what stands before the names of the backbone in the usual file.
        drop: patterns of tensors that carry nothing of the model, such as buffers saved by old versions.
        drop_extra_layers: ignore layers after the last one (the multi-token-prediction layers of DeepSeek).
    """

    rules: tuple[Rule, ...]
    prefix: str = "model."
    drop: tuple[str, ...] = ()
    drop_extra_layers: bool = False

    def import_links(self, theirs: str, config: Config) -> list[Link]:
        """The links from a tensor of a file to ours; none when no rule knows its name.

        Args:
            theirs: the name in the file, after `canonical`.
            config: the model's sizes.
        """
        links = []
        for row, found in self._match(self._import_patterns, theirs):
            experts = range(config.n_expert) if "{e}" in row.ours and "e" not in found else [int(found.get("e") or 0)]
            for expert in experts:
                ours = _fill(row.ours, {**found, "e": str(expert)})
                links.append(Link(theirs, ours, row, At(config, expert)))
        return links

    def export_links(self, ours: str, config: Config) -> list[Link]:
        """The links from one of our tensors to a file's; none when no rule knows its name."""
        return [
            Link(_fill(row.theirs, found), ours, row, At(config, int(found.get("e") or 0)))
            for row, found in self._match(self._export_patterns, ours)
        ]

    def is_dropped(self, theirs: str, config: Config) -> bool:
        """Whether a tensor of a file (after `canonical`) is left out on purpose."""
        if any(pattern.search(theirs) for pattern in self._drop_patterns):
            return True
        layer = re.match(re.escape(self.prefix) + r"layers\.(\d+)\.", theirs)
        return self.drop_extra_layers and layer is not None and int(layer[1]) >= config.n_layer

    def canonical(self, name: str) -> str:
        """A name from a file with the prefix of the family in place of the variants of it that occur."""
        for prefix in ("model.language_model.", "language_model.model.", "language_model."):
            if name.startswith(prefix):
                rest = name.removeprefix(prefix)
                return rest if rest.startswith("lm_head") else self.prefix + rest
        bare = name.startswith(("layers.", "embed_tokens.", "embed_in.", "norm.", "final_layer"))
        return self.prefix + name if bare else name

    def _match(self, patterns: list[list[tuple[Row, re.Pattern[str]]]], name: str) -> list[tuple[Row, dict[str, str]]]:
        for rule in patterns:
            if found := [(row, match.groupdict()) for row, pattern in rule if (match := pattern.fullmatch(name))]:
                return found
        return []

    @cached_property
    def _import_patterns(self) -> list[list[tuple[Row, re.Pattern[str]]]]:
        return [[(row, _pattern(row.theirs)) for row in rule] for rule in self.rules]

    @cached_property
    def _export_patterns(self) -> list[list[tuple[Row, re.Pattern[str]]]]:
        return [[(row, _pattern(row.ours)) for row in rule] for rule in self.rules]

    @cached_property
    def _drop_patterns(self) -> list[re.Pattern[str]]:
        return [re.compile(pattern) for pattern in (*_DROP_ALWAYS, *self.drop)]


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    for placeholder, group in _PLACEHOLDERS.items():
        escaped = escaped.replace(re.escape(placeholder), group)
    return re.compile(escaped + r"(?P<leaf>\.weight|\.bias|)")


def _fill(template: str, found: dict[str, str]) -> str:
    for placeholder in _PLACEHOLDERS:
        template = template.replace(placeholder, found.get(placeholder[1:-1]) or "")
    return template + found["leaf"]


# Rows that several families share. A stem beginning with `layers.` gets the family's prefix.


def rename(theirs: str, ours: str) -> Rule:
    """One tensor under another name."""
    return (Row(theirs, ours),)


def concat_qkv(q: str, k: str, v: str, ours: str = "transformer.h.{i}.attn.qkv") -> Rule:
    """Three tensors that are parts of our fused one."""
    return tuple(
        Row(theirs, ours, their_views=(Heads(part),), our_views=(QKV(part),))
        for part, theirs in zip("qkv", (q, k, v), strict=True)
    )


def interleaved_qkv(theirs: str, ours: str = "transformer.h.{i}.attn.qkv") -> Rule:
    """A fused tensor ordered by head group."""
    return tuple(Row(theirs, ours, their_views=(GroupedQKV(part),), our_views=(QKV(part),)) for part in "qkv")


def split(theirs: str, ours: tuple[str, ...]) -> Rule:
    """One tensor whose rows are several of ours."""
    return tuple(Row(theirs, name, their_views=(Rows(i, len(ours)),)) for i, name in enumerate(ours))


def stacked_experts(gate_up: str, down: str) -> tuple[Rule, ...]:
    """All experts in two tensors, gate above up: (E, 2I, C) and (E, C, I)."""
    names = ("transformer.h.{i}.mlp.experts.{e}.fc_1.weight", "transformer.h.{i}.mlp.experts.{e}.fc_2.weight")
    return (
        tuple(Row(gate_up, name, their_views=(OfExpert(), Rows(i, 2))) for i, name in enumerate(names)),
        (Row(down, "transformer.h.{i}.mlp.experts.{e}.proj.weight", their_views=(OfExpert(),)),),
    )


def separate_experts(path: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Three tensors an expert."""
    ours = "transformer.h.{i}.mlp.experts.{e}."
    pairs = ((gate, "fc_1"), (up, "fc_2"), (down, "proj"))
    return tuple(rename(f"{path}.{{e}}.{theirs}", ours + name) for theirs, name in pairs)


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
        split(_L + "mlp.gate_up_proj", (_H + "mlp.fc_1", _H + "mlp.fc_2")),
        rename(_L + "mlp.down_proj", _H + "mlp.proj"),
    )
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
}
# Our own files: the same names; early LitGPT versions ordered the fused attention weight by group and named it `attn`.
LITGPT = Table((interleaved_qkv(_H + "attn.attn"), rename("{name}", "{name}")), prefix="transformer.")

# Encoders of multi-modal checkpoints whose language model we load
_DROP_ALWAYS = (r"^(model\.)?(vision_tower|vision_model|multi_modal_projector|visual|audio_tower|embed_vision)\.",)


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
