"""Arrays of torch, NumPy and other libraries as checked tensors: scores, probabilities and labels."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fedlas.errors import RowError, UserError, UserTypeError, choose_advice, warn_caller


@runtime_checkable
class SupportsArray(Protocol):
    """An array of another library, such as JAX, pandas or polars."""

    def __array__(self) -> NDArray[Any]: ...

    def __len__(self) -> int: ...


Array: TypeAlias = Tensor | NDArray[Any] | Sequence[Any] | SupportsArray
Labels: TypeAlias = Int[Tensor, " n"] | Float[Tensor, "n classes"]
# Largest difference of the sum of a row of probabilities from one.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CLASS_LIMIT = 2**31 - 1  # of class numbers, if classes have no names
ENOUGH = 20  # number of rows that are not all distributions by chance
# Advice about logits whose rows all have this sum.
SUSPICIOUS_SUMS = {
    1: "If these are probabilities, their softmax says nothing: give them as such, ",
    100: "If these are percentages, their softmax says nothing: divide them by 100, and give them as probabilities, ",
}
PERCENTAGES = "these look like percentages: divide them by 100"


class RowLimits(NamedTuple):
    """How far the sums of rows of rounded probabilities may lie below and above one.

    Attributes:
        below: limit of each row below one; the larger one, because small probabilities are rounded to zero.
        above: limit of each row above one.
        unit: unit of the last digit of each row.
    """

    below: Float[Tensor, " n"]
    above: Float[Tensor, " n"]
    unit: Float[Tensor, " n"]


def check_class_numbers(name: str, numbers: Tensor, n: int, names: Sequence[str] | None) -> Int[Tensor, " n"]:
    """Return one class number per sample; raise if there are others."""
    numbers = _class_numbers(numbers)
    if numbers.is_floating_point() or numbers.shape != (n,):
        raise UserError(f"{name} is {numbers.dtype} of shape {tuple(numbers.shape)}; expected {n} integers")
    most = CLASS_LIMIT if names is None else len(names)
    check_rows(name, numbers, (numbers >= 0) & (numbers < most), f"is outside 0..{most - 1} (classes count from 0)")
    return numbers.long()


def check_correctness(flags: Tensor, n: int) -> Bool[Tensor, " n"]:
    """Return whether each sample is correct; raise if a value is neither 0 nor 1."""
    if flags.shape != (n,):
        raise UserError(f"correct has shape {tuple(flags.shape)}; expected {n} values of 0 or 1")
    if flags.dtype != torch.bool:
        check_rows("correct", flags, (flags == 0) | (flags == 1), "is neither 0 nor 1")
    return flags.bool()


def check_row_names(scores: object, other: object, names: tuple[str, str] = ("predictions", "labels")) -> None:
    """Raise if two objects of pandas have different row names: their rows would be paired by position.

    Args:
        scores: predictions.
        other: labels, or predictions of another model.
        names: names of both in the message.
    """
    indexes: list[Any] = [getattr(values, "index", None) for values in (scores, other)]
    if not all(hasattr(index, "equals") for index in indexes) or indexes[0].equals(indexes[1]):
        return  # a list has a method `index`
    if not all(type(index).__name__ == "RangeIndex" and (index.start, index.step) == (0, 1) for index in indexes):
        first, second = names
        raise UserError(
            f"the index of {second} differs from that of {first}; use {second}.loc[{first}.index], or, if the "
            "rows already belong together, reset_index(drop=True) on both"
        )


def as_tensor(values: Array, name: str) -> Tensor:
    """Return an array of torch, NumPy or another library as a tensor, without a copy if possible."""
    if isinstance(values, Tensor):
        if values.is_meta or values.layout != torch.strided:
            kind = "on the device meta, which holds no numbers" if values.is_meta else f"of layout {values.layout}"
            raise UserTypeError(f"{name} is a tensor {kind}; a dense one is needed (to_dense)")
        if values.is_complex():
            raise UserTypeError(f"{name} holds {values.dtype}; real numbers are expected")
        return values.detach()
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise UserTypeError(f"{name} is a masked array; remove the masked values first, or they would count")
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise UserError(f"{name} is no table of numbers ({error})") from error
    if array.dtype == np.longdouble and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if array.dtype.kind not in "fiub":
        names = "; number the classes, [class_names.index(label) for label in labels], or call "
        names += "fedlas.evaluate(probs, labels, class_names=[...])"
        raise UserTypeError(f"{name} holds {array.dtype}, not numbers{names if name == 'labels' else ''}")
    plain = array.dtype.isnative and all(stride >= 0 for stride in array.strides)  # torch can share it
    # Not ascontiguousarray: one number with a negative stride counts as contiguous and would stay as it is.
    array = array if plain else array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def as_floats(values: Array, name: str) -> Float[Tensor, "..."]:
    """Return an array as a tensor of floating-point numbers; raise if it holds other numbers."""
    tensor = as_tensor(values, name)
    if not tensor.is_floating_point():
        advice = f"; {PERCENTAGES}" if name in {"probs", "logits"} and _are_percentages(tensor) else ""
        advice += ", and give them as probs" if advice and name == "logits" else ""
        raise UserTypeError(f"{name} holds {tensor.dtype}; floating-point numbers are expected{advice}")
    if tensor.dtype.itemsize == 1:
        raise UserTypeError(f"{name} holds {tensor.dtype}; convert it to float16 or wider, such as {name}.half()")
    if tensor.ndim == 0:
        raise UserError(f"{name} is a single number; one row per sample is expected")
    return tensor


def float32_or_better(values: Tensor) -> Tensor:
    """Return values in float32, or in float64 if they are in float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def two_columns(values: Float[Tensor, "..."], name: str) -> Float[Tensor, "n classes"]:
    """Return two columns for the single one of a binary classifier: logits [0, z] for z, [1 - p, p] for p."""
    if values.ndim == 1 or values.shape[1:] == (1,):
        second = values.reshape(-1)
        return torch.stack([1 - second if name == "probs" else torch.zeros_like(second), second], dim=1)
    if values.ndim != 2:
        raise UserError(
            f"{name} have shape {tuple(values.shape)}; one row of classes per sample is expected: flatten maps "
            f"(N, C, ...) by {name}.movedim(1, -1).flatten(0, -2) and labels.flatten(), and drop ignored pixels"
        )
    if not values.shape[1]:
        raise UserError(f"{name} have shape {tuple(values.shape)}; at least one class is needed")
    return values


