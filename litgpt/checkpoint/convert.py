# Licensed under the Apache License 2.0, see the LICENSE file.

"""From a checkpoint to a model and back.

Loading builds the model without storage, checks every tensor against it, and only then allocates it and copies each
tensor to its place, so memory holds one copy of the weights and a few megabytes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from litgpt.checkpoint.dequantize import without_quantization
from litgpt.checkpoint.lazy_state import LazyState
from litgpt.checkpoint.plan import EMBEDDING, HEAD, ModelT, Plan, build_empty, main_dtype, plan_import
from litgpt.checkpoint.progress import byte_bar
from litgpt.checkpoint.save import FolderWriter, read_manifest
from litgpt.checkpoint.source import LITGPT_FILE, Source, open_source
from litgpt.checkpoint.tables import Link, summarize, table_for
from litgpt.checkpoint.types import TensorInfo
from litgpt.checkpoint.writers import write_safetensors, write_state_dict
from litgpt.config import Config
from litgpt.errors import UserError

if TYPE_CHECKING:
    from litgpt.model import GPT

_BLOCK = 16 << 20  # bytes copied at once
_ARCHITECTURES = {"gemma3_text": "Gemma3ForCausalLM"}  # of language models that come inside multi-modal ones
_SHARD = 5_000_000_000  # largest file of an export, as Hugging Face's tools write


@overload
def load_model(path: str | Path, *, gpt_class: type[ModelT], **options: Any) -> ModelT: ...
@overload
def load_model(path: str | Path, *, gpt_class: None = None, **options: Any) -> GPT: ...
def load_model(
    path: str | Path,
    *,
    gpt_class: type[GPT] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    config: Config | None = None,
    filled: Callable[[GPT, str], None] | None = None,
    **overrides: Any,
) -> GPT:
    """Load a checkpoint of any kind, in evaluation mode.

    Args:
        path: a Hugging Face folder, a LitGPT folder, or a `.gguf` file.
        gpt_class: `GPT` or a variant of it. A variant's own parameters get their initial values.
        dtype: of the parameters; None keeps the checkpoint's (float32 for quantized GGUF files).
        device: where the parameters go; None is the CPU.
        config: the architecture, when it is not the one that the checkpoint names.
        filled: called with the model and the name, in the plain model, of each tensor that is complete. It may replace
            the module that holds it, which frees the tensor.
        overrides: fields of the config that win over the checkpoint's.

    Raises:
        UserError: the checkpoint is missing, damaged, unknown, or does not fit the config.
    """
    if gpt_class is None:
        from litgpt.model import GPT

        gpt_class = GPT
    with open_source(path) as source:
        if config is None:
            config = source.config(gpt_class.config_class, **overrides)
        elif overrides:
            config = dataclasses.replace(config, **overrides)
        plan = plan_import(source, config)
        model = build_empty(gpt_class, plan.config)
        _allocate(model, dtype or plan.dtype, torch.device(device or "cpu"))
        _fill(model, plan, source, filled)
    return model.eval()


def _allocate(model: GPT, dtype: torch.dtype, device: torch.device) -> None:
    """Give every tensor of a model on the meta device storage; a parameter that is shared stays shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                storage = torch.empty(parameter.shape, dtype=dtype, device=device)
                made[parameter] = nn.Parameter(storage, requires_grad=parameter.requires_grad)
            setattr(module, name, made[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            # Buffers keep their dtype: rounding a router's correction bias changes which experts are chosen.
            setattr(module, name, torch.empty_like(buffer, device=device))


@torch.no_grad()
def _fill(model: GPT, plan: Plan, source: Source, filled: Callable[[GPT, str], None] | None) -> None:
    """Copy every tensor to its place."""
    pieces = Counter(link.ours for links in plan.links.values() for link in links)
    state = model.state_dict()  # views of the parameters, experts one by one
    places = {ours: _place(ours, state) for ours in pieces}
    others = _others(model, places.values())
    state.clear()
    infos, unreleased = source.tensors(), 0
    with byte_bar("loading", sum(infos[name].nbytes for name in plan.links), delay=1, leave=False) as bar:
        for name, links in plan.links.items():
            for link in links:
                into = link.our_view(places[link.ours])
                for part in _parts(into):
                    # Asked for anew each time: while a tensor is held, the pages it lies over stay in memory.
                    into[part].copy_(link.their_view(source.get(name))[part])
                    done = into[part].numel() * infos[name].dtype.itemsize
                    bar.update(done)
                    unreleased += done
                    if unreleased >= source.release_after:
                        source.release()
                        unreleased = 0
                pieces[link.ours] -= 1
                if filled is not None and not pieces[link.ours]:
                    del into, places[link.ours]
                    filled(model, link.ours)
    for module in others:
        module.reset_parameters()  # type: ignore[operator]


def _place(name: str, state: Mapping[str, Tensor]) -> Tensor:
    """The tensor of the plain model in a variant, where a wrapped layer holds the plain one as `linear`."""
    stem, _, leaf = name.rpartition(".")
    return state[name] if name in state else state[f"{stem}.linear.{leaf}"]


def _parts(tensor: Tensor) -> Iterator[slice]:
    """Parts of a tensor along the first dimension, each of a few megabytes."""
    step = max(1, _BLOCK * len(tensor) // max(1, tensor.nbytes))
    return (slice(start, start + step) for start in range(0, len(tensor), step))


def _others(model: GPT, places: Iterable[Tensor]) -> list[nn.Module]:
    """Modules with tensors that the checkpoint does not fill: a variant's, which may start from the weights loaded."""
    filled = {place.untyped_storage().data_ptr() for place in places}
    modules = model.modules()
    return [
        m for m in modules if any(p.untyped_storage().data_ptr() not in filled for p in m.parameters(recurse=False))
    ]


def export_hf(
    weights: nn.Module | Mapping[str, Tensor],
    config: Config,
    out_dir: str | Path,
    hf_config: Mapping[str, Any],
    files: Mapping[str, bytes] | None = None,
    shard_size: int = _SHARD,
    torch_file: str | None = None,
) -> None:
    """Write a Hugging Face folder.

    Args:
        weights: the plain model, or its state dict, which may be a `LazyState`: a tensor at a time is put together.
        config: its architecture.
        out_dir: the folder, which may hold an earlier export but no other weights.
        hf_config: the `config.json` the model came with (`Source.hf_config`); what the tensors decide (dtype, rows of
            the embedding, tied or not) is brought up to date.
        files: further files by name, such as those of the tokenizer (`Source.companion_files`).
        shard_size: largest file of weights in bytes.
        torch_file: name of a further file with all tensors, as `torch.save` writes them.

    Raises:
        UserError: tensors that the family has no name for, or somebody else's weights in `out_dir`.
    """
    state = weights.state_dict() if isinstance(weights, nn.Module) else weights
    infos, assemble = as_hf(state, config)
    shards = _split(infos, shard_size)
    names = _shard_names(len(shards))
    out_dir = Path(out_dir)
    _refuse_other_weights(out_dir)
    total = sum(info.nbytes for info in infos.values())
    with FolderWriter(out_dir) as folder, _progress("writing", total * (1 if torch_file is None else 2)) as counted:

        def get(name: str) -> Tensor:
            return counted(assemble(name))

        folder.forget(name for name in _weight_files(out_dir) if name not in names)
        for name, shard in zip(names, shards, strict=True):
            with folder.file(name) as path:
                write_safetensors(path, shard, get)
        if torch_file is not None:
            with folder.file(torch_file) as path:
                write_state_dict(path, infos, get, {})
        if len(shards) > 1:
            weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            folder.write_json(
                "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
            )
        folder.write_json("config.json", _updated_config(hf_config, config, infos))
        for name, content in (files or {}).items():
            folder.write_bytes(name, content)


def save_litgpt(
    weights: nn.Module | Mapping[str, Tensor],
    config: Config,
    out_dir: str | Path,
    hf_config: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a LitGPT folder: `lit_model.pth`, `model_config.yaml` and what comes with them.

    Args:
        weights: as for `export_hf`.
        config: its architecture.
        out_dir: the folder; files of the same names are replaced.
        hf_config: content of `config.json`, which exporting to Hugging Face needs later.
        files: further files by name, such as those of the tokenizer (`Source.companion_files`).
    """
    state = weights.state_dict() if isinstance(weights, nn.Module) else weights
    with FolderWriter(out_dir) as folder:
        with folder.file(LITGPT_FILE) as path:
            write_litgpt_file(state, config, path)
        with folder.file("model_config.yaml") as path:
            config.save(path)
        if hf_config is not None:
            folder.write_json("config.json", dict(hf_config))
        for name, content in (files or {}).items():
            folder.write_bytes(name, content)


def write_litgpt_file(state: Mapping[str, Tensor], config: Config, path: Path) -> None:
    """Write a state dict as LitGPT's `lit_model.pth`: flat, and a head that is tied to the embedding stored once."""
    is_tied = config.tie_embeddings and {EMBEDDING, HEAD} <= state.keys()
    infos, tied = _infos(state), {HEAD: EMBEDDING} if is_tied else {}
    with _progress("writing", sum(infos[name].nbytes for name in infos if name not in tied)) as counted:
        write_state_dict(path, infos, lambda name: counted(state[name]), tied)


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """A bar for anything longer than a second; what it yields counts the tensors that pass through."""
    with byte_bar(label, total, delay=1, leave=False) as bar:

        def counted(tensor: Tensor) -> Tensor:
            bar.update(tensor.nbytes)
            return tensor

        yield counted


def _infos(state: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """Shapes and dtypes of a state dict."""
    if isinstance(state, LazyState):
        return state.infos
    return {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def as_hf(state: Mapping[str, Tensor], config: Config) -> tuple[dict[str, TensorInfo], Callable[[str], Tensor]]:
    """A state dict under the names and in the layout of Hugging Face.

    Args:
        state: of the plain model.
        config: its architecture.

    Returns:
        Shape and dtype of every tensor there, and what puts one together, by name.

    Raises:
        UserError: tensors that the family has no name for.
    """
    table = table_for(config.family)
    links: dict[str, list[Link]] = {}
    infos: dict[str, TensorInfo] = {}
    unknown = []
    for ours, info in _infos(state).items():
        if config.tie_embeddings and ours == HEAD:
            continue
        found = table.export_links(ours, config)
        if not found:
            unknown.append(ours)
        for link in found:
            links.setdefault(link.theirs, []).append(link)
            piece = link.our_view(torch.empty(info.shape, device="meta"))
            infos[link.theirs] = TensorInfo(link.their_shape(tuple(piece.shape)), info.dtype)
    if unknown:
        raise UserError(
            f"a Hugging Face model of the type {config.family!r} has no place for: {summarize(unknown)}",
            "export the plain model; merge a LoRA model first",
        )
    return infos, lambda name: _assemble(links[name], infos[name], state)


def _assemble(links: list[Link], info: TensorInfo, state: Mapping[str, Tensor]) -> Tensor:
    """Put one of their tensors together."""
    first = links[0]
    if not first.row.their_views:
        return first.our_view(state[first.ours]).contiguous()
    whole = torch.empty(info.shape, dtype=info.dtype)
    for link in links:
        link.their_view(whole).copy_(link.our_view(state[link.ours]))
    return whole


def _split(infos: Mapping[str, TensorInfo], shard_size: int) -> list[dict[str, TensorInfo]]:
    """Cut the list of tensors into files, in order."""
    shards: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in infos.items():
        if shards[-1] and size + info.nbytes > shard_size:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _weight_files(folder: Path) -> list[str]:
    """Names of the files that decide which weights a Hugging Face folder holds."""
    patterns = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", LITGPT_FILE)
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))


def _refuse_other_weights(folder: Path) -> None:
    manifest = read_manifest(folder)
    if not manifest.get("complete", True):
        return  # an earlier export was interrupted: it began in a folder without other weights
    if found := [name for name in _weight_files(folder) if name not in manifest.get("files", {})]:
        raise UserError(f"{folder} already holds weights: {', '.join(found[:5])}", "choose an empty folder")


def _updated_config(hf_config: Mapping[str, Any], config: Config, infos: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """`config.json` for what is exported: the language model alone, with the dtype and sizes it has now."""
    updated = without_quantization(hf_config)
    if isinstance(text := updated.get("text_config"), Mapping):
        updated = {**text, "model_type": config.family}
        if config.family in _ARCHITECTURES:
            updated["architectures"] = [_ARCHITECTURES[config.family]]
    updated.pop("dtype", None)
    # The name that transformers before version 5 knows; newer ones read it too
    updated["torch_dtype"] = str(main_dtype(infos.values())).removeprefix("torch.")
    updated.update(tie_word_embeddings=config.tie_embeddings, vocab_size=config.padded_vocab_size)
    return updated
