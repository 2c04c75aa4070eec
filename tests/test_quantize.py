# Licensed under the Apache License 2.0, see the LICENSE file.

"""Weights in 4 and 8 bits. The oracles are a model with the same weights unpacked, and the formats' definitions."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from litgpt import adapter, adapter_v2, lora
from litgpt.api import LLM
from litgpt.checkpoint.convert import load_model, save_litgpt
from litgpt.errors import UserError
from litgpt.generate.base import generate
from litgpt.generate.compiled import CompiledDecode
from litgpt.generate.loading import load
from litgpt.kvcache import KVCache
from litgpt.model import GPT
from litgpt.peft import VariantGPT, dense_weight, mark_only_variant_as_trainable
from litgpt.quantize import check_quantization, is_quantized, load_quantized, quantize_model
from litgpt.quantized_linear import QuantizedExperts, QuantizedLinear
from tests.live_bytes import LiveBytes
from tests.tiny import random_ids
from tests.tiny_text import VOCAB_SIZE, write_tokenizer

pytest.importorskip("bitsandbytes")
BNB = ["bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq", "bnb.int8"]
ALL = [*BNB, "bnb.int8-training", "torchao.int8"]
# What rounding to so many values costs on normally distributed weights, as a part of their length: [at least, at most]
ERRORS = {"nf4": (0.08, 0.10), "fp4": (0.11, 0.14), "int8": (0.003, 0.008)}

SMALL: dict[str, Any] = {
    "block_size": 64,
    "vocab_size": 100,
    "padded_vocab_size": 100,
    "n_layer": 2,
    "n_head": 4,
    "n_query_groups": 2,
    "n_embd": 64,
    "head_size": 16,
    "intermediate_size": 128,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "bias": False,
}
MOE = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 64}
LATENT = {
    "n_query_groups": 4,
    "latent_attention": {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}


def small(gpt_class: type[GPT] = GPT, seed: int = 0, **fields: Any) -> GPT:
    torch.manual_seed(seed)
    model = gpt_class(gpt_class.config_class(**{**SMALL, **fields}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.08)
    return model.eval()


def small_lora(**fields: Any) -> GPT:
    switches = dict.fromkeys(("lora_query", "lora_key", "lora_value", "lora_projection", "lora_mlp"), True)
    return small(lora.GPT, **{"lora_r": 4, "lora_alpha": 8, **switches, **fields})


def save_checkpoint(folder: Path, **fields: Any) -> None:
    """A random model and a tokenizer."""
    write_tokenizer(folder)
    model = small(vocab_size=VOCAB_SIZE, padded_vocab_size=VOCAB_SIZE, **fields)
    save_litgpt(model, model.config, folder)


def unpack(model: nn.Module) -> None:
    """Put a plain map with the unpacked weight in place of every quantized one: the oracle."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, QuantizedLinear):
                plain = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                plain.weight = nn.Parameter(child.weight.clone(), requires_grad=False)
                plain.bias = child.bias
                setattr(module, name, plain)
            elif isinstance(child, QuantizedExperts):
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(child.dense(), requires_grad=False))


def quantized_paths(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, QuantizedLinear)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    model = small(n_embd=128, n_layer=3)
    save_litgpt(model, model.config, path)
    return path


# What is stored


@pytest.mark.parametrize("quantize", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_error(quantize: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 192, bias=True, dtype=dtype))
    nn.init.normal_(plain[0].weight, std=0.05)
    before = plain[0].weight.detach().clone()
    quantize_model(plain, quantize)
    quantized = plain[0]
    assert isinstance(quantized, QuantizedLinear)
    error = ((quantized.weight - before).float().norm() / before.float().norm()).item()
    low, high = next(span for kind, span in ERRORS.items() if kind in quantize)
    assert low <= error <= high
    x = torch.randn(2, 3, 256, dtype=dtype)
    y = quantized(x)
    assert y.dtype == dtype
    expected = F.linear(x.double(), quantized.weight.double(), quantized.bias.double())
    assert (y.double() - expected).norm() <= 3 * torch.finfo(dtype).eps * expected.norm()


