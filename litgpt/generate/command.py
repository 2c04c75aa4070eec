# Licensed under the Apache License 2.0, see the LICENSE file.

"""What `litgpt generate` and its relatives do once their options are read."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch

from litgpt.errors import UserError
from litgpt.generate.engine import Engine, with_seeds
from litgpt.generate.loading import load, with_stops_of
from litgpt.generate.speculative import Speculation, check_same_vocabulary
from litgpt.generate.types import Result, SamplingParams
from litgpt.kvcache import CacheKind

logger = logging.getLogger(__name__)


def run(
    checkpoint_dir: str | Path,
    prompt: str,
    params: SamplingParams,
    *,
    input: str = "",
    sys_prompt: str | None = None,
    prompt_style: str | None = None,
    adapter: str | Path | None = None,
    finetuned: Path | None = None,
    num_samples: int = 1,
    quantize: str | None = None,
    precision: str | None = None,
    device: str | None = None,
    kv_cache: str = "dense",
    compile: bool = False,
    speculate: str | None = None,
    draft_dir: str | Path | None = None,
    draft_k: int = 3,
) -> None:
    """Load a model and print continuations; see `litgpt.generate.base.main` and `full.main` for the arguments.

    Instead of `speculate`, `draft_dir` may name a smaller model that drafts up to `draft_k` tokens.
    """
    if num_samples < 1:
        raise UserError(f"num_samples must be at least 1, got {num_samples}")
    CacheKind.parse(kv_cache)  # before anything is loaded
    speculation = None if speculate is None else Speculation.parse(speculate)
    loaded = load(
        checkpoint_dir,
        precision=precision,
        device=device,
        prompt_style=prompt_style,
        adapter=adapter,
        finetuned=finetuned,
        quantize=quantize,
    )
    ids = loaded.encode(prompt, sys_prompt, input)
    params = with_stops_of(loaded.prompt_style, loaded.tokenizer, params)
    if draft_dir is not None:
        draft = load(draft_dir, precision=precision, device=device, prompt_style=prompt_style, quantize=quantize)
        check_same_vocabulary(draft.tokenizer, loaded.tokenizer)
        speculation = Speculation.by_model(draft.engine(compile=compile), draft_k)
    engine = loaded.engine(kv_cache=kv_cache, compile=compile, speculation=speculation)
    for sample_params in with_seeds(params, num_samples):
        _report(_print_continuation(engine, ids, sample_params))
    logger.info("memory: %s", _memory_used())


def _print_continuation(engine: Engine, ids: list[int], params: SamplingParams) -> Result:
    """Write one continuation to standard output as it comes."""
    with engine.stream([ids], params) as stream:
        for event in stream:
            sys.stdout.write(event.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    return stream.results[0]


def _report(result: Result) -> None:
    timing = result.timing
    logger.info(
        "prefill: %d tokens in %.2f s, %.1f tokens/s; decode: %d tokens in %.2f s, %.1f tokens/s (%s)",
        timing.prompt_tokens,
        timing.prefill_seconds,
        timing.prefill_rate,
        timing.new_tokens,
        timing.decode_seconds,
        timing.decode_rate,
        result.finish_reason,
    )
    if timing.drafted:
        logger.info(
            "speculation: %d of %d drafted tokens accepted, %.2f tokens a step",
            timing.accepted,
            timing.drafted,
            timing.tokens_per_step,
        )


def _memory_used() -> str:
    """The most memory taken so far, of the GPU if one is in use."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return f"{torch.cuda.max_memory_allocated() / 1e9:.2f} GB on the GPU"
    try:
        import resource
    except ImportError:  # Windows
        return "unknown"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.2f} GB"
