# Licensed under the Apache License 2.0, see the LICENSE file.

"""How byte-level BPE vocabularies split text into words: what `tokenizer.ggml.pre` of a GGUF stands for.

A name stands for regular expressions that are applied one after the other, each to the pieces the ones before left.
They are the expressions of the models' own tokenizer.json; llama.cpp's list of names is at
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WHITE_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{PUNCTUATION}|{WHITE_SPACE}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{PUNCTUATION}|{WHITE_SPACE}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{WHITE_SPACE}"
)
# Words by case: capitals then small letters.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START = r"[^\r\n\p{L}\p{N}]?"
CASED_END = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{WHITE_SPACE}"
TEKKEN = rf"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|\p{{N}}|{CASED_END}"
GPT4O = rf"{START}{UPPER}*{LOWER}+{CONTRACTIONS}?|{START}{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}|{CASED_END}"
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{WHITE_SPACE}"
)
DIGIT, THREE_DIGITS, NUMBER = r"\p{N}", r"[0-9][0-9][0-9]", r"\p{N}{1,3}"
CASED = r"[\p{Lu}\p{Ll}\p{Lt}]+"
CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
CJK_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"


class PreTokenizer(NamedTuple):
    """How text becomes words.

    Args:
        patterns: regular expressions whose matches, and what lies between them, are words.
        whole_words: a word that is a token is taken as it is, whatever the merges say.
        adds_bos: a text begins with the BOS token unless the file says otherwise.
        nfc: the text is put in Unicode's normal form C first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    nfc: bool = False

    @property
    def normalizer(self) -> dict[str, Any] | None:
        """The `normalizer` of a tokenizer.json."""
        return {"type": "NFC"} if self.nfc else None

    def as_json(self) -> dict[str, Any]:
        """The `pre_tokenizer` of a tokenizer.json."""
        steps: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
        return {"type": "Sequence", "pretokenizers": steps}


_GPT2 = PreTokenizer((GPT2,))
_DIGITS = PreTokenizer((DIGIT, GPT2))
_LLAMA3 = PreTokenizer((LLAMA3,), whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((QWEN2,), nfc=True)
_GPT4O = PreTokenizer((GPT4O,))
_NAMES: dict[PreTokenizer, str] = {
    _GPT2: "gpt-2 mpt olmo jais phi-2 trillion exaone4 gigachat a.x-4.0 mellum modern-bert granite-docling",
    _DIGITS: "smollm starcoder refact command-r codeshell exaone minerva-7b",
    _LLAMA3: "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    PreTokenizer((LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
    PreTokenizer((LLAMA3,), whole_words=True): "glm4",
    _QWEN2: "qwen2 deepseek-r1-qwen megrez",
    PreTokenizer((QWEN2,)): "stablelm2 hunyuan solar-open grok-2",
    PreTokenizer((QWEN35,), nfc=True): "qwen35",
    PreTokenizer((TEKKEN,), whole_words=True, adds_bos=True): "tekken",
    _GPT4O: "gpt-4o llama4 kanana2 minimax-m2",
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, THREE_DIGITS)): "falcon",
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT)): "deepseek-coder",
    PreTokenizer(
        (r"[\r\n]", rf"\s?{CASED}", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", CJK, r"\p{N}+")
    ): "deepseek-llm",
    PreTokenizer((NUMBER, CJK_AND_KANA, DEEPSEEK_V3)): "deepseek-v3 hunyuan-dense",
}
PRE_TOKENIZERS = {name: splitting for splitting, names in _NAMES.items() for name in names.split()}

# Files older than `tokenizer.ggml.pre`, and vocabularies their converter did not know
BY_ARCHITECTURE = {"qwen2": _QWEN2, "qwen3": _QWEN2, "qwen3moe": _QWEN2, "llama": _LLAMA3}


def pre_tokenizer(metadata: dict[str, Any]) -> PreTokenizer:
    """The splitting that a GGUF names; for a name that is not known, the likely one with a warning."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    splitting = BY_ARCHITECTURE.get(str(metadata.get("general.architecture")), _GPT2)
    if name != "default":
        logger.warning("Pre-tokenizer %r of the GGUF file is not known; some texts may be split differently.", name)
    return splitting
