"""The end of a step in few Triton kernels: sums of the epoch, norm of the gradient, SGD with momentum.

    logits, loss ─► tally ─► samples, correct, loss and its terms
    gradients ─► flat ─► norm ─► bad? skip? clip, rates, step + 1
                   └──────────────► SGD ─► weights

All gradients lie in one tensor, one after the other, each from the start of a block on and with zeros up to the next;
first those of the network, then those of the loss. So the norm is one pass over it, and its last program does at once
what else a step has to decide. Gradients that lie elsewhere are copied there first, and stay as long as they came:
SGD alone sees them clipped. `TrainStep` says the same in torch, for all that these kernels are not made for.
Equal inputs give equal bits.
"""

import warnings
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fedlas.train import kernels
from fedlas.train.kernels import finished
from fedlas.train.optim import SKIP, Rates, build_optimizer, parameters_of
from fedlas.train.recipe import Recipe

BLOCK = 2048  # numbers of one parameter that a program moves
TILE = 8192  # gradients whose squares a program adds at a time; a multiple of the block
PROGRAMS = 256  # that share the norm
ALIGNED = 16  # bytes that are read together
COLUMNS = 4  # of the table of blocks: addresses of parameter and memory, numbers in the block, group
LOGITS = 4096  # that a program looks at
WIDEST = 16384  # classes; more do not fit into the registers


@triton.jit
@no_type_check
def _squares(flat, first, last, TILE: tl.constexpr, PROGRAMS: tl.constexpr):
    """Sum the squares of this program's tiles."""
    total = tl.zeros((TILE,), tl.float32)
    for tile in range(first + tl.program_id(0).to(tl.int64), last, PROGRAMS):
        value = tl.load(flat + tile * TILE + tl.arange(0, TILE))
        total += value * value
    return tl.sum(total, 0)


