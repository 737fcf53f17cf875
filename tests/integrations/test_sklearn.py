"""Calibrators work as scikit-learn estimators and pass its estimator checks."""

import pickle

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, ShuffleSplit, StratifiedKFold, cross_val_score
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import check_estimator

from fedlas.integrations.sklearn import CalibratedClassifier, Scorer, ece_scorer
from fedlas.metrics import accuracy, ece
from fedlas.posthoc import HistogramBinning, Temperature, list_calibrators

NAMES = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])


@pytest.fixture(scope="module")
def digits():
    """Training and test halves, labelled by words."""
    images, numbers = load_digits(return_X_y=True)
    return images[:900], NAMES[numbers[:900]], images[900:], NAMES[numbers[900:]]


def sampled(classes: int = 3, n: int = 240):
    random = np.random.default_rng(0)
    labels = np.arange(n) % classes
    return random.normal(size=(n, 4)) + 1.2 * np.eye(classes, 4)[labels], labels


@pytest.mark.filterwarnings("ignore:the best temperature of these")  # some checks use data without a best temperature
@pytest.mark.parametrize(
    "response_method", ["predict_proba", pytest.param("decision_function", marks=pytest.mark.campaign)]
)
def test_calibrated_classifier_passes_the_sklearn_estimator_checks(response_method):
    estimator = CalibratedClassifier(LinearDiscriminantAnalysis(), response_method=response_method, cv=3)
    result = check_estimator(estimator, on_skip=None, on_fail=None)
    assert len(result) > 40
    failed = {item["check_name"]: item["exception"] for item in result if item["status"] != "passed"}
    failed.pop("check_array_api_input", None)  # needs an environment variable before the first import
    assert not failed


def test_every_sample_is_scored_out_of_fold():
    features, labels = sampled()
    model = CalibratedClassifier(GaussianNB(), cv=4).fit(features, labels)
    logits = np.zeros((len(labels), 3))
    for train, test in StratifiedKFold(4).split(features, labels):
        logits[test] = np.log(GaussianNB().fit(features[train], labels[train]).predict_proba(features[test]))
    best = minimize_scalar(
        lambda t: nll(logits / t, labels), bounds=(0.1, 10), method="bounded", options={"xatol": 1e-9}
    )
    assert model.calibrator_.temperature == pytest.approx(best.x, rel=1e-5)
    expected_logits = np.log(GaussianNB().fit(features, labels).predict_proba(features)) / best.x
    np.testing.assert_allclose(model.predict_proba(features), softmax(expected_logits), atol=1e-5)
    assert model.calibrator_.fitted.n == len(labels)


def softmax(logits):
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def nll(logits, labels):
    return -np.mean(np.log(softmax(logits)[np.arange(len(labels)), labels]))


def test_overconfident_text_classifiers_are_calibrated(digits):
    train, train_labels, test, test_labels = digits
    uncalibrated = GaussianNB().fit(train, train_labels)
    model = CalibratedClassifier(GaussianNB()).fit(train, train_labels)
    assert list(model.classes_) == sorted(NAMES)
    assert (model.predict(test) == model.classes_[model.predict_proba(test).argmax(1)]).all()
    assert (model.predict(test) == uncalibrated.predict(test)).mean() > 0.99
    assert -ece_scorer(uncalibrated, test, test_labels) > 0.15
    assert -ece_scorer(model, test, test_labels) < 0.08
    assert log_loss(test_labels, model.predict_proba(test)) < 0.3 * log_loss(
        test_labels, uncalibrated.predict_proba(test)
    )


def test_prefit_does_not_change_the_estimator(digits):
    train, train_labels, test, test_labels = digits
    uncalibrated = GaussianNB().fit(train[:500], train_labels[:500])
    for classifier in (
        CalibratedClassifier(uncalibrated, cv="prefit"),
        CalibratedClassifier(FrozenEstimator(uncalibrated), cv=3),
    ):
        model = classifier.fit(train[500:], train_labels[500:])
        expected = Temperature().fit(
            np.log(np.maximum(uncalibrated.predict_proba(train[500:]), 1e-7)), codes(train_labels[500:], uncalibrated)
        )
        assert model.calibrator_.temperature == pytest.approx(expected.temperature, rel=1e-6)
        assert -ece_scorer(model, test, test_labels) < 0.5 * -ece_scorer(uncalibrated, test, test_labels)
    assert classifier.set_params(cv="prefit").fit(train[500:], train_labels[500:]).estimator_.estimator is uncalibrated


