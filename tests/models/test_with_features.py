"""`WithFeatures` on small networks: choice of the head, outputs, errors, and execution modes.

All tests check features in the same way: the head applied to them must give the logits.
"""

import copy
import gc
import io
import pickle
import re
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fedlas.models.base import Output, WithFeatures


class Wired(nn.Module):
    """A network of named parts and a function that wires them."""

    def __init__(self, wiring, **parts):
        super().__init__()
        self.wiring = wiring
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args, **kwargs):
        return self.wiring(self, *args, **kwargs)


class Classifier(nn.Module):
    """Body, dropout and head; a named class, so that it can be pickled."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.fc(self.dropout(x))


def images():
    return torch.randn(4, 3, 8, 8)


def assert_features_give_logits(net, *args, **kwargs):
    """Call the wrapper and prove that the head turns each row of features into that row of logits."""
    output = net(*args, **kwargs)
    layer = net.model.get_submodule(net.head_name)
    torch.testing.assert_close(layer.forward(output.features), output.logits)
    return output


def chain(*names):
    """Linear layers in a row, one after another."""

    def wiring(self, x):
        for name in names:
            x = getattr(self, name)(x.tanh())
        return x

    layers = (nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 5))
    return Wired(wiring, **dict(zip(names, layers, strict=True)))


def pair(wiring, **parts):
    """A hidden layer `a` and a last layer `b`, connected by the given function."""
    return Wired(wiring, a=nn.Linear(6, 8), b=nn.Linear(8, 5), **parts)


FOUND = {
    "one linear layer": (nn.Linear(6, 5), ""),
    "sequential": (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)), "2"),
    "nested sequential": (nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 5))), "1.1"),
    "sequential of equal widths": (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), "1"),
    "sequential that folds": (nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), nn.Linear(4, 5)), "2"),
    "sequential with names": (nn.Sequential(OrderedDict(head=nn.Linear(6, 8), out=nn.Linear(8, 5))), "out"),
    "lazy layers": (nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(5)), "1"),
    "lazy layers with names": (Wired(lambda self, x: self.b(self.a(x)), a=nn.LazyLinear(8), b=nn.LazyLinear(5)), "b"),
    "fc1 fc2 fc3": (chain("fc1", "fc2", "fc3"), "fc3"),
    "fc_in fc_hidden out": (chain("fc_in", "fc_hidden", "out"), "out"),
    "no usual name": (chain("a", "b", "c"), "c"),
    "a list of layers": (
        Wired(
            lambda self, x: self.layers[1](self.layers[0](x)), layers=nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 5)])
        ),
        "layers.1",
    ),
    "a head defined before the body": (
        Wired(
            lambda self, x: self.classifier(self.body(x)),
            classifier=nn.Linear(8, 5),
            body=nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 8)),
        ),
        "classifier",
    ),
    "a gated layer": (
        Wired(lambda self, x: self.c(self.a(x) * self.b(x)), a=nn.Linear(6, 8), b=nn.Linear(6, 8), c=nn.Linear(8, 5)),
        "c",
    ),
    "an attention before it": (
        Wired(
            lambda self, x: self.out(self.attention(x, x, x, need_weights=False)[0]),
            attention=nn.MultiheadAttention(6, 2),
            out=nn.Linear(6, 5),
        ),
        "out",
    ),
    "a network inside another": (Wired(lambda self, x: self.net(x), net=chain("fc1", "fc2", "fc3")), "net.fc3"),
    "a body with a linear layer of its own": (
        Wired(
            lambda self, x: self.out(self.body.conv(x[:, None])[:, 0] * self.body.gate(x)),
            body=Wired(None, conv=nn.Conv1d(1, 1, 3, padding=1), gate=nn.Linear(6, 1)),
            out=nn.Linear(6, 5),
        ),
        "out",
    ),
    "a convolution called head": (
        Wired(lambda self, x: self.fc(self.head(x[..., None])[..., 0]), fc=nn.Linear(8, 5), head=nn.Conv1d(6, 8, 1)),
        "fc",
    ),
    "a weight-normalised head": (nn.Sequential(nn.Linear(6, 8), parametrizations.weight_norm(nn.Linear(8, 5))), "1"),
    "an output that is cast": (pair(lambda self, x: self.b(self.a(x)).double().float()), "b"),
    "a head called by keyword": (pair(lambda self, x: self.b(input=self.a(x))), "b"),
    "a projection beside the head": (
        Wired(
            lambda self, x: (self.fc(self.body(x)), self.projection(self.body(x))),
            body=nn.Linear(6, 8),
            projection=nn.Sequential(nn.Linear(8, 3)),
            fc=nn.Linear(8, 5),
        ),
        "fc",
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_head_is_found_automatically(case):
    model, name = copy.deepcopy(FOUND[case])
    net = WithFeatures(model)
    assert net.head_name == name
    assert isinstance(assert_features_give_logits(net, torch.randn(4, 6)), Output)
    assert repr(name) in repr(net)


def heads(wiring=lambda self, x: (self.head_a(x), self.head_b(x)), classes=5):
    return Wired(wiring, head_a=nn.Linear(6, 5), head_b=nn.Linear(6, classes))


def deep_heads():
    return Wired(None, body=nn.Linear(6, 6), a=nn.Sequential(nn.Linear(6, 5)), b=nn.Sequential(nn.Linear(6, 5)))


def low_rank():
    """A layer with an adapter beside it, whose input is as wide as its rank."""
    return Wired(None, classifier=Wired(None, base=nn.Linear(6, 5), down=nn.Linear(6, 2), up=nn.Linear(2, 5)))


REFUSED = {
    "two heads": (heads(), "head_a, head_b"),
    "two heads of different widths": (heads(classes=2), "head_a, head_b"),
    "two deep heads": (deep_heads(), "a.0, b.0"),
    "a list of heads": (Wired(None, heads=nn.ModuleList([nn.Linear(6, 5), nn.Linear(6, 5)])), "heads.0, heads.1"),
    "a later layer beside the head": (Wired(None, fc=nn.Linear(6, 5), projection=nn.Linear(6, 3)), "fc, projection"),
    "two branches that are joined": (
        Wired(None, image=nn.Linear(6, 3), text=nn.Linear(6, 4), out=nn.Linear(7, 5)),
        "image, text, out",
    ),
    "an adapter": (low_rank(), "classifier.base, classifier.up"),
    "no layer at all": (nn.Flatten(), "Flatten"),
    "a grouped convolution called head": (
        Wired(None, head=nn.Conv2d(6, 6, 1, groups=6)),
        "none",
    ),
    "convolutions only": (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1)), "none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_ambiguous_head_raises_with_the_candidates(case):
    model, candidates = REFUSED[case]
    with pytest.raises(ValueError, match="head=") as error:
        WithFeatures(model)
    assert re.search(rf"\b{re.escape(candidates)}\b(?!,)", str(error.value))


def test_one_of_two_heads_can_be_selected():
    x = torch.randn(4, 6)
    model = heads(lambda self, x: {"aux": self.head_b(2 * x), "logits": self.head_a(x)})
    torch.testing.assert_close(assert_features_give_logits(WithFeatures(model, head="head_a"), x).features, x)


def two_logits(self, x):
    return self.head_a(x), self.head_b(2 * x)


TWO_OUTPUTS = {
    "tuple": (two_logits, 1),
    "tuple from the end": (two_logits, -1),
    "post-processed": (lambda self, x: tuple(2 * y for y in two_logits(self, x)), 1),
    "dict": (lambda self, x: {"logits": self.head_a(x), "b": self.head_b(2 * x)}, "b"),
    "attribute": (lambda self, x: SimpleNamespace(logits=self.head_a(x), b=self.head_b(2 * x)), "b"),
}


@pytest.mark.parametrize("case", TWO_OUTPUTS)
def test_logits_of_another_head_raise(case):
    wiring, output = TWO_OUTPUTS[case]
    x, model = torch.randn(4, 6), heads(wiring)
    with pytest.raises(ValueError, match=r"'head_b'.*output="):
        WithFeatures(model, head="head_b")(x)
    net = WithFeatures(model, head="head_b", output=output)
    scale = 2 if case == "post-processed" else 1
    torch.testing.assert_close(net(x), Output(scale * model.head_b(2 * x), 2 * x))
    assert f"output={output!r}" in repr(net)


def test_logits_of_another_head_raise_without_gradients_and_compiled():
    net = WithFeatures(heads(two_logits), head="head_b")
    with torch.no_grad(), pytest.raises(ValueError, match="output="):
        net(torch.randn(4, 6))
    torch.compiler.reset()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="output="):
        compiled(torch.randn(4, 6))


def test_hidden_layer_as_wide_as_the_logits_is_not_taken_for_the_head():
    model = Wired(lambda self, x: self.b(self.a(x)), a=nn.Linear(6, 5), b=nn.Linear(5, 5))
    with pytest.raises(ValueError, match=r"'a'.*head="):
        WithFeatures(model, head="a")(torch.randn(4, 6))


@pytest.mark.parametrize(("output", "message"), [(2, "tuple.*2"), ("a", "tuple.*'a'")])
def test_an_unknown_output_raises(output, message):
    with pytest.raises(TypeError, match=message):
        WithFeatures(heads(), head="head_a", output=output)(torch.randn(4, 6))


def segmentation(mode="bilinear", **interpolate_options):
    """A body, a dropout and a head at a quarter of the size, resized like networks of torchvision."""

    def wiring(self, x):
        small_logits = self.classifier(self.body(x))
        outputs = {"out": functional.interpolate(small_logits, size=x.shape[2:], mode=mode, **interpolate_options)}
        return OrderedDict(outputs | {"aux": small_logits})

    head = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.1), nn.Conv2d(8, 5, 1))
    parts = {"classifier": head, "aux_classifier": nn.Sequential(nn.Conv2d(8, 5, 1))}
    return Wired(wiring, body=nn.Conv2d(3, 8, 4, stride=4), **parts)


@pytest.mark.parametrize(("mode", "interpolate_options"), [("bilinear", {"align_corners": False}), ("nearest", {})])
def test_features_of_resized_logits_are_resized_alike(mode, interpolate_options):
    net = WithFeatures(segmentation(mode, **interpolate_options).eval())
    output = assert_features_give_logits(net, torch.randn(2, 3, 16, 12))
    assert output.logits.shape == (2, 5, 16, 12)
    assert output.features.shape == (2, 8, 16, 12)
    small_output = WithFeatures(net.unwrap(), output="aux")(torch.randn(2, 3, 16, 12))
    assert small_output.features.shape == (2, 8, 4, 3)


def test_a_container_of_one_layer_is_enough_as_a_path():
    model = Wired(lambda self, x: self.b(self.a(x)), a=nn.Linear(6, 8), b=nn.Sequential(nn.Dropout(), nn.Linear(8, 5)))
    assert WithFeatures(model, head="b").head_name == "b.1"


class Cosine(nn.Module):
    """A custom classifier without nn.Linear."""

    def __init__(self):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(5, 8))

    def forward(self, x):
        return functional.normalize(x) @ functional.normalize(self.prototypes).T


def test_a_custom_head_can_be_given():
    model = nn.Sequential(nn.Linear(6, 8), Cosine())
    assert assert_features_give_logits(WithFeatures(model, head="1"), torch.randn(4, 6)).features.shape == (4, 8)
    with pytest.raises(ValueError, match="'0'"):  # the linear layer is not the last one here
        WithFeatures(model)(torch.randn(4, 6))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("fc33", "head='fc33'.*'fc3'.*fc1, fc2, fc3"),
        ("zzz", "head='zzz'.*fc1, fc2, fc3"),
        ("act", "head='act'.*weight.*fc1, fc2, fc3"),
        ("two", "head='two'.*weight.*two.a, two.b"),
    ],
)
def test_a_wrong_path_raises_with_the_known_layers(head, message):
    model = chain("fc1", "fc2", "fc3")
    model.act = nn.ReLU()
    if head == "two":
        model.two = Wired(None, a=nn.Linear(6, 5), b=nn.Linear(6, 5))
    with pytest.raises(ValueError, match=message):
        WithFeatures(model, head=head)


class Timm(nn.Module):
    """A network that says where its head is, as all of timm's do."""

    def __init__(self, head):
        super().__init__()
        self.body, self.last, self.neck = nn.Linear(6, 8), head, nn.Linear(8, 8)

    def get_classifier(self):
        return self.last

    def forward(self, x):
        return self.last(self.neck(self.body(x)))


