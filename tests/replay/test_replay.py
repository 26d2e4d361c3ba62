"""A run of worker processes, repeated in this one from its record alone, gives the same center to the bit."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import paragrad as pg
from paragrad.cli.main import app
from paragrad.schemes.traits import name_of
from tests.conftest import Watch, train


@pytest.fixture
def net() -> nn.Module:
    """A network with all that travels besides weights: dropout's random numbers, averages and a counter."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 2))


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "record.jsonl").read_text().splitlines()]


def rewrite(directory: Path, lines: list[dict[str, Any]]) -> None:
    (directory / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit(directory: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    lines = events(directory)
    change(lines)
    rewrite(directory, lines)


class Cut(BaseException):
    """Stands for a power cut."""


def cut_off(model: nn.Module, rows: Any, out: Path, scheme: pg.Scheme, at: int, **options: Any) -> None:
    """A run that is cut off at its ``at``-th commit, which is the first to come after a checkpoint."""

    def cut(watch: Watch, event: pg.Event) -> None:
        if (out / "checkpoints").exists() and any((out / "checkpoints").glob("0*")):
            raise Cut
        watch.at += 1

    with pytest.raises(Cut):
        train(model, rows, out, Watch(at, cut), scheme=scheme, run={"checkpoint_every": 0.02}, epochs=100, **options)


# -- to the bit ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "optimizer"),
    [
        (pg.AGN(window=3), "adam:lr=0.01"),
        (pg.AGN(window=2, bound=1), "sgd:lr=0.1"),
        (pg.Downpour(window=3, zealous=True), "sgd:lr=0.05"),
        (pg.AEASGD(window=3), "adam:lr=0.01"),
        (pg.EAMSGD(window=3), "sgd:lr=0.05"),
        (pg.GEM(window=2), "sgd:lr=0.1"),
        (pg.DeanDownpour(window=4, fetch=3), "sgd:lr=0.1"),
        (pg.SyncSGD(), "adam:lr=0.01"),
        (pg.BackupWorkers(), "adam:lr=0.01"),
        (pg.SoftSync(), "adam:lr=0.01"),
        (pg.DiLoCo(window=5), "adam:lr=0.01"),
        (pg.AsyncDiLoCo(window=8, dylu=True), "adam:lr=0.01"),
        (pg.ModelAveraging(window=4, starts="own"), "adam:lr=0.01"),
        (pg.AGN(window=3, overlap=1), "adam:lr=0.01"),
        (pg.DiLoCo(window=3, overlap=1), "sgd:lr=0.1"),
        (pg.SyncSGD(overlap=1), "adam:lr=0.01"),
        (pg.StalenessAware(window=2, overlap=1), "adam:lr=0.01"),
        (pg.AEASGD(window=3, overlap=1), "adam:lr=0.01"),
        (pg.SoftSync(overlap=1), "adam:lr=0.01"),
    ],
    ids=lambda value: repr(value) if isinstance(value, pg.Scheme) else "",
)
def test_a_run_repeated_from_its_record_ends_in_the_same_bits(scheme, optimizer, net, rows, tmp_path):
    options = {"scheme": scheme, "optimizer": optimizer, "epochs": 2, "run": {"checkpoint_every": 0.05}}
    result = train(net, rows, tmp_path / "run", **options)
    replayed = pg.replay(tmp_path / "run", net, rows, scheme=scheme)
    assert replayed.equal, replayed.compared
    assert replayed.compared[-1].what == "model.safetensors"
    assert len(replayed.compared) >= 2
    assert replayed.strayed is None
    assert not replayed.notes
    assert replayed.commits == result.summary["commits"]
    for mine, theirs in zip(replayed.model.parameters(), result.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_large_vectors_and_several_threads_are_the_same_to_the_bit(rows, tmp_path):
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 2))  # enough for the C kernels
    train(wide, rows, tmp_path / "run", scheme=pg.AGN(window=3), epochs=1, engine=pg.Local(workers=2, threads=2))
    before = torch.get_num_threads()
    assert pg.replay(tmp_path / "run", wide, rows).equal
    assert torch.get_num_threads() == before


def test_measured_distances_change_the_arithmetic_and_are_repeated_with_it(model, rows, tmp_path):
    train(model, rows, tmp_path / "run", scheme=pg.AGN(window=3), epochs=1, run={"distances": True})
    assert pg.replay(tmp_path / "run", model, rows).equal


