"""The README: its Python runs as printed, its links lead somewhere, also from the package page."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import torch

import fedlalr as fl
from fedlalr.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
LINK = r"\]\(([^)#]+)\)"
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")


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
    for target in re.findall(LINK, PAGE):
        assert (ROOT / target).exists(), target


def test_the_package_page_links_to_the_repository_or_not_at_all():
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    plain = description(PAGE, None)
    assert re.findall(LINK, plain) == []
    assert "LoRA adapters train as they are." in plain
    linked = description(PAGE, "https://example.org/us/fedlalr")
    targets = [target.removeprefix("https://example.org/us/fedlalr/") for target in re.findall(LINK, linked)]
    assert [re.sub("^(raw|blob)/HEAD/", "", target) for target in targets] == re.findall(LINK, PAGE)
    images = re.findall(rf"!\[[^]]+{LINK}", linked)
    assert images == [f"https://example.org/us/fedlalr/raw/HEAD/docs/{name}" for name in ("overview.svg", "demo.png")]
    assert description("[a](https://b.org/c) [d](#e) ![f](http://g.org)", None) == (
        "[a](https://b.org/c) [d](#e) ![f](http://g.org)"
    )
