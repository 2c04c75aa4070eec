# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt generate`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from litgpt import LLM
from litgpt.__main__ import main as litgpt_main
from litgpt.errors import UserError
from litgpt.generate import base
from litgpt.generate.engine import Engine
from litgpt.model import GPT
from tests.tiny_text import END, ScriptedModel, tiny_config, write_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tokenizer(tmp_path_factory.mktemp("checkpoint"))
    model = GPT(tiny_config())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    torch.save(model.state_dict(), folder / "lit_model.pth")
    model.config.save(folder / "model_config.yaml")
    return folder


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make every model say a text, whatever it is asked."""

    def script(text: str) -> None:
        stream = Engine.stream

        def scripted(self: Engine, prompts: Any, params: Any = None) -> Any:
            self.model = ScriptedModel([[0] * len(prompt) + list(text.encode()) for prompt in prompts])
            return stream(self, prompts, params)

        monkeypatch.setattr(Engine, "stream", scripted)

    return script


def test_the_continuation_alone_goes_to_stdout(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"temperature": 0.7, "top_k": 9, "max_new_tokens": 20, "precision": "32-true"}
    litgpt_main(["generate", str(checkpoint), "--prompt=Hi", *(f"--{k}={v}" for k, v in settings.items())])
    out, err = capsys.readouterr()
    llm = LLM.load(checkpoint, precision=settings.pop("precision"))
    assert out == llm.generate("Hi", seed=1234, **settings) + "\n"
    assert "prefill: " in err
    assert "decode: " in err
    assert "tokens/s" in err
    assert "memory: " in err


def test_samples_differ_and_repeat(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(**settings: Any) -> str:
        base.main(checkpoint, max_new_tokens=8, top_k=None, **settings)
        return capsys.readouterr().out

    first, three = run(), run(num_samples=3)
    assert three.startswith(first)
    assert three == run(num_samples=3)
    assert run(seed=1) != first != run(seed=1235)
    assert three.startswith(first + run(seed=1235))


@pytest.mark.parametrize(
    ("stop", "shown"), [(["--stop=END"], "né "), (['--stop=["two", "😀"]'], "né END "), ([], "né END 😀 two")]
)
def test_stop(checkpoint: Path, says: Any, capsys: pytest.CaptureFixture[str], stop: list[str], shown: str) -> None:
    says("né END 😀 two")
    litgpt_main(["generate", str(checkpoint), "--temperature=0", "--max_new_tokens=16", *stop])
    assert capsys.readouterr().out == shown + "\n"


@pytest.mark.parametrize("prompt_style", [None, "raw"])
def test_the_end_of_the_turn_stops_and_is_hidden(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], prompt_style: str | None
) -> None:
    """`<|end|>` is not the eos token: only the chat template tells that it ends an answer."""
    stream = Engine.stream

    def scripted(self: Engine, prompts: Any, params: Any = None) -> Any:
        self.model = ScriptedModel([[0] * len(prompt) + [*b"Yes", END, *b"User: more"] for prompt in prompts])
        return stream(self, prompts, params)

    monkeypatch.setattr(Engine, "stream", scripted)
    base.main(checkpoint, temperature=0, max_new_tokens=9, prompt_style=prompt_style)
    assert capsys.readouterr().out == "Yes\n"
    assert LLM.load(checkpoint, prompt_style=prompt_style).generate("Hi", temperature=0, max_new_tokens=9) == "Yes"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize": "no-such-bits"}, "no-such-bits"),
        ({"max_new_tokens": -1}, "max_new_tokens .* -1"),
        ({"num_samples": 0}, "num_samples .* 0"),
        ({"prompt": "x" * 100}, "tokens, .* 64"),
        ({"prompt_style": "no-such-style"}, "no-such-style"),
        ({"device": "no-such-device"}, "no-such-device"),
        ({"kv_cache": "no-such-kind"}, "no-such-kind"),
    ],
)
def test_what_a_person_can_do_wrong(checkpoint: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        base.main(checkpoint, **settings)


def test_importing_the_command_does_not_import_torch() -> None:
    code = "import sys, litgpt.generate.base; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
