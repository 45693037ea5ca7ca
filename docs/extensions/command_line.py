"""Writes the reference of every command into the page on the command line, from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

PLACE = "<!-- commands -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return markdown.replace(PLACE, reference()) if page.file.src_uri == "command-line.md" else markdown


def reference() -> str:
    """Every command with its help, arguments and options."""
    from fedlalr.cli import app

    return "\n".join(_sections(typer.main.get_command(app), "fedlalr"))


def _sections(command: Any, path: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _sections(inner, f"{path} {name}")
        return
    yield f"### {path}\n"
    yield from _help(command.help or "")
    yield f"\nUsage: `{' '.join([path, *command.collect_usage_pieces(command.context_class(command))])}`\n"
    options = [parameter for parameter in command.params if parameter.opts[0].startswith("-")]
    if options:
        yield from ("| option | | default |", "|---|---|---|")
        yield from (_row(option) for option in options)
        yield ""


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    default = option.show_default if isinstance(option.show_default, str) else option.default
    shown = "" if default is None or default is False or default == [] else getattr(default, "value", default)
    return f"| {names} | {_plain(option.help or '')} | {shown} |".replace("f*", "f\\*")


def _help(text: str) -> Iterator[str]:
    """The help, with the rich marks as Markdown and the examples as one block."""
    prose, _, examples = text.partition("[bold]Example")
    yield _plain(prose.strip())
    commands = re.findall(r"^\s*(?:s?\[/\]\s+)?(fedlalr .*)$", examples, flags=re.M)
    if commands:
        yield "\n```sh\n" + "\n".join(command.strip() for command in commands) + "\n```"


def _plain(text: str) -> str:
    return re.sub(r"\[bold\](.*?)\[/\]", r"**\1**", text).replace("|", "\\|")
