# Licensed under the Apache License 2.0, see the LICENSE file.

"""Memory and time of one training step on a long text: in one piece, and chunk by chunk under KV caches.

    python extensions/benchmark/long_context.py [--length 16384] [--chunk_size 1024] [--kinds dense window:1024]

Forward and backward pass of LoRA on a small random model, each in a fresh process; memory is the peak above what the
process had before. Linux only: it reads `/proc/self/status`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

from litgpt import lora
from litgpt.train.batches import Batch
from litgpt.train.objective import CachedObjective, Objective

ONE_PIECE = "one piece"


def peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def measure(kind: str, length: int, chunk_size: int) -> None:
    """Run one step and print its memory, time, loss and the norm of its gradient."""
    torch.manual_seed(0)
    config = lora.Config(
        n_layer=8,
        n_embd=256,
        n_head=4,
        n_query_groups=2,
        intermediate_size=768,
        padded_vocab_size=4096,
        block_size=length,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        bias=False,
        parallel_residual=False,
        lora_r=8,
        lora_query=True,
        lora_value=True,
    )
    model = lora.GPT(config)
    lora.mark_only_lora_as_trainable(model)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.02)
    ids = torch.randint(4096, (1, length))
    one = Objective(model, length)
    objective = one if kind == ONE_PIECE else CachedObjective(model, length, kind, chunk_size)
    before, begin = peak_bytes(), time.perf_counter()
    loss = objective(Batch(ids, ids, (length,)))
    loss.backward()
    seconds = time.perf_counter() - begin
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    memory = (peak_bytes() - before) / 2**20
    sys.stdout.write(f"| {kind} | {memory:.0f} | {seconds:.1f} | {float(loss.detach()):.3f} | {float(norm):.5f} |\n")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--chunk_size", type=int, default=1024)
    parser.add_argument("--kinds", nargs="+", default=["dense", "window:1024", "sinks:4+1020", "h2o:1024", "snap:1024"])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.length, args.chunk_size)
        return
    sys.stdout.write(f"{args.length} tokens, chunks of {args.chunk_size}\n\n")
    sys.stdout.write("| under | peak MB | seconds | loss | norm of the gradient |\n|---|---|---|---|---|\n")
    sys.stdout.flush()
    for kind in (ONE_PIECE, *args.kinds):
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--measure", kind], check=True)


if __name__ == "__main__":
    main()
