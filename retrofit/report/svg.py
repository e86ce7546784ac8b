"""One matplotlib drawing as SVG that belongs inside an HTML page.

The page decides colours (light or dark) and font: the drawing uses stand-in colours, which become CSS
variables.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, RULE = "#010203", "#010204", "#010205"
_ARMS = 6
_VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule"} | {f"#01030{i}": f"--arm-{i}" for i in range(_ARMS)}
_STYLE = {
    "svg.hashsalt": "retrofit",  # element ids come from the drawing, not from chance
    "svg.fonttype": "none",  # text stays text
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": RULE,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def arm_colour(index: int) -> str:
    """The stand-in for the colour of the arm of this index; the page's palette has six."""
    return f"#01030{index % _ARMS}"


def svg(draw: Callable[[Axes], None], size: tuple[int, int], margins: tuple[int, int, int, int] | None = None) -> str:
    """The drawing that `draw` makes on one pair of axes, `size` in CSS pixels at its natural width.

    `margins`: left, bottom, right and top of the axes, in CSS pixels; None lays them out by what stands round them,
    which takes as long as drawing.
    """
    with matplotlib.style.context(_STYLE, after_reset=True):  # whatever matplotlibrc the user has
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout=None if margins else "constrained")
        if margins:
            (width, height), (left, bottom, right, top) = size, margins
            figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
        draw(figure.add_subplot())
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _inline(buffer.getvalue(), size)


def with_ids(drawing: str, name: str) -> str:
    """The drawing with `name` before its ids: equal marks have equal ids, and a page must hold each id once."""
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", drawing)


def _inline(text: str, size: tuple[int, int]) -> str:
    """Only the drawing: no prolog, no fixed size or font, no names of groups, which repeat in a page."""
    body = text[text.index("<svg") :]
    body = re.sub(r"<svg [^>]*>", f'<svg viewBox="0 0 {size[0]} {size[1]}" focusable="false">', body, count=1)
    body = re.sub(r"<style.*?</style>|<metadata.*?</metadata>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r' transform="rotate\(-0 [^"]*"', "", body)
    body = body.replace("xlink:href", "href")
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    return re.sub(r"\s*\n\s*", "\n", body).strip()
