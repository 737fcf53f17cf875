"""Tables of measured numbers and the paper's numbers, as text, Markdown, LaTeX and CSV.

A number p of the paper is inside the noise of n > 1 seeds with mean m and standard deviation s if it lies between the
ends of their bootstrap intervals, or if

    |m - p| <= 2 sqrt(s^2 (1/n + 1/3))

which assumes that the paper's number is a mean of three seeds with the same standard deviation.

Numbers are stored as fractions and shown in percent. Text is untrusted input and escaped for every format;
non-printable characters become spaces.
"""

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from fedlas.errors import UserError
from fedlas.formatting import PERCENT_DECIMALS, align_columns, escape_latex, fixed
from fedlas.io.atomic import write_atomic

Detail = Literal["ours", "both", "full"]

PAPER_SEEDS = 3
RANKS = "Mean rank"
METHOD = "method"
PARTS = {"ours": ("ours",), "both": ("ours", "paper"), "full": ("ours", "interval", "paper", "difference")}
FIELDS = ("row", "title", "group", "column", "mean", "spread", "n", "planned", "low", "high")
COMPARED = ("paper", "difference", "inside_noise")


@dataclass(frozen=True)
class Cell:
    """Measured values and the paper's number in one cell of a table.

    Args:
        values: our value for each seed, as fractions.
        intervals: bootstrap interval of each value, or empty.
        paper: the paper's number, in the same unit.
        planned: number of seeds in the plan of the experiment.
    """

    values: tuple[float, ...] = ()
    intervals: tuple[tuple[float, float], ...] = ()
    paper: float | None = None
    planned: int = 0

    def __post_init__(self) -> None:
        if len(self.intervals) not in {0, len(self.values)}:
            raise UserError(f"{len(self.values)} values cannot have {len(self.intervals)} intervals")

    @property
    def mean(self) -> float | None:
        """Mean over seeds."""
        return fmean(self.values) if self.values else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        values = [float(value) for value in self.values]
        if len(values) < 2:
            return None
        return stdev(values) if all(map(math.isfinite, values)) else math.nan

    @property
    def interval(self) -> tuple[float, float] | None:
        """Mean lower and mean upper end of the intervals."""
        if not self.intervals:
            return None
        return fmean(low for low, _ in self.intervals), fmean(high for _, high in self.intervals)

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's number."""
        return None if self.mean is None or self.paper is None else self.mean - float(self.paper)

    @property
    def inside_noise(self) -> bool | None:
        """Whether the paper's number is within the noise of our seeds; None if that is unknown, as with one seed."""
        gap, spread = self.difference, self.spread
        if gap is None or self.paper is None or not math.isfinite(gap) or spread is None:
            return None
        if self.intervals and min(self.intervals)[0] <= self.paper <= max(high for _, high in self.intervals):
            return True
        # With identical seeds the deviation is 0, and the mean may differ from the paper's number by a rounding error.
        return abs(gap) <= 2 * spread * math.sqrt(1 / len(self.values) + 1 / PAPER_SEEDS) + 1e-12


@dataclass(frozen=True)
class Column:
    """Heading and number format of a column.

    Args:
        name: heading such as "ECE %".
        group: common heading of neighbouring columns, such as "CIFAR-10, ResNet-50".
        higher_is_better: whether the best value is the largest.
        percent: whether values are multiplied by 100.
        digits: number of decimals of all rows; rows are ranked by the rounded values.
        ranked: whether the best and second best values are marked.
        compared: whether the difference from the paper's number is meaningful.
    """

    name: str
    group: str = ""
    higher_is_better: bool = False
    percent: bool = True
    digits: int = PERCENT_DECIMALS
    ranked: bool = True
    compared: bool = True

    def format(self, value: float, sign: str = "") -> str:
        """Format a number as shown in the table, without a negative zero."""
        return fixed(float(value) * (100 if self.percent else 1), self.digits, sign)


