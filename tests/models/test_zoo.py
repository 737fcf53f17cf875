"""`WithFeatures` on networks of other libraries: torchvision, timm and Hugging Face.

Small ones run on the CPU, where the head applied to the features must give the logits; one of every family runs on the
meta device, where only shapes can be checked. Networks that cannot work are listed with the
reason, and must raise an error.
"""

import pytest
import timm
import torch
import torchvision
import transformers
from timm.models import _registry as timm_registry
from torch import nn
from torchvision.models.regnet import BlockParams
from transformers.models.auto import modeling_auto

from fedlas.models.base import WithFeatures

# Warnings of other libraries are not caused by this one.
pytestmark = pytest.mark.filterwarnings("ignore")
CLASSES = 13


def assert_features_give_logits(net, *args, **kwargs):
    """Call the wrapper and prove that the head turns each row of features into that row of logits."""
    output = net(*args, **kwargs)
    layer = net.model.get_submodule(net.head_name)
    weight = layer.weight.flatten(1)  # of a linear layer or of a 1x1 convolution
    expected_logits = nn.functional.linear(output.features, weight, layer.bias)
    torch.testing.assert_close(expected_logits, output.logits, rtol=1e-4, atol=1e-4 * output.logits.abs().max().item())
    assert output.logits.shape[-1] == CLASSES
    return output


def assert_shapes_on_meta_device(net, size):
    """Call the wrapper on the meta device and look at the shapes."""
    output = net(torch.empty(2, *size, device="meta"))
    layer = net.model.get_submodule(net.head_name)
    assert output.logits.shape == (2, CLASSES)
    assert output.features.shape == (2, layer.weight.shape[1])


def only_dropouts_train(net):
    for module in net.eval().modules():
        if isinstance(module, nn.Dropout):
            module.train()
    return net


TORCHVISION = torchvision.models.list_models(module=torchvision.models)
QUICK = {"alexnet", "convnext_tiny", "googlenet", "resnet18", "squeezenet1_1", "vgg11", "vit_b_16"}
# Their head is a convolution whose output passes an activation before it is averaged: no features make the logits.
SQUEEZENETS = {"squeezenet1_0", "squeezenet1_1"}


def torchvision_model(name, **options):
    if name in {"googlenet", "inception_v3"}:
        options["init_weights"] = False  # only to save time
    return torchvision.models.get_model(name, num_classes=CLASSES, **options)


def on_torchvision(name, monkeypatch):
    from_init_params = BlockParams.from_init_params

    def on_cpu(*args, **kwargs):  # a RegNet computes its widths with tensors
        with torch.device("cpu"):
            return from_init_params(*args, **kwargs)

    monkeypatch.setattr(BlockParams, "from_init_params", on_cpu)
    with torch.device("meta"):
        net = WithFeatures(torchvision_model(name))
    size = (3, 299, 299) if name == "inception_v3" else (3, 224, 224)
    if name in SQUEEZENETS:
        with pytest.raises(ValueError, match=r"\(2, 13, 13, 13\).*'classifier\.1'"):
            assert_shapes_on_meta_device(net, size)
    else:
        assert_shapes_on_meta_device(net, size)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.campaign) for name in TORCHVISION]
)
def test_head_is_found_in_all_torchvision_classifiers(name, monkeypatch):
    on_torchvision(name, monkeypatch)


@pytest.mark.parametrize(
    ("name", "head", "width"),
    [
        ("mobilenet_v3_small", "classifier.3", 1024),
        ("shufflenet_v2_x0_5", "fc", 1024),
        ("regnet_x_400mf", "fc", 400),
        pytest.param("resnet18", "fc", 512, marks=pytest.mark.campaign),
        pytest.param("efficientnet_b0", "classifier.1", 1280, marks=pytest.mark.campaign),
        pytest.param("swin_t", "head", 768, marks=pytest.mark.campaign),
        pytest.param("googlenet", "fc", 1024, marks=pytest.mark.campaign),
    ],
)
def test_torchvision_features_reproduce_the_logits(name, head, width):
    net = WithFeatures(torchvision_model(name)).eval()
    assert net.head_name == head
    assert assert_features_give_logits(net, torch.randn(2, 3, 64, 64)).features.shape == (2, width)


def test_auxiliary_heads_of_torchvision_are_not_ambiguous():
    net = WithFeatures(torchvision_model("googlenet", dropout=0.0))
    assert_features_give_logits(net, torch.randn(2, 3, 64, 64))


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "mnasnet0_5"])  # both in place
def test_torchvision_features_are_taken_before_dropout(name):
    net = only_dropouts_train(WithFeatures(torchvision_model(name, dropout=0.5)))
    x = torch.randn(2, 3, 64, 64)
    logits, features = net(x)
    expected = net.eval()(x)
    torch.testing.assert_close(features, expected.features, rtol=0, atol=0)
    assert not torch.equal(logits, expected.logits)


