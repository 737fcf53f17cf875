"""Tables of measured values and of the paper's values, in every format."""

import csv
import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlas.metrics.result import Definition, Result
from fedlas.report.tables import Cell, Column, Detail, Mark, Row, Table, mean_rank_columns

DETAILS: tuple[Detail, ...] = ("ours", "both", "full")
GROUPS = ("CIFAR-10, ResNet-101", "CIFAR-10, ResNet-50", "CIFAR-100, ResNet-101")
# ECE in percent of the paper's main table, in those groups, and the ranks that this makes; two share a value.
PAPER_ECE = {
    "CE": ([5.74, 5.85, 12.94], [7, 7, 4]),
    "MMCE": ([3.61, 3.1, 13.43], [4, 4, 6]),
    "ECP": ([5.41, 3.01, 13.43], [6, 3, 6]),
    "CPC": ([3.78, 3.91, 13.32], [5, 6, 5]),
    "LS": ([3.07, 3.59, 6.08], [3, 5, 1]),
    "MbLS": ([1.38, 1.21, 6.1], [2, 1, 2]),
    "FeDLaS-LS": ([1.37, 1.29, 7.48], [1, 2, 3]),
}
SPECIAL_CHARACTERS = r"""50% of $x_1^2$ {#1} & ~\alpha | <b>"it's"</b> [1] *s* `c` """


def paper_table() -> Table:
    rows = tuple(
        Row(name.lower(), name, tuple(Cell(paper=value / 100, planned=3) for value in values))
        for name, (values, _) in PAPER_ECE.items()
    )
    return Table("paper", "Paper", tuple(Column("ECE %", group) for group in GROUPS), rows)


def small_table(**changes: Any) -> Table:
    """Two metrics on two data sets: one row has all runs, one has half of them, one has none."""
    columns = tuple(
        Column(name, group, higher_is_better=name == "accuracy %")
        for group in ("CIFAR-10", "CIFAR-100")
        for name in ("accuracy %", "ECE %")
    )
    complete_row = (
        Cell((0.951, 0.952, 0.949), ((0.94, 0.96),) * 3, 0.9511, 3),
        Cell((0.0585, 0.06, 0.055), ((0.05, 0.07),) * 3, 0.0785, 3),
        Cell((0.77,) * 3, (), 0.7707, 3),
        Cell((0.125, 0.127, 0.126), ((0.12, 0.13),) * 3, None, 3),
    )
    partial_row = (
        Cell((0.95,), ((0.94, 0.96),), 0.9487, 3),
        Cell((0.0129,), ((0.011, 0.015),), 0.012, 3),
        Cell(paper=0.78, planned=3),
        Cell(planned=3),
    )
    empty_row = tuple(Cell(planned=3) for _ in columns)
    fields: dict[str, Any] = {
        "name": "small-fast",
        "title": "Fast",
        "columns": columns,
        "rows": (Row("ce", "CE", complete_row), Row("fedlas_ls", "FeDLaS-LS", partial_row), Row("ls", "LS", empty_row)),
        "notes": ("Fast protocol: 20 epochs.",),
    }
    return Table(**{**fields, **changes})


def one_column(*cells: Cell, **options: Any) -> Table:
    rows = tuple(Row("abcdefg"[n], "ABCDEFG"[n], (cell,)) for n, cell in enumerate(cells))
    return Table("one", "One", (Column("ECE %", **options),), rows)


def table_with_text(text: str) -> Table:
    """Make a table whose names and titles are all this text."""
    cells = (Cell((0.5, 0.25), ((0.2, 0.6),) * 2, 0.5, 3), Cell(paper=0.125))
    rows = (Row(text, text, cells), Row(text, text, cells[::-1]))
    return Table("t", text, (Column(text, text), Column(text, text)), rows, (text,))


def printable(text: str) -> str:
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def test_a_cell_averages_its_seeds() -> None:
    cell = Cell((0.01, 0.02, 0.03), ((0.0, 0.02), (0.01, 0.04), (0.02, 0.06)), 0.015, 3)
    assert cell.mean == pytest.approx(0.02)
    assert cell.spread == pytest.approx(0.01)
    assert cell.interval == pytest.approx((0.01, 0.04))
    assert cell.difference == pytest.approx(0.005)


