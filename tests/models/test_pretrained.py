"""Pretrained weights: matching files are loaded; mismatched or missing files raise with a remedy."""

import hashlib
import re
import urllib.error

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedlas.models import build_model
from fedlas.models.pretrained import Source

pytestmark = pytest.mark.usefixtures("single_block_resnets")
VIT = {"img_size": 32, "depth": 1, "embed_dim": 48, "num_heads": 2}


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path):
    """A machine without weights and without a network."""

    def refuse(url, path, *args, **kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    return tmp_path / "hub" / "checkpoints"


def save_weights(model, path):
    if path.suffix == ".safetensors":
        save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path)
    return path


def equals(model, weights, except_for=()):
    state_dict = model.state_dict()
    different = {key for key in state_dict if key not in weights or not torch.equal(state_dict[key], weights[key])}
    return different == set(except_for)


CASES = {
    "small_cnn": {},
    "resnet18_cifar": {},
    "resnet101": {},
    "vit_base_patch16_384": VIT,
    "timm:test_vit": {},
    "torchvision:mobilenet_v3_small": {},
}
HEADS = {"vit_base_patch16_384": "head", "timm:test_vit": "head", "torchvision:mobilenet_v3_small": "classifier.3"}


@pytest.mark.parametrize(("name", "kind"), [("small_cnn", "safetensors"), *((name, "pth") for name in CASES)])
def test_weights_round_trip_through_a_file(name, kind, tmp_path):
    model = build_model(name, 7, **CASES[name])
    path = save_weights(model, tmp_path / f"weights.{kind}")
    assert equals(build_model(name, 7, pretrained=path, **CASES[name]), model.state_dict())


@pytest.mark.parametrize("name", CASES)
def test_another_number_of_classes_keeps_the_initial_head(name, tmp_path):
    path = save_weights(build_model(name, 7, **CASES[name]), tmp_path / "weights.pth")
    torch.manual_seed(5)
    initial = build_model(name, 9, **CASES[name])
    torch.manual_seed(5)
    model = build_model(name, 9, pretrained=str(path), **CASES[name])
    head = HEADS.get(name, "fc")
    assert equals(model, torch.load(path, weights_only=True), except_for=[f"{head}.weight", f"{head}.bias"])
    assert torch.equal(model.get_submodule(head).weight, initial.get_submodule(head).weight)


def test_a_file_without_a_head_is_accepted(tmp_path):
    weights = build_model("small_cnn", 7).state_dict()
    body = {key: value for key, value in weights.items() if not key.startswith("fc.")}
    torch.save({"epoch": 3, "state_dict": body}, tmp_path / "body.pt")
    model = build_model("small_cnn", 7, pretrained=tmp_path / "body.pt")
    assert equals(model, weights, except_for=["fc.weight", "fc.bias"])


def test_files_of_old_versions_of_torch_are_accepted(tmp_path):
    weights = build_model("small_cnn", 7).state_dict()
    old_weights = {key: value for key, value in weights.items() if not key.endswith("num_batches_tracked")}
    torch.save(old_weights, tmp_path / "old.pth")
    assert equals(build_model("small_cnn", 7, pretrained=tmp_path / "old.pth"), weights)


def without(weights, name):
    return {key: value for key, value in weights.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: without(w, "conv2.weight"), r"missing.*conv2\.weight$"),
        (lambda w: without(w, "fc.bias"), r"missing.*fc\.bias$"),
        (lambda w: w | {"extra": torch.ones(1)}, "unknown.*extra$"),
        (
            lambda w: w | {"conv1.weight": torch.ones(32, 3, 3, 3)},
            r"conv1.weight \(32, 3, 3, 3\).*\(32, 1, 3, 3\)$",
        ),
        (lambda w: w | {"fc.weight": torch.ones(7, 64)}, r"fc.weight \(7, 64\).*\(7, 128\)"),
        (lambda w: w | {"fc.weight": torch.ones(9, 64), "fc.bias": torch.ones(9)}, r"fc.weight \(9, 64\)"),
        (
            lambda w: {f"module.{k}": v for k, v in w.items()},
            "missing.*conv1.weight, norm1.weight, norm1.bias, norm1.running_mean.*15 in all.*unknown.*module.conv1",
        ),
    ],
)
def test_mismatched_weights_raise_with_their_names(change, message, tmp_path):
    torch.save(change(build_model("small_cnn", 7).state_dict()), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=f"w.pth.*'small_cnn'.*{message}"):
        build_model("small_cnn", 7, pretrained=tmp_path / "w.pth")


def test_invalid_files_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pth"):
        build_model("small_cnn", 7, pretrained=tmp_path / "nowhere.pth")
    for name in ("broken.pth", "broken.safetensors"):
        (tmp_path / name).write_bytes(b"not weights")
        with pytest.raises(ValueError, match=f"{name}.*tensors"):
            build_model("small_cnn", 7, pretrained=tmp_path / name)
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")  # a pickle of code
    with pytest.raises(ValueError, match=r"module\.pth.*tensors"):
        build_model("small_cnn", 7, pretrained=tmp_path / "module.pth")
    torch.save({"epoch": 3}, tmp_path / "epoch.pth")
    with pytest.raises(ValueError, match=r"epoch\.pth.*state_dict"):
        build_model("small_cnn", 7, pretrained=tmp_path / "epoch.pth")


