"""The update of embedding rows as machine code: an optional accelerator of ``kernels`` on CPUs.

Importing it needs numba. The ids are sorted by row, and each row is read and written once: the gradients
of its bags are added up in the order of the ids, the optimizer's formula is applied, the version is set.
No array of aggregated gradients is ever made, which is what the time would go to.

Threads share the work by ranges of rows, so that no two write the same row and the result does not depend
on how many there are. They are those of numba's OpenMP layer. With torch imported first, which it is here,
that layer's symbols bind to the OpenMP runtime that torch has loaded, and so the threads are torch's own;
a pool beside them would compete with torch's workers, which spin for milliseconds after every operator.

Nothing here checks a row, an offset or a shape: ``kernels`` does.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from torchrec_ext.store.bags import Bags
from torchrec_ext.store.optimizers import SGD, AdaGrad, RowWiseAdaGrad, StoreOptimizer

logger = logging.getLogger(__name__)

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Function = TypeVar("Function", bound=Callable[..., Any])

# The formulas that ``_apply`` knows. A subclass may have another one.
_SGD, _ROW_WISE_ADAGRAD, _ADAGRAD = range(3)
_FORMULAS: dict[type[StoreOptimizer], int] = {
    SGD: _SGD,
    RowWiseAdaGrad: _ROW_WISE_ADAGRAD,
    AdaGrad: _ADAGRAD,
}

# A pair is a row, counted from the first of a range, in the upper half and what identifies an id in the
# lower: the id's bag or, if ids have a scale, its position.
_PAYLOAD = (1 << 32) - 1
_DIGIT_BITS = 11  # of a radix sort's digit: 2,048 counters of four bytes stay in the first-level cache
_LINE = 16  # float32 values in a cache line
# How many ids ahead memory is asked for: rows come from memory, gradients from a nearer cache.
_ROWS_AHEAD = 24
_GRADS_AHEAD = 16
_IDS_PER_PART = 8192  # below that, starting another thread costs more than it saves
_KEPT_SCRATCH = 4 << 20  # int64 values, 32 MiB: larger blocks come from fresh pages in any case


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
def _plan(rows: Int64Array, num_rows: int, first_row: Int64Array, first_pair: Int64Array) -> None:
    """Cuts the rows into ranges with about as many ids each; fills in the ranges' bounds and sizes."""
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
def _collect(
    rows: Int64Array,
    offsets: Int64Array,
    low: int,
    high: int,
    positions: bool,
    pairs: Int64Array,
    bag_of: Int32Array,
) -> None:
    """Fills ``pairs`` with those of rows ``low`` to ``high``, in the order of the ids."""
    bag = 0
    found = 0
    for position in range(len(rows)):
        while bag + 2 < len(offsets) and offsets[bag + 1] <= position:
            bag += 1
        row = rows[position]
        if low <= row < high:
            pairs[found] = (row - low) << 32 | (position if positions else bag)
            found += 1
            if positions:
                bag_of[position] = bag


@_jit()
def _sort(pairs: Int64Array, spare: Int64Array, num_rows: int) -> Int64Array:
    """Sorts pairs by row, stably, least significant digit first; the result is in one of the two arrays."""
    bits = 0
    while ((num_rows - 1) >> bits) > 0:
        bits += 1
    passes = (bits + _DIGIT_BITS - 1) // _DIGIT_BITS
    if passes == 0:
        return pairs
    width = (bits + passes - 1) // passes
    mask = (1 << width) - 1
    place = np.zeros((passes, 1 << width), np.int32)
    for pair in pairs:
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
        for pair in pairs:
            value = (pair >> shift) & mask
            spare[place[digit, value]] = pair
            place[digit, value] += 1
        pairs, spare = spare, pairs
    return pairs


@_jit(fastmath={"reassoc", "contract"})  # else the sum could not be split over a vector's lanes
def _mean_square(values: FloatArray) -> Any:
    total = np.float32(0)
    for column in range(len(values)):  # by index: numba's iterators are not vectorised
        total += values[column] * values[column]
    return total / np.float32(len(values))


