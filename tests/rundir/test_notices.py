"""What a run tells its caller in Python: the same as the command line shows, and warnings that name the caller's line."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import paragrad as pg
from paragrad.run import Run
from paragrad.rundir.display import Display
from paragrad.rundir.notices import Notices

DIVERGES = {"scheme": "downpour:window=10", "engine": "vector:workers=4", "batch_size": 8}
HOLDS = {"engine": "vector:workers=2", "batch_size": 8}


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("verbose", ["auto", 1, True])
def test_progress_and_notes_are_lines_where_there_is_no_terminal(model, rows, tmp_path, capsys, verbose):
    pg.train(model, rows, holdout=0.2, run=tmp_path / "run", verbose=verbose, **HOLDS)
    first, *notes, last, where = lines(capsys)
    assert first.startswith("syncsgd on vector:workers=2: 2 workers, ")
    assert any(note.startswith("Holdout") or "held out for validation" in note for note in notes)
    assert any(note.startswith("Loss: crossentropy") for note in notes)
    assert last.endswith("ended: finished")
    assert where == f"Run directory: {tmp_path / 'run'}"


@pytest.mark.parametrize("verbose", [0, False])
def test_verbose_0_is_silent_but_for_warnings(model, rows, capsys, verbose):
    pg.train(model, rows, verbose=verbose, **HOLDS)
    assert capsys.readouterr() == ("", "")
    with pytest.warns(pg.ParagradWarning, match="Downpour with 4 workers"):
        pg.train(model, rows, verbose=verbose, **DIVERGES)
    assert capsys.readouterr() == ("", "")


def test_another_verbose_is_refused(model, rows):
    with pytest.raises(pg.UsageError, match="verbose=3, but it must be 'auto', 0"):
        pg.train(model, rows, verbose=3)


def test_a_warning_names_the_callers_line_and_is_given_once(model, rows, tmp_path):
    with pytest.warns(pg.ParagradWarning) as caught:
        pg.train(model, rows, run=tmp_path / "run", **DIVERGES)
    (warning,) = caught
    assert warning.filename == __file__
    assert "pg.train(model, rows" in Path(__file__).read_text().splitlines()[warning.lineno - 1]
    assert str(warning.message) in (tmp_path / "run" / "record.jsonl").read_text()


def test_as_an_error_it_stops_before_anything_is_written(model, rows, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(pg.ParagradWarning, match="Downpour"):
            pg.train(model, rows, run=tmp_path / "run", **DIVERGES)
    assert not (tmp_path / "run").exists()


def test_in_the_midst_of_a_run_it_ends_nothing(capfd):
    notices = Notices(Run(), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        notices(pg.Event("warning", 1.0, {"message": "The disk is full."}))
    assert capfd.readouterr().err == "WARNING: The disk is full.\n"
    thread = threading.Thread(target=notices, args=(pg.Event("warning", 1.0, {"message": "The disk is full."}),))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread.start()
        thread.join()
    assert caught[0].filename == __file__, "also from a thread, where the caller is on no stack"


def test_what_a_display_of_the_caller_shows_is_not_shown_twice(model, rows, capsys):
    pg.train(model, rows, run=pg.Run(callbacks=(Display(),)), **DIVERGES)
    out = capsys.readouterr().out
    assert out.count("ended: finished") == 1
    assert out.count("WARNING: Downpour with") == 1


def test_events_are_logged_and_commits_are_not(model, rows, caplog):
    with caplog.at_level(logging.DEBUG, logger="paragrad"):
        pg.train(model, rows, verbose=0, **HOLDS)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert any(level == "INFO" and text.startswith("note: Loss: crossentropy") for level, text in said)
    assert any(level == "DEBUG" and text.startswith("start: ") for level, text in said)
    assert not any(text.startswith("commit:") for _, text in said)


def test_without_a_handler_the_log_is_silent():
    program = "import logging, paragrad.rundir.notices as n; n.LOG.error('nobody asked')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


SCRIPT = """
import torch, paragrad as pg
from torch import nn
torch.manual_seed(0)
x = torch.randn(400, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
pg.train(model, (x, (x.sum(1) > 0).long()), scheme="downpour:window=10", engine="vector:workers=4", batch_size=8)
"""


def test_in_a_terminal_the_view_is_live(tmp_path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other side was closed
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    text = seen.decode()
    assert process.wait() == 0
    assert "\x1b[" in text
    assert "epoch 1/1" in text
    assert text.count("ParagradWarning") == 1


def test_notes_of_pg_fit_are_shown_and_its_bar_is_the_only_progress(capsys):
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = torch.randn(60, 8).numpy()
    y = (x[:, 0] > 0).astype("int64")
    for verbose in (2, 0):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "__array__ implementation")
            pg.fit(model, x, y, verbose=verbose, **HOLDS)
        out = capsys.readouterr().out
        assert "ended: finished" not in out
        assert ("8/8 - " in out) == (verbose == 2)


def test_a_callback_still_hears_every_event(rows):
    heard: list[str] = []
    pg.train(nn.Linear(8, 2), rows, run=pg.Run(callbacks=(lambda event: heard.append(event.kind),)), **HOLDS)
    assert {"directory", "start", "note", "go", "commit", "end"} <= set(heard)
