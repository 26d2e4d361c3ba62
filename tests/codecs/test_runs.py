"""Whole runs with a codec: on the local and the vector engine, resumed, replayed, from the command line, and refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import paragrad as pg
from paragrad.cli.main import app
from paragrad.codecs.codec import size
from paragrad.config.options import describe, read_config
from paragrad.rundir.record import read
from paragrad.schemes.traits import name_of
from tests.codecs.table import TABLE
from tests.conftest import stop_after, train

LOOP = pg.Vector(workers=3, mode="loop")
EVERY = [pg.FP16(), pg.BF16(), pg.Int8(), pg.OneBit(), pg.Threshold(0.001), pg.Threshold(0.05, values=False), pg.TopK(0.05)]


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def weights(result: pg.Result) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


@pytest.mark.parametrize("engine", [pg.Local(workers=2), pg.Vector(workers=3), LOOP], ids=["local", "together", "loop"])
def test_bytes_are_in_the_record_and_in_the_summary(engine, model, rows, tmp_path):
    codec = pg.TopK(0.1)
    result = train(model, rows, tmp_path / "run", engine=engine, codec=codec, scheme=pg.AGN(window=5))
    each = size(codec.encode(torch.zeros(parameters(model))))
    commits = [event for event in read(tmp_path / "run") if event.kind == "commit"]
    assert {event.data["bytes"] for event in commits} == {each}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["codec"] == "topk:share=0.1"
    assert summary["bytes_sent"] == each * len(commits)
    assert summary["plain_over_sent"] == pytest.approx(4 * parameters(model) / each, abs=0.01)
    assert read_config(tmp_path / "run" / "run.toml")["codec"] == "topk:share=0.1"
    if "cluster" in summary:
        assert sum(summary["cluster"]["bytes_to_center"]) == summary["bytes_sent"]
    assert result.summary["test_loss"] is None


@pytest.mark.parametrize("scheme", [pg.AGN(window=5), pg.SyncSGD()], ids=name_of)
def test_without_a_codec_all_bytes_are_sent(scheme, model, rows, tmp_path):
    result = train(model, rows, tmp_path / "run", engine=LOOP, scheme=scheme)
    assert result.summary["bytes_sent"] == 4 * parameters(model) * result.summary["commits"]
    assert not {"plain_over_sent", "codec"} & set(result.summary)
    assert not any("bytes" in event.data for event in read(tmp_path / "run"))


@pytest.mark.parametrize("codec", [pg.Int8(), pg.TopK(0.1), None], ids=repr)
def test_on_a_narrow_wire_a_commit_takes_as_long_as_its_bytes(codec, model, rows, tmp_path):
    bandwidth = 1000.0
    engine = pg.Vector(workers=1, mode="loop", cluster=pg.Cluster(speeds=1.0, bandwidth=bandwidth))
    result = train(model, rows, tmp_path / "run", engine=engine, codec=codec, scheme=pg.AGN(window=5), epochs=1)
    plain = 4 * parameters(model)
    up = plain if codec is None else size(codec.encode(torch.zeros(parameters(model))))
    first = next(event for event in read(tmp_path / "run") if event.kind == "commit")
    assert first.time == pytest.approx(plain / bandwidth + 5 + up / bandwidth)
    assert result.summary["commits"] == 10


@pytest.fixture(scope="module")
def plain_loss(tmp_path_factory) -> float:
    """What the same training comes to without a codec."""
    return learn(None, tmp_path_factory.mktemp("plain") / "run")


def learn(codec: pg.Codec | None, out: Path) -> float:
    torch.manual_seed(0)
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    rows, model = (x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    result = train(model, rows, out, engine=LOOP, codec=codec, scheme=pg.AGN(window=2), optimizer="sgd:lr=0.5", epochs=8)
    return result.summary["train_loss"]


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_a_model_learns_with_every_codec_as_without(codec, plain_loss, tmp_path):
    assert plain_loss < 0.2
    assert learn(codec, tmp_path / "run") == pytest.approx(plain_loss, abs=0.03)


# -- once more ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [pg.TopK(0.05), pg.Int8(), pg.OneBit(block=16)], ids=repr)
@pytest.mark.parametrize("scheme", [pg.AGN(window=3), pg.AGN(window=3, overlap=1), pg.SyncSGD(), pg.SoftSync()], ids=repr)
def test_a_replay_repeats_a_local_run_to_the_bit_residuals_included(codec, scheme, model, rows, tmp_path):
    options = {"optimizer": "adam", "scheme": scheme, "codec": codec, "epochs": 2}
    train(copy.deepcopy(model), rows, tmp_path / "run", engine=pg.Local(workers=2), **options)
    replayed = pg.replay(tmp_path / "run", copy.deepcopy(model), rows)
    assert replayed.equal
    assert replayed.strayed is None
    assert {pair.what.split("/")[0] for pair in replayed.compared} == {"checkpoints", "model.safetensors"}


@pytest.mark.parametrize("engine", [pg.Local(workers=1, threads=1), pg.Vector(workers=1, mode="loop")], ids=["local", "vector"])
@pytest.mark.parametrize("codec", [pg.TopK(0.05), pg.OneBit()], ids=repr)
def test_a_resumed_run_goes_on_with_what_was_left_out(engine, codec, model, rows, tmp_path):
    def go(name: str, *callbacks, resume: bool = False) -> pg.Result:
        run = pg.Run(out=tmp_path / name, callbacks=callbacks, resume=resume, checkpoint_every=None)
        options = {"optimizer": "sgd:lr=0.1", "scheme": pg.AGN(window=3), "codec": codec, "engine": engine}
        return pg.train(copy.deepcopy(model), rows, batch_size=8, epochs=2, run=run, **options)

    whole = go("whole")
    go("halves", stop_after(12))
    halves = go("halves", resume=True)
    assert torch.equal(weights(whole), weights(halves))
    assert halves.summary["bytes_sent"] == whole.summary["bytes_sent"]
    assert pg.replay(tmp_path / "halves", copy.deepcopy(model), rows).equal


def test_a_run_is_not_resumed_with_another_codec(model, rows, tmp_path):
    train(model, rows, tmp_path / "run", stop := None, engine=LOOP, codec=pg.Int8(), epochs=1)
    for codec in (None, pg.FP16()):
        with pytest.raises(pg.UsageError, match="was made with codec 'int8'"):
            train(model, rows, tmp_path / "run", stop, engine=LOOP, codec=codec, epochs=2, run={"resume": True})


@pytest.mark.parametrize("codec", TABLE, ids=repr)
def test_a_virtual_run_with_a_codec_repeats_to_the_byte(codec, model, rows, tmp_path):
    cluster = pg.Cluster(
        speeds=pg.LogNormal(1.0, 0.5),
        latency=0.3,
        faults=(pg.Crash(worker=1, at=9.0, down=2.0), pg.DropMessage(worker=0, at=5.0)),
    )
    engine = pg.Vector(workers=3, mode="loop", cluster=cluster)
    for name in ("a", "b"):
        train(copy.deepcopy(model), rows, tmp_path / name, engine=engine, codec=codec, epochs=1, run={"validate_every": None})
    assert (tmp_path / "a" / "record.jsonl").read_bytes() == (tmp_path / "b" / "record.jsonl").read_bytes()
    assert pg.replay(tmp_path / "a", copy.deepcopy(model), rows).equal


class Own(pg.TopK):
    """A codec of the user's."""


