"""Clusters by name, to begin with."""

from __future__ import annotations

from paragrad.cluster.cluster import Churn, Cluster
from paragrad.cluster.faults import Slow
from paragrad.cluster.times import Exponential, LogNormal

PROFILES: dict[str, Cluster] = {
    "homogeneous": Cluster(),
    "heterogeneous": Cluster(speeds=(0.58, 0.75, 1.51, 3.33)),
    "spot": Cluster(speeds=LogNormal(1.0, 0.3), churn=Churn(up=Exponential(600.0), down=30.0)),
    "wan": Cluster(latency=LogNormal(0.05, 0.5), bandwidth=12.5e6),
    "straggler": Cluster(faults=(Slow(worker=0, at=0.0, factor=4.0),)),
}

CATALOGUE: dict[str, str] = {
    "homogeneous": "every step takes 1 s, messages take no time, nothing goes wrong",
    "heterogeneous": "four kinds of machines: a step takes 0.58, 0.75, 1.51 or 3.33 s",
    "spot": "rented by the minute: steps of about 1 s, workers lost every 600 s or so and replaced after 30 s",
    "wan": "far apart: messages take about 0.05 s, over links of 100 Mbit/s",
    "straggler": "as homogeneous, but worker 0 takes four times as long",
}
"""Each profile in a line."""
