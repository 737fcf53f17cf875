"""Reference implementations of all losses in plain Python loops, for comparison in tests.

Floats, lists and `math` only. Each loss function takes logits as a list of rows and labels as a list of integers and
returns the mean over the batch. Nothing here is shared with the library, and nothing here is fast.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

Row = list[float]
Rows = list[list[float]]


def log_softmax(row: Row) -> Row:
    """Log-probabilities of one row of logits."""
    top = max(row)
    log_total = math.log(sum(math.exp(value - top) for value in row))
    return [value - top - log_total for value in row]


def softmax(row: Row) -> Row:
    """Probabilities of one row of logits."""
    return [math.exp(value) for value in log_softmax(row)]


def log_sigmoid(value: float) -> float:
    """log of 1 / (1 + exp(-value)) without overflow."""
    return min(value, 0.0) - math.log1p(math.exp(-abs(value)))


def sigmoid(value: float) -> float:
    """1 / (1 + exp(-value)) without overflow."""
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    return math.exp(value) / (1 + math.exp(value))


def mean(values: Row) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def argmax(row: Row) -> int:
    """Position of the first largest entry."""
    return row.index(max(row))


def cross_entropies(logits: Rows, labels: list[int]) -> Row:
    """Minus the log-probability of the label, per sample."""
    return [-log_softmax(row)[label] for row, label in zip(logits, labels, strict=True)]


def uniform_cross_entropies(logits: Rows) -> Row:
    """E_i: minus the mean log-probability over classes, per sample."""
    return [-mean(log_softmax(row)) for row in logits]


def margin_excesses(logits: Rows, margin: float, reduction: str = "mean") -> Row:
    """R_i: how far logits lie further than the margin below the largest one, per sample."""
    result = []
    for row in logits:
        total = sum(max(0.0, max(row) - value - margin) for value in row)
        result.append(total / len(row) if reduction == "mean" else total)
    return result


# --- the thirteen baselines ---


def ce(logits: Rows, labels: list[int]) -> float:
    """Cross-entropy."""
    return mean(cross_entropies(logits, labels))


def ls(logits: Rows, labels: list[int], alpha: float = 0.05) -> float:
    """Label smoothing."""
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        log_probs = log_softmax(row)
        for k, log_prob in enumerate(log_probs):
            target = (1 - alpha) * (k == label) + alpha / len(row)
            total -= target * log_prob
    return total / len(logits)


def ecp(logits: Rows, labels: list[int], alpha: float = 0.1, class_reduction: str = "mean") -> float:
    """Cross-entropy minus alpha times the entropy of the prediction."""
    entropies = []
    for row in logits:
        clipped = [min(max(prob, 1e-10), 1 - 1e-10) for prob in softmax(row)]
        entropy = sum(-q * math.log(q) for q in clipped)
        entropies.append(entropy / len(row) if class_reduction == "mean" else entropy)
    return ce(logits, labels) - alpha * mean(entropies)


def mbls(logits: Rows, labels: list[int], lambda_: float = 0.1, margin: float = 6.0) -> float:
    """Margin-based label smoothing: cross-entropy plus the mean margin excess."""
    return ce(logits, labels) + lambda_ * mean(margin_excesses(logits, margin))


def acls(
    logits: Rows,
    labels: list[int],
    *,
    lambda_: float = 0.1,
    lambda_pos: float = 1.0,
    lambda_neg: float = 0.1,
    margin: float = 6.0,
    frozen_maxima: Row | None = None,
) -> float:
    """ACLS; `frozen_maxima` stands for the stopped gradient of the largest logit in the negative part."""
    positive = negative = 0.0
    for i, row in enumerate(logits):
        top = max(row)
        frozen = top if frozen_maxima is None else frozen_maxima[i]
        for value in row:
            if value == top:
                positive += max(0.0, value - margin) ** 2
            else:
                negative += max(0.0, frozen - value - margin) ** 2
    n, classes = len(logits), len(logits[0])
    penalty = lambda_pos * positive / n + lambda_neg * negative / (n * (classes - 1))
    return ce(logits, labels) + lambda_ * penalty


def focal(logits: Rows, labels: list[int], gamma: float = 3.0) -> float:
    """Focal loss."""
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        log_prob = log_softmax(row)[label]
        total += (1 - math.exp(log_prob)) ** gamma * -log_prob
    return total / len(logits)


def flsd(logits: Rows, labels: list[int], gamma: float = 3.0) -> float:
    """Focal loss with gamma 5 below a true-class probability of 0.2, 3 below 0.5, else the given gamma."""
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        log_prob = log_softmax(row)[label]
        prob = math.exp(log_prob)
        exponent = 5.0 if prob < 0.2 else 3.0 if prob < 0.5 else gamma
        total += (1 - prob) ** exponent * -log_prob
    return total / len(logits)


def dual_focal(logits: Rows, labels: list[int], gamma: float = 5.0) -> float:
    """Dual focal loss: the largest probability strictly below that of the true class joins in."""
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        probs = softmax(row)
        next_largest = max((prob for prob in probs if prob < probs[label]), default=0.0)
        total += (1 - probs[label] + next_largest) ** gamma * -log_softmax(row)[label]
    return total / len(logits)


def mmce_penalty(confidences: Row, correct: Row, variant: str = "m", double_normalise: bool = True) -> float:
    """The kernel calibration error over all pairs, with the correctness of each sample between 0 and 1."""
    pairs = [(i, j) for i in range(len(confidences)) for j in range(len(confidences))]
    kernel = {(i, j): math.exp(-abs(confidences[i] - confidences[j]) / 0.4) for i, j in pairs}
    if variant == "m":
        gaps = [c - conf for c, conf in zip(correct, confidences, strict=True)]
        return sum(gaps[i] * gaps[j] * kernel[i, j] for i, j in pairs) / len(confidences) ** 2
    m, n = sum(correct), sum(1 - c for c in correct)
    if m == 0 or n == 0:
        return 0.0
    correct_gaps = [c * (1 - conf) for c, conf in zip(correct, confidences, strict=True)]
    wrong_gaps = [(1 - c) * conf for c, conf in zip(correct, confidences, strict=True)]

    def mean_product(a: Row, b: Row, count: float) -> float:
        total = sum(a[i] * b[j] * kernel[i, j] for i, j in pairs)
        return total / count / (count + 1e-5 if double_normalise else 1)

    square = mean_product(correct_gaps, correct_gaps, m * m) + mean_product(wrong_gaps, wrong_gaps, n * n)
    square -= 2 * mean_product(correct_gaps, wrong_gaps, m * n)
    return math.sqrt(max(0.0, square) + 1e-10)


def mmce(
    logits: Rows, labels: list[int], lambda_: float = 1.0, variant: str = "m", double_normalise: bool = True
) -> float:
    """Cross-entropy plus the kernel calibration error, in both published variants."""
    confidences = [max(softmax(row)) for row in logits]
    correct = [float(argmax(row) == label) for row, label in zip(logits, labels, strict=True)]
    return ce(logits, labels) + lambda_ * mmce_penalty(confidences, correct, variant, double_normalise)


def mdca(logits: Rows, labels: list[int], beta: float = 1.0, base: str = "ce", gamma: float = 1.0) -> float:
    """A base loss plus the mean over classes of |mean probability - class frequency|."""
    n, classes = len(logits), len(logits[0])
    probs = [softmax(row) for row in logits]
    total = 0.0
    for k in range(classes):
        total += abs(sum(row[k] for row in probs) / n - sum(label == k for label in labels) / n)
    value = ce(logits, labels) if base == "ce" else focal(logits, labels, gamma)
    return value + beta * total / classes


def cpc(logits: Rows, labels: list[int], lambda_bdc: float = 0.1, lambda_bec: float = 1.0) -> float:
    """Cross-entropy plus the two pairwise terms; the second is 0 for two classes."""
    n, classes = len(logits), len(logits[0])
    bdc = bec = 0.0
    for row, label in zip(logits, labels, strict=True):
        other_logits = [value for k, value in enumerate(row) if k != label]
        bdc -= sum(log_sigmoid(row[label] - value) for value in other_logits)
        bec -= sum(0.5 * log_sigmoid(a - b + 1e-10) for a in other_logits for b in other_logits)
    bdc /= n * (classes - 1)
    bec = bec / (n * (classes - 1) * (classes - 2)) if classes > 2 else 0.0
    return ce(logits, labels) + lambda_bdc * bdc + lambda_bec * bec


def crl_scores(logits: Rows, score: str = "softmax") -> Row:
    """Confidence of each sample's prediction, by one of three scores."""
    result = []
    for row in logits:
        probs = sorted(softmax(row), reverse=True)
        if score == "softmax":
            result.append(probs[0])
        elif score == "margin":
            result.append(probs[0] - probs[1])
        else:
            entropy = -sum(math.exp(value) * value for value in log_softmax(row))
            result.append(-entropy / math.log(len(row)))
    return result


