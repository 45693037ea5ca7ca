"""Readable help: paragraphs as wide as the terminal, and a description of every argument."""

from __future__ import annotations

import re
from typing import Any, get_args, get_type_hints

from typer.core import TyperArgument, TyperCommand
from typer.models import ArgumentInfo


class Command(TyperCommand):
    """A command with readable help."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.help = in_paragraphs(self.help or "")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        arguments = [param for param in self.params if isinstance(param, TyperArgument)]
        if any(argument.help is None for argument in arguments):  # newer versions of click lose the help set by Typer
            texts = help_of_arguments(self.callback)
            for argument in arguments:
                argument.help = texts.get(argument.name or "")
        super().format_help(ctx, formatter)


def in_paragraphs(text: str) -> str:
    r"""A docstring without the line breaks of the source, which help would keep; blank lines separate paragraphs.

    >>> in_paragraphs("Train.\n\nA line\nand another.\n\nfedlalr run")
    'Train.\n\nA line and another.\n\nfedlalr run'
    """
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in re.split(r"\n\s*\n", text))


def help_of_arguments(function: Any) -> dict[str, str | None]:
    """The help texts in the annotations of a command's arguments."""
    hints = get_type_hints(function, include_extras=True)
    infos = {name: info for name, hint in hints.items() for info in get_args(hint) if isinstance(info, ArgumentInfo)}
    return {name: info.help for name, info in infos.items()}
