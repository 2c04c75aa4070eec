# Licensed under the Apache License 2.0, see the LICENSE file.

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import litgpt.api
from litgpt import LLM
from litgpt.errors import UserError
from litgpt.generate import engine as engine_module
from litgpt.generate.types import Result
from litgpt.model import GPT
from litgpt.prompts import PromptStyle
from tests.tiny_text import EOS, VOCAB_SIZE, ScriptedModel, tiny_config, write_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LitGPT folder with a random model and the tiny tokenizer."""
    torch.manual_seed(0)
    folder = write_tokenizer(tmp_path_factory.mktemp("checkpoint"))
    model = GPT(tiny_config())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    torch.save(model.state_dict(), folder / "lit_model.pth")
    model.config.save(folder / "model_config.yaml")
    return folder


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM.load(checkpoint, device="cpu", precision="32-true")


def scripted(llm: LLM, answer: list[int], **kwargs: Any) -> Any:
    """Generate with a model that is made to say `answer`."""
    model: Any = ScriptedModel([[0] * len(encoded(llm, "Hi")) + answer])
    own, llm.model = llm.model, model
    try:
        return llm.generate("Hi", temperature=0, **kwargs)
    finally:
        llm.model = own


def encoded(llm: LLM, prompt: str) -> list[int]:
    return llm.tokenizer.encode(llm.prompt_style.apply(prompt), bos=llm.prompt_style.bos).tolist()


def test_signatures_are_those_people_use() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(LLM.load)[:5] == ["model", "init", "tokenizer_dir", "access_token", "distribute"]
    assert names(LLM.generate)[1:9] == [
        "prompt",
        "sys_prompt",
        "max_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "return_as_token_ids",
        "stream",
    ]
    defaults = {name: p.default for name, p in inspect.signature(LLM.generate).parameters.items()}
    assert [defaults[n] for n in names(LLM.generate)[2:9]] == [None, 50, 1.0, None, 1.0, False, False]
    assert names(LLM.distribute)[1:] == [
        "accelerator",
        "devices",
        "precision",
        "quantize",
        "generate_strategy",
        "fixed_kv_cache_size",
    ]


# Loading


def test_load_names_what_does_not_exist(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="nothing-like-this"):
        LLM.load("nothing-like-this", init="random", tokenizer_dir=checkpoint)
    with pytest.raises(FileNotFoundError, match="not/here/at/all"):
        LLM.load("not/here/at/all")
    with pytest.raises(FileNotFoundError, match="no-folder"):
        LLM.load("pythia-14m", init="random", tokenizer_dir="no-folder")
    with pytest.raises(UserError, match="no-such-kind"):
        LLM.load(checkpoint, kv_cache="no-such-kind")
    with pytest.raises(UserError, match="init must be"):
        LLM.load(checkpoint, init="other")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="tokenizer"):
        LLM.load("pythia-14m", init="random")


def test_random_model(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(litgpt.api.Config, "from_name", lambda name: tiny_config(name=name))
    llm = LLM.load("tiny", init="random", tokenizer_dir=checkpoint, device="cpu")
    assert isinstance(llm.generate("Hi", max_new_tokens=5), str)
    llm.save(tmp_path / "saved")
    again = LLM.load(tmp_path / "saved", device="cpu")
    assert again.generate("Hi", temperature=0) == llm.generate("Hi", temperature=0)


def test_the_model_can_be_placed_later(checkpoint: Path, llm: LLM) -> None:
    later = LLM.load(checkpoint, distribute=None)
    for call in (lambda: later.generate("Hi"), lambda: later(torch.tensor([[1]])), later.state_dict):
        with pytest.raises(UserError, match="not loaded"):
            call()
    later.distribute(accelerator="cpu", devices=1, precision="32-true")
    assert later.generate("Hi", temperature=0) == llm.generate("Hi", temperature=0)
    later.distribute("cpu", precision="bf16-true")
    assert later.model is not None
    assert next(later.model.parameters()).dtype == torch.bfloat16
    assert isinstance(later.generate("Hi", max_new_tokens=3), str)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_precisions(checkpoint: Path, precision: str) -> None:
    llm = LLM.load(checkpoint, device="cpu", precision=precision)
    assert len(llm.generate("Hi", max_new_tokens=6, seed=1, return_as_token_ids=True)) <= 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accelerator": "tpu"}, "tpu"),
        ({"devices": 2}, "one device"),
        ({"devices": [0, 1]}, "one device"),
        ({"quantize": "nf4"}, "nf4"),
        ({"accelerator": "cpu", "precision": "bf16-mixed", "quantize": "bnb.nf4"}, "bnb.nf4 .* bf16-mixed"),
        ({"generate_strategy": "sequential"}, "not available yet"),
        ({"accelerator": "cpu", "fixed_kv_cache_size": 65}, "65 .* 64"),
        ({"accelerator": "cpu", "precision": "12-true"}, "12-true"),
    ],
)
def test_distribute_says_what_is_not_there(checkpoint: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LLM.load(checkpoint, distribute=None).distribute(**settings)


@pytest.mark.parametrize(("size", "lengths"), [(20, [20, 20]), ("max_model_supported", [64, 64]), (None, [8, 10])])
def test_fixed_cache_size(checkpoint: Path, size: Any, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    from_config = engine_module.KVCache.from_config

    def remember(*args: Any, **kwargs: Any) -> Any:
        if kwargs["device"] != "meta":  # not the estimate
            made.append(kwargs["max_length"])
        return from_config(*args, **kwargs)

    monkeypatch.setattr(engine_module.KVCache, "from_config", remember)
    llm = LLM.load(checkpoint, distribute=None, prompt_style="raw")
    llm.distribute("cpu", precision="32-true", fixed_kv_cache_size=size)
    for prompt in ("a", "abc"):
        llm.generate(prompt, max_new_tokens=6)
    assert made == lengths


def test_a_refused_cache_size_changes_nothing(checkpoint: Path) -> None:
    llm = LLM.load(checkpoint, device="cpu")
    for size in (0, 65):
        with pytest.raises(UserError, match=f"{size} .* 64"):
            llm.distribute("cpu", fixed_kv_cache_size=size)
    assert llm.fixed_kv_cache_size is None
    assert isinstance(llm.generate("Hi", max_new_tokens=2), str)


# Generating


def test_generate_returns_text(llm: LLM) -> None:
    result = llm.generate("Hi", max_new_tokens=12, seed=3, return_details=True)
    assert isinstance(result, Result)
    assert result.prompt_tokens == len(encoded(llm, "Hi"))
    ids = llm.generate("Hi", max_new_tokens=12, seed=3, return_as_token_ids=True)
    assert ids.tolist() == result.token_ids
    assert ids.dtype == torch.int64
    assert llm.generate("Hi", max_new_tokens=12, seed=3) == result.text == llm.tokenizer.decode(ids)
    assert len(set(llm.generate(["Hi"] * 3, max_new_tokens=12, seed=3))) == 1


def test_stream_equals_the_whole(llm: LLM) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 30, "seed": 5}
    pieces = list(llm.generate("Hi", stream=True, **settings))
    assert all(isinstance(piece, str) and piece for piece in pieces)
    assert "".join(pieces) == llm.generate("Hi", **settings)
    tokens = list(llm.generate("Hi", stream=True, return_as_token_ids=True, **settings))
    assert torch.equal(torch.cat(tokens), llm.generate("Hi", return_as_token_ids=True, **settings))
    with llm.generate("Hi", stream=True, return_details=True, **settings) as stream:
        assert "".join(event.text for event in stream) == stream.results[0].text


def test_two_streams(llm: LLM) -> None:
    prompts = ["What is", "nothing"]
    alone = [list(llm.generate(p, stream=True, seed=2, max_new_tokens=9)) for p in prompts]
    live = [llm.generate(p, stream=True, seed=2, max_new_tokens=9) for p in prompts]
    turns = [[next(s, None) for s in live] for _ in range(10)]
    assert [[turn[i] for turn in turns if turn[i] is not None] for i in range(2)] == alone


def test_a_list_of_requests(llm: LLM) -> None:
    prompts = ["one", "a longer request", ""]
    settings: dict[str, Any] = {"max_new_tokens": 8, "seed": 1}
    assert llm.generate(prompts, **settings) == [llm.generate(p, **settings) for p in prompts]
    results = llm.generate(prompts, return_details=True, logprobs=1, **settings)
    assert [len(r.logprobs) == len(r.token_ids) for r in results] == [True] * 3
    assert llm.generate([], **settings) == []
    with pytest.raises(UserError, match="one request"):
        llm.generate(prompts, stream=True)
    with pytest.raises(UserError, match="list of messages"):
        llm.generate(["one", {"role": "user", "content": "two"}])  # type: ignore[list-item]


@pytest.mark.parametrize("prompt", [None, 5, b"text", {"role": "user", "content": "Hi"}, iter(["one", "two"])])
def test_other_things_are_no_prompts(llm: LLM, prompt: Any) -> None:
    with pytest.raises(UserError, match="list of messages"):
        llm.generate(prompt, max_new_tokens=1)


def test_messages_are_one_conversation(llm: LLM) -> None:
    def n_prompt(prompt: Any, **kwargs: Any) -> int:
        result = llm.generate(prompt, max_new_tokens=0, return_details=True, **kwargs)
        assert isinstance(result, Result)
        return result.prompt_tokens

    question = {"role": "user", "content": "Hi"}
    system = {"role": "system", "content": "Be kind"}
    assert n_prompt([question]) == n_prompt("Hi")
    assert n_prompt([system, question]) == n_prompt("Hi", sys_prompt="Be kind") > n_prompt("Hi")


def test_ends(llm: LLM) -> None:
    answer = [*b"one END two", EOS, *b"more"]
    assert scripted(llm, answer) == "one END two"
    assert scripted(llm, answer, stop="END") == "one "
    assert scripted(llm, answer, stop=["two", "END"]) == "one "
    assert scripted(llm, answer, max_new_tokens=3, return_details=True).finish_reason == "length"
    assert "".join(scripted(llm, answer, stop=["END"], stream=True)) == "one "


def test_bad_settings_are_named_at_the_call(llm: LLM) -> None:
    with pytest.raises(UserError, match=r"max_new_tokens.*-3"):
        llm.generate("Hi", max_new_tokens=-3)
    with pytest.raises(UserError, match=r"top_p.*2"):
        llm.generate("Hi", top_p=2.0, stream=True)
    with pytest.raises(UserError, match=r"\d+ tokens, .* 64"):
        llm.generate("x" * 100, stream=True)


def test_benchmark_counts_one_generation(llm: LLM) -> None:
    text, measures = llm.benchmark(num_iterations=3, prompt="Hi", max_new_tokens=9, seed=1)
    result = llm.generate("Hi", max_new_tokens=9, seed=1, return_details=True)
    assert text == result.text
    assert measures["Tokens generated"] == [len(result.token_ids)] * 3
    assert all(len(values) == 3 for values in measures.values())
    for total, first, n, rate in zip(
        measures["Seconds total"],
        measures["Seconds to first token"],
        measures["Tokens generated"],
        measures["Inference speed in tokens/sec"],
        strict=True,
    ):
        assert 0 < first <= total
        assert rate == pytest.approx(n / total)
    assert llm.benchmark(prompt="Hi", max_new_tokens=9, seed=1, stream=True)[0] == text
    with pytest.raises(UserError, match="num_iterations"):
        llm.benchmark(0, prompt="Hi")


# Training and keeping


def test_forward(llm: LLM) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    logits = llm(ids)
    assert logits.shape == (2, 4, VOCAB_SIZE)
    targets = ids.clone()
    targets[:, :2] = -100
    again, loss = llm(ids, targets)
    assert torch.equal(again, logits)
    expected = -logits.log_softmax(-1)[:, 1:-1].gather(2, ids[:, 2:, None]).mean()
    torch.testing.assert_close(loss, expected)
    _, shapes = llm(ids, targets, loss_fn=lambda x, y: (x.shape, y.shape))
    assert shapes == ((2, 3, VOCAB_SIZE), (2, 3))


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_logits_and_loss_are_not_in_half_precision(checkpoint: Path, llm: LLM, precision: str) -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    logits, loss = LLM.load(checkpoint, device="cpu", precision=precision)(ids, ids)
    assert logits.dtype == loss.dtype == torch.float32
    assert not torch.equal(logits, llm(ids))  # but computed in it
    torch.testing.assert_close(loss, llm(ids, ids)[1], rtol=0.05, atol=0.05)


def test_save_and_load(llm: LLM, tmp_path: Path) -> None:
    llm.save(tmp_path)
    for name in ("lit_model.pth", "model_config.yaml", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).is_file()
    again = LLM.load(tmp_path, device="cpu", precision="32-true")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in llm.state_dict().items())
    assert again.generate("Hi", seed=4) == llm.generate("Hi", seed=4)


def test_save_names_the_prompt_style(llm: LLM, tmp_path: Path) -> None:
    """By its class; the checkpoint's own template is what is used without the file, and LitGPT has no name for it."""
    llm.save(tmp_path, prompt_style=PromptStyle.from_name("alpaca"))
    written = yaml.safe_load((tmp_path / "prompt_style.yaml").read_text(encoding="utf-8"))
    assert written == {"class_path": "litgpt.prompts.Alpaca"}
    llm.save(tmp_path)
    assert not (tmp_path / "prompt_style.yaml").exists()


