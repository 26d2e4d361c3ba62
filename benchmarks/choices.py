"""Every scheme with the fields and the optimiser that it is compared with."""

from __future__ import annotations

from typing import Any

from paragrad import schemes

ADAM, SGD = "adam:lr=0.001", "sgd:lr=0.05"

CHOICES: list[tuple[str, str]] = [
    ("syncsgd", ADAM),
    ("backupworkers:backups=1", ADAM),
    ("softsync:splits=2", ADAM),
    ("modelaveraging:window=10", ADAM),
    ("easgd:window=10", ADAM),
    ("diloco:window=10", ADAM),
    ("hogwild", SGD),
    ("downpour", ADAM),
    ("downpour:window=10", ADAM),
    ("downpour:window=10,zealous=true", ADAM),
    ("deandownpour:rate=0.02", SGD),
    ("dynsgd:window=5", ADAM),
    ("stalenessaware", ADAM),
    ("agn:window=15", ADAM),
    ("adag:window=15", ADAM),
    ("adag:window=15,form=invariant", ADAM),
    ("aeasgd:window=10", ADAM),
    ("eamsgd:window=10", SGD),
    ("gem", ADAM),
    ("dcasgd", SGD),
    ("dcasgd:adaptive=true", SGD),
    ("asyncdiloco:window=10", ADAM),
    ("ormo", SGD),
]
CHOICES += [(name.lower(), ADAM) for name in schemes.names() if name.lower() not in {spec.split(":")[0] for spec, _ in CHOICES}]
"""Each scheme with the fields that suit a run of this length, and its optimiser; one that is not listed, as it is."""

PLAIN = ("downpour", ADAM), ("downpour", SGD)
"""With one worker: plain training, to compare with."""

TASKS: dict[str, dict[str, Any]] = {
    "digits": {"model": "mlp", "epochs": 20, "batch_size": 16, "shape": (64,)},
    "mnist": {"model": "mlp", "epochs": 2, "batch_size": 64, "shape": (28, 28)},
}
