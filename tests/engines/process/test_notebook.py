"""Training from the cells of a notebook, in a real Jupyter kernel."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from paragrad.rundir import checkpoint
from tests.engines.test_local_life import alive, commits, wait_for

HEAD = """
import os, sys, time, torch, paragrad as pg
from multiprocessing import forkserver
from torch import nn

class Mine(nn.Module):
    def __init__(self, pause=0.0):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.pause = pause

    def forward(self, x):
        time.sleep(self.pause)
        return self.inner(x.flatten(1))

def train(model, **options):
    return pg.train(model, "digits", holdout=0.2, loss=lambda out, target: nn.functional.cross_entropy(out, target),
                    metrics={"accuracy": lambda out, target: (out.argmax(1) == target).float().mean()},
                    optimizer="adam:lr=0.02", scheme=pg.AGN(window=2), engine=pg.Local(workers=2), batch_size=16, **options)
"""


class Notebook:
    """A kernel, and cells that are run in it one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._notebook = nbformat.v4.new_notebook()
        self._client = NotebookClient(
            self._notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )
        self.open = self._client.setup_kernel

    def run(self, source: str, *, fails: bool = False) -> list[dict[str, Any]]:
        """What is shown below the cell."""
        self._client.allow_errors = fails
        self._notebook.cells.append(nbformat.v4.new_code_cell(source))
        self._client.execute_cell(self._notebook.cells[-1], len(self._notebook.cells) - 1)
        return list(self._notebook.cells[-1].outputs)

    def ask(self, expression: str) -> Any:
        """A value in the kernel."""
        outputs = self.run(f"import json; print(json.dumps({expression}))")
        # What an earlier cell has started may still have something to say.
        return json.loads(next(text for text in reversed(shown(outputs).splitlines()) if text[:1] in '[{"-0123456789tfn'))

    def interrupt(self) -> None:
        """What the stop button does: the signal goes to the kernel and to all that it has started."""
        os.killpg(os.getpgid(self._client.km.provisioner.pid), signal.SIGINT)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            patch.setenv(name, str(folder / name.lower()))
        made = Notebook(folder)
        with made.open():
            assert made.run(HEAD) == []
            yield made
            left = made.ask("[os.getpid(), forkserver._forkserver._forkserver_pid]")
        wait_for(lambda: not any(map(alive, left)), seconds=10)


def shown(outputs: list[dict[str, Any]]) -> str:
    """The text of all outputs, as it is where nothing can be drawn."""
    return "".join(each.get("text") or each.get("data", {}).get("text/plain", "") for each in outputs)


def test_a_cell_trains_its_own_model_with_its_own_loss(notebook):
    outputs = notebook.run("result = train(Mine(), epochs=1, verbose=0)\nprint('accuracy', result.accuracy)\nresult")
    assert [each["output_type"] for each in outputs] == ["stream", "execute_result"], outputs
    accuracy = float(outputs[0]["text"].removeprefix("accuracy "))
    assert accuracy > 0.6
    assert re.fullmatch(r"Result\(accuracy=0\.\d+, loss=.*, stopped='finished', directory='runs/.*-agn'\)", shown(outputs[1:]))


def test_a_second_training_finds_the_fork_server_warm_and_no_worker_of_the_first(notebook):
    pids = (
        "import re, pathlib\npids = re.findall(r'\"pid\":(\\d+)', pathlib.Path(result.directory, 'record.jsonl').read_text())"
    )
    notebook.run(f"result = train(Mine(), epochs=1)\n{pids}")
    server, first = notebook.ask("[forkserver._forkserver._forkserver_pid, list(map(int, pids))]")
    notebook.run(f"result = train(Mine(), epochs=1)\n{pids}")
    assert notebook.ask("forkserver._forkserver._forkserver_pid") == server
    second = notebook.ask("list(map(int, pids))")
    assert len(first) == len(second) == 2
    assert not any(map(alive, first + second))


def test_the_stop_button_leaves_a_checkpoint_and_a_kernel_that_trains_again(notebook):
    def press() -> None:
        wait_for(lambda: commits(notebook.folder) > 3)
        notebook.interrupt()

    finger = threading.Thread(target=press)
    finger.start()
    outputs = notebook.run("kept = 'before'\ntrain(Mine(pause=0.01), epochs=1000, run=pg.Run(out='run'))", fails=True)
    finger.join()
    *_, error = outputs
    assert error["ename"] == "Interrupted"
    assert "has a checkpoint" in error["evalue"]
    found, passed = checkpoint.newest(notebook.folder / "run" / "checkpoints")
    assert found is not None
    assert not passed
    outputs = notebook.run(
        "more = pg.Run(out='run', resume=True, stop=pg.Stop(seconds=0.5))\n"
        "print(kept, train(Mine(pause=0.01), epochs=1000, run=more, verbose=0).stopped)"
    )
    assert shown(outputs) == "before seconds\n"
    assert commits(notebook.folder) > found.numbers["clock"]


def test_the_progress_of_a_run_is_plain_lines_below_the_cell(notebook):
    lines = shown(notebook.run("result = train(Mine(), epochs=2)")).splitlines()
    assert "\x1b" not in "".join(lines)
    assert "agn:window=2" in lines[0]
    assert lines[-2].endswith("ended: finished")
    assert re.fullmatch("Run directory: runs/.*-agn", lines[-1])


def test_a_command_in_a_cell_takes_the_cell_for_no_terminal(notebook):
    program = (
        "import sys; from paragrad.rundir.display import Display; print(sys.stdout.isatty(), Display().console.is_terminal)"
    )
    text = shown(notebook.run(f"!{sys.executable} -c '{program}'"))
    assert text.split() == ["True", "False"], "it looks like a terminal, but cannot draw a live view"
