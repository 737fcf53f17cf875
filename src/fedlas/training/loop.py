"""Training loop: from a recipe to predictions on disk.

for each epoch
    for each batch:  step                          (step.py: the same for all losses, captured on a GPU)
    validation       ─► metrics, best epoch        (highest accuracy; the earliest epoch if several are equal)
    loss.end_epoch(validation)
    log.jsonl, checkpoint.pt
predictions of the last and of the best weights
"""

import logging
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlas import ranks
from fedlas.errors import UserError, UserTypeError, short_list
from fedlas.io import write_predictions
from fedlas.predictions import Predictions
from fedlas.training import checkpoint
from fedlas.training.backend_flags import backend_flags, enable_cudnn_benchmark, on_training_stream, raise_compile_limit
from fedlas.training.build import check_parts, select_device
from fedlas.training.callbacks import AbstractCallback, check_callbacks
from fedlas.training.distributed import any_signal, broadcast_buffers, decide_on_rank_zero, is_rank_zero, process_group
from fedlas.training.epoch_metrics import finite_or_none
from fedlas.training.prediction import Source, predictions_of
from fedlas.training.progress import default_callbacks, downloads, write_board
from fedlas.training.recipe import OFFICIAL_SUFFIX, Recipe
from fedlas.training.run_folder import ELSEWHERE, MACHINE, RESUME, Run, RunError, locked, run_in
from fedlas.training.schedule import lr_factor
from fedlas.training.session import Session
from fedlas.training.signals import StoppedError, StopSignals
from fedlas.training.validation import halves, validation_metrics

logger = logging.getLogger(__name__)

TRAINING_SPLITS = ("train", "val")  # splits used for training and model selection
CPUS_WITHOUT_BF16 = ("DEFAULT", "NO AVX", "AVX2")  # capabilities without bfloat16 instructions


class DivergedError(UserError, ArithmeticError):
    """A loss or gradient was not finite, or a loss was too large.

    Args:
        message: location of the divergence and the last good checkpoint.
        step: the first diverged step, counted from 1 at the start of the run.
        index: positions of the samples of its batch in the training split.
    """

    def __init__(self, message: str, step: int, index: list[int]) -> None:
        super().__init__(message)
        self.step, self.index = step, index


def fit(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[AbstractCallback] = (),
    device: str | torch.device | None = None,
    data_root: str | Path | None = None,
    progress: bool | None = None,
) -> Run:
    """Train a recipe and return its run folder.

    Args:
        recipe: the recipe.
        out: the run folder; by default `runs/<data>-<model>-<loss>-<key>`.
        resume: continue an unfinished run in the folder; start a new run if there is none.
        callbacks: user-defined callbacks.
        device: training device; by default a GPU if available.
        data_root: folder of the data sets; by default `$FEDLAS_DATA`, or the user's cache.
        progress: whether to show a progress bar; by default in a terminal.
    """
    if not isinstance(recipe, Recipe):
        raise UserTypeError(f"fit takes a Recipe, such as fedlas.recipe_for returns, not a {type(recipe).__name__}")
    chosen = select_device(device)
    callbacks = check_callbacks(callbacks)
    run = run_in("runs", recipe) if out is None else Run(Path(out))
    with ExitStack() as stack:
        stack.enter_context(process_group(chosen))
        if decide_on_rank_zero(lambda: run.holds_finished_run(recipe)):  # no lock: the folder may be read-only
            _report_finished_run(run, recipe)
            return run
        check_parts(recipe)  # before a folder is created; every rank raises alike
        decide_on_rank_zero(lambda: stack.enter_context(locked(run.folder)))
        if not decide_on_rank_zero(partial(run.check, recipe, resume=resume)):  # finished, also by another process
            decide_on_rank_zero(partial(run.update_evaluated, recipe))
            _report_finished_run(run, recipe)
            return run
        if is_rank_zero():
            _warn_about_recipe(recipe, chosen)
        stack.enter_context(backend_flags(recipe, chosen))
        stack.enter_context(on_training_stream(chosen))
        stack.enter_context(raise_compile_limit(recipe, chosen))
        if chosen.type == "cuda":
            torch.cuda.reset_peak_memory_stats(chosen)  # the log reports the peak of this run
        capture = not any(callback.sees_steps for callback in callbacks)
        with downloads(progress) as show_download:
            session = Session(recipe, chosen, data_root, capture=capture, progress=show_download)
            stack.callback(session.close)
            session.check()
        decide_on_rank_zero(partial(run.begin, recipe, chosen, ranks.count()))
        if session.data.resident and chosen.type == "cuda":
            enable_cudnn_benchmark()
        callbacks = [*callbacks, *(default_callbacks(recipe.tensorboard, progress) if is_rank_zero() else [])]
        _Training(run, session, callbacks, resume=resume).train()
    return run


