# Licensed under the Apache License 2.0, see the LICENSE file.

"""The examples of README.md run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = re.findall(r"^```(bash|python)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def test_there_are_four_examples() -> None:
    assert [language for language, _ in EXAMPLES] == ["bash", "python", "python", "bash"]


@pytest.mark.slow
@pytest.mark.parametrize(("language", "code"), EXAMPLES, ids=["command", "llm", "module", "finetuning"])
def test_example_runs(language: str, code: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    command = ["bash", "-euc", code] if language == "bash" else [sys.executable, "-c", code]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
