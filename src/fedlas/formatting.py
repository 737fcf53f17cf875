"""Numbers and plain tables as text: the only module that rounds results. `report/page/format.js` has the same rules.

A number with a confidence interval is shown up to the digit at which the half-width of the interval has its second
significant digit; the ends of the interval get as many decimals. A number without an interval has a fixed number of
decimals: 2 for percentages, 3 for anything else. Ties are rounded to even.

The module imports nothing from the package.
"""

import html
import math
from collections.abc import Sequence
from decimal import Decimal

PERCENT_DECIMALS, PLAIN_DECIMALS = 2, 3
MOST_DECIMALS = 8
LARGE = 1e6  # larger numbers are written with an exponent
SMALLEST_P = 0.001
# After `\\`, TeX parses `[` and `*` as arguments; the OT1 font encoding shows other characters for `<`, `>` and `|`.
LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {sign: f"{{{sign}}}" for sign in "[]*"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", '"': "''"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "−": "$-$", "±": r"$\pm$", "×": r"$\times$"}
    | {"α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "θ": r"$\theta$", "λ": r"$\lambda$", "τ": r"$\tau$"}
)


def decimals(low: float | None = None, high: float | None = None, *, percent: bool = True) -> int:
    """Return the number of decimals that the confidence interval of a number justifies.

    Args:
        low: lower end of the interval; None without an interval.
        high: upper end of the interval.
        percent: whether the number is a fraction that is shown as a percentage.
    """
    half_width = 0.0 if low is None or high is None else (high - low) / 2 * (100 if percent else 1)
    if not 0 < half_width < math.inf:
        return PERCENT_DECIMALS if percent else PLAIN_DECIMALS
    exponent = int(f"{half_width:.1e}".partition("e")[2])
    return min(MOST_DECIMALS, max(0, 1 - exponent))


def fixed(value: float, digits: int, sign: str = "") -> str:
    """Round to a number of decimals, without negative zero; `sign="+"` writes a plus sign too."""
    return f"{float(value):{sign}z.{digits}f}"


def number(value: float, low: float | None = None, high: float | None = None, *, percent: bool = True) -> str:
    """Write a number without its unit, with as many decimals as its confidence interval allows."""
    return _write(value, decimals(low, high, percent=percent), percent)


def cell(value: float, low: float | None = None, high: float | None = None, *, percent: bool = True) -> str:
    """Write a number and its confidence interval for a table whose heading has the unit, such as 1.9 [1.6, 2.3]."""
    digits = decimals(low, high, percent=percent)
    around = (
        "" if low is None or high is None else f" [{_write(low, digits, percent)}, {_write(high, digits, percent)}]"
    )
    return _write(value, digits, percent) + around


def difference(value: float, low: float, high: float, *, percent: bool = True) -> tuple[str, str]:
    """Write a signed difference and its confidence interval; differences of percentages are in points."""
    digits, unit = decimals(low, high, percent=percent), 100 if percent else 1
    ends = ", ".join(fixed(unit * end, digits, "+") for end in (low, high))
    return fixed(unit * value, digits, "+"), f"[{ends}]"


def percent(fraction: float, low: float | None = None, high: float | None = None) -> str:
    """Write a fraction as a percentage, rounded by its confidence interval."""
    return f"{number(fraction, low, high)} %"


def interval(low: float, high: float) -> str:
    """Write a confidence interval of a fraction, such as 1.6 to 2.3 %."""
    return f"{number(low, low, high)} to {percent(high, low, high)}"


def probability(fraction: float) -> str:
    """Write a probability of a model; it is never shown as 0 or 1."""
    if fraction > 0.9999:
        return "> 99.99 %"
    if fraction < 0.0001:
        return "< 0.01 %"
    return f"{fixed(100 * fraction, 2 if fraction > 0.99 or fraction < 0.01 else 1)} %"


def count(value: float) -> str:
    """Write a number of samples or classes, with commas; sums of soft labels have one decimal."""
    return f"{float(value):,.{0 if float(f'{value:.1f}').is_integer() else 1}f}"


def significant(value: float, digits: int = 3) -> str:
    """Write a number with some significant digits, without trailing zeros and without an exponent."""
    return f"{Decimal(f'{float(value):.{digits}g}') + 0:f}"


def edge(value: float) -> str:
    """Write the edge of a bin of confidence; edges near 1 need more digits."""
    return significant(value, 5 if value > 0.99 else 3)


def p_value(value: float, *, is_bound: bool = False) -> str:
    """Write a p-value with its relation, such as p = 0.012 or p < 0.001; with `is_bound` as a bound, p < 0.003."""
    if value < SMALLEST_P or (is_bound and value < 1):
        return f"p < {fixed(max(SMALLEST_P, math.ceil(1000 * value) / 1000), 3)}"
    return f"p = {fixed(value, 3)}"


def p_value_cell(value: float, *, is_bound: bool = False) -> str:
    """Write a p-value for a table whose heading has its name, such as 0.012 or < 0.001."""
    return p_value(value, is_bound=is_bound).removeprefix("p ").removeprefix("= ")


def level(value: float) -> str:
    """Write a confidence level, such as 95 %."""
    return f"{significant(100 * value, 4)} %"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of strings as lines with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def html_table(rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Format rows of strings as an HTML table; the first row is the header, and all text is escaped."""
    cells = [[html.escape(cell) for cell in row] for row in rows]
    head = "".join(f'<th scope="col">{cell}</th>' for cell in cells[0])
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells[1:])
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def latex_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a LaTeX tabular; in `rows`, only the first column is escaped, the others must be LaTeX."""
    body = [[escape_latex(row[0]), *row[1:]] for row in rows]
    lines = [" & ".join(cells) + r" \\" for cells in [[escape_latex(cell) for cell in head], *body]]
    columns = "l" + "r" * (len(head) - 1)
    return "\n".join(
        [rf"\begin{{tabular}}{{{columns}}}", r"\hline", lines[0], r"\hline", *lines[1:], r"\hline", r"\end{tabular}"]
    )


def escape_latex(text: str) -> str:
    """Escape text for LaTeX."""
    return text.translate(LATEX)


def _write(value: float, digits: int, percent: bool) -> str:
    scaled = 100 * value if percent else value
    return fixed(scaled, digits) if abs(scaled) < LARGE else f"{float(scaled):.4g}"
