"""Reproduce experiments: plans, table cells, comparisons, and reuse of finished runs."""

import json
import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reproduction_page import results_tables
from small_ledgers import minimal_ledger, minimal_line
from typer.testing import CliRunner

from fedlas.catalog import keywords
from fedlas.cli import app
from fedlas.comparison import ModelRuns, compare_runs, comparison_notes
from fedlas.experiments import paper
from fedlas.experiments.base import Choice
from fedlas.experiments.ledger import Ledger, Line
from fedlas.experiments.ledger_lookup import find_lines, find_runs
from fedlas.experiments.planning import CATALOG, experiment_named, make_plan
from fedlas.experiments.reproduce import reproduce
from fedlas.experiments.stored_predictions import StoredPredictions, load_stored_predictions
from fedlas.io import write_predictions
from fedlas.losses import CATALOG as LOSSES
from fedlas.metrics import accuracy, brier, nll, paired_bootstrap
from fedlas.metrics.calibration_error import ece
from fedlas.predictions import Predictions
from fedlas.training import Run, check_parts, recipe_for
from fedlas.training.protocols import list_recipes, protocol_named
from waiting import until

pytestmark = pytest.mark.usefixtures("few_resamples")
PUBLISHED = json.loads(Path(paper.__file__).with_name("paper.json").read_text())


@pytest.fixture(scope="module")
def empty_tables():
    """Return all tables of the paper for an empty ledger."""
    names = ("sota", "finegrained", "ood", "over_under")
    return {name: experiment_named(name).tables(Ledger("nowhere"), Choice(seeds=(1,)))[0] for name in names}


def cell(table, row, column, group=None):
    position = next(n for n, c in enumerate(table.columns) if c.name == column and (group is None or c.group == group))
    return next(r for r in table.rows if r.name == row).cells[position]


def test_the_main_table_has_all_losses_and_temperature_scaling():
    rows = list(experiment_named("sota").methods)
    not_in_paper = {"closed_loop", "pskd"}  # not compared in the paper
    assert sorted(rows) == sorted([*(LOSSES.entries.keys() - not_in_paper), "ce+temperature"])
    assert len(experiment_named("finegrained").methods) == 9
    assert len(experiment_named("ood").methods) == 9
    assert list(experiment_named("over_under").methods) == ["ce", "ls", "fedlas_ls", "mbls", "fedlas_mbls"]


def test_precision_table_recipes_differ_only_in_precision_and_speed():
    fast, slow = (
        planned.recipe
        for planned in experiment_named("precision").plan(Choice(protocol="fast", seeds=(1,)), Ledger("nowhere"))
    )
    assert (fast.precision, fast.capture, slow.precision, slow.capture) == ("bf16", True, "tf32", False)
    fast_settings = {"precision": "bf16", "channels_last": True, "compile": True, "capture": True}
    assert slow.replace(**fast_settings) == fast == recipe_for("cifar10", loss="ce", protocol="fast", seed=1)


def test_paper_numbers_are_found_by_method_data_and_metric(empty_tables):
    assert paper.value("sota", "fedlas_ls", "cifar10", "resnet50_cifar", metric="ece") == pytest.approx(0.0129)
    assert paper.value("sota", "ce", "cifar10", "resnet50_cifar", metric="aece") == pytest.approx(0.0584)
    assert paper.value("ood", "ce", "cifar10", "resnet50_cifar", metric="auroc", ood="svhn") == pytest.approx(0.9137)
    # Commented out in the source of the paper.
    assert paper.value("finegrained", "focal", "cub200", "resnet101", metric="ece") is None
    assert paper.value("sota", "ce", "digits", "small_cnn", metric="ece") is None
    compared_cells = sum(
        c.paper is not None
        for table in empty_tables.values()
        for r in table.rows
        for c, col in zip(r.cells, table.columns, strict=False)
        if col.group != "Mean rank" and col.name != "mean accuracy %"
    )
    assert compared_cells == sum(not row.get("commented_out") for row in PUBLISHED["numbers"])


def test_mean_ranks_of_paper_numbers_equal_those_of_the_paper(empty_tables):
    for name in ("sota", "finegrained"):
        table = empty_tables[name]
        for method, stated in paper.summaries_of(name).items():
            for metric in ("ECE", "AECE"):
                result = cell(table, method, metric, "Mean rank").paper
                assert result == pytest.approx(stated[f"mean_rank_{metric}"], abs=0.006), (name, method, metric)


def test_paper_mean_accuracies_are_in_full_tables_of_every_format(empty_tables, tmp_path):
    for name, method in (("sota", "fedlas_ls"), ("finegrained", "mbls")):
        table = empty_tables[name]
        stated = {item: summary["mean_Acc"] / 100 for item, summary in paper.summaries_of(name).items()}
        assert {row.name: cell(table, row.name, "mean accuracy %").paper for row in table.rows} == stated
        number = f"{100 * stated[method]:.2f}"
        for path in table.save(tmp_path, ("md", "tex", "txt")):
            assert number in path.read_text(), path
        (line,) = [item for item in table.csv().splitlines() if item.startswith(f"{method},") and "mean acc" in item]
        assert float(line.split(",")[-3]) == stated[method]
        (note,) = [item for item in table.notes if item.startswith("Mean accuracy")]
        assert re.search(rf"\b{len(paper.benchmarks(name))}\b", note)


