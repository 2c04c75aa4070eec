# Licensed under the Apache License 2.0, see the LICENSE file.

"""How samples should share a forward pass: padded in their order, padded by length, or joined in one row.

    python extensions/benchmark/packing.py CHECKPOINT [--samples 64] [--longest 512] [--micro_batch_size 4]

Forward and backward pass of LoRA over the same samples, whose lengths are drawn as those of instructions are (most
short, a few long). The three take turns, so a machine that speeds up or slows down does so for all; medians. The losses
must agree. Nothing else should be computing on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from litgpt import lora
from litgpt.attention import Step
from litgpt.train.loss import IGNORE_INDEX, linear_cross_entropy
from litgpt.train.packing import pack, plan_packs, waste

Groups = list[list[int]]


class Samples:
    """Random token ids of random lengths; all tokens are learnt."""

    def __init__(self, count: int, longest: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.empty(count).log_normal_(mean=0.0, std=0.7, generator=generator) * longest / 5
        self.lengths = drawn.clamp(8, longest).int().tolist()
        self.ids = [torch.randint(vocab_size, (n,), generator=generator) for n in self.lengths]

    def batch(self, group: Sequence[int], packed: bool) -> tuple[torch.Tensor, torch.Tensor, Step]:
        """Token ids, labels and step of one micro-batch."""
        ids = [self.ids[i] for i in group]
        if packed:
            row = pack(ids, ids)
            return row.input_ids, row.labels, row.step()
        idx, labels = pad_sequence(ids, True, 0), pad_sequence(ids, True, IGNORE_INDEX)
        return idx, labels, Step.without_cache(idx.size(1), idx.device)


def divisions(samples: Samples, size: int) -> dict[str, tuple[Groups, bool]]:
    """The micro-batches of each way, and whether they are packed."""

    def cut(order: Sequence[int]) -> Groups:
        return [list(order[i : i + size]) for i in range(0, len(order), size)]

    lengths = samples.lengths
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    return {
        "none": (cut(range(len(lengths))), False),
        "bucket": (cut(by_length), False),
        # as many tokens as the widest padded micro-batch, so that the peak of memory is about the same
        "pack": (plan_packs(lengths, size * max(lengths)), True),
    }


def one_epoch(gpt: lora.GPT, samples: Samples, groups: Groups, packed: bool) -> float:
    """Forward and backward pass of all samples; the summed loss."""
    total = 0.0
    for group in groups:
        idx, labels, step = samples.batch(group, packed)
        hidden = gpt.hidden(idx, step)[:, :-1].flatten(0, 1)
        loss = linear_cross_entropy(
            hidden,
            gpt.lm_head,
            labels[:, 1:].flatten(),
            softcap=gpt.config.final_logit_softcapping,
            logit_multiplier=gpt.config.logit_multiplier,
        )
        loss.backward()
        total += loss.item()
    gpt.zero_grad()
    return total


def seconds(run: Callable[[], float]) -> tuple[float, float]:
    """The time that something takes, and what it returns."""
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--micro_batch_size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    gpt = lora.GPT.from_checkpoint(args.checkpoint, dtype=torch.float32, lora_r=8, lora_query=True, lora_value=True)
    lora.mark_only_lora_as_trainable(gpt)
    gpt.train()
    samples = Samples(args.samples, args.longest, gpt.config.vocab_size or 1)
    ways = divisions(samples, args.micro_batch_size)
    times: dict[str, list[float]] = {name: [] for name in ways}
    losses = {}
    for _ in range(args.repeats):
        for name, (groups, packed) in ways.items():
            spent, losses[name] = seconds(lambda groups=groups, packed=packed: one_epoch(gpt, samples, groups, packed))
            times[name].append(spent)
    n_tokens = sum(samples.lengths)
    sys.stdout.write(f"{args.samples} samples, {n_tokens} tokens\n\n")
    sys.stdout.write("| packing | padding | tokens/s | loss |\n|---|---|---|---|\n")
    for name, (groups, packed) in ways.items():
        share, speed = waste(groups, samples.lengths, packed), n_tokens / statistics.median(times[name])
        sys.stdout.write(f"| {name} | {share:.1%} | {speed:.0f} | {losses[name] / n_tokens:.6f} |\n")


if __name__ == "__main__":
    main()
