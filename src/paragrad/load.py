"""load(...): a trained model with its weights, transformations and class names, ready to predict and to evaluate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
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
from paragrad.rundir.directory import read_tensors
from paragrad.rundir.notices import Verbose, show_notes

Array = np.ndarray[Any, Any]
KERAS = "model.keras"


@dataclass(frozen=True)
class Trained:
    """A trained model, as ``load`` returns it."""

    module: Any
    """The module with its weights, in evaluation mode; for a custom learner, the learner."""
    transforms: Fitted | None
    """Transformations of the table's columns, as fitted on the training part."""
    classes: tuple[str, ...] | None
    """Names of the classes, if they have names."""
    directory: Path
    loss: Loss | None
    """The loss of the training; None if it was a user-defined function."""
    head: Head
    """Kind of the outputs."""
    card: Card
    _shown_notes: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        """Return one line, since a notebook displays the last value of a cell."""
        return f"Trained({type(self.module).__name__}, head={self.head!r}, directory={str(self.directory)!r})"

    def predict(self, data: Any, *, verbose: Verbose = "auto") -> Array:
        """Return the prediction for every row: the probability of each class or of the positive class, or numbers in the
        units of the label.

        ``data`` is anything that ``train`` takes, with or without targets, or a table. If the run was trained on a table, its
        transformations are applied to the rows; arrays have their columns in the order of the features. Each note about the
        rows is printed once; ``verbose=0`` prints nothing.
        """
        rows = self._rows(data, verbose, labelled=False)
        return np.concatenate([scores for scores, _ in self.predictions(rows)])

    def evaluate(
        self,
        data: Any = None,
        *,
        metrics: MetricsLike | None = None,
        positive: str | None = None,
        verbose: Verbose = "auto",
    ) -> dict[str, Any]:
        """Return loss, accuracy, log loss, ROC AUC, F1 and confusion matrix, or regression errors; with weights, significance.

        ``data`` is anything that ``train`` takes, or a table; None: the validation rows of the run. If the label is
        transformed, ``loss`` is in the transformed units, as in training; regression errors are in the units of the label.
        ``metrics`` adds functions of (output, target), as in training. F1 is that of the class ``positive``: by default the
        class of the training, else, of two classes, the one named signal, or the second. Each note about the rows is printed
        once; ``verbose=0`` prints nothing.
        """
        return self.judged(self._rows(data, verbose, labelled=True), metrics=metrics, positive=positive)

    # -- rows ------------------------------------------------------------------------------------------------

    def _rows(self, data: Any, verbose: Verbose, *, labelled: bool) -> Given:
        """Return the rows, and show their notes that were not shown before."""
        rows = self.given(data, labelled=labelled)
        show_notes([note for note in rows.notes if note not in self._shown_notes], verbose)
        self._shown_notes.update(rows.notes)
        return rows

    def given(self, data: Any, *, labelled: bool) -> Given:
        """Return the user's data as rows; for None, the validation rows of the run."""
        if data is None:
            return self._validation_rows()
        return given(
            data,
            labelled=labelled,
            transforms=self.transforms,
            classes=self.classes,
            columns=self.card.table,
            keras=is_keras(self.module),
            as_classes=self.head in BY_CLASS,
        )

    def _validation_rows(self) -> Given:
        remedy = "give the rows (--data, data=)"
        if self.card.validation is None:
            raise UsageError(f"The run in {self.directory} had no validation rows: {remedy}.")
        settings = options.read_config(self.directory / "run.toml")
        try:
            parts = recipe.rows(settings, keras=is_keras(self.module))
        except UsageError as error:
            raise UsageError(
                f"The validation rows of the run in {self.directory} cannot be read again: {remedy}. {error}"
            ) from error
        if parts.validation is None or loading.fingerprint(parts.validation) != self.card.validation:
            raise UsageError(
                f"The validation rows of the run in {self.directory} differ from the rows that its run.toml names (they were "
                f"given in Python, or {settings['data']!r} has changed): {remedy}."
            )
        validation = parts.validation
        if isinstance(validation, Arrays) and isinstance(validation.tree, Weighted):
            # Training scales the weights. Undo that, so that sums of weights are counts of events, as in the file.
            validation = Arrays(Weighted(validation.tree.rows, validation.tree.weight / self.card.scale))
        return of_source(validation, f"the validation rows of {parts.name}")

    # -- predictions -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def predictions(self, rows: Given) -> Iterator[tuple[Array, Array | None]]:
        """Yield predictions and labels (None without labels), one mini-batch at a time."""
        for batch in rows.batches(EVALUATION_BATCH):
            inputs, target, _ = self._parts(batch)
            scores = self._in_units(scores_of(self._output(inputs), self.head, self.card.axis))
            yield scores, None if target is None else self._in_units(as_numpy(target))

    @torch.no_grad()
    def judged(self, rows: Given, *, metrics: MetricsLike | None = None, positive: str | None = None) -> dict[str, Any]:
        """Return the metrics of the predictions for these rows."""
        further = resolved(metrics, lambda: Outputs(self.head, classes=self.classes))
        positive = positive or positive_in(further) or self.card.positive
        measured = Measured({name: one for name, one in further.items() if not isinstance(one, Figures)}, _refuse)
        gathered: Gathered | None = None
        objective: Objective | None = None
        totals = Means()
        for batch in rows.batches(EVALUATION_BATCH):
            inputs, target, weight = self._parts(batch)
            if target is None and self.head != "raw":
                raise UsageError(f"{rows.name} has no labels, which evaluation needs: name the label, or use predict.")
            if self._loss_takes_batches():
                objective = objective or self._objective(batch)
                judged = objective.judge(self.module, batch, outputs=self.head != "raw")
                output, target = judged.output, judged.target
                totals.add(judged.sums)
            else:
                output = self._output(inputs)
                target = target if self.head in BY_CLASS else aligned(output, target, self.loss)
            scaled = None if weight is None else weight * self.card.scale
            if is_keras(self.module):
                x, count = arranged(self.module, inputs), float(len(output))
                loss = self.module.compute_loss(x=x, y=target, y_pred=output, sample_weight=scaled, training=False)
                totals.add({"loss": (float(loss) * count, count)})
            elif self.loss is not None and objective is None:
                totals.add(sums(self.loss, output, target, scaled, self.card.axis if self.head in BY_CLASS else None))
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
        """Undo the transformation of the label, if there is one."""
        if self.card.label is None or self.head != "numbers" or self.transforms is None:
            return values
        return self.transforms.invert(self.card.label, values)

    def _loss_takes_batches(self) -> bool:
        """Return whether the loss is a function of (model, batch)."""
        if self.head == "raw" and self.loss is None:
            raise UsageError("The run was trained with a loss of (model, batch): give it as pg.load(run, loss=...).")
        return self.loss is not None and takes_model_and_batch(self.loss)

    def _objective(self, batch: Any) -> Objective:
        assert self.loss is not None
        if isinstance(self.loss, losses.OwnLoss):
            with fitting():
                return OfItself(self.loss.fitted(self.loss.output(self.module, batch), target_of(batch)))
        return objective_of(self.loss)

    def _parts(self, batch: Any) -> tuple[Any, Any, torch.Tensor | None]:
        """Return inputs, target and weights of a mini-batch; target and weights may be None."""
        weight = weight_of(batch)
        rows = batch.rows if isinstance(batch, Weighted) else batch
        labelled = self.card.own_target or (has_target(rows) and len(leaves(rows)) > len(self.card.rows))
        inputs, target = split(rows) if labelled else (rows, None)
        shapes = tuple(tuple(leaf.shape[1:]) for leaf in leaves(inputs) if isinstance(leaf, torch.Tensor))
        if self.card.rows and not _match(shapes, self.card.rows):
            raise UsageError(
                f"A row has the shape {_joined(shapes)}, but the run was trained on rows of {_joined(self.card.rows)}."
            )
        return inputs, target, weight

    def _output(self, inputs: Any) -> torch.Tensor:
        if not isinstance(self.module, nn.Module):
            raise UsageError(f"{self.card.kind} makes a custom learner, for which pg.load cannot predict: use .module.")
        with fitting():
            if is_keras(self.module):
                output = self.module(arranged(self.module, inputs), training=False)
            else:
                output = losses.logits_of(call(self.module, inputs))
        if not isinstance(output, torch.Tensor):
            raise UsageError(f"The model returns a {type(output).__name__} instead of one tensor: call .module yourself.")
        return output


