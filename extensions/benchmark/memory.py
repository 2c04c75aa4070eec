# Licensed under the Apache License 2.0, see the LICENSE file.

"""Peak memory and time of loading a checkpoint, each in a fresh process. Linux only: it reads `/proc/self/status`.

python extensions/benchmark/memory.py CHECKPOINT [DTYPE]
"""

from __future__ import annotations

import json
import subprocess
import sys

PROLOGUE = """
import json, sys, time
begin = time.perf_counter()
import torch, litgpt.model, litgpt.checkpoint.convert
from litgpt.kvcache import KVCache
def peak():
    lines = open("/proc/self/status", encoding="utf-8").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
"""
BASELINE = PROLOGUE + "print(json.dumps({'peak': peak()}))"
LOAD = (
    PROLOGUE
    + """
before = time.perf_counter()
model = litgpt.model.GPT.from_checkpoint(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
loaded, at_peak = time.perf_counter(), peak()
with torch.inference_mode():
    cache = KVCache.from_config(model.config, max_length=64, dtype=getattr(torch, sys.argv[2]))
    model(torch.zeros((1, 8), dtype=torch.long), cache=cache, last_only=True).argmax()
print(json.dumps({
    "peak": at_peak, "parameters": sum(p.numel() * p.element_size() for p in model.parameters()),
    "load_s": loaded - before, "first_token_s": time.perf_counter() - begin,
}))
"""
)


def run(program: str, *args: str) -> dict[str, float]:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the figures."""
    path, dtype = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "bfloat16"
    baseline, loaded = run(BASELINE)["peak"], run(LOAD, path, dtype)
    extra = loaded["peak"] - baseline
    sys.stdout.write(
        f"parameters {loaded['parameters'] / 1e6:.1f} MB, peak above imports {extra / 1e6:.1f} MB "
        f"({extra / loaded['parameters']:.2f} x), load {loaded['load_s']:.2f} s, "
        f"first token {loaded['first_token_s']:.2f} s after the start of the process\n"
    )


if __name__ == "__main__":
    main()
