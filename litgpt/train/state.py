# Licensed under the Apache License 2.0, see the LICENSE file.

"""The folders that training writes, and going on from one of them.

`step-000002/` holds what was learnt so far and the state of the training, `final/` and `best/` only what was learnt;
all hold what it takes to use the model. The order of the data, dropout and the learning rate are functions of the seed
and the number of the step, so the state is the optimizer's, the counters and where the metrics end.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from litgpt.checkpoint.save import FolderWriter, check_manifest, read_manifest
from litgpt.checkpoint.torch_file import load_tensors_only
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.prompts import PromptStyle, save_prompt_style

logger = logging.getLogger(__name__)

STATE_FILE = "train_state.pth"
SECRET = "access_token"  # of a command and of data; never written
_STEP = re.compile(r"step-(\d+)")


@dataclass
class Counters:
    """How far training has come.

    Attributes:
        step: optimizer steps.
        iters: micro-batches of a device.
        tokens: tokens of all devices, padding aside.
        seconds: time spent in training.
        best_loss: the lowest validation loss so far.
        evals_since_best: evaluations since then.
    """

    step: int = 0
    iters: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_loss: float | None = None
    evals_since_best: int = 0


@dataclass(frozen=True)
class Companions:
    """What goes into every folder beside the weights.

    Args:
        config: the plain model's config.
        files: tokenizer and generation settings by name, and `config.json`.
        hyperparameters: the settings of the command, without secrets.
        prompt_style: how prompts are formatted.
        dtype: of the checkpoint; a whole model that is finished is written in it. None: as it was trained.
    """

    config: Config
    files: Mapping[str, bytes]
    hyperparameters: Mapping[str, Any]
    prompt_style: PromptStyle | None
    dtype: torch.dtype | None = None

    def write(self, folder: FolderWriter) -> None:
        """Write all of it."""
        with folder.file("model_config.yaml") as path:
            self.config.save(path)
        for name, content in self.files.items():
            folder.write_bytes(name, content)
        text = yaml.safe_dump(dict(self.hyperparameters), sort_keys=False)
        folder.write_bytes("hyperparameters.yaml", text.encode("utf-8"))
        if self.prompt_style is not None:
            save_prompt_style(self.prompt_style, folder.folder)


def save_folder(
    folder: Path,
    file_name: str,
    model: Mapping[str, Tensor],
    companions: Companions,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write one folder. Interrupted, it says that it is not whole.

    Args:
        folder: where.
        file_name: the file with what was learnt.
        model: its tensors.
        companions: what else belongs there.
        state: what resuming needs; a whole model keeps it in the same file, as LitGPT does.
    """
    content: dict[str, Any] = {"model": dict(model)}
    with FolderWriter(folder) as writer:
        if state is not None and file_name == "lit_model.pth":
            content |= state
        elif state is not None:
            with writer.file(STATE_FILE) as path:
                torch.save(dict(state), path)
        with writer.file(file_name) as path:
            torch.save(content, path)
        companions.write(writer)


def load_folder(folder: Path, file_name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_folder` wrote: the tensors of the model, and the state.

    Raises:
        UserError: the folder is not whole, or it has no state to go on from.
    """
    check_manifest(folder, hashes=True)
    content = load_tensors_only(folder / file_name)
    if "step_count" in content:
        state = content
    elif (folder / STATE_FILE).is_file():
        state = load_tensors_only(folder / STATE_FILE)
    else:
        raise UserError(f"{folder} holds no state of a training", "resume from a step-NNNNNN folder")
    return content["model"], {name: value for name, value in state.items() if name != "model"}


def step_folder(out_dir: Path, step: int) -> Path:
    """`step-000002`."""
    return out_dir / f"step-{step:06d}"


def step_folders(out_dir: Path) -> list[Path]:
    """The step folders that are whole, the latest last."""
    found = [(int(m[1]), path) for path in out_dir.glob("step-*") if (m := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found) if read_manifest(path).get("complete")]


def find_resume(resume: bool | Literal["auto"] | Path | str | None, out_dir: Path) -> Path | None:
    """The step folder to go on from, None to start anew.

    Args:
        resume: False or None: anew. True: the latest of `out_dir`. "auto": the same if there is one. A path: that
            folder, a file in it, or the latest of the output folder at that path.
        out_dir: the output folder.

    Raises:
        UserError: there is none.
    """
    if resume is None or resume is False:
        return None
    if resume is True or str(resume) == "auto":
        found = step_folders(out_dir)
        if found or resume is not True:
            return found[-1] if found else None
        raise UserError(
            f"there is nothing to resume: no whole step folder in {out_dir}",
            "leave --resume out, or use --resume auto",
        )
    path = Path(resume)
    path = path.parent if path.is_file() else path
    found = step_folders(path)
    if not found and not (path.is_dir() and _STEP.fullmatch(path.resolve().name)):
        raise UserError(f"--resume {resume}: there is no step folder", "give a step-NNNNNN folder, or auto")
    return found[-1] if found else path


def claim(out_dir: Path, resuming: bool, overwrite: bool) -> None:
    """Make sure that the output folder may be written to.

    Args:
        out_dir: the folder.
        resuming: the run goes on from a checkpoint.
        overwrite: remove the checkpoints of an earlier run.

    Raises:
        UserError: it holds an earlier run.
    """
    used = [path for path in out_dir.glob("*") if path.name in ("final", "best") or _STEP.fullmatch(path.name)]
    if resuming or not used:
        return
    if not overwrite:
        raise UserError(
            f"{out_dir} holds an earlier run: {', '.join(sorted(path.name for path in used)[:4])}",
            "choose another --out_dir, go on with --resume auto, or replace it with --overwrite true",
        )
    for path in used:
        shutil.rmtree(path)


def keep_latest(out_dir: Path, count: int | None) -> None:
    """Remove all but the latest step folders; None keeps all."""
    if count is not None:
        for folder in step_folders(out_dir)[:-count]:
            shutil.rmtree(folder)


def describe_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a command as plain values for a YAML file that the command reads, without secrets."""
    return {name: _plain(value) for name, value in arguments.items() if name != SECRET}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return value.as_posix()
    if isinstance(value, PromptStyle):
        return _instance(value, value.init_args())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init and f.name != SECRET]
        fields = {name: _plain(getattr(value, name)) for name in names}
        return fields if type(value).__module__ == "litgpt.args" else _instance(value, fields)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if key != SECRET}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _instance(value, {})


def _instance(value: object, init_args: Mapping[str, Any]) -> dict[str, Any]:
    name = type(value).__name__
    package = ".".join(type(value).__module__.split(".")[:2])  # people import from litgpt.data and litgpt.prompts
    public = getattr(import_module(package), name, None) is type(value)
    described: dict[str, Any] = {"class_path": f"{package if public else type(value).__module__}.{name}"}
    return described | ({"init_args": _plain(init_args)} if init_args else {})
