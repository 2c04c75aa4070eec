# Licensed under the Apache License 2.0, see the LICENSE file.

"""The commands that convert between LitGPT's files and Hugging Face's; `transformers` and LitGPT are the oracles."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from litgpt.__main__ import main
from litgpt.checkpoint import convert
from litgpt.checkpoint.convert import load_model
from litgpt.checkpoint.export import convert_from_litgpt, convert_to_litgpt, extract_pretrained
from litgpt.checkpoint.hf_config import to_hf
from litgpt.checkpoint.save import check_manifest, read_manifest
from litgpt.checkpoint.types import TensorInfo
from litgpt.checkpoint.writers import write_state_dict
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.model import GPT
from tests import tiny_finetuned, tiny_text
from tests.tiny import random_ids, save_tiny

transformers = pytest.importorskip("transformers")

FAMILIES = ("llama_bias", "qwen2", "qwen3_moe", "mixtral", "gemma3_text", "gpt_neox", "phi3", "deepseek_v3", "gpt_oss")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out = model(random_ids((2, 12)))
    return out if isinstance(out, Tensor) else out.logits


def flat(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "lit_model.pth", weights_only=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    theirs = save_tiny(name, tmp_path / "in")
    before = (tmp_path / "in" / "model.safetensors").read_bytes()
    main(["convert_to_litgpt", str(tmp_path / "in")])
    assert (tmp_path / "in" / "model.safetensors").read_bytes() == before
    model = load_model(tmp_path / "in")
    expected = model.state_dict()
    found = flat(tmp_path / "in")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert (logits(model) - logits(theirs)).abs().max() <= 1e-4
    main(["convert_from_litgpt", str(tmp_path / "in"), str(tmp_path / "out")])
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert torch.equal(logits(back), logits(theirs))
    check_manifest(tmp_path / "out", hashes=True)
    state = torch.load(tmp_path / "out" / "model.pth", weights_only=True)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in stored.items())


def test_everything_that_belongs_to_a_model_comes_along(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "in", vocab_size=tiny_text.VOCAB_SIZE)
    tiny_text.write_tokenizer(tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").write_text('{"eos_token_id": [1, 2]}', encoding="utf-8")
    main(["convert_to_litgpt", str(tmp_path / "in"), "--dtype", "bfloat16"])
    (tmp_path / "in" / "model.safetensors").unlink()
    main(["convert_from_litgpt", str(tmp_path / "in"), str(tmp_path / "out"), "--model_pth", "false"])
    assert not (tmp_path / "out" / "model.pth").exists()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "né"}], tokenize=False)
    assert text == "<s><|user|>user:né"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [1, 2]


def test_dtype_and_a_second_conversion(tmp_path: Path) -> None:
    theirs = save_tiny("deepseek_v3", tmp_path)
    main(["convert_to_litgpt", str(tmp_path), "--dtype", "float16"])
    state = flat(tmp_path)
    exact = {name for name, tensor in state.items() if tensor.dtype == torch.float32}
    assert exact == {f"transformer.h.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)}
    assert {tensor.dtype for name, tensor in state.items() if name not in exact} == {torch.float16}
    main(["convert_to_litgpt", str(tmp_path)])  # from the original again: nothing stays rounded
    assert torch.equal(flat(tmp_path)["lm_head.weight"], theirs.lm_head.weight)
    assert not read_manifest(tmp_path)  # the folder is somebody else's: LitGPT may replace the file


def test_converting_in_a_folder_that_we_wrote(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "in")
    convert_from_litgpt(tmp_path / "in", tmp_path / "out")
    convert_to_litgpt(tmp_path / "out")
    check_manifest(tmp_path / "out", hashes=True)
    assert {"lit_model.pth", "model_config.yaml"} < read_manifest(tmp_path / "out")["files"].keys()


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    save_tiny("qwen2", tmp_path)
    convert_to_litgpt(tmp_path)
    state = flat(tmp_path)
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()


def test_gguf_file_and_back(smollm2_gguf: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.symlink_to(smollm2_gguf)
    convert_from_litgpt(copy, tmp_path / "hf", torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is 2 + 2?"}], return_tensors="pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    ids = ids if isinstance(ids, Tensor) else ids["input_ids"]
    with torch.no_grad():
        top = model(ids).logits[0, -1].argmax()
        expected = load_model(smollm2_gguf, dtype=torch.bfloat16)(ids)[0, -1].argmax()
    assert top == expected


# The files


def test_state_dict_file_is_like_that_of_torch(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(7.0).bfloat16(),
        "matrix": torch.randn(3, 5),
        "nothing": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "view": torch.randn(4, 6).T,
        "double": torch.randn(2, dtype=torch.float64),
    }
    infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    infos["same"] = infos["matrix"]
    write_state_dict(tmp_path / "x.pth", infos, tensors.__getitem__, {"same": "matrix"})
    assert zipfile.ZipFile(tmp_path / "x.pth").testzip() is None
    for mmap in (False, True):
        found = torch.load(tmp_path / "x.pth", weights_only=True, mmap=mmap)
        assert list(found) == list(infos)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
            assert found[name].data_ptr() % 64 == 0 or not mmap or not tensor.numel()
        assert found["same"].data_ptr() == found["matrix"].data_ptr()
        assert all(tensor.is_contiguous() for tensor in found.values())


@pytest.mark.parametrize("command", ["convert_to_litgpt", "convert_from_litgpt", "convert_pretrained_checkpoint"])
def test_interrupted_conversion_is_no_checkpoint(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", tmp_path / "in")
    arguments = [command, str(tmp_path / "in")]
    if command != "convert_to_litgpt":
        main(["convert_to_litgpt", str(tmp_path / "in")])
        arguments.append(str(tmp_path / "out"))

    def fail(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert, "write_state_dict", fail)
        with pytest.raises(SystemExit):
            main(arguments)
    if command == "convert_to_litgpt":  # the folder is as good as before
        assert not (tmp_path / "in" / "lit_model.pth").exists()
        load_model(tmp_path / "in")
    else:
        with pytest.raises(UserError, match="half written"):
            load_model(tmp_path / "out")
    assert not list(tmp_path.rglob("*.tmp"))


_MEASURE = """
import sys
from pathlib import Path
import torch, litgpt.model, litgpt.checkpoint.export
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
from litgpt.checkpoint.export import convert_from_litgpt, convert_to_litgpt
folder = Path(sys.argv[1])
before = peak()
convert_to_litgpt(folder, dtype=torch.bfloat16)
convert_from_litgpt(folder, folder / "out", torch_file="model.pth")
print((peak() - before) / (folder / "model.safetensors").stat().st_size)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_is_far_from_a_copy_of_the_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "num_hidden_layers": 40, "intermediate_size": 1536, "num_attention_heads": 8}
    save_tiny("llama", tmp_path, **sizes, num_key_value_heads=8, head_dim=64)
    command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) <= 0.4  # what has been mapped may stay a while