# -- loading --------------------------------------------------------------------------------------------------------


def load(
    run: str | Path,
    model: nn.Module | Callable[[], Learner] | None = None,
    *,
    loss: Loss | str | None = None,
    checkpoint: str | int | None = None,
) -> Trained:
    """Return the trained model of a run.

    run         the run directory
    model       as given to ``train``; only needed if it was made in Python (a module, or a function that makes a learner)
    loss        as given to ``train``; only needed if it is your own function and ``evaluate`` should compute it
    checkpoint  ``"latest"``: the newest checkpoint, for a run that is not finished; or the update of a checkpoint
    """
    directory = _directory(run, checkpoint)
    card = Card.read(directory)
    saved = directory / KERAS
    if is_keras(model) or (model is None and checkpoint is None and saved.exists()):
        module = (kerasmodel.load(saved) if model is None else _keras_filled(model, directory, checkpoint)).eval()
        head, loss = keras_head(module), None
    else:
        if loss is None and card.loss is not None and not ownfile.is_gone(card.loss):
            loss = card.loss
        loss = losses.build(loss) if isinstance(loss, str) else loss
        module, head = _filled(_model(card, model, directory), directory, checkpoint), card.head
    file = directory / "transforms.json"
    transforms = Fitted.from_json(file.read_text(encoding="utf-8")) if file.exists() else None
    return Trained(module, transforms, card.classes, directory, loss, head, card)


