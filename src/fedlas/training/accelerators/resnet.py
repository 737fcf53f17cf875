"""Residual networks whose batch norms, sums and ReLUs are few kernels instead of many; for training on a GPU.

    conv ─► y ─► norm, ReLU ─► conv ─► y ─► norm, + skip, ReLU ─┬─► next layer
     ▲                                        ▲                 └─► next skip
     └──────────── skip ──────────────────────┘

What a block gives away is used twice, and handed out twice, so that the two gradients meet inside of a kernel and not
in a pass of their own; a skip with a stride has one for the pixels alone that it looked at. Weights of all convolutions
become narrow in one kernel (`blocks`), and their gradients wide in another, but for those that somebody takes as they
are; on a GPU those gradients are computed on a second stream, beside the passes of the norms. In bf16 and fp16 the
first 3x3 convolution on three channels has a custom kernel (`stem`), and so have 1x1 convolutions (`conv1x1`); these
kernels also compute the sums of the batch norm.
Layers keep their names, parameters and `state_dict`; outside of training they compute what they always did. All of it
is meant to be captured: launched one by one, so many kernels wait for the host. Needs Triton and torchvision.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from fedlas.training.accelerators import batch_norm, conv1x1, stem
from fedlas.training.accelerators.parameter_blocks import Narrowing

Convolved = tuple[Tensor, batch_norm.Normed | None]  # and what was found out about it already
Leave = Callable[[Tensor, Tensor], None]  # takes the gradient of a convolution and its weight
HEAD = ("avgpool", "fc")  # what computes as it always did
BESIDE = 4  # gradients of weights that may be under way on the second stream; each keeps what it reads


class Owed:
    """A place where the gradients of some images may be left in another shape than that of the images.

    A convolution leaves its own there in its backward pass, and gives autograd none; the norm that made the images
    takes it. The first use of them may leave a product that is still to be made: the norm sums while it multiplies.
    The second may leave the gradient of the pixels that it looked at.
    """

    product: conv1x1.Product | None = None
    apart: batch_norm.Apart | None = None

    def leave_product(self, gradient: Tensor, weight: Tensor) -> None:
        """Leave the factors of the gradient of the images."""
        self.product = conv1x1.Product(gradient, weight)

    def leave_apart(self, every: int, gradient: Tensor, weight: Tensor) -> None:
        """Leave the gradient of the pixels that a convolution of 1 x 1 looked at, every so-many-th."""
        looked_at = batch_norm.new_images(gradient, weight.shape[1])  # only its shape is asked for
        about = None, (1, 1), (0, 0), (1, 1), False, [0, 0], 1, [True, False, False]
        found: Tensor = torch.ops.aten.convolution_backward(gradient, looked_at, weight, *about)[0]
        self.apart = batch_norm.Apart(found.contiguous(memory_format=torch.channels_last), every)

    def taken(self) -> tuple[conv1x1.Product | None, batch_norm.Apart | None]:
        """Give what was left, once."""
        left, self.product, self.apart = (self.product, self.apart), None, None
        return left


class Given(NamedTuple):
    """What a norm gives away: its result twice, for two uses, and where their gradients may be left."""

    first: Tensor
    second: Tensor
    owed: Owed | None = None


def fuse(model: Any) -> bool:
    """Let a residual network of torchvision's kind, its images with channels last, train with few kernels.

    Returns:
        Whether it is one.
    """
    if not fits(model):
        return False
    for layer in model.modules():
        if type(layer) in _FUSED:
            layer.__class__ = _FUSED[type(layer)]
    return True


def fits(model: Any) -> bool:
    """Say whether a network is a residual one of torchvision's kind, with the layers that the kernels stand for."""
    if type(model) is not ResNet or any(one.dtype != torch.float32 for one in model.parameters()):
        return False
    weights = [weight for _, weight in model.named_parameters(remove_duplicate=False)]
    if len(weights) != len(set(weights)):  # gradients of one that is used twice would meet before both are there
        return False
    stages = (model.layer1, model.layer2, model.layer3, model.layer4)
    if any(type(stage) is not nn.Sequential for stage in stages):
        return False
    blocks = [block for stage in stages for block in stage]
    return _is_plain(model) and all(type(block) in _FUSED and _is_plain(block) for block in blocks)


