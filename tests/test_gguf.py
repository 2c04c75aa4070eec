# Licensed under the Apache License 2.0, see the LICENSE file.

"""GGUF files as virtual Hugging Face folders: same config and tensors as the folder they were made from."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from litgpt import constants
from litgpt.checkpoint.gguf import GGUFFile
from litgpt.config import Config
from litgpt.errors import UserError
from tests.gguf_writer import close, write_gguf
from tests.tiny import save_tiny

ROWS = [
    "llama",
    "llama_linear",
    "llama_yarn",
    "llama_bias",
    "llama_mha",
    "llama_mqa",
    "qwen2",
    "qwen3",
    "mistral_window",
    "mixtral",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "gpt_neox_sequential",
    "phi",
    "phi3",
]
# A GGUF cannot say these patterns of layers; they are llama.cpp's (and the published models').
PUBLISHED_PATTERN = {"gemma2": {"layer_types": None, "num_hidden_layers": 3}}


def convert(row: str, folder: Path, **overrides: Any) -> tuple[dict[str, Any], Path]:
    save_tiny(row, folder / "hf", **overrides)
    path = folder / "model.gguf"
    return write_gguf(folder / "hf", path), path


@pytest.mark.parametrize("row", ROWS)
def test_same_tensors_and_config_as_the_folder(row: str, tmp_path: Path) -> None:
    config, path = convert(row, tmp_path)
    file = GGUFFile(path)
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    infos = file.tensors()
    assert set(infos) == set(expected)
    for name, tensor in expected.items():
        got = file.get(name)
        assert (tuple(got.shape), got.dtype) == infos[name]
        # Gemma's norms went through + 1 in float32.
        tolerance = 2e-7 if row.startswith("gemma") and "norm" in name else 0.0
        assert torch.allclose(got, tensor, rtol=0, atol=tolerance), name
    assert Config.from_hf(file.hf_config()) == Config.from_hf(config)


def test_release_lets_pages_go_and_tensors_stay_right(tmp_path: Path) -> None:
    _, path = convert("llama", tmp_path)
    file = GGUFFile(path)
    for name, tensor in {name: file.get(name) for name in file.tensors()}.items():
        expected = tensor.clone()
        file.release()
        assert torch.equal(tensor, expected)
        assert torch.equal(file.get(name), expected)


def test_name_without_the_type_of_the_weights(tmp_path: Path) -> None:
    _, path = convert("llama", tmp_path)
    for name, expected in [
        ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct"),
        ("Llama-3.2-1B-Instruct-UD-Q4_K_XL", "Llama-3.2-1B-Instruct"),
        ("Qwen2.5-7B-IQ2_XXS", "Qwen2.5-7B"),
        ("gemma-3-270m-it-f16", "gemma-3-270m-it"),
        ("big-BF16-00001-of-00003", "big"),
        ("big-00001-of-00003", "big"),
        ("phi-2", "phi-2"),
        ("run.v2", "run.v2"),
    ]:
        path = path.rename(tmp_path / f"{name}.gguf")
        assert GGUFFile(path).name == expected
        assert Config.from_checkpoint(path).name == expected


def test_llama3_rope_is_found_again(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config, path = convert(
        "llama_llama3rope", tmp_path, head_dim=64, rope_parameters=rope, max_position_embeddings=131072
    )
    assert GGUFFile(path).hf_config()["rope_scaling"] == {k: v for k, v in rope.items() if k != "rope_theta"}
    assert Config.from_hf(GGUFFile(path).hf_config()) == Config.from_hf(config)


def test_other_rope_factors_are_kept_exactly(tmp_path: Path) -> None:
    config, path = convert("llama_llama3rope", tmp_path)  # its parameters are not those of any published model
    scaling = GGUFFile(path).hf_config()["rope_scaling"]
    assert scaling["rope_type"] == "longrope"
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    llama3, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), torch.device("cpu"))
    plain = config["rope_parameters"]["rope_theta"] ** -(torch.arange(0, 10, 2) / 10)
    torch.testing.assert_close(plain / torch.tensor(scaling["long_factor"]), llama3, rtol=1e-6, atol=0)
    assert scaling["short_factor"] == scaling["long_factor"]
    assert scaling["attention_factor"] == 1.0


@pytest.mark.parametrize(
    ("arch_row", "n_layer", "expected"),
    [("gemma2", 4, "SGSG"), ("gemma3_text", 7, "SSSSSGS")],
)
def test_layer_pattern_when_the_file_is_silent(arch_row: str, n_layer: int, expected: str, tmp_path: Path) -> None:
    kinds = {"S": "sliding_attention", "G": "full_attention"}
    layer_types = [kinds[kind] for kind in expected]
    _, path = convert(arch_row, tmp_path, num_hidden_layers=n_layer, layer_types=layer_types)
    file = GGUFFile(path)
    for key in ("attention.sliding_window_pattern", "rope.freq_base_swa", "attention.scale"):
        file.metadata.pop(f"{file.metadata['general.architecture']}.{key}", None)
    config = file.hf_config()
    assert config["layer_types"] == layer_types
    assert config["query_pre_attn_scalar"] == config["head_dim"]
    if arch_row == "gemma3_text":
        assert config["rope_local_base_freq"] == 10000.0


def test_phi2_with_fused_qkv(tmp_path: Path) -> None:
    """Older files of Phi-2 keep q, k and v in one tensor."""
    _, path = convert("phi", tmp_path)
    file = GGUFFile(path)
    names = [f"model.layers.1.self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    expected = {name: file.get(name) for name in names}
    reader = gguf.GGUFReader(path)
    stored = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    fused = tmp_path / "fused.gguf"
    writer = gguf.GGUFWriter(fused, "phi2")
    for key, value in file.metadata.items():
        if key.startswith("phi2."):
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    for kind in ("weight", "bias"):
        for layer in (0, 1):
            parts = [stored.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
            writer.add_tensor(f"blk.{layer}.attn_qkv.{kind}", np.concatenate(parts))
    for name, tensor in stored.items():
        writer.add_tensor(name, tensor)
    close(writer)
    fused_file = GGUFFile(fused)
    assert set(fused_file.tensors()) == set(file.tensors())
    for name, tensor in expected.items():
        assert torch.equal(fused_file.get(name), tensor)
        assert fused_file.tensors()[name].shape == tensor.shape


def write_llama(path: Path, tensors: dict[str, np.ndarray | tuple[np.ndarray, str]], **metadata: Any) -> Path:
    """The smallest llama metadata with these tensors: 4 heads of 64."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"embedding_length": 256, "block_count": 1, "feed_forward_length": 512, "context_length": 64}
    for key, value in ({**sizes, "attention.head_count": 4} | metadata).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=gguf.GGMLQuantizationType[tensor[1]])
        else:
            writer.add_tensor(name, tensor)
    close(writer)
    return path


