# Licensed under the Apache License 2.0, see the LICENSE file.

"""LitGPT's files with the tensors of a variant: read, written, and refused where they do not fit."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from litgpt.checkpoint.adapter_files import (
    VARIANTS,
    base_and_adapter,
    find_base,
    load_finetuned,
    open_adapter,
    read_state,
    save_state,
)
from litgpt.checkpoint.convert import save_litgpt
from litgpt.checkpoint.save import FolderWriter
from litgpt.config import Config
from litgpt.errors import MissingFileError, UserError
from litgpt.model import GPT
from litgpt.peft import variant_state_dict
from tests.tiny_finetuned import logits, write_base, write_finetuned

# Recorded from LitGPT 0.5.13: the names and shapes in files that its `finetune_*` save for this model, and the logits
# that it computes with such files. The values of all tensors follow from their names (`wave`).
TOY: dict[str, Any] = {
    "block_size": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_query_groups": 2,
    "n_embd": 32,
    "head_size": 10,
    "vocab_size": 113,
    "padded_vocab_size": 113,
    "rotary_percentage": 1.0,
    "bias": False,
    "parallel_residual": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 52,
}
MOE = {"mlp_class_name": "LLaMAMoE", "n_expert": 3, "n_expert_per_token": 2}
IN_OUT = {"attn.proj": (40, 32), "mlp.fc_1": (32, 52), "mlp.fc_2": (32, 52), "mlp.proj": (52, 32)}
FLAGS = ("lora_query", "lora_key", "lora_value", "lora_projection", "lora_mlp", "lora_head")


def lora_pair(name: str, n_in: int, n_out: int, rows: int = 4) -> dict[str, tuple[int, ...]]:
    return {f"{name}.lora_A": (rows, n_in), f"{name}.lora_B": (n_out, 4)}


def lora_file() -> dict[str, tuple[int, ...]]:
    shapes = lora_pair("lm_head", 32, 113)
    for i in range(3):
        shapes |= lora_pair(f"transformer.h.{i}.attn.qkv", 32, 60, rows=8)
        for name, sizes in IN_OUT.items():
            shapes |= lora_pair(f"transformer.h.{i}.{name}", *sizes)
    return shapes


def moe_file() -> dict[str, tuple[int, ...]]:
    """`lora_mlp` of 0.5.13 means the router too."""
    shapes = {}
    for i in range(3):
        shapes |= lora_pair(f"transformer.h.{i}.attn.qkv", 32, 20)
        shapes |= lora_pair(f"transformer.h.{i}.mlp.gate", 32, 3)
        for expert in range(3):
            for name in ("fc_1", "fc_2", "proj"):
                shapes |= lora_pair(f"transformer.h.{i}.mlp.experts.{expert}.{name}", *IN_OUT[f"mlp.{name}"])
    return shapes


def adapter_file() -> dict[str, tuple[int, ...]]:
    prefix = "transformer.h.2.attn"
    return {f"{prefix}.gating_factor": (1, 1, 4, 1), f"{prefix}.adapter_wte.weight": (10, 32)}


def adapter_v2_file() -> dict[str, tuple[int, ...]]:
    outs = {f"transformer.h.{i}.{name}": n_out for i in range(3) for name, (_, n_out) in IN_OUT.items()}
    outs |= {"lm_head": 113, **{f"transformer.h.{i}.attn.qkv": 60 for i in range(3)}}
    shapes = {f"{name}.adapter_{what}": (n,) for name, n in outs.items() for what in ("bias", "scale")}
    norms = [f"transformer.h.{i}.{name}.weight" for i in range(3) for name in ("norm_1", "norm_2")]
    return adapter_file() | shapes | dict.fromkeys((*norms, "transformer.ln_f.weight"), (32,))


RECORDED: dict[str, tuple[str, Any, dict[str, Any], list[float]]] = {
    "lora": ("lora", lora_file, {}, [0.15876, 0.5814, -0.04876, -0.32641, 0.37947, 0.71437]),
    "lora of experts": ("lora", moe_file, MOE, [0.04159, -0.08626, -0.17057, -0.16877, -0.08177, 0.04651]),
    # one group of keys: with more, 0.5.13 takes other rows of the fused map for the prompt's keys and values
    "adapter": ("adapter", adapter_file, {"n_query_groups": 1}, [-0.90869, -0.49706, 0.1655, 0.7445, 0.94767, 0.67244]),
    "adapter_v2": (
        "adapter_v2",
        adapter_v2_file,
        {"n_query_groups": 1},
        [-0.16026, -0.3561, -0.23467, 0.1206, 0.47784, 0.61537],
    ),
}
ON = {"lora": (True, False, True, True, True, True), "lora of experts": (False, True, False, False, True, False)}


def wave(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The values of a tensor."""
    n = math.prod(shape)
    steps = torch.arange(n, dtype=torch.float64) * 0.37 + zlib.crc32(name.encode()) % 1000
    values = torch.sin(steps).reshape(shape).float()
    if any(part in name for part in ("norm", "ln_f", "scale")):
        return 1 + 0.2 * values
    return values * (0.3 if len(shape) < 2 else 1.5 * shape[-1] ** -0.5)


