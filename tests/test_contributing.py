"""The page that shows how to add an algorithm: its example runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import fedlalr as fl

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def test_the_example_of_the_page_runs_and_learns(capsys):
    torch.manual_seed(0)
    namespace: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S):
        exec(compile(block, str(PAGE), "exec"), namespace)
    result = namespace["result"]
    assert isinstance(result, fl.Result)
    assert result.history[-1].train_loss < result.history[0].train_loss
    assert result.bytes_up == 5 * 10 * 2 * (8 * 3 + 3) * 4
    assert capsys.readouterr().out.split()[1] == str(result.bytes_up)
