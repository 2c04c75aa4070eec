# Licensed under the Apache License 2.0, see the LICENSE file.

"""Random programs against the cache-free forward pass: ragged feeding, decoding, rewinding, resetting, forking, files.

Planted faults show that these programs find what they are meant to find.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from litgpt.attention import KVView, Step
from litgpt.checkpoint import cache_file
from litgpt.checkpoint.cache_file import load_rows, save_rows
from litgpt.kvcache import KVCache, LayerSpec
from litgpt.kvcache.exact import ExactCache
from litgpt.kvcache.quantized import QuantizedBuffer
from litgpt.kvcache.rows import RowState
from litgpt.kvcache.storage import PlainStore
from litgpt.model import GPT
from litgpt.rope import Rope
from tests import test_kinds
from tests.tiny import random_ids
from tests.tiny_cached import FEATURES, MAX_LENGTH, TOLERANCE, VOCABULARY, cache_of, model_of

WINDOW = 5  # of the kind that bounds global layers
KINDS = ("dense", f"window:{WINDOW}")
MIX = [
    *FEATURES,
    *["experts"] * 4,
]  # a mixture of experts computes the rows of a batch together, so it comes more often


@functools.cache
def reference_of(feature: str, kind: str) -> GPT:
    """The model whose cache-free forward pass is right: for the window, with that window in its global layers."""
    model = copy.deepcopy(model_of(feature))
    if kind.startswith("window"):
        for block in model.transformer.h:
            block.attn.window = block.attn.window or WINDOW
    return model


class Program:
    """A cache beside the plain lists of tokens that its rows should hold."""

    def __init__(self, feature: str, kind: str, batch_size: int, slack: int) -> None:
        self.model, self.reference = model_of(feature), reference_of(feature, kind)
        self.kind, self.slack = kind, slack
        self.cache = cache_of(self.model, kind, batch_size, slack=slack)
        self.rows: list[list[int]] = [[] for _ in range(batch_size)]

    def feed(self, new: list[list[int]]) -> None:
        """Append to the rows and compare the logits of the new tokens."""
        counts = [len(tokens) for tokens in new]
        padded = torch.tensor([tokens + [0] * (max(counts) - len(tokens)) for tokens in new])
        logits = self.model(padded, cache=self.cache, step=self.cache.plan(counts))
        for b, n in enumerate(counts):
            self.rows[b] = self.rows[b] + new[b]
            if n:
                expected = self.reference(torch.tensor([self.rows[b]]))[0, -n:]
                error = (logits[b, :n] - expected).abs().max().item()
                assert error <= TOLERANCE, f"row {b}, {n} new tokens of {len(self.rows[b])}: off by {error}"
        assert self.cache.lengths == [len(row) for row in self.rows]

    def rewind(self, counts: list[int]) -> None:
        self.cache.rewind(counts)
        self.rows = [row[: len(row) - n] for row, n in zip(self.rows, counts, strict=True)]

    def reset(self, row: int) -> None:
        self.cache.reset_row(row)
        self.rows[row] = []

    def through_a_file(self) -> None:
        """Go on with a new cache that read from a file what the old one wrote."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows"
            save_rows(path, self.model, self.kind, [self.cache.export_row(b) for b in range(len(self.rows))], self.rows)
            states, self.rows = load_rows(path, self.model, self.kind)
        depths = [self.cache.max_rewind(b) for b in range(len(self.rows))]
        self.cache = cache_of(self.model, self.kind, len(self.rows), slack=self.slack)
        for b, state in enumerate(states):
            self.cache.import_row(b, state)
        assert [self.cache.max_rewind(b) for b in range(len(self.rows))] == depths

    def fork(self, source: int, target: int) -> None:
        self.cache.import_row(target, self.cache.export_row(source))
        self.rows[target] = list(self.rows[source])


def run_random_program(data: st.DataObject, feature: str, kind: str, batch_size: int, slack: int) -> None:
    program = Program(feature, kind, batch_size, slack)
    rows = range(batch_size)
    token = st.integers(0, VOCABULARY - 1)
    for _ in range(data.draw(st.integers(6, 14))):
        op = data.draw(st.sampled_from(["feed"] * 4 + ["decode"] * 2 + ["rewind"] * 6 + ["reset", "fork", "file"]))
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
        elif op == "file":
            program.through_a_file()
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
    @given(st.data(), st.sampled_from(MIX), st.sampled_from(KINDS), st.integers(1, 3), st.integers(1, 5))
    @torch.no_grad()
    def check(data: st.DataObject, feature: str, kind: str, batch_size: int, slack: int) -> None:
        run_random_program(data, feature, kind, batch_size, slack)

    return check


def test_random_programs_equal_the_cache_free_forward() -> None:
    programs(max_examples=60)()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_wraps_rewinds_and_forks(feature: str, kind: str) -> None:
    """A fixed program that is sure to reach every path, whatever the random ones draw."""
    fixed_program(feature, kind)


