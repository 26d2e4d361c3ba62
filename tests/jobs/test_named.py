"""Schemes, engines, codecs and runs as text: the same as objects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.jobs import named
from paragrad.run import Run


def test_text_is_the_object():
    assert named.scheme("diloco:window=30") == pg.DiLoCo(window=30)
    assert named.scheme("AGN") == pg.AGN()
    assert named.engine("local:workers=4") == pg.Local(workers=4)
    assert named.codec("topk:share=0.01") == pg.TopK(0.01)
    assert named.codec(None) is None


@pytest.mark.parametrize("run", ["runs/x", Path("runs/x")])
def test_a_path_is_a_run(run):
    assert Run.of(run) == pg.Run(out=run)
    assert Run.of(None) == pg.Run()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scheme": "agm"}, "Unknown scheme 'agm'. Did you mean"),
        ({"scheme": "agn:windw=5"}, "'windw'. Did you mean 'window'"),
        ({"scheme": pg.AGN}, r"scheme=AGN is a class: give an instance, AGN\(\)"),
        ({"scheme": None}, r"scheme=None is not valid. Give an object such as pg.AGN\(window=15\), or a name: syncsgd, "),
        (
            {"engine": 4},
            r"engine=4 is not valid. Give an object such as pg.Local\(workers=4\), or a name: local, vector, network",
        ),
        ({"engine": "locl"}, "Unknown engine 'locl'. Did you mean 'local'"),
        ({"codec": "zip"}, "Unknown codec 'zip'"),
        ({"run": 3}, r"run=3 is neither a pg.Run, such as pg.Run\(out='runs/x'\), nor the path"),
    ],
)
def test_what_is_neither_is_refused(options, said, model, rows, tmp_path):
    with pytest.raises(pg.UsageError, match=said):
        pg.train(model, rows, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_run_by_text_is_the_run_by_objects(model, rows, tmp_path):
    by_text = pg.train(
        model, rows, scheme="agn:window=5", engine="vector:workers=2", codec="topk:share=0.5", run=str(tmp_path / "text")
    )
    by_objects = pg.train(
        model,
        rows,
        scheme=pg.AGN(window=5),
        engine=pg.Vector(workers=2),
        codec=pg.TopK(0.5),
        run=pg.Run(out=tmp_path / "objects"),
    )
    assert by_text.directory == tmp_path / "text"
    assert (by_text.directory / "run.toml").read_text() == (by_objects.directory / "run.toml").read_text()
    for mine, theirs in zip(by_text.model.parameters(), by_objects.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    replayed = pg.replay(tmp_path / "text", model, rows, scheme="agn:window=5", codec="topk:share=0.5")
    assert replayed.within


def test_the_default_scheme_is_syncsgd(model, rows):
    assert pg.train(model, rows, engine="vector:workers=2").summary["scheme"] == "syncsgd"


def test_laws_are_checked_by_name():
    pg.check_scheme("agn:window=2")
    with pytest.raises(pg.UsageError, match="Unknown scheme"):
        pg.check_scheme("agm")
    with pytest.raises(pg.UsageError, match="Unknown engine"):
        pg.check_engine("cloud")


@pytest.mark.parametrize("loss", [None, lambda output, target: ((output - target) ** 2).mean()])
def test_rows_without_targets_are_rejected_where_the_model_is_no_autoencoder(model, rows, loss, tmp_path):
    x, _ = rows
    with pytest.raises(
        pg.UsageError, match=r"no targets.*outputs \(2, 2\) with its inputs \(2, 8\).*pg.train\(model, \(x, y\)\)"
    ):
        pg.train(model, x, loss=loss)
    assert list(tmp_path.iterdir()) == []


def test_one_output_is_not_stretched_over_the_inputs(rows):
    with pytest.raises(pg.UsageError, match="no targets"):
        pg.train(nn.Linear(8, 1), rows[0])


def test_an_autoencoder_is_trained_without_targets(rows):
    result = pg.train(nn.Linear(8, 8), rows[0], engine="vector:workers=2")
    assert result.summary["train_loss"] is not None
