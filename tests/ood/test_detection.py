"""Detection numbers: those of scikit-learn, exact counts, intervals that cover, one call for many data sets."""

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
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from fedlas import ood
from fedlas.metrics.result import Result
from fedlas.ood.detection import Ranking, aupr_of, auroc_of, fpr_of, ranking
from fedlas.predictions import Predictions

NORMAL = NormalDist()


def draw(kind: str, n: int = 400, m: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    known, foreign = torch.randn(n, dtype=torch.float64), 1 + 1.5 * torch.randn(m, dtype=torch.float64)
    return {
        "random": (known, foreign),
        "float32": (known.float(), foreign.float()),
        "tied": (known.round(), foreign.round()),
        "bfloat16": (known.bfloat16(), foreign.bfloat16()),
        "float16": (known.half(), foreign.half()),
        "huge": (1e300 * known, 1e300 * foreign),
        "tiny": (1e-310 * known, 1e-310 * foreign),
        "far from 0..1": (50 + known, 50 + foreign),  # a sigmoid makes ones of all of them
        "one value": (torch.zeros(n), torch.zeros(m)),
        "separated": (known, foreign + 100),
        "the wrong way": (known, foreign - 100),
        "integers": (known.round().long(), foreign.round().long()),
        "unequal types": (known.half(), foreign.float()),
    }[kind]


KINDS = [
    *("random", "float32", "tied", "bfloat16", "float16", "huge", "tiny", "far from 0..1", "one value"),
    *("separated", "the wrong way", "integers", "unequal types"),
]


def sklearn_form(known: torch.Tensor, foreign: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    scores = torch.cat([known.double(), foreign.double()]).numpy()
    return np.r_[np.zeros(len(known)), np.ones(len(foreign))], scores


def first_fpr(truth: np.ndarray, scores: np.ndarray, tpr: float) -> float:
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    return float(false[np.argmax(true >= tpr)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_scikit_learn(kind):
    known, foreign = draw(kind)
    truth, scores = sklearn_form(known, foreign)
    assert ood.auroc(known, foreign) == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    out, inside = ood.aupr(known, foreign), ood.aupr(known, foreign, positive="id")
    assert out == pytest.approx(average_precision_score(truth, scores), abs=1e-12)
    assert inside == pytest.approx(average_precision_score(1 - truth, -scores), abs=1e-12)
    for tpr in (0.5, 0.8, 0.95, 1.0):
        assert ood.fpr_at_tpr(known, foreign, tpr) == first_fpr(truth, scores, tpr)
        assert ood.fpr_at_tpr(known, foreign, tpr, positive="id") == first_fpr(1 - truth, -scores, tpr)


def test_numpy_and_lists_go_in():
    known, foreign = draw("tied")
    expected = ood.auroc(known, foreign)
    assert ood.auroc(known.numpy(), foreign.numpy()) == expected
    assert ood.auroc(known.tolist(), foreign.tolist()) == expected


def test_large_scores_are_not_squashed():
    """torchmetrics applies a sigmoid to scores outside 0..1: 0.502 where 0.857 is right."""
    known, foreign = 40 + 3 * torch.randn(2_000), 44.5 + 3 * torch.randn(2_000)
    assert ood.auroc(known, foreign) > 0.83
    assert ood.auroc(known, foreign) == pytest.approx(roc_auc_score(*sklearn_form(known, foreign)), abs=1e-12)
    assert ood.auroc(-foreign, -known) == ood.auroc(known, foreign)


def test_scores_that_sigmoid_cannot_hold_are_ranked_too():
    known, foreign = torch.tensor([-math.inf, 0.0, 1.0]), torch.tensor([0.5, math.inf, math.inf])
    assert ood.auroc(known, foreign) == 8 / 9
    assert ood.auroc(torch.tensor([math.inf]), torch.tensor([math.inf])) == 0.5


def test_the_golden_numbers():
    """Numbers of the published evaluation on the problem of facts.md: rows 0..599 against the halved rest."""
    random = np.random.RandomState(0)
    logits = 2 * random.randn(1000, 5)
    labels = random.randint(0, 5, 1000)
    logits[np.arange(1000), labels] += 1.5
    known, foreign = logits[:600].astype(np.float32), 0.5 * logits[600:].astype(np.float32)
    assert ood.auroc(ood.entropy(known), ood.entropy(foreign)) == 0.8375125
    assert ood.auroc(ood.max_probability(known), ood.max_probability(foreign)) == 0.7809625


tables = st.lists(st.integers(-4, 4), min_size=1, max_size=25)


@settings(max_examples=50)
@given(tables, tables)
def test_by_hand_and_turned_around(known, foreign):
    x, y = torch.tensor(known, dtype=torch.float64), torch.tensor(foreign, dtype=torch.float64)
    pairs = [Fraction(1 if a < b else 0) if a != b else Fraction(1, 2) for a in known for b in foreign]
    area = sum(pairs) / len(pairs)
    assert ood.auroc(x, y) == float(area)
    assert ood.auroc(-x, -y) == float(1 - area)
    assert ood.auroc(y, x) == float(1 - area)
    assert ood.aupr(x, y, positive="id") == ood.aupr(-y, -x)
    assert ood.fpr_at_tpr(x, y, positive="id") == ood.fpr_at_tpr(-y, -x)


@settings(max_examples=25)
@given(tables, tables, st.randoms(use_true_random=False))
def test_order_and_scale_mean_nothing(known, foreign, random):
    def numbers(x, y):
        x, y = (torch.tensor(v, dtype=torch.float64) for v in (x, y))
        results = ood.auroc(x, y), ood.aupr(x, y), ood.aupr(x, y, positive="id"), ood.fpr_at_tpr(x, y)
        return [(float(r), r.interval.low, r.interval.high) for r in results]

    expected = numbers(known, foreign)
    assert numbers(random.sample(known, len(known)), random.sample(foreign, len(foreign))) == expected
    for grow in (math.exp, math.atan, lambda v: 1e200 * v + 5e200, lambda v: v**3):
        assert numbers([grow(v) for v in known], [grow(v) for v in foreign]) == expected


@settings(max_examples=50)
@given(tables, tables)
def test_intervals_hold_their_value_and_stay_inside_0_and_1(known, foreign):
    x, y = torch.tensor(known, dtype=torch.float64), torch.tensor(foreign, dtype=torch.float64)
    for result in (ood.auroc(x, y), ood.aupr(x, y), ood.aupr(x, y, positive="id"), ood.fpr_at_tpr(x, y)):
        assert 0 <= result.interval.low <= result <= result.interval.high <= 1
        assert result.interval.width > 0


def counted(positives: list[int], negatives: list[int]) -> Ranking:
    scores = -torch.arange(len(positives), dtype=torch.float64)
    return Ranking(scores, torch.tensor(positives), torch.tensor(negatives))


def test_more_samples_than_float32_can_count():
    """From 2^24 on, a float32 counter stands still."""
    positives, negatives = [20_000_001, 3, 10**9], [7, 20_000_003, 2 * 10**9 + 1]
    ranked = counted(positives, negatives)
    m, n = sum(positives), sum(negatives)
    right = sum(Fraction(p) * (sum(negatives[i + 1 :]) + Fraction(negatives[i], 2)) for i, p in enumerate(positives))
    assert auroc_of(ranked) == float(right / (m * n))
    found, wrong, area = 0, 0, Fraction(0)
    for p, q in zip(positives, negatives, strict=True):
        found, wrong = found + p, wrong + q
        area += Fraction(p, m) * Fraction(found, found + wrong)
    assert aupr_of(ranked) == pytest.approx(float(area), rel=1e-15)
    assert fpr_of(ranked, 20_000_001 / m) == 7 / n
    assert fpr_of(ranked, 20_000_002 / m) == float(Fraction(20_000_010, n))


def test_seventeen_million_ties():
    """In a float16 or float32 counter 2^24 + 1 is 2^24."""
    n = 2**24 + 1
    known, foreign = torch.zeros(n, dtype=torch.float16), torch.zeros(3, dtype=torch.float16)
    ranked = ranking(known, foreign)
    assert ranked.sizes == (3, n)
    assert auroc_of(ranked) == 0.5
    assert aupr_of(ranked) == pytest.approx(3 / (n + 3), rel=1e-12)
    assert fpr_of(ranked) == 1.0
    assert fpr_of(ranked.turned()) == 1.0


def test_whole_groups_of_ties_pass_the_threshold():
    known = torch.tensor([0.0, 1.0, 1.0, 2.0])
    foreign = torch.tensor([1.0, 1.0, 2.0, 3.0])
    found = ood.fpr_at_tpr(known, foreign, 0.75)
    assert found == 0.75
    assert found.details["threshold"] == 1.0
    assert found.details["tpr"] == 1.0
    other = ood.fpr_at_tpr(known, foreign, 0.75, positive="id")
    assert other == 0.5
    assert other.details["threshold"] == 1.0


@pytest.mark.parametrize("m", [20, 40, 60, 100, 140, 1000])
def test_a_share_that_is_reached_exactly_is_reached(m):
    """0.95 * 20 is 19 and 19 / 20 is 0.95, in whatever way they are rounded."""
    scores = torch.arange(m, 0, -1.0)
    assert ood.fpr_at_tpr(scores - 0.5, scores, 0.95) == pytest.approx(0.95 - 1 / m)


def test_delong_is_the_textbook_one():
    known, foreign = draw("tied", 60, 40)
    result = ood.auroc(known, foreign, level=0.9)
    wins = (known[None] < foreign[:, None]).double() + (known[None] == foreign[:, None]).double() / 2
    variance = float(wins.mean(1).var() / 40 + wins.mean(0).var() / 60)
    area = float(wins.mean())
    reach = NORMAL.inv_cdf(0.95) * math.sqrt(variance) / (area * (1 - area))
    ends = [1 / (1 + math.exp(-(math.log(area / (1 - area)) + sign * reach))) for sign in (-1, 1)]
    assert [result.interval.low, result.interval.high] == pytest.approx(ends, rel=1e-12)


def test_the_variance_of_the_aupr_is_that_of_a_bootstrap():
    known, foreign = draw("bfloat16", 300, 200)
    random = np.random.default_rng(0)
    drawn = [
        ood.aupr(known[random.integers(0, 300, 300)], foreign[random.integers(0, 200, 200)]).value for _ in range(400)
    ]
    result = ood.aupr(known, foreign)
    error = result.interval.width / (2 * 1.96)
    assert error == pytest.approx(np.std(drawn), rel=0.12)


def test_separated_scores_still_leave_doubt():
    known, foreign = torch.arange(50.0), torch.arange(100.0, 130.0)
    area = ood.auroc(known, foreign)
    assert (area, area.interval.high) == (1.0, 1.0)
    assert area.interval.low == pytest.approx(0.025 ** (1 / 30))  # 30 pairs without a common sample, all right
    wrong = ood.auroc(foreign, known)
    assert (wrong, wrong.interval.low) == (0.0, 0.0)
    assert wrong.interval.high == pytest.approx(1 - 0.025 ** (1 / 30))
    rate = ood.fpr_at_tpr(known, foreign)
    assert (rate, rate.interval.low, rate.interval.high) == (0.0, 0.0, 1.0)  # 30 positives do not bound a 5 % quantile
    rate = ood.fpr_at_tpr(known, torch.arange(100.0, 300.0))
    assert (rate, rate.interval.low) == (0.0, 0.0)
    assert 1 - 0.025 ** (1 / 50) <= rate.interval.high < 0.09
    precision = ood.aupr(known, foreign)
    assert precision == 1.0
    assert 0.5 < precision.interval.low < 0.95
    # One wrong pair must not make an interval start higher than none did.
    mixed = torch.cat([foreign[1:], torch.tensor([48.5])])
    assert ood.auroc(known, mixed).interval.low <= area.interval.low
    assert ood.aupr(known, mixed).interval.low <= precision.interval.low + 1e-3
    lone = ood.aupr(known, torch.tensor([10.5]))  # one sample has no variance: the range of unseen ones is wide
    assert lone.interval.method == ood.aupr(known, foreign[:1]).interval.method
    constant = ood.auroc(torch.zeros(50), torch.zeros(30)).interval
    assert constant.low < 0.5 < constant.high


def truths(shift: float, spread: float, n: int, m: int) -> dict[str, float]:
    """AUROC, AUPR and FPR of normal scores: known ones are standard, foreign ones shifted and spread."""
    share = (np.arange(100_000) + 0.5) / 100_000
    out = share / (share + n / m * normal_cdf(-(shift + spread * normal_quantile(1 - share))))
    inside = share / (share + m / n * normal_cdf((normal_quantile(share) - shift) / spread))
    return {
        "auroc": NORMAL.cdf(shift / math.hypot(1, spread)),
        "aupr_out": float(out.mean()),
        "aupr_in": float(inside.mean()),
        "fpr": NORMAL.cdf(-(shift + spread * NORMAL.inv_cdf(0.05))),
    }


def normal_cdf(x: np.ndarray) -> np.ndarray:
    return torch.special.ndtr(torch.from_numpy(x)).numpy()


def normal_quantile(x: np.ndarray) -> np.ndarray:
    return torch.special.ndtri(torch.from_numpy(x)).numpy()


def coverage(shift: float, spread: float, n: int, m: int, trials: int) -> dict[str, float]:
    random, true = np.random.default_rng(0), truths(shift, spread, n, m)
    hits = dict.fromkeys(true, 0)
    for _ in range(trials):
        ranked = ranking(random.standard_normal(n), shift + spread * random.standard_normal(m))
        found = [auroc_of(ranked), aupr_of(ranked), aupr_of(ranked.turned()), fpr_of(ranked)]
        for name, result in zip(hits, found, strict=True):
            hits[name] += true[name] in result.interval
    return {name: count / trials for name, count in hits.items()}


def test_intervals_cover_the_true_value():
    """A sanity check; the campaign below holds 92 to 99 %."""
    assert min(coverage(1, 1, 400, 300, trials=40).values()) >= 0.9


@pytest.mark.campaign
@pytest.mark.parametrize("sizes", [(20, 20), (50, 200), (500, 500), (2_000, 5_000)])
@pytest.mark.parametrize(("shift", "spread"), [(0, 1), (1, 1), (2.5, 1), (2, 0.3), (4, 1), (1, 2)])
def test_95_percent_intervals_cover_everywhere(shift, spread, sizes):
    found = coverage(shift, spread, *sizes, trials=1_000)
    assert 0.92 <= found["auroc"] <= 0.99
    assert min(found.values()) >= 0.92


@pytest.mark.parametrize("function", [ood.auroc, ood.aupr, ood.fpr_at_tpr])
def test_bad_scores_are_named(function):
    good = torch.rand(4)
    with pytest.raises(ValueError, match="id_scores"):
        function(torch.zeros(0), good)
    with pytest.raises(ValueError, match="ood_scores"):
        function(good, [])
    with pytest.raises(ValueError, match=r"ood_scores.*row 2"):
        function(good, torch.tensor([1.0, 2.0, math.nan, math.nan]))
    with pytest.raises(ValueError, match=r"id_scores.*\(2, 2\)"):
        function(torch.rand(2, 2), good)
    with pytest.raises(ValueError, match=r"level.*95"):
        function(good, good, level=95)


def test_bad_options_are_named():
    good = torch.rand(4)
    with pytest.raises(ValueError, match=r"tpr.*95"):
        ood.fpr_at_tpr(good, good, 95)
    with pytest.raises((ValueError, TypeError), match="positive"):  # the shape checks of the tests come first
        ood.aupr(good, good, positive="in")


def test_results_say_what_they_are():
    known, foreign = draw("bfloat16")
    area, inside, rate = (
        ood.auroc(known, foreign),
        ood.aupr(known, foreign, positive="id"),
        ood.fpr_at_tpr(known, foreign),
    )
    assert isinstance(area, Result)
    assert (area.n, area.dtype, area.estimator) == (700, "bfloat16", "AUROC")
    assert re.match("OOD positive.*higher.*OOD", area.scope)
    assert re.match("ID positive.*lower.*ID", inside.scope)
    assert area.details == {"n_id": 400, "n_ood": 300, "positive": "ood"}
    assert inside.details == {"n_id": 400, "n_ood": 300, "positive": "id", "chance": 4 / 7}
    accepted = ood.fpr_at_tpr(known, foreign, positive="id")
    assert re.fullmatch(r"FPR at 95 % TPR .*OOD positive.*", rate.estimator)
    assert re.fullmatch(r"FPR at 95 % TPR .*ID positive.*", accepted.estimator)
    assert "ID positive" in inside.estimator
    assert "average precision" in inside.norm
    assert "DeLong" in area.interval.method
    assert Result.from_dict(json.loads(rate.to_json())).interval == rate.interval


def made(n: int, scale: float, width: int | None = 6, **rest: object) -> Predictions:
    features = None if width is None else scale * torch.randn(n, width)
    return Predictions(scale * torch.randn(n, 5), torch.zeros(n, dtype=torch.long), features=features, **rest)


def test_one_call_for_many_sets():
    known, svhn, noise = made(200, 3, split="test"), made(150, 1), made(120, 2)
    train = torch.randn(80, 6)
    found = ood.detect(known, {"svhn": svhn, "noise": noise}, train_features=train, k=5)
    assert found.scores == ood.score_names()
    for (name, foreign), score in itertools.product({"svhn": svhn, "noise": noise}.items(), ood.score_names()):
        x, y = ood.score_of(known, score, train, 5), ood.score_of(foreign, score, train, 5)
        held = found[name][score]
        assert held.auroc == ood.auroc(x, y)
        assert held.aupr_out == ood.aupr(x, y)
        assert held.aupr_in == ood.aupr(x, y, positive="id")
        assert held.fpr == ood.fpr_at_tpr(x, y)
        assert held.fpr.interval == ood.fpr_at_tpr(x, y).interval
        assert held.auroc.split.split()[::2] == ["test", name]
        assert held.auroc.details["score"] == score
    mean = found.mean["entropy"].auroc
    assert mean == pytest.approx((found["svhn"]["entropy"].auroc + found["noise"]["entropy"].auroc) / 2)
    assert mean.details["values"] == {name: found[name]["entropy"].auroc for name in ("svhn", "noise")}
    assert (mean.n, mean.interval) == (470, None)


def test_the_record_is_plain_json_and_a_table():
    found = ood.detect(made(200, 3), {"svhn": made(150, 1), "noise": made(120, 2)}, ["entropy", "energy"])
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["sets"]["svhn"]["energy"]["fpr"]["value"] == found["svhn"]["energy"].fpr
    assert plain["mean"]["entropy"]["aupr_in"]["value"] == found.mean["entropy"].aupr_in
    lines = str(found).splitlines()
    assert lines[0].split("  ")[0] == "OOD set"
    assert [line.split()[0] for line in lines[1:-1]] == ["svhn", "energy", "noise", "energy", "mean", "energy"]
    area = found["svhn"]["entropy"].auroc
    assert f"{100 * area:.2f} [{100 * area.interval.low:.2f}, {100 * area.interval.high:.2f}]" in lines[1]
    alone = str(ood.detect(made(20, 3), {"svhn": made(15, 1)}, ["entropy"]))
    assert len(alone.splitlines()) == 3


def test_logits_alone_are_enough_for_foreign_data():
    known, logits = made(50, 3), torch.randn(40, 5)
    found = ood.detect(known, {"noise": logits})
    assert found.scores == ("max_probability", "entropy", "max_logit", "energy", "generalised_entropy")
    assert found["noise"]["energy"].auroc == ood.auroc(ood.energy(known.logits), ood.energy(logits))
    assert found["noise"]["energy"].auroc.split.endswith("noise")


def test_probabilities_leave_out_what_they_cannot_say():
    known = Predictions.from_probs(torch.rand(30, 4).softmax(1), torch.zeros(30, dtype=torch.long))
    foreign = Predictions.from_probs(torch.full((20, 4), 0.25), torch.zeros(20, dtype=torch.long))
    found = ood.detect(known, {"flat": foreign})
    assert found.scores == ("max_probability", "entropy", "generalised_entropy")
    assert found["flat"]["entropy"].auroc == 1
    with pytest.raises(ValueError, match=r"energy.*logits"):
        ood.detect(known, {"flat": foreign}, ["energy"])


def test_scores_that_are_there_already():
    known, foreign = draw("random")
    found = ood.detect_scores({"mine": known}, {"a": {"mine": foreign}}, tpr=0.8, positive="id", level=0.5)
    held = found["a"]["mine"]
    expected = ood.fpr_at_tpr(known, foreign, 0.8, positive="id", level=0.5)
    assert (held.fpr, held.fpr.interval) == (expected, expected.interval)
    assert held.auroc.interval == ood.auroc(known, foreign, level=0.5).interval
    head, *_, notes = str(found).splitlines()
    assert re.search(r"AUPR .*OOD positive.*AUPR .*ID positive.*FPR at 80 % TPR .*ID positive", head)
    assert re.search("AUPR.*average precision.*FPR.*OOD", notes)
    with pytest.raises((ValueError, TypeError), match="positive"):  # the shape checks of the tests come first
        ood.detect_scores({"mine": known}, {"a": {"mine": foreign}}, positive="in")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: ood.detect(p, {}), ValueError, "data ?set"),
        (lambda p: ood.detect(p, {"a": p}, []), ValueError, "score"),
        (lambda p: ood.detect(p, {"a": p}, "entropy"), TypeError, "scores.*entropy"),
        (lambda p: ood.detect(p, {"a": p}, ["odin"]), ValueError, "'odin'"),
        (lambda p: ood.detect(p, {"a": p}, ["knn"]), ValueError, "knn.*train_features"),
        (lambda p: ood.detect(p, {"a": torch.rand(4, 3)}), ValueError, r"\ba\b.*3.*5"),
        (lambda p: ood.detect(p, {"b": torch.rand(4, 5)}, ["l1_norm"]), ValueError, r"\bb\b.*l1_norm.*features"),
        (lambda p: ood.detect_scores({"x": [1.0]}, {"a": {"y": [1.0]}}), ValueError, r"\ba\b.*'y'.*'x'"),
    ],
)
def test_what_does_not_fit_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(made(6, 1))


def test_a_set_that_is_called_like_a_row_of_the_table():
    found = ood.detect(made(20, 3), {"mean": made(15, 1), "the known samples": made(15, 2)}, ["entropy"])
    assert [line.split("  ")[0] for line in str(found).splitlines()[1:4]] == ["mean", "the known samples", "mean"]


def test_it_is_quick():
    known, foreign = torch.randn(10_000), torch.randn(26_000)
    ood.detect_scores({"a": known}, {"b": {"a": foreign}})
    start = time.perf_counter()
    ood.detect_scores({"a": known}, {"b": {"a": foreign}})
    assert time.perf_counter() - start < 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_the_same_numbers(kind):
    known, foreign = draw(kind)
    for function in (ood.auroc, ood.aupr, ood.fpr_at_tpr):
        here, there = function(known, foreign), function(known.cuda(), foreign.cuda())
        assert there == pytest.approx(here, abs=1e-14)
        assert there.interval.low == pytest.approx(here.interval.low, abs=1e-12)
        assert there.interval.high == pytest.approx(here.interval.high, abs=1e-12)
        assert function(known.cuda(), foreign) == there


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_detection_runs_where_the_predictions_are():
    known, foreign, train = made(200, 3), made(150, 1), torch.randn(80, 6)

    def there(p: Predictions) -> Predictions:
        return Predictions(p.logits.cuda(), p.labels.cuda(), features=p.features.cuda())

    here = ood.detect(known, {"a": foreign}, train_features=train, k=3)
    gpu = ood.detect(there(known), {"a": there(foreign)}, train_features=train, k=3)
    for score in here.scores:
        assert gpu["a"][score].auroc == pytest.approx(here["a"][score].auroc, abs=1e-3)
