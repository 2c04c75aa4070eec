# Licensed under the Apache License 2.0, see the LICENSE file.

"""The surface of GPT that people who know LitGPT use, and the errors they can meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import litgpt
from litgpt import model as model_module
from litgpt.config import Config
from litgpt.model import GPT, Block, CausalSelfAttention, GptNeoxMLP, LLaMAMLP, MultiheadLatentAttention
from tests.tiny import random_ids, randomize, tiny_pair

TOY: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 4,
    "n_query_groups": 2,
    "n_embd": 32,
    "head_size": 8,
    "vocab_size": 50,
    "padded_vocab_size": 50,
    "block_size": 64,
    "intermediate_size": 44,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "rotary_percentage": 1.0,
}
LATENT = {"q_lora_rank": 6, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}


def toy(seed: int = 0, **overrides: Any) -> GPT:
    """Build a toy model with random weights; `overrides` are fields of `Config`."""
    model = GPT(Config(**{**TOY, **overrides})).eval()
    randomize(model, seed)
    return model


def ids(*shape: int) -> Tensor:
    """Draw token ids of the toy vocabulary."""
    return random_ids(shape, vocab_size=TOY["vocab_size"])


def test_names_people_import() -> None:
    names = (
        "GPT Block CausalSelfAttention MultiheadLatentAttention GptNeoxMLP LLaMAMLP GemmaMLP LLaMAMoE RMSNorm KVCache "
        "apply_rope build_rope_cache build_mask_cache batched_index_select"
    )
    assert [n for n in names.split() if not hasattr(model_module, n)] == []
    assert litgpt.GPT is GPT
    assert litgpt.Config is Config


def test_parts_can_be_built_alone() -> None:
    config = Config(**TOY)
    assert isinstance(Block(config, 1).attn, CausalSelfAttention)
    assert isinstance(LLaMAMLP(config), nn.Module)
    assert GptNeoxMLP(config, intermediate_size=9).fc.weight.shape == (9, 32)
    assert isinstance(
        Block(Config(**{**TOY, "n_query_groups": 4, "latent_attention": LATENT}), 0).attn, MultiheadLatentAttention
    )
    with pytest.raises(ValueError, match="intermediate_size"):
        Config(**{**TOY, "intermediate_size": None})


def test_from_name_takes_overrides() -> None:
    model = GPT.from_name("pythia-14m", n_layer=1, n_embd=32, n_head=4, intermediate_size=48)
    assert model.config.name == "pythia-14m"
    assert len(model.transformer.h) == 1
    with pytest.raises(ValueError, match="no-such-model"):
        GPT.from_name("no-such-model")


def test_max_seq_length() -> None:
    model = toy()
    assert model.max_seq_length == model.config.block_size == 64
    assert model.cos.size(0) == model.sin.size(0) == 64
    model.max_seq_length = 20
    assert model.max_seq_length == model.cos.size(0) == 20
    with pytest.raises(ValueError, match=r"21.*20"):
        model(ids(1, 21))
    model.max_seq_length = 64
    assert model(ids(1, 64)).shape == (1, 64, 50)
    with pytest.raises(ValueError, match=r"65.*64"):
        model.max_seq_length = 65
    cos, sin = model.rope_cache()[:2]
    assert torch.equal(cos, model.cos)
    assert torch.equal(sin, model.sin)


@torch.no_grad()
def test_the_prefix_does_not_see_the_suffix() -> None:
    model, x = toy(), ids(2, 30)
    torch.testing.assert_close(model(x)[:, :12], model(x[:, :12]), atol=1e-5, rtol=0)


@torch.no_grad()
def test_lm_head_chunk_size_gives_the_same_logits_in_pieces() -> None:
    model, x = toy(final_logit_softcapping=1.5), ids(2, 11)
    whole, pieces = model(x), model(x, lm_head_chunk_size=4)
    assert [p.shape for p in pieces] == [(2, 4, 50), (2, 4, 50), (2, 3, 50)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    assert whole.abs().max() <= 1.5


@torch.no_grad()
def test_input_pos_surface() -> None:
    """A prompt, then single tokens, through `set_kv_cache` and `input_pos`; starting at 0 again starts over."""
    model, x = toy(), ids(2, 16)
    full = model(x)
    model.set_kv_cache(batch_size=2)
    for _ in range(2):
        parts = [model(x[:, :7], input_pos=torch.arange(7))]
        for t in range(7, 16):
            bound = t + 1 if t % 2 else None
            parts.append(model(x[:, t : t + 1], input_pos=torch.tensor([t]), input_pos_maxp1=bound))
        torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-5, rtol=0)
    model.clear_kv_cache()
    torch.testing.assert_close(model(x), full)


@torch.no_grad()
def test_input_pos_by_row() -> None:
    """Rows at different positions: `input_pos` of shape (B, T)."""
    model, x = toy(), ids(2, 16)
    full = model(x)
    model.set_kv_cache(batch_size=2, max_seq_length=16)
    model(x[:, :9], input_pos=torch.arange(9))
    rows = torch.stack([x[0, 9:12], x[1, 5:8]])
    out = model(rows, input_pos=torch.tensor([[9, 10, 11], [5, 6, 7]]))
    torch.testing.assert_close(out[0], full[0, 9:12], atol=1e-5, rtol=0)
    torch.testing.assert_close(out[1], full[1, 5:8], atol=1e-5, rtol=0)


@torch.no_grad()
def test_cache_misuse_is_one_clear_error() -> None:
    model, x = toy(), ids(2, 16)
    with pytest.raises(ValueError, match="set_kv_cache"):
        model(x, input_pos=torch.arange(16))
    model.set_kv_cache(batch_size=2, max_seq_length=10)
    with pytest.raises(ValueError, match=r"position 10 .* 10 positions"):
        model(x[:, :11], input_pos=torch.arange(11))
    with pytest.raises(ValueError, match=r"position 10 .* 10 positions"):
        model(x[:, :1], input_pos=torch.tensor([10]))
    with pytest.raises(ValueError, match=r"3.*2"):
        model(ids(3, 4), input_pos=torch.arange(4))
    for wrong in ([0, 7, 2, 3], [0, 0, 0, 3], [3, 2, 1, 0]):
        with pytest.raises(ValueError, match="contiguous"):
            model(x[:, :4], input_pos=torch.tensor(wrong))
    with pytest.raises(ValueError, match=r"negative, got -1"):
        model(x[:, :4], input_pos=torch.arange(-1, 3))
    model(x[:, :10], input_pos=torch.arange(10))  # still usable after the errors


@torch.no_grad()
def test_input_pos_goes_back_only_as_far_as_is_exact() -> None:
    """A ring that wrapped has overwritten what an earlier position would see; a gap was never written."""
    _, model = tiny_pair("mistral_window")
    x = ids(1, 40)
    model.set_kv_cache(1, max_seq_length=40)
    try:
        with pytest.raises(ValueError, match="position 3 would leave a gap"):
            model(x[:, 3:4], input_pos=torch.tensor([3]))
        model(x[:, :38], input_pos=torch.arange(38))
        with pytest.raises(ValueError, match="can go back 16 of them exactly"):
            model(x[:, 12:13], input_pos=torch.tensor([12]))
        again = model(x[:, 30:38], input_pos=torch.arange(30, 38))
        torch.testing.assert_close(again, model(x[:, :38])[:, 30:], atol=1e-5, rtol=0)
        assert model.kv_cache is not None
        assert model.kv_cache.lengths == [38]
    finally:
        model.clear_kv_cache()


@torch.no_grad()
def test_token_ids_beyond_the_embedding() -> None:
    model, x = toy(), ids(1, 5)
    x[0, 3] = 50
    with pytest.raises(ValueError, match=r"50"):
        model(x)
    with pytest.raises(ValueError, match=r"-1"):
        model(torch.tensor([[3, -1]]))


def test_tied_embeddings_are_one_parameter() -> None:
    model = toy(tie_embeddings=True)
    names = [n for n, _ in model.named_parameters()]
    assert sum(n in ("lm_head.weight", "transformer.wte.weight") for n in names) == 1
    assert model.lm_head.weight is model.transformer.wte.weight
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    other = toy(seed=1, tie_embeddings=True)
    other.load_state_dict(state, strict=True)
    assert torch.equal(other(ids(1, 4)), model(ids(1, 4)))
    del state["lm_head.weight"]  # Hugging Face files name the tensor once
    other.load_state_dict(state, strict=True)
    assert torch.equal(other(ids(1, 4)), model(ids(1, 4)))
    untied = toy()
    assert untied.lm_head.weight is not untied.transformer.wte.weight


@pytest.mark.parametrize("assign", [False, True])
def test_a_tied_model_that_loads_two_tensors_is_untied(assign: bool, caplog: pytest.LogCaptureFixture) -> None:
    source, model = toy(), toy(seed=1, tie_embeddings=True)
    model.load_state_dict(source.state_dict(), strict=True, assign=assign)
    assert "differ" in caplog.text
    assert not model.config.tie_embeddings
    assert torch.equal(model(ids(1, 4)), source(ids(1, 4)))


@pytest.mark.parametrize("overrides", [{}, {"tie_embeddings": True}, {"n_query_groups": 4, "latent_attention": LATENT}])
@torch.no_grad()
def test_meta_init_then_assign(overrides: dict[str, Any]) -> None:
    source = toy(**overrides)
    with torch.device("meta"):
        model = GPT(source.config).eval()
    assert all(p.is_meta for p in model.parameters())
    model.load_state_dict(source.state_dict(), strict=True, assign=True)
    assert not any(p.is_meta for p in model.parameters())
    if overrides.get("tie_embeddings"):
        assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(model(ids(1, 9)), source(ids(1, 9)))


def test_every_parameter_gets_a_gradient() -> None:
    model = toy(
        attn_bias=True,
        norm_qk=True,
        post_attention_norm=True,
        post_mlp_norm=True,
        attention_sinks=True,
        sliding_window_size=4,
        sliding_window_indices=[1, 0],
        attention_logit_softcapping=5.0,
    ).train()
    x = ids(2, 17)
    logits = model(x[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert missing == []


def test_gradient_through_two_chunks_equals_the_full_forward() -> None:
    from litgpt.kvcache import KVCache

    model, x = toy(sliding_window_size=4, sliding_window_indices=[1, 0]).double(), ids(2, 14)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    expected = torch.autograd.grad(loss(model(x)), list(model.parameters()))
    cache = KVCache.from_config(model.config, "dense", batch_size=2, max_length=14, dtype=torch.float64)
    chunks = [model(x[:, a:b], cache=cache, step=cache.plan(b - a)) for a, b in [(0, 6), (6, 14)]]
    actual = torch.autograd.grad(loss(torch.cat(chunks, dim=1)), list(model.parameters()))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, atol=1e-7, rtol=1e-6)


@torch.no_grad()
def test_last_only_is_the_last_new_token_of_each_row() -> None:
    from litgpt.kvcache import KVCache

    model, x = toy(), ids(3, 8)
    cache = KVCache.from_config(model.config, "dense", batch_size=3, max_length=8)
    out = model(x, cache=cache, step=cache.plan([8, 3, 5]), last_only=True)
    assert out.shape == (3, 1, 50)
    for row, n in enumerate([8, 3, 5]):
        torch.testing.assert_close(out[row, 0], model(x[row : row + 1, :n])[0, -1], atol=1e-5, rtol=0)


@torch.no_grad()
def test_half_precision_stays_close() -> None:
    import copy

    _, model = tiny_pair("llama")
    x = random_ids((1, 20))
    expected, actual = model(x), copy.deepcopy(model).to(torch.bfloat16)(x)
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).abs().max() < 0.2 * expected.abs().max()
