"""The colours of every figure and of the report."""

from __future__ import annotations

COLOURS = ("#d55e00", "#0072b2", "#009e73", "#c0679a", "#c98500", "#3a9ad9", "#1b1b1f", "#8c8c00")
"""Close to Okabe and Ito's palette, distinguishable with any colour vision, with enough contrast to white for thin
lines. `report/assets/page.css` has the same colours."""
GREY = "#bbbbbb"
"""For everything that is shown only for comparison."""