def check_finite(logits: Float[Tensor, "..."], name: str = "logits") -> None:
    """Raise if a row holds NaN or infinity."""
    # The extremes are NaN or infinite if any number is; this takes one pass and no mask.
    if logits.numel() == 0 or not bool(torch.isfinite(torch.stack(torch.aminmax(logits))).all()):
        good = torch.isfinite(logits)
        check_rows(name, logits, good if good.ndim == 1 else good.flatten(1).all(dim=1), "holds NaN or infinity")


def check_rows(name: str, values: Tensor, good: Bool[Tensor, "n *space"], fault: str) -> None:
    """Raise if a row is not good, with the first such row."""
    if good.numel() == 0:
        raise UserError(f"{name} has no rows; at least one sample is needed")
    if bool(good.all()):
        return
    row, *position = [int(i) for i in (~good).nonzero()[0]]
    shown = (
        values[row].movedim(0, -1)[tuple(position)]
        if position and values.ndim > good.ndim
        else values[(row, *position)]
    )
    raise RowError(f"{name}: ", row, f"{f' at {tuple(position)}' if position else ''} {fault}: {_shown(shown)}")


def check_probs(
    probs: Float[Tensor, "n classes *space"],
    limits: RowLimits | None = None,
    ignored: Bool[Tensor, "n *space"] | None = None,
    name: str = "probs",
) -> None:
    """Raise unless every row is a probability distribution, up to rounding."""
    sums, precision = row_sums(probs), TOLERANCE[probs.dtype]
    below, above = (limits.below, limits.above) if limits is not None else (precision, precision)
    good = (sums >= 1 - below) & (sums <= 1 + above)
    good &= probs.amin(dim=1) >= 0
    if limits is not None:  # otherwise no entry of such a row is larger than its sum may be
        good &= probs.amax(dim=1) <= 1 + precision
    if ignored is not None:
        good |= ignored
    if bool(good.all()) and good.numel():
        return
    if ignored is None:
        check_finite(probs, name)
    position = tuple(int(i) for i in (~good).nonzero()[0]) if good.numel() else ()
    total = float(sums[position]) if position else 1.0
    advice = ""
    if name == "probs":
        advice = "; " + choose_advice(
            "logits are given with logits=True, probabilities with other sums with normalize=True",
            "logits are given with --logits (logits=True), probabilities with other sums with --normalize "
            "(normalize=True)",
        )
    near = abs(total - 100) < 2 and bool((probs > 1).any())
    if near or _is_percentage(probs, position) or _are_percentages(probs):
        advice = f"; {PERCENTAGES}"
    spread = f", the sums of all rows are {float(sums.min()):.4g} to {float(sums.max()):.4g}" if len(sums) > 1 else ""
    rule = "is not a distribution (entries from 0 to 1, sum 1)"
    check_rows(name, probs, good, f"{rule}: it sums to {total:.6g}{spread}{advice}")


