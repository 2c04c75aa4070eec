# Licensed under the Apache License 2.0, see the LICENSE file.

"""Many tasks of language, each in ten wordings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litgpt.data.base import InstructionData
from litgpt.data.download import fetch_urls
from litgpt.data.files import Records, read_records
from litgpt.errors import UserError
from litgpt.prompts import PromptStyle

_TASKS = """
    aeslc ag_news_subset anli_r1 anli_r2 anli_r3 arc_challenge arc_easy bool_q cb cnn_dailymail cola common_gen
    copa coqa cosmos_qa dart definite_pronoun_resolution drop e2e_nlg fix_punct gigaword glue_mrpc glue_qqp
    hellaswag imdb_reviews math_dataset mnli_matched mnli_mismatched multi_news multirc natural_questions
    openbookqa opinion_abstracts_idebate opinion_abstracts_rotten_tomatoes para_crawl_enes paws_wiki piqa qnli
    quac record rte samsum sentiment140 snli squad_v1 squad_v2 sst2 story_cloze stsb trec trivia_qa true_case
    web_nlg_en wic wiki_lingua_english_en wmt14_enfr wmt16_translate_csen wmt16_translate_deen
    wmt16_translate_fien wmt16_translate_roen wmt16_translate_ruen wmt16_translate_tren wnli word_segment wsc
    yelp_polarity_reviews
"""
_ENDING = "_10templates"
SUBSETS = tuple(f"{task}{_ENDING}" for task in _TASKS.split())
"""The subsets that there are."""


@dataclass(kw_only=True, eq=False)
class FLAN(InstructionData):
    """FLAN, from https://huggingface.co/datasets/Muennighoff/flan. All of it is large: choose some subsets.

    Args:
        prompt_style: How prompts are written, a name or a class of litgpt.prompts.
        download_dir: Where the downloaded files are kept.
        url: Where to get them.
        subsets: Names of subsets, with commas between them. Default: all.
    """

    prompt_style: str | PromptStyle | None = "flan"
    download_dir: Path = Path("data/flan")
    url: str = "https://huggingface.co/datasets/Muennighoff/flan/resolve/main"
    subsets: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self._names():
            if name not in SUBSETS:
                close = difflib.get_close_matches(f"{name.removesuffix(_ENDING)}{_ENDING}", SUBSETS)
                hint = f"did you mean {' or '.join(close)}?" if close else "litgpt.data.flan.SUBSETS has all names"
                raise UserError(f"FLAN has no subset {name!r}", hint)

    def prepare_data(self) -> None:
        """Download the files that are not there."""
        urls = {file: f"{self.url}/{split}/{file}" for split in ("train", "test") for file in self._files(split)}
        fetch_urls(urls, Path(self.download_dir))

    def read(self) -> tuple[Records, Records | float]:
        """Read the files; see `InstructionData.read`."""
        train, held_out = (
            read_records(*(Path(self.download_dir) / file for file in self._files(split)))
            for split in ("train", "test")
        )
        return train.map("flan", _instruction), held_out.map("flan", _instruction)

    def _names(self) -> tuple[str, ...]:
        return SUBSETS if self.subsets is None else tuple(name.strip() for name in self.subsets.split(","))

    def _files(self, split: str) -> list[str]:
        return [f"{name}_{split}.jsonl" for name in self._names()]


def _instruction(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record in the form of an instruction."""
    return {"instruction": record.get("inputs"), "output": record.get("targets")}
