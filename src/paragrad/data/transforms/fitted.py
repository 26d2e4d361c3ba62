"""Transformations with what they learned of the training part: applied to any rows, written down, read again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paragrad.data.transforms.transform import Column, Columns, Learned, Transform
from paragrad.errors import UsageError, unknown

FORM = 1
"""The form of what is written."""


@dataclass(frozen=True)
class Step:
    """One transformation and what it learned of each column that it changes."""

    transform: Transform
    learned: dict[str, Learned]


@dataclass(frozen=True)
class Fitted:
    """Transformations that have learned, one after another."""

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    """The columns that they were fitted on."""
    outputs: tuple[str, ...]
    """The columns that come out."""
    apart: tuple[str, ...] = ()
    """Columns that are no features (a label, a weight): rows to predict from need not have them."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What is to be said aloud of what was learned."""

    def apply(self, columns: Columns, where: str = "") -> dict[str, Column]:
        """The columns changed, in the same order; others are left as they are. ``where`` is the file's name, for messages."""
        for name in self.inputs:
            if name not in columns and name not in self.apart:
                raise unknown(f"column{f' of {where}' * bool(where)}: the run was trained with", name, columns)
        made = _through(self.steps, columns, where)
        # Rounded once, at the end: numbers that were stored as float32 then come out as they do from float64.
        narrow = {name for name, values in columns.items() if np.asarray(values).dtype != np.float64}
        return {
            name: values.astype(np.float32) if name in narrow and values.dtype == np.float64 else values
            for name, values in made.items()
        }

    def changes(self, name: str | None) -> bool:
        """Whether one of them changes this column."""
        return any(name in step.learned for step in self.steps)

    def invert(self, name: str, values: Column) -> Column:
        """Values of a column as they were before the transformations, the last of them undone first."""
        found = values
        for step in reversed(self.steps):
            if name in step.learned:
                found = step.transform.invert(found, step.learned[name])
        return found if values.dtype == np.float64 else found.astype(np.float32)

    def to_json(self) -> str:
        """A text that ``from_json`` turns into an equal object, to the last bit of each number."""
        steps = [{"transform": step.transform.spelled(), "learned": step.learned} for step in self.steps]
        whole = {"form": FORM, "inputs": self.inputs, "outputs": self.outputs, "apart": self.apart, "steps": steps}
        return json.dumps(whole, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Fitted:
        """What ``to_json`` wrote."""
        from paragrad.data.transforms import parse

        try:
            whole = json.loads(text)
            if whole["form"] != FORM:
                raise UsageError(f"The transformations are written in form {whole['form']}, but this version reads {FORM}.")
            steps = tuple(Step(parse(step["transform"]), dict(step["learned"])) for step in whole["steps"])
            return cls(steps, tuple(whole["inputs"]), tuple(whole["outputs"]), tuple(whole["apart"]))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"The transformations cannot be read ({type(error).__name__}: {error}).") from error


def fit(
    transforms: Sequence[Transform], pieces: Callable[[], Iterator[Mapping[str, Column]]], *, apart: Sequence[str] = ()
) -> Fitted:
    """Fit each transformation on what those before it make of the rows; ``pieces()`` gives all rows, a part at a time.

    Columns ``apart`` (a label, a weight) are no features: they are changed only where a transformation names them.

    Each that has something to learn takes one pass over the rows, and those that look for a quantile two (or up to four);
    what is kept does not grow with the rows, and comes out the same whatever the parts are.
    """
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise UsageError(
                f"{transform!r} is not a transformation; give objects such as pg.Standardise(), or use parse(text)."
            )
    first = next((dict(piece) for piece in pieces()), None)
    if first is None:
        raise UsageError("There are no rows to fit transformations on.")
    inputs = tuple(first)
    steps: list[Step] = []
    notes: list[str] = []
    for transform in transforms:
        names = transform.chosen(list(first), apart)
        studies = {name: study for name in names if (study := transform.study(name, first[name])) is not None}
        rows = 0
        again = bool(studies)
        while again:
            rows = 0
            for number, piece in enumerate(pieces()):
                here = _through(steps, _alike(piece, inputs, number), "")
                rows += len(next(iter(here.values())))
                for name, study in studies.items():
                    study.add(here[name])
            if not rows:
                raise UsageError(f"There are no rows to fit {transform.spelled()!r} on.")
            again = max([study.again() for study in studies.values()])
        learned = {name: studies[name].learned() if name in studies else {} for name in names}
        steps.append(Step(transform, learned))
        notes += [note for name in names if name in studies for note in transform.notes(name, learned[name])]
        first = _through(steps[-1:], first, "")
    return Fitted(tuple(steps), inputs, tuple(first), tuple(apart), tuple(notes))


def _through(steps: Sequence[Step], columns: Columns, where: str) -> dict[str, Column]:
    made = {name: np.asarray(values) for name, values in columns.items()}
    for step in steps:
        made = step.transform.apply(made, {name: step.learned[name] for name in step.learned if name in made}, where)
    return made


def _alike(piece: Mapping[str, Any], inputs: Sequence[str], number: int) -> Mapping[str, Any]:
    if tuple(piece) != tuple(inputs):
        raise UsageError(
            f"Piece {number} of the rows has the columns {', '.join(piece)}, but the first has {', '.join(inputs)}: all "
            "must have the same."
        )
    return piece