def crl_targets(counts: Row, smallest: float, epochs: float) -> tuple[Row, Row]:
    """Sign and margin of every pair (i, i + 1) from the counts of correct classifications."""
    span = epochs - smallest
    frequencies = [(count - smallest) / span if span > 0 else 0.0 for count in counts]
    signs, margins = [], []
    for i, frequency in enumerate(frequencies):
        difference = frequency - frequencies[(i + 1) % len(frequencies)]
        signs.append(float((difference > 0) - (difference < 0)))
        margins.append(abs(difference))
    return signs, margins


def crl(
    logits: Rows,
    labels: list[int],
    *,
    counts: Row,
    smallest: float,
    epochs: float,
    rank_weight: float = 1.0,
    score: str = "softmax",
) -> float:
    """Cross-entropy plus the ranking term; `counts` are those of this batch, `smallest` that of the whole table."""
    scores = crl_scores(logits, score)
    signs, margins = crl_targets(counts, smallest, epochs)
    total = 0.0
    for i, (sign, margin) in enumerate(zip(signs, margins, strict=True)):
        if sign != 0:
            total += max(0.0, -sign * (scores[i] - scores[(i + 1) % len(scores)]) + margin)
    return ce(logits, labels) + rank_weight * total / len(logits)


def adafocal_start(bins: int = 15, gamma: float = 1.0) -> tuple[Row, Row]:
    """Gammas and the bins + 1 edges before the first update."""
    return [gamma] * bins, [b / bins for b in range(bins + 1)]


