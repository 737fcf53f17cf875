"""Run the main features in one process and print the results as JSON, which must be equal in every environment.

    python tests/faults/tour.py FOLDER [--start-method spawn]

`test_environment.py` starts it in unusual folders, with other locales, without a terminal or without asserts.
"""

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "training")]

import torch  # noqa: E402

NAMES = ("Katze", "köttur", "猫")
RESAMPLES = 100  # few bootstrap resamples suffice to compare intervals


ONLY_ASCII: list[bool] = []


def file_name(name: str) -> str:
    """Return a file name, with non-ASCII letters only if the environment supports them."""
    return name.encode("ascii", "ignore").decode() if ONLY_ASCII else name


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def table(folder: Path) -> dict[str, Any]:
    """Write a CSV like a Windows spreadsheet: byte order mark, CRLF line ends, Unicode."""
    import fedlas

    rows = [",".join([*(f"prob_{name}" for name in NAMES), "label"])]
    rows += [f"0.{a},0.{b},0.{8 - a - b + 2},{NAMES[(a + b) % 3]}" for a in range(1, 5) for b in range(1, 5)]
    path = folder / file_name("from Excel – ü.csv")
    path.write_bytes(("\ufeff" + "\r\n".join(rows) + "\r\n").encode())
    predictions = fedlas.read_predictions(path)
    report = fedlas.evaluate(predictions, seed=0, resamples=RESAMPLES)
    copies = [folder / file_name(f"again ü{suffix}") for suffix in (".csv", ".parquet")]
    for copy in copies:
        fedlas.write_predictions(predictions, copy)
    copied = [fedlas.read_predictions(copy) for copy in copies]
    return {
        "classes": list(predictions.class_names or ()),
        "copies_equal": [
            torch.equal(item.labels, predictions.labels) and item.class_names == predictions.class_names
            for item in copied
        ],
        "report": digest(report.to_json().replace(str(folder), "").encode()),
    }


def training(folder: Path) -> dict[str, Any]:
    """Train, record the run in a ledger, and return its values."""
    from runs_of import log_without_times, prediction_bytes, short

    import fedlas
    from fedlas.experiments import stored_predictions
    from fedlas.experiments.ledger import Ledger
    from fedlas.metrics.base import Resampling

    stored_predictions.Resampling = partial(Resampling, resamples=RESAMPLES)
    run = fedlas.fit(short("fedlas_ls", epochs=2), out=folder / file_name("Lauf Nr. 1 – 跑"))
    ledger = Ledger(folder / file_name("Büro"))
    stored_predictions.record(run, "small", ledger)
    predictions = {"köttur": run.predictions("best-test")}
    page = fedlas.save_page(predictions, folder / file_name("Seite ü.html"), resamples=RESAMPLES)
    return {
        "predictions": {name: digest(content) for name, content in prediction_bytes(run).items()},
        "log": digest(json.dumps(log_without_times(run)).encode()),
        "ece": [line.metrics["ece"] for line in ledger.lines.values()],
        "problems": list(stored_predictions.problems(ledger)),
        "page": "köttur".encode() in page.read_bytes() or b"k\\u00f6ttur" in page.read_bytes(),
    }


def figures(folder: Path) -> dict[str, Any]:
    """Draw figures of the table with its class names."""
    import fedlas

    predictions = {"köttur": fedlas.read_predictions(folder / file_name("from Excel – ü.csv"))}
    paths = fedlas.save_figures(predictions, folder / file_name("Bilder ü"), ("svg",), resamples=20)
    return {"files": sorted(path.name for path in paths)}


def images(folder: Path) -> dict[str, Any]:
    """Load images in a worker process from folders with unusual names."""
    from runs_of import large, natural_images

    import fedlas

    image_folder = natural_images(folder / file_name("Fotos ü"), 10)
    (image_folder / "owl").rename(image_folder / file_name("owl – 梟"))
    run = fedlas.fit(large(image_folder, "ce", epochs=1, workers=1), out=folder / "images")
    return {name: digest(run.predictions(name).logits.numpy().tobytes()) for name in ("best-test", "last-val")}


def command_line(folder: Path) -> dict[str, Any]:
    """Run commands that succeed and commands that fail."""
    from fedlas import cli

    result: dict[str, Any] = {}
    commands = {
        "evaluate": ["evaluate", str(folder / file_name("from Excel – ü.csv")), "--resamples", str(RESAMPLES)],
        "missing": ["evaluate", str(folder / file_name("nicht da ü.csv"))],
        "list": ["list", "losses"],
    }
    for name, arguments in commands.items():
        sys.argv = ["fedlas", *arguments]
        encoding = getattr(sys.stdout, "encoding", "utf-8")  # a closed stream has none
        stream, code = io.TextIOWrapper(io.BytesIO(), encoding, getattr(sys.stdout, "errors", "strict")), 0
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            try:
                cli.main()
            except SystemExit as end:
                code = int(end.code or 0)
        stream.flush()
        text = stream.buffer.getvalue().decode(errors="replace")  # type: ignore[attr-defined]
        result[name] = {"code": code, "traceback": "Traceback" in text, "something": bool(text.strip())}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--start-method")
    parser.add_argument("--ascii", action="store_true", help="names of files that ASCII can write")
    arguments = parser.parse_args()
    if arguments.start_method:
        multiprocessing.set_start_method(arguments.start_method)
    torch.set_num_threads(1)
    ONLY_ASCII.extend([True] * arguments.ascii)
    folder = arguments.folder / file_name("Mein Ordner – 我的 folder")
    folder.mkdir(parents=True)
    steps = [table, training, command_line, figures, images]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        result = {step.__name__: step(folder) for step in steps}
    (arguments.folder / "results.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