@pytest.mark.parametrize("case", RECORDED)
def test_files_of_litgpt_0_5_13(case: str, tmp_path: Path) -> None:
    kind, shapes, changes, expected = RECORDED[case]
    config = Config(**TOY | changes)
    base = {name: wave(name, tuple(tensor.shape)) for name, tensor in GPT(config).state_dict().items()}
    save_litgpt(base, config, tmp_path / "base")
    state = {name: wave(name, shape) for name, shape in shapes().items()}
    torch.save({"model": state}, tmp_path / VARIANTS[kind].file_name)
    if case in ON:
        switches = dict(zip(FLAGS, ON[case], strict=True))
        settings = {"checkpoint_dir": "base", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.05, **switches}
        (tmp_path / "hyperparameters.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    model = load_finetuned(tmp_path / "base", open_adapter(tmp_path))
    with torch.no_grad():
        ours = model(torch.arange(12)[None] * 7 % 113)[0, -1, :6]
    torch.testing.assert_close(ours, torch.tensor(expected), atol=2e-5, rtol=0)
    assert variant_state_dict(model).keys() == state.keys()


@pytest.mark.parametrize(
    ("kind", "n_groups", "says"), [("adapter", 2, True), ("adapter", 1, False), ("lora", 2, False)]
)
def test_prompts_of_litgpt_0_5_13_were_trained_otherwise(
    kind: str, n_groups: int, says: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(**TOY | {"n_query_groups": n_groups})
    save_litgpt(GPT(config), config, tmp_path / "base")
    shapes = lora_file() if kind == "lora" else adapter_file()
    state = {name: wave(name, shape) for name, shape in shapes.items()}
    torch.save({"model": state}, tmp_path / VARIANTS[kind].file_name)
    settings = {"lora_r": 4, **dict(zip(FLAGS, ON["lora"], strict=True))}
    (tmp_path / "hyperparameters.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    load_finetuned(tmp_path / "base", open_adapter(tmp_path))
    assert ("against rows of the attention's weights in another order" in caplog.text) == says


def test_our_prompts_need_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_base(tmp_path / "base", n_head=4, n_query_groups=2)
    write_finetuned("adapter", tmp_path / "base", tmp_path / "out")
    name = VARIANTS["adapter"].file_name
    with FolderWriter(tmp_path / "folder") as writer, writer.file(name) as path:
        save_state(read_state(tmp_path / "out" / name), path)
    load_finetuned(tmp_path / "base", open_adapter(tmp_path / "folder"))
    assert caplog.text == ""


@pytest.mark.parametrize("kind", VARIANTS)
def test_written_and_read(kind: str, tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    model = write_finetuned(kind, tmp_path / "base", tmp_path / "out")
    file = tmp_path / "out" / VARIANTS[kind].file_name
    assert list(torch.load(file, weights_only=True)) == ["model"]
    for path in (file, tmp_path / "out"):
        again = load_finetuned(tmp_path / "base", open_adapter(path))
        assert torch.equal(logits(again), logits(model))
    assert not torch.allclose(logits(model), logits(GPT.from_checkpoint(tmp_path / "base")), atol=1e-3)


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lit_model.pth.lora"
    save_state({"a": torch.ones(2)}, file)

    def fail(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        save_state({"a": torch.zeros(2)}, file)
    assert torch.equal(read_state(file)["a"], torch.ones(2))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_an_adapter_of_another_base_is_refused_before_the_base_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_base(tmp_path / "base")
    write_base(tmp_path / "other", n_embd=40)
    write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    monkeypatch.setattr("litgpt.checkpoint.adapter_files.load_model", None)
    with pytest.raises(UserError) as caught:
        load_finetuned(tmp_path / "other", open_adapter(tmp_path / "out"))
    message = caught.value.message
    assert "lit_model.pth.lora" in message
    assert "transformer.h.0.attn.qkv.lora_A [8, 32] instead of [8, 40]" in message
    assert "15 of the wrong shape" in message  # in each of 3 layers, all but the B of qkv
    assert "\n" not in message


def test_missing_and_unexpected_tensors_are_named_together(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    model = write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    state = dict(variant_state_dict(model))
    state["transformer.h.7.attn.qkv.lora_A"] = state.pop("transformer.h.1.attn.qkv.lora_A")
    save_state(state, tmp_path / "out" / "lit_model.pth.lora")
    with pytest.raises(UserError, match=r"1 missing: transformer\.h\.1.*1 unexpected: transformer\.h\.7"):
        load_finetuned(tmp_path / "base", open_adapter(tmp_path / "out"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda out: (out / "hyperparameters.yaml").unlink(), "hyperparameters.yaml does not exist"),
        (lambda out: (out / "hyperparameters.yaml").write_text("- 1"), "hyperparameters.yaml holds no settings"),
        (lambda out: (out / "hyperparameters.yaml").write_text("a: ["), "hyperparameters.yaml is damaged"),
        (lambda out: cut(out / "lit_model.pth.lora"), "lit_model.pth.lora is damaged"),
        (lambda out: torch.save({"model": {}}, out / "lit_model.pth.lora"), "holds no tensors"),
        (lambda out: torch.save({"model": {"a": print}}, out / "lit_model.pth.lora"), "objects that are not tensors"),
    ],
)
def test_damaged_folders(spoil: Any, message: str, tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    spoil(tmp_path / "out")
    with pytest.raises(UserError, match=message):
        load_finetuned(tmp_path / "base", open_adapter(tmp_path / "out"))


def test_what_is_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("x")
    with pytest.raises(UserError, match=r"some\.txt is not an adapter"):
        open_adapter(tmp_path / "some.txt")
    with pytest.raises(MissingFileError, match="holds no adapter"):
        open_adapter(tmp_path)
    with pytest.raises(MissingFileError, match="does not exist"):
        open_adapter(tmp_path / "nothing")


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_folder_with_an_adapter_alone_means_its_base_too(kind: str, tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    write_finetuned(kind, tmp_path / "base", tmp_path / "out")
    base, adapter = base_and_adapter(tmp_path / "out")
    assert base == tmp_path / "base"
    assert adapter is not None
    assert adapter.path == tmp_path / "out" / VARIANTS[kind].file_name
    write_base(tmp_path / "out")  # a whole model beside it: a LoRA is merged into that, others are not
    base, adapter = base_and_adapter(tmp_path / "out")
    assert base == tmp_path / "out"
    assert (adapter is None) == (kind == "lora")
    assert base_and_adapter(tmp_path / "base") == (tmp_path / "base", None)


def test_a_base_that_has_moved(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    write_finetuned("lora", tmp_path / "base", tmp_path / "out")
    (tmp_path / "base").rename(tmp_path / "moved")
    adapter = open_adapter(tmp_path / "out")
    with pytest.raises(MissingFileError, match=r"the base of .*lora is missing"):
        find_base(adapter)
    assert find_base(adapter, tmp_path / "moved") == tmp_path / "moved"
    (tmp_path / "out" / "hyperparameters.yaml").unlink()
    with pytest.raises(UserError, match="does not say from which base"):
        find_base(adapter)
