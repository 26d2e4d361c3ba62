"""What the examples say of themselves."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import paragrad as pg

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras's own, with NumPy 2
def test_a_keras_model_learns_the_digits(monkeypatch, capsys):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras")
    accuracy = load("keras_mnist").main(["2", "--engine", "vector"])
    assert accuracy > 0.6  # 0.1 is a guess
    assert "Accuracy on 297 test rows" in capsys.readouterr().out


def test_the_network_for_digits_takes_a_file_of_larger_images_too(tmp_path, capsys):
    generator = np.random.default_rng(0)
    x, y = generator.random((200, 28, 28), dtype=np.float32), np.arange(200) % 10
    x[np.arange(200), y, :] += 3  # the class is the row that is bright
    np.savez(tmp_path / "images.npz", x_train=x, y_train=y, x_test=x[:50], y_test=y[:50])
    result = load("torch_mnist").main(4, str(tmp_path / "images.npz"))
    assert result.accuracy > 0.5
    assert f"Accuracy on the test part: {result.accuracy:.2%}." in capsys.readouterr().out


def test_a_group_of_the_thesis_steps_like_one_process_with_the_whole_mini_batch():
    example = load("thesis_system")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    group = example.Group(model, nn.CrossEntropyLoss(), "adam:lr=0.01", members=3)
    alone = pg.TorchLearner(model, nn.CrossEntropyLoss(), "adam:lr=0.01")
    for rows in (10, 9, 2, 7):  # parts of uneven length, and fewer rows than members
        batch = (torch.randn(rows, 6, dtype=torch.float64), torch.randint(0, 3, (rows,)))
        one, other = group.step(batch), alone.step(batch)
        assert abs(one.loss - other.loss) < 1e-12
        assert one.weight == other.weight
    assert torch.allclose(group.weights, alone.weights, atol=1e-12, rtol=0)
