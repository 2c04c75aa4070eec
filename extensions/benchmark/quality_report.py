# Licensed under the Apache License 2.0, see the LICENSE file.

"""The table and the plot of what `quality.py` measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MB = 1e6
CHANCE = -2.3  # log-probability of a digit that is guessed


@dataclass
class ModelFigures:
    """What is known of one model.

    Attributes:
        name: of the model.
        kinds: those that were measured, in the order of the table.
        figures: task -> length -> kind -> figures of each text.
    """

    name: str
    kinds: list[str] = field(default_factory=list)
    figures: dict[str, dict[int, dict[str, list[dict[str, Any]]]]] = field(default_factory=dict)

    def lengths(self, task: str) -> list[int]:
        """At which a task was measured."""
        return sorted(self.figures.get(task, {}))

    def get(self, task: str, length: int, kind: str) -> list[dict[str, Any]]:
        """Figures of each text, none if not measured."""
        return self.figures.get(task, {}).get(length, {}).get(kind, [])

    def needle(self, length: int, kind: str) -> tuple[int, int, float] | None:
        """Numbers found, numbers hidden, and mean log-probability of their tokens."""
        measured = self.get("needle", length, kind)
        if not measured:
            return None
        found = [ok for one in measured for ok in one["found"]]
        return sum(found), len(found), statistics.mean(value for one in measured for value in one["logprob"])


def by_model(cells: Mapping[str, Mapping[str, Any]], kinds: Sequence[str]) -> list[ModelFigures]:
    """Sort the cells of a results file; kinds come in the given order."""
    models: dict[str, ModelFigures] = {}
    for key, figures in cells.items():
        name, task, length, kind = key.split(" | ")
        model = models.setdefault(name, ModelFigures(name))
        of_task = model.figures.setdefault(task.partition(" ")[0], {})
        of_task.setdefault(int(length), {}).setdefault(kind, []).append(dict(figures))
    for model in models.values():
        measured = {kind for of_task in model.figures.values() for of_length in of_task.values() for kind in of_length}
        model.kinds = [kind for kind in kinds if kind in measured]
    return list(models.values())


def table(cells: Mapping[str, Mapping[str, Any]], kinds: Sequence[str]) -> str:
    """Markdown, a table a model."""
    return "\n".join(_table(model) for model in by_model(cells, kinds))


def _table(model: ModelFigures) -> str:
    header = ["kind"]
    rows = {kind: [kind] for kind in model.kinds}
    for length in model.lengths("perplexity"):
        header += [f"MB at {length}", f"perplexity {length}", "its 2nd half"]
        for kind, row in rows.items():
            found = model.get("perplexity", length, kind)
            row += [f"{found[0]['bytes'] / MB:.1f}", *_decimals(found[0])] if found else [""] * 3
    for length in model.lengths("needle"):
        header.append(f"needles {length}")
        for kind, row in rows.items():
            needle = model.needle(length, kind)
            row.append("" if needle is None else f"{needle[0]}/{needle[1]}, {needle[2]:.2f}")
    for length in model.lengths("speed"):
        header.append(f"tokens/s at {length}")
        for kind, row in rows.items():
            found = model.get("speed", length, kind)
            row.append(f"{found[0]['tokens_per_second']:.1f}" if found else "")
    lines = [header, ["---"] * len(header), *rows.values()]
    return f"{model.name}, float32\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _decimals(figures: Mapping[str, float]) -> list[str]:
    return [f"{figures[name]:.3f}" for name in ("perplexity", "second_half")]


def draw(cells: Mapping[str, Mapping[str, Any]], kinds: Sequence[str], path: Path) -> None:
    """A row of panels a model: perplexity against the size of the cache, and how well numbers were found.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as ex:
        raise ImportError(f"drawing {path} takes matplotlib: pip install matplotlib") from ex
    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = by_model(cells, kinds)
    figure, axes = pyplot.subplots(len(models), 2, figsize=(12, 4.8 * len(models)), squeeze=False, layout="constrained")
    for model, (left, right) in zip(models, axes, strict=True):
        _draw_perplexity(left, model)
        _draw_needles(right, model)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_perplexity(axis: Any, model: ModelFigures) -> None:
    lengths = model.lengths("perplexity")
    if not lengths:
        axis.set_axis_off()
        return
    points = {kind: found[0] for kind in model.kinds if (found := model.get("perplexity", lengths[-1], kind))}
    families: dict[str, list[str]] = {}
    for kind in points:
        families.setdefault(kind.partition(" ")[0], []).append(kind)
    for name, kinds in families.items():
        sizes = [points[kind]["bytes"] / MB for kind in kinds]
        axis.plot(sizes, [points[kind]["second_half"] for kind in kinds], marker="o", label=name)
    axis.set(
        title=f"{model.name}: Alice in Wonderland, {lengths[-1]} tokens",
        xlabel="cache, MB in float32",
        ylabel="perplexity of the second half",
    )
    axis.legend(title="kind (budget 25 % and 50 %)", fontsize="small", title_fontsize="small")
    axis.grid(alpha=0.3)


def _draw_needles(axis: Any, model: ModelFigures) -> None:
    lengths = model.lengths("needle")
    if not lengths:
        axis.set_axis_off()
        return
    missing = float("nan")
    needles = [[model.needle(length, kind) for length in lengths] for kind in model.kinds]
    values = [[missing if needle is None else needle[2] for needle in row] for row in needles]
    image = axis.imshow(values, aspect="auto", cmap="RdYlGn", vmin=2 * CHANCE, vmax=0)
    _write_in(axis, [["" if needle is None else f"{needle[0]} of {needle[1]}" for needle in row] for row in needles])
    axis.set(title=f"{model.name}: numbers found in Paradise Lost", xlabel="tokens")
    axis.set_xticks(range(len(lengths)), map(str, lengths))
    axis.set_yticks(range(len(model.kinds)), model.kinds)
    axis.figure.colorbar(image, ax=axis, label=f"log-probability of a digit (a guess: {CHANCE})")


def _write_in(axis: Any, labels: Sequence[Sequence[str]]) -> None:
    for y, row in enumerate(labels):
        for x, label in enumerate(row):
            axis.text(x, y, label, ha="center", va="center", fontsize="small")
