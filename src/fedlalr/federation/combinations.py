"""Features that cannot be combined, with the reason: one table for the checks and the documentation."""

from __future__ import annotations

from collections.abc import Collection

from fedlalr.federation.options import Options
from fedlalr.federation.replies.screening import MAX_NORM_RATIO

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

COMBINATIONS = {
    (COMPRESSION, PACKED): "it is for mods that compute with a reply's numbers, and a codec sends bytes; use "
    "layout='records'",
    (PERSONAL, RECALIBRATE): "it needs the server's model, which is incomplete without them; use buffers='local' or "
    "'average'",
    (SIZES, SAMPLES): "large clients would count twice, in the cohort and in the mean; use one of the two",
    (FLOWER, SIZES): "the server does not know the clients' numbers of samples; use 'uniform' or 'round-robin', or a "
    "function that knows them",
    (FLOWER, RECALIBRATE): "it needs a second pass over the clients' data in every round; use buffers='average'",
    (PRIVACY, MAX): "a single client can set a maximum, and no clipped sum gives it; use the mean, such as "
    "second_moment='mean'",
    (PRIVACY, SAMPLES): "the weights would reveal the clients' numbers of samples; use weighting='uniform'",
    (PRIVACY, REDUCE): "the noise is calculated for a sum of clipped changes, not for other reductions; leave it out",
    (PRIVACY, NORM_RATIO): "its bound on a reply depends on the other replies; leave it out, since privacy clips",
    (PRIVACY, SAMPLING): "privacy needs clients that take part at random, independently; leave sampling out",
    (PRIVACY, MIN_CLIENTS): "the number of replies is private, and a round without any is valid; leave it out",
    (PRIVACY, RECALIBRATE): "the statistics would be sent without noise; use buffers='local', or units={'buffers': …} "
    "of fl.Privacy",
    (PRIVATE_FLOWER, SCORES): "nodes would send the losses of single clients without noise; leave out holdout and "
    "client_tests",
    (PRIVATE_FLOWER, RARE_CHECKPOINTS): "rounds that a resumed run repeats would spend privacy that is not accounted "
    "for; use checkpoint_every=1",
    (PRIVACY, ASYNCHRONOUS): "the noise is calculated for clients that are sampled at random in every round; use "
    "synchronous rounds",
    (PRIVACY, STRAGGLERS): "who is fast enough is not random; leave stragglers out",
    (ASYNCHRONOUS, RECALIBRATE): "clients measure the new model after an update, when they already train again; use "
    "buffers='average' or 'local'",
    (ASYNCHRONOUS, REDUCE): "stale replies weigh less, which only a mean can express; max_norm_ratio still bounds "
    "every reply",
    (ASYNCHRONOUS, STRAGGLERS): "the server never waits for slow clients there; use one of the two",
}
"""Two features that exclude each other → why, and what to do."""


def features_of(options: Options) -> set[str]:
    """The chosen features that exclude others."""
    chosen = {
        COMPRESSION: options.compression is not None,
        RECALIBRATE: options.buffers == "recalibrate",
        PERSONAL: options.personal is not None,
        SIZES: options.sampling == "size",
        PRIVACY: options.privacy is not None,
        SAMPLES: options.weighting == "samples",
        REDUCE: bool(options.reduce),
        NORM_RATIO: options.max_norm_ratio not in (None, MAX_NORM_RATIO),
        SAMPLING: options.sampling != "uniform",
        MIN_CLIENTS: options.min_clients > 1,
        SCORES: options.holdout is not None or options.client_tests is not None,
        RARE_CHECKPOINTS: options.checkpoint_every > 1,
        ASYNCHRONOUS: options.asynchronous is not None,
        STRAGGLERS: options.stragglers is not None,
    }
    return {feature for feature, is_chosen in chosen.items() if is_chosen}


def check_combinations(chosen: Collection[str]) -> None:
    """Reject features that exclude each other."""
    for (first, second), reason in COMBINATIONS.items():
        if first in chosen and second in chosen:
            raise ValueError(f"{first} and {second} cannot be combined: {reason}")
