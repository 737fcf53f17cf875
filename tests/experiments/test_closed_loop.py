"""The evaluation of `closed_loop`: search on V2, selection, primary table, temperature on V2."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_ledgers import fast_intervals

from fedlas.experiments import closed_loop_design, closed_loop_tables
from fedlas.experiments.base import Choice, Drawing
from fedlas.experiments.closed_loop_design import (
    ABLATIONS,
    CONFIGURATIONS,
    CONTROLS,
    METHODS,
    PUBLISHED,
    SEARCH_SEED,
    Candidate,
    primary_recipe,
    search_recipe,
    select_configuration,
)
from fedlas.experiments.ledger import TEMPERATURE, V2, Ledger, epoch_ledger
from fedlas.experiments.planning import experiment_named, make_plan
from fedlas.experiments.reproduce import reproduce
from fedlas.experiments.stored_predictions import load_stored_predictions, problems
from fedlas.metrics import nll
from fedlas.posthoc import build_calibrator
from fedlas.training import recipe_for
from fedlas.training.run_folder import run_in
from fedlas.training.validation import halves, second_half

RESULTS = Path(__file__).parents[2] / "results"
CHANGES = {"epochs": "1", "milestones": "1", "batch_size": "100", "precision": "fp32", "channels_last": "false",
           "model_options.width": "8"}  # fmt: skip
CHOICE = Choice(data=("digits",), models=("small_cnn",), losses=("closed_loop",), seeds=(1,), changes=CHANGES)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Train all runs of a search with two configurations and of the primary table; yield their folder."""
    folder = tmp_path_factory.mktemp("closed_loop")
    ledger = Ledger(folder / "results")
    two_configurations = {
        **CONFIGURATIONS,
        "closed_loop": (CONFIGURATIONS["closed_loop"][0], CONFIGURATIONS["closed_loop"][5]),
    }
    runs = reproduce(experiment_named("closed_loop"), CHOICE, ledger=ledger, runs=folder / "runs")
    with pytest.MonkeyPatch.context() as patch, fast_intervals():
        patch.setattr(closed_loop_design, "CONFIGURATIONS", two_configurations)
        with pytest.warns(UserWarning, match="milestones"):
            list(runs)
        yield folder


def test_each_method_has_six_configurations_and_no_test_predictions_in_the_search():
    plan = make_plan(experiment_named("closed_loop"), Choice(losses=tuple(METHODS)), Ledger("nowhere"))
    assert len(plan.runs) == 36
    assert {run.recipe.seed for run in plan.runs} == {SEARCH_SEED}
    assert {run.recipe.splits for run in plan.runs} == {("val",)}
    assert len({run.recipe.key for run in plan.runs}) == 36
    assert all(run.recipe.halve_validation and run.recipe.evaluated == "last" for run in plan.runs)
    assert {len(configurations) for configurations in CONFIGURATIONS.values()} == {6}


def test_losses_with_published_settings_are_planned_without_a_search():
    experiment, nothing = experiment_named("closed_loop"), Ledger("nowhere")
    losses = ("ls", "fedlas_ls", "mbls", "adafocal", "crl")
    plan = make_plan(experiment, Choice(losses=losses, seeds=experiment.seeds), nothing)
    expected = [(data, loss, seed) for data in ("cifar100", "cifar10") for loss in losses for seed in (1, 2, 3)]
    assert [run.recipe for run in plan.missing] == [
        recipe_for(data, None, loss, protocol="standard", seed=seed) for data, loss, seed in expected
    ]
    assert {(run.split, run.posthoc) for run in plan.missing} == {("test", (None, TEMPERATURE))}
    assert not any(run.recipe.ood for run in plan.missing)
    one = make_plan(experiment, Choice(data=("cifar10",), losses=("crl",), seeds=(2, 5)), nothing)
    assert [(run.recipe.data, run.recipe.loss, run.recipe.seed) for run in one.runs] == [("cifar10", "crl", 2)]
    assert make_plan(experiment, Choice(data=("fashion_mnist",), losses=("ls",)), nothing).runs == ()
    assert experiment.tables(nothing, Choice(losses=("ls",))) == []


def test_losses_with_published_settings_have_rows_when_they_are_run(evaluated, tmp_path, monkeypatch):
    experiment = experiment_named("closed_loop")
    ledger = Ledger(shutil.copytree(evaluated / "results", tmp_path / "results"))
    monkeypatch.setattr(closed_loop_design, "PUBLISHED", {**PUBLISHED, "data": ["digits"]})
    every = replace(CHOICE, losses=None)
    assert "closed_loop-published" not in [table.name for table in experiment.tables(ledger, every)]
    choice = replace(CHOICE, losses=("ls",))
    with fast_intervals(), pytest.warns(UserWarning, match="milestones"):
        list(reproduce(experiment, choice, ledger=ledger, runs=tmp_path / "runs"))
    assert make_plan(experiment, choice, ledger).missing == ()
    (table,) = experiment.tables(ledger, choice)
    assert table == experiment.tables(ledger, every)[-1]
    assert [row.name for row in table.rows] == ["ls", "ls+temperature", "closed_loop"], "others were not run"
    recipe = closed_loop_design.published_recipe("digits", "ls", 1, choice)
    names = ("accuracy", "ece", "aece", "classwise_ece", "nll", "brier", "aurc")
    for row, posthoc in zip(table.rows[:2], (None, TEMPERATURE), strict=True):
        line = ledger.find(recipe, posthoc)
        values = [line.metrics[name][0] * (1000 if name == "aurc" else 1) for name in names]
        assert [cell.values for cell in row.cells] == [(value,) for value in values]


