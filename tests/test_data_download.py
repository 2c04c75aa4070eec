# Licensed under the Apache License 2.0, see the LICENSE file.

"""Data modules that download: from a hub on this machine, once, and with a clear error when it is not there."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from litgpt.data import FLAN, LIMA, Alpaca, Alpaca2k, AlpacaGPT4, Deita, LongForm
from litgpt.data.base import InstructionData
from litgpt.errors import UserError
from litgpt.tokenizer import Tokenizer
from tests.hub_stub import COMMIT, HubStub, hub_for_tests, set_endpoint, set_offline
from tests.tiny_text import write_tokenizer

ALPACA = [{"instruction": f"Say {i}", "input": "", "output": "x" * i} for i in range(20)]
TURNS = ["Hi", "Hello", "More", "Bye"]
SUBSET = "aeslc_10templates"


def as_parquet(records: list[dict[str, Any]]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(records), sink)
    return sink.getvalue()


def as_lines(*records: Any) -> bytes:
    return "\n".join(map(json.dumps, records)).encode()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    monkeypatch.setenv("LITGPT_HOME", str(tmp_path / "home"))
    chats = [
        {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(TURNS)]}
    ] * 3
    texts = [{"input": "Write", "output": "a text"}]
    repos = {
        "mhenrichsen/alpaca_2k_test": {"alpaca_2000.parquet": as_parquet(ALPACA), "README.md": b"x"},
        "HuggingFaceH4/deita-10k-v0-sft": {
            "data/train_sft-00000-of-00002.parquet": as_parquet(chats),
            "data/train_sft-00001-of-00002.parquet": as_parquet(chats),
            "data/test_sft-00000-of-00001.parquet": as_parquet(chats[:1]),
            "data/train_gen-00000-of-00001.parquet": b"not wanted",
        },
        "GAIR/lima": {"train.jsonl": as_lines(*[{"conversations": TURNS, "source": "x"}] * 20), "lima.py": b""},
        "files/alpaca": {"alpaca.json": json.dumps(ALPACA).encode()},
        "files/longform": {"train.json": json.dumps(texts * 3).encode(), "val.json": json.dumps(texts).encode()},
        "files/flan": {
            f"{split}/{SUBSET}_{split}.jsonl": as_lines({"inputs": "In", "targets": "Out", "task": "t"})
            for split in ("train", "test")
        },
    }
    with hub_for_tests(repos, tmp_path, monkeypatch) as stub:
        yield stub


def url(stub: HubStub, repo: str, name: str = "") -> str:
    return f"{stub.url}/{repo}/resolve/{COMMIT}/{name}".rstrip("/")


def make(name: str, stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> InstructionData:
    monkeypatch.setattr("litgpt.data.longform._URL", url(stub, "files/longform"))
    address = url(stub, "files/alpaca", "alpaca.json")
    modules: dict[str, Any] = {
        "Alpaca": lambda: Alpaca(file_url=address, val_split_fraction=0.1),
        "AlpacaGPT4": lambda: AlpacaGPT4(file_url=address, val_split_fraction=0.1),
        "Alpaca2k": lambda: Alpaca2k(val_split_fraction=0.1),
        "Deita": lambda: Deita(),
        "Deita turns": lambda: Deita(include_multiturn_conversations=True),
        "LIMA": lambda: LIMA(),
        "LIMA turns": lambda: LIMA(include_multiturn_conversations=True),
        "LongForm": lambda: LongForm(),
        "FLAN": lambda: FLAN(subsets=SUBSET, url=url(stub, "files/flan")),
    }
    data: InstructionData = modules[name]()
    data.num_workers = 0
    return data


# Module -> samples to train on, samples held out, what is learnt of the first sample
MODULES = {
    "Alpaca": (18, 2, None),
    "AlpacaGPT4": (18, 2, None),
    "Alpaca2k": (18, 2, None),
    "Deita": (6, 1, "Hello</s>"),
    "Deita turns": (6, 1, "HelloBye</s>"),
    "LIMA": (18, 2, "Hello</s>"),
    "LIMA turns": (18, 2, "HelloBye</s>"),
    "LongForm": (3, 1, "a text</s>"),
    "FLAN": (1, 1, "Out</s>"),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "tokenizer"))
    n_train, n_val, learnt = MODULES[name]
    for attempt in range(2):
        data = make(name, hub, monkeypatch)
        data.mask_prompt = True
        data.connect(tokenizer, batch_size=2)
        data.prepare_data()
        data.setup()
        assert data.train_dataset is not None
        assert data.val_dataset is not None
        assert (len(data.train_dataset), len(data.val_dataset)) == (n_train, n_val)
        sample = data.train_dataset[0]
        text = tokenizer.decode(sample["labels"][sample["labels"] != -100], skip_special_tokens=False)
        assert text == (learnt or f"{data.train_dataset.data[0]['output']}</s>")
        assert tokenizer.decode(data.train_dataset.prompt(0)).startswith("Below is an instruction")
        assert sum(len(batch["input_ids"]) for batch in data.train_dataloader()) == n_train
        if attempt == 0:
            requests = len(hub.requests)
    assert len(hub.requests) == requests  # nothing is fetched again, not even the list of files
    assert not any("train_gen" in path or "README" in path for _, path, _, _ in hub.requests)


@pytest.mark.parametrize("name", ["Alpaca", "Alpaca2k", "LIMA"])
def test_without_a_network(name: str, hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_endpoint(monkeypatch, "http://127.0.0.1:9")
    set_offline(monkeypatch)
    with pytest.raises(UserError, match=r"or put the files into .*data.* by hand"):
        make(name, hub, monkeypatch).prepare_data()
    # files that are put there are enough
    folder = {"Alpaca": "alpaca", "Alpaca2k": "alpaca2k", "LIMA": "lima"}[name]
    file = {"Alpaca": Alpaca().file_name, "Alpaca2k": Alpaca2k().file_name, "LIMA": "train.jsonl"}[name]
    content = as_lines({"conversations": TURNS}) if name == "LIMA" else json.dumps(ALPACA).encode()
    (tmp_path / "data" / folder / file).write_bytes(content)
    data = make(name, hub, monkeypatch)
    data.connect(Tokenizer(write_tokenizer(tmp_path / "tokenizer")))
    data.prepare_data()
    data.setup()
    assert data.train_dataset is not None
    assert len(data.train_dataset) == (1 if name == "LIMA" else 18)


def test_a_download_that_broke_goes_on(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.drops["alpaca.json"] = 1
    data = make("Alpaca", hub, monkeypatch)
    data.prepare_data()
    assert len(data.read()[0]) == 20
    assert len(hub.gets("alpaca.json")) == 2
    assert not Path("data/alpaca/.incomplete").exists()


def test_refused(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.refuse["GAIR/lima"] = (403, "GatedRepo")
    with pytest.raises(UserError, match=r"datasets/GAIR/lima is gated.*HF_TOKEN"):
        make("LIMA", hub, monkeypatch).prepare_data()
    with pytest.raises(UserError, match="does not exist"):
        Deita(repo_id="no/where").prepare_data()
    del hub.refuse["GAIR/lima"]
    with pytest.raises(UserError, match=r"has no file \*.parquet"):
        Alpaca2k(repo_id="GAIR/lima").prepare_data()
    with pytest.raises(UserError, match="it was not found"):
        Alpaca(file_url=url(hub, "files/alpaca", "nothing.json")).prepare_data()


def test_subsets_of_flan() -> None:
    with pytest.raises(UserError, match=r"no subset 'aeslc' \(did you mean aeslc_10templates"):
        FLAN(subsets="aeslc")
    assert FLAN(subsets=f"{SUBSET}, wsc_10templates")._files("test") == [
        "aeslc_10templates_test.jsonl",
        "wsc_10templates_test.jsonl",
    ]
    assert len(FLAN()._files("train")) == 66
