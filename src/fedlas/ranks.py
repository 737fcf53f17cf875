"""Collective operations across the processes (ranks) of a distributed run; they do nothing for a single process.

The functions are out-of-place, so they can be traced by `torch.compile` with `fullgraph=True` and captured in a
CUDA graph. All ranks must call the same functions in the same order.

On a GPU with NCCL, these are the functional collectives of torch. With gloo, functional collectives sometimes abort the
process (docs/reliability.md), so tensors on the CPU use the plain collectives, wrapped in custom operators
for `torch.compile`.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedlas.errors import UserError

if TYPE_CHECKING or dist.is_available():
    from torch.distributed import _functional_collectives as functional

    # Renamed in torch 2.15, which warns of the old name.
    _gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


def count() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process, counted from 0."""
    return dist.get_rank() if count() > 1 else 0


def total(x: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, without gradient."""
    if count() == 1:
        return x
    if x.device.type == "cpu":
        plain: Tensor = (_total_op if torch.compiler.is_compiling() else _plain_total)(x.detach())
        return plain
    traced: Tensor = functional.all_reduce(x.detach(), "sum", _world())
    return traced


def stacked(x: Tensor) -> Tensor:
    """Stack the tensors of all ranks along a new first dimension, without gradient."""
    if count() == 1:
        return x.unsqueeze(0)
    if x.device.type == "cpu":
        plain: Tensor = (_stacked_op if torch.compiler.is_compiling() else _plain_stacked)(x.detach(), count())
        return plain
    rows: Tensor = _gather(x.detach().reshape(1, -1).contiguous(), 0, _world())
    return rows.reshape(count(), *x.shape)


def joined(x: Tensor) -> Tensor:
    """Concatenate the rows of all ranks, rank 0 first; the backward pass sums the gradients of all ranks.

    All ranks must have the same number of rows. This is checked on the CPU, unless compiled; on other devices the check
    would need a host synchronisation.
    """
    if count() == 1:
        return x
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        rows = stacked(torch.tensor(len(x))).tolist()
        if len(set(rows)) > 1:
            raise UserError(
                f"ranks have {rows} samples, but their batches are concatenated: they must have the same number"
            )
    result: Tensor = _Join.apply(x)
    return result


def own(x: Tensor) -> Tensor:
    """Return the rows of this rank from concatenated rows."""
    if count() == 1:
        return x
    rows = x.shape[0] // count()
    return x[rank() * rows : (rank() + 1) * rows]


def replicated(x: Tensor) -> Tensor:
    """Return a parameter that is replicated on all ranks, whose gradient is averaged over ranks.

    DistributedDataParallel does the same for its parameters; the mean of equal gradients has no effect.
    """
    if count() == 1:
        return x
    result: Tensor = _Replicate.apply(x)
    return result


def _plain_total(x: Tensor) -> Tensor:
    reduced = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(reduced)
    return reduced


def _plain_stacked(x: Tensor, world: int) -> Tensor:
    gathered = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world)]
    dist.all_gather(gathered, x.contiguous())
    return torch.stack(gathered)


# Custom operators, which Dynamo does not trace into.
_total_op = torch.library.custom_op("fedlas::total", _plain_total, mutates_args=(), device_types="cpu")
_stacked_op = torch.library.custom_op("fedlas::stacked", _plain_stacked, mutates_args=(), device_types="cpu")


@_total_op.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_stacked_op.register_fake
def _(x: Tensor, world: int) -> Tensor:
    return x.new_empty(world, *x.shape)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return stacked(x).flatten(0, 1)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return own(total(grad.contiguous()))


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return total(grad.contiguous()) / count()
