"""What the parts of a round cost: training, screening, reduction, evaluation, checkpoint.

    python benchmarks/round_parts.py quickstart rounds=20
    python benchmarks/round_parts.py cifar10 rounds=5

Every round is saved. Medians over the rounds after the first.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from fedlalr import config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("preset")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    chosen = config.load(arguments.preset, ["checkpoint_every=1", *arguments.overrides])
    with tempfile.TemporaryDirectory() as folder:
        result = config.execute(chosen, Path(folder) / "run")
    records = result.metrics[1:]
    seconds = statistics.median(record.seconds for record in records)
    print(
        f"{result.info.engine} on {result.info.device}, {result.info.parameters:,} parameters: {seconds:.3f} s a round"
    )
    for part in records[-1].timing:
        median = statistics.median(record.timing[part] for record in records)
        print(f"  {part}: {median * 1000:.2f} ms, {median / seconds:.2%}")


if __name__ == "__main__":
    main()