# config.json


@pytest.mark.parametrize(
    "name", ["llama_llama3rope", "llama_bias", "mistral_window", "qwen2_window", "qwen3", "gemma2", "gpt_neox", "phi"]
)
def test_config_json_is_made_when_there_is_none(name: str, tmp_path: Path) -> None:
    theirs = save_tiny(name, tmp_path / "in")
    convert_to_litgpt(tmp_path / "in")
    for file in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / "in" / file).unlink(missing_ok=True)
    convert_from_litgpt(tmp_path / "in", tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert (logits(back) - logits(theirs)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "name", ["Llama-3.2-1B", "tiny-llama-1.1b", "pythia-160m", "Gemma-2-2b", "Qwen2.5-0.5B", "phi-2"]
)
def test_config_json_of_known_models(name: str) -> None:
    written = to_hf(Config.from_name(name))
    kind = transformers.AutoConfig.for_model(**written)
    assert kind.num_hidden_layers == Config.from_name(name).n_layer
    assert kind.num_attention_heads == Config.from_name(name).n_head


def test_what_no_config_json_can_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"attention_logit_softcapping") as caught:
        to_hf(Config.from_name("Llama-3.2-1B", attention_logit_softcapping=5.0))
    assert "config.json" in caught.value.hint
    with pytest.raises(UserError, match="deepseek_v3"):
        to_hf(Config(family="deepseek_v3"))


