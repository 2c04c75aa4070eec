# Licensed under the Apache License 2.0, see the LICENSE file.

"""Rotary embeddings: frequencies of every scheme and odd, partial and interleaved rotations, against `transformers`."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as apply_glm
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb

from litgpt.config import Config
from litgpt.rope import Rope, apply_rope, build_rope_cache, inverse_frequencies, rotate
from tests.tiny import NAMES, tiny_hf_config

HEAD = 64
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
SCHEMES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": YARN,
    "yarn_betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_not_truncated": {**YARN, "truncate": False},
    "yarn_mscales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn_attention_factor": {**YARN, "attention_factor": 1.3},
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "short_factor": [1.0 + 0.01 * i for i in range(HEAD // 2)],
        "long_factor": [1.0 + 0.5 * i for i in range(HEAD // 2)],
    },
}


def base_config(**fields: Any) -> Config:
    """Build the config of a one-layer model; `fields` are fields of `Config`."""
    defaults = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 10, "padded_vocab_size": 10, "bias": False}
    return Config(**{**defaults, **fields})


def llama_json(rope: dict[str, Any]) -> dict[str, Any]:
    """Build the config.json of a Llama with a rope scheme."""
    return {
        "model_type": "llama",
        "hidden_size": HEAD * 2,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 10,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, **rope},
    }


@pytest.mark.parametrize("length", [100, 512, 513, 4096])
@pytest.mark.parametrize("name", SCHEMES)
def test_inverse_frequencies_equal_transformers(name: str, length: int) -> None:
    import transformers

    data = llama_json(SCHEMES[name])
    theirs = transformers.LlamaConfig(**data)
    inv_freq, factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, seq_len=length)
    ours = Config.from_hf(json.loads(theirs.to_json_string(use_diff=False)))
    actual, actual_factor = inverse_frequencies(HEAD, ours.rope_base, ours.rope_adjustments, length)
    torch.testing.assert_close(actual, inv_freq, rtol=1e-6, atol=0)
    assert actual_factor == pytest.approx(factor, rel=1e-6)


def test_yarn_interpolates_slow_dimensions_and_keeps_fast_ones() -> None:
    plain, _ = inverse_frequencies(HEAD, 10000.0)
    adjustments = {"rope_type": "yarn", "factor": 8.0, "original_max_seq_len": 512, "beta_fast": 32, "beta_slow": 1}
    scaled, factor = inverse_frequencies(HEAD, 10000.0, adjustments)
    ratio = plain / scaled
    assert ratio[0] == 1  # turns often within the original length: as trained
    assert ratio[-1] == pytest.approx(8)  # turns less than once: interpolated
    assert (ratio.diff() >= 0).all()
    assert factor == pytest.approx(0.1 * math.log(8) + 1)


def test_litgpt_files_tell_the_scheme_by_their_keys() -> None:
    for adjustments, kind in [
        ({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 512}, "llama3"),
        ({"factor": 8.0, "beta_fast": 32, "beta_slow": 1, "original_max_seq_len": 512}, "yarn"),
        ({"factor": 8.0}, "linear"),
    ]:
        named, _ = inverse_frequencies(HEAD, 10000.0, {**adjustments, "rope_type": kind})
        torch.testing.assert_close(inverse_frequencies(HEAD, 10000.0, adjustments)[0], named)
    with pytest.raises(ValueError, match="unheard-of"):
        inverse_frequencies(HEAD, 10000.0, {"rope_type": "unheard-of"})


def neox_tables(n_elem: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of GPT-NeoX for `n_elem` rotated elements; its config class only takes even sizes."""
    config = SimpleNamespace(
        max_position_embeddings=length,
        head_dim=n_elem,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    )
    return GPTNeoXRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])