def test_empty_cell_has_no_statistics() -> None:
    cell = Cell(paper=0.015, planned=3)
    assert (cell.mean, cell.spread, cell.interval, cell.difference, cell.inside_noise) == (None,) * 5
    assert Cell((0.01,)).spread is None
    assert Cell((0.01,)).difference is None


def test_cells_accept_metric_results() -> None:
    values = tuple(Result(value, Definition("ECE")) for value in (0.01, 0.03))
    cell = Cell(values, paper=Result(0.02, Definition("ECE")), planned=2)
    assert cell.spread == pytest.approx(math.sqrt(2) / 100)
    table = one_column(cell)
    assert "2.00 +- 1.41" in table.text()
    (line,) = csv.DictReader(io.StringIO(table.csv()))
    assert (line["mean"], line["paper"]) == ("0.02", "0.02")


@pytest.mark.parametrize(
    ("cell", "inside"),
    [
        (Cell((0.02,), ((0.01, 0.03),), 0.03), None),  # one seed gives no estimate of the noise between seeds
        (Cell((0.02,), ((0.01, 0.03),)), None),
        (Cell((), (), 0.02), None),
        (Cell((math.nan, 0.02), (), 0.02), None),
        # Equal seeds have no spread, so that only the hull of their intervals counts; its ends may be of any seed.
        (Cell((0.03,) * 2, ((0.0, 0.02), (0.04, 0.06)), 0.031), True),
        (Cell((0.03,) * 2, ((0.04, 0.06), (0.0, 0.02)), 0.001), True),
        (Cell((0.03,) * 2, ((0.04, 0.06), (0.0, 0.02)), 0.059), True),
        (Cell((0.03,) * 2, ((0.0, 0.06), (0.01, 0.02)), 0.059), True),
        (Cell((0.03,) * 2, ((0.04, 0.06), (0.0, 0.02)), 0.061), False),
        (Cell((0.03,) * 2, ((0.04, 0.06), (0.01, 0.02)), 0.009), False),
        # Intervals that miss the paper value do not overrule a spread that reaches it.
        (Cell((0.05, 0.01), ((0.04, 0.06), (0.0, 0.02)), 0.061), True),
        # Spread 0.01 of three seeds: two standard errors of the difference are 0.02 sqrt(2/3) = 0.01633.
        (Cell((0.01, 0.02, 0.03), (), 0.02 + 0.0163), True),
        (Cell((0.01, 0.02, 0.03), (), 0.02 - 0.0163), True),
        (Cell((0.01, 0.02, 0.03), (), 0.02 + 0.0164), False),
        # The same spread of two seeds: 2 x 0.01 sqrt(1/2 + 1/3) = 0.018257.
        (Cell((0.0, math.sqrt(2) / 100), (), math.sqrt(0.5) / 100 + 0.0182), True),
        (Cell((0.0, math.sqrt(2) / 100), (), math.sqrt(0.5) / 100 + 0.0183), False),
        (Cell((0.0009,) * 3, (), 0.0009), True),  # in floating point the mean of the three differs from 0.0009
        (Cell((0.0129,) * 3, (), 0.013), False),
    ],
)
def test_inside_noise_uses_intervals_or_two_standard_errors(cell: Cell, inside: bool | None) -> None:
    assert cell.inside_noise is inside


def test_partial_intervals_raise() -> None:
    with pytest.raises(ValueError, match=r"2 values .*1 intervals"):
        Cell((0.1, 0.2), ((0.0, 0.3),))


def test_paper_table_is_marked_by_paper_numbers() -> None:
    marks = [mark.paper for mark in paper_table().marks()]
    assert marks == [Mark((6,), (5,)), Mark((5,), (6,)), Mark((4,), (5,))]
    assert all(mark.ours == Mark() for mark in paper_table().marks())
    assert "best" in paper_table().text("both")
    assert "best" not in paper_table().text("ours")
    assert "(n/m)" not in paper_table().text("both")


def test_values_equal_after_rounding_share_a_mark() -> None:
    cells = [Cell((value,)) for value in (0.01234, 0.01226, 0.0124, 0.01235001, 0.5)]  # 1.23 1.23 1.24 1.24 50.00
    assert one_column(*cells).marks()[0].ours == Mark((0, 1), (2, 3))
    assert one_column(*cells, digits=3).marks()[0].ours == Mark((1,), (0,))
    assert one_column(*cells, higher_is_better=True).marks()[0].ours == Mark((4,), (2, 3))
    assert one_column(*cells, percent=False).marks()[0].ours == Mark((0, 1, 2, 3), (4,))