def fit_many(
    recipes: Iterable[Recipe],
    *,
    folder: str | Path = "runs",
    resume: bool = True,
    callbacks: Sequence[AbstractCallback] = (),
    device: str | torch.device | None = None,
    data_root: str | Path | None = None,
    progress: bool | None = None,
) -> Iterator[Run]:
    """Train many recipes in one process, which starts and loads compiled code only once.

    Each recipe is trained when the iterator reaches it, as in `for run in fit_many(...)`; the first error ends the
    loop.

    Args:
        recipes: the recipes, in order.
        folder: parent of the run folders.
        resume: continue unfinished runs.
        callbacks: callbacks of all runs.
        device: training device; by default a GPU if available.
        data_root: folder of the data sets; by default `$FEDLAS_DATA`, or the user's cache.
        progress: whether to show a progress bar for each run; by default in a terminal.
    """
    if isinstance(recipes, Recipe):
        raise UserTypeError("fit_many takes several recipes; use fit for a single recipe")
    shared: dict[str, Any] = {
        "resume": resume,
        "callbacks": callbacks,
        "device": select_device(device),
        "data_root": data_root,
        "progress": progress,
    }
    return (fit(recipe, out=run_in(folder, recipe).folder, **shared) for recipe in recipes)


def _report_finished_run(run: Run, recipe: Recipe) -> None:
    """Log that a run is finished, and write the TensorBoard file if the recipe asks for it."""
    if not is_rank_zero():
        return
    if recipe.tensorboard:
        write_board(run)
    logger.info("%s is already finished and is not trained again", run.folder)


def _warn_about_recipe(recipe: Recipe, device: torch.device) -> None:
    """Warn about settings that are valid but probably unintended."""
    late = [str(epoch) for epoch in recipe.milestones if epoch >= recipe.epochs]
    if late:
        never = "" if len(late) < len(recipe.milestones) else ", so the learning rate never drops"
        warnings.warn(
            f"milestones {', '.join(late)} are beyond the last of {recipe.epochs} epochs{never}; "
            "set milestones=... or another schedule",
            stacklevel=4,
        )
    if device.type != "cpu":
        return
    if recipe.precision == "fp16":
        warnings.warn("fp16 is very slow on a CPU; use precision=fp32", stacklevel=4)
    if recipe.precision == "bf16" and torch.backends.cpu.get_cpu_capability() in CPUS_WITHOUT_BF16:
        warnings.warn("bf16 may be ten times slower than fp32 on this CPU; use precision=fp32", stacklevel=4)


