"""Every figure of the paper as a preset and a plot."""
