"""Fused optimizer step: gradient norm, clipping, learning rate and SGD with momentum in two Triton kernels.

    gradients ─► flat ─► norm ─► bad? skip? clip, rates, step + 1
                   └──────────────► SGD ─► weights

All gradients are slots of one flat tensor, each aligned to a tile and padded with zeros (`parameter_blocks`); first
those of the network, then those of the loss. So the norm is one pass over the tensor, and its last program also decides
whether to skip the step. Gradients elsewhere in memory are copied to their slots first. They are not clipped in place:
SGD applies the factor. `TrainStep` computes the same with torch, for everything that these kernels do not support.
Equal inputs give equal bits.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Int
from torch import Tensor, nn

from fedlas.training.accelerators import metric_sums
from fedlas.training.accelerators.batch_norm import is_last_program
from fedlas.training.accelerators.parameter_blocks import ALIGNED, BLOCK, TILE, Layout, block_table, is_plain, lay_out
from fedlas.training.accelerators.resnet import FusedResNet
from fedlas.training.accelerators.trial import run_trial
from fedlas.training.epoch_metrics import EpochMetrics
from fedlas.training.optimizer import SKIP, build_optimizer, parameters_of
from fedlas.training.recipe import Recipe
from fedlas.training.schedule import LearningRates

SUMS = 2048  # partial sums that the last program adds at a time
COLUMNS = 5  # of the block table: those of `block_table`, address of the momentum buffer, group


@triton.jit
@no_type_check
def _add_partial_sums(partial, net, tiles, SUMS: tl.constexpr):
    """Add the partial sums of all programs in a fixed order, separately for the network and the loss."""
    of_net, of_loss = tl.zeros((SUMS,), tl.float32), tl.zeros((SUMS,), tl.float32)
    for start in range(0, tiles, SUMS):
        tile = start + tl.arange(0, SUMS)
        value = tl.load(partial + tile, mask=tile < tiles, other=0.0)
        of_net += tl.where(tile < net, value, 0.0)
        of_loss += tl.where(tile < net, 0.0, value)
    return tl.sum(of_net, 0), tl.sum(of_loss, 0)


@triton.jit
@no_type_check
def norm_kernel(
    flat, partial, counter, valid_flag, table, factors, rates, scales, count, first_bad, skip, steps,
    norm_sum, net, rows, groups, clipped, clip,
    CLIPS: tl.constexpr, CLIP_TOGETHER: tl.constexpr, GROUPS: tl.constexpr, SUMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute the gradient norm; the last program decides whether to skip the step, and counts it."""
    step, bad_before, loss_is_valid = tl.load(count), tl.load(first_bad), tl.load(valid_flag) != 0
    rate = tl.load(table + tl.minimum(step, rows - 1))
    tile, offsets = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    value = tl.load(flat + tile * TILE + offsets)  # the padding of a slot is zero
    tl.store(partial + tile, tl.sum(value * value, 0))
    if is_last_program(counter, tl.num_programs(0)):
        of_net, of_loss = _add_partial_sums(partial, net, tl.num_programs(0), SUMS)
        if CLIP_TOGETHER:
            of_net += of_loss
        norm = tl.sqrt_rn(of_net)
        finite = (norm < float("inf")) & (of_loss < float("inf"))  # NaN compares as false
        overflow = finite == 0
        bad = overflow | (loss_is_valid == 0)
        bad_now = tl.where((bad_before < 0) & bad, step, bad_before)
        skipped = (bad_now >= 0) | overflow
        tl.store(first_bad, bad_now)
        tl.store(skip, tl.where(skipped, 1.0, 0.0))
        tl.store(steps, tl.load(steps) + 1.0)
        tl.store(norm_sum, tl.load(norm_sum) + tl.where(skipped, 0.0, norm))
        tl.store(count, step + 1)
        group = tl.arange(0, GROUPS)
        in_range = group < groups
        tl.store(rates + group, rate * tl.load(factors + group, mask=in_range, other=0.0), mask=in_range)
        if CLIPS:
            factor = tl.minimum(tl.div_rn(clip, norm + 1e-6), 1.0)
            tl.store(scales + group, tl.where(group < clipped, factor, 1.0), mask=in_range)


