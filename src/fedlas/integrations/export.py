"""A network and its calibrator as one file, for `torch.export` and for ONNX.

    inputs ─► network ─► logits ─► calibrator ─► calibrated logits ─► softmax ─► probs

The graph is what the calibrator's own `apply` does, traced; there is no second version of any calibrator here, so one
that is new in the catalogue can be exported as soon as torch can trace it. ONNX knows no search in a sorted list, which
bins and rising curves need; it becomes a count of the entries below a value. What a calibrator does outside of torch
(all of probmetrics) has no graph, and is refused.

`FeatureClipping` is taken too, for a network whose features are known: its features are clamped before the last layer.

Files are written whole or not at all, and hold the names of the classes and which calibrator was used.
"""

import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlas.errors import UserError
from fedlas.extras import optional_module
from fedlas.io.atomic import write_atomic
from fedlas.io.untrusted import file_errors
from fedlas.models.base import WithFeatures
from fedlas.posthoc import AbstractCalibrator, FeatureClipping
from fedlas.posthoc.base import float32_or_better
from fedlas.predictions import two_columns

FORMAT = "fedlas.exported/1"
ABOUT = "fedlas"
FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch reads it at every load
"""Under this name a file says what it is: an extra file of a program, a metadata entry of an ONNX model."""

Said = Literal["probs", "logits"]
Inputs = Tensor | tuple[Tensor, ...]


