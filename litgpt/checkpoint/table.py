# Licensed under the Apache License 2.0, see the LICENSE file.

"""Hugging Face tensor names and layouts <-> ours: what a table of one family is made of, read in both directions.

A table is a list of rules, a rule a tuple of rows, a row says which piece of their tensor is which piece of ours.
Names are patterns: `{i}` is a layer, `{e}` an expert, `{n}` a head, and a `.weight` or `.bias` at the end is carried
over, so one row serves both. The first rule that knows a name decides; when a family has several layouts on disk, the
first one is the one that is exported, unless its rows are for other models (`when`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from litgpt.checkpoint.views import QKV, At, GroupedQKV, Heads, OfExpert, OfHead, Rows, Shape, Transposed, View
from litgpt.config import Config

_PLACEHOLDERS = {"{i}": r"(?P<i>\d+)", "{e}": r"(?P<e>\d+)", "{n}": r"(?P<n>\d+)", "{name}": r"(?P<name>.+)"}

# How names begin that lack the family's prefix
_BARE = ("layers.", "embed_tokens.", "embed_in.", "norm.", "final_layer", "h.", "wte.", "wpe.", "ln_f.", "word_emb")
# Encoders of multi-modal checkpoints whose language model we load
_DROP_ALWAYS = (r"^(model\.)?(vision_tower|vision_model|multi_modal_projector|visual|audio_tower|embed_vision)\.",)


@dataclass(frozen=True)
class Row:
    """`their_views` of the tensor `theirs` are `our_views` of the tensor `ours`.

    Args:
        theirs: a pattern, see the module.
        ours: likewise.
        their_views: applied one after the other.
        our_views: likewise.
        when: the models that are exported under this name; all are read.
        heads: how many tensors `{n}` stands for.
    """

    theirs: str
    ours: str
    their_views: tuple[View, ...] = ()
    our_views: tuple[View, ...] = ()
    when: Callable[[Config], bool] = lambda config: True
    heads: Callable[[Config], int] = lambda config: 1


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


def by_row(links: Sequence[Link]) -> list[Link]:
    """The links for what has an entry a row of the weight, as LoRA's B: it is not turned where the weight is."""
    plain = [tuple(view for view in link.row.their_views if not isinstance(view, Transposed)) for link in links]
    return [replace(link, row=replace(link.row, their_views=views)) for link, views in zip(links, plain, strict=True)]


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
            head = int(found.get("n") or 0)
            experts = range(config.n_expert) if "{e}" in row.ours and "e" not in found else [int(found.get("e") or 0)]
            for expert in experts if head < row.heads(config) else ():
                ours = _fill(row.ours, {**found, "e": str(expert)})
                links.append(Link(theirs, ours, row, At(config, expert, head)))
        return links

    def export_links(self, ours: str, config: Config) -> list[Link]:
        """The links from one of our tensors to a file's; none when no rule knows its name."""
        return [
            Link(_fill(row.theirs, {**found, "n": str(head)}), ours, row, At(config, int(found.get("e") or 0), head))
            for row, found in self._match(self._export_patterns, ours, config)
            for head in range(row.heads(config))
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
        return self.prefix + name if name.startswith(_BARE) else name

    def _match(
        self, patterns: list[list[tuple[Row, re.Pattern[str]]]], name: str, config: Config | None = None
    ) -> list[tuple[Row, dict[str, str]]]:
        for rule in patterns:
            rows = [(row, pattern) for row, pattern in rule if config is None or row.when(config)]
            if found := [(row, match.groupdict()) for row, pattern in rows if (match := pattern.fullmatch(name))]:
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


def rename(theirs: str, ours: str, when: Callable[[Config], bool] = Row.when) -> Rule:
    """One tensor under another name."""
    return (Row(theirs, ours, when=when),)


def transposed(theirs: str, ours: str) -> Rule:
    """One matrix stored as (in, out), or its bias."""
    return (Row(theirs, ours, their_views=(Transposed(),)),)


def head_norm(theirs: str, ours: str, heads: Callable[[Config], int]) -> Rule:
    """A norm for each head, `{n}` in their name, that are rows of one of ours."""
    return (Row(theirs, ours, our_views=(OfHead(),), heads=heads),)


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