def test_the_selected_configuration_does_not_depend_on_the_selected_losses():
    """Controls of CE, and losses with published settings, are shown beside `closed_loop` even if it is not selected."""
    ledger = Ledger(RESULTS)
    every, *one_loss = [
        select_configuration("cifar10", "closed_loop", None, Choice(losses=losses), ledger)
        for losses in (None, ("ce",), ("ls",))
    ]
    assert every is not None
    assert one_loss == [every, every]


def test_the_search_selects_by_nll_on_v2_and_the_selected_configuration_is_trained(evaluated):
    ledger = Ledger(evaluated / "results")
    nll_values = {None: [], TEMPERATURE: []}
    for number in (1, 2):
        recipe = search_recipe("digits", Candidate("closed_loop", number), CHOICE)
        run = run_in(evaluated / "runs", recipe)
        assert not run.predictions_file("last-test").exists()
        _, v2 = halves(run.predictions("last-val"))
        raw = ledger.find(recipe, None, V2)
        assert raw.metrics["nll"][0] == pytest.approx(float(nll(v2)), rel=1e-3)
        fold, total = second_half(v2, 2027), 0.0
        for part in (fold, ~fold):
            scaled = build_calibrator("temperature").fit(v2[~part]).transform(v2[part])
            total += float(nll(scaled)) * int(part.sum())
        scaled = ledger.find(recipe, TEMPERATURE, V2)
        assert scaled.metrics["nll"][0] == pytest.approx(total / len(v2), rel=1e-3)
        for line in (raw, scaled):
            nll_values[None if line.posthoc is None else TEMPERATURE].append(line.metrics["nll"][0])
    for posthoc, values in nll_values.items():
        chosen = select_configuration("digits", "closed_loop", posthoc, CHOICE, ledger)
        assert chosen.number == values.index(min(values)) + 1
        (line,) = [item for item in ledger.lines.values() if item.split == "test" and item.posthoc is None
                   and item.recipe.loss_options == search_recipe("digits", chosen, CHOICE).loss_options]  # fmt: skip
        assert line.seed == 1
    search, primary, _ = experiment_named("closed_loop").tables(ledger, CHOICE)
    assert all(cell.values for row in (*search.rows, *primary.rows) for cell in row.cells)
    assert list(problems(ledger)) == []
    drawing = Drawing(ledger, CHOICE, evaluated / "figures", lambda _: None)
    assert {path.name for path in experiment_named("closed_loop").draw(drawing)} >= {"closed_loop_feedback.pdf"}


def test_comparisons_appear_when_all_runs_are_there(evaluated, monkeypatch):
    """The runs of one method replace those of all three, so every difference is zero."""
    ledger = Ledger(evaluated / "results")
    lines = [item for item in ledger.lines.values() if item.split == "test"]

    def stored(_ledger, choice, _data, row, _seeds=None):
        posthoc = row[1]
        line = next(item for item in lines if (item.posthoc is None) == (posthoc is None))
        return [line] * len(choice.seeds)

    choice = replace(CHOICE, losses=None, seeds=(1, 2, 3, 4, 5))
    names = [table.name for table in experiment_named("closed_loop").tables(ledger, choice)]
    assert names == ["closed_loop-search", "closed_loop-primary", "closed_loop-selection"]
    monkeypatch.setattr(closed_loop_tables, "primary_lines", stored)
    unchanged = [table.name for table in experiment_named("closed_loop").tables(ledger, choice)]
    assert unchanged == names, "a part of the family is not corrected"
    monkeypatch.setattr(closed_loop_design, "FAMILIES", [["digits"]])
    _, _, tests, margins, _ = experiment_named("closed_loop").tables(ledger, choice)
    result = {row.name: [cell.values[0] for cell in row.cells] for row in tests.rows}
    assert len(result) == 6
    assert result["digits/pskd/nll"][0] == 0
    raw, scaled = (stored(ledger, choice, "", ("", posthoc))[0].metrics["nll"][0] for posthoc in (None, TEMPERATURE))
    assert result["digits/pskd+temperature/nll"][0] == pytest.approx(raw - scaled)
    assert {row.name for row in margins.rows} == {"digits/accuracy", "digits/ece", "digits/brier"}
    accuracy = margins.rows[0].cells
    assert (accuracy[0].values, accuracy[3].values) == ((0.0,), (1.0,))


