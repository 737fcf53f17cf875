"""Wrapper that returns logits and features of any classifier; features are the input of its last linear layer.

    x ─► body ─► features ─► dropout ─► last linear layer (the head) ─► rows picked ─► logits

`WithFeatures` finds the head when it is built, by the attribute names that libraries use and by order and widths of the
layers; if several layers are possible, it raises. A hook on the head records its input and output. A torch function
mode, active only during the call, records operations around the head: features are taken before a dropout (module or
function) that precedes the head; if the network selects rows of the output of the head (the last token of a decoder),
the same rows of the features are selected; if it resizes the output (segmentation), the features are resized too. The
first eager call with gradients checks that the logits come from the head. If the network returns the result of a
softmax, the first eager call warns.

The networks of this package are plain modules that return logits. Each catalogue entry derives from `AbstractNetwork`
and builds one network.
"""

import difflib
import importlib.util
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedlas.catalog import nearest
from fedlas.errors import UserError, UserTypeError, warn_caller
from fedlas.models.pretrained import Source, load_weights, mismatch, read_weights

__all__ = [
    "AbstractLibrary",
    "AbstractNetwork",
    "Common",
    "Head",
    "Output",
    "Source",
    "WithFeatures",
    "WithLoss",
    "closest",
    "parameters",
]

# Words in attribute names that libraries use for the part that returns the logits.
_HEAD_WORDS = {"fc", "head", "heads", "classifier", "score", "logits"}
_AUXILIARY = {"aux", "auxiliary"}  # an additional classifier for training only
_DROPOUTS = (torch.dropout, *(f for name, f in vars(functional).items() if "dropout" in name))
_SOFTMAXES = (torch.softmax, torch.special.softmax, Tensor.softmax, functional.softmax)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONVOLVE = (functional.conv1d, functional.conv2d, functional.conv3d)


class Output(NamedTuple):
    """Logits of a batch and the features that they are computed from."""

    logits: Tensor
    features: Tensor