def test_a_codec_of_ones_own_is_given_to_a_replay(model, rows, tmp_path):
    train(copy.deepcopy(model), rows, tmp_path / "run", engine=LOOP, codec=Own(0.2), epochs=1)
    with pytest.raises(pg.UsageError, match="give codec="):
        pg.replay(tmp_path / "run", copy.deepcopy(model), rows)
    with pytest.raises(pg.UsageError, match=r"was made with 'own:share=0\.2'"):
        pg.replay(tmp_path / "run", copy.deepcopy(model), rows, codec=Own(0.3))
    assert pg.replay(tmp_path / "run", copy.deepcopy(model), rows, codec=Own(0.2)).equal


def test_what_is_not_finite_is_refused_and_never_enters(rows, tmp_path):
    options = {"engine": pg.Local(workers=2), "scheme": pg.Downpour(window=2), "optimizer": "sgd:lr=1e38"}
    with pytest.raises(pg.Diverged, match="committed NaN"):
        train(nn.Linear(8, 2), rows, tmp_path / "run", codec=pg.OneBit(), **options)
    assert any(event.kind == "refused" and "bytes" in event.data for event in read(tmp_path / "run"))


# -- the command line, and what cannot be ---------------------------------------------------------------------------


def test_from_the_command_line_and_from_its_run_toml(tmp_path):
    def run(*arguments: str):
        return CliRunner().invoke(app, ["train", *arguments])

    done = run("--data", "digits", "--model", "mlp:8", "--codec", "topk:share=0.02", "--workers", "2", "--out", "run")
    assert done.exit_code == 0, done.output
    assert "times as much" in done.output
    again = run("run/run.toml", "--out", "again", "-q")
    assert again.exit_code == 0, again.output
    assert read_config(Path("again/run.toml"))["codec"] == "topk:share=0.02"
    assert CliRunner().invoke(app, ["replay", "run"]).exit_code == 0
    assert "Did you mean" in (said := run("--data", "digits", "--codec", "topp").output) or "topk" in said.lower()
    assert "share must be a number" in run("--data", "digits", "--codec", "topk:share=few").output


def test_the_codecs_are_listed():
    listed = CliRunner().invoke(app, ["codecs"]).output
    assert all(describe(codec).split(":")[0] in listed for codec in TABLE)
    assert "Stich" in CliRunner().invoke(app, ["codecs", "topk"]).output
    assert CliRunner().invoke(app, ["codecs", "zip"]).exit_code == 2


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        (pg.AEASGD(), "aeasgd sends weights"),
        (pg.AEASGD(atomic=False), "aeasgd:atomic=false gives each worker its own reply"),
        (pg.ModelAveraging(), "modelaveraging sends weights"),
        (pg.Hogwild(), "Hogwild share the center's weights"),
        (pg.ADAG(place="sends"), "also sends anchor"),
    ],
    ids=lambda given: name_of(given) if isinstance(given, pg.Scheme) else "",
)
@pytest.mark.parametrize("engine", [pg.Local(), LOOP], ids=["local", "vector"])
def test_a_scheme_whose_values_are_no_movements_is_refused(engine, scheme, said, model, rows, tmp_path):
    with pytest.raises(pg.UsageError, match=said):
        train(model, rows, tmp_path / "run", engine=engine, scheme=scheme, codec=pg.Int8())
    assert not (tmp_path / "run").exists()


def test_what_is_no_codec_is_refused(model, rows, tmp_path):
    with pytest.raises(pg.UsageError, match=r"codec=8 is not valid\. Give an object such as pg\.TopK\(0\.01\), or a name"):
        train(model, rows, tmp_path / "run", codec=8)