# Training checkpoints


def training_checkpoint(folder: Path, prefix: str = "") -> GPT:
    folder.mkdir()
    config = tiny_text.tiny_config(family="llama", mlp_class_name="LLaMAMLP", norm_class_name="RMSNorm",
                                   parallel_residual=False, bias=False, intermediate_size=48)  # fmt: skip
    model = GPT(config)
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    optimizer = {"state": {0: {"exp_avg": torch.zeros(3)}}}
    torch.save({"model": state, "optimizer": optimizer, "step_count": 3}, folder / "lit_model.pth")
    config.save(folder / "model_config.yaml")
    tiny_text.write_tokenizer(folder)
    return model


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_model_of_a_training_checkpoint(prefix: str, tmp_path: Path) -> None:
    model = training_checkpoint(tmp_path / "run", prefix)
    main(["convert_pretrained_checkpoint", str(tmp_path / "run"), str(tmp_path / "out")])
    found = flat(tmp_path / "out")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model_config.yaml", "tokenizer.json", "tokenizer_config.json", "manifest.json"} <= names
    main(["convert_from_litgpt", str(tmp_path / "run"), str(tmp_path / "hf")])  # with the optimizer still beside it
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    assert (logits(back) - logits(model.eval())).abs().max() <= 1e-4


def test_merged_lora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From finetuning to transformers; a LoRA alone is told from a model."""
    llama = {"mlp_class_name": "LLaMAMLP", "norm_class_name": "RMSNorm", "parallel_residual": False, "bias": False}
    tiny_finetuned.write_base(tmp_path / "base", family="llama", intermediate_size=48, **llama)
    model = tiny_finetuned.write_finetuned("lora", tmp_path / "base", tmp_path / "final")
    with pytest.raises(UserError, match="without its base"):
        convert_from_litgpt(tmp_path / "final", tmp_path / "hf")
    main(["show", str(tmp_path / "final")])
    assert "lit_model.pth.lora, put on this checkpoint" in capsys.readouterr().out
    main(["merge_lora", str(tmp_path / "final")])
    main(["convert_from_litgpt", str(tmp_path / "final"), str(tmp_path / "hf")])
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    assert (logits(back) - logits(model)).abs().max() <= 1e-4
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template
    tiny_finetuned.write_finetuned("adapter", tmp_path / "base", tmp_path / "adapter")
    with pytest.raises(UserError, match="no place"):
        convert_from_litgpt(tmp_path / "adapter", tmp_path / "nothing")


# What people do wrong


def test_refusals(tmp_path: Path) -> None:
    training_checkpoint(tmp_path / "run")
    with pytest.raises(UserError, match="LitGPT checkpoint already"):
        convert_to_litgpt(tmp_path / "run")
    with pytest.raises(UserError, match="itself"):
        convert_from_litgpt(tmp_path / "run", tmp_path / "run")
    with pytest.raises(UserError, match="not empty"):
        extract_pretrained(tmp_path / "run", tmp_path / "run")
    save_tiny("llama", tmp_path / "hf")
    with pytest.raises(UserError, match=r"no lit_model\.pth"):
        extract_pretrained(tmp_path / "hf", tmp_path / "out")
    convert_to_litgpt(tmp_path / "hf")  # its own files and ours: an export must not replace the former
    with pytest.raises(UserError, match=r"already holds weights: .*model\.safetensors"):
        convert_from_litgpt(tmp_path / "run", tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    (tmp_path / "parts" / "lit_model.pth").mkdir(parents=True)
    with pytest.raises(UserError, match="is a folder: training on several devices") as caught:
        extract_pretrained(tmp_path / "parts", tmp_path / "out")
    assert "fabric consolidate" in caught.value.hint
    (tmp_path / "lora").mkdir()
    torch.save({"model": {}}, tmp_path / "lora" / "lit_model.pth.lora")
    with pytest.raises(UserError, match="without its base") as caught:
        convert_from_litgpt(tmp_path / "lora", tmp_path / "out")
    assert "merge_lora" in caught.value.hint


def test_wrong_dtype_and_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny("llama", tmp_path / "in")
    capsys.readouterr()
    for arguments in (["convert_to_litgpt", str(tmp_path / "in"), "--dtype", "int3"], ["convert_to_litgpt", "nowhere"]):
        with pytest.raises(SystemExit):
            main(arguments)
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert "\nhint: " in error
        assert "Traceback" not in error


# LitGPT itself, in an environment of its own

PEER = os.environ.get("LITGPT_PEER_PYTHON")
_PEER_LOGITS = """
import sys, torch
from litgpt import GPT, Config
folder, out = sys.argv[1:]
model = GPT(Config.from_file(folder + "/model_config.yaml"))
state = torch.load(folder + "/lit_model.pth", mmap=True, weights_only=True)
model.load_state_dict(state)
ids = torch.load(out + ".ids")
with torch.no_grad():
    torch.save(model.eval()(ids), out)
