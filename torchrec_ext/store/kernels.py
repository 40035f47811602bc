"""Lookup and update of embedding rows in flat arrays: where the time of a training step goes.

Everything here runs on any device. On the CPU, updates by the usual optimizers go to ``_numba_update``
where numba is installed (the extra ``fast``), unless the environment says ``TORCHREC_EXT_NUMBA=0``.
No gradient flows through any of these functions.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from torchrec_ext.store.bags import Bags

if TYPE_CHECKING:
    from torchrec_ext.store.optimizers import StoreOptimizer

logger = logging.getLogger(__name__)

# On a CPU, rows are updated in pieces that a core's second-level cache holds until they are written back:
# all gradients of a large batch at once would go through memory, into fresh pages.
CHUNK_BYTES = 1 << 19
_CHUNK_BYTES_OF_OTHER_DEVICES = 64 << 20

_MAX_INT32 = torch.iinfo(torch.int32).max


def batch_major(
    rows: torch.Tensor, lengths: torch.Tensor, batch_size: int, scale: torch.Tensor | None = None
) -> Bags:
    """Puts feature-major ids, as a ``KeyedJaggedTensor`` holds them, into batch-major bags.

    Args:
        rows: the row of each id, int64 ``[n]``, feature by feature, bag by bag.
        lengths: the number of ids of each bag, int32 or int64 ``[num_features * batch_size]``.
        batch_size: the number of examples. With 0 of them there are no features either.
        scale: what each row is multiplied with, float32 ``[n]``, in the order of ``rows``.

    Raises:
        ValueError: on the CPU, the lengths do not add up to ``n``.
    """
    num_features = len(lengths) // batch_size if batch_size else 0
    bag_size = _bag_size(lengths, len(rows))
    if bag_size is None:
        rows, scale, lengths = _transposed(rows, scale, lengths, num_features, batch_size)
        offsets = lengths.new_zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
    else:
        shape = (num_features, batch_size, bag_size)
        rows = rows.reshape(shape).transpose(0, 1).reshape(-1)
        scale = None if scale is None else scale.reshape(shape).transpose(0, 1).reshape(-1)
        offsets = torch.arange(len(lengths) + 1, device=rows.device).mul_(bag_size)
    return Bags(rows, offsets, batch_size, num_features, scale, bag_size)


def feature_major(bags: Bags, values: torch.Tensor) -> torch.Tensor:
    """Puts a value per id back into the order of the ids that ``batch_major`` was given.

    Args:
        bags: what ``batch_major`` returned.
        values: float32 ``[n]``, in the order of ``bags.rows``.
    """
    if bags.bag_size is not None:
        return values.reshape(bags.batch_size, bags.num_features, bags.bag_size).transpose(0, 1).reshape(-1)
    values, _, _ = _transposed(values, None, bags.offsets.diff(), bags.batch_size, bags.num_features)
    return values


def pool(weight: torch.Tensor, bags: Bags) -> torch.Tensor:
    """Adds up the rows of each bag.

    Args:
        weight: float32 ``[num_rows, dim]``.
        bags: which rows.

    Returns:
        float32 ``[batch_size, num_features * dim]``.
    """
    out = torch.nn.functional.embedding_bag(
        bags.rows,
        weight.detach(),
        bags.offsets,
        mode="sum",
        per_sample_weights=None if bags.scale is None else bags.scale.detach(),
        include_last_offset=True,
    )
    return out.view(bags.batch_size, bags.num_features * weight.shape[1])


def scale_gradient(weight: torch.Tensor, bags: Bags, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of ``bags.scale``, or of ones if there is none.

    Args:
        weight: what was pooled, not updated since, float32 ``[num_rows, dim]``.
        bags: which rows were pooled.
        grad: the gradient of ``pool``'s output, ``[batch_size, num_features * dim]``.

    Returns:
        float32 ``[n]``, in the order of ``bags.rows``; see ``feature_major``.
    """
    weight = weight.detach()
    per_bag = _per_bag(bags, grad, weight.shape[1])
    bag_of = bags.bag_of_each()
    found = weight.new_empty(len(bags.rows))
    for chunk in _chunks(len(found), _chunk_size(weight)):
        pulled = weight.index_select(0, bags.rows[chunk])
        torch.sum(pulled.mul_(per_bag.index_select(0, bag_of[chunk])), dim=1, out=found[chunk])
    return found


