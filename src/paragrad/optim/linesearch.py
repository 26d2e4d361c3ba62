"""Line search for the strong Wolfe conditions: bracket a minimum, then zoom in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

ENOUGH = 1e-4
"""Smallest accepted share of the gain that the slope at the start promises."""
FURTHER = 10.0
"""Largest growth factor of the trial length while the minimum is still ahead."""
MARGIN = 0.05
"""Smallest distance of a trial from the ends of the bracket, as a share of the bracket."""
LAST = 2
"""Evaluations that are still made when the remaining gain is below the noise."""
EXACT = 1e-9
"""Share of the first slope below which a slope counts as zero."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point on the line: its distance from the start, and the value and the slope there."""

    length: float
    value: float
    slope: float

    @property
    def finite(self) -> bool:
        """True if value and slope are finite."""
        return math.isfinite(self.value) and math.isfinite(self.slope)


def search(
    at: Callable[[float], Point], start: Point, trial: float, *, curvature: float, noise: float, most: int
) -> tuple[Point, bool]:
    """Return the end of the step on the line, and whether the strong Wolfe conditions hold there.

    The conditions: the value has fallen by a share of what the slope promised, and the slope is at most ``curvature`` times
    its initial size. A point that meets them is improved once by interpolation, which finds the minimum of a parabola. If
    ``most`` evaluations are not enough, the result is the lowest point evaluated, perhaps the start. Values that differ by
    less than ``noise`` count as equal, and the slopes decide (Hager and Zhang 2005): near a minimum, values are only noise.
    """
    line = _Line(at, start, curvature, noise, most)
    low, high = line.bracket(trial)
    if line.found is None and high is not None:
        line.zoom(low, high)
    if line.found is None:
        return line.best, False
    line.polish()
    return line.found, True


@dataclass(slots=True)
class _Line:
    at: Callable[[float], Point]
    start: Point
    curvature: float
    noise: float
    left: int
    best: Point = field(init=False)
    found: Point | None = field(default=None, init=False)
    before: Point = field(init=False)
    """Second point of the interpolation in ``polish``."""

    def __post_init__(self) -> None:
        self.best = self.before = self.start

    def evaluate(self, length: float) -> Point:
        self.left -= 1
        point = self.at(length)
        if point.finite and point.value < self.best.value:
            self.best = point
        return point

    def fallen(self, point: Point) -> bool:
        """Return whether the value has fallen enough."""
        start = self.start
        if point.value <= start.value + ENOUGH * point.length * start.slope:
            return True
        return point.value <= start.value + self.noise and point.slope <= (2 * ENOUGH - 1) * start.slope

    def flat(self, point: Point) -> bool:
        return abs(point.slope) <= -self.curvature * self.start.slope

    def bracket(self, length: float) -> tuple[Point, Point | None]:
        """Move along the line until a minimum is passed; return the two points around it, the lower one first."""
        last = self.start
        while self.left > 0:
            point = self.evaluate(length)
            if not point.finite or not self.fallen(point) or (last.length and point.value > last.value + self.noise):
                return last, point
            if self.flat(point):
                self.found, self.before = point, last
                return last, None
            if point.slope >= 0:
                return point, last
            step = _secant(last, point)
            nearest, furthest = point.length + (point.length - last.length), FURTHER * point.length
            last, length = point, min(max(step, nearest) if math.isfinite(step) else furthest, furthest)
        return last, None

    def zoom(self, low: Point, high: Point) -> None:
        """Narrow the bracket; ``low`` is its lower end, and the slope there points into it."""
        while self.left > 0:
            point = self.evaluate(_between(low, high))
            if not point.finite or not self.fallen(point) or point.value > low.value + self.noise:
                high = point
            else:
                if self.flat(point):
                    self.found, self.before = point, low
                    return
                if point.slope * (high.length - low.length) >= 0:
                    high = low
                low = point
            if abs(low.slope * (high.length - low.length)) <= self.noise:
                self.left = min(self.left, LAST)  # the remaining gain is below the noise

    def polish(self) -> None:
        """Interpolate once more; keep the new point if its slope is smaller and its value not higher."""
        assert self.found is not None
        if self.left <= 0 or abs(self.found.slope) <= -EXACT * self.start.slope:
            return
        length = _secant(self.before, self.found)
        if not (math.isfinite(length) and 0 < length <= FURTHER * self.found.length):
            return
        point = self.evaluate(length)
        better = point.finite and self.fallen(point) and abs(point.slope) < abs(self.found.slope)
        if better and point.value <= self.found.value + self.noise:
            self.found = point


def _secant(one: Point, other: Point) -> float:
    """Return the zero of the slope by linear interpolation through two points; infinity if there is none ahead."""
    bend = other.slope - one.slope
    if bend == 0 or bend * (other.length - one.length) < 0:
        return math.inf
    return one.length - one.slope * (other.length - one.length) / bend


def _between(low: Point, high: Point) -> float:
    """Return the next trial in a bracket: the minimum of the cubic through both ends, or the middle."""
    width = high.length - low.length
    inside = low.length + 0.5 * width
    if not high.finite:
        return low.length + 0.1 * width
    first = low.slope + high.slope - 3 * (low.value - high.value) / (low.length - high.length)
    under = first * first - low.slope * high.slope
    if under >= 0:
        second = math.copysign(math.sqrt(under), width)
        below = high.slope - low.slope + 2 * second
        if below != 0:
            inside = high.length - width * (high.slope + second - first) / below
    margin = MARGIN * abs(width)
    least, most = min(low.length, high.length) + margin, max(low.length, high.length) - margin
    return min(max(inside, least), most) if math.isfinite(inside) else low.length + 0.5 * width