def test_selection_table_has_the_metrics_of_last_and_best_epoch(evaluated, tmp_path):
    ledger = Ledger(shutil.copytree(evaluated / "results", tmp_path / "results"))
    lines = {line.posthoc is None: line for line in epoch_ledger(ledger, "best").lines.values()}
    changed = replace(lines[True], metrics=lines[True].metrics | {"ece": (0.5, None, None)})
    file = ledger.folder / "best_epoch" / "digits-standard.jsonl"
    file.write_text(f"{changed.to_json()}\n{lines[False].to_json()}\n")
    table = next(
        candidate
        for candidate in experiment_named("closed_loop").tables(ledger, CHOICE)
        if "selection" in candidate.name
    )
    cells = {row.name: [cell.values for cell in row.cells] for row in table.rows}
    raw = ledger.lines[lines[True].id]
    assert cells["closed_loop/last"] == [(raw.metrics[name][0],) for name in ("accuracy", "ece", "nll")]
    assert cells["closed_loop/best"] == [(raw.metrics["accuracy"][0],), (0.5,), (raw.metrics["nll"][0],)]


def test_the_last_weights_are_evaluated_and_the_temperature_is_fitted_on_v2(evaluated):
    ledger = Ledger(evaluated / "results")
    line = next(item for item in ledger.lines.values() if item.split == "test" and item.posthoc is not None)
    run = run_in(evaluated / "runs", line.recipe)
    _, v2 = halves(run.predictions("last-val"))
    expected = build_calibrator("temperature").fit(v2)
    assert line.posthoc["fitted_on"] == V2
    assert line.posthoc["temperature"] == pytest.approx(float(expected.learned["temperature"]), rel=1e-3)
    raw = load_stored_predictions(ledger.find(line.recipe), ledger).predictions
    torch.testing.assert_close(raw.logits.float(), run.predictions("last-test").logits.float())
    assert len(line.curve[0]["loss_state"]["strengths"]) == len(line.curve[0]["loss_state"]["gaps"])


def test_controls_confirmation_and_ablations_follow_the_search(evaluated, monkeypatch):
    """The search on digits replaces the one on CIFAR-100."""
    ledger, experiment = Ledger(evaluated / "results"), experiment_named("closed_loop")
    monkeypatch.setattr(closed_loop_design, "CONTROLS", {**CONTROLS, "data": ["digits"], "rows": {
        row: {**item, "method": "closed_loop"} for row, item in CONTROLS["rows"].items()}})  # fmt: skip
    monkeypatch.setattr(closed_loop_design, "ABLATIONS", {**ABLATIONS, "data": "digits", "seeds": [2, 1]})
    monkeypatch.setattr(closed_loop_design, "CONFIRMATION", {"mnist": "digits"})
    recipes = {row: [item.recipe for item in experiment.plan(CHOICE, ledger) if row in item.rows]
              for row in (*CONTROLS["rows"], *ABLATIONS["variants"])}  # fmt: skip
    assert [item.seed for item in recipes["ce_v1"]] == [1, 2, 3]
    assert all(item.train_on_v1 and item.halve_validation for item in recipes["ce_v1"])
    assert not any(item.halve_validation for item in recipes["ce_t"])
    selected_recipe = primary_recipe("digits", ("closed_loop", None), 1, CHOICE, ledger)
    states = [item["loss_state"] for item in ledger.find(selected_recipe).curve]
    replay, constant = (recipes[row][0] for row in ("replay", "constant"))
    assert [item.seed for item in recipes["replay"]] == [2], "the strengths of seed 2 are not known yet"
    assert replay.loss_options["replay"][0]["strengths"] == [0.2] * len(states[0]["strengths"])
    assert len(replay.loss_options["replay"]) == selected_recipe.epochs
    assert constant.loss_options["replay"] == replay.loss_options["replay"][-1:]
    assert recipes["uniform"][1].loss_options == {**selected_recipe.loss_options, "target": "uniform"}
    assert recipes["training_feedback"][0].feedback == "train"
    mnist_choice = replace(CHOICE, data=("mnist",))
    confirmed = [item.recipe for item in experiment.plan(mnist_choice, ledger)]
    assert {item.data for item in confirmed} == {"mnist"}
    assert {item.seed for item in confirmed} == {1}
    assert confirmed[0].loss_options == selected_recipe.loss_options
    line = ledger.find(selected_recipe)
    monkeypatch.setattr(closed_loop_tables, "_finished_lines", lambda *_: [line, line, line])
    tables = {item.name: item for item in experiment.tables(ledger, CHOICE)}
    assert [row.name for row in tables["closed_loop-controls"].rows] == [*CONTROLS["rows"], "closed_loop"]
    assert {cell.values for row in tables["closed_loop-controls-comparison"].rows for cell in row.cells} == {(0.0,)}
    assert len(tables["closed_loop-ablations"].rows) == 1 + len(ABLATIONS["variants"])
