# Licensed under the Apache License 2.0, see the LICENSE file.

"""Tokenizers rebuilt from GGUF metadata: the same ids as SentencePiece, `tokenizers`, llama.cpp and transformers."""

from __future__ import annotations

import io
import json
import logging
import random
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from litgpt.checkpoint.gguf import GGUFFile
from litgpt.checkpoint.gguf_pretokenizers import PRE_TOKENIZERS
from litgpt.checkpoint.gguf_tokenizer import CONTROL, NORMAL, USER_DEFINED, build_tokenizer_files
from litgpt.errors import UserError
from tests.assets import cache_dir, tokenizer_dir

TEXTS = [
    "",
    " ",
    "Hello world",
    " leading",
    "  two leading",
    "trailing  ",
    "a\nb\n\nc\r\n\td\t\te",
    "1234567890 3.14159 0x1F 1,000,000",
    "def f(x):\n    return [i ** 2 for i in range(x)]  # squares\n",
    "It's I'LL we've they'd DON'T",
    "Ünïcödé naïve café e\u0301 ﬁ",
    "日本語と中文，한국어 ไทย हिन्दी العربية עברית",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 ok",
    "<b>bold</b> <table><tr>",
    "camelCaseAndSNAKE_CASE path/to/file.txt https://example.org/?a=b&c=d",
    "!!! ... --- *** ??? (){}[]<>",
    "▁literal ▁▁ mark",
    "\u0000\u0001\u007f",
]


def varied_texts(n: int, seed: int = 0) -> list[str]:
    """`TEXTS` and random concatenations of their parts with odd white space between them."""
    generator = random.Random(seed)
    words = [word for text in TEXTS for word in text.split(" ") if word]
    gaps = ["", " ", "  ", "   ", "\n", "\n\n", "\t", " \n", "\u00a0", "       "]
    made = []
    for _ in range(n):
        parts = [generator.choice(gaps) + generator.choice(words) for _ in range(generator.randint(1, 12))]
        made.append("".join(parts) + generator.choice(gaps))
    return TEXTS + made


def load(files: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(files["tokenizer.json"]))


def assert_same_ids(tokenizer: Tokenizer, texts: Iterable[str], encode: Any) -> None:
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False).ids == encode(text), repr(text)


# Small vocabularies, trained here


CORPUS = [text for text in TEXTS for _ in range(3)] + ["the quick brown fox jumps over the lazy dog " * 4] * 5


def sentencepiece_metadata(**options: Any) -> tuple[dict[str, Any], Any]:
    """Train a SentencePiece BPE model and describe it as llama.cpp's converter does."""
    spm = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.replace("\0", "").splitlines() if line]),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        minloglevel=2,
        **options,
    )
    processor = spm.SentencePieceProcessor(model_proto=model.getvalue())
    user = set(options.get("user_defined_symbols", []))
    types, scores = [], []
    for i in range(processor.get_piece_size()):
        kinds = [
            processor.is_unknown(i),
            processor.is_control(i),
            processor.id_to_piece(i) in user,
            processor.is_unused(i),
        ]
        kind = next((kind for kind, holds in zip((2, 3, 4, 5), kinds, strict=True) if holds), NORMAL)
        types.append(6 if processor.is_byte(i) else kind)
        scores.append(-1000.0 if kind == USER_DEFINED else processor.get_score(i))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            processor.id_to_piece(i).replace("▁", " ") if types[i] == 4 else processor.id_to_piece(i)
            for i in range(len(types))
        ],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": options.get("add_dummy_prefix", True),
    }, processor


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabulary(prefix: bool) -> None:
    metadata, processor = sentencepiece_metadata(add_dummy_prefix=prefix)
    tokenizer = load(build_tokenizer_files(metadata))
    texts = [text for text in varied_texts(300) if text and "\0" not in text]
    assert_same_ids(tokenizer, texts, processor.encode)
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text.replace("▁", " ")


def test_sentencepiece_user_defined_symbols_come_first() -> None:
    symbols = ["\n", "\n\n", "▁▁", "▁▁▁", "<b>", "</b>"]
    metadata, processor = sentencepiece_metadata(add_dummy_prefix=False, user_defined_symbols=symbols)
    tokenizer = load(build_tokenizer_files(metadata))
    assert_same_ids(tokenizer, [t for t in varied_texts(300) if t and "\0" not in t and "▁" not in t], processor.encode)


