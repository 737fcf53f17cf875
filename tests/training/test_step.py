"""The training step against a plain torch loop; non-finite values freeze the weights."""

import copy
import gc
import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from runs_of import assert_same, short
from torch import nn

from fedlas.training import compilation
from fedlas.training.capture import without_collector
from fedlas.training.compilation import CompiledCall
from fedlas.training.mixup import Mixer, _rectangle
from fedlas.training.optimizer import build_optimizer
from fedlas.training.precision import GradientScaler
from fedlas.training.recipe import Recipe
from fedlas.training.run_folder import RunError
from fedlas.training.schedule import lr_factor, lr_table, row_of
from fedlas.training.session import Session

CPU = torch.device("cpu")
PLAIN = Recipe(data="digits", model="small_cnn", loss="ce")


def steps(session: Session, count: int, epoch: int = 0) -> None:
    session.net.train()
    for _, inputs in zip(range(count), session.batches(epoch), strict=False):
        session.runner.run(*inputs)


@pytest.mark.parametrize("changes", [{}, {"nesterov": False, "clip": None}, {"optimizer": "adamw", "lr": 0.003}])
@pytest.mark.parametrize("loss", ["ce", "fedlas_ls"])
def test_the_step_equals_a_plain_torch_loop(loss, changes):
    recipe = short(loss, **changes)
    session, reference = Session(recipe, CPU), Session(recipe, CPU)
    steps(session, 5)

    net, criterion = reference.net, reference.loss
    parameters = [*net.parameters(), *criterion.parameters()]
    if recipe.optimizer == "sgd":
        optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9, nesterov=recipe.nesterov, weight_decay=5e-4)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1.0, weight_decay=5e-4)
    reference.train_source.set_epoch(0)
    for number, (images, labels, index) in enumerate(reference.train_source.batches(50)):
        if number == 5:
            break
        optimizer.param_groups[0]["lr"] = recipe.lr * lr_factor(recipe, number, 7)
        optimizer.zero_grad()
        logits, features = net(images)
        criterion(logits, labels, features, index).backward()
        if recipe.clip:
            nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)  # not the gate's: as in the official code
        optimizer.step()
    for parameter, expected in zip([*session.net.parameters(), *session.loss.parameters()], parameters, strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "changes", [{"loss": "ls"}, {"loss": "mbls", "loss_options": {"reduction": "sum"}, "lr": 1e-4, "clip": None}]
)
def test_gradient_accumulation_equals_the_whole_batch(changes):
    """Regression: the sum of each part was scaled by its fraction of the batch, a fifth of the correct value."""
    recipe = short(model_options={"norm": "group"}, **changes)
    full_batch, accumulated = Session(recipe, CPU), Session(recipe.replace(accumulate=5), CPU)
    steps(full_batch, 7)
    steps(accumulated, 7)  # the last batch of 30 too
    for parameter, expected in zip(full_batch.net.parameters(), accumulated.net.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-3, atol=1e-5)
    assert full_batch.step.metrics.read() == pytest.approx(accumulated.step.metrics.read(), rel=1e-4)


def test_the_gate_can_have_its_own_learning_rate():
    recipe = short("fedlas_ls", gate_lr_factor=0.0, gate_weight_decay=0.0)
    session = Session(recipe, CPU)
    gate = [p.clone() for p in session.loss.parameters()]
    steps(session, 3)
    assert all(torch.equal(p, q) for p, q in zip(gate, session.loss.parameters(), strict=True))
    rates = session.step.rates
    assert [float(group) for group in rates.groups] == [pytest.approx(recipe.lr * lr_factor(recipe, 2, 7)), 0.0]


def test_clipping_may_include_the_gate():
    for clip_loss in (False, True):
        session = Session(short("fedlas_ls", clip=1e-6, clip_loss=clip_loss), CPU)
        steps(session, 1)
        gate = torch.cat([p.grad.flatten() for p in session.loss.parameters()]).norm()
        net = torch.cat([p.grad.flatten() for p in session.net.parameters()]).norm()
        assert net <= 1.01e-6
        assert (gate <= 1.01e-6) == clip_loss