def test_our_and_paper_numbers_are_marked_separately() -> None:
    table = one_column(Cell((0.01,), (), 0.02), Cell((0.02,), (), 0.01), Cell((), (), 0.015), Cell((math.nan,)))
    assert table.marks()[0] == (Mark((0,), (1,)), Mark((1,), (2,)))


def test_paper_marks_include_left_out_rows() -> None:
    table = one_column(Cell((0.3,), (), 0.3), Cell((0.2,), (), 0.2), Cell((0.1,), (), 0.1))
    partial_table = replace(table, rows=table.rows[:2], left_out=table.rows[2:])
    assert partial_table.marks()[0] == (Mark((1,), (0,)), Mark((), (1,)))
    ranked = mean_rank_columns(partial_table, ["ECE %"])
    assert ranked.marks()[0] == partial_table.marks()[0]
    with pytest.raises(ValueError, match=r"1 cells .*2 columns"):
        replace(ranked, left_out=partial_table.left_out)


def test_single_or_unranked_values_are_not_marked() -> None:
    assert one_column(Cell((0.01,)), Cell()).marks()[0].ours == Mark()
    assert one_column(Cell((0.01,)), Cell((0.02,)), ranked=False).marks()[0].ours == Mark()
    assert one_column(Cell((0.01,)), Cell((0.01,))).marks()[0].ours == Mark((0, 1))


def test_text_shows_the_table() -> None:
    lines = small_table().text("ours").splitlines()
    assert lines[:8] == [
        "Fast",
        "                      CIFAR-10                        CIFAR-100",
        "method     name       accuracy %       ECE %          accuracy %     ECE %",
        "----------------------------------------------------------------------------------",
        "CE         ce         95.07** +- 0.15  5.78* +- 0.26  77.00 +- 0.00  12.60 +- 0.10",
        "FeDLaS-LS  fedlas_ls  95.00* (1/3)     1.29** (1/3)",
        "LS         ls",
        "Fast protocol: 20 epochs.",
    ]
    assert [line.partition(":")[0] for line in lines[8:]] == ["**", "+-", "(n/m)"]


def test_full_text_shows_intervals_differences_and_noise() -> None:
    lines = small_table().text("full").splitlines()
    row = next(line for line in lines if line.startswith("CE "))
    assert row.split("  ")[0] == "CE"
    assert re.findall(r"\[.*?\]", row) == ["[94.00, 96.00]", "[5.00, 7.00]", "[12.00, 13.00]"]
    assert re.findall(r"[-+]\d+\.\d\d (?:inside|outside)", row) == ["-0.04 inside", "-2.07 outside", "-0.07 outside"]
    assert {"difference", "inside"} <= {line.partition(":")[0] for line in lines}
    assert "interval" not in small_table().text("both")


def test_zero_difference_has_no_minus_sign() -> None:
    text = one_column(Cell((0.01,), (), 0.01001)).text("full")
    assert "+0.00" in text
    assert "-0.00" not in text


@pytest.mark.parametrize("detail", DETAILS)
def test_text_table_is_ascii(detail: Detail) -> None:
    assert small_table().text(detail).isascii()


def test_column_shows_only_parts_with_values() -> None:
    heads = small_table().text("both").splitlines()[3].split()
    assert heads == ["method", "name", *["ours", "paper"] * 3, "ours"]
    heads = paper_table().text("full").splitlines()[3].split()
    assert heads == ["method", "name", *["ours", "paper"] * 3]


def test_failed_run_is_shown_as_nan_and_never_best() -> None:
    table = one_column(Cell((math.nan, 0.01), (), 0.01, 2), Cell((0.02,)), Cell((0.03,)))
    assert table.marks()[0].ours == Mark((1,), (2,))
    assert re.search(r"^A +a +nan$", table.text(), re.MULTILINE)


def test_decimal_points_are_aligned() -> None:
    lines = one_column(Cell((0.0123,)), Cell((0.1234, 0.12)), Cell((1.0,))).text().splitlines()[3:6]
    assert len({line.index(".") for line in lines}) == 1


fractions = st.floats(-2, 2, allow_nan=False).map(lambda value: round(value, 5))