def _are_percentages(table: Tensor) -> bool:
    """Return whether rows are percentages, some above 1; rounding moves the sums of many classes from 100."""
    if table.ndim != 2 or not table.numel() or table.is_complex():
        return False
    numbers = table.double()
    if bool((numbers.amin() < 0) | (numbers.amax() > 100) | (numbers.amax() <= 1)):
        return False
    return bool((numbers.sum(dim=1).median() - 100).abs() <= 10)


def _is_percentage(probs: Tensor, position: tuple[int, ...]) -> bool:
    """Return whether a row was made of one percentage of a binary classifier."""
    if probs.ndim != 2 or probs.shape[1] != 2 or not position:
        return False
    other, second = probs[position].tolist()
    return bool(1 < second <= 100 and other == 1 - second)


def check_transposed(probs: Tensor, labels: Array | None) -> None:
    """Raise if probabilities have a column and not a row for each label: the table may be transposed."""
    shape = getattr(labels, "shape", None)
    count = shape[0] if shape else len(labels) if isinstance(labels, Sequence) else 0
    if probs.ndim == 2 and count == probs.shape[1] != probs.shape[0]:
        rows = "1 row" if len(probs) == 1 else f"{len(probs)} rows"
        raise UserError(f"probs has {rows} for {count} labels; is it transposed?")


def warn_about_probabilities(logits: Tensor) -> None:
    """Warn of logits that are probabilities or percentages."""
    if logits.shape[1:] == (2,) and _is_probability_of_one_class(logits):
        advice = choose_advice("by Predictions.from_probs or as probs in a file", "as a column called prob_...")
        warn_caller(f"every logit lies between 0 and 1. If these are probabilities of class 1, give them {advice}")
    for total, remedy in SUSPICIOUS_SUMS.items():
        # The first rows rule out nearly all tables.
        if _have_sum(logits[:ENOUGH], total) and _have_sum(logits, total):
            about = f"{total}" if total == 1 else f"about {total}"  # percentages are rounded
            advice = choose_advice(
                "by Predictions.from_probs or as probs in a file",
                "as an array called probs or columns called prob_...",
            )
            warn_caller(f"every row of the logits lies between 0 and {total} and sums to {about}. {remedy}{advice}")


