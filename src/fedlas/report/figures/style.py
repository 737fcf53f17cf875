"""The one look of all figures, and how they get to disk.

A figure is as wide as one column of a paper or as its page, its letters have 7 or 8 points, and it needs no colour to
be read: lines differ in dashes and markers, areas in hatches. It looks the same whatever style a user has set, and no
clock time goes into files: equal input makes equal bytes.
"""

import base64
import io
import json
import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from fedlas.extras import optional_module
from fedlas.io.atomic import write_atomic

COLUMN, PAGE = 3.3, 6.9  # inches
FONT = "DejaVu Sans"  # comes with matplotlib, so it is there on every machine
STYLE = {
    "font.family": FONT,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.6,  # long enough to distinguish dashes
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "pdf.fonttype": 42,  # whole letters, which publishers ask for
    "svg.fonttype": "none",  # text that can be searched and edited
    "svg.hashsalt": "fedlas",  # names inside of the file would be random otherwise
}
DARK, MIDDLE, LIGHT, PALE = "#000000", "#0072b2", "#e69f00", "#999999"
OVER, UNDER = "#d55e00", "#56b4e9"  # dark and light in grey too
COLOURS = (DARK, MIDDLE, LIGHT, PALE, "#d55e00", "#009e73", "#cc79a7")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (8, 1.5, 1, 1, 1, 1.5)))
STROKES = tuple(zip(COLOURS, MARKERS, strict=False))
NO_CLOCK = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
FORMATS = ("pdf", "png")
FORMAT = "fedlas.figure/1"  # of the numbers beside a figure, by which files are known again
LONGEST = 32  # letters of a name that someone else gave