CellArguments = tuple[list[float], list[tuple[float, float]], float | None, int]
ColumnArguments = tuple[str, str, bool, bool, int, bool]


@st.composite
def cell_arguments(draw: st.DrawFn) -> CellArguments:
    values = draw(st.lists(fractions, max_size=3))
    pairs = st.tuples(fractions, fractions)
    intervals = draw(st.lists(pairs, min_size=len(values), max_size=len(values))) if draw(st.booleans()) else []
    return values, intervals, draw(st.none() | fractions), draw(st.integers(0, 4))


@st.composite
def table_arguments(draw: st.DrawFn) -> tuple[list[ColumnArguments], list[tuple[str, list[CellArguments]]]]:
    """Arguments of tables; the tables are not built here, because their shape checks draw random numbers."""
    names, groups = st.sampled_from(["ECE %", "NLL"]), st.sampled_from(["", "one", "a long heading of a group"])
    flag = st.booleans()
    columns = draw(st.lists(st.tuples(names, groups, flag, flag, st.integers(1, 4), flag), max_size=4))
    row = st.lists(cell_arguments(), min_size=len(columns), max_size=len(columns))
    return columns, draw(st.lists(st.tuples(st.sampled_from(["CE", "FeDLaS-LS"]), row), max_size=4))


def table_of(arguments: tuple[list[ColumnArguments], list[tuple[str, list[CellArguments]]]]) -> Table:
    columns = tuple(
        Column(name, group, higher_is_better=higher, percent=percent, digits=digits, ranked=ranked)
        for name, group, higher, percent, digits, ranked in arguments[0]
    )
    rows = tuple(
        Row(name.lower(), name, tuple(Cell(tuple(v), tuple(i), paper, planned) for v, i, paper, planned in cells))
        for name, cells in arguments[1]
    )
    return Table("t", "Title", columns, rows)


def expected_numbers(table: Table, row: Row, detail: Detail) -> list[str]:
    """All numbers of a row of the table, in order, computed independently."""
    texts = []
    for column, cell in zip(table.columns, row.cells, strict=True):
        numbers = [cell.mean, cell.spread]
        numbers += [*(cell.interval or ())] if detail == "full" else []
        numbers += [cell.paper] if detail != "ours" else []
        scale = 100 if column.percent else 1
        row_texts = [f"{scale * number:.{column.digits}f}" for number in numbers if number is not None]
        if detail == "full" and cell.difference is not None:
            row_texts.append(f"{scale * cell.difference:+.{column.digits}f}")
        texts += [re.sub(r"^[-+](0\.0+)$", r"\1", number) for number in row_texts]
    return texts


def shown_numbers(line: str) -> list[str]:
    return [re.sub(r"^\+(0\.0+)$", r"\1", number) for number in re.findall(r"[-+]?\d+\.\d+", line)]


@given(table_arguments(), st.sampled_from(DETAILS))
def test_every_format_contains_every_value(arguments: Any, detail: Detail) -> None:
    table = table_of(arguments)
    lines = table.text(detail).splitlines()
    start = next(index for index, line in enumerate(lines) if re.fullmatch("-+", line)) + 1
    for row, line in zip(table.rows, lines[start:], strict=False):
        parts = line.split()
        assert parts[:2] == [row.title, row.name]
        assert shown_numbers(line) == expected_numbers(table, row, detail)
        partial = [cell for cell in row.cells if 0 < len(cell.values) < cell.planned]
        assert re.findall(r"\(\d/\d\)", line) == [f"({len(cell.values)}/{cell.planned})" for cell in partial]
    latex = table.latex(detail).replace("$-$", "-")
    for row in table.rows:
        expected_row = expected_numbers(table, row, detail)
        for output in (table.markdown(detail), latex):
            assert expected_row in [shown_numbers(line) for line in output.splitlines() if row.title in line]
    check_latex(table.latex(detail))
    check_markdown(table.markdown(detail))


