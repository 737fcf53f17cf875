"""The Hugging Face Trainer trains image, text and token classifiers with fedlas losses and gates, and resumes."""

from pathlib import Path
from typing import Any

import digit_batches
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlas
from fedlas import metrics

# transformers takes seconds to import, so it is imported where it is used, in functions.
SEQUENCE, TOKEN = "BertForSequenceClassification", "BertForTokenClassification"
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
CLASSES, WORDS, LENGTH = 4, 24, 6


def calibrate(*args: Any, **options: Any) -> Any:
    from fedlas.integrations.huggingface import Calibration

    return Calibration(*args, **options)


def images() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=4, num_channels=1, num_labels=10))


def sentences(kind: str = SEQUENCE, **config_options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = {**SMALL, "vocab_size": WORDS, "max_position_embeddings": LENGTH, "num_labels": CLASSES}
    return getattr(transformers, kind)(transformers.BertConfig(**config, **config_options))


def pictures(part: tuple[Tensor, Tensor]) -> list[dict[str, Any]]:
    rows = zip(part[0].reshape(-1, 1, 8, 8), part[1], strict=True)
    return [{"pixel_values": x, "labels": int(y), "index": n} for n, (x, y) in enumerate(rows)]


def texts(n: int, tokens: bool = False) -> list[dict[str, Any]]:
    """Return random sentences whose first token determines the class; with `tokens`, each token has its own class."""
    token_ids = torch.randint(0, WORDS, (n, LENGTH), generator=torch.Generator().manual_seed(n))
    labels = token_ids % CLASSES if tokens else token_ids[:, 0] % CLASSES
    if tokens:
        labels[torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) < 0.4] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(token_ids, labels, strict=True)]


def arguments(folder: Path, **overrides: Any) -> Any:
    from transformers import TrainingArguments

    defaults = {"num_train_epochs": 4, "per_device_train_batch_size": 30, "learning_rate": 5e-3, "weight_decay": 0.0}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    schedule = {"logging_strategy": "epoch", "eval_strategy": "no", "save_strategy": "no"}
    return TrainingArguments(output_dir=str(folder), **{**defaults, **quiet, **schedule, **overrides})


def build_trainer(calibration: Any, folder: Path, train: Any, evaluated: Any = None, **overrides: Any) -> Any:
    from transformers import Trainer

    return Trainer(
        calibration.model,
        arguments(folder, **overrides),
        train_dataset=train,
        eval_dataset=evaluated,
        compute_loss_func=calibration.compute_loss,
        compute_metrics=calibration.compute_metrics,
        callbacks=[calibration],
    )


def loss_of(name: str, classes: int = CLASSES, **options: Any) -> Any:
    torch.manual_seed(1)
    return fedlas.build_loss(name, num_classes=classes, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, dict[str, Tensor], Path]:
    folder = tmp_path_factory.mktemp("images")
    calibration = calibrate(images(), loss_of("fedlas_ls", 10))
    start = {name: value.clone() for name, value in calibration.loss.state_dict().items()}
    data = (pictures(digit_batches.training()), pictures(digit_batches.validation()))
    trainer = build_trainer(calibration, folder, *data, eval_strategy="epoch", save_strategy="epoch")
    trainer.train()
    return calibration, trainer, start, folder


def test_image_classifier_and_gate_train(finished):
    calibration, trainer, start, _ = finished
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] < 0.7 * losses[0]
    for name, value in calibration.loss.state_dict().items():
        assert name.endswith("started") or not torch.equal(value, start[name]), f"{name} has not moved"


