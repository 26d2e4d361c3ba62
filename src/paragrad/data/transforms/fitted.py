"""Transformations with the values that they learned from the training part: apply, invert, save and load them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paragrad.data.transforms.transform import Column, Columns, Learned, Transform
from paragrad.errors import UsageError, unknown

FORM = 1
"""Version of the JSON format."""


@dataclass(frozen=True)
class Step:
    """One transformation, and the values that it learned from each column that it changes."""

    transform: Transform
    learned: dict[str, Learned]


@dataclass(frozen=True)
class Fitted:
    """Fitted transformations, which are applied in order."""

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    """Columns that they were fitted on."""
    outputs: tuple[str, ...]
    """Columns that they return."""
    apart: tuple[str, ...] = ()
    """Columns that are not features (a label, a weight): rows to predict need not have them."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Notes for the user about the learned values."""

    def apply(self, columns: Columns, where: str = "") -> dict[str, Column]:
        """Return the columns in the same order, transformed. ``where`` is the name of the file in messages."""
        for name in self.inputs:
            if name not in columns and name not in self.apart:
                raise unknown(f"column{f' of {where}' * bool(where)}: the run was trained with", name, columns)
        made = _through(self.steps, columns, where)
        # Round once at the end, so that numbers stored as float32 and as float64 give the same result.
        narrow = {name for name, values in columns.items() if np.asarray(values).dtype != np.float64}
        return {
            name: values.astype(np.float32) if name in narrow and values.dtype == np.float64 else values
            for name, values in made.items()
        }

    def changes(self, name: str | None) -> bool:
        """Return whether one of them changes this column."""
        return any(name in step.learned for step in self.steps)

    def invert(self, name: str, values: Column) -> Column:
        """Return values of a column as they were before the transformations, by undoing the last one first."""
        found = values
        for step in reversed(self.steps):
            if name in step.learned:
                found = step.transform.invert(found, step.learned[name])
        return found if values.dtype == np.float64 else found.astype(np.float32)

    def to_json(self) -> str:
        """Return a text that ``from_json`` turns into an equal object, to the last bit of each number."""
        steps = [{"transform": step.transform.spelled(), "learned": step.learned} for step in self.steps]
        whole = {"form": FORM, "inputs": self.inputs, "outputs": self.outputs, "apart": self.apart, "steps": steps}
        return json.dumps(whole, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Fitted:
        """Return the object that ``to_json`` wrote."""
        from paragrad.data.transforms import parse

        try:
            whole = json.loads(text)
            if whole["form"] != FORM:
                raise UsageError(
                    f"The transformations are saved in format {whole['form']}, but this version reads format {FORM}."
                )
            steps = tuple(Step(parse(step["transform"]), dict(step["learned"])) for step in whole["steps"])
            return cls(steps, tuple(whole["inputs"]), tuple(whole["outputs"]), tuple(whole["apart"]))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"The transformations cannot be read ({type(error).__name__}: {error}).") from error


def fit(
    transforms: Sequence[Transform], pieces: Callable[[], Iterator[Mapping[str, Column]]], *, apart: Sequence[str] = ()
) -> Fitted:
    """Fit each transformation on the rows as the previous ones return them. ``pieces()`` yields all rows, part by part.

    Columns ``apart`` (a label, a weight) are not features: a transformation changes them only if it names them.

    A transformation that learns takes one pass over the rows; quantiles take two, or up to four. Memory does not grow with
    the number of rows, and the result does not depend on how the rows are divided into parts.
    """
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise UsageError(
                f"{transform!r} is not a transformation: give an object such as pg.Standardise(), or use parse(text)."
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
        again = bool(studies)
        while again:
            rows = 0
            for number, piece in enumerate(pieces()):
                if tuple(piece) != inputs:
                    raise UsageError(
                        f"Piece {number} of the rows has the columns {', '.join(piece)}, but the first has "
                        f"{', '.join(inputs)}: all must have the same."
                    )
                here = _through(steps, piece, "")
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
