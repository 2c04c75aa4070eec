# Licensed under the Apache License 2.0, see the LICENSE file.

"""What a decode step costs as the context grows, for every kind of KV cache; and that unused slots cost nothing.

    python extensions/benchmark/length.py CHECKPOINT [--kinds dense int8] [--lengths 256 1024] [--plot decode.png]

Caches of all kinds stand side by side and take turns, a few steps each, so a machine that speeds up or slows down does
so for all of them; medians. Nothing else should be computing on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from litgpt.kvcache import KVCache
from litgpt.model import GPT

KINDS = ("dense", "window:512", "sinks:4+508", "h2o:512", "snap:512", "tova:512", "int8", "int4")
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
CHUNK = 512


class Decoding:
    """A cache filled to a length, and the times of steps that follow."""

    def __init__(self, model: GPT, kind: str, length: int, max_length: int) -> None:
        self.model, self.length = model, length
        self.cache = KVCache.from_config(model.config, kind, max_length=max_length, dtype=torch.float32)
        self.idx = torch.randint(0, model.config.vocab_size or 1, (1, length), generator=torch.manual_seed(0))
        for chunk in self.idx.split(CHUNK, dim=1):
            model(chunk, cache=self.cache, last_only=True)
        self.seconds: list[float] = []

    def steps(self, n: int) -> None:
        """Time `n` steps."""
        for _ in range(n):
            begin = time.perf_counter()
            self.model(self.idx[:, :1], cache=self.cache, last_only=True)
            self.seconds.append(time.perf_counter() - begin)

    @property
    def milliseconds(self) -> float:
        """Median of a step."""
        return 1000 * statistics.median(self.seconds)


def interleave(runs: Iterable[Decoding], rounds: int, n: int = 4) -> None:
    """Let the runs take turns, each round in the other direction."""
    runs = list(runs)
    for run in runs:
        run.steps(2)
        run.seconds.clear()
    for i in range(rounds):
        for run in runs if i % 2 == 0 else reversed(runs):
            run.steps(n)


@torch.inference_mode()
def main() -> None:
    """Print the table; draw the plot when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    model = GPT.from_checkpoint(args.checkpoint, dtype=torch.float32)
    kinds, lengths = list(args.kinds), list(args.lengths)
    out = sys.stdout.write

    context = model.config.block_size
    unused = {size: Decoding(model, "dense", 256, size) for size in (512, context)}
    interleave(unused.values(), 3 * args.rounds)
    small, large = (run.milliseconds for run in unused.values())
    out(f"dense at 256: {small:.1f} ms with max_length 512, {large:.1f} ms with {context}, {large / small:.3f} x\n\n")

    table: dict[str, list[float]] = {kind: [] for kind in kinds}
    for length in lengths:
        runs = {kind: Decoding(model, kind, length, min(length + 64, context + 64)) for kind in kinds}
        interleave(runs.values(), args.rounds)
        for kind, run in runs.items():
            table[kind].append(run.milliseconds)
    out(
        "| ".join(["ms a step ", *(f"{n} " for n in lengths)])
        + "\n"
        + " | ".join(["---", *["---:"] * len(lengths)])
        + "\n"
    )
    for kind, row in table.items():
        out(f"{kind} | " + " | ".join(f"{ms:.1f}" for ms in row) + "\n")
    if args.plot:
        draw(table, lengths, args.plot)


def draw(table: dict[str, list[float]], lengths: list[int], path: Path) -> None:
    """Draw milliseconds a step over the length of the context."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for kind, row in table.items():
        axes.plot(lengths, row, marker="o", label=kind)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the context")
    axes.set_ylabel("ms a decoded token")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
