"""`build_model` and `list_models`: resolution of names, and errors for unknown names."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from torch import nn

import fedlas
from fedlas.models import CATALOG, AbstractLibrary, WithFeatures, build_model, list_models


def test_every_network_has_a_catalogue_record():
    records = list_models()
    assert {"resnet50_cifar", "resnet101_tiny", "resnet101", "vit_base_patch16_384", "small_cnn"} <= {
        r.name for r in records
    }
    for record in records:
        assert record.summary
        assert record.citation
        assert {"num_classes", "in_channels", "pretrained"} <= set(record.keywords)
    assert fedlas.list_models() == records
    assert fedlas.build_model is build_model


def test_libraries_are_not_listed_as_networks():
    libraries = {name for name, cls in CATALOG.entries.items() if issubclass(cls, AbstractLibrary)}
    assert libraries == CATALOG.entries.keys() - {r.name for r in list_models()}
    assert "timm" in libraries


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("timm:resnet18", timm.models.ResNet),
        ("torchvision:resnet18", torchvision.models.ResNet),
        ("timm:test_vit.r160_in1k", timm.models.VisionTransformer),
        ("resnet26", timm.models.ResNet),
        ("swin_t", torchvision.models.SwinTransformer),
        ("resnet50", torchvision.models.ResNet),  # the catalogue takes precedence over libraries
    ],
)
def test_names_resolve_to_networks(name, cls):
    with torch.device("meta"):
        model = build_model(name, 5)
        assert isinstance(model, cls)
        assert WithFeatures(model)(torch.empty(2, 3, 160, 160)).logits.shape == (2, 5)


@pytest.mark.parametrize("name", ["timm:test_vit", "torchvision:resnet18", "vit_base_patch16_384"])
@pytest.mark.parametrize("option", ["checkpoint_path", "pretrained_cfg", "weights_backbone"])
def test_a_library_loads_no_weights_by_itself(name, option):
    """A recipe is untrusted input, and a library may unpickle the file that it names."""
    with pytest.raises(ValueError, match=f"'{option}'"):
        build_model(name, num_classes=5, settings={option: "untrusted.pth"})


def test_unknown_options_are_passed_to_the_library():
    model = build_model("timm:test_vit", num_classes=5, in_channels=1, drop_rate=0.3, settings={"depth": 1})
    assert model.head_drop.p == 0.3
    assert len(model.blocks) == 1
    assert model(torch.randn(1, 1, 160, 160)).shape == (1, 5)
    with torch.device("meta"):
        assert build_model("torchvision:mobilenet_v3_small", 5, dropout=0.7).classifier[2].p == 0.7
    with pytest.raises(TypeError, match="nonsense"):
        build_model("timm:test_vit", 5, nonsense=1)


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "vit_b_16", "squeezenet1_1"])
def test_networks_of_torchvision_take_other_channels(name):
    with torch.device("meta"):
        model = build_model(f"torchvision:{name}", 5, in_channels=2)
        default = build_model(f"torchvision:{name}", 5)
        assert model(torch.empty(2, 2, 224, 224)).shape == (2, 5)
    convolution, default_convolution = (
        next(m for m in x.modules() if isinstance(m, nn.Conv2d)) for x in (model, default)
    )
    assert repr(convolution) == repr(default_convolution).replace("(3,", "(2,", 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet50_cifr", "'resnet50_cifr'.*'resnet50_cifar'"),
        ("ResNet50-CIFAR", "'resnet50_cifar'"),
        ("xyz", "resnet101, .*small_cnn.*'timm:NAME', 'torchvision:NAME'"),
        ("mobilenetv3_smal_100", "'mobilenetv3_small_100'"),
        ("resnet18", "'timm:resnet18'.*'torchvision:resnet18'"),
        ("timm", "'timm:NAME'"),
        ("timm:", "'timm:NAME'"),
        ("timm:resnt50", "timm.*'resnt50'.*'resnet50'"),
        ("torchvision:swin_tt", "torchvision.*'swin_tt'.*'swin_t'"),
        ("jax:resnet18", "'jax:resnet18'"),
    ],
)
def test_an_unknown_name_raises_with_suggestions(name, message):
    with pytest.raises(ValueError, match=message):
        build_model(name, 10)


def test_wrong_keywords_raise():
    with pytest.raises(TypeError, match=r"'small_cnn'.*'channels'.*'in_channels'"):
        build_model("small_cnn", 10, channels=1)
    with pytest.raises(ValueError, match=r"num_classes.*0.*1"):
        build_model("small_cnn", 0)
    with pytest.raises(ValueError, match=r"in_channels.*-1"):
        build_model("small_cnn", 10, in_channels=-1)


def test_a_missing_library_does_not_break_the_catalogue(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "timm" else find_spec(name))
    with pytest.raises(ValueError, match=r"'small_cnn'.*'timm:NAME'.*installed"):
        build_model("smal_cnn", 10)
    with torch.device("meta"):
        assert isinstance(build_model("resnet18", 10), torchvision.models.ResNet)  # no longer in two libraries


def test_listing_networks_loads_no_library():
    code = (
        "import sys, fedlas; fedlas.list_models(); fedlas.build_model('small_cnn', 10); "
        "print({'timm', 'torchvision', 'safetensors'} & set(sys.modules))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "set()"


def test_a_missing_library_raises_with_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.models.resnet", None)
    with pytest.raises(ImportError, match=r"torchvision.*pip install 'fedlas\[train\]'"):
        build_model("resnet18_cifar", 10)


def documentation_row(record):
    """The row of a network in the table of the documentation."""
    image_size = record.cls.image_size or 28
    with torch.device("meta"):
        model = build_model(record.name, 10)
        channels = next(m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d))
        width = WithFeatures(model)(torch.empty(2, channels, image_size, image_size)).features.shape[1]
    size = sum(p.numel() for p in model.parameters())
    return f"| `{record.name}` | {record.cls.image_size or 'any'} | {width:,} | {size:,} |"


@pytest.mark.campaign
def test_documented_network_properties_are_correct():
    """Fails if a documented property is outdated; new networks need no entry."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    documented_rows = set(re.findall(r"^\| `\w+` \| \w+ \| [\d,]+ \| [\d,]+ \|", text, re.MULTILINE))
    assert documented_rows, "the documentation shows no networks"
    assert documented_rows <= {documentation_row(record) for record in list_models()}
