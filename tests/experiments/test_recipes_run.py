"""Every recipe of every table builds its network, loss and optimizer, and trains two steps.

Images are random, because no data set is available here; their size and their numbers of channels and classes are real.
`make test` trains a small network with every loss and its options, and one ResNet; the campaign trains every network
with the other settings of its recipes.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image

from fedlas.data import build_data
from fedlas.data.base import AbstractDataset, Split
from fedlas.experiments.base import Choice
from fedlas.experiments.ledger import Ledger
from fedlas.experiments.planning import CATALOG, experiment_named, make_plan
from fedlas.training import Recipe, RunError, recipe_for
from fedlas.training import session as session_module
from fedlas.training.session import Session

SAMPLES = 4
CLASSES = {"cifar10": 10, "cifar100": 100, "tiny_imagenet": 200, "cub200": 200, "aircraft": 100}


@cache
def recipes() -> dict[str, Recipe]:
    """Return every recipe of every table with seed 1."""
    result = {}
    for name in CATALOG.entries:
        if name == "indicator":  # it reads its data when it is planned
            continue
        for protocol in ("paper", "official", "fast"):
            try:
                plan = make_plan(experiment_named(name), Choice(seeds=(1,), protocol=protocol), Ledger("nowhere"))
            except ValueError:
                continue
            planned_recipes = {run.recipe.name: run.recipe.replace(ood=()) for run in plan.runs}
            result |= {key: recipe for key, recipe in planned_recipes.items() if recipe.data in CLASSES}
    return result


@pytest.fixture
def synthetic_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace every data set by four random images of the same size."""

    def build_synthetic(name: str, **options: object) -> AbstractDataset:
        data = build_data(name, **{**options, "download": False})
        generator = torch.Generator().manual_seed(0)
        size = {"tiny_imagenet": 64}.get(name, 32)
        images: torch.Tensor | tuple[Path, ...] = torch.randint(
            256, (SAMPLES, 3, size, size), generator=generator, dtype=torch.uint8
        )
        if not data.resident:
            images = tuple(tmp_path / f"{n}.png" for n in range(SAMPLES))
            for path in images:
                Image.new("RGB", (300, 200), (120, 80, 40)).save(path)
        names = tuple(str(n) for n in range(CLASSES[name]))
        labels = torch.randint(len(names), (SAMPLES,), generator=generator)
        split = Split("train", images, labels, torch.arange(SAMPLES), names, name)
        monkeypatch.setattr(type(data), "split", lambda _self, _name: split)
        monkeypatch.setattr(type(data), "class_names", names, raising=False)
        monkeypatch.setattr(type(data), "num_classes", len(names), raising=False)
        return data

    monkeypatch.setattr(session_module, "build_data", build_synthetic)


def two_steps(recipe: Recipe) -> Iterator[torch.Tensor]:
    """Train two steps; yield the weights of the last layer before and after."""
    small = recipe.replace(batch_size=2, drop_last=False, workers=0, precision="fp32")
    small = small.replace(model_options={k: v for k, v in small.model_options.items() if k != "pretrained"})
    session = Session(small, torch.device("cpu"))
    weight = list(session.net.parameters())[-1]
    yield weight.detach().clone()
    steps = 0
    for inputs in session.batches(0):
        session.runner.run(*inputs)
        steps += 1
    assert steps == 2
    assert session.step.bad_step() is None
    yield weight.detach().clone()


def assert_trains(recipe: Recipe) -> None:
    before, after = two_steps(recipe)
    assert bool(after.isfinite().all())
    assert not torch.equal(before, after)


def test_predefined_recipes_cover_all_tables():
    assert {recipe.loss for recipe in recipes().values()} >= {"ce", "fedlas_ls", "adafocal", "cpc", "crl"}
    assert len({(recipe.data, recipe.model) for recipe in recipes().values()}) == 13
    assert len(recipes()) > 200


def test_every_loss_trains_a_small_network_with_its_options(synthetic_data):
    unique = {}
    for recipe in recipes().values():
        if recipe.data in ("cifar10", "cifar100"):
            unique[recipe.loss, str(recipe.loss_options)] = recipe
    assert len(unique) > 50
    for recipe in unique.values():
        assert_trains(
            recipe.replace(model="small_cnn", model_options={"in_channels": 3, "width": 8}, channels_last=False)
        )


def test_cifar_resnet_trains(synthetic_data):
    assert_trains(recipe_for("cifar10", "resnet18_cifar", "fedlas_mbls", protocol="fast"))


@pytest.mark.campaign
@pytest.mark.parametrize("data", CLASSES)
def test_every_network_trains_with_every_setting_of_its_recipes(synthetic_data, data):
    """Losses and networks share no code, so one loss with features replaces all losses of a setting."""
    settings = {
        recipe.replace(loss="fedlas_ls", loss_options={}) for recipe in recipes().values() if recipe.data == data
    }
    assert len({recipe.model for recipe in settings}) >= 2
    for recipe in settings:
        assert_trains(recipe)


def first_images(source) -> torch.Tensor:
    return next(iter(source.batches(SAMPLES))).images


def test_the_official_code_normalises_test_images_differently(synthetic_data):
    recipe = recipe_for("cifar100", "small_cnn", protocol="fast", model_options={"in_channels": 3}, precision="fp32")
    recipe = recipe.replace(batch_size=2, splits=("val", "test", "test-published"), ood=("cifar10",))
    session = Session(recipe, torch.device("cpu"))
    session.check()
    test_images, published_images = (
        first_images(session.evaluation_source(name)) for name in ("test", "test-published")
    )
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2023, 0.1994, 0.2010])
    pixels = test_images * std.view(3, 1, 1) + mean.view(3, 1, 1)
    imagenet = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (pixels - imagenet[0].view(3, 1, 1)) / imagenet[1].view(3, 1, 1)
    assert published_images == pytest.approx(expected, abs=1e-5)
    assert torch.equal(first_images(session.ood_source("cifar10")), test_images)
    other = Session(recipe.replace(data="cifar10", splits=("val", "test")), torch.device("cpu"))
    assert first_images(other.ood_source("cifar100-published")) == pytest.approx(expected, abs=1e-5)


def test_published_test_split_requires_another_official_normalisation(synthetic_data):
    recipe = recipe_for("cifar10", "small_cnn", protocol="fast", model_options={"in_channels": 3})
    session = Session(recipe.replace(batch_size=2, splits=("test-published",), precision="fp32"), torch.device("cpu"))
    with pytest.raises(RunError, match="cifar10"):
        session.check()
    with pytest.raises(ValueError, match="splits"):
        recipe.replace(splits=("tests",))