class Stroke(NamedTuple):
    """How one line of several is drawn."""

    colour: str
    marker: str
    dash: Any

    @property
    def line(self) -> dict[str, Any]:
        """The options of a line."""
        return {"color": self.colour, "linestyle": self.dash}

    def marked(self, points: int, most: int = 8) -> dict[str, Any]:
        """Give the options of a line with markers, at most some of them."""
        face = "white" if self.dash != "-" else self.colour
        return self.line | {"marker": self.marker, "markerfacecolor": face, "markevery": max(1, -(-points // most))}


def stroke(number: int) -> Stroke:
    """Give the look of a line; the first forty differ in marker or dashes, whatever their colour."""
    return Stroke(*(looks[number % len(looks)] for looks in (COLOURS, MARKERS, DASHES)))


def shown(text: object, longest: int = LONGEST) -> str:
    """Make of someone else's text what can be drawn: cut, on one line, and no formula."""
    whole = " ".join(str(text).split())
    cut = whole if len(whole) <= longest else f"{whole[: longest - 1]}…"
    known = _letters()
    drawn = "".join(letter if ord(letter) in known and _visible(letter) else "□" for letter in cut)
    # A dollar would begin a formula, and a legend leaves out what begins with an underscore.
    drawn = drawn.replace("$", r"\$")
    return f" {drawn}" if drawn.startswith("_") else drawn or "(no name)"


def fitted(text: object, inches: float, points: float = 8) -> str:
    """Make of someone else's text what fits into a place of some width."""
    path = optional_module("matplotlib.textpath").TextPath
    with figure_style():
        for longest in range(LONGEST, 3, -1):
            drawn = shown(text, longest)
            if path((0, 0), drawn, size=points).get_extents().width <= 72 * inches:
                return drawn
    return drawn


@cache
def _letters() -> frozenset[int]:
    manager = optional_module("matplotlib.font_manager")
    return frozenset(manager.get_font(manager.findfont(FONT)).get_charmap())


def _visible(letter: str) -> bool:
    return unicodedata.category(letter)[0] != "C"


def legend_below(figure: Any, panel: Any, *, most: int = 4, **options: Any) -> None:
    """Explain the lines of a panel below the figure, in as many columns as there is room for."""
    handles, labels = panel.get_legend_handles_labels()
    if not labels:
        return
    longest = max(max(map(len, label.split("\n"))) for label in labels)
    columns = int(figure.get_figwidth() / (0.048 * longest + 0.5))
    columns = max(1, min(columns, most, len(labels)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, columnspacing=1.2, **options)


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw in the one style of all figures, whatever the user's own is."""
    matplotlib = optional_module("matplotlib")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


@contextmanager
def paper(width: float, height: float) -> Iterator[Any]:
    """Make an empty figure in the one style of all; what is drawn inside of the block gets it too."""
    with figure_style():
        yield _figure_class()(figsize=(width, height), layout="constrained")


@cache
def _figure_class() -> Any:
    """Make matplotlib's figure show itself in a notebook, also where pyplot was never imported."""

    class PaperFigure(optional_module("matplotlib.figure").Figure):  # type: ignore[misc]
        """A figure that a notebook shows as a picture."""

        def _repr_html_(self) -> str:
            picture = base64.b64encode(content_of(self, "png", dpi=200)).decode()
            width = round(96 * self.get_figwidth() * 1.3)  # a little larger than on paper
            return f'<img alt="figure" width="{width}" src="data:image/png;base64,{picture}">'

    return PaperFigure


def label_outside(axes: Sequence[Any], x: str, y: str) -> None:
    """Name the axes of a grid of panels where nothing stands beyond them: below, and on the left."""
    columns = axes[0].get_gridspec().ncols
    for place, panel in enumerate(axes):
        if place % columns == 0:
            panel.set_ylabel(y)
        if place + columns >= len(axes):
            panel.set_xlabel(x)
            panel.tick_params(labelbottom=True)  # also where the place below is empty


def title_room(panel: Any) -> float:
    """Give the inches that a title has above a panel of a grid."""
    inches: float = panel.get_figure().get_figwidth() / panel.get_gridspec().ncols - 0.35
    return inches


@contextmanager
def grid(
    count: int, *, height: float = 1.5, share: bool = True, narrow: int = 2, more: float = 0
) -> Iterator[tuple[Any, list[Any]]]:
    """Make a figure of equal panels: some beside each other in a column, or three on a page.

    Args:
        count: how many panels.
        height: of each, in inches.
        share: whether they have the same axes.
        narrow: how many fit into a column.
        more: inches for what stands below.
    """
    columns = count if count <= narrow else 2 if count in {2, 4} else 3
    rows = -(-count // columns)
    with paper(COLUMN if count <= narrow else PAGE, 0.75 + height * rows + more) as figure:
        panels = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)
        axes = list(panels.flat)
        for empty in axes[count:]:
            empty.set_axis_off()
        yield figure, axes[:count]


def save_figure(figure: Any, path: str | Path, *, dpi: int = 150) -> Path:
    """Write a figure, whole or not at all; the file's ending says as what. No clock time goes into it."""
    path = Path(path)
    write_atomic(path, content_of(figure, path.suffix[1:], dpi))
    return path


def content_of(figure: Any, kind: str, dpi: int) -> bytes:
    """Give the content of a figure's file of some kind, such as "png"."""
    buffer = io.BytesIO()
    with figure_style():
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=NO_CLOCK.get(f".{kind}"))
    return buffer.getvalue()


def save_with_data(
    figure: Any, data: Any, folder: str | Path, name: str, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write a figure, as PDF and PNG if nothing else is said, and its numbers as JSON, where NaN becomes null.

    Args:
        figure: from a `..._figure`.
        data: what it was drawn from: a data class of a `..._data`, or several of them.
        folder: for all files.
        name: of the files, without ending.
        formats: endings of the figure's files.
    """
    with figure_style():
        figure.draw_without_rendering()
    layout = figure.get_layout_engine()
    figure.set_layout_engine("none")  # once is enough for all formats, and takes longer than drawing
    try:
        made = {Path(folder) / f"{name}.{end}": content_of(figure, end, dpi=300) for end in formats}
    finally:
        figure.set_layout_engine(layout)
    found = _plain(data)
    numbers = {"format": FORMAT, "figure": name, **(found if is_dataclass(data) else {"data": found})}
    text = Path(folder) / f"{name}.json"
    # First: whoever is interrupted here finds no picture without numbers, which nobody would dare to write over.
    write_atomic(text, (json.dumps(numbers, allow_nan=False) + "\n").encode())
    for path, content in made.items():
        write_atomic(path, content)
    return [*made, text]


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbers_of(values: Float[Tensor, " n"]) -> tuple[float, ...]:
    """Make plain numbers, of as many digits as float32 has."""
    return tuple(float(f"{value:.7g}") for value in values.tolist())
