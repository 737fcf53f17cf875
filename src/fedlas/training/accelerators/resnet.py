"""Residual networks whose training passes use custom kernels for convolution, batch norm, skip connection and ReLU.

    conv ─► y ─► norm, ReLU ─► conv ─► y ─► norm, + skip, ReLU ─┬─► next layer
     ▲                                        ▲                 └─► next skip
     └──────────── skip ──────────────────────┘

The output of a block is used twice and returned twice, so that a kernel adds its two gradients without a separate pass.
A strided skip connection has a gradient only at the pixels that it reads. All convolution weights are cast to low
precision by one kernel (`parameter_blocks`), and their gradients to float32 by another.
Gradients of weights are computed on a side stream. In bf16 and fp16 the first 3x3 convolution on three
channels has a custom kernel (`stem`), and so have 1x1 convolutions (`conv1x1`); these kernels also compute the sums of
the batch norm.

In evaluation the network computes as torchvision's does. It is meant to be captured in a CUDA graph: launched one by
one, so many kernels wait for the host. Needs Triton and torchvision.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from fedlas.training.accelerators import batch_norm, conv1x1, stem
from fedlas.training.accelerators.parameter_blocks import WeightCast

Convolved = tuple[Tensor, batch_norm.Normed | None]  # with the statistics of the next batch norm, if known
Defer = Callable[[Tensor, Tensor], None]  # receives the gradient of a convolution and its weight
HEAD = ("avgpool", "fc")  # layers that are computed by torch
MAX_PENDING = 4  # gradients of weights on the side stream at a time; each keeps its inputs alive


class DeferredGradient:
    """Gradients of an activation that convolutions hand to the batch norm before them, not to autograd.

    The first use of the activation may defer a GEMM: the batch norm computes its sums while it multiplies.
    The second use may hand over the gradient at the pixels that a strided convolution reads.
    """

    gemm: conv1x1.Gemm | None = None
    strided: batch_norm.StridedGradient | None = None

    def defer_gemm(self, gradient: Tensor, weight: Tensor) -> None:
        """Store the factors of the gradient."""
        self.gemm = conv1x1.Gemm(gradient, weight)

    def store_strided(self, stride: int, gradient: Tensor, weight: Tensor) -> None:
        """Store the gradient at the pixels that a strided 1 x 1 convolution reads."""
        read = batch_norm.new_images(gradient, weight.shape[1])  # only its shape matters
        arguments = None, (1, 1), (0, 0), (1, 1), False, [0, 0], 1, [True, False, False]
        input_gradient: Tensor = torch.ops.aten.convolution_backward(gradient, read, weight, *arguments)[0]
        self.strided = batch_norm.StridedGradient(input_gradient.contiguous(memory_format=torch.channels_last), stride)

    def pop(self) -> tuple[conv1x1.Gemm | None, batch_norm.StridedGradient | None]:
        """Return the stored gradient and clear it."""
        stored, self.gemm, self.strided = (self.gemm, self.strided), None, None
        return stored


class Activation(NamedTuple):
    """Output of a batch norm, once for each of its two uses, and where their gradients may be deferred."""

    first: Tensor
    second: Tensor
    deferred: DeferredGradient | None = None


class Support(NamedTuple):
    """The optional kernels that a device runs; other convolutions are computed by cuDNN."""

    stem: bool = True
    conv1x1: bool = True
    conv1x1_backward: bool = True


ALL_KERNELS = Support()


def fits(model: Any) -> bool:
    """Return whether a network is a torchvision ResNet whose layers the kernels implement."""
    if type(model) is not ResNet or any(weight.dtype != torch.float32 for weight in model.parameters()):
        return False
    weights = [weight for _, weight in model.named_parameters(remove_duplicate=False)]
    if len(weights) != len(set(weights)):  # gradients of a shared weight would be combined before both are computed
        return False
    stages = (model.layer1, model.layer2, model.layer3, model.layer4)
    if any(type(stage) is not nn.Sequential for stage in stages):
        return False
    blocks = [block for stage in stages for block in stage]
    return _is_standard(model) and all(
        type(block) in (BasicBlock, Bottleneck) and _is_standard(block) for block in blocks
    )


def has_bottlenecks(model: nn.Module) -> bool:
    """Return whether a network has 1x1 convolutions with stride 1."""
    return any(isinstance(layer, Bottleneck) for layer in model.modules())


def _is_standard(part: Any) -> bool:
    """Return whether a block, or the layers before the first one, are exactly those that the kernels implement."""
    layers = dict(part.named_children())
    downsample = getattr(part, "downsample", None)
    if downsample is not None:
        if type(downsample) is not nn.Sequential or len(downsample) != 2:  # a convolution and its batch norm
            return False
        layers |= {"conv of downsample": downsample[0], "bn of downsample": downsample[1]}
    return type(layers["relu"]) is nn.ReLU and all(
        _is_standard_norm(layer) if name.startswith("bn") else _is_standard_convolution(layer)
        for name, layer in layers.items()
        if name.startswith(("bn", "conv"))
    )


def _is_mean(pool: Any) -> bool:
    """Return whether a layer is a global mean without hooks."""
    return type(pool) is nn.AdaptiveAvgPool2d and pool.output_size in (1, (1, 1)) and not _has_hooks(pool)


def _has_hooks(layer: nn.Module) -> bool:
    forward = layer._forward_hooks or layer._forward_pre_hooks
    return bool(forward or layer._backward_hooks or layer._backward_pre_hooks)


def _is_standard_norm(norm: Any) -> bool:
    if type(norm) is not nn.BatchNorm2d or norm.num_features % batch_norm.CHANNEL_MULTIPLE:
        return False
    return norm.affine and norm.track_running_stats and norm.momentum is not None


def _is_standard_convolution(layer: Any) -> bool:
    if type(layer) is not nn.Conv2d or isinstance(layer.padding, str):
        return False
    return layer.bias is None and layer.padding_mode == "zeros"


class FusedResNet(ResNet):  # type: ignore[misc]
    """A ResNet whose training passes use custom kernels; in evaluation it computes as torchvision's does.

    It has the layers of the given network, under the same names, and does not change them.

    Args:
        model: a network that `fits`.
        support: the optional kernels that it uses.
    """

    def __init__(self, model: nn.Module, support: Support = ALL_KERNELS) -> None:
        nn.Module.__init__(self)
        for name, layer in model.named_children():
            self.add_module(name, layer)
        self.training = model.training
        self.support, self.has_bottlenecks = support, has_bottlenecks(model)
        self.gradient_slots: Mapping[Tensor, Tensor] = {}
        self.weight_cast: WeightCast | None = None
        self.counters: dict[nn.Module, Tensor] = {}

    @contextmanager
    def gradients_to(self, slots: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """Write the gradients of some weights to given memory for the duration of a step."""
        self.gradient_slots = slots
        try:
            yield
        finally:
            self.gradient_slots = {}

    def _forward_impl(self, x: Tensor) -> Tensor:
        if not self._uses_kernels(x):
            return super()._forward_impl(x)  # type: ignore[no-any-return]
        layers = _TrainingPass(self, x)
        out = layers.first(self.conv1, self.bn1, x)
        if not isinstance(self.maxpool, nn.Identity):
            pooled = self.maxpool(out.first).contiguous(memory_format=torch.channels_last)
            out = Activation(pooled, pooled)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in stage:
                out = layers.block(block, out)
        _count_batch(self)
        pooled = _Mean.apply(out.first) if _is_mean(self.avgpool) else self.avgpool(out.first)
        logits: Tensor = self.fc(torch.flatten(pooled, 1))
        return logits

    def _uses_kernels(self, x: Tensor) -> bool:
        """Return whether all layers are in training mode and without hooks."""
        if not (torch.is_grad_enabled() and (x.is_cuda or batch_norm.INTERPRETED)):
            return False
        body = [layer for part, layer in self.named_modules() if part.partition(".")[0] not in ("", *HEAD)]
        return self.training and all(layer.training and not _has_hooks(layer) for layer in body)

    def counter(self, norm: Any) -> Tensor:
        """Return zeros with which a kernel determines its last program, which resets them."""
        counter = self.counters.get(norm)
        if counter is None or counter.device != norm.weight.device:
            blocks = norm.num_features // batch_norm.CHANNEL_MULTIPLE
            counter = self.counters[norm] = torch.zeros(blocks, dtype=torch.int32, device=norm.weight.device)
        return counter

    def cast_of(self, weights: list[Tensor]) -> WeightCast:
        """Return the cast of the weights to low precision; reuse it while their addresses do not change."""
        if self.weight_cast is None or not self.weight_cast.holds(weights):
            self.weight_cast = WeightCast(weights)
        return self.weight_cast


class _TrainingPass:
    """One training pass: low-precision copies of all weights, and the layers computed with them.

    Args:
        model: the network.
        images: its input.
    """

    def __init__(self, model: FusedResNet, images: Tensor) -> None:
        layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
        kind = images.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        self.model = model
        self.side = SideStream(images.device, used=model.has_bottlenecks)
        weights = [layer.weight for layer in layers]
        targets = [GradientTarget(weight, model.gradient_slots.get(weight)) for weight in weights]
        cast = None if dtype == torch.float32 else model.cast_of(weights)
        self.weights = dict(zip(layers, CastWeights.apply(dtype, self.side, targets, cast, *weights), strict=True))

    def block(self, block: Any, x: Activation) -> Activation:
        """Compute a residual block."""
        inside = self.layer(block.conv1, block.bn1, x)
        if isinstance(block, BasicBlock):
            return self.last_layer(block.conv2, block.bn2, inside, x, block.downsample)
        inside = self.layer(block.conv2, block.bn2, inside)
        return self.last_layer(block.conv3, block.bn3, inside, x, block.downsample)

    def layer(self, layer: Any, norm: nn.BatchNorm2d, x: Activation) -> Activation:
        """Compute convolution, batch norm and ReLU."""
        return self.norm(*self.convolve(layer, norm, x.first, x.deferred), norm)

    def last_layer(
        self, layer: Any, norm: nn.BatchNorm2d, x: Activation, skip: Activation, downsample: Any
    ) -> Activation:
        """Compute convolution, batch norm, sum with the skip connection and ReLU."""
        y, statistics = self.convolve(layer, norm, x.first, x.deferred)
        if downsample is None:
            return self.norm(y, statistics, norm, skip.second)
        other, other_norm = downsample
        skipped = self.convolve(other, other_norm, skip.second, skip.deferred, first=False)
        return self.norm(y, statistics, norm, *skipped, other_norm)

    def first(self, layer: Any, norm: nn.BatchNorm2d, images: Tensor) -> Activation:
        """Compute the first layer, with its own kernel where it is a 3 x 3 convolution of small images."""
        geometry = layer.stride, layer.padding, layer.dilation, layer.groups
        weight = self.weights[layer]
        fits_stem = self.model.support.stem and geometry == ((1, 1), (1, 1), (1, 1), 1) and stem.fits(images, weight)
        if not fits_stem or images.requires_grad or weight.dtype == torch.float32:  # its products would be rounded
            return self.layer(layer, norm, Activation(images, images))
        deferred = DeferredGradient()
        images = images.to(weight.dtype)
        first, second = _Stem.apply(images, weight, norm.weight, norm.bias, self.norm_of(norm), deferred)
        return Activation(first, second, deferred)

    def convolve(
        self, layer: Any, norm: nn.BatchNorm2d, x: Tensor, deferred: DeferredGradient | None = None,
        *, first: bool = True,
    ) -> Convolved:  # fmt: skip
        """Convolve; where that is faster, also compute the statistics of the next batch norm.

        Args:
            layer: a convolution.
            norm: the batch norm after it.
            x: its input.
            deferred: where the gradient of the input may be deferred.
            first: whether this is the first use of the input.
        """
        geometry = layer.stride, layer.padding, layer.dilation, layer.groups
        weight = self.weights[layer]
        x = x.to(weight.dtype)
        is_gemm = geometry == ((1, 1), (0, 0), (1, 1), 1)
        support = self.model.support
        fits = is_gemm and support.conv1x1 and conv1x1.fits(x, weight)
        with_statistics = self.norm_of(norm) if fits else None
        defer: Defer | None = None
        if deferred is not None and first:
            if is_gemm and support.conv1x1_backward and conv1x1.fits_back(x, weight):
                defer = deferred.defer_gemm
        elif deferred is not None and (stride := stride_of_1x1(geometry, weight)) > 1:
            defer = partial(deferred.store_strided, stride)
        y, statistics = Convolution.apply(x, weight, geometry, self.side, with_statistics, defer)
        return y.contiguous(memory_format=torch.channels_last), statistics  # a copy only without cuDNN

    def norm(
        self, y: Tensor, statistics: batch_norm.Normed | None, norm: nn.BatchNorm2d, skip: Tensor | None = None,
        skip_statistics: batch_norm.Normed | None = None, skip_norm: nn.BatchNorm2d | None = None,
    ) -> Activation:  # fmt: skip
        """Normalise, add the skip connection and apply ReLU; return the result twice, for its two uses."""
        other = (None, None) if skip_norm is None else (skip_norm.weight, skip_norm.bias)
        norms = self.norm_of(norm), None if skip_norm is None else self.norm_of(skip_norm)
        deferred = DeferredGradient()
        known = statistics, skip_statistics
        first, second = _NormAddReLU.apply(y, norm.weight, norm.bias, skip, *other, norms, known, deferred)
        return Activation(first, second, deferred)

    def norm_of(self, norm: Any) -> "_Norm":
        """Return parameters, running statistics and counter of a batch norm."""
        statistics = norm.running_mean, norm.running_var, norm.eps, norm.momentum
        return _Norm(batch_norm.Affine(norm.weight, norm.bias, *statistics), self.model.counter(norm))


class _Norm(NamedTuple):
    """Parameters and running statistics of a batch norm, and the counter of its kernels."""

    affine: batch_norm.Affine
    counter: Tensor


def _count_batch(model: nn.Module) -> None:
    """Increase the batch counters of all batch norms but those of the head, which count by themselves."""
    named = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)]
    counts: Any = [layer.num_batches_tracked for name, layer in named if name.partition(".")[0] not in HEAD]
    torch._foreach_add_(counts, 1)


class SideStream:
    """A second CUDA stream, for gradients of weights, which are needed only at the end of the backward pass.

    They are computed while batch norms wait for memory. That is faster where blocks have many batch norms.

    Args:
        device: device of the stream.
        used: compute on the second stream; otherwise everything runs on the current one.
    """

    def __init__(self, device: torch.device, *, used: bool = True) -> None:
        self.stream = _side_stream(device) if used and device.type == "cuda" else None
        self.pending: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(self, work: Callable[[], Tensor], *read: Tensor) -> Tensor:
        """Start a computation, whose inputs are kept alive until it ends; its result is valid after `join`."""
        if self.stream is None:
            return work()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            result = work()
            self.pending.append((self.stream.record_event(), read))
        self.join(MAX_PENDING)
        return result

    def join(self, left: int = 0) -> None:
        """Let the current stream wait until at most `left` computations are pending."""
        while len(self.pending) > left:
            done, read = self.pending.popleft()
            torch.cuda.current_stream(read[0].device).wait_event(done)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class GradientTarget(NamedTuple):
    """A weight, and the slot for its gradient, if it has one."""

    weight: Tensor
    slot: Tensor | None

    def allocate(self, gradient: Tensor) -> Tensor:
        """Return memory for a float32 gradient: the slot, unless it holds the gradient of an earlier part."""
        if self.slot is None or self.weight.grad is not None:
            return torch.empty_like(gradient, dtype=torch.float32)
        return self.slot.view_as(self.slot)  # a new tensor: autograd keeps a gradient that has no other owner


class CastWeights(torch.autograd.Function):
    """Cast weights to low precision and their gradients to float32, one kernel each."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, side: SideStream, targets: list[GradientTarget], cast: WeightCast | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.side, ctx.targets = side, targets
        if cast is None:
            return tuple(weight.detach() for weight in weights)
        return tuple(cast.copies(weights, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.side.join()
        if gradients[0].dtype == torch.float32:
            return None, None, None, None, *gradients
        copies = [target.allocate(gradient) for target, gradient in zip(ctx.targets, gradients, strict=True)]
        torch._foreach_copy_(copies, list(gradients))
        return None, None, None, None, *copies


class Convolution(torch.autograd.Function):
    """A convolution that computes both gradients in parallel, and statistics for a batch norm if one is given."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, geometry: tuple[Any, ...], side: SideStream, norm: _Norm | None,
        defer: Defer | None,
    ) -> Convolved:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.side, ctx.defer = geometry, side, defer
        if norm is None:
            return functional.conv2d(x, weight, None, *geometry), None
        return conv1x1.multiply(x, weight, *norm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Any, ...]:
        if ctx.defer is not None and gradient.requires_grad:  # a deferred gradient has no graph
            raise RuntimeError("the kernels of residual networks cannot be differentiated twice")
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry

        def gradient_of(position: int) -> Tensor:
            arguments = None, stride, padding, dilation, False, [0, 0], groups
            output_mask = [number == position for number in range(3)]  # input, weight, bias
            gradients: Any = torch.ops.aten.convolution_backward(gradient, x, weight, *arguments, output_mask)
            return gradients[position]  # type: ignore[no-any-return]

        of_input = of_weight = None
        input_first = not _is_1x1(weight)  # the side stream then runs in parallel to a batch norm
        wants_input = ctx.needs_input_grad[0]
        if wants_input and ctx.defer is not None:
            ctx.defer(gradient, weight)
        elif wants_input and input_first:
            of_input = gradient_of(0)
        if ctx.needs_input_grad[1]:  # otherwise nobody would wait for it
            of_weight = ctx.side.run(lambda: gradient_of(1), gradient, x)
        if wants_input and ctx.defer is None and not input_first:
            of_input = gradient_of(0)
        return of_input, of_weight, None, None, None, None


class _NormAddReLU(torch.autograd.Function):
    """z = relu(norm(y) + skip), or relu(norm(y) + other norm(skip)), returned twice."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor, skip: Tensor | None, skip_weight: Tensor | None,
        skip_bias: Tensor | None, norms: tuple[_Norm, _Norm | None],
        known: tuple[batch_norm.Normed | None, batch_norm.Normed | None], deferred: DeferredGradient,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        del weight, bias, skip_weight, skip_bias  # part of the norms
        norm, skip_norm = norms
        statistics, other = known
        if statistics is None:
            statistics = batch_norm.statistics(y, *norm)
        if other is None and skip is not None and skip_norm is not None:
            other = batch_norm.statistics(skip, *skip_norm)
        z, bits = batch_norm.activation(y, statistics, skip, other)
        ctx.save_for_backward(y, bits, skip if other is not None else None)
        ctx.statistics, ctx.other, ctx.counter = statistics, other, norm.counter
        ctx.deferred, ctx.has_skip = deferred, skip is not None
        ctx.set_materialize_grads(False)
        return z, z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        y, bits, skip = ctx.saved_tensors
        sums = _gradient_sums(ctx.deferred, gradients, y, bits, ctx.statistics, ctx.counter, skip, ctx.other)
        of_y, of_skip = batch_norm.gradients(sums, y, ctx.statistics, skip, ctx.other)
        of_norm, others = (of_y, sums.weight, sums.bias), (None, None, None)
        if ctx.other is not None:
            return *of_norm, of_skip, sums.other_weight, sums.other_bias, *others
        return *of_norm, of_skip if ctx.has_skip else None, None, None, *others


class _Mean(torch.autograd.Function):
    """Global mean of an image; its gradient is written in channels-last layout, in one pass."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        ctx.size = images.shape[2:]
        return images.mean((2, 3), keepdim=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        height, width = ctx.size
        return batch_norm.spread_mean_gradient(gradient, height, width)


class _Stem(torch.autograd.Function):
    """z = relu(norm(convolution of images)), returned twice; images have no gradient, that of y is never stored."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, filters: Tensor, weight: Tensor, bias: Tensor, norm: _Norm,
        deferred: DeferredGradient,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        del weight, bias  # part of the norm
        y, statistics = stem.convolve(images, filters, *norm)
        z, bits = batch_norm.activation(y, statistics, None, None)
        ctx.save_for_backward(images, filters, y, bits)
        ctx.statistics, ctx.counter, ctx.deferred = statistics, norm.counter, deferred
        ctx.set_materialize_grads(False)
        return z, z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        images, filters, y, bits = ctx.saved_tensors
        sums = _gradient_sums(ctx.deferred, gradients, y, bits, ctx.statistics, ctx.counter)
        # On the current stream: nothing follows that could run in parallel.
        of_filters = None
        if ctx.needs_input_grad[1]:
            of_filters = stem.gradient_of_filters(images, filters, y, ctx.statistics, sums)
        return None, of_filters, sums.weight, sums.bias, None, None


def _gradient_sums(
    deferred: DeferredGradient, gradients: tuple[Tensor | None, ...], *arguments: Any
) -> batch_norm.GradientSums:
    """Compute the first backward pass of a batch norm, from one or two gradients of its output."""
    gemm, strided = deferred.pop()
    present = [value.contiguous(memory_format=torch.channels_last) for value in gradients if value is not None]
    if gemm is None:
        return batch_norm.gradient_sums(present[0], present[1] if len(present) > 1 else strided, *arguments)
    return conv1x1.gradient_sums(gemm, present[0] if present else strided, *arguments)


def _is_1x1(weight: Tensor) -> bool:
    """Return whether a convolution is 1x1."""
    return weight.shape[2:] == (1, 1)


def stride_of_1x1(geometry: tuple[Any, ...], weight: Tensor) -> int:
    """Return the stride of a 1 x 1 convolution, 1 for any other convolution."""
    (down, across), *rest = geometry
    return down if down == across and _is_1x1(weight) and rest == [(0, 0), (1, 1), 1] else 1
