"""Sources: rows in the order asked for, in the nesting given."""

import numpy as np
import pytest
import torch

from paragrad.data.source import Arrays, Items, all_rows, leaves, mapped, target_of
from paragrad.errors import UsageError


def test_a_batch_of_arrays_keeps_order_and_nesting() -> None:
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    source = Arrays(({"a": x, "b": [x, x]}, y))
    inputs, target = source.batch(np.array([4, 0, 4]))
    assert len(source) == 6
    assert target.tolist() == [4, 0, 4]
    assert torch.equal(inputs["a"], x[[4, 0, 4]])
    assert torch.equal(inputs["b"][1], x[[4, 0, 4]])


def test_rows_may_be_any_view_of_numbers() -> None:
    source = Arrays(torch.arange(6))
    assert source.batch(np.arange(6)[::-2]).tolist() == [5, 3, 1]


def test_a_selection_of_a_selection_finds_the_first_rows() -> None:
    rows = np.array([5, 3, 1])
    for source in (Arrays(torch.arange(6)), Items(list(range(6)))):
        part = source.select(rows).select(np.array([2, 0]))
        assert len(part) == 2
        assert part.batch(np.array([0, 1])).tolist() == [1, 5]


def test_items_are_collated_as_a_dataloader_would() -> None:
    data = [(np.float32(k), {"y": k}) for k in range(4)]
    x, y = Items(data).batch(np.array([3, 1]))
    assert x.tolist() == [3.0, 1.0]
    assert y["y"].tolist() == [3, 1]


def test_all_rows_covers_a_source_in_order() -> None:
    cut = all_rows(Arrays(torch.zeros(7)), 3)
    assert [part.tolist() for part in cut] == [[0, 1, 2], [3, 4, 5], [6]]


def test_trees_are_walked_in_order() -> None:
    tree = {"a": (1, [2, 3]), "y": 4}
    assert leaves(tree) == [1, 2, 3, 4]
    assert mapped(tree, lambda leaf: -leaf) == {"a": (-1, (-2, -3)), "y": -4}


def test_the_target_is_the_last_or_that_of_its_name_or_the_array_itself() -> None:
    assert target_of((1, 2, 3)) == 3
    assert target_of({"label": 1, "x": 2}) == 1
    assert target_of(5) == 5
    with pytest.raises(UsageError, match="it has a, b"):
        target_of({"a": 1, "b": 2})
