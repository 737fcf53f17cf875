"""`fedlas calibrate`: fit a calibrator on one file, and apply it to another."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlas.cli.endings import one_line_errors
from fedlas.cli.options import parsed, with_columns
from fedlas.cli.places import check_places, read_file, refuse_other_kind, refuse_own_input
from fedlas.cli.terminal import progress, show
from fedlas.errors import UserError


@with_columns
def calibrate_fit(
    file: Annotated[Path, typer.Argument(help="Predictions with labels, on samples that are not evaluated.")],
    out: Annotated[Path, typer.Option(help="File of the calibrator: .safetensors.")],
    posthoc: Annotated[str, typer.Option(help="The calibrator; see: fedlas list calibrators")] = "temperature",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEYWORD=VALUE", help="A keyword of the calibrator.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a calibrator that is there.")] = False,
    *,
    columns: Any,
) -> None:
    """Fit a calibrator, and save it."""
    with one_line_errors():
        from fedlas.io import require_labels
        from fedlas.metrics import nll as loss_of
        from fedlas.posthoc import build_calibrator, load_calibrator
        from fedlas.posthoc.base import DoubtfulFit
        from fedlas.training.recipe_text import value_of

        if out.suffix.lower() != ".safetensors":
            raise UserError(f"--out {out}: a calibrator is saved as a .safetensors file")
        check_places([out])
        refuse_own_input([file], [out])
        refuse_other_kind(out, "calibrator", load_calibrator)
        held = load_calibrator(out) if not overwrite and out.is_file() and out.stat().st_size else None
        options = {name: value_of(text) for name, text in parsed(settings).items()}
        calibrator = build_calibrator(posthoc, **options)
        if held is not None and (held.name, held.options) != (calibrator.name, calibrator.options):
            raise _calibrator_exists(out)
        with progress() as report:
            given = require_labels(read_file(file, report, columns), file)
            report(f"fitting {posthoc}", 0.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DoubtfulFit)  # shown below
                calibrator.fit(given)
            report(f"fitting {posthoc}", 1.0)
            if held is not None and not _same_numbers(held.learned, calibrator.learned):
                raise _calibrator_exists(out)
            calibrator.save(out)
        words = {"standard_error": "standard error of its logarithm"}
        numbers = {name: value for name, value in calibrator.learned.items() if value.numel() == 1}
        learned = [f"{words.get(name, name)} {float(value):.4g}" for name, value in numbers.items()]
        zeros = int(loss_of(given).details["floored"])
        if zeros:
            few = f"{zeros:,} {'label has' if zeros == 1 else 'labels have'} probability zero"
            advice = "give logits, or probabilities with more digits"
            show(f"warning: {few}, whose logarithm is unknown: {advice}", err=True)
        fit = calibrator.fitted
        nll = [] if fit is None else [f"NLL {fit.before:.4g} before, {fit.after:.4g} after, on {fit.n:,} samples"]
        show(f"{posthoc}: {', '.join([*learned, *nll])}", err=True)
        if fit is not None and fit.doubt:
            show(f"warning: {out} is written, but do not rely on it: {fit.doubt}", err=True)
        show(out)


def _calibrator_exists(out: Path) -> FileExistsError:
    return FileExistsError(f"{out} holds another calibrator; give --overwrite to replace it, or name another file")


def _same_numbers(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Return whether two calibrators have equal parameters."""
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name].cpu()) for name in ours)


@with_columns
def calibrate_apply(
    calibrator: Annotated[Path, typer.Argument(help="A file that `fedlas calibrate fit` wrote.")],
    file: Annotated[Path, typer.Argument(help="Predictions to calibrate; labels are not needed.")],
    out: Annotated[Path, typer.Option(help="Output file: .safetensors, .npz, .csv, .parquet or .jsonl.")],
    probs: Annotated[bool, typer.Option("--probs", help="Write probabilities, not logits.")] = False,
    *,
    columns: Any,
) -> None:
    """Apply a saved calibrator to predictions."""
    with one_line_errors():
        from fedlas.io import check_suffix, read_existing, write_if_same
        from fedlas.posthoc import load_calibrator

        check_suffix(out)
        check_places([out])
        refuse_own_input([calibrator, file], [out])
        refuse_other_kind(out, "file of predictions", read_existing)
        with progress() as report:
            learned = load_calibrator(calibrator)
            given = read_file(file, report, columns)
            calibrated = learned.transform(given)
            # A table of probabilities becomes another one.
            write_if_same(calibrated, out, read_existing(out), probs=probs or given.given_probs is not None)
        if learned.fitted is not None and learned.fitted.doubt:
            show(f"warning: do not rely on predictions calibrated by {calibrator}: {learned.fitted.doubt}", err=True)
        show(out)