def _is_plain(part: Any) -> bool:
    """Say whether a block, or what comes before the first, has exactly the layers that the kernels stand for."""
    layers = dict(part.named_children())
    aside = getattr(part, "downsample", None)
    if aside is not None:
        if type(aside) is not nn.Sequential or len(aside) != 2:  # a convolution and its norm
            return False
        layers |= {"conv aside": aside[0], "bn aside": aside[1]}
    return type(layers["relu"]) is nn.ReLU and all(
        _is_usual_norm(layer) if name.startswith("bn") else _is_usual_convolution(layer)
        for name, layer in layers.items()
        if name.startswith(("bn", "conv"))
    )


def _is_mean(pool: Any) -> bool:
    """Say whether a layer is a mean over the image, at which nobody looks."""
    return type(pool) is nn.AdaptiveAvgPool2d and pool.output_size in (1, (1, 1)) and not _is_watched(pool)


def _is_watched(layer: nn.Module) -> bool:
    """Say whether somebody looks at what a layer takes or gives, forward or back."""
    forward, back = layer._forward_hooks or layer._forward_pre_hooks, layer._backward_hooks or layer._backward_pre_hooks
    return bool(forward or back)


def _is_usual_norm(norm: Any) -> bool:
    if type(norm) is not nn.BatchNorm2d or norm.num_features % batch_norm.NARROWEST:
        return False
    return norm.affine and norm.track_running_stats and norm.momentum is not None


def _is_usual_convolution(layer: Any) -> bool:
    if type(layer) is not nn.Conv2d or isinstance(layer.padding, str):
        return False
    return layer.bias is None and layer.padding_mode == "zeros"


class FusedResNet(ResNet):  # type: ignore[misc]
    """torchvision's ResNet, from the image to the logits.

    Attributes:
        gradient_slots: where the gradients of some weights shall lie, for whoever wants to have them side by side.
        gradient_taker: asked with a weight and its narrow gradient; says whether it keeps that, as it is.
        narrowing: what makes narrow copies of the weights, as soon as it was needed once.
    """

    gradient_slots: Mapping[Tensor, Tensor] = MappingProxyType({})
    gradient_taker: Callable[[Tensor, Tensor], bool] | None = None
    narrowing: Narrowing | None = None

    def narrowing_of(self, weights: list[Tensor]) -> Narrowing:
        """Give what makes narrow copies of weights; kept as long as these are where they were."""
        if self.narrowing is None or not self.narrowing.holds(weights):
            self.narrowing = Narrowing(weights)
        return self.narrowing

    def _forward_impl(self, x: Tensor) -> Tensor:
        if not self._fused_now(x):
            return super()._forward_impl(x)  # type: ignore[no-any-return]
        with _narrow_weights(self, x):
            given = _first(self.conv1, self.bn1, x)
            if not isinstance(self.maxpool, nn.Identity):
                pooled = self.maxpool(given.first).contiguous(memory_format=torch.channels_last)
                given = Given(pooled, pooled)
            for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
                given = layer(given)
        _count_batch(self)
        images = given.first
        pooled = _Mean.apply(images) if _is_mean(self.avgpool) else self.avgpool(images)
        logits: Tensor = self.fc(torch.flatten(pooled, 1))
        return logits

    def _fused_now(self, x: Tensor) -> bool:
        """Say whether the kernels may stand for the layers: in training alone, and where nobody looks at a layer."""
        if not (torch.is_grad_enabled() and (x.is_cuda or batch_norm.INTERPRETED)):
            return False
        body = [layer for part, layer in self.named_modules() if part.partition(".")[0] not in ("", *HEAD)]
        return self.training and all(layer.training and not _is_watched(layer) for layer in body)


class FusedBasicBlock(BasicBlock):  # type: ignore[misc]
    """Two convolutions beside a skip."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return super().forward(x)
        inside = _layer(self.conv1, self.bn1, x.first, x.owed)
        return _joined(self.conv2, self.bn2, inside, x, self.downsample)


class FusedBottleneck(Bottleneck):  # type: ignore[misc]
    """Three convolutions beside a skip, the one in the middle of fewer channels."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return super().forward(x)
        inside = _layer(self.conv1, self.bn1, x.first, x.owed)
        inside = _layer(self.conv2, self.bn2, inside.first, inside.owed)
        return _joined(self.conv3, self.bn3, inside, x, self.downsample)


_FUSED: dict[type, type] = {BasicBlock: FusedBasicBlock, Bottleneck: FusedBottleneck, ResNet: FusedResNet}


