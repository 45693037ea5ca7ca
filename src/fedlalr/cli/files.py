"""Output files of commands: one-line errors for files that cannot be written, as early as possible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlalr.config import ConfigError
from fedlalr.data.fetch import data_folder
from fedlalr.data.sources import DataNotFound

FIGURES = (".png", ".svg", ".pdf")
"""Allowed suffixes of figures."""


def check_figure(path: Path | None, option: str) -> None:
    """Reject a figure that cannot be written, before it is computed; None: no figure is requested."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name the figure in it, such as {path / 'figure.png'}")
    if path.suffix.lower() not in FIGURES:
        raise ConfigError(
            f"{option} {path} has no supported format; the name of a figure must end in one of {', '.join(FIGURES)}"
        )
    with writing(path, option):
        path.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Explain why a file cannot be written, and which option changes its path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path} cannot be written: {reason}; choose another path with {option}") from error


@contextmanager
def data_folder_errors() -> Iterator[None]:
    """Explain which data folder cannot be used, and how to choose another."""
    try:
        yield
    except DataNotFound:
        raise
    except OSError as error:
        reason = str(error.strerror or error)
        if "FEDLALR_DATA" in reason or error.errno is None:  # a message of this library
            raise ConfigError(reason) from error
        raise ConfigError(
            f"{error.filename or data_folder()} cannot be used: {reason}; data sets are stored in "
            f"{data_folder()}; set FEDLALR_DATA to use another folder"
        ) from error
