# Licensed under the Apache License 2.0, see the LICENSE file.

"""Two processes learn what one learns; choosing devices and precision; and the loggers, which processes share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from litgpt import constants
from litgpt.args import LogArgs
from litgpt.errors import UsageError, UserError
from litgpt.train.devices import is_divided, make_fabric, pick_training_precision, whole
from litgpt.train.loggers import COLUMNS, MetricsFile, make_logger, next_version
from tests.tiny_training import rows, write_checkpoint


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("base") / "tiny")
    records = [{"instruction": f"{i}+{i}?", "output": str(2 * i)} for i in range(23)]
    (folder.parent / "data.json").write_text(json.dumps(records), encoding="utf-8")
    return folder


def train(base: Path, out: Path, method: str, *args: str) -> Path:
    """Train in a process of its own, on the CPU."""
    command = [sys.executable, "-m", "litgpt", f"finetune_{method}", str(base), "--out_dir", str(out), *args]
    data = ["--data", "JSON", "--data.json_path", str(base.parent / "data.json"), "--data.num_workers", "0"]
    settings = ["--train.global_batch_size", "8", "--train.epochs", "2", "--optimizer.lr", "0.01", "--eval.interval"]
    settings += ["2", "--train.save_interval", "2", "--eval.max_new_tokens", "2", "--train.max_norm", "0.5"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *data, *settings], env=env, capture_output=True, encoding="utf-8", timeout=280)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="gloo on Windows needs its own set-up")
@pytest.mark.parametrize(
    ("method", "strategy", "file", "flags"),
    [
        ("full", "ddp", "lit_model.pth", ()),
        ("full", "fsdp", "lit_model.pth", ()),
        ("lora", "auto", "lit_model.pth.lora", ()),
        ("adapter_v2", "fsdp", "lit_model.pth.adapter_v2", ()),
        ("lora", "ddp", "lit_model.pth.lora", ("--kv_cache", "window:4", "--chunk_size", "8")),
    ],
)
def test_two_processes_equal_one(
    base: Path, tmp_path: Path, method: str, strategy: str, file: str, flags: tuple[str, ...]
) -> None:
    """20 samples in groups of 8: in the tail of 4, and where samples are joined, a process may have nothing to do."""
    extra = (*flags, *(("--lora_dropout", "0") if method == "lora" else ()))
    one = train(base, tmp_path / "one", method, *extra)
    two = train(base, tmp_path / "two", method, *extra, "--devices", "2", "--strategy", strategy)
    a, b = (torch.load(folder / "final" / file, weights_only=True)["model"] for folder in (one, two))
    assert a.keys() == b.keys()
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-4
    for ours, theirs in zip(rows(one), rows(two), strict=True):
        for column in ("loss", "val_loss", "learning_rate", "total_tokens", "grad_norm"):
            assert ours[column] == theirs[column] or float(ours[column]) == pytest.approx(
                float(theirs[column]), abs=2e-5
            )
    # A run of two goes on from its own checkpoint, exactly
    again = train(
        base, two, method, *extra, "--devices", "2", "--strategy", strategy, "--resume", str(two / "step-000002")
    )
    c = torch.load(again / "final" / file, weights_only=True)["model"]
    assert all(torch.equal(b[name], c[name]) for name in b)
    assert len(rows(again)) == len(rows(one))


def test_number_of_devices() -> None:
    for devices in (1, "1"):
        assert make_fabric(devices, 1, "32-true", "auto", partial=True).world_size == 1
    for devices in (0, -1, "all", "1,2"):
        with pytest.raises(UsageError, match="--devices takes a number"):
            make_fabric(devices, 1, "32-true", "auto", partial=True)


def test_precision_of_training() -> None:
    assert pick_training_precision("bf16-true", partial=True) == "bf16-mixed"
    assert pick_training_precision("bf16-true", partial=False) == "bf16-true"
    assert pick_training_precision("16-true", partial=True) == "16-mixed"
    assert pick_training_precision("32", partial=True) == "32-true"
    assert pick_training_precision(None, partial=True) in ("bf16-mixed", "32-true")
    with pytest.raises(UserError, match="unknown precision"):
        pick_training_precision("bf8", partial=True)


def test_what_is_whole_stays_as_it_is() -> None:
    state = {"a": torch.ones(2), "b": [{"c": torch.zeros(1), "d": 3}]}
    assert whole(state)["a"] is state["a"]
    assert not is_divided(torch.nn.Linear(2, 2))


def test_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "csv" / "version_0" / "metrics.csv"
    metrics = MetricsFile(path)
    metrics.write({"step": 1, "loss": 0.5})
    position = metrics.position
    metrics.write({"step": 2, "loss": 0.25})
    with pytest.raises(ValueError, match="fields not in fieldnames"):
        metrics.write({"what": 1})
    MetricsFile(path, position).write({"step": 2, "val_loss": 2.0})
    found = rows(tmp_path, without=())
    assert [row["step"] for row in found] == ["1", "2"]
    assert [row["val_loss"] for row in found] == ["", "2.0"]
    assert list(found[0]) == list(COLUMNS)
    assert next_version(tmp_path / "logs" / "csv").name == "version_1"
    assert next_version(tmp_path / "nothing").name == "version_0"


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_logger_that_is_not_installed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "is_available", lambda module: False)
    with pytest.raises(UserError, match=rf"--logger_name {name} needs the package {name} .*litgpt\[loggers\]"):
        make_logger(name, tmp_path, "test", LogArgs(), resuming=False)


def test_csv_needs_no_logger(tmp_path: Path) -> None:
    assert make_logger("csv", tmp_path, "test", LogArgs(), resuming=False) is None


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    made = make_logger("tensorboard", tmp_path, "test", LogArgs(), resuming=False)
    assert made is not None
    made.log_metrics({"loss": 0.5}, step=3)
    made.finalize("success")
    assert list((tmp_path / "logs" / "tensorboard" / "version_0").glob("events.*"))


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = make_logger("wandb", tmp_path, "test", LogArgs(project="p", run="r", group="g"), resuming=False)
    assert made is not None
    made.log_metrics({"loss": 0.5}, step=3)
    made.finalize("success")
    import wandb

    wandb.finish()
    assert list(tmp_path.glob("logs/wandb/offline-run-*"))


@pytest.mark.slow
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    made = make_logger("mlflow", tmp_path, "test", LogArgs(run="r"), resuming=False)
    assert made is not None
    made.log_metrics({"loss": 0.5}, step=3)
    made.finalize("success")
    assert [path.read_text().split()[1] for path in tmp_path.rglob("metrics/loss")] == ["0.5"]