def test_nf4_takes_the_nearest_of_sixteen_values() -> None:
    """The values are printed in appendix E of https://arxiv.org/abs/2305.14314; each block is scaled to [-1, 1]."""
    values = torch.tensor(
        [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]  # noqa: RUF005
        + [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
    )
    layer = nn.Sequential(nn.Linear(128, 6, bias=False))
    blocks = layer[0].weight.detach().clone().view(-1, 64)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    nearest = ((blocks / scale).unsqueeze(-1) - values).abs().argmin(dim=-1)
    quantize_model(layer, "bnb.nf4")
    torch.testing.assert_close(layer[0].weight, (values[nearest] * scale).view(6, 128))


@pytest.mark.parametrize("quantize", ["bnb.int8", "torchao.int8"])
def test_int8_rounds_each_row_by_its_largest_number(quantize: str) -> None:
    layer = nn.Sequential(nn.Linear(64, 5, bias=False))
    weight = layer[0].weight.detach().clone()
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    quantize_model(layer, quantize)
    # bitsandbytes divides in 16 bits, so a number half-way between two steps may go either way; torchao's steps are a
    # little smaller, and the largest numbers of a row are cut
    assert ((layer[0].weight - weight).abs() <= 0.57 * scale).all()


@pytest.mark.parametrize(
    ("quantize", "bits"), [("bnb.nf4", 4.5), ("bnb.nf4-dq", 4.13), ("bnb.int8", 8.13), ("torchao.int8", 8.13)]
)
def test_bits_a_weight(quantize: str, bits: float) -> None:
    layer = nn.Sequential(nn.Linear(256, 256, bias=False))
    quantize_model(layer, quantize)
    assert layer[0].nbytes * 8 / 256**2 == pytest.approx(bits, abs=0.02)


@pytest.mark.parametrize("quantize", ALL)
def test_changing_the_dtype_of_a_model_rounds_nothing(quantize: str) -> None:
    layer = nn.Sequential(nn.Linear(128, 64, bias=True))
    quantize_model(layer, quantize)
    before = layer[0].weight.clone()
    layer.to(torch.bfloat16).to(torch.float32)
    torch.testing.assert_close(layer[0].dense(torch.float32), before, rtol=0, atol=0)


# Models


@pytest.mark.parametrize("quantize", BNB)
@pytest.mark.parametrize("fields", [{}, MOE, LATENT, {"bias": True}], ids=["dense", "moe", "latent", "bias"])
def test_a_quantized_model_computes_with_the_unpacked_weights(quantize: str, fields: dict[str, Any]) -> None:
    model = small(**fields)
    quantize_model(model, quantize)
    ids = random_ids((2, 12), vocab_size=100)
    with torch.no_grad():
        found = model(ids)
        one = model(ids[:1, :1])  # so few rows that the experts' weights are gathered
        unpack(model)
        torch.testing.assert_close(found, model(ids), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one, model(ids[:1, :1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, MOE, {**MOE, "n_shared_expert": 1}, LATENT])
def test_head_embedding_and_router_stay(fields: dict[str, Any]) -> None:
    model = small(**fields)
    kept = {n: p for n, p in model.named_parameters() if any(w in n for w in ("lm_head", "wte", "gate", "norm", "ln"))}
    assert len(kept) >= 7
    quantize_model(model, "bnb.int8")
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in kept.items())
    others = [name for name, parameter in after.items() if parameter.is_floating_point() and name not in kept]
    assert others == []


def test_the_head_is_quantized_when_asked_for() -> None:
    model = small()
    quantize_model(model, "bnb.int8", keep=())
    assert isinstance(model.lm_head, QuantizedLinear)


@pytest.mark.parametrize("fields", [{}, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("quantize", ["bnb.nf4", "bnb.int8", "torchao.int8"])
def test_generating_with_a_cache(quantize: str, fields: dict[str, Any]) -> None:
    model = small(**fields)
    quantize_model(model, quantize)
    prompt = random_ids((7,), vocab_size=100)
    found = generate(model, prompt, 20, temperature=0.0)
    unpack(model)
    assert found.tolist() == generate(model, prompt, 20, temperature=0.0).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["bnb.nf4-dq", "bnb.int8", "torchao.int8"])
def test_compiled_decoding(quantize: str) -> None:
    model = small(n_layer=1)
    quantize_model(model, quantize)
    caches = [KVCache.from_config(model.config, batch_size=1, max_length=16) for _ in range(2)]
    decode = CompiledDecode(model)
    with torch.inference_mode():
        for token in (5, 17, 3):
            ids = torch.tensor([[token]])
            compiled = decode(ids, caches[0], caches[0].plan(1))
            torch.testing.assert_close(compiled, model(ids, cache=caches[1]), rtol=1e-4, atol=1e-5)


def test_quantized_experts_say_that_they_do_not_compile(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, **MOE)
    loaded = load(tmp_path, precision="32-true", device="cpu", quantize="bnb.int8")
    assert loaded.engine() is not None
    with pytest.raises(UserError, match="experts do not compile"):
        loaded.engine(compile=True)


# Training


@pytest.mark.parametrize("quantize", ALL)
@pytest.mark.parametrize("fields", [{}, MOE], ids=["dense", "moe"])
def test_gradients_of_lora_are_those_of_the_unpacked_base(quantize: str, fields: dict[str, Any]) -> None:
    model = small_lora(**fields).train()
    quantize_model(model, quantize)
    assert isinstance(model, VariantGPT)
    mark_only_variant_as_trainable(model)
    assert any(".linear" in path for path in quantized_paths(model))
    ids = random_ids((2, 12), vocab_size=100)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        logits = model(ids)
        assert isinstance(logits, torch.Tensor)
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    found = gradients()
    assert found
    assert all("lora_" in name for name in found)
    unpack(model)
    expected = gradients()
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("variant", [lora, adapter, adapter_v2])
def test_training_leaves_the_base_as_it_is(variant: Any) -> None:
    fields = {"lora_r": 2, "lora_query": True, "lora_mlp": True} if variant is lora else {"adapter_start_layer": 0}
    model = small(variant.GPT, **fields).train()
    quantize_model(model, "bnb.nf4")
    mark_only_variant_as_trainable(model)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    ids, losses = random_ids((2, 12), vocab_size=100), []
    for _ in range(4):
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = dict(model.named_parameters())
    moved = {name for name, weight in weights.items() if not torch.equal(weight, after[name])}
    assert moved
    assert moved == {name for name in moved if after[name].requires_grad}


def test_the_backward_pass_keeps_no_unpacked_weight() -> None:
    layer = nn.Sequential(nn.Linear(512, 512, bias=False))
    quantize_model(layer, "bnb.int8")
    x = torch.randn(1, 512, requires_grad=True)
    with LiveBytes() as live:
        y = layer(x)
        assert live.now < 0.1 * 512 * 512 * 4
        y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0], layer[0].weight.sum(0), rtol=1e-4, atol=1e-4)


