# Licensed under the Apache License 2.0, see the LICENSE file.

"""The finetuning commands, from the command line to the folders they leave."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from litgpt.__main__ import main
from litgpt.checkpoint.convert import load_model
from litgpt.cli import build_parser, join_class_options
from litgpt.constants import is_available
from litgpt.data import LIMA
from litgpt.finetune.full import setup
from litgpt.model import GPT
from litgpt.train.state import describe_arguments
from tests.tiny_training import rows, write_checkpoint

FILES = {
    "full": "lit_model.pth",
    "lora": "lit_model.pth.lora",
    "adapter": "lit_model.pth.adapter",
    "adapter_v2": "lit_model.pth.adapter_v2",
}
METHODS = list(FILES)
COMMON = (
    *("--train.global_batch_size", "8", "--train.micro_batch_size", "2", "--optimizer", "AdamW", "--optimizer.lr"),
    *("0.01", "--eval.max_new_tokens", "3", "--eval.interval", "2", "--data.num_workers", "0"),
    *("--train.lr_warmup_steps", "2", "--data.val_split_fraction", "0.1"),
)
EXTRA = {
    "full": (),
    "lora": ("--lora_dropout", "0.1", "--lora_r", "2"),
    "adapter": ("--adapter_start_layer", "1", "--adapter_prompt_length", "3"),
    "adapter_v2": ("--adapter_start_layer", "1", "--adapter_prompt_length", "3"),
}
Command = Callable[..., Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, and what to train it on."""
    folder = write_checkpoint(tmp_path_factory.mktemp("base") / "tiny")
    records = [{"instruction": f"{i}+{i}?", "input": "", "output": str(2 * i)} for i in range(30)]
    (folder.parent / "data.json").write_text(json.dumps(records), encoding="utf-8")
    return folder


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Command:
    """Run a finetuning command in this process; returns the output folder."""

    def call(method: str, *args: str, name: str = "out") -> Path:
        main(arguments(base, tmp_path / name, method, *args))
        return tmp_path / name

    return call


def arguments(base: Path, out: Path, method: str, *args: str) -> list[str]:
    data = ("--data", "JSON", "--data.json_path", str(base.parent / "data.json"))
    return [f"finetune_{method}", str(base), "--out_dir", str(out), *data, *COMMON, *EXTRA[method], *args]


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def refusal(capsys: pytest.CaptureFixture[str], run: Command, *args: Any, code: int = 1) -> str:
    with pytest.raises(SystemExit) as left:
        run(*args)
    assert left.value.code == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2].startswith("error: ")
    assert lines[-1].startswith("hint: ")
    return "\n".join(lines[-2:])


@pytest.mark.parametrize("method", METHODS)
def test_folders(run: Command, base: Path, method: str) -> None:
    out = run(method, "--train.epochs", "1", "--train.save_interval", "2", "--train.max_norm", "1.0")
    drawn = {"loss.png"} if is_available("matplotlib") else set()
    assert {path.name for path in out.iterdir()} == {"logs", "step-000002", "step-000004", "final", *drawn}
    beside = {"model_config.yaml", "hyperparameters.yaml", "tokenizer.json", "tokenizer_config.json", "config.json"}
    merged = {"lit_model.pth", "merged_from.json"} if method == "lora" else set()
    state = set() if method == "full" else {"train_state.pth"}
    assert {p.name for p in (out / "final").iterdir()} == {FILES[method], "manifest.json", *beside, *merged}
    assert {p.name for p in (out / "step-000002").iterdir()} == {FILES[method], "manifest.json", *beside, *state}
    learnt = read(out / "final" / FILES[method])
    assert set(learnt) == {"model"}
    before = read(base / "lit_model.pth")
    if method == "full":
        step = read(out / "step-000002" / "lit_model.pth")
        assert {"model", "optimizer", "scheduler", "iter_num", "step_count"} <= set(step)
        assert learnt["model"].keys() == before.keys()
        assert not torch.equal(learnt["model"]["lm_head.weight"], before["lm_head.weight"])
    else:
        assert learnt["model"].keys().isdisjoint(k for k in before if "norm_" not in k and "ln_f" not in k)
    losses = [float(row["loss"]) for row in rows(out) if row["loss"]]
    assert len(losses) == 4  # 27 samples, the last step has 3
    assert all(float(row["grad_norm"]) > 0 for row in rows(out) if row["loss"])
    assert len([row for row in rows(out) if row["val_loss"]]) == 2