@dataclass(frozen=True)
class Row:
    """One method.

    Args:
        name: catalogue name, such as "fedlas_ls".
        title: its name in text, such as "FeDLaS-LS".
        cells: one for each column.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]


class Mark(NamedTuple):
    """Rows with the best and the second best value of a column; equal values tie."""

    best: tuple[int, ...] = ()
    second: tuple[int, ...] = ()

    def within(self, count: int) -> "Mark":
        """Keep only the first `count` rows."""
        return Mark(*(tuple(row for row in rows if row < count) for rows in self))


class Marks(NamedTuple):
    """Marks of a column, among our values and among the paper's."""

    ours: Mark
    paper: Mark


def _plain(text: str) -> str:
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def _markdown(text: str) -> str:
    escaped = re.sub(r"([\\`*_{}\[\]<>|~&$#])", r"\\\1", _plain(text))
    return re.sub(
        r"^(\d*)([-+=.)])", r"\1\\\2", escaped
    )  # Markdown would parse it as a list or as the underline of a heading


def _latex(text: str) -> str:
    return escape_latex(_plain(text))


def _for_spreadsheet(text: str) -> str:
    plain = _plain(text)
    return f"'{plain}" if plain.startswith(tuple("=+-@＝＋－＠")) else plain


class _Style(NamedTuple):
    """Escape function, marks and symbols of an output format."""

    escape: Callable[[str], str]
    best: str
    second: str
    marks: str
    around: str = "±"
    minus: str = "-"
    labels: tuple[str, ...] = (METHOD, "name")


TEXT = _Style(_plain, "{}**", "{}*", "**: best; *: second best.", around="+-")
MARKDOWN = _Style(_markdown, "**{}**", "*{}*", "Bold: best; italic: second best.")
TEX = _Style(
    _latex, r"\textbf{{{}}}", r"\underline{{{}}}", "Bold: best; underlined: second best.", r"$\pm$", "$-$", ("Method",)
)


