# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt show`: what a checkpoint is, from its headers alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from litgpt.errors import UserError

if TYPE_CHECKING:
    from litgpt.checkpoint.source import Source
    from litgpt.config import Config


def show(checkpoint_dir: Path) -> None:
    """Print what a checkpoint is: its architecture, size, memory, chat template and stop tokens. No weights are read.

    Args:
        checkpoint_dir: A checkpoint folder (Hugging Face or LitGPT), a .gguf file, or the id of a repository.
    """
    from litgpt.checkpoint.adapter_files import base_and_adapter
    from litgpt.checkpoint.hub import resolve
    from litgpt.checkpoint.plan import plan_import
    from litgpt.checkpoint.source import open_source

    path, adapter = base_and_adapter(resolve(checkpoint_dir))
    with open_source(path) as source:
        config = plan_import(source, source.config()).config
        lines = [("checkpoint", f"{path}, {source.kind}")]
        if adapter is not None:
            lines.append(("adapter", f"{adapter.path}, put on this checkpoint"))
        lines += [*_architecture(config), *_sizes(source, config), *_text(path, config)]
    width = max(len(label) for label, _ in lines) + 2
    sys.stdout.writelines(f"{label + ':':<{width}}{text}\n" for label, text in lines)


def _architecture(config: Config) -> Iterator[tuple[str, str]]:
    yield "model", f"{config.name or 'unnamed'}, of the type {config.family}"
    yield "layers", f"{config.n_layer} of width {config.n_embd}{', attention beside MLP' * config.parallel_residual}"
    yield "attention", _attention(config)
    yield "positions", _positions(config)
    yield "MLP", _mlp(config)
    yield "norms", f"{config.norm_class_name}{', queries and keys too' * config.norm_qk}"
    tied = "shared by embedding and head" if config.tie_embeddings else "apart for embedding and head"
    yield "vocabulary", f"{config.padded_vocab_size} rows, {tied}"


def _attention(config: Config) -> str:
    if config.latent_attention is not None:
        return f"{config.n_head} heads, keys and values from a latent vector of {config.kv_lora_rank}"
    text = f"{config.n_head} heads of {config.head_size}"
    if config.n_query_groups != config.n_head:
        text += f", {config.n_query_groups} of keys and values"
    sliding = sum(config.layer_window(i) is not None for i in range(config.n_layer))
    if sliding:
        text += f", the last {config.sliding_window_size} tokens in {sliding} of {config.n_layer} layers"
    return text + ", sinks" * config.attention_sinks


def _positions(config: Config) -> str:
    scaling = config.rope_adjustments or {}
    # LitGPT's files do not name the kind: Llama 3's has bounds of frequencies
    kind = scaling.get("rope_type") or ("llama3" if "low_freq_factor" in scaling else "linear")
    bases = [config.rope_base, *([config.rope_local_base_freq] if config.rope_local_base_freq is not None else [])]
    rotary = f"rotary, base {' and '.join(f'{base:g}' for base in bases)}{f', stretched ({kind})' if scaling else ''}"
    return f"up to {config.block_size}; {'learned' if config.learned_positions else rotary}"


def _mlp(config: Config) -> str:
    if config.mlp_class_name != "LLaMAMoE":
        gated = "" if config.mlp_class_name == "GptNeoxMLP" else ", gated"
        return f"width {config.intermediate_size}{gated}"
    layers = sum(config.layer_is_moe(i) for i in range(config.n_layer))
    text = f"{config.n_expert} experts of width {config.moe_intermediate_size} in {layers} of {config.n_layer} layers, "
    shared = f" and {config.n_shared_expert} shared" if config.n_shared_expert else ""
    return f"{text}{config.n_expert_per_token} a token{shared}"


def _sizes(source: Source, config: Config) -> Iterator[tuple[str, str]]:
    from litgpt.checkpoint.plan import build_empty
    from litgpt.kvcache.memory import bytes_per_token, estimate, in_words
    from litgpt.model import GPT
    from litgpt.runtime import num_parameters, parse_dtype

    model = build_empty(GPT, config)
    count = num_parameters(model)
    idle = _idle_parameters(config)
    yield "parameters", f"{count:,}" + (f", {count - idle:,} used for a token" if idle else "")
    yield (
        "weights",
        f"{in_words(source.nbytes_stored())} stored, {in_words(2 * count)} in memory in bfloat16, "
        f"{in_words(4 * count)} in float32",
    )
    dtype = parse_dtype("bfloat16")
    first = estimate(config, length=2, dtype=dtype) - estimate(config, length=1, dtype=dtype)
    later = bytes_per_token(config, dtype=dtype)
    beyond = f" ({later:,} once the windows are full)" if later != first else ""
    full = in_words(estimate(config, dtype=dtype))
    yield "KV cache", f"{first:,} bytes a token{beyond}, {full} for {config.block_size} tokens, in bfloat16"


def _idle_parameters(config: Config) -> int:
    """Parameters of the experts that a token is not sent to."""
    if config.mlp_class_name != "LLaMAMoE" or config.moe_intermediate_size is None:
        return 0
    expert = 3 * config.n_embd * config.moe_intermediate_size
    if config.bias if config.mlp_bias is None else config.mlp_bias:
        expert += 2 * config.moe_intermediate_size + config.n_embd
    layers = sum(config.layer_is_moe(i) for i in range(config.n_layer))
    return layers * (config.n_expert - config.n_expert_per_token) * expert


def _text(path: Path, config: Config) -> Iterator[tuple[str, str]]:
    from litgpt.prompts import ChatTemplate, choose_prompt_style, encode_prompt
    from litgpt.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer(path)
    except UserError as error:
        yield "tokenizer", f"none: {error.message}"
        return
    yield "tokenizer", f"{tokenizer.backend}, {tokenizer.vocab_size} tokens"
    style = choose_prompt_style(path, tokenizer, config)
    if isinstance(style, ChatTemplate):
        yield "prompts", f"the checkpoint's chat template, {len(tokenizer.chat_template or '')} characters"
    else:
        yield "prompts", f"the style {type(style).__name__}; the checkpoint has no chat template"
    ids = encode_prompt(tokenizer, style, "Hello!")
    yield "for example", f"'Hello!' becomes {tokenizer.decode(ids, skip_special_tokens=False)!r}"
    stops: list[tuple[int, ...]] = [(i,) for i in sorted(tokenizer.stop_ids)]
    stops += [tuple(sequence) for sequence in style.stop_tokens(tokenizer) if tuple(sequence) not in stops]
    names = (f"{tokenizer.decode(list(stop), skip_special_tokens=False)!r} ({stop[0]})" for stop in stops)
    yield "stops at", ", ".join(names) or "nothing: there is no end-of-text token"
