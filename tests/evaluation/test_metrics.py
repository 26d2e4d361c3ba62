"""Metrics against scikit-learn and against loops that anyone can check."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from paragrad.errors import UsageError
from paragrad.evaluation import metrics
from paragrad.evaluation.outputs import signal_of


def draw(seed: int, rows: int, *, ties: bool = False, negative: bool = False) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    score = rng.integers(0, 5, rows).astype(float) if ties else rng.normal(size=rows)
    signal = rng.random(rows) < 0.4
    signal[:2] = [True, False]
    weight = rng.uniform(0.1, 2, rows) * (np.where(rng.random(rows) < 0.15, -0.3, 1) if negative else 1)
    return score, signal, weight


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(2, 60), ties=st.booleans(), negative=st.booleans(), weighted=st.booleans())
def test_auc_counts_pairs(seed, rows, ties, negative, weighted):
    score, signal, weight = draw(seed, rows, ties=ties, negative=negative)
    weight = weight if weighted else np.ones(rows)
    pairs = total = 0.0
    for i in np.flatnonzero(signal):
        for j in np.flatnonzero(~signal):
            pairs += weight[i] * weight[j] * (1.0 if score[i] > score[j] else 0.5 if score[i] == score[j] else 0.0)
            total += weight[i] * weight[j]
    found = metrics.roc_auc(score, signal, weight if weighted else None)
    assert found == pytest.approx(pairs / total, rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("ties", [False, True])
def test_auc_is_that_of_scikit_learn(ties):
    score, signal, weight = draw(1, 5_000, ties=ties)
    assert metrics.roc_auc(score, signal) == pytest.approx(sk.roc_auc_score(signal, score), rel=1e-12)
    assert metrics.roc_auc(score, signal, weight) == pytest.approx(
        sk.roc_auc_score(signal, score, sample_weight=weight), rel=1e-12
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(2, 40), ties=st.booleans(), negative=st.booleans())
def test_the_best_cut_is_the_best_of_all_cuts(seed, rows, ties, negative):
    score, signal, weight = draw(seed, rows, ties=ties, negative=negative)
    cut = metrics.best_cut(score, signal, weight)
    best = 0.0
    for threshold in np.unique(score):
        s = weight[(score >= threshold) & signal].sum()
        b = weight[(score >= threshold) & ~signal].sum() + 10.0
        if s > 0 and b > 0:
            best = max(best, math.sqrt(max(2 * ((s + b) * math.log(1 + s / b) - s), 0.0)))
    assert cut.value == pytest.approx(best, rel=1e-6, abs=1e-7)
    assert cut.s == pytest.approx(weight[(score >= cut.threshold) & signal].sum(), abs=1e-12)
    assert cut.b == pytest.approx(weight[(score >= cut.threshold) & ~signal].sum(), abs=1e-12)


def test_significance_at_numbers_worked_by_hand():
    assert metrics.ams(10.0, 90.0) == pytest.approx(math.sqrt(2 * (110 * math.log(1.1) - 10)))
    assert metrics.ams(30.0, 100.0, 0.0) == pytest.approx(math.sqrt(2 * (130 * math.log(1.3) - 30)))
    assert metrics.ams(0.01, 1e6) == pytest.approx(0.01 / 1e3, rel=1e-2)
    assert metrics.s_over_root_b(30.0, 100.0) == 3.0
    np.testing.assert_array_equal(metrics.ams(np.array([-1.0, 5.0]), np.array([1.0, -20.0])), [0, 0])
    np.testing.assert_array_equal(metrics.s_over_root_b(np.array([5.0, 1.0]), np.array([0.0, -1.0])), [0, 0])
    score, signal, weight = draw(3, 200)
    simple = metrics.best_cut(score, signal, weight, figure=metrics.s_over_root_b)
    assert simple.value == pytest.approx(simple.s / math.sqrt(simple.b))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [2, 4])
def test_classes_in_pieces_are_those_of_scikit_learn(classes, weighted):
    rng = np.random.default_rng(classes)
    logits = rng.normal(size=(600, classes))
    target = rng.integers(0, classes, 600)
    logits[np.arange(600), target] += 0.7
    weight = rng.uniform(0.2, 2, 600) if weighted else None
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    gathered = metrics.Classes(classes)
    for start, end in ((0, 100), (100, 103), (103, 600)):
        gathered.add(logp[start:end], target[start:end], None if weight is None else weight[start:end])
    found = gathered.result()
    p, predicted = np.exp(logp), logp.argmax(1)
    extra: dict[str, Any] = {"sample_weight": weight}
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(target, predicted, **extra), rel=1e-12)
    assert found["log_loss"] == pytest.approx(sk.log_loss(target, p, **extra), rel=1e-9)
    assert found["f1_macro"] == pytest.approx(sk.f1_score(target, predicted, average="macro", **extra), rel=1e-12)
    np.testing.assert_allclose(found["confusion"], sk.confusion_matrix(target, predicted, **extra), rtol=1e-12)
    if classes == 2:
        assert found["f1"] == pytest.approx(sk.f1_score(target, predicted, **extra), rel=1e-12)
        assert found["auc"] == pytest.approx(sk.roc_auc_score(target, logp[:, 1] - logp[:, 0], **extra), abs=1e-6)
        assert ("significance" in found) == weighted
    else:
        each = [sk.roc_auc_score(target == kind, logp[:, kind], **extra) for kind in range(classes)]
        assert found["auc"] == pytest.approx(np.mean(each), abs=1e-6)
    assert metrics.accuracy(predicted, target, weight) == pytest.approx(found["accuracy"], rel=1e-12)
    assert metrics.log_loss(p, target, weight) == pytest.approx(found["log_loss"], rel=1e-9)


def test_the_cut_is_a_probability():
    rng = np.random.default_rng(0)
    margin = rng.normal(size=500)
    signal = rng.random(500) < 1 / (1 + np.exp(-2 * margin))
    logp = np.stack([-np.logaddexp(0, margin), -np.logaddexp(0, -margin)], axis=1)
    gathered = metrics.Classes(2)
    gathered.add(logp, signal.astype(int), np.full(500, 2.0))
    found = gathered.result()["significance"]
    chosen = np.exp(logp[:, 1]) >= found["cut"] - 1e-6
    assert 2.0 * (chosen & signal).sum() == pytest.approx(found["s"])
    assert found["s_over_root_b"] == pytest.approx(found["s"] / math.sqrt(found["b"]))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 50), max_size=4), width=st.integers(1, 3), weighted=st.booleans()
)
def test_numbers_in_pieces_are_those_of_scikit_learn(seed, cuts, width, weighted):
    rng = np.random.default_rng(seed)
    true = rng.normal(1e3, 1, size=(50, width))
    found = true + rng.normal(0, 0.5, size=(50, width))
    weight = rng.uniform(0.1, 2, 50) if weighted else None
    total = metrics.Numbers()
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 50], strict=True):
        total.add(found[start:end], true[start:end], None if weight is None else weight[start:end])
    result = total.result()
    assert result["mse"] == pytest.approx(sk.mean_squared_error(true, found, sample_weight=weight), rel=1e-9)
    assert result["mae"] == pytest.approx(sk.mean_absolute_error(true, found, sample_weight=weight), rel=1e-9)
    assert result["r2"] == pytest.approx(sk.r2_score(true, found, sample_weight=weight), rel=1e-9, abs=1e-9)


def test_rows_whose_label_is_ignored_do_not_count():
    gathered = metrics.Classes(2)
    gathered.add(np.log(np.array([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]])), np.array([0, 1, -100]))
    assert gathered.rows == 2
    assert gathered.result()["accuracy"] == 1.0


def test_one_class_alone_has_no_auc():
    assert math.isnan(metrics.roc_auc(np.array([0.1, 0.2]), np.array([True, True])))


def test_what_cannot_be_judged_is_said():
    with pytest.raises(UsageError, match="no rows"):
        metrics.Classes(2).result()
    with pytest.raises(UsageError, match="no rows"):
        metrics.Numbers().result()
    with pytest.raises(UsageError, match="score is NaN"):
        metrics.roc_auc(np.array([np.nan, 1.0]), np.array([True, False]))
    with pytest.raises(UsageError, match="weight is NaN"):
        metrics.roc_auc(np.array([0.0, 1.0]), np.array([True, False]), np.array([np.nan, 1.0]))
    with pytest.raises(UsageError, match="label is 3, but the model has 2 classes"):
        metrics.Classes(2).add(np.zeros((1, 2)), np.array([3]))
    with pytest.raises(UsageError, match="2 numbers for a row, but its target has 1"):
        metrics.Numbers().add(np.zeros((3, 2)), np.zeros(3))


def test_either_class_may_be_the_one_that_is_looked_for() -> None:
    draw = np.random.default_rng(0)
    scores, target, weight = draw.normal(size=(200, 2)), draw.integers(0, 2, 200), draw.normal(1, 0.5, 200)
    first, second = metrics.Classes(2, signal=0), metrics.Classes(2)
    first.add(scores, target, weight)
    second.add(scores[:, ::-1], 1 - target, weight)
    mine, other = first.result(), second.result()
    assert mine["auc"] == pytest.approx(other["auc"])
    for name in ("f1", "f1_macro", "accuracy", "significance"):
        assert mine[name] == pytest.approx(other[name])


@pytest.mark.parametrize(
    ("classes", "place"),
    [(None, 1), (("signal", "background"), 0), (("background", "signal"), 1), (("Signal", "ttbar"), 0), (("a", "b"), 1)],
)
def test_the_class_that_is_called_signal_is_looked_for(classes: tuple[str, ...] | None, place: int) -> None:
    assert signal_of(classes) == place