@_jit(fastmath={"contract"})  # fused multiply-add, as torch's own operators do
def _apply(
    pairs: Int64Array,
    low: int,
    weight: FloatArray,
    state: FloatArray,
    versions: Int64Array,
    grads: FloatArray,
    scale: FloatArray,
    bag_of: Int32Array,
    formula: int,
    lr: Any,
    eps: Any,
    version: int,
) -> None:
    """Updates the rows of sorted pairs."""
    dim = weight.shape[1]
    columns = state.shape[1]
    scaled = len(scale) > 0
    total = np.empty(dim, np.float32)
    at = 0
    while at < len(pairs):
        row = pairs[at] >> 32
        for column in range(dim):
            total[column] = 0
        while at < len(pairs) and pairs[at] >> 32 == row:
            if at + _GRADS_AHEAD < len(pairs):
                ahead = pairs[at + _GRADS_AHEAD] & _PAYLOAD
                if scaled:
                    ahead = np.int64(bag_of[ahead])
                for column in range(0, dim, _LINE):
                    _prefetch(grads, ahead * dim + column)
            if at + _ROWS_AHEAD < len(pairs):
                ahead = pairs[at + _ROWS_AHEAD] >> 32
                if ahead != pairs[at + _ROWS_AHEAD - 1] >> 32:
                    ahead += low
                    for column in range(0, dim, _LINE):
                        _prefetch(weight, ahead * dim + column)
                    for column in range(0, columns, _LINE):
                        _prefetch(state, ahead * columns + column)
                    _prefetch(versions, ahead)
            payload = pairs[at] & _PAYLOAD
            if scaled:
                bag = np.int64(bag_of[payload])
                factor = scale[payload]
                for column in range(dim):
                    total[column] += factor * grads[bag, column]
            else:
                for column in range(dim):
                    total[column] += grads[payload, column]
            at += 1
        row += low
        if formula == _SGD:
            for column in range(dim):
                weight[row, column] -= lr * total[column]
        elif formula == _ROW_WISE_ADAGRAD:
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
def _update_part(
    low: int,
    high: int,
    pairs: Int64Array,
    spare: Int64Array,
    bag_of: Int32Array,
    weight: FloatArray,
    state: FloatArray,
    versions: Int64Array,
    rows: Int64Array,
    offsets: Int64Array,
    scale: FloatArray,
    grads: FloatArray,
    formula: int,
    lr: Any,
    eps: Any,
    version: int,
) -> None:
    """Updates rows ``low`` to ``high``."""
    _collect(rows, offsets, low, high, len(scale) > 0, pairs, bag_of)
    pairs = _sort(pairs, spare, high - low)
    _apply(pairs, low, weight, state, versions, grads, scale, bag_of, formula, lr, eps, version)


@_jit(parallel=True)
def _update_parts(
    first_row: Int64Array,
    first_pair: Int64Array,
    pairs: Int64Array,
    spare: Int64Array,
    bag_of: Int32Array,
    weight: FloatArray,
    state: FloatArray,
    versions: Int64Array,
    rows: Int64Array,
    offsets: Int64Array,
    scale: FloatArray,
    grads: FloatArray,
    formula: int,
    lr: Any,
    eps: Any,
    version: int,
) -> None:
    """Updates the rows of each range, side by side."""
    for part in numba.prange(len(first_row) - 1):
        begin, end = first_pair[part], first_pair[part + 1]
        _update_part(
            first_row[part],
            first_row[part + 1],
            pairs[begin:end],
            spare[begin:end],
            bag_of,
            weight,
            state,
            versions,
            rows,
            offsets,
            scale,
            grads,
            formula,
            lr,
            eps,
            version,
        )