class CalibratedModel(nn.Module):
    """A network with its calibrator, which returns one tensor: calibrated probabilities or logits.

    Args:
        net: a network that returns logits, or one in a `WithFeatures`; feature clipping puts it into one by itself.
        calibrator: a fitted one; None leaves the logits as they are.
        output: "probs" or "logits".
        class_names: one for each class, kept in the files.
    """

    def __init__(
        self,
        net: nn.Module,
        calibrator: AbstractCalibrator | FeatureClipping | None = None,
        *,
        output: Said = "probs",
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if output not in {"probs", "logits"}:
            raise UserError(f'output is {output!r}; expected "probs" or "logits"')
        _check_fitted(calibrator)
        needs_features = isinstance(calibrator, FeatureClipping) and not isinstance(net, WithFeatures)
        self.net = WithFeatures(net) if needs_features else net
        self.calibrator = calibrator
        self.output = output
        self.class_names = None if class_names is None else tuple(map(str, class_names))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return what the calibrated network says, a row for each sample, in float32 or better."""
        said = self.net(*inputs)
        if isinstance(self.calibrator, FeatureClipping):
            logits = _clipped(self.calibrator, said.features)
        else:
            logits = two_columns(float32_or_better(_logits(said)), "logits")
            if self.calibrator is not None:
                logits = self.calibrator.apply(logits)
        return logits.softmax(1) if self.output == "probs" else logits

    @property
    def about(self) -> dict[str, Any]:
        """What a file says about itself."""
        known: dict[str, Any] = {"format": FORMAT, "output": self.output, "class_names": self.class_names}
        if isinstance(self.calibrator, AbstractCalibrator):
            assert self.calibrator.fitted is not None
            known["calibrator"] = {"name": self.calibrator.name, "options": self.calibrator.options}
            known["calibrator"]["fitted"] = asdict(self.calibrator.fitted)
        elif isinstance(self.calibrator, FeatureClipping):
            threshold = self.calibrator.threshold
            # JSON has no infinity, which is the threshold where nothing was to be gained by clipping.
            known["calibrator"] = {"name": "feature_clipping", "threshold": threshold if _finite(threshold) else None}
        return known


@dataclass(frozen=True)
class Exported:
    """A program that was read back: `exported.model(images)`.

    Args:
        model: maps inputs to what the file promises.
        about: what the file says about itself: "output", "class_names", "calibrator".
    """

    model: nn.Module
    about: dict[str, Any]


def program(model: CalibratedModel, example: Inputs) -> torch.export.ExportedProgram:
    """Trace a calibrated network as it is used for prediction; any number of samples may go in.

    Args:
        model: the network and its calibrator.
        example: inputs of the right shape and type, on the network's device; one sample is enough.
    """
    inputs = _two_or_more(example)
    with _predicting(model), torch.no_grad():
        said = model(*inputs)  # what is wrong with network or inputs is said by them, and not by the tracer
        _check_classes(model, said)
        batch = torch.export.Dim("batch")
        shapes = (tuple({0: batch} for _ in inputs),)
        try:
            return torch.export.export(model, inputs, dynamic_shapes=shapes)
        except Exception as error:
            raise UserError(_blame(model, said, error)) from error


def save_program(model: CalibratedModel, example: Inputs, path: str | Path) -> Path:
    """Write a calibrated network for `torch.export.load`; by habit such a file ends in .pt2."""
    content = io.BytesIO()
    torch.export.save(program(model, example), content, extra_files={ABOUT: json.dumps(model.about)})
    write_atomic(Path(path), content.getvalue())
    return Path(path)


def load_program(path: str | Path) -> Exported:
    """Read a file that `save_program` wrote; it needs torch, and none of the code that made the network.

    Nothing in it is unpickled but tensors. What it holds is a program all the same: run none that you do not trust.
    """
    words = {ABOUT: ""}
    with file_errors(path), _tensors_only():
        content = Path(path).read_bytes()
        _check_constants(content)
        found = torch.export.load(io.BytesIO(content), extra_files=words)
        about = json.loads(words[ABOUT] or "{}")
    if about.get("format") != FORMAT:
        raise UserError(f"{path} is not a program that fedlas wrote; torch.export.load reads any other")
    return Exported(found.module(), about)


def _check_constants(content: bytes) -> None:
    """Refuse constants that torch would unpickle whatever they are; a network with a calibrator has none."""
    with zipfile.ZipFile(io.BytesIO(content)) as folder:
        for name in folder.namelist():
            parts = name.split("/")
            if "constants" in parts[:-1] and not parts[-1].startswith("tensor_") and not name.endswith(".json"):
                raise UserError(f"it holds {name[:80]}, which is more than a tensor and is not unpickled")


@contextmanager
def _tensors_only() -> Iterator[None]:
    """Have `torch.load` make nothing but tensors, also where torch itself asks it for more."""
    before = os.environ.get(FORCED)
    os.environ[FORCED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FORCED]
        else:
            os.environ[FORCED] = before


def save_onnx(
    model: CalibratedModel, example: Inputs, path: str | Path, *, tolerance: float | None = 1e-4, **options: Any
) -> Path:
    """Write a calibrated network as an ONNX file, all in one, and compare what onnxruntime makes of it.

    Its inputs are called `input` (`input_0`, `input_1` ... if there are several) and its output `probs` or `logits`.

    Args:
        model: the network and its calibrator.
        example: inputs of the right shape and type; one sample is enough.
        path: the file.
        tolerance: how far onnxruntime's answer to the example may be from the network's own; None compares nothing.
            Bins have steps, at which the last digit of a logit decides.
        options: passed on to `torch.onnx.export`, such as `opset_version`.
    """
    for package in ("onnx", "onnxscript", *(["onnxruntime"] if tolerance is not None else [])):
        optional_module(package, "integrations")
    inputs = _two_or_more(example)
    names = ["input"] if len(inputs) == 1 else [f"input_{n}" for n in range(len(inputs))]
    traced = program(model, inputs)
    if any(node.target in _SEARCHES for node in traced.graph.nodes):
        traced = traced.run_decompositions(dict(_SEARCHES))
    made = torch.onnx.export(
        traced, (), input_names=names, output_names=[model.output], dynamo=True, verbose=False, **options
    )
    assert made is not None
    made.model.metadata_props[ABOUT] = json.dumps(model.about)
    try:
        content = made.model_proto.SerializeToString()
    except ValueError as error:
        raise UserError("a single ONNX file holds up to 2 GiB; this network is larger, take save_program") from error
    if tolerance is not None:
        _compare(model, inputs, content, names, tolerance)
    write_atomic(Path(path), content)
    return Path(path)


def _compare(model: CalibratedModel, inputs: tuple[Tensor, ...], content: bytes, names: list[str], most: float) -> None:
    """Raise an error where onnxruntime says something else than the network."""
    session = optional_module("onnxruntime", "integrations").InferenceSession(
        content, providers=["CPUExecutionProvider"]
    )
    with _predicting(model), torch.no_grad():
        for count in (1, len(inputs[0])):  # the number of samples is free
            part = [one[:count] for one in inputs]
            own = model(*part).cpu()
            fed = {name: one.cpu().numpy() for name, one in zip(names, part, strict=True)}
            theirs = torch.from_numpy(session.run(None, fed)[0])
            apart = float((own - theirs).abs().max()) if own.shape == theirs.shape else math.inf
            if not apart <= most:
                raise UserError(
                    f"the ONNX file says something else than the network: {model.output} of the example differ by "
                    f"{apart:.3g}, more than tolerance={most:g}, and nothing was written. A calibrator with steps can "
                    "do that where a sample lies on one; then compare on your own data, and set tolerance=None"
                )


def _logits(said: Any) -> Tensor:
    found = getattr(said, "logits", said)
    if not isinstance(found, Tensor) or found.ndim != 2:
        kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise UserError(
            f"the network returns {kind}; one row of logits per sample is expected (WithFeatures(net) takes them out "
            "of what other libraries return)"
        )
    return found


def _clipped(clipping: FeatureClipping, features: Tensor) -> Tensor:
    assert clipping.threshold is not None
    given = float32_or_better(features)
    clamped = given.clamp(-clipping.threshold, clipping.threshold) if _finite(clipping.threshold) else given
    return functional.linear(
        clamped, clipping.weight.to(clamped), None if clipping.bias is None else clipping.bias.to(clamped)
    )


def _finite(threshold: float | None) -> bool:
    return threshold is not None and math.isfinite(threshold)


def _check_fitted(calibrator: AbstractCalibrator | FeatureClipping | None) -> None:
    if isinstance(calibrator, FeatureClipping):
        if calibrator.threshold is None:
            raise RuntimeError("feature clipping is not fitted yet; call fit(predictions) first")
    elif calibrator is not None and calibrator.fitted is None:
        raise RuntimeError(f"{calibrator.name} is not fitted yet; call fit(logits, labels) first, or load it")


def _check_classes(model: CalibratedModel, said: Tensor) -> None:
    classes = said.shape[1]
    if model.class_names is not None and len(model.class_names) != classes:
        raise UserError(f"class_names has {len(model.class_names)} names for {classes} classes")
    fitted = getattr(model.calibrator, "fitted", None)
    if fitted is not None and fitted.classes != classes:
        raise UserError(f"the network has {classes} classes; its calibrator was fitted on {fitted.classes}")
    if isinstance(model.calibrator, AbstractCalibrator):
        model.calibrator.check_names(model.class_names)


def _two_or_more(example: Inputs) -> tuple[Tensor, ...]:
    """Give every input two samples at least: the tracer takes a single one for a number that never changes."""
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    counts = {len(one) if one.ndim else 0 for one in inputs}
    if len(counts) != 1 or 0 in counts:
        raise UserError("example holds tensors whose first axis counts samples: one at least, and equally many in all")
    return tuple(torch.cat([one, one]) if len(one) == 1 else one for one in inputs)


class _Alone(nn.Module):
    """A calibrator by itself, to see whether it can be traced."""

    def __init__(self, calibrator: AbstractCalibrator) -> None:
        super().__init__()
        self.calibrator = calibrator

    def forward(self, logits: Tensor) -> Tensor:
        return self.calibrator.apply(logits)


def _blame(model: CalibratedModel, said: Tensor, error: Exception) -> str:
    """Say which part cannot be traced."""
    if isinstance(model.calibrator, AbstractCalibrator):
        try:
            torch.export.export(_Alone(model.calibrator), (said,))
        except Exception as reason:
            why = str(reason).strip().partition("\n")[0]
            return (
                f"{model.calibrator.name} cannot be exported: it does its work outside of torch, or by its numbers "
                f"({why}). Take another calibrator, or export with calibrator=None and apply it afterwards"
            )
    return f"torch.export cannot trace {type(model.net).__name__}: {error}"


@contextmanager
def _predicting(model: nn.Module) -> Iterator[None]:
    """Put every part into the mode for prediction, and each back into its own afterwards."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _count_below(places: Tensor, values: Tensor, right: bool) -> Tensor:
    """Find where values belong in a sorted list by counting, which ONNX can do."""
    below = places <= values.unsqueeze(-1) if right else places < values.unsqueeze(-1)
    return below.sum(-1)


def _searchsorted(
    places: Tensor,
    values: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    assert places.ndim == 1
    assert sorter is None
    found = _count_below(places, values, right or side == "right")
    return found.int() if out_int32 else found


def _bucketize(values: Tensor, places: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    found = _count_below(places, values, right)
    return found.int() if out_int32 else found


_SEARCHES: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.searchsorted.Tensor: _searchsorted,
    torch.ops.aten.bucketize.Tensor: _bucketize,
}