def test_paper_mean_accuracies_are_means_over_data_and_networks():
    """The paper truncates its means to two digits."""
    benchmarks = paper.benchmarks("finegrained")
    for method, mean in paper.mean_accuracies("finegrained").items():
        accuracies = [paper.value("finegrained", method, *benchmark, metric="accuracy") for benchmark in benchmarks]
        assert 0 <= sum(accuracies) / len(accuracies) - mean + 1e-9 < 1e-4, method


def test_mean_accuracy_uses_only_seeds_that_were_run_everywhere(tmp_path):
    benchmarks = paper.benchmarks("sota")
    finished_runs = [
        (benchmark, seed) for benchmark in benchmarks for seed in (1, 2, 3) if (benchmark, seed) != (benchmarks[-1], 3)
    ]
    values = {(benchmark, seed): 0.7 + 0.01 * n for n, (benchmark, seed) in enumerate(finished_runs)}
    recipes = {
        item: recipe_for(*item[0], "ls", protocol="paper", seed=item[1]).replace(
            ood=experiment_named("sota").ood_data(item[0][0], Choice())
        )
        for item in finished_runs
    }
    ledger = minimal_ledger(tmp_path, [minimal_line(recipes[item], "paper", values[item]) for item in finished_runs])
    sota = experiment_named("sota")
    choice = Choice(losses=("ce", "ls"))
    (table,) = sota.tables(ledger, choice)
    result = cell(table, "ls", "mean accuracy %")
    means = [sum(values[benchmark, seed] for benchmark in benchmarks) / len(benchmarks) for seed in (1, 2)]
    assert result.values == pytest.approx(means)
    assert (result.planned, result.intervals) == (3, ())
    assert result.inside_noise is False
    assert cell(table, "ce", "mean accuracy %").values == ()
    assert cell(sota.tables(ledger, replace(choice, seeds=(3,)))[0], "ls", "mean accuracy %").values == ()


@pytest.mark.parametrize("part", [{"data": ("cifar10",)}, {"models": ("resnet50_cifar",)}, {"protocol": "fast"}])
def test_partial_tables_have_no_mean_accuracy(part):
    (table,) = experiment_named("sota").tables(Ledger("nowhere"), Choice(losses=("ce",), seeds=(1,), **part))
    assert "mean accuracy %" not in {column.name for column in table.columns}


def test_plan_uses_the_published_recipes():
    plan = make_plan(experiment_named("sota"), Choice(data=("cifar10",), models=("resnet50_cifar",)), Ledger("nowhere"))
    assert len(plan.runs) == len(plan.missing) == 45
    published = recipe_for("cifar10", "resnet50_cifar", "fedlas_ls", protocol="paper", seed=2)
    assert published in [item.recipe for item in plan.runs]
    ce = [item for item in plan.runs if item.recipe.loss == "ce"]
    assert all(item.posthoc == (None, "temperature") for item in ce)
    assert plan.minutes is None


def test_experiments_share_runs_of_equal_recipes():
    empty_ledger, choice = Ledger("nowhere"), Choice(data=("cifar10",), protocol="fast")
    names = {
        name: {run.recipe.name for run in make_plan(experiment_named(name), choice, empty_ledger).runs}
        for name in ("sota", "ood", "over_under", "gate_stability", "ablations")
    }
    assert names["ood"] <= names["sota"]
    assert names["over_under"] <= names["sota"]
    assert names["gate_stability"] <= names["sota"]
    assert len(names["ablations"] & names["sota"]) == 12  # ce, ls and both FeDLaS losses


def test_published_test_split_is_planned_only_for_cifar100():
    """Both splits of CIFAR-10 have the same test images; those of CIFAR-100 differ, also as OOD data."""
    choice = Choice(data=("cifar10", "cifar100"), protocol="fast", losses=("ce",), seeds=(1,), split="test-published")
    cifar10, cifar100 = make_plan(experiment_named("ood"), choice, Ledger("nowhere")).runs
    assert (cifar10.split, cifar10.recipe.splits) == ("test", ("val", "test"))
    assert cifar10.recipe.ood == ("cifar100", "cifar100-published", "svhn")
    assert (cifar100.split, cifar100.recipe.splits) == ("test-published", ("val", "test", "test-published"))
    assert cifar100.recipe.ood == ("cifar10", "svhn")
    (official,) = make_plan(
        experiment_named("sota"),
        replace(choice, data=("cifar100",), protocol="official", models=("resnet50_cifar",)),
        Ledger("nowhere"),
    ).runs
    assert official.split == "test"  # the recipe itself uses the published test images
    with pytest.raises(ValueError, match="'val'"):
        replace(choice, split="val")


