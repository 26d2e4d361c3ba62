"""Keywords that people guess are rejected with the one that is meant."""

from __future__ import annotations

import inspect
import re

import pytest

import paragrad as pg
from paragrad.config import keywords, options
from paragrad.run import Run, Stop


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"workers": 4}, "Did you mean engine='local:workers=4'?"),
        ({"n_workers": 4}, "Did you mean engine='local:workers=4'?"),
        ({"out": "runs/x"}, "Did you mean run='runs/x'?"),
        ({"callbacks": [print]}, "Did you mean run=pg.Run(callbacks=...)?"),
        ({"resume": True}, "Did you mean run=pg.Run(out=..., resume=True)?"),
        ({"patience": 3}, "Did you mean run=pg.Run(stop=pg.Stop(patience=3))?"),
        ({"lr": 0.01}, "Did you mean optimizer='adam:lr=0.01'?"),
        ({"learning_rate": 0.01}, "Did you mean optimizer='adam:lr=0.01'?"),
        ({"val": None}, "Did you mean validation=?"),
        ({"validation_data": None}, "Did you mean validation=?"),
        ({"validation_split": 0.1}, "Did you mean holdout=0.1?"),
        ({"metric": "auc"}, "Did you mean metrics=?"),
        ({"optimiser": "adam"}, "Did you mean optimizer=?"),
        ({"device": "cuda"}, "Did you mean engine='local:device=cuda', or engine='vector:device=cuda'?"),
        ({"shuffle": True}, "drawn from seed=: leave it out."),
        ({"shards": "label"}, "run=pg.Run(partition='label')"),
        ({"epoch": 3}, "Did you mean epochs=?"),
        ({"shceme": "agn"}, "Did you mean scheme=?"),
        ({"wrokers": 4}, "Did you mean engine='local:workers=4'?"),
        ({"frobnicate": 1}, "Available: model, data, validation,"),
    ],
)
def test_an_unknown_keyword_names_the_one_that_is_meant(given, meant, model, rows, tmp_path):
    (name,) = given
    with pytest.raises(pg.UsageError, match=re.escape(f"Unknown argument {name}= of pg.train.")) as raised:
        pg.train(model, rows, **given)
    assert meant in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_targets_as_an_argument_of_their_own_are_rejected(model, rows):
    with pytest.raises(pg.UsageError, match=r"given 3 arguments without a keyword.*pg\.train\(model, \(x, y\)\)"):
        pg.train(model, *rows)


@pytest.mark.parametrize(("function", "guesses"), [(pg.train, keywords.TRAIN), (pg.fit, keywords.FIT)])
def test_no_guess_is_a_keyword_that_there_is(function, guesses):
    assert not guesses.keys() & inspect.signature(function).parameters.keys()


@pytest.mark.parametrize("guess", [*keywords.TRAIN.values(), *keywords.FIT.values()])
def test_every_answer_names_what_there_is(guess):
    """Keywords of pg.train, pg.fit, pg.Run and pg.Stop, and options that parse."""
    known = {
        name
        for f in (pg.train, pg.fit, Run, Stop, pg.Optimizer, pg.Network, pg.Vector)
        for name in inspect.signature(f).parameters
    }
    outside = re.sub(r"'[^']*'", "''", guess)
    assert set(re.findall(r"(\w+)=", outside)) <= known
    for text in re.findall(r"engine='([^']*)'", guess):
        name, fields = options.split_fields(text)
        assert fields.keys() <= inspect.signature(getattr(pg, name.capitalize())).parameters.keys()


def test_the_signature_is_the_functions_own():
    assert list(inspect.signature(pg.train).parameters)[:2] == ["model", "data"]
    assert pg.train.__name__ == "train"
    assert "scheme" in (pg.train.__doc__ or "")
