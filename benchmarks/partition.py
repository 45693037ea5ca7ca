"""How long dealing takes: `python benchmarks/partition.py`. Prints seconds and the classes a client ends up with."""

from __future__ import annotations

import time

import numpy as np

from fedlalr.data.heterogeneity import count_labels
from fedlalr.data.partition import partition

SIZES = ((50_000, 100, 10), (50_000, 100, 100), (1_000_000, 10_000, 10), (1_000_000, 10_000, 100))
SCHEMES = (
    ("dirichlet", 0.6),
    ("dirichlet", 0.3),
    ("dirichlet", 0.01),
    ("dirichlet-classes", 0.3),
    ("iid", 1.0),
    ("shards", 1.0),
    ("lognormal", 1.0),
)


def main() -> None:
    """Deal every size by every scheme, three times each, and print the median time."""
    print("  samples clients classes  scheme            alpha  seconds  classes/client")
    for n, clients, classes in SIZES:
        labels = np.arange(n) % classes
        for scheme, alpha in SCHEMES:
            seconds = []
            for seed in range(3):
                start = time.perf_counter()
                parts = partition(labels, clients, scheme, alpha=alpha, seed=seed)
                seconds.append(time.perf_counter() - start)
            present = (count_labels(labels, parts) > 0).sum(axis=1).mean()
            middle = np.median(seconds)
            print(f"{n:>9,} {clients:>7,} {classes:>7}  {scheme:<17} {alpha:>5} {middle:>8.3f} {present:>15.2f}")


if __name__ == "__main__":
    main()