# Largest error of a weight in units of its block's range: half a step, for K-quants with their coarser scales.
QUANTIZED = {"Q8_0": 1 / 250, "Q4_0": 1 / 14, "Q4_1": 1 / 28, "Q5_0": 1 / 28, "Q5_1": 1 / 60}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_tensors(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 256)
    quantized = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    file = GGUFFile(write_llama(tmp_path / "a.gguf", {"token_embd.weight": (quantized, kind)}))
    got = file.get("model.embed_tokens.weight")
    assert got.dtype == torch.float32
    assert file.tensors()["model.embed_tokens.weight"] == ((6, 256), torch.float32)
    blocks = weight.view(6, 8, 32)
    step = (blocks.amax(-1) - blocks.amin(-1)).max().item() * QUANTIZED[kind] * 1.1
    assert (got - weight).abs().max() < step


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_against_the_definition(kind: str, tmp_path: Path) -> None:
    """Random blocks decoded value by value, after the layout in llama.cpp's ggml-quants.c."""
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    raw = np.random.default_rng(0).integers(0, 256, size=(3, block_bytes), dtype=np.uint8)
    scales = np.array([[0.5, 0.25]] * 3, dtype=np.float16).view(np.uint8)
    if kind == "Q6_K":
        raw[:, -2:] = scales[:, :2]
    else:
        raw[:, :4] = scales
    file = GGUFFile(write_llama(tmp_path / "a.gguf", {"token_embd.weight": (raw, kind)}))
    expected = torch.tensor([decode_block(kind, row.tolist()) for row in raw])
    assert torch.equal(file.get("model.embed_tokens.weight"), expected)


def decode_block(kind: str, raw: list[int]) -> list[float]:
    return decode_q6_k(raw) if kind == "Q6_K" else decode_q4_q5_k(raw, high_bits=kind == "Q5_K")


