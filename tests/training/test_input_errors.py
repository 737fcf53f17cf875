"""User errors are reported in one sentence, before training starts."""

import errno
import itertools
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from runs_of import large, natural_images, short

import fedlas
from fedlas.experiments.scheduler import train_recipes
from fedlas.io.atomic import write_atomic
from fedlas.training import AbstractCallback, Recipe, Run, RunError, checkpoint, fit, fit_many
from fedlas.training.callbacks import HOOKS, check_callbacks
from fedlas.training.predict_run import predict_with
from fedlas.training.session import Session

CPU = torch.device("cpu")


def quick(loss: str, **changes: Any) -> Recipe:
    """A run of one step."""
    return short(loss, epochs=1, data_options={"train_samples": 50}, **changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fit(quick("fedlas_ls"), out=tmp_path_factory.mktemp("run") / "run")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("small_cnn", {"in_channels": 3}, "small_cnn.*1 x 8 x 8.*digits"),
        ("resnet18_tiny", {"in_channels": 1}, "resnet18_tiny.*1 x 8 x 8"),
        ("timm:test_vit", {"in_channels": 1}, r"timm:test_vit.*model_options\.in_channels"),
    ],
)
def test_a_network_for_other_images_raises_before_training(model, options, message):
    """Regression: these ended in a traceback of torch in the first step."""
    if model.startswith("timm"):
        pytest.importorskip("timm")
    with pytest.raises(RunError, match=message):
        Session(Recipe(data="digits", model=model, loss="ce", model_options=options), CPU)


def test_the_image_size_option_is_suggested(tmp_path):
    recipe = large(natural_images(tmp_path, 10)).replace(model="resnet18_tiny", model_options={})
    with pytest.raises(RunError, match=r"3 x 16 x 16.*data_options\.image_size"):
        Session(recipe, CPU)


def test_an_internal_error_of_a_network_is_not_called_a_wrong_image_size(monkeypatch):
    """Regression: every error of the trial image was reported as a wrong number of channels."""

    def fail(*_: Any) -> None:
        raise KeyError("internal")

    monkeypatch.setattr(torch.nn.BatchNorm2d, "forward", fail)
    with pytest.raises(KeyError, match="internal"):
        Session(quick("ce"), CPU)


def test_duplicate_class_names_raise_before_training(monkeypatch):
    """Regression: predictions with such names raised an error only after the first epoch."""
    data_class = type(fedlas.build_data("digits"))
    monkeypatch.setattr(data_class, "class_names", property(lambda _self: ("0", "0", *"23456789")))
    with pytest.raises(RunError, match="'0'"):
        Session(quick("ce"), CPU)


