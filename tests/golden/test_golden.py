"""Compare the losses with values that the official repositories computed on one small batch.

`values.json` has an 8 x 5 batch and the value, terms, gradients and state that the official code of each method
computed for it, in float64 except for the losses in SINGLE (float32). A test reads its section of the file through
`Reader`, which fails if a number was not read; the last test fails if a section has no test.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedlas
from fedlas.losses import BCG

VALUES: dict[str, Any] = json.loads((Path(__file__).parent / "values.json").read_text())
SECTIONS: set[str] = set()

LOGITS = torch.tensor(VALUES["inputs"]["logits"], dtype=torch.float64)
LABELS = torch.tensor(VALUES["inputs"]["target"])
FEATURES = torch.tensor(VALUES["inputs"]["features"], dtype=torch.float64)

# The loss of each entry; TERMS converts weighted terms to the terms of the official code, which follow the total.
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "CE_mean": ("ce", {}),
    "LS_0.05": ("ls", {}),
    "LS_0.1": ("ls", {"alpha": 0.1}),
    "MbLS_m6_l0.1": ("mbls", {}),
    "MbLS_m2_l0.1": ("mbls", {"margin": 2}),
    "ACLS_m6_a0.1_pos1_neg0.1": ("acls", {}),
    "ACLS_m2_a0.1_pos1_neg0.1": ("acls", {"margin": 2}),
    "FL_gamma3_mean": ("focal", {}),
    "FLSD53_mean": ("flsd", {}),
    "MMCE_m_lambda1_plus_CE": ("mmce", {}),
    "MMCE_w_lambda2_plus_CE": ("mmce", {"variant": "w", "lambda_": 2.0}),
    "ECP_0.1": ("ecp", {}),
    "DFL_gamma5_mean": ("dual_focal", {}),
    "MDCA_CE_beta1": ("mdca", {}),
    "MDCA_FL1_beta1": ("mdca", {"base": "focal"}),
    "CPC_bdc0.1_bec1": ("cpc", {}),
    "AdaFocal_initial_gamma1_sum": ("adafocal", {"reduction": "sum"}),
    "AdaFocal_after_two_updates_sum": ("adafocal", {"reduction": "sum"}),
}
TERMS: dict[str, Callable[[dict[str, Tensor]], list[Tensor]]] = {
    "mbls": lambda t: [t["classification"], t["margin"] / 0.1],
    "acls": lambda t: [t["classification"], (t["positive"] + t["negative"]) / 0.1],
    "ecp": lambda t: [t["classification"], -t["entropy"] / 0.1],
    "cpc": lambda t: [t["classification"], t["discrimination"] / 0.1, t["exclusion"]],
}
SINGLE = {"mmce", "mdca"}
FEDLAS: dict[str, tuple[str, dict[str, Any]]] = {
    "FeDLaS-LS_alpha0.05_beta4_theta0.95": ("fedlas_ls", {}),
    "FeDLaS-MbLS_alpha0.1_beta0.5_theta0.95_m6": ("fedlas_mbls", {}),
    "FeDLaS-MbLS_alpha0.1_beta0.5_theta0.5_m2": ("fedlas_mbls", {"theta": 0.5, "margin": 2}),
}


class Reader:
    """Return values of one section and record which were read."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.unread = set(content)

    def __call__(self, name: str) -> Any:
        self.unread.discard(name)
        return self.content[name]

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def finish(self) -> None:
        assert not self.unread, f"values that no test read: {sorted(self.unread)}"


