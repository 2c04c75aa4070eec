# Licensed under the Apache License 2.0, see the LICENSE file.

"""Small tokenizers of the usual kinds, built on the spot, and checkpoint folders around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["Hello world, this is a text.", "né😀 über 日本語 naïve", "  two  spaces\n\tand a tab", "123 456 <|x|>"] * 3
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(specials: tuple[str, ...] = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")) -> tokenizers.Tokenizer:
    """A byte-level BPE as GPT-2 and Llama 3 have it, with a non-special added token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    tokenizer.add_tokens(["<tool> né"])
    return tokenizer


def sentencepiece_like() -> tokenizers.Tokenizer:
    """A BPE with spaces as "▁", byte fallback and a stripped first space, as Llama 2 has it."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "▁▁", *"abcdeéhlnotw.", "▁a", "he", "ll", "▁he", "▁hell", "▁hello", "▁t", "é."]:
        vocab[piece] = len(vocab)
    merges = [("▁", "▁"), ("▁", "a"), ("h", "e"), ("l", "l"), ("▁", "he"), ("▁he", "ll"), ("▁hell", "o"), ("▁", "t")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[*merges, ("é", ".")], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_folder(folder: Path, tokenizer: tokenizers.Tokenizer, **files: Any) -> Path:
    """A checkpoint folder; keyword `config=...` writes tokenizer_config.json, any other NAME writes NAME.json."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        file = folder / ("tokenizer_config.json" if name == "config" else f"{name}.json")
        file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def add_bos_template(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Let the post-processor put `<s>` before every text, as Llama 3's tokenizer.json does."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer
