# Licensed under the Apache License 2.0, see the LICENSE file.

"""How much memory a cache takes, before anything is allocated, and what to do when that is too much.

There is no formula here: every figure comes from the cache's own constructor on the meta device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from litgpt.errors import UserError
from litgpt.kvcache.cache import KVCache
from litgpt.kvcache.spec import CacheKind

if TYPE_CHECKING:
    from litgpt.config import Config

logger = logging.getLogger(__name__)

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
FAR = 2**30  # tokens; past every window and every budget
SMALL_BUDGETS = (4096, 1024)  # of the evicting kind that is suggested when nothing exact fits


def estimate(
    config: Config,
    kind: str = "dense",
    batch_size: int = 1,
    length: int | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """Bytes of the cache that `KVCache.from_config` with the same sizes allocates.

    Args:
        config: the model's description.
        kind: kind of the cache.
        batch_size: rows.
        length: longest row in tokens, default the model's context.
        dtype: element type, default torch's.
    """
    return KVCache.estimate(config, kind, batch_size=batch_size, max_length=length, dtype=dtype)


def bytes_per_token(config: Config, kind: str = "dense", dtype: torch.dtype | None = torch.bfloat16) -> int:
    """Bytes that one more token of length costs a row, once windows and budgets are full.

    Layers of bounded size count nothing: for a kind such as `window:1024` this is 0.
    """
    return estimate(config, kind, 1, FAR + 1, dtype) - estimate(config, kind, 1, FAR, dtype)


def longest_length(
    config: Config,
    kind: str,
    budget_bytes: int,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    limit: int | None = None,
) -> int:
    """The longest length in tokens whose cache takes at most `budget_bytes`, 0 when not even one token fits.

    Args:
        config: the model's description.
        kind: kind of the cache.
        budget_bytes: what there is.
        batch_size: rows.
        dtype: element type, default torch's.
        limit: longest length of interest, default the model's context.
    """
    fits, too_long = 0, (config.block_size if limit is None else limit) + 1
    while too_long - fits > 1:
        length = (fits + too_long) // 2
        if estimate(config, kind, batch_size, length, dtype) <= budget_bytes:
            fits = length
        else:
            too_long = length
    return fits


def smaller_kinds(kind: str, length: int) -> Iterator[str]:
    """Kinds that take less memory for `length` tokens, the ones that change the results least first."""
    parsed = CacheKind.parse(kind)
    if parsed.store in ("plain", "offload"):
        yield str(replace(parsed, store="int8"))
    if parsed.store != "int4":
        yield str(replace(parsed, store="int4"))
    if parsed.policy == "dense":
        for budget in SMALL_BUDGETS:
            if budget < length:
                yield str(CacheKind("h2o", budget, store=parsed.store))


def advise(
    config: Config, kind: str, available: int, batch_size: int, length: int, dtype: torch.dtype | None = None
) -> str:
    """What fits in `available` bytes when a cache does not: the longest length, and the mildest change of kind.

    Args:
        config: the model's description.
        kind: kind of the cache that does not fit.
        available: bytes there are.
        batch_size: rows.
        length: tokens that were asked for.
        dtype: element type, default torch's.
    """
    longest = longest_length(config, kind, available, batch_size, dtype, limit=length)
    advice = [f"{kind} fits up to {longest} tokens"] if longest else []
    for other in smaller_kinds(kind, length):
        size = estimate(config, other, batch_size, length, dtype)
        if size <= available:
            return "; ".join([*advice, f"KV cache {other} fits all {length} in {in_words(size)}"])
    return "; ".join([*advice, "use fewer rows or a shorter length"])


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device; None where there is no telling.

    On the CPU what the machine has free, and no more than what the limits of a container leave.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    left = list(_left_in_groups())
    if (kilobytes := _figure(PROC / "meminfo", "MemAvailable:")) is not None:
        left.append(1024 * kilobytes)
    return min(left, default=None)


def _left_in_groups() -> Iterator[int]:
    """Bytes that each control group around this process leaves: its own, and those that this one lies in.

    https://docs.kernel.org/admin-guide/cgroup-v2.html, and cgroup-v1/memory.html; in most containers only the group at
    the root can be seen. Files that could be dropped from memory count as free.
    """
    for line in _lines(PROC / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage, cached = CGROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            most, used = _figure(folder / limit), _figure(folder / usage)
            if most is not None and used is not None:
                yield max(0, most - used + (_figure(folder / "memory.stat", cached) or 0))


def _figure(path: Path, name: str | None = None) -> int | None:
    """The number in a file of the kernel, or in its line that begins with `name`; None where there is none."""
    for line in _lines(path):
        words = line.split()
        if name is None or words[:1] == [name]:
            number = words[0 if name is None else 1]
            return int(number) if number.isdigit() else None  # "max" is no limit
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def ensure_fits(
    config: Config,
    kind: str = "dense",
    batch_size: int = 1,
    max_length: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Log what `KVCache.from_config` with the same arguments would allocate, and refuse what there is no room for.

    Raises:
        UserError: more than is free; names the longest length and the kind that do fit.
    """
    cache = KVCache.from_config(config, kind, batch_size, max_length, dtype, device="meta")
    logger.info("%s (%s)", cache.report(), kind)
    device = torch.device("cpu") if CacheKind.parse(kind).store == "offload" else torch.device(device or "cpu")
    available, needed = available_bytes(device), cache.nbytes()
    if available is not None and needed > available:
        raise UserError(
            f"a KV cache of kind {kind} for {batch_size} x {cache.max_length} tokens takes {in_words(needed)}, "
            f"{in_words(available)} are free on {device}",
            advise(config, kind, available, batch_size, cache.max_length, dtype),
        )


def in_words(n_bytes: int) -> str:
    """A number of bytes for people."""
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
