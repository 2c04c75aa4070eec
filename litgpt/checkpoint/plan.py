# Licensed under the Apache License 2.0, see the LICENSE file.

"""What goes where when a checkpoint is loaded, worked out and checked from names and shapes alone."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from litgpt.checkpoint.source import Source
from litgpt.checkpoint.tables import Link, Table, summarize
from litgpt.checkpoint.types import TensorInfo
from litgpt.config import Config
from litgpt.errors import UserError

if TYPE_CHECKING:
    from litgpt.model import GPT

logger = logging.getLogger(__name__)
ModelT = TypeVar("ModelT", bound="GPT")

_LARGEST = 2**30  # of any size in a configuration
EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"


class Plan(NamedTuple):
    """The links of every tensor of a checkpoint that is used, by its name in the file and in the order of the file."""

    config: Config
    links: dict[str, list[Link]]
    dtype: torch.dtype  # the one most of the weights are stored in


class _NoDraws(TorchFunctionMode):
    """Skips random initialisation, which is of no use without storage and imports torch's compiler (seconds) there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def build_empty(gpt_class: type[ModelT], config: Config) -> ModelT:
    """A model on the meta device: shapes without storage."""
    with torch.device("meta"), _NoDraws():
        return gpt_class(config)


def plan_import(source: Source, config: Config) -> Plan:
    """Match a checkpoint with a model.

    Args:
        source: the opened checkpoint.
        config: the model's architecture. The plan's config is a copy with the number of embedding rows and the tie
            between embedding and head as the file has them.

    Raises:
        UserError: tensors that no rule knows, that are missing, or whose shape does not fit, all in one message.
    """
    table, infos = source.table(config), source.tensors()
    _refuse_impossible(source, config)
    links, unexpected = _link(table, infos, config)
    config = _adapt(config, source, links)
    expected = plain_state(config)
    if config.tie_embeddings:  # one tensor under two names: either will do, and of two equal ones the first is read
        other = HEAD if EMBEDDING in _filled(links) or HEAD not in _filled(links) else EMBEDDING
        links = {name: found for name, found in links.items() if found[0].ours != other}
        del expected[other]
    problems = {"unexpected": unexpected, **_check(links, infos, expected, table, config)}
    if any(problems.values()):
        listed = "; ".join(f"{len(names)} {kind}: {summarize(names)}" for kind, names in problems.items() if names)
        raise UserError(f"{source.path} does not fit a model of the type {config.family!r}: {listed}", _hint(problems))
    used = [infos[name] for name in links]
    _refuse_quantized(source, used)
    return Plan(config, links, main_dtype(used))


def _refuse_impossible(source: Source, config: Config) -> None:
    """Refuse sizes that no model has, before a model of them is described: that alone would take hours or overflow."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, int) and value > _LARGEST:
            raise UserError(f"{source.path}: {field.name} is {value:.1e}", "is the configuration damaged?")
    if config.n_layer > len(source.tensors()):
        raise UserError(
            f"{source.path} says that it has {config.n_layer} layers, but holds only {len(source.tensors())} tensors",
            "is the configuration damaged?",
        )


def _link(table: Table, infos: Mapping[str, TensorInfo], config: Config) -> tuple[dict[str, list[Link]], list[str]]:
    """Return the links by name in the file, and the names that no rule knows."""
    links: dict[str, list[Link]] = {}
    unexpected, dropped = [], []
    for name in infos:
        canonical = table.canonical(name)
        if table.is_dropped(canonical, config):
            dropped.append(name)
        elif found := table.import_links(canonical, config):
            links[name] = found
        else:
            unexpected.append(name)
    if dropped:
        logger.info("not part of the language model, left out: %s", summarize(dropped))
    return links, unexpected


def _adapt(config: Config, source: Source, links: Mapping[str, list[Link]]) -> Config:
    """Return a copy of the config with the embedding rows and the tie that the tensors show."""
    by_ours = _filled(links)
    changes: dict[str, object] = {}
    if (embedding := by_ours.get(EMBEDDING)) is not None:
        rows = source.tensors()[embedding].shape[0]
        if rows != config.padded_vocab_size:
            changes = {"padded_vocab_size": rows, "vocab_size": min(config.vocab_size, rows)}
    head = by_ours.get(HEAD)
    if config.tie_embeddings and embedding is not None and head is not None and not _equal(source, embedding, head):
        logger.warning(
            "%s says that %s and %s are one tensor, but they differ: they are loaded as two",
            source.path,
            embedding,
            head,
        )
        changes["tie_embeddings"] = False
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def _equal(source: Source, a: str, b: str) -> bool:
    infos = source.tensors()
    same = infos[a].shape == infos[b].shape and torch.equal(source.get(a), source.get(b))
    source.release()
    return same


def _filled(links: Mapping[str, list[Link]]) -> dict[str, str]:
    """Our names that the links fill -> a name in the file that does."""
    return {link.ours: name for name, found in links.items() for link in found}


def plain_state(config: Config) -> dict[str, torch.Tensor]:
    """The plain model's state dict, without storage."""
    from litgpt.model import GPT

    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(Config)}
    return build_empty(GPT, Config(**fields)).state_dict()


