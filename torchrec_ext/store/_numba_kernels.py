"""The update of embedding rows as machine code.

The ids are sorted by row, and each row is read and written once: the gradients of its bags are added up in
the order of the ids, the optimizer's formula is applied, the version is set. No array of aggregated
gradients is ever made; that is what the time would go to.

Nothing here checks a row or a shape: ``_numba_update`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Function = TypeVar("Function", bound=Callable[..., Any])

SGD, ROW_WISE_ADAGRAD, ADAGRAD = range(3)

# A pair is a row, counted from the first of a range, in the upper half and what identifies an id in the
# lower: the id's bag or, if ids have a scale, its position.
_PAYLOAD = (1 << 32) - 1
_DIGIT_BITS = 11  # of a radix sort's digit: 2,048 counters of four bytes stay in the first-level cache
_LINE = 16  # float32 values in a cache line
# How many ids ahead memory is asked for: rows come from memory, gradients from a nearer cache.
_ROWS_AHEAD = 24
_GRADS_AHEAD = 16
PADDING = _ROWS_AHEAD  # so that looking ahead needs no check; each of those costs about 2 % of an update


class Rows(NamedTuple):
    """What is updated.

    Attributes:
        weight: ``[num_rows, dim]``.
        state: the optimizer's, ``[num_rows, 1]`` or ``[num_rows, dim]``; none for SGD, ``[0, 0]``.
        versions: ``[num_rows]``.
    """

    weight: FloatArray
    state: FloatArray
    versions: Int64Array


class Gradients(NamedTuple):
    """By what.

    Attributes:
        rows: the row of each id, ``[n]``.
        offsets: where each bag begins and the last one ends, ``[num_bags + 1]``.
        scale: each id's factor, ``[n]`` or, if there are none, ``[0]``.
        per_bag: the bags' gradients, ``[num_bags, dim]``.
    """

    rows: Int64Array
    offsets: Int64Array
    scale: FloatArray
    per_bag: FloatArray


class Formula(NamedTuple):
    """How: one of the kinds above, its numbers in float32, and the rows' new version."""

    kind: int
    lr: Any
    eps: Any
    version: int


class Scratch(NamedTuple):
    """Memory for sorting.

    Attributes:
        pairs: of a range of rows, with ``PADDING`` more than it has ids.
        spare: as much again.
        bag_of: the bag of each id, ``[n]``; used only if ids have a scale.
    """

    pairs: Int64Array
    spare: Int64Array
    bag_of: Int32Array


def _jit(**options: Any) -> Callable[[Function], Function]:
    """Compiles at the first call, and keeps the machine code on disk where there is a place for it."""

    def decorate(function: Function) -> Function:
        options.update(nogil=True, error_model="numpy")
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # neither the package's directory nor the user's cache can be written to
            return numba.njit(**options)(function)

    return decorate


@intrinsic
def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Asks for the cache line of ``array.flat[index]``, which need not exist."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, flag, flag, flag])
        function = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        builder.call(function, [address, flag(0), flag(3), flag(1)])  # to read, into all caches, data
        return context.get_dummy_value()

    return numba.void(array, numba.int64), generate


@_jit()
def plan(rows: Int64Array, num_rows: int, first_row: Int64Array, first_pair: Int64Array) -> None:
    """Cuts the rows into ranges with about as many ids each.

    Args:
        rows: the row of each id.
        num_rows: how many there are.
        first_row: is filled in: where each range begins and the last one ends.
        first_pair: is filled in: how many ids there are before that.
    """
    parts = len(first_row) - 1
    shift = 0
    while (num_rows >> shift) > 4096:
        shift += 1
    count = np.zeros((num_rows >> shift) + 1, np.int64)
    for row in rows:
        count[row >> shift] += 1
    part = 0
    seen = 0
    for block in range(len(count)):
        while part < parts and seen * parts >= part * len(rows):
            first_row[part] = block << shift
            first_pair[part] = seen
            part += 1
        seen += count[block]
    first_row[part:] = num_rows
    first_pair[part:] = len(rows)


@_jit()
def _collect(grads: Gradients, low: int, high: int, pairs: Int64Array, bag_of: Int32Array) -> None:
    """Fills ``pairs`` with those of rows ``low`` to ``high``, in the order of the ids."""
    scaled = len(grads.scale) > 0
    bag = 0
    found = 0
    for position in range(len(grads.rows)):
        while bag + 2 < len(grads.offsets) and grads.offsets[bag + 1] <= position:
            bag += 1
        row = grads.rows[position]
        if low <= row < high:
            pairs[found] = (row - low) << 32 | (position if scaled else bag)
            found += 1
            if scaled:
                bag_of[position] = bag


