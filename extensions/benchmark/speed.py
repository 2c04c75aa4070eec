# Licensed under the Apache License 2.0, see the LICENSE file.

"""Prefill and decode speed beside other engines: same machine, same session, runs interleaved, medians and ratios.

    python extensions/benchmark/speed.py HF_FOLDER LITGPT_FOLDER \
        --python litgpt-0.5.13=/envs/litgpt/bin/python --python transformers=/envs/hf/bin/python

`HF_FOLDER` and `LITGPT_FOLDER` hold the same weights (see README.md beside this file). An engine without `--python` is
left out. Nothing else should be computing on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch


class Worker:
    """A process that holds one engine with its model loaded."""

    def __init__(self, engine: str, python: str, path: str) -> None:
        command = [python, str(Path(__file__).with_name("workers.py")), engine, path]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.engine = engine
        self.loaded = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith("{"):
            if not line:
                raise RuntimeError(f"{self.engine} stopped with exit code {self.process.wait()}")
        return json.loads(line)

    def measure(self, length: int, n_new: int) -> dict[str, Any]:
        """Run once."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{length} {n_new}\n")
        self.process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def read_bandwidth() -> float:
    """Bytes a second that a sum over 1 GiB of float32 reads, best of 5."""
    x = torch.ones(2**28)
    best = min(_seconds(lambda: x.sum()) for _ in range(5))
    return x.numel() * x.element_size() / best


def gemm_rate() -> float:
    """Floating-point operations a second of a 1024-cubed float32 matrix product, best of 5."""
    a = torch.randn(1024, 1024)
    best = min(_seconds(lambda: a @ a) for _ in range(5))
    return 2 * 1024**3 / best


def _seconds(run: Any) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main() -> None:
    """Run the comparison and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf_folder")
    parser.add_argument("litgpt_folder")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=INTERPRETER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256, help="prompt length in tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens to decode")
    args = parser.parse_args()

    out = sys.stdout.write
    out(f"read bandwidth {read_bandwidth() / 1e9:.1f} GB/s, float32 GEMM {gemm_rate() / 1e9:.0f} GFLOP/s\n")
    ours = ("ours", "ours-compiled")
    pythons = {**dict.fromkeys(ours, sys.executable), **dict(item.split("=", 1) for item in args.python)}
    workers = [
        Worker(engine, python, args.litgpt_folder if engine.startswith("litgpt-") else args.hf_folder)
        for engine, python in pythons.items()
    ]
    for worker in workers:
        worker.measure(args.prompt, 4)  # warm up
    rounds = []
    for i in range(args.rounds):  # every engine takes every place in the order
        order = workers[i % len(workers) :] + workers[: i % len(workers)]
        rounds.append({w.engine: w.measure(args.prompt, args.new) for w in order})
    for worker in workers:
        worker.stop()

    tokens = {engine: result["tokens"] for engine, result in rounds[0].items()}
    for engine, got in tokens.items():
        if got != tokens["ours"]:
            out(f"note: {engine} chose other tokens\n")
    out(f"{'engine':16} {'load s':>7} {'prefill tok/s':>14} {'decode tok/s':>13} {'ms/token':>9}\n")
    medians: dict[str, tuple[float, float]] = {}
    for worker in workers:
        prefill = statistics.median(args.prompt / r[worker.engine]["prefill_s"] for r in rounds)
        decode = statistics.median((args.new - 1) / r[worker.engine]["decode_s"] for r in rounds)
        medians[worker.engine] = prefill, decode
        load = worker.loaded["load_s"]
        out(f"{worker.engine:16} {load:7.2f} {prefill:14.1f} {decode:13.2f} {1000 / decode:9.1f}\n")
    others = [value for engine, value in medians.items() if engine not in ours]
    for engine in ours if others else ():
        prefill, decode = (
            own / max(peers) for own, peers in zip(medians[engine], zip(*others, strict=True), strict=True)
        )
        out(f"{engine} / best peer: prefill {prefill:.2f}, decode {decode:.2f}\n")


if __name__ == "__main__":
    main()