def _check(
    links: Mapping[str, list[Link]],
    infos: Mapping[str, TensorInfo],
    expected: Mapping[str, torch.Tensor],
    table: Table,
    config: Config,
) -> dict[str, list[str]]:
    """Return what is wrong, by kind."""
    not_ours, wrong_shape = [], []
    covered: Counter[str] = Counter()
    for name, found in links.items():
        for link in found:
            if link.ours not in expected:
                not_ours.append(name)
                break
            ours = expected[link.ours]
            piece = link.our_view(ours)
            covered[link.ours] += piece.numel()
            if _piece_shape(link, infos[name]) != piece.shape:
                wanted = link.their_shape(tuple(piece.shape))
                wrong_shape.append(f"{name} {list(infos[name].shape)} instead of {list(wanted)}")
                break
    twice = [name for name, count in covered.items() if count > expected[name].numel()]
    # A missing tensor is named as the file would have named it; of a fused one, only the parts that are missing.
    present = {link.theirs for found in links.values() for link in found}
    missing: dict[str, None] = {}
    for name, tensor in expected.items():
        if covered[name] < tensor.numel():
            wanted_names = [link.theirs for link in table.export_links(name, config)] or [name]
            missing.update(dict.fromkeys(wanted for wanted in wanted_names if wanted not in present))
    return {
        "not in the model": not_ours,
        "missing": list(missing),
        "of the wrong shape": wrong_shape,
        "given more than once": twice,
    }


def _piece_shape(link: Link, info: TensorInfo) -> torch.Size | None:
    """Shape of the piece of their tensor, None when the whole cannot be cut that way."""
    try:
        return link.their_view(torch.empty(info.shape, device="meta")).shape
    except (RuntimeError, IndexError, ValueError):
        return None


def main_dtype(infos: Iterable[TensorInfo]) -> torch.dtype:
    """The dtype that most of the elements have."""
    counts: Counter[torch.dtype] = Counter()
    for info in infos:
        counts[info.dtype] += info.numel
    return max(counts, key=counts.__getitem__, default=torch.float32)


def _refuse_quantized(source: Source, infos: Iterable[TensorInfo]) -> None:
    unreadable = {info.dtype for info in infos} - {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    if unreadable:
        raise UserError(
            f"{source.path} stores weights as {', '.join(sorted(map(str, unreadable)))}: it is quantized",
            "use the unquantized model or a .gguf file of it",
        )


def _hint(problems: Mapping[str, list[str]]) -> str:
    quantized = ("weight_scale", "qweight", "scales", "_blocks", "absmax", "quant_map")
    if any(mark in name for name in problems["unexpected"] for mark in quantized):
        return "the weights seem to be quantized: use the unquantized model or a .gguf file of it"
    return "the weights and the config do not belong together, or this variant of the architecture is not supported"