def _layer(layer: Any, norm: nn.BatchNorm2d, images: Tensor, owed: Owed | None = None) -> Given:
    return _norm(*_convolve(layer, norm, images, owed), norm)


def _joined(layer: Any, norm: nn.BatchNorm2d, given: Given, skipped: Given, downsample: Any) -> Given:
    y, about = _convolve(layer, norm, given.first, given.owed)
    if downsample is None:
        return _norm(y, about, norm, skipped.second)
    aside, aside_norm = downsample
    return _norm(y, about, norm, *_convolve(aside, aside_norm, skipped.second, skipped.owed, first=False), aside_norm)


@contextmanager
def _narrow_weights(model: FusedResNet, images: Tensor) -> Iterator[None]:
    """Make narrow copies of all convolutions' weights, at once, and let the layers have them for a while."""
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    kind = images.device.type
    narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    beside = _Beside(images.device, used=any(isinstance(layer, Bottleneck) for layer in model.modules()))
    weights = [layer.weight for layer in layers]
    rooms = [_Room(weight, model.gradient_slots.get(weight), model.gradient_taker) for weight in weights]
    narrowing = None if narrow == torch.float32 else model.narrowing_of(weights)
    copies = _Narrow.apply(narrow, beside, rooms, narrowing, *weights)
    try:
        for layer, copy in zip(layers, copies, strict=True):
            layer.narrow, layer.beside = copy, beside
        yield
    finally:
        for layer in layers:
            layer.narrow = layer.beside = None


def _count_batch(model: nn.Module) -> None:
    """Let all norms know that they have seen one more batch; the head counts for itself."""
    named = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)]
    counts: Any = [layer.num_batches_tracked for name, layer in named if name.partition(".")[0] not in HEAD]
    torch._foreach_add_(counts, 1)


def _first(layer: Any, norm: nn.BatchNorm2d, images: Tensor) -> Given:
    """Do the first convolution and its norm, in few kernels where they are of the usual kind for small images."""
    about = layer.stride, layer.padding, layer.dilation, layer.groups
    usual = about == ((1, 1), (1, 1), (1, 1), 1) and stem.fits(images, layer.narrow)
    if not usual or images.requires_grad or layer.narrow.dtype == torch.float32:  # whose products would be rounded
        return _layer(layer, norm, images)
    narrow = images.to(layer.narrow.dtype)
    owed = Owed()
    first, second = _Stem.apply(narrow, layer.narrow, norm.weight, norm.bias, norm, owed)
    return Given(first, second, owed)


def _convolve(
    layer: Any, norm: nn.BatchNorm2d, images: Tensor, owed: Owed | None = None, *, first: bool = True
) -> Convolved:
    """Convolve, and, where that pays, look at the batch for the norm after it, and at gradients for the one before.

    Args:
        layer: a convolution.
        norm: what comes after it.
        images: what a norm gave away.
        owed: where their gradient may be left.
        first: whether this is their first use.
    """
    about = layer.stride, layer.padding, layer.dilation, layer.groups
    narrow = images.to(layer.narrow.dtype)
    is_product = about == ((1, 1), (0, 0), (1, 1), 1)
    looks = norm if is_product and conv1x1.fits(narrow, layer.narrow) else None
    leave: Leave | None = None
    if owed is not None and first:
        if is_product and conv1x1.fits_back(narrow, layer.narrow):
            leave = owed.leave_product
    elif owed is not None and (every := _every(about, layer.narrow)) > 1:
        leave = partial(owed.leave_apart, every)
    y, found = _Convolution.apply(narrow, layer.narrow, about, layer.beside, looks, leave)
    return y.contiguous(memory_format=torch.channels_last), found  # as it is but for convolutions without cuDNN


def _norm(
    y: Tensor, about: batch_norm.Normed | None, norm: nn.BatchNorm2d, skip: Tensor | None = None,
    skip_about: batch_norm.Normed | None = None, skip_norm: nn.BatchNorm2d | None = None,
) -> Given:  # fmt: skip
    """Normalise, add what skipped the layers, cut off what is negative; give the result twice, for two uses."""
    other = (None, None) if skip_norm is None else (skip_norm.weight, skip_norm.bias)
    abouts, owed = (about, skip_about), Owed()
    first, second = _NormAddReLU.apply(y, norm.weight, norm.bias, skip, *other, norm, skip_norm, abouts, owed)
    return Given(first, second, owed)


