"""Recipes: plain values, stable keys, settings from text, and the published hyperparameters."""

import json

import pytest

import fedlas
from fedlas.catalog import keywords
from fedlas.data import CATALOG as DATA
from fedlas.losses import CATALOG as LOSSES
from fedlas.training.protocols import PROTOCOLS, list_recipes, recipe_for
from fedlas.training.recipe import Recipe

SMALL = Recipe(data="digits", model="small_cnn", loss="ce")


def test_recipe_key_is_stable():
    """Folders of old runs must be found again: a changed key here is a break for users."""
    assert SMALL.key == "1149f82ba7"
    published = recipe_for("cifar10", loss="fedlas_ls", precision="fp32", channels_last=False)
    assert published.key == "b534071516"
    assert recipe_for("cifar10", loss="fedlas_ls").key == "9d84535553"
    assert SMALL.name == f"digits-small_cnn-ce-{SMALL.key}"


def test_execution_fields_are_not_part_of_the_key():
    assert SMALL.replace(checkpoint_every=5, workers=3, tensorboard=True, capture=False).key == SMALL.key
    assert SMALL.replace(seed=2).key != SMALL.key
    assert SMALL.replace(lr=1).key == SMALL.replace(lr=1.0).key
    first, other = {"ignore_index": 1, "sync": False}, {"sync": False, "ignore_index": 1}
    assert SMALL.replace(loss_options=first).key == SMALL.replace(loss_options=other).key


def test_a_recipe_survives_a_json_round_trip():
    recipe = recipe_for("cub200", loss="fedlas_mbls", ood=("svhn",))
    assert Recipe.from_dict(json.loads(recipe.to_json())) == recipe
    assert hash(recipe) == hash(Recipe.from_dict(recipe.to_dict()))


