# Licensed under the Apache License 2.0, see the LICENSE file.

"""Data modules: files of all kinds, splits, batches, the cache of tokens, and what is said about bad input."""

from __future__ import annotations

import json
import logging
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch
from safetensors.torch import load, load_file
from torch.utils.data import DataLoader, random_split

from litgpt.data import JSON, Alpaca, DataModule, SFTDataset, get_sft_collate_fn, tokens
from litgpt.data.base import split
from litgpt.data.files import read_records
from litgpt.data.records import Conversation, Instruction, parse_record
from litgpt.errors import MissingFileError, UserError
from litgpt.prompts import Alpaca as AlpacaStyle
from litgpt.prompts import ChatTemplate, PromptStyle, save_prompt_style
from litgpt.tokenizer import Tokenizer
from tests.tiny_text import write_tokenizer

ALPACA = [{"instruction": f"Say {i}", "input": "", "output": "x" * i} for i in range(10)]
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of tokens, empty."""
    monkeypatch.setenv("LITGPT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path / "tokenizer", chat_template=None))


def write(path: Path, records: list[Any]) -> Path:
    lines = [json.dumps(record) for record in records]
    text = "\n".join(lines) if path.suffix == ".jsonl" else "[\n" + ",\n".join(lines) + "\n]"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def ready(tokenizer: Tokenizer, path: Path, **settings: Any) -> JSON:
    """A JSON module after `setup`."""
    connect = {key: settings.pop(key) for key in ("batch_size", "max_seq_length") if key in settings}
    data = JSON(path, **{"num_workers": 0, **settings})
    data.connect(tokenizer, **connect)
    data.prepare_data()
    data.setup()
    return data


def cached_files(home: Path) -> list[Path]:
    return sorted((home / "tokens").glob("*.safetensors"))


class Characters:
    """A tokenizer of another make: one token a character."""

    bos_id, eos_id = 0, 1

    def encode(self, text: str, bos: bool | None = None, eos: bool = False, max_length: int = -1) -> torch.Tensor:
        return torch.tensor([0] * bool(bos) + [ord(c) for c in text] + [1] * eos)


class Plain(PromptStyle):
    def apply(self, prompt: Any, *, sys_prompt: str | None = None, **kwargs: Any) -> str:
        return f"In: {prompt} Out:"


# The dataset


@pytest.mark.parametrize("mask_prompt", [True, False])
@pytest.mark.parametrize("ignore_index", [-1, -100])
@pytest.mark.parametrize("max_seq_length", [1000, 14, 5, -1])
def test_sft_dataset(mask_prompt: bool, ignore_index: int, max_seq_length: int) -> None:
    data = [{"instruction": "Foo", "output": "Bar"}, {"instruction": "Boo", "output": ""}]
    made: Any = Characters()
    dataset = SFTDataset(data, made, Plain(), max_seq_length, mask_prompt, ignore_index)
    ids = [*map(ord, "In: Foo Out:Bar"), 1]
    labels = [ignore_index] * 12 + ids[12:] if mask_prompt else ids
    cut = max_seq_length if max_seq_length > 0 else None
    assert dataset[0]["input_ids"].tolist() == ids[:cut]
    assert dataset[0]["labels"].tolist() == labels[:cut]
    assert dataset[0]["labels"].dtype == dataset[0]["input_ids"].dtype == torch.int64
    assert dataset.lengths == [len(dataset[i]["input_ids"]) for i in range(2)]
    assert dataset.prompt(0).tolist() == ids[:12]
    assert len(list(iter(dataset))) == 2


def test_transform_gets_a_copy() -> None:
    def transform(record: dict[str, str]) -> dict[str, str]:
        return {"instruction": record.pop("q"), "output": record.pop("a")}

    made: Any = Characters()
    data = [{"q": "Foo", "a": "Bar"}]
    for _ in range(2):
        dataset = SFTDataset(data, made, Plain(), transform=transform)
        assert dataset[0]["input_ids"].tolist() == [*map(ord, "In: Foo Out:Bar"), 1]


def test_what_a_cut_loses_is_said(caplog: pytest.LogCaptureFixture) -> None:
    made: Any = Characters()
    data = [{"instruction": i, "output": o} for i, o in (("a", "b"), ("a", "bbbbbb"), ("aaaaaaaaaa", "b"))]
    with caplog.at_level(logging.WARNING):
        dataset = SFTDataset(data, made, Plain(), max_seq_length=14)
    assert dataset.lengths == [12, 14, 14]
    assert "2 of 3 samples are longer than max_seq_length=14 (the longest has 21 tokens)" in caplog.text
    assert "1 of them lose all" in caplog.text
    caplog.clear()
    SFTDataset(data, made, Plain(), max_seq_length=21)
    assert not caplog.text


def test_collate() -> None:
    samples = [
        {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([10, 20, 30])},
        {"input_ids": torch.tensor([4]), "labels": torch.tensor([40])},
    ]
    batch = get_sft_collate_fn(pad_id=99, ignore_index=-1)(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 99, 99]]
    assert batch["labels"].tolist() == [[10, 20, 30], [40, -1, -1]]
    assert batch.keys() == {"input_ids", "labels"}
    cut = get_sft_collate_fn(max_seq_length=2)([{**s, "token_counts": {"raw": i}} for i, s in enumerate(samples)])
    assert cut["input_ids"].tolist() == [[1, 2], [4, 0]]
    assert cut["token_counts"]["raw"].tolist() == [[0], [1]]


# Splits


@pytest.mark.parametrize(("total", "fraction"), [(10, 0.5), (100, 0.05), (51759, 0.03865), (52002, 0.03847)])
def test_split_is_that_of_random_split(total: int, fraction: float) -> None:
    generator = torch.Generator().manual_seed(7)
    expected = random_split(range(total), [1.0 - fraction, fraction], generator=generator)  # type: ignore[arg-type]
    assert split(total, fraction, 7) == tuple(part.indices for part in expected)
    assert len(split(total, fraction, 7)[1]) in (5, 2000)


@pytest.mark.parametrize(("total", "fraction", "held_out"), [(10, 0.05, 1), (1, 0.05, 0), (10, 0, 0), (2, 0.9, 1)])
def test_small_splits(total: int, fraction: float, held_out: int) -> None:
    train, val = split(total, fraction, 0)
    assert (len(train), len(val)) == (total - held_out, held_out)
    assert sorted([*train, *val]) == list(range(total))


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2])
def test_impossible_split(fraction: float) -> None:
    with pytest.raises(UserError, match="is not a fraction"):
        split(10, fraction, 0)


# JSON


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
@pytest.mark.parametrize("as_text", [True, False])
def test_json_file(tmp_path: Path, tokenizer: Tokenizer, suffix: str, as_text: bool) -> None:
    path = tmp_path / f"data{suffix}"
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(ALPACA), path)
    else:
        write(path, ALPACA)
    data = ready(tokenizer, str(path) if as_text else path, batch_size=4, seed=3)  # type: ignore[arg-type]
    assert isinstance(data.prompt_style, AlpacaStyle)
    assert data.train_dataset is not None
    assert data.val_dataset is data.test_dataset
    train, held_out = split(10, 0.05, 3)
    assert data.train_dataset.data == [ALPACA[i] for i in train]
    for dataset, indices in ((data.train_dataset, train), (data.val_dataset, held_out)):
        assert dataset is not None
        for sample, index in zip(dataset, indices, strict=True):
            text = AlpacaStyle().apply(**{"prompt": ALPACA[index]["instruction"]}) + ALPACA[index]["output"]
            assert tokenizer.decode(sample["input_ids"], skip_special_tokens=False) == f"<s>{text}</s>"
            assert torch.equal(sample["labels"], sample["input_ids"])
    batches = list(data.train_dataloader())
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 1]
    again = ready(tokenizer, path, batch_size=4, seed=3).train_dataloader()
    assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(batches, again, strict=True))
    assert len(list(data.val_dataloader())) == 1


def test_json_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path / "d" / "train.json", ALPACA)
    write(tmp_path / "d" / "val.jsonl", [CHAT])
    data = ready(tokenizer, tmp_path / "d", mask_prompt=True, ignore_index=-7)
    assert data.train_dataset is not None
    assert data.val_dataset is not None
    assert (len(data.train_dataset), len(data.val_dataset)) == (10, 1)
    sample = data.val_dataset[0]
    learnt = sample["labels"] != -7
    assert tokenizer.decode(sample["labels"][learnt], skip_special_tokens=False) == "Hello</s>"
    with pytest.raises(UserError, match=r"is a folder, so val.json is what is held out"):
        JSON(tmp_path / "d", val_split_fraction=0.1)
    (tmp_path / "d" / "val.jsonl").unlink()
    with pytest.raises(MissingFileError, match=r"has no val.json"):
        ready(tokenizer, tmp_path / "d")


def test_the_checkpoint_says_the_prompt_style(tmp_path: Path) -> None:
    path = write(tmp_path / "data.json", ALPACA)
    chat = Tokenizer(write_tokenizer(tmp_path / "chat"))
    assert isinstance(ready(chat, path).prompt_style, ChatTemplate)
    assert isinstance(ready(chat, path, prompt_style="alpaca").prompt_style, AlpacaStyle)
    assert Alpaca().prompt_style.__class__ is AlpacaStyle
    save_prompt_style("phi-2", tmp_path / "chat")
    assert type(ready(chat, path).prompt_style).__name__ == "Phi2"
    with pytest.raises(UserError, match="unknown prompt style 'nope'"):
        JSON(path, prompt_style="nope")


def test_needs_connect(tmp_path: Path) -> None:
    data = JSON(write(tmp_path / "data.json", ALPACA))
    with pytest.raises(UserError, match="call connect"):
        data.setup()
    with pytest.raises(UserError, match="call setup"):
        data.train_dataloader()


def test_nothing_left_to_learn(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "data.json", ALPACA)
    with pytest.raises(UserError, match="no sample has an answer within max_seq_length=10 tokens"):
        ready(tokenizer, path, max_seq_length=10)


# Records and bad input


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"instruction": "a", "output": "b"}, Instruction("a", "b", {"instruction": "a", "output": "b"})),
        (
            {"instruction": "a", "output": "b", "prompt": "c", "messages": 1, "input": None},
            Instruction("a", "b", {"instruction": "a", "output": "b", "messages": 1, "input": None}),
        ),
        (CHAT, Conversation(CHAT["messages"])),
        ({**CHAT, "output": "x"}, Conversation(CHAT["messages"])),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "tools": ""},
            Conversation(CHAT["messages"]),
        ),
        ({"conversations": ["Hi", "Hello"]}, Conversation(CHAT["messages"])),
        (
            {**CHAT, "system": "S", "tools": '[{"name": "f"}]'},
            Conversation([{"role": "system", "content": "S"}, *CHAT["messages"]], [{"name": "f"}]),
        ),
    ],
)
def test_records(record: Any, expected: Instruction | Conversation) -> None:
    assert parse_record(record) == expected


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"instruction": "a"}, "the field 'output' is missing"),
        ({"instruction": 1, "output": "b"}, "the field 'instruction' is int, not a text"),
        ({"instruction": "a", "output": "b", "input": []}, "the field 'input' is list"),
        ({"text": "a"}, "the record has only the fields 'text'"),
        ("a", "a record must be an object, not str"),
        ({"messages": []}, "'messages' is not a list of messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message of the assistant"),
        ({"messages": [{"role": "user"}]}, "message 1 has no content"),
        ({"messages": [{"content": "a"}]}, "message 1 has no role"),
        ({"messages": [3]}, "message 1 is int"),
        ({"instruction": "\ud800", "output": "b"}, "not valid Unicode"),
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_bad_record_is_named(tmp_path: Path, tokenizer: Tokenizer, record: Any, message: str, suffix: str) -> None:
    path = write(tmp_path / f"data{suffix}", [*ALPACA, record])
    line = 12 if suffix == ".json" else 11  # the list of a .json file begins on the line before
    with pytest.raises(UserError, match=message) as caught:
        ready(tokenizer, path)
    assert str(caught.value).startswith(f"{path}:{line}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"instruction": "a", "output": "b"}\n\n{"instruction": \n', r"a.jsonl:3: not valid JSON"),
        ("a.json", b'[{"instruction": "a"\n"b": 1}]', r"a.json:2: not valid JSON"),
        ("a.json", b'{"a": 1}\n{"a": 2}', r"a.json:2: not valid JSON: Extra data .*name it .jsonl"),
        ("a.json", b'{"data": []}', "must hold a list of records, not dict"),
        ("a.json", b"", "holds no records"),
        ("a.json", b"[]", "holds no records"),
        ("a.jsonl", b"\n \n", "holds no records"),
        ("a.jsonl", b'{"a": 1}\n"\xff"', "a.jsonl:2: not UTF-8"),
        ("a.parquet", b"PAR1", "is damaged or no Parquet file"),
        ("a.csv", b"a,b", "is not a file that data is read from"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, tokenizer: Tokenizer, name: str, content: bytes, message: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        ready(tokenizer, tmp_path / name)


def test_missing_file() -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        JSON(Path("nowhere.json"))


def test_lines_with_odd_ends(tmp_path: Path) -> None:
    text = '\ufeff{"instruction": "a\u2028b", "output": "\x85"}\r\n\r\n{"instruction": "c", "output": "d"}\n\n'
    (tmp_path / "a.jsonl").write_bytes(text.encode())
    records = read_records(tmp_path / "a.jsonl")
    assert [record["instruction"] for record in records] == ["a\u2028b", "c"]
    assert records.place(1) == f"{tmp_path / 'a.jsonl'}:3"
    both = read_records(write(tmp_path / "b.json", [[1], [2, [3]]]), tmp_path / "a.jsonl")
    assert len(both) == 4
    assert both.place(1) == f"{tmp_path / 'b.json'}:3 (record 2)"
    assert both.place(3) == f"{tmp_path / 'a.jsonl'}:3"


# The cache


def test_tokens_are_encoded_once(
    tmp_path: Path, tokenizer: Tokenizer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "data.json", ALPACA)
    first = ready(tokenizer, path)
    assert len(cached_files(home)) == 1

    def refuse(*_: Any) -> None:
        raise AssertionError("encoded again")

    with monkeypatch.context() as patch:
        patch.setattr(tokens, "encode_records", refuse)
        second = ready(tokenizer, path, max_seq_length=200, mask_prompt=True, ignore_index=-1, val_split_fraction=0.5)
        same = ready(Tokenizer(tokenizer.path), path)
    assert first.train_dataset is not None
    assert same.train_dataset is not None
    assert second.train_dataset is not None
    assert second.train_dataset.lengths != first.train_dataset.lengths
    assert all(
        torch.equal(a["labels"], b["labels"]) for a, b in zip(first.train_dataset, same.train_dataset, strict=True)
    )


@pytest.mark.parametrize("change", ["file", "style", "variables", "tokenizer", "template"])
def test_a_changed_input_is_encoded_again(tmp_path: Path, home: Path, change: str) -> None:
    path = write(tmp_path / "data.json", ALPACA)
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "chat"))
    ready(tokenizer, path)
    style: Any = None
    if change == "file":
        write(path, [*ALPACA[:-1], {"instruction": "new", "output": "x"}])
    elif change == "style":
        style = "alpaca"
    elif change == "variables":
        style = ChatTemplate(enable_thinking=False)
    else:
        template = None if change == "tokenizer" else "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
        tokenizer = Tokenizer(write_tokenizer(tmp_path / "chat2", template, bos=change == "template"))
    ready(tokenizer, path, prompt_style=style)
    assert len(cached_files(home)) == 2


@pytest.mark.parametrize("damage", ["cut", "byte", "empty"])
def test_a_damaged_cache_is_made_again(
    tmp_path: Path, tokenizer: Tokenizer, home: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "data.json", ALPACA)
    ready(tokenizer, path)
    (file,) = cached_files(home)
    whole = file.read_bytes()
    changed = {"cut": whole[:-40], "byte": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "empty": b""}
    file.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING):
        ready(tokenizer, path)
    assert "is damaged and is made again" in caplog.text
    mended, expected = load_file(file), load(whole)
    assert mended.keys() == expected.keys()
    assert all(torch.equal(mended[name], expected[name]) for name in expected)


def test_a_style_defined_elsewhere_is_not_kept(tmp_path: Path, tokenizer: Tokenizer, home: Path) -> None:
    ready(tokenizer, write(tmp_path / "data.json", ALPACA), prompt_style=Plain())
    assert not cached_files(home)


def test_a_home_that_cannot_be_written(
    tmp_path: Path, tokenizer: Tokenizer, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home.write_text("a file, not a folder", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        data = ready(tokenizer, write(tmp_path / "data.json", ALPACA))
    assert data.train_dataset is not None
    assert len(data.train_dataset) == 9
    assert "cannot be kept for the next time" in caplog.text


def _lengths(folder: Path, path: Path) -> list[int]:
    data = ready(Tokenizer(folder), path)
    assert data.train_dataset is not None
    return data.train_dataset.lengths


@pytest.mark.slow
def test_several_processes(tmp_path: Path, tokenizer: Tokenizer, home: Path) -> None:
    path = write(tmp_path / "data.json", ALPACA * 50)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.starmap(_lengths, [(tokenizer.path, path)] * 3)
    assert found[0] == found[1] == found[2] == _lengths(tokenizer.path, path)
    assert len(cached_files(home)) == 1


# The command line, and Lightning


def parse(*argv: str) -> Any:
    def setup(data: DataModule | None = None) -> None: ...

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_function_arguments(setup, fail_untyped=False)
    return parser.instantiate(parser.parse_args(argv)).data


def test_command_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x.json", ALPACA)
    data = parse("--data", "JSON", "--data.json_path", str(path), "--data.mask_prompt", "true")
    assert isinstance(data, JSON)
    assert (data.json_path, data.mask_prompt, data.prompt_style, data.val_split_fraction) == (path, True, None, 0.05)
    text = "data:\n  class_path: litgpt.data.Alpaca2k\n  init_args:\n    prompt_style: alpaca\n    seed: 7\n"
    (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
    data = parse("--config", str(tmp_path / "c.yaml"))
    assert (type(data).__name__, data.seed, data.val_split_fraction) == ("Alpaca2k", 7, 0.05)


def test_a_module_of_one_s_own() -> None:
    class Mine(DataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader([1, 2], batch_size=self.batch_size)  # type: ignore[arg-type]

    data = Mine()
    data.connect(batch_size=2, max_seq_length=None)
    data.prepare_data()
    data.setup()
    assert len(data.train_dataloader()) == 1
    assert data.val_dataloader() is None
    assert data.max_seq_length == -1


@pytest.mark.slow
def test_lightning_takes_data_modules_and_is_not_imported_for_them() -> None:
    script = (
        "import sys, litgpt.data; assert 'torch' not in sys.modules\n"
        "from litgpt.data import Alpaca; a = Alpaca(); assert 'lightning' not in sys.modules\n"
        "from lightning import LightningDataModule; b = Alpaca()\n"
        "assert isinstance(a, LightningDataModule) and isinstance(b, LightningDataModule) and b.trainer is None\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)
