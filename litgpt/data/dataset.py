# Licensed under the Apache License 2.0, see the LICENSE file.

"""The dataset of supervised finetuning, and how its samples become a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from litgpt.data.encoding import Encoder
from litgpt.data.tokens import TokenTable, encode_records
from litgpt.prompts import PromptStyle
from litgpt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Sample = dict[str, torch.Tensor]


class SFTDataset(Dataset[Sample]):
    """Samples `{"input_ids": (n,), "labels": (n,)}`, both int64; the labels are not shifted.

    All samples are encoded at once, when the dataset is made. A sequence that is too long is cut at its end; how many
    lose the end of an answer that way is logged as a warning.

    Args:
        data: records: instructions (`instruction`, `output`, maybe `input`) or conversations (`messages`).
        tokenizer: the tokenizer of the model.
        prompt_style: a name or an instance.
        max_seq_length: longest sequence in tokens; not positive: no limit.
        mask_prompt: whether only what the assistant writes is learnt.
        ignore_index: the label of what is not learnt.
        transform: brings a record to one of the forms above.
        tokens: the encoded data, if that is known.

    Attributes:
        lengths: tokens of every sample.

    Raises:
        UserError: a record is not what it should be; says which.
    """

    def __init__(
        self,
        data: Sequence[Any],
        tokenizer: Tokenizer,
        prompt_style: str | PromptStyle,
        max_seq_length: int = -1,
        mask_prompt: bool = True,
        ignore_index: int = -100,
        transform: Callable[[Any], Any] | None = None,
        tokens: TokenTable | None = None,
    ) -> None:
        style = PromptStyle.from_name(prompt_style) if isinstance(prompt_style, str) else prompt_style
        self.data, self.tokenizer, self.prompt_style = data, tokenizer, style.bind(tokenizer)
        self.max_seq_length, self.mask_prompt, self.ignore_index = max_seq_length, mask_prompt, ignore_index
        self.transform = transform
        if tokens is None:
            records = data if transform is None else [transform(_copy(record)) for record in data]
            tokens = encode_records(records, Encoder(tokenizer, self.prompt_style))
        self._tokens = tokens
        limit = max_seq_length if max_seq_length > 0 else None
        self.lengths: list[int] = [length if limit is None else min(length, limit) for length in tokens.lengths]
        self._warn_of_cuts()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        """Return one sample."""
        ids, supervised = self._tokens.sample(index, self.max_seq_length)
        input_ids = ids.long()
        labels = input_ids.masked_fill(~supervised, self.ignore_index) if self.mask_prompt else input_ids.clone()
        return {"input_ids": input_ids, "labels": labels}

    def prompt(self, index: int) -> torch.Tensor:
        """The tokens before the first answer, `(n,)` int64: what a model is given to answer."""
        ids, supervised = self._tokens.sample(index)
        return ids[: int(supervised.int().argmax())].long()

    def is_learnt(self, index: int) -> bool:
        """Whether a sample has a token of an answer left after the cut to `max_seq_length`."""
        return bool(self._tokens.sample(index, self.max_seq_length)[1].any())

    def _warn_of_cuts(self) -> None:
        whole = self._tokens.lengths
        cut = [i for i, length in enumerate(self.lengths) if length < whole[i]]
        if not cut:
            return
        lost = sum(not self.is_learnt(index) for index in cut)
        logger.warning(
            "%d of %d samples are longer than max_seq_length=%d (the longest has %d tokens) and lose the end of an "
            "answer; %d of them lose all that is to be learnt. A larger --train.max_seq_length keeps them whole",
            len(cut),
            len(self),
            self.max_seq_length,
            max(whole),
            lost,
        )


def _copy(record: Any) -> Any:
    """A transform may change the record that it gets."""
    return dict(record) if isinstance(record, dict) else record


def get_sft_collate_fn(
    max_seq_length: int = -1, pad_id: int = 0, ignore_index: int = -100
) -> Callable[[Sequence[dict[str, Any]]], dict[str, Any]]:
    """Return the function that makes a batch of samples, for a `DataLoader`.

    The batch has `input_ids` and `labels`, `(B, T)`, padded on the right to the longest sample, and `token_counts` if
    the samples have that.

    Args:
        max_seq_length: batches are cut to that many tokens; not positive: not at all.
        pad_id: the token to pad with.
        ignore_index: the label of padding.
    """
    return partial(_collate, max_seq_length=max_seq_length, pad_id=pad_id, ignore_index=ignore_index)


def _collate(samples: Sequence[dict[str, Any]], max_seq_length: int, pad_id: int, ignore_index: int) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for key, padding in (("input_ids", pad_id), ("labels", ignore_index)):
        rows = [sample[key] for sample in samples]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
        batch[key] = padded[:, :max_seq_length] if max_seq_length > 0 else padded
    if "token_counts" in samples[0]:
        counts = [sample["token_counts"] for sample in samples]
        batch["token_counts"] = {key: torch.tensor([[count[key]] for count in counts]) for key in counts[0]}
    return batch
