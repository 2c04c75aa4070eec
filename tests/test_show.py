# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt show`; `transformers` and plain arithmetic are the oracles of its figures."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from litgpt.__main__ import main
from litgpt.checkpoint.safetensors_file import SafetensorsFile
from litgpt.checkpoint.torch_file import TorchFile
from tests import tiny_text
from tests.tiny import NAMES, save_tiny

pytest.importorskip("transformers")

GATED = [name for name in NAMES if "moe" in name or name in ("mixtral", "gpt_oss", "deepseek_v3")]


def report(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    capsys.readouterr()
    main(["show", str(path)])
    lines = capsys.readouterr().out.splitlines()
    return {label: text.strip() for label, _, text in (line.partition(":") for line in lines)}


def number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1].replace(",", ""))


@pytest.mark.parametrize("name", ["llama_bias", "qwen2", "gemma2", "gpt_neox", "mixtral", "deepseek_v3", "gpt_oss"])
def test_parameters(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = save_tiny(name, tmp_path)
    shown = report(tmp_path, capsys)
    assert number(shown["parameters"], r"^([\d,]+)") == theirs.num_parameters()
    assert shown["tokenizer"].startswith("none: ")
    if name in GATED:
        config = theirs.config
        experts = [(n, p) for n, p in theirs.named_parameters() if ".experts." in n]
        total = sum(p.numel() for _, p in experts)
        count = getattr(config, "num_local_experts", None) or config.n_routed_experts
        idle = total * (count - config.num_experts_per_tok) // count
        assert number(shown["parameters"], r"([\d,]+) used") == theirs.num_parameters() - idle


def test_figures_of_a_llama(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = save_tiny("llama", tmp_path, vocab_size=tiny_text.VOCAB_SIZE, max_position_embeddings=2**20)
    tiny_text.write_tokenizer(tmp_path)
    shown = report(tmp_path, capsys)
    per_token = 2 * 2 * 2 * 10 * 2  # layers, keys and values, groups, head size, bytes
    assert number(shown["KV cache"], r"^([\d,]+) bytes a token, ") == per_token
    assert f"{per_token * 2**20 / 2**20:.1f} MiB for 1048576 tokens" in shown["KV cache"]
    stored = sum(p.numel() for p in theirs.parameters()) * 4
    assert shown["weights"].startswith(f"{stored / 2**20:.1f} MiB stored")
    assert shown["prompts"] == f"the checkpoint's chat template, {len(tiny_text.CHAT_TEMPLATE)} characters"
    assert "<|user|>user:Hello!" in shown["for example"]
    assert "'<|end|>' (259)" in shown["stops at"]
    assert "'</s>' (257)" in shown["stops at"]


def test_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny("gemma3_text", tmp_path, max_position_embeddings=4096)
    shown = report(tmp_path, capsys)
    assert "the last 6 tokens in 3 of 4 layers" in shown["attention"]
    layer = 2 * 2 * 10 * 2
    assert shown["KV cache"].startswith(f"{4 * layer} bytes a token ({layer} once the windows are full)")


def test_kinds_of_checkpoints(
    smollm2_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = report(smollm2_gguf, capsys)
    assert shown["parameters"] == "134,515,008"
    assert "'<|im_end|>' (2)" in shown["stops at"]
    save_tiny("llama", tmp_path / "hf" / "a-fine-tune-nobody-knows")
    fine_tune = tmp_path / "hf" / "a-fine-tune-nobody-knows"
    as_hf = report(fine_tune, capsys)
    main(["convert_to_litgpt", str(fine_tune)])
    for name in ("model.safetensors", "config.json"):
        (fine_tune / name).unlink()
    as_litgpt = report(fine_tune, capsys)
    assert as_hf.pop("checkpoint").endswith("hf")
    assert as_litgpt.pop("checkpoint").endswith("litgpt")
    assert as_hf == as_litgpt


def test_no_weights_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("llama", tmp_path)
    main(["convert_to_litgpt", str(tmp_path)])
    for kind in (TorchFile, SafetensorsFile):
        monkeypatch.setattr(kind, "get", lambda *_: pytest.fail("read"))
    report(tmp_path, capsys)
    (tmp_path / "lit_model.pth").unlink()
    report(tmp_path, capsys)


@pytest.mark.parametrize("fault", ["missing", "empty", "cut", "unknown"])
def test_faults_are_one_line_and_a_hint(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    save_tiny("llama", folder)
    if fault == "missing":
        folder = tmp_path / "nowhere"
    elif fault == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif fault == "cut":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[:-10])
    else:
        (folder / "config.json").write_text('{"model_type": "perceiver"}', encoding="utf-8")
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(["show", str(folder)])
    assert caught.value.code == 1
    shown = capsys.readouterr()
    assert not shown.out
    assert re.fullmatch(r"error: [^\n]+\nhint: [^\n]+\n", shown.err)