@triton.jit
@no_type_check
def _update_block(
    gradient, parameter, momentum_buffer, remaining, scale, rate, decay, momentum,
    FULL: tl.constexpr, HAS_MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of parameters; FULL blocks use vectorised loads."""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < (BLOCK if FULL else remaining)
    value = tl.load(parameter + offsets, mask=mask)
    if HAS_MOMENTUM:
        velocity = tl.load(momentum_buffer + offsets, mask=mask)
    decayed = tl.load(gradient + offsets, mask=mask) * scale + decay * value
    change = decayed
    if HAS_MOMENTUM:
        change = momentum * velocity + decayed
        tl.store(momentum_buffer + offsets, change, mask=mask)
        if NESTEROV:
            change = decayed + momentum * change
    tl.store(parameter + offsets, value - rate * change, mask=mask)


@triton.jit
@no_type_check
def sgd_kernel(
    flat, blocks, scales, rates, decays, skip, momentum,
    HAS_MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Update all parameters, one block per program, unless the step is skipped."""
    block = tl.program_id(0).to(tl.int64)
    entry = blocks + block * COLUMNS
    parameter = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.float32)), ALIGNED)
    remaining = tl.load(entry + 1)
    momentum_buffer = tl.multiple_of(tl.load(entry + 3).to(tl.pointer_type(tl.float32)), ALIGNED)
    group = tl.load(entry + 4)
    scale, rate, decay = tl.load(scales + group), tl.load(rates + group), tl.load(decays + group)
    arguments = flat + block * BLOCK, parameter, momentum_buffer, remaining, scale, rate, decay, momentum
    if tl.load(skip) == 0:
        if remaining >= BLOCK:
            _update_block(*arguments, True, HAS_MOMENTUM, NESTEROV, BLOCK)
        else:
            _update_block(*arguments, False, HAS_MOMENTUM, NESTEROV, BLOCK)


