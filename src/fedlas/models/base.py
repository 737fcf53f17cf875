"""Any classifier with its features: the input of its last linear layer, beside the logits that this layer makes.

    x ─► body ─► features ─► dropout ─► last linear layer (the head) ─► rows picked ─► logits

`WithFeatures` finds the head when it is built, by the names that libraries give it and by the order and widths of the
layers; where two layers could be it, nothing is guessed. A hook on the head gives its input and output. What happens
around it is seen by a torch function mode, active only while the wrapper runs: a dropout right before the head is
undone, be it a module or a function; where the network picks rows of the head's output (the last token of a decoder),
the same rows of the features are picked; where it resizes the output (segmentation), the features are resized alike.
Nothing stays behind after the call. The first eager call with gradients checks that the logits come from the head.

The networks of this package are plain modules that return logits, made by entries of the catalogue: an entry derives
from `AbstractNetwork` and knows how to build one network.
"""

import difflib
import importlib.util
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
from fedlas.errors import UserError, UserTypeError
from fedlas.models.pretrained import Source, load_weights, misfit, read_weights

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

# Words in attribute names by which libraries and people call the part that ends in the logits.
_HEAD_WORDS = {"fc", "head", "heads", "classifier", "score", "logits"}
_AUXILIARY = {"aux", "auxiliary"}  # a second classifier that only helps training
_DROPOUTS = (torch.dropout, *(f for name, f in vars(functional).items() if "dropout" in name))
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONVOLVE = (functional.conv1d, functional.conv2d, functional.conv3d)


class Output(NamedTuple):
    """What a network says about a batch, and the features that it says it from."""

    logits: Tensor
    features: Tensor


class WithFeatures(nn.Module):
    """A classifier that returns its features beside its logits.

    The features keep their gradients and are taken before all dropouts that directly precede the last linear layer.
    The wrapped network is `model`, its `state_dict` unchanged, and `head_name` the dotted path of that layer in it.

    Args:
        model: a network that returns logits, something that has them as `logits`, a dictionary that has them as
            "logits" or "out", or a tuple that starts with them.
        head: the dotted path of the last linear layer, for a network where it is not found or not the only one.
        output: the position or key of the logits in what the network returns, for a network with several outputs.
    """

    def __init__(self, model: nn.Module, head: str | None = None, output: int | str | None = None) -> None:
        super().__init__()
        self.model = model
        self.output = output
        self.head_name = _found_head(model) if head is None else _given_head(model, head)
        layer = model.get_submodule(self.head_name)
        _warn_of_softmax(model)
        self._channels_first = isinstance(layer, _CONVOLUTIONS)
        self._width = _widths(layer)[1]
        # Logits that are not the very output of a layer that we found ourselves may come from one of these.
        same_width = [name for name, other in _layers(model) if _widths(other)[1] == _widths(layer)[1]]
        self._rivals = [name for name in same_width if name != self.head_name] if head is None else []
        self._watch: _Watch | None = None
        self._unwrapped = False
        self._verified = False
        # A bound method, so that a copy of the wrapper has a hook of its own.
        self._hook = layer.register_forward_hook(self._see_head, with_kwargs=True)

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        """Call the network and return its logits with their features."""
        if getattr(self, "_is_replica", False):
            raise UserTypeError("WithFeatures does not work in nn.DataParallel; use DistributedDataParallel")
        if self._unwrapped:
            raise RuntimeError("this WithFeatures was unwrapped; wrap the network again")
        if self._watch is not None:
            raise RuntimeError("this WithFeatures is already running, inside of itself or in another thread")
        self._watch = watch = _Watch(self._width, picks_rows=not self._channels_first)
        try:
            with watch:
                result = self.model(*args, **kwargs)
        finally:
            self._watch = None
        return self._pair(watch, _logits(result, self.output))

    def unwrap(self) -> nn.Module:
        """Take the hook off the head and return the network as it came, to be pickled or scripted on its own."""
        self._hook.remove()
        self._unwrapped = True
        return self.model

    def extra_repr(self) -> str:
        """Say where the features come from when the module is printed."""
        return f"head_name={self.head_name!r}" + ("" if self.output is None else f", output={self.output!r}")

    def _see_head(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._watch is not None:
            self._watch.see_head(args[0] if args else next(iter(kwargs.values())), output)

    def _pair(self, watch: "_Watch", logits: Tensor) -> Output:
        """Put logits and features together, or say why they may not belong together."""
        layer = f"the layer {self.head_name!r}"
        advice = "pass WithFeatures(model, head=...) the layer that makes the logits"
        if watch.calls != 1:
            times = f"was called {watch.calls} times in one forward pass instead of once"
            raise UserError(f"{layer} {times}; {advice}, or wrap again if it was replaced")
        output, features = watch.origin(logits)
        if output is not logits and self._rivals:
            rivals = ", ".join([self.head_name, *self._rivals])
            raise UserError(f"the logits are not the output of {layer} as it is; {advice}, one of: {rivals}")
        if output is not logits:
            self._verify(watch, output, logits)
        axis = 1 if self._channels_first else output.ndim - 1
        rows, rows_of_features = ((*t.shape[:axis], *t.shape[axis + 1 :]) for t in (output, features))
        if rows == rows_of_features:
            if logits.shape == output.shape:
                return Output(logits, features)
            if self._channels_first and logits.shape == output.shape[:2] and output.shape[2:].numel() == 1:
                return Output(logits, features.flatten(1))
            if not self._channels_first and logits.shape == (*rows[:1], output.shape[-1], *rows[1:]):
                return Output(logits, features.movedim(-1, 1))
        shapes = f"features {tuple(features.shape)} and output {tuple(output.shape)} of {layer}"
        raise UserError(f"{shapes} do not belong row by row to logits {tuple(logits.shape)}; {advice}")

    def _verify(self, watch: "_Watch", output: Tensor, logits: Tensor) -> None:
        """Raise if the logits come from another layer; once, and as soon as there are gradients to follow."""
        other = any(made is logits for made in watch.of_same_width)
        graph = torch.is_grad_enabled() and output.requires_grad and logits.requires_grad
        if not other and not self._verified and graph and not torch.compiler.is_compiling():
            (slope,) = torch.autograd.grad(logits.sum(), output, retain_graph=True, allow_unused=True)
            other, self._verified = slope is None, slope is not None
        if other:
            raise UserError(
                f"the logits are not made by the layer {self.head_name!r}, whose input the features are; pass "
                "WithFeatures(model, head=...) the layer that makes the logits, or output=... the position or key of "
                "its logits in what the network returns"
            )


class WithLoss(nn.Module):
    """A network and its loss in one module, so that DistributedDataParallel sees the parameters and buffers of both.

    Args:
        net: the network; it gets a `WithFeatures` around it unless it is one.
        loss: a module that is called as `loss(logits, labels, features=..., index=...)`.
    """

    def __init__(self, net: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.net = net if isinstance(net, WithFeatures) else WithFeatures(net)
        self.loss = loss
        # DistributedDataParallel broadcasts all other buffers in every step.
        self._ddp_params_and_buffers_to_ignore = [f"loss.{name}" for name in getattr(loss, "identical_buffers", ())]

    def forward(self, inputs: Any, labels: Tensor, index: Tensor | None = None) -> tuple[Tensor, Output]:
        """Return the loss of a batch and what the network said; mappings, tuples and lists of inputs are unpacked."""
        if isinstance(inputs, Mapping):
            output = self.net(**inputs)
        elif isinstance(inputs, (tuple, list)):
            output = self.net(*inputs)
        else:
            output = self.net(inputs)
        return self.loss(output.logits, labels, features=output.features, index=index), output


def parameters(*modules: nn.Module) -> list[nn.Parameter]:
    """List the parameters of several modules for an optimizer, each parameter once: `parameters(net, loss)`."""
    return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))