@pytest.mark.parametrize("scheme", [pg.AGN(window=2), pg.SyncSGD(), pg.SoftSync()], ids=name_of)
def test_a_killed_worker_and_its_replacement_are_repeated(scheme, net, rows, tmp_path):
    watch = Watch(at=9, act=lambda watch, event: watch.signal(1, signal.SIGKILL))
    # Dealt: what the killed worker had to do is left for its replacement.
    result = train(net, rows, tmp_path / "run", watch, scheme=scheme, run={"partition": "dealt"})
    assert result.summary["lost_workers"] == 1
    assert sum(event.kind == "join" for event in watch.events) == 4
    assert pg.replay(tmp_path / "run", net, rows).equal


def test_rows_of_a_worker_that_is_given_up_are_repeated_by_who_did_them(net, rows, tmp_path):
    watch = Watch(at=6, act=lambda watch, event: watch.signal(1, signal.SIGKILL))
    engine = pg.Local(workers=3, replace_after=0.001)
    train(net, rows, tmp_path / "run", watch, scheme=pg.AGN(window=2), engine=engine, run={"partition": "dealt"})
    assert any(event.kind == "leave" for event in watch.events)
    assert pg.replay(tmp_path / "run", net, rows).equal


@pytest.mark.parametrize("scheme", [pg.AGN(window=2), pg.SoftSync(), pg.DiLoCo(window=2)], ids=name_of)
def test_a_resumed_run_is_repeated_from_its_beginning(scheme, net, rows, tmp_path):
    cut_off(net, rows, tmp_path / "run", scheme, at=8)
    train(net, rows, tmp_path / "run", scheme=scheme, epochs=100, run={"resume": True, "stop": pg.Stop(seconds=0.2)})
    train(net, rows, tmp_path / "run", scheme=scheme, epochs=200, run={"resume": True, "stop": pg.Stop(seconds=0.2)})
    resumes = [event for event in events(tmp_path / "run") if event["event"] == "resume"]
    assert len(resumes) == 2
    assert all(event["arrived"] for event in resumes)
    replayed = pg.replay(tmp_path / "run", net, rows)
    assert replayed.equal, replayed.compared


def test_an_unfinished_run_is_compared_with_its_newest_checkpoint(net, rows, tmp_path):
    cut_off(net, rows, tmp_path / "run", pg.AEASGD(window=2), at=8)
    replayed = pg.replay(tmp_path / "run", net, rows)
    assert replayed.equal
    assert all(pair.what.startswith("checkpoints/") for pair in replayed.compared)
    assert any("not ended" in note for note in replayed.notes)


@pytest.mark.parametrize("kept", [0, 2])
def test_a_round_of_which_only_a_part_was_written_down_is_left_out(kept, net, rows, tmp_path):
    cut_off(net, rows, tmp_path / "run", pg.SyncSGD(), at=8)
    lines = events(tmp_path / "run")
    commits = [line for line in lines if line["event"] == "commit"]
    sizes = Counter(line["clock"] for line in commits)
    last = max(clock for clock, size in sizes.items() if size == 3)  # the last round of an epoch is shorter
    rounds = [line for line in commits if line["clock"] == last]
    rewrite(tmp_path / "run", [line for line in lines if line.get("clock", 0) < last or line == rounds[kept]])
    replayed = pg.replay(tmp_path / "run", net, rows)
    assert replayed.clock == last - 1
    assert any("cut off in the middle" in note for note in replayed.notes)


def test_a_commit_that_came_twice_is_repeated_twice(model, rows, tmp_path):
    train(model, rows, tmp_path / "run", scheme=pg.AGN(window=3), epochs=1)

    def twice(lines: list[dict[str, Any]]) -> None:
        at, commit = next((i, line) for i, line in enumerate(lines) if line.get("clock") == 5)
        for line in lines[at + 1 :]:
            if "arrived" in line:
                line["arrived"] += 1
        again = {key: commit[key] for key in ("time", "worker", "incarnation", "sequence")}
        lines.insert(at + 1, {"event": "repeated", **again, "arrived": commit["arrived"] + 1})

    edit(tmp_path / "run", twice)
    assert pg.replay(tmp_path / "run", model, rows).equal


# -- what cannot be, or is not the same ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run, made on the command line."""
    out = tmp_path_factory.mktemp("replay") / "run"
    flags = ["--data", "digits", "--model", "linear", "--batch-size", "64", "--workers", "2", "--scheme", "agn:window=3"]
    assert CliRunner().invoke(app, ["train", *flags, "--quiet", "--out", str(out)], catch_exceptions=False).exit_code == 0
    return out


@pytest.fixture
def run(digits: Path, tmp_path: Path) -> Path:
    """A copy of it that may be changed."""
    copy = tmp_path / "run"
    copy.mkdir()
    for name in ("run.toml", "record.jsonl", "model.safetensors"):
        (copy / name).write_bytes((digits / name).read_bytes())
    return copy


