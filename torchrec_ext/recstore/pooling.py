"""Pooling the rows of a batch, with a backward pass that records their gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from torchrec_ext.recstore.batch import GroupBatch
from torchrec_ext.recstore.fused_ids import concatenate
from torchrec_ext.recstore.lookups import FlatLookup, KeyedLookup, Lookup, first_key_row
from torchrec_ext.recstore.reads import GroupRows
from torchrec_ext.store import Bags, LocalStore, kernels

Record = Callable[[Lookup, torch.Tensor], None]
"""Takes a lookup and the gradient of what it pooled."""


@dataclass(frozen=True)
class Pooling:
    """A lookup that is ready to run.

    Attributes:
        lookup: what is looked up.
        pool: does it, ``[batch_size, num_features * dim]``.
        scale: the batch's scale, if it requires a gradient.
        buffer: the rows that the bags are of, which that gradient needs.
    """

    lookup: Lookup
    pool: Callable[[], torch.Tensor]
    scale: torch.Tensor | None = None
    buffer: torch.Tensor | None = None

    def __call__(self, anchor: torch.Tensor, record: Record) -> torch.Tensor:
        """Pools, and has the gradient recorded when it arrives.

        Args:
            anchor: any tensor that requires a gradient, which it will not get.
            record: takes the gradient.
        """
        if not torch.is_grad_enabled():
            return self.pool()
        return _Pooled.apply(anchor, self.scale, self, record)


def pool_flat(store: LocalStore, batch: GroupBatch) -> Pooling:
    """A lookup in dense tables of a local store, where the rows lie."""
    tables = batch.group.tables
    group = store.group_of(tables[0])
    bags = _bags(concatenate(batch, {table: first_key_row(group, table) for table in tables}), batch)
    lookup = FlatLookup(bags, batch.group.dim, tables, group)
    return Pooling(lookup, lambda: store.local_lookup_flat(group, bags))


def pool_rows(rows: GroupRows, batch: GroupBatch) -> Pooling:
    """A lookup in rows that were read."""
    bags = _bags(rows.ids.positions, batch)
    lookup = KeyedLookup(bags, batch.group.dim, rows.ids.tables, rows.ids.keys, rows.has_row)
    scale = batch.scale if wants_scale_gradient(batch) else None
    return Pooling(lookup, lambda: kernels.pool(rows.buffer, bags), scale, rows.buffer)


def wants_scale_gradient(batch: GroupBatch) -> bool:
    """Whether the weights of a batch get a gradient: then its rows must be there in backward."""
    return batch.scale is not None and batch.scale.requires_grad and torch.is_grad_enabled()


def _bags(rows: torch.Tensor, batch: GroupBatch) -> Bags:
    scale = None if batch.scale is None else batch.scale.detach()
    bags = kernels.batch_major(rows, batch.lengths, batch.batch_size, scale)
    return bags if batch.batch_size else replace(bags, num_features=len(batch.group.features))


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, scale: torch.Tensor | None, pooling: Pooling, record: Record
    ) -> torch.Tensor:
        ctx.pooling, ctx.record = pooling, record
        return pooling.pool()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pooling: Pooling = ctx.pooling
        scale_grad = None
        if ctx.needs_input_grad[1]:
            assert pooling.buffer is not None
            bags = pooling.lookup.bags
            scale_grad = kernels.feature_major(bags, kernels.scale_gradient(pooling.buffer, bags, grad))
        ctx.record(pooling.lookup, grad)
        return None, scale_grad, None, None