def test_finished_runs_are_not_trained_again(trained, choice, ledger):
    plan = make_plan(experiment_named("sota"), choice, ledger)
    assert len(plan.runs) == 4
    assert not plan.missing
    assert list(reproduce(experiment_named("sota"), choice, ledger=ledger, runs=trained / "runs")) == []


def test_plan_estimates_time_from_similar_runs(choice, ledger):
    three_seeds = Choice(**{**vars(choice), "seeds": (1, 2, 3)})
    plan = make_plan(experiment_named("sota"), three_seeds, ledger)
    assert len(plan.missing) == 2
    assert 0 < plan.minutes < 5
    larger_plan = make_plan(
        experiment_named("sota"), replace(three_seeds, data=("digits", "cifar10"), models=("small_cnn",)), ledger
    )
    assert larger_plan.minutes == pytest.approx(plan.minutes)
    assert larger_plan.unknown == len(larger_plan.missing) - len(plan.missing) > 0
    device = next(iter(ledger.lines.values())).environment["device_name"]
    assert re.search(rf"min\b.*{device}.*\b{len(plan.missing)}\b", str(larger_plan))
    assert device in str(plan)


@pytest.mark.parametrize(
    ("devices", "names_gpu"), [(["NVIDIA H200"], True), (["NVIDIA H200", "x86_64"], False), ([None], False)]
)
def test_time_estimate_names_a_common_gpu(choice, ledger, devices, names_gpu):
    changed_ledger = Ledger(ledger.folder)
    for name, line in ledger.lines.items():
        changed_ledger.lines[name] = replace(line, environment={"device_name": devices[line.seed % len(devices)]})
    text = str(make_plan(experiment_named("sota"), replace(choice, seeds=(1, 2, 3)), changed_ledger))
    assert " min" in text
    assert ("NVIDIA H200" in text) == names_gpu
    assert "x86_64" not in text


def test_table_cells_have_one_value_per_seed(choice, ledger):
    table = experiment_named("sota").tables(ledger, choice)[0]
    result = cell(table, "ls", "ECE %")
    values = [line.metrics["ece"][0] for line in ledger.lines.values() if line.method == "ls"]
    assert sorted(result.values) == sorted(values)
    assert len(result.intervals) == 2
    assert "small" in " ".join(table.notes)
    other = experiment_named("sota").tables(ledger, Choice(**{**vars(choice), "losses": ("ce", "focal")}))[0]
    assert cell(other, "focal", "ECE %").values == ()


def test_only_option_selects_runs_by_name(choice, tmp_path):
    plan = make_plan(experiment_named("sota"), choice, Ledger(tmp_path), "-ls-")
    assert [planned.recipe.loss for planned in plan.missing] == ["ls", "ls"]


def test_limit_minutes_that_is_not_positive_raises(choice, tmp_path):
    for minutes in (-1, 0, float("nan")):
        with pytest.raises(ValueError, match=f"limit_minutes.*{minutes:g}"):
            list(
                reproduce(
                    experiment_named("sota"), choice, ledger=Ledger(tmp_path), runs=tmp_path,
                    limit_minutes=minutes,
                )
            )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_unknown_run_name_raises_with_examples(choice, tmp_path):
    with pytest.raises(ValueError, match=r"'zzzz'.* (digits-small_cnn-\S+, ){3}digits-\S+$"):
        make_plan(experiment_named("sota"), choice, Ledger(tmp_path), "zzzz")


@pytest.mark.parametrize(
    ("name", "protocol", "data"),
    [("sota", "paper", "cifar10"), ("sota", "small", "digits"), ("gate_stability", "fast", "cifar10"),
     ("ablations", "fast", "cifar10")],
)  # fmt: skip
def test_tables_of_changed_recipes_note_the_changes(name, protocol, data):
    unchanged = Choice(data=(data,), protocol=protocol)
    (before,) = experiment_named(name).tables(Ledger("nowhere"), unchanged)
    (after,) = experiment_named(name).tables(
        Ledger("nowhere"), replace(unchanged, changes={"epochs": "1", "lr": "0.2"})
    )
    assert not any("epochs=1" in note for note in before.notes)
    assert any("epochs=1, lr=0.2" in note for note in after.notes)
    summary = protocol_named(protocol).summary
    protocol_notes = {note for note in before.notes if summary in note}
    assert protocol_notes
    assert protocol_notes.isdisjoint(after.notes)


