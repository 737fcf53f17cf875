"""Downloads of the report page: JSON of all data, CSV of the tables, SVG and PNG of the charts."""

import csv
import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from report import pages

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def download(open_tab: Any, three_model_page: Path, tmp_path: Path) -> Any:
    """Return a function that clicks a download button and returns the name and content of the file."""
    tab = open_tab(three_model_page, accept_downloads=True)

    def click(selector: str) -> tuple[str, bytes]:
        with tab.page.expect_download() as download_info:
            tab.page.locator(selector).first.click()
        download_info.value.save_as(tmp_path / "file")
        return download_info.value.suggested_filename, (tmp_path / "file").read_bytes()

    click.data = tab.data()
    return click


def rows_of(content: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(content.decode("utf-8"), newline="")))


def test_all_data_and_metrics_are_downloaded_at_full_precision(download):
    name, content = download("#summary-downloads button[aria-label^='Download JSON']")
    assert name == "three-models.json"
    assert json.loads(content) == download.data
    name, content = download("#summary-downloads button[aria-label^='Download CSV']")
    assert name == "metrics.csv"
    rows = rows_of(content)
    first = next(row for row in rows if row["metric"] == "ece")
    expected = download.data["models"][0]["states"][0]["results"]["ece"]
    assert [float(first[key]) for key in ("value", "low", "high")] == [
        expected[key] for key in ("value", "low", "high")
    ]
    assert {row["model"] for row in rows} == {"sure", "unsure", "other"}


def test_every_table_is_downloaded(download):
    model = download.data["models"][0]
    rows = rows_of(download("#slice-table button")[1])
    assert [float(row["harm"]) for row in rows] == [row[7] for row in model["slices"]["rows"]]
    rows = rows_of(download("#confusion-tables button")[1])
    assert [int(row["samples"]) for row in rows] == [row[2] for row in model["confusions"]["by_count"]]
    assert rows[0]["label"] in pages.CIFAR10
    rows = rows_of(download("#class-downloads button")[1])
    assert [float(row["weight"]) for row in rows] == model["class_table"]["weight"]
    rows = rows_of(download("#sample-downloads button")[1])
    assert [(row["kind"], row["id"]) for row in rows if row["kind"] == "over-confident"] == [
        ("over-confident", sample["id"]) for sample in model["samples"]["over"]
    ]
    rows = rows_of(download("#comparison-tests button")[1])
    assert len(rows) == len(download.data["comparison"]["tests"])


def test_charts_are_downloaded_as_standalone_svg_and_png(download):
    chart = "#reliability-diagrams .downloads button"
    name, content = download(f"{chart}:text-is('SVG')")
    assert name == "uncalibrated.svg"
    root = ElementTree.fromstring(content)
    assert root.tag == f"{SVG}svg"
    assert root.find(f"{SVG}title").text == "Uncalibrated"
    shapes = [element for element in root.iter(f"{SVG}rect") if element.get("fill", "").startswith("rgb")]
    assert len(shapes) > 10
    assert {element.get("id") for element in root.iter(f"{SVG}pattern")} == {"hatch-over", "hatch-under"}
    assert b"class=" not in content
    name, content = download(f"{chart}:text-is('PNG')")
    assert name == "uncalibrated.png"
    assert content.startswith(b"\x89PNG")
    rows = rows_of(download(f"{chart}:text-is('CSV')")[1])
    bins = download.data["models"][0]["states"][0]["diagrams"]["width"]["bins"]
    assert [int(row["Samples"]) for row in rows] == [row[2] for row in bins]


def test_csv_downloads_quote_text_and_contain_no_formulas(modules):
    text = modules.evaluate(
        """async () => (await import("/csv.js")).csvText(
            ["a", "b"], [["=1+1", 'say "x", y'], ["-5", -0.1], [null, "line\\nbreak"], ["@sum", true]])"""
    )
    assert list(csv.reader(io.StringIO(text, newline=""))) == [
        ["a", "b"], ["'=1+1", 'say "x", y'], ["-5", "-0.1"], ["", "line\nbreak"], ["'@sum", "true"],
    ]  # fmt: skip
