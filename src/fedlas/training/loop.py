"""From a recipe to predictions on disk: one plain loop for every loss.

for each epoch
    for each batch:  step                          (step.py: one line for all losses, captured on a GPU)
    validation       ─► metrics, best epoch        (strictly better accuracy; of equal ones the earliest)
    loss.end_epoch(validation)
    log.jsonl, checkpoint.pt
predictions of the last and of the best weights
"""

import math
import resource
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
from fedlas.errors import UserError, UserTypeError
from fedlas.predictions import Predictions
from fedlas.training import checkpoint
from fedlas.training.backend_flags import backend_flags, enable_cudnn_benchmark, on_stream, raise_compile_limit
from fedlas.training.build import SessionCache, select_device
from fedlas.training.callbacks import AbstractCallback, check_callbacks
from fedlas.training.distributed import (
    any_signal,
    broadcast_buffers,
    decide_on_rank_zero,
    gather_objects,
    is_rank_zero,
    process_group,
)
from fedlas.training.prediction import Source, predictions_of
from fedlas.training.progress import default_callbacks, downloads, write_board
from fedlas.training.protocols import check_parts
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import ELSEWHERE, MACHINE, RESUME, Run, RunError, locked, run_in
from fedlas.training.schedule import lr_factor
from fedlas.training.session import Session
from fedlas.training.signals import StoppedError, StopSignals
from fedlas.training.validation import halves, judged

LEARNED = ("train", "val")  # splits from which a run learns, and by which it chooses
NO_BF16 = ("DEFAULT", "NO AVX", "AVX2")  # what torch calls processors that compute bfloat16 step by step