def _is_probability_of_one_class(logits: Tensor) -> bool:
    """Return whether a single column of logits, as `two_columns` returns it, lies within [0, 1]."""
    if len(logits) < ENOUGH or bool((logits[:, 0] != 0).any()):
        return False
    return bool(((logits[:, 1] >= 0) & (logits[:, 1] <= 1)).all() & (logits[:, 1] > 0).any())


def are_probabilities(values: Array) -> bool:
    """Return whether every row of an array is a distribution, in too many rows for chance."""
    table = as_tensor(values, "logits")
    return table.ndim == 2 and table.is_floating_point() and table.dtype in TOLERANCE and _have_sum(table, 1)


def _have_sum(logits: Tensor, total: int) -> bool:
    """Return whether rows are not negative and have one sum, and are too many for chance."""
    fewest = ENOUGH if total == 1 else 3
    if len(logits) < fewest or bool((logits.amin() < 0) | (logits.amax() > total)):
        return False
    if total > 1 and bool(logits.amax() <= 1):  # many small numbers
        return False
    near = TOLERANCE[logits.dtype] if total == 1 else 0.01 * total
    if not bool(((row_sums(logits) - total).abs() <= near).all()):
        return False
    # One-hot rows may be logits; most rows of percentages have several classes.
    return total == 1 or bool((logits.amax(1) < 0.999 * total).double().mean() > 0.5)


def row_sums(probs: Tensor) -> Tensor:
    """Return the sum of each row, in float32 or better."""
    return probs.sum(dim=1, dtype=torch.float64 if probs.dtype == torch.float64 else torch.float32)


def check_labels(labels: Tensor, n: int, classes: int) -> Labels:
    """Return one label per sample, hard ones as int64; raise if they are not valid."""
    if len(labels) != n:
        question = "; is the table transposed?" if len(labels) == classes else ""
        raise UserError(f"labels has {len(labels)} rows for {n} samples{question}")
    # One-hot labels of a wrong width are an error below, not class numbers.
    labels = _class_numbers(labels) if labels.ndim != 2 or labels.shape[1] in {1, classes} else labels
    if labels.ndim == 1 and not labels.is_floating_point():
        fault = f"is outside 0..{classes - 1} (classes count from 0)"
        if len(labels) and int(labels.min()) == 1 and int(labels.max()) == classes:
            fault += "; these labels count from 1: subtract 1"
        check_rows("labels", labels, (labels >= 0) & (labels < classes), fault)
        return labels.long()
    if labels.ndim != 2 or not labels.is_floating_point() or labels.shape[1] != classes:
        described = f"labels are {labels.dtype} of shape {tuple(labels.shape)}"
        raise UserError(f"{described}; expected {n} integers, or soft labels: ({n}, {classes}) floats")
    check_probs(labels, name="labels")
    return labels


def _class_numbers(labels: Tensor) -> Tensor:
    """Return class numbers of labels that are unsigned, whole floating-point numbers, a column, or one-hot."""
    if labels.dtype in {torch.uint16, torch.uint32, torch.uint64, torch.bool}:
        labels = labels.long()  # few operations know these types
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 1 and labels.is_floating_point() and bool((labels == labels.round()).all()):
        return labels.long()
    if labels.ndim == 2:
        one_hot = (labels.amin(dim=1) == 0) & (labels.amax(dim=1) == 1) & ((labels != 0).sum(dim=1) == 1)
        if labels.is_floating_point() and not bool(one_hot.all()):
            return labels  # soft labels
        check_rows("labels", labels, one_hot, "is not one-hot (a single 1, zeros otherwise)")
        return labels.argmax(dim=1)
    return labels


def _shown(row: Tensor) -> str:
    values = row.reshape(-1)[:6].tolist()
    text = ", ".join(f"{value:.6g}" for value in values) + (", ..." if row.numel() > 6 else "")
    return text if row.ndim == 0 else f"[{text}]"
