# Licensed under the Apache License 2.0, see the LICENSE file.

"""Rotary position embedding: frequencies of every scaling scheme, and the rotation itself.

Angles are computed from the positions of each forward pass (a few small operations for the whole model), so there is
no table to size, to move between devices or to lose precision when the model is cast to bfloat16.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from litgpt.config import Config


class RopeRows(NamedTuple):
    """Cosine and signed sine of one forward pass, each `(B, T, 1, n_rotated)`, B being 1 when all rows agree.

    `query_scale` `(B, T, 1, 1)` is a factor on the queries that depends on the position, None being 1.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleave: bool = False
    query_scale: torch.Tensor | None = None


def inverse_frequencies(
    n_elem: int, base: float = 10000.0, adjustments: dict[str, Any] | None = None, length: int | None = None
) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies of a rotary embedding and the factor on its cosines and sines.

    Args:
        n_elem: number of rotated elements of a head.
        base: base period (theta).
        adjustments: scaling scheme, `Config.rope_adjustments`. The scheme is its `rope_type`, or follows from its keys.
        length: length in tokens that the sequence may reach; only longrope depends on it.

    Returns:
        float32 tensor `(ceil(n_elem / 2),)` in radians per position, and the attention factor.

    Raises:
        ValueError: unknown scheme.
    """
    # float32 throughout, in this order of operations: it is what checkpoints were trained with
    exponents = torch.arange(0, n_elem, 2, dtype=torch.int64).float() / n_elem
    inv_freq = 1.0 / (base**exponents)
    if not adjustments:
        return inv_freq, 1.0
    kind = rope_type(adjustments)
    if kind == "default":
        return inv_freq, 1.0
    if kind == "linear":
        return inv_freq / adjustments["factor"], 1.0
    if kind == "llama3":
        return _llama3(inv_freq, adjustments), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, n_elem, base, adjustments)
    if kind == "longrope":
        is_long = length is not None and length > adjustments["original_max_seq_len"]
        factors = torch.tensor(adjustments["long_factor" if is_long else "short_factor"], dtype=torch.float32)
        return 1.0 / (factors * base**exponents), float(adjustments.get("attention_factor") or 1.0)
    raise ValueError(f"unknown rope_type {kind!r}: use default, linear, llama3, yarn or longrope")


def rope_type(adjustments: dict[str, Any]) -> str:
    """The scaling scheme of `Config.rope_adjustments`; LitGPT's files tell it only by the keys they hold."""
    if "rope_type" in adjustments:
        return adjustments["rope_type"]
    for key, kind in (("beta_fast", "yarn"), ("short_factor", "longrope"), ("low_freq_factor", "llama3")):
        if key in adjustments:
            return kind
    return "linear" if "factor" in adjustments else "default"


def _llama3(inv_freq: torch.Tensor, adj: dict[str, Any]) -> torch.Tensor:
    """Slow down low frequencies by `factor`, keep high ones, blend between (the Llama 3.1 release notes' scheme)."""
    low, high, original = adj["low_freq_factor"], adj["high_freq_factor"], adj["original_max_seq_len"]
    rotations = original * inv_freq / (2 * math.pi)
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / adj["factor"] + blend * inv_freq