@pytest.mark.parametrize(
    ("head_size", "percentage"),
    [
        (6, 1.0),
        (10, 1.0),
        (10, 0.5),
        (7, 0.5),
        (6, 0.5),
        (5, 0.5),
        (10, 0.25),
        (4, 0.25),
        (8, 0.75),
        (3, 0.34),
        (2, 0.5),
    ],
)
def test_partial_rotary_equals_gpt_neox(head_size: int, percentage: float) -> None:
    """An odd number of rotated elements (one included) rotates in whole pairs, as GPT-NeoX does."""
    config = base_config(n_embd=head_size, rotary_percentage=percentage)
    x = torch.randn(2, 9, 1, head_size, generator=torch.Generator().manual_seed(0))  # (B, T, H, head size)
    cos, sin = neox_tables(config.rope_n_elem, 9)
    expected, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    (rows,) = Rope(config).rows(torch.arange(9)[None], 9, torch.float32)
    torch.testing.assert_close(rotate(x, rows).transpose(1, 2), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("head_size", [5, 7])
def test_odd_whole_head(head_size: int) -> None:
    """A head of odd size that rotates whole has no room for the last pair: GPT-NeoX's tables, cut."""
    config = base_config(n_embd=head_size, rotary_percentage=1.0)
    x = torch.randn(1, 9, 1, head_size, generator=torch.Generator().manual_seed(0))
    cos, sin = (table[..., :head_size] for table in neox_tables(head_size, 9))
    expected, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    (rows,) = Rope(config).rows(torch.arange(9)[None], 9, torch.float32)
    torch.testing.assert_close(rotate(x, rows).transpose(1, 2), expected, atol=1e-6, rtol=0)


def test_no_rotary_at_all() -> None:
    assert Rope(base_config(rotary_percentage=0.0)).rows(torch.arange(4)[None], 4, torch.float32) == [None]


@pytest.mark.parametrize("percentage", [0.5, 1.0])
def test_interleaved_equals_glm_and_scores_equal_deepseek(percentage: float) -> None:
    head_size, length = 12, 9
    config = base_config(n_embd=head_size, rotary_percentage=percentage, rope_interleave=True)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, length, 1, head_size, generator=generator) for _ in range(2))
    cos, sin = neox_tables(config.rope_n_elem, length)
    (rows,) = Rope(config).rows(torch.arange(length)[None], length, torch.float32)
    ours_q, ours_k = (rotate(x, rows).transpose(1, 2) for x in (q, k))
    theirs_q, theirs_k = apply_glm(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    torch.testing.assert_close(ours_q, theirs_q, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours_k, theirs_k, atol=1e-6, rtol=0)
    if percentage == 1.0:  # DeepSeek lays the result out differently, the scores are the same
        theirs_q, theirs_k = apply_rotary_pos_emb_interleave(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        torch.testing.assert_close(ours_q @ ours_k.mT, theirs_q @ theirs_k.mT, atol=1e-5, rtol=0)


def test_scores_depend_on_distance_only() -> None:
    config = base_config(n_embd=16, rotary_percentage=1.0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float32)

    def score(q_pos: int, k_pos: int) -> float:
        q_rows, k_rows = (Rope(config).rows(torch.tensor([[p]]), 1000, q.dtype)[0] for p in (q_pos, k_pos))
        return (rotate(q, q_rows) * rotate(k, k_rows)).sum().item()

    assert score(7, 3) == pytest.approx(score(504, 500), abs=1e-3)
    assert score(7, 3) != pytest.approx(score(8, 3), abs=1e-3)


def test_tables_by_layer() -> None:
    config = base_config(
        n_layer=3, rotary_percentage=1.0, rope_base=5000, rope_local_base_freq=10.0, rope_indices=[1, -1, 0]
    )
    local, none, everywhere = Rope(config).rows(torch.arange(5)[None], 5, torch.float32)
    assert none is None
    assert not torch.equal(local.cos, everywhere.cos)
    expected = base_config(rotary_percentage=1.0, rope_base=10)
    assert torch.equal(local.cos, Rope(expected).rows(torch.arange(5)[None], 5, torch.float32)[0].cos)


def test_rows_at_any_positions_are_the_table_at_these_positions() -> None:
    config = base_config(n_embd=16, rotary_percentage=1.0)
    positions = torch.tensor([[3, 4, -1], [100, 101, 102]])
    (rows,) = Rope(config).rows(positions, 128, torch.float32)
    cos, sin = build_rope_cache(128, 16)
    torch.testing.assert_close(rows.cos[1, :, 0], cos[100:103], atol=1e-6, rtol=0)
    torch.testing.assert_close(rows.sin.abs()[1, :, 0], sin.abs()[100:103], atol=1e-6, rtol=0)
    torch.testing.assert_close(rows.cos[0, :2, 0], cos[3:5], atol=1e-6, rtol=0)


def test_build_rope_cache_and_apply_rope_are_gpt_neox() -> None:
    cos, sin = build_rope_cache(9, 10)
    their_cos, their_sin = neox_tables(10, 9)
    torch.testing.assert_close(cos[None], their_cos)
    torch.testing.assert_close(sin[None], their_sin)
    x = torch.randn(2, 3, 9, 10)
    expected, _ = apply_rotary_pos_emb(x, x, their_cos, their_sin)
    torch.testing.assert_close(apply_rope(x, cos, sin), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(apply_rope(x, cos[None], sin[None]), expected, atol=1e-6, rtol=0)
    condensed, _ = build_rope_cache(9, 10, condense_ratio=4)
    torch.testing.assert_close(condensed[8], cos[2])
    both, _ = build_rope_cache(9, 10, base=500, rope_local_base_freq=10000.0)
    assert both.shape == (9, 10, 2)
    torch.testing.assert_close(both[..., 1], cos)


@pytest.mark.parametrize("n_elem", [1, 5])
def test_build_rope_cache_of_odd_sizes(n_elem: int) -> None:
    cos, sin = build_rope_cache(4, n_elem)
    assert cos.shape[0] == sin.shape[0] == 4
    assert torch.isfinite(cos).all()


@pytest.mark.parametrize("name", NAMES)
def test_frequencies_of_every_row(name: str) -> None:
    """The frequencies a tiny model of each family uses are those `transformers` uses."""
    theirs = tiny_hf_config(name)
    ours = Config.from_hf(json.loads(theirs.to_json_string(use_diff=False)))
    if ours.learned_positions:
        return  # nothing rotates
    parameters = theirs.rope_parameters
    parameters = parameters.get("full_attention", parameters)
    if parameters["rope_type"] == "default" or "full_attention" in theirs.rope_parameters:
        return  # no function in the table; compared by the logits
    for length in (16, 17):
        expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, seq_len=length)
        actual, actual_factor = inverse_frequencies(ours.rope_n_elem, ours.rope_base, ours.rope_adjustments, length)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
        assert actual_factor == pytest.approx(factor, rel=1e-6)
