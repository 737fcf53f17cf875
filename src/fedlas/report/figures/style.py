"""Style and saving of all figures.

Figures are one column or one page wide, use fonts of 7 and 8 points, and are readable without colour: lines differ in
dashes and markers, areas in hatches. The user's matplotlib style is ignored, and files contain no timestamps: equal
input gives equal bytes.
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
FONT = "DejaVu Sans"  # bundled with matplotlib
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
    "pdf.fonttype": 42,  # embed TrueType fonts, which publishers require
    "svg.fonttype": "none",  # text that can be searched and edited
    "svg.hashsalt": "fedlas",  # element ids would be random otherwise
}
DARK, MIDDLE, LIGHT, PALE = "#000000", "#0072b2", "#e69f00", "#999999"
OVER, UNDER = "#d55e00", "#56b4e9"  # differ in luminance too
COLOURS = (DARK, MIDDLE, LIGHT, PALE, "#d55e00", "#009e73", "#cc79a7")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (8, 1.5, 1, 1, 1, 1.5)))
NO_TIMESTAMP = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
FORMATS = ("pdf", "png")
FORMAT = "fedlas.figure/1"  # format tag of the JSON data of a figure, which identifies the file
MAX_LENGTH = 32  # characters of an untrusted name


class LineStyle(NamedTuple):
    """Colour, marker and dashes of a line."""

    colour: str
    marker: str
    dash: Any

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `Axes.plot`."""
        return {"color": self.colour, "linestyle": self.dash}

    def with_markers(self, points: int, most: int = 8) -> dict[str, Any]:
        """Return the keyword arguments of `Axes.plot` for a line with at most `most` markers."""
        face = "white" if self.dash != "-" else self.colour
        return self.options | {"marker": self.marker, "markerfacecolor": face, "markevery": max(1, -(-points // most))}


def line_style(number: int) -> LineStyle:
    """Return the style of a line; the first forty differ in marker or dashes as well as in colour."""
    return LineStyle(*(cycle[number % len(cycle)] for cycle in (COLOURS, MARKERS, DASHES)))


def safe_label(text: object, longest: int = MAX_LENGTH) -> str:
    """Return untrusted text as a label: truncated, on one line, and never parsed as a formula."""
    one_line = " ".join(str(text).split())
    truncated = one_line if len(one_line) <= longest else f"{one_line[: longest - 1]}…"
    supported = _font_characters()
    label = "".join(char if ord(char) in supported and _is_visible(char) else "□" for char in truncated)
    # A dollar sign would start a formula, and legends skip labels that start with an underscore.
    label = label.replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label or "(no name)"


def fit_label(text: object, inches: float, points: float = 8) -> str:
    """Return untrusted text as a label that fits a width in inches."""
    path = optional_module("matplotlib.textpath").TextPath
    with figure_style():
        for longest in range(MAX_LENGTH, 3, -1):
            label = safe_label(text, longest)
            if path((0, 0), label, size=points).get_extents().width <= 72 * inches:
                return label
    return label


@cache
def _font_characters() -> frozenset[int]:
    """Return the code points that the font can draw."""
    manager = optional_module("matplotlib.font_manager")
    return frozenset(manager.get_font(manager.findfont(FONT)).get_charmap())


def _is_visible(char: str) -> bool:
    return unicodedata.category(char)[0] != "C"


def legend_below(figure: Any, panel: Any, *, most: int = 4, **options: Any) -> None:
    """Add a legend for a panel below the figure, in as many columns as fit."""
    handles, labels = panel.get_legend_handles_labels()
    if not labels:
        return
    longest = max(max(map(len, label.split("\n"))) for label in labels)
    columns = int(figure.get_figwidth() / (0.048 * longest + 0.5))
    columns = max(1, min(columns, most, len(labels)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, columnspacing=1.2, **options)


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply the style of all figures, ignoring the user's matplotlib settings."""
    matplotlib = optional_module("matplotlib")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


@contextmanager
def figure_of_size(width: float, height: float) -> Iterator[Any]:
    """Yield an empty figure; apply the style of all figures inside the block."""
    with figure_style():
        yield _figure_class()(figsize=(width, height), layout="constrained")


@cache
def _figure_class() -> Any:
    """Return a subclass of matplotlib's `Figure` that is displayed in notebooks without pyplot."""

    class PaperFigure(optional_module("matplotlib.figure").Figure):  # type: ignore[misc]
        """A figure that notebooks display as an image."""

        def _repr_html_(self) -> str:
            picture = base64.b64encode(figure_bytes(self, "png", dpi=200)).decode()
            width = round(96 * self.get_figwidth() * 1.3)  # slightly larger than in print
            return f'<img alt="figure" width="{width}" src="data:image/png;base64,{picture}">'

    return PaperFigure


def label_outer_axes(axes: Sequence[Any], x: str, y: str) -> None:
    """Label the outer axes of a grid of panels: the left column and the lowest panel of each column."""
    columns = axes[0].get_gridspec().ncols
    for number, panel in enumerate(axes):
        if number % columns == 0:
            panel.set_ylabel(y)
        if number + columns >= len(axes):
            panel.set_xlabel(x)
            panel.tick_params(labelbottom=True)  # also if the panel below is hidden


def title_width(panel: Any) -> float:
    """Return the width in inches available to the title of a panel in a grid."""
    inches: float = panel.get_figure().get_figwidth() / panel.get_gridspec().ncols - 0.35
    return inches


@contextmanager
def panel_grid(
    count: int, *, height: float = 1.5, share_axes: bool = True, per_column: int = 2, extra_height: float = 0
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a figure of equal panels, one column wide if they fit, else one page wide.

    Args:
        count: number of panels.
        height: height of each panel in inches.
        share_axes: whether panels share both axes.
        per_column: largest number of panels in a figure of one column.
        extra_height: additional height in inches, such as for a legend.
    """
    columns = count if count <= per_column else 2 if count in {2, 4} else 3
    rows = -(-count // columns)
    with figure_of_size(COLUMN if count <= per_column else PAGE, 0.75 + height * rows + extra_height) as figure:
        panels = figure.subplots(rows, columns, squeeze=False, sharex=share_axes, sharey=share_axes)
        axes = list(panels.flat)
        for empty in axes[count:]:
            empty.set_axis_off()
        yield figure, axes[:count]


def save_figure(figure: Any, path: str | Path, *, dpi: int = 150) -> Path:
    """Write a figure atomically, without a timestamp, in the format given by the file name extension."""
    path = Path(path)
    write_atomic(path, figure_bytes(figure, path.suffix[1:], dpi))
    return path


def figure_bytes(figure: Any, kind: str, dpi: int) -> bytes:
    """Return the bytes of a figure in a format such as "png"."""
    buffer = io.BytesIO()
    with figure_style():
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=NO_TIMESTAMP.get(f".{kind}"))
    return buffer.getvalue()


def save_with_data(
    figure: Any, data: Any, folder: str | Path, name: str, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Write a figure, by default as PDF and PNG, and its numbers as JSON, with null for NaN; return the paths.

    Args:
        figure: result of a `..._figure` function.
        data: numbers of the figure: one or several results of the matching `..._data` function.
        folder: folder of all files.
        name: file name without extension.
        formats: file formats of the figure.
    """
    with figure_style():
        figure.draw_without_rendering()
    layout = figure.get_layout_engine()
    figure.set_layout_engine("none")  # reuse the layout for all formats: computing it takes longer than drawing
    try:
        files = {Path(folder) / f"{name}.{end}": figure_bytes(figure, end, dpi=300) for end in formats}
    finally:
        figure.set_layout_engine(layout)
    numbers = _json_value(data)
    content = {"format": FORMAT, "figure": name, **(numbers if is_dataclass(data) else {"data": numbers})}
    json_path = Path(folder) / f"{name}.json"
    # Write the JSON file first: with it, a later run may overwrite the figure files, also after an interrupt.
    write_atomic(json_path, (json.dumps(content, allow_nan=False) + "\n").encode())
    for path, picture in files.items():
        write_atomic(path, picture)
    return [*files, json_path]


def _json_value(value: Any) -> Any:
    """Convert data classes and sequences to JSON types; non-finite numbers become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return _json_value(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): _json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_floats(values: Float[Tensor, " n"]) -> tuple[float, ...]:
    """Convert a tensor to floats rounded to the precision of float32."""
    return tuple(float(f"{value:.7g}") for value in values.tolist())
