"""A new loss file in the folder is listed, built and tested by the contract, which detects faulty losses."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedlas

pytestmark = pytest.mark.campaign  # it runs pytest on the contract
HERE = Path(__file__).parent
# A minimal loss file
NEW = '''
"""Evenness: L = mean_i CE_i + beta Σ_k p_ik^2. Source: made up for a test."""
from fedlas.losses.base import AbstractLoss

class Evenness(AbstractLoss):
    """Cross-entropy plus a penalty on uneven probabilities."""
    name = "dropped_in"
    citation = "Nobody, On Evenness, 2026."
    def terms(self, batch):
        return {"classification": self.cross_entropy(batch), "evenness": 0.1 * (batch.log_probs.exp() ** 2).sum(1)}
'''
# The faulty losses below, and the test that must fail for each
DETECTED_BY = {
    "clips": "test_the_classification_term_of_huge_logits_is_their_difference",
    "overflows": "test_loss_of_huge_logits_is_finite",
    "leaks": "test_ignored_samples_equal_removed_samples",
    "weighs": "test_class_weights_do_not_affect_regularisers",
    "averages": "test_reductions_are_sums_and_means_over_samples",
    "hardens": "test_a_soft_label_averages_the_loss_over_the_classes",
    "lies": "test_gradients_equal_finite_differences",
    "rounds": "test_low_precision_is_computed_in_float32",
    "forgets": "test_a_copy_continues_like_the_original",
    "replaces": "test_training_updates_all_state_in_place",
    "peeks": "test_eval_mode_does_not_change_the_state",
    "mumbles": "test_loss_has_a_summary_and_a_citation",
    "stumbles": "test_optional_inputs_are_not_required",
}
CARELESS = '''
"""Losses that each break the contract in one way: L = mean_i CE_i and something. Source: made up for a test."""
import torch
from fedlas.losses.base import AbstractLoss

class AbstractCareless(AbstractLoss):
    citation = "Nobody, On Haste, 2026."
    def terms(self, batch):
        return {"classification": self.cross_entropy(batch), "penalty": self.penalty(batch)}
    def penalty(self, batch):
        return batch.confidence()

class Clips(AbstractCareless):
    """Cross-entropy of clipped probabilities."""
    name = "careless_clips"
    def terms(self, batch):
        return {"classification": self.expected(batch, lambda log_p: -log_p.exp().clamp_min(1e-12).log())}

class Overflows(AbstractCareless):
    """Exponentials of raw logits."""
    name = "careless_overflows"
    def penalty(self, batch):
        return batch.logits.exp().sum(1).log()

class Leaks(AbstractCareless):
    """A mean over ignored samples too."""
    name = "careless_leaks"
    def penalty(self, batch):
        return batch.confidence() - batch.confidence().mean()

class Weighs(AbstractCareless):
    """A regulariser with class weights."""
    name = "careless_weighs"
    def penalty(self, batch):
        return 0.1 * self.cross_entropy(batch)

class Averages(AbstractCareless):
    """Overrides the reduction of the sum."""
    name = "careless_averages"
    def forward(self, *inputs):
        value = super().forward(*inputs)
        return value / len(inputs[0]) if self.reduction == "sum" else value

class Hardens(AbstractCareless):
    """Takes the largest share of a soft label for the label."""
    name = "careless_hardens"
    def penalty(self, batch):
        labels = batch.labels.argmax(1) if batch.soft else batch.labels
        return -batch.log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)

class Lies(AbstractCareless):
    """A value that is not what its gradient belongs to."""
    name = "careless_lies"
    def penalty(self, batch):
        return batch.confidence() + 0.01 * (batch.confidence() - torch.tensor(batch.confidence().tolist()))

class Rounds(AbstractCareless):
    """Feature norms in the type of the network."""
    name = "careless_rounds"
    def penalty(self, batch):
        return batch.confidence() * batch.features.abs().sum(1).to(batch.logits.dtype)

class Forgets(AbstractCareless):
    """Keeps its state outside of the state dict."""
    name = "careless_forgets"
    steps = 0.0
    def penalty(self, batch):
        self.steps += self.training
        return batch.confidence() * self.steps

class Replaces(AbstractCareless):
    """Puts a new tensor where its state was."""
    name = "careless_replaces"
    def __init__(self, **common):
        super().__init__(**common)
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))
    def penalty(self, batch):
        self.steps = self.steps + self.training
        return batch.confidence()

class Peeks(AbstractCareless):
    """Updates its state in evaluation mode."""
    name = "careless_peeks"
    def __init__(self, **common):
        super().__init__(**common)
        self.register_buffer("valid_samples", torch.zeros((), dtype=torch.float64))
    def penalty(self, batch):
        self.valid_samples += batch.valid.sum()
        return batch.confidence()

class Mumbles(AbstractCareless):
    """Cross-entropy from an unknown source."""
    name = "careless_mumbles"
    citation = "somebody"

class Stumbles(AbstractCareless):
    """Cannot be built; the other losses are still collected and tested."""
    name = "careless_stumbles"
    def __init__(self, **common):
        raise RuntimeError
'''


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Run the contract against a copy of the package with two more files in its folder of losses."""
    package_root = tmp_path_factory.mktemp("copy")
    shutil.copytree(Path(fedlas.__file__).parent, package_root / "fedlas", ignore=shutil.ignore_patterns("__pycache__"))
    (package_root / "fedlas" / "losses" / "evenness.py").write_text(NEW)
    (package_root / "fedlas" / "losses" / "careless.py").write_text(CARELESS)
    files = [str(file) for file in HERE.glob("test_contract_*.py") if file != Path(__file__)]
    select = "dropped_in or " + " or ".join(f"({test} and careless_{name})" for name, test in DETECTED_BY.items())
    excluded_prefixes = ("PYTEST_", "COV_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(excluded_prefixes)}
    environment |= {"PYTHONPATH": str(package_root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *files, "-q", "-rA", "--tb=line", "-p", "no:cacheprovider", "-k", select]
    result = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return result.stdout + result.stderr


def names(report, status, loss):
    return set(re.findall(rf"^{status} \S*::(\w+)\[{loss}\b", report, re.MULTILINE))


def test_a_new_loss_file_is_tested_by_the_whole_contract(report):
    assert not names(report, "FAILED", "dropped_in"), report[-5000:]
    assert not names(report, "ERROR", "dropped_in"), report[-5000:]
    assert len(names(report, "PASSED", "dropped_in")) > 40, report[-5000:]


@pytest.mark.parametrize("name", DETECTED_BY)
def test_an_incorrect_loss_fails_the_contract(report, name):
    assert names(report, "FAILED", f"careless_{name}") == {DETECTED_BY[name]}, report[-5000:]