class _Scratch(threading.local):
    """Memory that is used again by the thread's next update: fresh pages are what would cost most."""

    def __init__(self) -> None:
        self._kept = np.empty(0, np.int64)

    def take(self, size: int) -> Int64Array:
        """An int64 array with any content; the next call may give it away again."""
        if size > _KEPT_SCRATCH:
            return np.empty(size, np.int64)
        if size > len(self._kept):
            self._kept = np.empty(min(size + size // 4, _KEPT_SCRATCH), np.int64)
        return self._kept[:size]


_scratch = _Scratch()


def update_(
    weight: torch.Tensor,
    slots: Mapping[str, torch.Tensor],
    versions: torch.Tensor,
    bags: Bags,
    grads: torch.Tensor,
    optimizer: StoreOptimizer,
    *,
    lr: float,
    version: int,
) -> bool:
    """Applies the gradients of pooled rows to the rows, in place, if it can.

    Args:
        weight: on the CPU, float32 ``[num_rows, dim]``.
        slots: the optimizer's state by slot name.
        versions: int64 ``[num_rows]``.
        bags: which rows were pooled, all of them below ``num_rows``.
        grads: contiguous, float32 ``[bags.num_bags, dim]``.
        optimizer: whose formula counts.
        lr: the learning rate.
        version: what the versions of the rows become.

    Returns:
        Whether it was done; else nothing was changed.
    """
    formula = _FORMULAS.get(type(optimizer))
    if formula is None or not _is_fit(weight, slots, versions, bags):
        return False
    state = next(iter(slots.values()), weight[:0, :0])
    n, num_rows = len(bags.rows), len(weight)
    scratch = _scratch.take(2 * n + (0 if bags.scale is None else (n + 1) // 2))
    pairs, spare, bag_of = scratch[:n], scratch[n : 2 * n], scratch[2 * n :].view(np.int32)
    rows = bags.rows.numpy()
    arguments = (
        pairs,
        spare,
        bag_of,
        weight.numpy(),
        state.detach().numpy(),
        versions.numpy(),
        rows,
        bags.offsets.numpy(),
        np.empty(0, np.float32) if bags.scale is None else bags.scale.detach().numpy(),
        grads.detach().numpy(),
        formula,
        np.float32(lr),
        np.float32(getattr(optimizer, "eps", 0)),
        version,
    )
    parts = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, n // _IDS_PER_PART)
    if parts <= 1 or not _has_safe_threads():
        _update_part(0, num_rows, *arguments)
        return True
    first_row, first_pair = np.empty((2, parts + 1), np.int64)
    _plan(rows, num_rows, first_row, first_pair)
    before = numba.get_num_threads()
    numba.set_num_threads(parts)  # of this thread's loops: OpenMP would restart a team of another size
    try:
        _update_parts(first_row, first_pair, *arguments)
    finally:
        numba.set_num_threads(before)
    return True


def _is_fit(
    weight: torch.Tensor, slots: Mapping[str, torch.Tensor], versions: torch.Tensor, bags: Bags
) -> bool:
    """Whether machine code may run on these: it knows two types, and takes shapes at their word."""
    floats = [weight, *slots.values(), *([] if bags.scale is None else [bags.scale])]
    integers = [versions, bags.rows, bags.offsets]
    return (
        all(one.is_contiguous() for one in floats + integers)
        and all(one.dtype == torch.float32 for one in floats)
        and all(one.dtype == torch.int64 for one in integers)
        and all(len(one) == len(weight) for one in (versions, *slots.values()))
        and max(len(weight), len(bags.rows), bags.num_bags) < 1 << 31
    )


@numba.njit(parallel=True)
def _start_threads() -> int:
    total = 0
    for one in numba.prange(1):
        total += one
    return total


@functools.cache
def _has_safe_threads() -> bool:
    """Whether several Python threads may run parallel loops at the same time.

    Numba ends the process if they do with its fallback, the ``workqueue`` layer. Which layer it is, is
    known once it has started.
    """
    _start_threads()
    layer = numba.threading_layer()
    if layer == "workqueue":
        logger.warning("updates run on one thread: numba found neither OpenMP nor TBB on this machine")
    return bool(layer != "workqueue")
