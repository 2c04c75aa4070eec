# Licensed under the Apache License 2.0, see the LICENSE file.

"""Problems with an exact scorer, from reasoning-gym; runs in the environment where that is installed.

    python extensions/benchmark/problems.py make COUNT SEED     JSON lines of problems on stdout
    python extensions/benchmark/problems.py score               JSON lines {"problem", "answer"} on stdin, a score each

https://pypi.org/project/reasoning-gym/ (Apache-2.0). It imports nothing of litgpt.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from typing import Any

import reasoning_gym

# Small enough for a model of 135 million parameters to learn from some hundred examples
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "needle_haystack": {"min_num_statements": 4, "max_num_statements": 8},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
}


def make(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` problems, the tasks in turn; another seed gives other problems."""
    each = [reasoning_gym.create_dataset(name, size=count, seed=seed, **options) for name, options in TASKS.items()]
    problems = chain.from_iterable(zip(*each, strict=True))
    names = list(TASKS)
    return [{"task": names[i % len(names)], "entry": entry} for i, entry in zip(range(count), problems, strict=False)]


def score(problem: dict[str, Any], answer: str) -> float:
    """1 for the exact answer."""
    return float(reasoning_gym.get_score_answer_fn(problem["task"])(answer, problem["entry"]) == 1)


def main() -> None:
    """See the module."""
    if sys.argv[1] == "make":
        for problem in make(int(sys.argv[2]), int(sys.argv[3])):
            sys.stdout.write(json.dumps(problem, default=str) + "\n")
    else:
        for line in sys.stdin:
            record = json.loads(line)
            sys.stdout.write(f"{score(record['problem'], record['answer'])}\n")


if __name__ == "__main__":
    main()
