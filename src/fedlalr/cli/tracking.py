"""`--track`: log runs to TensorBoard and MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedlalr.config import Config
from fedlalr.config.errors import as_config_errors
from fedlalr.report.trackers import Tracker, TrackerMissing, create_tracker

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
    name = f"{config.name}-{config.algorithm.name}-seed-{config.seed}"
    settings = config.problem()
    with ExitStack() as stack:
        with as_config_errors(ValueError, TrackerMissing):
            trackers = [create_tracker(kind, folder, name, settings) for kind in dict.fromkeys(names or ())]
        yield [stack.enter_context(tracker) for tracker in trackers]