@_jit()
def _sort(pairs: Int64Array, spare: Int64Array, num_rows: int) -> Int64Array:
    """Sorts all pairs but the padding by row, stably; the result is in one of the two arrays.

    It is a radix sort, least significant digit first.
    """
    bits = 0
    while ((num_rows - 1) >> bits) > 0:
        bits += 1
    passes = (bits + _DIGIT_BITS - 1) // _DIGIT_BITS
    if passes == 0:
        return pairs
    width = (bits + passes - 1) // passes
    mask = (1 << width) - 1
    place = np.zeros((passes, 1 << width), np.int32)
    for pair in pairs[:-PADDING]:
        row = pair >> 32
        for digit in range(passes):
            place[digit, (row >> (digit * width)) & mask] += 1
    for digit in range(passes):
        before = 0
        for value in range(1 << width):
            count = place[digit, value]
            place[digit, value] = before
            before += count
        shift = 32 + digit * width
        for pair in pairs[:-PADDING]:
            value = (pair >> shift) & mask
            spare[place[digit, value]] = pair
            place[digit, value] += 1
        pairs, spare = spare, pairs
    return pairs


@_jit(fastmath={"reassoc", "contract"})  # else the sum could not be split over a vector's lanes
def _mean_square(values: FloatArray) -> Any:
    total = np.float32(0)
    for column in range(len(values)):  # by index: loops over values are not vectorised
        total += values[column] * values[column]
    return total / np.float32(len(values))


@_jit(fastmath={"contract"})  # fused multiply-add, as torch's own operators do
def _apply(
    pairs: Int64Array, bag_of: Int32Array, low: int, grads: Gradients, rows: Rows, formula: Formula
) -> None:
    """Updates the rows of sorted pairs.

    One function, unpacked once: a call inside the loop, or a look into a tuple, counts the references of
    its arrays, and takes up to four times as long.
    """
    weight, state, versions = rows
    _, _, scale, per_bag = grads
    kind, lr, eps, version = formula
    dim = weight.shape[1]
    scaled = len(scale) > 0
    total = np.empty(dim, np.float32)
    at = 0
    while at < len(pairs) - PADDING:
        row = pairs[at] >> 32
        first = at
        while at < len(pairs) - PADDING and pairs[at] >> 32 == row:
            ahead = pairs[at + _GRADS_AHEAD] & _PAYLOAD
            if scaled:
                ahead = np.int64(bag_of[ahead])
                later = pairs[at + _ROWS_AHEAD] & _PAYLOAD
                _prefetch(bag_of, later)
                _prefetch(scale, later)
            for column in range(0, dim, _LINE):
                _prefetch(per_bag, ahead * dim + column)
            _prefetch(per_bag, ahead * dim + dim - 1)  # where rows do not begin with a line
            ahead = pairs[at + _ROWS_AHEAD] >> 32
            if ahead != pairs[at + _ROWS_AHEAD - 1] >> 32:
                ahead += low
                for column in range(0, dim, _LINE):
                    _prefetch(weight, ahead * dim + column)
                _prefetch(weight, ahead * dim + dim - 1)
                if kind == ROW_WISE_ADAGRAD:
                    _prefetch(state, ahead)
                elif kind == ADAGRAD:
                    for column in range(0, dim, _LINE):
                        _prefetch(state, ahead * dim + column)
                _prefetch(versions, ahead)
            payload = pairs[at] & _PAYLOAD
            if scaled:
                factor = scale[payload]
                bag = np.int64(bag_of[payload])
                for column in range(dim):
                    before = np.float32(0) if at == first else total[column]
                    total[column] = before + factor * per_bag[bag, column]
            elif at == first:
                for column in range(dim):
                    total[column] = per_bag[payload, column]
            else:
                for column in range(dim):
                    total[column] += per_bag[payload, column]
            at += 1
        row += low
        if kind == SGD:
            for column in range(dim):
                weight[row, column] -= lr * total[column]
        elif kind == ROW_WISE_ADAGRAD:
            state[row, 0] += _mean_square(total)
            deviation = np.sqrt(state[row, 0]) + eps
            for column in range(dim):
                weight[row, column] -= lr * total[column] / deviation
        else:
            for column in range(dim):
                state[row, column] += total[column] * total[column]
                deviation = np.sqrt(state[row, column]) + eps
                weight[row, column] -= lr * total[column] / deviation
        versions[row] = version


@_jit()
def update_range(
    low: int, high: int, scratch: Scratch, grads: Gradients, rows: Rows, formula: Formula
) -> None:
    """Updates rows ``low`` to ``high``."""
    n = len(scratch.pairs) - PADDING
    if n == 0:
        return
    _collect(grads, low, high, scratch.pairs, scratch.bag_of)
    pairs = _sort(scratch.pairs, scratch.spare, high - low)
    pairs[n:] = pairs[n - 1]
    _apply(pairs, scratch.bag_of, low, grads, rows, formula)


@_jit(parallel=True)
def update_ranges(
    first_row: Int64Array,
    first_pair: Int64Array,
    scratch: Scratch,
    grads: Gradients,
    rows: Rows,
    formula: Formula,
) -> None:
    """Updates the ranges that ``plan`` made, side by side."""
    for part in numba.prange(len(first_row) - 1):
        begin = first_pair[part] + part * PADDING
        end = first_pair[part + 1] + (part + 1) * PADDING
        own = Scratch(scratch.pairs[begin:end], scratch.spare[begin:end], scratch.bag_of)
        update_range(first_row[part], first_row[part + 1], own, grads, rows, formula)
