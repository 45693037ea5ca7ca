"""Counter-based random bits: a pure function of integers, the same on every device, engine and machine.

A client's random numbers in a round (its batch order, its augmentation) are hashed from (seed, round, client, …) rather
than drawn from a generator with state. So they do not depend on the engine, the order of calls, or the number of
processes.

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood. "Fast Splittable Pseudorandom Number Generators", OOPSLA
2014), folded over the counters.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

BATCHES: Final = 1
"""Stream of the batch order."""
AUGMENTATION: Final = 2
"""Stream of the augmentation."""
COHORT: Final = 3
"""Stream of the sampling of clients."""
MODULES: Final = 4
"""Stream of the randomness inside modules, such as dropout."""
HOLDOUT: Final = 5
"""Stream of the samples that are held out for evaluation."""
ROUNDING: Final = 6
"""Stream of the stochastic rounding of compressed slots."""
NOISE: Final = 7
"""Stream of the noise of simulated privacy."""
SPEEDS: Final = 8
"""Stream of the clients' speeds on the virtual clock."""
STARTS: Final = 9
"""Stream of the order in which sampled clients start in an asynchronous run."""

_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_ALL: Final = (1 << 64) - 1


def key(*counters: int) -> int:
    """Fold integers into one 64-bit key, as a signed Python integer.

    >>> key(0, BATCHES, 7) == key(0, BATCHES, 7), key(0, BATCHES, 7) == key(1, BATCHES, 7)
    (True, False)
    """
    state = 0
    for counter in counters:
        state = _mix(((state ^ (counter & _ALL)) + _GOLDEN) & _ALL)
    return _signed(state)


def bits(start: int, *counters: Tensor | int) -> Tensor:
    """Uniform integers in [0, 2⁶³), one for every broadcast combination of the counters.

    `start` is a `key`; at least one counter is an int64 tensor. Folding a counter here or in `key` gives the same bits.
    """
    state: Tensor | int = start
    for counter in counters:
        if isinstance(counter, Tensor):
            state = _mix_tensor((counter ^ state) + _signed(_GOLDEN))
        elif isinstance(state, Tensor):
            state = _mix_tensor((state ^ counter) + _signed(_GOLDEN))
        else:
            state = _signed(_mix((((state ^ counter) & _ALL) + _GOLDEN) & _ALL))
    if not isinstance(state, Tensor):
        raise TypeError("bits needs at least one tensor of counters; use key() for plain integers")
    return (state >> 1) & ((1 << 63) - 1)


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _FIRST) & _ALL
    z = ((z ^ (z >> 27)) * _SECOND) & _ALL
    return z ^ (z >> 31)


def _mix_tensor(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift(z, 27)) * _signed(_SECOND)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z
