"""Predictions of a trained run on any data: file names, existing files, and precision."""

import signal
from pathlib import Path

import pytest
import torch
from runs_of import SignalAt, large, natural_images, prediction_bytes, short
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fedlas
from fedlas.io import read_predictions, write_predictions
from fedlas.io.safetensors import CHECKSUM
from fedlas.training import Run, RunError, StoppedError, fit
from fedlas.training.predict_run import predict_with
from fedlas.training.run_folder import locked

CLASSES = [str(number) for number in range(10)]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fit(short("ce", epochs=2), out=tmp_path_factory.mktemp("trained") / "digits")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Run:
    here = tmp_path_factory.mktemp("folder")
    natural_images(here / "other", count=4, seed=1)
    return fit(large(natural_images(here / "home"), "ce", epochs=1, workers=0), out=here / "run")


def test_predictions_do_not_make_an_unfinished_run_look_finished(tmp_path):
    """Regression: four calls wrote all files that mark a run as finished."""
    recipe = short("ce", epochs=2)
    with pytest.raises(StoppedError):
        fit(recipe, out=tmp_path / "run", callbacks=[SignalAt(10, signal.SIGTERM)])
    run = Run(tmp_path / "run")
    for split in ("val", "test"):
        for state in ("best", "last"):
            with pytest.raises(RunError, match=r"\b1 .*\b2\b.*--resume"):
                predict_with(run.folder, "digits", split=split, state=state)
            made = predict_with(
                run.folder, "digits", split=split, state=state, out=run.predictions_file(f"{state}-{split}")
            )
            assert made.exists()
    assert not run.finished
    assert len(fit(recipe, out=run.folder, resume=True).log) == 2
    assert run.finished


def test_a_locked_run_raises(digits, tmp_path):
    with locked(digits.folder):
        with pytest.raises(RunError, match="process"):
            predict_with(digits.folder, "digits", split="train")
        predict_with(digits.folder, "digits", split="train", out=tmp_path / "elsewhere.safetensors")


def test_a_finished_run_needs_no_checkpoint(digits, tmp_path):
    copied = Run(tmp_path / "copied")
    for path in digits.folder.rglob("*.*"):
        if path.is_file() and path.name != "checkpoint.pt":
            (copied.folder / path.relative_to(digits.folder)).parent.mkdir(parents=True, exist_ok=True)
            (copied.folder / path.relative_to(digits.folder)).write_bytes(path.read_bytes())
    assert copied.finished
    assert fit(digits.recipe, out=copied.folder).log == digits.log
    with pytest.raises(RunError, match="checkpoint"):
        fit(digits.recipe.replace(ood=("digits",)), out=copied.folder)

    with pytest.raises(RunError, match="checkpoint"):
        predict_with(copied.folder, "digits", split="train")


def test_changed_images_raise(tmp_path):
    home, out = natural_images(tmp_path / "home"), tmp_path / "run"
    recipe = large(home, "ce", workers=0)

    def swap() -> None:
        for position in range(10):  # names of all files stay; of those that cats and dogs have, ten are the others'
            (home / "cat" / f"{position}.png").rename(home / "kept.png")
            (home / "dog" / f"{position}.png").rename(home / "cat" / f"{position}.png")
            (home / "kept.png").rename(home / "dog" / f"{position}.png")

    with pytest.raises(StoppedError):
        fit(recipe, out=out, callbacks=[SignalAt(12, signal.SIGTERM)])
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


def test_a_run_without_its_training_data_can_predict(folder, tmp_path):
    home, away = folder.folder.parent / "home", folder.folder.parent / "away"
    asked = {"data": "folder", "options": {"path": str(folder.folder.parent / "other")}, "split": "all"}
    there = read_predictions(predict_with(folder.folder, **asked, out=tmp_path / "there.safetensors"))
    home.rename(away)
    try:
        gone = read_predictions(predict_with(folder.folder, **asked, out=tmp_path / "gone.safetensors"))
        assert gone.class_names == there.class_names == ("cat", "dog", "owl")
        assert torch.equal(gone.logits, there.logits)
        bare = Run(tmp_path / "bare")
        bare.folder.mkdir()
        for name in ("recipe.json", "checkpoint.pt", "log.jsonl"):
            (bare.folder / name).write_bytes((folder.folder / name).read_bytes())
        with pytest.raises(FileNotFoundError, match=r"classes.*home"):
            predict_with(bare.folder, **asked, out=tmp_path / "none.safetensors")
    finally:
        away.rename(home)


def test_predictions_on_the_recipes_data_are_named_after_the_split(digits):
    before = prediction_bytes(digits)
    assert predict_with(digits.folder, "digits") == digits.predictions_file("best-test")
    assert predict_with(digits.folder, "digits", split="val", state="last") == digits.predictions_file("last-val")
    assert prediction_bytes(digits) == before
    predict_with(digits.folder, "digits", options={"train_samples": 330})  # a keyword as it is in the recipe
    assert prediction_bytes(digits) == before