class _Training:
    """Trains a session to its end, and writes log, checkpoints and predictions."""

    def __init__(self, run: Run, session: Session, callbacks: Sequence[AbstractCallback], *, resume: bool) -> None:
        self.run, self.session, self.recipe, self.callbacks = run, session, session.recipe, callbacks
        self.resume_hint = "run the same command again to continue" if resume else f"continue with {RESUME}"
        self.writer = checkpoint.Writer()
        self.signals = StopSignals(ignore_repeats=ranks.count() > 1)
        self.validation_source = session.evaluation_source("val")
        if self.recipe.feedback == "train":
            self.feedback_source = session.feedback_source()

    def train(self) -> None:
        """Train, then write the predictions."""
        try:
            with self.signals.listening():
                decide_on_rank_zero(self._check_data)
                self._resume()
                for callback in self.callbacks:
                    callback.on_train_start(self.run, self.session, self.session.epoch)
                while self.session.epoch < self.recipe.epochs:
                    self._epoch()
                self.writer.wait()
                self._write_predictions()
            self._stop(self._signal(), "at its end")  # fit_many must not start another run
        except BaseException as error:
            for other in self._close():
                error.add_note(f"while closing: {other!r}")
            raise
        errors = self._close()
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"while closing: {other!r}")
            raise errors[0]

    def _close(self) -> list[Exception]:
        """Close all callbacks and the checkpoint writer; return the errors."""
        closing: list[Callable[[], object]] = [partial(callback.on_train_end, self.run) for callback in self.callbacks]
        closing += [self.writer.close, self._remove_earlier_checkpoint]
        errors: list[Exception] = []
        for close in closing:
            try:
                close()
            except Exception as error:
                errors.append(error)
        return errors

    def _remove_earlier_checkpoint(self) -> None:
        """Remove the checkpoint before the last one of a finished run."""
        if is_rank_zero() and self.run.finished_for(self.recipe):  # also if a signal came with the last file
            self.run.checkpoint_before.unlink(missing_ok=True)

    def _epoch(self) -> None:
        """Train the rest of the current epoch, validate, and write its record and perhaps a checkpoint."""
        start_time, epoch, first_step = time.perf_counter(), self.session.epoch, self.session.position
        loss = self.session.loss.train()
        self.session.net.train()
        for inputs in self.session.batches(epoch, first_step):
            self.session.runner.run(*inputs)
            self.session.position += 1
            self._after_step()
        broadcast_buffers(self.session.net)
        train_metrics = self.session.step.metrics.read()
        self._stop_if_diverged()
        seconds = time.perf_counter() - start_time
        validation = self._predict(self.validation_source, "val")
        if self.recipe.halve_validation:
            validation = halves(validation)[1 if self.recipe.train_on_v1 else 0]
        loss.end_epoch(self._feedback(validation))
        val_metrics = validation_metrics(validation)
        self.session.update_best(val_metrics["accuracy"])
        record = self._record(train_metrics, val_metrics)
        images = (self.session.steps_per_epoch - first_step) * self.recipe.batch_size
        record[MACHINE] = {
            "seconds": time.perf_counter() - start_time,
            "images_per_second": min(images, self.session.num_samples) / max(seconds, 1e-9),
            "memory_mib": _memory(self.session.device),
            "continued_at_step": first_step or None,
        }
        self.session.step.metrics.reset()
        decide_on_rank_zero(lambda: self.run.append_log(record))
        for callback in self.callbacks:
            callback.on_epoch_end(record)
        self.session.epoch, self.session.position = epoch + 1, 0
        self._save_or_stop(
            self._signal(),
            due=epoch + 1 == self.recipe.epochs or self._is_due(record["steps"]),
            where=f"after epoch {epoch + 1} of {self.recipe.epochs}",
        )

    def _feedback(self, validation: Predictions) -> Predictions | None:
        """Return the predictions that the loss learns from; never those of the test split."""
        if self.session.validates_on_test:
            return None
        if self.recipe.feedback == "validation" or not self.session.loss.needs_validation:
            return validation
        return self._predict(self.feedback_source, "train")

    def _after_step(self) -> None:
        """Call callbacks, handle signals and save checkpoints; wait for the GPU only to write a checkpoint."""
        epoch, position, steps = self.session.epoch, self.session.position, self.session.steps_per_epoch
        step = epoch * steps + position
        for callback in self.callbacks:
            callback.on_step_dispatched(step)
            if callback.sees_steps:
                callback.on_step_end(self.session, step)
        if self.session.device.type == "cpu":
            self._stop_if_diverged()
        every = self.recipe.checkpoint_every
        self._save_or_stop(
            self._signal(step),
            due=every > 0 and step % every == 0 and position < steps,
            where=f"after step {position} of {steps} in epoch {epoch + 1}",
        )

    def _is_due(self, step: int) -> bool:
        """Return whether to save a checkpoint at the end of this epoch.

        Without `checkpoint_every`, an epoch skips its checkpoint while the previous one is being written. Several
        processes have to agree, so they save one in every epoch.
        """
        if self.recipe.checkpoint_every:
            return step % self.recipe.checkpoint_every == 0
        return self.writer.idle or ranks.count() > 1

    def _signal(self, step: int = 0) -> int | None:
        """Return the signal that any rank caught, if any."""
        return any_signal(self.signals.caught, step, self.session.device)

    def _save_or_stop(self, signal_number: int | None, *, due: bool, where: str) -> None:
        """Save a checkpoint if it is due or a signal was caught; after a signal, stop."""
        if due or signal_number is not None:
            self._stop_if_diverged()
            state = self.session.state_dict()
            decide_on_rank_zero(lambda: self.writer.save(self.run.checkpoint, state))
        self._stop(signal_number, where)

    def _stop(self, signal_number: int | None, where: str) -> None:
        """Raise StoppedError if a signal was caught; the checkpoint was saved before."""
        if signal_number is not None:
            self.writer.wait()
            raise StoppedError(f"stopped {where}; {self.resume_hint} ({self.run.folder})", signal_number)

    def _record(self, train_metrics: dict[str, float], val_metrics: dict[str, float]) -> dict[str, Any]:
        """Return the log record of the current epoch."""
        number, steps_per_epoch = self.session.epoch + 1, self.session.steps_per_epoch
        steps = number * steps_per_epoch
        record: dict[str, Any] = {
            "epoch": number,
            "steps": steps,
            "lr": self.recipe.lr * lr_factor(self.recipe, steps - 1, steps_per_epoch),
            "train": {name: finite_or_none(value) for name, value in train_metrics.items()},
            "val": val_metrics,
            "gate": self.session.step.gate.end_epoch(),
            "best_epoch": self.session.best_epoch,
        }
        loss_state = self.session.loss.epoch_state()
        return record | {"loss_state": loss_state} if loss_state else record

    def _resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        if decide_on_rank_zero(lambda: checkpoint.recover_checkpoint(self.run)):
            self.session.load_state_dict(checkpoint.load_for(self.run, self.recipe), self.run.checkpoint)
        decide_on_rank_zero(lambda: self.run.truncate_log(self.session.epoch))

    def _check_data(self) -> None:
        """Record the checksums of the data; raise if a resumed run was trained on other data."""
        checksums = {name: self.session.data.split(name).checksum() for name in TRAINING_SPLITS}
        recorded = self.run.environment.get("data", {}) if self.run.checkpoint.exists() else {}
        changed = [name for name in TRAINING_SPLITS if recorded.get(name, checksums[name]) != checksums[name]]
        if changed:
            raise RunError(
                f"{self.run.folder} was trained on other data: images or labels of {' and '.join(changed)} changed; "
                f"restore the original data, or {ELSEWHERE}"
            )
        self.run.update_environment({"data": recorded | checksums})

    def _stop_if_diverged(self) -> None:
        step = self.session.step.bad_step()
        if step is None:
            return
        epoch, position = divmod(step, self.session.steps_per_epoch)
        index = self.session.batch_indices(epoch)[position].tolist()
        self.writer.wait()
        saved = str(self.run.checkpoint) if self.run.checkpoint.exists() else None
        details = {"step": step + 1, "index": index, "checkpoint": saved}
        decide_on_rank_zero(lambda: self.run.append_log({"epoch": epoch + 1, "diverged": details}))
        location = f"step {step + 1} (epoch {epoch + 1}, batch {position + 1})"
        cause = f"the loss or its gradient is not finite, or too large, in {location}"
        last_checkpoint = f"the last good checkpoint is {saved}" if saved else "there is no earlier checkpoint"
        raise DivergedError(
            f"{cause}; samples of that batch: {short_list(map(str, index), 8)} (all in {self.run.log_file}); "
            f"{last_checkpoint}; a smaller lr may help, or clip",
            step + 1,
            index,
        )

    def _predict(self, source: Source, split: str, *, labelled: bool = True) -> Predictions:
        names = self.session.data.class_names
        return predictions_of(
            self.session.net, source, self.recipe, device=self.session.device, split=split, class_names=names,
            labelled=labelled,
        )  # fmt: skip

    def _write_predictions(self) -> None:
        """Write the predictions of the last and the best weights, OOD data last, and the checksums of all data."""
        decide_on_rank_zero(self._record_checksums)
        states = {"last": {name: value.clone() for name, value in self.session.net.model.state_dict().items()}}
        states["best"] = self.session.best
        self._predict_all(states, {name: self.session.evaluation_source(name) for name in self.recipe.splits})
        sources = {f"ood-{name}": self.session.ood_source(name) for name in self.recipe.ood}
        self._predict_all(states, sources, labelled=False)

    def _record_checksums(self) -> None:
        """Record the checksums of all data that is predicted."""
        ood = {data.name: data for data in map(self.session.ood_data, self.recipe.ood)}
        checksums = dict(self.run.environment["data"])
        for name in dict.fromkeys(split.removesuffix(OFFICIAL_SUFFIX) for split in self.recipe.splits):
            if name not in TRAINING_SPLITS:  # recorded before the training
                checksums[name] = self.session.data.split(name).checksum()
        checksums |= {f"ood-{name}": data.split("test").checksum() for name, data in ood.items()}
        self.run.update_environment({"data": checksums, "titles": {name: data.title for name, data in ood.items()}})

    def _predict_all(
        self, states: dict[str, dict[str, Tensor]], sources: dict[str, Source], *, labelled: bool = True
    ) -> None:
        for state, weights in states.items():
            checkpoint.restore_module(self.session.net.model, weights)
            for split, source in sources.items():
                predictions = self._predict(source, split, labelled=labelled)
                file = self.run.predictions_file(f"{state}-{split}")
                decide_on_rank_zero(partial(write_predictions, predictions, file))
            self._stop(self._signal(), "after training")


def _memory(device: torch.device) -> float:
    """Return the peak memory in MiB: of the GPU during this run, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
