"""OOD detection: agreement with scikit-learn, exact counts, coverage of intervals, several data sets in one call."""

import inspect
import itertools
import json
import math
import re
import time
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from fedlas import ood
from fedlas.metrics.result import Result
from fedlas.ood.detection import Ranking, aupr_of, auroc_of, fpr_of, ranking
from fedlas.predictions import Predictions

NORMAL = NormalDist()


def scores_of_kind(kind: str, n: int = 400, m: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    id_data, ood_data = torch.randn(n, dtype=torch.float64), 1 + 1.5 * torch.randn(m, dtype=torch.float64)
    return {
        "random": (id_data, ood_data),
        "float32": (id_data.float(), ood_data.float()),
        "tied": (id_data.round(), ood_data.round()),
        "bfloat16": (id_data.bfloat16(), ood_data.bfloat16()),
        "float16": (id_data.half(), ood_data.half()),
        "huge": (1e300 * id_data, 1e300 * ood_data),
        "tiny": (1e-310 * id_data, 1e-310 * ood_data),
        "far from 0..1": (50 + id_data, 50 + ood_data),  # torchmetrics applies a sigmoid, which rounds to 1
        "one value": (torch.zeros(n), torch.zeros(m)),
        "separated": (id_data, ood_data + 100),
        "the wrong way": (id_data, ood_data - 100),
        "integers": (id_data.round().long(), ood_data.round().long()),
        "unequal types": (id_data.half(), ood_data.float()),
    }[kind]


KINDS = [
    *("random", "float32", "tied", "bfloat16", "float16", "huge", "tiny", "far from 0..1", "one value"),
    *("separated", "the wrong way", "integers", "unequal types"),
]


def sklearn_form(id_scores: torch.Tensor, ood_scores: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    scores = torch.cat([id_scores.double(), ood_scores.double()]).numpy()
    return np.r_[np.zeros(len(id_scores)), np.ones(len(ood_scores))], scores


def fpr_at_first_threshold(labels: np.ndarray, scores: np.ndarray, tpr: float) -> float:
    fpr_values, tpr_values, _ = roc_curve(labels, scores, drop_intermediate=False)
    return float(fpr_values[np.argmax(tpr_values >= tpr)])


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_match_scikit_learn(kind):
    id_data, ood_data = scores_of_kind(kind)
    labels, scores = sklearn_form(id_data, ood_data)
    assert ood.auroc(id_data, ood_data) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    aupr_ood, aupr_id = ood.aupr(id_data, ood_data), ood.aupr(id_data, ood_data, positive="id")
    assert aupr_ood == pytest.approx(average_precision_score(labels, scores), abs=1e-12)
    assert aupr_id == pytest.approx(average_precision_score(1 - labels, -scores), abs=1e-12)
    for tpr in (0.5, 0.8, 0.95, 1.0):
        assert ood.fpr_at_tpr(id_data, ood_data, tpr) == fpr_at_first_threshold(labels, scores, tpr)
        assert ood.fpr_at_tpr(id_data, ood_data, tpr, positive="id") == fpr_at_first_threshold(1 - labels, -scores, tpr)


def test_numpy_arrays_and_lists_are_accepted():
    id_data, ood_data = scores_of_kind("tied")
    expected = ood.auroc(id_data, ood_data)
    assert ood.auroc(id_data.numpy(), ood_data.numpy()) == expected
    assert ood.auroc(id_data.tolist(), ood_data.tolist()) == expected


def test_infinite_scores_are_ranked():
    id_data, ood_data = torch.tensor([-math.inf, 0.0, 1.0]), torch.tensor([0.5, math.inf, math.inf])
    assert ood.auroc(id_data, ood_data) == 8 / 9
    assert ood.auroc(torch.tensor([math.inf]), torch.tensor([math.inf])) == 0.5


def test_reference_values_of_the_official_code():
    """Results of the official evaluation: rows 0..599 against the other rows, halved."""
    random = np.random.RandomState(0)
    logits = 2 * random.randn(1000, 5)
    labels = random.randint(0, 5, 1000)
    logits[np.arange(1000), labels] += 1.5
    id_data, ood_data = logits[:600].astype(np.float32), 0.5 * logits[600:].astype(np.float32)
    assert ood.auroc(ood.entropy(id_data), ood.entropy(ood_data)) == 0.8375125
    assert ood.auroc(ood.max_probability(id_data), ood.max_probability(ood_data)) == 0.7809625


tables = st.lists(st.integers(-4, 4), min_size=1, max_size=25)


@settings(max_examples=50)
@given(tables, tables)
def test_metrics_match_exact_fractions_for_both_positives(id_data, ood_data):
    x, y = torch.tensor(id_data, dtype=torch.float64), torch.tensor(ood_data, dtype=torch.float64)
    pairs = [Fraction(1 if a < b else 0) if a != b else Fraction(1, 2) for a in id_data for b in ood_data]
    area = sum(pairs) / len(pairs)
    assert ood.auroc(x, y) == float(area)
    assert ood.auroc(-x, -y) == float(1 - area)
    assert ood.auroc(y, x) == float(1 - area)
    assert ood.aupr(x, y, positive="id") == ood.aupr(-y, -x)
    assert ood.fpr_at_tpr(x, y, positive="id") == ood.fpr_at_tpr(-y, -x)


@settings(max_examples=25)
@given(tables, tables, st.randoms(use_true_random=False))
def test_metrics_are_invariant_to_order_and_monotone_transforms(id_data, ood_data, random):
    def values_and_intervals(x, y):
        x, y = (torch.tensor(v, dtype=torch.float64) for v in (x, y))
        results = ood.auroc(x, y), ood.aupr(x, y), ood.aupr(x, y, positive="id"), ood.fpr_at_tpr(x, y)
        return [(float(r), r.interval.low, r.interval.high) for r in results]

    expected = values_and_intervals(id_data, ood_data)
    assert (
        values_and_intervals(random.sample(id_data, len(id_data)), random.sample(ood_data, len(ood_data))) == expected
    )
    for transform in (math.exp, math.atan, lambda v: 1e200 * v + 5e200, lambda v: v**3):
        assert values_and_intervals([transform(v) for v in id_data], [transform(v) for v in ood_data]) == expected


@settings(max_examples=50)
@given(tables, tables)
def test_intervals_contain_their_value_and_stay_between_0_and_1(id_data, ood_data):
    x, y = torch.tensor(id_data, dtype=torch.float64), torch.tensor(ood_data, dtype=torch.float64)
    for result in (ood.auroc(x, y), ood.aupr(x, y), ood.aupr(x, y, positive="id"), ood.fpr_at_tpr(x, y)):
        assert 0 <= result.interval.low <= result <= result.interval.high <= 1
        assert result.interval.width > 0


def ranking_of_counts(positives: list[int], negatives: list[int]) -> Ranking:
    scores = -torch.arange(len(positives), dtype=torch.float64)
    return Ranking(scores, torch.tensor(positives), torch.tensor(negatives))


def test_counts_are_exact_above_two_to_the_24():
    """A float32 counter stops at 2^24."""
    positives, negatives = [20_000_001, 3, 10**9], [7, 20_000_003, 2 * 10**9 + 1]
    ranked = ranking_of_counts(positives, negatives)
    m, n = sum(positives), sum(negatives)
    correct_pairs = sum(
        Fraction(p) * (sum(negatives[i + 1 :]) + Fraction(negatives[i], 2)) for i, p in enumerate(positives)
    )
    assert auroc_of(ranked) == float(correct_pairs / (m * n))
    true_positives, false_positives, area = 0, 0, Fraction(0)
    for p, q in zip(positives, negatives, strict=True):
        true_positives, false_positives = true_positives + p, false_positives + q
        area += Fraction(p, m) * Fraction(true_positives, true_positives + false_positives)
    assert aupr_of(ranked) == pytest.approx(float(area), rel=1e-15)
    assert fpr_of(ranked, 20_000_001 / m) == 7 / n
    assert fpr_of(ranked, 20_000_002 / m) == float(Fraction(20_000_010, n))


def test_seventeen_million_ties():
    """In a float16 or float32 counter 2^24 + 1 is 2^24."""
    n = 2**24 + 1
    id_data, ood_data = torch.zeros(n, dtype=torch.float16), torch.zeros(3, dtype=torch.float16)
    ranked = ranking(id_data, ood_data)
    assert ranked.sizes == (3, n)
    assert auroc_of(ranked) == 0.5
    assert aupr_of(ranked) == pytest.approx(3 / (n + 3), rel=1e-12)
    assert fpr_of(ranked) == 1.0
    assert fpr_of(ranked.reversed()) == 1.0


def test_tied_scores_pass_the_threshold_together():
    id_data = torch.tensor([0.0, 1.0, 1.0, 2.0])
    ood_data = torch.tensor([1.0, 1.0, 2.0, 3.0])
    result = ood.fpr_at_tpr(id_data, ood_data, 0.75)
    assert result == 0.75
    assert result.details["threshold"] == 1.0
    assert result.details["tpr"] == 1.0
    other = ood.fpr_at_tpr(id_data, ood_data, 0.75, positive="id")
    assert other == 0.5
    assert other.details["threshold"] == 1.0


@pytest.mark.parametrize("m", [20, 40, 60, 100, 140, 1000])
def test_a_tpr_that_is_met_exactly_counts_as_met(m):
    """0.95 * 20 is 19 and 19 / 20 is 0.95, regardless of rounding."""
    scores = torch.arange(m, 0, -1.0)
    assert ood.fpr_at_tpr(scores - 0.5, scores, 0.95) == pytest.approx(0.95 - 1 / m)


def test_delong_variance_matches_the_textbook_formula():
    id_data, ood_data = scores_of_kind("tied", 60, 40)
    result = ood.auroc(id_data, ood_data, level=0.9)
    wins = (id_data[None] < ood_data[:, None]).double() + (id_data[None] == ood_data[:, None]).double() / 2
    variance = float(wins.mean(1).var() / 40 + wins.mean(0).var() / 60)
    area = float(wins.mean())
    margin = NORMAL.inv_cdf(0.95) * math.sqrt(variance) / (area * (1 - area))
    expected = [1 / (1 + math.exp(-(math.log(area / (1 - area)) + sign * margin))) for sign in (-1, 1)]
    assert [result.interval.low, result.interval.high] == pytest.approx(expected, rel=1e-12)


def test_aupr_variance_matches_a_bootstrap():
    id_data, ood_data = scores_of_kind("bfloat16", 300, 200)
    random = np.random.default_rng(0)
    resampled = [
        ood.aupr(id_data[random.integers(0, 300, 300)], ood_data[random.integers(0, 200, 200)]).value
        for _ in range(400)
    ]
    result = ood.aupr(id_data, ood_data)
    standard_error = result.interval.width / (2 * 1.96)
    assert standard_error == pytest.approx(np.std(resampled), rel=0.12)


def test_perfectly_separated_scores_have_a_nonempty_interval():
    id_data, ood_data = torch.arange(50.0), torch.arange(100.0, 130.0)
    area = ood.auroc(id_data, ood_data)
    assert (area, area.interval.high) == (1.0, 1.0)
    assert area.interval.low == pytest.approx(0.025 ** (1 / 30))  # 30 pairs without a common sample, all right
    reversed_area = ood.auroc(ood_data, id_data)
    assert (reversed_area, reversed_area.interval.low) == (0.0, 0.0)
    assert reversed_area.interval.high == pytest.approx(1 - 0.025 ** (1 / 30))
    rate = ood.fpr_at_tpr(id_data, ood_data)
    assert (rate, rate.interval.low, rate.interval.high) == (0.0, 0.0, 1.0)  # 30 positives do not bound a 5 % quantile
    rate = ood.fpr_at_tpr(id_data, torch.arange(100.0, 300.0))
    assert (rate, rate.interval.low) == (0.0, 0.0)
    assert 1 - 0.025 ** (1 / 50) <= rate.interval.high < 0.09
    precision = ood.aupr(id_data, ood_data)
    assert precision == 1.0
    assert 0.5 < precision.interval.low < 0.95
    # One misranked pair must not raise the lower end of an interval.
    mixed = torch.cat([ood_data[1:], torch.tensor([48.5])])
    assert ood.auroc(id_data, mixed).interval.low <= area.interval.low
    assert ood.aupr(id_data, mixed).interval.low <= precision.interval.low + 1e-3
    single = ood.aupr(id_data, torch.tensor([10.5]))  # one sample has no variance estimate: the interval is wide
    assert single.interval.method == ood.aupr(id_data, ood_data[:1]).interval.method
    constant = ood.auroc(torch.zeros(50), torch.zeros(30)).interval
    assert constant.low < 0.5 < constant.high


def true_values(shift: float, scale: float, n: int, m: int) -> dict[str, float]:
    """AUROC, AUPR and FPR of normal scores: ID scores are standard normal, OOD scores are shifted and scaled."""
    levels = (np.arange(100_000) + 0.5) / 100_000
    precision_ood = levels / (levels + n / m * ndtr(-(shift + scale * ndtri(1 - levels))))
    precision_id = levels / (levels + m / n * ndtr((ndtri(levels) - shift) / scale))
    return {
        "auroc": NORMAL.cdf(shift / math.hypot(1, scale)),
        "aupr_out": float(precision_ood.mean()),
        "aupr_in": float(precision_id.mean()),
        "fpr": NORMAL.cdf(-(shift + scale * NORMAL.inv_cdf(0.05))),
    }


def coverage(shift: float, scale: float, n: int, m: int, trials: int) -> dict[str, float]:
    random, expected = np.random.default_rng(0), true_values(shift, scale, n, m)
    covered = dict.fromkeys(expected, 0)
    for _ in range(trials):
        ranked = ranking(random.standard_normal(n), shift + scale * random.standard_normal(m))
        results = [auroc_of(ranked), aupr_of(ranked), aupr_of(ranked.reversed()), fpr_of(ranked)]
        for name, result in zip(covered, results, strict=True):
            covered[name] += expected[name] in result.interval
    return {name: count / trials for name, count in covered.items()}


def test_intervals_cover_the_true_value():
    """A quick check; the campaign below requires 92 to 99 %."""
    assert min(coverage(1, 1, 400, 300, trials=40).values()) >= 0.9


@pytest.mark.campaign
@pytest.mark.parametrize("sizes", [(20, 20), (50, 200), (500, 500), (2_000, 5_000)])
@pytest.mark.parametrize(("shift", "scale"), [(0, 1), (1, 1), (2.5, 1), (2, 0.3), (4, 1), (1, 2)])
def test_95_percent_intervals_cover_everywhere(shift, scale, sizes):
    result = coverage(shift, scale, *sizes, trials=1_000)
    assert 0.92 <= result["auroc"] <= 0.99
    assert min(result.values()) >= 0.92


@pytest.mark.parametrize("function", [ood.auroc, ood.aupr, ood.fpr_at_tpr])
def test_invalid_scores_raise_an_error_with_their_name(function):
    scores = torch.rand(4)
    with pytest.raises(ValueError, match="id_scores"):
        function(torch.zeros(0), scores)
    with pytest.raises(ValueError, match="ood_scores"):
        function(scores, [])
    with pytest.raises(ValueError, match=r"ood_scores.*row 2"):
        function(scores, torch.tensor([1.0, 2.0, math.nan, math.nan]))
    with pytest.raises(ValueError, match=r"id_scores.*\(2, 2\)"):
        function(torch.rand(2, 2), scores)
    with pytest.raises(ValueError, match=r"level.*95"):
        function(scores, scores, level=95)


def test_invalid_options_raise_an_error_with_their_name():
    scores = torch.rand(4)
    with pytest.raises(ValueError, match=r"tpr.*95"):
        ood.fpr_at_tpr(scores, scores, 95)
    with pytest.raises((ValueError, TypeError), match="positive"):  # the shape checks of the tests come first
        ood.aupr(scores, scores, positive="in")


def test_results_carry_their_definition():
    id_data, ood_data = scores_of_kind("bfloat16")
    area, aupr_id, fpr = (
        ood.auroc(id_data, ood_data),
        ood.aupr(id_data, ood_data, positive="id"),
        ood.fpr_at_tpr(id_data, ood_data),
    )
    assert isinstance(area, Result)
    assert (area.n, area.dtype, area.estimator) == (700, "bfloat16", "AUROC")
    assert re.match("OOD positive.*higher.*OOD", area.scope)
    assert re.match("ID positive.*lower.*ID", aupr_id.scope)
    assert area.details == {"n_id": 400, "n_ood": 300, "positive": "ood"}
    assert aupr_id.details == {"n_id": 400, "n_ood": 300, "positive": "id", "chance": 4 / 7}
    fpr_id = ood.fpr_at_tpr(id_data, ood_data, positive="id")
    assert re.fullmatch(r"FPR at 95 % TPR .*OOD positive.*", fpr.estimator)
    assert re.fullmatch(r"FPR at 95 % TPR .*ID positive.*", fpr_id.estimator)
    assert "ID positive" in aupr_id.estimator
    assert "average precision" in aupr_id.norm
    assert "DeLong" in area.interval.method
    assert Result.from_dict(json.loads(fpr.to_json())).interval == fpr.interval


def random_predictions(n: int, scale: float, width: int | None = 6, **fields: object) -> Predictions:
    features = None if width is None else scale * torch.randn(n, width)
    return Predictions(scale * torch.randn(n, 5), torch.zeros(n, dtype=torch.long), features=features, **fields)


def test_detect_evaluates_all_scores_on_all_sets():
    id_data, svhn, noise = (
        random_predictions(200, 3, split="test"),
        random_predictions(150, 1),
        random_predictions(120, 2),
    )
    result = ood.detect(id_data, {"svhn": svhn, "noise": noise})
    assert result.scores == ood.score_names()
    for (name, ood_data), score in itertools.product({"svhn": svhn, "noise": noise}.items(), ood.score_names()):
        x, y = ood.score_of(id_data, score), ood.score_of(ood_data, score)
        detection = result[name][score]
        assert detection.auroc == ood.auroc(x, y)
        assert detection.aupr_out == ood.aupr(x, y)
        assert detection.aupr_in == ood.aupr(x, y, positive="id")
        assert detection.fpr == ood.fpr_at_tpr(x, y)
        assert detection.fpr.interval == ood.fpr_at_tpr(x, y).interval
        assert detection.auroc.split.split()[::2] == ["test", name]
        assert detection.auroc.details["score"] == score
    mean = result.mean["entropy"].auroc
    assert mean == pytest.approx((result["svhn"]["entropy"].auroc + result["noise"]["entropy"].auroc) / 2)
    assert mean.details["values"] == {name: result[name]["entropy"].auroc for name in ("svhn", "noise")}
    assert (mean.n, mean.interval) == (470, None)


def test_detection_round_trips_through_json_and_prints_a_table():
    result = ood.detect(
        random_predictions(200, 3),
        {"svhn": random_predictions(150, 1), "noise": random_predictions(120, 2)},
        ["entropy", "energy"],
    )
    fields = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert fields["sets"]["svhn"]["energy"]["fpr"]["value"] == result["svhn"]["energy"].fpr
    assert fields["mean"]["entropy"]["aupr_in"]["value"] == result.mean["entropy"].aupr_in
    lines = str(result).splitlines()
    assert lines[0].split("  ")[0] == "OOD set"
    assert [line.split()[0] for line in lines[1:-1]] == ["svhn", "energy", "noise", "energy", "mean", "energy"]
    area = result["svhn"]["entropy"].auroc
    assert area.cell() in lines[1]
    single_score_table = str(ood.detect(random_predictions(20, 3), {"svhn": random_predictions(15, 1)}, ["entropy"]))
    assert len(single_score_table.splitlines()) == 3


def test_detect_accepts_ood_logits_without_labels():
    id_data, logits = random_predictions(50, 3), torch.randn(40, 5)
    result = ood.detect(id_data, {"noise": logits})
    assert result.scores == ("max_probability", "entropy", "max_logit", "energy", "generalised_entropy")
    assert result["noise"]["energy"].auroc == ood.auroc(ood.energy(id_data.logits), ood.energy(logits))
    assert result["noise"]["energy"].auroc.split.endswith("noise")


def test_scores_that_need_logits_are_left_out_for_probabilities():
    id_data = Predictions.from_probs(torch.rand(30, 4).softmax(1), torch.zeros(30, dtype=torch.long))
    ood_data = Predictions.from_probs(torch.full((20, 4), 0.25), torch.zeros(20, dtype=torch.long))
    result = ood.detect(id_data, {"flat": ood_data})
    assert result.scores == ("max_probability", "entropy", "generalised_entropy")
    assert result["flat"]["entropy"].auroc == 1
    with pytest.raises(ValueError, match=r"energy.*logits"):
        ood.detect(id_data, {"flat": ood_data}, ["energy"])


def test_detect_scores_matches_the_single_metrics():
    id_data, ood_data = scores_of_kind("random")
    result = ood.detect_scores({"mine": id_data}, {"a": {"mine": ood_data}}, tpr=0.8, positive="id", level=0.5)
    detection = result["a"]["mine"]
    expected = ood.fpr_at_tpr(id_data, ood_data, 0.8, positive="id", level=0.5)
    assert (detection.fpr, detection.fpr.interval) == (expected, expected.interval)
    assert detection.auroc.interval == ood.auroc(id_data, ood_data, level=0.5).interval
    head, *_, notes = str(result).splitlines()
    assert re.search(r"AUPR .*OOD positive.*AUPR .*ID positive.*FPR at 80 % TPR .*ID positive", head)
    assert re.search("AUPR.*average precision.*FPR.*OOD", notes)
    with pytest.raises((ValueError, TypeError), match="positive"):  # the shape checks of the tests come first
        ood.detect_scores({"mine": id_data}, {"a": {"mine": ood_data}}, positive="in")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: ood.detect(p, {}), ValueError, "data ?set"),
        (lambda p: ood.detect(p, {"a": p}, []), ValueError, "score"),
        (lambda p: ood.detect(p, {"a": p}, "entropy"), TypeError, "scores.*entropy"),
        (lambda p: inspect.unwrap(ood.detect)(p.logits, {"a": p}), TypeError, r"Predictions\(logits\)"),
        (lambda p: ood.detect(p, {"a": p}, ["odin"]), ValueError, "'odin'"),
        (lambda p: ood.detect(p, {"a": torch.rand(4, 3)}), ValueError, r"\ba\b.*3.*5"),
        (lambda p: ood.detect(p, {"b": torch.rand(4, 5)}, ["l1_norm"]), ValueError, r"\bb\b.*l1_norm.*features"),
        (lambda p: ood.detect_scores({"x": [1.0]}, {"a": {"y": [1.0]}}), ValueError, r"\ba\b.*'y'.*'x'"),
    ],
)
def test_inconsistent_inputs_raise_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call(random_predictions(6, 1))