"""


def run_peer(folder: Path, *arguments: str) -> None:
    assert PEER is not None
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # In another folder than this project's, whose `litgpt` would be found first
    done = subprocess.run([PEER, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(PEER is None, reason="LITGPT_PEER_PYTHON names no Python with LitGPT 0.5.13")
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt_neox", "mixtral", "qwen3"])
def test_litgpt_reads_ours_and_we_read_its(name: str, tmp_path: Path) -> None:
    theirs = save_tiny(name, tmp_path / "ours")
    ids = random_ids((2, 12))
    torch.save(ids, tmp_path / "logits.ids")
    main(["convert_to_litgpt", str(tmp_path / "ours")])
    run_peer(tmp_path, "-c", _PEER_LOGITS, str(tmp_path / "ours"), str(tmp_path / "logits"))
    assert (torch.load(tmp_path / "logits") - logits(theirs)).abs().max() <= 1e-4
    theirs.save_pretrained(tmp_path / "its")
    # What it writes: the file that its own incremental writer makes of the same tensors
    run_peer(tmp_path, "-c", _PEER_SAVES, str(tmp_path / "ours"), str(tmp_path / "its"))
    (tmp_path / "its" / "model.safetensors").unlink()
    assert (logits(load_model(tmp_path / "its")) - logits(theirs)).abs().max() <= 1e-4


_PEER_SAVES = """
import shutil, sys, torch
from litgpt.utils import incremental_save
source, target = sys.argv[1:]
state = torch.load(source + "/lit_model.pth", weights_only=True)
with incremental_save(target + "/lit_model.pth") as saver:
    saver.save({name: saver.store_early(tensor) for name, tensor in state.items()})
shutil.copy(source + "/model_config.yaml", target)
"""


@pytest.mark.slow
@pytest.mark.skipif(PEER is None, reason="LITGPT_PEER_PYTHON names no Python with LitGPT 0.5.13")
def test_litgpt_converts_and_we_read_it(tmp_path: Path) -> None:
    """A model that LitGPT knows by name, made tiny on both sides."""
    theirs = save_tiny("llama", tmp_path / "in")
    config = Config.from_checkpoint(tmp_path / "in")
    convert_to_litgpt(tmp_path / "in")
    run_peer(tmp_path, "-c", _PEER_CONVERTS, str(tmp_path / "in"))
    assert Config.from_checkpoint(tmp_path / "in").n_embd == config.n_embd
    (tmp_path / "in" / "model.safetensors").unlink()
    assert (logits(load_model(tmp_path / "in")) - logits(theirs)).abs().max() <= 1e-4
    run_peer(tmp_path, "-m", "litgpt", "convert_from_litgpt", str(tmp_path / "in"), str(tmp_path / "back"))
    state = torch.load(tmp_path / "back" / "model.pth", weights_only=True)
    assert torch.equal(state["model.layers.1.mlp.up_proj.weight"], theirs.model.layers[1].mlp.up_proj.weight)


_PEER_CONVERTS = """
import sys
from pathlib import Path
from litgpt import Config
from litgpt.scripts import convert_hf_checkpoint as module
folder = Path(sys.argv[1])
config = Config.from_file(folder / "model_config.yaml")
(folder / "lit_model.pth").unlink()
(folder / "model_config.yaml").unlink()
module.Config = type("Known", (), {"from_name": staticmethod(lambda name: config)})
module.convert_hf_checkpoint(folder, model_name="tiny")
"""
