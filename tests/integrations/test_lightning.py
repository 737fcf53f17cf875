"""A LightningModule trains with fedlas losses; the callback logs fedlas metrics, also after resuming."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import digit_batches
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fedlas
from fedlas import metrics
from start_method import START_METHOD

# lightning takes seconds to import, so it is imported where it is used: in functions.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
EPOCHS = 3


class Steps:
    """The steps of a typical LightningModule, with the network wrapper and a loss of fedlas."""

    def __init__(self, loss: str = "fedlas_ls", **options: Any) -> None:
        super().__init__()
        self.net = fedlas.WithFeatures(digit_batches.network())
        self.loss = fedlas.build_loss(loss, num_classes=10, **options)
        self.outputs: list[tuple[Tensor, Tensor]] = []
        self.gate: list[tuple[Tensor, Tensor, Tensor]] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, labels, index = batch
        logits, features = self.net(x)
        value: Tensor = self.loss(logits, labels, features, index)
        self.log("train_loss", value, on_step=False, on_epoch=True, sync_dist=True)
        if self.loss.name == "fedlas_ls":
            self.gate.append((index, self.loss.psi, self.loss.alpha_i))
        return value

    def on_validation_epoch_start(self) -> None:
        self.outputs.clear()

    def validation_step(self, batch: Any, _: int) -> dict[str, Tensor] | None:
        x, labels = batch
        logits, features = self.net(x)
        self.outputs.append((logits.detach(), labels))
        if self.loss.needs_index:  # it stores predictions of the training samples only
            return {"logits": logits, "labels": labels}
        self.log("val_loss", self.loss(logits, labels, features), sync_dist=True)
        return None

    def test_step(self, batch: Any, number: int) -> dict[str, Tensor] | None:
        return self.validation_step(batch, number)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def module_of(steps: type = Steps) -> Any:
    """Return a LightningModule class with these steps."""
    from lightning.pytorch import LightningModule

    return type("Classifier", (steps, LightningModule), {})


def calibration_callback(*args: Any, **options: Any) -> Any:
    from fedlas.integrations.lightning import CalibrationCallback

    return CalibrationCallback(*args, **options)


def loaders() -> tuple[Any, Any]:
    x, labels = digit_batches.training()
    seeded = torch.Generator().manual_seed(0)
    train = DataLoader(TensorDataset(x, labels, torch.arange(len(x))), 50, shuffle=True, generator=seeded)
    return train, DataLoader(TensorDataset(*digit_batches.validation()), 150)


def build_trainer(folder: Path, *callbacks: Any, **overrides: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger

    options = {"max_epochs": EPOCHS, "logger": CSVLogger(folder, version=0), **overrides}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    return Trainer(accelerator="cpu", callbacks=list(callbacks), default_root_dir=folder, **quiet, **options)


def checkpoint_callback(folder: Path, **options: Any) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(folder / "checkpoints", **options)


def logged(folder: Path, column: str) -> list[float]:
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        return [float(row[column]) for row in csv.DictReader(file) if row.get(column)]


def expected_metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    probs = logits.softmax(1)
    return {
        "accuracy": metrics.accuracy(probs, labels),
        "nll": metrics.nll(fedlas.Predictions(logits, labels)),
        "ece": metrics.ece(probs, labels),
        "aece": metrics.aece(probs, labels),
        "over_ece": metrics.over_ece(probs, labels),
        "under_ece": metrics.under_ece(probs, labels),
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("lightning")
    torch.manual_seed(0)
    module = module_of()()
    start = {name: value.clone() for name, value in module.loss.state_dict().items()}
    trainer = build_trainer(
        folder, calibration_callback(), checkpoint_callback(folder, monitor="val_ece", save_last=True)
    )
    trainer.fit(module, *loaders())
    return module, trainer, folder, start


def test_network_and_gate_train(finished):
    module, _, folder, start = finished
    losses = logged(folder, "train_loss")
    assert len(losses) == EPOCHS
    assert losses[-1] < 0.7 * losses[0]
    assert logged(folder, "val_accuracy")[-1] > 0.8
    for name, value in module.loss.state_dict().items():
        assert name.endswith("started") or not torch.equal(value, start[name]), f"{name} has not moved"


def test_logged_metrics_equal_fedlas_metrics(finished):
    module, trainer, folder, _ = finished
    logits, labels = (torch.cat(parts) for parts in zip(*module.outputs, strict=True))
    assert len(labels) == digit_batches.VALIDATION
    for name, value in expected_metrics(logits, labels).items():
        assert float(trainer.callback_metrics[f"val_{name}"]) == pytest.approx(value, rel=1e-6, abs=1e-8), name
        assert len(logged(folder, f"val_{name}")) == EPOCHS  # and none of the sanity check


def test_the_logged_state_of_the_gate_is_that_of_each_epoch(finished):
    module, _, folder, _ = finished
    steps = digit_batches.TRAINING // 50
    history, expected = fedlas.GateHistory(digit_batches.TRAINING), []
    for epoch in range(EPOCHS):
        steps_of_epoch = module.gate[epoch * steps : (epoch + 1) * steps]
        for index, psi, _ in steps_of_epoch:
            history.update(index, psi)
        alpha = torch.cat([alpha_i for *_, alpha_i in steps_of_epoch]).mean()
        expected.append((history.end_epoch(), float(alpha)))
    assert logged(folder, "train_gate_positive") == pytest.approx([epoch.positive for epoch, _ in expected], rel=1e-5)
    assert logged(folder, "train_gate_negative") == pytest.approx([epoch.negative for epoch, _ in expected], rel=1e-5)
    assert logged(folder, "train_alpha") == pytest.approx([alpha for _, alpha in expected], rel=1e-5)
    assert logged(folder, "train_flip_rate") == pytest.approx([epoch.flip_rate for epoch, _ in expected[1:]], rel=1e-5)


def test_a_run_resumes_from_a_checkpoint_with_its_loss(finished, tmp_path):
    module, _, folder, _ = finished
    last_checkpoint = folder / "checkpoints" / "last.ckpt"
    torch.manual_seed(1)
    restored = module_of()()
    for epochs in (EPOCHS, EPOCHS + 1):
        checkpoints = checkpoint_callback(tmp_path / str(epochs), monitor="val_ece", save_last=True)
        trainer = build_trainer(tmp_path, calibration_callback(), checkpoints, max_epochs=epochs)
        trainer.fit(restored, *loaders(), ckpt_path=last_checkpoint)
        if epochs == EPOCHS:  # training is complete, so only the checkpoint is read
            assert not restored.gate
            for name, value in module.state_dict().items():
                assert torch.equal(restored.state_dict()[name], value), name
    assert len(restored.gate) == digit_batches.TRAINING // 50
    assert len(logged(tmp_path, "val_ece")) == 1
    before = {int(i): float(p) for index, psi, _ in module.gate[-12:] for i, p in zip(index, psi, strict=True)}
    after = {int(i): float(p) for index, psi, _ in restored.gate for i, p in zip(index, psi, strict=True)}
    flips = sum(before[i] != after[i] for i in after) / len(after)
    assert logged(tmp_path, "train_flip_rate") == pytest.approx([flips])  # against the last epoch before the stop


def test_testing_logs_and_does_not_change_the_loss(finished, tmp_path):
    module, *_ = finished
    before = {name: value.clone() for name, value in module.loss.state_dict().items()}
    module.outputs.clear()
    result = build_trainer(tmp_path, calibration_callback(bins=10), logger=False).test(
        module, loaders()[1], verbose=False
    )[0]
    logits, labels = (torch.cat(parts) for parts in zip(*module.outputs, strict=True))
    assert result["test_ece"] == pytest.approx(metrics.ece(logits.softmax(1), labels, 10), rel=1e-6)
    for name, value in module.loss.state_dict().items():
        assert torch.equal(value, before[name])
    assert not module.loss._forward_hooks


class Stream(IterableDataset):
    """The digits of validation one by one, without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*digit_batches.validation(), strict=True)


