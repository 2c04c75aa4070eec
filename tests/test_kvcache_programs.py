# Licensed under the Apache License 2.0, see the LICENSE file.

"""Random programs of ragged feeding, decoding, rewinding, resetting and forking against the cache-free forward pass.

Planted faults show that these programs find what they are meant to find.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from litgpt.attention import KVView, Step
from litgpt.config import Config
from litgpt.kvcache import KVCache, LayerSpec
from litgpt.kvcache.exact import ExactCache
from litgpt.model import GPT
from tests.tiny import random_ids, randomize

MAX_LENGTH = 40
VOCABULARY = 31
TOLERANCE = 1e-10
COMMON: dict[str, Any] = {
    "n_layer": 2,
    "n_embd": 12,
    "n_head": 4,
    "n_query_groups": 2,
    "head_size": 6,
    "vocab_size": VOCABULARY,
    "padded_vocab_size": VOCABULARY,
    "block_size": MAX_LENGTH,
    "intermediate_size": 14,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "rotary_percentage": 1.0,
}
LATENT = {"q_lora_rank": 5, "kv_lora_rank": 7, "qk_rope_head_dim": 4, "qk_nope_head_dim": 3, "v_head_dim": 5}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "window": {"sliding_window_size": 4},
    "mixed_softcap": {"sliding_window_size": 3, "sliding_window_indices": [1, 0], "attention_logit_softcapping": 2.0},
    "mixed_sinks": {"sliding_window_size": 5, "sliding_window_indices": [0, 1], "attention_sinks": True},
    "latent": {"n_query_groups": 4, "latent_attention": LATENT},
}


@functools.cache
def model_of(name: str) -> GPT:
    model = GPT(Config(**{**COMMON, **CONFIGS[name]})).double().eval()
    randomize(model, seed=len(name))
    return model


class Program:
    """A cache beside the plain lists of tokens that its rows should hold."""

    def __init__(self, name: str, batch_size: int, slack: int) -> None:
        self.model = model_of(name)
        config = self.model.config
        specs = [LayerSpec.from_config(config, i, MAX_LENGTH, slack=slack) for i in range(config.n_layer)]
        self.cache = KVCache(specs, batch_size, torch.float64)
        self.rows: list[list[int]] = [[] for _ in range(batch_size)]

    def feed(self, new: list[list[int]]) -> None:
        """Append to the rows and compare the logits of the new tokens."""
        counts = [len(tokens) for tokens in new]
        padded = torch.tensor([tokens + [0] * (max(counts) - len(tokens)) for tokens in new])
        logits = self.model(padded, cache=self.cache, step=self.cache.plan(counts))
        for b, n in enumerate(counts):
            self.rows[b] = self.rows[b] + new[b]
            if n:
                expected = self.model(torch.tensor([self.rows[b]]))[0, -n:]
                error = (logits[b, :n] - expected).abs().max().item()
                assert error <= TOLERANCE, f"row {b}, {n} new tokens of {len(self.rows[b])}: off by {error}"
        assert self.cache.lengths == [len(row) for row in self.rows]

    def rewind(self, counts: list[int]) -> None:
        self.cache.rewind(counts)
        self.rows = [row[: len(row) - n] for row, n in zip(self.rows, counts, strict=True)]

    def reset(self, row: int) -> None:
        self.cache.reset_row(row)
        self.rows[row] = []

    def fork(self, source: int, target: int) -> None:
        self.cache.import_row(target, self.cache.export_row(source))
        self.rows[target] = list(self.rows[source])


def run_random_program(data: st.DataObject, name: str, batch_size: int, slack: int) -> None:
    program = Program(name, batch_size, slack)
    rows = range(batch_size)
    token = st.integers(0, VOCABULARY - 1)
    for _ in range(data.draw(st.integers(6, 14))):
        op = data.draw(st.sampled_from(["feed"] * 4 + ["decode"] * 2 + ["rewind"] * 6 + ["reset", "fork"]))
        if op in ("feed", "decode"):
            most = 1 if op == "decode" else data.draw(st.sampled_from([slack, 13]))
            counts = [min(data.draw(st.integers(0, most)), MAX_LENGTH - len(row)) for row in program.rows]
            if any(counts):
                program.feed([data.draw(st.lists(token, min_size=n, max_size=n)) for n in counts])
        elif op == "rewind":
            limits = [program.cache.max_rewind(b) for b in rows]
            program.rewind([data.draw(st.sampled_from([0, n // 2, n, n])) for n in limits])
        elif op == "reset":
            program.reset(data.draw(st.sampled_from(rows)))
        else:
            program.fork(data.draw(st.sampled_from(rows)), data.draw(st.sampled_from(rows)))


def programs(max_examples: int) -> Callable[[], None]:
    """Build the property test over `max_examples` programs, the same ones in every run."""

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
        report_multiple_bugs=False,
    )
    @given(st.data(), st.sampled_from(list(CONFIGS)), st.integers(1, 3), st.integers(1, 5))
    @torch.no_grad()
    def check(data: st.DataObject, name: str, batch_size: int, slack: int) -> None:
        run_random_program(data, name, batch_size, slack)

    return check


def test_random_programs_equal_the_cache_free_forward() -> None:
    programs(max_examples=60)()


def test_every_config_wraps_rewinds_and_forks() -> None:
    """A fixed program that is sure to reach every path, whatever the random ones draw."""
    with torch.no_grad():
        for name in CONFIGS:
            program = Program(name, batch_size=2, slack=2)
            draw = [random_ids((40,), seed, VOCABULARY).tolist() for seed in range(6)]
            program.feed([draw[0][:12], draw[1][:3]])  # longer than the rings
            program.feed([draw[0][12:14], draw[1][3:5]])  # in place
            program.rewind([2, 1])
            program.feed([draw[2][:9], draw[3][:1]])  # longer than the slack, over rewound slots
            program.fork(0, 1)
            program.feed([draw[2][:1], draw[4][:1]])
            program.reset(0)
            program.feed([draw[5][:1], draw[4][1:8]])


def off_by_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = Step.visible

    def wider(self: Step, view: KVView, window: int | None) -> torch.Tensor:
        return visible(self, view, None if window is None else window + 1)

    monkeypatch.setattr(Step, "visible", wider)


def ring_without_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = LayerSpec.slots.fget
    monkeypatch.setattr(LayerSpec, "slots", property(lambda spec: slots(dataclasses.replace(spec, slack=1))))


def rewind_forgets_the_high_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ExactCache.max_rewind
    monkeypatch.setattr(ExactCache, "max_rewind", lambda self, length, high: exact(self, length, length))


def rewind_one_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ExactCache.max_rewind
    monkeypatch.setattr(ExactCache, "max_rewind", lambda self, length, high: min(exact(self, length, high) + 1, length))


def padding_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = ExactCache._slots
    monkeypatch.setattr(ExactCache, "_slots", lambda self, pos: slots(self, pos).masked_fill(pos < 0, 0))


def reset_keeps_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "reset_row", lambda self, row: self.rewind([0] * self.batch_size))


def rows_share_the_longest_end(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = KVCache.plan

    def shared(self: KVCache, n_new: Any) -> Step:
        step = plan(self, n_new)
        step.end = step.end.max().expand_as(step.end)
        return step

    monkeypatch.setattr(KVCache, "plan", shared)


@pytest.mark.parametrize(
    "plant",
    [
        off_by_one_window,
        ring_without_slack,
        rewind_forgets_the_high_mark,
        rewind_one_too_far,
        padding_is_stored,
        reset_keeps_the_length,
        rows_share_the_longest_end,
    ],
)
def test_planted_faults_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)):
        programs(max_examples=400)()
