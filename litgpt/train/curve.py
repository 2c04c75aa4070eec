# Licensed under the Apache License 2.0, see the LICENSE file.

"""The loss over the steps as a picture, from the metrics that training wrote."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from litgpt.checkpoint.save import atomic_write
from litgpt.constants import require
from litgpt.errors import MissingFileError, UserError

CURVES = {"loss": "training", "val_loss": "validation"}  # columns, and what they are called in the picture
SMOOTH = 20  # the training loss is averaged over this part of the steps


def read_curves(path: str | Path) -> dict[str, list[tuple[float, float]]]:
    """The `(step, value)` points of the losses in a `metrics.csv`; rows and values that are no numbers are left out.

    Raises:
        UserError: the file is missing, or there is no loss in it.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"there are no metrics at {path}", "give the metrics.csv of a training")
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in CURVES}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            step = _number(row.get("step"))
            for name, points in curves.items():
                value = _number(row.get(name))
                if step is not None and value is not None:
                    points.append((step, value))
    if not any(curves.values()):
        raise UserError(f"{path} has no loss in it", "it needs the columns step and loss, or val_loss")
    return {name: points for name, points in curves.items() if points}


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def smooth(values: list[float]) -> list[float]:
    """Means over a window that grows to `1 / SMOOTH` of all values and looks back only."""
    width = max(1, len(values) // SMOOTH)
    means, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - width] if i >= width else 0.0)
        means.append(total / min(i + 1, width))
    return means


def draw_loss(metrics: str | Path, picture: str | Path) -> None:
    """Draw the losses of a `metrics.csv`.

    Args:
        metrics: the file that training wrote.
        picture: where the picture goes; the suffix decides its kind, for instance `.png`.

    Raises:
        UserError: matplotlib is not installed, or there is no loss to draw.
    """
    curves = read_curves(metrics)
    require("matplotlib", "the picture of the loss")
    from matplotlib.figure import Figure  # needs no screen, unlike pyplot

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    for name, points in curves.items():
        steps, values = map(list, zip(*points, strict=True))
        if name == "loss":
            axes.plot(steps, values, alpha=0.3, linewidth=0.8, color="tab:blue")
            axes.plot(steps, smooth(values), label=CURVES[name], color="tab:blue")
        else:
            axes.plot(steps, values, label=CURVES[name], color="tab:orange", marker="o", markersize=3)
    axes.legend()
    axes.grid(alpha=0.3)
    picture = Path(picture)
    with atomic_write(picture) as temporary:
        figure.savefig(temporary, format=picture.suffix.lstrip(".") or "png", dpi=120)