@dataclass(frozen=True)
class Table:
    """Methods in rows, measurements in columns.

    `detail` selects the content of a cell: "ours" is the mean and standard deviation over seeds, "both" adds the
    paper's number, "full" adds the interval, the difference, and whether it is inside noise. Cells without a run are
    empty; cells with fewer seeds than planned show both numbers of seeds.

    Args:
        name: name of the files, without extension.
        title: caption of the table.
        columns: headings and number formats of the columns.
        rows: one row per method.
        notes: sentences below the table.
        left_out: rows that are not shown, but are included when the paper's best values are marked.
        row_heading: heading of the column of row titles; names of rows are shown only if it is "method".
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    left_out: tuple[Row, ...] = ()
    row_heading: str = METHOD

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.+-]*", self.name, re.ASCII):
            raise UserError(f"a table is named like a file, in letters, digits and any of ._+-; this is {self.name!r}")
        for row in (*self.rows, *self.left_out):
            if len(row.cells) != len(self.columns):
                raise UserError(f"{row.name} has {len(row.cells)} cells for {len(self.columns)} columns")

    def marks(self) -> tuple[Marks, ...]:
        """Return the best and second best rows of each column, by rounded values; a single value has no mark."""
        count, every = len(self.rows), (*self.rows, *self.left_out)
        columns = [(column, [row.cells[position] for row in every]) for position, column in enumerate(self.columns)]
        return tuple(
            Marks(
                _mark(column, [cell.mean for cell in cells[:count]]),
                _mark(column, [cell.paper for cell in cells]).within(count),
            )
            for column, cells in columns
        )

    def text(self, detail: Detail = "ours") -> str:
        """Format the table as plain text; symbols other than the given names are ASCII."""
        heads, lines, notes = self._layout(detail, TEXT)
        labels = len(self._row_labels(TEXT))
        head_rows = [[label for head, span in level for label in (head, *[""] * (span - 1))] for level in heads]
        columns = [_align_numbers([line[position] for line in lines]) for position in range(labels, len(head_rows[-1]))]
        body = [[*line[:labels], *(column[number] for column in columns)] for number, line in enumerate(lines)]
        text_lines = align_columns([*head_rows, *body])
        text_lines.insert(len(head_rows), "-" * max(map(len, text_lines)))
        return "\n".join([*filter(None, [_plain(self.title)]), *text_lines, *notes]) + "\n"

    def markdown(self, detail: Detail = "ours") -> str:
        """Format a Markdown table: the best values are bold, the second best italic."""
        heads, lines, notes = self._layout(detail, MARKDOWN)
        above = [[head for head, span in level for _ in range(span)] for level in heads]
        head = ["<br>".join(filter(None, column)) for column in zip(*above, strict=True)]
        rule = [":---" if position < len(self._row_labels(MARKDOWN)) else "---:" for position in range(len(head))]
        grid = "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))
        return "\n\n".join([*([f"### {_markdown(self.title)}"] if _plain(self.title) else []), grid, *notes]) + "\n"

    def latex(self, detail: Detail = "ours") -> str:
        """Format a LaTeX table with booktabs; wide tables span both columns of a page."""
        heads, lines, notes = self._layout(detail, TEX)
        width = len(heads[-1]) - 1
        kind, size = "table" if width <= 4 else "table*", r"\footnotesize" if width <= 8 else r"\scriptsize"
        latex_lines = [rf"\begin{{{kind}}}[t]", rf"\centering\caption{{{_latex(self.title)}}}\label{{tab:{self.name}}}"]
        latex_lines += [rf"{size}\setlength{{\tabcolsep}}{{3pt}}", rf"\begin{{tabular}}{{l{'r' * width}}}", r"\toprule"]
        for level in heads[:-1]:
            latex_lines.append(" & ".join(rf"\multicolumn{{{span}}}{{c}}{{{head}}}" for head, span in level) + r" \\")
            stops = accumulate(span for _, span in level)
            spans = [(stop - span + 1, stop) for (head, span), stop in zip(level, stops, strict=True) if head]
            latex_lines += ["".join(rf"\cmidrule(lr){{{start}-{stop}}}" for start, stop in spans)] if spans else []
        latex_lines += [" & ".join(head for head, _ in heads[-1]) + r" \\", r"\midrule"]
        latex_lines += [*(" & ".join(line) + r" \\" for line in lines), r"\bottomrule", r"\end{tabular}"]
        latex_lines += [rf"\par\smallskip{{{size} {' '.join(notes)}\par}}"] if notes else []
        return "\n".join([*latex_lines, rf"\end{{{kind}}}"]) + "\n"

    def csv(self) -> str:
        """Format one CSV row for each cell, as fractions; text that looks like a formula gets an apostrophe."""
        lines = io.StringIO(newline="")
        writer = csv.writer(lines)
        writer.writerow((*FIELDS, *COMPARED))
        for row in self.rows:
            for column, cell in zip(self.columns, row.cells, strict=True):
                labels = [_for_spreadsheet(label) for label in (row.name, row.title, column.group, column.name)]
                ours = [cell.mean, cell.spread, len(cell.values), cell.planned, *(cell.interval or (None, None))]
                compared = [cell.difference, cell.inside_noise] if column.compared else [None, None]
                writer.writerow([*labels, *ours, None if cell.paper is None else float(cell.paper), *compared])
        return lines.getvalue()

    def save(
        self, folder: str | Path, formats: Sequence[str] = ("md", "tex", "csv", "txt"), detail: Detail = "both"
    ) -> list[Path]:
        """Write the table to a folder, one file for each format; return the paths."""
        content_by_format = {
            "md": self.markdown(detail),
            "tex": self.latex(detail),
            "csv": self.csv(),
            "txt": self.text(detail),
        }
        if unknown := [name for name in formats if name not in content_by_format]:
            raise UserError(
                f"a table cannot be written as {', '.join(unknown)}, only as {', '.join(content_by_format)}"
            )
        paths = {name: Path(folder) / f"{self.name}.{name}" for name in formats}
        # Write the CSV file first: it identifies the files of a table, so that they can be overwritten.
        for name in sorted(paths, key=lambda name: name != "csv"):
            write_atomic(paths[name], content_by_format[name].encode())
        return list(paths.values())

    def _layout(self, detail: Detail, style: _Style) -> tuple[list[list[tuple[str, int]]], list[list[str]], list[str]]:
        """Return escaped headings with their spans, the widest first, escaped rows, and escaped notes."""
        if detail not in PARTS:
            raise UserError(f"detail is one of {', '.join(PARTS)}, not {detail!r}")
        parts = [self._parts(position, detail) for position in range(len(self.columns))]
        heads = [[(column.name, len(column_parts)) for column, column_parts in zip(self.columns, parts, strict=True)]]
        if any(column.group for column in self.columns):
            grouped = groupby(range(len(parts)), key=lambda position: self.columns[position].group)
            heads.insert(
                0, [(group, sum(len(parts[position]) for position in positions)) for group, positions in grouped]
            )
        if any(len(column_parts) > 1 for column_parts in parts):
            heads.append([(part, 1) for column_parts in parts for part in column_parts])
        labels = self._row_labels(style)
        heads = [[*((label if level is heads[-1] else "", 1) for label in labels), *level] for level in heads]
        marks, lines, titles = self.marks(), [], [row.title for row in self.rows]
        for number, row in enumerate(self.rows):
            is_ambiguous = titles.count(row.title) > 1 and row.name != row.title
            single_label = f"{row.title} ({row.name})" if row.title and is_ambiguous else row.title or row.name
            row_labels = (row.title, row.name) if len(labels) > 1 else (single_label,)
            cells = zip(parts, self.columns, row.cells, marks, strict=True)
            entries = [
                _entry(part, a, b, c, row=number, style=style)
                for column_parts, a, b, c in cells
                for part in column_parts
            ]
            lines.append([*map(style.escape, row_labels), *entries])
        escaped = [[(style.escape(head), span) for head, span in level] for level in heads]
        return escaped, lines, [style.escape(note) for note in (*self.notes, *self._legend(detail, style))]

    def _row_labels(self, style: _Style) -> tuple[str, ...]:
        """Return the headings of the columns that identify a row."""
        return style.labels if self.row_heading == METHOD else (self.row_heading,)

    def _parts(self, position: int, detail: Detail) -> list[str]:
        """Return the parts of a column that at least one cell has; "ours" is always included."""
        parts = [part for part in PARTS[detail] if self.columns[position].compared or part != "difference"]
        cells = [row.cells[position] for row in self.rows]
        return [part for part in parts if part == "ours" or any(getattr(cell, part) is not None for cell in cells)]

    def _legend(self, detail: Detail, style: _Style) -> list[str]:
        """Return a sentence for each mark and symbol in the table."""
        cells, full = [cell for row in self.rows for cell in row.cells], detail == "full"
        around = "+-" if style is TEXT else "±"
        compared = [
            row.cells[position] for row in self.rows for position, column in enumerate(self.columns) if column.compared
        ]
        theirs = [cell for row in self.left_out for cell in row.cells if cell.paper is not None]
        sentences = {
            style.marks: any(mark.ours.best or (any(mark.paper) and detail != "ours") for mark in self.marks()),
            "The paper's values are marked among all of its rows.": bool(theirs) and detail != "ours",
            f"{around}: standard deviation over seeds.": any(cell.spread is not None for cell in cells),
            "(n/m): n of m planned seeds were run.": any(0 < len(cell.values) < cell.planned for cell in cells),
            "interval: mean of the seeds' bootstrap intervals.": full and any(cell.intervals for cell in cells),
            "difference: ours minus the paper's.": full and any(cell.difference is not None for cell in compared),
            "inside: the paper's value is within the seeds' intervals or two standard errors; outside: it is not; with "
            "one seed there is no verdict.": full and any(cell.inside_noise is not None for cell in compared),
        }
        return [sentence for sentence, occurs in sentences.items() if occurs]


def mean_rank_columns(table: Table, metric_columns: Sequence[str]) -> Table:
    """Add a column for each metric with the mean rank of each method over all columns of that name.

    Our values are rounded before ranking, the paper's are not. Each set is ranked among its rows without missing
    values; if these rows differ, the two mean ranks are not compared.

    Args:
        table: table to extend.
        metric_columns: names of columns, such as "ECE %"; the columns of all groups are ranked together.
    """
    columns, notes, added = list(table.columns), list(table.notes), []
    for metric in metric_columns:
        positions = [n for n, column in enumerate(table.columns) if column.name == metric and column.group != RANKS]
        if not positions:
            names = ", ".join(dict.fromkeys(column.name for column in table.columns))
            raise UserError(f"no column is called {metric!r}; there are {names}")
        ours, paper = {}, {}
        for number, row in enumerate(table.rows):
            cells = [(table.columns[position], row.cells[position]) for position in positions]
            ours[number] = [_signed(c, None if cell.mean is None else float(c.format(cell.mean))) for c, cell in cells]
            paper[number] = [_signed(c, cell.paper) for c, cell in cells]
        first, second = _ranks(ours), _ranks(paper)
        same = first.keys() == second.keys()
        compared = same and all(table.columns[position].compared for position in positions)
        columns.append(Column(metric.removesuffix(" %"), RANKS, percent=False, compared=compared))
        added.append([Cell((first[n],) if n in first else (), (), second.get(n)) for n in range(len(table.rows))])
        notes.append(f"Mean rank of {metric} (columns ranked: {len(positions)}): equal values share the smallest rank.")
        if first and second and not same:
            notes[-1] += f" Ours are of {len(first)} rows, the paper's of {len(second)} other rows."
    rows = [replace(row, cells=(*row.cells, *(cells[n] for cells in added))) for n, row in enumerate(table.rows)]
    left_out = [replace(row, cells=(*row.cells, *(Cell() for _ in added))) for row in table.left_out]
    return replace(table, columns=tuple(columns), rows=tuple(rows), notes=tuple(notes), left_out=tuple(left_out))


def _ranks(table: dict[int, list[float]]) -> dict[int, float]:
    """Return the mean rank of each row without missing values; equal values share the smallest of their ranks."""
    complete_rows = {row: values for row, values in table.items() if all(map(math.isfinite, values))}
    if len(complete_rows) < 2:
        return {}
    columns = list(zip(*complete_rows.values(), strict=True))
    return {
        row: fmean(1 + sum(other < value for other in column) for value, column in zip(values, columns, strict=True))
        for row, values in complete_rows.items()
    }


def _signed(column: Column, value: float | None) -> float:
    # Round, since 13.43 / 100 and 0.1343 differ in floating point.
    return math.nan if value is None else round(-value if column.higher_is_better else float(value), 12)


def _mark(column: Column, values: Sequence[float | None]) -> Mark:
    rounded = [math.nan if value is None else float(column.format(value)) for value in values]
    finite = [value for value in rounded if math.isfinite(value)]
    if not column.ranked or len(finite) < 2:
        return Mark()
    order = sorted(set(finite), reverse=column.higher_is_better)[:2]
    return Mark(*(tuple(n for n, value in enumerate(rounded) if value == level) for level in order))


def _entry(part: str, column: Column, cell: Cell, marks: Marks, *, row: int, style: _Style) -> str:
    number, suffix, mark = "", "", Mark()
    if part == "ours" and cell.mean is not None:
        number, mark = column.format(cell.mean), marks.ours
        if cell.spread is not None and math.isfinite(cell.spread):
            suffix = f" {style.around} {column.format(cell.spread)}"
        if len(cell.values) < cell.planned:
            suffix += f" ({len(cell.values)}/{cell.planned})"
    elif part == "interval" and cell.interval is not None:
        number = f"[{', '.join(column.format(end) for end in cell.interval)}]"
    elif part == "paper" and cell.paper is not None:
        number, mark = column.format(cell.paper), marks.paper
    elif part == "difference" and cell.difference is not None:
        number = column.format(cell.difference, "+")
        suffix = {None: "", True: " inside", False: " outside"}[cell.inside_noise]
    sign = style.best if row in mark.best else style.second if row in mark.second else "{}"
    return sign.format(number.replace("-", style.minus)) + suffix


def _align_numbers(column: Sequence[str]) -> list[str]:
    """Right-align the first number of each entry."""
    ends = [len(entry.partition(" ")[0].rstrip("*")) for entry in column]
    return [" " * (max(ends) - end) * bool(entry) + entry for entry, end in zip(column, ends, strict=True)]
