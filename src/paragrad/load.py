"""load(...): the model of a run with its weights, its transformations and the names of its classes; to predict and to judge."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from paragrad.config import options
from paragrad.core.flat import load_plain, plain_name, plain_state
from paragrad.data import load as loading
from paragrad.data.given import Given, given, of_source
from paragrad.data.source import Arrays, Weighted, leaves, target_of
from paragrad.data.transforms import Fitted
from paragrad.errors import UsageError
from paragrad.evaluation.card import Card, Head, keras_head
from paragrad.evaluation.figures import Figures, MetricsLike, Outputs, positive_in, resolved
from paragrad.evaluation.outputs import BY_CLASS, Gathered, as_numpy, scores_of
from paragrad.jobs import recipe
from paragrad.jobs.build import EVALUATION_BATCH
from paragrad.jobs.factories import made_on
from paragrad.learners import kerasmodel
from paragrad.learners.batch import call, fitting, has_target, split, weight_of
from paragrad.learners.criterion import Loss, Means, aligned, sums
from paragrad.learners.frozen import frozen
from paragrad.learners.keras import KerasLearner, arranged
from paragrad.learners.learner import Learner
from paragrad.learners.measured import Measured
from paragrad.learners.objective import Objective, OfItself, objective_of, takes_model_and_batch
from paragrad.models import builtin, losses, ownfile
from paragrad.models.builtin import is_keras
from paragrad.rundir import checkpoint as checkpoints
from paragrad.rundir.notices import Verbose, show_notes

Array = np.ndarray[Any, Any]
KERAS = "model.keras"


@dataclass(frozen=True)
class Predicted:
    """What the model says of a few rows."""

    scores: Array
    """A probability for each class, or of yes; the numbers, where it predicts numbers."""
    target: Array | None
    """What was to be predicted, where the rows have it."""
    weight: Array | None


@dataclass(frozen=True)
class Trained:
    """A trained model, ready to be used."""

    module: Any
    """The module with its weights, in evaluation mode; for a learner of your own, the learner."""
    transforms: Fitted | None
    """What is done to the columns of a table, as it was fitted on the training part."""
    classes: tuple[str, ...] | None
    """The names of the classes, where they have any."""
    directory: Path
    loss: Loss | None
    """The loss that it was trained with; None where that is a function of your own."""
    head: Head
    """What its outputs are."""
    card: Card
    _told: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Notes that were shown: each is shown once."""

    def __repr__(self) -> str:
        """A line: a notebook shows what a cell ends with."""
        return f"Trained({type(self.module).__name__}, head={self.head!r}, directory={str(self.directory)!r})"

    def predict(self, data: Any, *, verbose: Verbose = "auto") -> Array:
        """What the model says of every row: the probability of each class, of yes, or the numbers, in the units of the label.

        ``data`` is what ``train`` takes, with or without targets, or a table. Rows of a run that was trained on a table go
        through its transformations, whatever they are given as; arrays have the columns in the order of the features.
        Notes about the rows are printed, each once; ``verbose=0`` is silent.
        """
        rows = self._shown(self.given(data, labelled=False), verbose)
        return np.concatenate([part.scores for part in self.predictions(rows)])

    def evaluate(
        self,
        data: Any = None,
        *,
        metrics: MetricsLike | None = None,
        positive: str | None = None,
        verbose: Verbose = "auto",
    ) -> dict[str, Any]:
        """Loss, accuracy, log loss, ROC AUC, F1 and confusion matrix, or errors of numbers; with weights also significance.

        ``data`` is what ``train`` takes, or a table; None: the rows that the run was validated on. Where the label is
        transformed, ``loss`` is in the transformed units, as in training; errors of numbers are in those of the label.
        ``metrics`` adds functions of (output, target), as in training. F1 is that of the class ``positive``: by default the one
        of the training, else of two classes the one that is called signal, or the second. Notes about the rows are printed,
        each once; ``verbose=0`` is silent.
        """
        return self.judged(self._shown(self.given(data, labelled=True), verbose), metrics=metrics, positive=positive)

    # -- rows ------------------------------------------------------------------------------------------------

    def _shown(self, rows: Given, verbose: Verbose) -> Given:
        """Return the rows, their notes shown."""
        show_notes([note for note in rows.notes if note not in self._told], verbose)
        self._told.update(rows.notes)
        return rows

    def given(self, data: Any, *, labelled: bool) -> Given:
        """What a user gives, as rows; None: those that the run was validated on."""
        if data is None:
            return self._own_rows()
        return given(
            data,
            labelled=labelled,
            transforms=self.transforms,
            classes=self.classes,
            columns=self.card.table,
            keras=is_keras(self.module),
            as_classes=self.head in BY_CLASS,
        )

    def _own_rows(self) -> Given:
        if self.card.validation is None:
            raise UsageError(f"The run in {self.directory} had no rows to be validated on: say which to take (--data, data=).")
        settings = options.read_config(self.directory / "run.toml")
        again = "say which rows to take (--data, data=)"
        try:
            parts = recipe.rows(settings)
        except UsageError as error:
            raise UsageError(
                f"The rows that the run in {self.directory} was validated on cannot be had again: {again}. {error}"
            ) from error
        if parts.validation is None or loading.fingerprint(parts.validation) != self.card.validation:
            raise UsageError(
                f"The rows that the run in {self.directory} was validated on are not those that its run.toml leads to now "
                f"(they were given in Python, or {settings['data']!r} has changed): {again}."
            )
        validation = parts.validation
        if isinstance(validation, Arrays) and isinstance(validation.tree, Weighted):
            # As the file has them: training scales weights, and counts of events are not scaled.
            validation = Arrays(Weighted(validation.tree.rows, validation.tree.weight / self.card.scale))
        return of_source(validation, f"the rows of {parts.name} that the run was validated on")

    # -- using it --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def predictions(self, rows: Given) -> Iterator[Predicted]:
        """What the model says, a mini-batch at a time."""
        for batch in rows.batches(EVALUATION_BATCH):
            inputs, target, weight = self._parts(batch)
            scores = self._in_units(scores_of(self._output(inputs), self.head, self.card.axis))
            yield Predicted(scores, None if target is None else self._in_units(as_numpy(target)), as_numpy(weight))

    @torch.no_grad()
    def judged(self, rows: Given, *, metrics: MetricsLike | None = None, positive: str | None = None) -> dict[str, Any]:
        """What the predictions for these rows are worth."""
        further = resolved(metrics, lambda: Outputs(self.head, classes=self.classes))
        positive = positive or positive_in(further) or self.card.positive
        measured = Measured({name: one for name, one in further.items() if not isinstance(one, Figures)}, _refuse)
        gathered: Gathered | None = None
        objective: Objective | None = None
        totals = Means()
        for batch in rows.batches(EVALUATION_BATCH):
            inputs, target, weight = self._parts(batch)
            if target is None and self.head != "raw":
                raise UsageError(
                    f"{rows.name} has no labels, but to evaluate is to compare with them: name the label, or use predict."
                )
            if self._looks_at_batches:
                objective = objective or self._objective(batch)
                judged = objective.judge(self.module, batch, outputs=self.head != "raw")
                output, target = judged.output, judged.target
                totals.add(judged.sums)
            else:
                output = self._output(inputs)
                target = target if self.head in BY_CLASS else aligned(output, target, self.loss)
            if is_keras(self.module):
                count = float(len(output))
                totals.add({"loss": (_keras_loss(self.module, inputs, target, output, weight, self.card.scale) * count, count)})
            elif self.loss is not None and objective is None:
                axis = self.card.axis if self.head in BY_CLASS else None
                totals.add(sums(self.loss, output, target, None if weight is None else weight * self.card.scale, axis))
            if gathered is None:
                gathered = Gathered(self.head, self.card.axis, output, target, self.classes, positive)
            measured.add(output, target, weight)
            if self.head == "numbers":
                output, target = (self._in_units(as_numpy(values).astype(np.float64)) for values in (output, target))
            gathered.add(output, target, as_numpy(weight))
        if gathered is None:
            raise UsageError(f"{rows.name} has no rows.")
        return {"rows": rows.rows} | gathered.result() | totals.result() | measured.result()

    def _in_units(self, values: Array) -> Array:
        """Numbers as the label has them: a transformation of it is undone."""
        if self.card.label is None or self.head != "numbers" or self.transforms is None:
            return values
        return self.transforms.invert(self.card.label, values)

    @property
    def _looks_at_batches(self) -> bool:
        """Whether the loss is one of (model, batch)."""
        if self.head == "raw" and self.loss is None:
            raise UsageError("The run was trained with a loss of (model, batch): give it, as pg.load(run, loss=...).")
        return self.loss is not None and takes_model_and_batch(self.loss)

    def _objective(self, batch: Any) -> Objective:
        assert self.loss is not None
        if isinstance(self.loss, losses.OwnLoss):
            with fitting():
                return OfItself(self.loss.fitted(self.loss.output(self.module, batch), target_of(batch)))
        return objective_of(self.loss)

    def _parts(self, batch: Any) -> tuple[Any, Any, torch.Tensor | None]:
        """Inputs, target and weights of a mini-batch; the target is None where there is none."""
        weight = weight_of(batch)
        rows = batch.rows if isinstance(batch, Weighted) else batch
        labelled = self.card.own_target or (has_target(rows) and len(leaves(rows)) > len(self.card.rows))
        inputs, target = split(rows) if labelled else (rows, None)
        shapes = tuple(tuple(leaf.shape[1:]) for leaf in leaves(inputs) if isinstance(leaf, torch.Tensor))
        if self.card.rows and not _alike(shapes, self.card.rows):
            raise UsageError(
                f"A row has the shape {_shown(shapes)}, but the run was trained on rows of {_shown(self.card.rows)}."
            )
        return inputs, target, weight

    def _output(self, inputs: Any) -> torch.Tensor:
        if not isinstance(self.module, nn.Module):
            raise UsageError(f"{self.card.kind} makes a learner of your own, which only you know how to ask: use .module.")
        with fitting():
            if is_keras(self.module):
                output = self.module(arranged(self.module, inputs), training=False)
            else:
                output = losses.logits_of(call(self.module, inputs))
        if not isinstance(output, torch.Tensor):
            raise UsageError(f"The model puts out a {type(output).__name__}, and not one tensor: call .module yourself.")
        return output


