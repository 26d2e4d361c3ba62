"""A cluster as data: its times are drawn by key, its faults make sense, and it survives being written down."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import paragrad as pg
from paragrad.cluster import (
    CATALOGUE,
    FAULTS,
    PROFILES,
    CenterCrash,
    Churn,
    Cluster,
    Crash,
    DropMessage,
    DuplicateMessage,
    Exponential,
    Join,
    Leave,
    LogNormal,
    Partition,
    Pause,
    Slow,
    Trace,
    Uniform,
    from_config,
    from_text,
    mean_of,
    to_config,
    to_table,
)
from paragrad.config import options
from paragrad.errors import UsageError

above_0 = st.floats(1e-6, 1e6)
from_0 = st.floats(0, 1e6)
ranks = st.integers(0, 7)
times = st.one_of(
    above_0,
    st.builds(Exponential, above_0),
    st.builds(LogNormal, above_0, st.floats(0, 3)),
    st.tuples(above_0, above_0).map(lambda ends: Uniform(min(ends), max(ends))),
    st.builds(Trace, st.lists(above_0, min_size=1, max_size=4).map(tuple)),
)
faults = st.one_of(
    st.builds(Crash, ranks, from_0, from_0),
    st.builds(Pause, ranks, from_0, above_0),
    st.builds(Slow, ranks, from_0, above_0, st.one_of(above_0, st.just(math.inf))),
    st.builds(Leave, ranks, from_0),
    st.builds(Join, ranks, from_0),
    st.builds(Partition, st.lists(ranks, min_size=1, max_size=3).map(tuple), from_0, above_0),
    st.builds(CenterCrash, from_0, from_0),
    st.builds(DropMessage, ranks, from_0, st.booleans()),
    st.builds(DuplicateMessage, ranks, from_0),
)


def each(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(value, st.lists(value, min_size=1, max_size=4).map(tuple))


clusters = st.one_of(
    st.sampled_from(list(PROFILES.values())),
    st.builds(
        Cluster,
        speeds=each(times),
        latency=each(times),
        bandwidth=st.one_of(st.none(), each(above_0)),
        center_rate=st.one_of(st.none(), above_0),
        faults=st.lists(faults, max_size=4).map(tuple),
        churn=st.one_of(st.none(), st.builds(Churn, times, times)),
        replace_after=from_0,
        retry=above_0,
    ),
)


def refused(make: Callable[[], Any], *named: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    for part in named:
        assert part in str(caught.value)


# Times


@given(times, st.lists(st.integers(1, 150), max_size=6), st.integers(0, 2**40))
def test_draws_do_not_depend_on_how_they_are_grouped(seconds: Any, groups: list[int], seed: int) -> None:
    cluster = Cluster(speeds=seconds)
    alone, together = cluster.steps(1, 2, seed), cluster.steps(1, 2, seed)
    for count in groups:
        expected = 0.0
        for _ in range(count):
            expected += alone.next()
        total = together.total(count)
        assert total == (pytest.approx(expected) if isinstance(seconds, float) else expected)
    assert alone.next() == together.next()


def test_a_constant_is_multiplied_and_no_steps_take_no_time() -> None:
    steps = Cluster(speeds=0.1).steps(0, 0, 0)
    assert (steps.next(), steps.total(7), steps.total(0)) == (0.1, 7 * 0.1, 0.0)
    assert Cluster(speeds=Exponential(1.0)).steps(0, 0, 0).total(0) == 0.0


def test_every_key_has_draws_of_its_own() -> None:
    noise = Exponential(1.0)
    cluster = Cluster(speeds=noise, latency=noise, churn=Churn(noise, noise))

    def first(seed: int, worker: int, incarnation: int) -> list[float]:
        lives = cluster.lives(worker, seed)
        assert lives is not None
        steps, delays = cluster.steps(worker, incarnation, seed), cluster.delays(worker, incarnation, seed)
        return [steps.next(), delays.next()] + [lives.up.next(), lives.down.next()] * (incarnation == 0)

    drawn = [x for seed in (0, 1) for worker in (0, 1, 2) for incarnation in (0, 1) for x in first(seed, worker, incarnation)]
    assert len(set(drawn)) == len(drawn)
    assert first(0, 1, 1) == first(0, 1, 1)


def test_draws_stay_what_they_are() -> None:
    steps = Cluster(speeds=Exponential(2.0)).steps(3, 1, 7)
    expected = np.random.default_rng((7, 8, 3, 1)).exponential(2.0, 64)
    assert [steps.next() for _ in range(64)] == expected.tolist()


@pytest.mark.parametrize("seconds", [Exponential(3.0), LogNormal(0.5, 0.8), Uniform(1.0, 2.0), Trace((1.0, 2.0, 6.0)), 4.0])
def test_a_distribution_has_the_mean_that_it_says(seconds: Any) -> None:
    count = 60_000
    assert Cluster(latency=seconds).delays(0, 0, 1).total(count) / count == pytest.approx(mean_of(seconds), rel=0.02)


def test_the_logarithm_of_a_log_normal_has_its_sigma() -> None:
    steps = Cluster(speeds=LogNormal(2.0, 0.4)).steps(0, 0, 0)
    assert np.std(np.log([steps.next() for _ in range(20_000)])) == pytest.approx(0.4, rel=0.03)
    assert LogNormal(2.0, 0.0) == LogNormal(2, 0)
    assert Cluster(speeds=LogNormal(2.0, 0.0)).steps(0, 0, 0).next() == pytest.approx(2.0)


def test_uniform_times_stay_between_their_ends() -> None:
    steps = Cluster(speeds=Uniform(1.0, 2.0)).steps(0, 0, 0)
    assert all(1.0 <= steps.next() <= 2.0 for _ in range(1000))


def test_a_draw_costs_less_than_a_microsecond() -> None:
    def cost() -> float:
        steps = Cluster(speeds=LogNormal(1.0, 0.5)).steps(0, 0, 0)
        begun = time.process_time()
        steps.total(100_000)
        return (time.process_time() - begun) / 100_000

    assert min(cost() for _ in range(5)) < 1e-6


def test_a_trace_begins_again_when_it_is_used_up() -> None:
    steps = Cluster(speeds=Trace((1.0, 2.0, 4.0))).steps(0, 0, 0)
    assert [steps.next() for _ in range(5)] == [1.0, 2.0, 4.0, 1.0, 2.0]
    assert steps.total(4) == 4.0 + 1.0 + 2.0 + 4.0


def recorded(directory: Path) -> Path:
    commits = [(0, 5, 1.0), (1, 4, 8.0), (0, 2, 1.0), (0, 0, 1.0)]
    events = [{"event": "commit", "time": 0.0, "worker": w, "steps": n, "seconds": s} for w, n, s in commits]
    lines = [{"event": "start", "time": 0.0}, *events, {"event": "end", "time": 1.0}]
    (directory / "record.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory / "record.jsonl"


def test_a_trace_is_made_from_the_commits_of_a_run(tmp_path: Path) -> None:
    record = recorded(tmp_path)
    assert Trace.of(record, 0) == Trace((0.2, 0.5))
    assert Trace.of(str(tmp_path), 1) == Trace((2.0,))
    assert from_text(f"homogeneous:speeds=trace({str(tmp_path)!r}, 1)") == Cluster(speeds=Trace((2.0,)))
    assert from_config({"speeds": [{"trace": str(record), "worker": 0}, 1.0]}) == Cluster(speeds=(Trace((0.2, 0.5)), 1.0))


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused(lambda: Trace.of(tmp_path, 0), "record.jsonl", "directory of a run")
    refused(lambda: Trace.of(tmp_path / "nowhere", 0), "nowhere", "directory of a run")
    recorded(tmp_path)
    refused(lambda: Trace.of(tmp_path, 7), "worker 7", "0, 1")
    refused(lambda: from_config({"speeds": {"trace": str(tmp_path)}}), "which worker")


# The cluster


def test_what_differs_between_workers_is_repeated_in_turn() -> None:
    cluster = Cluster(speeds=[1, 2.0], latency=(0.5, Exponential(1.0)), bandwidth=[100.0, 200.0, 400.0])  # type: ignore[arg-type]
    assert cluster.speeds == (1.0, 2.0)
    assert [cluster.steps(worker, 0, 0).next() for worker in range(5)] == [1.0, 2.0, 1.0, 2.0, 1.0]
    assert cluster.delays(2, 0, 0).next() == 0.5
    assert [cluster.transfer(worker, 800) for worker in range(4)] == [8.0, 4.0, 2.0, 8.0]
    assert Cluster().transfer(0, 10**12) == 0.0
    assert Cluster().lives(0, 0) is None


def test_a_cluster_is_a_value() -> None:
    cluster = Cluster(speeds=[1.0, Trace([1, 2])], faults=[Partition([0, 1], 1, 2)])  # type: ignore[arg-type]
    assert hash(cluster) == hash(Cluster(speeds=(1.0, Trace((1.0, 2.0))), faults=(Partition((0, 1), 1.0, 2.0),)))
    with pytest.raises(FrozenInstanceError):
        cluster.retry = 2.0  # type: ignore[misc]
    assert Cluster(faults=Crash(0, 1.0)).faults == (Crash(0, 1.0),)  # type: ignore[arg-type]
    assert type(Cluster(speeds=np.float32(2)).speeds) is float


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Exponential(0.0), ["mean=0.0", "above 0"]),
        (lambda: Exponential(math.inf), ["mean=inf", "finite"]),
        (lambda: LogNormal(-1.0, 0.5), ["mean=-1.0"]),
        (lambda: LogNormal(1.0, -0.5), ["sigma=-0.5"]),
        (lambda: LogNormal(1.0, 99.0), ["sigma=99.0", "at most 10"]),
        (lambda: Uniform(2.0, 1.0), ["low=2.0", "high=1.0"]),
        (lambda: Uniform(-1.0, 1.0), ["low=-1.0"]),
        (lambda: Trace(()), ["at least one"]),
        (lambda: Trace(1.0), ["seconds=1.0", "list"]),
        (lambda: Trace((1.0, math.nan)), ["seconds[1]=nan"]),
        (lambda: Cluster(speeds=-1.0), ["speeds=-1.0", "seconds"]),
        (lambda: Cluster(speeds=0.0), ["speeds=0.0", "above 0"]),
        (lambda: Cluster(speeds=(1.0, Trace((0.0,)))), ["speeds=", "above 0"]),
        (lambda: Cluster(speeds=(1.0, math.inf)), ["speeds[1]=inf"]),
        (lambda: Cluster(speeds=()), ["speeds=()", "empty"]),
        (lambda: Cluster(speeds="fast"), ["speeds='fast'", "LogNormal(1.0, 0.5)"]),
        (lambda: Cluster(speeds=True), ["speeds=True"]),
        (lambda: Cluster(speeds=10**400), ["speeds=1000"]),
        (lambda: Cluster(latency=math.nan), ["latency=nan"]),
        (lambda: Cluster(latency=((1.0,),)), ["latency[0]=(1.0,)"]),
        (lambda: Cluster(bandwidth=0.0), ["bandwidth=0.0", "bytes per second", "none"]),
        (lambda: Cluster(bandwidth=(1.0, -1.0)), ["bandwidth[1]=-1.0"]),
        (lambda: Cluster(bandwidth=math.inf), ["bandwidth=inf", "none"]),
        (lambda: Cluster(center_rate=0.0), ["center_rate=0.0", "commits per second"]),
        (lambda: Cluster(replace_after=-1.0), ["replace_after=-1.0"]),
        (lambda: Cluster(retry=0.0), ["retry=0.0", "above 0"]),
        (lambda: Cluster(faults=("crash",)), ["'crash'", "Crash(worker=2, at=30.0)"]),
        (lambda: Cluster(churn=600.0), ["churn=600.0", "Churn(up="]),
        (lambda: Churn(0.0, 1.0), ["up=0.0", "above 0"]),
        (lambda: Churn(1.0, -1.0), ["down=-1.0"]),
        (lambda: Crash(-1, 0.0), ["Crash: worker=-1", "whole number"]),
        (lambda: Crash(1.0, 0.0), ["worker=1.0", "whole number"]),
        (lambda: Crash(True, 0.0), ["worker=True"]),
        (lambda: Crash(0, -1.0), ["Crash: at=-1.0", "seconds"]),
        (lambda: Crash(0, math.inf), ["at=inf"]),
        (lambda: Crash(0, 0.0, down=-1.0), ["down=-1.0"]),
        (lambda: Pause(0, 0.0, seconds=0.0), ["Pause: seconds=0.0", "above 0"]),
        (lambda: Pause(0, 0.0, seconds=math.inf), ["seconds=inf"]),
        (lambda: Slow(0, 0.0, factor=0.0), ["factor=0.0", "above 0"]),
        (lambda: Slow(0, 0.0, factor=2.0, seconds=-1.0), ["seconds=-1.0"]),
        (lambda: Leave(0, math.nan), ["at=nan"]),
        (lambda: Join("a", 0.0), ["worker='a'"]),
        (lambda: Partition((), 0.0, 1.0), ["workers=()", "at least one"]),
        (lambda: Partition(1, 0.0, 1.0), ["workers=1", "list"]),
        (lambda: Partition((0, -1), 0.0, 1.0), ["workers=-1"]),
        (lambda: CenterCrash(-1.0), ["at=-1.0"]),
        (lambda: DropMessage(0, 0.0, answer=1), ["answer=1", "true or false"]),
        (lambda: DuplicateMessage(0, -1.0), ["at=-1.0"]),
    ],
)
def test_a_value_that_cannot_be_is_named(make: Callable[[], Any], named: list[str]) -> None:
    refused(make, *named)


@pytest.mark.parametrize(
    ("cluster", "named"),
    [
        (Cluster(speeds=(1.0, 2.0, 3.0)), ["speeds", "3 workers", "there are 2"]),
        (Cluster(latency=(1.0, 2.0, 3.0)), ["latency", "there are 2"]),
        (Cluster(bandwidth=(1.0, 2.0, 3.0)), ["bandwidth", "there are 2"]),
        (Cluster(faults=(Crash(2, 30.0),)), ["Crash(worker=2, at=30.0", "worker 2", "0 to 1"]),
        (Cluster(faults=(Partition((0, 5), 1.0, 1.0),)), ["Partition", "worker 5", "0 to 1"]),
        (
            Cluster(faults=(Join(0, 1.0), Join(0, 2.0))),
            ["Join(worker=0, at=2.0)", "Join(worker=0, at=1.0)", "a Leave in between"],
        ),
        (Cluster(faults=(Leave(1, 2.0), Leave(1, 1.0))), ["Leave(worker=1, at=2.0)", "a Join in between"]),
        (Cluster(faults=(Join(0, 1.0), Join(1, 2.0))), ["None of the 2 workers", "start"]),
        (Cluster(faults=(Join(0, 1.0), Leave(1, 0.0))), ["None of the 2 workers", "start"]),
    ],
)
def test_a_cluster_that_does_not_fit_its_workers_is_refused(cluster: Cluster, named: list[str]) -> None:
    refused(lambda: cluster.check(2), *named)


@pytest.mark.parametrize(
    "cluster",
    [
        *PROFILES.values(),
        Cluster(faults=(Join(0, 1.0), Leave(0, 2.0), Join(0, 2.0), Crash(0, 0.5))),
        Cluster(faults=tuple(Join(worker, 0.0) for worker in range(4))),
        Cluster(faults=tuple(Leave(worker, 5.0) for worker in range(4))),
        Cluster(faults=(CenterCrash(1.0), DropMessage(3, 0.0))),
    ],
)
def test_a_cluster_that_fits_passes(cluster: Cluster) -> None:
    cluster.check(4)


def test_one_worker_alone_is_named_as_such() -> None:
    refused(lambda: Cluster(faults=(Crash(1, 0.0),)).check(1), "0 alone")


def test_a_worker_that_joins_first_is_not_there_before() -> None:
    cluster = Cluster(faults=(Leave(1, 9.0), Join(1, 3.0), Leave(2, 1.0), Join(2, 4.0)))
    assert [cluster.begins(worker) for worker in range(3)] == [True, False, True]


# Text and TOML


def test_every_profile_has_a_line_and_is_known_by_its_name() -> None:
    assert list(CATALOGUE) == list(PROFILES)
    for name, cluster in PROFILES.items():
        assert from_text(name) == from_text(f" {name.upper()} ") == cluster
        assert to_config(cluster) == name
        assert from_config(to_table(cluster)) == cluster


def test_a_profile_with_fields_changed() -> None:
    assert from_text("straggler:latency=0.1") == Cluster(latency=0.1, faults=(Slow(0, 0.0, 4.0),))
    assert from_text("wan:bandwidth=none,latency=0,center-rate=1e3") == Cluster(center_rate=1000.0)
    assert from_text("homogeneous:speeds=exponential(1.0)") == Cluster(speeds=Exponential(1.0))
    assert from_text("homogeneous:speeds=(1, LogNormal(mean=1,sigma=.5), trace((1,2)))") == Cluster(
        speeds=(1.0, LogNormal(1.0, 0.5), Trace((1.0, 2.0)))
    )
    assert from_text("homogeneous:faults=crash(2, 30),churn=churn(exponential(600), 30)") == Cluster(
        faults=(Crash(2, 30.0),), churn=Churn(Exponential(600.0), 30.0)
    )
    assert from_text("homogeneous:faults=[slow(0,1,factor=2,seconds=inf), drop_message(1,2,answer=true)]") == Cluster(
        faults=(Slow(0, 1.0, 2.0), DropMessage(1, 2.0, answer=True))
    )


@given(clusters)
def test_what_python_prints_of_a_field_is_text_for_it(cluster: Cluster) -> None:
    text = ",".join(f"{name}={getattr(cluster, name)!r}" for name in Cluster.__dataclass_fields__)
    assert from_text(f"straggler:{text}") == cluster


@given(clusters)
def test_a_cluster_written_as_toml_reads_back(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> None:
    path = tmp_path_factory.getbasetemp() / "run.toml"
    assert from_config(to_config(cluster)) == cluster
    options.write_config(path, {"epochs": 3, "cluster": to_config(cluster), "about": {"torch": "2"}})
    assert from_config(options.read_config(path)["cluster"]) == cluster
    assert from_text(str(path)) == cluster
    path.write_text(options.as_toml(to_table(cluster)))
    assert from_text(str(path)) == cluster


def test_a_file_may_be_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        [cluster]
        profile = "wan"
        speeds = [1, {uniform = [1, 2]}, {trace = [1.0, 2]}]
        bandwidth = "none"
        churn = {up = 60, down = {exponential = 5}}
        [[cluster.faults]]
        kind = "crash"
        worker = 2
        at = 30
        [[cluster.faults]]
        kind = "partition"
        workers = [0, 1]
        at = 1
        seconds = 2.5
        """
    )
    assert from_text(str(path)) == Cluster(
        speeds=(1.0, Uniform(1.0, 2.0), Trace((1.0, 2.0))),
        latency=LogNormal(0.05, 0.5),
        churn=Churn(60.0, Exponential(5.0)),
        faults=(Crash(2, 30.0), Partition((0, 1), 1.0, 2.5)),
    )
    path.write_text("cluster = 'straggler:retry=2'")
    assert from_text(str(path)) == Cluster(faults=(Slow(0, 0.0, 4.0),), retry=2.0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("stragler", ["'stragler'", "Did you mean 'straggler'?", "FILE.toml"]),
        ("", ["''", "straggler"]),
        ("straggler:latncy=1", ["'latncy'", "Did you mean 'latency'?"]),
        ("straggler:latency", ["'latency'", "field=value"]),
        ("straggler:latency=fast", ["latency=fast", "exponential(1.0)"]),
        ("straggler:latency=1+1", ["latency=1+1", "a number"]),
        ("straggler:latency=(1", ["latency=(1", "a number"]),
        ("straggler:latency=-1", ["latency=-1", "0 or more"]),
        ("straggler:latency=None", ["latency=None"]),
        ("straggler:latency=exponental(1)", ["'exponental'", "Did you mean 'exponential'?"]),
        ("straggler:latency=lognormal(1)", ["lognormal(1)", "mean, sigma", "sigma must be given"]),
        ("straggler:latency=exponential(1,2)", ["exponential(1, 2)", "mean"]),
        ("straggler:latency=exponential(1,mean=2)", ["exponential(1, mean=2)", "once"]),
        ("straggler:latency=exponential(**{})", ["exponential(**{})"]),
        ("straggler:latency=crash(0,1)", ["latency=Crash(", "seconds"]),
        ("straggler:faults=(crash(0),)", ["crash(0)", "at must be given"]),
        ("straggler:faults=crash(0,whn=1)", ["'whn'", "crash"]),
        ("straggler:faults=3", ["3", "not a fault"]),
        ("straggler:churn=3", ["churn=3"]),
        ("nowhere.toml", ["nowhere.toml", "no file", "profile"]),
    ],
)
def test_a_text_that_is_no_cluster_is_named(text: str, named: list[str]) -> None:
    refused(lambda: from_text(text), *named)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (3, ["cluster = 3", "table"]),
        ({"speed": 1.0}, ["'speed'", "Did you mean 'speeds'?"]),
        ({"profile": "wam"}, ["'wam'", "Did you mean 'wan'?"]),
        ({"speeds": "fast"}, ["speeds='fast'", "{exponential = 1.0}"]),
        ({"speeds": {"exponental": 1.0}}, ["'exponental'", "Did you mean 'exponential'?"]),
        ({"speeds": {"exponential": 1.0, "lognormal": [1, 1]}}, ["speeds=", "{exponential = 1.0}"]),
        ({"speeds": {"exponential": "a"}}, ["mean='a'"]),
        ({"speeds": {"lognormal": 1.0}}, ["lognormal(1.0)", "sigma"]),
        ({"speeds": {"trace": 1.0}}, ["seconds=1.0", "list"]),
        ({"speeds": [1.0, True]}, ["speeds=True"]),
        ({"retry": "often"}, ["retry='often'"]),
        ({"churn": 3.0}, ["churn=3.0", "up ="]),
        ({"churn": {"up": 3.0}}, ["churn(up=3.0)", "down must be given"]),
        ({"churn": {"up": 3.0, "dwn": 3.0}}, ["'dwn'", "Did you mean 'down'?"]),
        ({"faults": {"kind": "crash"}}, ["faults=", "list"]),
        ({"faults": [{"worker": 1}]}, ["no kind", "crash"]),
        ({"faults": [{"kind": "crush", "worker": 1, "at": 1}]}, ["'crush'", "Did you mean 'crash'?"]),
        ({"faults": [{"kind": "crash", "worker": 1}]}, ["crash(worker=1)", "at must be given"]),
        ({"faults": [{"kind": "crash", "worker": 1, "at": "noon"}]}, ["at='noon'"]),
    ],
)
def test_a_table_that_is_no_cluster_is_named(config: Any, named: list[str]) -> None:
    refused(lambda: from_config(config), *named)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("speeds = ", ["not TOML"]),
        ("speeds = -1", ["speeds=-1"]),
        ("cluster = 3", ["cluster = 3"]),
        ("cluster = 'mine.toml'", ["Unknown cluster"]),
    ],
)
def test_a_file_that_holds_no_cluster_is_named(tmp_path: Path, text: str, named: list[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    refused(lambda: from_text(str(path)), "mine.toml", *named)


def test_every_fault_is_public_and_has_a_kind() -> None:
    for kind, cls in FAULTS.items():
        assert getattr(pg, cls.__name__) is cls
        assert kind.replace("_", "") == cls.__name__.lower()
    assert pg.Cluster is Cluster
