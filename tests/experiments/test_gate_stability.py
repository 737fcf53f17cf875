"""The figure on the gate takes its numbers from ledger lines, seed by seed."""

import json
import re

import pytest
from small_ledgers import minimal_ledger, minimal_line

from fedlas.experiments.base import Choice, Drawing
from fedlas.experiments.gate_stability import GateStability
from fedlas.experiments.ledger import Ledger
from fedlas.training.protocols import recipe_for

CHOICE = Choice(seeds=(1, 2))


def curve(start, epochs=3):
    return tuple(
        {
            "epoch": n,
            "gate": {
                "positive": start + n / 10,
                "negative": 1 - start - n / 10,
                "flip_rate": None if n == 1 else start / n,
                "alpha_ratio": 2 * start,
                "against_gamma": 3 * start,
            },
        }
        for n in range(1, epochs + 1)
    )


def ledger_of(folder, curves):
    """Return a ledger with one line for each recipe and its curve."""
    lines = [minimal_line(recipe, "paper", curve=run_curve) for recipe, run_curve in curves]
    return minimal_ledger(folder, lines)


def recipe(loss, seed, model="resnet50_cifar", data="cifar10"):
    return recipe_for(data, model, loss, protocol="paper", seed=seed)


@pytest.fixture
def ledger(tmp_path):
    curves = [
        (recipe("fedlas_ls", 1), curve(0.1)),
        (recipe("fedlas_ls", 2), curve(0.3)),
        (recipe("fedlas_mbls", 2), curve(0.2)),
    ]
    return ledger_of(tmp_path / "ledger", curves)


def test_gate_stability_uses_runs_of_the_main_table(tmp_path):
    from fedlas.experiments.sota import Sota

    empty_ledger = Ledger(tmp_path)
    plan = GateStability().plan(CHOICE, empty_ledger)
    assert [planned.recipe for planned in plan] == [
        recipe(loss, seed) for loss in ("fedlas_ls", "fedlas_mbls") for seed in (1, 2)
    ]
    assert {planned.protocol for planned in plan} == {"paper"}
    shared = {planned.recipe.key for planned in Sota().plan(CHOICE, empty_ledger)}
    assert {planned.recipe.key for planned in plan} <= shared


def test_choice_overrides_the_planned_runs(tmp_path):
    choice = Choice(("cifar100",), ("resnet101_cifar",), ("fedlas_ls",), (5,), "official", {"epochs": "7"})
    (item,) = GateStability().plan(choice, Ledger(tmp_path))
    expected = recipe_for("cifar100", "resnet101_cifar", "fedlas_ls", protocol="official", seed=5).replace(epochs=7)
    assert (item.recipe, item.protocol) == (expected, "official")
    assert GateStability().plan(Choice(protocol="fast"), Ledger(tmp_path))[0].recipe.model == "resnet18_cifar"
    assert GateStability().plan(Choice(protocol="small"), Ledger(tmp_path))[0].recipe.data == "digits"
    with pytest.raises(ValueError, match="loss 'ce'"):
        GateStability().plan(Choice(losses=("ce",)), Ledger(tmp_path))
    with pytest.raises(ValueError, match="cifar11"):
        GateStability().plan(Choice(data=("cifar11",)), Ledger(tmp_path))


def test_the_table_has_first_and_last_epochs_of_each_seed(ledger):
    (table,) = GateStability().tables(ledger, CHOICE)
    assert table.name == "gate_stability-paper"
    headings = [column.name for column in table.columns]
    assert not any(column.ranked for column in table.columns)
    complete_row, partial_row = table.rows
    assert [row.title for row in table.rows] == ["FeDLaS-LS", "FeDLaS-MbLS"]
    cells = dict(zip(headings, complete_row.cells, strict=True))
    assert cells["psi = +1 %, first epoch"].values == pytest.approx((0.2, 0.4))
    assert cells["psi = +1 %, last epoch"].values == pytest.approx((0.4, 0.6))
    assert cells["flip rate %, second epoch"].values == pytest.approx((0.05, 0.15))
    assert cells["flip rate %, last epoch"].values == pytest.approx((0.1 / 3, 0.1))
    assert cells["alpha_i / alpha, last epoch"].values == pytest.approx((0.2, 0.6))
    assert cells["psi = -sign(gamma) %, last epoch"].values == pytest.approx((0.3, 0.9))
    assert [(len(cell.values), cell.planned) for cell in partial_row.cells] == [(1, 2)] * len(headings)
    assert "(1/2)" in table.text()
    assert "Protocol" in table.notes[0]


def test_without_runs_table_cells_are_empty_and_no_figure_is_drawn(tmp_path):
    empty_ledger = Ledger(tmp_path / "none")
    (table,) = GateStability().tables(empty_ledger, CHOICE)
    assert all(cell.values == () for row in table.rows for cell in row.cells)
    assert GateStability().draw(Drawing(empty_ledger, CHOICE, tmp_path / "figures", lambda _: None)) == []
    assert not (tmp_path / "figures").exists()


def test_the_figure_has_mean_and_range_over_seeds(ledger, tmp_path):
    pytest.importorskip("matplotlib")
    files = GateStability().draw(Drawing(ledger, CHOICE, tmp_path / "figures", lambda _: None))
    assert [path.name for path in files] == [
        f"gate_stability-paper-cifar10-resnet50_cifar.{end}" for end in ("pdf", "png", "json")
    ]
    assert all(re.fullmatch(GateStability().file_names, path.stem) for path in files)
    data = json.loads(files[2].read_text())
    assert data["milestones"] == [150, 250]
    assert "CIFAR" in data["title"]
    first, second = data["positive"]
    assert (first["name"], second["name"]) == ("FeDLaS-LS (2 seeds)", "FeDLaS-MbLS (1 seed)")
    assert first["mean"] == pytest.approx([0.3, 0.4, 0.5])
    assert (first["low"], first["high"]) == (pytest.approx([0.2, 0.3, 0.4]), pytest.approx([0.4, 0.5, 0.6]))
    assert data["flip_rate"][0]["epochs"] == [2, 3]
    assert data["negative"][1]["mean"] == pytest.approx([0.7, 0.6, 0.5])


def test_one_cycle_has_no_milestones_and_losses_without_runs_are_left_out(tmp_path):
    pytest.importorskip("matplotlib")
    choice = Choice(protocol="small", seeds=(1,))
    recorded = recipe_for("digits", "small_cnn", "fedlas_mbls", protocol="small", seed=1)
    files = GateStability().draw(
        Drawing(ledger_of(tmp_path / "l", [(recorded, curve(0.1))]), choice, tmp_path, lambda _: None)
    )
    data = json.loads(files[2].read_text())
    assert data["milestones"] == []
    assert [item["name"] for item in data["positive"]] == ["FeDLaS-MbLS (1 seed)"]