def test_get_classifier_selects_the_head():
    assert WithFeatures(Timm(nn.Linear(8, 5))).head_name == "last"
    assert WithFeatures(nn.Sequential(Timm(nn.Sequential(nn.Dropout(), nn.Linear(8, 5))))).head_name == "0.last.1"
    with pytest.raises(ValueError, match="body, neck"):
        WithFeatures(Timm(nn.Identity()))


class Dropping(nn.Module):
    """Dropouts of every kind, right before the last layer."""

    def __init__(self, drop):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 8), nn.Linear(8, 5), drop

    def forward(self, x):
        return self.b(self.drop(self.a(x)))


DROPOUTS = {
    "module": nn.Dropout(0.5),
    "in place": nn.Dropout(0.5, inplace=True),
    "two": nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)),
    "two in place": nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Dropout(0.5, inplace=True)),
    "alpha": nn.AlphaDropout(0.5),
    "identity in between": nn.Sequential(nn.Dropout(0.5), nn.Identity()),
    "function": Wired(lambda self, x: functional.dropout(x, 0.5, self.training)),
    "function by keywords": Wired(lambda self, x: functional.dropout(input=x, training=self.training, inplace=True)),
    "torch's own": Wired(lambda self, x: torch.dropout(x, 0.5, train=self.training)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", DROPOUTS)
def test_features_are_taken_before_dropouts(case, training):
    net = WithFeatures(Dropping(DROPOUTS[case])).train(training)
    x = torch.randn(4, 6)
    output = net(x)
    torch.testing.assert_close(output.features, net.model.a(x), rtol=0, atol=0)
    assert training == (not torch.allclose(net.model.b(output.features), output.logits))
    output.features.sum().backward()
    assert net.model.a.weight.grad.abs().sum() > 0
    assert net.model.b.weight.grad is None


NOT_DIRECT = {
    "activation": nn.Sequential(nn.Dropout(0.5), nn.ReLU()),
    "activation in place": nn.Sequential(nn.Dropout(0.5), nn.ReLU(inplace=True)),
    "dropout in place, activation in place": nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Hardtanh(inplace=True)),
    "written into": Wired(lambda self, x: _write_into(functional.dropout(x, 0.5, self.training))),
    "result thrown away": Wired(lambda self, x: (functional.dropout(x, 0.5, self.training), x)[1]),
}