def adafocal_bin(prob: float, edges: Row) -> int:
    """The first bin that takes this true-class probability."""
    last = len(edges) - 2
    for b in range(last + 1):
        below_first = b == 0 and prob < edges[1]
        above_last = b == last and prob >= edges[last]
        if below_first or above_last or edges[b] <= prob < edges[b + 1]:
            return b
    raise AssertionError("no bin took the sample")


def adafocal(logits: Rows, labels: list[int], gammas: Row, edges: Row) -> float:
    """AdaFocal with given gammas and edges; a negative gamma is the inverse focal loss."""
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        log_prob = log_softmax(row)[label]
        prob = math.exp(log_prob)
        gamma = gammas[adafocal_bin(prob, edges)]
        sign = (gamma > 0) - (gamma < 0)
        total += (1 - sign * prob + 1e-20) ** abs(gamma) * -log_prob
    return total / len(logits)


def equal_mass_edges(confidences: Row, bins: int = 15) -> Row:
    """Edges by linear interpolation of the sorted confidences at q N / bins, the last clamped to the maximum."""
    ordered = sorted(confidences)
    last = len(ordered) - 1
    edges = []
    for q in range(bins + 1):
        # The product in the order of numpy.linspace: a rounded edge may decide on which side of it a sample falls.
        position = min(q * (len(ordered) / bins), float(last))
        lower = math.floor(position)
        upper = min(lower + 1, last)
        edges.append(ordered[lower] + (position - lower) * (ordered[upper] - ordered[lower]))
    return edges


def bin_gaps(confidences: Row, correct: list[bool], edges: Row) -> Row:
    """Mean confidence minus accuracy of every bin (lower, upper], 0 for an empty one."""
    gaps = []
    for lower, upper in pairwise(edges):
        inside = [i for i, conf in enumerate(confidences) if lower < conf <= upper]
        if inside:
            gaps.append(mean([confidences[i] for i in inside]) - mean([float(correct[i]) for i in inside]))
        else:
            gaps.append(0.0)
    return gaps


def adafocal_next(
    gammas: Row,
    gaps: Row,
    *,
    step: float = 1.0,
    switch: float = 0.2,
    gamma_min: float = -2.0,
    gamma_max: float = 20.0,
) -> Row:
    """One update of the gammas from the calibration gaps of their bins."""
    result = []
    for old, gap in zip(gammas, gaps, strict=True):
        gamma = old * math.exp(step * gap) if old > 0 else old * math.exp(-step * gap)
        if abs(gamma) < switch:
            gamma = -switch if gamma > 0 else switch
        result.append(min(max(gamma, gamma_min), gamma_max))
    return result


def adafocal_update(gammas: Row, logits: Rows, labels: list[int], **limits: float) -> tuple[Row, Row]:
    """Gammas and edges after one look at the logits of a validation split."""
    confidences = [max(softmax(row)) for row in logits]
    correct = [argmax(row) == label for row, label in zip(logits, labels, strict=True)]
    edges = equal_mass_edges(confidences, len(gammas))
    return adafocal_next(gammas, bin_gaps(confidences, correct, edges), **limits), edges


# --- the method ---


@dataclass
class Gate:
    """Weights of the gate network: C -> width -> 2."""

    weight_in: Rows
    bias_in: Row
    weight_out: Rows
    bias_out: Row


