"""The colours of every figure and of the report. A method always has the same: see `report/line_styles.py`."""

from __future__ import annotations

import math

COLOURS = (
    "#d55e00", "#0072b2", "#009e73", "#c0679a", "#c98500", "#3a9ad9", "#1b1b1f", "#8c8c00", "#8a4b20", "#6f42b8"
)  # fmt: skip
"""Close to Okabe and Ito's palette, distinguishable with any colour vision, with enough contrast to white for thin
lines. `report/assets/page.css` has the same colours."""
GREY = "#bbbbbb"
"""For everything that is shown only for comparison."""


def shades(colour: str, count: int) -> list[str]:
    """A colour and darker and lighter versions of it, from dark to light, for several lines of one method.

    >>> shades("#d55e00", 1), shades("#d55e00", 3)
    (['#d55e00'], ['#6a2f00', '#d55e00', '#eaae7f'])
    """
    channels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    places = [i / (count - 1) - 0.5 for i in range(count)] if count > 1 else [0.0]  # −½ is dark, 0 the colour itself
    mixed = [[c * (1 + place) if place < 0 else c + (255 - c) * place for c in channels] for place in places]
    return ["#" + "".join(f"{math.ceil(c - 0.5):02x}" for c in one) for one in mixed]