def test_head_selects_one_of_two_heads(tmp_path):
    """A distilled DeiT averages two layers; there was no way to say which of them has the features."""
    pytest.importorskip("timm")
    model_options = {"in_channels": 1, "img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2}
    recipe = quick("fedlas_ls").replace(model="timm:deit_tiny_distilled_patch16_224", model_options=model_options)
    with pytest.raises(RunError, match=r"deit_tiny_.*head=.*head=PATH"):
        Session(recipe, CPU)
    run = fit(recipe.with_settings({"head": "head"}), out=tmp_path / "run")
    predictions_file = predict_with(run.folder, "digits", out=tmp_path / "test.safetensors")
    assert torch.equal(fedlas.read_predictions(predictions_file).logits, run.predictions("best-test").logits)


def test_the_dry_run_changes_nothing():
    recipe = Recipe(data="digits", model="small_cnn", loss="ce")
    torch.manual_seed(recipe.seed)
    expected_weights = fedlas.build_model("small_cnn", 10).state_dict()
    network = Session(recipe, CPU).net
    assert network.training
    for name, value in network.model.state_dict().items():
        assert torch.equal(value, expected_weights[name]), name


def test_a_single_class_raises(tmp_path):
    folder = natural_images(tmp_path, 20)
    with pytest.raises(RunError, match="'cat'"):
        Session(large(folder / "cat"), CPU)


@pytest.fixture
def unchecked():
    """Disable the type checker of the tests, which would raise first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("recipe", "callbacks", "message"),
    [
        ({"data": "digits"}, [], "Recipe.*dict"),
        (short("ce"), AbstractCallback(), r"list.*callbacks=\["),
        (short("ce"), [AbstractCallback], r"AbstractCallback\(\)"),
        (short("ce"), [print], "AbstractCallback.*<built-in"),
    ],
)
def test_fit_checks_its_arguments(tmp_path, recipe, callbacks, message):
    with pytest.raises(TypeError, match=message):
        fit(recipe, out=tmp_path / "run", callbacks=callbacks)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("unchecked")
def test_fit_many_checks_its_arguments_at_once(tmp_path):
    with pytest.raises(TypeError, match=r"fit_many.*\bfit\b"):
        fit_many(short("ce"), folder=tmp_path)
    with pytest.raises(TypeError, match="fodler"):
        fit_many([short("ce")], fodler=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_options": {"beta": 2}}, "'ls'.*'beta'"),
        ({"loss_options": {"alpha": 2}}, "alpha"),
        ({"model_options": {"widht": 8}}, "widht"),
        ({"data_options": {"train_sample": 50}}, "train_sample"),
        ({"loss": "crl", "mixup": 0.2}, "crl.*mixup"),
    ],
)
def test_an_invalid_recipe_creates_no_folder(tmp_path, monkeypatch, changes, message):
    """Regression: invalid recipes left folders in runs/ with a lock, a recipe and an environment."""
    monkeypatch.chdir(tmp_path)
    for out in (None, "refused"):
        with pytest.raises((TypeError, ValueError), match=message):
            fit(short("ls").replace(**changes), out=out)
    assert list(tmp_path.iterdir()) == []


class Misnamed(AbstractCallback):
    """Has a method whose name is similar to that of a hook."""

    def on_epoch_ended(self, record: Any) -> None:
        """Never called."""


class WithOtherMembers(AbstractCallback):
    """Has a property, an attribute and a private method."""

    steps = 0

    @property
    def last(self) -> int:
        return self._count()

    def _count(self) -> int:
        return self.steps


def test_a_misnamed_hook_raises(tmp_path):
    with pytest.raises(TypeError, match=rf"Misnamed\.on_epoch_ended.*{', '.join(HOOKS)}"):
        fit(short("ce"), out=tmp_path, callbacks=[Misnamed()])
    assert HOOKS == ("on_train_start", "on_step_dispatched", "on_step_end", "on_epoch_end", "on_train_end")
    check_callbacks([WithOtherMembers()])


class WithoutFlag(AbstractCallback):
    """Handles steps without `sees_steps`."""

    def on_step_end(self, session: Any, step: int) -> None:
        """Never called."""


def test_a_hook_of_steps_without_its_flag_raises():
    """Regression: it was never called."""
    with pytest.raises(TypeError, match=r"WithoutFlag\.on_step_end.*sees_steps = True"):
        check_callbacks([WithoutFlag()])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # `--set epochs=10` of a published recipe keeps its milestones, and the learning rate never drops.
        ({"schedule": "multi_step", "milestones": (150, 250)}, r"milestones.*150, 250.*\b1\b"),
        ({"precision": "fp16"}, "fp16.*precision=fp32"),
    ],
)
def test_settings_that_are_probably_unintended_warn(tmp_path, changes, message):
    with pytest.warns(UserWarning, match=message):
        fit(quick("ce", **changes), out=tmp_path / "run")


@pytest.mark.parametrize(("processor", "slow"), [("AVX2", True), ("AVX512", False)])
def test_bf16_on_a_cpu_without_bf16_instructions_warns(tmp_path, monkeypatch, processor, slow):
    """The paper's protocol takes bfloat16 for residual networks: twelve times slower with AVX2 alone."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: processor)
    with warnings.catch_warnings(record=True) as recorded_warnings:
        warnings.simplefilter("always")
        fit(quick("ce", precision="bf16"), out=tmp_path / "run")
    assert any("precision=fp32" in str(warning.message) for warning in recorded_warnings) == slow


def test_the_error_for_a_checkpoint_of_other_data_is_complete(finished, tmp_path):
    state = checkpoint.load(finished.checkpoint)
    session = Session(finished.recipe.replace(model_options={"norm": "group"}), CPU)
    with pytest.raises(RunError, match=r"data.*key"):
        session.load_state_dict(state)


@pytest.mark.parametrize("changes", [{"seed": 7}, {"loss": "fedlas_mbls"}])
def test_a_checkpoint_of_another_recipe_raises(finished, tmp_path, changes):
    """Weights of another seed or loss were resumed and evaluated under the name of this recipe."""
    recipe = finished.recipe.replace(**changes)
    run = Run(shutil.copytree(finished.folder, tmp_path / "run", ignore=lambda *_: ["predictions"]))
    run.recipe_file.write_text(recipe.to_json())
    run.environment_file.unlink()  # it would report the images and labels of the other seed
    message = rf"checkpoint\.pt.*{finished.recipe.key}.*{recipe.key}"
    with pytest.raises(RunError, match=message):
        fit(recipe, out=run.folder, resume=True, progress=False)
    with pytest.raises(RunError, match=message):
        predict_with(run.folder, "digits", out=tmp_path / "p.safetensors")
    assert not (tmp_path / "p.safetensors").exists()
    assert not any(run.folder.glob("predictions/*"))


def test_a_finished_run_is_found_in_a_read_only_folder(finished, monkeypatch):
    def refuse(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), ".lock")

    monkeypatch.setattr("fedlas.training.loop.locked", refuse)
    assert fit(finished.recipe, out=finished.folder).folder == finished.folder