def fits(recipe: Recipe, optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether the kernels support an optimizer."""
    if recipe.optimizer != "sgd" or recipe.precision == "fp16" or not hasattr(tl, "tuple"):
        return False
    for parameter in parameters_of(optimizer):
        pair = parameter, optimizer.state[parameter].get("momentum_buffer", parameter)
        if pair[0].stride() != pair[1].stride() or not all(is_plain(tensor) for tensor in pair):
            return False
    reason = run_trial(lambda: _try_step(recipe, device))
    if reason is not None:
        warnings.warn(
            f"the fused optimizer step cannot be used, torch's optimizer is used instead: {reason}", stacklevel=2
        )
    return reason is None


def _try_step(recipe: Recipe, device: torch.device) -> None:
    """Take a step with a small layer, and add to all sums."""
    layer = nn.utils.skip_init(nn.Linear, 64, 64, device=device)  # draws no random numbers
    optimizer, rates = build_optimizer(recipe, layer, nn.Identity(), torch.ones(2), device)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    count, first_bad = (torch.full((), value, dtype=torch.int64, device=device) for value in (0, -1))
    metrics = EpochMetrics(device, metric_sums)
    FusedOptimizerStep(recipe, optimizer, rates, nn.Identity())(count == 0, count, first_bad, metrics)
    logits, labels = torch.zeros(64, 64, device=device), torch.zeros(64, dtype=torch.int64, device=device)
    metrics.add_batch(torch.zeros((), device=device), {}, logits, labels)
    psi, gamma, alpha_i, edges = torch.ones(4, 1, device=device)
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    metric_sums.add_gate(labels[:1], psi, gamma, alpha_i, 1.0, edges, labels.to(torch.int8), sums)


class FusedOptimizerStep:
    """Optimizer step of one optimizer by the custom kernels.

    It stores the addresses of parameters, momentum buffers and learning rates, which are only changed in place.

    Args:
        recipe: clipping and momentum.
        optimizer: SGD whose parameters fit.
        rates: its learning rates.
        loss: the loss, whose parameters are clipped only on request.
        model: network that hands over its gradients, if there is one.
    """

    def __init__(
        self, recipe: Recipe, optimizer: torch.optim.Optimizer, rates: LearningRates, loss: nn.Module,
        model: FusedResNet | None = None,
    ) -> None:  # fmt: skip
        self.recipe, self.rates, self.model = recipe, rates, model
        self.skip: Tensor = getattr(optimizer, SKIP)
        self.device = self.skip.device
        groups, of_loss = optimizer.param_groups, set(loss.parameters())
        self.groups_of_net = sum(group["params"][0] not in of_loss for group in groups)
        self.parameters = list(parameters_of(optimizer))
        self.optimizer = optimizer
        self.addresses = self._addresses()
        self.net_end, layout = _gradient_layout(groups, self.groups_of_net)
        self.flat = torch.zeros(layout.end, device=self.device)
        self.slots = dict(zip(self.parameters, layout.views(self.flat, self.parameters), strict=True))
        self.blocks = _parameter_table(self.parameters, self._momentum_buffers(), groups, layout).to(self.device)
        self.decays = torch.tensor([float(group["weight_decay"]) for group in groups], device=self.device)
        self.scales = torch.ones(len(groups), device=self.device)
        self.partial = torch.zeros(layout.end // TILE, device=self.device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=self.device)

    def gradient_slots(self) -> AbstractContextManager[None]:
        """Return a context in which the network writes its gradients to the slots."""
        return nullcontext() if self.model is None else self.model.gradients_to(self.slots)

    def _momentum_buffers(self) -> list[Tensor]:
        """Return the momentum buffer of each parameter, or the parameter itself if it has none."""
        return [self.optimizer.state[parameter].get("momentum_buffer", parameter) for parameter in self.parameters]

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (*self.parameters, *self._momentum_buffers())]

    @property
    def ready(self) -> bool:
        """Whether all parameters have a gradient and no address changed; torch skips parameters without one."""
        complete = all(parameter.grad is not None for parameter in self.parameters)
        return complete and self._addresses() == self.addresses

    @torch.no_grad()
    def __call__(
        self, loss_is_valid: Bool[Tensor, ""], count: Int[Tensor, ""], first_bad: Int[Tensor, ""], metrics: EpochMetrics
    ) -> None:
        """Update the parameters, or record the first bad step; see `FusedStep`."""
        self.copy_to_slots()
        steps, norm_sum = metrics.total("steps"), metrics.total("gradient_norm")
        recipe, table = self.recipe, self.rates.table
        groups = len(self.scales)
        norm_kernel[(len(self.partial),)](
            self.flat, self.partial, self.counter, loss_is_valid, table, self.rates.factors, self.rates.now,
            self.scales, count, first_bad, self.skip, steps, norm_sum, self.net_end // TILE, len(table), groups,
            groups if recipe.clip_loss else self.groups_of_net, float(recipe.clip or 0),
            CLIPS=recipe.clip is not None, CLIP_TOGETHER=recipe.clip_loss, GROUPS=triton.next_power_of_2(groups),
            SUMS=SUMS, TILE=TILE, num_warps=8,
        )  # fmt: skip
        sgd_kernel[(len(self.blocks),)](
            self.flat, self.blocks, self.scales, self.rates.now, self.decays, self.skip,
            float(recipe.momentum), HAS_MOMENTUM=recipe.momentum > 0, NESTEROV=recipe.nesterov, BLOCK=BLOCK,
            COLUMNS=COLUMNS, ALIGNED=ALIGNED, num_warps=4,
        )  # fmt: skip

    def copy_to_slots(self) -> None:
        """Copy gradients to their slots."""
        pairs: list[tuple[Tensor, Any]] = [(slot, parameter.grad) for parameter, slot in self.slots.items()]
        to_copy = [(slot, gradient) for slot, gradient in pairs if slot.data_ptr() != gradient.data_ptr()]
        if to_copy:
            torch._foreach_copy_([slot for slot, _ in to_copy], [gradient for _, gradient in to_copy])


def _gradient_layout(groups: list[dict[str, Any]], groups_of_net: int) -> tuple[int, Layout]:
    """Return the end of the gradients of the network, and the layout of all gradients."""
    of_net, of_loss = (
        [parameter for group in selected for parameter in group["params"]]
        for selected in (groups[:groups_of_net], groups[groups_of_net:])
    )
    first = lay_out(of_net)
    second = lay_out(of_loss, first.end)
    return first.end, Layout(first.starts + second.starts, second.end)


def _parameter_table(
    parameters: list[Tensor], momentum_buffers: list[Tensor], groups: list[dict[str, Any]], layout: Layout
) -> Int[Tensor, "blocks 5"]:
    """Return the block table of the parameters, with the momentum buffer and the group of each block."""
    rows, momentum_rows = block_table(parameters, layout), block_table(momentum_buffers, layout)
    group = torch.tensor([number for number, group in enumerate(groups) for _ in group["params"]])
    return torch.cat([rows, momentum_rows[:, :1], group[rows[:, 2:]]], 1)
