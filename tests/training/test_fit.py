"""Short real runs: every loss, the log, run folders, the best epoch, many recipes in one process."""

import errno
import json
import math
import os
import re
from typing import Any

import pytest
import torch
from runs_of import AtStep, assert_equal_runs, prediction_bytes, short

import fedlas
from fedlas.data import CATALOG as DATA
from fedlas.data import DamagedFileError, build_data
from fedlas.data.digits import Digits
from fedlas.losses.closed_loop import ClosedLoop
from fedlas.training import AbstractCallback, DivergedError, Run, RunError, fit, fit_many
from fedlas.training import backend_flags as flags_module
from fedlas.training.build import select_device
from fedlas.training.checkpoint import Writer
from fedlas.training.loop import _Training
from fedlas.training.progress import downloads
from fedlas.training.run_folder import locked
from fedlas.training.session import Session
from fedlas.training.validation import halves

NAMES = [record.name for record in fedlas.list_losses()]
QUICK = {
    "adafocal",
    "crl",
    "fedlas_mbls",
}  # each needs different inputs from training; the others train in campaigns and in other tests


@pytest.fixture
def feedback(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The predictions that a closed loop learns from, epoch by epoch."""
    received, learn_from_epoch = [], ClosedLoop.learn_from_epoch
    monkeypatch.setattr(
        ClosedLoop, "learn_from_epoch", lambda self, val: (received.append(val), learn_from_epoch(self, val))
    )
    return received


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fit(short(), out=tmp_path_factory.mktemp("run") / "fedlas_ls")


@pytest.mark.parametrize(
    "loss", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.campaign) for name in NAMES]
)
def test_every_loss_trains(tmp_path, loss):
    run = fit(short(loss, epochs=6, lr=0.1), out=tmp_path / loss)
    first, last = run.log[0], run.log[-1]
    assert last["val"]["accuracy"] > 0.5
    assert last["train"]["accuracy"] > first["train"]["accuracy"]
    terms = {name: value for name, value in last["train"].items() if name.startswith("loss_")}
    if terms:
        assert math.isclose(sum(terms.values()), last["train"]["loss"], rel_tol=1e-5)


def test_log_has_all_metrics(finished):
    for number, record in enumerate(finished.log, start=1):
        assert (record["epoch"], record["steps"]) == (number, 7 * number)
        assert set(record["val"]) == {"accuracy", "ece", "aece", "over_ece", "under_ece", "nll"}
        assert math.isclose(record["val"]["over_ece"] + record["val"]["under_ece"], record["val"]["ece"])
        gate = record["gate"]
        assert gate["positive"] + gate["negative"] == pytest.approx(1)
        assert (gate["flip_rate"] is None) == (number == 1)
        assert sum(gate["gamma_histogram"]["counts"]) == 330
        assert len(gate["gamma_histogram"]["counts"]) == len(gate["gamma_histogram"]["edges"]) + 1
        assert 0 < gate["alpha_ratio"] < 2
        assert 0 <= gate["against_gamma"] <= 1
        assert record["machine"]["images_per_second"] > 0
        assert record["lr"] >= 0


def test_the_run_folder_has_exactly_the_documented_files(finished):
    names = {path.name for path in finished.folder.iterdir()}
    assert names == {"recipe.json", "environment.json", "log.jsonl", "checkpoint.pt", "predictions", ".lock"}
    assert set(prediction_bytes(finished)) == {
        f"{state}-{split}.safetensors" for state in ("best", "last") for split in ("val", "test")
    }
    assert finished.recipe == short()
    assert "torch" in json.loads((finished.folder / "environment.json").read_text())["versions"]


def test_a_run_folder_does_not_contain_its_path(finished):
    """So it may be moved."""
    files = [path.read_bytes() for path in finished.folder.rglob("*") if path.is_file()]
    assert len(files) == 9
    assert str(finished.folder.parent).encode() not in b"".join(files)


def test_stored_predictions_equal_the_outputs_of_the_network(finished):
    best = finished.predictions("best-test")
    assert best.split == "test"
    assert len(best) == 797
    assert best.features.shape == (797, 1)
    assert torch.equal(best.index, torch.arange(1000, 1797))
    assert best.class_names == tuple("0123456789")
    val = finished.predictions("best-val")
    record = next(r for r in finished.log if r["epoch"] == finished.log[-1]["best_epoch"])
    assert float(fedlas.metrics.accuracy(val)) == record["val"]["accuracy"]
    assert float(fedlas.metrics.aece(val)) == record["val"]["aece"]
    with pytest.raises(RunError, match=r"best-train.*best-test, best-val"):
        finished.predictions("best-train")


def test_the_best_epoch_is_the_earliest_with_the_highest_accuracy(tmp_path):
    run = fit(short("ce", epochs=6), out=tmp_path / "run")
    accuracies = [record["val"]["accuracy"] for record in run.log]
    best = accuracies.index(max(accuracies)) + 1
    assert run.log[-1]["best_epoch"] == best
    checkpoint = torch.load(run.checkpoint, weights_only=True)
    assert (checkpoint["best_epoch"], checkpoint["best_accuracy"]) == (best, max(accuracies))


def test_halve_validation_uses_only_v1(tmp_path, feedback):
    """V1 reaches the loss and selects the best epoch; V2 has the other samples, whatever the order of rows."""
    run = fit(short("closed_loop", halve_validation=True), out=tmp_path / "run")
    stored = run.predictions("last-val")
    v1, v2 = halves(stored)
    assert abs(len(v1) - len(v2)) <= 1
    assert sorted([*v1.index.tolist(), *v2.index.tolist()]) == sorted(stored.index.tolist())
    assert feedback[-1].index.tolist() == v1.index.tolist()
    assert run.log[-1]["val"]["accuracy"] == pytest.approx(feedback[-1].correct.double().mean().item())
    shuffled_v1, _ = halves(stored[torch.randperm(len(stored))])
    assert sorted(shuffled_v1.index.tolist()) == sorted(v1.index.tolist())
    assert [len(run.log[-1]["loss_state"][name]) for name in ("strengths", "gaps", "edges")] == [10, 10, 11]
    assert "loss_state" not in fit(short("ce", epochs=1), out=tmp_path / "ce").log[0]


def test_train_on_v1_adds_v1_to_the_training_samples(tmp_path):
    run = fit(short("pskd", halve_validation=True, train_on_v1=True), out=tmp_path / "run")
    v1, v2 = halves(run.predictions("last-val"))
    checkpoint = torch.load(run.checkpoint, weights_only=True)
    train = build_data("digits", seed=run.recipe.seed, **run.recipe.data_options).split("train")
    assert len(checkpoint["loss"]["past"]) == len(train) + len(v1)
    assert (checkpoint["loss"]["past"].sum(1) > 0.99).all(), "every sample was visited"
    assert run.log[-1]["val"]["accuracy"] == pytest.approx(v2.correct.double().mean().item())
    with pytest.raises(RunError, match=r"closed_loop.*train_on_v1"):
        fit(short("closed_loop", halve_validation=True, train_on_v1=True), out=tmp_path / "other")


def test_training_samples_can_replace_v1_as_feedback(tmp_path, feedback):
    run = fit(short("closed_loop", halve_validation=True, feedback="train"), out=tmp_path / "run")
    v1, _ = halves(run.predictions("last-val"))
    train = build_data("digits", seed=run.recipe.seed, **run.recipe.data_options).split("train")
    assert {len(validation) for validation in feedback} == {len(v1)}
    assert set(feedback[-1].index.tolist()) <= set(train.index.tolist())
    assert feedback[0].index.tolist() == feedback[-1].index.tolist()


def test_losses_without_feedback_need_no_predictions_of_training_samples(tmp_path, monkeypatch):
    """Regression: they were made after each epoch, and ignored."""
    splits = []
    predict = _Training._predict

    def record_split(training, source, split, **more):
        splits.append(split)
        return predict(training, source, split, **more)

    monkeypatch.setattr(_Training, "_predict", record_split)
    fit(short("ce", epochs=1, halve_validation=True, feedback="train"), out=tmp_path / "run")
    assert "val" in splits
    assert "train" not in splits


def test_equal_recipes_give_equal_bytes(finished, tmp_path):
    assert_equal_runs(fit(short(), out=tmp_path / "again"), finished)
    other = fit(short(seed=2), out=tmp_path / "other")
    assert prediction_bytes(other) != prediction_bytes(finished)


def test_a_finished_run_is_not_repeated(finished, caplog):
    before = finished.log_file.stat().st_mtime_ns
    with caplog.at_level("INFO", "fedlas"):
        assert fit(short(), out=finished.folder).folder == finished.folder
    assert "is already finished and is not trained again" in caplog.text
    assert fit(short(checkpoint_every=4), out=finished.folder, resume=True).finished
    assert finished.log_file.stat().st_mtime_ns == before


def test_the_weights_to_evaluate_change_in_a_finished_run(tmp_path, caplog):
    """Regression: the folder kept the earlier value, so that other weights were evaluated than requested."""
    run = fit(short("ce", epochs=1), out=tmp_path)
    before = prediction_bytes(run), run.log_file.read_bytes(), run.checkpoint.stat().st_mtime_ns
    for evaluated in ("last", "best"):
        caplog.clear()
        with caplog.at_level("INFO", "fedlas"):
            assert fit(short("ce", epochs=1, evaluated=evaluated), out=tmp_path).recipe.evaluated == evaluated
        assert "is already finished and is not trained again" in caplog.text
        assert run.recipe == short("ce", epochs=1, evaluated=evaluated)
    assert (prediction_bytes(run), run.log_file.read_bytes(), run.checkpoint.stat().st_mtime_ns) == before


def test_another_recipe_in_the_folder_raises(finished, tmp_path):
    with pytest.raises(RunError, match=r"lr.*0\.1.*0\.3"):
        fit(short(lr=0.3), out=finished.folder, resume=True)
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(RunError, match="empty"):
        fit(short(), out=tmp_path)


def test_a_recipe_without_training_is_replaced(tmp_path):
    """Regression: a wrong option blocked its run folder forever."""
    with pytest.raises(RunError, match=r"small_cnn.*\b1\b.*\b8\b.*\b8\b"):
        fit(short("ls", epochs=1, model_options={"in_channels": 3}), out=tmp_path / "run")
    Run(tmp_path / "run").begin(short("ls", epochs=1), torch.device("cpu"), 1)  # killed before the first step
    run = fit(short("ls", epochs=1, loss_options={"alpha": 0.1}), out=tmp_path / "run")
    assert run.finished
    assert run.recipe.loss_options == {"alpha": 0.1}


def test_a_finished_run_stays_finished_if_further_predictions_fail(tmp_path):
    """Regression: the recipe with the further split was already written, so the run counted as unfinished."""
    run = fit(short("ce", epochs=1), out=tmp_path)
    with pytest.raises(RunError, match="published"):
        fit(short("ce", epochs=1, splits=("val", "test", "test-published")), out=tmp_path)
    assert run.finished
    assert run.recipe.splits == ("val", "test")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"data": "digits"}', '{"epohs": 3}', b"\xff\xfe"])
def test_a_damaged_recipe_file_is_named(finished, tmp_path, content):
    (tmp_path / "log.jsonl").write_text(finished.log_file.read_text())
    (tmp_path / "recipe.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RunError, match=r"recipe\.json"):
        fit(short(), out=tmp_path, resume=True)


def test_the_environment_of_earlier_epochs_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLAS_COMMIT", "first")
    run = fit(short("ce", epochs=1), out=tmp_path)
    assert (run.environment["commit"], "earlier" in run.environment) == ("first", False)
    for commit in ("second", "second"):
        run.predictions_file("best-val").unlink()
        monkeypatch.setenv("FEDLAS_COMMIT", commit)
        fit(short("ce", epochs=1), out=tmp_path, resume=True)
    assert run.environment["commit"] == "second"
    assert [item["commit"] for item in run.environment["earlier"]] == ["first"]
    assert set(run.environment["data"]) == {"train", "val", "test"}


def test_a_folder_is_locked_during_a_run(tmp_path):
    with locked(tmp_path), pytest.raises(RunError, match="process"):
        fit(short(), out=tmp_path)


def test_a_file_system_without_locks_is_reported(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fedlas.training.run_folder.fcntl.flock", refuse)
    with pytest.raises(RunError, match="No locks available"):
        fit(short(), out=tmp_path)


class OnTest(Digits):
    """Digits whose epochs are selected on the test split."""

    name = "on_test"
    selection = "official"


def test_a_loss_never_learns_from_test_labels(tmp_path, monkeypatch):
    """AdaFocal moves its gammas by the calibration of the images that epochs are selected on."""
    monkeypatch.setitem(DATA.entries, "on_test", OnTest)
    recipe = short("adafocal", epochs=1).replace(data="on_test")
    with pytest.raises(RunError, match=r"adafocal.*selection=official"):
        fit(recipe, out=tmp_path / "adafocal")
    validations = []
    monkeypatch.setattr("fedlas.losses.ce.CE.end_epoch", lambda _, validation: validations.append(validation))
    fit(recipe.replace(loss="ce"), out=tmp_path / "ce")
    assert validations == [None]


def test_an_unavailable_device_raises_one_line():
    for device in ("gpu", "cuda:99", "meta"):
        with pytest.raises(RunError, match=f"{device}|GPU"):
            select_device(device)


def test_downloads_show_a_progress_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with downloads(progress=True) as report_progress:
        for fraction in (None, 0.5, 1.0):
            report_progress("downloading cifar-10-binary.tar.gz", fraction)
        session = Session(short("ce"), torch.device("cpu"), progress=report_progress)
        assert session.data.progress is report_progress
        assert session.ood_data("svhn").progress is report_progress
    assert "cifar-10-binary.tar.gz" in capsys.readouterr().err
    with downloads() as report_progress:  # where there is no terminal
        assert report_progress is None


def test_many_recipes_in_one_process_equal_single_runs(tmp_path):
    losses_and_seeds = [("fedlas_mbls", 1), ("crl", 2), ("crl", 3)]
    recipes = [short(loss, seed=seed, epochs=2) for loss, seed in losses_and_seeds]
    runs = list(fit_many(recipes, folder=tmp_path / "many"))
    for recipe, run in zip(recipes, runs, strict=True):
        assert_equal_runs(run, fit(recipe, out=tmp_path / "alone" / recipe.name))


def test_id_predictions_are_written_before_ood_data_fails(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(Session, "ood_source", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        fit(short("ce", epochs=1, ood=("digits",)), out=tmp_path)
    assert len(prediction_bytes(Run(tmp_path))) == 4
    monkeypatch.undo()
    run = fit(short("ce", epochs=1, ood=("digits",)), out=tmp_path, resume=True)
    for state in ("best", "last"):
        ood = run.predictions(f"{state}-ood-digits")
        assert torch.equal(ood.logits, run.predictions(f"{state}-test").logits)
        assert ood.given_labels is None


def test_a_damaged_test_split_raises_before_the_first_step(tmp_path, monkeypatch):
    read = Digits.read

    def damaged(data, part):
        if part == "test":
            raise DamagedFileError("t10k-images is damaged")
        return read(data, part)

    monkeypatch.setattr(Digits, "read", damaged)
    with pytest.raises(DamagedFileError, match="t10k-images is damaged"):
        fit(short("ce"), out=tmp_path)
    assert Run(tmp_path).log == []
    assert fit(short("ce", epochs=1, splits=("val",)), out=tmp_path / "without").finished  # needs no test data


def test_log_records_are_flushed_to_disk(tmp_path, monkeypatch):
    file_sizes = []
    monkeypatch.setattr(
        "fedlas.training.run_folder.os.fsync", lambda number: file_sizes.append(os.fstat(number).st_size)
    )
    Run(tmp_path).append_log({"epoch": 1})
    assert file_sizes == [len('{"epoch": 1}\n')]


class Collect(AbstractCallback):
    """Records the calls of its hooks."""

    def __init__(self):
        self.steps, self.epochs, self.ends = [], [], 0

    sees_steps = True

    def on_step_end(self, session, step):
        assert all(p.grad is not None for p in session.net.parameters())
        self.steps.append(step)

    def on_epoch_end(self, record):
        self.epochs.append(record["epoch"])

    def on_train_end(self, run):
        self.ends += 1


def test_callbacks_see_steps_and_epochs(tmp_path):
    recorder = Collect()
    fit(short("ce"), out=tmp_path / "run", callbacks=[recorder])
    assert recorder.steps == list(range(1, 22))
    assert recorder.epochs == [1, 2, 3]
    assert recorder.ends == 1
    list(fit_many([short("ce", epochs=1, seed=3)], folder=tmp_path / "many", callbacks=[recorder], progress=True))
    assert recorder.ends == 2


class FailsToClose(AbstractCallback):
    """Fails at the end of a run."""

    def on_train_end(self, run):
        raise OSError("end")


def fail(_) -> None:
    raise KeyError("step")


def test_an_error_while_closing_does_not_replace_the_error_of_the_training(tmp_path):
    recorder = Collect()
    with pytest.raises(KeyError, match="step") as error_info:
        fit(short("ce"), out=tmp_path / "one", callbacks=[FailsToClose(), AtStep(1, fail), recorder])
    assert "end" in error_info.value.__notes__[0]
    assert recorder.ends == 1
    with pytest.raises(OSError, match="end") as error_info:
        fit(short("ce", epochs=1), out=tmp_path / "two", callbacks=[FailsToClose(), recorder, FailsToClose()])
    assert "end" in error_info.value.__notes__[0]
    assert recorder.ends == 2


def test_tensorboard_gets_the_log(tmp_path):
    pytest.importorskip("tensorboard")
    run = fit(short("ce", epochs=1, tensorboard=True), out=tmp_path / "run")
    assert list((run.folder / "tensorboard").iterdir())


def test_divergence_reports_step_and_samples(tmp_path):
    recipe = short("ce", lr=1e30, clip=None, schedule="constant")
    with pytest.raises(DivergedError, match=r"step \d+.*epoch 1") as error_info:
        fit(recipe, out=tmp_path / "run")
    error = error_info.value
    assert re.search(rf"step {error.step}\b.*batch {error.step}\b", str(error))
    assert len(error.index) == 50
    assert "checkpoint.pt" not in str(error)  # there is none
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["diverged"]["index"] == error.index


def test_another_recipe_may_replace_a_run_that_diverged_in_its_first_epoch(tmp_path):
    """Regression: such a run has nothing to lose but blocked its folder for other learning rates."""
    changes = {"clip": None, "schedule": "constant", "epochs": 1}
    with pytest.raises(DivergedError):
        fit(short("ce", lr=1e30, **changes), out=tmp_path / "run")
    run = fit(short("ce", lr=0.1, **changes), out=tmp_path / "run", resume=True)
    assert_equal_runs(run, fit(short("ce", lr=0.1, **changes), out=tmp_path / "alone"))


@pytest.mark.parametrize(("step", "checkpoint_every"), [(9, 0), (4, 2)])
def test_a_run_that_diverged_later_is_not_replaced(tmp_path, step, checkpoint_every):
    """Its log has an epoch, or it has a checkpoint."""
    with pytest.raises(DivergedError):
        fit(short("ce", checkpoint_every=checkpoint_every), out=tmp_path, callbacks=[AtStep(step, break_weights)])
    if not checkpoint_every:
        Run(tmp_path).checkpoint.unlink(missing_ok=True)
    with pytest.raises(RunError, match=r"lr.*0\.1.*0\.3"):
        fit(short("ce", lr=0.3), out=tmp_path, resume=True)


def test_a_finite_but_huge_loss_counts_as_divergence(tmp_path):
    """Regression: such a run finished without an error and with chance accuracy."""

    @torch.no_grad()
    def enlarge_weights(session: Session) -> None:
        for parameter in session.net.parameters():
            parameter.mul_(1e4)

    with pytest.raises(DivergedError, match=r"step 4\b"):
        fit(short("ce"), out=tmp_path / "run", callbacks=[AtStep(3, enlarge_weights)])


def break_weights(session: Session) -> None:
    with torch.no_grad():
        next(session.net.parameters()).fill_(math.nan)


def test_divergence_reports_a_resumable_checkpoint(tmp_path, finished, monkeypatch):
    monkeypatch.setattr(Writer, "idle", True)  # a slow disk must not skip the checkpoint of an epoch
    with pytest.raises(DivergedError, match=r"step 17\b.*checkpoint\.pt") as error_info:
        fit(short(), out=tmp_path / "run", callbacks=[AtStep(16, break_weights)])
    assert error_info.value.step == 17
    checkpoint = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert (checkpoint["epoch"], checkpoint["position"]) == (2, 0)
    assert all(value.isfinite().all() for value in checkpoint["model"].values())
    assert_equal_runs(fit(short(), out=tmp_path / "run", resume=True), finished)


def break_gate_gradients(session: Session) -> None:
    next(session.loss.parameters()).register_hook(lambda gradient: gradient * math.nan)


def test_no_checkpoint_is_saved_after_a_bad_gate_gradient(tmp_path):
    with pytest.raises(DivergedError, match=r"step 5\b"):
        fit(short(checkpoint_every=1), out=tmp_path, callbacks=[AtStep(4, break_gate_gradients)])
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (checkpoint["epoch"], checkpoint["position"]) == (0, 4)
    assert all(value.isfinite().all() for value in checkpoint["loss"].values() if value.is_floating_point())


def test_backend_flags_and_random_state_are_restored(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fit(short("ce", epochs=1), out=tmp_path / "run")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("lacks", [True, False])
def test_onednn_is_disabled_from_the_start_if_it_lacks_bf16(monkeypatch, lacks):
    """Disabling oneDNN during a step would change last digits after resuming."""
    monkeypatch.setattr(flags_module, "_lacks_onednn_bf16", lambda: lacks)
    for precision, enabled in {"bf16": not lacks, "fp32": True}.items():
        with flags_module.backend_flags(short(precision=precision), torch.device("cpu")):
            assert torch.backends.mkldnn.enabled is enabled
            torch.backends.mkldnn.enabled = False  # as torch does
        assert torch.backends.mkldnn.enabled


FEW = {"batch_size": 20, "epochs": 2, "data_options": {"train_samples": 100}}  # float16 is slow on a CPU


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"precision": "fp16", **FEW}, {"channels_last": True}])
@pytest.mark.filterwarnings("ignore:fp16 is very slow")
def test_other_precisions_and_layouts_train_nearly_the_same(finished, tmp_path, changes):
    reference = fit(short(**FEW), out=tmp_path / "plain") if changes.get("precision") == "fp16" else finished
    run = fit(short(**changes), out=tmp_path / "run")
    for record, expected in zip(run.log, reference.log, strict=True):
        assert record["train"]["loss"] == pytest.approx(expected["train"]["loss"], rel=0.1)
        assert record["val"]["nll"] == pytest.approx(expected["val"]["nll"], rel=0.25)
        assert record["val"]["accuracy"] == pytest.approx(expected["val"]["accuracy"], abs=0.1)
    assert run.predictions("best-test").logits.dtype == torch.float32


@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        ("fedlas_ls", {"optimizer": "adamw", "lr": 1e-2, "schedule": "cosine", "warmup": 0.5, "decay_all": False}),
        ("ce", {"mixup": 0.2, "cutmix": 1.0}),
    ],
)
def test_other_optimizers_schedules_and_mixup_train(tmp_path, loss, changes):
    run = fit(short(loss, epochs=6, **changes), out=tmp_path / "run")
    assert run.log[-1]["val"]["accuracy"] > 0.5