class MultipleLoaders(Steps):
    """Record which loader the samples came from."""

    def validation_step(self, batch: Any, number: int, dataloader_idx: int = 0) -> dict[str, Tensor] | None:
        output = super().validation_step(batch, number)
        self.outputs[-1] = (dataloader_idx, *self.outputs[-1])
        return output

    def test_step(self, batch: Any, number: int, dataloader_idx: int = 0) -> dict[str, Tensor] | None:
        return self.validation_step(batch, number, dataloader_idx)


def metrics_of_loader(module: Any, index: int) -> dict[str, float]:
    parts = [(logits, labels) for loader, logits, labels in module.outputs if loader == index]
    return expected_metrics(*(torch.cat(column) for column in zip(*parts, strict=True)))


@pytest.mark.filterwarnings("ignore:Your `IterableDataset`")
@pytest.mark.parametrize("loss", ["ce", "adafocal"])
def test_each_of_several_loaders_has_its_own_numbers(loss, tmp_path, monkeypatch):
    torch.manual_seed(0)
    module, end_epoch_inputs = module_of(MultipleLoaders)(loss), []
    end_epoch = type(module.loss).end_epoch
    monkeypatch.setattr(
        type(module.loss), "end_epoch", lambda self, val=None: (end_epoch_inputs.append(val), end_epoch(self, val))
    )
    train, validation = loaders()
    shifted = DataLoader(TensorDataset(digit_batches.validation()[0] + 1, digit_batches.validation()[1]), 100)
    trainer = build_trainer(tmp_path, calibration_callback(), enable_checkpointing=False, max_epochs=1)
    trainer.fit(module, train, [validation, shifted, DataLoader(Stream(), 150)])
    assert "val_ece" not in trainer.callback_metrics
    assert metrics_of_loader(module, 0)["ece"] != pytest.approx(metrics_of_loader(module, 1)["ece"], rel=1e-3)
    for number in range(3):
        for name, value in metrics_of_loader(module, number).items():
            result = trainer.callback_metrics[f"val_{name}/dataloader_idx_{number}"]
            assert float(result) == pytest.approx(value, rel=1e-5, abs=1e-7), (name, number)
    if loss == "adafocal":  # it uses the first loader
        expected_logits = torch.cat([logits for number, logits, _ in module.outputs if number == 0])
        assert torch.equal(end_epoch_inputs[0].logits, expected_logits)
    module.outputs.clear()
    test_results = trainer.test(module, [validation, shifted], verbose=False)
    for number in range(2):
        test_metrics = {name for name in test_results[number] if name.startswith("test_")}
        assert test_metrics == {f"test_{name}/dataloader_idx_{number}" for name in metrics_of_loader(module, number)}
        assert test_results[number][f"test_ece/dataloader_idx_{number}"] == pytest.approx(
            metrics_of_loader(module, number)["ece"]
        )


