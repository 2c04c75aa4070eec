# Licensed under the Apache License 2.0, see the LICENSE file.

"""The recipes of `config_hub`, and the files that LitGPT 0.5.13 has for the same purpose.

`tests/facts/recipes.yaml` says what those files set. Everything goes through the parser of the real command.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from litgpt.__main__ import COMMANDS
from litgpt.cli import build_parser, load
from tests.test_surface import SURFACE

HUB = Path(__file__).parent.parent / "config_hub"
FACTS: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "facts" / "recipes.yaml").read_text(encoding="utf-8")
)
# LitGPT lets two recipes write to one folder; here the second run would be refused
CHANGED = {
    "finetune/gemma-7b/lora.yaml": {"out_dir": "out/finetune/lora-gemma-7b"},
    "finetune/mistral-7b-v0.2/lora.yaml": {"out_dir": "out/finetune/lora-mistral-7b-v0.2"},
    "finetune/mistral-7b-v0.2/qlora.yaml": {"out_dir": "out/finetune/qlora-mistral-7b-v0.2"},
}
# The fields that the groups of LitGPT 0.5.13 have, which its files spell out
GROUPS = {
    "train": "save_interval log_interval global_batch_size micro_batch_size lr_warmup_steps lr_warmup_fraction epochs "
    "max_tokens max_steps max_time max_seq_length tie_embeddings max_norm min_lr",
    "eval": "interval max_new_tokens max_iters initial_validation final_validation evaluate_example",
    "log": "project run group teamspace metadata log_model save_logs checkpoint_name",
}
DATA = "mask_prompt val_split_fraction prompt_style ignore_index seed num_workers download_dir repo_id"


def command_of(name: str) -> str:
    return "finetune_full" if name.endswith("full.yaml") else "finetune_lora"


@cache
def command_function(command: str) -> Callable[..., Any]:
    return load(COMMANDS[command].target)


def settings(command: str, config: Path) -> dict[str, Any]:
    """What the command's parser makes of a file: all settings, defaults included, under dotted names."""
    parsed = build_parser(command, command_function(command)).parse_args(["--config", str(config)])
    values = flat(parsed.as_dict())
    return {name: value for name, value in values.items() if not name.startswith("config")}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names -> values; paths as text."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value.as_posix() if isinstance(value, Path) else value
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `flat`."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *groups, leaf = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[leaf] = value
    return tree


def spelled_out(name: str) -> dict[str, Any]:
    """A recipe as LitGPT 0.5.13 writes it: every setting of its command, null included."""
    from litgpt.data import Alpaca2k

    surface = SURFACE[command_of(name)][1]
    values: dict[str, Any] = {}
    parameters = inspect.signature(command_function(command_of(name))).parameters
    for parameter in surface:
        default = parameters[parameter].default
        if parameter in GROUPS:
            values |= {f"{parameter}.{field}": getattr(default, field) for field in GROUPS[parameter].split()}
        elif parameter not in ("data", "optimizer", "checkpoint_dir"):
            values[parameter] = default.as_posix() if isinstance(default, Path) else default
    fields = {field.name: field.default for field in dataclasses.fields(Alpaca2k)}
    values |= {f"data.init_args.{field}": fields[field] for field in DATA.split()}
    values = {k: v.as_posix() if isinstance(v, Path) else v for k, v in values.items()}
    return nested(values | FACTS[name])


def test_every_recipe_is_there() -> None:
    found = {path.relative_to(HUB).as_posix() for path in HUB.rglob("*.yaml")}
    assert {name for name in found if name.startswith("finetune/")} == set(FACTS)


@pytest.mark.parametrize("name", FACTS)
def test_settings_are_those_of_litgpt(name: str) -> None:
    found = settings(command_of(name), HUB / name)
    expected = {**FACTS[name], **CHANGED.get(name, {})}
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("name", FACTS)
def test_a_recipe_states_only_differences(name: str, tmp_path: Path) -> None:
    stated = flat(yaml.safe_load((HUB / name).read_text(encoding="utf-8")))
    classes = {key: stated[key] for key in stated if key.endswith("class_path")}
    bare = tmp_path / "bare.yaml"
    data = {key: value for key, value in classes.items() if key.startswith("data.")}
    bare.write_text(yaml.safe_dump(nested({"checkpoint_dir": "x", **data})), encoding="utf-8")
    defaults = settings(command_of(name), bare)
    restated = {key for key, value in stated.items() if key not in classes and defaults.get(key, value) == value}
    assert restated <= {key for key in stated if key.startswith("optimizer.")}  # the parser knows no defaults of those


@pytest.mark.parametrize("name", FACTS)
def test_litgpts_own_file_means_the_same(name: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(spelled_out(name)), encoding="utf-8")
    theirs = {**settings(command_of(name), path), **CHANGED.get(name, {})}
    assert theirs == settings(command_of(name), HUB / name)


def test_two_recipes_never_write_to_one_folder() -> None:
    folders = [yaml.safe_load(path.read_text(encoding="utf-8"))["out_dir"] for path in HUB.rglob("*.yaml")]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("path", sorted(HUB.rglob("*.yaml")), ids=lambda path: path.relative_to(HUB).as_posix())
def test_the_first_line_is_the_command_to_run(path: Path) -> None:
    name = path.relative_to(HUB).as_posix()
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.endswith(f"Run: litgpt {command_of(name)} --config config_hub/{name}")


def test_the_command_gets_objects() -> None:
    from litgpt.args import TrainArgs
    from litgpt.data import Alpaca2k

    parser = build_parser("finetune_lora", command_function("finetune_lora"))
    arguments = parser.instantiate(parser.parse_args(["--config", str(HUB / "finetune/gemma-2b/qlora.yaml")]))
    assert isinstance(arguments["data"], Alpaca2k)
    assert arguments["data"].val_split_fraction == 0.03847
    assert isinstance(arguments["train"], TrainArgs)
    assert (arguments["train"].micro_batch_size, arguments["quantize"]) == (2, "bnb.nf4")


def test_a_setting_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("checkpoint_dir: x\ntrain:\n  epoch: 1\n", encoding="utf-8")
    with pytest.raises(Exception, match="epoch"):
        settings("finetune_lora", path)