class _Beside:
    """A second stream of the device, for results that are needed late.

    A convolution's backward pass gives two gradients. The one of its images is waited for by the layer before; the one
    of its weights by nobody until the end, so it is computed while passes of norms wait for memory. That pays where
    blocks have many norms; convolutions of 3 x 3 alone leave nothing idle.
    """

    def __init__(self, device: torch.device, *, used: bool = True) -> None:
        self.stream = _second_stream(device) if used and device.type == "cuda" else None
        self.under_way: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(self, work: Callable[[], Tensor], *read: Tensor) -> Tensor:
        """Begin to work; what it reads is kept until it is done, the result is there after `join`."""
        if self.stream is None:
            return work()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            found = work()
            self.under_way.append((self.stream.record_event(), read))
        self.join(BESIDE)
        return found

    def join(self, left: int = 0) -> None:
        """Let the first stream wait until no more than this is under way."""
        while len(self.under_way) > left:
            done, read = self.under_way.popleft()
            torch.cuda.current_stream(read[0].device).wait_event(done)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Room(NamedTuple):
    """A weight, where its gradient shall lie, and who may take that as it is."""

    weight: Tensor
    slot: Tensor | None
    taker: Callable[[Tensor, Tensor], bool] | None = None

    def make(self, gradient: Tensor) -> Tensor | None:
        """Give room for a gradient that nobody takes; a slot may hold that of another part of the batch already."""
        if self.taker is not None and self.taker(self.weight, gradient):
            return None
        if self.slot is None or self.weight.grad is not None:
            return torch.empty_like(gradient, dtype=torch.float32)
        return self.slot.view_as(self.slot)  # a tensor of its own: torch takes over what nobody else holds


class _Narrow(torch.autograd.Function):
    """Weights in a narrower type, and their gradients in a wider one, one kernel each."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, beside: _Beside, rooms: list[_Room], narrowing: Narrowing | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.beside, ctx.rooms = beside, rooms
        if narrowing is None:
            return tuple(weight.detach() for weight in weights)
        return tuple(narrowing.copies(weights, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.beside.join()
        if gradients[0].dtype == torch.float32:
            return None, None, None, None, *gradients
        copies = [room.make(gradient) for room, gradient in zip(ctx.rooms, gradients, strict=True)]
        pairs = [(copy, gradient) for copy, gradient in zip(copies, gradients, strict=True) if copy is not None]
        if pairs:
            torch._foreach_copy_([copy for copy, _ in pairs], [gradient for _, gradient in pairs])
        return None, None, None, None, *copies


class _Convolution(torch.autograd.Function):
    """A convolution whose two gradients are computed beside each other; it looks at the batch for a norm, if given."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, about: tuple[Any, ...], beside: _Beside,
        norm: nn.BatchNorm2d | None, leave: Leave | None,
    ) -> Convolved:  # fmt: skip
        ctx.save_for_backward(images, weight)
        ctx.about, ctx.beside, ctx.leave = about, beside, leave
        if norm is None:
            return functional.conv2d(images, weight, None, *about), None
        return conv1x1.multiply(images, weight, _affine(norm), _counter(norm))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Any, ...]:
        if ctx.leave is not None and gradient.requires_grad:  # what is left has no graph, so nobody would notice
            raise RuntimeError("the kernels of residual networks cannot be differentiated twice")
        images, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.about

        def found(place: int) -> Tensor:
            about = None, stride, padding, dilation, False, [0, 0], groups
            wanted = [number == place for number in range(3)]  # of images, weight, bias
            gradients: Any = torch.ops.aten.convolution_backward(gradient, images, weight, *about, wanted)
            return gradients[place]  # type: ignore[no-any-return]

        of_images = of_weight = None
        images_first = not _is_product(weight)  # the side stream then computes the other gradient beside a norm
        learns = ctx.needs_input_grad[0]  # or nobody would take what is left
        if learns and ctx.leave is not None:
            ctx.leave(gradient, weight)
        elif learns and images_first:
            of_images = found(0)
        if ctx.needs_input_grad[1]:  # else nobody would wait for it
            of_weight = ctx.beside.run(lambda: found(1), gradient, images)
        if learns and ctx.leave is None and not images_first:
            of_images = found(0)
        return of_images, of_weight, None, None, None, None


