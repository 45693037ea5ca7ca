"""A command whose help reads well: paragraphs as wide as the terminal, and a word on every argument."""

from __future__ import annotations

import re
from typing import Any, get_args, get_type_hints

from typer.core import TyperArgument, TyperCommand
from typer.models import ArgumentInfo


class Command(TyperCommand):
    """One of the commands."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.help = in_paragraphs(self.help or "")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        arguments = [param for param in self.params if isinstance(param, TyperArgument)]
        if any(argument.help is None for argument in arguments):  # newer clicks forget what Typer told them
            told = help_of_arguments(self.callback)
            for argument in arguments:
                argument.help = told.get(argument.name or "")
        super().format_help(ctx, formatter)


def in_paragraphs(text: str) -> str:
    r"""A docstring without the line breaks of the source, which would be kept; blank lines part paragraphs.

    >>> in_paragraphs("Train.\n\nA line\nand another.\n\nfedlalr run")
    'Train.\n\nA line and another.\n\nfedlalr run'
    """
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in re.split(r"\n\s*\n", text))


def help_of_arguments(function: Any) -> dict[str, str | None]:
    """What the annotations of a command say about its arguments."""
    hints = get_type_hints(function, include_extras=True)
    infos = {name: info for name, hint in hints.items() for info in get_args(hint) if isinstance(info, ArgumentInfo)}
    return {name: info.help for name, info in infos.items()}
