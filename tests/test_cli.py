# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command line: what it imports, prints and exits with. Commands themselves have tests of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Literal

import pytest

from litgpt import __main__ as entry
from litgpt.__main__ import COMMANDS, Command, main
from litgpt.errors import UserError

ROOT = Path(__file__).parent.parent
seen: dict[str, object] = {}


def sample_command(
    checkpoint_dir: Path,
    prompt: str = "Hello",
    *,
    top_k: int | None = 50,
    ratio: float = 0.5,
    stream: bool = False,
    quantize: Literal["bnb.nf4", "bnb.int8"] | None = None,
    access_token: str | None = None,
) -> None:
    """Do something.

    Args:
        checkpoint_dir: Where the model is.
        prompt: What to say.
    """
    seen.update(locals())
    if prompt.startswith("raise "):
        raise {
            "user": UserError("the model is broken", "download it again"),
            "value": ValueError("n_embd 3 is odd\nsecond line"),
            "key": KeyError("wte"),
            "file": FileNotFoundError(2, "No such file or directory", "x.bin"),
            "interrupt": KeyboardInterrupt(),
            "pipe": BrokenPipeError(32, "Broken pipe"),
            "memory": MemoryError("cannot allocate 5 GB"),
        }[prompt.removeprefix("raise ")]
    sys.stdout.write("done\n")


def find_model() -> Path | None:
    """The fallback of the sample command."""
    return Path("fallback.gguf") if os.environ.get("SAMPLE_FALLBACK") else None


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line with a sample command; returns the exit code and both outputs."""
    monkeypatch.setitem(COMMANDS, "sample", Command(f"{__name__}:sample_command", "A sample."))
    fallback = Command(f"{__name__}:sample_command", "A sample.", fallback=f"{__name__}:find_model")
    monkeypatch.setitem(COMMANDS, "fallback", fallback)
    monkeypatch.delenv("LITGPT_DEBUG", raising=False)
    seen.clear()

    def call(*args: str) -> tuple[int, str, str]:
        try:
            main(args)
        except SystemExit as left:
            code = left.code
        else:
            code = 0
        out, err = capsys.readouterr()
        assert isinstance(code, int)
        return code, out, err

    return call


def python(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, encoding="utf-8")


# What is imported


LIGHT = [name for name in COMMANDS if not name.startswith("finetune")]  # their data modules are datasets of torch


@pytest.mark.parametrize("args", [["--help"], ["--version"], *([name, "--help"] for name in LIGHT)], ids=" ".join)
def test_help_imports_no_torch(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = f"""
import sys, json
from litgpt.__main__ import main
try:
    main({args!r})
except SystemExit as left:
    assert not left.code, left.code
