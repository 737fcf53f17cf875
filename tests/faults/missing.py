"""Campaign on missing packages: features that need one raise with the install command, and all others work.

    python tests/faults/missing.py             # remove each package and try what needs it
    python tests/faults/missing.py --extras    # remove the packages of each extra and try everything

The packages are those of the extras in pyproject.toml. A package is hidden by an import finder in a forked child, so
the environment is not changed and torch is imported only once.
"""

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import fedlas
from fedlas.io import write_predictions
from fedlas.predictions import Predictions

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"[A-Za-z0-9_.-]+")
DISTRIBUTIONS = packages_distributions()  # computed once, because it reads a file of each package
OTHER_NAMES = {"lightning": ("pytorch-lightning",)}  # alternative distributions


class Without:
    """An import finder that hides some packages, as if they were not installed."""

    def __init__(self, finder: Any, names: Sequence[str]) -> None:
        self.finder, self.names = finder, set(names)
        self.packages = {normal(item) for name in names for item in DISTRIBUTIONS.get(name, ())}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in self.names:
            return None
        return self.finder.find_spec(fullname, path, target)

    def find_distributions(self, *arguments: Any) -> Iterator[Any]:
        """Return distributions for `importlib.metadata`, except hidden ones."""
        result = getattr(self.finder, "find_distributions", lambda *_: ())(*arguments)
        return (item for item in result if normal(item.metadata["Name"]) not in self.packages)


def extras() -> dict[str, set[str]]:
    """Return the packages of every user-facing extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        extra: {normal(item) for item in requirements}
        for extra, requirements in project["optional-dependencies"].items()
        if extra not in ("all", "dev", "fuzz")
    }


def normal(requirement: str) -> str:
    """Return the normalised package name of a requirement."""
    result = NAME.match(requirement)
    assert result is not None, requirement
    return re.sub(r"[-_.]+", "-", result[0]).lower()


def modules(package: str) -> list[str]:
    """Return the import names of a package."""
    names = {package, *OTHER_NAMES.get(package, ())}
    return [name for name, distributions in DISTRIBUTIONS.items() if names & {normal(item) for item in distributions}]


def installs_package(extra: str, package: str) -> bool:
    """Return whether an extra installs a package, directly or as a dependency."""
    requirements = extras().get(extra, set())
    return package in requirements or any(
        package in {normal(name) for name in requires(item) or ()} for item in requirements
    )


def sample_predictions() -> Predictions:
    """Return predictions of 60 samples in 3 classes."""
    labels = torch.arange(60) % 3
    return Predictions(torch.randn(60, 3) + 2 * torch.eye(3)[labels], labels)


def digits() -> Any:
    return fedlas.recipe_for("digits", epochs=1, batch_size=50, data_options={"train_samples": 50})


def command_line(folder: Path) -> None:
    write_predictions(sample_predictions(), folder / "p.safetensors")
    sys.argv = ["fedlas", "evaluate", str(folder / "p.safetensors")]
    try:
        import_module("fedlas.__main__").main()
    except SystemExit as end:
        if end.code:
            raise ImportError(str(end.code)) from end


def progress_bar(folder: Path) -> None:
    fedlas.fit(digits(), out=folder / "run", progress=True)


def onnx(folder: Path) -> None:
    export = import_module("fedlas.integrations.export")
    model = export.CalibratedModel(
        torch.nn.Linear(4, 3), fedlas.build_calibrator("temperature").fit(sample_predictions())
    )
    export.save_onnx(model, torch.randn(1, 4), folder / "net.onnx")


def search(folder: Path) -> None:
    module = import_module("fedlas.experiments.search")
    ranges = [module.Range.parse("alpha=0.01:0.1")]
    module.search(digits().replace(loss="ls"), ranges, trials=1, folder=folder)


def trainer(folder: Path) -> None:
    import_module("fedlas.integrations.huggingface")
    arguments = import_module("transformers").TrainingArguments(str(folder), report_to=[], use_cpu=True)
    import_module("transformers").Trainer(torch.nn.Linear(4, 3), arguments)


def board(folder: Path) -> None:
    import_module("fedlas.records").Board(folder, first=1).close()


def cluster(folder: Path) -> None:
    import_module("fedlas.experiments.scheduler").train_recipes([digits()], folder=folder, executor="ray")


def probmetrics(folder: Path) -> None:
    fedlas.build_calibrator("probmetrics").fit(sample_predictions())


# A typical use of each package.
EXAMPLES: dict[str, Callable[[Path], Any]] = {
    "torchvision": lambda _: fedlas.build_model("resnet18_cifar", 10),
    "timm": lambda _: fedlas.build_model("timm:test_vit", 10),
    "scikit-learn": lambda _: fedlas.build_data("digits").split("test"),
    "safetensors": lambda folder: write_predictions(sample_predictions(), folder / "p.safetensors"),
    "typer": command_line,
    "rich": progress_bar,
    "matplotlib": lambda folder: fedlas.save_figures({"mine": sample_predictions()}, folder, ("svg",), resamples=20),
    "jinja2": lambda folder: fedlas.save_page({"mine": sample_predictions()}, folder / "page.html"),
    "pillow": lambda _: import_module("fedlas.report.thumbnails").picture_of(torch.rand(8, 8)),
    "pyarrow": lambda folder: fedlas.write_predictions(sample_predictions(), folder / "p.parquet"),
    "probmetrics": probmetrics,
    "numba": probmetrics,
    "ray": cluster,
    "optuna": search,
    "lightning": lambda _: import_module("fedlas.integrations.lightning"),
    "transformers": lambda _: import_module("fedlas.integrations.huggingface"),
    "accelerate": trainer,
    "torchmetrics": lambda _: import_module("fedlas.integrations.torchmetrics"),
    "tensorboard": board,
    "onnx": onnx,
    "onnxruntime": onnx,
    "onnxscript": onnx,
}


def losses_and_metrics(folder: Path) -> None:
    """Use the functions that need only the required packages."""
    logits, labels = torch.randn(12, 10, requires_grad=True), torch.arange(12) % 10
    for record in fedlas.list_losses():
        loss = fedlas.build_loss(record.name, **sizes(record.name))
        loss(logits, labels, features=torch.rand(12, 5), index=torch.arange(12)).sum().backward()
    fedlas.metrics.ece(sample_predictions().probs, sample_predictions().labels)
    fedlas.build_calibrator("temperature").fit(sample_predictions()).transform(sample_predictions())
    (folder / "p.csv").write_text("prob_a,prob_b,label\n0.3,0.7,b\n0.9,0.1,a\n")
    fedlas.metrics.ece(fedlas.read_predictions(folder / "p.csv").probs, torch.tensor([1, 0]))


def sizes(loss: str) -> dict[str, int]:
    """Return the arguments of a loss that depend on the data."""
    all_sizes = {"num_classes": 10, "feature_dim": 5, "num_samples": 12, "train_samples": 12, "epochs": 5}
    keywords = {keyword for record in fedlas.list_losses() if record.name == loss for keyword in record.keywords}
    return {name: value for name, value in all_sizes.items() if name in keywords}


def error_without(function: Callable[[Path], Any], hidden: Sequence[str]) -> str:
    """Call a function in a child without some modules; return the error, or "" on success."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            for name in [module for module in sys.modules if module.partition(".")[0] in hidden]:
                del sys.modules[name]
            sys.meta_path[:] = [Without(finder, hidden) for finder in sys.meta_path]
            os.write(write_end, _attempt(function).encode()[-4000:])
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        text = file.read().decode()
    return text if os.waitpid(child, 0)[1] == 0 else "the process died"