class DivergedError(UserError, ArithmeticError):
    """A loss or gradient was not finite, or a loss enormous.

    Args:
        message: says where, and names the last good checkpoint.
        step: the first bad step, counted from 1 at the beginning of the run.
        index: positions in the training split of its batch.
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
    """Train by a recipe, and give the folder that holds everything about the run.

    Args:
        recipe: what to do.
        out: the run's folder; by default `runs/<data>-<model>-<loss>-<key>`.
        resume: continue what is there; where nothing is there, start.
        callbacks: callbacks of one's own.
        device: where to train; by default a GPU if there is one.
        data_root: where data lies; by default `$FEDLAS_DATA`, or the user's cache.
        progress: whether to show a bar; by default in a terminal.
    """
    return Engine(device=device, data_root=data_root).fit(
        recipe, out=out, resume=resume, callbacks=callbacks, progress=progress
    )


def fit_many(
    recipes: Iterable[Recipe],
    *,
    folder: str | Path = "runs",
    resume: bool = True,
    callbacks: Sequence[AbstractCallback] = (),
    progress: bool | None = None,
    **options: Any,
) -> Iterator[Run]:
    """Train many recipes in one process; a network that several share is compiled once.

    Each is trained when its run is asked for, as in `for run in fit_many(...)`; one that fails ends it.

    Args:
        recipes: what to do, one after the other; neighbours that are alike share most.
        folder: every run gets a folder in it.
        resume: continue runs that stand still.
        callbacks: callbacks of all runs.
        progress: whether to show a bar for each; by default in a terminal.
        options: device and data_root, as for `fit`.
    """
    if isinstance(recipes, Recipe):
        raise UserTypeError("fit_many takes several recipes; for a single one there is fit")
    engine = Engine(**options)
    return (
        engine.fit(recipe, out=run_in(folder, recipe).folder, resume=resume, callbacks=callbacks, progress=progress)
        for recipe in recipes
    )


class Engine:
    """Trains recipes one after the other, and keeps what the next one can use.

    Args:
        device: where to train.
        data_root: where data lies.
    """

    def __init__(self, *, device: str | torch.device | None = None, data_root: str | Path | None = None) -> None:
        self.device, self.data_root = select_device(device), data_root
        self._cache = SessionCache()
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def fit(
        self,
        recipe: Recipe,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        callbacks: Sequence[AbstractCallback] = (),
        progress: bool | None = None,
    ) -> Run:
        """Train by a recipe; see the function `fit`."""
        if not isinstance(recipe, Recipe):
            raise UserTypeError(f"fit takes a Recipe, such as fedlas.recipe_for gives, not a {type(recipe).__name__}")
        callbacks = check_callbacks(callbacks)
        run = run_in("runs", recipe) if out is None else Run(Path(out))
        with ExitStack() as stack:
            stack.enter_context(process_group(self.device))
            if decide_on_rank_zero(lambda: run.holds(recipe)):  # no lock: the folder may be read-only
                if recipe.tensorboard and is_rank_zero():
                    write_board(run)
                return run
            check_parts(recipe)  # what nobody can train leaves no folder behind; every process sees it alike
            decide_on_rank_zero(lambda: _enter(stack, run))
            if decide_on_rank_zero(lambda: _prepared(run, recipe, resume, self.device)) == "finished":
                return run
            if is_rank_zero():
                _warn(recipe, self.device)
            stack.enter_context(backend_flags(recipe, self.device))
            stack.enter_context(on_stream(self._stream))
            stack.enter_context(raise_compile_limit(recipe, self.device))
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)  # the log tells of this run
            capture = not any(one.sees_steps for one in callbacks)
            with downloads(progress) as shown:
                session = Session(
                    recipe, self.device, self.data_root, capture=capture, cache=self._cache, progress=shown
                )
                stack.callback(session.close)
                session.check()
            if session.data.resident and self.device.type == "cuda":
                enable_cudnn_benchmark()
            callbacks = [*callbacks, *(default_callbacks(recipe.tensorboard, progress) if is_rank_zero() else [])]
            _Training(run, session, callbacks, resume=resume).go()
        return run


def _warn(recipe: Recipe, device: torch.device) -> None:
    """Return what is allowed and hardly meant."""
    late = [str(epoch) for epoch in recipe.milestones if epoch >= recipe.epochs]
    if late:
        never = "" if len(late) < len(recipe.milestones) else ", so the learning rate never drops"
        warnings.warn(
            f"milestones {', '.join(late)} lie beyond the end of {recipe.epochs} epochs{never}; "
            "set milestones=... or another schedule",
            stacklevel=4,
        )
    if recipe.precision == "fp16" and device.type == "cpu":
        warnings.warn("fp16 is very slow on a CPU; take precision=fp32 there", stacklevel=4)
    if recipe.precision == "bf16" and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in NO_BF16:
        warnings.warn("bf16 may be ten times slower than fp32 on this CPU; take precision=fp32 here", stacklevel=4)


def _enter(stack: ExitStack, run: Run) -> None:
    stack.enter_context(locked(run.folder))


def _prepared(run: Run, recipe: Recipe, resume: bool, device: torch.device) -> str:
    return run.prepare(recipe, resume=resume, device=device.type, processes=ranks.count())


class _Training:
    """One run, from where it stands to its end."""

    def __init__(self, run: Run, session: Session, callbacks: Sequence[AbstractCallback], *, resume: bool) -> None:
        self.run, self.session, self.recipe, self.callbacks = run, session, session.recipe, callbacks
        self.to_go_on = "start the same command again to go on" if resume else f"continue with {RESUME}"
        self.writer = checkpoint.Writer()
        self.signals = StopSignals(patient=ranks.count() > 1)
        self.validation_source = session.evaluation("val")
        if self.recipe.feedback == "train":
            self.feedback_source = session.feedback()

    def go(self) -> None:
        """Train, then predict."""
        try:
            with self.signals.listening():
                decide_on_rank_zero(self._know_data)
                self._resume()
                for callback in self.callbacks:
                    callback.on_train_start(self.run, self.session, self.session.epoch)
                while self.session.epoch < self.recipe.epochs:
                    self._epoch()
                self.writer.wait()
                self._predict_everything()
            self._stop(self.signals.caught, "at its end")  # who trains many runs is to begin no other
        finally:
            self._close()

    def _close(self) -> None:
        """Close callbacks and checkpoint writer, whatever fails; then raise the first error."""
        closing: list[Callable[[], object]] = [partial(one.on_train_end, self.run) for one in self.callbacks]
        closing.append(self.writer.close)
        if is_rank_zero() and self.run.finished_for(self.recipe):  # also if a signal came with the last file
            closing.append(partial(self.run.checkpoint_before.unlink, missing_ok=True))
        errors: list[Exception] = []
        for close in closing:
            try:
                close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _epoch(self) -> None:
        began, epoch, start = time.perf_counter(), self.session.epoch, self.session.position
        loss = self.session.loss.train()
        self.session.net.train()
        step = epoch * self.session.steps_per_epoch + start
        for inputs in self.session.batches(epoch, start):
            self.session.execute(*inputs)  # the one line for all losses
            step += 1
            self._after_step(epoch, step)
        broadcast_buffers(self.session.net)
        trained = self.session.step.metrics.read()
        self._stop_if_diverged()
        seconds = time.perf_counter() - began
        validation = self._predict(self.validation_source, "val")
        if self.recipe.halve_validation:
            validation = halves(validation)[1 if self.recipe.train_on_v1 else 0]
        loss.end_epoch(self._feedback(validation))
        record = self._record(epoch, trained, validation)
        images = (self.session.steps_per_epoch - start) * self.recipe.batch_size
        record[MACHINE] = {
            "seconds": time.perf_counter() - began,
            "images_per_second": min(images, self.session.samples) / max(seconds, 1e-9),
            "memory_mib": _memory(self.session.device),
            "continued_at_step": start or None,
        }
        self.session.step.metrics.reset()
        if is_rank_zero():
            self.run.append_log(record)
        for callback in self.callbacks:
            callback.on_epoch_end(record)
        self.session.epoch, self.session.position = epoch + 1, 0
        number = any_signal(self.signals.caught, 0, self.session.device)
        if number is not None or epoch + 1 == self.recipe.epochs or self._is_due(step):
            self._save()
        self._stop(number, f"after epoch {epoch + 1} of {self.recipe.epochs}")

    def _feedback(self, validation: Predictions) -> Predictions | None:
        """Return the predictions that the loss learns from; never those of the test split, which may select epochs."""
        if self.session.validates_on_test:
            return None
        if self.recipe.feedback == "validation":
            return validation
        return self._predict(self.feedback_source, "train")

    def _after_step(self, epoch: int, step: int) -> None:
        """Do what happens between two steps; none of it waits for a GPU unless something is to be written."""
        for callback in self.callbacks:
            callback.on_step_end(self.session, step)
            callback.on_step_dispatched(step)
        if self.session.device.type == "cpu":
            self._stop_if_diverged()
        position = self.session.position = step - epoch * self.session.steps_per_epoch
        number = any_signal(self.signals.caught, step, self.session.device)
        every = self.recipe.checkpoint_every
        if number is not None or (every and step % every == 0 and position < self.session.steps_per_epoch):
            self._stop_if_diverged()
            self._save()
        self._stop(number, f"after step {position} of {self.session.steps_per_epoch} in epoch {epoch + 1}")

    def _is_due(self, step: int) -> bool:
        """Return whether an epoch that ends is to have a checkpoint; unless asked to, nobody waits for a slow disk.

        Several processes have to agree, so there every epoch has one.
        """
        if self.recipe.checkpoint_every:
            return step % self.recipe.checkpoint_every == 0
        return self.writer.idle or ranks.count() > 1

    def _stop(self, number: int | None, where: str) -> None:
        """Stop, if a signal asked for it; what there is to go on from was saved before."""
        if number is not None:
            self.writer.wait()
            raise StoppedError(f"stopped {where}; {self.to_go_on} ({self.run.folder})", number)

    def _record(self, epoch: int, trained: dict[str, float], validation: Predictions) -> dict[str, Any]:
        """Make the line of the log, and remember the weights of the best epoch."""
        steps = self.session.steps_per_epoch
        last = (epoch + 1) * steps - 1
        found = judged(validation)
        self.session.update_best(found["accuracy"])
        return {
            "epoch": epoch + 1,
            "steps": last + 1,
            "lr": self.recipe.lr * lr_factor(self.recipe, last, steps),
            "train": _finite(trained),
            "val": found,
            "gate": self.session.step.gate.read(),
            "best_epoch": self.session.best_epoch,
        } | ({"loss_state": state} if (state := self.session.loss.epoch_state()) else {})

    def _save(self) -> None:
        """Write a checkpoint."""
        state = self.session.state_dict()
        if is_rank_zero():
            self.writer.save(self.run.checkpoint, state)

    def _resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        if not decide_on_rank_zero(lambda: checkpoint.last_good(self.run)):
            decide_on_rank_zero(lambda: self.run.keep_log(0))
            return
        path = self.run.checkpoint
        saved = checkpoint.load(path)
        checkpoint.check_recipe(saved, path, self.recipe)
        self.session.load_state_dict(saved, path)
        checkpoint.check_stand(saved, path, self.recipe.epochs, self.session.steps_per_epoch)
        decide_on_rank_zero(lambda: self.run.keep_log(self.session.epoch))
        try:
            self.session.load_random_state(saved["random"])
        except checkpoint.UNFIT as error:
            raise checkpoint.refused(path, f"its generators of random numbers: {error}") from error

    def _know_data(self) -> None:
        """Write down on what a run learns; one that continues has to find what it learned from before."""
        found = {name: self.session.data.split(name).checksum() for name in LEARNED}
        known = self.run.environment.get("data", {}) if self.run.checkpoint.exists() else {}
        others = [name for name in LEARNED if known.get(name, found[name]) != found[name]]
        if others:
            raise RunError(
                f"{self.run.folder} learned from other data: images or labels of {' and '.join(others)} have changed; "
                f"put back what was there, or {ELSEWHERE}"
            )
        self.run.note({"data": known | found})

    def _stop_if_diverged(self) -> None:
        step = self.session.step.bad_step()
        if step is None:
            return
        epoch, position = divmod(step, self.session.steps_per_epoch)
        index = self.session.batches_of_places(epoch)[position].tolist()
        self.writer.wait()
        kept = str(self.run.checkpoint) if self.run.checkpoint.exists() else None
        if is_rank_zero():
            about = {"step": step + 1, "index": index, "checkpoint": kept}
            self.run.append_log({"epoch": epoch + 1, "diverged": about})
        place = f"step {step + 1} (epoch {epoch + 1}, batch {position + 1})"
        where = f"the loss or its gradient is not finite, or enormous, in {place}"
        samples = ", ".join(map(str, index[:8])) + (f" and {len(index) - 8} more" if len(index) > 8 else "")
        last = f"the last good checkpoint is {kept}" if kept else "there is no checkpoint before it"
        raise DivergedError(
            f"{where}; samples of that batch: {samples} (all in {self.run.log_file}); {last}; "
            "a smaller lr may help, or clip",
            step + 1,
            index,
        )

    def _predict(self, source: Source, split: str, *, labelled: bool = True) -> Predictions:
        names = self.session.data.class_names
        return predictions_of(
            self.session.net, source, self.recipe, device=self.session.device, split=split, class_names=names,
            labelled=labelled,
        )  # fmt: skip

    def _predict_everything(self) -> None:
        """Write the predictions of the last weights and of the best, and on what data; foreign data comes last."""
        if is_rank_zero():
            looked_at = dict.fromkeys(name.partition("-")[0] for name in self.recipe.splits)
            foreign = {data.name: data for data in map(self.session.ood_data, self.recipe.ood)}
            sums = dict(self.run.environment["data"])
            sums |= {name: self.session.data.split(name).checksum() for name in looked_at if name not in LEARNED}
            sums |= {f"ood-{name}": data.split("test").checksum() for name, data in foreign.items()}
            self.run.note({"data": sums, "titles": {name: data.title for name, data in foreign.items()}})
        states = {"last": {name: value.clone() for name, value in self.session.net.model.state_dict().items()}}
        states["best"] = self.session.best
        self._predict_all(states, {name: self.session.evaluation(name) for name in self.recipe.splits})
        sources = {f"ood-{name}": self.session.ood_source(name) for name in self.recipe.ood}
        self._predict_all(states, sources, labelled=False)
        gather_objects(0)  # nobody leaves before the files are there

    def _predict_all(
        self, states: dict[str, dict[str, Tensor]], sources: dict[str, Source], *, labelled: bool = True
    ) -> None:
        for state, weights in states.items() if sources else ():
            checkpoint.restore_module(self.session.net.model, weights)
            for split, source in sources.items():
                made = self._predict(source, split, labelled=labelled)
                if is_rank_zero():
                    made.save(self.run.predictions_file(f"{state}-{split}"))
            self._stop(any_signal(self.signals.caught, 0, self.session.device), "after training")


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _memory(device: torch.device) -> float:
    """Return the most memory that was used: of the device in this run, or of this process in its life."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
