"""What all processes of a distributed run hold together; in a process that runs alone everything here is the identity.

Nothing is changed in place, so every function can be traced by `torch.compile` with `fullgraph=True` and captured in a
CUDA graph. All ranks must call the same functions in the same order.

On a GPU, with NCCL, these are torch's functional collectives. Over gloo those abort the process now and then
(`tests/faults/collectives.py`), so what lies on the CPU goes through the plain ones; what is traced there finds them in
operators of our own.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedlas.errors import UserError

if TYPE_CHECKING or dist.is_available():
    from torch.distributed import _functional_collectives as functional

    # torch 2.15 has the same function under a new name and warns of the old one.
    _gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


def count() -> int:
    """Count the processes of the run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def total(x: Tensor) -> Tensor:
    """Sum a tensor over all ranks; no gradient crosses ranks."""
    if count() == 1:
        return x
    if x.device.type == "cpu":
        plain: Tensor = (_total_op if torch.compiler.is_compiling() else _plain_total)(x.detach())
        return plain
    traced: Tensor = functional.all_reduce(x.detach(), "sum", _world())
    return traced


def stacked(x: Tensor) -> Tensor:
    """Stack the tensors of all ranks along a new first dimension; no gradient crosses ranks."""
    if count() == 1:
        return x.unsqueeze(0)
    if x.device.type == "cpu":
        plain: Tensor = (_stacked_op if torch.compiler.is_compiling() else _plain_stacked)(x.detach(), count())
        return plain
    rows: Tensor = _gather(x.detach().reshape(1, -1).contiguous(), 0, _world())
    return rows.reshape(count(), *x.shape)


def joined(x: Tensor) -> Tensor:
    """Join the rows of all ranks, rank 0 first; the gradient of every rank's loss finds its way back.

    Every rank must hold equally many rows. On the CPU that is checked, unless it is compiled; elsewhere a look at the
    numbers would make the host wait.
    """
    if count() == 1:
        return x
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        rows = stacked(torch.tensor(len(x))).tolist()
        if len(set(rows)) > 1:
            raise UserError(f"ranks hold {rows} samples, but their batch is joined: give each rank equally many")
    result: Tensor = _Join.apply(x)
    return result


def own(x: Tensor) -> Tensor:
    """Cut this rank's rows out of joined rows."""
    if count() == 1:
        return x
    rows = x.shape[0] // count()
    return x[dist.get_rank() * rows : (dist.get_rank() + 1) * rows]


def replicated(x: Tensor) -> Tensor:
    """Use a parameter that every rank holds a copy of: its gradient becomes the mean over ranks.

    DistributedDataParallel does the same for the parameters it wraps, and the mean of equal gradients changes nothing.
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
    held = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world)]
    dist.all_gather(held, x.contiguous())
    return torch.stack(held)


# The same, as Dynamo takes them: as they are, without a look inside.
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