def nan_images(session: Session) -> Callable[[], object]:
    """Make all images NaN, and return a function that undoes that."""
    scale, shift = session.train_source._constants
    session.train_source._constants = (scale * math.nan, shift)
    return lambda: setattr(session.train_source, "_constants", (scale, shift))


def nan_gate_gradients(session: Session) -> Callable[[], object]:
    """Make gradients NaN that clipping does not consider, and return a function that undoes that."""
    return next(session.loss.parameters()).register_hook(lambda gradient: gradient * math.nan).remove


@pytest.mark.parametrize("spoil", [nan_images, nan_gate_gradients])
def test_a_bad_step_is_recorded_and_freezes_the_weights(spoil):
    session = Session(short("fedlas_ls"), CPU)

    def weights_and_momentum():
        return [*session.net.parameters(), *session.loss.parameters()], session.state_dict()["optimizer"]

    steps(session, 2)
    assert session.step.bad_step() is None
    before = copy.deepcopy(weights_and_momentum())
    restore = spoil(session)
    steps(session, 2)
    restore()
    steps(session, 3)
    assert session.step.bad_step() == 2  # the third
    assert_same(before, weights_and_momentum())


def test_gradients_that_stay_bad_in_float16_are_not_an_overflow():
    session = Session(short("ce", precision="fp16", epochs=30, batch_size=2, data_options={"train_samples": 4}), CPU)
    next(session.net.parameters()).register_hook(lambda gradient: gradient * math.nan)
    for epoch in range(10):
        steps(session, 2, epoch)
    # The scale falls from 2^16 to 1 in as many steps, and the next one is of no use.
    assert float(session.step.scaler.value) <= 1
    assert session.step.bad_step() == 16


def test_the_loss_scale_falls_after_an_overflow_and_grows_after_many_good_steps():
    scaler = GradientScaler("fp16", CPU)
    scaler.update(torch.tensor(True))
    assert float(scaler.value) == 32768
    for _ in range(2000):
        scaler.update(torch.tensor(False))
    assert float(scaler.value) == 65536
    assert int(scaler.good_steps) == 0
    bf16_scaler = GradientScaler("bf16", CPU)
    bf16_scaler.update(torch.tensor(True))
    assert float(bf16_scaler.value) == 1


def test_an_overflow_in_float16_skips_one_step():
    session = Session(short("ce", precision="fp16", data_options={"train_samples": 100}), CPU)
    session.step.scaler.value.fill_(1e30)
    before = [p.clone() for p in session.net.parameters()]
    steps(session, 1)
    assert session.step.bad_step() is None
    assert float(session.step.scaler.value) == pytest.approx(5e29)
    assert all(torch.equal(p, q) for p, q in zip(before, session.net.parameters(), strict=True))


def test_schedules_equal_those_of_torch():
    recipe = PLAIN.replace(epochs=10, schedule="multi_step", milestones=(3, 6), lr=0.5)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    expected = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6], 0.1)
    for epoch in range(10):
        assert lr_factor(recipe, 4 * epoch, 4) * 0.5 == pytest.approx(optimizer.param_groups[0]["lr"])
        assert lr_factor(recipe, 4 * epoch + 3, 4) * 0.5 == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        expected.step()