def test_changed_recipes_are_not_compared_with_paper_numbers():
    """The same holds for mean ranks of another protocol."""
    paper_choice = Choice(data=("cifar10",), models=("resnet50_cifar",), losses=("ce", "ls"), seeds=(1, 2))
    sota, measures = experiment_named("sota"), dict.fromkeys(("accuracy", "ece", "aece"), (0.5, 0.4, 0.6))

    def full_table(choice):
        ledger = Ledger("nowhere")
        for planned_run in sota.plan(choice, ledger):
            ledger.lines[planned_run.recipe.name] = Line(
                planned_run.recipe.name, planned_run.recipe, choice.protocol, measures, {}
            )
        (table,) = sota.tables(ledger, choice)
        return table

    assert "outside" in full_table(paper_choice).text("full")
    for other in (replace(paper_choice, changes={"epochs": "1"}), replace(paper_choice, protocol="fast", models=None)):
        table = full_table(other)
        assert not any(column.compared for column in table.columns)
        assert all(cell.values for row in table.rows for cell in row.cells)
        for name in ("difference", "inside", "outside"):
            assert name not in table.text("full")
        assert all(line.endswith(",,") for line in table.csv().splitlines()[1:])


def test_best_paper_numbers_are_marked_over_all_rows_of_the_paper():
    ledger = Ledger(Path(__file__).parents[2] / "results")
    choice = Choice(data=("cifar10",), losses=("ce", "fedlas_ls"), protocol="fast", seeds=(1,))
    (experiment_table,) = experiment_named("sota").tables(Ledger("nowhere"), choice)
    page_table = next(t for t in results_tables(ledger, choice) if t.title.startswith("CIFAR-10, resnet18"))
    (full_table,) = experiment_named("sota").tables(ledger, replace(choice, losses=None))
    position = next(n for n, column in enumerate(full_table.columns) if column.name == "ECE %")
    best = {full_table.rows[n].name for n in full_table.marks()[position].paper.best}
    assert "fedlas_ls" not in best
    for table in (experiment_table, page_table):
        assert [row.name for row in table.rows] == ["ce", "fedlas_ls"]
        assert table.marks()[position].paper.best == ()
        assert "**1.29**" not in table.markdown("both")


def test_ablation_latex_row_labels_are_unique():
    (table,) = experiment_named("ablations").tables(Ledger("nowhere"), Choice(protocol="fast"))
    labels = [line.partition(" & ")[0] for line in table.latex().splitlines() if " & " in line]
    assert len(set(labels)) == len(labels)
    assert any("gate=soft" in label for label in labels)


def test_interrupted_reproduce_ends_without_a_traceback(tmp_path):
    """The message must not suggest --resume, which `reproduce` does not have."""

    def interrupt() -> None:
        until(lambda: list(tmp_path.glob("runs/*/checkpoint.pt")))
        os.kill(os.getpid(), signal.SIGINT)

    command = "reproduce sota --data digits --protocol small --losses ce --seeds 1 --set epochs=2000 --device cpu"
    paths = ["--runs", str(tmp_path / "runs"), "--ledger", str(tmp_path / "results")]
    thread = threading.Thread(target=interrupt)
    thread.start()
    result = CliRunner().invoke(app, [*command.split(), "--set", "model_options.width=8", *paths])
    thread.join()
    assert result.exit_code == 128 + signal.SIGINT
    assert str(tmp_path / "runs") in result.stderr
    assert "--resume" not in result.stderr
    assert "Traceback" not in result.stderr


def test_reproduce_of_a_figure_suggests_the_out_option(tmp_path):
    result = CliRunner().invoke(app, ["reproduce", "smoothing_curve", "--ledger", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "--out" in result.output


def test_control_is_planned_after_the_run_it_depends_on(tmp_path):
    rows = ("fedlas_ls", "ls same mean alpha")
    changes = {"epochs": "1", "batch_size": "100", "model_options.width": "8"}
    choice = Choice(data=("digits",), losses=rows, seeds=(1,), protocol="small", changes=changes)
    experiment, ledger = experiment_named("ablations"), Ledger(tmp_path / "results")
    assert len(make_plan(experiment, choice, ledger).runs) == 1
    tables = list(reproduce(experiment, choice, ledger=ledger, runs=tmp_path / "runs"))
    assert len(tables) == 1, "one table between the two runs; the caller makes the final one"
    lines = {line.recipe.loss: line for line in ledger.lines.values()}
    ratio = lines["fedlas_ls"].curve[-1]["gate"]["alpha_ratio"]
    assert lines["ls"].recipe.loss_options["alpha"] == pytest.approx(0.05 * ratio, abs=1e-5)
    assert [bool(cell(tables[0][0], row, "ECE %").values) for row in rows] == [True, False]
    assert all(cell(experiment.tables(ledger, choice)[0], row, "ECE %").values for row in rows)


@pytest.mark.parametrize("name", sorted(CATALOG.entries))
def test_every_planned_recipe_is_valid(name):
    for protocol in ("paper", "official", "fast"):
        try:
            plan = make_plan(experiment_named(name), Choice(protocol=protocol, seeds=(1,)), Ledger("nowhere"))
        except ValueError as error:
            assert protocol == "fast"
            assert "network" in str(error)  # noqa: PT017
            continue
        for run in plan.runs:
            loss = LOSSES.find(run.recipe.loss)
            sizes = {"num_classes": 10, "num_samples": 20, "epochs": 2}  # filled in by the training engine
            loss(
                **{option: size for option, size in sizes.items() if option in keywords(loss)},
                **run.recipe.loss_options,
            )


def test_dry_run_prints_plan_and_table_without_training(trained, tmp_path):
    arguments = ["reproduce", "sota", "--data", "cifar10", "--protocol", "fast", "--dry-run", "--ledger", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert re.search(r"\b45 runs\b.*\b0\b.*\b45\b", result.output)
    assert "FeDLaS-MbLS" in result.output
    assert "does not exist" not in result.stderr
    assert "--ledger" in CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "missing")]).stderr
    indicator_result = CliRunner().invoke(
        app, ["reproduce", "indicator", "--data", "digits", "--dry-run", "--ledger", str(tmp_path)]
    )
    assert re.search(r"indicator.*small.*\b1 run\b.*\b0\b", indicator_result.output)  # for every requested protocol
    assert not list(tmp_path.iterdir())


