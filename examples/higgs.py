"""Separate signal from background with files of an analysis: train on Parquet, test on ROOT.

    python examples/higgs.py                          simulates 20,000 collisions
    python examples/higgs.py 20 --data higgs_uci.npz  reads x_train, y_train, x_test, y_test and feature_names
    python examples/higgs.py 20 --data 'events*.root' --label is_signal --weight weight

The first two write their rows to ./higgs. ``paragrad data higgs/train.parquet`` shows the columns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import uproot
from torch import nn

import paragrad as pg

FOLDER = Path("higgs")


def collisions(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Simulate photon pairs: a resonance at 125 GeV, smeared by the detector, over a falling spectrum."""
    draw = np.random.default_rng(seed)
    signal = draw.random(rows) < 0.5
    mass = np.where(signal, draw.normal(125, 4, rows), 100 + draw.exponential(30, rows))
    boost = draw.exponential(np.where(signal, 45, 25))
    eta = draw.normal(0, np.where(signal, 1.0, 1.4), (2, rows))
    share = np.clip(draw.normal(0.5, np.where(signal, 0.08, 0.12)), 0.1, 0.9)
    columns = {
        "photon1_pt": share * (mass + boost),
        "photon2_pt": (1 - share) * (mass + boost),
        "photon1_eta": eta[0],
        "photon2_eta": eta[1],
        "mass": draw.normal(mass, 1.5),
        "met": draw.exponential(20, rows),
        # Generators give some events a negative weight: they count against the others.
        "weight": np.where(draw.random(rows) < 0.05, -1.0, 1.0) * draw.uniform(0.5, 1.5, rows),
    }
    return {**{name: values.astype(np.float32) for name, values in columns.items()}, "is_signal": signal.astype(np.int32)}


def of_archive(path: str, part: str) -> dict[str, np.ndarray]:
    """Return one part of an .npz with x_train, y_train, x_test, y_test and feature_names as columns."""
    archive = np.load(path)
    columns = {str(name): archive[f"x_{part}"][:, place] for place, name in enumerate(archive["feature_names"])}
    return {**columns, "is_signal": archive[f"y_{part}"].astype(np.int32)}


def written(train: dict[str, np.ndarray], test: dict[str, np.ndarray]) -> tuple[Path, Path]:
    """Write the training rows as Parquet and the test rows as a tree in a ROOT file; return both paths."""
    FOLDER.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(train), FOLDER / "train.parquet", row_group_size=4096)
    with uproot.recreate(FOLDER / "test.root") as file:
        tree = file.mktree("events", {name: values.dtype for name, values in test.items()})
        tree.extend(test)
    return FOLDER / "train.parquet", FOLDER / "test.root"


def main(epochs: int = 10, data: str | None = None, label: str = "is_signal", weight: str | None = None) -> pg.Result:
    """Train a small network with two asynchronous workers."""
    if data is None:
        paths, weight = written(collisions(20_000, 1), collisions(5_000, 2)), "weight"
    elif data.endswith(".npz"):
        paths = written(of_archive(data, "train"), of_archive(data, "test"))
    else:
        paths = data, None
    table = pg.Table(paths[0], label=label, weight=weight, transforms=(pg.Standardise(),))
    opened = table.open()
    torch.manual_seed(0)
    features = len(opened.features)
    model = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    result = pg.train(
        model,
        table,
        validation=paths[1],
        holdout=None if paths[1] else 0.2,
        optimizer="adam:lr=0.002",
        scheme=pg.AGN(window=5),
        engine=pg.Local(workers=2),
        epochs=epochs,
        batch_size=64,
    )
    print(f"{len(opened):,} rows of {features} features: accuracy {result.accuracy:.3f}")
    if paths[1] is not None:
        trained = pg.load(result.directory, model=model)  # with its transformations, which scale the test part
        print(f"ROC AUC on {paths[1]}: {trained.evaluate(paths[1])['auc']:.3f}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int, nargs="?", default=10)
    parser.add_argument("--data")
    parser.add_argument("--label", default="is_signal")
    parser.add_argument("--weight")
    given = parser.parse_args()
    main(given.epochs, given.data, given.label, given.weight)