def affine(weight: Rows, bias: Row, inputs: Row) -> Row:
    """weight times inputs plus bias."""
    return [sum(w * x for w, x in zip(row, inputs, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


def gate_value(row: Row, gate: Gate, positive_index: int = 1) -> float:
    """v_i: the gate's probability of the positive mode minus that of the negative mode."""
    hidden = [x if x > 0 else 0.01 * x for x in affine(gate.weight_in, gate.bias_in, row)]
    probs = softmax(affine(gate.weight_out, gate.bias_out, hidden))
    return probs[positive_index] - probs[1 - positive_index]


def gate_states(
    logits: Rows, gate: Gate | None, kind: str = "learned", zero: float = -1.0, positive_index: int = 1
) -> Row:
    """psi_i of every sample."""
    states = []
    for row in logits:
        if kind == "positive":
            states.append(1.0)
        elif kind == "negative":
            states.append(-1.0)
        else:
            assert gate is not None
            value = gate_value(row, gate, positive_index)
            if kind == "soft":
                states.append(value)
            else:
                states.append(1.0 if value > 0 else -1.0 if value < 0 else zero)
    return states


def confidences_of(logits: Rows, features: Rows | None, source: str = "features", norm: float = 1.0) -> Row:
    """n_i: the quantity that the indicator normalises."""
    if source == "max_prob":
        return [max(softmax(row)) for row in logits]
    if source == "max_logit":
        return [max(row) for row in logits]
    assert features is not None
    if math.isinf(norm):
        return [max(abs(value) for value in row) for row in features]
    return [sum(abs(value) ** norm for value in row) ** (1 / norm) for row in features]


def mean_and_std(values: Row) -> tuple[float, float]:
    """Mean and unbiased standard deviation."""
    centre = mean(values)
    return centre, math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))


PUBLISHED = (20.0, 100.0)


def indicator(
    values: Row,
    state: tuple[float, float] | None = PUBLISHED,
    *,
    theta: float = 0.95,
    normalise: str = "ema",
    training: bool = True,
    eps: float = 1e-3,
) -> tuple[Row, tuple[float, float] | None]:
    """gamma_i and the running mean and std afterwards; state None means that no batch has been seen yet."""
    if normalise == "none":
        return list(values), state
    if normalise == "batch":
        mu, sd = mean_and_std(values)
        return [(value - mu) / (sd + eps) for value in values], state
    if training and len(values) > 1:
        batch_mu, batch_sd = mean_and_std(values)
        if state is None:
            state = batch_mu, batch_sd
        else:
            mu, sd = state
            state = theta * batch_mu + (1 - theta) * mu, theta * batch_sd + (1 - theta) * sd
    assert state is not None
    mu, sd = state
    return [(value - mu) / (sd + eps) for value in values], state


def adaptive_alphas(
    alpha: float, beta: float, states: Row, gammas: Row, *, low: float = -math.inf, high: float = math.inf
) -> Row:
    """alpha_i: the base smoothing times twice a sigmoid, clamped."""
    return [
        min(max(alpha * 2 * sigmoid(beta * psi * gamma), low), high) for psi, gamma in zip(states, gammas, strict=True)
    ]


def convex(cross_entropy: Row, regulariser: Row, alphas: Row) -> float:
    """Mean of (1 - alpha_i) CE_i + alpha_i R_i."""
    return mean([(1 - a) * c + a * r for c, r, a in zip(cross_entropy, regulariser, alphas, strict=True)])


def fedlas_ls(logits: Rows, labels: list[int], alphas: Row) -> float:
    """FeDLaS-LS with given alpha_i."""
    return convex(cross_entropies(logits, labels), uniform_cross_entropies(logits), alphas)


def fedlas_mbls(
    logits: Rows, labels: list[int], alphas: Row, margin: float = 6.0, margin_reduction: str = "mean"
) -> float:
    """FeDLaS-MbLS with given alpha_i."""
    excesses = margin_excesses(logits, margin, margin_reduction)
    return convex(cross_entropies(logits, labels), excesses, alphas)


# --- states of the gate in each epoch ---


def state_shares(states: dict[int, float]) -> tuple[float, float]:
    """Shares of the visited samples in positive and in negative mode; `states` maps sample index to psi."""
    positive = sum(psi > 0 for psi in states.values())
    negative = sum(psi < 0 for psi in states.values())
    return positive / len(states), negative / len(states)


def flip_rate(previous: dict[int, float], current: dict[int, float]) -> float:
    """Share of the samples visited in both epochs whose state changed."""
    common = [index for index in current if index in previous]
    return sum(previous[index] != current[index] for index in common) / len(common)