LOADING = ("checkpoint", "pretrained", "weights", "cache_dir")  # how words of libraries begin that read files


def without_weights(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Refuse settings by which a library would load weights by itself, which may run code that a file brings along."""
    for word in settings or {}:
        if word.startswith(LOADING):
            raise UserError(f"the setting {word!r} is not passed on; weights are loaded by pretrained=... alone")
    return dict(settings or {})


class Common(TypedDict, total=False):
    """Keywords that every network takes."""

    in_channels: int
    pretrained: bool | str | Path


class AbstractNetwork(ABC):
    """An entry of the catalogue: a network of one name, with the keywords that it can be built with.

    Args:
        num_classes: number of logits.
        in_channels: number of channels of an image: 3 for colour, 1 for grey.
        pretrained: True for the weights that the network's makers publish, or the path of a file of weights. Of a file
            for another number of classes, all but the last layer is taken.
    """

    name: ClassVar[str]
    citation: ClassVar[str]
    image_size: ClassVar[int | None] = None
    """Height and width of the images that it is made for; None if it takes any."""

    def __init__(self, num_classes: int, *, in_channels: int = 3, pretrained: bool | str | Path = False) -> None:
        for word, count in {"num_classes": num_classes, "in_channels": in_channels}.items():
            if count < 1:
                raise UserError(f"{word} is {count}; at least 1 is needed")
        self.num_classes, self.in_channels, self.pretrained = num_classes, in_channels, pretrained

    @abstractmethod
    def drawn(self) -> nn.Module:
        """Make the network with weights drawn at random."""

    def source(self) -> Source:
        """Say where its weights are published."""
        raise UserError(f"there are no published weights of {self.name!r}; pass pretrained='path/to/a/file'")

    def converted(self, weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:  # noqa: ARG002
        """Rename or resize published weights that do not fit as they are."""
        return weights

    def build(self) -> nn.Module:
        """Make the network, with the weights that were asked for."""
        if self.pretrained is False:
            return self.drawn()
        path = self.source().fetched() if self.pretrained is True else Path(self.pretrained)
        weights = read_weights(path)
        model = self.drawn()
        head = _found_head(model)
        if misfit(model, weights, head):
            weights = self.converted(weights, model)
        if fault := misfit(model, weights, head):
            raise UserError(f"{path} does not fit the network {self.name!r}: {fault}")
        load_weights(model, weights, head)
        return model


class AbstractLibrary(AbstractNetwork):
    """An entry that stands for all networks of a library; its name and a colon come before the network's.

    Args:
        num_classes: number of logits.
        network: the network's name in the library.
        settings: passed on to the library; `build_model` gathers here what it does not know itself.
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
        """Say whether the library, whose package has the entry's name, is there."""
        return importlib.util.find_spec(cls.name) is not None

    @classmethod
    @abstractmethod
    def networks(cls) -> Collection[str]:
        """List the names of the library's networks."""

    @classmethod
    def has(cls, network: str) -> bool:
        """Say whether the library has a network of this name."""
        return network in cls.networks()


class Head(nn.Linear):
    """A last linear layer that prepares its input itself, so that features are what comes in: before a dropout, say.

    Args:
        in_features: width of the features.
        out_features: number of classes.
        before: what happens to the features first.
    """

    def __init__(self, in_features: int, out_features: int, before: nn.Module) -> None:
        super().__init__(in_features, out_features)
        self.before = before

    def forward(self, features: Tensor) -> Tensor:
        """Make logits of features."""
        return super().forward(self.before(features))


def closest(word: str, known: Collection[str]) -> str:
    """End an error message with those of many known words that look like an unknown one."""
    close = difflib.get_close_matches(word.lower(), known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


class _Watch(TorchFunctionMode):
    """Sees one forward pass: the call of the head, the dropouts before it and the rows picked after it."""

    def __init__(self, width: int, *, picks_rows: bool) -> None:
        super().__init__()
        self.width = width
        self.picks_rows = picks_rows
        self.of_same_width: list[Tensor] = []  # outputs of layers like the head
        self.calls = 0
        self.pairs: list[tuple[Tensor, Tensor]] = []  # the head's output, then rows picked from it, with their features
        self.resized: list[tuple[Tensor, int, tuple[Any, ...], dict[str, Any]]] = []  # with the pair they come from
        self.dropped: Tensor | None = None  # the output of the most recent dropout
        self.undropped: Tensor | None = None  # what went into it, or into the first of several in a row

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return self._see_dropout(func, args, kwargs)
        result = func(*args, **kwargs)
        if func is Tensor.__getitem__:
            self._see_rows(args[0], args[1], result)
        elif func is functional.interpolate:
            self._see_resize(args, kwargs, result)
        elif func is functional.linear if self.picks_rows else func in _CONVOLVE:
            if result.shape[-1 if self.picks_rows else 1] == self.width:
                self.of_same_width.append(result)
        elif result is self.dropped or (func is Tensor.__setitem__ and args[0] is self.dropped):
            self.dropped = None  # changed in place, so no longer what the dropout made
        return result

    def see_head(self, value: Tensor, output: Any) -> None:
        """Remember a call of the head."""
        if not isinstance(output, Tensor):
            raise UserTypeError(f"the layer given as head returns a {type(output).__name__} instead of a tensor")
        self.calls += 1
        self.pairs.append((output, self._before_dropout(value)))

    def origin(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Find the output that the logits are, with its features; the head's own if they are none that was seen."""
        for resized, place, args, kwargs in self.resized:
            if resized is logits:  # only now: features are many times as wide as logits
                return logits, functional.interpolate(self.pairs[place][1], *args, **kwargs)
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
            if source is output and self.picks_rows and _spares_last_axis(index, output.ndim):
                self.pairs.append((result, features[index]))
                return

    def _see_resize(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        """Note a resize of the head's output; it commutes with the head, which acts on each position alone."""
        source = args[0] if args else kwargs["input"]
        others = {name: value for name, value in kwargs.items() if name != "input"}
        for place, (output, _) in enumerate(self.pairs):
            if source is output and not self.picks_rows:
                self.resized.append((result, place, args[1:], others))
                return


def _spares_last_axis(index: Any, ndim: int) -> bool:
    """Say whether an index picks rows only: the last axis holds classes in the logits, but features in the features."""
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


def _warn_of_softmax(model: nn.Module) -> None:
    """Warn of a network whose last layer makes probabilities: losses take them for logits, and hardly learn."""
    last = [name for name, layer in model.named_modules() if not list(layer.children())][-1:]
    if last and isinstance(model.get_submodule(last[0]), nn.Softmax):
        warnings.warn(
            f"the last layer, {last[0]!r}, is a softmax: what the network returns are probabilities, and losses need "
            "logits; train it without that layer",
            stacklevel=3,
        )


def _found_head(model: nn.Module) -> str:
    """Find the dotted path of the layer that makes a classifier's logits."""
    ends = _ends("", model)
    if len(ends) == 1:
        return next(iter(ends))
    problem = f"several layers of {type(model).__name__} could make its logits: {', '.join(ends)}"
    if not ends:
        layers = ", ".join(dict(_layers(model))) or "none"
        problem = f"{type(model).__name__} does not end in a linear layer (the linear layers in it: {layers})"
    raise UserError(f"{problem}; pass WithFeatures(model, head=...) the layer whose input are the features")


def _given_head(model: nn.Module, head: str) -> str:
    """Check a path that the user gives, and go on to the layer inside where it is a container of one."""
    module = dict(model.named_modules()).get(head)
    # People's own classifiers (cosine, prototypes) are no linear layers, but hold a matrix themselves.
    if module is not None and any(p.ndim > 1 for p in module.parameters(recurse=False)):
        return head
    ends = {} if module is None else _ends(head, module, pointwise=True)
    if len(ends) == 1:
        return next(iter(ends))
    problem = "is no part of the model" if module is None else "is not one layer with a weight matrix"
    raise UserError(f"head={head!r} {problem}; {nearest(str(head), list(ends or dict(_layers(model))))}")


def _ends(name: str, module: nn.Module, pointwise: bool = False) -> dict[str, nn.Module]:
    """List what could make a module's output: its last layer, and those of parts that cannot feed a later one."""
    if _is_layer(module):
        return {name: module}
    parts, pointwise = _parts(module, pointwise)
    ends: dict[str, nn.Module] = {}
    for n, (path, part) in enumerate(parts, start=1):
        here = f"{name}.{path}" if name else path
        takers = {_widths(_layers(later, pointwise)[0][1])[0] for _, later in parts[n:]}
        if not takers:
            ends |= _ends(here, part, pointwise)
        elif _is_plain(part):  # and no body of convolutions or attention, which may end in any width
            last, layer = _layers(part, pointwise, here)[-1]
            if not takers & {_widths(layer)[1], 0}:  # 0: a lazy layer takes any width
                ends[last] = layer
    return ends


def _parts(module: nn.Module, pointwise: bool) -> tuple[list[tuple[str, nn.Module]], bool]:
    """Give the parts in which to look for a module's last layer, and whether that may be a 1x1 convolution."""
    say = getattr(module, "get_classifier", None)  # of all timm networks
    said = say() if callable(say) else ()
    heads = said if isinstance(said, (tuple, list)) else (said,)
    found = [(path, part) for path, part in module.named_modules() if any(part is head for head in heads)]
    if found:
        return [(path, part) for path, part in found if _layers(part, pointwise=True)], True
    children = [(path, part) for path, part in module.named_children() if _layers(part, pointwise)]
    if type(module).forward is nn.Sequential.forward:
        return children[-1:], pointwise
    words = {path: {*path.lower().split("_")} for path, _ in module.named_children()}
    named = [(p, m) for p, m in module.named_children() if _HEAD_WORDS & words[p] and not _AUXILIARY & words[p]]
    named = [(p, m) for p, m in named if _layers(m)] or [(p, m) for p, m in named if _layers(m, pointwise=True)]
    # A single layer that comes after them puts such names in doubt: fc_in, fc_hidden, out.
    single = [path for path, part in children if isinstance(part, nn.Linear)]
    if named and (not single or single[-1] in dict(named)):
        return named, True
    return children, pointwise


def _layers(module: nn.Module, pointwise: bool = False, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """List the linear layers in a module, or if there are none and they count, its 1x1 convolutions."""
    layers = [(path, m) for path, m in module.named_modules(prefix=prefix) if _is_layer(m)]
    return [(path, m) for path, m in layers if isinstance(m, nn.Linear)] or (layers if pointwise else [])


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, _CONVOLUTIONS):
        return set(module.kernel_size) == {1} and module.groups == 1
    return isinstance(module, nn.Linear)


def _is_plain(module: nn.Module) -> bool:
    """Say whether all weight matrices in a module are those of linear layers."""
    others = (m for m in module.modules() if not isinstance(m, nn.Linear))
    return all(p.ndim < 2 for m in others for p in m.parameters(recurse=False))


def _widths(layer: nn.Module) -> tuple[int, int]:
    """Give the numbers of inputs and outputs of a layer; -1 where it does not say."""
    if isinstance(layer, _CONVOLUTIONS):
        return layer.in_channels, layer.out_channels
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (-1, -1)