def state_dict(run: str | Path, *, checkpoint: str | int | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a run by the module's own names, for ``module.load_state_dict(..., strict=False)``.

    run         the run directory
    checkpoint  None: the finished model; ``"latest"``: the newest checkpoint; or the update of a checkpoint. A checkpoint
                holds the trained parameters and the buffers, but no frozen parameters
    """
    directory = _directory(run, checkpoint)
    if checkpoint is None:
        return _tensors(directory)
    named = _checkpoint(directory, checkpoint).named()
    if not named:
        raise UsageError(f"The run in {directory} trained a custom learner, whose tensors have no names: use pg.load.")
    return named


def _directory(run: str | Path, checkpoint: str | int | None) -> Path:
    if checkpoint not in (None, "latest") and not isinstance(checkpoint, int):
        raise UsageError(f"checkpoint={checkpoint!r} must be 'latest', the number of an update, or None.")
    directory = Path(run)
    if not directory.is_dir():
        raise UsageError(f"{str(directory)!r} is not a run directory.")
    return directory


def _checkpoint(directory: Path, which: str | int) -> checkpoints.Checkpoint:
    found, damaged = checkpoints.of(directory / "checkpoints", which)
    if found is None:
        there = ", ".join(str(int(path.name)) for path in sorted((directory / "checkpoints").glob("[0-9]*"))) or "none"
        raise UsageError(" ".join([f"The run in {directory} has no valid checkpoint {which} (it has: {there}).", *damaged]))
    return found


def _model(card: Card, model: Any, directory: Path) -> Any:
    """Return the model without the weights of the run."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if callable(model):
        return made_on("cpu", model)
    if model is not None:
        raise UsageError(f"model={model!r} is neither a torch module nor a function that makes a learner.")
    if card.built is None:
        raise UsageError(
            f"The model of the run in {directory} ({card.kind}) was made in Python, and the run directory cannot build it: "
            f"give it as pg.load({str(directory)!r}, model={card.kind}(...))."
        )
    try:
        return builtin.build(card.built.spec, card.built.inputs, card.built.outputs, card.built.seed)
    except UsageError as error:
        raise UsageError(
            f"The model of the run in {directory} cannot be built again: {error} Or give it: pg.load(run, model=...)."
        ) from error


def _filled(model: Any, directory: Path, checkpoint: str | int | None) -> Any:
    """Return the model with the weights of the run, in evaluation mode."""
    if isinstance(model, nn.Module):
        tensors = state_dict(directory, checkpoint=checkpoint)
        mine = plain_state(model)
        untrained = {plain_name(name) for name in frozen(model)} | {
            name for name, tensor in mine.items() if tensor.is_complex()
        }
        absent = {} if checkpoint is None else {name: mine[name] for name in untrained}
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


def _keras_filled(model: Any, directory: Path, checkpoint: str | int | None) -> Any:
    """Return the Keras model with the weights of the run, matched by order: Keras numbers layer names across models."""
    learner = KerasLearner(model)
    if checkpoint is not None:
        _fill_from_checkpoint(learner, _checkpoint(directory, checkpoint))
        return learner.copy()
    mine, theirs = learner.tensors(), _tensors(directory)
    if len(mine) != len(theirs):
        raise UsageError(
            f"The model has {len(mine)} tensors, but the run in {directory} has {len(theirs)}. Give the model that was trained."
        )
    _check_tensors(mine, dict(zip(mine, theirs.values(), strict=True)), directory)
    for tensor, other in zip(mine.values(), theirs.values(), strict=True):
        tensor.data.copy_(other)
    learner.collect()
    return learner.copy()


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a finished run by name, tied ones under each of their names."""
    file = directory / "model.safetensors"
    if not file.exists():
        raise UsageError(
            f"The run in {directory} is not finished: it has no {file.name}. Use its newest checkpoint "
            f"(pg.load({str(directory)!r}, checkpoint='latest'), --checkpoint latest), or resume it "
            f"(paragrad train --resume {directory})."
        )
    try:
        tensors, aliases = read_tensors(file)
    except (OSError, SafetensorError, ValueError) as error:
        raise UsageError(f"{file} cannot be read ({type(error).__name__}: {error}): it is damaged.") from error
    return tensors | {name: tensors[original] for name, original in aliases.items()}


def _check_tensors(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], directory: Path) -> None:
    remedy = "Give the model that was trained."
    for name, tensor in mine.items():
        if name not in theirs:
            there = ", ".join(list(theirs)[:6]) + ", ..." * (len(theirs) > 6)
            raise UsageError(f"The model has a tensor {name!r}, but the run in {directory} has none (it has {there}). {remedy}")
        if tensor.shape != theirs[name].shape or tensor.dtype != theirs[name].dtype:
            raise UsageError(
                f"{name!r} is {_kind(tensor)} in the model, but {_kind(theirs[name])} in the run in {directory}. {remedy}"
            )
    for name in theirs:
        if name not in mine:
            raise UsageError(f"The run in {directory} has a tensor {name!r}, but the model has none. {remedy}")


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


def _match(shapes: Sequence[tuple[int, ...]], trained: Sequence[tuple[int, ...]]) -> bool:
    """Return whether rows have the shapes of the training; -1 there stands for any length."""
    return [len(shape) for shape in shapes] == [len(shape) for shape in trained] and all(
        length in (own, -1)
        for shape, other in zip(shapes, trained, strict=True)
        for own, length in zip(shape, other, strict=True)
    )


def _joined(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(map(str, shapes))