def aggregate(bags: Bags, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of rows from those of the bags that pooled them.

    Args:
        bags: which rows were pooled.
        grad: the gradient of ``pool``'s output, ``[batch_size, num_features * dim]``.

    Returns:
        The rows that occur, int64 ``[u]``, ascending, and the sum of each one's gradients, float32
        ``[u, dim]``.
    """
    per_bag = _per_bag(bags, grad, grad.shape[1] // max(bags.num_features, 1))
    if not len(bags.rows):
        return bags.rows, per_bag[:0]
    return next(_sums(bags, bags.rows, per_bag))


def update_(
    weight: torch.Tensor,
    slots: dict[str, torch.Tensor],
    versions: torch.Tensor,
    bags: Bags,
    grad: torch.Tensor,
    optimizer: StoreOptimizer,
    *,
    lr: float,
    step: int,
    version: int,
) -> None:
    """Applies the gradients of pooled rows to the rows, in place.

    Gradients of a row that occurs several times are added up before, in the order of the ids: the result
    is the same in every run, on any number of threads.

    Args:
        weight: float32 ``[num_rows, dim]``.
        slots: the optimizer's state by slot name, float32 ``[num_rows, 1]`` or ``[num_rows, dim]``.
        versions: int64 ``[num_rows]``; those of the rows that occur become ``version``.
        bags: which rows were pooled.
        grad: the gradient of ``pool``'s output.
        optimizer: whose formula counts.
        lr: the learning rate.
        step: the update's number, from 1.
        version: see ``versions``.

    Raises:
        IndexError: on the CPU, a row is not one of ``weight``; nothing was changed.
    """
    if not len(bags.rows):
        return
    weight = weight.detach()
    _check_rows(bags.rows, len(weight))
    per_bag = _per_bag(bags, grad, weight.shape[1])
    if _fused_update_(weight, slots, versions, bags, per_bag, optimizer, lr, version):
        return
    keys = bags.rows.int() if len(weight) <= _MAX_INT32 else bags.rows  # half the bytes to sort
    for rows, grads in _sums(bags, keys, per_bag, _chunk_size(weight)):
        _apply_chunk_(weight, slots, versions, rows, grads, optimizer, lr, step, version)


def _apply_chunk_(
    weight: torch.Tensor,
    slots: dict[str, torch.Tensor],
    versions: torch.Tensor,
    rows: torch.Tensor,
    grads: torch.Tensor,
    optimizer: StoreOptimizer,
    lr: float,
    step: int,
    version: int,
) -> None:
    # Copying rows out and back is quicker than scatter_add_, and any formula can be applied in between.
    new_weight = weight.index_select(0, rows)
    new_slots = {name: slot.index_select(0, rows) for name, slot in slots.items()}
    optimizer.apply_(new_weight, new_slots, grads, lr=lr, step=step)
    weight.index_copy_(0, rows, new_weight)
    for name, slot in slots.items():
        slot.index_copy_(0, rows, new_slots[name])
    versions.index_fill_(0, rows, version)


def _fused_update_(
    weight: torch.Tensor,
    slots: dict[str, torch.Tensor],
    versions: torch.Tensor,
    bags: Bags,
    per_bag: torch.Tensor,
    optimizer: StoreOptimizer,
    lr: float,
    version: int,
) -> bool:
    """Updates by machine code if it can; returns whether it did."""
    if weight.device.type != "cpu" or (fused := _fused_kernels()) is None:
        return False
    try:
        return bool(fused.update_(weight, slots, versions, bags, per_bag, optimizer, lr=lr, version=version))
    except OSError as error:  # before it ran: numba keeps what it compiles on disk, and that may be full
        logger.warning("an update went through torch operators: %s", error)
        return False


def _fused_kernels() -> ModuleType | None:
    if os.environ.get("TORCHREC_EXT_NUMBA") == "0":
        return None
    return _import_fused_kernels()


@functools.cache
def _import_fused_kernels() -> ModuleType | None:
    try:
        return importlib.import_module("torchrec_ext.store._numba_update")
    except ImportError as error:
        logger.debug("updates go through torch operators: %s", error)
        return None


def _sums(
    bags: Bags, keys: torch.Tensor, per_bag: torch.Tensor, size: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows that occur, ascending and ``size`` at a time, and the sums of their gradients.

    Args:
        bags: which rows were pooled; not none.
        keys: their rows, int32 or int64.
        per_bag: the bags' gradients.
        size: by default all in one go.
    """
    keys, order = torch.sort(keys, stable=True)  # stable: the order of the sums is that of the ids
    is_first = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(keys[1:], keys[:-1], out=is_first[1:])
    begins = is_first.nonzero().view(-1)
    rows = keys.index_select(0, begins).long()
    scale = None if bags.scale is None else bags.scale.detach().index_select(0, order)
    bag_of = (
        order.div_(bags.bag_size, rounding_mode="floor")
        if bags.bag_size
        else bags.bag_of_each().index_select(0, order)
    )
    bounds = torch.cat([begins, begins.new_tensor([len(keys)])])
    size = size or len(rows)
    # The host learns where the chunks lie in one transfer.
    ends = [*begins[::size].tolist(), len(keys)]
    for chunk, (begin, end) in zip(_chunks(len(rows), size), pairwise(ends), strict=True):
        grads = torch.nn.functional.embedding_bag(
            bag_of[begin:end],
            per_bag,
            bounds[chunk.start : chunk.stop + 1] - begin,
            mode="sum",
            per_sample_weights=None if scale is None else scale[begin:end],
            include_last_offset=True,
        )
        yield rows[chunk], grads


def _per_bag(bags: Bags, grad: torch.Tensor, dim: int) -> torch.Tensor:
    """A gradient per bag, contiguous: that of a plain sum is one number that is said to be many."""
    return grad.detach().reshape(bags.num_bags, dim).to(torch.float32).contiguous()


def _chunk_size(weight: torch.Tensor) -> int:
    """How many rows to update at a time."""
    nbytes = CHUNK_BYTES if weight.device.type == "cpu" else _CHUNK_BYTES_OF_OTHER_DEVICES
    return max(1, nbytes // (weight.shape[1] * weight.element_size()))


def _chunks(n: int, size: int) -> Iterator[slice]:
    for begin in range(0, n, size):
        yield slice(begin, min(begin + size, n))


def _check_rows(rows: torch.Tensor, num_rows: int) -> None:
    """On the CPU, where machine code would write to any address; elsewhere the host would have to wait."""
    if rows.device.type == "cpu":
        lowest, highest = (row.item() for row in rows.aminmax())
        if lowest < 0 or highest >= num_rows:
            raise IndexError(f"rows {lowest} to {highest} are to be updated, of {num_rows} rows")


def _bag_size(lengths: torch.Tensor, n: int) -> int | None:
    """The length that all bags have; None if they differ, or the host would have to wait for it."""
    if lengths.device.type != "cpu" or not len(lengths):
        return None
    total = lengths.sum().item()
    lowest, highest = (length.item() for length in lengths.aminmax())
    if total != n or lowest < 0:
        raise ValueError(f"the bags' lengths, {lowest} at least, add up to {total}, but there are {n} ids")
    return int(lowest) if lowest == highest else None


def _transposed(
    values: torch.Tensor, scale: torch.Tensor | None, lengths: torch.Tensor, outer: int, inner: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """``outer`` by ``inner`` bags as ``inner`` by ``outer`` bags: values, scale and lengths."""
    import fbgemm_gpu  # noqa: F401  # registers the operator; slow, and not every store needs it

    bags = torch.arange(outer * inner, dtype=torch.int32, device=lengths.device)
    lengths, values, scale = torch.ops.fbgemm.permute_1D_sparse_data(
        bags.view(outer, inner).t().reshape(-1), lengths, values, scale, len(values)
    )
    return values, scale, lengths
