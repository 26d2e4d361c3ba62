"""Arrays as a table with the columns of a training."""

from __future__ import annotations

import numpy as np

import paragrad as pg
from paragrad.data.named import table_of

COLUMNS = {"features": ["a", "b"], "shapes": [[], []], "label": "kind", "weight": None}
ROWS = {"a": np.arange(4.0), "b": np.ones(4), "kind": np.arange(4) % 2}


def test_a_column_that_is_neither_feature_nor_label_is_not_taken_as_the_weight():
    table = table_of({**ROWS, "y": np.full(4, 7.0)}, COLUMNS, [])
    assert (table.label, table.weight) == ("kind", None)


def test_weights_get_a_name_that_no_column_has():
    table = table_of(pg.Weighted({**ROWS, "y": np.full(4, 7.0)}, np.arange(4.0)), COLUMNS, [])
    assert table.source[table.weight].tolist() == [0, 1, 2, 3]
    assert table.source["y"].tolist() == [7, 7, 7, 7]


def test_rows_without_the_weights_of_the_training_count_once_and_a_note_says_so():
    notes: list[str] = []
    assert table_of(ROWS, {**COLUMNS, "weight": "w"}, notes).weight is None
    assert notes == ["The run was trained with weights ('w'), but these rows have none: each row counts 1."]
