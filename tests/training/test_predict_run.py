"""Predictions of a trained run on any data: file names, existing files, and precision."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from runs_of import large, natural_images, prediction_bytes, short, stop_at
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fedlas
from fedlas.data import Resident
from fedlas.io import read_predictions, write_predictions
from fedlas.io.safetensors import CHECKSUM
from fedlas.training import Run, RunError, fit, load_network
from fedlas.training.predict_run import predict_with
from fedlas.training.run_folder import locked


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fit(short("ce", epochs=2), out=tmp_path_factory.mktemp("trained") / "digits")


@pytest.fixture(scope="module")
def folder_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    base = tmp_path_factory.mktemp("folder")
    natural_images(base / "other", count=4, seed=1)
    return fit(large(natural_images(base / "home"), "ce", epochs=1, workers=0), out=base / "run")


@pytest.mark.parametrize("evaluated", ["best", "last"])
def test_the_network_of_a_run_has_the_evaluated_weights(evaluated, tmp_path):
    """Regression: weights of a checkpoint were those of the last epoch, while reports evaluate the best one."""
    options = {"schedule": "constant", "model_options": {"width": 8, "norm": "group"}}
    recipe = short("ce", epochs=6, evaluated=evaluated, **options)
    run = fit(recipe, out=tmp_path / "run")
    assert run.log[-1]["best_epoch"] < recipe.epochs  # so the two states differ
    data = fedlas.build_data("digits", seed=recipe.seed, **recipe.data_options)
    images = Resident(data.split("test"), data.transform_for("test"), train=False)
    batch = images.batch(images.order())

    def logits(network):
        with torch.no_grad():
            return network.eval()(batch)

    def stored(state):
        return run.predictions(f"{state}-test").logits

    assert not torch.allclose(stored("best"), stored("last"), atol=0.1)
    torch.testing.assert_close(logits(load_network(run.folder)), stored(evaluated), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(load_network(run.folder, "last")), stored("last"), rtol=1e-4, atol=1e-4)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in load_network(run.folder).modules())
    from_file = fedlas.build_model("small_cnn", 10, **recipe.model_options, pretrained=run.checkpoint)
    torch.testing.assert_close(logits(from_file), stored("best"), rtol=1e-4, atol=1e-4)


def test_the_network_of_an_unfinished_run_is_an_error(tmp_path):
    recipe = short("ce", epochs=2)
    stop_at(10, recipe, tmp_path)
    with pytest.raises(RunError, match="--resume"):
        load_network(tmp_path)
    with pytest.raises(ValueError, match="best, last"):
        load_network(tmp_path, "first")


def test_predictions_do_not_make_an_unfinished_run_look_finished(tmp_path):
    """Regression: four calls wrote all files that mark a run as finished."""
    recipe = short("ce", epochs=2)
    stop_at(10, recipe, tmp_path / "run")
    run = Run(tmp_path / "run")
    for split in ("val", "test"):
        for state in ("best", "last"):
            with pytest.raises(RunError, match=r"\b1 .*\b2\b.*--resume"):
                predict_with(run.folder, "digits", split=split, state=state)
            file = run.predictions_file(f"{state}-{split}")
            assert predict_with(run.folder, "digits", split=split, state=state, out=file).exists()
    assert not run.finished
    assert len(fit(recipe, out=run.folder, resume=True).log) == 2
    assert run.finished


def test_a_locked_run_raises(digits_run, tmp_path):
    with locked(digits_run.folder):
        with pytest.raises(RunError, match="process"):
            predict_with(digits_run.folder, "digits", split="train")
        predict_with(digits_run.folder, "digits", split="train", out=tmp_path / "elsewhere.safetensors")


def test_a_finished_run_needs_no_checkpoint(digits_run, tmp_path):
    copied = Run(shutil.copytree(digits_run.folder, tmp_path / "copied"))
    copied.checkpoint.unlink()
    assert copied.finished
    assert fit(digits_run.recipe, out=copied.folder).log == digits_run.log
    with pytest.raises(RunError, match="checkpoint"):
        fit(digits_run.recipe.replace(ood=("digits",)), out=copied.folder)

    with pytest.raises(RunError, match="checkpoint"):
        predict_with(copied.folder, "digits", split="train")


def test_changed_images_raise(tmp_path):
    images_folder, out = natural_images(tmp_path / "home"), tmp_path / "run"
    recipe = large(images_folder, "ce", workers=0)

    def swap() -> None:
        for position in range(10):  # file names stay, but ten cats and ten dogs are swapped
            (images_folder / "cat" / f"{position}.png").rename(images_folder / "kept.png")
            (images_folder / "dog" / f"{position}.png").rename(images_folder / "cat" / f"{position}.png")
            (images_folder / "kept.png").rename(images_folder / "dog" / f"{position}.png")

    stop_at(12, recipe, out)
    log = (out / "log.jsonl").read_bytes()
    swap()
    with pytest.raises(RunError, match=r"train.*val"):
        fit(recipe, out=out, resume=True)
    assert (out / "log.jsonl").read_bytes() == log
    swap()
    assert fit(recipe, out=out, resume=True).finished
    swap()
    with pytest.raises(RunError, match=r"train.*--out"):
        predict_with(out, "folder", split="train")
    assert not Run(out).predictions_file("best-train").exists()
    assert predict_with(out, "folder", split="train", out=tmp_path / "changed.safetensors").exists()


def test_a_run_without_its_training_data_can_predict(folder_run, tmp_path):
    images_folder, moved_folder = folder_run.folder.parent / "home", folder_run.folder.parent / "away"
    arguments = {"data": "folder", "options": {"path": str(folder_run.folder.parent / "other")}, "split": "all"}
    with_data = read_predictions(predict_with(folder_run.folder, **arguments, out=tmp_path / "there.safetensors"))
    images_folder.rename(moved_folder)
    try:
        without_data = read_predictions(predict_with(folder_run.folder, **arguments, out=tmp_path / "gone.safetensors"))
        assert without_data.class_names == with_data.class_names == ("cat", "dog", "owl")
        assert torch.equal(without_data.logits, with_data.logits)
        bare_folder = shutil.copytree(folder_run.folder, tmp_path / "bare", ignore=lambda *_: ["predictions"])
        with pytest.raises(FileNotFoundError, match=r"classes.*home"):
            predict_with(bare_folder, **arguments, out=tmp_path / "none.safetensors")
    finally:
        moved_folder.rename(images_folder)


def test_predictions_on_the_recipes_data_are_named_after_the_split(digits_run):
    before = prediction_bytes(digits_run)
    assert predict_with(digits_run.folder, "digits") == digits_run.predictions_file("best-test")
    last_file = predict_with(digits_run.folder, "digits", split="val", state="last")
    assert last_file == digits_run.predictions_file("last-val")
    predict_with(digits_run.folder, "digits", options={"train_samples": 330})  # a keyword as it is in the recipe
    assert prediction_bytes(digits_run) == before


def test_other_data_options_give_another_name(digits_run):
    before = prediction_bytes(digits_run)
    path = predict_with(digits_run.folder, "digits", split="train", options={"label_noise": 0.0})
    assert path.stem.startswith("best-digits-train-")
    assert {**prediction_bytes(digits_run), **before} == prediction_bytes(digits_run)
    assert predict_with(digits_run.folder, "digits", split="train").stem == "best-train"


def test_predictions_on_other_images_never_replace_those_of_the_run(folder_run):
    """Regression: predictions on other images replaced the test predictions of the run."""
    before = prediction_bytes(folder_run)
    other = folder_run.folder.parent / "other"
    path = predict_with(folder_run.folder, "folder", options={"path": other})
    assert path.stem.startswith("best-folder-all-")
    assert len(fedlas.read_predictions(path)) == 12  # all images, not a tenth of them
    assert {name: prediction_bytes(folder_run)[name] for name in before} == before
    assert predict_with(folder_run.folder, "folder").stem == "best-test"  # the test split of the recipe


def test_another_path_of_the_training_images_is_the_same_data(folder_run, monkeypatch):
    """Regression: a relative path and the absolute path of one folder gave the predictions of different splits."""
    before = prediction_bytes(folder_run)
    monkeypatch.chdir(folder_run.folder.parent)
    for path in ("home", "other/../home", str(folder_run.folder.parent / "home")):
        assert predict_with(folder_run.folder, "folder", options={"path": path}).stem == "best-test"
    monkeypatch.chdir(folder_run.folder)
    root = folder_run.folder.parent  # relative paths are also searched below the root
    assert predict_with(folder_run.folder, "folder", options={"path": "home"}, data_root=root).stem == "best-test"
    assert prediction_bytes(folder_run) == before


def test_predictions_without_checksums_compare_equal(digits_run, tmp_path):
    """Regression: their bytes differ, and so they were taken for other predictions, after the forward pass."""
    path = predict_with(digits_run.folder, "digits", out=tmp_path / "made.safetensors")
    original_bytes = path.read_bytes()
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = {name: text for name, text in file.metadata().items() if name != CHECKSUM}
    save_file(tensors, path, metadata=metadata)
    assert CHECKSUM.encode() not in path.read_bytes()
    assert predict_with(digits_run.folder, "digits", out=path).read_bytes() == original_bytes
    changed = {**tensors, "logits": tensors["logits"] + torch.eye(1, 10) * 1e-3}
    save_file(changed, path, metadata=metadata)
    before = path.read_bytes()
    with pytest.raises(RunError, match=r"made\.safetensors.*predictions"):
        predict_with(digits_run.folder, "digits", out=path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("difference", ["another split", "fewer samples", "other labels", "other classes", "no labels"])
def test_predictions_of_other_samples_raise_before_the_forward_pass(digits_run, tmp_path, monkeypatch, difference):
    stored = digits_run.predictions("best-test")
    names, letters = stored.class_names, list("abcdefghij")
    same_samples = partial(fedlas.Predictions, stored.logits, index=stored.index, split=stored.split)
    replacements = {
        "another split": digits_run.predictions("best-val"),
        "fewer samples": stored[:10],
        "other labels": same_samples((stored.labels + 1) % 10, class_names=names),
        "other classes": same_samples(stored.labels, class_names=letters),
        "no labels": same_samples(class_names=names),
    }
    write_predictions(replacements[difference], tmp_path / "held.safetensors")
    monkeypatch.setattr("fedlas.training.predict_run._network", None)
    with pytest.raises(RunError, match=r"held\.safetensors.*predictions"):
        predict_with(digits_run.folder, "digits", out=tmp_path / "held.safetensors")


def test_options_are_values_and_not_text(folder_run, tmp_path):
    options = {"path": folder_run.folder.parent / "other", "class_names": ["cat", "dog", "owl"], "antialias": False}
    path = predict_with(folder_run.folder, "folder", options=options, out=tmp_path / "made.safetensors")
    assert fedlas.read_predictions(path).given_labels is not None
    with pytest.raises(ValueError, match="seed="):
        predict_with(folder_run.folder, "folder", options={"seed": 3})


def test_weights_of_another_shape_are_reported(folder_run, tmp_path):
    moved = tmp_path / "run"
    moved.mkdir()
    recipe = folder_run.recipe_file.read_text().replace('"in_channels": 3', '"in_channels": 1')
    (moved / "recipe.json").write_text(recipe)
    checkpoint = torch.load(folder_run.checkpoint, weights_only=True)
    torch.save(checkpoint | {"recipe": Run(moved).recipe.key}, moved / "checkpoint.pt")
    with pytest.raises(RunError, match=r"checkpoint\.pt.*small_cnn.*\b3\b"):
        predict_with(moved, "folder", out=tmp_path / "made.safetensors")


@pytest.mark.filterwarnings("ignore:fp16 is very slow")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_logits_are_computed_in_float32(tmp_path: Path, precision):
    """In low precision, many samples would share a confidence, and top classes a logit."""
    changes = {"epochs": 2, "precision": precision, "splits": ("val",), "data_options": {"train_samples": 60}}
    run = fit(short("ce", **changes), out=tmp_path / "run")
    logits = run.predictions("best-val").logits
    assert not torch.equal(logits, logits.to(torch.bfloat16 if precision == "bf16" else torch.float16).float())
    assert len(logits.amax(1).unique()) > 0.99 * len(logits)
    record = next(r for r in run.log if r["epoch"] == run.log[-1]["best_epoch"])
    assert record["val"]["nll"] == float(fedlas.metrics.nll(run.predictions("best-val")))