def codes(labels, estimator):
    return np.searchsorted(estimator.classes_, labels)


@pytest.mark.parametrize("name", [record.name for record in list_calibrators()])
def test_every_calibrator_gives_probabilities(name):
    features, labels = sampled(2 if name == "platt" else 3)
    model = CalibratedClassifier(LogisticRegression(), name, cv=3).fit(features, labels)
    probs = model.predict_proba(features)
    assert model.calibrator_.name == name
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-9)
    assert log_loss(labels, probs) < log_loss(labels, np.full_like(probs, 1 / probs.shape[1]))


@pytest.mark.parametrize("classes", [2, 3])
def test_decision_function_values_are_used_as_logits(classes):
    features, labels = sampled(classes)
    svm = LinearSVC().fit(features, labels)
    model = CalibratedClassifier(svm, response_method="decision_function", cv="prefit").fit(features, labels)
    scores = svm.decision_function(features)
    logits = np.stack([np.zeros(len(scores)), scores], axis=1) if classes == 2 else scores
    np.testing.assert_allclose(
        model.predict_proba(features), softmax(logits / model.calibrator_.temperature), atol=1e-9
    )


def test_zero_probabilities_do_not_break_the_temperature(digits):
    train, train_labels, test, test_labels = digits
    default_floor = CalibratedClassifier(KNeighborsClassifier(), cv=3).fit(train, train_labels)
    tiny_floor = CalibratedClassifier(KNeighborsClassifier(), cv=3, floor=1e-300).fit(train, train_labels)
    assert log_loss(test_labels, default_floor.predict_proba(test)) < log_loss(
        test_labels, tiny_floor.predict_proba(test)
    )
    assert default_floor.calibrator_.temperature < 10 < tiny_floor.calibrator_.temperature


def test_calibrated_classifier_works_in_pipelines_and_searches():
    features, labels = sampled()
    inner = make_pipeline(StandardScaler(), LogisticRegression())
    model = make_pipeline(StandardScaler(), CalibratedClassifier(inner, cv=3))
    assert cross_val_score(model, features, labels, cv=3).mean() > 0.5
    scores = cross_val_score(model, features, labels, cv=3, scoring=ece_scorer)
    assert (scores < 0).all()
    search = GridSearchCV(
        CalibratedClassifier(LogisticRegression(), cv=3),
        {"calibrator": ["temperature", HistogramBinning(bins=2)], "estimator__C": [0.1, 1.0]},
        scoring=Scorer(ece),
        cv=3,
    ).fit(features, labels)
    assert len(search.cv_results_["params"]) == 4
    assert set(search.best_params_) == {"calibrator", "estimator__C"}
    assert search.predict_proba(features).shape == (len(labels), 3)


def test_calibrated_classifier_can_be_cloned_set_and_pickled():
    features, labels = sampled()
    model = CalibratedClassifier(LogisticRegression(C=2.0), HistogramBinning(bins=4), cv=3).fit(features, labels)
    cloned = clone(model)
    assert not hasattr(cloned, "calibrator_")
    assert cloned.calibrator is not model.calibrator
    assert cloned.calibrator.options == model.calibrator.options
    assert model.calibrator.fitted is None, "the passed calibrator was fitted, so a clone would contain it"
    cloned.set_params(estimator__C=3.0, calibrator="vector_scaling", floor=1e-6)
    assert cloned.get_params()["estimator__C"] == 3.0
    assert cloned.fit(features, labels).calibrator_.name == "vector_scaling"
    unpickled = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(unpickled.predict_proba(features), model.predict_proba(features))