def _attempt(function: Callable[[Path], Any]) -> str:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            function(Path(folder))
        except ImportError as error:
            return f"ImportError: {error}"
        except BaseException:
            return traceback.format_exc()
    return ""


def names_package(message: str, package: str) -> bool:
    """Return whether an error names a package and its install command."""
    names = {package, *modules(package)}
    has_name = any(re.search(rf"\b{re.escape(name)}\b", message) for name in names)
    commands = re.findall(r"pip install (?:-U )?'fedlas\[([a-z,]+)\]'", message)
    installs_extra = any(installs_package(extra, package) for command in commands for extra in command.split(","))
    installs_directly = re.search(rf"pip install [^\n]*{re.escape(package)}", message) is not None
    return message.startswith("ImportError: ") and has_name and (installs_extra or installs_directly)


def without_packages() -> list[dict[str, str]]:
    """Hide each package and return problems; with all hidden, losses and metrics must work."""
    result = []
    for package in sorted({item for required in extras().values() for item in required}):
        hidden = modules(package)
        text = error_without(EXAMPLES[package], hidden)
        problems = [] if names_package(text, package) else [f"what needs it says: {text or 'nothing'}"]
        result.append({"without": package, "says": text.removeprefix("ImportError: "), "wrong": "\n".join(problems)})
    all_modules = [name for required in extras().values() for package in required for name in modules(package)]
    error = error_without(losses_and_metrics, all_modules)
    result.append({"without": "all of them", "says": "losses, metrics and files of text work", "wrong": error})
    return result


def without_extras() -> list[dict[str, str]]:
    """Hide the packages that only one extra installs; every use must work or name a missing package."""
    result = []
    packages_by_extra = extras()
    for extra, packages in packages_by_extra.items():
        exclusive = packages - {name for other, names in packages_by_extra.items() if other != extra for name in names}
        hidden = [name for package in exclusive for name in modules(package)]
        successes, problems = 0, []
        for name, function in {"losses and metrics": losses_and_metrics, **EXAMPLES}.items():
            error = error_without(function, hidden)
            successes += not error
            if error and not any(names_package(error, package) for package in exclusive):
                problems.append(f"{name}: {error}")
        count = 1 + len(EXAMPLES)
        summary = f"{successes} of {count} examples work, {count - successes - len(problems)} name what is missing"
        result.append({"without": f"[{extra}]", "says": summary, "wrong": "\n".join(problems)})
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", action="store_true", help="hide all packages of each extra, and try everything")
    arguments = parser.parse_args()
    result = without_extras() if arguments.extras else without_packages()
    print("| without | what needs it says |\n|---|---|")
    for item in result:
        print(f"| {item['without']} | {item['says'] if not item['wrong'] else 'WRONG: ' + item['wrong']} |")
    return int(any(item["wrong"] for item in result))


if __name__ == "__main__":
    sys.exit(main())