@pytest.mark.parametrize("method", METHODS)
def test_flags_that_others_refuse(run: Command, method: str) -> None:
    """`--optimizer NAME --optimizer.lr`, max_norm, lr_warmup_fraction, min_lr and max_time, for every method."""
    flags = ("--train.lr_warmup_fraction", "0.5", "--train.min_lr", "0.002", "--train.max_norm", "0.01")
    out = run(method, "--train.epochs", "2", *flags, "--train.max_time", "1000", "--train.lr_schedule", "linear")
    rates = [float(row["learning_rate"]) for row in rows(out) if row["loss"]]
    assert rates[:2] == [0.005, 0.01]
    assert rates[2:] == pytest.approx([0.01 - 0.008 * i / 6 for i in range(6)])
    out = run(method, "--train.epochs", "2", "--train.max_time", "0", name="other")
    assert [row for row in rows(out) if row["loss"]] == []


def test_lora_is_merged(run: Command, base: Path) -> None:
    """The merged model is the base plus the product of the two small matrices, written out."""
    out = run("lora", "--train.epochs", "1", "--lora_key", "true", "--lora_projection", "true")
    merged, before = read(out / "final" / "lit_model.pth"), read(base / "lit_model.pth")
    assert merged.keys() == before.keys()
    lora = read(out / "final" / "lit_model.pth.lora")["model"]
    name = "transformer.h.1.attn.proj"
    update = lora[f"{name}.lora_B"] @ lora[f"{name}.lora_A"] * (16 / 2)
    assert torch.allclose(merged[f"{name}.weight"], before[f"{name}.weight"] + update, atol=1e-6)
    assert not torch.equal(merged[f"{name}.weight"], before[f"{name}.weight"])
    assert torch.equal(merged["lm_head.weight"], before["lm_head.weight"])
    # A second run into the same folder does not keep the merge of the first
    out = run("lora", "--train.epochs", "2", "--lora_projection", "true", "--overwrite", "true")
    assert not torch.equal(read(out / "final" / "lit_model.pth")[f"{name}.weight"], merged[f"{name}.weight"])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows ends processes in another way")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("method", METHODS)
def test_killed_and_resumed_is_the_straight_run(
    run: Command, base: Path, tmp_path: Path, method: str, workers: int
) -> None:
    """Bit for bit: the final weights and the rows of the metrics, those past the checkpoint cut."""
    flags = ("--train.epochs", "12", "--train.save_interval", "3", "--train.neftune_alpha", "5", "--data.num_workers")
    flags = (*flags, str(workers), "--train.keep_last", "2", "--eval.interval", "5")
    straight = run(method, *flags, name="straight")
    out = tmp_path / "killed"
    kill_at = random.Random(f"{method} {workers}").randint(4, 40)
    command = [sys.executable, "-m", "litgpt", *arguments(base, out, method, *flags)]
    # As many threads as here: sums of another number of parts are rounded otherwise
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True, env=env)
    metrics, deadline = out / "logs/csv/version_0/metrics.csv", time.monotonic() + 240
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > kill_at):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)  # with the processes that read data
    process.wait()
    assert not (out / "final").exists()
    resumed = run(method, *flags, "--resume", "auto", name="killed")
    found, expected = (read(folder / "final" / FILES[method])["model"] for folder in (resumed, straight))
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert rows(resumed) == rows(straight)
    assert sorted(p.name for p in resumed.glob("step-*")) == ["step-000045", "step-000048"]