def test_a_scorer_supports_folds_without_a_class():
    features, labels = sampled()
    model = LogisticRegression().fit(features, labels)
    subset = labels != 1
    expected = ece(model.predict_proba(features)[subset], labels[subset], bins=5)
    assert Scorer(ece, options={"bins": 5})(model, features[subset], labels[subset]) == pytest.approx(-float(expected))
    assert Scorer(accuracy)(model, features, labels) == Scorer(accuracy, higher_is_better=True)(model, features, labels)
    assert Scorer(accuracy, higher_is_better=True)(model, features, labels) == pytest.approx(
        model.score(features, labels)
    )
    with pytest.raises(ValueError, match=r"\b7\b.*0, 1, 2"):
        ece_scorer(model, features, np.full(len(labels), 7))
    assert pickle.loads(pickle.dumps(ece_scorer)) == ece_scorer


def test_a_scorer_takes_the_name_of_a_metric():
    """Regression: the error came from the call, which cross_val_score turns into NaN."""
    features, labels = sampled(6)
    model = LogisticRegression().fit(features, labels)
    assert Scorer("ece") == ece_scorer
    scores = cross_val_score(LogisticRegression(), features, labels, scoring=Scorer("ece", options={"bins": 5}), cv=3)
    assert (scores < 0).all()
    assert Scorer("accuracy")(model, features, labels) == pytest.approx(model.score(features, labels))
    assert Scorer("top_5")(model, features, labels) > 0.8
    with pytest.raises(ValueError, match=r"'classwise_ec'.*'classwise_ece'"):
        Scorer("classwise_ec")


@pytest.mark.filterwarnings("ignore:The least populated class")
def test_a_training_fold_without_a_class_raises():
    features, labels = sampled()
    names = np.array(["cat", "dog", "owl"])[labels]
    names[np.flatnonzero(names == "owl")[1:]] = "cat"
    with pytest.raises(ValueError, match=r"fold 3 of 3.*'owl'.*cv=\"prefit\""):
        CalibratedClassifier(GaussianNB(), cv=3).fit(features, names)
    not_owl = names != "owl"
    two_class_model = CalibratedClassifier(GaussianNB().fit(features[not_owl], names[not_owl]), cv="prefit")
    with pytest.raises(ValueError, match=r"'owl'.*'cat', 'dog'"):
        two_class_model.fit(features, names)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (CalibratedClassifier(LinearSVC()), 'LinearSVC.*predict_proba.*response_method="decision_function"'),
        (
            CalibratedClassifier(DecisionTreeClassifier(), response_method="decision_function"),
            'DecisionTreeClassifier.*response_method="predict_proba"',
        ),
        (CalibratedClassifier(LinearRegression()), "LinearRegression.*predict_proba$"),
        (
            CalibratedClassifier(GaussianNB(), response_method="predict"),
            "response_method.*'predict'.*'predict_proba'.*'decision_function'",
        ),
        (CalibratedClassifier(GaussianNB(), cv="prefi"), "cv.*'prefi'.*\"prefit\""),
        (CalibratedClassifier(GaussianNB(), cv="prefit"), "GaussianNB"),
        (CalibratedClassifier(GaussianNB(), cv=ShuffleSplit(2)), "partitions"),
        (CalibratedClassifier(GaussianNB(), floor=0), r"floor.*\b0\b.*1e-7"),
        (CalibratedClassifier(GaussianNB(), "platt"), r"platt.*\b4\b"),
        (CalibratedClassifier(GaussianNB(), "tempe"), "'tempe'.*'temperature'"),
    ],
)
def test_invalid_options_raise(model, message):
    with pytest.raises(ValueError, match=message):
        model.fit(*sampled(4))


def test_other_invalid_options_raise():
    features, labels = sampled(4)
    with pytest.raises(TypeError, match=r"calibrator.*Temperature\(\).*3"):
        CalibratedClassifier(GaussianNB(), 3).fit(features, labels)
    with pytest.raises(ValueError, match=r"y\b.*class.*\b1\b"):
        CalibratedClassifier(GaussianNB()).fit(features, np.ones(len(labels), dtype=int))
    pairs = SVC(decision_function_shape="ovo").fit(features, labels)
    with pytest.raises(ValueError, match=r'\(240, 6\).*4 classes.*decision_function_shape="ovr"'):
        CalibratedClassifier(pairs, response_method="decision_function", cv="prefit").fit(features, labels)