def fixed_program(feature: str, kind: str) -> None:
    with torch.no_grad():
        program = Program(feature, kind, batch_size=2, slack=2)
        draw = [random_ids((40,), seed, VOCABULARY).tolist() for seed in range(6)]
        program.feed([draw[0][:12], draw[1][:3]])  # longer than the rings
        program.feed([draw[0][12:14], draw[1][3:5]])  # in place
        program.rewind([2, 1])
        program.through_a_file()
        program.feed([draw[2][:9], draw[3][:1]])  # longer than the slack, over rewound slots
        program.fork(0, 1)
        program.through_a_file()
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


def positions_start_at_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rope.rows

    def relative(self: Rope, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return rows(self, positions - positions[:, :1], *args, **kwargs)

    monkeypatch.setattr(Rope, "rows", relative)


def groups_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    write, write_run = PlainStore.write, PlainStore.write_run

    def flipped(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.flip(1)

    monkeypatch.setattr(PlainStore, "write", lambda self, at, k, v, live=None: write(self, at, flipped(k), v, live))
    monkeypatch.setattr(
        PlainStore, "write_run", lambda self, at, k, v, live=None: write_run(self, at, flipped(k), v, live)
    )


def rings_forget_what_came_before_a_long_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    update = ExactCache._update_by_long_chunk
    monkeypatch.setattr(
        ExactCache,
        "_update_by_long_chunk",
        lambda self, k, v, step: update(self, k, v, dataclasses.replace(step, fresh=True)),
    )


def fork_shares_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "import_row", lambda self, row, state: self.lengths.__setitem__(row, state.length))


PLANTS = [
    off_by_one_window,
    ring_without_slack,
    rewind_forgets_the_high_mark,
    rewind_one_too_far,
    padding_is_stored,
    reset_keeps_the_length,
    rows_share_the_longest_end,
    positions_start_at_the_chunk,
    groups_in_the_wrong_order,
    rings_forget_what_came_before_a_long_chunk,
]


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_faults_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError)) as caught:
        programs(max_examples=400)()
    print(f"{plant.__name__}: {str(caught.value).splitlines()[0][:90]}")


# Faults that random programs cannot see: other tests must fail on them


def a_failed_forward_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "abandon", KVCache.commit)


def stale_slots_are_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExactCache, "forget", lambda self, row, start, stop: None)


def a_row_may_grow_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = KVCache.plan

    def unchecked(self: KVCache, n_new: Any) -> Step:
        monkeypatch.setattr(self, "max_length", 10**6)
        return plan(self, n_new)

    monkeypatch.setattr(KVCache, "plan", unchecked)


def scales_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = QuantizedBuffer.decode
    monkeypatch.setattr(
        QuantizedBuffer, "decode", lambda self, code, scale, zero: decode(self, code, torch.ones_like(scale), zero)
    )


def files_forget_the_high_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    state_of = cache_file._state_of

    def forgetful(*args: Any) -> RowState:
        state = state_of(*args)
        return dataclasses.replace(state, high=state.length)

    monkeypatch.setattr(cache_file, "_state_of", forgetful)


def files_lose_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    state_of = cache_file._state_of

    def lossy(*args: Any) -> RowState:
        state = state_of(*args)
        for buffer in state.buffers.values():
            buffer[:, -1:] = 0
        return state

    monkeypatch.setattr(cache_file, "_state_of", lossy)


@torch.no_grad()
def int8_is_near_dense() -> None:
    model, ids = model_of("grouped"), random_ids((1, 20), 0, VOCABULARY)
    dense, int8 = (cache_of(model, kind) for kind in ("dense", "int8"))
    error = (model(ids, cache=dense) - model(ids, cache=int8)).abs().max().item()
    assert error < 0.1, f"int8 is off by {error}"


def test_int8_is_near_dense() -> None:
    int8_is_near_dense()


def fixed_forks() -> None:
    fixed_program("grouped", "dense")


def fixed_files() -> None:
    fixed_program("sliding", "dense")


def failing_forwards() -> None:
    test_kinds.test_a_failing_forward_leaves_rows_as_they_were_or_empty("dense", "mlp", 3)


def stale_nans() -> None:
    test_kinds.test_stale_nan_does_not_leak("dense", "rewind", 3)


def rows_too_long() -> None:
    test_kinds.test_what_does_not_fit_is_refused_and_changes_nothing("dense")


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (fork_shares_its_source, fixed_forks),  # random programs find it too, after many
        (files_forget_the_high_mark, fixed_files),
        (files_lose_a_slot, fixed_files),
        (a_failed_forward_commits, failing_forwards),
        (stale_slots_are_not_cleared, stale_nans),
        (a_row_may_grow_past_the_end, rows_too_long),
        (scales_are_forgotten, int8_is_near_dense),
    ],
)
def test_other_planted_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    plant(monkeypatch)
    with pytest.raises((AssertionError, IndexError, RuntimeError, ValueError, pytest.fail.Exception)) as caught:
        check()
    print(f"{plant.__name__}: {str(caught.value).splitlines()[0][:90]}")
