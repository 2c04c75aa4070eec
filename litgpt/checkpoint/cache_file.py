# Licensed under the Apache License 2.0, see the LICENSE file.

"""Rows of a KV cache on disk: one safetensors file, which only the model and the kind of cache it came from may read.

The header's metadata holds the tokens and lengths, what the buffers were made for, a fingerprint of the model, and a
hash of all that. The slots in use are written, not the room for more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from litgpt.checkpoint.safetensors_file import SafetensorsFile
from litgpt.checkpoint.save import atomic_write
from litgpt.errors import UserError
from litgpt.kvcache import KVCache, LayerSpec
from litgpt.kvcache.rows import RowState
from litgpt.model import GPT

FORMAT = "litgpt-kv-cache-1"
NAMES_ONLY = ("name", "hf_config", "prompt_style")  # fields of a config that change no number
SAMPLED = 64  # parameters that the fingerprint looks at, and elements of each


def save_rows(
    path: str | Path, model: GPT, kind: str, rows: Sequence[RowState], tokens: Sequence[Sequence[int]]
) -> None:
    """Write rows, such as `cache.export_row` gives. The file gets its name only when it is whole.

    Args:
        path: the file.
        model: the model that filled the rows.
        kind: kind of the cache.
        rows: the rows.
        tokens: the tokens of each.
    """
    for state, ids in zip(rows, tokens, strict=True):
        if state.length != len(ids):
            raise ValueError(f"{len(ids)} tokens came with a row of {state.length}")
    tensors = {f"{i}.{name}": buffer for i, state in enumerate(rows) for name, buffer in state.buffers.items()}
    content = {
        "kind": kind,
        "model": fingerprint(model),
        "dtype": str(model.transformer.wte.weight.dtype),
        "rows": [
            {
                "tokens": [int(i) for i in ids],
                "high": state.high,
                "max_rewind": state.max_rewind,
                "specs": [dataclasses.asdict(spec) for spec in state.specs],
            }
            for state, ids in zip(rows, tokens, strict=True)
        ],
    }
    text = json.dumps(content)
    metadata = {"format": FORMAT, "content": text, "sha256": _hash_of(text, tensors)}
    with atomic_write(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata)


def load_rows(path: str | Path, model: GPT, kind: str) -> tuple[list[RowState], list[list[int]]]:
    """Read rows, for `cache.import_row`, and the tokens of each.

    Args:
        path: the file.
        model: the model that will go on.
        kind: kind of the cache that will hold them.

    Raises:
        UserError: the file is missing or damaged, or holds rows of another model or kind.
    """
    file = SafetensorsFile(path)
    try:
        content = _content(file)
        if content["kind"] != kind:
            raise UserError(f"{path} holds a KV cache of kind {content['kind']!r}, not {kind!r}", "use the same kind")
        if content["model"] != fingerprint(model):
            raise UserError(
                f"{path} holds the KV cache of another model, of other weights or of another dtype",
                f"load the model that wrote it, in {content['dtype']}",
            )
        tensors = {name: file.get(name).clone() for name in file.tensors()}  # independent of the file from here on
        if _hash_of(file.metadata["content"], tensors) != file.metadata["sha256"]:
            raise _damaged(path)
        states = [_state_of(row, tensors, i) for i, row in enumerate(content["rows"])]
        return states, [row["tokens"] for row in content["rows"]]
    except (KeyError, TypeError, ValueError) as error:
        raise error if isinstance(error, UserError) else _damaged(path) from error
    finally:
        file.close()


def save_cache(path: str | Path, model: GPT, kind: str, cache: KVCache, tokens: Sequence[Sequence[int]]) -> None:
    """Write all rows of a cache; see `save_rows`."""
    save_rows(path, model, kind, [cache.export_row(row) for row in range(cache.batch_size)], tokens)


def load_cache(
    path: str | Path, model: GPT, kind: str, max_length: int | None = None
) -> tuple[KVCache, list[list[int]]]:
    """Read all rows into a new cache on the model's device; see `load_rows`.

    Args:
        path: the file.
        model: the model that will go on.
        kind: kind of the cache.
        max_length: room in tokens, default what the saved cache had.
    """
    states, tokens = load_rows(path, model, kind)
    if not states:
        raise UserError(f"{path} holds no rows")
    had = max(spec.max_length for state in states for spec in state.specs)
    max_length = max_length or had
    before, after = (
        KVCache.from_config(model.config, kind, 1, n, device="meta").rope_length for n in (had, max_length)
    )
    if model.rope.is_long(after) != model.rope.is_long(before):
        raise UserError(
            f"{path} was written for {had} tokens; for {max_length} this model rotates keys in another way",
            f"give max_length={had}",
        )
    weight = model.transformer.wte.weight
    cache = KVCache.from_config(model.config, kind, len(states), max_length, weight.dtype, weight.device)
    for row, state in enumerate(states):
        try:
            cache.import_row(row, state)
        except ValueError as error:
            raise UserError(f"{path} does not fit a KV cache of {max_length} tokens: {error}") from error
    return cache, tokens


def fingerprint(model: GPT) -> str:
    """A hash of what a model computes: its config, and a few elements of many of its weights, in their dtype."""
    fields = {name: value for name, value in vars(model.config).items() if name not in NAMES_ONLY}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode("utf-8"))
    named = sorted(model.named_parameters())
    for name, parameter in named[:: max(1, len(named) // SAMPLED)] + named[-1:]:
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // SAMPLED)]
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(_bytes_of(sample))
    return digest.hexdigest()


def _content(file: SafetensorsFile) -> dict[str, Any]:
    if file.metadata.get("format") != FORMAT:
        raise UserError(f"{file.path} holds no KV cache", "give a file that save_cache or save_rows wrote")
    return json.loads(file.metadata["content"])


def _state_of(row: dict[str, Any], tensors: dict[str, torch.Tensor], index: int) -> RowState:
    prefix = f"{index}."
    buffers = {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    specs = tuple(LayerSpec(**spec) for spec in row["specs"])
    return RowState(len(row["tokens"]), row["high"], row["max_rewind"], specs, buffers)


def _hash_of(text: str, tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(text.encode("utf-8"))
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode("utf-8"))
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _damaged(path: str | Path) -> UserError:
    return UserError(f"{path} is damaged", "delete it; it can be computed again")
