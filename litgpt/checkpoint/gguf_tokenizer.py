# Licensed under the Apache License 2.0, see the LICENSE file.

"""The tokenizer in a GGUF's metadata as the files a Hugging Face folder has for it."""

from __future__ import annotations

from itertools import groupby
from typing import Any, TypeGuard

from litgpt.checkpoint.gguf_pretokenizers import pre_tokenizer
from litgpt.errors import UserError

Metadata = dict[str, Any]

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPACE = "\u2581"  # how SentencePiece writes a space
# Used by SentencePiece-type files that do not say
LLAMA_IDS = {"bos": 1, "eos": 2, "unk": 0}
ID_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Ends of a turn that files often have no key for
END_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
# Phi-3's other special tokens swallow the white space that follows them, which a GGUF cannot say.
PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def build_tokenizer_files(metadata: Metadata) -> dict[str, Any]:
    """Rebuild `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.

    Raises:
        UserError: no tokenizer in the file, or one of a kind that is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or not _are_strings(tokens):
        raise UserError(
            f"the GGUF file has no tokenizer that is supported (tokenizer.ggml.model is {kind!r})",
            "supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)",
        )
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"the GGUF file has {len(tokens)} tokens but {len(types)} token types", "download it again")
    parts = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens, types)
    ids = _special_ids(metadata, kind)
    adds = _added_at_the_ends(metadata, kind)
    tokenizer_json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, parts["model"]["vocab"], types),
        **parts,
        "post_processor": _template(tokens, ids, **adds),
    }
    return {
        "tokenizer.json": tokenizer_json,
        "tokenizer_config.json": _tokenizer_config(metadata, tokens, ids, adds),
        "generation_config.json": _generation_config(metadata, tokens, types, ids),
    }


def _are_strings(values: Any) -> TypeGuard[list[str]]:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


# Byte-level BPE


def _byte_level(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not _are_strings(merges):
        raise UserError("the GGUF file has a byte-level vocabulary without merges", "convert the model again")
    splitting = pre_tokenizer(metadata)
    return {
        "normalizer": splitting.normalizer,
        "pre_tokenizer": splitting.as_json(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(_vocabulary(tokens), _pairs(merges), ignore_merges=splitting.whole_words),
    }


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space:
            raise UserError(f"the GGUF file has the merge {merge!r}, which is not a pair", "download it again")
        pairs.append((left, right))
    return pairs


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**model, **options, "vocab": vocab, "merges": merges}


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocab.setdefault(token, i)
    return vocab


# SentencePiece


def _sentencepiece(metadata: Metadata, tokens: list[str], types: list[int]) -> dict[str, Any]:
    # Runs of spaces are stored as spaces, but the text that meets them has been normalized.
    spelled = [token.replace(" ", SPACE) if token.isspace() else token for token in tokens]
    vocab = _vocabulary(spelled)
    if merges := metadata.get("tokenizer.ggml.merges"):
        pairs = _pairs(merges)
    else:
        pairs = _merges_from_scores(vocab, _scores(metadata, types))
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    from_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    decoders: list[dict[str, Any]] = [from_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    normalizer: dict[str, Any] = to_space
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, to_space]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _special_ids(metadata, "llama").get("unk", 0)
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocab, pairs, unk_token=spelled[unknown], fuse_unk=True, byte_fallback=BYTE in types),
    }


def _scores(metadata: Metadata, types: list[int]) -> list[float]:
    """Scores by id. llama.cpp writes -1000 for user-defined pieces, which SentencePiece puts before all others."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(types):
        raise UserError("the GGUF file has a SentencePiece vocabulary without scores", "convert the model again")
    return [0.0 if kind in (CONTROL, USER_DEFINED) else score for score, kind in zip(scores, types, strict=True)]


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best score first: the order SentencePiece applies them in.

    Among equal scores longer parts come first, as in the merges that Hugging Face derives from SentencePiece models.
    """

    def score(piece: str) -> float:
        return scores[vocab[piece]]

    merges: list[tuple[str, str]] = []
    for _, pieces in groupby(sorted(vocab, key=score, reverse=True), key=score):
        splits = [
            (left, right)
            for piece in pieces
            for cut in range(1, len(piece))
            if (left := piece[:cut]) in vocab and (right := piece[cut:]) in vocab
        ]
        splits.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
        merges += splits
    return merges


# Special tokens


def _added_tokens(metadata: Metadata, vocab: dict[str, int], types: list[int]) -> list[dict[str, Any]]:
    """Tokens that are found in the text as they stand, before it is split."""
    phi3 = metadata.get("general.architecture") == "phi3" and metadata["tokenizer.ggml.model"] == "llama"
    added = []
    for token, i in vocab.items():
        if types[i] in (CONTROL, USER_DEFINED, UNKNOWN) and token:
            special = types[i] != USER_DEFINED
            swallows = phi3 and special and token not in PHI3_KEEPS_SPACE
            added.append(
                {
                    "id": i,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": swallows,
                    "normalized": False,
                    "special": special,
                }
            )
    return added


def _special_ids(metadata: Metadata, kind: str) -> dict[str, int]:
    n_tokens = len(metadata["tokenizer.ggml.tokens"])
    ids = dict(LLAMA_IDS) if kind == "llama" else {}
    ids |= {name: metadata[k] for name, key in ID_KEYS.items() if (k := f"tokenizer.ggml.{key}_token_id") in metadata}
    return {name: i for name, i in ids.items() if isinstance(i, int) and 0 <= i < n_tokens}


def _added_at_the_ends(metadata: Metadata, kind: str) -> dict[str, bool]:
    default = kind == "llama" or pre_tokenizer(metadata).adds_bos
    return {
        "add_bos": bool(metadata.get("tokenizer.ggml.add_bos_token", default)),
        "add_eos": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }


def _template(tokens: list[str], ids: dict[str, int], add_bos: bool, add_eos: bool) -> dict[str, Any] | None:
    before = [ids["bos"]] if add_bos and "bos" in ids else []
    after = [ids["eos"]] if add_eos and "eos" in ids else []
    if not before + after:
        return None

    def sequence(letter: str, type_id: int) -> list[dict[str, Any]]:
        def special(i: int) -> dict[str, Any]:
            return {"SpecialToken": {"id": tokens[i], "type_id": type_id}}

        middle = {"Sequence": {"id": letter, "type_id": type_id}}
        return [*map(special, before), middle, *map(special, after)]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in before + after},
    }


def _tokenizer_config(
    metadata: Metadata, tokens: list[str], ids: dict[str, int], adds: dict[str, bool]
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds["add_bos"],
        "add_eos_token": adds["add_eos"],
        **{f"{name}_token": tokens[i] for name, i in ids.items()},
    }
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if length:
        config["model_max_length"] = length
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _generation_config(metadata: Metadata, tokens: list[str], types: list[int], ids: dict[str, int]) -> dict[str, Any]:
    named = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom")]
    stops = [ids["eos"]] if "eos" in ids else []
    stops += [i for i in named if isinstance(i, int) and 0 <= i < len(tokens)]
    ends = set(END_OF_TURN)
    stops += [i for i, token in enumerate(tokens) if types[i] in (CONTROL, USER_DEFINED) and token in ends]
    config: dict[str, Any] = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if name in ids}
    if stops:
        config["eos_token_id"] = list(dict.fromkeys(stops))
    return config
