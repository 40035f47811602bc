"""What a CRC-32 that differs tells about the damage, if that is small.

The CRC is linear: the exclusive or of the checksums before and after depends on the flipped bits alone. A
bit that is ``e`` bits before the end contributes ``S^e(1)``, where ``S`` is the CRC register's step on a
zero bit. ``S`` has the order 2^32 - 1, so one flipped bit can be found; four neighbouring bytes of which the
place is known can be restored.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ORDER = (1 << 32) - 1
_STRIDE = 1 << 16

Map = tuple[int, ...]  # a linear map of registers: the images of their 32 bits


def flipped_bits(saved: int, found: int, nbytes: int) -> list[int]:
    """The single bits of which one, flipped, explains a checksum.

    Damage to more bits is explained by a single bit, too, with a probability of one in 2^32 per bit.

    Args:
        saved: the checksum of before.
        found: the checksum of now.
        nbytes: how many bytes it is of.

    Returns:
        Their numbers; the eight of a byte begin with its lowest.
    """
    register, bits = saved ^ found, 8 * nbytes
    if not register:
        return []
    table, back = _small_powers(), _tables(_power(_ORDER - _STRIDE))
    found_at: list[int] = []
    for giant in range(min(bits, _ORDER) // _STRIDE + 1):
        small = table.get(register)
        if small is not None:
            found_at += range(giant * _STRIDE + small, bits + 1, _ORDER)
        register = _apply(back, register)
    return sorted({bits - before_end for before_end in found_at if before_end >= 1})


def flipped_word(saved: int, found: int, nbytes: int, at: int) -> int:
    """Which bits of the four bytes at ``at``, flipped, explain a checksum.

    There are always some; that nothing else was damaged has to be known.

    Returns:
        A little-endian word, to be combined with the one that is there by exclusive or.
    """
    exponent = (8 * (nbytes - at)) % _ORDER
    return _apply(_tables(_power((_ORDER - exponent) % _ORDER)), saved ^ found)


def _step(register: int) -> int:
    return (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)


@lru_cache(maxsize=1)
def _small_powers() -> dict[int, int]:
    register, powers = 1, {}
    for exponent in range(_STRIDE):
        powers[register] = exponent
        register = _step(register)
    return powers


@lru_cache(maxsize=64)
def _power(exponent: int) -> Map:
    """``S`` to a power."""
    if exponent == 0:
        return tuple(1 << bit for bit in range(32))
    half = _power(exponent // 2)
    tables = _tables(half)
    squared = tuple(_apply(tables, image) for image in half)
    return tuple(map(_step, squared)) if exponent % 2 else squared


@lru_cache(maxsize=64)
def _tables(linear: Map) -> tuple[tuple[int, ...], ...]:
    """A map by the four bytes of its argument."""
    tables = []
    for byte in range(4):
        images = [0]
        for bit in range(8):
            images += [image ^ linear[8 * byte + bit] for image in images]
        tables.append(tuple(images))
    return tuple(tables)


def _apply(tables: tuple[tuple[int, ...], ...], register: int) -> int:
    first, second, third, fourth = tables
    return (
        first[register & 255]
        ^ second[register >> 8 & 255]
        ^ third[register >> 16 & 255]
        ^ fourth[register >> 24]
    )