def test_under_autocast_the_product_is_in_16_bits() -> None:
    layer = nn.Sequential(nn.Linear(64, 64))
    quantize_model(layer, "bnb.nf4")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 64, requires_grad=True)).dtype == torch.bfloat16


@pytest.mark.parametrize("fields", [{"use_dora": True}, {"lora_init": "pissa"}, {"use_dora": True, **MOE}])
def test_starting_points_come_from_the_unpacked_base(folder: Path, fields: dict[str, Any], tmp_path: Path) -> None:
    if MOE.items() <= fields.items():
        model = small(**MOE)
        save_litgpt(model, model.config, tmp_path)
        folder = tmp_path
    options = {"lora_r": 4, "lora_mlp": True, "lora_query": True, **{k: fields[k] for k in fields if k not in MOE}}
    loaded = load_quantized(folder, "bnb.nf4", gpt_class=lora.GPT, **options)
    plain = load_quantized(folder, "bnb.nf4")
    ids = random_ids((1, 8), vocab_size=100)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids), plain(ids), rtol=1e-4, atol=1e-4)
    layer = lora.lora_layers(loaded)[0]
    if layer.use_dora:
        torch.testing.assert_close(layer.lora_magnitude, layer.row_lengths())
    assert dense_weight(layer.holder).dtype == torch.float32


def test_merging_into_a_quantized_base_is_refused() -> None:
    model = small_lora()
    quantize_model(model, "bnb.nf4")
    with pytest.raises(ValueError, match="quantized"):
        lora.merge_lora_weights(model)


# Loading


@pytest.mark.parametrize("quantize", ["bnb.nf4", "torchao.int8"])
@pytest.mark.parametrize("fields", [{}, MOE, LATENT], ids=["dense", "moe", "latent"])
def test_quantizing_while_reading_gives_the_same_model(tmp_path: Path, quantize: str, fields: dict[str, Any]) -> None:
    model = small(**fields)
    save_litgpt(model, model.config, tmp_path)
    later = load_model(tmp_path)
    quantize_model(later, quantize)
    found = load_quantized(tmp_path, quantize)
    assert quantized_paths(found) == quantized_paths(later)
    assert len(quantized_paths(found)) >= 8
    ids = random_ids((1, 8), vocab_size=100)
    with torch.no_grad():
        assert torch.equal(found(ids), later(ids))