def markdown_cells(line: str) -> list[str]:
    assert line.startswith("| ")
    assert line.endswith(" |")
    parts = re.findall(r"(?:\\.|[^|\\])*", line[1:-1])
    cells = [part.strip() for part in parts[::2]]
    assert "|".join(parts[::2]) == line[1:-1]
    return [re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", part) for part in cells]


def check_markdown(markdown: str) -> list[list[str]]:
    lines = [markdown_cells(line) for line in markdown.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    assert re.fullmatch(r"(:---|---:)+", "".join(lines[1]))
    return lines


def test_markdown_marks_and_aligns() -> None:
    lines = small_table().markdown("both").splitlines()
    assert lines[0] == "### Fast"
    assert lines[2].startswith("| method | name | CIFAR-10<br>accuracy %<br>ours | CIFAR-10<br>accuracy %<br>paper |")
    assert lines[3] == "| :--- | :--- |" + " ---: |" * 7
    assert lines[5] == (
        r"| FeDLaS-LS | fedlas\_ls | *95.00* (1/3) | *94.87* | **1.29** (1/3) | **1.20** |  | **78.00** |  |"
    )
    assert lines[6] == "| LS | ls |" + "  |" * 7
    assert any(re.match("Bold: .*italic: ", line) for line in lines)


@given(st.text() | st.text(r"\|`*_<&[]#-+1. ", max_size=8))
def test_markdown_escapes_text_in_cells(text: str) -> None:
    markdown = table_with_text(text).markdown("full")
    lines = check_markdown(markdown)
    assert [line[:2] for line in lines[2:]] == [[printable(text)] * 2] * 2
    for line in markdown.splitlines():
        assert not re.match(r"\s|[-+=]|\d+[.)]|#(?!## )", line)
    assert not re.search(r"(?<!\\)(\\\\)*[<&](?!br>)", markdown)


def check_latex(latex: str) -> list[str]:
    """Check for syntax that TeX would reject; return the rows of the table."""
    unescaped = re.sub(r"\\[\\&%$#_{}]", "", latex)
    depth = 0
    for character in unescaped:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    assert not re.search(r"[%#_^~|<>\"]", unescaped)
    assert unescaped.count("$") % 2 == 0
    assert re.findall(r"\\begin\{(.*?)\}", latex) == re.findall(r"\\end\{(.*?)\}", latex)[::-1]
    assert "" not in latex.splitlines()[:-1]
    assert not re.search(r"\\(\\|[a-z]+rule(\{.*?\})?)\s*[\[*]", latex)
    spec = re.search(r"\\begin\{tabular\}\{(lr*)\}", latex)
    assert spec
    width = len(spec[1])
    rows = [line for line in latex.splitlines() if line.endswith(r" \\")]
    for row in rows:
        spans = [int(span) - 1 for span in re.findall(r"\\multicolumn\{(\d+)\}", row)]
        assert len(re.findall(r"(?<!\\)&", row)) + sum(spans) == width - 1
    for start, stop in re.findall(r"\\cmidrule\(lr\)\{(\d+)-(\d+)\}", latex):
        assert 1 < int(start) <= int(stop) <= width
    commands = set(re.findall(r"\\([a-zA-Z]+)", unescaped))
    assert commands <= {
        *("begin", "end", "centering", "caption", "label", "footnotesize", "scriptsize", "setlength", "tabcolsep"),
        *("toprule", "midrule", "bottomrule", "cmidrule", "multicolumn", "textbf", "underline", "pm", "par"),
        *("smallskip", "textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater", "textbar"),
        *("times", "alpha", "beta", "gamma", "theta", "lambda", "tau"),
    }
    return rows


def test_latex_has_the_rows_of_a_paper() -> None:
    latex = small_table().latex()
    rows = check_latex(latex)
    assert rows[0] == r"\multicolumn{1}{c}{} & \multicolumn{2}{c}{CIFAR-10} & \multicolumn{2}{c}{CIFAR-100} \\"
    assert r"\cmidrule(lr){2-3}\cmidrule(lr){4-5}" in latex
    assert rows[1] == r"Method & accuracy \% & ECE \% & accuracy \% & ECE \% \\"
    assert rows[2] == (
        r"CE & \textbf{95.07} $\pm$ 0.15 & \underline{5.78} $\pm$ 0.26 & 77.00 $\pm$ 0.00 & 12.60 $\pm$ 0.10 \\"
    )
    assert rows[3] == r"FeDLaS-LS & \underline{95.00} (1/3) & \textbf{1.29} (1/3) &  &  \\"
    assert latex.startswith("\\begin{table}[t]\n")
    assert r"\label{tab:small-fast}" in latex


def test_a_wide_latex_table_takes_both_columns_of_the_page() -> None:
    latex = small_table().latex("full")
    check_latex(latex)
    assert latex.startswith("\\begin{table*}[t]\n")
    assert r"$-$0.04 inside" in latex


def test_latex_escapes_special_characters() -> None:
    rows = check_latex(table_with_text(SPECIAL_CHARACTERS).latex("full"))
    assert rows[-1].startswith(
        r"50\% of \$x\_1\textasciicircum{}2\$ \{\#1\} \& \textasciitilde{}\textbackslash{}alpha \textbar{} "
        r"\textless{}b\textgreater{}''it's''\textless{}/b\textgreater{} {[}1{]} {*}s{*} `c` & "
    )
    assert r"$\theta$ $\pm$ $\times$" in table_with_text("θ ± ×").latex()


@given(st.text() | st.text('\\&%$#_{}~^[]*<>|"\n a', max_size=8))
def test_latex_is_valid_for_any_text(text: str) -> None:
    check_latex(table_with_text(text).latex("full"))


def test_row_without_a_paper_name_shows_its_own_name() -> None:
    table = Table("t", "", (Column("ECE %"),), (Row("my_loss", "", (Cell((0.1,)),)),))
    assert r"my\_loss & 10.00 \\" in table.latex()
    assert table.text().splitlines()[0].startswith("method")
    assert table.markdown().startswith("| method")


def test_csv_has_everything_as_fractions() -> None:
    text = small_table().csv()
    assert text.endswith("\r\n")
    assert text.count("\r\n") == text.count("\n") == 13
    lines = list(csv.DictReader(io.StringIO(text, newline="")))
    first, second, third, *_ = lines
    assert ",".join(first) == ("row,title,group,column,mean,spread,n,planned,low,high,paper,difference,inside_noise")
    cell = small_table().rows[0].cells[0]
    assert (float(first["mean"]), float(first["spread"])) == (cell.mean, cell.spread)
    assert (float(first["low"]), float(first["high"])) == cell.interval
    assert (float(first["paper"]), float(first["difference"])) == (cell.paper, cell.difference)
    assert (first["n"], first["planned"], first["inside_noise"]) == ("3", "3", "True")
    assert second["inside_noise"] == "False"
    assert (third["group"], third["low"], third["high"]) == ("CIFAR-100", "", "")
    last = lines[-1]
    assert (last.pop("row"), last.pop("title"), last.pop("group"), last.pop("column")) == (
        "ls", "LS", "CIFAR-100", "ECE %",
    )  # fmt: skip
    assert (last.pop("n"), last.pop("planned")) == ("0", "3")
    assert set(last.values()) == {""}


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "＝1", '=HYPERLINK("http://x";"y")', "\u200b=1"]
)
def test_csv_text_cannot_be_a_formula(text: str) -> None:
    for line in csv.DictReader(io.StringIO(table_with_text(text).csv(), newline="")):
        assert [line[name] for name in ("row", "title", "group", "column")] == [f"'{printable(text)}"] * 4


