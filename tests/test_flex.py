# Licensed under the Apache License 2.0, see the LICENSE file.

"""The compiled step through flex attention, as GPUs take it, run on the CPU: logits, one graph, dead blocks skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from litgpt import attention, flex
from litgpt.generate.compiled import CompiledDecode
from litgpt.kvcache import KVCache
from tests.tiny import random_ids, tiny_pair

MAX_LENGTH = 300  # more than one block of slots, and not a whole number of them


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(attention, "FLEX_DEVICES", ("cpu",))


def compare_with_eager(name: str, kind: str, max_length: int, backend: Any) -> None:
    """Decode three ragged rows both ways."""
    _, model = tiny_pair(name)
    decode = CompiledDecode(model, backend=backend)
    prompts = [9, 3, 17]
    caches = [KVCache.from_config(model.config, kind, len(prompts), max_length, torch.float32) for _ in range(2)]
    for cache in caches:
        model(random_ids((3, 17)), cache=cache, step=cache.plan(prompts))
    tokens = random_ids((3, 12), seed=1)
    for t in range(12):
        idx = tokens[:, t : t + 1]
        actual = decode(idx, caches[0], caches[0].plan(1))
        expected = model(idx, cache=caches[1], step=caches[1].plan(1))
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "dense"), ("gemma2", "dense"), ("gpt_oss", "dense"), ("gemma3_text", "h2o:6"), ("deepseek_v3", "int8")],
)
@torch.no_grad()
def test_same_logits_and_one_graph(name: str, kind: str) -> None:
    """Softcaps, learned sinks, rings, evicted slots, latent attention."""
    counter = CompileCounterWithBackend("aot_eager")
    compare_with_eager(name, kind, 60, counter)
    assert counter.frame_count == 1
    assert any("flex_attention" in str(node.target) for graph in counter.graphs for node in graph.graph.nodes)


@torch.no_grad()
def test_only_live_blocks() -> None:
    visible = torch.zeros(2, 3, MAX_LENGTH, dtype=torch.bool)
    visible[0, :, :100] = True
    visible[1, :, 290:] = True  # a ring past its wrap, a window: live blocks need not come first
    visible[1, 2, 5] = True
    blocks = flex.block_mask(visible, n_queries=4)
    assert blocks.kv_num_blocks.squeeze(-1).tolist() == [[1, 1, 1], [1, 1, 2]]
    assert blocks.kv_indices[0, 0, 0, 0] == 0
    assert blocks.kv_indices[1, 0, 0, 0] == 2
    assert blocks.kv_indices[1, 2, 0, :2].tolist() == [0, 2]
    dense = blocks.to_dense()
    assert dense[1, 2, 0].tolist() == [1, 0, 1]
