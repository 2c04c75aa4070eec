# Licensed under the Apache License 2.0, see the LICENSE file.

"""What each kind of KV cache costs in quality: perplexity of one book, and finding numbers hidden in another.

    python extensions/benchmark/quality.py [CHECKPOINT] --results results.json
    python extensions/benchmark/quality.py [CHECKPOINT] --results results.json --perplexity --needle --speed 4096

Every figure is written to the results file as soon as it is known; figures that are there already are not measured
again, so an interrupted run goes on. The table (stdout) and the plot (beside the results) show all that the file holds.
Protocol, the same for all kinds: text goes through the cache in chunks of 256 tokens, so that kinds that evict do so as
they would in use; a chunk attends to what the cache kept and to itself. Budgets are a share of the tested length.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import statistics
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any

import texts
import torch
from quality_report import draw, table
from texts import Needle

from litgpt.checkpoint.save import atomic_write
from litgpt.generate.engine import Engine
from litgpt.generate.loading import Loaded, load
from litgpt.kvcache import KVCache
from litgpt.kvcache.prefix import PrefixStore
from litgpt.scripts.demo import fetch_demo_model

logger = logging.getLogger("quality")

BOUNDED = ("window", "sinks", "h2o", "snap")
KINDS = ("dense", *(f"{name} {share}%" for name in BOUNDED for share in (50, 25)), "int8", "int4")
N_SINK = 4
CHUNK = 256  # tokens a forward pass
DEPTHS = (0.1, 0.5, 0.9)
STORE_BYTES = 2**30
DECODED = 16  # tokens a round of the speed measurement


def spec_of(kind: str, length: int) -> str:
    """What `KVCache.from_config` takes: "h2o 25%" of 4096 is "h2o:1024"."""
    name, _, share = kind.partition(" ")
    if not share:
        return name
    budget = length * int(share.rstrip("%")) // 100
    return f"sinks:{N_SINK}+{budget - N_SINK}" if name == "sinks" else f"{name}:{budget}"


def engine_for(loaded: Loaded, spec: str) -> Engine:
    """An engine that feeds text in our chunks, and computes what prompts have in common once."""
    return Engine(
        loaded.model, loaded.tokenizer, kv_cache=spec, prefill_chunk=CHUNK, prefix_store=PrefixStore(STORE_BYTES)
    )


def new_cache(engine: Engine, length: int) -> KVCache:
    """A cache of one row, in float32."""
    return KVCache.from_config(
        engine.model.config, engine.kv_cache, max_length=length, dtype=torch.float32, device=engine.device
    )


def losses(engine: Engine, ids: Sequence[int], cache: KVCache) -> torch.Tensor:
    """Minus log-probability of each token but the first, `(len(ids) - 1,)`, given what the cache kept of those before.

    The first value belongs to `ids[1]`.
    """
    out = []
    with engine.computing():
        for start in range(0, len(ids) - 1, engine.prefill_chunk):
            chunk = ids[start : min(start + engine.prefill_chunk, len(ids) - 1)]
            targets = torch.tensor(ids[start + 1 : start + 1 + len(chunk)], device=engine.device)
            logits = engine.score([chunk], cache)[0]
            out.append(torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none"))
    return torch.cat(out)


def measure_perplexity(loaded: Loaded, kind: str, length: int) -> dict[str, float]:
    """Perplexity of the beginning of Alice in Wonderland, and of its second half, where every budget is used up."""
    ids = loaded.tokenizer.encode(texts.read(texts.ALICE)).tolist()[:length]
    engine = engine_for(loaded, spec_of(kind, length))
    cache = new_cache(engine, length)
    values = losses(engine, ids, cache).double()
    return {
        "perplexity": values.mean().exp().item(),
        "second_half": values[len(values) // 2 :].mean().exp().item(),
        "bytes": cache.nbytes(),
    }


def answer_logprobs(engine: Engine, prompt: list[int], answer: list[int]) -> tuple[list[float], bool]:
    """Log-probability of each token of an answer after a prompt, and whether greedy decoding would give the answer."""
    cache = new_cache(engine, len(prompt) + len(answer))
    values, is_greedy = [], True
    with engine.computing():
        logits = engine.prefill([prompt], cache)
        for i, token in enumerate(answer):
            values.append(logits[0].float().log_softmax(-1)[token].item())
            is_greedy &= int(logits[0].argmax()) == token
            if i + 1 < len(answer):
                logits = engine.decode(torch.tensor([token], device=engine.device), cache, [True])
    return values, is_greedy


def question(loaded: Loaded, text: str, needle: Needle) -> tuple[list[int], list[int]]:
    """Token ids of a prompt that ends right before a needle's number, and those of the number.

    A model with a chat template is asked, and its answer begun; another one continues the text.
    """
    encode, number = loaded.tokenizer.encode, needle.number
    other = f"{9 - int(number[0])}{number[1:]}"  # where the token ids part is where the number begins
    if loaded.tokenizer.chat_template is None:
        head: list[int] = []
        tails = [encode(f"{text}\n{needle.lead} {n}").tolist() for n in (number, other)]
    else:
        request = f"Remember the magic numbers in this text.\n\n{text}\nWhat is the magic number of {needle.city}?"
        head = loaded.encode(request)
        tails = [encode(f"{needle.lead} {n}", bos=False).tolist() for n in (number, other)]
    begin = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*tails, strict=False)))
    return head + tails[0][:begin], tails[0][begin:]


def questions(loaded: Loaded, length: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """One question a depth about one text; each prompt and its answer fill about `length` tokens, not more."""
    needles = texts.make_needles(len(DEPTHS), seed)
    lines = texts.read(texts.PARADISE_LOST).splitlines(keepends=True)[1000 * seed :]

    def ask(part: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        text = texts.hide(part, needles, DEPTHS)
        return [question(loaded, text, needle) for needle in needles]

    def n_tokens(part: Sequence[str]) -> int:
        return max(len(prompt) + len(answer) for prompt, answer in ask(part))

    return ask(texts.most_lines(lines, length, n_tokens))


def measure_needles(loaded: Loaded, kind: str, length: int, seed: int) -> dict[str, list[Any]]:
    """By depth: mean log-probability of the digits, and whether greedy decoding finds the number."""
    engine = engine_for(loaded, spec_of(kind, length))
    found = [answer_logprobs(engine, prompt, answer) for prompt, answer in questions(loaded, length, seed)]
    return {"logprob": [statistics.mean(values) for values, _ in found], "found": [greedy for _, greedy in found]}


def measure_speed(loaded: Loaded, length: int, rounds: int) -> dict[str, dict[str, float]]:
    """Tokens decoded a second behind `length` tokens, by kind: median of rounds in which the kinds take turns."""
    ids = loaded.tokenizer.encode(texts.read(texts.ALICE)).tolist()[: length + 1]
    engines = {kind: engine_for(loaded, spec_of(kind, length)) for kind in KINDS}
    caches = {kind: new_cache(engine, length + (1 + rounds) * DECODED) for kind, engine in engines.items()}
    token = torch.tensor(ids[-1:])
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for kind, engine in engines.items():
        with engine.computing():
            engine.prefill([ids[:-1]], caches[kind])
    for _ in range(1 + rounds):  # the first warms up
        for kind, engine in engines.items():
            start = perf_counter()
            with engine.computing():
                for _ in range(DECODED):
                    engine.decode(token, caches[kind], [True])
            times[kind].append(perf_counter() - start)
    return {kind: {"tokens_per_second": DECODED / statistics.median(values[1:])} for kind, values in times.items()}


class Results:
    """Figures by `model | task | length | kind`, in a file that is complete after every new one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells: dict[str, dict[str, Any]] = {}
        if path.is_file():
            self.cells = json.loads(path.read_text(encoding="utf-8"))

    @staticmethod
    def key(model: str, task: str, length: int, kind: str) -> str:
        """Where a figure is filed."""
        return f"{model} | {task} | {length} | {kind}"

    def __contains__(self, key: str) -> bool:
        return key in self.cells

    def add(self, key: str, figures: dict[str, Any]) -> None:
        """Keep figures, on disk too."""
        self.cells[key] = figures
        with atomic_write(self.path) as target:
            target.write_text(json.dumps(self.cells, indent=1) + "\n", encoding="utf-8")
        logger.info("%s: %s", key, figures)


