"""Line plots as inline SVG; the macro ``plot`` of ``parts.html.jinja`` draws them in the page's colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_trial.errors import printable

WIDTH, HEIGHT = 400, 250
LEFT, TOP, RIGHT, BOTTOM = 46, 10, 392, 212  # edges of the area with the lines
COLOURS = 8  # the number of colours in ``page.html.jinja``
DASHES = ("", "7 5", "2 4", "9 4 2 4", "14 4")  # they distinguish lines that overlap
MOST_POINTS = 400  # the maximum points of a line
MOST_DOTS = 40  # a line with more points has no dots


@dataclass(frozen=True)
class Line:
    """A line of a plot.

    Attributes:
        name: the name in the legend.
        xs: the x of each point; points that are not finite are left out.
        ys: the y of each point.
        number: the number that selects colour and dashes; lines with the same number look the same.
        is_thin: whether the line is thin and without dots.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    number: int = 0
    is_thin: bool = False


def percent(value: float) -> str:
    """Format a share for an axis."""
    return f"{100 * value:.4g} %"


def number(value: float) -> str:
    """Format a number for an axis."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def plot(
    title: str,
    lines: Sequence[Line],
    x_label: str = "steps",
    y_text: Callable[[float], str] = number,
    x_text: Callable[[float], str] = number,
) -> dict[str, Any]:
    """Return the values of the macro ``plot``: lines, ticks and edges in the coordinates of the SVG.

    Args:
        title: the title above the plot.
        lines: the lines; a line without points is only in the legend.
        x_label: the label below the plot.
        y_text: a function that formats a y.
        x_text: a function that formats an x.
    """
    points = [
        [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
        for line in lines
    ]
    x_ticks = _ticks([x for of_line in points for x, _ in of_line])
    y_ticks = _ticks([y for of_line in points for _, y in of_line])

    def across(x: float) -> float:
        return round(_scaled(x, x_ticks, LEFT, RIGHT), 1)

    def down(y: float) -> float:
        return round(_scaled(y, y_ticks, BOTTOM, TOP), 1)

    drawn = []
    for line, of_line in zip(lines, points, strict=True):
        chosen = of_line[:: -(-len(of_line) // MOST_POINTS) or 1]
        chosen += [of_line[-1]] if of_line and chosen[-1] != of_line[-1] else []
        places = [(across(x), down(y), x_text(x), y_text(y)) for x, y in chosen]
        drawn.append(
            {
                "name": printable(line.name),
                "colour": line.number % COLOURS,
                "dashes": DASHES[line.number % len(DASHES)],
                "thin": line.is_thin,
                "dots": not line.is_thin and len(places) <= MOST_DOTS,
                "path": "M" + "L".join(f"{x} {y}" for x, y, *_ in places) if places else "",
                "points": places,
            }
        )
    return {
        **{"title": title, "x_label": x_label, "lines": drawn, "width": WIDTH, "height": HEIGHT},
        **{"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        "x_ticks": [{"at": across(x), "text": x_text(x)} for x in x_ticks],
        "y_ticks": [{"at": down(y), "text": y_text(y)} for y in y_ticks],
    }


def _scaled(value: float, ticks: Sequence[float], first: float, last: float) -> float:
    return first + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (last - first)


def _ticks(values: Sequence[float]) -> list[float]:
    """Return 3 to 7 round numbers that enclose the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        most = 1.0 if 0 <= high <= 1 else math.inf  # a share is at most 1
        low, high = low - (abs(low) or 1) / 2, min(high + (abs(high) or 1) / 2, most)
    rough = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(place * step, 12) for place in range(first, last + 1)]
