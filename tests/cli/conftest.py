"""Quick figures for the tests of commands that draw."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def empty_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a module with `DRAWN`, write empty files instead of figures except in the tests that it names.

    Figures take longer than the small runs in them; what they show is tested beside what draws them.
    """
    drawn = getattr(request.module, "DRAWN", None)
    if drawn is not None and request.node.originalname not in drawn:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
