"""A point along a line at which the strong Wolfe conditions hold: bracketing, then zooming in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

ENOUGH = 1e-4
"""A step must gain at least this share of what the slope at its beginning promises."""
FURTHER = 10.0
"""A trial is at most so many times as long as the last, while the minimum is still ahead."""
MARGIN = 0.05
"""A trial stays this share of the bracket away from its ends."""
LAST = 2
"""Evaluations that are still made where there is nothing to gain that could be seen."""
EXACT = 1e-9
"""A slope that is this share of the first one is as good as none."""


@dataclass(frozen=True, slots=True)
class Point:
    """A place on the line: how far along, and the value and the slope there."""

    length: float
    value: float
    slope: float

    @property
    def finite(self) -> bool:
        """Whether there is anything to go by."""
        return math.isfinite(self.value) and math.isfinite(self.slope)


def search(
    at: Callable[[float], Point], start: Point, trial: float, *, curvature: float, noise: float, most: int
) -> tuple[Point, bool]:
    """Where to stop on the line, and whether the strong Wolfe conditions hold there.

    The value has fallen by a share of what the slope promised, and the slope is at most ``curvature`` of what it was. A
    first trial that would do is still improved once by interpolation, which on a parabola is its minimum. Where ``most``
    evaluations are not enough it is the lowest point that was seen, perhaps the start. Values that differ by less than
    ``noise`` are taken for equal, and the slopes decide (Hager and Zhang 2005): near a minimum the value says nothing.
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
    best: Point = Point(0.0, math.inf, 0.0)
    found: Point | None = None
    before: Point = Point(0.0, math.inf, 0.0)
    """The point that the one found was interpolated from."""

    def __post_init__(self) -> None:
        self.best = self.before = self.start

    def look(self, length: float) -> Point:
        self.left -= 1
        point = self.at(length)
        if point.finite and point.value < self.best.value:
            self.best = point
        return point

    def fallen(self, point: Point) -> bool:
        """Whether the value has fallen enough."""
        start = self.start
        if point.value <= start.value + ENOUGH * point.length * start.slope:
            return True
        return point.value <= start.value + self.noise and point.slope <= (2 * ENOUGH - 1) * start.slope

    def flat(self, point: Point) -> bool:
        return abs(point.slope) <= -self.curvature * self.start.slope

    def bracket(self, length: float) -> tuple[Point, Point | None]:
        """Go on until a minimum lies behind: between the two points that are returned, the lower one first."""
        last = self.start
        while self.left > 0:
            point = self.look(length)
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
            point = self.look(_between(low, high))
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
                self.left = min(self.left, LAST)  # what is left to gain is below what the value can show

    def polish(self) -> None:
        """One interpolation more, kept where the slope is smaller there and the value no higher."""
        assert self.found is not None
        if self.left <= 0 or abs(self.found.slope) <= -EXACT * self.start.slope:
            return
        length = _secant(self.before, self.found)
        if not (math.isfinite(length) and 0 < length <= FURTHER * self.found.length):
            return
        point = self.look(length)
        better = point.finite and self.fallen(point) and abs(point.slope) < abs(self.found.slope)
        if better and point.value <= self.found.value + self.noise:
            self.found = point


def _secant(one: Point, other: Point) -> float:
    """Where the slope would be 0 if it were a straight line through two points; infinite where it never is."""
    bend = other.slope - one.slope
    if bend == 0 or bend * (other.length - one.length) < 0:
        return math.inf
    return one.length - one.slope * (other.length - one.length) / bend


def _between(low: Point, high: Point) -> float:
    """The next trial in a bracket: the minimum of the cubic through both ends, or of the parabola, or the middle."""
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
