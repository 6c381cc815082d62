"""Line charts as svg elements, drawn in a millisecond, so that a run can redraw its report after each evaluation."""

import math
from collections.abc import Iterator, Sequence
from html import escape

Curve = tuple[str, list[float], list[float]]
"""Label, steps, values."""
Limits = tuple[float | None, float | None]
"""Range of the vertical axis; None: that of the values."""

WIDTH, HEIGHT = 374, 223
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 26, 40
"""Margins around the area of the curves; a legend widens the right one."""
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
MANY_POINTS = 30
"""Points of a curve from which on they are not marked."""
LARGEST = 1e300
"""Numbers beyond it are drawn as if they were it, so that no range overflows."""


def draw_lines(title: str, curves: Sequence[Curve], limits: Limits = (None, None)) -> str:
    """An svg element with a curve per entry over steps: title, ticks, a grid and a legend of the labels, if any.

    A value that is not finite interrupts its curve.
    """
    longest = max((len(label) for label, *_ in curves), default=0)
    right = WIDTH - RIGHT - (longest and min(22 + 5 * longest, WIDTH // 3))
    across = _Axis([step for _, steps, _ in curves for step in steps], (None, None), LEFT, right)
    up = _Axis([value for *_, values in curves for value in values], limits, HEIGHT - BOTTOM, TOP)
    parts = [*_frame(title, across, up)]
    for number, (label, steps, values) in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        parts += _line(across, up, steps, values, color)
        if label:
            y = TOP + 8 + 13 * number
            parts.append(f'<path d="M{right + 8} {y - 3}h12" stroke="{color}" stroke-width="1.5"/>')
            parts.append(_text(right + 24, y, label, "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="9" fill="#222">'
    return "\n".join([head, *parts, "</svg>"])


class _Axis:
    """Maps numbers to the pixels from `start` to `end`; those out of its range to the nearer end."""

    def __init__(self, numbers: Sequence[float], limits: Limits, start: float, end: float):
        finite = [min(max(number, -LARGEST), LARGEST) for number in numbers if abs(number) < math.inf]
        least, most = min(finite, default=0.0), max(finite, default=1.0)
        margin = 0.05 * (most - least)
        if margin <= 1e-9 * max(abs(least), abs(most), 1e-9):  # all the same, but for rounding
            margin = 0.05 * max(abs(most), 1e-3)
        low, high = limits
        self.low, self.high = least - margin if low is None else low, most + margin if high is None else high
        if self.low >= self.high:  # all values lie beyond the one limit that is given
            self.low, self.high = self.low - 1, self.low + 1
        self.start, self.end = start, end

    def __call__(self, number: float) -> float:
        share = (min(max(number, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Multiples of 1, 2 or 5 times a power of ten within the range, four to eleven of them."""
        least = (self.high - self.low) / 10
        power = 10.0 ** math.floor(math.log10(least))
        step = next((power * times for times in (1, 2, 5) if power * times >= least), power * 10)
        return [n * step for n in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _frame(title: str, across: _Axis, up: _Axis) -> Iterator[str]:
    """Yield the title, the ticks with their grid, and the axes."""
    bottom, right, middle = up.start, across.end, (across.start + across.end) / 2
    yield f'<g font-size="11">{_text(middle, TOP - 11, title)}</g>'
    yield _text(middle, HEIGHT - 8, "step")
    grid = ""
    for tick in across.ticks():
        grid += f"M{across(tick):.1f} {TOP}V{bottom}"
        yield _text(across(tick), bottom + 14, _shown(tick))
    for tick in up.ticks():
        grid += f"M{LEFT} {up(tick):.1f}H{right}"
        yield _text(LEFT - 5, up(tick) + 3, _shown(tick), "end")
    yield f'<path d="{grid}" stroke="#ddd" fill="none"/>'
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" stroke="#222" fill="none"/>'


def _shown(number: float) -> str:
    """A tick's label; six digits, since ticks are multiples of a round step."""
    return f"{number:,.6g}" if number == 0 or 1e-3 <= abs(number) < 1e6 else f"{number:.6g}"


def _line(across: _Axis, up: _Axis, steps: list[float], values: list[float], color: str) -> Iterator[str]:
    """Yield a curve's path, which begins anew after each value that is not finite, and its points if they are few."""
    path, dots, joined = "", [], False
    for step, value in zip(steps, values, strict=True):
        if finite := math.isfinite(value):
            place = f"{across(step):.1f} {up(value):.1f}"
            path += f"{'L' if joined else 'M'}{place}"
            dots.append(f"M{place}h0")
        joined = finite
    yield f'<path d="{path}" stroke="{color}" stroke-width="1.2" fill="none"/>'
    if len(values) < MANY_POINTS:
        yield f'<path d="{"".join(dots)}" stroke="{color}" stroke-width="3.6" stroke-linecap="round"/>'
