"""Partition schemes: one function each, which returns the client of every sample.

All take the classes of the samples as 0 … K−1, the number of clients N and a generator; `partition.partition` checks
the arguments. All of them terminate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]

_BLOCKS = (256, 4096)
_LARGEST_TABLE = 200_000_000
_TRIES = 10


def iid(classes: Indices, clients: int, rng: np.random.Generator) -> Indices:
    """Shuffle and split evenly."""
    return _deal(equal_sizes(len(classes), clients), rng)


def lognormal(classes: Indices, clients: int, sigma: float, min_size: int, rng: np.random.Generator) -> Indices:
    """No label skew; beyond `min_size` each, sizes are in the proportions exp(sigma · z), z normal."""
    log_weight = sigma * rng.standard_normal(clients)
    weight = np.exp(log_weight - log_weight.max())
    share = weight / weight.sum() * (len(classes) - min_size * clients)
    extra = np.floor(share).astype(np.int64)
    missing = len(classes) - min_size * clients - int(extra.sum())
    extra[np.argsort(extra - share, kind="stable")[:missing]] += 1
    return _deal(min_size + extra, rng)


def dirichlet(classes: Indices, clients: int, alpha: float, rng: np.random.Generator) -> Indices:
    """Equal sizes, one class prior per client drawn from Dir(alpha · 1): FedDyn's partition."""
    labels = int(classes.max()) + 1
    if clients * labels > _LARGEST_TABLE:
        raise ValueError(
            f"the scheme 'dirichlet' keeps a prior over {labels} classes for each of {clients} clients, "
            f"more than {_LARGEST_TABLE:,} numbers; use fewer clients or coarser labels"
        )
    return deal_by_priors(classes, _log_dirichlet(alpha, (clients, labels), rng), rng)


def deal_by_priors(classes: Indices, log_prior: Floats, rng: np.random.Generator) -> Indices:
    """Assign equal numbers of samples by the clients' class priors, given as logarithms `[N, K]`.

    The rule: until all samples are assigned, draw a random client that is not full, a class from its prior renormalised
    over the classes with samples left, and a random unused sample of that class.

    Sampled from the same distribution without a loop over samples. Clients arrive as Poisson processes that stop when
    full, so the next one is always uniform among those that are not. Every arrival draws a class from its client's
    prior; a class that has run out by then is redrawn from the rest, which is equivalent to renormalising.
    """
    arrivals = _arrivals(equal_sizes(len(classes), len(log_prior)), rng)
    wishes = _wishes(arrivals, log_prior, rng)
    dealt = _settle(wishes, arrivals, log_prior, np.bincount(classes), rng)
    owner = np.empty(len(classes), np.int64)
    # The i-th arrival with class c takes the i-th sample of the shuffled class c.
    owner[_shuffled_by_class(classes, rng)] = arrivals[np.argsort(dealt, kind="stable")]
    return owner


def dirichlet_classes(classes: Indices, clients: int, alpha: float, min_size: int, rng: np.random.Generator) -> Indices:
    """Every class is divided over the clients in proportions drawn from Dir(alpha · 1); sizes are unequal.

    Redrawn, up to ten times, while a client has fewer than `min_size` samples; after that, random samples of clients
    that have more move to those that have fewer.
    """
    by_class = _shuffled_by_class(classes, rng)
    counts = np.bincount(classes)
    owner = np.empty(len(classes), np.int64)
    for _ in range(_TRIES):
        for samples in np.split(by_class, np.cumsum(counts)[:-1]):
            proportions = np.exp(_log_dirichlet(alpha, (1, clients), rng)[0])
            cuts = np.rint(np.cumsum(proportions) * len(samples)).astype(np.int64)
            cuts[-1] = len(samples)
            owner[samples] = np.repeat(np.arange(clients), np.diff(cuts, prepend=0))
        if np.bincount(owner, minlength=clients).min() >= min_size:
            return owner
    return _fill_up(owner, clients, min_size, rng)


