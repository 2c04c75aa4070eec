# Licensed under the Apache License 2.0, see the LICENSE file.

"""Compares the models known by name with those of LitGPT 0.5.13: every field, and the names and shapes of all tensors.

    python extensions/compat/compare_configs.py --python path/to/other/bin/python

`--python` is the interpreter of an environment with `litgpt==0.5.13`; this script asks it for its models and compares
them with the ones of the environment that runs the script. Every difference is written out with its reason, or with
none, and then the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("compare_configs")

LAYERS = 2  # of the models whose tensors are compared: the others repeat them

# Runs under both interpreters, so it uses only what both packages have.
DUMP = """
import importlib.metadata, json, sys
import litgpt, torch
from litgpt.config import Config, configs
from litgpt.model import GPT

def tensors(name):
    with torch.device("meta"):
        state = GPT(Config.from_name(name, n_layer={layers})).state_dict()
    return {{key: list(value.shape) for key, value in state.items() if key not in ("cos", "sin")}}

out = {{"file": litgpt.__file__, "version": importlib.metadata.version("litgpt"), "models": {{}}}}
for known in configs:
    name = known["name"]
    out["models"][name] = {{"fields": vars(Config.from_name(name)), "tensors": tensors(name)}}
json.dump(out, sys.stdout)
"""

# Why a model is in only one of the two
REASONS_FOR_MODELS = {
    "Gemma-3-270m": "newer than LitGPT 0.5.13",
    "Gemma-3-270m-it": "newer than LitGPT 0.5.13",
}


class Reason(NamedTuple):
    """Why a field may differ, and a check of our fields and theirs that it is so."""

    text: str
    holds: Callable[[dict[str, Any], dict[str, Any]], bool]


REASONS_FOR_FIELDS = {
    "moe_intermediate_size": Reason(
        "there `intermediate_size` is taken when it is None, here it is filled in",
        lambda ours, theirs: (
            theirs["moe_intermediate_size"] is None and ours["moe_intermediate_size"] == theirs["intermediate_size"]
        ),
    ),
}


class Difference(NamedTuple):
    """One value that differs; `reason` is empty when nobody has looked into it."""

    model: str
    place: str
    ours: Any
    theirs: Any
    reason: str


def dump(python: Path) -> dict[str, Any]:
    """The package and the models of the environment of an interpreter."""
    code = DUMP.format(layers=LAYERS)
    # -I: not the package that happens to lie in the working directory
    done = subprocess.run([python, "-I", "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[Difference]:
    """All differences between the models of two environments; fields that LitGPT does not have are not looked at."""
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield Difference(name, "model", name in ours, name in theirs, REASONS_FOR_MODELS.get(name, ""))
    for name in sorted(ours.keys() & theirs.keys()):
        mine, other = ours[name], theirs[name]
        for field, value in other["fields"].items():
            if field not in mine["fields"] or mine["fields"][field] != value:
                reason = REASONS_FOR_FIELDS.get(field)
                explained = reason is not None and reason.holds(mine["fields"], other["fields"])
                text = reason.text if reason is not None and explained else ""
                yield Difference(name, field, mine["fields"].get(field), value, text)
        for tensor in sorted(mine["tensors"].keys() | other["tensors"].keys()):
            shapes = mine["tensors"].get(tensor), other["tensors"].get(tensor)
            if shapes[0] != shapes[1]:
                yield Difference(name, tensor, *shapes, reason="")


def main() -> int:
    """Compare; 1 when a difference has no reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="interpreter of an environment with litgpt==0.5.13")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    ours, theirs = dump(Path(sys.executable)), dump(options.python)
    if theirs["version"] != "0.5.13" or theirs["file"] == ours["file"]:
        parser.error(f"{options.python} has litgpt {theirs['version']} from {theirs['file']}, expected 0.5.13")
    ours, theirs = ours["models"], theirs["models"]
    found = list(differences(ours, theirs))
    for difference in found:
        values = f"{difference.ours!r} here, {difference.theirs!r} there"
        logger.info("%s, %s: %s (%s)", difference.model, difference.place, values, difference.reason or "NO REASON")
    unknown = sum(not difference.reason for difference in found)
    shared = len(ours.keys() & theirs.keys())
    logger.info("%d models in both, %d differences, %d without a reason", shared, len(found), unknown)
    return int(unknown > 0)


if __name__ == "__main__":
    sys.exit(main())