class _NormAddReLU(torch.autograd.Function):
    """z = relu(norm(y) + skip), or relu(norm(y) + other norm(skip)), given twice."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor, skip: Tensor | None, skip_weight: Tensor | None,
        skip_bias: Tensor | None, norm: nn.BatchNorm2d, skip_norm: nn.BatchNorm2d | None,
        abouts: tuple[batch_norm.Normed | None, batch_norm.Normed | None], owed: Owed,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        del weight, bias, skip_weight, skip_bias  # they are the norms' own
        about, other = abouts
        if about is None:
            about = batch_norm.statistics(y, _affine(norm), _counter(norm))
        if other is None and skip is not None and skip_norm is not None:
            other = batch_norm.statistics(skip, _affine(skip_norm), _counter(skip_norm))
        z, bits = batch_norm.activation(y, about, skip, other)
        ctx.save_for_backward(y, bits, skip if other is not None else None)
        ctx.about, ctx.other, ctx.norm, ctx.owed, ctx.has_skip = about, other, norm, owed, skip is not None
        ctx.set_materialize_grads(False)
        return z, z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        y, bits, skip = ctx.saved_tensors
        sums = _gradient_sums(ctx.owed, given, y, bits, ctx.about, _counter(ctx.norm), skip, ctx.other)
        found = batch_norm.gradients(sums, y, ctx.about, skip, ctx.other)
        of_skip = found.skip if ctx.has_skip else None
        nothing = None, None, None, None
        if ctx.other is not None:
            return found.y, found.weight, found.bias, found.other_y, found.other_weight, found.other_bias, *nothing
        return found.y, found.weight, found.bias, of_skip, None, None, *nothing


class _Mean(torch.autograd.Function):
    """The mean over an image; its gradient is spread over the image with channels last, in one pass."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        ctx.size = images.shape[2:]
        return images.mean((2, 3), keepdim=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        height, width = ctx.size
        return batch_norm.spread(gradient, height, width)


class _Stem(torch.autograd.Function):
    """z = relu(norm(convolution of images)), given twice; images have no gradient, and y's is never written."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, filters: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm2d, owed: Owed
    ) -> tuple[Tensor, Tensor]:
        del weight, bias  # they are the norm's own
        y, about = stem.convolve(images, filters, _affine(norm), _counter(norm))
        z, bits = batch_norm.activation(y, about, None, None)
        ctx.save_for_backward(images, filters, y, bits)
        ctx.about, ctx.norm, ctx.owed = about, norm, owed
        ctx.set_materialize_grads(False)
        return z, z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        images, filters, y, bits = ctx.saved_tensors
        sums = _gradient_sums(ctx.owed, given, y, bits, ctx.about, _counter(ctx.norm))
        # Nothing comes after it that could run meanwhile, so it is not put behind what the second stream has to do.
        learns = ctx.needs_input_grad[1]
        of_filters = stem.gradient_of_filters(images, filters, y, ctx.about, sums) if learns else None
        return None, of_filters, sums.weight, sums.bias, None, None


def _gradient_sums(owed: Owed, given: tuple[Tensor | None, ...], *about: Any) -> batch_norm.GradientSums:
    """Do the first pass back through a norm, from the gradients of z that there are, one or two."""
    product, apart = owed.taken()
    there = [one.contiguous(memory_format=torch.channels_last) for one in given if one is not None]
    if product is None:
        return batch_norm.gradient_sums(there[0], there[1] if len(there) > 1 else apart, *about)
    second = there[0] if there else apart
    return conv1x1.gradient_sums(product, second, *about)


def _is_product(weight: Tensor) -> bool:
    """Say whether a convolution is a product of matrices."""
    return weight.shape[2:] == (1, 1)


def _every(about: tuple[Any, ...], weight: Tensor) -> int:
    """Say how far apart the pixels are that a convolution of 1 x 1 looks at; 1 for any other convolution."""
    (down, across), *rest = about
    return down if down == across and _is_product(weight) and rest == [(0, 0), (1, 1), 1] else 1


def _affine(norm: Any) -> batch_norm.Affine:
    return batch_norm.Affine(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps, norm.momentum)


def _counter(norm: Any) -> Tensor:
    """Give the zeros by which programs find out who is the last; kept, because they are zeros again afterwards."""
    if not hasattr(norm, "counter") or norm.counter.device != norm.weight.device:
        blocks = norm.num_features // batch_norm.NARROWEST
        norm.counter = torch.zeros(blocks, dtype=torch.int32, device=norm.weight.device)
    counter: Tensor = norm.counter
    return counter