TIMM = timm.list_models()
TWO_HEADS = r"head.*head="
TIMM_REFUSED = {  # their logits are a mean, a weighted sum or a sum of the outputs of several heads
    "crossvit": TWO_HEADS,
    "efficientformer": TWO_HEADS,
    "efficientformer_v2": TWO_HEADS,
    "efficientvim": TWO_HEADS,
    "repvit": TWO_HEADS,
    "swiftformer": TWO_HEADS,
    "volo": "'head'.*head, aux_head",
}
SMALL = ["test_", "atto", "femto", "pico", "nano", "xxs", "tiny", "050", "_t", "small", "_s", "18", "b0"]


def timm_family(name):
    return timm_registry._model_to_module[name]


def size_rank(name):
    return next((n for n, text in enumerate(SMALL) if text in name), len(SMALL))


PLAIN = [name for name in TIMM if "distilled" not in name and not name.endswith("_enc")]
TIMM_FAMILIES = {timm_family(name): name for name in sorted(PLAIN, key=size_rank, reverse=True)}


def on_timm(name, refused):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=CLASSES)
    size = model.pretrained_cfg.get("input_size", (3, 224, 224))
    if refused:
        with pytest.raises(ValueError, match=refused):
            assert_shapes_on_meta_device(WithFeatures(model), size)
    else:
        assert_shapes_on_meta_device(WithFeatures(model), size)


QUICK_FAMILIES = {"convnext", "crossvit", "efficientformer", "efficientnet", "repvit", "resnet", "vision_transformer"}
FAMILIES = TIMM_FAMILIES.keys() - {"gemma4_vit"}  # that one runs on the CPU below


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in QUICK_FAMILIES else pytest.mark.campaign) for name in sorted(FAMILIES)],
)
def test_head_is_found_in_every_timm_family(family):
    on_timm(TIMM_FAMILIES[family], TIMM_REFUSED.get(family))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in timm.list_models("test_*")),
        ("dla46_c", {}),  # heads that are 1x1 convolutions
        pytest.param("resnetv2_18", {}, marks=pytest.mark.campaign),
        # does not run on the meta device
        pytest.param("gemma4_vit_167m", {"depth": 1, "img_size": 96}, marks=pytest.mark.campaign),
    ],
)
def test_timm_features_reproduce_the_logits(name, options):
    net = WithFeatures(timm.create_model(name, num_classes=CLASSES, **options)).eval()
    size = 96 if "gemma" in name else 160
    assert_features_give_logits(net, torch.randn(2, 3, size, size))


@pytest.mark.parametrize("name", ["test_efficientnet", "test_resnet", "test_vit", "test_convnext", "dla46_c"])
def test_timm_features_are_taken_before_dropout(name):
    net = only_dropouts_train(WithFeatures(timm.create_model(name, num_classes=CLASSES, drop_rate=0.5)))
    net.model.training = True  # many of them drop by a function
    x = torch.randn(2, 3, 160, 160)
    logits, features = net(x)
    expected = net.eval()(x)
    torch.testing.assert_close(features, expected.features, rtol=0, atol=0)
    assert not torch.equal(logits, expected.logits)


def test_a_timm_model_without_a_classifier_raises():
    with pytest.raises(ValueError, match="head="):
        WithFeatures(timm.create_model("test_vit", num_classes=0))


def test_one_of_several_heads_can_be_given():
    with torch.device("meta"):
        model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=CLASSES)
    with pytest.raises(ValueError, match="head, head_dist"):
        WithFeatures(model)
    assert_shapes_on_meta_device(WithFeatures(model, head="head"), (3, 224, 224))


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": CLASSES}
SEQUENCES = {
    "Bert": SIZES,
    "DistilBert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32},
    "Roberta": SIZES,
    "Albert": SIZES | {"embedding_size": 8},
    "DebertaV2": SIZES,
    "Electra": SIZES,
    "ModernBert": SIZES,
    "XLNet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32},
    "Funnel": {"d_model": 16, "block_sizes": [1], "n_head": 2, "d_head": 8, "d_inner": 32},
    "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
    "OPT": SIZES | {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "Llama": SIZES | {"num_key_value_heads": 2},
    "Qwen2": SIZES | {"num_key_value_heads": 2},
    "Bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
    "T5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
}  # fmt: skip
PICTURE = {"image_size": 32, "num_labels": CLASSES}
PICTURES = {
    "ViT": SIZES | {"patch_size": 8},
    "DeiT": SIZES | {"patch_size": 8},
    "Beit": SIZES | {"patch_size": 8},
    "Dinov2": SIZES | {"patch_size": 8},
    "Swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4, "patch_size": 2},
    "ConvNext": {"hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]},
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "MobileNetV2": {"depth_multiplier": 0.25, "classifier_dropout_prob": 0.5},
    "RegNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8},
    "PoolFormer": {"hidden_sizes": [8, 8, 8, 16]},
}


def hugging_face(name, task, **options):
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, f"{name}For{task}")(config)


def padded(padding):
    """Two sequences that end with the token 2, one of them shorter than the other."""
    tokens = torch.randint(3, 50, (2, 12))
    tokens[:, -1] = 2
    tokens[1] = torch.cat([torch.zeros(5, dtype=torch.long), tokens[1, 5:]])
    if padding == "right":
        tokens[1] = tokens[1].roll(-5)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long()}


