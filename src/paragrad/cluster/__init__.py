"""A simulated cluster, described by numbers: speeds and latencies of workers, and faults."""

from __future__ import annotations

from paragrad.cluster.cluster import Churn as Churn
from paragrad.cluster.cluster import Cluster as Cluster
from paragrad.cluster.cluster import Lives as Lives
from paragrad.cluster.config import from_config as from_config
from paragrad.cluster.config import from_text as from_text
from paragrad.cluster.config import to_config as to_config
from paragrad.cluster.config import to_table as to_table
from paragrad.cluster.faults import FAULTS as FAULTS
from paragrad.cluster.faults import CenterCrash as CenterCrash
from paragrad.cluster.faults import Crash as Crash
from paragrad.cluster.faults import DropMessage as DropMessage
from paragrad.cluster.faults import DuplicateMessage as DuplicateMessage
from paragrad.cluster.faults import Fault as Fault
from paragrad.cluster.faults import Join as Join
from paragrad.cluster.faults import Leave as Leave
from paragrad.cluster.faults import Partition as Partition
from paragrad.cluster.faults import Pause as Pause
from paragrad.cluster.faults import Slow as Slow
from paragrad.cluster.profiles import CATALOGUE as CATALOGUE
from paragrad.cluster.profiles import PROFILES as PROFILES
from paragrad.cluster.times import TIMES as TIMES
from paragrad.cluster.times import Draws as Draws
from paragrad.cluster.times import Exponential as Exponential
from paragrad.cluster.times import LogNormal as LogNormal
from paragrad.cluster.times import Trace as Trace
from paragrad.cluster.times import Uniform as Uniform
from paragrad.cluster.times import mean_of as mean_of
