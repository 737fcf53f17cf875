"""The end of a step in few Triton kernels: norm of the gradient, SGD with momentum.

    gradients ─► flat ─► norm ─► bad? skip? clip, rates, step + 1
                   └──────────────► SGD ─► weights

All gradients lie in one tensor, one after the other, each from the start of a tile on and with zeros up to the next
(`blocks`); first those of the network, then those of the loss. So the norm is one pass over it, and its last program
does at once what else a step has to decide. Gradients that lie elsewhere are copied there first, and stay as long as
they came: SGD alone sees them clipped. While a step is captured nobody can look at gradients, so narrow ones are read
where they are, and never become wide in memory; that changes no bit.
`TrainStep` says the same in torch, for all that these kernels are not made for. Equal inputs give equal bits.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fedlas.training.accelerators import batch_norm, metric_sums
from fedlas.training.accelerators.batch_norm import finished
from fedlas.training.accelerators.parameter_blocks import (
    ALIGNED,
    BLOCK,
    EVEN,
    TILE,
    Layout,
    is_plain,
    laid_out,
    table_of,
)
from fedlas.training.accelerators.precompile import launch, precompilation
from fedlas.training.accelerators.resnet import FusedResNet
from fedlas.training.epoch_metrics import EpochMetrics
from fedlas.training.optimizer import OptimizerStep, build_optimizer, parameters_of
from fedlas.training.recipe import Recipe

BYTES = tl.constexpr(ALIGNED // 2)  # of narrow gradients that are read together: as many as of wide ones
SUMS = 2048  # of programs that the last one adds at a time
COLUMNS = 5  # of the table of blocks: those that all such tables have, address of memory, group


@triton.jit
@no_type_check
def _gradient(flat, address, place, there):
    """Read gradients: narrow ones where they are, if that address is known, others in their slots."""
    is_narrow = address != 0
    narrow = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), BYTES)
    small = tl.load(narrow + place, mask=tl.where(is_narrow, there, False), other=0.0)
    large = tl.load(flat + place, mask=tl.where(is_narrow, False, there), other=0.0)
    return tl.where(is_narrow, small.to(tl.float32), large)


@triton.jit
@no_type_check
def _totals(partial, net, tiles, SUMS: tl.constexpr):
    """Add up what all programs left, always in one order, of the network and of the loss."""
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
    flat, blocks, sources, partial, counter, fine, table, factors, rates, scales, count, first_bad, skip, steps,
    lengths, net, rows, groups, clipped, clip,
    CLIPS: tl.constexpr, TOGETHER: tl.constexpr, GROUPS: tl.constexpr, SUMS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Find the length of the gradient; the last program decides what becomes of the step, and counts it."""
    step, bad_before, is_fine = tl.load(count), tl.load(first_bad), tl.load(fine) != 0
    rate = tl.load(table + tl.minimum(step, rows - 1))
    tile, place = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    about = blocks + tile * (TILE // BLOCK) * COLUMNS
    left, source = tl.load(about + 1), tl.load(sources + tl.load(about + 2))
    # What comes after the last number of a slot is zero, and a narrow gradient has as many numbers as are read.
    value = _gradient(flat, source, tile * TILE + place, place < tl.cdiv(left, EVEN) * EVEN)
    tl.store(partial + tile, tl.sum(value * value, 0))
    if finished(counter, tl.num_programs(0)):
        of_net, of_loss = _totals(partial, net, tl.num_programs(0), SUMS)
        if TOGETHER:
            of_net += of_loss
        norm = tl.sqrt_rn(of_net)
        finite = (norm < float("inf")) & (of_loss < float("inf"))  # NaN is not less, either
        overflow = finite == 0
        bad = overflow | (is_fine == 0)
        bad_now = tl.where((bad_before < 0) & bad, step, bad_before)
        skipped = (bad_now >= 0) | overflow
        tl.store(first_bad, bad_now)
        tl.store(skip, tl.where(skipped, 1.0, 0.0))
        tl.store(steps, tl.load(steps) + 1.0)
        tl.store(lengths, tl.load(lengths) + tl.where(skipped, 0.0, norm))
        tl.store(count, step + 1)
        group = tl.arange(0, GROUPS)
        known = group < groups
        tl.store(rates + group, rate * tl.load(factors + group, mask=known, other=0.0), mask=known)
        if CLIPS:
            shorter = tl.minimum(tl.div_rn(clip, norm + 1e-6), 1.0)
            tl.store(scales + group, tl.where(group < clipped, shorter, 1.0), mask=known)


@triton.jit
@no_type_check
def _move(
    flat, source, start, parameter, memory, left, scale, rate, decay, momentum,
    FULL: tl.constexpr, HAS_MEMORY: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take a step with one block; of whole ones, many bytes are read together."""
    place = tl.arange(0, BLOCK)
    there = place < (BLOCK if FULL else left)
    value = tl.load(parameter + place, mask=there)
    if HAS_MEMORY:
        before = tl.load(memory + place, mask=there)
    change = _gradient(flat, source, start + place, there) * scale + decay * value
    if HAS_MEMORY:
        gradient = change
        change = momentum * before + gradient
        tl.store(memory + place, change, mask=there)
        if NESTEROV:
            change = gradient + momentum * change
    tl.store(parameter + place, value - rate * change, mask=there)


@triton.jit
@no_type_check
def sgd_kernel(
    flat, blocks, sources, scales, rates, decays, skip, momentum,
    HAS_MEMORY: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Take a step with all parameters, a block each program, unless it is to be skipped."""
    block = tl.program_id(0).to(tl.int64)
    about = blocks + block * COLUMNS
    parameter = tl.multiple_of(tl.load(about).to(tl.pointer_type(tl.float32)), ALIGNED)
    left, source = tl.load(about + 1), tl.load(sources + tl.load(about + 2))
    memory = tl.multiple_of(tl.load(about + 3).to(tl.pointer_type(tl.float32)), ALIGNED)
    group = tl.load(about + 4)
    scale, rate, decay = tl.load(scales + group), tl.load(rates + group), tl.load(decays + group)
    given = flat, source, block * BLOCK, parameter, memory, left, scale, rate, decay, momentum
    if tl.load(skip) == 0:
        if left >= BLOCK:
            _move(*given, True, HAS_MEMORY, NESTEROV, BLOCK)
        else:
            _move(*given, False, HAS_MEMORY, NESTEROV, BLOCK)


def fits(recipe: Recipe, optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Return whether the kernels can take the steps of an optimizer."""
    if recipe.optimizer != "sgd" or recipe.precision == "fp16" or not hasattr(tl, "tuple"):
        return False
    for parameter in parameters_of(optimizer):
        both = parameter, optimizer.state[parameter].get("momentum_buffer", parameter)
        if both[0].stride() != both[1].stride() or not all(is_plain(one) for one in both):
            return False
    reason = batch_norm.why_not(device) or (_why_not(recipe, device) if device.type == "cuda" else None)
    if reason is not None:
        warnings.warn(f"custom kernels cannot end a step, torch's optimizer has to do: {reason}", stacklevel=2)
    return reason is None


def _why_not(recipe: Recipe, device: torch.device) -> str | None:
    """Take a step with a small layer, and give the reason why that cannot be done, if there is one."""

    def work() -> None:
        layer = nn.Linear(64, 64).to(device)
        optimizer, rates = build_optimizer(recipe, layer, nn.Identity(), torch.ones(2), device)
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        count, first_bad = (torch.full((), value, dtype=torch.int64, device=device) for value in (0, -1))
        steps, lengths, samples, correct, total = torch.zeros(5, dtype=torch.float64, device=device).unbind()
        plain = OptimizerStep(recipe, layer, nn.Identity(), optimizer, rates)
        FusedOptimizerStep(plain).step(count == 0, count, first_bad, steps, lengths)
        labels = torch.zeros(64, dtype=torch.int64, device=device)
        metric_sums.add_batch(layer.weight.detach(), labels, samples, correct, [rates.now[0]], [total])
        psi, gamma, alpha_i, edges = torch.ones(4, 1, device=device)
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        metric_sums.add_gate(labels[:1], psi, gamma, alpha_i, 1.0, edges, labels.to(torch.int8), sums)

    def rehearsed() -> None:
        with precompilation(device) as one, one.going_on():
            work()
        work()

    return batch_norm.reason_against(rehearsed)


class FusedOptimizerStep:
    """The steps of one optimizer.

    It remembers addresses: of parameters, of what the optimizer remembers of them, and of rates. All of these are only
    ever changed in place.

    Args:
        plain: the same step by torch, with SGD whose parameters fit; used where a parameter has no gradient.
        model: network that hands over its gradients, if there is one.
    """

    def __init__(self, plain: OptimizerStep, model: FusedResNet | None = None) -> None:
        self.plain, self.model = plain, model
        self.recipe, self.rates, self.skip, self.device = plain.recipe, plain.rates, plain.skip, plain.device
        optimizer = plain.optimizer
        groups, of_loss = optimizer.param_groups, set(plain.loss.parameters())
        self.groups_of_net = sum(group["params"][0] not in of_loss for group in groups)
        self.parameters = list(parameters_of(optimizer))
        self.optimizer = optimizer
        self.addresses = self._addresses()
        self.net, layout = _laid_out(groups, self.groups_of_net)
        self.flat = torch.zeros(layout.end, device=self.device)
        self.slots = dict(zip(self.parameters, layout.views(self.flat, self.parameters), strict=True))
        self.blocks = _table(self.parameters, self._memory(), groups, layout).to(self.device)
        self.decays = torch.tensor([float(group["weight_decay"]) for group in groups], device=self.device)
        self.scales = torch.ones(len(groups), device=self.device)
        self.partial = torch.zeros(layout.end // TILE, device=self.device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.all_in_slots = torch.zeros(len(self.parameters), dtype=torch.int64, device=self.device)
        self.narrow: dict[Tensor, Tensor] = {}
        self.captured: list[Int[Tensor, " parameters"]] = []
        self.captures = False
        self.late: list[int] = []

    def receiving(self) -> AbstractContextManager[None]:
        """Return a context in which the network writes its gradients to the slots."""
        return nullcontext() if self.model is None else self.model.gradients_to(self)

    def __call__(
        self, finite: Bool[Tensor, ""], count: Int[Tensor, ""], first_bad: Int[Tensor, ""], metrics: EpochMetrics
    ) -> None:
        """Update the parameters, or record the first bad step; see `OptimizerStep`."""
        if self.ready:
            self.step(finite, count, first_bad, metrics.total("steps"), metrics.total("gradient_norm"))
        else:
            self.widen()
            self.plain(finite, count, first_bad, metrics)

    def _memory(self) -> list[Tensor]:
        """List what the optimizer remembers of each parameter; itself, where that is nothing."""
        return [self.optimizer.state[one].get("momentum_buffer", one) for one in self.parameters]

    def _addresses(self) -> list[int]:
        return [one.data_ptr() for one in (*self.parameters, *self._memory())]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Take over narrow gradients as they are, while one step is captured.

        Where they lie is known before the end, and written down after it: replays need not do it again.
        """
        if self.recipe.accumulate > 1:  # parts are added in float32
            yield
            return
        self.captured.append(torch.zeros_like(self.all_in_slots))
        self.captures, self.late = True, []
        try:
            yield
            if self.late:
                self.captured[-1].copy_(torch.tensor(self.late))
        finally:
            self.captures, self.late = False, []
            self.narrow.clear()

    def take(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Take over a gradient as it is, if that can be done; else it has to become wide, and the parameter's own."""
        if parameter in self.narrow:  # of another pass through the network: the two are added up
            self._give_back(parameter)
        possible = self.captures and parameter in self.slots and _stays_narrow(parameter, gradient)
        if possible and parameter.grad is None:
            self.narrow[parameter] = gradient
        return parameter in self.narrow

    def widen(self) -> None:
        """Let parameters have the gradients that were taken over."""
        for parameter in list(self.narrow):
            self._give_back(parameter)

    def _give_back(self, parameter: Tensor) -> None:
        """Add a gradient that was taken over to what the parameter has."""
        gradient = self.narrow.pop(parameter).float()
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    @property
    def ready(self) -> bool:
        """Whether all parameters have a gradient, and all is where it was; torch leaves those without one alone."""
        there = all(parameter.grad is not None or parameter in self.narrow for parameter in self.parameters)
        return there and self._addresses() == self.addresses

    @torch.no_grad()
    def step(
        self,
        fine: Bool[Tensor, ""],
        count: Int[Tensor, ""],
        first_bad: Int[Tensor, ""],
        steps: Float[Tensor, ""],
        lengths: Float[Tensor, ""],
    ) -> None:
        """Take a step, or note why not.

        Args:
            fine: whether the loss is fine.
            count: number of the step, raised by one.
            first_bad: number of the first bad step, below zero if there was none.
            steps: sum that one is added to.
            lengths: sum that the length of the gradient is added to, unless the step is skipped.
        """
        self._gather()
        recipe, table, sources = self.recipe, self.rates.table, self._sources()
        groups = len(self.scales)
        launch(norm_kernel, (len(self.partial),),
            self.flat, self.blocks, sources, self.partial, self.counter, fine, table, self.rates.factors,
            self.rates.now, self.scales, count, first_bad, self.skip, steps, lengths, self.net // TILE, len(table),
            groups, groups if recipe.clip_loss else self.groups_of_net, float(recipe.clip or 0),
            CLIPS=recipe.clip is not None, TOGETHER=recipe.clip_loss, GROUPS=triton.next_power_of_2(groups),
            SUMS=SUMS, TILE=TILE, BLOCK=BLOCK, COLUMNS=COLUMNS, EVEN=EVEN, num_warps=8,
        )  # fmt: skip
        launch(sgd_kernel, (len(self.blocks),),
            self.flat, self.blocks, sources, self.scales, self.rates.now, self.decays, self.skip,
            float(recipe.momentum), HAS_MEMORY=recipe.momentum > 0, NESTEROV=recipe.nesterov, BLOCK=BLOCK,
            COLUMNS=COLUMNS, ALIGNED=ALIGNED, num_warps=4,
        )  # fmt: skip
        self.narrow.clear()

    def _gather(self) -> None:
        """Bring those gradients to their slots that are elsewhere, but for narrow ones that are all there is."""
        for parameter in [one for one in self.narrow if one.grad is not None]:  # a weight in the loss, say
            self._give_back(parameter)
        pairs: list[tuple[Tensor, Any]] = [
            (slot, parameter.grad) for parameter, slot in self.slots.items() if parameter not in self.narrow
        ]
        away = [(slot, gradient) for slot, gradient in pairs if slot.data_ptr() != gradient.data_ptr()]
        if away:
            torch._foreach_copy_([slot for slot, _ in away], [gradient for _, gradient in away])

    def _sources(self) -> Int[Tensor, " parameters"]:
        """Say of each gradient where it lies: zero for its slot, else where narrow slots would begin for it to be one.

        So a narrow gradient is as many numbers away from its source as it would be from the start of all slots.
        """
        if not self.narrow:
            return self.all_in_slots
        sources = dict.fromkeys(self.slots, 0)
        for parameter, gradient in self.narrow.items():
            start = int(self.slots[parameter].storage_offset())
            sources[parameter] = gradient.data_ptr() - gradient.element_size() * start
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.late = list(sources.values())
            return self.captured[-1]
        return self.captured[-1].copy_(torch.tensor(list(sources.values())))


def _stays_narrow(parameter: Tensor, gradient: Tensor) -> bool:
    """Return whether the kernels can read a narrow gradient as it is, and nobody else wants to."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return False
    if gradient.dtype != torch.bfloat16 or gradient.data_ptr() % ALIGNED or gradient.numel() % EVEN:
        return False
    strides = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return parameter.requires_grad and all(size == 1 or mine == its for size, mine, its in strides)


def _laid_out(groups: list[dict[str, Any]], groups_of_net: int) -> tuple[int, Layout]:
    """Return where gradients of the network end, and how all lie."""
    of_net, of_loss = (
        [one for group in part for one in group["params"]] for part in (groups[:groups_of_net], groups[groups_of_net:])
    )
    first = laid_out(of_net)
    second = laid_out(of_loss, first.end)
    return first.end, Layout(first.starts + second.starts, second.end)


def _table(
    parameters: list[Tensor], memory: list[Tensor], groups: list[dict[str, Any]], layout: Layout
) -> Int[Tensor, "blocks 5"]:
    """List the blocks of parameters, with the memory that belongs to each and its group."""
    rows, remembered = table_of(parameters, layout), table_of(memory, layout)
    group = torch.tensor([number for number, group in enumerate(groups) for _ in group["params"]])
    return torch.cat([rows, remembered[:, :1], group[rows[:, 2:]]], 1)