def _write_into(x):
    x[:, 0] = 1.0
    return x


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", NOT_DIRECT)
def test_a_dropout_that_does_not_directly_precede_the_head_stays(case, training):
    assert_features_give_logits(WithFeatures(Dropping(NOT_DIRECT[case])).train(training), torch.randn(4, 6))


OUTPUTS = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, y + 1),
    "list": lambda y: [y],
    "dict": lambda y: {"loss": y.sum(), "logits": y},
    "attribute": lambda y: SimpleNamespace(loss=y.sum(), logits=y),
    "named tuple": lambda y: Output(y, y),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_logits_are_extracted_from_network_outputs(case):
    assert_features_give_logits(WithFeatures(pair(lambda self, x: OUTPUTS[case](self.b(self.a(x))))), torch.randn(4, 6))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"start": 1, "end": 2}, "dict.*start, end"),
        (None, "NoneType"),
        ((), "tuple"),
        (SimpleNamespace(logits=None), "SimpleNamespace"),
    ],
)
def test_an_output_without_logits_raises(output, message):
    with pytest.raises(TypeError, match=message):
        WithFeatures(pair(lambda self, x: output))(torch.randn(4, 6))


ROWS = {
    "last token": lambda y: y[:, -1],
    "first token of all classes": lambda y: y[:, 0, :],
    "one token each": lambda y: y[torch.arange(4), torch.tensor([0, 2, 1, 2])],
    "marked tokens": lambda y: y[torch.tensor([[True, False, True]] * 4)],
    "twice": lambda y: y[1:][:, 1],
    "all tokens after a look at one": lambda y: (y[0], y)[1],
    "nothing picked": lambda y: y[()],
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_selected_after_the_head_are_selected_from_the_features(case):
    output = assert_features_give_logits(
        WithFeatures(pair(lambda self, x: ROWS[case](self.b(self.a(x))))), torch.randn(4, 3, 6)
    )
    assert output.features.shape == (*output.logits.shape[:-1], 8)


WRONG = {
    "never called": lambda self, x: self.a(x)[:, :5],
    "called twice": lambda self, x: self.b(self.a(x)) + self.b(self.a(-x)),
    "not the last": lambda self, x: self.b(self.a(x)) @ torch.ones(5, 3),
    "averaged over rows": lambda self, x: self.b(self.a(x)).unflatten(0, (2, -1)).mean(0),
    "some classes only": lambda self, x: self.b(self.a(x))[:, :2],
    "squeezed": lambda self, x: self.b(self.a(x))[:, 0],
    "no axis": lambda self, x: self.b(self.a(x)).sum(),
    "an axis added": lambda self, x: self.b(self.a(x))[None],
    "single numbers": lambda self, x: (y := self.b(self.a(x)))[y > 0],
}


@pytest.mark.parametrize("case", WRONG)
def test_mismatched_features_and_logits_raise(case):
    with pytest.raises(ValueError, match=r"'b'.*head="):
        WithFeatures(pair(WRONG[case]))(torch.randn(4, 6))


def test_logits_of_another_layer_of_equal_width_raise():
    def wiring(self, x):
        return self.fc(x) + self.auxiliary(x)

    model = Wired(wiring, auxiliary=nn.Sequential(nn.Linear(6, 5)), fc=nn.Linear(6, 5))
    with pytest.raises(ValueError, match=r"'fc'.*fc, auxiliary.0"):
        WithFeatures(model)(torch.randn(4, 6))
    assert WithFeatures(model, head="fc")(torch.randn(4, 6)).features.shape == (4, 6)


class Pooling(nn.Module):
    """A classifier that sees many rows and gives one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5))

    def forward(self, x):
        return (x @ self.weight).mean(1)


def test_a_head_that_changes_the_rows_raises():
    net = WithFeatures(nn.Sequential(nn.Linear(6, 8), Pooling()), head="1")
    with pytest.raises(ValueError, match=r"\(4, 3, 8\).*\(4, 5\).*'1'"):
        net(torch.randn(4, 3, 6))


def test_one_class_of_a_map_raises():
    net = WithFeatures(Wired(lambda self, x: self.fc(x)[:, 0], fc=nn.Conv2d(3, 5, 1)))
    with pytest.raises(ValueError, match="'fc'"):
        net(torch.randn(2, 3, 4, 4))


def test_maps_keep_the_layout_of_their_logits():
    x = torch.randn(2, 3, 4, 4)
    convolutional = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 1))
    assert assert_features_give_logits(WithFeatures(convolutional, head="1"), x).features.shape == (2, 8, 4, 4)

    def channels_last(self, x):
        return self.b(self.a(x).movedim(1, -1)).movedim(-1, 1)

    net = WithFeatures(Wired(channels_last, a=nn.Conv2d(3, 8, 1), b=nn.Linear(8, 5)))
    logits, features = net(x)
    assert (logits.shape, features.shape) == ((2, 5, 4, 4), (2, 8, 4, 4))
    torch.testing.assert_close(net.model.b.forward(features.movedim(1, -1)), logits.movedim(1, -1))


def test_a_pointwise_convolution_after_pooling_is_a_linear_layer():
    def wiring(self, x):
        return self.fc(functional.dropout(x.mean((2, 3), keepdim=True), 0.5, self.training)).flatten(1)

    net = WithFeatures(Wired(wiring, body=nn.Conv2d(3, 3, 3), fc=nn.Conv2d(3, 5, 1)))
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(net(x).features, x.mean((2, 3)))
    net.eval()
    logits, features = net(x)
    torch.testing.assert_close(features @ net.model.fc.weight.flatten(1).T + net.model.fc.bias, logits)
    with pytest.raises(ValueError, match="'fc'"):  # averaged after the head
        WithFeatures(Wired(lambda self, x: self.fc(x).mean((2, 3)), fc=nn.Conv2d(3, 5, 1)))(x)


def test_one_logit_without_a_class_axis_raises():
    """Regression: the advice was another head, though the head is correct."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1), nn.Flatten(0))
    with pytest.raises(ValueError, match=r"\(4,\).*\(4, 1\).*torch\.cat\(\[0 \* z, z\], 1\)$"):
        WithFeatures(model)(torch.randn(4, 6))


def test_unwrap_removes_all_hooks():
    model = Classifier().eval()
    net = WithFeatures(model)
    layer = model.get_submodule(net.head_name)
    assert len(layer._forward_hooks) == 1
    assert net.unwrap() is model
    assert not layer._forward_hooks
    assert not any(b"fedlas" in part for part in (pickle.dumps(layer),))
    with pytest.raises(RuntimeError, match="wrap"):
        net(images())


def test_the_wrapped_model_is_unchanged():
    model = Classifier().eval()
    names, x = list(model.state_dict()), images()
    before = model(x)
    net = WithFeatures(model)
    assert net.model is model
    assert list(model.state_dict()) == names
    assert list(net.state_dict()) == [f"model.{name}" for name in names]
    assert type(model(x)) is torch.Tensor
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    torch.testing.assert_close(net(x).logits, before, rtol=0, atol=0)
    unwrapped = Classifier().eval()
    unwrapped.load_state_dict(model.state_dict())
    torch.testing.assert_close(unwrapped(x), before, rtol=0, atol=0)


def by_pickle(net):
    return pickle.loads(pickle.dumps(net))


def by_torch(net):
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copy_network", [copy.deepcopy, by_pickle, by_torch])
def test_a_copy_sees_its_own_features(copy_network):
    net = WithFeatures(Classifier()).eval()
    net_copy = copy_network(net)
    with torch.no_grad():
        net_copy.model.body[0].weight.add_(1.0)
    x = images()
    first, second = assert_features_give_logits(net, x), assert_features_give_logits(net_copy, x)
    assert not torch.allclose(first.features, second.features)
    torch.testing.assert_close(assert_features_give_logits(net, x).features, first.features, rtol=0, atol=0)
    # This model has the hook of another wrapper.
    assert_features_give_logits(WithFeatures(copy_network(net_copy.model)), x)


def test_two_wrappers_of_one_model_work_side_by_side():
    model = Classifier()
    first, second = WithFeatures(model), WithFeatures(model, head="fc")
    x = images()
    for net in (first, second, first):
        torch.testing.assert_close(net(x).features, model.body(x), rtol=0, atol=0)


def test_a_wrapper_of_a_wrapper_works():
    net = WithFeatures(WithFeatures(Classifier())).eval()
    assert net.head_name == "model.fc"
    assert_features_give_logits(net, images())


def test_wrapper_keeps_no_tensors_alive():
    net = WithFeatures(Classifier())
    references = []
    net.model.fc.register_forward_pre_hook(lambda _, args: references.append(weakref.ref(args[0])))
    gc.disable()  # tensors that only the cycle collector would free count as kept alive
    try:
        output = net(images())
        references.append(weakref.ref(output.features))
        del output
        net.model(images())
        with pytest.raises(RuntimeError):
            net(torch.randn(4, 2, 8, 8))
        assert len(references) == 3
        assert [reference() for reference in references] == [None, None, None]
    finally:
        gc.enable()
    assert net._recorder is None


def test_an_error_in_the_network_leaves_the_wrapper_usable():
    net = WithFeatures(Classifier())
    with pytest.raises(RuntimeError, match="channels"):
        net(torch.randn(4, 2, 8, 8))
    assert net(images()).features.shape == (4, 8)


def test_a_wrapper_does_not_run_inside_of_itself():
    net = WithFeatures(pair(lambda self, x: net(x)))
    with pytest.raises(RuntimeError, match="running"):
        net(torch.randn(4, 6))


def test_a_replica_of_data_parallel_raises():
    net = WithFeatures(Classifier())
    net._is_replica = True  # as torch marks them
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        net(images())


def test_modes_devices_and_types_reach_the_model():
    net = WithFeatures(Classifier())
    assert not net.eval().model.dropout.training
    assert net.train().model.dropout.training
    output = net.to(torch.float64)(images().double())
    assert output.features.dtype == output.logits.dtype == torch.float64
    output = net.to("meta")(images().double().to("meta"))
    assert output.features.device.type == output.logits.device.type == "meta"


def test_wrapper_works_in_inference_mode_and_no_grad():
    net = WithFeatures(Classifier()).eval()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert not assert_features_give_logits(net, images()).features.requires_grad


def test_wrapper_works_under_autocast():
    net = WithFeatures(Classifier()).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = assert_features_give_logits(net, images())
    assert output.logits.dtype == torch.bfloat16
    output.logits.sum().backward()
    assert net.model.body[0].weight.grad.dtype == torch.float32


def test_wrapper_works_in_channels_last():
    net, x = WithFeatures(Classifier()).eval(), images()
    expected = net(x)
    output = net.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_wrapper_works_with_gradient_checkpointing(reentrant):
    reference = WithFeatures(Classifier()).eval()
    net = WithFeatures(Classifier(reentrant)).eval()
    net.load_state_dict(reference.state_dict())
    x = images().requires_grad_()
    expected, output = reference(x), net(x)
    torch.testing.assert_close(output, expected)
    for logits, features in (expected, output):
        (logits.square().sum() + features.sum()).backward()
    for parameter, expected_parameter in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected_parameter.grad)