def test_pretrained_transformers_may_give_features_before_the_norm(tmp_path):
    post_norm = build_model("vit_base_patch16_384", 7, **VIT)
    path = save_weights(post_norm, tmp_path / "vit.safetensors")
    model = build_model("vit_base_patch16_384", 7, pre_norm=True, pretrained=path, **VIT)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.eval()(images), post_norm.eval()(images))
    pre_norm_path = save_weights(model, tmp_path / "pre_norm.safetensors")
    assert equals(
        build_model("vit_base_patch16_384", 7, pre_norm=True, pretrained=pre_norm_path, **VIT), model.state_dict()
    )  # also from a file of such a network


def test_positions_of_a_transformer_are_resized_by_timm(tmp_path):
    path = save_weights(build_model("vit_base_patch16_384", 7, **VIT), tmp_path / "vit.pth")
    model = build_model("vit_base_patch16_384", 7, pretrained=path, **VIT | {"img_size": 64})
    assert equals(model, torch.load(path, weights_only=True), except_for=["pos_embed"])


TORCH = "https://download.pytorch.org/models"
TIMM = "https://huggingface.co/timm"
PUBLISHED = {  # network, tag: address, name on this machine
    ("resnet101", ""): (f"{TORCH}/resnet101-63fe2227.pth", "resnet101-63fe2227.pth"),
    ("resnet50", "IMAGENET1K_V2"): (f"{TORCH}/resnet50-11ad3fa6.pth", "resnet50-11ad3fa6.pth"),
    ("torchvision:swin_t", ""): (f"{TORCH}/swin_t-704ceda3.pth", "swin_t-704ceda3.pth"),
    ("vit_base_patch16_384", ""): (
        f"{TIMM}/vit_base_patch16_384.augreg_in21k_ft_in1k/resolve/main/model.safetensors",
        "vit_base_patch16_384.augreg_in21k_ft_in1k.safetensors",
    ),
    ("vit_base_patch16_384", "augreg_in1k"): (
        f"{TIMM}/vit_base_patch16_384.augreg_in1k/resolve/main/model.safetensors",
        "vit_base_patch16_384.augreg_in1k.safetensors",
    ),
    ("timm:resnet18", ""): (f"{TIMM}/resnet18.a1_in1k/resolve/main/model.safetensors", "resnet18.a1_in1k.safetensors"),
}


@pytest.mark.parametrize("case", PUBLISHED, ids=" ".join)
def test_a_failed_download_raises_with_url_and_path(case, hub, monkeypatch):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    name, tag = case
    url, file = PUBLISHED[case]
    with pytest.raises(OSError, match="no route to host") as error:
        build_model(name, 10, pretrained=True, **({"tag": tag} if tag else {}))
    assert re.search(rf"{re.escape(url)} .*{re.escape(str(hub / file))}\b.*pretrained=", str(error.value))


def test_an_existing_file_is_used(hub):
    hub.mkdir(parents=True)
    model = build_model("timm:test_vit", 1000)
    save_file(model.state_dict(), hub / "test_vit.r160_in1k.safetensors")
    loaded = build_model("timm:test_vit", 10, pretrained=True)
    assert equals(loaded, model.state_dict(), except_for=["head.weight", "head.bias"])


def test_the_hugging_face_cache_is_used(tmp_path, monkeypatch):
    path = save_weights(build_model("timm:test_vit", 1000), tmp_path / "model.safetensors")
    requests = []
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: requests.append(args) or str(path))
    build_model("timm:test_vit", 10, pretrained=True)
    assert requests == [("timm/test_vit.r160_in1k", "model.safetensors")]


def test_weights_are_fetched_once_and_checked(hub, tmp_path, monkeypatch):
    monkeypatch.undo()  # the real function, with a file:// address
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    content = b"some weights"
    digest = hashlib.sha256(content).hexdigest()
    (tmp_path / "there.pth").write_bytes(content)
    source = Source(f"file://{tmp_path}/there.pth", f"net-{digest[:8]}.pth")
    assert source.fetch() == hub / f"net-{digest[:8]}.pth"
    (tmp_path / "there.pth").unlink()
    assert source.fetch().read_bytes() == content
    source.path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=rf"{source.path}.*SHA-256.*{digest[:8]}"):
        source.fetch()


def test_a_download_with_a_wrong_checksum_is_deleted(hub, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    (tmp_path / "there.pth").write_bytes(b"something else")
    source = Source(f"file://{tmp_path}/there.pth", "net-01234567.pth")
    with pytest.raises(OSError, match="invalid hash value"):
        source.fetch()
    assert not list(hub.iterdir())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet50_cifar", {}, "'resnet50_cifar'.*pretrained='"),
        ("resnet101", {"tag": "V9"}, "'V9'.*'resnet101'.*IMAGENET1K_V1, IMAGENET1K_V2"),
        ("timm:botnet50ts_256", {}, "timm.*'botnet50ts_256'"),
    ],
)
def test_missing_published_weights_raise(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_model(name, 10, pretrained=True, **options)