heavy = ("torch", "lightning", "transformers", "huggingface_hub", "numpy", "tokenizers", "jsonargparse")
print("\\n" + json.dumps([name for name in heavy if name in sys.modules]))
"""
    start = time.perf_counter()
    done = python(code)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == (["jsonargparse"] if len(args) == 2 else [])
    with capsys.disabled():
        sys.stdout.write(f"\nlitgpt {' '.join(args)}: {seconds:.2f} s ")


def test_importing_the_package_is_cheap() -> None:
    done = python("import sys, litgpt, litgpt.constants, litgpt.runtime; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_optional_packages() -> None:
    from litgpt import constants

    assert isinstance(constants.GGUF_AVAILABLE, bool)
    assert not constants.is_available("no_such_package")
    assert not constants.is_available("no_such_package.part")
    with pytest.raises(UserError, match="reading it needs the package no_such_package") as caught:
        constants.require("no_such_package", "reading it")
    assert caught.value.hint == "pip install no_such_package"
    with pytest.raises(AttributeError):
        constants.NOTHING  # noqa: B018


# Help and usage


@pytest.mark.parametrize("args", [[], ["-h"], ["--help"], ["help"]])
def test_help(run: Run, args: list[str]) -> None:
    code, out, err = run(*args)
    assert (code, err) == (0, "")
    for name, command in COMMANDS.items():
        assert f"  {name} " in out
        assert command.help in out


def test_version(run: Run) -> None:
    import litgpt

    assert run("--version") == (0, f"litgpt {litgpt.__version__}\n", "")
    code, out, _ = run("version")
    assert code == 0
    assert out.startswith(f"litgpt {litgpt.__version__}\npython ")
    assert "\ntorch " in out


@pytest.mark.parametrize(
    ("name", "hint"),
    [("generat", "did you mean generate?"), ("zzz", "the commands are "), ("Download", "did you mean download?")],
)
def test_unknown_command(run: Run, name: str, hint: str) -> None:
    code, out, err = run(name)
    assert (code, out) == (2, "")
    error, advice = err.splitlines()
    assert error == f"error: unknown command {name!r}"
    assert advice.startswith(f"hint: {hint}")


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        ([], "the following arguments are required: checkpoint_dir", "see `litgpt sample --help`"),
        (["x", "--top_q", "3"], "unrecognized arguments: --top_q 3", "did you mean --top_k?"),
        (["x", "--top-k", "3"], "unrecognized arguments: --top-k 3", "did you mean --top_k?"),
        (["--checkpoint_dir", "x"], "unrecognized arguments: --checkpoint_dir", "give only the value"),
        (["x", "y"], "unrecognized arguments: y", "see `litgpt sample --help`"),
        (["x", "--top_k", "many"], "--top_k takes an integer or null, not 'many'", "see"),
        (["x", "--ratio", "half"], "--ratio takes a number, not 'half'", "see"),
        (["x", "--stream", "maybe"], "--stream takes true or false, not 'maybe'", "see"),
        (["x", "--stream"], "argument --stream: expected one argument", "see"),
        (["x", "--quantize", "nf4"], "--quantize takes bnb.nf4, bnb.int8 or null, not 'nf4'", "see"),
        (["x", "--config", "no.yaml"], "File does not exist", "see"),
    ],
)
def test_usage_errors(run: Run, args: list[str], error: str, hint: str) -> None:
    code, out, err = run("sample", *args)
    assert (code, out) == (2, "")
    first, second = err.splitlines()  # exactly two lines
    assert first.startswith("error: ")
    assert error in first
    assert second.startswith(f"hint: {hint}")
    assert seen == {}


def test_values_and_abbreviations(run: Run) -> None:
    code, out, err = run(
        "sample", "a/b", "--prom", "- 1: [x]", "--top_k", "null", "--ratio", "1e-1", "--stream", "true"
    )
    assert (code, out, err) == (0, "done\n", "")
    assert seen == {
        "checkpoint_dir": Path("a/b"),
        "prompt": "- 1: [x]",
        "top_k": None,
        "ratio": 0.1,
        "stream": True,
        "quantize": None,
        "access_token": None,
    }


def test_config_file(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("checkpoint_dir: from/file\ntop_k: 7\nprompt: né\n", encoding="utf-8")
    assert run("sample", "--config", str(file), "--top_k", "8")[0] == 0
    assert (seen["checkpoint_dir"], seen["top_k"], seen["prompt"]) == (Path("from/file"), 8, "né")
    file.write_text("top_q: 7\n", encoding="utf-8")
    code, _, err = run("sample", "x", "--config", str(file))
    assert code == 2
    assert "top_q" in err
    file.write_text("a: [", encoding="utf-8")
    code, _, err = run("sample", "x", "--config", str(file))
    assert code == 2
    assert len(err.splitlines()) == 2


@pytest.fixture
def config_url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/c.yaml" else 404)
            self.end_headers()
            self.wfile.write(b"checkpoint_dir: from/web\ntop_k: 9\n")

        def log_message(self, *args: object) -> None:
            """Stay silent."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/c.yaml"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("form", ["--config={}", "--config {}"])
def test_config_from_the_web(run: Run, config_url: str, form: str) -> None:
    assert run("sample", *form.format(config_url).split())[0] == 0
    assert (seen["checkpoint_dir"], seen["top_k"]) == (Path("from/web"), 9)
    code, _, err = run("sample", *form.format(config_url + ".old").split())
    assert code == 2
    assert "404" in err


def test_print_config(run: Run) -> None:
    code, out, _ = run("sample", "x", "--prompt", "ü", "--print_config")
    assert code == 0
    assert out.startswith("checkpoint_dir: x\nprompt: ")
    assert seen == {}


