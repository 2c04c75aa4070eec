# Licensed under the Apache License 2.0, see the LICENSE file.

"""Every feature of the plain model under every variant: what a variant must not break, cell by cell.

A feature joins by a row in `FEATURES`, a variant by a row in `VARIANTS`; `pytest -s` shows the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from litgpt import adapter, adapter_v2, ia3, lora, model
from litgpt.attention import Step
from litgpt.config import Config
from litgpt.generate.compiled import CompiledDecode
from litgpt.kvcache import KVCache, LayerSpec
from litgpt.peft import VariantGPT, variant_filter
from tests.tiny import random_ids, randomize

VOCABULARY = 31
LENGTH = 12
TOLERANCE = 1e-5
COMMON: dict[str, Any] = {
    "name": "tiny",
    "n_layer": 2,
    "n_embd": 12,
    "n_head": 4,
    "n_query_groups": 2,
    "head_size": 6,  # heads are not n_embd wide together
    "vocab_size": VOCABULARY,
    "padded_vocab_size": VOCABULARY,
    "block_size": 32,
    "intermediate_size": 14,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "rotary_percentage": 1.0,
}
WINDOW = {"sliding_window_size": 5, "sliding_window_indices": [1, 0, 1]}
MOE = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 10}
DENSE_FIRST = {**MOE, "first_k_dense_replace": 1, "n_layer": 3}
SHARED = {**MOE, "n_shared_expert": 2}
GROUPED = {
    **MOE,
    "n_expert_groups": 2,
    "n_topk_groups": 1,
    "n_topk_scores_per_group": 2,
    "moe_correction_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
LATENT = {
    "n_query_groups": 4,
    "latent_attention": {
        "q_lora_rank": 5,
        "kv_lora_rank": 7,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 3,
        "v_head_dim": 5,
    },
}
NEOX = {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "rotary_percentage": 0.5, "bias": True}
SCALED = {"query_growth": 0.3, "rope_adjustments": {"factor": 2.0, "original_max_seq_len": 4}}
FEATURES: dict[str, dict[str, Any]] = {
    "multi-head": {"n_query_groups": 4},
    "grouped-query": {},
    "multi-query": {"n_query_groups": 1},
    "biases": {**NEOX, "lm_head_bias": True},
    "qk-norm": {"norm_qk": True},
    "qk-norm olmo2": {"norm_qk": True, "norm_qk_type": "olmo2", "post_attention_norm": True, "post_mlp_norm": True},
    "qk-norm each head": {"norm_class_name": "LayerNorm", "norm_qk": True, "norm_qk_type": "each_head"},
    "clamped, scaled by position": {**SCALED, "clip_qkv": 0.5, "rope_indices": [0, -1]},
    "learned positions": {**NEOX, "rotary_percentage": 0.0, "learned_positions": True},
    "squared ReLU": {**NEOX, "mlp_activation": "relu2", "norm_unit_offset": True},
    "sliding window": {**WINDOW, "n_layer": 3},
    "softcap": {"attention_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "norm_unit_offset": True},
    "attention sinks": {"attention_sinks": True, "attn_bias": True},
    "tied embeddings": {"tie_embeddings": True, "mlp_class_name": "GemmaMLP", "scale_embeddings": True},
    "MoE": {**MOE, "moe_router_bias": True, "mlp_bias": True},
    "dense first": DENSE_FIRST,
    "shared experts": SHARED,
    "grouped router": GROUPED,
    "latent attention": LATENT,
    "latent, q whole": {**LATENT, "latent_attention": {**LATENT["latent_attention"], "q_lora_rank": None}},
    "parallel residual": {**NEOX, "parallel_residual": True},
    "parallel, shared norm": {**NEOX, "parallel_residual": True, "shared_attention_norm": True},
    "all at once": {**GROUPED, **SHARED, **DENSE_FIRST, **LATENT, **WINDOW, "n_expert_per_token": 2, "attn_bias": True},
    "all, plain attention": {
        **GROUPED,
        **SHARED,
        **DENSE_FIRST,
        **WINDOW,
        "bias": True,
        "norm_qk": True,
        "attention_logit_softcapping": 2.0,
        "parallel_residual": True,
    },
}
ALL_TARGETS = {
    "lora_r": 3,
    "lora_alpha": 5,
    **{f"lora_{part}": True for part in ("query", "key", "value", "projection", "mlp", "head")},
}
PROMPTS = {"adapter_prompt_length": 4, "adapter_start_layer": 1}


@dataclass(frozen=True)
class Variant:
    gpt_class: type[VariantGPT]
    mark: Callable[[Any], None]
    fields: dict[str, Any] = field(default_factory=dict)
    merges: bool = False


def _lora(**fields: Any) -> Variant:
    return Variant(lora.GPT, lora.mark_only_lora_as_trainable, {"lora_r": 3, "lora_alpha": 5, **fields}, True)


VARIANTS = {
    "LoRA q v": _lora(lora_query=True, lora_value=True),
    "LoRA k": _lora(lora_key=True),
    "LoRA all": _lora(**ALL_TARGETS, lora_router=True),
    "rsLoRA": _lora(lora_targets="all-linear", use_rslora=True),
    "DoRA": _lora(**ALL_TARGETS, use_dora=True),
    "PiSSA": _lora(**ALL_TARGETS, lora_init="pissa"),
    "Adapter": Variant(adapter.GPT, adapter.mark_only_adapter_as_trainable, PROMPTS),
    "Adapter V2": Variant(adapter_v2.GPT, adapter_v2.mark_only_adapter_v2_as_trainable, PROMPTS),
    "IA3": Variant(ia3.GPT, ia3.mark_only_ia3_as_trainable),
}
PASSED: set[tuple[str, str]] = set()


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    """Show which cells passed."""
    yield
    width = max(map(len, FEATURES))
    print(f"\n{'':{width}} | " + " | ".join(VARIANTS))
    for feature in FEATURES:
        cells = (("ok" if (feature, variant) in PASSED else "-").center(len(variant)) for variant in VARIANTS)
        print(f"{feature:{width}} | " + " | ".join(cells))
    print(f"{len(PASSED)} of {len(FEATURES) * len(VARIANTS)} cells passed")


@functools.cache
def base_of(feature: str) -> model.GPT:
    """The plain model of a row. All cells share it: never change it."""
    made = model.GPT(Config(**{**COMMON, **FEATURES[feature]})).eval()
    randomize(made, seed=len(feature))
    return made


@functools.cache
def data() -> Tensor:
    return random_ids((2, LENGTH), seed=3, vocab_size=VOCABULARY)


@functools.cache
def tolerance_of(feature: str) -> float:
    """Rounding of a random tiny model in float32 is that of its logits."""
    return TOLERANCE * max(1.0, base_of(feature)(data()).abs().max().item())


def assert_same_parts(variant: nn.Module, base: nn.Module) -> None:
    """Every module of the base has one of its type at its place, or one that wraps it."""
    for name, module in base.named_modules():
        found = variant.get_submodule(name)
        assert isinstance(found, type(module)) or type(found.linear) is type(module), name  # type: ignore[arg-type]


def is_trained(made: VariantGPT, name: str) -> bool:
    """All that goes into the file, but for where PiSSA started."""
    return variant_filter(made, name) and not name.endswith(("lora_A0", "lora_B0"))


def train(made: VariantGPT, n_steps: int) -> None:
    """Plain gradient steps; by step 2 every trainable tensor must have a gradient, stacked experts each for itself."""
    trainable = {name: p for name, p in made.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-2, weight_decay=0.0)
    seen: set[str] = set()
    for step in range(n_steps):
        ids = random_ids((4, LENGTH), seed=step, vocab_size=VOCABULARY)
        logits = made(ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        for name, p in trainable.items():
            assert p.grad is not None, f"{name} has no gradient"
            if p.grad.count_nonzero():
                seen.add(name)
        if step == 1:
            assert seen == set(trainable), f"no gradient by step 2: {sorted(set(trainable) - seen)}"
        optimizer.step()


def cached_logits(made: model.GPT, ids: Tensor) -> Tensor:
    """Logits through the cache: a chunk, single tokens, another chunk."""
    specs = [LayerSpec.from_config(made.config, i, 16, slack=2) for i in range(made.config.n_layer)]
    cache = KVCache(specs, len(ids), torch.float32)
    return torch.cat([made(chunk, cache=cache) for chunk in ids.split([5, 1, 1, 1, 4], dim=1)], dim=1)  # type: ignore[misc]


def packed_logits(made: model.GPT, ids: Tensor) -> Tensor:
    """Logits of all rows joined in one, behind a row of another length."""
    first = random_ids((1, 5), seed=4, vocab_size=VOCABULARY)
    row = torch.cat([first, ids.flatten()[None]], dim=1)
    logits = made(row, step=Step.packed([[5, *[ids.size(1)] * len(ids)]], ids.device))
    assert isinstance(logits, Tensor)
    return logits[0, 5:].unflatten(0, ids.shape)


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("feature", list(FEATURES))
def test_cell(feature: str, variant: str) -> None:
    torch.manual_seed(0)
    row, base, ids, tolerance = VARIANTS[variant], base_of(feature), data(), tolerance_of(feature)
    made = row.gpt_class(row.gpt_class.config_class(**{**COMMON, **FEATURES[feature], **row.fields})).eval()

    # the base checkpoint loads with only the variant's tensors missing
    result = made.load_state_dict(base.state_dict())
    own = {key for key in made.state_dict() if any(part in key for part in made.added)}
    assert set(result.missing_keys) == own
    assert own
    assert result.unexpected_keys == []
    assert_same_parts(made, base)
    before = made(ids)
    torch.testing.assert_close(before, base(ids), atol=tolerance, rtol=0)

    # training reaches what it should and nothing else
    row.mark(made)
    wanted = {name for name, _ in made.named_parameters() if is_trained(made, name)}
    assert {name for name, p in made.named_parameters() if p.requires_grad} == wanted
    frozen = {key: value.clone() for key, value in made.state_dict().items() if not is_trained(made, key)}
    train(made.train(), 3)
    state = made.eval().state_dict()
    assert [key for key, value in frozen.items() if not torch.equal(value, state[key])] == []

    with torch.no_grad():
        after = made(ids)
        assert not torch.allclose(after, before, atol=100 * tolerance)
        torch.testing.assert_close(cached_logits(made, ids), after, atol=tolerance, rtol=0)
        torch.testing.assert_close(packed_logits(made, ids), after, atol=tolerance, rtol=0)
        if row.merges:
            lora.merge_lora_weights(made)
            torch.testing.assert_close(made(ids), after, atol=tolerance, rtol=0)
            plain = {key.replace(".linear.", "."): v for key, v in made.state_dict().items() if key not in own}
            merged = model.GPT(Config(**{**COMMON, **FEATURES[feature], "tie_embeddings": made.config.tie_embeddings}))
            merged.load_state_dict(plain)
            torch.testing.assert_close(merged.eval()(ids), after, atol=tolerance, rtol=0)
            lora.unmerge_lora_weights(made)
            assert torch.equal(made(ids), after)
            assert all(torch.equal(value, state[key]) for key, value in made.state_dict().items())
    PASSED.add((feature, variant))


@pytest.mark.parametrize("variant", ["LoRA all", "DoRA", "Adapter", "Adapter V2", "IA3"])
@pytest.mark.parametrize("feature", ["sliding window", "all at once"])
@torch.no_grad()
def test_decoding_compiles_to_one_graph(feature: str, variant: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    row = VARIANTS[variant]
    made = row.gpt_class(row.gpt_class.config_class(**{**COMMON, **FEATURES[feature], **row.fields})).eval()
    randomize(made)
    specs = [LayerSpec.from_config(made.config, i, 16, slack=2) for i in range(made.config.n_layer)]
    caches = [KVCache(specs, 2, torch.float32) for _ in range(2)]
    counter = CompileCounterWithBackend("aot_eager")
    decode = CompiledDecode(made, backend=counter)
    ids = data()
    for cache in caches:
        made(ids[:, :4], cache=cache)
    for t in range(4, LENGTH):
        idx = ids[:, t : t + 1]
        compiled = decode(idx, caches[0], caches[0].plan(1))
        torch.testing.assert_close(compiled, made(idx, cache=caches[1]), atol=1e-4, rtol=0)
    assert counter.frame_count == 1
    torch._dynamo.reset()