def decode_q4_q5_k(raw: list[int], high_bits: bool) -> list[float]:
    scales, rest = raw[4:16], raw[16:]
    high, low = (rest[:32], rest[32:]) if high_bits else ([0] * 32, rest)
    out = []
    for group in range(8):
        if group < 4:
            scale, minimum = scales[group] & 63, scales[group + 4] & 63
        else:
            scale = (scales[group + 4] & 15) | (scales[group - 4] >> 6 << 4)
            minimum = (scales[group + 4] >> 4) | (scales[group] >> 6 << 4)
        for i in range(32):
            nibble = low[group // 2 * 32 + i] >> (4 * (group % 2)) & 15
            value = nibble + 16 * (high[i] >> group & 1)
            out.append(0.5 * scale * value - 0.25 * minimum)
    return out


def decode_q6_k(raw: list[int]) -> list[float]:
    low, high, scales = raw[:128], raw[128:192], raw[192:208]
    out = [0.0] * 256
    for half in range(2):
        for i in range(32):
            for quarter in range(4):
                nibble = low[half * 64 + i + 32 * (quarter % 2)] >> (4 * (quarter // 2)) & 15
                value = nibble | (high[half * 32 + i] >> (2 * quarter) & 3) << 4
                scale = scales[half * 8 + i // 16 + 2 * quarter]
                scale -= 256 if scale > 127 else 0
                out[half * 128 + quarter * 32 + i] = 0.5 * scale * (value - 32)
    return out


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_float_tensors_keep_their_dtype(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    weight = torch.randn(6, 256).to(dtype)
    raw = weight.view(torch.uint8).numpy()
    tensors = (
        {"token_embd.weight": (raw, kind), "blk.0.attn_q.weight": (raw, kind)}
        if kind == "BF16"
        else {"token_embd.weight": weight.numpy(), "blk.0.attn_q.weight": weight.numpy()}
    )
    path = write_llama(tmp_path / "a.gguf", tensors, **{"attention.head_count": 1})
    before = path.read_bytes()
    file = GGUFFile(path)
    got = file.get("model.embed_tokens.weight")
    assert got.dtype == dtype
    assert torch.equal(got, weight)
    assert file.hf_config()["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert file.get("model.layers.0.self_attn.q_proj.weight").dtype == dtype
    got.zero_()  # allowed, and the file stays as it is
    assert path.read_bytes() == before


def test_experts_in_tensors_of_their_own(tmp_path: Path) -> None:
    """Mixtral files from before April 2024."""
    weights = [torch.randn(512, 256) for _ in range(2)]
    tensors: dict[str, Any] = {"token_embd.weight": np.zeros((4, 256), dtype=np.float32)}
    tensors |= {f"blk.0.ffn_gate.{i}.weight": weight.numpy() for i, weight in enumerate(weights)}
    file = GGUFFile(write_llama(tmp_path / "a.gguf", tensors, expert_count=2, expert_used_count=1))
    for i, weight in enumerate(weights):
        assert torch.equal(file.get(f"model.layers.0.block_sparse_moe.experts.{i}.w1.weight"), weight)


def test_split_file(tmp_path: Path) -> None:
    config, path = convert("llama", tmp_path)
    reader = gguf.GGUFReader(path)
    whole = GGUFFile(path)
    names = [f"part-0000{i}-of-00002.gguf" for i in (1, 2)]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_uint16("split.count", 2)
        writer.add_uint16("split.no", number)
        if number == 0:
            for key, value in whole.metadata.items():
                if key.startswith("llama."):
                    (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        close(writer)
    for name in names:
        part = GGUFFile(tmp_path / name)
        assert set(part.tensors()) == set(whole.tensors())
        assert torch.equal(part.get("lm_head.weight"), whole.get("lm_head.weight"))
        assert Config.from_hf(part.hf_config()) == Config.from_hf(config)
    (tmp_path / names[1]).unlink()
    with pytest.raises(UserError, match="part-00002-of-00002"):
        GGUFFile(tmp_path / names[0])


def test_unmapped_tensors_are_all_named(tmp_path: Path) -> None:
    one = np.zeros((4, 256), dtype=np.float32)
    tensors = {
        "token_embd.weight": one,
        "blk.0.attn_sinks.weight": one,
        "mystery": one,
        "rope_freqs.weight": one[0, :32] + 1,
    }
    file = GGUFFile(write_llama(tmp_path / "a.gguf", tensors))
    with pytest.raises(UserError, match=r"2 tensors .* llama model: blk\.0\.attn_sinks\.weight, mystery"):
        file.tensors()


def test_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    close(gguf.GGUFWriter(path, "mamba"))
    with pytest.raises(UserError, match="'mamba' is not supported") as caught:
        GGUFFile(path).hf_config()
    assert "qwen3moe" in caught.value.hint


def test_missing_metadata_and_missing_model(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    close(gguf.GGUFWriter(path, "llama"))
    with pytest.raises(UserError, match="holds no model"):
        GGUFFile(path).hf_config()
    file = GGUFFile(write_llama(tmp_path / "b.gguf", {"token_embd.weight": np.zeros((4, 256), dtype=np.float32)}))
    del file.metadata["llama.block_count"]
    with pytest.raises(UserError, match=r"lacks the metadata llama\.block_count"):
        file.hf_config()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 2**31),
        ("attention.head_count", 0),
        ("embedding_length", "many"),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("attention.sliding_window_pattern", 0),
        ("attention.head_count_kv", [2, 4]),
    ],
)
def test_damaged_metadata(key: str, value: Any, tmp_path: Path) -> None:
    _, path = convert("gemma3_text", tmp_path)
    file = GGUFFile(path)
    file.metadata[f"gemma3.{key}"] = value
    with pytest.raises(UserError):
        file.hf_config()


def test_without_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        GGUFFile(tmp_path / "a.gguf")
    assert "pip install 'litgpt[gguf]'" in caught.value.hint


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"PK\x03\x04" + bytes(100), b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(40)],
    ids=["empty", "magic only", "a zip", "version 1"],
)
def test_no_gguf(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        GGUFFile(path)
    assert str(path) in caught.value.message
    assert caught.value.hint
    with pytest.raises(UserError, match="not a file"):
        GGUFFile(tmp_path / "missing.gguf")


def test_truncated_anywhere(tmp_path: Path) -> None:
    """Whatever is cut off the end, the answer is one error and comes at once."""
    _, path = convert("llama", tmp_path)
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    sizes = [*range(0, 3000, 7), len(whole) // 2, len(whole) - 4000]
    for size in sizes:
        cut.write_bytes(whole[:size])
        with pytest.raises(UserError) as caught:
            GGUFFile(cut)
        assert caught.value.hint


def test_absurd_lengths(tmp_path: Path) -> None:
    """Counts and lengths of 2**62 neither hang nor ask for memory."""
    huge = 2**62
    key = struct.pack("<Q", 1) + b"k"
    head = b"GGUF" + struct.pack("<I", 3)
    fields = {
        "fields": head + struct.pack("<QQ", 0, huge),
        "tensors": head + struct.pack("<QQ", huge, 0),
        "bytes": head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 0, huge),
        "strings": head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, huge),
        "string": head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IQ", 8, huge),
        "dims": head + struct.pack("<QQ", 1, 0) + key + struct.pack("<I", 2) + struct.pack("<QQIQ", huge, huge, 0, 0),
        "offset": head + struct.pack("<QQ", 1, 0) + key + struct.pack("<I", 1) + struct.pack("<QIQ", 4, 0, huge),
    }
    for name, content in fields.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content + bytes(64))
        with pytest.raises(UserError, match=r"damaged|truncated"):
            GGUFFile(path)


def test_flipped_bytes_in_the_header(tmp_path: Path) -> None:
    """Damage is a UserError or goes unnoticed, but never another exception."""
    _, path = convert("qwen3", tmp_path)
    whole = bytearray(path.read_bytes())
    generator = np.random.default_rng(0)
    damaged = tmp_path / "damaged.gguf"
    for position in generator.integers(4, 4000, size=300):
        broken = bytearray(whole)
        broken[position] ^= int(generator.integers(1, 256))
        damaged.write_bytes(broken)
        try:
            file = GGUFFile(damaged)
            file.hf_config()
            file.tensors()
        except UserError:
            pass


@pytest.mark.slow
@pytest.mark.timeout(900)  # the reference reads Gemma's vocabulary slowly, twice
@pytest.mark.parametrize("model", ["smollm2_gguf", "gemma3_gguf"])
def test_real_file_equals_transformers(model: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path: Path = request.getfixturevalue(model)
    file = GGUFFile(path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = file.hf_config()
    ours = transformers.CONFIG_MAPPING[config["model_type"]](**config).to_dict()
    same_fields = set(ours) - {"architectures", "dtype", "torch_dtype", "_name_or_path", "rms_norm_eps"}
    expected = theirs.config.to_dict()
    assert {k: ours[k] for k in same_fields} == {k: expected.get(k) for k in same_fields}
    assert ours["rms_norm_eps"] == pytest.approx(expected["rms_norm_eps"], rel=1e-6)
    state = theirs.state_dict()
    assert set(file.tensors()) == set(state) - {"lm_head.weight"}
    for name in file.tensors():
        assert torch.equal(file.get(name), state[name]), name


def test_opening_is_fast_and_lazy(smollm2_gguf: Path) -> None:
    """Nothing of the weights is read to list them."""
    file = GGUFFile(smollm2_gguf)
    infos = file.tensors()
    assert len(infos) == 272
    assert infos["model.embed_tokens.weight"] == ((49152, 576), torch.float32)
