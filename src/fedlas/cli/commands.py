"""All commands, in the order in which `fedlas --help` lists them."""

import os
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from fedlas.cli.calibrate import calibrate_apply, calibrate_fit
from fedlas.cli.catalogue import list_catalogue
from fedlas.cli.compare import compare_models
from fedlas.cli.errors import format_warning, report_interrupt
from fedlas.cli.evaluation import detect_ood, evaluate_command
from fedlas.cli.reproduce import demo_run, reproduce_experiment
from fedlas.cli.terminal import configure_logging
from fedlas.cli.training import predict_run, search_options, train_run

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train calibrated classifiers and evaluate the calibration of any classifier.",
    epilog="Example: fedlas evaluate predictions.csv",
)


def print_version(requested: bool) -> bool:
    """Print the version and exit, if requested."""
    if requested:
        try:
            typer.echo(f"fedlas {metadata.version('fedlas')}")
        except metadata.PackageNotFoundError:
            typer.echo("fedlas, from its sources: it is not installed")
        raise typer.Exit
    return requested


@app.callback()
def common(
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print results, warnings and errors only.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print debug messages and the traceback of every error.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Apply the options that come before any command."""
    del version  # handled by its callback
    if quiet and verbose:
        raise typer.BadParameter("give --quiet or --verbose, not both")
    configure_logging(quiet=quiet, verbose=verbose)


calibrate = typer.Typer(
    no_args_is_help=True,
    help="Fit a calibrator, or apply one to predictions.",
    epilog="Example: fedlas calibrate fit val.csv --out temperature.safetensors",
)
app.command("evaluate", epilog="Example: fedlas evaluate test.csv --calibration val.csv --html report.html")(
    evaluate_command
)
app.command("compare", epilog="Example: fedlas compare runs/ce runs/fedlas_ls --metrics ece,nll")(compare_models)
app.command("ood", epilog="Example: fedlas ood test.csv svhn=svhn.csv")(detect_ood)
app.command("train", epilog="Example: fedlas train --data cifar10 --loss fedlas_ls --protocol fast")(train_run)
app.command("predict", epilog="Example: fedlas predict runs/mine --data svhn")(predict_run)
app.command(
    "search", epilog="Example: fedlas search --data cifar10 --loss fedlas_ls --protocol fast --over beta=0.5:8:log"
)(search_options)
app.command("reproduce", epilog="Example: fedlas reproduce sota --data cifar10 --protocol fast --dry-run")(
    reproduce_experiment
)
app.command("demo", epilog="Example: fedlas demo --out runs/demo")(demo_run)
app.command("list", epilog="Example: fedlas list losses")(list_catalogue)
app.add_typer(calibrate, name="calibrate")
calibrate.command("fit", epilog="Example: fedlas calibrate fit val.csv --out temperature.safetensors")(calibrate_fit)
calibrate.command(
    "apply", epilog="Example: fedlas calibrate apply temperature.safetensors test.csv --out calibrated.csv"
)(calibrate_apply)


def main() -> None:
    """Run the command line."""
    warnings.formatwarning = format_warning
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for as long as it runs
    try:
        app(prog_name="fedlas")
    except KeyboardInterrupt:
        sys.exit(report_interrupt())
