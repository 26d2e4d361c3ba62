"""Losses by name, and the loss and the number of outputs that fit a target."""

import numpy as np
import pytest
import torch
from torch import nn

from paragrad.data.load import split
from paragrad.data.source import Items
from paragrad.errors import UsageError
from paragrad.models.losses import CATALOGUE, build, infer, outputs

X = np.zeros((6, 4), np.float32)


def source(target):
    return split((X, np.asarray(target))).train


def test_every_loss_of_the_catalogue_can_be_built() -> None:
    assert set(CATALOGUE) == {"crossentropy", "bce", "mse", "l1", "huber", "value", "own", "FILE.py:FUNCTION"}
    assert all(isinstance(build(name), nn.Module) for name in CATALOGUE if not name.startswith("FILE"))
    assert isinstance(build("BCE"), nn.BCEWithLogitsLoss)
    with pytest.raises(UsageError, match=r"Unknown loss .croosentropy.\. Did you mean .crossentropy."):
        build("croosentropy")


CASES = [
    ([0, 1, 2, 0, 4, 1], nn.CrossEntropyLoss, 5),
    ([0, 1, -100, 0, 1, 1], nn.CrossEntropyLoss, 2),
    ([0, 0, 0, 0, 0, 0], nn.CrossEntropyLoss, 2),
    ([True, False] * 3, nn.CrossEntropyLoss, 2),
    ([0.5, 1.5, 0.0, 1.0, 2.0, 3.0], nn.MSELoss, 1),
    ([0.0, 1.0] * 3, nn.CrossEntropyLoss, 2),
    ([1.0, 2.0] * 3, nn.MSELoss, 1),
    ([[0.0], [1.0]] * 3, nn.MSELoss, 1),
    ([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]] * 3, nn.BCEWithLogitsLoss, 3),
    ([[0, 1, 1], [0, 0, 0]] * 3, nn.BCEWithLogitsLoss, 3),
    ([[0.0, 1.0, 0.5], [0.0, 0.0, 0.0]] * 3, nn.MSELoss, 3),
    (np.random.default_rng(0).random((6, 2, 3)), nn.MSELoss, 6),
    (np.arange(6 * 5).reshape(6, 5) % 7, nn.CrossEntropyLoss, 7),
]


@pytest.mark.parametrize(("target", "kind", "count"), CASES)
def test_the_loss_and_the_outputs_follow_from_the_target(target, kind: type[nn.Module], count: int) -> None:
    loss, sentence = infer(source(target))
    assert type(loss) is kind
    assert sentence.startswith("Loss: ")
    assert outputs(source(target), loss) == count


def test_one_hot_rows_may_be_classes() -> None:
    assert outputs(source(np.eye(6)), nn.CrossEntropyLoss()) == 6
    assert "crossentropy" in infer(source(np.eye(6)))[1]


def test_yes_or_no_needs_one_output() -> None:
    assert outputs(source([0, 1] * 3), nn.BCEWithLogitsLoss()) == 1


def test_a_lone_array_is_to_be_reconstructed() -> None:
    alone = split(np.random.default_rng(0).random((6, 4))).train
    loss, _ = infer(alone)
    assert isinstance(loss, nn.MSELoss)
    assert outputs(alone, loss) == 4


def test_a_dataset_is_looked_through_to_its_last_row() -> None:
    rows = Items([(torch.zeros(2), 0)] * 1500 + [(torch.zeros(2), 8)])
    loss, _ = infer(rows)
    assert isinstance(loss, nn.CrossEntropyLoss)
    assert outputs(rows, loss) == 9


def test_targets_that_no_loss_fits_are_refused() -> None:
    with pytest.raises(UsageError, match=r"torch\.complex64"):
        infer(source(np.zeros(6, np.complex64)))
    with pytest.raises(UsageError, match="targets are str"):
        infer(Items([(0, "a")] * 3))
