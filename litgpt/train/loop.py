# Licensed under the Apache License 2.0, see the LICENSE file.

"""The training loop.

A step: collect its micro-batches, count the tokens to learn over all devices, add up the gradients of the summed loss
divided by that count, then update. So neither the division into micro-batches nor the number of devices matters.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from litgpt.args import CHUNK_SIZE, EvalArgs, TrainArgs
from litgpt.errors import UserError
from litgpt.generate.loading import autocast_dtype
from litgpt.train.activation import checkpoint_activations
from litgpt.train.batches import (
    Batch,
    Plan,
    collate_for,
    dataset_of,
    derive_seed,
    eval_batches,
    lengths_of,
    packing_under_cache,
    train_steps,
)
from litgpt.train.devices import divided_like, divided_optimizer_state, is_divided, whole
from litgpt.train.evaluate import answer_example, mean_loss, sum_over_devices, undisturbed
from litgpt.train.loggers import MetricsFile, next_version
from litgpt.train.memory import probe
from litgpt.train.method import Method
from litgpt.train.objective import CachedObjective, Objective
from litgpt.train.optimizer import Spec, make_optimizer
from litgpt.train.progress import Progress
from litgpt.train.schedule import make_schedule
from litgpt.train.state import Companions, Counters, keep_latest, load_folder, save_folder, step_folder

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from litgpt.model import GPT
    from litgpt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def fit(
    fabric: Fabric,
    method: Method,
    model: GPT,
    data: Any,
    train: TrainArgs,
    eval: EvalArgs,
    *,
    optimizer: Spec,
    seed: int,
    out_dir: Path,
    companions: Companions,
    resume: Path | None = None,
    tokenizer: Tokenizer | None = None,
    kv_cache: str | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Path:
    """Train a model and write the folders.

    Args:
        fabric: launched; with the loggers to tell.
        method: what is trained and how it is saved.
        model: the model, its trainable parameters marked.
        data: gives `train_dataloader()` and `val_dataloader()`, whose datasets and worker processes are used.
        train: how to train.
        eval: how to evaluate.
        optimizer: see `make_optimizer`.
        seed: decides the order of the data and all random numbers.
        out_dir: where the folders go.
        companions: what goes into every folder.
        resume: the step folder to go on from.
        tokenizer: for the example that evaluations show; None shows none.
        kv_cache: kind of the KV cache to train under; None: every token sees all before it that the model lets it see.
        chunk_size: tokens that go through that cache at once.

    Returns:
        The file of the metrics, which the first device wrote.

    Raises:
        UserError: settings that do not fit each other or the data.
    """
    run = Run(
        fabric, method, model, data, train, eval, optimizer, seed, out_dir, companions, tokenizer, kv_cache, chunk_size
    )
    if resume is not None:
        run.restore(resume)
    run.train()
    return run.metrics_path


class Run:
    """One training, from its first step or from where it stopped; see `fit` for the arguments."""

    def __init__(
        self,
        fabric: Fabric,
        method: Method,
        model: GPT,
        data: Any,
        train: TrainArgs,
        eval: EvalArgs,
        optimizer: Spec,
        seed: int,
        out_dir: Path,
        companions: Companions,
        tokenizer: Tokenizer | None = None,
        kv_cache: str | None = None,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        self.fabric, self.method, self.model = fabric, method, model
        self.train_args, self.eval_args, self.seed = train, eval, seed
        self.out_dir, self.companions, self.tokenizer, self.kv_cache = out_dir, companions, tokenizer, kv_cache
        self.dataset, self.num_workers = dataset_of(data.train_dataloader)
        self.val_dataset, _ = dataset_of(data.val_dataloader)
        self.plan = Plan(
            lengths_of(self.dataset),
            seed,
            train.global_batch_size,
            train.micro_batch_size,
            fabric.global_rank,
            fabric.world_size,
            packing=train.packing if kv_cache is None else packing_under_cache(train.packing),
        )
        self._check_lengths()
        checkpoint_activations(model, train.checkpoint_activations)
        self.counters = Counters()
        reach, noise = max(self.plan.lengths), train.neftune_alpha
        self.objective = fabric.setup_module(
            Objective(model, reach, noise)
            if kv_cache is None
            else CachedObjective(model, reach, kv_cache, chunk_size, noise)
        )
        made = make_optimizer(optimizer, model, method.lr_scale)  # of the parameters as they are divided now
        self.peaks = [group["initial_lr"] for group in made.param_groups]
        self.schedule = make_schedule(train, max(self.peaks), self.plan.steps_per_epoch, self._total_steps())
        self.optimizer = cast("torch.optim.Optimizer", fabric.setup_optimizers(made))
        self.metrics_path = next_version(out_dir / "logs" / "csv") / "metrics.csv"
        self.metrics_position = 0

    def _check_lengths(self) -> None:
        longest, limit = max(self.plan.lengths), self.model.max_seq_length
        if longest > limit:
            raise UserError(
                f"sample {self.plan.lengths.index(longest)} has {longest} tokens, the longest possible is {limit}",
                "cut it with --train.max_seq_length",
            )

    def _total_steps(self) -> int | None:
        """Steps of the whole training, None when only time ends it; about, when the number of tokens does."""
        train, per_epoch = self.train_args, self.plan.steps_per_epoch
        limits = [train.max_steps] if train.max_steps is not None else []
        if train.epochs is not None:
            limits.append(train.epochs * per_epoch)
        if train.max_tokens is not None:
            limits.append(math.ceil(train.max_tokens * per_epoch / sum(self.plan.lengths)))
        if not limits and train.max_time is None:
            raise UserError("nothing says when training ends", "give --train.epochs, --train.max_steps or max_tokens")
        return min(limits) if limits else None

    # The loop

    def train(self) -> None:
        """Train to the end and save the result."""
        train, counters = self.train_args, self.counters
        self.metrics = MetricsFile(self.metrics_path, self.metrics_position) if self.fabric.is_global_zero else None
        self.progress = Progress(self.schedule.total, counters.step, enabled=self.fabric.is_global_zero)
        steps = train_steps(self.dataset, self.plan, counters.step, self.num_workers)
        self.objective.train()
        if self.fabric.device.type == "cuda":
            probe(self._longest_pass, self.model.parameters(), self.fabric.device)
        with self.progress:
            if self.eval_args.initial_validation and counters.step == 0:
                self.evaluate(None)
            while not self._is_over():
                self.step(next(steps))
                final = self.eval_args.final_validation and self._is_over()  # is evaluated below
                if counters.step % self.eval_args.interval == 0 and not final:
                    self.evaluate(self.eval_args.max_iters)
                if train.save_interval is not None and counters.step % train.save_interval == 0:
                    self.save(step_folder(self.out_dir, counters.step), state=self.state())
                    if self.fabric.is_global_zero:
                        keep_latest(self.out_dir, train.keep_last)
            if self.eval_args.final_validation:
                self.evaluate(None)
        self.save(self.out_dir / "final")

    def _longest_pass(self) -> None:
        """Forward and backward pass of the micro-batch that needs the most memory."""
        samples = [self.dataset[i] for i in self.plan.longest()]
        batch = collate_for(self.dataset, packed=self.plan.packing == "pack")(samples)
        self.fabric.backward(self.objective(batch.to(self.fabric.device)))

    def _is_over(self) -> bool:
        train, counters, patience = self.train_args, self.counters, self.eval_args.patience
        if train.max_tokens is not None:
            if counters.tokens >= train.max_tokens:
                return True
        elif self.schedule.total is not None and counters.step >= self.schedule.total:
            return True
        if train.max_steps is not None and counters.step >= train.max_steps:
            return True
        if train.epochs is not None and counters.step >= train.epochs * self.plan.steps_per_epoch:
            return True
        if patience is not None and counters.evals_since_best >= patience:
            self.progress.say("no lower validation loss in %d evaluations: training ends", patience)
            return True
        if train.max_time is None:
            return False
        over = torch.tensor([counters.seconds >= train.max_time], dtype=torch.float32)
        return bool(sum_over_devices(self.fabric, over))  # all devices stop together

    def step(self, batches: list[Batch]) -> None:
        """One update, from the micro-batches of this device."""
        start = time.perf_counter()
        counters, fabric = self.counters, self.fabric
        seed_everything(derive_seed("step", self.seed, counters.step, fabric.global_rank))
        counts = torch.tensor([sum(b.supervised for b in batches), sum(b.tokens for b in batches)])
        n_learnt, n_tokens = (int(count) for count in sum_over_devices(fabric, counts))
        scale = fabric.world_size / max(n_learnt, 1)  # gradients are averaged over devices
        factor = self.schedule(counters.step)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * factor
        loss_sum = torch.zeros((), device=fabric.device)
        for i, batch in enumerate(batches):
            with fabric.no_backward_sync(self.objective, enabled=i < len(batches) - 1):
                loss = self.objective(batch.to(fabric.device))
                fabric.backward(loss * scale)
            loss_sum += loss.detach()
        norm = None
        if self.train_args.max_norm is not None:
            norm = fabric.clip_gradients(self.objective, self.optimizer, max_norm=self.train_args.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        epoch = self.plan.epoch(counters.step)
        counters.step += 1
        counters.iters += len(batches)
        counters.tokens += n_tokens
        if counters.step % self.train_args.log_interval == 0:
            loss_mean = float(sum_over_devices(fabric, loss_sum)) / max(n_learnt, 1)  # waits for the device
            seconds = time.perf_counter() - start
            self._report(
                {
                    "step": counters.step,
                    "iter": counters.iters,
                    "epoch": epoch,
                    "loss": loss_mean,
                    "learning_rate": max(self.peaks) * factor,
                    **({} if norm is None else {"grad_norm": float(norm)}),
                    "total_tokens": counters.tokens,
                    "iter_time": seconds,
                    "tokens_per_second": n_tokens / seconds,
                }
            )
        self.progress.advance()
        counters.seconds += time.perf_counter() - start

    def _report(self, metrics: dict[str, float]) -> None:
        if "loss" in metrics:
            self.progress.report(metrics)
        if self.metrics is not None:
            self.metrics.write(metrics)
        self.fabric.log_dict(metrics, step=self.counters.step)

    # Evaluation

    def evaluate(self, max_batches: int | None) -> None:
        """Measure the validation loss, note whether it is the lowest, and show an example."""
        if not len(self.val_dataset):
            return
        counters, fabric = self.counters, self.fabric
        with undisturbed(self.objective):
            batches = eval_batches(
                self.val_dataset, self.train_args.micro_batch_size, max_batches, fabric.global_rank, fabric.world_size
            )
            loss = mean_loss(fabric, self.objective, batches)
            self._show_example()
        perplexity = math.exp(loss) if loss < 700 else math.inf
        self.progress.say("step %d: validation loss %.4f, perplexity %.3f", counters.step, loss, perplexity)
        self._report({"step": counters.step, "val_loss": loss, "val_ppl": perplexity})
        counters.evals_since_best += 1
        if counters.best_loss is None or loss < counters.best_loss:
            counters.best_loss, counters.evals_since_best = loss, 0
            if self.eval_args.save_best:
                self.save(self.out_dir / "best")

    def _show_example(self) -> None:
        if self.tokenizer is None or not self.eval_args.max_new_tokens:
            return
        # A divided model runs on all devices or on none
        if self.fabric.is_global_zero or is_divided(self.model):
            autocast = autocast_dtype(self.fabric.strategy.precision.precision)
            texts = answer_example(
                self.model,
                self.tokenizer,
                self.val_dataset,
                self.eval_args,
                self.counters.step,
                autocast,
                self.kv_cache or "dense",
            )
            self.progress.say("example: %s\nanswer: %s", *texts)
        self.fabric.barrier()

    # Saving and going on

    def state(self) -> dict[str, Any]:
        """What resuming needs beside the weights."""
        position = 0 if self.metrics is None else self.metrics.position
        return {
            "optimizer": whole(self.optimizer.state_dict()),
            "scheduler": dataclasses.asdict(self.schedule),
            "iter_num": self.counters.iters,
            "step_count": self.counters.step,
            "counters": dataclasses.asdict(self.counters),
            "data": self._data_identity(),
            "metrics": {"file": self.metrics_path.relative_to(self.out_dir).as_posix(), "position": position},
            "precision": self.fabric.strategy.precision.state_dict(),
        }

    def _data_identity(self) -> dict[str, int]:
        return {
            "samples": len(self.plan.lengths),
            "tokens": sum(self.plan.lengths),
            "global_batch_size": self.plan.global_batch_size,
            "seed": self.seed,
        }

    def save(self, folder: Path, state: Mapping[str, Any] | None = None) -> None:
        """Write a folder; the first device does."""
        weights = whole(self.method.state(self.model))
        if state is None and not self.method.partial:
            kept = {name for name, _ in self.model.named_buffers()}  # of a few numbers, and they decide a lot
            dtype = self.companions.dtype
            weights = {
                name: tensor if name in kept else tensor.to(dtype or tensor.dtype) for name, tensor in weights.items()
            }
        if self.fabric.is_global_zero:
            self.progress.say("saving %s", folder)
            save_folder(folder, self.method.file_name, weights, self.companions, state)
        self.fabric.barrier()

    def restore(self, folder: Path) -> None:
        """Go on from a step folder.

        Raises:
            UserError: the folder is not whole, or it belongs to other data or another division into steps.
        """
        weights, state = load_folder(folder, self.method.file_name)
        was, now = state["data"], self._data_identity()
        changed = [f"{name} {was[name]} -> {now[name]}" for name in now if was[name] != now[name]]
        if changed:
            raise UserError(
                f"{folder} belongs to a run on other steps: {', '.join(changed)}",
                "resume with the same data, seed and --train.global_batch_size, or start a new run",
            )
        if state["scheduler"] != dataclasses.asdict(self.schedule):
            logger.warning("the learning rate's schedule is not the one of the run that is resumed")
        self.method.load_state(self.model, divided_like(weights, self.model.state_dict()))
        self.optimizer.load_state_dict(divided_optimizer_state(state["optimizer"], self.optimizer))
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        self.counters = Counters(**state["counters"])
        path = self.out_dir / state["metrics"]["file"]
        if folder.resolve().parent == self.out_dir.resolve() and path.is_file():
            self.metrics_path, self.metrics_position = path, state["metrics"]["position"]
        if self.fabric.is_global_zero:
            logger.info("going on from %s", folder)


def seed_everything(seed: int) -> None:
    """Seed the random numbers of torch, on all devices, of Python and of numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