def test_never_two_copies() -> None:
    with LiveBytes() as live:
        model = small(n_layer=16, n_embd=256, intermediate_size=512)
        before = live.now
        live.peak = before
        quantize_model(model, "bnb.int8")
        after = live.now
    quantized = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    stored = sum(m.nbytes for m in quantized)
    largest = 256 * 512 * 4
    assert stored > 10 * largest
    assert live.peak <= before + 4 * largest  # what rounding one weight takes; each is freed when it is replaced
    assert after <= before - sum(m.in_features * m.out_features * 4 for m in quantized) + 1.01 * stored


MEMORY = """
import sys, threading, time
from litgpt.quantize import load_quantized
from litgpt.checkpoint.convert import load_model
from bitsandbytes.functional import int8_vectorwise_quant
import torch
torch.set_num_threads(1)
load_model(sys.argv[2]) # what is imported on the way
int8_vectorwise_quant(torch.randn(64, 64).half())
def used():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:"))
before, most, done = used(), 0, False
def watch():
    global most
    while not done:
        most = max(most, used())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
load_quantized(sys.argv[1], "bnb.int8")
done = True
thread.join()
print(most - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux to say how much memory is used")
def test_memory_while_loading(tmp_path: Path, folder: Path) -> None:
    model = small(n_embd=512, intermediate_size=2048, n_layer=8)
    save_litgpt(model, model.config, tmp_path)
    dense = sum(parameter.nbytes for parameter in model.parameters())
    # The allocator keeps blocks below a size that it raises to 32 MB: real weights are larger, these are not
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEMORY, str(tmp_path), str(folder)]
    peak = int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    largest = 2048 * 512 * 4
    print(f"dense {dense / 1e6:.0f} MB, peak while loading in 8 bits {peak / 1e6:.0f} MB")
    assert peak < dense / 4 + 8 * largest + 8e6


def test_what_was_saved_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "litgpt"):
        load_quantized(folder, "bnb.nf4")
    assert "quantized 15 linear maps to bnb.nf4: 0.9 MB -> 0.1 MB" in caplog.text


# What people type


def test_llm(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    llm = LLM.load(tmp_path, distribute=None)
    llm.distribute("cpu", precision="32-true", quantize="bnb.int8")
    assert is_quantized(llm.model)
    text = llm.generate("Hi", max_new_tokens=5, temperature=0)
    later = LLM.load(tmp_path, device="cpu", precision="32-true")  # quantized when it is there already
    later.distribute("cpu", quantize="bnb.int8")
    assert later.generate("Hi", max_new_tokens=5, temperature=0) == text
    later.distribute("cpu")  # stays as it is
    assert later.generate("Hi", max_new_tokens=5, temperature=0) == text
    with pytest.raises(UserError, match="quantized"):
        later.distribute("cpu", precision="bf16-true")
    with pytest.raises(UserError, match="quantized"):
        later.distribute("cpu", quantize="bnb.nf4")
    with pytest.raises(UserError, match="cannot be saved"):
        later.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "64-true"])
def test_precisions_that_do_not_go_with_it(precision: str) -> None:
    with pytest.raises(UserError, match=precision) as caught:
        check_quantization("bnb.nf4", precision)
    assert "bf16-true" in caught.value.hint


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "32-true"])
def test_precisions(tmp_path: Path, precision: str) -> None:
    save_checkpoint(tmp_path)
    loaded = load(tmp_path, precision=precision, device="cpu", quantize="bnb.nf4")
    ids = loaded.encode("Hi")
    assert len(loaded.engine().generate([ids])[0].token_ids) > 0


@pytest.mark.parametrize(("quantize", "package"), [("bnb.nf4", "bitsandbytes"), ("torchao.int8", "torchao")])
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, quantize: str, package: str, tmp_path: Path
) -> None:
    monkeypatch.setattr("litgpt.constants.is_available", lambda module: module != package)
    with pytest.raises(UserError, match=package) as caught:
        load(tmp_path, quantize=quantize, precision="32-true")  # before anything is looked for
    assert "litgpt[quantize]" in caught.value.hint


def test_unknown_name() -> None:
    with pytest.raises(UserError, match=r"nf4") as caught:
        check_quantization("nf4")
    assert "bnb.nf4" in caught.value.hint
