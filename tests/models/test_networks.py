"""Networks of the catalogue: parameter counts, initialisation, features and compilation."""

import math

import pytest
import timm
import torch
from sklearn.datasets import load_digits
from torch import nn

from fedlas.models import WithFeatures, build_model, list_models
from fedlas.models.base import Head

RECORDS = {record.name: record for record in list_models()}
SIDE = {"small_cnn": 28}
VIT = {"img_size": 32, "depth": 1, "embed_dim": 48, "num_heads": 2}
SAME_BLOCKS = {
    "resnet34_cifar",
    "resnet34_tiny",
    "resnet101_cifar",
    "resnet101_tiny",
    "resnet50",
}  # with a single block in each stage


def size(model):
    return sum(p.numel() for p in model.parameters())


def small_network(name, **options):
    """A small version of a network of the catalogue, and images for it; ResNets need `single_block_resnets`."""
    if name.startswith("vit"):
        options |= VIT
    model = build_model(name, 7, **options)
    image_size = (
        32
        if name.startswith("vit") or name in {"resnet50", "resnet101"}
        else SIDE.get(name, RECORDS[name].cls.image_size)
    )
    return model, torch.randn(2, options.get("in_channels", 1 if name == "small_cnn" else 3), image_size, image_size)


@pytest.mark.parametrize(
    ("name", "classes", "expected"),
    [
        ("resnet18_cifar", 10, 11_173_962),
        ("resnet50_cifar", 10, 23_520_842),
        ("resnet101_cifar", 100, 42_697_380),
        ("resnet50_tiny", 200, 25_138_952),
        ("resnet101_tiny", 200, 44_131_080),
        ("resnet101", 200, 42_909_960),
        ("vit_base_patch16_384", 200, 86_244_296),
        ("small_cnn", 10, 94_186),
    ],
)
def test_parameter_counts_equal_the_published_ones(name, classes, expected):
    with torch.device("meta"):
        assert size(build_model(name, classes)) == expected


def test_a_small_network_can_be_smaller():
    layers = build_model("small_cnn", 7, width=8).modules()
    assert [layer.out_channels for layer in layers if isinstance(layer, nn.Conv2d)] == [8, 16, 32]
    for width in (0, 12):
        with pytest.raises(ValueError, match=rf"width.*{width}.*\b8\b"):
            build_model("small_cnn", 7, width=width)


def test_options_do_not_change_sizes():
    with torch.device("meta"):
        assert size(build_model("vit_base_patch16_384", 100, pre_norm=True)) == 86_167_396
        assert size(build_model("resnet101", 100, dropout=0.0)) == 42_705_060
        assert size(build_model("small_cnn", 10, norm="group")) == 94_186


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("resnet18_cifar", 512),
        ("resnet34_cifar", 512),
        ("resnet50_cifar", 2048),
        pytest.param("resnet101_cifar", 2048, marks=pytest.mark.campaign),
        ("resnet18_tiny", 2048),
        pytest.param("resnet34_tiny", 2048, marks=pytest.mark.campaign),
        ("resnet50_tiny", 8192),
        pytest.param("resnet101_tiny", 8192, marks=pytest.mark.campaign),
        ("resnet50", 2048),
        pytest.param("resnet101", 2048, marks=pytest.mark.campaign),
        ("vit_base_patch16_384", 768),
    ],
)
def test_features_have_the_published_width_at_full_size(name, width):
    image_size = RECORDS[name].cls.image_size
    with torch.device("meta"):
        logits, features = WithFeatures(build_model(name, 7))(torch.empty(2, 3, image_size, image_size))
    assert logits.shape == (2, 7)
    assert features.shape == (2, width)


@pytest.mark.usefixtures("single_block_resnets")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.campaign] if name in SAME_BLOCKS else []) for name in RECORDS]
)
def test_the_head_maps_features_to_logits(name):
    model, images = small_network(name)
    net = WithFeatures(model).eval()
    logits, features = net(images)
    torch.testing.assert_close(model.get_submodule(net.head_name)(features), logits)
    torch.testing.assert_close(model(images), logits)
    assert RECORDS[name].summary.endswith(".")


def before_pool(model, images):
    images = model.maxpool(model.relu(model.bn1(model.conv1(images))))
    return model.layer4(model.layer3(model.layer2(model.layer1(images))))


