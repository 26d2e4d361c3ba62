"""Predefined clusters by name."""

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
    "homogeneous": "steps of 1 s, no latency, no faults",
    "heterogeneous": "four kinds of machines, with steps of 0.58, 0.75, 1.51 and 3.33 s",
    "spot": "spot instances: steps of about 1 s; a worker is lost after about 600 s and replaced after 30 s",
    "wan": "distant machines: messages take about 0.05 s, over links of 100 Mbit/s",
    "straggler": "as homogeneous, but worker 0 is four times slower",
}
"""Description of each profile."""
