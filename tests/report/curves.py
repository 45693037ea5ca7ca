"""Made-up runs."""

from collections.abc import Sequence

from fedlalr.federation import Record
from fedlalr.report.comparison import Curve


def curve(accuracies: Sequence[float | None], vectors: int = 1, failure: str | None = None) -> Curve:
    """A run with these accuracies that sends a megabyte each way and round for each vector."""
    return Curve(
        [
            Record(
                round=i,
                loss=1.0,
                accuracy=accuracy,
                train_loss=2.0,
                lr=0.1,
                seconds=2.0,
                bytes_up=vectors * 1_000_000 + 250_000,
                bytes_down=vectors * 1_000_000 + 250_000,
                clients=1,
            )
            for i, accuracy in enumerate(accuracies, start=1)
        ],
        failure,
    )
