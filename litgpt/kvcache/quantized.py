# Licensed under the Apache License 2.0, see the LICENSE file.

"""A buffer of vectors in 8 or 4 bits: what the quantized stores are made of.

A vector is the key or value of one token and group. Its channels are cut into blocks; each block has a scale and a zero
point of its own, fitted to that vector alone when it is written. So what is stored of a token never changes, and never
depends on the tokens around it, the batch or the chunk it came in.
"""

from __future__ import annotations

import math

import torch
import torch.nn as nn

BLOCK = {8: 64, 4: 32}
"""Bits -> channels that share a scale; a latent of 512 channels and its rotated 64 fill whole blocks."""

# Half the digits of float16 but the range of float32: no value of a model makes it infinite or zero. What the rounding
# costs is small, because codes are fitted to the rounded zero point.
PARAM_DTYPE = torch.bfloat16


class QuantizedBuffer(nn.Module):
    """Vectors `(B, G, S, size)` as `zero + scale * code`, each within about half a scale of what was written.

    Values beyond the range of the element type saturate, NaN stays NaN.

    Args:
        bits: 8, or 4 with two codes a byte.
        shape: `(B, G, S)`.
        size: channels of a vector; any number.
        dtype: element type that is read, default torch's.
        device: where it lives.
    """

    def __init__(
        self,
        bits: int,
        shape: tuple[int, int, int],
        size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.size, self.dtype, self.packed = size, dtype or torch.get_default_dtype(), bits == 4
        self.middle = 2 ** (bits - 1)  # codes are -middle .. middle - 1
        self.n_blocks = math.ceil(size / BLOCK[bits])
        self.width = 2 * math.ceil(size / self.n_blocks / 2)  # blocks of one even width, the last one padded
        # room for rounding: what is read must stay finite, and so must the difference of two values
        self.limit = min(torch.finfo(self.dtype).max, 2.0**125) * (1 - 1 / self.middle)
        n_bytes = self.n_blocks * self.width * bits // 8
        self.code: torch.Tensor
        self.scale: torch.Tensor
        self.zero: torch.Tensor
        code_dtype = torch.uint8 if self.packed else torch.int8
        self._add("code", (*shape, n_bytes), code_dtype, device)
        self._add("scale", (*shape, self.n_blocks), PARAM_DTYPE, device)
        self._add("zero", (*shape, self.n_blocks), PARAM_DTYPE, device)

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> None:
        self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device), persistent=False)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Code, scale and zero of vectors `(B, G, T, size)`."""
        x = x.to(torch.promote_types(x.dtype, torch.float32)).clamp(-self.limit, self.limit)
        if (padding := self.n_blocks * self.width - self.size) > 0:
            x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], padding)), dim=-1)  # leaves the range as it is
        x = x.unflatten(-1, (self.n_blocks, self.width))
        low, high = x.aminmax(dim=-1)
        # the lowest code for the lowest value and the highest for the highest, up to the rounding of zero
        zero = (low + (high - low) * (self.middle / (2 * self.middle - 1))).to(PARAM_DTYPE)
        scale = torch.maximum((high - zero) / (self.middle - 1), (zero - low) / self.middle)
        scale = scale.clamp_min(torch.finfo(PARAM_DTYPE).tiny).to(PARAM_DTYPE)  # never zero: it divides
        code = ((x - zero.unsqueeze(-1)) / scale.unsqueeze(-1)).round().clamp(-self.middle, self.middle - 1)
        code = code.flatten(-2).to(torch.int8)
        if self.packed:
            first, second = (code + self.middle).to(torch.uint8).chunk(2, dim=-1)
            code = first | (second << 4)
        return code, scale, zero

    def decode(self, code: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """Vectors `(B, G, T, size)` from what `encode` made of them."""
        if self.packed:
            code = torch.cat((code & 15, code >> 4), dim=-1).to(torch.int8) - self.middle
        x = code.to(self.dtype).unflatten(-1, (self.n_blocks, self.width))
        x = x.mul_(scale.to(self.dtype).unsqueeze(-1)).add_(zero.to(self.dtype).unsqueeze(-1))
        return x.flatten(-2)[..., : self.size]

    def put(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Write `(B, G, T, size)` into `slots` `(B or 1, G or 1, T)`."""
        for buffer, part in zip(self._parts(), self.encode(x), strict=True):
            buffer.scatter_(2, slots.unsqueeze(-1).expand(part.shape), part)

    def put_run(self, start: int, x: torch.Tensor) -> None:
        """Write `(B, G, T, size)` into the slots from `start` on."""
        for buffer, part in zip(self._parts(), self.encode(x), strict=True):
            buffer[: x.size(0), :, start : start + x.size(2)] = part

    def get(self, n_rows: int, live: int | None) -> torch.Tensor:
        """The vectors of the first rows, up to slot `live`; None for all slots."""
        code, scale, zero = (buffer[:n_rows, :, :live] for buffer in self._parts())
        return self.decode(code, scale, zero)

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.code, self.scale, self.zero
