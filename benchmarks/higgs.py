"""Higgs rows as Parquet, HDF5, ROOT and CSV: one seed gives one model from each, and how good it is.

    .venv/bin/python benchmarks/higgs.py --data ../shared/data

The folder holds ``higgs_uci/higgs_uci.npz`` and ``higgs_atlas/higgs_atlas.npz`` (x, y and feature_names, train and test).
SyncSGD comes to the same bits whatever file the rows are from. Beside what a network reaches stand the figures of its peers
on the same rows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import measure
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
import uproot

import paragrad as pg
from paragrad.models import builtin

Columns = dict[str, np.ndarray[Any, Any]]
SETS = {
    "higgs_uci": {"peers": {"logistic": 0.688, "trees": 0.797}, "transforms": (pg.Standardise(),), "epochs": 30},
    "higgs_atlas": {
        "peers": {"logistic": 0.812, "trees": 0.890},
        "transforms": (pg.Missing(value=-999.0, flag=True), pg.Standardise()),
        "epochs": 20,
    },
}
"""ROC AUC of scikit-learn's logistic regression and gradient-boosted trees on the same rows; what is done to the columns."""
LABEL = "is_signal"


def _hdf5(path: Path, columns: Columns) -> None:
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values


def _root(path: Path, columns: Columns) -> None:
    with uproot.recreate(path) as file:
        file.mktree("events", {name: values.dtype for name, values in columns.items()}).extend(columns)


WRITERS: dict[str, Callable[[Path, Columns], None]] = {
    "parquet": lambda path, columns: pa.parquet.write_table(pa.table(columns), path, row_group_size=4096),
    "h5": _hdf5,
    "root": _root,
    "csv": lambda path, columns: pa.csv.write_csv(pa.table(columns), path),
}


def columns_of(archive: Any, part: str) -> Columns:
    """One part of the archive as columns by name."""
    features = {str(name): archive[f"x_{part}"][:, place] for place, name in enumerate(archive["feature_names"])}
    return {**features, LABEL: archive[f"y_{part}"].astype(np.int32)}


def one(name: str, suffix: str, archive: Any, folder: Path, epochs: int) -> dict[str, Any]:
    """Write both parts, train on one, judge by the other."""
    paths = {part: folder / f"{name}_{part}.{suffix}" for part in ("train", "test")}
    for part, path in paths.items():
        WRITERS[suffix](path, columns_of(archive, part))
    settings: dict[str, Any] = SETS[name]
    features = [str(feature) for feature in archive["feature_names"]]
    table = pg.Table(paths["train"], features=features, label=LABEL, transforms=settings["transforms"])
    began = time.perf_counter()
    width = pg.Table(paths["train"], features=features, label=LABEL).open()
    read = time.perf_counter() - began
    inputs = len(width.names) + (_gaps(archive) if name == "higgs_atlas" else 0)
    result = pg.train(
        builtin.build("mlp:128-128", inputs=(inputs,), outputs=2),
        table,
        validation=paths["test"],
        optimizer="adam:lr=0.001,weight_decay=0.0001",
        scheme=pg.SyncSGD(),
        engine=pg.Local(workers=2),
        epochs=epochs,
        batch_size=64,
        run=pg.Run(out=folder / f"run-{name}-{suffix}", validate_every=None, checkpoint_every=None),
        verbose=0,
    )
    found = pg.load(result.directory).evaluate(paths["test"])
    weights = torch.cat([tensor.reshape(-1) for tensor in result.model.state_dict().values()])
    return {
        "set": name,
        "format": suffix,
        "model": hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16],
        "auc": found["auc"],
        "accuracy": found["accuracy"],
        "megabytes": paths["train"].stat().st_size / 1e6,
        "seconds_to_open": read,
        "seconds_to_train": result.summary["seconds"],
    }


def _gaps(archive: Any) -> int:
    """Features that lack a value somewhere: each gets a column that says where."""
    return int((archive["x_train"] == -999.0).any(0).sum())


def main() -> None:
    parser = measure.parser("higgs", __doc__, seconds=None, repeats=1)
    parser.add_argument("--data", type=Path, required=True, help="the folder that higgs_uci/ and higgs_atlas/ lie in")
    parser.add_argument("--epochs", type=int, help="instead of those of each set")
    options = parser.parse_args()
    report = measure.Report("higgs", options)
    for name, settings in SETS.items():
        archive = np.load(options.data / name / f"{name}.npz")
        with measure.folder() as folder:
            for suffix in WRITERS:
                report.figures.append(one(name, suffix, archive, folder, options.epochs or settings["epochs"]))  # type: ignore[call-overload]
                print(report.figures[-1], flush=True)
        mine = [figures for figures in report.figures if figures["set"] == name]
        peers = ", ".join(f"{peer} {auc}" for peer, auc in settings["peers"].items())  # type: ignore[attr-defined]
        report.claims += [
            measure.Claim(f"{name}: different models from four formats", len({f["model"] for f in mine}), target="1"),
            measure.Claim.over(f"{name}: ROC AUC on the test part ({peers})", [f["auc"] for f in mine]),
        ]
    options.data = options.data.name
    measure.show(
        "Higgs rows from four kinds of file", ("what", "value"), [(claim.what, f"{claim.value:.4g}") for claim in report.claims]
    )
    report.write()


if __name__ == "__main__":
    main()
