# Licensed under the Apache License 2.0, see the LICENSE file.

"""Stores: what is read is what was written, up to the rounding of few bits, whatever the way it was written."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from litgpt.errors import UserError
from litgpt.kvcache import KVCache, LayerCache, LayerSpec
from litgpt.kvcache.quantized import BLOCK, QuantizedBuffer
from litgpt.kvcache.registry import POLICIES
from litgpt.model import GPT
from tests.tiny import random_ids, tiny_pair

LENGTH = 40
SIZES = (1, 7, 10, 64, 80, 128, 576)
CHUNKINGS = ([LENGTH], [1] * LENGTH, [7, 1, 13, 2, 2, 15], [3] * 13 + [1])


@functools.cache
def model_of(name: str) -> GPT:
    return copy.deepcopy(tiny_pair(name)[1]).double()


def run(model: GPT, kind: str, rows: list[list[int]], chunks: list[int], max_length: int = LENGTH) -> Tensor:
    """Logits of all positions, fed in chunks through a cache."""
    cache = KVCache.from_config(model.config, kind, len(rows), max_length, torch.float64)
    out, start = [], 0
    for n in chunks:
        out.append(model(torch.tensor([row[start : start + n] for row in rows]), cache=cache))
        start += n
    return torch.cat(out, dim=1)


def layer_after(spec: LayerSpec, k: Tensor, v: Tensor | None, chunks: list[int]) -> LayerCache:
    """Build one layer that has been fed `k` and `v` in chunks."""
    layer = POLICIES[spec.policy](spec, k.size(0), k.dtype)
    cache = KVCache([spec], k.size(0), k.dtype)
    start = 0
    for n in chunks:
        step = cache.plan(n)
        part = slice(start, start + n)
        layer.update(k[:, :, part], None if v is None else v[:, :, part], step)
        cache.commit(step)
        start += n
    return layer


# The numbers


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [8, 4])
def test_error_is_at_most_half_a_step(bits: int, size: int) -> None:
    x = torch.randn(2, 3, 16, size, dtype=torch.float64) * torch.logspace(-3, 3, 16)[:, None]
    x[:, 1] += 5  # an offset that all channels share
    x[:, 2, :, 0] *= 30  # a channel that stands out
    buffer = QuantizedBuffer(bits, (2, 3, 17), size, torch.float64)
    buffer.put_run(0, x)
    n_blocks, width = buffer.n_blocks, buffer.width
    assert width <= BLOCK[bits]
    error = F.pad((buffer.get(2, 16) - x).abs(), (0, n_blocks * width - size)).unflatten(-1, (n_blocks, width))
    scale = buffer.scale[:, :, :16].double()
    assert (error.amax(-1) <= scale * 0.501 + 1e-12).all()
    padded = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], n_blocks * width - size)), -1)
    low, high = padded.unflatten(-1, (n_blocks, width)).aminmax(dim=-1)
    # a step is the range in equal parts, a little more for what the zero point lost in rounding
    zero = buffer.zero[:, :, :16].double().abs()
    assert (scale <= 1.01 * ((high - low) / (2**bits - 1) + zero * 2**-8 / (2 ** (bits - 1) - 1)) + 1e-37).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [8, 4])
def test_extreme_values_stay_finite(bits: int, size: int, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    noise = torch.randn(1, 2, 5, size, dtype=torch.float64)
    rows = {
        "zeros": 0 * noise,
        "tiny": noise * 1e-7,
        "subnormal": noise * torch.finfo(dtype).tiny / 4,
        "limit": noise.sign() * limit,
        "constant at the limit": torch.full_like(noise, -limit),
        "near the limit of float16": noise.sign() * 65504,
        "one outlier": torch.where(torch.arange(size) == 0, limit, noise),
    }
    for name, row in rows.items():
        x = row.clamp(-limit, limit).to(dtype)
        buffer = QuantizedBuffer(bits, (1, 2, 6), size, dtype)
        buffer.put_run(0, x)
        y = buffer.get(1, 5)
        assert torch.isfinite(y).all(), name
        assert torch.isfinite(buffer.scale).all(), name
        if name == "zeros":
            assert torch.equal(y, x)
        if name in ("tiny", "near the limit of float16"):
            # codes of 4 bits leave out the last eighth of float16's range, those of 8 bits the last 128th
            step = x.double().abs().max().item() / 2 ** (bits - 1)
            spacing = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # of the smallest numbers
            torch.testing.assert_close(y.double(), x.double(), rtol=0, atol=1.01 * step + 8 * spacing)


# The stores


@pytest.mark.parametrize("store", ["int8", "int4"])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_buffers_are_identical_under_any_chunking(store: str, latent: bool, window: int | None) -> None:
    groups, width = (1, 70) if latent else (2, 10)
    spec = LayerSpec(groups, width, 50 if latent else 10, LENGTH, window, slack=3, alias_v=latent, store=store)
    k = torch.randn(3, groups, LENGTH, width)
    v = None if latent else torch.randn(3, groups, LENGTH, 10)
    expected = layer_after(spec, k, v, CHUNKINGS[0])
    assert next(expected.buffers()).any()
    for chunks in CHUNKINGS[1:]:
        layer = layer_after(spec, k, v, chunks)
        for (name, a), (_, b) in zip(expected.named_buffers(), layer.named_buffers(), strict=True):
            assert torch.equal(a[:, :, :-1], b[:, :, :-1]), name  # the last slot takes what is not kept


@pytest.mark.parametrize("store", ["int8", "int4", "offload"])
@torch.no_grad()
def test_a_row_does_not_depend_on_its_batch(store: str) -> None:
    spec = LayerSpec(2, 10, 10, LENGTH, 9, slack=3, store=store)
    k, v = torch.randn(3, 2, LENGTH, 10), torch.randn(3, 2, LENGTH, 10)
    together = layer_after(spec, k, v, CHUNKINGS[2])
    for row in range(3):
        alone = layer_after(spec, k[row : row + 1], v[row : row + 1], CHUNKINGS[2])
        for a, b in zip(together.buffers(), alone.buffers(), strict=True):
            assert torch.equal(a[row, :, :-1], b[0, :, :-1])


@pytest.mark.parametrize("store", ["plain", "int8", "int4", "offload"])
def test_reading_fewer_rows_and_live_slots(store: str) -> None:
    layer = layer_after(LayerSpec(2, 10, 10, LENGTH, store=store), *torch.randn(2, 3, 2, LENGTH, 10), [LENGTH])
    whole_k, whole_v = layer.store.read(torch.empty(3))
    assert whole_k.shape == (3, 2, LENGTH + 1, 10)
    k, v = layer.store.read(torch.empty(2), live=5)
    assert k.size(0) == v.size(0) == 2
    assert torch.equal(k[:, :, :5], whole_k[:2, :, :5])
    assert torch.equal(v[:, :, :5], whole_v[:2, :, :5])
    assert store == "plain" or k.size(2) == 5


@pytest.mark.parametrize("store", ["int8", "int4", "offload"])
def test_what_is_forgotten_cannot_leak(store: str) -> None:
    cache = KVCache([LayerSpec(2, 10, 10, LENGTH, store=store)], 2)
    step = cache.plan(4)
    cache.layers[0].update(*torch.full((2, 2, 2, 4, 10), torch.nan), step)
    cache.commit(step)
    cache.reset_row(0)
    k, v = cache.layers[0].store.read(torch.empty(2))
    assert torch.equal(k[0], torch.zeros_like(k[0]))
    assert torch.equal(v[0], torch.zeros_like(v[0]))
    assert k[1].isnan().any(), "values that are not numbers are kept as they are"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_gradients_are_refused(kind: str) -> None:
    model = tiny_pair("llama")[1]
    cache = KVCache.from_config(model.config, kind, 1, LENGTH)
    with pytest.raises(UserError, match=f"{kind} KV cache has no gradient.*no_grad"):
        model(random_ids((1, 4)), cache=cache)
    assert cache.lengths == [0]
    with torch.no_grad():
        model(random_ids((1, 4)), cache=cache)


def test_gradients_flow_through_offloaded_buffers() -> None:
    model = copy.deepcopy(tiny_pair("llama")[1])
    ids = random_ids((1, 12))
    gradients = []
    for kind in ("dense", "offload"):
        model.zero_grad()
        cache = KVCache.from_config(model.config, kind, 1, LENGTH)
        (model(ids[:, :7], cache=cache).sum() + model(ids[:, 7:], cache=cache).sum()).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


# In a model


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "int8"),
        ("gemma3_text", "int8"),  # rings that wrap, and chunks longer than they take in place
        ("gemma3_text", "int4"),
        ("deepseek_v3", "int8"),
        ("deepseek_v3", "int4"),
        ("llama", "window:9,int8"),
        ("llama", "offload"),
    ],
)
@torch.no_grad()
def test_logits_do_not_depend_on_chunks_or_batch(name: str, kind: str) -> None:
    model = model_of(name)
    rows = random_ids((3, LENGTH)).tolist()
    expected = run(model, kind, rows, CHUNKINGS[0])
    for chunks in CHUNKINGS[1:]:
        torch.testing.assert_close(run(model, kind, rows, chunks), expected, atol=1e-10, rtol=0)
    alone = run(model, kind, rows[1:2], CHUNKINGS[2])
    torch.testing.assert_close(alone, expected[1:2], atol=1e-10, rtol=0)


@pytest.mark.parametrize("policy", ["h2o", "snap", "tova"])
@pytest.mark.parametrize(("name", "store"), [("llama", "int8"), ("gemma3_text", "int8"), ("deepseek_v3", "int4")])
@torch.no_grad()
def test_evicting_with_room_for_everything_is_the_store_alone(name: str, store: str, policy: str) -> None:
    model, rows = model_of(name), random_ids((2, LENGTH)).tolist()
    expected = run(model, store, rows, CHUNKINGS[2])
    evicting = run(model, f"{policy}:{LENGTH},{store}", rows, CHUNKINGS[2])
    torch.testing.assert_close(evicting, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("kind", "most"), [("h2o:12,int8", 0.05), ("h2o:12,int4", 0.5)])
@torch.no_grad()
def test_evicting_quantized_stays_near_evicting_plain(kind: str, most: float) -> None:
    model, rows = model_of("llama"), random_ids((2, LENGTH)).tolist()
    chunks = [4] * 10
    kl = mean_kl(run(model, "h2o:12", rows, chunks), run(model, kind, rows, chunks))
    assert kl < most


@pytest.mark.parametrize("kind", ["int8", "int4", "offload"])
@torch.no_grad()
def test_rewind_fork_and_reset(kind: str) -> None:
    model, tokens = model_of("gemma3_text"), random_ids((1, 30))
    expected = run(model, kind, tokens.tolist(), [30])
    cache = KVCache.from_config(model.config, kind, 2, LENGTH, torch.float64)
    model(tokens[:, :20].expand(2, -1), cache=cache)
    model(random_ids((2, 3), seed=7), cache=cache)
    cache.rewind(3)
    cache.reset_row(1)
    cache.import_row(1, cache.export_row(0))
    out = model(tokens[:, 20:].expand(2, -1), cache=cache)
    for row in range(2):
        torch.testing.assert_close(out[row], expected[0, 20:], atol=1e-10, rtol=0)


def mean_kl(reference: Tensor, other: Tensor) -> float:
    """Mean over positions of KL(reference || other) of the next token, in nats."""
    a, b = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return F.kl_div(b, a, reduction="none", log_target=True).sum(-1).mean().item()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi3"])
@torch.no_grad()
def test_error_of_a_tiny_model(name: str) -> None:
    model, rows = model_of(name), random_ids((2, LENGTH)).tolist()
    plain = run(model, "dense", rows, [LENGTH])
    errors = {}
    for kind in ("offload", "int8", "int4"):
        quantized = run(model, kind, rows, [LENGTH])
        errors[kind] = mean_kl(plain, quantized)
        print(f"{name} {kind}: largest logit error {(quantized - plain).abs().max():.4f}, KL {errors[kind]:.2e}")
    assert errors["offload"] == 0
    assert errors["int8"] < 1e-3
    assert errors["int4"] < 0.1


TEXT = (
    "The lighthouse keeper kept a notebook. Each evening he wrote down the height of the tide, the colour of the sky "
    "and the number of gulls on the railing, although nobody had asked him to. Years later a student of the weather "
    "found the notebooks in a shed and saw that the gulls left two days before every great storm. "
)


@pytest.mark.slow
@torch.no_grad()
def test_error_of_a_real_model(smollm2_gguf: Path) -> None:
    from litgpt.tokenizer import Tokenizer

    model = GPT.from_checkpoint(smollm2_gguf, dtype=torch.float32)
    ids = Tokenizer(smollm2_gguf).encode(TEXT * 3).unsqueeze(0)[:, :256].long()
    logits = {}
    for kind in ("dense", "int8", "int4"):
        cache = KVCache.from_config(model.config, kind, 1, ids.size(1))
        logits[kind] = torch.cat([model(part, cache=cache) for part in ids.split(64, dim=1)], dim=1)[0]
    plain = logits.pop("dense")
    entropy = F.cross_entropy(plain[:-1], ids[0, 1:]).item()
    kl = {}
    for kind, quantized in logits.items():
        kl[kind] = mean_kl(plain, quantized)
        same = (quantized.argmax(-1) == plain.argmax(-1)).double().mean()
        loss = F.cross_entropy(quantized[:-1], ids[0, 1:]).item()
        print(
            f"SmolLM2 {kind}: mean logit error {(quantized - plain).abs().mean():.4f}, KL {kl[kind]:.2e} nats, "
            f"same first choice {same:.1%}, loss {loss:.4f} (plain {entropy:.4f})"
        )
    assert kl["int8"] < 1e-3
    assert kl["int4"] < 0.2
