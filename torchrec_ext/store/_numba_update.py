"""Updates by machine code: an optional accelerator of ``kernels`` on CPUs. Importing it needs numba.

Threads share the work by ranges of rows, so that no two write the same row and the result does not depend
on how many there are. They are those of numba's OpenMP layer. With torch imported first, as it is here,
that layer's symbols bind to the OpenMP runtime that torch has loaded, and so the threads are torch's own; a
pool beside them would compete with torch's workers, which spin for milliseconds after every operator.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping

import torch  # before numba: see above

from torchrec_ext.store.bags import Bags
from torchrec_ext.store.optimizers import SGD, AdaGrad, RowWiseAdaGrad, StoreOptimizer

# isort: split
import numba
import numpy as np

from torchrec_ext.store import _numba_kernels as machine_code

logger = logging.getLogger(__name__)

# By exact type: a subclass may have another formula.
_KINDS: dict[type[StoreOptimizer], int] = {
    SGD: machine_code.SGD,
    RowWiseAdaGrad: machine_code.ROW_WISE_ADAGRAD,
    AdaGrad: machine_code.ADAGRAD,
}
_IDS_PER_THREAD = 8192  # below that, starting another thread costs more than it saves
_KEPT_SCRATCH = 4 << 20  # int64 values, 32 MiB: larger blocks come from fresh pages in any case


def update_(
    weight: torch.Tensor,
    slots: Mapping[str, torch.Tensor],
    versions: torch.Tensor,
    bags: Bags,
    per_bag: torch.Tensor,
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
        per_bag: the bags' gradients, contiguous, float32 ``[bags.num_bags, dim]``.
        optimizer: whose formula counts.
        lr: the learning rate.
        version: what the versions of the rows become.

    Returns:
        Whether it was done; else nothing was changed.
    """
    kind = _KINDS.get(type(optimizer))
    if kind is None or not _fits(weight, slots, versions, bags, optimizer):
        return False
    n = len(bags.rows)
    state = next(iter(slots.values()), weight[:0, :0])
    rows = machine_code.Rows(weight.numpy(), state.numpy(), versions.numpy())
    grads = machine_code.Gradients(
        bags.rows.numpy(),
        bags.offsets.numpy(),
        np.empty(0, np.float32) if bags.scale is None else bags.scale.detach().numpy(),
        per_bag.numpy(),
    )
    eps = getattr(optimizer, "eps", 0.0)
    formula = machine_code.Formula(kind, np.float32(lr), np.float32(eps), version)
    threads = _num_threads(n)
    size = n + threads * machine_code.PADDING
    block = _scratch.take(2 * size + (len(grads.scale) + 1) // 2)
    scratch = machine_code.Scratch(block[:size], block[size : 2 * size], block[2 * size :].view(np.int32))
    if threads == 1:
        machine_code.update_range(0, len(weight), scratch, grads, rows, formula)
        return True
    first_row, first_pair = np.empty((2, threads + 1), np.int64)
    machine_code.plan(grads.rows, len(weight), first_row, first_pair)
    before = numba.get_num_threads()
    numba.set_num_threads(threads)  # of this Python thread: OpenMP would restart a team of another size
    try:
        machine_code.update_ranges(first_row, first_pair, scratch, grads, rows, formula)
    finally:
        numba.set_num_threads(before)
    return True


def _fits(
    weight: torch.Tensor,
    slots: Mapping[str, torch.Tensor],
    versions: torch.Tensor,
    bags: Bags,
    optimizer: StoreOptimizer,
) -> bool:
    """Whether machine code may run on these: it knows two types, and takes shapes at their word."""
    num_rows, dim = weight.shape
    floats = [weight, *slots.values(), *([] if bags.scale is None else [bags.scale])]
    integers = [versions, bags.rows, bags.offsets]
    expected = {slot.name: (num_rows, slot.columns(dim)) for slot in optimizer.slots}
    return (
        all(one.is_contiguous() for one in floats + integers)
        and all(one.dtype == torch.float32 for one in floats)
        and all(one.dtype == torch.int64 for one in integers)
        and {name: tuple(slot.shape) for name, slot in slots.items()} == expected
        and len(versions) == num_rows
        and max(num_rows, len(bags.rows), bags.num_bags) < 1 << 31
    )


class _Scratch(threading.local):
    """Memory that is used again by the thread's next update: fresh pages are what would cost most."""

    def __init__(self) -> None:
        self._kept = np.empty(0, np.int64)

    def take(self, size: int) -> machine_code.Int64Array:
        """An int64 array with any content; the next call may give it away again."""
        if size > _KEPT_SCRATCH:
            return np.empty(size, np.int64)
        if size > len(self._kept):
            self._kept = np.empty(min(size + size // 4, _KEPT_SCRATCH), np.int64)
        return self._kept[:size]


_scratch = _Scratch()
_starting = threading.Lock()


@numba.njit(parallel=True)
def _start_threads() -> int:
    total = 0
    for one in numba.prange(1):
        total += one
    return total


def _num_threads(n: int) -> int:
    """How many are worth it for ``n`` ids."""
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS, n // _IDS_PER_THREAD)
    return threads if threads > 1 and _has_safe_threads() else 1


@functools.cache
def _has_safe_threads() -> bool:
    """Whether several Python threads may run parallel loops at the same time.

    Numba ends the process if they do with its fallback, the ``workqueue`` layer. Which layer it is, is
    known once it has started.
    """
    with _starting:
        try:
            _start_threads()
        except ValueError as error:  # the one that the user asked for is not there
            logger.warning("updates run on one thread: %s", error)
            return False
        if numba.threading_layer() == "workqueue":
            logger.warning("updates run on one thread: numba uses neither OpenMP nor TBB")
            return False
        return True
