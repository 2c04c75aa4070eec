# Licensed under the Apache License 2.0, see the LICENSE file.

"""A tiny tokenizer (one token a byte, and a few more), and a model whose answers are written down beforehand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers
from torch import nn

from litgpt.attention import Step
from litgpt.config import Config
from litgpt.kvcache import KVCache

SPECIAL = ("<s>", "</s>", "<|user|>", "<|end|>")
BOS, EOS, USER, END = range(256, 260)
VOCAB_SIZE = 260
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}<|end|>"
    "{% else %}<|user|>{{ message.role }}:{{ message.content }}{% endif %}{% endfor %}"
)


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE, bos: bool = True) -> Path:
    """Write the files of a tokenizer whose id of a byte is the byte, followed by `SPECIAL`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {_letter(byte): byte for byte in range(256)}
    tokenizer = HFTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if bos:
        settings |= {"bos_token": "<s>", "add_bos_token": True}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _letter(byte: int) -> str:
    """The character that byte-level vocabularies write for a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in printable else chr(256 + sorted(set(range(256)) - set(printable)).index(byte))


def tiny_config(**changes: object) -> Config:
    """Two layers, grouped queries, and room for 64 tokens of the tiny tokenizer."""
    fields = {
        "n_layer": 2,
        "n_head": 4,
        "n_query_groups": 2,
        "n_embd": 32,
        "head_size": 8,
        "vocab_size": VOCAB_SIZE,
        "padded_vocab_size": VOCAB_SIZE,
        "block_size": 64,
        "rotary_percentage": 1.0,
    }
    return Config(**{**fields, **changes})


class ScriptedModel(nn.Module):
    """Gives certain sequences, whatever it is fed: the logits after position p point at `scripts[row][p + 1]`."""

    def __init__(self, scripts: Sequence[Sequence[int]], context: int = 64) -> None:
        super().__init__()
        self.config = tiny_config(n_layer=1, block_size=context)
        self.max_seq_length = context
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(VOCAB_SIZE, 1)})
        self.scripts = scripts
        self.n_forwards = 0

    def forward(self, idx: torch.Tensor, cache: KVCache, step: Step, last_only: bool = False) -> torch.Tensor:
        self.n_forwards += 1
        cache.commit(step)
        ends = [[length] for length in cache.lengths] if last_only else (step.pos + 1).expand(idx.shape).tolist()
        nexts = [
            [script[end] if end < len(script) else 0 for end in row]
            for script, row in zip(self.scripts, ends, strict=True)
        ]
        return nn.functional.one_hot(torch.tensor(nexts), VOCAB_SIZE).float()
