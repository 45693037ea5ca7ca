"""Features that cannot be combined, with the reason: one table for the checks and the documentation."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Combination(NamedTuple):
    """Two features that exclude each other."""

    first: str
    second: str
    reason: str
    """Why, and what to do."""


COMPRESSION = "compression"
PACKED = 'layout="packed" on Flower'
RECALIBRATE = 'buffers="recalibrate"'
PERSONAL = "personal parameters"
SIZES = 'sampling="size"'
FLOWER = "Flower"
PRIVACY = "privacy"
PRIVATE_FLOWER = "privacy on Flower"
MAX = "a slot that is reduced by its maximum"
SAMPLES = 'weighting="samples"'
REDUCE = "reduce"
NORM_RATIO = "max_norm_ratio"
SAMPLING = 'sampling other than "uniform"'
MIN_CLIENTS = "min_clients above 1"
SCORES = "evaluation of the clients"
RARE_CHECKPOINTS = "checkpoint_every above 1"
ASYNCHRONOUS = "asynchronous rounds"
STRAGGLERS = "stragglers"

COMBINATIONS = (
    Combination(
        COMPRESSION,
        PACKED,
        "it is for mods that compute with a reply's numbers, and a codec sends bytes; use layout='records'",
    ),
    Combination(
        PERSONAL,
        RECALIBRATE,
        "it needs the server's model, which is incomplete without them; use buffers='local' or 'average'",
    ),
    Combination(
        FLOWER,
        SIZES,
        "the server does not know the clients' numbers of samples; use 'uniform' or 'round-robin', or a function that "
        "knows them",
    ),
    Combination(
        FLOWER,
        RECALIBRATE,
        "it needs a second pass over the clients' data in every round; use buffers='average'",
    ),
    Combination(
        PRIVACY,
        MAX,
        "a single client can set a maximum, and no clipped sum gives it; use the mean, such as second_moment='mean'",
    ),
    Combination(PRIVACY, SAMPLES, "the weights would reveal the clients' numbers of samples; use weighting='uniform'"),
    Combination(
        PRIVACY, REDUCE, "the noise is calculated for a sum of clipped changes, not for other reductions; leave it out"
    ),
    Combination(
        PRIVACY, NORM_RATIO, "its bound on a reply depends on the other replies; leave it out, since privacy clips"
    ),
    Combination(PRIVACY, SAMPLING, "privacy needs clients that take part at random, independently; leave sampling out"),
    Combination(
        PRIVACY, MIN_CLIENTS, "the number of replies is private, and a round without any is valid; leave it out"
    ),
    Combination(
        PRIVACY,
        RECALIBRATE,
        "the statistics would be sent without noise; use buffers='local', or units={'buffers': …} of fl.Privacy",
    ),
    Combination(
        PRIVATE_FLOWER,
        SCORES,
        "nodes would send the losses of single clients without noise; leave out holdout and client_tests",
    ),
    Combination(
        PRIVATE_FLOWER,
        RARE_CHECKPOINTS,
        "rounds that a resumed run repeats would spend privacy that is not accounted for; use checkpoint_every=1",
    ),
    Combination(
        PRIVACY,
        ASYNCHRONOUS,
        "the noise is calculated for clients that are sampled at random in every round; use synchronous rounds",
    ),
    Combination(PRIVACY, STRAGGLERS, "who is fast enough is not random; leave stragglers out"),
    Combination(
        ASYNCHRONOUS,
        RECALIBRATE,
        "clients measure the new model after an update, when they already train again; use buffers='average' or "
        "'local'",
    ),
    Combination(
        ASYNCHRONOUS,
        REDUCE,
        "stale replies weigh less, which only a mean can express; max_norm_ratio still bounds every reply",
    ),
    Combination(
        ASYNCHRONOUS,
        STRAGGLERS,
        "the server never waits for slow clients there; use one of the two",
    ),
)


def check_combinations(chosen: Collection[str], table: Collection[Combination] = COMBINATIONS) -> None:
    """Reject features that exclude each other."""
    for first, second, reason in table:
        if first in chosen and second in chosen:
            raise ValueError(f"{first} and {second} cannot be combined: {reason}")


def combinations_table() -> str:
    """The table in `docs/compression.md`."""
    rows = [f"| {first} | {second} | {reason} |" for first, second, reason in COMBINATIONS]
    return "\n".join(["| feature | not with | because |", "|---|---|---|", *rows])
