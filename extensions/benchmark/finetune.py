# Licensed under the Apache License 2.0, see the LICENSE file.

"""What LoRA teaches a small model: exact answers to problems before and after, and the loss on dialogues.

    python extensions/benchmark/finetune.py OUT [--checkpoint CHECKPOINT] --python PYTHON [--tasks problems dialogues]

PYTHON is that of an environment with `pip install reasoning-gym`. The dialogues are those of the package
chatterbot-corpus (https://pypi.org/project/chatterbot-corpus/, BSD), which pip downloads. Training is the command
`litgpt finetune_lora` in a process of its own, whose speed and peak of memory are shown. `OUT/TASK` holds its folders
and the picture of the loss.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from litgpt.generate.loading import load, with_stops_of
from litgpt.generate.types import SamplingParams
from litgpt.scripts.demo import download_wheel, fetch_demo_model

PROBLEMS = Path(__file__).with_name("problems.py")
DIALOGUES = "chatterbot-corpus==1.3.3"
SEED = 1
OPTIONS = (
    *("--train.global_batch_size", "16", "--train.micro_batch_size", "8", "--train.lr_warmup_steps", "10"),
    *("--lora_r", "16", "--lora_alpha", "32", "--lora_targets", "all-linear", "--optimizer.lr", "1e-3"),
    *("--data.num_workers", "0", "--data.mask_prompt", "true", "--data.prompt_style", "null"),
    *("--eval.max_new_tokens", "null", "--eval.initial_validation", "true", "--train.max_seq_length", "256"),
)


def run_problems(python: str, *args: str, lines: str = "") -> list[str]:
    """Output lines of `problems.py` in another environment."""
    command = [python, str(PROBLEMS), *args]
    done = subprocess.run(command, input=lines, capture_output=True, encoding="utf-8", check=True)
    return done.stdout.splitlines()


def accuracy(
    checkpoint: Path, adapter: Path | None, problems: Sequence[dict[str, Any]], python: str
) -> dict[str, float]:
    """Share of problems that greedy decoding answers exactly, by task."""
    loaded = load(checkpoint, adapter=adapter)
    engine = loaded.engine()
    params = SamplingParams(max_new_tokens=24, temperature=0.0)
    params = with_stops_of(loaded.prompt_style, loaded.tokenizer, params)
    answers = []
    for start in range(0, len(problems), 16):
        prompts = [loaded.encode(problem["entry"]["question"]) for problem in problems[start : start + 16]]
        answers += [result.text.strip() for result in engine.generate(prompts, params)]
    records = [{"problem": p, "answer": answer} for p, answer in zip(problems, answers, strict=True)]
    found = run_problems(python, "score", lines="\n".join(map(json.dumps, records)) + "\n")
    scores: dict[str, list[float]] = {"all": []}
    for problem, value in zip(problems, map(float, found), strict=True):
        scores.setdefault(problem["task"], []).append(value)
        scores["all"].append(value)
    return {task: statistics.mean(values) for task, values in scores.items()}


def compare_with_peft(checkpoint: Path, folder: Path, adapter: Path, problems: Sequence[dict[str, Any]]) -> str:
    """Greedy answers of this package beside those of transformers and peft, from the same adapter."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = load(checkpoint, adapter=adapter, precision="32-true")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapter)
    params = SamplingParams(max_new_tokens=24, temperature=0.0)
    stops = sorted(loaded.tokenizer.stop_ids)
    same = 0
    for problem in problems:
        prompt = loaded.encode(problem["entry"]["question"])
        (ours,) = loaded.engine().generate([prompt], params)
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=stops
        )
        theirs = [index for index in out[0, len(prompt) :].tolist() if index not in stops]
        same += ours.text == loaded.tokenizer.decode(torch.tensor(theirs))
    return f"{same} of {len(problems)} answers are the same text in transformers + peft"


