"""Checks of the inputs of a loss, with messages that suggest a fix.

Shapes, dtypes and devices are always checked. Values (labels and indices in range, soft labels that are probabilities)
are always checked in eager code on the CPU; on an accelerator and under `torch.compile`, they are checked only inside
`checks(True)`, because reading them synchronises the host. Inside a transform of `torch.func` such as `vmap`, values
cannot be read and are not checked.
"""

from types import TracebackType
from typing import ClassVar

import torch
from torch import Tensor

from fedlas.errors import UserError, UserTypeError

_transforms_are_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


class checks:  # noqa: N801 (a context manager, named like a verb)
    """Check the values of labels and indices on all devices, even if that synchronises the host.

    For debugging: `with fedlas.checks(True): value = loss(logits, labels)`.
    """

    active: ClassVar[bool] = False

    def __init__(self, on: bool = True) -> None:
        self.on = on

    def __enter__(self) -> None:
        self.before = checks.active
        checks.active = self.on

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        checks.active = self.before


def check_tensors(logits: object, labels: object, features: object = None, index: object = None) -> None:
    """Raise if an input is not a dense tensor, such as an output of a network that was not unpacked."""
    inputs = {"logits": logits, "labels": labels, "features": features, "index": index}
    for name, value in inputs.items():
        if value is None and name in ("features", "index"):
            continue
        if isinstance(value, Tensor):
            if value.layout != torch.strided:
                raise UserTypeError(f"{name} has the layout {value.layout}; a dense tensor is needed (to_dense)")
            continue
        hint = "; unpack what the network returns: logits, features = net(x)" if isinstance(value, tuple) else ""
        raise UserTypeError(f"{name} must be a tensor, not {type(value).__name__}{hint}")


def check_shapes(logits: Tensor, labels: Tensor, features: Tensor | None, index: Tensor | None) -> None:
    """Raise if shapes, types or devices do not match."""
    shape = tuple(logits.shape)
    if not logits.is_floating_point():
        raise UserError(f"logits must be floating point, not {logits.dtype}")
    if logits.ndim < 2 or logits.shape[1] < 2:
        hint = "; a single logit z of class 1 is torch.cat([0 * z, z], 1)" if logits.ndim == 2 else ""
        raise UserError(f"logits must have shape (N, C) or (N, C, d1, ...) with at least 2 classes, not {shape}{hint}")
    without_classes = (shape[0], *shape[2:])
    if labels.dtype == torch.bool or labels.is_complex():
        raise UserError(f"labels must be integers, or probabilities in floating point, not {labels.dtype}")
    if labels.is_floating_point():
        if tuple(labels.shape) != shape:
            raise UserError(
                f"floating-point labels are soft labels and must have the shape of the logits, {shape}, not "
                f"{tuple(labels.shape)}; class numbers must be integers (labels.long())"
            )
    elif tuple(labels.shape) != without_classes:
        hint = "; for one-hot labels, use labels.argmax(1)" if tuple(labels.shape) == shape else ""
        raise UserError(
            f"labels must have shape {without_classes} for logits of shape {shape}, not {tuple(labels.shape)}{hint}"
        )
    if features is not None:
        if not features.is_floating_point():
            raise UserError(f"features must be floating point, not {features.dtype}")
        if features.ndim != logits.ndim or (features.shape[0], *features.shape[2:]) != without_classes:
            raise UserError(
                f"features must have shape (N, D) or (N, D, d1, ...) beside logits of shape {shape}, not "
                f"{tuple(features.shape)}"
            )
    if index is not None and (
        index.is_floating_point() or index.dtype == torch.bool or tuple(index.shape) != shape[:1]
    ):
        raise UserError(f"index must be {shape[0]} integers, one per sample, not {index.dtype} {tuple(index.shape)}")
    for name, tensor in (("labels", labels), ("features", features), ("index", index)):
        if tensor is not None and tensor.device != logits.device:
            raise UserError(f"{name} are on {tensor.device}, logits on {logits.device}; move them to one device")


