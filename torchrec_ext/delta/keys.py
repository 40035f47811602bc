"""Sets of keys, as sorted arrays, and lists of them in the order in which they were said."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
NO_KEYS: Keys = np.empty(0, np.int64)

_MAX_THREADS = 8
_SORTED_AT_ONCE = 1 << 20


def union(*sets: Keys) -> Keys:
    """The keys of all, sorted, each once; they need be neither sorted nor unique before."""
    keys = np.concatenate([NO_KEYS, *sets])
    keys.sort()
    # Not np.unique, which hashes integers from NumPy 2.3 on: that takes fifty times as long.
    return keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys


def difference(keys: Keys, others: Keys) -> Keys:
    """The keys that are not among others, in their order."""
    return keys[~np.isin(keys, others)]


def last_places(keys: Keys) -> NDArray[np.int64]:
    """The last place of each key, int64, in the order of the keys."""
    if not len(keys):
        return NO_KEYS
    width = len(keys).bit_length()
    low, high = int(keys.min()), int(keys.max())
    if (high - low) >> (63 - width) == 0:
        return _last_places_of_narrow(keys, low, width)
    if len(keys) < _SORTED_AT_ONCE:
        return _last_places_of_wide(keys)
    shares = min(_MAX_THREADS, os.cpu_count() or 1)
    bounds = np.quantile(keys[:: len(keys) // 1000], np.linspace(0, 1, shares + 1)[1:-1], method="lower")

    def of_share(share: int) -> NDArray[np.int64]:
        inside = np.ones(len(keys), np.bool_)
        if share > 0:
            inside &= keys >= bounds[share - 1]
        if share < shares - 1:
            inside &= keys < bounds[share]
        places = np.flatnonzero(inside)
        return places[_last_places_of_wide(keys[places])]

    with ThreadPoolExecutor(shares, "torchrec-ext-sort") as threads:  # NumPy sorts without the GIL
        return np.concatenate(list(threads.map(of_share, range(shares))))


def _last_places_of_narrow(keys: Keys, low: int, width: int) -> NDArray[np.int64]:
    # A key and its place fit in one number: to sort these takes a fifth of the time of an argsort.
    ordered = keys - low
    ordered <<= width
    ordered |= np.arange(len(keys))
    ordered.sort()
    place = (1 << width) - 1
    differs = np.append((ordered[1:] ^ ordered[:-1]) > place, True)
    return ordered[np.flatnonzero(differs)] & place


def _last_places_of_wide(keys: Keys) -> NDArray[np.int64]:
    if not len(keys):
        return NO_KEYS
    # Not a stable sort, which takes three times as long: the last place is the highest.
    order = np.argsort(keys)
    ordered = keys[order]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    return np.maximum.reduceat(order, first)