@pytest.mark.parametrize(("loss", "options"), [("adafocal", {}), ("crl", {"num_samples": digit_batches.TRAINING})])
def test_updates_between_epochs_are_in_the_checkpoint_of_the_epoch(loss, options, tmp_path, monkeypatch):
    torch.manual_seed(0)
    module = module_of()(loss, **options)
    end_epoch_inputs = []
    end_epoch = type(module.loss).end_epoch

    def recording_end_epoch(self: Any, validation: Any = None) -> None:
        end_epoch_inputs.append(validation)
        end_epoch(self, validation)

    monkeypatch.setattr(type(module.loss), "end_epoch", recording_end_epoch)
    checkpoint = checkpoint_callback(tmp_path, monitor="val_ece", save_on_train_epoch_end=False)
    trainer = build_trainer(tmp_path, calibration_callback(), checkpoint, max_epochs=1)
    trainer.fit(module, *loaders())
    assert len(end_epoch_inputs) == 1  # not after the sanity check
    logits, labels = (torch.cat(parts) for parts in zip(*module.outputs, strict=True))
    if module.loss.needs_validation:
        assert torch.equal(end_epoch_inputs[0].logits, logits)
        assert torch.equal(end_epoch_inputs[0].labels, labels)
    else:
        assert end_epoch_inputs == [None]
    assert float(trainer.callback_metrics["val_ece"]) == pytest.approx(metrics.ece(logits.softmax(1), labels), rel=1e-6)
    saved_state = torch.load(checkpoint.best_model_path, weights_only=True)["state_dict"]
    for name, value in module.loss.state_dict().items():
        assert torch.equal(saved_state[f"loss.{name}"], value), name


def test_without_validation_epochs_end_too(tmp_path, monkeypatch):
    module, end_epoch_inputs = module_of()("ce"), []
    monkeypatch.setattr(
        type(module.loss), "end_epoch", lambda self, validation=None: end_epoch_inputs.append(validation)
    )
    build_trainer(tmp_path, calibration_callback(), logger=False, max_epochs=2).fit(module, loaders()[0])
    assert end_epoch_inputs == [None, None]


VALIDATIONS = {  # options of the Trainer, and the epochs that end with an update; an epoch has 12 steps
    "max_steps": ({"max_steps": 18}, [0]),
    "mid-epoch only": ({"max_epochs": 2, "val_check_interval": 0.45}, [0, 1]),
    "mid-epoch and end": ({"max_epochs": 2, "val_check_interval": 0.5}, [0, 1]),
    "every second epoch": ({"max_epochs": 3, "check_val_every_n_epoch": 2}, [1]),
    "every 18 steps": ({"max_epochs": 3, "check_val_every_n_epoch": None, "val_check_interval": 18}, [1, 2]),
}