class WithFeatures(nn.Module):
    """A classifier that returns logits and features.

    The features keep their gradients and are taken before all dropouts that directly precede the last linear layer.
    The wrapped network is `model`, its `state_dict` unchanged, and `head_name` the dotted path of that layer in it.

    Args:
        model: a network that returns logits, an object with an attribute `logits`, a dictionary with a key "logits" or
            "out", or a tuple that starts with the logits.
        head: dotted path of the last linear layer, if it is not found or not unique.
        output: position or key of the logits in the output of the network, if it has several outputs.
    """

    def __init__(self, model: nn.Module, head: str | None = None, output: int | str | None = None) -> None:
        super().__init__()
        self.model = model
        self.output = output
        self.head_name = _find_head(model) if head is None else _check_head(model, head)
        layer = model.get_submodule(self.head_name)
        self._softmax_was_reported = _warn_of_softmax(model)
        self._channels_first = isinstance(layer, _CONVOLUTIONS)
        self._width = _widths(layer)[1]
        # Other layers that may compute the logits, if the logits are not the output of an automatically found head.
        same_width = [name for name, other in _layers(model) if _widths(other)[1] == _widths(layer)[1]]
        self._rivals = [name for name in same_width if name != self.head_name] if head is None else []
        self._recorder: _Recorder | None = None
        self._unwrapped = False
        self._verified = False
        # A bound method, so that a copy of the wrapper has its own hook.
        self._hook = layer.register_forward_hook(self._see_head, with_kwargs=True)

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        """Call the network and return its logits and features."""
        if getattr(self, "_is_replica", False):
            raise UserTypeError("WithFeatures does not work in nn.DataParallel; use DistributedDataParallel")
        if self._unwrapped:
            raise RuntimeError("this WithFeatures was unwrapped; wrap the network again")
        if self._recorder is not None:
            raise RuntimeError("this WithFeatures is already running, inside of itself or in another thread")
        self._recorder = recorder = _Recorder(self._width, picks_rows=not self._channels_first)
        try:
            with recorder:
                result = self.model(*args, **kwargs)
        finally:
            self._recorder = None
        return self._pair(recorder, _logits(result, self.output))

    def unwrap(self) -> nn.Module:
        """Remove the hook and return the original network, for example to pickle or script it."""
        self._hook.remove()
        self._unwrapped = True
        return self.model

    def extra_repr(self) -> str:
        """Show the path of the head."""
        return f"head_name={self.head_name!r}" + ("" if self.output is None else f", output={self.output!r}")

    def _see_head(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._recorder is not None:
            self._recorder.see_head(args[0] if args else next(iter(kwargs.values())), output)

    def _pair(self, recorder: "_Recorder", logits: Tensor) -> Output:
        """Return logits and features; raise if they may not belong together."""
        layer = f"the layer {self.head_name!r}"
        advice = "pass WithFeatures(model, head=...) the layer that computes the logits"
        if recorder.calls != 1:
            times = f"was called {recorder.calls} times in one forward pass instead of once"
            raise UserError(f"{layer} {times}; {advice}, or wrap again if it was replaced")
        if logits is recorder.probs and not self._softmax_was_reported and not torch.compiler.is_compiling():
            self._softmax_was_reported = True
            warn_caller(
                "the network returns the result of a softmax: probabilities, but losses need logits; train it without "
                "the softmax"
            )
        output, features = recorder.origin(logits)
        if output is not logits and self._rivals:
            rivals = ", ".join([self.head_name, *self._rivals])
            raise UserError(f"the logits are not the output of {layer} as it is; {advice}, one of: {rivals}")
        if output is not logits:
            self._verify(recorder, output, logits)
        axis = 1 if self._channels_first else output.ndim - 1
        rows, rows_of_features = ((*t.shape[:axis], *t.shape[axis + 1 :]) for t in (output, features))
        if rows == rows_of_features:
            if logits.shape == output.shape:
                return Output(logits, features)
            if self._channels_first and logits.shape == output.shape[:2] and output.shape[2:].numel() == 1:
                return Output(logits, features.flatten(1))
            if not self._channels_first and logits.shape == (*rows[:1], output.shape[-1], *rows[1:]):
                return Output(logits, features.movedim(-1, 1))
        if logits.ndim == 1 and output.shape == (len(logits), 1):
            raise UserError(
                f"the logits have shape {tuple(logits.shape)}, one logit z per sample; return them as "
                f"{tuple(output.shape)}, and make two logits for the loss: torch.cat([0 * z, z], 1)"
            )
        shapes = f"features {tuple(features.shape)} and output {tuple(output.shape)} of {layer}"
        raise UserError(f"{shapes} do not match the rows of logits {tuple(logits.shape)}; {advice}")

    def _verify(self, recorder: "_Recorder", output: Tensor, logits: Tensor) -> None:
        """Raise if the logits come from another layer; checked once, in the first call with gradients."""
        other = any(candidate is logits for candidate in recorder.of_same_width)
        graph = torch.is_grad_enabled() and output.requires_grad and logits.requires_grad
        if not other and not self._verified and graph and not torch.compiler.is_compiling():
            (gradient,) = torch.autograd.grad(logits.sum(), output, retain_graph=True, allow_unused=True)
            other, self._verified = gradient is None, gradient is not None
        if other:
            raise UserError(
                f"the logits are not computed by the layer {self.head_name!r}, whose input the features are; pass "
                "WithFeatures(model, head=...) the layer that computes the logits, or output=... the position or key "
                "of its logits in the output of the network"
            )


class WithLoss(nn.Module):
    """A network and its loss in one module, so that DistributedDataParallel sees the parameters and buffers of both.

    Args:
        net: the network; wrapped in `WithFeatures` unless it is one.
        loss: a module, called as `loss(logits, labels, features=..., index=...)`.
    """

    def __init__(self, net: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        _check_call(loss)
        self.net = net if isinstance(net, WithFeatures) else WithFeatures(net)
        self.loss = loss
        # DistributedDataParallel broadcasts all other buffers in every step.
        self._ddp_params_and_buffers_to_ignore = [f"loss.{name}" for name in getattr(loss, "identical_buffers", ())]

    def forward(self, inputs: Any, labels: Tensor, index: Tensor | None = None) -> tuple[Tensor, Output]:
        """Return the loss of a batch and the output of the network; unpack inputs in mappings, tuples or lists."""
        if isinstance(inputs, Mapping):
            output = self.net(**inputs)
        elif isinstance(inputs, (tuple, list)):
            output = self.net(*inputs)
        else:
            output = self.net(inputs)
        return self.loss(output.logits, labels, features=output.features, index=index), output


def _check_call(loss: nn.Module) -> None:
    """Raise if a loss cannot be called with features and index."""
    taken = inspect.signature(loss.forward).parameters
    if not {"features", "index"} <= taken.keys() and all(p.kind is not p.VAR_KEYWORD for p in taken.values()):
        name = getattr(loss, "original_name", type(loss).__name__)  # of a scripted module
        raise UserTypeError(
            f"{name} cannot be called as loss(logits, labels, features=..., index=...); for "
            'cross-entropy pass fedlas.build_loss("ce"); a custom loss needs these arguments in its forward'
        )


def parameters(*modules: nn.Module) -> list[nn.Parameter]:
    """List the parameters of several modules for an optimizer, each parameter once: `parameters(net, loss)`."""
    return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))