@pytest.mark.usefixtures("single_block_resnets")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_tiny_features_are_2x2_average_pools(memory_format):
    model, images = small_network("resnet18_tiny")
    model, images = model.eval().to(memory_format=memory_format), images.to(memory_format=memory_format)
    last_maps = before_pool(model, images)
    assert last_maps.shape == (2, 512, 8, 8)
    features = WithFeatures(model)(images).features
    for channel in (0, 1, 511):
        for row in (0, 1):
            for column in (0, 1):
                window = last_maps[:, channel, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
                torch.testing.assert_close(features[:, 4 * channel + 2 * row + column], window.mean((1, 2)))


@pytest.mark.usefixtures("single_block_resnets")
def test_cifar_features_are_global_average_pools():
    model, images = small_network("resnet50_cifar")
    last_maps = before_pool(model.eval(), images)
    assert last_maps.shape == (2, 2048, 4, 4)
    torch.testing.assert_close(WithFeatures(model)(images).features, last_maps.mean((2, 3)))


def test_the_stride_is_on_the_3x3_convolution_and_the_stem_keeps_the_size():
    with torch.device("meta"):
        model = build_model("resnet50_cifar", 10)
    block = model.layer2[0]
    assert (block.conv1.stride, block.conv2.stride, block.conv3.stride) == ((1, 1), (2, 2), (1, 1))
    assert (model.conv1.kernel_size, model.conv1.stride, model.conv1.padding) == ((3, 3), (1, 1), (1, 1))
    assert [len(model.get_submodule(f"layer{n}")) for n in (1, 2, 3, 4)] == [3, 4, 6, 3]


def convolutions(model):
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)]


def kurtosis(weight):
    """3 for a normal distribution, 1.8 for a uniform one."""
    return (weight.pow(4).mean() / weight.pow(2).mean() ** 2).item()


@pytest.mark.usefixtures("single_block_resnets")
def test_cifar_networks_have_the_default_initialisation_of_torch():
    model = build_model("resnet50_cifar", 10)
    for name, layer in convolutions(model):
        bound = 1 / math.sqrt(layer.weight[0].numel())
        assert bound * 0.99 < layer.weight.abs().max() <= bound, name
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03), name
        assert kurtosis(layer.weight) == pytest.approx(1.8, rel=0.05), name
    assert_norms_and_head_are_torch_defaults(model)


@pytest.mark.usefixtures("single_block_resnets")
def test_tiny_networks_have_the_initialisation_of_the_paper():
    model = build_model("resnet50_tiny", 200)
    for name, layer in convolutions(model):
        expected = math.sqrt(2 / (layer.kernel_size[0] ** 2 * layer.out_channels))
        assert layer.weight.std().item() == pytest.approx(expected, rel=0.05), name
        assert abs(layer.weight.mean().item()) < 0.1 * expected, name
        assert kurtosis(layer.weight) == pytest.approx(3, rel=0.1), name
    assert_norms_and_head_are_torch_defaults(model)


def assert_norms_and_head_are_torch_defaults(model):
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert (layer.weight == 1).all()
            assert (layer.bias == 0).all()
    bound = 1 / math.sqrt(model.fc.in_features)
    assert bound * 0.99 < model.fc.weight.abs().max() <= bound
    assert 0 < model.fc.bias.abs().max() <= bound


@pytest.mark.usefixtures("single_block_resnets")
@pytest.mark.parametrize("name", ["resnet18_cifar", "resnet18_tiny", "vit_base_patch16_384", "small_cnn"])
def test_equal_seeds_give_equal_networks(name):
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(small_network(name)[0].state_dict())
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not all(torch.equal(weights[0][key], weights[2][key]) for key in weights[0])


@pytest.mark.usefixtures("single_block_resnets")
def test_features_are_taken_before_the_published_dropout():
    model, images = small_network("resnet101")
    assert isinstance(model.fc, Head)
    assert model.fc.before.p == 0.5
    net = WithFeatures(model.eval())
    expected = net(images)
    model.fc.train()
    logits, features = net(images)
    torch.testing.assert_close(features, expected.features, rtol=0, atol=0)
    assert not torch.equal(logits, expected.logits)
    torch.testing.assert_close(features, before_pool(model, images).mean((2, 3)))
    with torch.device("meta"):
        assert type(build_model("resnet50", 7).fc) is nn.Linear  # none was published for it
        assert build_model("resnet50", 7, dropout=0.2).fc.before.p == 0.2