def test_dry_run_of_a_figure_ends_without_an_error(tmp_path):
    """Regression: a planned exit was reported as an internal error."""
    out = str(tmp_path / "out")
    result = CliRunner().invoke(app, ["reproduce", "indicator", "--data", "digits", "--dry-run", "--out", out])
    assert result.exit_code == 0
    assert "no figure is drawn" in result.stderr
    assert "internal" not in result.stderr


@pytest.mark.parametrize("name", sorted(CATALOG.entries))
def test_rows_of_planned_runs_are_unique(name):
    plan = make_plan(experiment_named(name), Choice(seeds=(1, 2)), Ledger("nowhere"))
    without_folders = [tuple(row[:-1]) for row in plan.rows()]
    assert len(set(without_folders)) == len(without_folders)


def test_ablation_plan_shows_row_names(tmp_path):
    command = "reproduce ablations --protocol fast --seeds 1 --dry-run --ledger"
    result = CliRunner().invoke(app, [*command.split(), str(tmp_path)])
    planned_runs = result.stdout.partition("What each part")[0]
    for row in ("ls half", "fedlas_ls gate=shuffled", "fedlas_ls theta=0.1", "fedlas_mbls gate=shuffled"):
        assert (row in planned_runs) == (row in experiment_named("ablations").methods), row


def test_run_shared_by_two_rows_is_planned_with_both_names():
    choice = Choice(data=("cifar10",), losses=("ce", "ce+temperature"), seeds=(1,), protocol="fast")
    (row,) = make_plan(experiment_named("sota"), choice, Ledger("nowhere")).rows()
    assert row[2] == "ce, ce+temperature"
    assert "temperature" in row[3]


def test_reproduce_trains_missing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "reproduce sota --data digits --protocol small --losses ls --seeds 1 --set epochs=1 --out made"
    arguments = [*command.split(), "--set", "model_options.width=8"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert [line.method for line in Ledger("results").lines.values()] == ["ls", "ls+temperature"]
    title = experiment_named("sota").title
    assert result.output.count(title) == result.stdout.count(title) == 1, "the last table comes once"
    formats = (".md", ".tex", ".csv", ".txt")
    tables = {f"sota-small{part}{suffix}" for part in ("", "-epochs") for suffix in formats}
    assert {path.name for path in Path("made").glob("[!.]*")} == tables
    second_result = CliRunner().invoke(app, arguments)
    assert re.search(r"small.*\b1 run\b.*\b1\b.*\b0\b", second_result.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("reproduce nothing", "experiment.*'nothing'"),
        ("reproduce sota --protocol quick", "protocol.*'quick'"),
        ("reproduce sota --losses ce,zz", "'zz'"),
        ("reproduce sota --data mars", "'mars'"),
        ("reproduce sota --seeds 1,x", "seeds.*1,x"),
        ("reproduce sota --seeds 1,1", "seeds.*1,1"),
        ("reproduce sota --data cifar10,cifar10", "cifar10"),
        ("reproduce sota --protocol fast --split val", "'val'"),
        ("reproduce sota --dry-run --model nosuch --data cifar10", "network.*'nosuch'"),
        ("reproduce gate_stability --dry-run --model nosuch", "network.*'nosuch'"),
        ("reproduce sota --limit-minutes 0 --dry-run", "limit_minutes.* 0"),
        ("reproduce smoothing_curve --only zzzz", "'zzzz'"),
        ("compare a b --metrics ,", "','"),
        ("reproduce sota --data digits --protocol fast", "'fast'.*'digits'"),
        ("reproduce sota --set epoch=3", "'epoch'"),
        ("compare a b", "'a'.*data/protocol/method"),
    ],
)
def test_invalid_arguments_fail_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 1
    assert re.search(message, result.output), result.output
    assert "Traceback" not in result.output


