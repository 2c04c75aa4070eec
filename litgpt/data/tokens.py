# Licensed under the Apache License 2.0, see the LICENSE file.

"""Samples as token ids: encoded once, and kept in a file for the next time.

What is kept depends on the records, the tokenizer and the prompt style, and its name is a hash of these three. How
long sequences may be, what is masked and how the samples are split is applied when samples are read, so that changing
it costs nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from litgpt.checkpoint.safetensors_file import SafetensorsFile
from litgpt.checkpoint.save import atomic_write
from litgpt.data.encoding import Encoder
from litgpt.data.files import Records
from litgpt.data.records import parse_record
from litgpt.errors import UserError
from litgpt.prompts import PromptStyle
from litgpt.runtime import cache_dir
from litgpt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FORMAT = "litgpt-tokens-1"  # to be changed when the same inputs give other ids


@dataclass(frozen=True)
class TokenTable:
    """Token ids of many samples, one after the other.

    Attributes:
        ids: `(total,)` int32.
        supervised: `(total,)` bool, what the assistant writes.
        starts: where each sample begins.
        lengths: how many tokens each has.
    """

    ids: torch.Tensor
    supervised: torch.Tensor
    starts: Sequence[int]
    lengths: Sequence[int]

    def select(self, indices: Sequence[int]) -> TokenTable:
        """The table of some of the samples, over the same memory."""
        starts, lengths = [self.starts[i] for i in indices], [self.lengths[i] for i in indices]
        return TokenTable(self.ids, self.supervised, starts, lengths)

    def sample(self, index: int, max_length: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and what is supervised of one sample, cut to `max_length` tokens if that is positive."""
        length = self.lengths[index] if max_length <= 0 else min(self.lengths[index], max_length)
        place = slice(self.starts[index], self.starts[index] + length)
        return self.ids[place], self.supervised[place]


def encode_records(
    records: Sequence[Any], encoder: Encoder, place: Callable[[int], str] = lambda index: f"record {index + 1}"
) -> TokenTable:
    """Encode records, with a progress bar if it takes long.

    Args:
        records: instructions or conversations; see `litgpt.data.records`.
        encoder: encodes a sample.
        place: where a record stands, for messages.

    Raises:
        UserError: a record is not what it should be; says where.
    """
    from tqdm import tqdm

    ids, supervised, lengths = array("i"), bytearray(), array("q")
    # `disable=None` shows the bar only on a terminal, `delay` only when it takes longer than that
    for index, record in enumerate(tqdm(records, "tokenizing", delay=1.0, disable=None, unit=" samples")):
        try:
            new_ids, new_supervised = encoder(parse_record(record))
        except UserError as error:
            raise UserError(f"{place(index)}: {error.message}", error.hint) from error
        ids.extend(new_ids)
        supervised.extend(new_supervised)
        lengths.append(len(new_ids))
    arrays = np.array(ids, np.int32), np.frombuffer(bytes(supervised), bool).copy(), np.array(lengths, np.int64)
    return _table(*map(torch.from_numpy, arrays))


def cached_table(records: Records, encoder: Encoder) -> TokenTable:
    """The table of some records: read from the cache, or else made and put there.

    Several processes may ask at once: one of them does the work. A damaged file is made again; a folder that cannot
    be written to costs only time.

    Raises:
        UserError: see `encode_records`.
    """
    key = cache_key(records, encoder)
    if key is None:
        return encode_records(records, encoder, records.place)
    from filelock import FileLock

    path, table = cache_dir() / "tokens" / f"{key}.safetensors", None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            table = _read(path)
            if table is None:
                table = encode_records(records, encoder, records.place)
                _write(path, table)
    except OSError as error:
        logger.warning("the tokens cannot be kept for the next time: %s", error)
    return encode_records(records, encoder, records.place) if table is None else table


def cache_key(records: Records, encoder: Encoder) -> str | None:
    """A hash of all that the tokens depend on; None if that cannot be told, as for a prompt style defined elsewhere."""
    style, tokenizer = encoder.style, encoder.tokenizer
    if not isinstance(tokenizer, Tokenizer) or not type(style).__module__.startswith("litgpt.prompt"):
        return None
    settings = {name: value for name, value in vars(style).items() if value is not tokenizer}
    parts = [FORMAT, records.digest, _fingerprint(tokenizer), type(style).__name__, settings, _constants(type(style))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _constants(style: type[PromptStyle]) -> dict[str, Any]:
    """The pieces that a style is made of, so that a corrected style is not confused with what it was."""
    names = {name for base in style.__mro__ for name in vars(base) if not name.startswith("_")}
    return {name: value for name in names if isinstance(value := getattr(style, name), str | bool | tuple | None)}


def _fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of what decides how a tokenizer encodes."""
    processor = tokenizer.processor
    vocabulary = (
        processor.to_str().encode() if tokenizer.backend == "huggingface" else processor.serialized_model_proto()
    )
    rest = [tokenizer.use_bos, tokenizer.bos_id, tokenizer.eos_id, sorted(tokenizer.stop_ids)]
    texts = [tokenizer.chat_templates, tokenizer.special_tokens]
    return hashlib.sha256(vocabulary + json.dumps([*rest, *texts], sort_keys=True).encode()).hexdigest()


def _table(ids: torch.Tensor, supervised: torch.Tensor, lengths: torch.Tensor) -> TokenTable:
    starts = torch.cumsum(lengths, 0) - lengths
    return TokenTable(ids, supervised, starts.tolist(), lengths.tolist())


def _write(path: Path, table: TokenTable) -> None:
    lengths = torch.tensor(table.lengths, dtype=torch.int64)
    tensors = {"ids": table.ids, "supervised": table.supervised, "lengths": lengths}
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, {"format": FORMAT, "sha256": _hash(tensors)})


def _read(path: Path) -> TokenTable | None:
    """The table in a file; None if there is none or it is damaged."""
    if not path.is_file():
        return None
    try:
        file = SafetensorsFile(path)
        tensors = {name: file.get(name) for name in ("ids", "supervised", "lengths")}
        if file.metadata.get("sha256") == _hash(tensors):
            return _table(**tensors)
        problem = "its content has changed"
    except Exception as error:  # whatever is wrong with it, it can be made again
        problem = str(error)
    logger.warning("%s is damaged and is made again: %s", path, problem)
    return None


def _hash(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()
