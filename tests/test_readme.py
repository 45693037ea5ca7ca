"""The README: its Python runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import fedlalr as fl
from fedlalr.algorithms import ALGORITHMS

PAGE = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_python_of_the_page_runs():
    torch.manual_seed(0)
    namespace: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.S):
        exec(compile(block, "README.md", "exec"), namespace)
    assert isinstance(namespace["result"], fl.Result)
    assert len(namespace["result"].history) == 10


def test_the_table_of_methods_names_every_algorithm():
    table = PAGE.split("## Methods")[1].split("\n\n")[1]
    named = set(re.findall(r"`([a-z0-9]+)`", table))
    assert set(ALGORITHMS) <= named


def test_every_file_it_links_to_is_there():
    root = Path(__file__).parents[1]
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (root / target).exists(), target