def test_resume_takes_a_folder_a_file_or_the_latest(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--train.epochs", "1", "--train.save_interval", "2")
    assert "there is nothing to resume" in refusal(capsys, run, "full", *flags, "--resume", "true")
    out = run("full", *flags, "--resume", "auto")  # nothing there: starts anew
    expected = read(out / "final" / "lit_model.pth")["model"]
    for resume in ("true", str(out / "step-000002"), str(out / "step-000002" / "lit_model.pth"), str(out)):
        run("full", *flags, "--resume", resume)
        found = read(out / "final" / "lit_model.pth")["model"]
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert len([row for row in rows(out) if row["loss"]]) == 4
    other = run("full", *flags, "--resume", str(out / "step-000002"), name="other")
    assert len([row for row in rows(other) if row["loss"]]) == 2  # the rows before are in the other folder
    assert "no step folder" in refusal(capsys, run, "full", *flags, "--resume", str(out / "final"))
    message = refusal(capsys, run, "full", *flags, "--resume", "auto", "--train.global_batch_size", "4")
    assert "global_batch_size 8 -> 4" in message


def test_a_half_written_step_is_passed_over(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--train.epochs", "1", "--train.save_interval", "1")
    out = run("lora", *flags)
    manifest = out / "step-000004" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
    run("lora", *flags, "--resume", "auto")
    assert f"going on from {out / 'step-000003'}" in capsys.readouterr().err
    file = out / "step-000002" / FILES["lora"]
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "changed or damaged" in refusal(capsys, run, "lora", *flags, "--resume", str(file))


def test_a_used_folder_is_refused(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    out = run("full", "--train.max_steps", "1")
    message = refusal(capsys, run, "full", "--train.max_steps", "1")
    assert "holds an earlier run: final" in message
    assert "--overwrite true" in message
    (out / "notes.txt").write_text("mine")
    run("full", "--train.max_steps", "1", "--overwrite", "true")
    assert (out / "notes.txt").read_text() == "mine"
    assert sorted(p.name for p in (out / "logs" / "csv").iterdir()) == ["version_0", "version_1"]


def test_no_secret_is_written(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    out = run("full", "--train.max_steps", "1", "--access_token", "hf_verysecret")
    written = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert b"hf_verysecret" not in written
    captured = capsys.readouterr()
    assert "hf_verysecret" not in captured.out + captured.err


def test_hyperparameters_run_the_same_again(run: Command, base: Path, tmp_path: Path) -> None:
    out = run("lora", "--train.epochs", "1")
    file = out / "final" / "hyperparameters.yaml"
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert settings["lora_r"] == 2
    assert settings["optimizer"] == {"class_path": "AdamW", "init_args": {"lr": 0.01}}
    assert settings["data"]["class_path"] == "litgpt.data.JSON"
    main(["finetune", "--config", str(file), str(base), "--out_dir", str(tmp_path / "again")])
    found, expected = (read(f / "final" / FILES["lora"])["model"] for f in (tmp_path / "again", out))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_description_of_arguments() -> None:
    described = describe_arguments({"a": Path("x") / "y", "access_token": "t", "b": (1, 2.5), "c": {"d": None}})
    assert described == {"a": "x/y", "b": [1, 2.5], "c": {"d": None}}
    assert "hf_verysecret" not in str(describe_arguments({"data": LIMA(access_token="hf_verysecret")}))


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
def test_precision(run: Command, base: Path, tmp_path: Path, method: str, precision: str) -> None:
    """What learns in LoRA is kept in 32 bits; files of whole models keep the dtype of the checkpoint."""
    half = {name: tensor.bfloat16() for name, tensor in read(base / "lit_model.pth").items()}
    torch.save(half, base / "lit_model.pth")
    (base / "manifest.json").unlink(missing_ok=True)
    out = run(method, "--train.max_steps", "2", "--precision", precision)
    whole = read(out / "final" / "lit_model.pth")
    whole = whole.get("model", whole)
    assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}
    if method == "lora":
        learnt = read(out / "final" / FILES["lora"])["model"]
        assert {tensor.dtype for tensor in learnt.values()} == {torch.float32}


@pytest.mark.parametrize("method", METHODS)
def test_under_a_kv_cache(run: Command, method: str) -> None:
    """A cache that keeps everything changes nothing but memory and time."""
    # AdamW would make a step of a rounding error
    flags = ("--train.max_steps", "3", "--precision", "32-true", "--optimizer", "SGD", "--optimizer.lr", "0.1")
    straight, cached = run(method, *flags), run(method, *flags, "--kv_cache", "dense", "--chunk_size", "8", name="b")
    found, expected = (read(out / "final" / FILES[method])["model"] for out in (cached, straight))
    dropout = method == "lora"  # drawn in other places of the chunks
    for name, tensor in expected.items():
        if not dropout:
            torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)
    losses = [[float(row["loss"]) for row in rows(out) if row.get("loss")] for out in (straight, cached)]
    assert losses[0] == pytest.approx(losses[1], abs=0.1 if dropout else 1e-4)
    narrow = run(method, *flags, "--kv_cache", "window:4", "--chunk_size", "8", name="c")
    assert [float(row["loss"]) for row in rows(narrow) if row.get("loss")] != losses[1]


@pytest.mark.parametrize("mode", ["block", "selective"])
@pytest.mark.parametrize("method", METHODS)
def test_checkpointed_activations_change_nothing(run: Command, method: str, mode: str) -> None:
    flags = ("--train.max_steps", "3", "--precision", "32-true")
    straight, again = run(method, *flags), run(method, *flags, "--train.checkpoint_activations", mode, name="b")
    found, expected = (read(out / "final" / FILES[method])["model"] for out in (again, straight))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("quantize", ["bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "torchao.int8"])
@pytest.mark.parametrize("method", ["lora", "adapter", "adapter_v2"])
def test_on_a_quantized_base(run: Command, method: str, quantize: str) -> None:
    pytest.importorskip(quantize.split(".")[0].replace("bnb", "bitsandbytes"))
    out = run(method, "--train.epochs", "4", "--quantize", quantize, "--precision", "32-true")
    losses = [float(row["loss"]) for row in rows(out) if row.get("loss")]
    assert method == "adapter" or losses[-1] < losses[0] - 0.1  # its gate opens slowly
    first = {"lora": "lora_B", "adapter": "gating_factor", "adapter_v2": "adapter_bias"}[method]
    learnt = {name: t for name, t in read(out / "final" / FILES[method])["model"].items() if name.endswith(first)}
    assert learnt
    assert all(tensor.abs().max() > 1e-3 for tensor in learnt.values())  # all were zero


def test_frozen_weights_are_held_in_16_bits(base: Path) -> None:
    from litgpt import lora
    from litgpt.train.command import load_for_training
    from litgpt.train.method import Method

    method = Method("lora", lora.GPT, "x", lora.mark_only_lora_as_trainable, lambda model: {})
    settings = {"lora_r": 2, "lora_query": True}
    model = load_for_training(method, base, "bf16-mixed", torch.device("cpu"), config=settings)
    dtypes = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert dtypes == {(False, torch.bfloat16), (True, torch.float32)}


@pytest.mark.parametrize("option", [{"use_dora": True}, {"lora_init": "pissa"}])
def test_what_starts_from_the_weights_is_not_rounded(base: Path, option: dict[str, Any]) -> None:
    """Under 16 bits too, training starts from the base itself."""
    from litgpt import lora
    from litgpt.train.command import load_for_training
    from litgpt.train.method import Method

    method = Method("lora", lora.GPT, "x", lora.mark_only_lora_as_trainable, lambda model: {})
    settings = {"lora_r": 2, "lora_query": True, **option}
    model = load_for_training(method, base, "bf16-mixed", torch.device("cpu"), config=settings)
    for layer in lora.lora_layers(model):
        if layer.active:
            own = torch.cat(layer._updated_parts(layer.holder.weight.float()), dim=-2)
            whole = torch.cat(layer._updated_parts(layer.adapted_weight()), dim=-2)
            torch.testing.assert_close(whole, own, atol=0, rtol=1e-6)


def test_the_result_generates(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    out = run("lora", "--train.epochs", "1")
    capsys.readouterr()
    main(["generate", str(out / "final"), "--prompt", "3+3?", "--max_new_tokens", "4", "--temperature", "0"])
    assert capsys.readouterr().out
    assert isinstance(load_model(out / "final"), GPT)


@pytest.mark.parametrize(
    ("flags", "message", "code"),
    [
        (("--optimizer", "Adamm"), "there is no optimizer 'Adamm'", 1),
        (("--optimizer.momentun", "0.9"), "momentun", 1),
        (("--train.tie_embeddings", "true"), "--train.tie_embeddings is for pretraining", 1),
        (("--devices", "many"), "--devices takes a number", 2),
        (("--lora_query", "false", "--lora_value", "false"), "nothing would be trained", 1),
        (("--train.epochs", "null"), "nothing says when training ends", 1),
        (("--train.max_seq_length", "0"), "--train.max_seq_length must be at least 1", 1),
        (("--quantize", "bnb.int3"), "--quantize", 2),
        (("--kv_cache", "int8"), "a KV cache in int8 has no gradient", 1),
        (("--kv_cache", "ring:3"), "unknown kind of KV cache 'ring:3'", 1),
        (("--kv_cache", "dense", "--chunk_size", "0"), "--chunk_size must be at least 1", 2),
        (("--kv_cache", "dense", "--train.packing", "pack"), "a KV cache cannot hold joined samples", 1),
        (("--kv_cache", "dense", "--precision", "16-mixed"), "use --precision bf16-mixed", 1),
    ],
)
def test_mistakes(
    run: Command, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str, code: int
) -> None:
    assert message in refusal(capsys, run, "lora", *flags, code=code)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--optimizer", "SGD", "--optimizer.lr", "0.5"], {"class_path": "SGD", "init_args": {"lr": 0.5}}),
        (["--optimizer.lr=1e-4"], {"class_path": "AdamW", "init_args": {"lr": 1e-4}}),
        (
            ["--optimizer.class_path", "torch.optim.SGD", "--optimizer.init_args.nesterov", "true"],
            {"class_path": "torch.optim.SGD", "init_args": {"nesterov": True}},
        ),
        (
            ["--config", "FILE", "--optimizer.init_args.lr", "0.1"],
            {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1, "betas": [0.9, 0.95]}},
        ),
        (
            ["--config", "FILE", "--optimizer", "SGD", "--optimizer.lr", "1"],
            {"class_path": "SGD", "init_args": {"lr": 1}},
        ),
        (["--optimizer", "SGD"], "SGD"),
    ],
)
def test_options_of_the_optimizer(args: list[str], expected: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 2e-4, betas: [0.9, 0.95]}}\n")
    parser = build_parser("finetune_full", setup)
    argv = join_class_options(parser, ["base", *(str(file) if arg == "FILE" else arg for arg in args)], "optimizer")
    assert parser.parse_args(argv).optimizer == expected