COMPILED = {
    "classifier": (Classifier, images),
    "function": (lambda: Dropping(DROPOUTS["function"]), lambda: torch.randn(4, 6)),
    "in place": (lambda: Dropping(DROPOUTS["in place"]), lambda: torch.randn(4, 6)),
    "not direct": (lambda: Dropping(NOT_DIRECT["activation in place"]), lambda: torch.randn(4, 6)),
    "rows": (
        lambda: pair(lambda self, x: self.b(self.a(x))[torch.arange(4), x[..., 0].argmax(1)]),
        lambda: torch.randn(4, 3, 6),
    ),
}


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("case", COMPILED)
def test_wrapper_compiles_in_one_graph_without_recompilation(case, training):
    build, inputs = COMPILED[case]
    torch.compiler.reset()
    net = WithFeatures(build()).train(training)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = inputs()
    torch.manual_seed(1)
    expected = net(x)
    torch.manual_seed(1)
    output = compiled(x)
    torch.testing.assert_close(output, expected)
    gradients = []
    for logits, features in (expected, output):
        net.zero_grad()
        (logits.square().sum() + features.sum()).backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    torch.testing.assert_close(*gradients)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            compiled(inputs())
    assert net._recorder is None


def test_errors_are_raised_in_compiled_code():
    net = torch.compile(WithFeatures(pair(WRONG["called twice"])), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"'b'.*\b2\b"):
        net(torch.randn(4, 6))