LOADING = ("checkpoint", "pretrained", "weights", "cache_dir")  # prefixes of library options that read files


def without_weights(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings; raise if one makes the library load weights, because loading may run code in the file."""
    for setting in settings or {}:
        if setting.startswith(LOADING):
            raise UserError(f"the setting {setting!r} is not passed on; weights are loaded by pretrained=... alone")
    return dict(settings or {})


class Common(TypedDict, total=False):
    """Keywords of all networks."""

    in_channels: int
    pretrained: bool | str | Path


class AbstractNetwork(ABC):
    """Base class of catalogue entries: a named network and the keywords to build it.

    Args:
        num_classes: number of logits.
        in_channels: number of channels of an image: 3 for colour, 1 for greyscale.
        pretrained: True for the published weights of the network, or the path of a weight file; of the checkpoint of a
            run, the weights of its best epoch. If the number of classes in the file differs, the last layer is not
            loaded.
    """

    name: ClassVar[str]
    citation: ClassVar[str]
    image_size: ClassVar[int | None] = None
    """Height and width of the images; None if the network accepts any size."""

    def __init__(self, num_classes: int, *, in_channels: int = 3, pretrained: bool | str | Path = False) -> None:
        for option, count in {"num_classes": num_classes, "in_channels": in_channels}.items():
            if count < 1:
                raise UserError(f"{option} is {count}; at least 1 is needed")
        self.num_classes, self.in_channels, self.pretrained = num_classes, in_channels, pretrained

    @abstractmethod
    def random_init(self) -> nn.Module:
        """Build the network with randomly initialised weights."""

    def source(self) -> Source:
        """Return the source of its published weights."""
        raise UserError(f"there are no published weights of {self.name!r}; pass pretrained='path/to/a/file'")

    def converted(self, weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:  # noqa: ARG002
        """Rename or resize published weights that do not match the network."""
        return weights

    def build(self) -> nn.Module:
        """Build the network, with pre-trained weights if requested."""
        if self.pretrained is False:
            return self.random_init()
        path = self.source().fetch() if self.pretrained is True else Path(self.pretrained)
        weights = read_weights(path)
        model = self.random_init()
        head = _find_head(model)
        if mismatch(model, weights, head):
            weights = self.converted(weights, model)
        if problem := mismatch(model, weights, head):
            raise UserError(f"{path} does not fit the network {self.name!r}: {problem}")
        load_weights(model, weights, head)
        return model


class AbstractLibrary(AbstractNetwork):
    """Catalogue entry of all networks of a library, built by the name LIBRARY:NETWORK.

    Args:
        num_classes: number of logits.
        network: name of the network in the library.
        settings: options of the library; `build_model` adds all keywords that are not listed here.
        common: see `AbstractNetwork`.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        network: str,
        settings: Mapping[str, Any] | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_classes, **common)
        if not self.has(network):
            raise UserError(f"{self.name} has no network {network!r}{closest(network, self.networks())}")
        self.network, self.settings = network, without_weights(settings)

    @classmethod
    def is_installed(cls) -> bool:
        """Return whether the library, whose package is named like the entry, is installed."""
        return importlib.util.find_spec(cls.name) is not None

    @classmethod
    @abstractmethod
    def networks(cls) -> Collection[str]:
        """Return the names of the networks of the library."""

    @classmethod
    def has(cls, network: str) -> bool:
        """Return whether the library has a network of this name."""
        return network in cls.networks()