def test_an_ood_set_may_be_called_mean():
    result = ood.detect(
        random_predictions(20, 3),
        {"mean": random_predictions(15, 1), "the id_data samples": random_predictions(15, 2)},
        ["entropy"],
    )
    assert [line.split("  ")[0] for line in str(result).splitlines()[1:4]] == ["mean", "the id_data samples", "mean"]


def test_detection_of_36000_samples_is_fast():
    id_data, ood_data = torch.randn(10_000), torch.randn(26_000)
    ood.detect_scores({"a": id_data}, {"b": {"a": ood_data}})
    start = time.perf_counter()
    ood.detect_scores({"a": id_data}, {"b": {"a": ood_data}})
    assert time.perf_counter() - start < 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_metrics_match_the_cpu(kind):
    id_data, ood_data = scores_of_kind(kind)
    for function in (ood.auroc, ood.aupr, ood.fpr_at_tpr):
        cpu_result, gpu_result = function(id_data, ood_data), function(id_data.cuda(), ood_data.cuda())
        assert gpu_result == pytest.approx(cpu_result, abs=1e-14)
        assert gpu_result.interval.low == pytest.approx(cpu_result.interval.low, abs=1e-12)
        assert gpu_result.interval.high == pytest.approx(cpu_result.interval.high, abs=1e-12)
        assert function(id_data.cuda(), ood_data) == gpu_result


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_detect_runs_on_the_device_of_the_predictions():
    id_data, ood_data = random_predictions(200, 3), random_predictions(150, 1)

    def to_gpu(p: Predictions) -> Predictions:
        return Predictions(p.logits.cuda(), p.labels.cuda(), features=p.features.cuda())

    cpu_result = ood.detect(id_data, {"a": ood_data})
    gpu_result = ood.detect(to_gpu(id_data), {"a": to_gpu(ood_data)})
    for score in cpu_result.scores:
        assert gpu_result["a"][score].auroc == pytest.approx(cpu_result["a"][score].auroc, abs=1e-3)