def test_settings_are_parsed_by_the_type_of_their_field():
    settings = {
        "epochs": "10", "lr": "1e-3", "deterministic": "true", "schedule": "multi_step", "milestones": "3,7",
        "clip": "none", "precision": "bf16", "loss_options.alpha": "0.1", "data_options": '{"label_noise": 0.2}',
        "ood": "svhn",
    }  # fmt: skip
    recipe = SMALL.replace(clip=2.0, loss="ls").with_settings(settings)
    assert (recipe.epochs, recipe.lr, recipe.deterministic, recipe.milestones) == (10, 0.001, True, (3, 7))
    assert (recipe.clip, recipe.precision, recipe.ood) == (None, "bf16", ("svhn",))
    assert (recipe.loss_options, recipe.data_options) == ({"alpha": 0.1}, {"label_noise": 0.2})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epohs": "3"}, "epohs.*'epochs'"),
        ({"epochs": "many"}, "epochs.*'many'"),
        ({"epochs": "0"}, "epochs.*1.*0"),
        ({"lr": "fast"}, "lr.*'fast'"),
        ({"lr": "nan"}, "lr.*finite"),
        ({"deterministic": "perhaps"}, "deterministic.*true.*false"),
        ({"precision": "int8"}, "precision.*fp32, tf32, bf16, fp16"),
        ({"loss_options": "alpha"}, "loss_options.*JSON"),
        ({"accumulate": "3"}, "accumulate.*batch_size"),
        ({"data_options.seed": "3"}, "data_options.*seed="),
        ({"schedule": "one_cycle", "warmup": "5"}, "warmup.*schedule=one_cycle"),
        ({"schedule": "cosine", "milestones": "3"}, "milestones.*schedule=cosine"),
        ({"decay": "0.2"}, "decay.*schedule=constant"),
        ({"schedule": "cosine", "peak_at": "0.5"}, "peak_at.*schedule=cosine"),
        ({"end_factor": "0.5"}, "end_factor.*schedule=constant"),
        ({"optimizer": "adamw", "nesterov": "true"}, "nesterov.*optimizer=adamw"),
        ({"optimizer": "adamw", "momentum": "0.8"}, "momentum.*optimizer=adamw"),
        ({"beta2": "0.99"}, "beta2.*optimizer=sgd"),
        ({"schedule": "multi_step"}, "milestones.*multi_step"),
        ({"clip_loss": "true"}, "clip_loss.*clip"),
        ({"momentum": "1.5"}, "momentum.*0.*1.*1.5"),
        ({"schedule": "one_cycle", "start_factor": "-5"}, "start_factor.*0.*1.*-5"),
        ({"schedule": "cosine", "end_factor": "-1"}, "end_factor.*0.*1.*-1"),
        ({"schedule": "multi_step", "milestones": "3", "decay": "-1"}, "decay.*0.*1.*-1"),
        ({"schedule": "multi_step", "milestones": "5,3,-1"}, "milestones.*5, 3, -1"),
        ({"gate_lr_factor": "-1"}, "gate_lr_factor.*0.*-1"),
        ({"gate_weight_decay": "-1"}, "gate_weight_decay.*0.*-1"),
        ({"workers": "-1"}, "workers.*0.*-1"),
        ({"batch_size": "99999999999999999999"}, "batch_size.*2147483647"),
        ({"momentum": "0", "nesterov": "true"}, "momentum.*nesterov=false"),
        ({"loss_options.reduction": "none"}, 'reduction="none"'),
        ({"loss_options.gamma": "NaN"}, "loss_options.gamma.*finite.*nan"),
        ({"loss_options.num_classes": "3"}, "loss_options.*num_classes"),
        ({"model_options.num_classes": "3"}, "model_options.*num_classes"),
        ({"data_options.progress": "3"}, "data_options.*progress"),
        ({"accumulate": "4", "loss_options.weight": "[1, 2]"}, "accumulate=4.*weight.*loss_options"),
        ({"accumulate": "4", "loss_options.ignore_index": "3"}, "accumulate=4.*ignore_index.*loss_options"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SMALL.with_settings(settings)


def test_replace_resets_fields_without_effect():
    """Milestones have no effect with a cosine schedule and must not be part of the key."""
    multi_step = recipe_for("cifar10")
    assert multi_step.replace(schedule="cosine") == recipe_for("cifar10", schedule="cosine")
    assert multi_step.replace(schedule="cosine").milestones == ()
    assert not recipe_for("digits").with_settings({"optimizer": "adamw"}).nesterov


def test_recipes_with_fields_without_effect_can_be_read():
    """Recipes were written with settings without effect until these were refused."""
    old_fields = {**SMALL.to_dict(), "schedule": "one_cycle", "warmup": 3.0, "optimizer": "adamw", "nesterov": True}
    assert Recipe.from_dict(old_fields) == SMALL.replace(schedule="one_cycle", optimizer="adamw")


def test_values_of_another_type_raise():
    for changes in ({"epochs": 2.5}, {"lr": "0.1"}, {"milestones": 3}, {"loss_options": [1]}, {"seed": True}):
        with pytest.raises(TypeError):
            SMALL.replace(**changes)


def test_every_predefined_recipe_can_be_built():
    recipes = list(list_recipes())
    losses = {record.name for record in fedlas.list_losses()}
    assert len({(p, r.key) for p, r in recipes}) == len(recipes)
    assert {p for p, _ in recipes} == {protocol.name for protocol in PROTOCOLS}
    assert {r.loss for p, r in recipes if p == "paper"} == losses
    published = {(r.data, r.model) for p, r in recipes if p == "paper"}
    assert {data for data, _ in published} == {"cifar10", "cifar100", "tiny_imagenet", "cub200", "aircraft"}
    assert len(published) == 10
    for _, recipe in recipes:
        parameter_names = keywords(LOSSES.find(recipe.loss))
        options = {name: 10 for name in ("num_samples", "epochs") if name in parameter_names}
        fedlas.build_loss(recipe.loss, num_classes=7, **recipe.loss_options, **options)


SGD = {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 5e-4, "clip": 2.0, "clip_loss": False}
FAST_NUMERICS = {"precision": "bf16", "channels_last": True, "compile": True, "capture": True}  # five times as fast
LARGE_STEPS = {"batch_size": 512, "epochs": 20, "schedule": "one_cycle", "nesterov": True, "momentum": 0.9, "lr": 0.2}
STANDARD = {
    **SGD, "model": "resnet18_cifar", "batch_size": 128, "epochs": 100, "milestones": (50, 75), "precision": "bf16",
    "halve_validation": True, "evaluated": "last",
}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "model", "protocol", "settings"),
    [
        ("cifar10", None, None, {**SGD, **FAST_NUMERICS, "model": "resnet50_cifar", "epochs": 350, "drop_last": True}),
        ("cifar10", None, None, {"milestones": (150, 250), "batch_size": 128}),
        ("cifar10", "small_cnn", "paper", {"precision": "fp32"}),
        ("cifar100", None, "paper", {**FAST_NUMERICS, "drop_last": False}),
        ("tiny_imagenet", None, "paper", {**FAST_NUMERICS, "epochs": 100, "milestones": (40, 60), "batch_size": 64}),
        ("cub200", None, None, {"model": "vit_base_patch16_384", "optimizer": "adamw", "lr": 1e-4, "epochs": 200}),
        ("cub200", None, None, {"data_options": {"image_size": 384}, "precision": "fp32"}),
        ("cub200", "resnet101", None, {"data_options": {"image_size": 224}}),
        ("cifar10", None, "official", {"precision": "fp32", "channels_last": False}),
        ("cifar100", None, "official", {"precision": "fp32", "data_options": {"official_test_normalisation": True}}),
        ("tiny_imagenet", None, "official", {"precision": "fp32", "channels_last": False}),
        ("cifar10", None, "fast", {**LARGE_STEPS, "model": "resnet18_cifar", "weight_decay": 1e-3}),
        ("cifar100", None, "fast", {**LARGE_STEPS, "weight_decay": 2e-3}),  # tuned separately
        ("cifar10", "resnet18_cifar", None, {"epochs": 20}),  # the network determines the protocol
        *((data, None, "standard", STANDARD) for data in ("cifar10", "cifar100", "fashion_mnist")),
        ("fashion_mnist", None, None, {"model": "small_cnn"}),
    ],
)
def test_protocols_have_their_documented_settings(data, model, protocol, settings):
    recipe = recipe_for(data, model, protocol=protocol)
    assert {name: getattr(recipe, name) for name in settings} == settings


