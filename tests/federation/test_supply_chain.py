"""No input is executed: all places in the sources that could do so are listed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "fedlalr"

KNOWN = {
    ("data/sources/unpickle.py", "pickle.Unpickler"): "resolves every name to an inert stand-in of its own",
    (
        "training/engines/worker_process.py",
        "pickle.loads",
    ): "a run's own child processes, over a private pair of sockets",
    ("training/engines/shared_memory.py", "pickle.loads"): "the same, in shared memory",
    ("training/ranks.py", "torch.load"): "the other ranks of the same run, which trust each other",
    ("config/yaml_file.py", "yaml.load"): "with a loader derived from SafeLoader",
}
"""Places that would execute untrusted input, and why they never read any."""

DANGEROUS = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "marshal.loads",
    "shelve.open", "torch.load", "torch.jit.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load",
    "eval", "exec", "os.system", "os.popen", "joblib.load",
}  # fmt: skip


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def found_in(source: str) -> set[str]:
    """Dangerous names that a source mentions, and dangerous options it passes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Name) and dotted(node) in DANGEROUS:
            found.add(dotted(node))
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{name.name}" for name in node.names} & DANGEROUS
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant) and node.value.value is True:
            found |= {f"{node.arg}=True"} & {"allow_pickle=True", "shell=True", "trust_remote_code=True"}
    return found


def test_every_place_that_could_execute_what_it_reads_is_known():
    found = {
        (str(path.relative_to(SOURCES)), name)
        for path in SOURCES.rglob("*.py")
        for name in found_in(path.read_text(encoding="utf-8"))
    }
    assert found == set(KNOWN)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from pickle import loads\nloads(b'')", "pickle.loads"),
        ("np.load(f, allow_pickle=True)", "allow_pickle=True"),
        ("subprocess.run('ls', shell=True)", "shell=True"),
        ("class U(pickle.Unpickler): pass", "pickle.Unpickler"),
        ("eval('1')", "eval"),
    ],
)
def test_the_search_finds_what_it_looks_for(source, name):
    assert found_in(source) == {name}