def shards(classes: Indices, clients: int, k: int, rng: np.random.Generator) -> Indices:
    """Every client holds exactly k classes; every class is divided evenly over the clients that hold it.

    The number of clients that hold a class is proportional to its size, as far as it has samples for them, so that
    classes of equal size give clients of equal size.
    """
    counts = np.bincount(classes)
    holders = _holders(counts, clients, k)
    held = _choose_classes(holders, clients, k, rng)
    # The clients of class 0, then those of class 1, and so on.
    by_class = rng.permutation(clients)[np.argsort(held.ravel(), kind="stable") // k]
    sizes = [equal_sizes(count, parts) for count, parts in zip(counts, holders, strict=True)]
    owner = np.empty(len(classes), np.int64)
    owner[_shuffled_by_class(classes, rng)] = np.repeat(by_class, np.concatenate(sizes))
    return owner


def equal_sizes(n: int, parts: int) -> Indices:
    """n in parts that differ by at most one."""
    return np.full(parts, n // parts, np.int64) + (np.arange(parts) < n % parts)


def _deal(sizes: Indices, rng: np.random.Generator) -> Indices:
    return rng.permutation(np.repeat(np.arange(len(sizes)), sizes))


def _shuffled_by_class(classes: Indices, rng: np.random.Generator) -> Indices:
    """The samples of class 0 in random order, then those of class 1, and so on."""
    shuffled = rng.permutation(len(classes))
    return shuffled[np.argsort(classes[shuffled], kind="stable")]


def _log_dirichlet(alpha: float, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Rows of logarithms of Dir(alpha · 1): for a small alpha most entries themselves would underflow."""
    # If g ~ Gamma(alpha + 1) and u is uniform, g · u^(1/alpha) ~ Gamma(alpha).
    log_gamma = np.log(rng.standard_gamma(alpha + 1.0, shape)) - rng.standard_exponential(shape) / alpha
    log_gamma -= log_gamma.max(axis=1, keepdims=True)
    log_gamma -= np.log(np.exp(log_gamma).sum(axis=1, keepdims=True))
    return log_gamma


def _arrivals(sizes: Indices, rng: np.random.Generator) -> Indices:
    """Clients in the order of arrival, each uniform among those that are not full."""
    times = np.cumsum(rng.standard_exponential((len(sizes), int(sizes.max()))), axis=1)
    client, place = np.nonzero(np.arange(times.shape[1]) < sizes[:, None])
    return client[np.argsort(times[client, place])]


def _wishes(arrivals: Indices, log_prior: Floats, rng: np.random.Generator) -> Indices:
    """A class from the prior of every arriving client."""
    clients, k = log_prior.shape
    cumulative = np.cumsum(np.exp(log_prior), axis=1)
    cumulative /= cumulative[:, -1:]
    # One sorted table for all clients: client i's distribution function lies in [i, i + 1].
    cumulative += np.arange(clients)[:, None]
    found = np.searchsorted(cumulative.ravel(), rng.random(len(arrivals)) + arrivals, side="right")
    return np.clip(found - arrivals * k, 0, k - 1)


def _settle(wishes: Indices, arrivals: Indices, log_prior: Floats, left: Indices, rng: np.random.Generator) -> Indices:
    """The class assigned to every arrival, if `left[c]` samples of class c are available at first.

    Works in blocks. A block ends early where a class runs out, so there are at most n / block + K of them; blocks of at
    most n / 4K keep the number of wasted draws after such an end small.
    """
    size = int(np.clip(len(wishes) // (4 * len(left)), *_BLOCKS))
    left = left.copy()
    dealt = np.empty_like(wishes)
    start = 0
    while start < len(wishes):
        block = wishes[start : start + size].copy()
        gone = np.flatnonzero(left[block] == 0)
        if len(gone):
            open_classes = np.flatnonzero(left)
            weights = log_prior[np.ix_(arrivals[start + gone], open_classes)]
            block[gone] = open_classes[np.argmax(weights + rng.gumbel(size=weights.shape), axis=1)]
        block = block[: _first_excess(block, left)]
        dealt[start : start + len(block)] = block
        left -= np.bincount(block, minlength=len(left))
        start += len(block)
    return dealt


def _first_excess(block: Indices, left: Indices) -> int:
    """The first position in the block whose class has no samples left; the block's length if there is none."""
    if (np.bincount(block, minlength=len(left)) <= left).all():
        return len(block)
    by_class = np.argsort(block, kind="stable")
    grouped = block[by_class]
    rank = np.arange(len(block)) - np.searchsorted(grouped, grouped)
    return int(by_class[rank >= left[grouped]].min())


def _fill_up(owner: Indices, clients: int, min_size: int, rng: np.random.Generator) -> Indices:
    """Move random samples from clients with more than enough to clients with too few."""
    sizes = np.bincount(owner, minlength=clients)
    shuffled = rng.permutation(len(owner))
    grouped = shuffled[np.argsort(owner[shuffled], kind="stable")]
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    spare = grouped[rank >= min_size]
    lacking = np.repeat(np.arange(clients), np.maximum(min_size - sizes, 0))
    filled = owner.copy()
    filled[rng.permutation(spare)[: len(lacking)]] = lacking
    return filled


def _holders(counts: Indices, clients: int, k: int) -> Indices:
    """How many clients hold each class: N·k in total, by its size, at least one, at most one per sample."""
    most = np.minimum(counts, clients)
    if k > len(counts):
        raise ValueError(f"classes_per_client={k} is more than the number of classes, {len(counts)}")
    if clients * k < len(counts):
        raise ValueError(
            f"{clients} clients with classes_per_client={k} leave some of the {len(counts)} classes without a client; "
            f"use at least classes_per_client={-(-len(counts) // clients)}"
        )
    if clients * k > most.sum():
        raise ValueError(
            f"{clients} clients cannot hold classes_per_client={k} each: some classes have too few samples; "
            f"use at most classes_per_client={most.sum() // clients}"
        )
    low, high = 0.0, float(clients * k)
    for _ in range(100):
        middle = (low + high) / 2
        fits = np.clip(np.floor(middle * counts), 1, most).sum() <= clients * k
        low, high = (middle, high) if fits else (low, middle)
    holders: Indices = np.clip(np.floor(low * counts), 1, most).astype(np.int64)
    more = np.flatnonzero(np.clip(np.floor(high * counts), 1, most) > holders)
    holders[more[: clients * k - int(holders.sum())]] += 1
    return holders


def _choose_classes(holders: Indices, clients: int, k: int, rng: np.random.Generator) -> Indices:
    """k distinct classes for every client, class c chosen `holders[c]` times in total, `[N, k]`.

    Client by client, at random in proportion to the remaining numbers of holders. A class that all remaining clients
    must hold is chosen first; since no class needs more holders than there are clients, this always succeeds.
    """
    left = holders.copy()
    chosen = np.empty((clients, k), np.int64)
    for client in range(clients):
        with np.errstate(divide="ignore"):
            key = rng.standard_exponential(len(left)) / left
        key[left == clients - client] = -1.0
        chosen[client] = np.argpartition(key, k - 1)[:k]
        left[chosen[client]] -= 1
    return chosen