def test_a_compiled_network_can_be_wrapped_too():
    net = WithFeatures(torch.compile(Classifier(), backend="aot_eager")).eval()
    assert net.head_name == "_orig_mod.fc"
    for _ in range(2):
        assert_features_give_logits(net, images())


def test_wrapper_can_be_exported():
    net, x = WithFeatures(Classifier()).eval(), images()
    torch.testing.assert_close(torch.export.export(net, (x,)).module()(x), net(x))


@pytest.mark.parametrize("last", [nn.Softmax(dim=1), nn.LogSoftmax(dim=1), nn.Identity()])
def test_a_network_that_returns_probabilities_warns(last):
    """Regression: such a network trained without a warning and hardly learned."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Softmax(dim=1), nn.Linear(8, 3), last)
    if not isinstance(last, nn.Softmax):
        WithFeatures(model)
        return
    with pytest.warns(UserWarning, match=r"'3'.*softmax"):
        WithFeatures(model)


@pytest.mark.parametrize(
    ("last", "warns"),
    [
        (lambda logits: logits.softmax(1), True),
        (lambda logits: torch.softmax(logits, 1), True),
        (lambda logits: nn.functional.softmax(logits, dim=1), True),
        (lambda logits: 30 * torch.tanh(logits / 30), False),
        (lambda logits: logits.double() * 2, False),
        (lambda logits: logits * logits.softmax(1).amax(), False),
    ],
)
def test_a_forward_that_ends_in_a_softmax_warns_once(last, warns):
    """Regression: only a final module nn.Softmax was noticed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return last(self.fc(x))

    net, x = WithFeatures(Net()), torch.randn(5, 4)
    if warns:
        with pytest.warns(UserWarning, match="softmax"):
            net(x)
    net(x)
    with torch.no_grad():
        net.eval()(x)