def section(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the section of the file that a test reads."""
    SECTIONS.add(name)
    return lambda test: test


def close(value: Tensor | float, expected: Any, rel: float = 1e-9) -> None:
    """Compare with a tolerance relative to the largest absolute value."""
    value = torch.as_tensor(value, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=0, atol=rel * float(expected.abs().max()))


def gradient(loss: torch.nn.Module, **extra: Tensor) -> tuple[Tensor, Tensor]:
    logits = LOGITS.clone().requires_grad_()
    value = loss(logits, LABELS, **extra)
    value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


@section("inputs")
def test_inputs_equal_golden_values() -> None:
    reader = Reader(VALUES["inputs"])
    i, j = torch.arange(8.0, dtype=torch.float64)[:, None], torch.arange(6.0, dtype=torch.float64)
    close(6 * torch.sin(1.3 * i + 0.7 * j[:5] + 0.4 * i * j[:5]), reader("logits"), rel=1e-5)
    close((2 + 1.5 * torch.cos(0.9 * i + 1.7 * j)).abs(), reader("features"), rel=1e-4)
    assert LOGITS.argmax(1).tolist() == reader("argmax")
    offset = torch.tensor([0, 0, 2, 0, 0, 2, 0, 0])
    assert ((LOGITS.argmax(1) + offset) % 5).tolist() == reader("target")
    reader.finish()


@section("losses")
@pytest.mark.parametrize("entry", VALUES["losses"])
def test_losses_equal_golden_values(entry: str) -> None:
    name, options = LOSSES[entry]
    reader, rel = Reader(VALUES["losses"][entry]), 1e-6 if name in SINGLE else 1e-9
    loss = fedlas.build_loss(name, num_classes=5, **options).double()
    if "two_updates" in entry:
        for _ in range(2):
            loss.update(torch.tensor(VALUES["adafocal"]["gaps"], dtype=torch.float64))
        # The published code updates its gammas in float64 but hands them to the loss in float32, which shows at 1e-9.
        loss.gammas.copy_(loss.gammas.float())
    value, grad = gradient(loss)
    close(value, reader("loss"), rel)
    close(grad[0], reader("grad_row0"), rel)
    close(grad[2], reader("grad_row2"), rel)
    close(grad.abs().sum(), reader("grad_abs_sum"), rel)
    assert ("terms" in reader) == (name in TERMS)
    if "terms" in reader:
        total, *parts = reader("terms")
        close(value, total, rel)
        for term, expected in zip(TERMS[name](loss.last_terms), parts, strict=True):
            close(term, expected, rel)
    reader.finish()


@section("adafocal")
def test_adafocal_updates_equal_golden_values() -> None:
    reader = Reader(VALUES["adafocal"])
    loss = fedlas.build_loss("adafocal", num_classes=5)
    gaps = torch.tensor(reader("gaps"), dtype=torch.float64)
    updates = reader("gammas")
    assert len(updates) == 2
    for expected in updates:
        loss.update(gaps)
        torch.testing.assert_close(loss.gammas, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)
    reader.finish()


@section("crl")
def test_crl_equals_golden_values() -> None:
    reader = Reader(VALUES["crl"])
    counts = torch.tensor(reader("correctness_counts"))
    loss = fedlas.build_loss("crl", num_classes=5, num_samples=8).double()
    loss.correct_epochs.copy_(counts.long())
    loss.finished_epochs.fill_(reader("max_correctness"))
    value, _ = gradient(loss, index=torch.arange(8))
    close(value, reader("total_with_CE_weight1"))
    close(loss.last_terms["ranking"], reader("ranking_loss"))

    # Sign and margin of each pair, read off the hinge: with equal scores it is the margin, with the gradient the sign.
    zero_logits = torch.zeros(8, 5, dtype=torch.float64)
    loss.correct_epochs.copy_(counts.long())
    margins = loss.parts(zero_logits, LABELS, index=torch.arange(8))["ranking"]
    close(margins, reader("rank_margin"))
    loss.correct_epochs.copy_(counts.long())
    scores = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    terms = loss._ranking(scores, torch.arange(8), torch.ones(8, dtype=torch.bool))
    signs = [-torch.autograd.grad(term, scores, retain_graph=True)[0][i] for i, term in enumerate(terms)]
    assert torch.stack(signs).tolist() == reader("rank_target")
    reader.finish()


def build_fedlas(entry: str) -> Any:
    name, options = FEDLAS[entry]
    loss = fedlas.build_loss(name, num_classes=5, preset="official", **options).double()
    weights = {key: torch.tensor(value, dtype=torch.float64) for key, value in VALUES["gate"]["weights"].items()}
    loss.smoothing.bcg.load_state_dict(weights)
    return loss


@section("fedlas")
@pytest.mark.parametrize("entry", VALUES["fedlas"])
def test_fedlas_equals_golden_values(entry: str) -> None:
    reader, loss = Reader(VALUES["fedlas"][entry]), build_fedlas(entry)
    norms = FEATURES.abs().sum(1)
    close(norms, reader("l1_norms"))
    close(norms.mean(), reader("batch_mean"))
    close(norms.std(), reader("batch_std_unbiased"))

    value, grad = gradient(loss, features=FEATURES)
    close(value, reader("loss"))
    close(grad[0], reader("grad_row0"))
    close(grad.abs().sum(), reader("grad_abs_sum"))
    assert loss.psi.tolist() == reader("psi")
    close(loss.gamma, reader("gamma"))
    close(loss.alpha_i, reader("alpha_i"))
    nci = loss.smoothing.nci
    close(nci.mean, reader("ema_mean"))
    close(nci.std, reader("ema_std"))
    gate = Reader(reader("gate_grads"))
    for name, parameter in loss.smoothing.bcg.named_parameters():
        close(parameter.grad, gate(name))
    gate.finish()

    close(loss.eval()(LOGITS, LABELS, FEATURES).detach(), reader("loss_in_eval_mode_same_batch"))
    close(nci.mean, reader("ema_mean"))
    close(loss.train()(LOGITS, LABELS, FEATURES).detach(), reader("loss_second_train_call_same_batch"))
    close(torch.stack([nci.mean, nci.std]), reader("ema_after_second"))
    reader.finish()


@section("gate")
def test_gate_equals_golden_values() -> None:
    """Set the gate's two outputs directly: the first layer returns its input, the second returns +-x/2."""
    reader = Reader(VALUES["gate"])
    state = build_fedlas(next(iter(FEDLAS))).smoothing.bcg.state_dict()
    for name, value in reader("weights").items():
        close(state[name], value)
    bcg = BCG(1, zero=0).double()
    with torch.no_grad():
        for name, parameter in bcg.named_parameters():
            parameter.copy_(torch.tensor([[-0.5], [0.5]]) if name == "fc_out.weight" else float("weight" in name))
    for difference, sign in reader("sign"):
        # tanh(x / 2) is the difference of a softmax over (-x/2, x/2)
        x = torch.full(
            (1, 1), 2 * torch.atanh(torch.tensor(abs(difference), dtype=torch.float64)).item(), dtype=torch.float64
        )
        if difference < 0:
            x = -x / 0.01  # the leaky slope
        assert bcg(x, torch.ones(1, dtype=torch.bool)).item() == sign
    reader.finish()


def leaves(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from leaves(value, f"{path}/{key}")
        else:
            yield f"{path}/{key}", value


def test_every_golden_value_is_tested() -> None:
    assert set(VALUES) == SECTIONS
    assert set(VALUES["losses"]) == set(LOSSES)
    assert set(VALUES["fedlas"]) == set(FEDLAS)
    assert not [path for path, value in leaves(VALUES) if type(value) not in (int, float)]


def test_unused_golden_values_are_reported() -> None:
    reader = Reader({"loss": 1.0, "gradient": 2.0})
    reader("loss")
    with pytest.raises(AssertionError, match="gradient"):
        reader.finish()
