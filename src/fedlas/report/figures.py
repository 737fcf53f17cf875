"""Figures: `..._data` computes what `..._figure` draws, so that a figure can be checked, or drawn by someone else."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlas.metrics.bins import Bins


@dataclass(frozen=True)
class Reliability:
    """What a reliability diagram shows.

    Args:
        title: what the diagram is of.
        confidence: mean confidence of each filled bin.
        accuracy: share of right answers in it.
        share: share of all samples in it.
        ece: expected calibration error.
    """

    title: str
    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]
    share: tuple[float, ...]
    ece: float


def reliability_data(bins: Bins, ece: float, title: str) -> Reliability:
    """Take from bins of confidence what a reliability diagram shows."""
    counts = bins.counts.tolist()
    filled = [n for n, count in enumerate(counts) if count > 0]
    confidence, accuracy = bins.confidence.tolist(), bins.accuracy.tolist()
    return Reliability(
        title=title,
        confidence=tuple(confidence[n] for n in filled),
        accuracy=tuple(accuracy[n] for n in filled),
        share=tuple(counts[n] / sum(counts) for n in filled),
        ece=ece,
    )


def reliability_figure(rows: Mapping[str, Sequence[Reliability]]) -> Any:
    """Draw reliability diagrams, a row of them for each name; a matplotlib figure."""
    figures = importlib.import_module("matplotlib.figure")
    columns = max(len(row) for row in rows.values())
    figure = figures.Figure(figsize=(2.6 * columns, 2.7 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), columns, squeeze=False, sharex=True, sharey=True)
    for line, (name, row) in zip(panels, rows.items(), strict=True):
        for panel, data in zip(line, row, strict=False):
            _draw(panel, data)
        line[0].set_ylabel(f"{name}\naccuracy")
    for panel in panels[-1]:
        panel.set_xlabel("confidence")
    return figure


def _draw(panel: Any, data: Reliability) -> None:
    panel.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--")
    panel.bar(data.confidence, data.share, width=0.05, color="0.85")
    panel.plot(data.confidence, data.accuracy, marker="o", markersize=3, color="#0072b2")
    for confidence, accuracy in zip(data.confidence, data.accuracy, strict=True):
        panel.plot([confidence, confidence], [confidence, accuracy], color="#d55e00", linewidth=1)
    panel.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    panel.set_title(f"{data.title}\nECE {100 * data.ece:.1f} %", fontsize=9)


def save_figure(figure: Any, path: str | Path) -> Path:
    """Write a figure; the file's ending says as what. No clock time goes into it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None} if path.suffix == ".png" else None)
    return path
