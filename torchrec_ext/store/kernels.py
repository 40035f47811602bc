"""Lookup and update of embedding rows in flat arrays: where the time of a training step goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchrec_ext.store.bags import Bags

if TYPE_CHECKING:
    from torchrec_ext.store.optimizers import StoreOptimizer


def batch_major(
    rows: torch.Tensor, lengths: torch.Tensor, batch_size: int, scale: torch.Tensor | None = None
) -> Bags:
    """Puts feature-major ids, as a ``KeyedJaggedTensor`` holds them, into batch-major bags.

    Args:
        rows: the row of each id, int64 ``[n]``, feature by feature, bag by bag.
        lengths: the number of ids of each bag, int32 or int64 ``[num_features * batch_size]``.
        batch_size: the number of examples.
        scale: what each row is multiplied with, float32 ``[n]``, in the order of ``rows``.
    """
    num_features = len(lengths) // batch_size if batch_size else 0
    order = torch.arange(len(rows), device=rows.device)
    per_bag = torch.split(order, lengths.tolist())
    bags = [per_bag[f * batch_size + b] for b in range(batch_size) for f in range(num_features)]
    order = torch.cat(bags) if bags else order
    offsets = torch.zeros(len(bags) + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(lengths.view(num_features, batch_size).t().reshape(-1), 0, out=offsets[1:])
    return Bags(rows[order], offsets, batch_size, num_features, None if scale is None else scale[order])


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
        weight,
        bags.offsets,
        mode="sum",
        per_sample_weights=bags.scale,
        include_last_offset=True,
    )
    return out.view(bags.batch_size, bags.num_features * weight.shape[1])


def aggregate(bags: Bags, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of rows from those of the bags that pooled them.

    Args:
        bags: which rows were pooled.
        grad: the gradient of ``pool``'s output, ``[batch_size, num_features * dim]``.

    Returns:
        The rows that occur, int64 ``[u]``, ascending, and the sum of each one's gradients, float32
        ``[u, dim]``.
    """
    rows, inverse = torch.unique(bags.rows, return_inverse=True)
    lengths = bags.offsets.diff()
    bag_of = torch.repeat_interleave(torch.arange(bags.num_bags, device=lengths.device), lengths)
    per_id = grad.reshape(bags.num_bags, -1)[bag_of]
    if bags.scale is not None:
        per_id = per_id * bags.scale.unsqueeze(1)
    return rows, per_id.new_zeros(len(rows), per_id.shape[1]).index_add_(0, inverse, per_id)


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
    """
    apply_(weight, slots, versions, *aggregate(bags, grad), optimizer, lr=lr, step=step, version=version)


def apply_(
    weight: torch.Tensor,
    slots: dict[str, torch.Tensor],
    versions: torch.Tensor,
    rows: torch.Tensor,
    grads: torch.Tensor,
    optimizer: StoreOptimizer,
    *,
    lr: float,
    step: int,
    version: int,
) -> None:
    """Applies one gradient per row, in place; see ``update_``.

    Args:
        rows: int64 ``[u]``, no repeats.
        grads: float32 ``[u, dim]``.
    """
    new_weight = weight.index_select(0, rows)
    new_slots = {name: slot.index_select(0, rows) for name, slot in slots.items()}
    optimizer.apply_(new_weight, new_slots, grads, lr=lr, step=step)
    weight.index_copy_(0, rows, new_weight)
    for name, slot in slots.items():
        slot.index_copy_(0, rows, new_slots[name])
    versions.index_fill_(0, rows, version)