@pytest.mark.parametrize(
    ("name", "padding"), [*((name, "right") for name in SEQUENCES), ("GPT2", "left"), ("Bert", "left")]
)
def test_sequence_classifier_features_reproduce_the_logits(name, padding):
    net = WithFeatures(hugging_face(name, "SequenceClassification", **TEXT, **SEQUENCES[name])).eval()
    output = assert_features_give_logits(net, **padded(padding))
    assert output.logits.shape == (2, CLASSES)
    assert output.features.shape[0] == 2


@pytest.mark.campaign
def test_a_decoder_compiles_in_one_graph():
    torch.compiler.reset()
    net = WithFeatures(hugging_face("GPT2", "SequenceClassification", **TEXT, **SEQUENCES["GPT2"])).eval()
    batch = padded("right")
    output = torch.compile(net, fullgraph=True, backend="aot_eager")(**batch)
    torch.testing.assert_close(output, net(**batch))


def test_token_features_reproduce_the_logits():
    net = WithFeatures(hugging_face("Bert", "TokenClassification", **TEXT, **SIZES)).eval()
    assert assert_features_give_logits(net, **padded("right")).features.shape == (2, 12, 16)


@pytest.mark.parametrize("name", PICTURES)
def test_image_classifier_features_reproduce_the_logits(name):
    net = WithFeatures(hugging_face(name, "ImageClassification", **PICTURE, **PICTURES[name])).eval()
    assert_features_give_logits(net, torch.randn(2, 3, 32, 32))


def test_hugging_face_features_are_taken_before_dropout():
    dropout_rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.5}
    net = WithFeatures(hugging_face("Bert", "SequenceClassification", **TEXT, **SIZES, **dropout_rates))
    batch = padded("right")
    logits, features = net.train()(**batch)
    expected = net.eval()(**batch)
    torch.testing.assert_close(features, expected.features)
    assert not torch.equal(logits, expected.logits)


def test_two_heads_of_hugging_face_raise():
    model = hugging_face("DeiT", "ImageClassificationWithTeacher", **PICTURE, **PICTURES["DeiT"])
    with pytest.raises(ValueError, match="cls_classifier, distillation_classifier"):
        WithFeatures(model)


def test_a_hugging_face_output_without_logits_raises():
    net = WithFeatures(hugging_face("Bert", "QuestionAnswering", **TEXT | {"num_labels": 2}, **SIZES))
    with pytest.raises(TypeError, match=r"QuestionAnsweringModelOutput.*start_logits, end_logits"):
        net(**padded("right"))


def test_logits_after_a_loss_raise():
    net = WithFeatures(hugging_face("Bert", "SequenceClassification", **TEXT, **SIZES))
    with pytest.raises(ValueError, match=r"logits \(\)"):
        net(**padded("right"), labels=torch.tensor([1, 2]), return_dict=False)


TASKS = ("SEQUENCE", "IMAGE", "TOKEN")
NAMES = [getattr(modeling_auto, f"MODEL_FOR_{task}_CLASSIFICATION_MAPPING_NAMES").values() for task in TASKS]
HUGGING_FACE = {
    name
    for names in NAMES
    for class_names in names
    for name in ([class_names] if isinstance(class_names, str) else class_names)
}


@pytest.mark.campaign
def test_head_is_found_in_all_hugging_face_classifiers():
    supported, refused, unbuilt = set(), set(), set()
    for name in sorted(
        HUGGING_FACE - {"ShieldGemma2ForImageClassification"}
    ):  # its logits are two tokens of a language model
        try:
            cls = getattr(transformers, name)
            with torch.device("meta"):
                model = cls(cls.config_class(num_labels=CLASSES))
        except Exception:  # it needs more than its defaults, or another library
            unbuilt.add(name)
            continue
        try:
            net = WithFeatures(model)
        except ValueError:
            refused.add(name)
        else:
            assert model.get_submodule(net.head_name).out_features == CLASSES, name
            supported.add(name)
    two_heads = ("DeiTForImageClassificationWithTeacher", "LevitForImageClassificationWithTeacher", "SwiftFormer")
    assert all(name.startswith(two_heads) for name in refused)
    assert len(supported) > 10 * len(unbuilt)