def main() -> None:
    """Measure what is missing, then print the table and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="default: the demo model")
    parser.add_argument("--results", type=Path, default=Path("results.json"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--perplexity", type=int, nargs="*", default=[4096], metavar="LENGTH", help="none: skip")
    parser.add_argument(
        "--needle", type=int, nargs="*", default=[2048, 4096, 8192], metavar="LENGTH", help="none: skip"
    )
    parser.add_argument("--seeds", type=int, default=1, help="texts a length, each with three needles")
    parser.add_argument("--speed", type=int, metavar="LENGTH", help="also time decoding, on an otherwise idle machine")
    parser.add_argument("--rounds", type=int, default=5, help="of the speed measurement")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    path = Path(args.checkpoint or fetch_demo_model())
    loaded = lru_cache(lambda: load(path, precision="32-true"))  # only if something is missing
    results = Results(args.results)
    for length, kind in itertools.product(args.perplexity, args.kinds):
        if (key := results.key(path.stem, "perplexity", length, kind)) not in results:
            results.add(key, measure_perplexity(loaded(), kind, length))
    for length, seed, kind in itertools.product(args.needle, range(args.seeds), args.kinds):
        if (key := results.key(path.stem, f"needle {seed}", length, kind)) not in results:
            results.add(key, measure_needles(loaded(), kind, length, seed))
    if args.speed:
        for kind, figures in measure_speed(loaded(), args.speed, args.rounds).items():
            results.add(results.key(path.stem, "speed", args.speed, kind), figures)
    sys.stdout.write(table(results.cells, KINDS))
    draw(results.cells, KINDS, args.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