def test_compare_runs_pairs_models_by_seed(trained, ledger):
    result = compare_runs(find_runs("digits/ce", ledger), find_runs("digits/small/ls", ledger), ("ece", "accuracy"))
    assert set(result[0].by_seed) == {1, 2}
    line = next(line for line in ledger.lines.values() if (line.method, line.seed) == ("ce", 2))
    other = next(line for line in ledger.lines.values() if (line.method, line.seed) == ("ls", 2))
    direct = paired_bootstrap(
        ece, load_stored_predictions(line, ledger).predictions, load_stored_predictions(other, ledger).predictions
    )
    assert result[0].by_seed[2] == direct
    differences = [first.difference for first in result[0].by_seed.values()]
    assert result[0].difference == pytest.approx(sum(differences) / 2)
    assert result[0].standard_error == pytest.approx(abs(differences[0] - differences[1]) / 2)
    assert len(result[0].rows()) == 3


def test_compare_accepts_run_folders_and_files(trained, ledger):
    folders = sorted((trained / "runs").iterdir())
    run = Run(folders[0])
    result = CliRunner().invoke(app, ["compare", str(folders[0]), str(run.predictions_file("last-test"))])
    assert result.exit_code == 0, result.output
    assert re.search(r"accuracy % +\S+ +\S+ +\S+ +\+0", result.output)


@pytest.mark.parametrize("second", ["one.csv", "copy.npz", "other.csv"])
def test_comparing_equal_predictions_adds_a_note(tmp_path, monkeypatch, second):
    monkeypatch.chdir(tmp_path)
    predictions = Predictions(
        torch.randn(50, 3, dtype=torch.float64), torch.arange(50) % 3, class_names=["a", "b", "c"]
    )
    write_predictions(predictions, Path("one.csv"))
    write_predictions(predictions, Path("copy.npz"))
    write_predictions(
        Predictions(2 * predictions.logits, predictions.labels, class_names=["a", "b", "c"]), Path("other.csv")
    )
    result = CliRunner().invoke(app, ["compare", "one.csv", second])
    assert result.exit_code == 0, result.output
    assert ("identical predictions" in result.stderr) == (second != "other.csv")


def test_note_names_seeds_with_equal_predictions(ledger):
    ce, ls = (find_runs(f"digits/{name}", ledger) for name in ("ce", "ls"))
    assert comparison_notes(ce, ls) == []
    (note,) = comparison_notes(ce, ce)
    assert "identical predictions" in note
    (note,) = comparison_notes(ce, ModelRuns("mixed", {1: ls.runs[1], 2: ce.runs[2]}))
    assert re.search(r"identical predictions.*\b2\b", note)


def test_note_names_unpaired_seeds(ledger):
    ce, ls = (find_runs(f"digits/{name}", ledger) for name in ("ce", "ls"))
    with_seed_7 = replace(ls, runs={**ls.runs, 7: ls.runs[1]}, settings={**ls.settings, 7: ls.settings[1]})
    for note, position in ((comparison_notes(ce, with_seed_7), "second"), (comparison_notes(with_seed_7, ce), "first")):
        assert len(note) == 1
        assert re.search(rf"\b{position}\b.*\b7\b", note[0])


def test_note_names_differing_recipe_fields(ledger):
    ce = find_runs("digits/ce", ledger)
    first = ModelRuns("a", {1: ce.runs[1]}, settings={1: ce.settings[1]})
    other = {**ce.settings[2], "epochs": 9}
    second = ModelRuns("b", {2: ce.runs[2]}, settings={2: other})
    notes = sorted(comparison_notes(first, second))
    assert len(notes) == 2
    assert re.search(rf"epochs.*\b{ce.settings[1]['epochs']}\b.*\b9\b", notes[0])
    assert re.search(r"seed.*\b1\b.*\b2\b", notes[1])
    (item,) = compare_runs(first, second, ["accuracy"], resamples=100)
    assert item.rows()[0][1] == "1, 2"
    assert [item.to_dict()["pairs"][0][name] for name in ("seed", "second_seed")] == [1, 2]


def test_note_reports_pairing_by_row_number():
    predictions = Predictions(torch.randn(50, 3), torch.arange(50) % 3)
    other = Predictions(torch.randn(50, 3), torch.arange(50) % 3)
    (note,) = comparison_notes(ModelRuns("a", {None: predictions}), ModelRuns("b", {None: other}))
    assert re.search(r"\bids\b.*\bindex\b", note)
    indexed = [Predictions(item.logits, item.labels, index=torch.arange(50)) for item in (predictions, other)]
    assert comparison_notes(*(ModelRuns(name, {None: item}) for name, item in zip("ab", indexed, strict=True))) == []
    assert comparison_notes(ModelRuns("a", {None: predictions}), ModelRuns("b", {None: indexed[1]})) == [note]