def dialogues() -> Iterator[list[dict[str, str]]]:
    """The English conversations of the corpus, as messages."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(download_wheel(DIALOGUES, Path(folder))) as wheel:
        for name in sorted(n for n in wheel.namelist() if "/data/english/" in n and n.endswith(".yml")):
            for conversation in yaml.safe_load(wheel.read(name).decode("utf-8"))["conversations"]:
                turns = [str(turn) for turn in conversation][: len(conversation) // 2 * 2]
                roles = ("user", "assistant") * (len(turns) // 2)
                if turns:
                    yield [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]


def write_lines(path: Path, records: Sequence[Any]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def train(checkpoint: Path, data: Path, out: Path, epochs: int) -> int:
    """Run the command; returns its peak of resident memory in bytes."""
    command = [sys.executable, "-m", "litgpt", "finetune_lora", str(checkpoint), "--out_dir", str(out)]
    command += ["--data", "JSON", "--data.json_path", str(data), "--train.epochs", str(epochs), *OPTIONS]
    subprocess.run([*command, "--overwrite", "true"], check=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # of the largest child there was


def report(out: Path, peak: int) -> list[str]:
    """Lines about a training: its validation loss, speed and memory."""
    path = max(out.glob("logs/csv/version_*/metrics.csv"), key=lambda p: p.stat().st_mtime)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["val_loss"]) for row in rows if row.get("val_loss")]
    speeds = [float(row["tokens_per_second"]) for row in rows if row.get("tokens_per_second")]
    return [
        f"validation loss {losses[0]:.3f} before, {losses[-1]:.3f} after",
        f"{statistics.median(speeds):.0f} tokens/s (median of {len(speeds)} steps), peak memory {peak / 2**20:.0f} MB",
        f"loss: {out / 'loss.png'}",
    ]


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="default: the demo model")
    parser.add_argument("--python", help="of the environment with reasoning-gym")
    parser.add_argument("--hf", type=Path, help="the checkpoint as a Hugging Face folder: compare with peft as well")
    parser.add_argument("--tasks", nargs="+", default=["problems", "dialogues"], choices=["problems", "dialogues"])
    parser.add_argument("--train", type=int, default=2000, help="problems to learn from")
    parser.add_argument("--test", type=int, default=240, help="problems to be tested with, others")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    checkpoint = args.checkpoint or fetch_demo_model()
    args.out.mkdir(parents=True, exist_ok=True)
    say = sys.stdout.write

    if "problems" in args.tasks:
        if not args.python:
            parser.error("--python says where reasoning-gym is installed")
        made = [json.loads(line) for line in run_problems(args.python, "make", str(args.train + args.test), str(SEED))]
        random.Random(SEED).shuffle(made)
        held_out, learnt = made[: args.test], made[args.test :]
        known = {problem["entry"]["question"] for problem in learnt}
        held_out = [problem for problem in held_out if problem["entry"]["question"] not in known]
        data, out = args.out / "problems.jsonl", args.out / "problems"
        write_lines(data, [{"instruction": p["entry"]["question"], "output": p["entry"]["answer"]} for p in learnt])
        before = accuracy(checkpoint, None, held_out, args.python)
        peak = train(checkpoint, data, out, args.epochs)
        after = accuracy(checkpoint, out / "final", held_out, args.python)
        say(
            f"## {len(learnt)} problems, tested on {len(held_out)} others\n\n| task | before | after |\n|---|---|---|\n"
        )
        for task, value in before.items():
            say(f"| {task} | {value:.1%} | {after[task]:.1%} |\n")
        say("\n" + "\n".join(report(out, peak)) + "\n")
        if args.hf is not None:
            say(compare_with_peft(checkpoint, args.hf, out / "final", held_out[:20]) + "\n")
        say("\n")
    if "dialogues" in args.tasks:
        data, out = args.out / "dialogues.jsonl", args.out / "dialogues"
        found = [{"messages": messages} for messages in dialogues()]
        write_lines(data, found)
        peak = train(checkpoint, data, out, 1)
        say(f"## {len(found)} dialogues\n\n" + "\n".join(report(out, peak)) + "\n")


if __name__ == "__main__":
    main()
