# Licensed under the Apache License 2.0, see the LICENSE file.

"""Tokens per step and speed-up by prompt lookup, on an answer that copies its prompt and on one that does not.

    python extensions/benchmark/speculative.py [CHECKPOINT]

Greedy, plain and speculative runs interleaved, medians. Nothing else should be computing on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from litgpt.generate.engine import Engine
from litgpt.generate.loading import load, with_stops_of
from litgpt.generate.speculative import Speculation
from litgpt.generate.types import Result, SamplingParams
from litgpt.scripts.demo import fetch_demo_model

PARAGRAPH = (
    "The llama is a domesticated South American camelid, widely used as a meat and pack animal by Andean cultures "
    "since the pre-Columbian era. Llamas are social animals and live with others as a herd. Their wool is soft and "
    "contains only a small amount of lanolin. Llamas can learn simple tasks after a few repetitions. When using a "
    "pack, they can carry about 25 to 30% of their body weight for 8 to 13 km."
)
TASKS = {
    "copying": f"Repeat this paragraph word for word:\n\n{PARAGRAPH}",
    "free text": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
}


def main() -> None:
    """Run the comparison and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="default: the demo model")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8, 12], help="longest drafts to compare")
    parser.add_argument("--new", type=int, default=128, help="tokens to decode at most")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    loaded = load(args.checkpoint or fetch_demo_model(), precision=args.precision)
    params = SamplingParams(max_new_tokens=args.new, temperature=0)
    params = with_stops_of(loaded.prompt_style, loaded.tokenizer, params)
    engines = {"plain": loaded.engine()}
    engines |= {f"lookup:{k}": loaded.engine(speculation=Speculation.parse(f"lookup:{k}")) for k in args.drafts}
    out = sys.stdout.write
    out(f"{'task':10} {'engine':10} {'new':>4} {'drafted':>8} {'accepted':>9} {'tokens/step':>12} {'tokens/s':>9}\n")
    for task, prompt in TASKS.items():
        ids = loaded.encode(prompt)
        runs: dict[str, list[Result]] = {name: [] for name in engines}
        for _ in range(1 + args.rounds):  # the first warms up
            for name, engine in engines.items():
                runs[name].append(_run(engine, ids, params))
        rates = {name: statistics.median(r.timing.decode_rate for r in results[1:]) for name, results in runs.items()}
        for name, results in runs.items():
            timing = results[0].timing
            note = "" if results[0].token_ids == runs["plain"][0].token_ids else "  other tokens than plain"
            out(
                f"{task:10} {name:10} {timing.new_tokens:4} {timing.drafted:8} {timing.accepted:9} "
                f"{timing.tokens_per_step:12.2f} {rates[name]:9.1f}  x{rates[name] / rates['plain']:.2f}{note}\n"
            )


def _run(engine: Engine, ids: list[int], params: SamplingParams) -> Result:
    return engine.generate([ids], params)[0]


if __name__ == "__main__":
    main()
