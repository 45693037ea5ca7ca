"""The paper's figures, reproduced: runs, plots, and verdicts on its claims."""
