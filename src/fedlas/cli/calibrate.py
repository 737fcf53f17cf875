"""`fedlas calibrate`: fit a calibrator, or apply one to predictions."""

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlas.cli.errors import one_line_errors
from fedlas.cli.options import parse_settings, with_columns
from fedlas.cli.output_paths import Overwrite, check_outputs
from fedlas.cli.terminal import progress, show
from fedlas.errors import UserError


@with_columns
def calibrate_fit(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Predictions with labels, on samples that are not used for evaluation."),
    ],
    out: Annotated[Path, typer.Option(help="Output file (.safetensors).")],
    posthoc: Annotated[str, typer.Option(help="Calibrator; see: fedlas list calibrators")] = "temperature",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEYWORD=VALUE", help="Set an option of the calibrator; may be repeated."),
    ] = None,
    overwrite: Overwrite = False,
    *,
    columns: Any,
) -> None:
    """Fit a calibrator to predictions with labels, and save it."""
    with one_line_errors():
        from fedlas.io import read_predictions, require_labels
        from fedlas.metrics import nll
        from fedlas.posthoc import build_calibrator
        from fedlas.posthoc.base import DoubtfulFit
        from fedlas.training.recipe_text import value_of

        if out.suffix.lower() != ".safetensors":
            raise UserError(f"--out {out}: a calibrator needs a .safetensors file")
        check_outputs([out], overwrite=overwrite, inputs=[file])
        options = {name: value_of(text) for name, text in parse_settings(settings).items()}
        calibrator = build_calibrator(posthoc, **options)
        with progress() as report:
            predictions = require_labels(read_predictions(file, progress=report, **columns), file)
            report(f"fitting {posthoc}", 0.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DoubtfulFit)  # shown below
                calibrator.fit(predictions)
            report(f"fitting {posthoc}", 1.0)
            calibrator.save(out)
        titles = {"standard_error": "standard error of the log-temperature"}
        scalars = {name: value for name, value in calibrator.learned.items() if value.numel() == 1}
        parameters = [f"{titles.get(name, name)} {float(value):.4g}" for name, value in scalars.items()]
        zeros = int(nll(predictions).details["floored"])
        if zeros:
            labels = f"{zeros:,} {'label has' if zeros == 1 else 'labels have'} probability zero"
            advice = "give logits, or probabilities with more digits"
            show(f"warning: {labels}, whose logarithm is unknown: {advice}", err=True)
        fit = calibrator.fitted
        change = [] if fit is None else [f"NLL {fit.before:.4g} before, {fit.after:.4g} after, on {fit.n:,} samples"]
        show(f"{posthoc}: {', '.join([*parameters, *change])}", err=True)
        if fit is not None and fit.doubt:
            show(f"warning: {out} is written, but the fit is unreliable: {fit.doubt}", err=True)
        show(out)


@with_columns
def calibrate_apply(
    calibrator: Annotated[
        Path, typer.Argument(metavar="CALIBRATOR", help="Calibrator written by `fedlas calibrate fit`.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Predictions to calibrate; labels are not needed.")],
    out: Annotated[Path, typer.Option(help="Output file (.safetensors, .npz, .csv, .parquet or .jsonl).")],
    probs: Annotated[bool, typer.Option("--probs", help="Write probabilities instead of logits.")] = False,
    overwrite: Overwrite = False,
    *,
    columns: Any,
) -> None:
    """Apply a saved calibrator to predictions."""
    with one_line_errors():
        from fedlas.io import check_suffix, read_predictions, write_predictions
        from fedlas.posthoc import load_calibrator

        check_suffix(out)
        check_outputs([out], overwrite=overwrite, inputs=[calibrator, file])
        with progress() as report:
            loaded = load_calibrator(calibrator)
            predictions: Any = read_predictions(file, progress=report, **columns)
            # If the input has probabilities, write probabilities.
            write_predictions(loaded.transform(predictions), out, probs=probs or predictions.given_probs is not None)
        if predictions.columns is not None and predictions.columns.unread:
            show(f"columns that are not written: {', '.join(predictions.columns.unread)}", err=True)
        if loaded.fitted is not None and loaded.fitted.doubt:
            show(f"warning: the fit of {calibrator} is unreliable: {loaded.fitted.doubt}", err=True)
        if loaded.was_fitted_on(predictions):
            show(f"warning: {calibrator} was fitted on the samples of {file}: its metrics are optimistic", err=True)
        show(out)