def _yarn(inv_freq: torch.Tensor, n_elem: int, base: float, adj: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN, https://arxiv.org/abs/2309.00071 section 3.2: interpolate the dimensions that turn less than once."""
    factor, original = adj["factor"], adj["original_max_seq_len"]

    def dimension_of(rotations: float) -> float:
        return n_elem * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(adj.get("beta_fast") or 32), dimension_of(adj.get("beta_slow") or 1)
    if adj.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n_elem - 1)
    ramp = (torch.arange(len(inv_freq), dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    interpolated = ramp.clamp(0, 1)
    scaled = inv_freq / factor * interpolated + inv_freq * (1 - interpolated)
    return scaled, yarn_attention_factor(adj)


def yarn_attention_factor(adj: dict[str, Any]) -> float:
    """Factor on cosines and sines under YaRN: stated, or a ratio of the two mscales, or the paper's 0.1 ln(s) + 1."""
    if adj.get("attention_factor") is not None:
        return float(adj["attention_factor"])
    mscale, mscale_all = adj.get("mscale"), adj.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_mscale(adj["factor"], mscale) / yarn_mscale(adj["factor"], mscale_all)
    return yarn_mscale(adj["factor"], 1.0)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """`0.1 * mscale * ln(factor) + 1`, and 1 when nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class Rope:
    """All rotary tables of one model: global, and local when the config has a second base.

    Not a module and not a buffer, so that casting a model never rounds the frequencies.

    Args:
        config: the model's description.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tables = sorted({i for i in (config.layer_rope(n) for n in range(config.n_layer)) if i >= 0})
        head_size = config.qk_rope_head_dim if config.latent_attention is not None else config.head_size
        assert head_size is not None
        self.n_rotated = rotated_elements(config.rope_n_elem, head_size)
        self._memo: dict[tuple[int, bool, torch.device], tuple[torch.Tensor, float]] = {}

    def is_long(self, length: int) -> bool:
        """Whether sequences that may reach `length` tokens have other frequencies than short ones."""
        adjustments = self.config.rope_adjustments or {}
        return "long_factor" in adjustments and length > adjustments["original_max_seq_len"]

    def frequencies(self, table: int, length: int, device: torch.device) -> tuple[torch.Tensor, float]:
        """Inverse frequencies repeated to `(n_rotated,)` on `device`, and the attention factor of a table."""
        config = self.config
        adjustments = config.rope_adjustments if table == 0 else None  # the local table is never stretched
        key = (table, self.is_long(length), device)
        if key not in self._memo:
            base = config.rope_base if table == 0 else config.rope_local_base_freq
            assert base is not None
            inv_freq, factor = inverse_frequencies(config.rope_n_elem, base, adjustments, length)
            if table == 0:
                inv_freq = inv_freq / config.rope_condense_ratio
            inv_freq = _spread(inv_freq, self.n_rotated, config.rope_interleave)
            self._memo[key] = (inv_freq.to(device), factor)
        return self._memo[key]

    def rows(
        self, positions: torch.Tensor, length: int, dtype: torch.dtype, backwards: bool = False
    ) -> list[RopeRows | None]:
        """Cosines and sines at `positions`, one entry a layer (None where a layer does not rotate).

        Args:
            positions: `(B, T)` absolute positions; padding (-1) is treated as position 0.
            length: length in tokens that the sequences may reach.
            dtype: dtype of the queries and keys.
            backwards: turn the other way and leave out the attention factor, to move what is rotated already.
        """
        if self.n_rotated == 0:
            return [None] * self.config.n_layer
        made: dict[int, RopeRows | None] = {-1: None}
        positions = positions.clamp_min(0)[:, :, None, None].float()
        query_scale = self._query_scale(positions, dtype)
        for table in self.tables:
            inv_freq, factor = self.frequencies(table, length, positions.device)
            angles = positions * inv_freq  # (B, T, 1, n_rotated), float32
            sign = _sine_sign(self.n_rotated, self.config.rope_interleave, angles.device)
            cos, sin = angles.cos(), angles.sin() * sign
            if backwards:
                sin = -sin
            elif factor != 1.0:
                cos, sin = cos * factor, sin * factor
            made[table] = RopeRows(cos.to(dtype), sin.to(dtype), self.config.rope_interleave, query_scale)
        return [made[self.config.layer_rope(n)] for n in range(self.config.n_layer)]

    def _query_scale(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Queries far into the text look more sharply, as those of Llama 4 do; https://arxiv.org/abs/2501.19399."""
        if (growth := self.config.query_growth) is None:
            return None
        adjustments = self.config.rope_adjustments or {}
        length = adjustments.get("original_max_seq_len", self.config.block_size)
        return (1 + growth * torch.log1p((positions / length).floor())).to(dtype)


def rotated_elements(n_elem: int, head_size: int) -> int:
    """How many elements of a head rotate: an odd share is rounded up to pairs where the head has room."""
    return min(n_elem + n_elem % 2, head_size)


def _spread(values: torch.Tensor, n_rotated: int, interleave: bool) -> torch.Tensor:
    """One value a pair -> one a rotated element: `a b c a b c` (halves) or `a a b b c c` (interleaved)."""
    return (values.repeat_interleave(2) if interleave else values.repeat(2))[:n_rotated]


def _sine_sign(n_rotated: int, interleave: bool, device: torch.device) -> torch.Tensor:
    index = torch.arange(n_rotated, device=device)
    negative = index % 2 == 0 if interleave else index < n_rotated - n_rotated // 2
    return torch.where(negative, -1.0, 1.0)


def rotate(x: torch.Tensor, rows: RopeRows) -> torch.Tensor:
    """Rotate the leading elements of each head.

    Args:
        x: `(B, T, H, head size)`.
        rows: cosines and signed sines of the step.

    Returns:
        Tensor like `x`; elements past `n_rotated` are passed through.
    """
    cos, sin, interleave = rows[:3]
    n = cos.size(-1)
    turned, rest = (x, None) if x.size(-1) == n else (x[..., :n], x[..., n:])
    if interleave:
        swapped = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        swapped = turned.roll(-(n // 2), -1)
    turned = torch.addcmul(turned * cos, swapped, sin)
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


def build_rope_cache(
    seq_len: int,
    n_elem: int,
    device: torch.device | None = None,
    base: float = 10000,
    condense_ratio: float = 1,
    extra_config: dict[str, Any] | None = None,
    rope_local_base_freq: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine tables of positions `0..seq_len-1`, for code that wants whole tables.

    Returns:
        Two float32 tensors `(seq_len, n_elem)`; with `rope_local_base_freq` `(seq_len, n_elem, 2)`, the last axis being
        (global, local).
    """

    def table(base: float, adjustments: dict[str, Any] | None, condense: float) -> tuple[torch.Tensor, torch.Tensor]:
        inv_freq, factor = inverse_frequencies(n_elem, base, adjustments, seq_len)
        positions = torch.arange(seq_len, device=device).float()
        angles = torch.outer(positions, _spread(inv_freq.to(positions.device) / condense, max(n_elem, 2), False))
        angles = angles[:, :n_elem]
        return angles.cos() * factor, angles.sin() * factor

    cos, sin = table(base, extra_config, condense_ratio)
    if rope_local_base_freq is None:
        return cos, sin
    local_cos, local_sin = table(rope_local_base_freq, None, 1)
    return torch.stack((cos, local_cos), dim=-1), torch.stack((sin, local_sin), dim=-1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate whole heads by plain (unsigned) tables, halves layout.

    Args:
        x: `(B, H, T, n_elem)`.
        cos: `(T, n_elem)` or `(B, T, n_elem)`.
        sin: like `cos`.
    """
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    n = x.size(-1)
    signed = sin * _sine_sign(n, False, sin.device)
    cos, signed = cos.unsqueeze(1), signed.unsqueeze(1)
    return torch.addcmul(x * cos, x.roll(-(n // 2), -1), signed).to(x.dtype)