def paragrad(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.output


def test_the_command_says_that_the_bits_are_the_same(digits):
    code, said = paragrad(digits)
    assert code == 0
    assert "same to the bit" in said
    assert "model.safetensors" in said


def test_another_center_is_an_exit_status_of_1_unless_within_the_tolerance(run):
    tensors = load_file(run / "model.safetensors")
    name = sorted(tensors)[0]
    tensors[name] += 0.001
    save_file(tensors, run / "model.safetensors")
    code, said = paragrad(run)
    assert code == 1
    assert "more than the tolerance" in said
    code, said = paragrad(run, "--tolerance", 0.01)
    assert code == 0
    assert "within the tolerance" in said
    assert pg.replay(run).largest == pytest.approx(0.001, rel=1e-3)


def test_commits_in_another_order_are_noticed(run):
    def swap(lines: list[dict[str, Any]]) -> None:
        commits = [line for line in lines if line["event"] == "commit"]
        one = commits[4]
        two = next(line for line in commits[5:] if line["worker"] != one["worker"])
        one["arrived"], two["arrived"] = two["arrived"], one["arrived"]

    edit(run, swap)
    with pytest.raises(pg.NotReplayed, match=r"At arrival .* the replay differs from the record: "):
        pg.replay(run)
    assert paragrad(run)[0] == 1


def test_other_batches_are_noticed(run):
    def exchange(lines: list[dict[str, Any]]) -> None:
        one, two = [line for line in lines if line["event"] == "commit"][2:4]
        one["batches"], two["batches"] = two["batches"], one["batches"]

    edit(run, exchange)
    with pytest.raises(pg.NotReplayed, match="its batches would be"):
        pg.replay(run)


def test_a_gap_in_the_record_is_named(run):
    def lose(lines: list[dict[str, Any]]) -> None:
        lost = next(line for line in lines if line.get("clock") == 4)
        lines[lines.index(lost)] = {"event": "gap", "time": 0.0, "lines": 1}

    edit(run, lose)
    with pytest.raises(pg.UsageError, match=r"gap: arrival 6 .*1 lines were left out.* beyond update 3"):
        pg.replay(run)


def test_another_torch_is_said(run):
    edit(run, lambda lines: lines[0].update(torch="1.0.0", threads=999))
    notes = pg.replay(run).notes
    assert any("made with torch 1.0.0" in note for note in notes)
    assert any("999 threads" in note for note in notes)


def test_other_data_is_refused_with_both_fingerprints(model, rows, tmp_path):
    train(model, rows, tmp_path / "run", scheme=pg.AGN(window=3), epochs=1)
    recorded = events(tmp_path / "run")[0]["fingerprint"]
    x, y = rows
    with pytest.raises(pg.UsageError, match=f"fingerprint [0-9a-f]+, but the run had 400 with {recorded}"):
        pg.replay(tmp_path / "run", model, (x + 1, y))
    with pytest.raises(pg.UsageError, match="give data="):
        pg.replay(tmp_path / "run", model)
    with pytest.raises(pg.UsageError, match="does not have the initial weights"):
        pg.replay(tmp_path / "run", nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)), rows)
    with pytest.raises(pg.UsageError, match=r"18 parameters, .* had 178"):
        pg.replay(tmp_path / "run", nn.Linear(8, 2), rows)
    with pytest.raises(pg.UsageError, match="made with 'agn:window=3'"):
        pg.replay(tmp_path / "run", model, rows, scheme=pg.AGN(window=4))
    code, said = paragrad(tmp_path / "run")
    assert code == 2
    assert "made in Python" in said


def test_hogwild_has_no_order_to_repeat(model, rows, tmp_path):
    train(model, rows, tmp_path / "run", scheme=pg.Hogwild(), epochs=1)
    with pytest.raises(pg.UsageError, match="without a lock, so that there is no order"):
        pg.replay(tmp_path / "run", model, rows)


def test_a_directory_without_a_run_is_refused(run, tmp_path):
    assert paragrad(tmp_path / "nowhere")[0] == 2
    with pytest.raises(pg.UsageError, match=r"no record\.jsonl"):
        pg.replay(tmp_path)
    (run / "model.safetensors").unlink()
    with pytest.raises(pg.UsageError, match="neither a model nor a checkpoint"):
        pg.replay(run)
    edit(run, lambda lines: [line.pop("arrived", None) for line in lines] and None)
    with pytest.raises(pg.UsageError, match=r"'arrived'.* older version"):
        pg.replay(run)
    assert paragrad(run, "--tolerance", -1)[0] == 2