def byte_level_metadata(name: str) -> tuple[dict[str, Any], Tokenizer]:
    """Train a byte-level BPE with a splitting and describe it as llama.cpp's converter does."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=PRE_TOKENIZERS[name].whole_words))
    splitting = PRE_TOKENIZERS[name].as_json()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<s>", "<|end|>"])
    state = json.loads(tokenizer.to_str())
    state["pre_tokenizer"] = splitting
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("   ", normalized=False)])
    size = tokenizer.get_vocab_size()
    model = json.loads(tokenizer.to_str())["model"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [tokenizer.id_to_token(i) for i in range(size)],
        "tokenizer.ggml.token_type": [CONTROL] * 2 + [NORMAL] * (size - 4) + [USER_DEFINED] * 2,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }, tokenizer


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "tekken", "gpt-4o", "deepseek-v3", "falcon"])
def test_byte_level_vocabulary(name: str) -> None:
    metadata, expected = byte_level_metadata(name)
    tokenizer = load(build_tokenizer_files(metadata))
    texts = [*varied_texts(300), "<s>a<|end|>b <think>\n</think>    x"]
    assert_same_ids(tokenizer, texts, lambda text: expected.encode(text).ids)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_and_files() -> None:
    metadata, _ = byte_level_metadata("gpt-2")
    metadata |= {
        "general.architecture": "llama",
        "llama.context_length": 77,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.padding_token_id": 10**6,  # damaged: not a token
    }
    files = build_tokenizer_files(metadata)
    added = {token["content"]: token["special"] for token in files["tokenizer.json"]["added_tokens"]}
    assert added == {"<s>": True, "<|end|>": True, "<think>": False, "   ": False}
    assert load(files).encode("a").ids[0] == 0
    assert load(files).encode("a").ids[-1] == 0
    assert load(files).encode("a", "b").ids.count(0) == 4
    config = files["tokenizer_config.json"]
    assert config["bos_token"] == config["eos_token"] == "<s>"
    assert "pad_token" not in config
    assert (config["add_bos_token"], config["add_eos_token"]) == (True, True)
    assert (config["chat_template"], config["model_max_length"]) == ("{{ messages }}", 77)
    # The stated ids and the end of a turn, which has no key of its own here
    assert files["generation_config.json"] == {"bos_token_id": 0, "eos_token_id": [0, 5, 1]}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokenizer.ggml.pre": "smollm"}, False),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_bos_unless_the_file_says_otherwise(changes: dict[str, Any], expected: bool) -> None:
    metadata, _ = byte_level_metadata("gpt-2")
    files = build_tokenizer_files(metadata | changes)
    assert files["tokenizer_config.json"]["add_bos_token"] is expected
    assert (load(files).encode("abc").ids[0] == 0) is expected


def test_sentencepiece_defaults() -> None:
    """Old files state neither ids nor flags: BOS 1, EOS 2, a BOS in front and a space prefix."""
    metadata, _ = sentencepiece_metadata()
    del metadata["tokenizer.ggml.add_space_prefix"]
    files = build_tokenizer_files(metadata)
    assert files["generation_config.json"] == {"bos_token_id": 1, "eos_token_id": [2]}
    config = files["tokenizer_config.json"]
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert load(files).encode("the").ids[0] == 1
    assert load(files).encode("the").tokens[1].startswith("▁")


def test_phi3_tokens_swallow_white_space() -> None:
    metadata, _ = sentencepiece_metadata(control_symbols=["<|user|>", "<|end|>", "<|endoftext|>"])
    plain = load(build_tokenizer_files(metadata))
    assert plain.encode("<|end|>\nx").ids != plain.encode("<|end|>x").ids
    phi3 = load(build_tokenizer_files(metadata | {"general.architecture": "phi3"}))
    assert phi3.encode("<|end|>\nx").ids == phi3.encode("<|end|>x").ids
    assert phi3.encode("<|endoftext|>\nx").ids == plain.encode("<|endoftext|>\nx").ids


def test_unknown_splitting_is_said(caplog: pytest.LogCaptureFixture) -> None:
    metadata, _ = byte_level_metadata("gpt-2")
    with caplog.at_level(logging.WARNING):
        build_tokenizer_files(metadata | {"tokenizer.ggml.pre": "brand-new"})
    assert "'brand-new'" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
        ({"tokenizer.ggml.merges": None}, "without merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab', which is not a pair"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None}, "without scores"),
    ],
)
def test_metadata_that_is_no_tokenizer(changes: dict[str, Any], message: str) -> None:
    metadata, _ = byte_level_metadata("gpt-2")
    with pytest.raises(UserError, match=message):
        build_tokenizer_files({k: v for k, v in (metadata | changes).items() if v is not None})


# Real vocabularies


def test_smollm2(smollm2_gguf: Path) -> None:
    tokenizer = load(GGUFFile(smollm2_gguf).tokenizer_files())
    text = "<|im_start|>user\n  Add 1234é<|im_end|>\n"
    encoded = tokenizer.encode(text)
    assert encoded.tokens[:5] == ["<|im_start|>", "user", "ĊĠ", "ĠAdd", "Ġ"]
    assert encoded.tokens[5:] == ["1", "2", "3", "4", "Ã©", "<|im_end|>", "Ċ"]
    assert encoded.ids[:2] == [1, 4093]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2_gguf: Path) -> None:
    transformers = pytest.importorskip("transformers")
    files = GGUFFile(smollm2_gguf).tokenizer_files()
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    # transformers does not know the splitting "smollm" and leaves digits with the space before them; the published
    # tokenizer.json has these two steps, and llama.cpp does the same.
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer = load(files)
    texts = [*varied_texts(300), "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>"]
    assert_same_ids(tokenizer, texts, lambda text: theirs(text, add_special_tokens=False).input_ids)
    assert tokenizer.encode("Hello").ids == theirs("Hello").input_ids
    assert files["tokenizer_config.json"]["chat_template"] == theirs.chat_template
    assert files["generation_config.json"]["eos_token_id"] == [2, 0]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_gemma3_equals_the_published_tokenizer(gemma3_gguf: Path) -> None:
    files = GGUFFile(gemma3_gguf).tokenizer_files()
    published = tokenizer_dir("gemma3") / "tokenizer.json"
    expected = json.loads(published.read_text(encoding="utf-8"))
    assert files["tokenizer.json"]["model"]["vocab"] == expected["model"]["vocab"]
    assert [list(merge) for merge in files["tokenizer.json"]["model"]["merges"]] == expected["model"]["merges"]
    theirs = Tokenizer.from_str(published.read_text(encoding="utf-8"))
    tokenizer = load(files)
    texts = [*varied_texts(300), "<start_of_turn>user\nHi<end_of_turn>\n"]
    assert_same_ids(tokenizer, texts, lambda text: theirs.encode(text, add_special_tokens=False).ids)
    assert tokenizer.encode("Hello").ids == theirs.encode("Hello").ids
    for text in texts:
        assert tokenizer.decode(theirs.encode(text).ids) == theirs.decode(theirs.encode(text).ids)
    assert files["generation_config.json"]["eos_token_id"] == [1, 106]


# llama.cpp's own vectors: vocabularies with texts and the ids that the models' original tokenizers give for them.
# Not among them: qwen35, whose vectors lack the normalization that the model's tokenizer has.
GOLDEN = [
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3"),
    *("qwen2", "refact", "starcoder"),
]
PACKAGE = "llama-cpp-python==0.3.36"


@pytest.fixture(scope="session")
def vocabularies() -> Path:
    """Folder with `ggml-vocab-*.gguf`, `.inp` and `.out`, from a source archive of 77 MB that may be unavailable."""
    target = cache_dir() / "vocabularies"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
        done = subprocess.run(
            [*command, "-d", folder, PACKAGE], capture_output=True, text=True, check=False, timeout=250
        )
        archives = list(Path(folder).glob("*.tar.gz"))
        if not archives:
            pytest.skip(f"{PACKAGE} cannot be downloaded: {done.stderr[-300:]}")
        unpacked = Path(folder) / "unpacked"
        unpacked.mkdir()
        with tarfile.open(archives[0]) as archive:
            for member in archive:
                name = Path(member.name).name
                if "/llama.cpp/models/" in member.name and any(f"-vocab-{golden}.gguf" in name for golden in GOLDEN):
                    content = archive.extractfile(member)
                    assert content is not None
                    (unpacked / name).write_bytes(content.read())
        unpacked.replace(target)
    return target


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(name: str, vocabularies: Path) -> None:
    path = vocabularies / f"ggml-vocab-{name}.gguf"
    tokenizer = load(GGUFFile(path).tokenizer_files())
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text(encoding="utf-8").split("\n")
    expected = {text: [int(i) for i in line.split()] for text, line in zip(texts, lines, strict=True)}
    assert len(expected) > 40
    assert_same_ids(tokenizer, expected, expected.__getitem__)
