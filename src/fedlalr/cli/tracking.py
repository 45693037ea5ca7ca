"""`--track`: log runs to TensorBoard and MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedlalr.config import Config
    from fedlalr.report.trackers import Tracker

Track = Annotated[
    list[str] | None,
    typer.Option(
        help="tensorboard (into RUN_DIR/tensorboard) or mlflow (to MLFLOW_TRACKING_URI); repeatable.",
        show_default=False,
    ),
]


@contextmanager
def tracked(names: Sequence[str] | None, config: Config, folder: Path) -> Iterator[list[Tracker]]:
    """The requested trackers; closed at the end of the block, also after an error."""
    from fedlalr.config import ConfigError

    if not names:  # do not import the trackers' module
        yield []
        return
    from fedlalr.report.trackers import TrackerMissing, create_tracker

    name = f"{config.name}-{config.algorithm.name}-seed-{config.seed}"
    settings = config.problem()
    with ExitStack() as stack:
        try:
            trackers = [create_tracker(kind, folder, name, settings) for kind in dict.fromkeys(names)]
        except (ValueError, TrackerMissing) as error:
            raise ConfigError(str(error)) from error
        yield [stack.enter_context(tracker) for tracker in trackers]