def test_half_of_the_validation_split_cannot_be_test_data():
    with pytest.raises(ValueError, match=r"halve_validation.*selection"):
        recipe_for("cifar10", protocol="standard", data_options={"selection": "official"})


@pytest.mark.parametrize(
    ("data", "loss", "options"),
    [
        ("cifar10", "ls", {"alpha": 0.05}),
        ("cifar100", "ls", {"alpha": 0.1}),
        ("cifar10", "fedlas_ls", {"alpha": 0.05, "beta": 4.0, "theta": 0.95}),
        ("cifar100", "fedlas_ls", {"alpha": 0.1, "beta": 4.0, "theta": 0.5}),
        ("cifar10", "fedlas_mbls", {"lambda_": 0.1, "margin": 6.0, "beta": 0.5, "theta": 0.95}),
        ("cifar100", "fedlas_mbls", {"lambda_": 0.1, "margin": 6.0, "beta": 1.0, "theta": 0.5}),
        ("tiny_imagenet", "fedlas_mbls", {"lambda_": 0.05, "margin": 10.0, "beta": 0.5, "theta": 0.5}),
        ("tiny_imagenet", "mbls", {"lambda_": 0.05, "margin": 10.0}),
        ("aircraft", "fedlas_ls", {"alpha": 0.05, "beta": 4.0, "theta": 0.5}),
        ("cifar10", "dual_focal", {"gamma": 5.0}),
        ("cub200", "dual_focal", {"gamma": 2.3}),
        ("digits", "fedlas_ls", {}),
    ],
)
def test_published_hyperparameters_of_losses(data, loss, options):
    assert recipe_for(data, loss=loss).loss_options == options


def test_the_official_protocol_has_the_deviations_of_the_official_code():
    assert recipe_for("cub200", loss="fedlas_ls", protocol="official").loss_options["theta"] == 0.001
    assert recipe_for("cub200", protocol="official").data_options["selection"] == "official"
    assert recipe_for("tiny_imagenet", loss="mbls", protocol="official").loss_options["lambda_"] == 0.1
    assert recipe_for("cifar10", loss="fedlas_ls", protocol="official").loss_options["preset"] == "official"


def test_no_loss_learns_from_test_labels():
    """The released code selects on the test split; AdaFocal would learn its gammas there."""
    for data in ("cub200", "aircraft"):
        assert recipe_for(data, loss="adafocal", protocol="official").data_options == {
            "antialias": False,
            "image_size": 384,
        }
        assert recipe_for(data, loss="crl", protocol="official").data_options["selection"] == "official"


def test_protocols_without_a_data_set_raise():
    with pytest.raises(ValueError, match=r"'paper'.*'digits'.*fast, small"):
        recipe_for("digits", "small_cnn", protocol="paper")
    with pytest.raises(ValueError, match=r"'official'.*'svhn'"):
        recipe_for("svhn", "resnet50_cifar", protocol="official")
    small_cnn = recipe_for("cub200", "small_cnn")
    assert (small_cnn.model_options, small_cnn.data_options) == ({"in_channels": 3}, {"image_size": 224})
    vit = recipe_for("cub200", "timm:vit_small_patch16_224")
    assert (vit.model_options, vit.data_options) == ({"pretrained": True}, {"image_size": 224})
    assert vit.optimizer == "adamw"
    for model in ("resnet101", "vit_base_patch16_384"):
        assert recipe_for("aircraft", model).model_options == {"pretrained": True}


@pytest.mark.parametrize("data", sorted(DATA.entries))
@pytest.mark.parametrize("model", [None, "small_cnn"])
def test_suggested_protocols_are_usable(data, model):
    """Regression: `fast` was suggested for digits, for which it has no network."""
    try:
        recipe_for(data, model, protocol="paper")
    except ValueError as error:
        suggestions = str(error).partition("use one of: ")[2].split(", ")
        assert len(suggestions) == sum(not protocol.paper_data_only for protocol in PROTOCOLS)
        for name, _, hint in (suggestion.partition(" ") for suggestion in suggestions):
            assert recipe_for(data, "small_cnn" if hint == "(with --model)" else model, protocol=name).data == data
            if hint:
                with pytest.raises(ValueError, match=f"{name}.*{data}"):
                    recipe_for(data, model, protocol=name)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("cifar_10", {}, "'cifar10'"),
        ("digits", {"loss": "celoss"}, "'celoss'"),
        ("digits", {"loss": "ls", "loss_options": {"alhpa": 0.1}}, "'alhpa'.*'alpha'"),
        ("digits", {"protocol": "papers"}, "'paper'"),
        ("cifar10", {"protocol": "small"}, "--model.*model="),
    ],
)
def test_unknown_names_raise_with_a_suggestion(data, options, message):
    with pytest.raises(ValueError, match=message):
        recipe_for(data, **options)