@pytest.mark.parametrize("part", ["Config.save", "save_prompt_style"])
def test_interrupted_save_is_recognised(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"litgpt.api.{part}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.save(tmp_path)
    with pytest.raises(UserError, match="half written"):
        LLM.load(tmp_path)
    llm.save(tmp_path)
    assert LLM.load(tmp_path, device="cpu").config == llm.config


@pytest.mark.parametrize("wrapped", [True, False])
def test_trainer_setup(checkpoint: Path, llm: LLM, tmp_path: Path, wrapped: bool) -> None:
    trained = LLM.load(checkpoint, distribute=None)
    if wrapped:
        state = {f"llm.{name}": tensor + 1 for name, tensor in llm.state_dict().items()}
        torch.save({"state_dict": state, "epoch": 1}, tmp_path / "trainer.ckpt")
        trained.trainer_setup(trainer_ckpt=tmp_path / "trainer.ckpt")
    else:
        trained.trainer_setup()
    assert trained.model is not None
    assert trained.model.training
    for name, tensor in llm.state_dict().items():
        assert torch.equal(trained.state_dict()[name], tensor + wrapped)
    _, loss = trained(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 3]]))
    loss.backward()
    assert all(p.grad is not None for p in trained.parameters())


def test_trainer_setup_names_a_bad_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    llm = LLM.load(checkpoint, distribute=None)
    with pytest.raises(UserError, match="does not exist"):
        llm.trainer_setup(tmp_path / "none.ckpt")
    (tmp_path / "bad.ckpt").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot read"):
        llm.trainer_setup(tmp_path / "bad.ckpt")


def test_prefix_cache(checkpoint: Path) -> None:
    llm = LLM.load(checkpoint, device="cpu", precision="32-true", prefix_cache_bytes=2**24)
    assert llm.prefix_store is not None
    answers = [llm.generate("hello", max_new_tokens=5, temperature=0.0, return_as_token_ids=True) for _ in range(2)]
    assert torch.equal(*answers)
    assert llm.prefix_store.stats.hits == 1
    llm.distribute(accelerator="cpu", precision="bf16-true")
    assert len(llm.prefix_store) == 0
