"""Plain docstrings as Markdown: examples become code, lines about parameters a list."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Function, Object


class Docstrings(Extension):
    """Read by mkdocstrings when the site is built."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            names = {parameter.name for parameter in obj.parameters} if isinstance(obj, Function) else set()
            obj.docstring.value = as_markdown(obj.docstring.value, names)


def as_markdown(text: str, parameters: set[str]) -> str:
    """A docstring with its examples fenced and its lines `name: …` as items."""
    lines: list[str] = []
    in_example = False
    for line in text.splitlines():
        starts = line.lstrip().startswith(">>>")
        if starts and not in_example:
            lines += ["", "```pycon"]
        elif in_example and not line.strip():
            lines.append("```")
        in_example = starts or (in_example and bool(line.strip()))
        about = re.match(r"(\w+): ", line)
        if not in_example and about and about[1] in parameters:
            line = f"- `{about[1]}`: {line[about.end() :]}"
            if lines and lines[-1].strip() and not lines[-1].startswith(("-", " ")):
                lines.append("")
        lines.append(line.strip() if in_example else line)
    return "\n".join([*lines, "```"] if in_example else lines)