class Head(nn.Linear):
    """A last linear layer that applies a module to its input first, so that features are taken before a dropout.

    Args:
        in_features: width of the features.
        out_features: number of classes.
        before: module that is applied to the features.
    """

    def __init__(self, in_features: int, out_features: int, before: nn.Module) -> None:
        super().__init__(in_features, out_features)
        self.before = before

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of features."""
        return super().forward(self.before(features))


def closest(name: str, known: Collection[str]) -> str:
    """Return a "did you mean" suffix for an error message; empty if no known name is similar."""
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


class _Recorder(TorchFunctionMode):
    """Records one forward pass: calls of the head, dropouts before it and rows selected after it."""

    def __init__(self, width: int, *, picks_rows: bool) -> None:
        super().__init__()
        self.width = width
        self.picks_rows = picks_rows
        self.of_same_width: list[Tensor] = []  # outputs of layers with the width of the head
        self.calls = 0
        self.probs: Tensor | None = None  # the output of the most recent softmax
        self.pairs: list[tuple[Tensor, Tensor]] = []  # (output of the head or rows selected from it, features)
        self.resized: list[
            tuple[Tensor, int, tuple[Any, ...], dict[str, Any]]
        ] = []  # the last three: index into `pairs` and the arguments of interpolate
        self.dropped: Tensor | None = None  # the output of the most recent dropout
        self.undropped: Tensor | None = None  # the input of that dropout, or of the first of consecutive dropouts

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return self._see_dropout(func, args, kwargs)
        result = func(*args, **kwargs)
        if func is Tensor.__getitem__:
            self._see_rows(args[0], args[1], result)
        elif func in _SOFTMAXES:
            if self.width in (-1, *result.shape):  # not attention weights, which would be kept in memory
                self.probs = result
        elif func is functional.interpolate:
            self._see_resize(args, kwargs, result)
        elif func is functional.linear if self.picks_rows else func in _CONVOLVE:
            if result.shape[-1 if self.picks_rows else 1] == self.width:
                self.of_same_width.append(result)
        elif result is self.dropped or (func is Tensor.__setitem__ and args[0] is self.dropped):
            self.dropped = None  # changed in place, so no longer the output of the dropout
        return result

    def see_head(self, value: Tensor, output: Any) -> None:
        """Record a call of the head."""
        if not isinstance(output, Tensor):
            raise UserTypeError(f"the layer given as head returns a {type(output).__name__} instead of a tensor")
        self.calls += 1
        self.pairs.append((output, self._before_dropout(value)))

    def origin(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the recorded tensor that is the logits, with its features; by default the output of the head."""
        for resized, position, args, kwargs in self.resized:
            if resized is logits:  # features have many more channels than logits, so they are resized only if needed
                return logits, functional.interpolate(self.pairs[position][1], *args, **kwargs)
        for output, features in self.pairs:
            if output is logits:
                return output, features
        return self.pairs[0]

    def _see_dropout(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        value = args[0] if args else kwargs["input"]
        in_place = args[3] if len(args) > 3 else kwargs.get("inplace", False)
        before = self._before_dropout(value)
        if in_place and before is value:
            before = before.clone()
        dropped = func(*args, **kwargs)
        self.dropped, self.undropped = dropped, before
        return dropped

    def _before_dropout(self, value: Tensor) -> Tensor:
        return self.undropped if self.undropped is not None and value is self.dropped else value

    def _see_rows(self, source: Tensor, index: Any, result: Tensor) -> None:
        for output, features in self.pairs:
            if source is output and self.picks_rows and _keeps_last_axis(index, output.ndim):
                self.pairs.append((result, features[index]))
                return

    def _see_resize(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        """Record a resize of the output of the head; it commutes with the head, which acts pointwise."""
        source = args[0] if args else kwargs["input"]
        others = {name: value for name, value in kwargs.items() if name != "input"}
        for position, (output, _) in enumerate(self.pairs):
            if source is output and not self.picks_rows:
                self.resized.append((result, position, args[1:], others))
                return


def _keeps_last_axis(index: Any, ndim: int) -> bool:
    """Return whether an index selects rows only; the last axis is classes for logits, but channels for features."""
    parts = index if isinstance(index, tuple) else (index,)
    if parts and isinstance(parts[-1], slice) and parts[-1] == slice(None):
        parts = parts[:-1]
    if not all(isinstance(part, (int, slice, Tensor)) for part in parts):
        return False
    return sum(part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1 for part in parts) < ndim


def _logits(result: Any, output: int | str | None = None) -> Tensor:
    """Return the logits among the outputs of a network."""
    logits = result
    if output is not None:
        logits = _item(result, output)
    elif isinstance(result, Mapping):
        logits = result.get("logits", result.get("out"))
    elif hasattr(result, "logits"):
        logits = result.logits
    elif isinstance(result, (tuple, list)) and result:
        logits = result[0]
    if isinstance(logits, Tensor):
        return logits
    keys = f" with {', '.join(map(str, result))}" if isinstance(result, Mapping) else ""
    chosen = "" if output is None else f", whose item {output!r} is no tensor"
    takes = 'a tensor, something with `logits`, a dictionary with "out", or a tuple that starts with a tensor'
    raise UserTypeError(
        f"the network returns a {type(result).__name__}{keys}{chosen}; WithFeatures takes {takes}; for other outputs "
        "pass output=..., the position or key of the logits"
    )


def _item(result: Any, output: int | str) -> Any:
    """Return an item of a tuple or dictionary, or an attribute; None if there is no such item."""
    try:
        return result[output]
    except (KeyError, IndexError, TypeError):
        return getattr(result, output, None) if isinstance(output, str) else None


def _warn_of_softmax(model: nn.Module) -> bool:
    """Warn if the last layer is a softmax, and return whether it is: losses would treat its probabilities as logits."""
    last = [name for name, layer in model.named_modules() if not list(layer.children())][-1:]
    ends_in_softmax = bool(last) and isinstance(model.get_submodule(last[0]), nn.Softmax)
    if ends_in_softmax:
        warnings.warn(
            f"the last layer, {last[0]!r}, is a softmax: the network returns probabilities, but losses need "
            "logits; train it without that layer",
            stacklevel=3,
        )
    return ends_in_softmax


def _find_head(model: nn.Module) -> str:
    """Return the dotted path of the layer that computes the logits of a classifier."""
    ends = _ends("", model)
    if len(ends) == 1:
        return next(iter(ends))
    problem = f"several layers of {type(model).__name__} could make its logits: {', '.join(ends)}"
    if not ends:
        layers = ", ".join(dict(_layers(model))) or "none"
        problem = f"{type(model).__name__} does not end in a linear layer (the linear layers in it: {layers})"
    raise UserError(f"{problem}; pass WithFeatures(model, head=...) the layer whose input are the features")


def _check_head(model: nn.Module, head: str) -> str:
    """Return the path of a head; if it names a container of one layer, the path of that layer."""
    module = dict(model.named_modules()).get(head)
    # Custom classifiers (cosine, prototypes) are not linear layers, but have a weight matrix themselves.
    if module is not None and any(p.ndim > 1 for p in module.parameters(recurse=False)):
        return head
    ends = {} if module is None else _ends(head, module, pointwise=True)
    if len(ends) == 1:
        return next(iter(ends))
    problem = "is no part of the model" if module is None else "is not one layer with a weight matrix"
    raise UserError(f"head={head!r} {problem}; {nearest(str(head), list(ends or dict(_layers(model))))}")


def _ends(name: str, module: nn.Module, pointwise: bool = False) -> dict[str, nn.Module]:
    """Return the layers that may compute the output: the last one, and layers whose width fits no later layer."""
    if _is_layer(module):
        return {name: module}
    parts, pointwise = _parts(module, pointwise)
    ends: dict[str, nn.Module] = {}
    for n, (path, part) in enumerate(parts, start=1):
        module_path = f"{name}.{path}" if name else path
        input_widths = {_widths(_layers(later, pointwise)[0][1])[0] for _, later in parts[n:]}
        if not input_widths:
            ends |= _ends(module_path, part, pointwise)
        elif _is_plain(part):  # the output width of convolutions or attention is unknown
            last, layer = _layers(part, pointwise, module_path)[-1]
            if not input_widths & {_widths(layer)[1], 0}:  # 0: a lazy layer accepts any width
                ends[last] = layer
    return ends


def _parts(module: nn.Module, pointwise: bool) -> tuple[list[tuple[str, nn.Module]], bool]:
    """Return the submodules that may contain the last layer, and whether this layer may be a 1x1 convolution."""
    get_classifier = getattr(module, "get_classifier", None)  # of all timm networks
    classifier = get_classifier() if callable(get_classifier) else ()
    heads = classifier if isinstance(classifier, (tuple, list)) else (classifier,)
    classifiers = [(path, part) for path, part in module.named_modules() if any(part is head for head in heads)]
    if classifiers:
        return [(path, part) for path, part in classifiers if _layers(part, pointwise=True)], True
    children = [(path, part) for path, part in module.named_children() if _layers(part, pointwise)]
    if type(module).forward is nn.Sequential.forward:
        return children[-1:], pointwise
    name_parts = {path: {*path.lower().split("_")} for path, _ in module.named_children()}
    named = [
        (p, m) for p, m in module.named_children() if _HEAD_WORDS & name_parts[p] and not _AUXILIARY & name_parts[p]
    ]
    named = [(p, m) for p, m in named if _layers(m)] or [(p, m) for p, m in named if _layers(m, pointwise=True)]
    # Such names are ambiguous if another linear layer follows, as in fc_in, fc_hidden, out.
    single = [path for path, part in children if isinstance(part, nn.Linear)]
    if named and (not single or single[-1] in dict(named)):
        return named, True
    return children, pointwise


def _layers(module: nn.Module, pointwise: bool = False, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the linear layers in a module, or with `pointwise` its 1x1 convolutions if there are none."""
    layers = [(path, m) for path, m in module.named_modules(prefix=prefix) if _is_layer(m)]
    return [(path, m) for path, m in layers if isinstance(m, nn.Linear)] or (layers if pointwise else [])


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, _CONVOLUTIONS):
        return set(module.kernel_size) == {1} and module.groups == 1
    return isinstance(module, nn.Linear)


def _is_plain(module: nn.Module) -> bool:
    """Return whether all weight matrices in a module belong to linear layers."""
    others = (m for m in module.modules() if not isinstance(m, nn.Linear))
    return all(p.ndim < 2 for m in others for p in m.parameters(recurse=False))


def _widths(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a layer; -1 if unknown."""
    if isinstance(layer, _CONVOLUTIONS):
        return layer.in_channels, layer.out_channels
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (-1, -1)
