"""Export of a network with its calibrator to one file, with `torch.export` or ONNX.

    inputs ─► network ─► logits ─► calibrator ─► calibrated logits ─► softmax ─► probs

The graph is a trace of the `apply` method of the calibrator, so a new calibrator of the catalogue can be exported if
torch can trace it. ONNX has no `searchsorted`, which binning and isotonic calibrators use; it is replaced by a count of
the entries below a value. Calibrators that compute outside of torch (all of probmetrics) have no graph and raise an
error.

`FeatureClipping` is supported too: it clamps the features before the last layer.

Files are written atomically and contain the class names and the calibrator.
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

from fedlas.errors import UserError, UserTypeError
from fedlas.extras import optional_module
from fedlas.io.atomic import write_atomic
from fedlas.io.untrusted import file_errors
from fedlas.models.base import WithFeatures
from fedlas.posthoc import AbstractCalibrator, FeatureClipping
from fedlas.predictions.arrays import float32_or_better, two_columns

FORMAT = "fedlas.exported/1"
METADATA = "fedlas"  # name of the stored metadata: an extra file of a program, or a property of an ONNX model
FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # environment variable that torch reads at every load

OutputType = Literal["probs", "logits"]
Inputs = Tensor | tuple[Tensor, ...]


class CalibratedModel(nn.Module):
    """A network with its calibrator, which returns one tensor: calibrated probabilities or logits.

    Args:
        net: a network that returns logits, or a `WithFeatures`; feature clipping wraps the network if necessary.
        calibrator: a fitted calibrator, or None.
        output: "probs" or "logits".
        class_names: names of the classes, stored in the file.
    """

    def __init__(
        self,
        net: nn.Module,
        calibrator: AbstractCalibrator | FeatureClipping | None = None,
        *,
        output: OutputType = "probs",
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if output not in {"probs", "logits"}:
            raise UserError(f'output is {output!r}; expected "probs" or "logits"')
        if not isinstance(calibrator, AbstractCalibrator | FeatureClipping | None):
            raise UserTypeError(f"calibrator is {calibrator!r:.100}; load a file of one by load_calibrator")
        _check_fitted(calibrator)
        needs_features = isinstance(calibrator, FeatureClipping) and not isinstance(net, WithFeatures)
        self.net = WithFeatures(net) if needs_features else net
        self.calibrator = calibrator
        self.output = output
        self.class_names = None if class_names is None else tuple(map(str, class_names))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return calibrated probabilities or logits, one row per sample, in float32 or float64."""
        output = self.net(*inputs)
        if isinstance(self.calibrator, FeatureClipping):
            logits = _clipped(self.calibrator, output.features)
        else:
            logits = two_columns(float32_or_better(_logits(output)), "logits")
            if self.calibrator is not None:
                logits = self.calibrator.apply(logits)
        return logits.softmax(1) if self.output == "probs" else logits

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata that is stored in the file."""
        known: dict[str, Any] = {"format": FORMAT, "output": self.output, "class_names": self.class_names}
        if isinstance(self.calibrator, AbstractCalibrator):
            assert self.calibrator.fitted is not None
            known["calibrator"] = {"name": self.calibrator.name, "options": self.calibrator.options}
            known["calibrator"]["fitted"] = asdict(self.calibrator.fitted)
        elif isinstance(self.calibrator, FeatureClipping):
            threshold = self.calibrator.threshold
            # The threshold is infinite if clipping does not help, and JSON has no infinity.
            known["calibrator"] = {"name": "feature_clipping", "threshold": threshold if _finite(threshold) else None}
        return known


@dataclass(frozen=True)
class Exported:
    """A program that was loaded from a file: call `exported.model(images)`.

    Args:
        model: maps inputs to calibrated probabilities or logits.
        metadata: metadata of the file: "output", "class_names", "calibrator".
    """

    model: nn.Module
    metadata: dict[str, Any]


def program(model: CalibratedModel, example: Inputs) -> torch.export.ExportedProgram:
    """Trace a calibrated network in evaluation mode, with a dynamic number of samples.

    Args:
        model: the network and its calibrator.
        example: inputs of the right shape and type, on the network's device; one sample is enough.
    """
    if not isinstance(model, CalibratedModel):
        raise UserTypeError(f"the model is a {type(model).__name__}; wrap it in CalibratedModel(model)")
    inputs = _two_or_more(example)
    with _predicting(model), torch.no_grad():
        output = model(*inputs)  # raise errors of the network or its inputs here rather than in the tracer
        _check_classes(model, output)
        batch = torch.export.Dim("batch")
        shapes = (tuple({0: batch} for _ in inputs),)
        try:
            return torch.export.export(model, inputs, dynamic_shapes=shapes)
        except Exception as error:
            raise UserError(_explain_failure(model, output, error)) from error


def save_program(model: CalibratedModel, example: Inputs, path: str | Path) -> Path:
    """Write a calibrated network for `torch.export.load`; the usual extension is .pt2."""
    content = io.BytesIO()
    torch.export.save(program(model, example), content, extra_files={METADATA: json.dumps(model.metadata)})
    write_atomic(Path(path), content.getvalue())
    return Path(path)


def load_program(path: str | Path) -> Exported:
    """Load a file that `save_program` wrote; this needs torch, but not the code of the network.

    Only tensors are unpickled. The file contains a program: do not run a program that you do not trust.
    """
    extra_files = {METADATA: ""}
    with file_errors(path), _tensors_only():
        content = Path(path).read_bytes()
        _check_constants(content)
        exported = torch.export.load(io.BytesIO(content), extra_files=extra_files)
        metadata = json.loads(extra_files[METADATA] or "{}")
    if metadata.get("format") != FORMAT:
        raise UserError(f"{path} was not written by fedlas; read it with torch.export.load")
    return Exported(exported.module(), metadata)


def _check_constants(content: bytes) -> None:
    """Raise if the file has constants that torch would unpickle unsafely, which `save_program` never writes."""
    with zipfile.ZipFile(io.BytesIO(content)) as folder:
        for name in folder.namelist():
            parts = name.split("/")
            if "constants" in parts[:-1] and not parts[-1].startswith("tensor_") and not name.endswith(".json"):
                raise UserError(f"it holds {name[:80]}, which is more than a tensor and is not unpickled")


@contextmanager
def _tensors_only() -> Iterator[None]:
    """Force `weights_only=True` in all calls of `torch.load`, including those inside torch."""
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
    """Write a calibrated network as a single ONNX file after a comparison with the output of onnxruntime.

    Its inputs are called `input` (`input_0`, `input_1` ... if there are several) and its output `probs` or `logits`.

    Args:
        model: the network and its calibrator.
        example: inputs of the right shape and type; one sample is enough.
        path: the file.
        tolerance: largest difference of the outputs of onnxruntime and network; None skips the comparison. Binning
            calibrators are discontinuous, so rounding of a logit may change their output.
        options: passed to `torch.onnx.export`, such as `opset_version`.
    """
    for package in ("onnx", "onnxscript", *(["onnxruntime"] if tolerance is not None else [])):
        optional_module(package, "integrations")
    inputs = _two_or_more(example)
    names = ["input"] if len(inputs) == 1 else [f"input_{n}" for n in range(len(inputs))]
    traced = program(model, inputs)
    if any(node.target in _SEARCHES for node in traced.graph.nodes):
        traced = traced.run_decompositions(dict(_SEARCHES))
    onnx_program = torch.onnx.export(
        traced, (), input_names=names, output_names=[model.output], dynamo=True, verbose=False, **options
    )
    assert onnx_program is not None
    onnx_program.model.metadata_props[METADATA] = json.dumps(model.metadata)
    try:
        content = onnx_program.model_proto.SerializeToString()
    except ValueError as error:
        raise UserError("a single ONNX file holds up to 2 GiB; this network is larger, use save_program") from error
    if tolerance is not None:
        _compare(model, inputs, content, names, tolerance)
    write_atomic(Path(path), content)
    return Path(path)


def _compare(
    model: CalibratedModel, inputs: tuple[Tensor, ...], content: bytes, names: list[str], limit: float
) -> None:
    """Raise if the outputs of onnxruntime and network differ."""
    session = optional_module("onnxruntime", "integrations").InferenceSession(
        content, providers=["CPUExecutionProvider"]
    )
    with _predicting(model), torch.no_grad():
        for count in (1, len(inputs[0])):  # the number of samples is dynamic
            part = [tensor[:count] for tensor in inputs]
            expected = model(*part).cpu()
            onnx_inputs = {name: tensor.cpu().numpy() for name, tensor in zip(names, part, strict=True)}
            actual = torch.from_numpy(session.run(None, onnx_inputs)[0])
            difference = float((expected - actual).abs().max()) if expected.shape == actual.shape else math.inf
            if not difference <= limit:
                raise UserError(
                    f"the ONNX file says something else than the network: {model.output} of the example differ by "
                    f"{difference:.3g}, more than tolerance={limit:g}, and nothing was written. A binning calibrator "
                    "is discontinuous; if that is the reason, compare on your own data and set tolerance=None"
                )


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        is_tensor = isinstance(logits, Tensor)
        kind = f"a tensor of shape {tuple(logits.shape)}" if is_tensor else f"a {type(logits).__name__}"
        raise UserError(
            f"the network returns {kind}; one row of logits per sample is expected (WithFeatures(net) takes them out "
            "of what other libraries return)"
        )
    return logits


def _clipped(clipping: FeatureClipping, features: Tensor) -> Tensor:
    assert clipping.threshold is not None
    features_32 = float32_or_better(features)
    clamped = features_32.clamp(-clipping.threshold, clipping.threshold) if _finite(clipping.threshold) else features_32
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


def _check_classes(model: CalibratedModel, output: Tensor) -> None:
    classes = output.shape[1]
    if model.class_names is not None and len(model.class_names) != classes:
        raise UserError(f"class_names has {len(model.class_names)} names for {classes} classes")
    fitted = getattr(model.calibrator, "fitted", None)
    if fitted is not None and fitted.classes != classes:
        raise UserError(f"the network has {classes} classes; its calibrator was fitted on {fitted.classes}")
    if isinstance(model.calibrator, AbstractCalibrator):
        model.calibrator.check_names(model.class_names)


def _two_or_more(example: Inputs) -> tuple[Tensor, ...]:
    """Repeat a single sample, because the tracer would treat a batch size of 1 as constant."""
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    counts = {len(tensor) if tensor.ndim else 0 for tensor in inputs}
    if len(counts) != 1 or 0 in counts:
        raise UserError("the tensors of example need the same number of samples on their first axis, at least one")
    return tuple(torch.cat([tensor, tensor]) if len(tensor) == 1 else tensor for tensor in inputs)


def _explain_failure(model: CalibratedModel, output: Tensor, error: Exception) -> str:
    """Return an error message that names the part that cannot be traced."""
    if isinstance(model.calibrator, AbstractCalibrator):
        try:
            torch.export.export(CalibratedModel(nn.Identity(), model.calibrator), (output,))
        except Exception as reason:
            first_line = str(reason).strip().partition("\n")[0]
            return (
                f"{model.calibrator.name} cannot be exported: it computes outside of torch, or depends on values "
                f"({first_line}). Use another calibrator, or export with calibrator=None and apply it afterwards"
            )
    return f"torch.export cannot trace {type(model.net).__name__}: {error}"


@contextmanager
def _predicting(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and restore the mode of each module afterwards."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _count_below(boundaries: Tensor, values: Tensor, right: bool) -> Tensor:
    """Return the positions of values in a sorted tensor by counting, which ONNX supports."""
    below = boundaries <= values.unsqueeze(-1) if right else boundaries < values.unsqueeze(-1)
    return below.sum(-1)


def _searchsorted(
    boundaries: Tensor,
    values: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    assert boundaries.ndim == 1
    assert sorter is None
    count = _count_below(boundaries, values, right or side == "right")
    return count.int() if out_int32 else count


def _bucketize(values: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    count = _count_below(boundaries, values, right)
    return count.int() if out_int32 else count


_SEARCHES: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.searchsorted.Tensor: _searchsorted,
    torch.ops.aten.bucketize.Tensor: _bucketize,
}
