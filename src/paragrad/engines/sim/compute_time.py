"""Duration of a simulated worker's windows: random step times, plus slow-downs and pauses."""

from __future__ import annotations

from paragrad.cluster import Cluster, Pause, Slow


class ComputeTime:
    """Step times of one worker, over all its incarnations."""

    def __init__(self, cluster: Cluster, worker: int, seed: int) -> None:
        self._cluster = cluster
        self._worker = worker
        self._seed = seed
        self._slow = [fault for fault in cluster.faults if isinstance(fault, Slow) and fault.worker == worker]
        pauses = (fault for fault in cluster.faults if isinstance(fault, Pause) and fault.worker == worker)
        self._pauses = sorted((pause.at, pause.seconds) for pause in pauses)
        self.begin(0)

    def begin(self, incarnation: int) -> None:
        """Begin a new incarnation, with its own random numbers."""
        self._steps = self._cluster.steps(self._worker, incarnation, self._seed)
        self.delays = self._cluster.delays(self._worker, incarnation, self._seed)

    def end_of(self, steps: int, now: float) -> float:
        """Return the time when a window of this many steps ends that begins now."""
        if not self._slow and not self._pauses:
            return now + self._steps.total(steps)
        for _ in range(steps):
            now = self.awake(now)
            length = self._steps.next()
            for slow in self._slow:
                if slow.at <= now < slow.at + slow.seconds:
                    length *= slow.factor
            end = now + length
            for at, seconds in self._pauses:
                if now < at < end:
                    end += seconds
            now = end
        return now

    def awake(self, now: float) -> float:
        """Return the time when the worker can continue: now, or at the end of a pause."""
        for at, seconds in self._pauses:
            if at <= now < at + seconds:
                now = at + seconds
        return now
