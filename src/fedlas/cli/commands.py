"""All commands, in the order in which `fedlas --help` lists them."""

import os
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from fedlas.cli.calibration import calibrate_apply, calibrate_fit
from fedlas.cli.catalogue import list_catalogue
from fedlas.cli.endings import interrupted, plain_warning
from fedlas.cli.evaluation import detect_ood, evaluate_command
from fedlas.cli.paper import compare_models, demo_run, reproduce_experiment
from fedlas.cli.training import predict_run, search_options, train_run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train classifiers that say what they know, and measure whether they do.",
)


def tell_version(asked: bool) -> bool:
    """Say which version this is, and nothing else."""
    if asked:
        try:
            typer.echo(f"fedlas {metadata.version('fedlas')}")
        except metadata.PackageNotFoundError:
            typer.echo("fedlas, from its sources: it is not installed")
        raise typer.Exit
    return asked


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=tell_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Take the options that come before any command."""


calibrate = typer.Typer(no_args_is_help=True, help="Fit a calibrator on predictions, and apply it to others.")
app.command("train")(train_run)
app.command("predict")(predict_run)
app.command("list")(list_catalogue)
app.command("demo")(demo_run)
app.command("reproduce")(reproduce_experiment)
app.command("evaluate")(evaluate_command)
app.add_typer(calibrate, name="calibrate")
calibrate.command("fit")(calibrate_fit)
calibrate.command("apply")(calibrate_apply)
app.command("ood")(detect_ood)
app.command("compare")(compare_models)
app.command("search")(search_options)


def main() -> None:
    """Run the command line."""
    warnings.formatwarning = plain_warning
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for as long as it runs
    try:
        app(prog_name="fedlas")
    except KeyboardInterrupt:
        sys.exit(interrupted())