@pytest.mark.parametrize("name", ["sample", *(name for name in COMMANDS if name != "version")])
def test_no_secret_is_shown(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_token")
    for args in (["--help"], ["--print_config"], ["x", "--print_config"]):
        code, out, err = run(name, *args)
        assert code == 0
        assert out
        assert "hf_secret" not in out + err


def test_no_given_secret_is_shown(run: Run) -> None:
    code, out, err = run("sample", "x", "--access_token", "hf_secret_token", "--print_config")
    assert code == 0
    assert "access_token: null" in out
    assert "hf_secret" not in out + err


@pytest.mark.parametrize(
    "args",
    [
        ["--access_token", "hf_secret_token", "--print_conf=skip_unset"],
        ["--acces_tokn", "hf_secret_token"],
        ["--top_q", "1", "--access-token=hf_secret_token"],
        ["--access_token", "hf_secret_token", "--top_k"],
        ["--access_token", "hf_secret_token", "--top_k", "many"],
    ],
)
def test_no_mistyped_secret_is_shown(run: Run, args: list[str]) -> None:
    _, out, err = run("sample", "x", *args)
    assert out + err
    assert "hf_secret" not in out + err


# The checkpoint that is there without asking for one


def test_fallback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("fallback", "--top_k", "3")
    assert (code, out) == (2, "")
    assert "no checkpoint is given, and the demo model is not installed" in err
    assert "python -m litgpt.scripts.demo" in err
    monkeypatch.setenv("SAMPLE_FALLBACK", "1")
    assert run("fallback", "--top_k", "3")[0] == 0
    assert (seen["checkpoint_dir"], seen["top_k"]) == (Path("fallback.gguf"), 3)
    assert run("fallback", "given")[0] == 0
    assert seen["checkpoint_dir"] == Path("given")
    code, _, err = run("fallback", "--top_k", "many")
    assert code == 2
    assert "--top_k takes an integer" in err


# Errors


@pytest.mark.parametrize(
    ("kind", "code", "lines"),
    [
        ("user", 1, ["error: the model is broken", "hint: download it again"]),
        ("value", 1, ["error: n_embd 3 is odd second line", "hint: run it again with --debug"]),
        ("key", 1, ["error: KeyError: 'wte'", "hint: run it again with --debug"]),
        ("file", 1, ["error: [Errno 2] No such file or directory: 'x.bin'", "hint: run it again with --debug"]),
        ("memory", 1, ["error: out of memory: cannot allocate 5 GB", "hint: use a smaller model"]),
        ("interrupt", 130, ["", "interrupted"]),
    ],
)
def test_errors(run: Run, kind: str, code: int, lines: list[str]) -> None:
    found, out, err = run("sample", "x", "--prompt", f"raise {kind}")
    assert (found, out) == (code, "")
    assert "Traceback" not in err
    shown = err.splitlines()
    assert len(shown) == len(lines)
    assert all(line.startswith(start) for line, start in zip(shown, lines, strict=True))


@pytest.mark.parametrize("kind", ["user", "key"])
def test_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    args = ["sample", "x", "--prompt", f"raise {kind}"]
    for found, _, err in (run("--debug", *args), run(*args, "--debug")):
        assert found == 1
        assert "Traceback" in err
        assert err.splitlines()[-2].startswith("error: ")
    monkeypatch.setenv("LITGPT_DEBUG", "1")
    assert "Traceback" in run(*args)[2]


def test_closed_pipe_is_silent() -> None:
    """As in `litgpt --help | true`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "litgpt", "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, encoding="utf-8")
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_utf8_on_any_code_page() -> None:
    code = """
import sys, io
sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="cp1252")
from litgpt import __main__ as entry
entry.help_text = lambda: "né 😀 \\udc80\\n"
entry.main([])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
    assert done.stdout.decode("utf-8").splitlines() == ["né 😀 ?"], done.stderr


def test_results_go_to_stdout_and_messages_to_stderr(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    def dispatch(argv: list[str]) -> None:
        log = logging.getLogger("litgpt.some.module")
        log.debug("hidden")
        log.info("loading")
        log.warning("careful")
        sys.stdout.write("result\n")

    monkeypatch.setattr(entry, "_dispatch", dispatch)
    assert run("anything") == (0, "result\n", "loading\nwarning: careful\n")
    assert "hidden" in run("--debug", "anything")[2]


# Device and precision


def test_device_and_precision() -> None:
    import torch

    from litgpt.runtime import parse_dtype, pick_device, pick_precision, weight_dtype

    cpu = torch.device("cpu")
    assert pick_device("cpu") == cpu
    assert pick_device() == pick_device("auto")
    assert pick_precision(None, cpu) == pick_precision("auto", cpu)
    assert pick_precision(None, cpu) in ("bf16-true", "32-true")
    assert pick_precision("fp32", cpu) == "32-true"
    assert weight_dtype("bf16-true") == torch.bfloat16
    assert weight_dtype("bf16-mixed") == torch.float32
    assert parse_dtype("float16") == torch.float16
    for call in (
        lambda: pick_device("tpu9"),
        lambda: pick_device("cuda:99"),
        lambda: pick_device("xla"),
        lambda: pick_device("meta"),
        lambda: pick_precision("bf17", cpu),
        lambda: parse_dtype("int8"),
        lambda: parse_dtype("nn"),
    ):
        with pytest.raises(UserError):
            call()


def test_precision_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from litgpt.runtime import pick_precision

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False})
    assert pick_precision(None, torch.device("cpu")) == "32-true"
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    assert pick_precision(None, torch.device("cpu")) == "bf16-true"