@pytest.mark.parametrize(
    ("first_names", "second_names", "message"),
    [
        ("abc", "bac", "order"),
        ("210", "012", "order"),
    ],
)
def test_compare_rejects_different_classes(tmp_path, monkeypatch, first_names, second_names, message):
    monkeypatch.chdir(tmp_path)
    logits, labels = torch.randn(50, 3), torch.arange(50) % 3
    write_predictions(Predictions(logits, labels, class_names=list(first_names)), "one.safetensors")
    write_predictions(Predictions(-logits, labels, class_names=list(second_names)), "two.safetensors")
    result = CliRunner().invoke(app, ["compare", "one.safetensors", "two.safetensors"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(f"^fedlas: .*classes.*{message}", result.stderr)


def test_temperature_scaled_ledger_rows_can_be_compared():
    """These older lines have no stored logits."""
    ledger = Ledger(Path(__file__).parents[2] / "results")
    model_runs = find_runs("cifar10/fast/ce+temperature", ledger)
    lines = {line.seed: line for line in find_lines(model_runs.name, ledger)}
    for seed, predictions in model_runs.runs.items():
        assert float(ece(predictions)) == pytest.approx(lines[seed].metrics["ece"][0], abs=1e-6)


def many_class_predictions(seed: int) -> Predictions:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(600) % 30
    logits = 3 * torch.randn(600, 30, generator=generator)
    logits[torch.arange(600), labels] += 5
    return Predictions(logits, labels, split="test")


def test_many_class_rows_are_compared_by_top_probabilities():
    predictions = [many_class_predictions(seed) for seed in (1, 2)]
    models = [
        ModelRuns(name, {1: StoredPredictions.of(item).tops()}) for name, item in zip("ab", predictions, strict=True)
    ]
    result = {item.metric: item for item in compare_runs(*models)}
    assert set(result) == {"accuracy", "ece", "aurc"}
    for name, metric in {"accuracy": accuracy, "ece": ece}.items():
        direct = paired_bootstrap(metric, *predictions)
        assert result[name].difference == pytest.approx(direct.difference, abs=1e-6)
        assert result[name].by_seed[1].interval.low == pytest.approx(direct.interval.low, abs=1e-3)
        assert result[name].by_seed[1].better == direct.better
    with pytest.raises(ValueError, match=r"nll.*\ba\b.*accuracy, ece"):
        compare_runs(*models, ("nll",))


def test_many_class_rows_are_compared_by_stored_nll_and_brier():
    """The ledger stores the loss and the squared error of each sample."""
    predictions = [many_class_predictions(seed) for seed in (1, 2)]
    stored = [StoredPredictions.of(item) for item in predictions]
    models = [
        ModelRuns(name, {1: item.tops()}, {1: item.of_each_sample()}) for name, item in zip("ab", stored, strict=True)
    ]
    assert [item.metric for item in compare_runs(*models)] == ["accuracy", "ece", "nll", "brier", "aurc"]
    for other in (models[1], ModelRuns("b", {1: predictions[1]})):  # also against complete predictions
        for result, metric in zip(compare_runs(models[0], other, ("nll", "brier")), (nll, brier), strict=True):
            direct = paired_bootstrap(metric, *predictions)
            assert result.difference == pytest.approx(direct.difference, abs=1e-6)
            assert result.by_seed[1].interval.low == pytest.approx(direct.interval.low, abs=1e-5)
            assert result.by_seed[1].better == direct.better


def test_ledger_lookup_excludes_variants_of_the_protocol():
    """Ablations have the same loss as the row they are derived from."""
    ledger = Ledger(Path(__file__).parents[2] / "results")
    line = next(item for item in ledger.lines.values() if item.method == "fedlas_ls" and item.seed == 1)
    other = replace(line.recipe, loss_options={**line.recipe.loss_options, "beta": 1.0})
    ledger.lines["variant"] = replace(line, id="variant", recipe=other)
    assert line in find_lines("cifar10/fast/fedlas_ls", ledger)
    assert "variant" not in {item.id for item in find_lines("cifar10/fast/fedlas_ls", ledger)}
    assert len(find_runs("cifar10/fast/fedlas_ls", ledger).runs) == 3


def test_ls_half_uses_half_the_alpha_of_the_protocol():
    for data in ("cifar10", "cifar100"):
        choice = Choice(data=(data,), losses=("ls", "ls half"), protocol="fast", seeds=(1,))
        ls, ls_half = (planned.recipe for planned in experiment_named("ablations").plan(choice, Ledger("nowhere")))
        assert ls_half.loss_options["alpha"] == ls.loss_options["alpha"] / 2


def test_ablation_rows_are_found_by_name():
    ledger = Ledger(Path(__file__).parents[2] / "results")
    for row, options in (("fedlas_ls gate=shuffled", {"gate": "shuffled"}), ("ls half", {"alpha": 0.025})):
        for text in (f"cifar10/{row}", f"cifar10/fast/{row}"):
            lines = find_lines(text, ledger)
            assert sorted(line.seed for line in lines) == [1, 2, 3]
            assert all(options.items() <= line.recipe.loss_options.items() for line in lines)
    recipe_by_seed = {line.seed: line.recipe for line in find_lines("cifar10/fast/ls same mean alpha", ledger)}
    assert {recipe.loss for recipe in recipe_by_seed.values()} == {"ls"}
    assert len({recipe.loss_options["alpha"] for recipe in recipe_by_seed.values()}) > 1, "each seed has its own mean"
    assert find_lines("cifar100/fast/ls half", ledger) == find_lines("cifar10/paper/ls half", ledger) == []


@pytest.mark.parametrize("name", ["sota", "ood"])
def test_results_tables_skip_data_that_is_not_in_the_experiment(name):
    ledger = Ledger(Path(__file__).parents[2] / "results")
    line = next(iter(ledger.lines.values()))
    ledger.lines["tiny"] = replace(line, id="tiny", recipe=recipe_for("tiny_imagenet", protocol="fast"))
    assert "CIFAR-10, resnet18_cifar, fast protocol" in [table.title for table in results_tables(ledger, name=name)]


def test_tables_note_rebuilt_svhn():
    ledger = Ledger(Path(__file__).parents[2] / "results")
    (table,) = experiment_named("ood").tables(ledger, Choice(data=("cifar10",), protocol="fast"))
    assert any("SVHN" in note and "rebuilt" in note for note in table.notes)
    line = next(iter(ledger.lines.values()))
    assert {"ood-svhn", "ood-cifar100"} <= set(line.data)


def test_predefined_recipes_include_all_planned_recipes():
    """The tables train the recipes that `fedlas list recipes` shows."""
    predefined = {recipe.replace(seed=1) for protocol, recipe in list_recipes() if protocol == "fast"}
    plan = make_plan(experiment_named("sota"), Choice(protocol="fast", seeds=(1,)), Ledger("nowhere"))
    assert {run.recipe for run in plan.runs} <= predefined


def test_line_checksums_identify_the_splits(ledger):
    checksums = {tuple(sorted(line.data.items())) for line in ledger.lines.values()}
    tests = {line.data["test"] for line in ledger.lines.values()}
    assert len(tests) == 1  # the same for every seed
    assert len(checksums) == 2  # each seed has its own training split
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in tests)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("--set loss_options.alpah=0.1", "'ls'.*'alpah'.*'alpha'"),
        ("--set loss_options.alpha=7", "alpha.*0.*1.*7"),
        ("--set loss_options.alpha=x", "alpha.*'ls'.*'x'"),
        ("--set loss_options.weight=[1,2]", "weight.*2.*10"),
        ("--set model_options.widht=3", "'small_cnn'.*'widht'.*'width'"),
        ("--set data_options.label_noise=3", "label_noise.*0.*1.*3"),
        ("--set alpha=0.1", r"'ls'.*loss_options\.alpha"),
        ("--workers 0", "workers.*1.*0"),
        ("--gpus-per-run 2", "gpus_per_run.*0.*1.*2.*torchrun"),
        ("--cpus-per-run -1", "cpus_per_run.*0.*-1"),
        ("--address auto", "address.*Ray"),
        ("--runs file", "file .*--runs"),
        ("--runs file/below", "file .*--runs"),
    ],
)
@pytest.mark.parametrize("dry_run", [["--dry-run"], []], ids=["dry", "real"])
def test_invalid_settings_fail_before_planning(settings, message, dry_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    options = ["--data", "digits", "--losses", "ls", "--seeds", "1", "--protocol", "small", *settings.split(), *dry_run]
    result = CliRunner().invoke(app, ["reproduce", "sota", *options])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.output
    assert re.search(message, result.stderr), result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_check_parts_draws_no_random_numbers():
    state = torch.get_rng_state()
    folder = {
        "data_options": {"path": "nowhere"},
        "loss_options": {"weight": [1.0, 2.0, 3.0]},
    }  # number of classes unknown
    for name in LOSSES.entries:
        check_parts(recipe_for("digits", loss=name))
        check_parts(recipe_for("folder", "small_cnn", name, protocol="small", **folder))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("change", ["loss=ls", "data=cifar10", "model=resnet18_cifar", "seed=1"])
def test_set_rejects_fields_that_have_their_own_option(change):
    name, _, value = change.partition("=")
    with pytest.raises(ValueError, match=f"{name}.* --"):
        Choice(changes={name: value})


def test_ledger_path_that_is_a_file_fails_before_training(tmp_path):
    (tmp_path / "ledger").write_text("")
    result = CliRunner().invoke(app, ["reproduce", "sota", "--data", "digits", "--ledger", str(tmp_path / "ledger")])
    assert result.exit_code == 1
    assert str(tmp_path / "ledger") in result.output