@given(st.text())
def test_csv_round_trips(text: str) -> None:
    lines = list(csv.DictReader(io.StringIO(table_with_text(text).csv(), newline=""), strict=True))
    assert len(lines) == 4
    for line in lines:
        assert line["row"].removeprefix("'") == printable(text).removeprefix("'")
        assert line["row"][:1] not in set("=+-@")


def test_save_writes_every_format(tmp_path: Path) -> None:
    table = small_table(title="Fäst")
    paths = table.save(tmp_path / "new")
    assert [path.name for path in paths] == [f"small-fast.{suffix}" for suffix in ("md", "tex", "csv", "txt")]
    contents = [path.read_bytes().decode() for path in paths]
    expected_contents = [
        table.markdown("both"),
        table.latex("both"),
        table.csv(),
        table.text("both"),
    ]
    assert contents == expected_contents
    assert sorted((tmp_path / "new").iterdir()) == sorted(paths)
    (text_path,) = table.save(str(tmp_path / "new"), ("txt",), detail="full")
    assert text_path.read_text(encoding="utf-8") == table.text("full")


def test_save_with_an_unknown_format_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"docx.* md, tex"):
        small_table().save(tmp_path, ("md", "docx"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "-x", "x\n", "ä", 'x"y'])
def test_table_name_that_is_not_a_file_name_raises(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        small_table(name=name)


def test_row_with_missing_cells_raises() -> None:
    with pytest.raises(ValueError, match=r"ce .*1 cells .*4 columns"):
        small_table(rows=(Row("ce", "CE", (Cell(),)),))


def test_unknown_detail_raises() -> None:
    # The annotation raises TypeError with the shape checks of the tests; without them the table raises ValueError.
    with pytest.raises((ValueError, TypeError), match="brief"):
        small_table().text(cast("Any", "brief"))


@pytest.mark.parametrize("table", [Table("t", "", (), ()), small_table(rows=()), small_table(notes=())])
def test_empty_table_has_every_format(table: Table) -> None:
    for detail in DETAILS:
        check_latex(table.latex(detail))
        check_markdown(table.markdown(detail))
        assert "method" in table.text(detail)
        assert table.csv().startswith("row,title")


def test_mean_ranks_equal_those_of_the_paper() -> None:
    ranked = mean_rank_columns(paper_table(), ["ECE %"])
    assert ranked.columns[3].group == "Mean rank"
    assert [row.cells[3].values for row in ranked.rows] == [()] * 7
    for row, (_, ranks) in zip(ranked.rows, PAPER_ECE.values(), strict=True):
        assert row.cells[3].paper == pytest.approx(sum(ranks) / 3)
    assert ranked.marks()[3].paper == Mark((5,), (6,))


def test_mean_ranks_use_rounded_values_of_complete_rows() -> None:
    columns = (Column("ECE %", "a"), Column("acc", "a", higher_is_better=True), Column("ECE %", "b"))
    our_values = [(0.01004, 0.9, 0.02), (0.00996, 0.8, 0.01), (0.5, 0.95, None), (0.03, 0.7, 0.03)]
    paper_values = [(0.01, 0.9, 0.02), (0.02, 0.8, 0.01), (0.03, 0.7, 0.03), (None, 0.6, 0.04)]
    rows = tuple(
        Row("ce", "CE", tuple(Cell(() if o is None else (o,), (), p) for o, p in zip(a, b, strict=True)))
        for a, b in zip(our_values, paper_values, strict=True)
    )
    table = mean_rank_columns(Table("t", "T", columns, rows), ["ECE %", "acc"])
    assert [(column.name, column.group) for column in table.columns[3:]] == [("ECE", "Mean rank"), ("acc", "Mean rank")]
    assert [row.cells[3].mean for row in table.rows] == [1.5, 1.0, None, 3.0]  # 1.00 and 1.00 share a rank
    assert [row.cells[3].paper for row in table.rows] == [1.5, 1.5, 3.0, None]
    assert [row.cells[4].mean for row in table.rows] == [2.0, 3.0, 1.0, 4.0]
    assert not table.columns[3].compared
    assert table.columns[4].compared
    assert re.search("3 rows.* 3 ", table.notes[0])
    assert "rows" not in table.notes[1]
    assert [line["difference"] for line in csv.DictReader(io.StringIO(table.csv()))][3::5] == [""] * 4
    assert table.text("full").splitlines()[3].split()[-5:] == ["ours", "paper", "ours", "paper", "difference"]
    ranked_twice = mean_rank_columns(table, ["acc"])  # columns of ranks are not ranked, although one is called "acc"
    assert [row.cells[5] for row in ranked_twice.rows] == [row.cells[4] for row in ranked_twice.rows]
    assert re.search(r"columns.*: 1\)", ranked_twice.notes[-1])


def test_mean_ranks_ignore_floating_point_noise() -> None:
    assert 0.1 + 0.2 != 0.3
    table = mean_rank_columns(one_column(Cell(paper=0.3), Cell(paper=0.1 + 0.2)), ["ECE %"])
    assert [row.cells[1].paper for row in table.rows] == [1.0, 1.0]


def test_single_row_has_no_mean_rank() -> None:
    table = mean_rank_columns(one_column(Cell((0.1,), (), 0.2), Cell()), ["ECE %"])
    assert [row.cells[1] for row in table.rows] == [Cell(), Cell()]


def test_mean_ranks_of_unknown_columns_raise() -> None:
    with pytest.raises(ValueError, match=r"'AECE %'.* ECE %"):
        mean_rank_columns(paper_table(), ["AECE %"])
