# Licensed under the Apache License 2.0, see the LICENSE file.

"""From checkpoints to models and back: values, strictness, memory."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from litgpt.checkpoint import convert
from litgpt.checkpoint.convert import export_hf, load_model, save_litgpt
from litgpt.checkpoint.progress import byte_bar
from litgpt.checkpoint.save import check_manifest
from litgpt.checkpoint.source import open_source
from litgpt.checkpoint.writers import write_safetensors
from litgpt.config import Config
from litgpt.errors import UserError
from litgpt.model import GPT, Layers
from tests.tiny import NAMES, random_ids, randomize, save_tiny, tiny_hf_config

transformers = pytest.importorskip("transformers")

Edit = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def edit_weights(folder: Path, edit: Edit) -> None:
    """Rewrite `model.safetensors`."""
    weights = edit(load_file(folder / "model.safetensors"))
    save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def export_copy(model: GPT, source_dir: Path, out_dir: Path, **options: Any) -> None:
    with open_source(source_dir) as source:
        export_hf(model, model.config, out_dir, source.hf_config(), source.companion_files(), **options)


@torch.no_grad()
def assert_same_logits(ours: GPT, theirs: Any, tolerance: float = 1e-4) -> None:
    ids = random_ids((2, 12))
    assert (ours(ids) - theirs(ids).logits).abs().max().item() <= tolerance


def assert_same_state(first: nn.Module, second: nn.Module) -> None:
    expected, found = first.state_dict(), second.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


# The round trip


# In bfloat16 only the families whose tensors are cut or joined; transformers keeps DeepSeek's routers in float32.
BF16_NAMES = ("llama", "mixtral", "gpt_neox", "phi3", "gpt_oss")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in NAMES), *((name, torch.bfloat16) for name in BF16_NAMES)],
)
def test_round_trip_through_our_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Hugging Face folder -> our model -> exported folder -> transformers: the same bytes under the same names."""
    save_tiny(name, tmp_path / "in")
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=dtype)
    original.save_pretrained(tmp_path / "in")
    model = load_model(tmp_path / "in")
    assert not model.training
    assert all(parameter.requires_grad and parameter.device.type == "cpu" for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    export_copy(model, tmp_path / "in", tmp_path / "out")
    with open_source(tmp_path / "in") as before, open_source(tmp_path / "out") as after:
        assert after.tensors() == before.tensors()
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same_state(original, back)
    if dtype == torch.float32:  # the same tensors under another config.json would be another model
        assert_same_logits(model, back)


@pytest.mark.parametrize(
    "name", ["llama_bias", "gemma2", "mixtral", "deepseek_v3", "gpt_oss", "gpt_neox", "phi", "phi3"]
)
def test_round_trip_through_a_litgpt_folder(name: str, tmp_path: Path) -> None:
    theirs = save_tiny(name, tmp_path / "in")
    model = load_model(tmp_path / "in")
    with open_source(tmp_path / "in") as source:
        save_litgpt(model, model.config, tmp_path / "lit", source.hf_config(), source.companion_files())
    assert (tmp_path / "lit" / "generation_config.json").is_file()
    again = load_model(tmp_path / "lit")
    assert_same_state(model, again)
    assert_same_logits(again, theirs)
    export_copy(again, tmp_path / "lit", tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_state(theirs, back)
    assert_same_logits(again, back)


@pytest.mark.slow
def test_gguf_to_hugging_face_folder(smollm2_gguf: Path, tmp_path: Path) -> None:
    model = load_model(smollm2_gguf, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.transformer.wte.weight
    export_copy(model, smollm2_gguf, tmp_path)
    assert_same_state(model, load_model(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["torch_dtype"] == "bfloat16"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(theirs.lm_head.weight, model.lm_head.weight)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).decode([504, 2365]) == "The quick"


# Layouts of other writers


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_prefixes_and_vision_tensors(prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = save_tiny("gemma3_text", tmp_path)

    def edit(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in weights.items()}
        return renamed | {"vision_tower.vision_model.embeddings.patch_embedding.weight": torch.zeros(3, 3)}

    edit_weights(tmp_path, edit)
    with caplog.at_level(logging.INFO, "litgpt"):
        assert_same_logits(load_model(tmp_path), theirs)
    assert "vision_tower.vision_model.embeddings.patch_embedding.weight" in caplog.text


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe_unnormed", "deepseek_v3", "gpt_neox"])
def test_names_that_transformers_uses_in_memory(name: str, tmp_path: Path) -> None:
    """Stacked experts, and a head that is called otherwise on disk: what `torch.save(model.state_dict())` writes."""
    theirs = save_tiny(name, tmp_path)
    assert theirs.state_dict().keys() != load_file(tmp_path / "model.safetensors").keys()
    edit_weights(tmp_path, lambda weights: theirs.state_dict())
    assert_same_logits(load_model(tmp_path), theirs)


def test_buffers_of_old_gpt_neox_files(tmp_path: Path) -> None:
    theirs = save_tiny("gpt_neox", tmp_path)
    path = "gpt_neox.layers.0.attention."
    old = {path + "bias": torch.ones(1, 1, 8, 8), path + "masked_bias": torch.tensor(-1e9)}
    old[path + "rotary_emb.inv_freq"] = torch.ones(3)
    edit_weights(tmp_path, lambda weights: weights | old)
    assert_same_logits(load_model(tmp_path), theirs)


def test_pickled_checkpoint(tmp_path: Path) -> None:
    theirs = save_tiny("llama", tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert_same_logits(load_model(tmp_path), theirs)


def test_padded_vocabulary(tmp_path: Path) -> None:
    """The file has more rows than the config says."""
    save_tiny("llama", tmp_path)

    def pad(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = {name: weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        return weights | {name: torch.cat([tensor, torch.zeros(7, 36)]) for name, tensor in rows.items()}

    edit_weights(tmp_path, pad)
    model = load_model(tmp_path)
    assert model.config.padded_vocab_size == 120
    assert model.config.vocab_size == 113
    assert model.lm_head.weight.shape == model.transformer.wte.weight.shape == (120, 36)


# Tied embeddings


def test_tied_without_a_head(tmp_path: Path) -> None:
    theirs = save_tiny("qwen2", tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_same_logits(model, theirs)


def test_tied_with_only_a_head(tmp_path: Path) -> None:
    theirs = save_tiny("qwen2", tmp_path)
    edit_weights(tmp_path, lambda w: {k.replace("model.embed_tokens", "lm_head"): t for k, t in w.items()})
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_same_logits(model, theirs)


def test_tied_with_an_equal_copy(tmp_path: Path) -> None:
    theirs = save_tiny("qwen2", tmp_path)
    edit_weights(tmp_path, lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"]})
    model = load_model(tmp_path)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_same_logits(model, theirs)


def test_tied_with_an_unequal_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny("qwen2", tmp_path)
    edit_weights(tmp_path, lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"] + 1})
    model = load_model(tmp_path)
    assert not model.config.tie_embeddings
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight + 1)
    assert "differ" in caplog.text
    export_copy(model, tmp_path, tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(back.lm_head.weight, model.lm_head.weight)


def test_untied_without_a_head(tmp_path: Path) -> None:
    save_tiny("qwen2", tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"1 missing: lm_head\.weight"):
        load_model(tmp_path)


# Strictness


def test_all_problems_in_one_error_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("llama_bias", tmp_path)

    def spoil(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        del weights["model.layers.1.self_attn.k_proj.bias"], weights["model.norm.weight"]
        weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(51, 36)
        return weights | {"model.layers.0.self_attn.surprise": torch.zeros(1), "score.weight": torch.zeros(2, 36)}

    edit_weights(tmp_path, spoil)
    monkeypatch.setattr(convert, "_allocate", lambda *_: pytest.fail("allocated"))
    with pytest.raises(UserError) as caught:
        load_model(tmp_path)
    message = caught.value.message
    assert "2 unexpected: " in message
    assert "model.layers.0.self_attn.surprise" in message
    assert "score.weight" in message
    assert "2 missing: " in message
    assert "model.layers.1.self_attn.k_proj.bias" in message
    assert "model.norm.weight" in message
    assert "1 of the wrong shape: model.layers.0.mlp.up_proj.weight [51, 36] instead of [52, 36]" in message
    assert "q_proj" not in message


def test_tensors_of_a_part_that_the_model_lacks(tmp_path: Path) -> None:
    save_tiny("llama_bias", tmp_path)
    edit_config(tmp_path, mlp_bias=False)
    with pytest.raises(UserError, match=r"6 not in the model: model\.layers\.0\.mlp\.down_proj\.bias"):
        load_model(tmp_path)


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    edit_weights(tmp_path, lambda w: w | {"norm.weight": w["model.norm.weight"]})
    with pytest.raises(UserError, match=r"given more than once: transformer\.ln_f\.weight"):
        load_model(tmp_path)


def test_missing_expert(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path)
    lost = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    edit_weights(tmp_path, lambda w: {name: tensor for name, tensor in w.items() if name != lost})
    with pytest.raises(UserError, match=f"1 missing: {lost}"):
        load_model(tmp_path)


def test_too_many_layers(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    with pytest.raises(UserError, match="9 not in the model"):
        load_model(tmp_path, n_layer=1)


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "qweight"])
def test_quantized_folder_is_named_as_such(tmp_path: Path, suffix: str) -> None:
    save_tiny("llama", tmp_path)
    edit_weights(tmp_path, lambda w: w | {f"model.layers.0.mlp.up_proj.{suffix}": torch.zeros(1)})
    with pytest.raises(UserError) as caught:
        load_model(tmp_path)
    assert "quantized" in caught.value.hint


def test_eight_bit_weights_are_refused(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    edit_weights(tmp_path, lambda w: {name: tensor.to(torch.float8_e4m3fn) for name, tensor in w.items()})
    with pytest.raises(UserError, match="float8_e4m3fn"):
        load_model(tmp_path)


# Options


def test_dtype(tmp_path: Path) -> None:
    theirs = save_tiny("llama", tmp_path).half().float()
    model = load_model(tmp_path, dtype=torch.float16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert torch.equal(model.lm_head.weight.float(), theirs.lm_head.weight)


def test_dtype_of_a_mixed_file_is_that_of_most_weights(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    edit_weights(tmp_path, lambda w: {name: t if "norm" in name else t.bfloat16() for name, t in w.items()})
    assert {parameter.dtype for parameter in load_model(tmp_path).parameters()} == {torch.bfloat16}


def test_correction_bias_is_not_rounded(tmp_path: Path) -> None:
    theirs = save_tiny("deepseek_v3", tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    expected = theirs.model.layers[1].mlp.gate.e_score_correction_bias
    assert torch.equal(model.transformer.h[1].mlp.gate.e_score_correction_bias, expected)


def test_config_and_overrides(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    config = Config.from_checkpoint(tmp_path)
    before = dataclasses.asdict(config)
    model = load_model(tmp_path, config=config, block_size=17)
    assert model.max_seq_length == 17
    assert dataclasses.asdict(config) == before
    assert load_model(tmp_path, rope_base=5).config.rope_base == 5


def test_large_tensors_are_copied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_BLOCK", 1000)
    for name in ("llama", "gpt_neox", "mixtral", "gpt_oss"):
        theirs = save_tiny(name, tmp_path / name)
        assert_same_logits(load_model(tmp_path / name), theirs)


class Screen(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt_oss"])
def test_progress_reaches_its_end_on_a_terminal_only(
    name: str, is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(name, tmp_path)
    screen = Screen(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(convert, "byte_bar", lambda *args, **_: byte_bar(*args, mininterval=0))
    load_model(tmp_path)
    assert ("loading: 100%" in screen.getvalue()) == is_terminal
    assert "101%" not in screen.getvalue()
    assert is_terminal or not screen.getvalue()


def test_a_quick_load_shows_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", tmp_path)
    monkeypatch.setattr(sys, "stderr", screen := Screen(True))
    load_model(tmp_path)
    assert "loading" not in screen.getvalue()


# Variants


class WrappedLinear(nn.Module):
    def __init__(self, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out, bias=bias)
        self.extra = nn.Parameter(torch.empty(n_out))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.extra, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.extra - 3.0


class WrappingLayers(Layers):
    def linear(self, config: Config, path: str, role: str, n_in: int, n_out: int, bias: bool = False) -> nn.Module:
        if role in ("qkv", "head"):
            return WrappedLinear(n_in, n_out, bias)
        return super().linear(config, path, role, n_in, n_out, bias)


@dataclasses.dataclass
class VariantConfig(Config):
    strength: int = 1


class Variant(GPT):
    config_class = VariantConfig
    layers_class = WrappingLayers


@pytest.mark.parametrize("name", ["llama_bias", "qwen2", "mixtral"])
def test_variant_reads_a_plain_checkpoint(name: str, tmp_path: Path) -> None:
    theirs = save_tiny(name, tmp_path)
    model = load_model(tmp_path, gpt_class=Variant, strength=2)
    assert isinstance(model, Variant)
    assert model.config.strength == 2
    assert model.transformer.h[1].attn.qkv.extra.unique().tolist() == [3.0]
    assert_same_logits(model, theirs)


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_variant_is_as_strict(change: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    if change == "missing":
        edit_weights(tmp_path, lambda w: {key: tensor for key, tensor in w.items() if key != name})
    else:
        edit_weights(tmp_path, lambda w: w | {"model.layers.0.self_attn.q_proj.extra": torch.zeros(1)})
    with pytest.raises(UserError, match=f"1 {change}"):
        load_model(tmp_path, gpt_class=Variant)


# Exporting


def test_shards(tmp_path: Path) -> None:
    theirs = save_tiny("llama", tmp_path / "in")
    model = load_model(tmp_path / "in")
    out = tmp_path / "out"
    export_copy(model, tmp_path / "in", out, shard_size=30_000)
    parts = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(parts) > 2
    assert parts[0] == f"model-00001-of-{len(parts):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in theirs.state_dict().values())
    assert_same_state(theirs, transformers.AutoModelForCausalLM.from_pretrained(out))
    assert_same_state(model, load_model(out))
    export_copy(model, tmp_path / "in", out)  # fewer files: none of the old ones may stay
    assert [path.name for path in out.glob("model*")] == ["model.safetensors"]
    assert_same_state(model, load_model(out))
    check_manifest(out, hashes=True)


def test_somebody_elses_weights_are_not_mixed_with_ours(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    model = load_model(tmp_path)
    with pytest.raises(UserError, match="already holds weights"):
        export_copy(model, tmp_path, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_variants_own_tensors_have_no_place(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    model = load_model(tmp_path, gpt_class=Variant)
    with pytest.raises(UserError, match=r"transformer\.h\.0\.attn\.qkv\.extra"):
        export_copy(model, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("writer", ["hf", "litgpt"])
def test_interrupted_export_is_recognised(writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", tmp_path / "in")
    model = load_model(tmp_path / "in")
    out = tmp_path / "out"

    def export(**options: Any) -> None:
        if writer == "hf":
            export_copy(model, tmp_path / "in", out, **options)
        else:
            save_litgpt(model, model.config, out)

    def fail(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    export()
    with monkeypatch.context() as patch:
        patch.setattr(convert, "write_safetensors", fail)
        patch.setattr(convert, "write_state_dict", fail)
        with pytest.raises(KeyboardInterrupt):
            export()
    with pytest.raises(UserError, match="half written"):
        load_model(out)
    export()
    assert_same_state(model, load_model(out))


def test_interruption_between_two_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", tmp_path / "in")
    model = load_model(tmp_path / "in")
    written = []

    def write_two(path: Path, *arguments: Any) -> None:
        if len(written) == 2:
            raise OSError("no space left on device")
        written.append(path)
        write_safetensors(path, *arguments)

    monkeypatch.setattr(convert, "write_safetensors", write_two)
    with pytest.raises(OSError, match="no space"):
        export_copy(model, tmp_path / "in", tmp_path / "out", shard_size=30_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) == 2
    with pytest.raises(UserError, match="half written"):
        load_model(tmp_path / "out")


def test_text_part_of_a_multi_modal_config(tmp_path: Path) -> None:
    theirs = save_tiny("gemma3_text", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    model = load_model(tmp_path)
    assert_same_logits(model, theirs)
    export_copy(model, tmp_path, tmp_path / "out")
    assert_same_state(theirs, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["Gemma3", "Mistral3"])
def test_language_model_of_a_vision_model(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What transformers writes for the whole; the encoder of images is named as left out."""
    name = {"Gemma3": "gemma3_text", "Mistral3": "mistral_window"}[kind]
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"model_type": {"Gemma3": "siglip_vision_model", "Mistral3": "pixtral"}[kind], "image_size": 28}
    whole = getattr(transformers, f"{kind}Config")(
        text_config=tiny_hf_config(name).to_dict(), vision_config=vision | sizes | {"patch_size": 14}
    )
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(whole).float().eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "litgpt"):
        model = load_model(tmp_path)
    assert "not part of the language model, left out: " in caplog.text
    assert "vision_tower" in caplog.text
    assert "multi_modal_projector" in caplog.text
    assert_same_logits(model, theirs)


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text"])
def test_tied_stays_one_tensor_through_training_and_export(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path / "in")
    model = load_model(tmp_path / "in").train()
    before = model.lm_head.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(random_ids((2, 9))).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not torch.equal(model.lm_head.weight, before)
    export_copy(model.eval(), tmp_path / "in", tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert [n for n, t in stored.items() if t.shape == before.shape] == ["model.embed_tokens.weight"]
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert_same_logits(model, back)


def test_tied_litgpt_file_holds_one_tensor(tmp_path: Path) -> None:
    save_tiny("qwen2", tmp_path)
    model = load_model(tmp_path)
    save_litgpt(model, model.config, tmp_path / "lit")
    state = torch.load(tmp_path / "lit" / "lit_model.pth", weights_only=True)
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    assert load_model(tmp_path / "lit").config.tie_embeddings


# Memory and time

_MEASURE = """
import resource, sys, torch
import litgpt.model
from litgpt.checkpoint.convert import load_model
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
before = peak()
model = load_model(sys.argv[1], dtype=torch.bfloat16)
size = sum(parameter.nbytes for parameter in model.parameters())
print((peak() - before) / size, "torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("kind", "limit"), [("hf", 1.2), ("litgpt", 1.3)])
def test_loading_takes_one_copy_of_the_weights(kind: str, limit: float, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "in")
    config = Config.from_checkpoint(
        tmp_path / "in", n_layer=12, n_embd=576, n_head=9, n_query_groups=3, head_size=64, intermediate_size=1536,
        padded_vocab_size=49152, block_size=64, tie_embeddings=True,
    )  # fmt: skip
    model = GPT(config).bfloat16()
    sizes = {"hidden_size": 576, "num_hidden_layers": 12, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"head_dim": 64, "intermediate_size": 1536, "tie_word_embeddings": True, "vocab_size": 49152}
    edit_config(tmp_path / "in", **sizes)
    if kind == "hf":
        export_copy(model, tmp_path / "in", tmp_path / "out")
    else:
        save_litgpt(model, config, tmp_path / "out")
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    share, imported_dynamo = done.stdout.split()
    assert float(share) <= limit
    assert imported_dynamo == "False", "loading must not pay for importing torch's compiler"
