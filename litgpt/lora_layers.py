# Licensed under the Apache License 2.0, see the LICENSE file.

"""The layers of LoRA: frozen maps, single, fused or stacked, with a trainable update of low rank beside them.

Letters in shapes: B batch, T tokens, E experts, M rows for experts, r rank, P parts of a fused map that have an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

from litgpt.layers import StackedLinear, grouped_linear, upcast
from litgpt.peft import WrappedLinear, dense_weight

START = ("lora_A0", "lora_B0")  # where PiSSA started


@dataclass(frozen=True)
class Rows:
    """Which of several adapters the rows of a batch use; `LoRAAdapters` makes it.

    Attributes:
        index: `(B,)` number of each row's adapter, or one number for all rows.
        groups: number of an adapter -> the rows that use it.
    """

    index: Tensor | int
    groups: dict[int, Tensor]

    @property
    def n_rows(self) -> int | None:
        """Rows of the batch, None when one adapter is for all."""
        return len(self.index) if isinstance(self.index, Tensor) else None


def lora_scaling(r: int, lora_alpha: float, use_rslora: bool) -> float:
    """The factor on an update of rank `r`."""
    return lora_alpha / max(1, r) ** (0.5 if use_rslora else 1.0)


class LoRALayer(nn.Module):
    """A map with an update `scaling * B A` of low rank beside its frozen weight `W`.

    The parts of a fused map have updates of their own, or none. DoRA scales the rows of `W + scaling * B A` to trained
    lengths, `lora_magnitude`. PiSSA starts with the `B A` that approximates `W` best and subtracts that start,
    `lora_A0` and `lora_B0`, for good: the update is zero at first and the base stays what it is.
    """

    lora_A: Tensor  # (P * r, n_in), with E in front for stacked maps
    lora_B: Tensor  # (width of the P parts together, r)
    lora_A0: Tensor
    lora_B0: Tensor
    lora_magnitude: Tensor  # (width of the P parts together,)

    def add_lora(
        self,
        in_features: int,
        widths: Sequence[int],
        enabled: Sequence[bool] = (True,),
        lead: tuple[int, ...] = (),
        *,
        r: int = 0,
        lora_alpha: float = 1,
        lora_dropout: float = 0.0,
        use_rslora: bool = False,
        use_dora: bool = False,
        init: str = "default",
    ) -> None:
        """Make the tensors.

        Args:
            in_features: width of the input.
            widths: widths of the parts of the output.
            enabled: for each part, whether it has an update.
            lead: dimensions in front of those of the weight.
            r: rank; 0 for no update. This and what follows: see `Config`.
            lora_alpha: numerator of the scale.
            lora_dropout: dropout on the input of the update.
            use_rslora: divide by the root of the rank.
            use_dora: train lengths of rows.
            init: "default" or "pissa".
        """
        if r < 0:
            raise ValueError(f"the rank must not be negative, got {r}")
        self.r, self.widths, self.enabled = r, list(widths), [r > 0 and on for on in enabled]
        self.active, self.merged = any(self.enabled), False
        self.use_dora, self.use_pissa = use_dora, init == "pissa"
        self.scaling = lora_scaling(r, lora_alpha, use_rslora)
        self.lora_dropout = nn.Dropout(lora_dropout) if lora_dropout > 0 else nn.Identity()
        self.rows: Rows | None = None
        self.bank: dict[str, Tensor] = {}  # the tensors of several adapters, stacked, for `rows`
        self._kept: list[nn.Parameter] = []  # the weight before merging; a list, so that it is no parameter here
        if not self.active:
            return
        shape_a = (*lead, r * sum(self.enabled), in_features)
        shape_b = (*lead, sum(self.updated_widths), r)
        self.lora_A, self.lora_B = nn.Parameter(torch.empty(shape_a)), nn.Parameter(torch.empty(shape_b))
        if self.use_dora:
            self.lora_magnitude = nn.Parameter(torch.empty(shape_b[:-1]))
        if self.use_pissa:
            self.lora_A0 = nn.Parameter(torch.empty(shape_a), requires_grad=False)
            self.lora_B0 = nn.Parameter(torch.empty(shape_b), requires_grad=False)
        self.reset_parameters()

    @property
    def updated_widths(self) -> list[int]:
        """Widths of the parts that have an update."""
        return [width for width, on in zip(self.widths, self.enabled, strict=True) if on]

    @property
    def holder(self) -> nn.Module:
        """The module that has the frozen weight `(..., n_out, n_in)`."""
        return cast(nn.Module, getattr(self, "linear", self))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give LoRA's tensors their initial values. DoRA and PiSSA take them from the frozen weight."""
        if not self.active:
            return
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)
        nn.init.zeros_(self.lora_B)
        if self.lora_A.is_meta:
            return
        if self.use_pissa:
            pairs = [_principal(part, self.r) for part in self._updated_parts(upcast(dense_weight(self.holder)))]
            self.lora_A.copy_(torch.cat([a for a, _ in pairs], dim=-2) * self.scaling**-0.5)
            self.lora_B.copy_(torch.cat([b for _, b in pairs], dim=-2) * self.scaling**-0.5)
            self.lora_A0.copy_(self.lora_A)
            self.lora_B0.copy_(self.lora_B)
        if self.use_dora:
            self.lora_magnitude.copy_(self.row_lengths())

    # The update

    def tensors(self) -> dict[str, Tensor]:
        """LoRA's tensors by name, for `rows` with B in front."""
        if self.rows is not None:
            return {name: stacked[self.rows.index] for name, stacked in self.bank.items()}
        return {name: getattr(self, name) for name in ("lora_A", "lora_B", *(START if self.use_pissa else ()))}

    def _updates(self, down: Callable[[Tensor], Tensor], up: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Tensor]:
        """The update of each part that has one: `scaling * up(down(A), B)`, less where PiSSA started."""
        tensors = self.tensors()
        total: list[Tensor] = []
        for mark, sign in (("", 1), ("0", -1)) if self.use_pissa else (("", 1),):
            downs = (down(tensors[f"lora_A{mark}"]) * (sign * self.scaling)).split(self.r, -1)
            ups = map(up, downs, tensors[f"lora_B{mark}"].split(self.updated_widths, -2))
            total = [a + b for a, b in zip(total, ups, strict=True)] if total else list(ups)
        return iter(total)

    def _join(
        self,
        whole: Tensor,
        updates: Iterator[Tensor],
        dim: int,
        ratio: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """`whole` with the updates of its parts along `dim`; `ratio`, one a row of the weight, is DoRA's."""
        joined = []
        ratios = iter(() if ratio is None else ratio.split(self.updated_widths, dim))
        biases = [None] * len(self.widths) if bias is None else bias.split(self.widths, -1)
        for part, part_bias, on in zip(whole.split(self.widths, dim), biases, self.enabled, strict=True):
            if on:
                update = next(updates)
                if ratio is not None:
                    scale, mapped = next(ratios), part if part_bias is None else part - part_bias
                    update = scale * update + (scale - 1) * mapped
                part = part + update.to(part.dtype)
            joined.append(part)
        return joined[0] if len(joined) == 1 else torch.cat(joined, dim)

    def _updated_parts(self, weight: Tensor) -> list[Tensor]:
        parts = weight.split(self.widths, -2)
        return [part for part, on in zip(parts, self.enabled, strict=True) if on]

    def _weight_updates(self) -> Iterator[Tensor]:
        return (update.mT for update in self._updates(lambda a: upcast(a).mT, lambda d, b: d @ upcast(b).mT))

    @torch.no_grad()  # DoRA takes the lengths for constants, section 4.3
    def row_lengths(self) -> Tensor:
        """Euclidean lengths of the rows of `W + scaling * B A` that have an update."""
        parts = self._updated_parts(upcast(dense_weight(self.holder)))
        return torch.cat([(w + u).norm(dim=-1) for w, u in zip(parts, self._weight_updates(), strict=True)], dim=-1)

    def ratio(self) -> Tensor | None:
        """DoRA's factor on each row of the weight that has an update, None without DoRA."""
        if not self.use_dora:
            return None
        if self.rows is not None:
            return self.bank["ratio"][self.rows.index]
        return upcast(self.lora_magnitude) / self.row_lengths().clamp_min(torch.finfo(torch.float32).tiny)

    def adapted_weight(self) -> Tensor:
        """The weight of the one map that the frozen weight and the update make together, at least in float32."""
        ratio = self.ratio()
        ratio = None if ratio is None else ratio.unsqueeze(-1)
        return self._join(upcast(dense_weight(self.holder)), self._weight_updates(), -2, ratio)

    # Merging

    @torch.no_grad()
    def merge(self, keep_base: bool = True) -> float:
        """Put the update into the weight; see `merge_lora_weights`."""
        if self.merged or not self.active:
            return 0.0
        weight = cast(nn.Parameter, self.holder.weight)
        if dense_weight(self.holder) is not weight:
            raise ValueError("an update cannot be merged into a quantized weight: load the base without --quantize")
        exact = self.adapted_weight()
        merged = exact.to(weight.dtype)
        update, lost = (exact - weight).norm(), (exact - merged).norm()
        self._kept = [weight] if keep_base else []
        # a parameter of its own: the embedding may share the one before
        self.holder.weight = nn.Parameter(merged, requires_grad=False)
        self.merged = True
        return float(lost / update) if update > 0 else 0.0

    def unmerge(self) -> None:
        """Take the weight from before merging."""
        if not self.merged:
            return
        if not self._kept:
            raise ValueError("the base weights were not kept: merge with keep_base=True to be able to unmerge")
        weight = self._kept.pop()
        weight.data = weight.data.to(cast(Tensor, self.holder.weight).device)
        self.holder.weight = weight
        self.merged = False


def _principal(weight: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """A `(..., r, n_in)` and B `(..., n_out, r)` whose product approximates the weight best."""
    rank = min(r, *weight.shape[-2:])
    u, s, v = torch.svd_lowrank(weight, q=min(rank + 8, *weight.shape[-2:]), niter=8)
    root = s[..., None, :rank].sqrt()
    a, b = (v[..., :rank] * root).mT, u[..., :rank] * root
    pad = r - rank
    return nn.functional.pad(a, (0, 0, 0, pad)), nn.functional.pad(b, (0, pad))


def _times(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.mT


class LoRALinear(LoRALayer, WrappedLinear):
    """A linear map with LoRA.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        r: rank; 0 for the plain map.
        lora_alpha: numerator of the scale.
        lora_dropout: dropout on the input of the update.
        bias: whether the frozen map has a bias.
        **options: of `LoRALayer.add_lora`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        r: int = 0,
        lora_alpha: float = 1,
        lora_dropout: float = 0.0,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        options.setdefault("widths", [out_features])
        self.add_lora(in_features, r=r, lora_alpha=lora_alpha, lora_dropout=lora_dropout, **options)

    @property
    def weight(self) -> Tensor:
        """The adapted weight `(n_out, n_in)`, for code that multiplies by it in another way."""
        weight = dense_weight(self.linear)
        return weight if self.merged or not self.active else self.adapted_weight().to(weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, T, n_in) -> (B, T, n_out)`."""
        y = self.linear(x)
        if self.merged or not self.active:
            return y
        if self.rows is not None and self.rows.n_rows not in (None, x.size(0)):
            raise ValueError(f"adapters were chosen for {self.rows.n_rows} rows, the batch has {x.size(0)}")
        x = self.lora_dropout(x)
        updates = self._updates(lambda a: _times(x, a.to(x.dtype)), lambda d, b: _times(d, b.to(d.dtype)))
        ratio = self.ratio()
        if ratio is not None and ratio.dim() > 1:
            ratio = ratio.unsqueeze(1)  # (B, 1, n_out): a row of the batch has its own
        return self._join(y, updates, -1, ratio, self.bias)


class LoRAQKVLinear(LoRALinear):
    """The fused map of queries, keys and values, `q | k | v`, each with an update of its own or none.

    Args:
        in_features: width of the input.
        out_features: width of queries, keys and values together.
        head_size: width of a head.
        n_head: heads of the queries.
        n_query_groups: heads of the keys, and of the values.
        r: rank; 0 for the plain map.
        lora_alpha: numerator of the scale.
        lora_dropout: dropout on the input of the update.
        enable_lora: whether queries, keys and values have an update.
        bias: whether the frozen map has a bias.
        **options: of `LoRALayer.add_lora`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        head_size: int,
        n_head: int,
        n_query_groups: int,
        r: int = 0,
        lora_alpha: float = 1,
        lora_dropout: float = 0.0,
        enable_lora: bool | Sequence[bool] = False,
        bias: bool = True,
        **options: Any,
    ) -> None:
        widths = [n_head * head_size, n_query_groups * head_size, n_query_groups * head_size]
        if out_features != sum(widths):
            raise ValueError(f"queries, keys and values of {widths} elements are not {out_features} together")
        enabled = [enable_lora] * 3 if isinstance(enable_lora, bool) else enable_lora
        parts = {"widths": widths, "enabled": enabled}
        super().__init__(in_features, out_features, r, lora_alpha, lora_dropout, bias, **parts, **options)


class LoRAExperts(LoRALayer, StackedLinear):
    """The stacked linear maps of E experts with LoRA.

    Args:
        n_expert: number of maps.
        in_features: width of the input.
        out_features: width of the output.
        bias: whether the frozen maps have a bias.
        **options: of `LoRALayer.add_lora`.
    """

    active = False  # as long as the plain maps are made

    def __init__(self, n_expert: int, in_features: int, out_features: int, bias: bool = False, **options: Any) -> None:
        super().__init__(n_expert, in_features, out_features, bias)
        self.add_lora(in_features, [out_features], lead=(n_expert,), **options)

    def reset_parameters(self) -> None:
        """Give LoRA's tensors their initial values; while there are none, the plain maps."""
        if self.active:
            super().reset_parameters()
        else:
            StackedLinear.reset_parameters(self)

    def forward(self, x: Tensor, expert: Tensor, counts: Tensor | None) -> Tensor:
        """Map each row by its own expert, see `StackedLinear.forward`."""
        y = super().forward(x, expert, counts)
        if self.merged:
            return y

        def times(x: Tensor, weight: Tensor) -> Tensor:  # (M, n) by (E, n_out, n)
            weight = weight.to(x.dtype)
            if counts is None:
                return torch.bmm(weight[expert], x.unsqueeze(-1)).squeeze(-1)
            return grouped_linear(x, weight, counts)

        x = self.lora_dropout(x)
        updates = self._updates(lambda a: times(x, a), times)
        ratio, bias = self.ratio(), self.bias
        ratio = None if ratio is None else ratio[expert]
        return self._join(y, updates, -1, ratio, None if bias is None else bias[expert])


def each_adapter(module: nn.Module, run: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Run a module that cannot mix adapters for the rows of each adapter on its own.

    Args:
        module: the module, with `LoRALayer`s in it.
        run: called with the rows `(n,)` of an adapter while the layers use that one; its result has `n` rows.

    Returns:
        The results in the order of the rows of the batch, or None if the rows of the batch do not differ.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, LoRALayer)]
    rows = next((layer.rows for layer in layers if layer.rows is not None), None)
    if rows is None or rows.n_rows is None:
        return None
    parts = []
    for number, group in rows.groups.items():
        for layer in layers:
            layer.rows = Rows(number, {})
        parts.append(run(group))
    for layer in layers:
        layer.rows = rows
    return torch.cat(parts)[torch.cat(list(rows.groups.values())).argsort()]