def checked_labels(labels: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    """Return the labels; raise if class numbers are out of range or soft labels are not probabilities."""
    if not _can_read(labels):
        return labels
    if torch.compiler.is_compiling():
        checked: Tensor = _checked_labels_op(labels, num_classes, ignore_index)
        return checked
    _check_labels(labels, num_classes, ignore_index)
    return labels


def all_are_classes(labels: Tensor, num_classes: int) -> bool:
    """Return whether all labels are known to be in range; always false on an accelerator or in compiled code."""
    if not is_eager_on_cpu(labels) or not labels.numel():
        return False
    low, high = torch.aminmax(labels)
    return low.item() >= 0 and high.item() < num_classes


def checked_index(index: Tensor, num_samples: int) -> Tensor:
    """Return the indices; raise if one is outside of the training split."""
    if not _can_read(index):
        return index
    if torch.compiler.is_compiling():
        checked: Tensor = _checked_index_op(index, num_samples)
        return checked
    _check_index(index, num_samples)
    return index


def _can_read(tensor: Tensor) -> bool:
    if tensor.device.type == "meta" or is_transformed():
        return False
    return checks.active or (tensor.device.type == "cpu" and not torch.compiler.is_compiling())


def is_eager_on_cpu(x: Tensor) -> bool:
    """Return whether values can be read without synchronisation and the overhead per operator dominates."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed()


def is_transformed() -> bool:
    """Return whether this code runs inside a transform of `torch.func`."""
    return not torch.compiler.is_compiling() and bool(_transforms_are_active())


def _check_labels(labels: Tensor, num_classes: int, ignore_index: int) -> None:
    if labels.is_floating_point():
        # Rounding errors of the sum: half a unit in the last place per class, and a margin.
        tolerance = max(1e-4, num_classes * torch.finfo(labels.dtype).eps)
        rows = labels.detach().movedim(1, -1).reshape(-1, num_classes).double()
        bad = ~((rows >= 0).all(1) & ((rows.sum(1) - 1).abs() <= tolerance))
        if bad.any():
            row = int(bad.nonzero()[0])
            values = [round(value, 4) for value in rows[row, :5].tolist()]
            raise UserError(
                f"soft labels must be non-negative and sum to 1; row {row} sums to {float(rows[row].sum()):.6g} "
                f"and begins {values}"
            )
        return
    labels = labels.long()  # torch does not compare uint16, uint32 and uint64
    bad = ((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise UserError(
            f"label {int(labels[tuple(where)])} at position {where} is not one of {num_classes} classes "
            f"(0 to {num_classes - 1}, or ignore_index={ignore_index})"
        )


def _check_index(index: Tensor, num_samples: int) -> None:
    index = index.long()
    bad = (index < 0) | (index >= num_samples)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise UserError(
            f"index {int(index[row])} at position {row} is outside of the training split of {num_samples} samples; "
            "build the loss with num_samples=len(training split)"
        )


# In a compiled graph a check must be an operator whose result is used, or it would be eliminated.
@torch.library.custom_op("fedlas::checked_labels", mutates_args=())
def _checked_labels_op(labels: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    _check_labels(labels, num_classes, ignore_index)
    return labels.clone()


@torch.library.custom_op("fedlas::checked_index", mutates_args=())
def _checked_index_op(index: Tensor, num_samples: int) -> Tensor:
    _check_index(index, num_samples)
    return index.clone()


@_checked_labels_op.register_fake
def _(labels: Tensor, num_classes: int, ignore_index: int) -> Tensor:  # noqa: ARG001 (an operator's signature)
    return torch.empty_like(labels)


@_checked_index_op.register_fake
def _(index: Tensor, num_samples: int) -> Tensor:  # noqa: ARG001 (an operator's signature)
    return torch.empty_like(index)
