# Licensed under the Apache License 2.0, see the LICENSE file.

"""What all data modules have in common, and what those for instruction finetuning do."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from litgpt.config import Config
from litgpt.data.dataset import SFTDataset, get_sft_collate_fn
from litgpt.data.encoding import Encoder
from litgpt.data.files import Records
from litgpt.data.tokens import TokenTable, cached_table
from litgpt.errors import MissingFileError, UserError
from litgpt.prompts import Alpaca, Default, PromptStyle, choose_prompt_style
from litgpt.tokenizer import Tokenizer

__all__ = ["DataModule", "InstructionData", "SFTDataset", "get_sft_collate_fn"]

logger = logging.getLogger(__name__)


class _Plain:
    """Stands for `LightningDataModule` as long as Lightning is not imported."""


class DataModule(_Plain):
    """Data for training, as Lightning's `LightningDataModule` has it, and `connect` before the rest.

    The order of calls is `connect`, `prepare_data` (on one process of a machine), `setup`, then the loaders.
    """

    def __init__(self) -> None:
        _join_lightning()
        super().__init__()

    def connect(
        self, tokenizer: Tokenizer | None = None, batch_size: int = 1, max_seq_length: int | None = -1, **kwargs: Any
    ) -> None:
        """Say what is only known when a model is.

        Args:
            tokenizer: the tokenizer of the model.
            batch_size: samples in a batch of the loaders.
            max_seq_length: longest sequence in tokens; None or not positive: no limit.
            kwargs: for subclasses.
        """
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_seq_length = -1 if max_seq_length is None else max_seq_length

    def prepare_data(self) -> None:
        """Download what is missing."""

    def setup(self, stage: str = "") -> None:
        """Read the data."""

    def train_dataloader(self) -> Any:
        """Return batches to train on."""
        raise NotImplementedError(f"{type(self).__name__} has no data to train on")

    def val_dataloader(self) -> Any:
        """Return batches to validate on, None if there are none."""
        return None


def _join_lightning() -> None:
    """Make data modules Lightning's, which `Trainer.fit(model, data)` insists on, once a program uses Lightning.

    Importing Lightning takes seconds, and nothing else here needs it.
    """
    if "lightning.pytorch" in sys.modules and DataModule.__bases__ == (_Plain,):
        from lightning.pytorch import LightningDataModule

        DataModule.__bases__ = (LightningDataModule,)


@dataclass(kw_only=True, eq=False)
class InstructionData(DataModule, ABC):
    """Data for supervised finetuning. Subclasses say where the records come from.

    Args:
        mask_prompt: Learn only what the assistant writes, not the prompts.
        prompt_style: How prompts are written, a name or a class of litgpt.prompts. null: as the checkpoint says (its
            prompt_style.yaml, chat template or family), and alpaca if it says nothing.
        ignore_index: The label of tokens that are not learnt.
        seed: Decides which samples are held out, and the order in which the loader gives them.
        num_workers: Processes that load data.

    Attributes:
        train_dataset: what is trained on, after `setup`.
        val_dataset: what is held out.
    """

    mask_prompt: bool = False
    prompt_style: str | PromptStyle | None = "alpaca"
    ignore_index: int = -100
    seed: int = 42
    num_workers: int = 4

    tokenizer: Tokenizer | None = field(default=None, init=False, repr=False)
    batch_size: int = field(default=1, init=False, repr=False)
    max_seq_length: int = field(default=-1, init=False, repr=False)
    train_dataset: SFTDataset | None = field(default=None, init=False, repr=False)
    val_dataset: SFTDataset | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__init__()
        if isinstance(self.prompt_style, str):
            self.prompt_style = PromptStyle.from_name(self.prompt_style)

    @abstractmethod
    def read(self) -> tuple[Records, Records | float]:
        """Read the files.

        Returns:
            What to train on and what to hold out, or everything and the fraction of it to hold out.
        """

    def connect(
        self, tokenizer: Tokenizer | None = None, batch_size: int = 1, max_seq_length: int | None = -1, **kwargs: Any
    ) -> None:
        """See `DataModule.connect`; `prompt_style` is settled from here on."""
        super().connect(tokenizer, batch_size, max_seq_length)
        if tokenizer is not None:
            style = _style_of(tokenizer) if self.prompt_style is None else self.prompt_style
            assert isinstance(style, PromptStyle)
            self.prompt_style = style.bind(tokenizer)

    def setup(self, stage: str = "") -> None:
        """Read and encode the data, or take it from the cache.

        Raises:
            UserError: the data is missing or damaged, or nothing of it can be learnt.
        """
        if self.tokenizer is None or not isinstance(self.prompt_style, PromptStyle):
            raise UserError("the data needs the tokenizer of the model", "call connect(tokenizer=...) before setup()")
        encoder = Encoder(self.tokenizer, self.prompt_style)
        records, rest = self.read()
        table = cached_table(records, encoder)
        if isinstance(rest, Records):
            self.train_dataset = self._dataset(records, table, range(len(records)))
            self.val_dataset = self._dataset(rest, cached_table(rest, encoder), range(len(rest)))
        else:
            train, held_out = split(len(records), rest, self.seed)
            self.train_dataset = self._dataset(records, table, train)
            self.val_dataset = self._dataset(records, table, held_out)
        if not any(map(self.train_dataset.is_learnt, range(len(self.train_dataset)))):
            raise UserError(
                f"no sample has an answer within max_seq_length={self.max_seq_length} tokens",
                "raise --train.max_seq_length",
            )

    def _dataset(self, records: Records, table: TokenTable, indices: Sequence[int]) -> SFTDataset:
        assert self.tokenizer is not None
        assert isinstance(self.prompt_style, PromptStyle)
        return SFTDataset(
            data=[records[index] for index in indices],
            tokenizer=self.tokenizer,
            prompt_style=self.prompt_style,
            max_seq_length=self.max_seq_length,
            mask_prompt=self.mask_prompt,
            ignore_index=self.ignore_index,
            tokens=table.select(indices),
        )

    @property
    def test_dataset(self) -> SFTDataset | None:
        """What is held out, under LitGPT's name."""
        return self.val_dataset

    def train_dataloader(self) -> DataLoader[Any]:
        """Return shuffled batches to train on; the order follows from the seed."""
        return self._dataloader(self.train_dataset, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return batches to validate on."""
        return self._dataloader(self.val_dataset, shuffle=False)

    def _dataloader(self, dataset: SFTDataset | None, shuffle: bool) -> DataLoader[Any]:
        if dataset is None:
            raise UserError("there is no data yet", "call setup() before asking for a loader")
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle and len(dataset) > 0,
            generator=torch.Generator().manual_seed(self.seed),
            num_workers=self.num_workers,
            collate_fn=get_sft_collate_fn(self.max_seq_length, ignore_index=self.ignore_index),
        )


def split(total: int, fraction: float, seed: int) -> tuple[Sequence[int], Sequence[int]]:
    """Draw which samples are held out.

    Args:
        total: number of samples.
        fraction: how much of them to hold out, rounded down, but at least one sample if it is not 0.
        seed: the same seed draws the same samples.

    Returns:
        Indices of the samples to train on and of those held out.

    Raises:
        UserError: the fraction leaves nothing to train on.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"val_split_fraction={fraction} is not a fraction", "use a number from 0 up to, but not, 1")
    n_held_out = min(max(int(total * fraction), int(fraction > 0)), total - 1)
    # The order that `torch.utils.data.random_split` draws, so the samples are those that LitGPT holds out.
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    return order[: total - n_held_out], order[total - n_held_out :]


def _style_of(tokenizer: Tokenizer) -> PromptStyle:
    """The prompt style of the checkpoint that a tokenizer comes from, alpaca if it has none."""
    try:
        config = Config.from_checkpoint(tokenizer.path)
    except MissingFileError:  # a tokenizer alone
        config = None
    style = choose_prompt_style(tokenizer.path, tokenizer, config)
    if type(style) is not Default:
        return style
    logger.info("the checkpoint has no prompt format of its own: using alpaca")  # else nothing ends a request
    return Alpaca()
