"""The arguments of `client_app` by name: they are imported where a client trains, and nowhere else."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from flwr.app import Context

from fedlalr import __version__

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclass(frozen=True)
class Names:
    """Names such as `my_app.task:model`."""

    model: str
    data: str
    algorithm: str
    settings: str | None = None
    test: str | None = None

    def __post_init__(self) -> None:
        for argument, name in asdict(self).items():
            if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
                raise ValueError(
                    f"{argument} must be a name such as 'my_app.task:{argument}', not {name!r}; client_app takes all "
                    f"of its functions by name, or none"
                )

    def load(self) -> dict[str, Any]:
        """Import the named objects; by argument of `client_app`."""
        return {argument: resolve_name(name) for argument, name in self._given()}

    def digest(self, context: Context) -> str:
        """Another one for other names, another configuration of run or node, or other files of the named packages."""
        facts = [__version__, asdict(self), dict(context.run_config), dict(context.node_config)]
        found = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for file in self._files():
            found.update(f"{file}\0{file.stat().st_size}\0".encode())
            found.update(file.read_bytes())
        return found.hexdigest()

    def _given(self) -> list[tuple[str, str]]:
        return [(each.name, getattr(self, each.name)) for each in fields(self) if getattr(self, each.name) is not None]

    def _files(self) -> Iterator[Path]:
        for package in sorted({name.partition(":")[0].partition(".")[0] for _, name in self._given()}):
            spec = find_spec(package)
            if spec is None:
                raise ModuleNotFoundError(f"client_app names a function in {package}, which cannot be imported")
            for place in sorted(spec.submodule_search_locations or [str(spec.origin)]):
                found = [Path(place)] if Path(place).is_file() else sorted(Path(place).rglob("*"))
                yield from (file for file in found if file.is_file() and file.parent.name != "__pycache__")
