# Licensed under the Apache License 2.0, see the LICENSE file.

"""A tokenizer as the metadata of a GGUF: the way back of `gguf_tokenizer`."""

from __future__ import annotations

import json
from typing import Any

from litgpt.checkpoint.gguf_pretokenizers import DIGIT, GPT2, PRE_TOKENIZERS
from litgpt.checkpoint.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from litgpt.errors import UserError
from litgpt.tokenizer import Tokenizer

_WORST = -1e6  # score of pieces that no merge makes: single characters, bytes


def vocabulary_metadata(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """The `tokenizer.*` keys.

    Args:
        tokenizer: the checkpoint's.
        rows: of the embedding; there may be more than tokens.

    Raises:
        UserError: a kind of tokenizer that llama.cpp does not have.
    """
    if tokenizer.backend != "huggingface":
        raise UserError(
            f"{tokenizer.path} has a tokenizer.model only: it cannot be written into a .gguf file",
            "save the tokenizer with transformers first, which writes tokenizer.json",
        )
    content = json.loads(tokenizer.processor.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise UserError(f"a tokenizer of the kind {model['type']} cannot be written into a .gguf file", "only BPE can")
    tokens, types = _tokens(tokenizer, model, rows)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if model.get("byte_fallback"):
        metadata: dict[str, Any] = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": _scores(tokens, model["merges"]),
            "tokenizer.ggml.add_space_prefix": _prepends_space(content),
        }
    else:
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _name_of_splitting(content),
            "tokenizer.ggml.merges": merges,
        }
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    metadata |= _special_tokens(tokenizer, model)
    if tokenizer.chat_template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata


def _tokens(tokenizer: Tokenizer, model: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Texts and types by id; rows of the embedding without a token get a name that nothing is encoded to."""
    by_id = {index: token for token, index in tokenizer.vocabulary.items()}
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(max(rows, max(by_id) + 1))]
    types = [NORMAL if index in by_id else UNUSED for index in range(len(tokens))]
    if model.get("byte_fallback"):
        for byte in range(256):
            if (index := tokenizer.vocabulary.get(f"<0x{byte:02X}>")) is not None:
                types[index] = BYTE
    for index, token in tokenizer.processor.get_added_tokens_decoder().items():
        types[index] = CONTROL if token.special else USER_DEFINED
    if model.get("byte_fallback") and model.get("unk_token") in tokenizer.vocabulary:
        types[tokenizer.vocabulary[model["unk_token"]]] = UNKNOWN
    return tokens, types


def _scores(tokens: list[str], merges: list[Any]) -> list[float]:
    """What SentencePiece compares: the earlier a merge makes a piece, the better."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    return [-float(ranks[token]) if token in ranks else _WORST for token in tokens]


def _prepends_space(content: dict[str, Any]) -> bool:
    steps = [*_steps(content.get("normalizer"), "normalizers"), *_steps(content.get("pre_tokenizer"), "pretokenizers")]
    return any(s["type"] == "Prepend" or s.get("prepend_scheme", "never") != "never" for s in steps)


def _name_of_splitting(content: dict[str, Any]) -> str:
    """llama.cpp's name for how a byte-level vocabulary splits text into words."""
    patterns: list[str] = []
    for step in _steps(content.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Split" and "Regex" in step["pattern"]:
            patterns.append(step["pattern"]["Regex"])
        elif step["type"] == "Digits" and step.get("individual_digits"):
            patterns.append(DIGIT)
        elif step["type"] == "ByteLevel":
            patterns += [GPT2] if step.get("use_regex", True) else []
        else:
            patterns.append(f"a step of the type {step['type']}")
    nfc = any(step["type"] == "NFC" for step in _steps(content.get("normalizer"), "normalizers"))
    wanted = (tuple(patterns), bool(content["model"].get("ignore_merges")), nfc)
    for name, known in PRE_TOKENIZERS.items():
        if (known.patterns, known.whole_words, known.nfc) == wanted:
            return name
    raise UserError(
        f"llama.cpp has no name for how this tokenizer splits text: {patterns}",
        "a .gguf file of this model would tokenize differently, so none is written",
    )


def _steps(part: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    """The steps of a sequence, or the only one."""
    if part is None:
        return []
    return list(part[inside]) if part["type"] == "Sequence" else [part]


def _special_tokens(tokenizer: Tokenizer, model: dict[str, Any]) -> dict[str, Any]:
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    names = {"unknown": model.get("unk_token"), "padding": tokenizer.special_tokens.get("pad_token")}
    ids |= {key: tokenizer.vocabulary.get(text) for key, text in names.items() if text is not None}
    others = sorted(tokenizer.stop_ids - {tokenizer.eos_id})
    ids["eot"] = others[0] if others else None
    metadata: dict[str, Any] = {
        f"tokenizer.ggml.{key}_token_id": index for key, index in ids.items() if index is not None
    }
    return metadata | {"tokenizer.ggml.add_bos_token": tokenizer.use_bos}
