"""Exported calibrated networks equal the originals, in torch.export and ONNX format, for all calibrators."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import fedlas
from fedlas.integrations.export import CalibratedModel, load_program, program, save_onnx, save_program
from fedlas.posthoc import FeatureClipping, Temperature, build_calibrator, list_calibrators
from fedlas.posthoc.base import AbstractCalibrator, Samples

CLOSE = 1e-5
OUTSIDE_OF_TORCH = {"probmetrics"}
NAMES = [record.name for record in list_calibrators() if record.name not in OUTSIDE_OF_TORCH]


def thinned(fast: set[str]) -> list:
    """Return all calibrators, those with the same kind of graph as another marked as campaigns: an export is slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.campaign) for name in NAMES]


def fitted(name: str, classes: int = 3) -> AbstractCalibrator:
    """A calibrator fitted on over-confident logits (scaled by three)."""
    logits = 1.5 * torch.randn(300, classes)
    labels = torch.multinomial(logits.softmax(1), 1)[:, 0]
    return build_calibrator(name).fit(3 * logits, labels, split="val")


def linear(classes: int = 3) -> nn.Module:
    """A network whose logits are large enough for calibrators to matter."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, classes))
    for item in (net[1], net[4]):
        nn.init.normal_(item.weight)
    return net


def session_of(path):
    import onnxruntime

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def by_onnxruntime(path, *inputs: torch.Tensor) -> torch.Tensor:
    session = session_of(path)
    names = [get_input.name for get_input in session.get_inputs()]
    return torch.from_numpy(session.run(None, dict(zip(names, map(np.asarray, inputs), strict=True)))[0])


@pytest.mark.parametrize("name", thinned({"temperature"}))
def test_onnx_outputs_equal_torch_outputs(name, tmp_path):
    classes = 2 if name == "platt" else 3
    calibrator, net, images = fitted(name, classes), linear(classes), torch.randn(50, 1, 2, 4)
    model = CalibratedModel(net, calibrator, class_names="abc"[:classes])
    save_onnx(model, images[:1], tmp_path / "model.onnx")
    assert model.training, "exporting left the network in another mode"
    with torch.no_grad():
        expected = torch.from_numpy(calibrator.transform(net.eval()(images).numpy())).softmax(1)
        uncalibrated = net(images).softmax(1)
    assert (expected - uncalibrated).abs().max() > 0.05, (
        "this calibrator changes nothing, so the test could not detect an error"
    )
    torch.testing.assert_close(by_onnxruntime(tmp_path / "model.onnx", images), expected, atol=CLOSE, rtol=0)
    session = session_of(tmp_path / "model.onnx")
    metadata = json.loads(session.get_modelmeta().custom_metadata_map["fedlas"])
    assert metadata["class_names"] == list("abc"[:classes])
    assert (metadata["calibrator"]["name"], metadata["calibrator"]["fitted"]["split"]) == (name, "val")
    assert [item.name for item in session.get_inputs()] == ["input"]
    assert [item.name for item in session.get_outputs()] == [metadata["output"]] == ["probs"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("name", thinned({"histogram_binning", "platt", "vector_scaling"}))
def test_an_exported_program_round_trips(name, tmp_path):
    classes = 2 if name == "platt" else 3
    calibrator, net, images = fitted(name, classes), linear(classes), torch.randn(50, 1, 2, 4)
    model = CalibratedModel(net, calibrator, class_names="abc"[:classes])
    save_program(model, images[:1], tmp_path / "model.pt2")
    loaded = load_program(tmp_path / "model.pt2")
    with torch.no_grad():
        expected = torch.from_numpy(calibrator.transform(net.eval()(images).numpy())).softmax(1)
        uncalibrated = net(images).softmax(1)
    assert (expected - uncalibrated).abs().max() > 0.05, (
        "this calibrator changes nothing, so the test could not detect an error"
    )
    torch.testing.assert_close(loaded.model(images), expected, atol=CLOSE, rtol=0)
    assert loaded.metadata == json.loads(json.dumps(model.metadata))
    assert loaded.metadata["class_names"] == list("abc"[:classes])


@pytest.mark.parametrize("wrapped", [False, True])
def test_catalogue_networks_are_exported_with_and_without_features(wrapped, tmp_path):
    net = fedlas.build_model("small_cnn", 3)
    nn.init.normal_(net.fc.weight, std=3)
    for _ in range(3):
        net(torch.randn(16, 1, 8, 8))  # BatchNorm statistics that differ from the initial ones
    calibrator, images = fitted("temperature"), torch.randn(7, 1, 8, 8)
    model = CalibratedModel(fedlas.WithFeatures(net) if wrapped else net, calibrator, output="logits")
    save_program(model, images, tmp_path / "model.pt2")
    with torch.no_grad():
        expected = net.eval()(images) / calibrator.temperature
    for count in (1, 7):
        outputs = load_program(tmp_path / "model.pt2").model(images[:count])
        torch.testing.assert_close(outputs, expected[:count], atol=CLOSE, rtol=0)


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "shape"), [("small_cnn", (1, 8, 8)), ("resnet18_cifar", (3, 32, 32))])
def test_catalogue_networks_are_exported_to_onnx(name, shape, tmp_path):
    without_features = name == "small_cnn"
    net = fedlas.build_model(name, 3)
    net = net if without_features else fedlas.WithFeatures(net)
    model = CalibratedModel(net, fitted("vector_scaling"), output="logits" if without_features else "probs")
    images = torch.randn(7, *shape)
    save_onnx(model, images, tmp_path / "model.onnx")
    with torch.no_grad():
        expected = model.eval()(images)
    for count in (1, 7):
        outputs = by_onnxruntime(tmp_path / "model.onnx", images[:count])
        torch.testing.assert_close(outputs, expected[:count], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("onnx", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_feature_clipping_is_exported_with_its_network(onnx, tmp_path):
    net, images = linear(), torch.randn(200, 1, 2, 4)
    with torch.no_grad():
        logits, features = fedlas.WithFeatures(net.eval())(images)
    labels = torch.multinomial((logits / 4).softmax(1), 1)[:, 0]
    val = fedlas.Predictions(logits, labels, features=features, split="val")
    clipping = FeatureClipping(net[4].weight, net[4].bias).fit(val)
    expected = clipping.transform(val).probs
    assert (expected - val.probs).abs().max() > 0.05
    model = CalibratedModel(net, clipping)
    if onnx:
        save_onnx(model, images, tmp_path / "model.onnx")
        torch.testing.assert_close(by_onnxruntime(tmp_path / "model.onnx", images), expected, atol=CLOSE, rtol=0)
        return
    save_program(model, images, tmp_path / "model.pt2")
    loaded = load_program(tmp_path / "model.pt2")
    torch.testing.assert_close(loaded.model(images), expected, atol=CLOSE, rtol=0)
    assert loaded.metadata["calibrator"] == {"name": "feature_clipping", "threshold": clipping.threshold}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)

    def forward(self, images, sizes):
        return self.fc(torch.cat([images, sizes], dim=1))


def test_several_inputs_and_a_one_logit_head(tmp_path):
    net, calibrator = TwoInputs(), Temperature().fit(*one_logit())
    inputs = torch.randn(5, 3), torch.randn(5, 1)
    save_onnx(CalibratedModel(net, calibrator), inputs, tmp_path / "model.onnx")
    with torch.no_grad():
        of_class_1 = calibrator.transform(net(*inputs)).sigmoid()[:, 0]
    outputs = by_onnxruntime(tmp_path / "model.onnx", *inputs)
    torch.testing.assert_close(outputs, torch.stack([1 - of_class_1, of_class_1], dim=1), atol=CLOSE, rtol=0)


def one_logit():
    logits = torch.randn(300)
    return 3 * logits, (torch.rand(300) < logits.sigmoid()).long()


def test_the_batch_size_is_dynamic():
    exported = program(CalibratedModel(linear(), fitted("temperature")), torch.randn(1, 8))
    assert exported.module()(torch.randn(11, 8)).shape == (11, 3)


@pytest.mark.parametrize("name", sorted(OUTSIDE_OF_TORCH))
def test_a_calibrator_outside_of_torch_raises_with_its_name(name, tmp_path):
    with pytest.raises(ValueError, match=rf"{name}.*calibrator=None"):
        save_onnx(CalibratedModel(linear(), fitted(name)), torch.randn(1, 8), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


class DataDependent(nn.Module):
    """A network whose control flow depends on its input, which cannot be exported."""

    def forward(self, images):
        return images if float(images.sum()) > 0 else -images


def test_a_network_that_cannot_be_traced_raises():
    with pytest.raises(ValueError, match=r"torch\.export.*DataDependent"):
        program(CalibratedModel(DataDependent(), fitted("temperature")), torch.ones(1, 3))


class DiffersWhenExported(AbstractCalibrator):
    """Has other outputs after export."""

    name = "drifting"
    citation = "No paper."

    def learn(self, samples: Samples):
        self.calls = 0
        return {"shift": torch.zeros(())}

    def apply(self, logits):
        self.calls += 1
        return logits + torch.tensor([float(self.calls), 0.0, 0.0])


def test_an_onnx_file_with_other_outputs_is_not_written(tmp_path):
    model = CalibratedModel(linear(), DiffersWhenExported().fit(torch.randn(10, 3), torch.randint(3, (10,))))
    with pytest.raises(ValueError, match=r"probs.*0\.\d+.*tolerance=0\.0001"):
        save_onnx(model, torch.randn(4, 8), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_invalid_options_raise(tmp_path):
    calibrator, example = fitted("temperature"), torch.randn(2, 8)
    with pytest.raises(RuntimeError, match=r"temperature.*fit\("):
        CalibratedModel(linear(), Temperature())
    with pytest.raises(RuntimeError, match=r"feature clipping.*fit\("):
        CalibratedModel(linear(), FeatureClipping(torch.ones(3, 6)))
    with pytest.raises(TypeError, match="calibrator"):
        CalibratedModel(linear(), "temperature.safetensors")
    with pytest.raises(TypeError, match="model"):  # the shape checks may raise first
        save_onnx(linear(), example, tmp_path / "model.onnx")
    with pytest.raises((ValueError, TypeError), match="output"):  # the shape checks may raise first
        CalibratedModel(linear(), calibrator, output="scores")
    with pytest.raises(ValueError, match=r"class_names.*2.*3 classes"):
        program(CalibratedModel(linear(), calibrator, class_names="ab"), example)
    named_predictions = fedlas.Predictions(torch.randn(50, 3), torch.randint(3, (50,)), class_names=list("abc"))
    with pytest.raises(ValueError, match=r"class 0.*'a'.*'c'"):
        program(
            CalibratedModel(linear(), build_calibrator("vector_scaling").fit(named_predictions), class_names="cba"),
            example,
        )
    with pytest.raises(ValueError, match=r"4 classes.*calibrator.*3"):
        program(CalibratedModel(linear(4), calibrator), example)
    with pytest.raises(ValueError, match=r"\(2, 4, 2\)"):
        program(CalibratedModel(nn.Unflatten(1, (4, 2)), calibrator), example)
    with pytest.raises(ValueError, match="example"):
        program(CalibratedModel(TwoInputs(), calibrator), (torch.randn(2, 3), torch.randn(3, 1)))
    (tmp_path / "other.pt2").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"other\.pt2"):
        load_program(tmp_path / "other.pt2")
    torch.export.save(torch.export.export(linear(), (example,)), tmp_path / "plain.pt2")
    with pytest.raises(ValueError, match=r"plain\.pt2.*torch\.export\.load"):
        load_program(tmp_path / "plain.pt2")