@pytest.mark.parametrize("case", VALIDATIONS)
@pytest.mark.parametrize("loss", ["adafocal", "closed_loop"])
def test_an_epoch_ends_with_its_latest_validation_if_any(loss, case, tmp_path, monkeypatch):
    """Regression: training crashed at the end of an epoch without a validation at its last batch."""
    module = module_of()(loss, **({"num_samples": digit_batches.TRAINING} if loss == "closed_loop" else {}))
    epochs, end_epoch = [], type(module.loss).end_epoch

    def recording_end_epoch(self: Any, validation: Any = None) -> None:
        epochs.append(module.current_epoch)
        assert torch.equal(validation.logits, torch.cat([logits for logits, _ in module.outputs]))
        end_epoch(self, validation)

    monkeypatch.setattr(type(module.loss), "end_epoch", recording_end_epoch)
    options, expected = VALIDATIONS[case]
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": None, **options}
    build_trainer(tmp_path, calibration_callback(), **options).fit(module, *loaders())
    assert epochs == expected


@pytest.mark.parametrize("options", [{}, {"check_val_every_n_epoch": 5}, {"limit_val_batches": 0}])
def test_a_loss_that_needs_validation_warns_once_if_there_is_none(options, tmp_path):
    module, (train, validation) = module_of()("adafocal"), loaders()
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": 2, **options}
    trainer = build_trainer(tmp_path, calibration_callback(), **options)
    with pytest.warns(UserWarning, match=r"adafocal.*validation") as warning_records:
        trainer.fit(module, train, validation if len(options) > 3 else None)
    assert sum("adafocal" in str(record.message) for record in warning_records) == 1


def test_a_step_that_does_not_call_the_loss_warns(tmp_path):
    module = module_of()()
    module.validation_step = lambda batch, batch_idx: None
    with pytest.warns(UserWarning, match=r"validation_step.*loss"):
        build_trainer(tmp_path, calibration_callback(), logger=False, max_epochs=1).fit(module, *loaders())


def test_a_module_without_a_loss_or_with_two_raises(tmp_path):
    module = module_of()()
    with pytest.raises(ValueError, match=r"'criterion'.*Classifier.*\bloss;"):
        build_trainer(tmp_path, calibration_callback("criterion"), logger=False).validate(module, loaders()[1])
    module.other = fedlas.build_loss("ce")
    with pytest.raises(ValueError, match=r"Classifier.*loss, other"):
        build_trainer(tmp_path, calibration_callback(), logger=False).validate(module, loaders()[1])
    del module.loss, module.other
    with pytest.raises(ValueError, match=r"Classifier.*self\.loss = fedlas\.build_loss"):
        build_trainer(tmp_path, calibration_callback(), logger=False).validate(module, loaders()[1])


def test_both_package_names_work():
    import lightning.pytorch as pl
    import pytorch_lightning as other

    assert other.Callback is not pl.Callback
    renamed = type("Renamed", (Steps, other.LightningModule), {})
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    trainer = other.Trainer(
        accelerator="cpu", max_epochs=1, log_every_n_steps=1, callbacks=[calibration_callback()], **quiet
    )
    trainer.fit(renamed(), *loaders())
    assert {"val_ece", "train_alpha"} <= trainer.callback_metrics.keys()


@pytest.mark.skipif(START_METHOD != "fork", reason="with CUDA processes are spawned, and this module has no pickle")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_two_processes_log_the_numbers_of_all_samples(tmp_path):
    torch.manual_seed(0)
    module, reference = module_of()(), module_of()()
    gate = module.loss.smoothing.bcg.fc_in.weight.detach().clone()
    ddp_options = {"logger": False, "enable_checkpointing": False, "strategy": "ddp_fork", "devices": 2}
    trainer = build_trainer(tmp_path, calibration_callback(), max_epochs=2, use_distributed_sampler=True, **ddp_options)
    trainer.fit(module, *loaders())
    reference.load_state_dict(module.state_dict())
    x, labels = digit_batches.validation()
    logits = reference.net(x).logits.detach()
    for name, value in expected_metrics(logits, labels).items():
        assert float(trainer.callback_metrics[f"val_{name}"]) == pytest.approx(value, rel=1e-5, abs=1e-7), name
    assert {"train_alpha", "train_flip_rate"} <= trainer.callback_metrics.keys()
    assert not torch.equal(module.loss.smoothing.bcg.fc_in.weight, gate)
