"""Functions of a batch that losses share: expectations over labels, label smoothing, focal terms and reduction."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from fedlas import ranks
from fedlas.catalog import one_of
from fedlas.errors import UserError
from fedlas.losses.base.batch import IGNORE_INDEX, Batch, as_batch, full_precision
from fedlas.losses.base.hyperparameters import within
from fedlas.losses.base.input_checks import check_tensors, is_eager_on_cpu

Reduction = Literal["mean", "sum", "none"]


def expected(batch: Batch, weight: Tensor | None, loss_of: Callable[[Tensor], Tensor]) -> Float[Tensor, " n"]:
    """Return the mean of a loss over the label distribution: Σ_k y_k w_k l(k).

    `loss_of` maps log p_k to l(k) elementwise, for one column (hard labels) or for all classes.
    """
    if weight is not None:
        weight = weight.to(batch.logits.dtype)
    if batch.soft:
        target = batch.labels if weight is None else batch.labels * weight
        return (target * loss_of(batch.log_probs)).sum(1)
    if loss_of is torch.neg and not torch.compiler.is_compiling():  # one operator instead of four
        picked = functional.nll_loss(batch.log_probs, batch.labels, reduction="none")
    else:
        picked = loss_of(_pick(batch.log_probs, batch.labels)).squeeze(1)
    return picked if weight is None else picked * weight[batch.labels]


def smoothed(batch: Batch, weight: Tensor | None, alpha: float | Tensor) -> Float[Tensor, " n"]:
    """Return (1 - alpha) CE + alpha E for each sample, with E the cross-entropy to the uniform distribution."""
    log_probs = batch.log_probs if weight is None else batch.log_probs * weight.to(batch.logits.dtype)
    cross_entropy, mean = expected(batch, weight, torch.neg), log_probs.mean(1)
    if is_eager_on_cpu(mean):  # the same value with fewer operators
        return cross_entropy - alpha * (cross_entropy + mean)
    return (1 - alpha) * cross_entropy - alpha * mean


def focal(log_p: Tensor, gamma: float | Tensor) -> Tensor:
    """Return (1 - p)^gamma * (-log p) with a finite gradient, even at p = 1."""
    return -log_p * complement(log_p) ** gamma


def complement(log_p: Tensor) -> Tensor:
    """Return 1 - p, accurate near p = 1 and positive, so that all its powers have a finite gradient."""
    return (-torch.expm1(log_p)).clamp_min(torch.finfo(log_p.dtype).tiny)


def reduce(terms: dict[str, Tensor], batch: Batch, weight: Tensor | None, reduction: Reduction) -> dict[str, Tensor]:
    """Reduce each term over the valid samples; see the docstring of `fedlas.losses.base.loss`."""
    per_sample = terms
    if not batch.all_valid:
        per_sample = {name: torch.where(batch.valid, values, 0) for name, values in terms.items()}
    if reduction == "none":
        return per_sample
    if reduction == "mean" and batch.all_valid and weight is None and not batch.shared:
        return {name: values.mean() for name, values in per_sample.items()}
    totals = {name: values.sum() for name, values in per_sample.items()}
    if batch.shared:
        totals = {name: value * ranks.count() for name, value in totals.items()}
    if reduction == "sum":
        return totals
    count = batch.count()
    denominators = dict.fromkeys(totals, count)
    if weight is not None and not batch.soft:
        weights = batch.total(weight.to(count.dtype)[batch.labels])
        denominators["classification"] = torch.where(weights > 0, weights, 1)
    return {name: value / denominators[name] for name, value in totals.items()}


def smoothed_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    alpha: float | Tensor,
    *,
    weight: Tensor | Sequence[float] | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the cross-entropy with a separate label smoothing for each sample.

    Like `F.cross_entropy(label_smoothing=alpha)`, but alpha may be a tensor with one value per label, and has a
    gradient.
    """
    one_of("reduction", reduction, ("mean", "sum", "none"))
    check_tensors(logits, labels)
    with full_precision(logits):
        batch = as_batch(logits, labels, ignore_index=ignore_index)
        if isinstance(alpha, Tensor) and alpha.ndim > 0:
            if tuple(alpha.shape) != shape_without_classes(logits):
                raise UserError(f"alpha must have shape {shape_without_classes(logits)}, not {tuple(alpha.shape)}")
            alpha = alpha.reshape(-1).to(batch.logits.dtype)
        elif not isinstance(alpha, Tensor):
            within("alpha", alpha, 0, 1)
        factors = class_weight(weight, logits.shape[1])
        value = sum_of_terms(reduce({"classification": smoothed(batch, factors, alpha)}, batch, factors, reduction))
        return value.reshape(shape_without_classes(logits)) if reduction == "none" else value


def sum_of_terms(terms: dict[str, Tensor]) -> Tensor:
    """Return the sum of all terms."""
    first, *others = terms.values()
    return sum(others, first)


def shape_without_classes(logits: Tensor) -> tuple[int, ...]:
    """Return the shape of hard labels for logits."""
    return (logits.shape[0], *logits.shape[2:])


def class_weight(weight: Tensor | Sequence[float] | None, num_classes: int | None) -> Tensor | None:
    """Return class weights as a tensor; raise unless there is one floating-point number per class."""
    if weight is None:
        return None
    expected_type = "weight must be one floating-point number per class, such as [1.0, 0.5, 2.0]"
    try:
        weight = torch.as_tensor(weight, dtype=None if isinstance(weight, Tensor) else torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{expected_type}, not {weight!r}") from error
    if weight.ndim != 1 or not weight.is_floating_point():
        raise UserError(f"{expected_type}, not a tensor of {weight.dtype} and shape {tuple(weight.shape)}")
    if num_classes is not None and len(weight) != num_classes:
        raise UserError(f"weight has {len(weight)} entries for {num_classes} classes")
    return weight


def _pick(x: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, "n 1"]:
    """Return the entry of the label in each row."""
    if not torch.compiler.is_compiling():
        return x.gather(1, labels.unsqueeze(1))
    # The gradient of a gather is a scatter into a new tensor; Inductor fuses the gradient of a masked sum.
    is_label = torch.arange(x.shape[1], device=x.device) == labels.unsqueeze(1)
    picked = torch.where(is_label, x, 0).sum(1)
    # Labels are not checked here; a label out of range gives NaN instead of a loss of 0.
    return torch.where((labels >= 0) & (labels < x.shape[1]), picked, torch.nan).unsqueeze(1)