def test_a_file_as_run_folder_raises(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(RunError, match=r"run\b.*file.*--out.*out="):
        fit(short("ce"), out=tmp_path / "run")


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fedlas.io.atomic.os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device.*log\.jsonl"):
        write_atomic(tmp_path / "log.jsonl", b"line")
    assert list(tmp_path.iterdir()) == []


def test_predictions_need_the_safetensors_suffix(finished, tmp_path):
    (tmp_path / "folder.safetensors").mkdir()
    for out in (tmp_path / "p.npz", tmp_path, tmp_path / "folder.safetensors"):
        with pytest.raises(RunError, match=rf"\.safetensors.*{out}"):
            predict_with(finished.folder, "digits", out=out)


def test_ignored_labels_warn(finished, tmp_path):
    folder, out = natural_images(tmp_path / "images", 2), tmp_path / "own.safetensors"
    with pytest.warns(UserWarning, match=r"labels.*cat, dog, owl"):
        predict_with(finished.folder, "folder", options={"path": str(folder)}, out=out)
    assert fedlas.read_predictions(out).given_labels is None
    cats = tmp_path / "cats.safetensors"
    predict_with(
        finished.folder, "folder", options={"path": str(folder / "cat")}, out=cats
    )  # one class: no labels expected, no warning


def test_predictions_do_not_overwrite_other_files(finished, tmp_path):
    """Regression: a calibrator or the predictions of another run were overwritten without a warning."""
    out = tmp_path / "p.safetensors"
    out.touch()
    for _ in range(2):  # the same predictions may be written again
        predict_with(finished.folder, "digits", out=out)
    fedlas.build_calibrator("temperature").fit(fedlas.read_predictions(out).with_split("val")).save(out)
    content = out.read_bytes()
    with pytest.raises(RunError, match=r"p\.safetensors.*predictions"):
        predict_with(finished.folder, "digits", out=out)
    assert out.read_bytes() == content


FILES = ("recipe.json", "environment.json", "log.jsonl", "checkpoint.pt", "checkpoint-before.pt", ".lock")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(FILES, ["link", "dangling link", "pipe"]),
        ("predictions", "link"),
        ("predictions/best-test.safetensors", "link"),
        ("tensorboard", "link"),
    ],
)
def test_links_and_pipes_in_a_run_folder_raise(finished, tmp_path, name, kind):
    """Regression: the target of a link was overwritten, and reading a pipe blocks."""
    run = Run(shutil.copytree(finished.folder, tmp_path / "run", ignore=lambda *_: ["predictions"]))
    recipe, path, link_target = run.recipe, run.folder / name, tmp_path / "mine"
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(link_target)
    if kind == "link":
        link_target.write_text("mine")
    with pytest.raises(RunError, match=f"{name}.*{kind.split()[-1]}"):
        fit(recipe.replace(tensorboard=True), out=run.folder, resume=True, progress=False)
    assert link_target.exists() == (kind == "link")
    assert kind != "link" or link_target.read_text() == "mine"


def test_the_run_folder_itself_may_be_a_symbolic_link(finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert fit(finished.recipe, out=tmp_path / "link", resume=True, progress=False).finished


def test_a_default_run_folder_that_is_a_symbolic_link_raises(finished, tmp_path, monkeypatch):
    """Regression: the run that the link points to was resumed and overwritten."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished.folder, tmp_path / "elsewhere", ignore=lambda *_: ["predictions"])
    Path("runs").mkdir()
    Path("runs", finished.recipe.name).symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))
    launches = (lambda: fit(finished.recipe), lambda: list(fit_many([finished.recipe])))
    for launch in (*launches, lambda: list(train_recipes([finished.recipe], folder=Path("runs"), device="cpu"))):
        with pytest.raises(RunError, match=f"{finished.recipe.name}.*link"):
            launch()
    assert sorted(tmp_path.rglob("*")) == before