def test_schedules_have_the_expected_shapes():
    def factors(**changes):
        return (lr_table(PLAIN.replace(epochs=10, lr=1.0, **changes), 10)).tolist()

    assert factors() == [1.0] * 100
    warmup = factors(warmup=1.0)
    assert warmup[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    cosine = factors(schedule="cosine", warmup=1.0)
    assert cosine[10] == pytest.approx(1)
    assert cosine[55] == pytest.approx(0.5, abs=0.01)
    assert 0 < cosine[-1] < 0.001
    for shape in ("one_cycle", "triangle"):
        cycle = factors(schedule=shape, peak_at=0.3, start_factor=0.04)
        assert cycle[0] == pytest.approx(0.04)
        assert max(cycle) == pytest.approx(cycle[30]) == pytest.approx(1)
        assert cycle[-1] < 0.02
        assert cycle[:31] == sorted(cycle[:31])
        assert cycle[30:] == sorted(cycle[30:], reverse=True)


def test_learning_rates_follow_a_step_counter_on_the_device():
    table = lr_table(PLAIN.replace(epochs=2, schedule="cosine"), 5)
    assert torch.equal(row_of(table, torch.tensor(3)), table[3])
    assert torch.equal(row_of(table, torch.tensor(99)), table[-1])
    net = nn.Linear(2, 2)
    optimizer, rates = build_optimizer(PLAIN, net, nn.Linear(3, 1), table, CPU)
    rates.set(torch.tensor(4))
    assert optimizer.param_groups[0]["lr"] is rates.groups[0]
    assert float(optimizer.param_groups[1]["lr"]) == float(table[4])


def test_decay_all_false_decays_only_matrices():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    optimizer, _ = build_optimizer(PLAIN.replace(decay_all=False), net, nn.Identity(), torch.ones(1), CPU)
    decays = {p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {4: 5e-4, 1: 0.0}


def test_mixup_and_cutmix_mix_neighbours():
    images, labels = torch.rand(4, 1, 8, 8), torch.arange(4)
    for recipe in (PLAIN.replace(mixup=1.0), PLAIN.replace(cutmix=1.0)):
        mixer = Mixer(recipe, 50, 10, CPU)
        for step in range(20):
            mixed, soft_labels = mixer(images, labels, torch.tensor(step))
            weight = soft_labels[torch.arange(4), labels]
            assert torch.allclose(soft_labels.sum(1), torch.ones(4))
            assert torch.allclose(weight, weight[:1].expand(4))
            if recipe.mixup:
                torch.testing.assert_close(mixed, weight[0] * images + (1 - weight[0]) * images.roll(-1, 0))
            else:
                unchanged_fraction = (mixed == images).float().mean(dim=(1, 2, 3))
                torch.testing.assert_close(unchanged_fraction, weight)
    disabled = Mixer(PLAIN, 5, 10, CPU)
    assert disabled(images, labels, torch.tensor(0)) == (images, labels)


def test_mixup_draws_depend_only_on_the_seed():
    first, same_seed, other_seed = (
        Mixer(PLAIN.replace(mixup=0.3, cutmix=0.5, seed=s), 30, 10, CPU).table for s in (1, 1, 2)
    )
    assert torch.equal(first, same_seed)
    assert not torch.equal(first, other_seed)
    assert 0 < first[:, 1].mean() < 1


class CannotBeCompiled(CompiledCall):
    """A module whose compilation fails in the forward or backward pass, for some numbers of rows."""

    def __init__(self, module, error, *, backward=False, rows=None):
        super().__init__(module, backend="eager")
        self.error, self.backward, self.rows = error, backward, rows
        self._compiled = self.compile

    def fail(self, *_):
        raise self.error

    def compile(self, *args, **kwargs):
        output = self.module(*args, **kwargs)
        if self.backward:
            output.logits.register_hook(self.fail)
        elif self.rows in {None, len(args[0])}:
            self.fail()
        return output


def compiler_error(message):
    return importlib.import_module("torch._dynamo.exc").TorchDynamoException(message)


def assert_equal_state(session, expected):
    state, expected_state = session.state_dict(), expected.state_dict()
    for part in ("model", "loss", "optimizer", "step"):
        assert_same(state[part], expected_state[part])


@pytest.mark.parametrize(
    ("part", "failure", "inactive", "count"),
    [
        ("feed", {}, ["feed"], 1),
        ("net", {}, ["net"], 1),
        ("net", {"backward": True}, ["net", "loss"], 1),  # the error does not say which of them failed
        ("net", {"rows": 15}, ["net"], 7),  # in the last batch, which is smaller
        ("loss", {}, ["loss"], 1),
    ],
)
def test_failed_compilation_falls_back_to_eager_without_repeating_a_step(part, failure, inactive, count):
    recipe = short("fedlas_ls", accumulate=2)
    reference, broken = Session(recipe, CPU), Session(recipe, CPU)
    error = compiler_error("no graph for this module\nand more")
    modules = {"feed": broken.step.assemble_batch, "net": broken.net, "loss": broken.loss}
    failures = {name: {"rows": 0} for name in modules} | {part: failure}
    calls = {name: CannotBeCompiled(module, error, **failures[name]) for name, module in modules.items()}
    broken.step.assemble_batch, *broken.step.module.calls = calls.values()
    with pytest.warns(UserWarning, match=r"no graph for this module$"):
        steps(broken, count)
    assert [name for name, call in calls.items() if not call.active] == inactive
    steps(reference, count)
    for session in (reference, broken):
        steps(session, 2, epoch=1)
    assert_equal_state(broken, reference)


@pytest.mark.parametrize("backward", [False, True])
def test_failed_compilation_raises_if_there_are_several_processes(monkeypatch, backward):
    """Regression: one process repeated the step, and with it collectives that the others had finished."""
    session = Session(short("ce"), CPU)
    network = CannotBeCompiled(session.net, compiler_error("no graph\nand more"), backward=backward)
    session.step.module.calls = network, session.loss
    monkeypatch.setattr(compilation, "ranks", SimpleNamespace(count=lambda: 2))  # other modules see one process
    with pytest.raises(RunError, match=r"set compile=False: no graph$"):
        steps(session, 1)
    assert network.active


def test_errors_that_are_not_compilation_errors_are_raised():
    with_cause = compiler_error("while compiling")
    with_cause.__cause__ = torch.OutOfMemoryError("no memory left")
    with_message = compiler_error("CUDA error: out of memory")
    for error in (
        torch.OutOfMemoryError("no memory left"),
        with_cause,
        with_message,
        RuntimeError("a bug in user code"),
    ):
        session = Session(short("ce"), CPU)
        session.step.module.calls = CannotBeCompiled(session.net, error), session.loss
        with pytest.raises(type(error)):
            steps(session, 1)


@pytest.mark.filterwarnings("ignore:.*attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("loss", "backend", "count"),
    [
        ("fedlas_ls", "eager", 3),
        pytest.param("fedlas_ls", "aot_eager", 7, marks=pytest.mark.campaign),  # the last batch has another shape
        pytest.param("crl", "aot_eager", 7, marks=pytest.mark.campaign),
    ],
)
def test_a_compiled_step_sees_terms_and_gate_too(loss, backend, count):
    """Traced in one graph, as on a GPU, but executed by torch's own kernels."""
    torch._dynamo.reset()  # variants that other tests compiled count towards the limit
    recipe = short(loss)
    reference, compiled = Session(recipe, CPU), Session(recipe, CPU)
    options = {"fullgraph": True, "dynamic": False, "backend": backend}
    compiled.step.module.calls = [CompiledCall(module, **options) for module in (compiled.net, compiled.loss)]
    for session in (reference, compiled):
        steps(session, count)
    assert compiled.step.module.calls[0].active
    metrics, expected_metrics = compiled.step.metrics.read(), reference.step.metrics.read()
    assert metrics == pytest.approx(expected_metrics, rel=1e-3)
    assert metrics.keys() == expected_metrics.keys()
    gate, expected_gate = compiled.step.gate.end_epoch(), reference.step.gate.end_epoch()
    assert gate.keys() == expected_gate.keys()
    for name in ("positive", "alpha_ratio") if gate else ():
        assert gate[name] == pytest.approx(expected_gate[name], rel=0.05)


def test_no_garbage_is_collected_during_a_capture():
    """Regression: freeing the graph of an earlier run during a capture broke the capture on a GPU."""
    assert gc.isenabled()
    with without_collector():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("keep", [1.0, 0.75, 0.36, 0.0])
def test_the_cutmix_rectangle_has_the_area_of_the_weight(keep):
    middle = torch.tensor(0.5)
    fraction, inside = _rectangle(torch.tensor(keep), middle, middle, 100, 50)
    assert float(fraction) == pytest.approx(1 - keep, abs=0.01)
    assert int(inside.sum()) == round(float(fraction) * 5_000)