def test_other_data_options_give_another_name(digits):
    before = prediction_bytes(digits)
    path = predict_with(digits.folder, "digits", split="train", options={"label_noise": 0.0})
    assert path.stem.startswith("best-digits-train-")
    assert {**prediction_bytes(digits), **before} == prediction_bytes(digits)
    assert predict_with(digits.folder, "digits", split="train").stem == "best-train"


def test_predictions_on_other_images_never_replace_those_of_the_run(folder):
    """Regression: predictions on other images replaced the test predictions of the run."""
    before = prediction_bytes(folder)
    other = folder.folder.parent / "other"
    path = predict_with(folder.folder, "folder", options={"path": other})
    assert path.stem.startswith("best-folder-all-")
    assert len(fedlas.read_predictions(path)) == 12  # all images, not a tenth of them
    assert {name: prediction_bytes(folder)[name] for name in before} == before
    assert predict_with(folder.folder, "folder").stem == "best-test"  # those it was trained beside
    path.write_bytes(folder.predictions_file("last-val").read_bytes())
    with pytest.raises(RunError, match=f"{path.name}.*predictions"):
        predict_with(folder.folder, "folder", options={"path": other})


def test_predictions_without_checksums_compare_equal(digits, tmp_path):
    """Their bytes differ, and after all images had been looked at they were called other predictions."""
    made = predict_with(digits.folder, "digits", out=tmp_path / "made.safetensors")
    now = made.read_bytes()
    tensors = load_file(made)
    with safe_open(made, "pt") as file:
        words = {name: text for name, text in file.metadata().items() if name != CHECKSUM}
    save_file(tensors, made, metadata=words)
    assert CHECKSUM.encode() not in made.read_bytes()
    assert predict_with(digits.folder, "digits", out=made).read_bytes() == now
    changed = {**tensors, "logits": tensors["logits"] + torch.eye(1, 10) * 1e-3}
    save_file(changed, made, metadata=words)
    before = made.read_bytes()
    with pytest.raises(RunError, match=r"made\.safetensors.*predictions"):
        predict_with(digits.folder, "digits", out=made)
    assert made.read_bytes() == before


@pytest.mark.parametrize("fault", ["another split", "fewer samples", "other labels", "other classes", "no labels"])
def test_predictions_of_other_samples_raise_before_the_forward_pass(digits, tmp_path, monkeypatch, fault):
    held = digits.predictions("best-test")
    about = {"index": held.index, "features": held.features, "class_names": held.class_names, "split": held.split}
    others = {
        "another split": digits.predictions("best-val"),
        "fewer samples": held[:10],
        "other labels": fedlas.Predictions(held.logits, (held.labels + 1) % 10, **about),
        "other classes": fedlas.Predictions(held.logits, held.labels, **about | {"class_names": list("abcdefghij")}),
        "no labels": fedlas.Predictions(held.logits, **about),
    }
    write_predictions(others[fault], tmp_path / "held.safetensors")
    monkeypatch.setattr("fedlas.training.predict_run._network", None)
    with pytest.raises(RunError, match=r"held\.safetensors.*predictions"):
        predict_with(digits.folder, "digits", out=tmp_path / "held.safetensors")


def test_a_file_without_predictions_raises_before_the_forward_pass(digits, monkeypatch):
    path = digits.predictions_file("best-train")
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(b"mine")
    monkeypatch.setattr("fedlas.training.predict_run._network", None)
    try:
        with pytest.raises(RunError, match=r"best-train.*predictions"):
            predict_with(digits.folder, "digits", split="train")
        assert path.read_bytes() == b"mine"
    finally:
        path.unlink()
        if before is not None:
            path.write_bytes(before)


def test_options_are_values_and_not_text(folder, tmp_path):
    options = {"path": folder.folder.parent / "other", "class_names": ["cat", "dog", "owl"], "antialias": False}
    path = predict_with(folder.folder, "folder", options=options, out=tmp_path / "made.safetensors")
    assert fedlas.read_predictions(path).given_labels is not None
    with pytest.raises(ValueError, match="seed="):
        predict_with(folder.folder, "folder", options={"seed": 3})


def test_weights_of_another_shape_are_reported(folder, tmp_path):
    moved = tmp_path / "run"
    moved.mkdir()
    recipe = folder.recipe_file.read_text().replace('"in_channels": 3', '"in_channels": 1')
    (moved / "recipe.json").write_text(recipe)
    saved = torch.load(folder.checkpoint, weights_only=True)
    torch.save(saved | {"recipe": Run(moved).recipe.key}, moved / "checkpoint.pt")
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
