"""Checkpoints in the layout of the published code are loaded completely, or an error names the mismatch.

The published code comes without weights, so the tests write checkpoints with its layout and names.
"""

import os
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedlas
from fedlas.integrations.official import load_official, read_official

IMAGES = (2, 3, 8, 8)


def published_names(net: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a CIFAR ResNet as the published code calls them."""
    return {name.replace(".downsample.", ".shortcut."): value for name, value in net.state_dict().items()}


def write(path: Path, net: nn.Module, weights: dict[str, torch.Tensor], **changed) -> Path:
    """A checkpoint as the published trainer writes it: five entries, the score a numpy number."""
    gate = nn.Linear(10, 5)
    optimizer = torch.optim.SGD([*net.parameters(), *gate.parameters()], lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [150, 250])
    state = {"epoch": 282, "state_dict": weights, "optimizer": optimizer.state_dict()}
    state |= {"scheduler": scheduler.state_dict(), "val_score": np.float64(0.9566)}
    torch.save(state | changed, path)
    return path


def trained(name: str = "resnet18_cifar", classes: int = 10) -> nn.Module:
    """A network whose weights and statistics differ from those of any other new network."""
    net = fedlas.build_model(name, classes)
    net(torch.randn(4, *IMAGES[1:]))
    return net.eval()


@pytest.mark.parametrize(("prefix", "wrapped"), [("", False), ("module.", True)])
def test_a_cifar_network_reproduces_the_official_logits(prefix, wrapped, tmp_path):
    official_net = trained()
    weights = {prefix + name: value for name, value in published_names(official_net).items()}
    path = write(tmp_path / "best.pth", official_net, weights)
    net = fedlas.build_model("resnet18_cifar", 10).eval()
    images = torch.randn(IMAGES)
    assert not torch.allclose(net(images), official_net(images))
    result = load_official(path, fedlas.WithFeatures(net) if wrapped else net)
    assert torch.equal(net(images), official_net(images))
    assert (result.epoch, result.accuracy) == (283, 0.9566)


def test_tiny_network_loads_official_weights(tmp_path):
    official_net = fedlas.build_model("resnet18_tiny", 5)
    net = fedlas.build_model("resnet18_tiny", 5)
    load_official(write(tmp_path / "last.pth", official_net, official_net.state_dict()), net)
    assert all(torch.equal(value, official_net.state_dict()[name]) for name, value in net.state_dict().items())


class PublishedViT(nn.Module):
    """Holds a timm network as `vit`, and its head a second time."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit, self.fc = vit, vit.head


def small_vit() -> nn.Module:
    return fedlas.build_model("timm:vit_tiny_patch16_224", 7, img_size=8, patch_size=4, depth=2)


def named_like_a_vit() -> nn.Module:
    parts = {"flatten": nn.Flatten(), "patch_embed": nn.Linear(3 * 8 * 8, 5), "head": nn.Linear(5, 7)}
    return nn.Sequential(OrderedDict(parts))


@pytest.mark.parametrize("build", [named_like_a_vit, pytest.param(small_vit, marks=pytest.mark.campaign)])
def test_prefixes_of_vision_transformers_are_removed(build, tmp_path):
    official_net, net, images = build().eval(), build().eval(), torch.randn(IMAGES)
    nn.init.normal_(official_net.head.weight)
    weights = PublishedViT(official_net).state_dict()
    assert {"fc.weight", "vit.head.weight"} <= set(weights)
    load_official(write(tmp_path / "best.pth", official_net, weights), net)
    assert torch.equal(net(images), official_net(images))
    weights["fc.bias"] = weights["fc.bias"] + 1
    with pytest.raises(ValueError, match=r"odd\.pth.*fc\.bias.*vit\.head\.bias"):
        read_official(write(tmp_path / "odd.pth", official_net, weights))


def test_bare_and_nested_state_dicts_are_read(tmp_path):
    net = nn.ModuleDict({"layer1": nn.ModuleDict({"downsample": nn.Linear(2, 3)}), "fc": nn.Linear(3, 3)})
    weights = published_names(net)
    assert list(weights) != list(net.state_dict())
    torch.save(weights, tmp_path / "bare.pth")
    torch.save({"state_dict": {"state_dict": weights}}, tmp_path / "nested.pth")
    for name in ("bare.pth", "nested.pth"):
        result = read_official(tmp_path / name)
        assert list(result.weights) == list(net.state_dict())
        assert (result.epoch, result.accuracy) == (None, None)


@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize("numpy_module", ["numpy._core.multiarray", "numpy.core.multiarray"])
def test_score_written_by_any_numpy_version_is_read(kind, numpy_module, tmp_path):
    net = nn.Linear(2, 2)
    path = write(tmp_path / "best.pth", net, net.state_dict(), val_score=kind(0.75))
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    pickled = next(name for name in parts if name.endswith("data.pkl"))
    written_module = next(
        text for text in (b"numpy._core.multiarray", b"numpy.core.multiarray") if text in parts[pickled]
    )
    parts[pickled] = parts[pickled].replace(written_module, numpy_module.encode())
    with zipfile.ZipFile(path, "w") as file:
        for name, content in parts.items():
            file.writestr(name, content)
    assert read_official(path).accuracy == 0.75


def test_mismatched_weights_raise_and_change_nothing(tmp_path):
    official_net = fedlas.build_model("resnet18_cifar", 10)
    path = write(tmp_path / "best.pth", official_net, published_names(official_net))
    with torch.device("meta"):
        deeper = fedlas.build_model("resnet34_cifar", 10)
    with pytest.raises(ValueError, match=r"best\.pth.*ResNet.*layer1\.2\.conv1\.weight"):
        load_official(path, deeper)
    wider = fedlas.build_model("resnet18_cifar", 100)
    before = {name: value.clone() for name, value in wider.state_dict().items()}
    with pytest.raises(ValueError, match=r'fc\.weight.*\(10, 512\).*\(100, 512\).*"resnet18_cifar", 10'):
        load_official(path, wider)
    assert all(torch.equal(value, before[name]) for name, value in wider.state_dict().items())
    with pytest.raises(ValueError, match=r"Linear.*conv1\.weight, .*\d+ in all"):
        load_official(path, nn.Linear(512, 10))


@pytest.mark.parametrize("name", ["resnet50_cifar", "resnet18_tiny", "resnet50"])
def test_the_error_suggests_the_network_of_a_file(name, tmp_path):
    with torch.device("meta"):
        weights = fedlas.build_model(name, 4).state_dict()
    torch.save({key: torch.empty_like(value, device="cpu") for key, value in weights.items()}, tmp_path / "best.pth")
    with pytest.raises(ValueError, match=f'build_model\\("{name}", 4\\)'):
        load_official(tmp_path / "best.pth", nn.Linear(2, 2))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_file_is_not_executed(tmp_path):
    torch.save({"state_dict": {}, "epoch": Evil(tmp_path / "made")}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"evil\.pth"):
        read_official(tmp_path / "evil.pth")
    objects = np.array([1, "a"], dtype=object)[0:1]
    torch.save({"state_dict": {"a": torch.ones(1)}, "val_score": objects}, tmp_path / "objects.pth")
    with pytest.raises(ValueError, match=r"objects\.pth"):
        read_official(tmp_path / "objects.pth")
    assert not (tmp_path / "made").exists()


def test_a_recursive_dictionary_raises(tmp_path):
    recursive: dict = {"epoch": 3}
    recursive["state_dict"] = recursive
    torch.save(recursive, tmp_path / "around.pth")
    with pytest.raises(ValueError, match=r"around\.pth.*\b8\b.*'state_dict'"):
        read_official(tmp_path / "around.pth")


def test_files_that_are_not_checkpoints_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"best\.pth"):
        read_official(tmp_path / "best.pth")
    torch.save({"epoch": 3, "model": "resnet"}, tmp_path / "words.pth")
    with pytest.raises(ValueError, match=r"words\.pth.*'state_dict'.*epoch, model"):
        read_official(tmp_path / "words.pth")
    torch.save({"a.shortcut.0": torch.ones(1), "a.downsample.0": torch.ones(1)}, tmp_path / "twice.pth")
    with pytest.raises(ValueError, match=r"twice\.pth.*a\.downsample\.0"):
        read_official(tmp_path / "twice.pth")