@triton.jit
@no_type_check
def norm_kernel(
    flat, partial, counter, fine, table, factors, rates, scales, count, first_bad, skip, steps, norms,
    net, tiles, rows, groups, clipped, clip,
    CLIPS: tl.constexpr, TOGETHER: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Find the length of the gradient; the last program decides what becomes of the step, and counts it."""
    step, bad_before, is_fine = tl.load(count), tl.load(first_bad), tl.load(fine) != 0
    rate = tl.load(table + tl.minimum(step, rows - 1))
    program = tl.arange(0, PROGRAMS)
    tl.store(partial + tl.program_id(0), _squares(flat, 0, net, TILE, PROGRAMS))
    tl.store(partial + PROGRAMS + tl.program_id(0), _squares(flat, net, tiles, TILE, PROGRAMS))
    if finished(counter, tl.num_programs(0)):
        there = program < tl.num_programs(0)
        of_net = tl.sum(tl.load(partial + program, mask=there, other=0.0), 0)
        of_loss = tl.sum(tl.load(partial + PROGRAMS + program, mask=there, other=0.0), 0)
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
        tl.store(norms, tl.load(norms) + tl.where(skipped, 0.0, norm))
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
    flat, parameter, memory, left, scale, rate, decay, momentum,
    FULL: tl.constexpr, HAS_MEMORY: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take a step with one block; whole ones need no mask, so that many bytes are read together."""
    place = tl.arange(0, BLOCK)
    there = None if FULL else place < left
    value = tl.load(parameter + place, mask=there)
    change = tl.load(flat + place, mask=there) * scale + decay * value
    if HAS_MEMORY:
        gradient = change
        change = momentum * tl.load(memory + place, mask=there) + gradient
        tl.store(memory + place, change, mask=there)
        if NESTEROV:
            change = gradient + momentum * change
    tl.store(parameter + place, value - rate * change, mask=there)


@triton.jit
@no_type_check
def sgd_kernel(
    flat, blocks, scales, rates, decays, skip, momentum,
    HAS_MEMORY: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Take a step with all parameters, a block each program, unless it is to be skipped."""
    block = tl.program_id(0).to(tl.int64)
    about = blocks + block * COLUMNS
    parameter = tl.multiple_of(tl.load(about).to(tl.pointer_type(tl.float32)), ALIGNED)
    memory = tl.multiple_of(tl.load(about + 1).to(tl.pointer_type(tl.float32)), ALIGNED)
    left, group = tl.load(about + 2), tl.load(about + 3)
    scale, rate, decay = tl.load(scales + group), tl.load(rates + group), tl.load(decays + group)
    here = flat + block * BLOCK
    if tl.load(skip) == 0:
        if left == BLOCK:
            _move(here, parameter, memory, left, scale, rate, decay, momentum, True, HAS_MEMORY, NESTEROV, BLOCK)
        else:
            _move(here, parameter, memory, left, scale, rate, decay, momentum, False, HAS_MEMORY, NESTEROV, BLOCK)


@triton.jit
@no_type_check
def tally_kernel(
    logits, labels, samples, correct, means, sums, rows, classes, down, across,
    MEANS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add a batch to the sums of the epoch.

    A label is the network's answer if no other class is ahead: has a larger logit, or the same and comes first. NaN is
    larger than all numbers, as torch has it.
    """
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    label = tl.load(labels + row, mask=row < rows, other=-1)
    known = (label >= 0) & (label < classes)
    start = logits + row.to(tl.int64) * down
    own = tl.load(start + label * across, mask=known, other=0.0).to(tl.float32)
    there = (row < rows) & (column < classes)
    other = tl.load(start + column * across, mask=there, other=-float("inf")).to(tl.float32)
    first = column < label
    is_nan, own_is_nan = other != other, own != own  # noqa: PLR0124
    ahead = tl.where(own_is_nan, is_nan & first, is_nan | (other > own) | ((other == own) & first))
    hits = known & (tl.sum(ahead.to(tl.int32), 1, keep_dims=True) == 0)
    tl.atomic_add(correct, tl.sum(hits.to(tl.int32)).to(tl.float64))  # whole numbers: no order changes their sum
    if tl.program_id(0) == 0:
        tl.store(samples, tl.load(samples) + rows)
        for number in tl.static_range(MEANS):
            tl.store(sums[number], tl.load(sums[number]) + tl.load(means[number]) * rows)


def tally(
    logits: Float[Tensor, "n classes"],
    labels: Int[Tensor, " n"],
    samples: Float[Tensor, ""],
    correct: Float[Tensor, ""],
    means: list[Tensor],
    sums: list[Tensor],
) -> bool:
    """Add to the sums of an epoch: samples, right answers, and means times samples; say whether that is possible."""
    rows, classes = logits.shape
    if classes > WIDEST:
        return False
    columns = triton.next_power_of_2(classes)
    height = max(1, LOGITS // columns)
    tally_kernel[(triton.cdiv(rows, height),)](
        logits, labels.contiguous(), samples, correct, tuple(means), tuple(sums), rows, classes, *logits.stride(),
        MEANS=len(means), ROWS=height, COLUMNS=columns, num_warps=8,
    )  # fmt: skip
    return True


class Place(NamedTuple):
    """A parameter, the slot of its gradient, the start of that slot, and the parameter's group."""

    parameter: Tensor
    slot: Tensor
    start: int
    group: int


def fits(recipe: Recipe, optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Say whether the kernels can take the steps of an optimizer."""
    if recipe.optimizer != "sgd" or recipe.precision == "fp16" or not hasattr(tl, "tuple"):
        return False
    for parameter in parameters_of(optimizer):
        both = parameter, optimizer.state[parameter].get("momentum_buffer", parameter)
        if any(one.dtype != torch.float32 or one.data_ptr() % ALIGNED for one in both):
            return False
        if both[0].stride() != both[1].stride() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
            return False
    reason = kernels.why_not(device) or (_why_not(recipe, device) if device.type == "cuda" else None)
    if reason is not None:
        warnings.warn(f"kernels of our own cannot end a step, torch's optimizer has to do: {reason}", stacklevel=2)
    return reason is None


def _why_not(recipe: Recipe, device: torch.device) -> str | None:
    """Take a step with a small layer, and give the reason why that cannot be done, if there is one."""

    def work() -> None:
        layer = nn.Linear(64, 64).to(device)
        optimizer, rates = build_optimizer(recipe, layer, nn.Identity(), torch.ones(2), device)
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        count, first_bad = (torch.full((), value, dtype=torch.int64, device=device) for value in (0, -1))
        steps, norms, samples, correct, total = torch.zeros(5, dtype=torch.float64, device=device).unbind()
        Descent(recipe, nn.Identity(), optimizer, rates).step(count == 0, count, first_bad, steps, norms)
        labels = torch.zeros(64, dtype=torch.int64, device=device)
        tally(layer.weight.detach(), labels, samples, correct, [rates.now[0]], [total])

    return kernels.reason_against(work)


class Descent:
    """The steps of one optimizer.

    It remembers addresses: of parameters, of what the optimizer remembers of them, and of rates. All of these are only
    ever changed in place.

    Args:
        recipe: momentum and clipping.
        loss: the loss, whose parameters are clipped only on request.
        optimizer: SGD whose parameters `fits`.
        rates: learning rates.
    """

    def __init__(self, recipe: Recipe, loss: nn.Module, optimizer: torch.optim.Optimizer, rates: Rates) -> None:
        self.recipe, self.rates = recipe, rates
        groups, of_loss = optimizer.param_groups, set(loss.parameters())
        self.groups_of_net = sum(group["params"][0] not in of_loss for group in groups)
        self.skip: Tensor = getattr(optimizer, SKIP)
        device = self.skip.device
        starts, self.net, total = _laid_out(groups, self.groups_of_net)
        self.flat = torch.zeros(total, device=device)
        self.places = [
            Place(one, self.flat.as_strided(one.shape, one.stride(), start), start, number)
            for (number, one), start in zip(_numbered(groups), starts, strict=True)
        ]
        self.slots = {place.parameter: place.slot for place in self.places}
        self.memory = [optimizer.state[one].get("momentum_buffer", one) for one in parameters_of(optimizer)]
        self.addresses = [place.parameter.data_ptr() for place in self.places]
        self.blocks = self._table(total // BLOCK).to(device)
        self.decays = torch.tensor([float(group["weight_decay"]) for group in groups], device=device)
        self.scales = torch.ones(len(groups), device=device)
        self.partial = torch.zeros(2 * PROGRAMS, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)

    def _table(self, blocks: int) -> Int[Tensor, "blocks 4"]:
        """List the blocks; those between network and loss have no numbers."""
        rows = torch.zeros(blocks, COLUMNS, dtype=torch.int64)
        width = self.flat.element_size()
        for place, memory in zip(self.places, self.memory, strict=True):
            first = torch.arange(0, place.parameter.numel(), BLOCK)
            mine = rows[place.start // BLOCK :][: len(first)]
            mine[:, 0], mine[:, 1] = place.parameter.data_ptr() + width * first, memory.data_ptr() + width * first
            mine[:, 2], mine[:, 3] = (place.parameter.numel() - first).clamp_max(BLOCK), place.group
        return rows

    tally = staticmethod(tally)

    @property
    def ready(self) -> bool:
        """Whether all parameters have a gradient, and are where they were; torch leaves those without one alone."""
        return all(
            place.parameter.grad is not None and place.parameter.data_ptr() == address
            for place, address in zip(self.places, self.addresses, strict=True)
        )

    @torch.no_grad()
    def step(
        self,
        fine: Bool[Tensor, ""],
        count: Int[Tensor, ""],
        first_bad: Int[Tensor, ""],
        steps: Float[Tensor, ""],
        norms: Float[Tensor, ""],
    ) -> None:
        """Take a step, or note why not.

        Args:
            fine: whether the loss is fine.
            count: number of the step, raised by one.
            first_bad: number of the first bad step, below zero if there was none.
            steps: sum that one is added to.
            norms: sum that the length of the gradient is added to, unless the step is skipped.
        """
        self._gather()
        recipe, table = self.recipe, self.rates.table
        tiles, groups = len(self.flat) // TILE, len(self.scales)
        norm_kernel[(min(PROGRAMS, tiles),)](
            self.flat, self.partial, self.counter, fine, table, self.rates.factors, self.rates.now, self.scales, count,
            first_bad, self.skip, steps, norms, self.net // TILE, tiles, len(table), groups,
            groups if recipe.clip_loss else self.groups_of_net, float(recipe.clip or 0),
            CLIPS=recipe.clip is not None, TOGETHER=recipe.clip_loss, GROUPS=triton.next_power_of_2(groups),
            TILE=TILE, PROGRAMS=PROGRAMS, num_warps=8,
        )  # fmt: skip
        sgd_kernel[(len(self.blocks),)](
            self.flat, self.blocks, self.scales, self.rates.now, self.decays, self.skip, float(recipe.momentum),
            HAS_MEMORY=recipe.momentum > 0, NESTEROV=recipe.nesterov, BLOCK=BLOCK, COLUMNS=COLUMNS, ALIGNED=ALIGNED,
            num_warps=4,
        )  # fmt: skip

    def _gather(self) -> None:
        """Bring those gradients to their slots that are elsewhere."""
        pairs: list[tuple[Tensor, Any]] = [(place.slot, place.parameter.grad) for place in self.places]
        away = [(slot, gradient) for slot, gradient in pairs if slot.data_ptr() != gradient.data_ptr()]
        if away:
            torch._foreach_copy_([slot for slot, _ in away], [gradient for _, gradient in away])


def _numbered(groups: list[dict[str, Any]]) -> list[tuple[int, Tensor]]:
    return [(number, one) for number, group in enumerate(groups) for one in group["params"]]


def _laid_out(groups: list[dict[str, Any]], groups_of_net: int) -> tuple[list[int], int, int]:
    """Say where gradients start, where those of the network end, and where all end; both ends are whole tiles."""
    starts, end, of_net = [], 0, 0
    for number, one in _numbered(groups):
        if number < groups_of_net:
            of_net = _up(end + one.numel(), TILE)
        elif end < of_net:
            end = of_net
        starts.append(end)
        end += _up(one.numel(), BLOCK)
    return starts, of_net, _up(end, TILE)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
