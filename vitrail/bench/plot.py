"""The plot of a report: an SVG with three panels, the share of requests that were at least as
quick, one curve a side. Written by hand, since it is three axes and some lines. Pure."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 220, 46, 58, 60
COLOURS = ("#1f6fb2", "#c8501e", "#2d8a4e", "#7a4fa3")
SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)


class Curves(NamedTuple):
    """One side's samples in milliseconds."""

    name: str
    first: list[float]
    token: list[float]
    whole: list[float]


def draw(sides: Sequence[Curves], title: str) -> str:
    """The SVG document."""
    panels = (
        ("time to first token, ms", [s.first for s in sides]),
        ("time a token, ms", [s.token for s in sides]),
        ("end to end, ms", [s.whole for s in sides]),
    )
    total = LEFT + 3 * (WIDTH + GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{TOP + HEIGHT + 50}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>',
    ]
    for i, side in enumerate(sides):
        x = LEFT + 180 * i
        out.append(
            f'<text x="{x}" y="38" fill="{_colour(i)}">{escape(side.name)} (n = {len(side.first)})'
            "</text>"
        )
    for i, (label, series) in enumerate(panels):
        out += _panel(LEFT + i * (WIDTH + GAP), label, series)
    return "\n".join([*out, "</svg>", ""])


def _panel(left: int, label: str, series: Sequence[Sequence[float]]) -> list[str]:
    top = max((max(values) for values in series if values), default=0.0) or 1.0
    out = [
        f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>'
    ]
    for share in SHARES:
        y = TOP + HEIGHT * (1 - share)
        out.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        if share != 0.99:  # too near to the next
            out.append(f'<text x="{left - 4}" y="{y + 4:.1f}" text-anchor="end">{share:g}</text>')
    for tick in range(5):
        x = left + WIDTH * tick / 4
        text = f"{top * tick / 4:.3g}"
        out.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 14}" text-anchor="middle">{text}</text>')
    out.append(f'<text x="{left}" y="{TOP + HEIGHT + 32}">{escape(label)}</text>')
    for i, values in enumerate(series):
        if values:
            out.append(
                f'<path d="{_steps(sorted(values), left, top)}" fill="none" '
                f'stroke="{_colour(i)}" stroke-width="1.5"/>'
            )
    return out


def _steps(values: Sequence[float], left: int, top: float) -> str:
    """The empirical distribution: it rises by 1 / n at each sample."""
    path = f"M{left} {TOP + HEIGHT}"
    for rank, value in enumerate(values, 1):
        x = left + WIDTH * value / top
        path += f"H{x:.1f}V{TOP + HEIGHT * (1 - rank / len(values)):.1f}"
    return path + f"H{left + WIDTH}"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
