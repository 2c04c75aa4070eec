# Licensed under the Apache License 2.0, see the LICENSE file.

"""The model: one plain GPT, from token ids to logits, for every config.

Letters in shapes: B batch, T tokens of this step, S slots of the cache, C embedding width `n_embd`, V padded
vocabulary, H query heads `n_head`, G key/value groups `n_query_groups`, D head size, R latent rank `kv_lora_rank`.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn as nn

from litgpt import kvcache
from litgpt.attention import KVView, Step, attend, build_mask_cache, column_sums
from litgpt.config import Config
from litgpt.kvcache import LayerCache as KVCache
from litgpt.kvcache import batched_index_select
from litgpt.layers import (
    GemmaMLP,
    GptNeoxMLP,
    LayerNorm,
    LayersBase,
    LLaMAMLP,
    LLaMAMoE,
    RMSNorm,
    StackedLinear,
)
from litgpt.rope import Rope, RopeRows, apply_rope, build_rope_cache, rotate

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "GPT",
    "Block",
    "CausalSelfAttention",
    "Config",
    "GemmaMLP",
    "GptNeoxMLP",
    "KVCache",
    "LLaMAMLP",
    "LLaMAMoE",
    "LayerNorm",
    "Layers",
    "MultiheadLatentAttention",
    "RMSNorm",
    "apply_rope",
    "batched_index_select",
    "build_mask_cache",
    "build_rope_cache",
]

logger = logging.getLogger(__name__)

LATENT_ABSORB_LIMIT = 170  # queries a step below which scoring in the latent space is cheaper than expanding it
LATENT_NORM_EPS = 1e-6  # of the norms inside latent attention, whatever the model's other norms have
EXPAND_BYTES = 64 * 2**20  # latent keys and values are expanded for as many heads at once as fit in this


class Layers(LayersBase):
    """Says how the parts of a model are made. Variants override the parts that differ."""

    def attention(self, config: Config, block_idx: int) -> nn.Module:
        """The attention of a block."""
        made = CausalSelfAttention if config.latent_attention is None else MultiheadLatentAttention
        return made(config, block_idx, self)

    def mlp(self, config: Config, block_idx: int) -> nn.Module:
        """The feed-forward network of a block: dense, or a mixture of experts where the config has one."""
        path = f"h.{block_idx}.mlp"
        if config.layer_is_moe(block_idx):
            return LLaMAMoE(config, path, self)
        if config.mlp_class_name == "LLaMAMoE":
            return LLaMAMLP(config, path=path, layers=self)
        return config.mlp_class(config, path=path, layers=self)


class Transformer(nn.ModuleDict):
    """The embedding `wte`, the blocks `h` and the final norm `ln_f`, under the names that checkpoints use.

    With `Config.learned_positions` also the embedding of positions `wpe`.
    """

    wte: nn.Embedding
    wpe: nn.Embedding
    h: nn.ModuleList
    ln_f: nn.Module


class GPT(nn.Module):
    """A decoder-only language model.

    Args:
        config: what it is made of.
        layers: how its parts are made; default: this class's `layers_class`.
    """

    config_class: type[Config] = Config
    layers_class: type[Layers] = Layers

    def __init__(self, config: Config, layers: Layers | None = None) -> None:
        super().__init__()
        layers = layers or self.layers_class()
        assert config.padded_vocab_size is not None
        self.config = config
        self.lm_head = layers.linear(
            config, "lm_head", "head", config.n_embd, config.padded_vocab_size, config.lm_head_bias
        )
        self.transformer = Transformer(
            {
                "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
                "h": nn.ModuleList(Block(config, i, layers) for i in range(config.n_layer)),
                "ln_f": layers.norm(config, "ln_f", config.n_embd),
            }
        )
        if config.learned_positions:
            self.transformer["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        if config.tie_embeddings:
            self.tie_weights()
        self.register_load_state_dict_pre_hook(_match_tie)
        self.register_load_state_dict_post_hook(_tie_again)
        self.rope = Rope(config)
        self.kv_cache: kvcache.KVCache | None = None
        self._max_seq_length = config.block_size

    # Making one

    @classmethod
    def from_name(cls, name: str, **kwargs: Any) -> Self:
        """A model with random weights by the name of its config; `kwargs` override fields."""
        return cls(cls.config_class.from_name(name, **kwargs))

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a model, ready to run: strict, in eval mode.

        Args:
            path: a Hugging Face folder, a `.gguf` file, a LitGPT folder or a repository id.
            dtype: dtype of the weights, default the checkpoint's.
            device: where they go, default the CPU.
            **kwargs: fields of the config to override.

        Raises:
            UserError: the checkpoint is missing, damaged or of an unknown kind.
        """
        from litgpt.checkpoint.convert import load_model
        from litgpt.checkpoint.hub import resolve

        return load_model(resolve(path), gpt_class=cls, dtype=dtype, device=device, **kwargs)

    def tie_weights(self) -> None:
        """Make the head's weight and the embedding one parameter."""
        self._plain_head.weight = self.transformer.wte.weight

    @property
    def _plain_head(self) -> nn.Linear:
        return cast(nn.Linear, getattr(self.lm_head, "linear", self.lm_head))  # a variant may wrap the map

    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights of one module; use as `gpt.apply(gpt._init_weights)`."""
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        elif isinstance(module, StackedLinear):
            module.reset_parameters()

    # Running it

    def forward(
        self,
        idx: torch.Tensor,
        input_pos: torch.Tensor | None = None,
        input_pos_maxp1: int | None = None,
        lm_head_chunk_size: int = 0,
        *,
        cache: kvcache.KVCache | None = None,
        step: Step | None = None,
        last_only: bool = False,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Logits of the next token at each position.

        Args:
            idx: `(B, T)` token ids.
            input_pos: `(T,)` or `(B, T)` positions of the tokens in the cache made by `set_kv_cache`, contiguous within
                a row; starting again at 0 starts a new sequence.
            input_pos_maxp1: largest position plus 1, if the caller knows it; saves attending to unused slots.
            lm_head_chunk_size: with a value above 0, a list of logits for so many positions each.
            cache: the cache of this request; its lengths are committed when the forward pass succeeded.
            step: `cache.plan(...)`, default T new tokens in every row; without a cache, `Step.packed(...)` for rows of
                several sequences.
            last_only: only the logits of each row's last new token.

        Returns:
            `(B, T, V)`, or `(B, 1, V)` with `last_only`, or a list of `(B, <= chunk, V)`.

        Raises:
            ValueError: too many tokens or rows, positions outside the cache, or token ids outside the embedding.
        """
        if input_pos is not None:
            cache, step = self._step_from_positions(idx, input_pos, input_pos_maxp1)
        elif cache is not None:
            if idx.size(0) != cache.batch_size:
                raise ValueError(f"a batch of {idx.size(0)} rows does not fit a KV cache of {cache.batch_size}")
            if step is not None and step.documents is not None:
                raise ValueError("packed rows need no KV cache: they start and end with the forward pass")
            step = cache.plan(idx.size(1)) if step is None else step
            if step.size != idx.size(1):
                raise ValueError(f"the step was planned for {step.size} tokens a row, got {idx.size(1)}")
        else:
            self._check_length(idx, step)
        self.check_ids(idx)
        try:
            logits = self.run(idx, step, cache, last_only=last_only, lm_head_chunk_size=lm_head_chunk_size)
        except BaseException:
            if cache is not None and step is not None:
                cache.abandon(step)
            raise
        if cache is not None and step is not None:
            cache.commit(step)
        return logits

    def _check_length(self, idx: torch.Tensor, step: Step | None) -> None:
        """Raise ValueError for a pass without a cache that is longer than it may be, or than its step."""
        if step is not None and step.size != idx.size(1):
            raise ValueError(f"the step is for {step.size} tokens a row, got {idx.size(1)}")
        length = idx.size(1) if step is None else step.reach
        if length > self.max_seq_length:
            raise ValueError(f"cannot forward {length} tokens: the maximum length is {self.max_seq_length}")

    def check_ids(self, idx: torch.Tensor) -> None:
        """Raise ValueError for token ids outside the embedding, on devices that the host need not wait for."""
        if torch.compiler.is_compiling() or idx.is_cuda or idx.device.type == "meta" or not idx.numel():
            return
        n_rows = self.transformer.wte.num_embeddings
        low, high = (int(v) for v in idx.aminmax())
        if low < 0 or high >= n_rows:
            raise ValueError(f"token id {low if low < 0 else high} is outside the embedding of {n_rows} rows")

    def run(
        self,
        idx: torch.Tensor,
        step: Step | None = None,
        cache: kvcache.KVCache | None = None,
        *,
        last_only: bool = False,
        lm_head_chunk_size: int = 0,
    ) -> torch.Tensor | list[torch.Tensor]:
        """`forward` without its bookkeeping: checks and commits nothing, so it compiles to one graph."""
        x = self.hidden(idx, step, cache)
        if last_only:
            last = None if step is None else step.last
            x = x[:, -1:] if last is None else x.gather(1, last.view(-1, 1, 1).expand(-1, 1, x.size(-1)))
        if lm_head_chunk_size > 0:
            return [self.head(chunk) for chunk in x.split(lm_head_chunk_size, dim=1)]
        return self.head(x)

    def hidden(self, idx: torch.Tensor, step: Step | None = None, cache: kvcache.KVCache | None = None) -> torch.Tensor:
        """Token ids `(B, T)` -> what the head reads, `(B, T, C)` after the final norm. Checks and commits nothing."""
        if step is None:
            step = Step.without_cache(idx.size(1), idx.device)
        x = self.embed(idx)
        if self.config.learned_positions:
            if cache is not None and cache.max_length > self.config.block_size:
                raise ValueError(
                    f"a KV cache of {cache.max_length} positions: this model has learned {self.config.block_size}"
                )
            x = x + self.transformer.wpe(step.pos.clamp_min(0))
        if step.start is None:  # what stands at padding must not matter: zero times NaN would
            x = x.masked_fill((step.pos < 0).unsqueeze(-1), 0)
        length = step.reach if cache is None else cache.rope_length
        rows = self.rope.rows(step.pos, length, x.dtype)
        if cache is not None and (kept := cache.relative_length) is not None:
            step.sink_rope = self.rope.rows((step.pos + 1 - kept).clamp_min(0), length, x.dtype, backwards=True)
        for i, block in enumerate(self.transformer.h):
            x = block(x, rows[i], step, None if cache is None else cache.layers[i])
        return self.transformer.ln_f(x)

    def embed(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids `(B, T)` -> `(B, T, C)`."""
        x = self.transformer.wte(idx)
        scale = self.config.embedding_multiplier
        if self.config.scale_embeddings:
            scale *= self.config.n_embd**0.5
        if scale != 1.0:
            x = x * torch.tensor(scale, dtype=x.dtype)  # rounded to the model's dtype, as in training
        return x

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Final hidden states `(B, T, C)` -> logits `(B, T, V)`."""
        logits = self.lm_head(x)
        if self.config.logit_multiplier != 1.0:
            logits = logits * self.config.logit_multiplier
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    # The surface for code that sets one cache on the model

    @property
    def max_seq_length(self) -> int:
        """Longest sequence in tokens; also the default length of `set_kv_cache`."""
        return self._max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        if value > self.config.block_size:
            raise ValueError(
                f"max_seq_length {value} exceeds the model's context (block_size) {self.config.block_size}"
            )
        self._max_seq_length = value

    def rope_cache(self, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine tables up to `max_seq_length`. The model computes its own from the positions of each step."""
        config = self.config
        return build_rope_cache(
            self.max_seq_length,
            config.rope_n_elem,
            device,
            config.rope_base,
            config.rope_condense_ratio,
            config.rope_adjustments,
            config.rope_local_base_freq,
        )

    @property
    def cos(self) -> torch.Tensor:
        """Cosine table, see `rope_cache`."""
        return self.rope_cache(self.transformer.wte.weight.device)[0]

    @property
    def sin(self) -> torch.Tensor:
        """Sine table, see `rope_cache`."""
        return self.rope_cache(self.transformer.wte.weight.device)[1]

    def set_kv_cache(
        self,
        batch_size: int,
        max_seq_length: int | None = None,
        rope_cache_length: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Give the model a cache of its own, for forward passes with `input_pos`.

        Args:
            batch_size: rows.
            max_seq_length: longest sequence, default `self.max_seq_length`.
            rope_cache_length: accepted for compatibility; rotary angles need no cache.
            device: default the weights' device.
            dtype: default the weights' dtype.
        """
        weight = self.transformer.wte.weight
        self.kv_cache = kvcache.KVCache.from_config(
            self.config,
            batch_size=batch_size,
            max_length=max_seq_length or self.max_seq_length,
            dtype=dtype or weight.dtype,
            device=device or weight.device,
        )

    def clear_kv_cache(self) -> None:
        """Drop the cache made by `set_kv_cache`."""
        self.kv_cache = None

    def _step_from_positions(
        self, idx: torch.Tensor, input_pos: torch.Tensor, maxp1: int | None
    ) -> tuple[kvcache.KVCache, Step]:
        cache = self.kv_cache
        if cache is None:
            raise ValueError("input_pos needs a KV cache: call `gpt.set_kv_cache(batch_size)` first")
        if idx.size(0) > cache.batch_size:
            raise ValueError(f"a batch of {idx.size(0)} rows does not fit a KV cache of {cache.batch_size}")
        pos = input_pos.unsqueeze(0) if input_pos.dim() == 1 else input_pos
        n_tokens = idx.size(1)
        if pos.size(0) not in (1, idx.size(0)) or pos.size(1) != n_tokens:
            raise ValueError(f"input_pos {tuple(input_pos.shape)} does not fit tokens {tuple(idx.shape)}")
        if pos.is_cuda or torch.compiler.is_compiling():  # the positions are not looked at: no wait for the device
            if maxp1 is not None and maxp1 > cache.max_length:
                raise ValueError(f"position {maxp1 - 1} is outside the KV cache of {cache.max_length} positions")
            return cache, Step(pos, pos[:, -1] + 1, live=maxp1)
        first, last = pos[:, 0].tolist(), pos[:, -1].tolist()
        if min(first) < 0:
            raise ValueError(f"input_pos must not be negative, got {min(first)}")
        if n_tokens > 1 and not bool((pos.diff(dim=1) == 1).all()):
            raise ValueError(f"input_pos must be contiguous within a row, got {first} to {last}")
        if max(last) >= cache.max_length:
            raise ValueError(f"position {max(last)} is outside the KV cache of {cache.max_length} positions")
        starts = first * (idx.size(0) // len(first))
        cache.move_to(starts)
        start = starts[0] if len(set(starts)) == 1 else None
        if start is not None:
            pos = pos[:1]
        lengths = [s + n_tokens for s in starts] + cache.lengths[len(starts) :]
        return cache, Step(pos, pos[:, -1] + 1, max(last) + 1, start, fresh=start == 0, lengths=lengths)


def _match_tie(model: GPT, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Let a tied model read a state dict that names the one tensor once, and untie it for two different ones."""
    embedding, head = f"{prefix}transformer.wte.weight", f"{prefix}lm_head.weight"
    if not model.config.tie_embeddings or f"{prefix}lm_head.linear.weight" in state_dict:
        return
    if embedding in state_dict and head not in state_dict:
        state_dict[head] = state_dict[embedding]
    elif embedding in state_dict and not _same(state_dict[embedding], state_dict[head]):
        logger.warning("the embedding and the head that are loaded differ: they are now two parameters")
        model.config = dataclasses.replace(model.config, tie_embeddings=False)
        model._plain_head.weight = nn.Parameter(torch.empty_like(model._plain_head.weight))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or a.is_meta or b.is_meta or torch.equal(a, b.to(a.device))


def _tie_again(model: GPT, incompatible_keys: Any) -> None:
    """Tensors that were assigned, not copied, came as two parameters."""
    if model.config.tie_embeddings:
        model.tie_weights()


class Block(nn.Module):
    """One layer: attention and feed-forward network, each with its norms and a residual connection."""

    layers_class: type[Layers] = Layers

    def __init__(self, config: Config, block_idx: int, layers: Layers | None = None) -> None:
        super().__init__()
        if config.shared_attention_norm and not config.parallel_residual:
            raise ValueError("shared_attention_norm needs parallel_residual: there is one norm for both branches")
        layers = layers or self.layers_class()

        def norm(name: str, wanted: bool) -> nn.Module | None:
            return layers.norm(config, f"h.{block_idx}.{name}", config.n_embd) if wanted else None

        self.norm_1 = norm("norm_1", config.norm_1)
        self.attn = layers.attention(config, block_idx)
        self.post_attention_norm = norm("post_attention_norm", config.post_attention_norm)
        self.norm_2 = norm("norm_2", config.norm_2 and not config.shared_attention_norm)
        self.mlp = layers.mlp(config, block_idx)
        self.post_mlp_norm = norm("post_mlp_norm", config.post_mlp_norm)
        self.config = config

    def forward(self, x: torch.Tensor, rope: RopeRows | None, step: Step, cache: KVCache | None = None) -> torch.Tensor:
        """`(B, T, C) -> (B, T, C)`.

        Sequential: `h = x + attn(norm_1(x)); h + mlp(norm_2(h))`. Parallel: `x + attn(norm_1(x)) + mlp(norm_2(x))`,
        where `norm_1` may serve both. Each branch may have a norm behind it too.
        """
        config = self.config
        normed = x if self.norm_1 is None else self.norm_1(x)
        branch = self.attn(normed, rope, step, cache)
        if self.post_attention_norm is not None:
            branch = self.post_attention_norm(branch)
        if config.residual_multiplier != 1.0:
            branch = branch * config.residual_multiplier
        h = x + branch
        mlp_in = x if config.parallel_residual else h
        if config.shared_attention_norm:
            mlp_in = normed
        elif self.norm_2 is not None:
            mlp_in = self.norm_2(mlp_in)
        branch = self.mlp(mlp_in)
        if self.post_mlp_norm is not None:
            branch = self.post_mlp_norm(branch)
        if config.residual_multiplier != 1.0:
            branch = branch * config.residual_multiplier
        return h + branch


class CausalSelfAttention(nn.Module):
    """Multi-head, grouped-query or multi-query attention."""

    layers_class: type[Layers] = Layers

    def __init__(self, config: Config, block_idx: int, layers: Layers | None = None) -> None:
        super().__init__()
        layers = layers or self.layers_class()
        path = f"h.{block_idx}.attn"
        assert config.head_size is not None
        assert config.n_query_groups is not None
        q_size, kv_size = config.n_head * config.head_size, config.n_query_groups * config.head_size
        proj_bias = config.bias if config.attn_proj_bias is None else config.attn_proj_bias
        self.qkv = layers.linear(
            config, f"{path}.qkv", "qkv", config.n_embd, q_size + 2 * kv_size, config.bias or config.attn_bias
        )
        self.proj = layers.linear(config, f"{path}.proj", "proj", q_size, config.n_embd, proj_bias)
        if config.norm_qk:
            self.norm_q = layers.head_norm(config, f"{path}.norm_q", config.n_head, config.head_size)
            self.norm_k = layers.head_norm(config, f"{path}.norm_k", config.n_query_groups, config.head_size)
        self.sinks = nn.Parameter(torch.zeros(config.n_head)) if config.attention_sinks else None
        self.window = config.layer_window(block_idx)
        self.scale = config.attention_scale
        self.config = config
        self.block_idx = block_idx

    def forward(self, x: torch.Tensor, rope: RopeRows | None, step: Step, cache: KVCache | None = None) -> torch.Tensor:
        """`(B, T, C) -> (B, T, C)`."""
        q, k, v = self.project(x, rope)
        if cache is None:
            view = KVView(k, v, step.pos.unsqueeze(1), step.live, key="chunk")
        else:
            view = cache.update(k, v, step)
        y = self.attend(q, view, step)  # (B, H, T, D)
        if cache is not None and cache.needs_weights:
            cache.observe(self.attention_mass(q, view, step, cache.observe_last), step)
        return self.proj(y.transpose(1, 2).reshape(x.size(0), x.size(1), -1))

    def project(self, x: torch.Tensor, rope: RopeRows | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of the step, normed and rotated.

        The sole owner of the fused layout `q | k | v`.

        Returns:
            q `(B, H, T, D)`, k and v `(B, G, T, D)`.
        """
        config = self.config
        n_head, n_groups, size = config.n_head, config.n_query_groups, config.head_size
        assert n_groups is not None
        assert size is not None
        qkv = self.qkv(x)
        if config.norm_qk and config.norm_qk_type == "olmo2":
            q, k, v = qkv.split((n_head * size, n_groups * size, n_groups * size), dim=-1)
            qkv = torch.cat((self.norm_q(q), self.norm_k(k), v), dim=-1)
        if (limit := config.clip_qkv) is not None:
            qkv = qkv.clamp(-limit, limit)
        heads = qkv.view(x.size(0), x.size(1), -1, size)  # (B, T, H + 2G, D)
        qk, v = heads.narrow(2, 0, n_head + n_groups), heads.narrow(2, n_head + n_groups, n_groups)
        if config.norm_qk and config.norm_qk_type != "olmo2":
            q, k = qk.split((n_head, n_groups), dim=2)
            qk = torch.cat((self.norm_q(q), self.norm_k(k)), dim=2)
        if rope is not None:
            qk = rotate(qk, rope)  # queries and keys in one go
        qk = qk.transpose(1, 2)
        q, k = qk.narrow(1, 0, n_head), qk.narrow(1, n_head, n_groups)
        if rope is not None and rope.query_scale is not None:
            q = q * rope.query_scale.transpose(1, 2)
        return q, k, v.transpose(1, 2)

    def attend(self, q: torch.Tensor, view: KVView, step: Step) -> torch.Tensor:
        """Attend from `q` to the view; the method that variants extend."""
        config = self.config
        return attend(
            q,
            view,
            step,
            scale=self.scale,
            window=self.window,
            softcap=config.attention_logit_softcapping,
            sinks=self.sinks,
            q_for_sinks=queries_for_sinks(q, view, step, self.block_idx),
        )

    @torch.no_grad()
    def attention_mass(self, q: torch.Tensor, view: KVView, step: Step, last: int | None) -> torch.Tensor:
        """Attention that each slot receives from the `last` queries, `(B, G, S)`; see `attention.column_sums`."""
        softcap = self.config.attention_logit_softcapping
        options: dict[str, Any] = {"scale": self.scale, "window": self.window, "softcap": softcap, "sinks": self.sinks}
        return column_sums(q, view, step, last=last, **options)


def queries_for_sinks(q: torch.Tensor, view: KVView, step: Step, block_idx: int) -> torch.Tensor | None:
    """Queries `(B, H, T, D)` turned to where relative sinks see them; None when that is where they are."""
    if not view.relative_sinks or step.sink_rope is None or (rows := step.sink_rope[block_idx]) is None:
        return None
    return rotate(q.transpose(1, 2), rows).transpose(1, 2)


class MultiheadLatentAttention(nn.Module):
    """Multi-head latent attention of DeepSeek-V2 and V3, https://arxiv.org/abs/2405.04434 section 2.1.

    The cache holds one latent vector and one rotated key part a token, shared by all heads. A few queries are scored in
    the latent space, with the up-projections absorbed into queries and outputs; many queries expand it instead.
    """

    layers_class: type[Layers] = Layers

    def __init__(self, config: Config, block_idx: int, layers: Layers | None = None) -> None:
        super().__init__()
        layers = layers or self.layers_class()
        path = f"h.{block_idx}.attn"
        n_head, rank = config.n_head, config.kv_lora_rank
        if config.q_lora_rank is None:
            self.q_proj = layers.linear(config, f"{path}.q_proj", "q", config.n_embd, n_head * config.qk_head_dim)
        else:
            self.q_a_proj = layers.linear(
                config, f"{path}.q_a_proj", "q", config.n_embd, config.q_lora_rank, config.attn_bias
            )
            self.q_a_norm = layers.norm(config, f"{path}.q_a_norm", config.q_lora_rank, eps=LATENT_NORM_EPS)
            self.q_b_proj = layers.linear(
                config, f"{path}.q_b_proj", "q", config.q_lora_rank, n_head * config.qk_head_dim
            )
        self.kv_a_proj_with_mqa = layers.linear(
            config, f"{path}.kv_a_proj_with_mqa", "kv", config.n_embd, rank + config.qk_rope_head_dim, config.attn_bias
        )
        self.kv_a_norm = layers.norm(config, f"{path}.kv_a_norm", rank, eps=LATENT_NORM_EPS)
        up_size = n_head * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = layers.linear(config, f"{path}.kv_b_proj", "kv", rank, up_size)
        proj_bias = config.attn_bias if config.attn_proj_bias is None else config.attn_proj_bias
        self.proj = layers.linear(config, f"{path}.proj", "proj", n_head * config.v_head_dim, config.n_embd, proj_bias)
        self.window = config.layer_window(block_idx)
        self.scale = config.attention_scale
        self.config = config
        self.block_idx = block_idx

    def forward(self, x: torch.Tensor, rope: RopeRows | None, step: Step, cache: KVCache | None = None) -> torch.Tensor:
        """`(B, T, C) -> (B, T, C)`."""
        q, latent = self.project(x, rope)
        if cache is None:
            v = latent[..., : self.config.kv_lora_rank]
            view = KVView(latent, v, step.pos.unsqueeze(1), step.live, key="chunk")
        else:
            view = cache.update(latent, None, step)
        y = self.attend(q, view, step)  # (B, H, T, v_head_dim)
        if cache is not None and cache.needs_weights:
            cache.observe(self.attention_mass(q, view, step, cache.observe_last), step)
        return self.proj(y.transpose(1, 2).reshape(x.size(0), x.size(1), -1))

    def project(self, x: torch.Tensor, rope: RopeRows | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and what the cache stores, rotated.

        Returns:
            q `(B, H, T, qk_nope_head_dim + qk_rope_head_dim)` and latent `(B, 1, T, R + qk_rope_head_dim)`.
        """
        config = self.config
        q = self.q_proj(x) if config.q_lora_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = q.unflatten(-1, (config.n_head, config.qk_head_dim))  # (B, T, H, nope + rope)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((config.kv_lora_rank, config.qk_rope_head_dim), dim=-1)
        k_rope = k_rope.unsqueeze(2)  # (B, T, 1, rope): one key part for all heads
        if rope is not None:
            q_nope, q_rope = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), dim=-1)
            q = torch.cat((q_nope, rotate(q_rope, rope)), dim=-1)
            k_rope = rotate(k_rope, rope)
        latent = torch.cat((self.kv_a_norm(latent), k_rope.squeeze(2)), dim=-1)
        return q.transpose(1, 2), latent.unsqueeze(1)

    def attend(self, q: torch.Tensor, view: KVView, step: Step) -> torch.Tensor:
        """Attend from `q` to the latents of the view; the method that variants extend.

        Args:
            q: `(B, H, T, nope + rope)`.
            view: k `(B, 1, S, R + rope)`, v its first R elements.
            step: the positions of the queries.

        Returns:
            `(B, H, T, v_head_dim)`.
        """
        config = self.config
        rank = config.kv_lora_rank
        k_up, v_up = self._up_projections()
        options: dict[str, Any] = {"scale": self.scale, "window": self.window}
        q_for_sinks = self._queries_for_sinks(q, view, step)
        if q.size(2) <= LATENT_ABSORB_LIMIT:
            if q_for_sinks is not None:
                options["q_for_sinks"] = self._absorb(q_for_sinks, k_up)
            y = attend(self._absorb(q, k_up), view, step, **options)  # (B, H, T, R)
            return torch.einsum("bhtr,hvr->bhtv", y, v_up)
        n_slots = view.k.size(2) if view.live is None else min(view.live, view.k.size(2))
        view = view._replace(k=view.k[:, :, :n_slots], v=view.v[:, :, :n_slots], pos=view.pos[..., :n_slots])
        a_head = q.size(0) * n_slots * (q.size(3) + config.v_head_dim) * q.element_size()
        n_heads = max(1, EXPAND_BYTES // a_head)
        out = []
        parts = zip(q.split(n_heads, 1), k_up.split(n_heads), v_up.split(n_heads), strict=True)
        for i, (q_part, k_part, v_part) in enumerate(parts):
            if q_for_sinks is not None:
                options["q_for_sinks"] = q_for_sinks.split(n_heads, 1)[i]
            k = torch.einsum("bsr,hnr->bhsn", view.v[:, 0], k_part)
            k_rope = view.k[..., rank:].expand(-1, k.size(1), -1, -1)
            v = torch.einsum("bsr,hvr->bhsv", view.v[:, 0], v_part)
            expanded = view._replace(k=torch.cat((k, k_rope), dim=-1), v=v)
            out.append(attend(q_part, expanded, step, **options))
        return torch.cat(out, dim=1)

    @torch.no_grad()
    def attention_mass(self, q: torch.Tensor, view: KVView, step: Step, last: int | None) -> torch.Tensor:
        """Attention that each slot receives from the `last` queries, `(B, 1, S)`; see `attention.column_sums`."""
        q = self._absorb(q, self._up_projections()[0])
        return column_sums(q, view, step, scale=self.scale, window=self.window, last=last)

    def _absorb(self, q: torch.Tensor, k_up: torch.Tensor) -> torch.Tensor:
        """Queries `(B, H, T, nope + rope)` against expanded keys -> `(B, H, T, R + rope)` against latents."""
        q_nope, q_rope = q.split((self.config.qk_nope_head_dim, self.config.qk_rope_head_dim), dim=-1)
        return torch.cat((torch.einsum("bhtn,hnr->bhtr", q_nope, k_up), q_rope), dim=-1)

    def _queries_for_sinks(self, q: torch.Tensor, view: KVView, step: Step) -> torch.Tensor | None:
        q_nope, q_rope = q.split((self.config.qk_nope_head_dim, self.config.qk_rope_head_dim), dim=-1)
        turned = queries_for_sinks(q_rope, view, step, self.block_idx)
        return None if turned is None else torch.cat((q_nope, turned), dim=-1)

    def _up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What expands a latent to keys `(H, nope, R)` and to values `(H, v, R)`."""
        sizes = (self.config.qk_nope_head_dim, self.config.v_head_dim)
        up = self.up_projection().unflatten(0, (self.config.n_head, sum(sizes)))
        k_up, v_up = up.split(sizes, dim=1)
        return k_up, v_up

    def up_projection(self) -> torch.Tensor:
        """The weight `(H * (nope + v), R)` that expands a latent to keys and values, as this variant has it now."""
        return cast(torch.Tensor, self.kv_b_proj.weight)