def test_logged_metrics_equal_fedlas_metrics(finished):
    _, trainer, _, _ = finished
    evaluated = [record for record in trainer.state.log_history if "eval_ece" in record]
    x, labels = digit_batches.validation()
    with torch.no_grad():
        logits = trainer.model.eval()(x.reshape(-1, 1, 8, 8)).logits
    probs = logits.softmax(1)
    over, under = metrics.over_ece(probs, labels), metrics.under_ece(probs, labels)
    expected = {
        "accuracy": metrics.accuracy(probs, labels),
        "nll": metrics.nll(fedlas.Predictions(logits, labels)),
        "ece": metrics.ece(probs, labels),
        "aece": metrics.aece(probs, labels),
        "over_ece": over,
        "under_ece": under,
    }
    assert len(evaluated) == 4
    assert evaluated[-1]["eval_accuracy"] > 0.6
    for name, value in expected.items():
        assert evaluated[-1][f"eval_{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    # The loss of an evaluation is that of the loss in evaluation mode.
    loss = trainer.model.calibration_loss.eval()
    features = fedlas.WithFeatures(trainer.model, head="classifier")(x.reshape(-1, 1, 8, 8)).features
    assert evaluated[-1]["eval_loss"] == pytest.approx(float(loss(logits, labels, features).detach()), rel=1e-4)


def test_the_state_of_the_gate_is_logged(finished):
    evaluated = [record for record in finished[1].state.log_history if "eval_ece" in record]
    assert all(0 <= record["eval_gate_positive"] <= 1 for record in evaluated)
    assert all(0 < record["eval_alpha"] < 0.1 for record in evaluated)
    assert ["eval_flip_rate" in record for record in evaluated] == [False, True, True, True]


def test_a_saved_network_loads_without_its_loss(finished):
    from transformers import ViTForImageClassification

    _, trainer, _, folder = finished
    last_checkpoint = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    x = digit_batches.validation()[0].reshape(-1, 1, 8, 8)
    loaded = ViTForImageClassification.from_pretrained(last_checkpoint).eval()
    torch.testing.assert_close(loaded(x).logits, trainer.model.eval()(x).logits)


def test_a_resumed_run_restores_its_loss(tmp_path):
    """Use sentences, because transformers 5.22 does not find the parameters in its own checkpoint of a ViT."""
    runs = []
    for start, resume in ((1, None), (2, str(tmp_path / "checkpoint-4"))):
        torch.manual_seed(start)
        loss = fedlas.build_loss("fedlas_ls", num_classes=CLASSES)
        calibration = calibrate(sentences(), loss)
        trainer = build_trainer(calibration, tmp_path, texts(60), num_train_epochs=3, save_strategy="epoch")
        trainer.train(resume_from_checkpoint=resume)
        runs.append(trainer.model.state_dict())
    for name, value in runs[0].items():
        torch.testing.assert_close(runs[1][name], value, msg=lambda m, name=name: f"{name}: {m}")


def test_text_classifiers_train(tmp_path):
    calibration = calibrate(sentences(), loss_of("fedlas_mbls"))
    trainer = build_trainer(calibration, tmp_path, texts(300), texts(200))
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_accuracy"] > 0.9 > before["eval_accuracy"]
    assert after["eval_loss"] < before["eval_loss"]


@pytest.mark.parametrize(
    ("loss", "options", "kind"),
    [("mbls", {"weight": [1.0, 2.0, 0.5, 1.0]}, SEQUENCE), ("fedlas_ls", {"theta": 1e-12}, TOKEN)],
)
def test_accumulated_gradients_are_those_of_one_large_batch(loss, options, kind, tmp_path):
    """Parts must be weighted by their number of labels. A tiny theta fixes mu and sigma."""
    weights = []
    for rows, parts in ((24, 1), (6, 4)):
        model = sentences(kind, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        calibration = calibrate(model, loss_of(loss, **options))
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": parts, "max_steps": 2}
        sgd_options = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        trainer = build_trainer(calibration, tmp_path, texts(48, kind == TOKEN), **sizes, **sgd_options)
        trainer.train()
        weights.append(dict(model.named_parameters()))
    start = dict(sentences(kind).named_parameters())
    assert any(not torch.equal(value, weights[0][name]) for name, value in start.items())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_the_value_without_a_count_is_that_of_the_loss():
    model, loss = sentences(), loss_of("ls")
    calibration = calibrate(model.eval(), loss)
    batch = torch.stack([row["input_ids"] for row in texts(8)])
    labels = torch.stack([row["labels"] for row in texts(8)])
    expected = nn.functional.cross_entropy(model(batch).logits, labels, label_smoothing=loss.alpha)
    torch.testing.assert_close(calibration.compute_loss(model(batch), labels), expected)
    soft = nn.functional.one_hot(labels, CLASSES).float()  # the Trainer counts 8 x 4 soft labels
    torch.testing.assert_close(calibration.compute_loss(model(batch), soft, torch.tensor(8 * CLASSES)), expected)
    torch.testing.assert_close(calibration.compute_loss(model(batch), labels, torch.tensor(16)), expected / 2)


@pytest.mark.parametrize("evaluated", [True, False])
def test_losses_are_updated_between_epochs(evaluated, tmp_path, monkeypatch):
    loss = loss_of("adafocal" if evaluated else "crl", **({} if evaluated else {"num_samples": 60}))
    end_epoch_inputs, end_epoch = [], type(loss).end_epoch
    monkeypatch.setattr(
        type(loss), "end_epoch", lambda self, val=None: (end_epoch_inputs.append(val), end_epoch(self, val))
    )
    data = [{**row, "index": n} for n, row in enumerate(texts(60))]
    overrides = {"num_train_epochs": 2, "eval_strategy": "epoch" if evaluated else "no", "save_strategy": "epoch"}
    trainer = build_trainer(calibrate(sentences(), loss), tmp_path, data, texts(40), **overrides)
    trainer.train()
    assert [val is not None for val in end_epoch_inputs] == [evaluated, evaluated]
    if evaluated:
        assert len(end_epoch_inputs[0].labels) == 40
    last_checkpoint = max(tmp_path.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    from safetensors.torch import load_file

    saved_state = load_file(last_checkpoint / "model.safetensors")
    for name, value in loss.state_dict().items():
        assert torch.equal(saved_state[f"calibration_loss.{name}"], value), name


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_losses_learn_from_the_first_of_several_data_sets(strategy, tmp_path, monkeypatch):
    """Regression: with "steps" the last data set was used, for example the test set."""
    loss, sizes = loss_of("adafocal"), []
    monkeypatch.setattr(type(loss), "end_epoch", lambda _, validation=None: sizes.append(len(validation.labels)))
    overrides = {"num_train_epochs": 2, "eval_strategy": strategy, "eval_steps": 1}
    evaluated = {"val": texts(20), "test": texts(30)}
    trainer = build_trainer(calibrate(sentences(), loss), tmp_path, texts(60), evaluated, **overrides)
    trainer.evaluate(texts(40))  # not an evaluation of the training
    trainer.train()
    assert sizes == [20, 20]


def test_a_loss_that_needs_an_evaluation_warns_if_there_is_none(tmp_path):
    """Regression: training raised at the end of an epoch without an evaluation."""
    loss = loss_of("adafocal")
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    trainer = build_trainer(calibrate(sentences(), loss), tmp_path, texts(60), texts(20), num_train_epochs=2)
    with pytest.warns(UserWarning, match="adafocal.*eval_strategy"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in loss.state_dict().items())


def test_an_evaluation_ends_one_epoch_only(tmp_path, monkeypatch):
    """Regression: later epochs learned from the same predictions again."""
    loss, sizes = loss_of("adafocal"), []
    monkeypatch.setattr(type(loss), "end_epoch", lambda _, validation=None: sizes.append(len(validation.labels)))
    overrides = {"num_train_epochs": 6, "eval_strategy": "steps", "eval_steps": 3}
    build_trainer(calibrate(sentences(), loss), tmp_path, texts(60), texts(20), **overrides).train()
    assert sizes == 4 * [20]  # epochs of two steps; none of the first and fourth is followed by an evaluation


def test_a_trainer_without_the_loss_function_warns_once(tmp_path):
    """Regression: the model was trained with its own cross-entropy, silently."""
    from transformers import Trainer

    calibration = calibrate(sentences(), loss_of("mbls"))
    options = arguments(tmp_path, num_train_epochs=2)
    trainer = Trainer(calibration.model, options, train_dataset=texts(60), callbacks=[calibration])
    with pytest.warns(UserWarning, match=r"mbls.*compute_loss_func=calibration\.compute_loss") as warning_records:
        trainer.train()
    assert sum("mbls" in str(record.message) for record in warning_records) == 1


def test_token_metrics_ignore_unlabelled_tokens():
    from transformers import EvalPrediction

    calibration = calibrate(sentences(TOKEN), loss_of("ce"))
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(30, LENGTH, CLASSES)), random.integers(0, CLASSES, (30, LENGTH))
    labels[:, ::2] = -100
    result = calibration.compute_metrics(EvalPrediction(predictions=logits, label_ids=labels))
    probs = torch.as_tensor(logits).softmax(-1)[:, 1::2].reshape(-1, CLASSES)
    assert result["ece"] == metrics.ece(probs, torch.as_tensor(labels)[:, 1::2].reshape(-1))


def test_remove_restores_the_model():
    model = sentences()
    keys = model.state_dict().keys()
    calibration = calibrate(model, loss_of("fedlas_ls"))
    assert model.state_dict().keys() > keys
    with pytest.raises(ValueError, match=r"remove\(\)"):
        calibrate(model, loss_of("ce"))
    assert calibration.remove() is model
    assert model.state_dict().keys() == keys
    assert "forward" not in vars(model)
    assert not model.classifier._forward_hooks
    calibrate(model, loss_of("ce"))


def test_remove_restores_a_patched_forward():
    model, calls = sentences(), []
    original_forward = model.forward

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original_forward(*args, **kwargs)

    model.forward = patched
    calibration = calibrate(model, loss_of("ce"))
    model(torch.zeros(1, LENGTH, dtype=torch.long))
    assert len(calls) == 1
    assert calibration.remove().forward is patched


@pytest.mark.parametrize(
    ("options", "message"),
    [({"reduction": "sum"}, 'reduction="mean".*sum'), ({"ignore_index": 3}, "-100.*ignore_index")],
)
def test_unsupported_losses_raise(options, message):
    with pytest.raises(ValueError, match=message):
        calibrate(sentences(), loss_of("ce", **options))


def test_missing_labels_and_a_different_model_raise():
    model = sentences()
    calibration = calibrate(model, loss_of("ce"))
    with pytest.raises(ValueError, match=r"labels.*label_names"):
        calibration.compute_loss({"logits": torch.zeros(2, CLASSES)}, None)
    with pytest.raises(RuntimeError, match=r"model.*Trainer"):
        calibration.compute_loss({"logits": torch.zeros(2, CLASSES)}, torch.zeros(2, dtype=torch.int64))