def test_a_transformer_gives_its_cls_token_after_or_before_the_final_norm():
    torch.manual_seed(0)
    post_norm, images = small_network("vit_base_patch16_384")
    pre_norm, _ = small_network("vit_base_patch16_384", pre_norm=True)
    weights = post_norm.state_dict()
    for part in ("weight", "bias"):
        weights[f"norm.{part}"] += torch.rand_like(weights[f"norm.{part}"])
        weights[f"head.before.{part}"] = weights[f"norm.{part}"]
    post_norm.load_state_dict({k: v for k, v in weights.items() if "before" not in k})
    pre_norm.load_state_dict({k: v for k, v in weights.items() if not k.startswith("norm.")})
    post_norm_output, pre_norm_output = WithFeatures(post_norm.eval())(images), WithFeatures(pre_norm.eval())(images)
    torch.testing.assert_close(pre_norm_output.logits, post_norm_output.logits)
    torch.testing.assert_close(post_norm_output.features, post_norm.forward_features(images)[:, 0])
    torch.testing.assert_close(post_norm.norm(pre_norm_output.features), post_norm_output.features)
    assert not torch.allclose(pre_norm_output.features, post_norm_output.features)


def test_a_transformer_is_the_one_of_timm():
    torch.manual_seed(0)
    model, images = small_network("vit_base_patch16_384")
    torch.manual_seed(0)
    timm_model = timm.create_model("vit_base_patch16_384", num_classes=7, **VIT)
    torch.testing.assert_close(model.eval()(images), timm_model.eval()(images), rtol=0, atol=0)


COMPILED = {
    "small_cnn": {},
    "vit_base_patch16_384 pre_norm": {"pre_norm": True},
}
COMPILED_SLOWLY = {
    "resnet18_tiny": {},  # these two have every block, pool and head of the ResNets
    "resnet101": {},
    "small_cnn group": {"norm": "group"},
    "vit_base_patch16_384": {},
}


@pytest.mark.usefixtures("single_block_resnets")
@pytest.mark.parametrize(
    "case", [*COMPILED, *(pytest.param(case, marks=pytest.mark.campaign) for case in COMPILED_SLOWLY)]
)
def test_logits_and_features_compile_in_one_graph(case):
    """As in the training engine: in training mode and channels-last, with gradients."""
    torch.compiler.reset()
    model, images = small_network(case.split()[0], **(COMPILED | COMPILED_SLOWLY)[case])
    model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # so that two passes agree
    net = WithFeatures(model)
    weight = torch.randn(7)

    def step(run):
        model.zero_grad()
        output = run(images)
        (output.logits @ weight).sum().backward()
        return output, [p.grad.clone() for p in model.parameters()]

    expected, gradients = step(net)
    compiled, compiled_gradients = step(torch.compile(net, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-5)
    for gradient, compiled_gradient in zip(gradients, compiled_gradients, strict=True):
        torch.testing.assert_close(
            compiled_gradient, gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item() + 1e-6
        )


@pytest.mark.usefixtures("single_block_resnets")
@pytest.mark.parametrize(
    ("name", "channels"),
    [("resnet18_cifar", 1), ("resnet18_tiny", 1), ("resnet50", 4), ("vit_base_patch16_384", 1), ("small_cnn", 4)],
)
def test_images_may_have_other_channels(name, channels):
    model, images = small_network(name, in_channels=channels)
    assert model.eval()(images).shape == (2, 7)
    first_convolution = convolutions(model)[0][1]
    assert first_convolution.in_channels == channels


@pytest.mark.parametrize("image_size", [8, 28, 32])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_small_network_takes_small_images(image_size, norm):
    net = WithFeatures(build_model("small_cnn", 10, norm=norm))
    logits, features = net(torch.randn(4, 1, image_size, image_size))
    assert (logits.shape, features.shape) == ((4, 10), (4, 128))
    assert (features >= 0).all()


def test_samples_of_the_small_network_with_group_norm_do_not_depend_on_each_other():
    model, images = build_model("small_cnn", 10, norm="group"), torch.randn(6, 1, 8, 8)
    torch.testing.assert_close(model(images), torch.cat([model(images[:3]), model(images[3:])]))
    assert not list(model.buffers())


@pytest.mark.campaign
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_small_network_learns_digits_in_seconds(norm):
    torch.use_deterministic_algorithms(True)
    try:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        labels = torch.tensor(digits.target)
        model = build_model("small_cnn", 10, norm=norm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for _ in range(4):
            for rows in torch.randperm(1500).split(50):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
                optimizer.step()
        assert (model.eval()(images[1500:]).argmax(1) == labels[1500:]).float().mean() > 0.9
    finally:
        torch.use_deterministic_algorithms(False)
