# Licensed under the Apache License 2.0, see the LICENSE file.

"""The progress bar of whatever moves many bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm


def byte_bar(label: str, total: int, done: int = 0, **options: Any) -> tqdm[Any]:
    """A bar on standard error that counts bytes; nothing is shown where that is not a terminal.

    Args:
        label: what is happening.
        total: how many bytes there are.
        done: how many of them are done already.
        options: further arguments of `tqdm`.
    """
    from tqdm import tqdm

    # `disable=None` is how tqdm spells "only on a terminal"
    return tqdm(desc=label, total=total, initial=done, unit="B", unit_scale=True, disable=None, **options)