# -- loading --------------------------------------------------------------------------------------------------------


def load(
    run: str | Path,
    model: nn.Module | Callable[[], Learner] | None = None,
    *,
    loss: Loss | str | None = None,
    checkpoint: str | int | None = None,
) -> Trained:
    """The trained model of a run.

    run         the directory of a run
    model       as it was given to ``train``; only where it was made in Python (a module, a function that makes a learner)
    loss        as it was given to ``train``; only where it is a function of your own, and ``evaluate`` is to compute it
    checkpoint  ``"latest"``: the newest checkpoint, of a run that is not finished; or the update that one is of
    """
    directory = _directory(run, checkpoint)
    card = Card.read(directory)
    saved = directory / KERAS
    if is_keras(model) or (model is None and checkpoint is None and saved.exists()):
        model = (kerasmodel.load(saved) if model is None else _keras_filled(model, directory)).eval()
        return replace(_trained(card, model, directory, None), head=keras_head(model))
    loss = losses.build(loss) if isinstance(loss, str) else loss
    if loss is None and card.loss is not None and not ownfile.is_gone(card.loss):
        loss = losses.build(card.loss)
    return _trained(card, _filled(_model(card, model, directory), directory, checkpoint), directory, loss)


def state_dict(run: str | Path, *, checkpoint: str | int | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a run by the module's own names, as ``module.load_state_dict(..., strict=False)`` takes them.

    run         the directory of a run
    checkpoint  None: the finished model; ``"latest"``: the newest checkpoint; or the update that one is of. A checkpoint holds
                all that training changes, and buffers; a frozen parameter that stays as it is, it does not
    """
    directory = _directory(run, checkpoint)
    if checkpoint is None:
        return _tensors(directory)
    named = _checkpoint(directory, checkpoint).named()
    if not named:
        raise UsageError(f"The run in {directory} trained a learner of your own, whose tensors have no names: use pg.load.")
    return named


def _directory(run: str | Path, checkpoint: str | int | None) -> Path:
    if checkpoint not in (None, "latest") and not isinstance(checkpoint, int):
        raise UsageError(f"checkpoint={checkpoint!r}, but it is 'latest', the number of an update, or None.")
    directory = Path(run)
    if not directory.is_dir():
        raise UsageError(f"{str(directory)!r} is not the directory of a run.")
    return directory


def _checkpoint(directory: Path, which: str | int) -> checkpoints.Checkpoint:
    found, passed = checkpoints.of(directory / "checkpoints", which)
    if found is None:
        there = ", ".join(str(int(path.name)) for path in sorted((directory / "checkpoints").glob("[0-9]*"))) or "none"
        raise UsageError(" ".join([f"The run in {directory} has no sound checkpoint {which} (it has: {there}).", *passed]))
    return found


def _trained(card: Card, module: Any, directory: Path, loss: Loss | None) -> Trained:
    transforms = directory / "transforms.json"
    return Trained(
        module=module,
        transforms=Fitted.from_json(transforms.read_text(encoding="utf-8")) if transforms.exists() else None,
        classes=card.classes,
        directory=directory,
        loss=loss,
        head=card.head,
        card=card,
    )


def _model(card: Card, model: Any, directory: Path) -> Any:
    """The model before it has its weights."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if callable(model):
        return made_on("cpu", model)
    if model is not None:
        raise UsageError(f"model={model!r} is neither a torch module nor a function that makes a learner.")
    if card.built is None:
        raise UsageError(
            f"The model of the run in {directory} ({card.kind}) was made in Python, which the directory cannot repeat: "
            f"give it, as pg.load({str(directory)!r}, model={card.kind}(...))."
        )
    try:
        return builtin.build(card.built.spec, card.built.inputs, card.built.outputs, card.built.seed)
    except UsageError as error:
        raise UsageError(
            f"The model of the run in {directory} cannot be built again: {error} Or give it: pg.load(run, model=...)."
        ) from error


def _filled(model: Any, directory: Path, checkpoint: str | int | None) -> Any:
    """The model with the weights of the run, in evaluation mode."""
    if isinstance(model, nn.Module):
        tensors = state_dict(directory, checkpoint=checkpoint)
        mine = plain_state(model)
        still = {plain_name(name) for name in frozen(model)} | {name for name, tensor in mine.items() if tensor.is_complex()}
        absent = {} if checkpoint is None else {name: mine[name] for name in still}
        _check_tensors(mine, absent | tensors, directory)
        load_plain(model, tensors)
        return model.eval()
    if checkpoint is not None:
        _fill_from_checkpoint(model, _checkpoint(directory, checkpoint))
        return model
    tensors = _tensors(directory)
    if not isinstance(model, Learner):
        raise UsageError(
            f"The function given as model returned {type(model).__name__}, which is not a Learner (see pg.Learner)."
        )
    inner = getattr(model, "module", None)
    if inner is not None:
        _check_tensors(plain_state(inner), tensors, directory)
        load_plain(inner, tensors)
        model.collect()
        return model
    for name in ("weights", "buffers"):
        _fill_vector(getattr(model, name), tensors[name], name, directory)
    model.spread()
    return model


def _fill_from_checkpoint(learner: Learner, found: checkpoints.Checkpoint) -> None:
    for name, mine in (("value", learner.weights), ("buffers", learner.buffers), ("integers", learner.integers)):
        _fill_vector(mine, found.tensors[name], "weights" if name == "value" else name, found.path)
    learner.spread()


def _keras_filled(model: Any, directory: Path) -> Any:
    """A Keras model that was given, with the weights of the run: in their order, since names of layers are counted on."""
    learner = KerasLearner(model)
    _fill_from_checkpoint(learner, _checkpoint(directory, "latest"))
    return learner.copy()


def _keras_loss(model: Any, inputs: Any, target: Any, output: Any, weight: torch.Tensor | None, scale: float) -> float:
    model.eval()
    weight = None if weight is None else weight * scale
    return float(model.compute_loss(x=arranged(model, inputs), y=target, y_pred=output, sample_weight=weight, training=False))


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a finished run by name, tied ones under each of their names."""
    file = directory / "model.safetensors"
    if not file.exists():
        raise UsageError(
            f"The run in {directory} is not finished: it has no {file.name}. Take its newest checkpoint "
            f"(pg.load({str(directory)!r}, checkpoint='latest'), --checkpoint latest), or go on with it "
            f"(paragrad train --resume {directory})."
        )
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            aliases = json.loads((opened.metadata() or {}).get("aliases", "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise UsageError(f"{file} cannot be read ({type(error).__name__}: {error}): it is damaged.") from error
    return tensors | {name: tensors[original] for name, original in aliases.items()}


def _check_tensors(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], directory: Path) -> None:
    again = "Give the model that was trained."
    for name, tensor in mine.items():
        if name not in theirs:
            there = ", ".join(list(theirs)[:6]) + ", ..." * (len(theirs) > 6)
            raise UsageError(f"The model has a tensor {name!r}, but the run in {directory} has none (it has {there}). {again}")
        if tensor.shape != theirs[name].shape or tensor.dtype != theirs[name].dtype:
            raise UsageError(
                f"{name!r} is {_kind(tensor)} in the model, but {_kind(theirs[name])} in the run in {directory}. {again}"
            )
    for name in theirs:
        if name not in mine:
            raise UsageError(f"The run in {directory} has a tensor {name!r}, but the model has none. {again}")


def _fill_vector(mine: torch.Tensor, theirs: torch.Tensor, name: str, where: Path) -> None:
    if mine.shape != theirs.shape:
        raise UsageError(
            f"The model has {mine.numel():,} numbers in its {name}, but {where} has {theirs.numel():,}: give the same model."
        )
    mine.copy_(theirs)


def _refuse(message: str) -> None:
    raise UsageError(f"{message}. A metric takes (output, target) of all rows and returns one number.")


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _alike(shapes: Sequence[tuple[int, ...]], known: Sequence[tuple[int, ...]]) -> bool:
    """Whether rows have the shapes of those that were trained on, -1 standing for any length."""
    return [len(shape) for shape in shapes] == [len(shape) for shape in known] and all(
        there in (here, -1) for shape, mine in zip(shapes, known, strict=True) for here, there in zip(shape, mine, strict=True)
    )


def _shown(shapes: Sequence[tuple[int, ...]]) -> str:
    return str(shapes[0]) if len(shapes) == 1 else " and ".join(map(str, shapes))
