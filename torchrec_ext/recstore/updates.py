"""Handing the gradients of a trace to the store's optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrec_ext.recstore.lookups import FlatLookup, KeyedLookup, Lookup
from torchrec_ext.recstore.trace import TraceEntry
from torchrec_ext.store import Bags, DenseTable, LocalStore, Store


def apply_entries(store: Store, entries: Sequence[TraceEntry], *, lr: float, step: int) -> None:
    """Updates the rows that entries of a trace have gradients of.

    The gradients of a row are added up over all entries, before the optimizer's formula is applied once.

    Args:
        store: where the rows are.
        entries: the gradients.
        lr: the learning rate.
        step: the update's number, from 1.
    """
    flat: dict[str, list[tuple[FlatLookup, torch.Tensor]]] = {}
    keyed: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for entry in entries:
        lookup: Lookup = entry.lookup
        if isinstance(store, LocalStore) and isinstance(lookup, KeyedLookup):
            group = store.group_of(lookup.tables[0])
            # A dynamic table's rows have to be found and updated under one lock.
            if isinstance(group.tables[lookup.tables[0]], DenseTable):
                lookup = lookup.in_flat_rows(group)
        if isinstance(lookup, FlatLookup):
            flat.setdefault(lookup.group.name, []).append((lookup, entry.grad))
        elif isinstance(lookup, KeyedLookup):
            for table, keys, grads in lookup.gradients(entry.grad):
                keyed.setdefault(table, []).append((keys, grads))
    for of_group in flat.values():
        assert isinstance(store, LocalStore)
        # Asked for again: another process may have changed the optimizer, and with it the state.
        group = store.group_of(of_group[0][0].tables[0])
        store.local_update_flat(group, *_combined(of_group), step=step, lr=lr)
    if keyed:
        requests = [
            (table, torch.cat([keys for keys, _ in parts]), torch.cat([grads for _, grads in parts]))
            for table, parts in keyed.items()
        ]
        store.update_many(requests, step=step, lr=lr)


def _combined(parts: Sequence[tuple[FlatLookup, torch.Tensor]]) -> tuple[Bags, torch.Tensor]:
    """The bags and gradients of several lookups as if they were one's."""
    if len(parts) == 1:
        return parts[0][0].bags, parts[0][1]
    device = parts[0][0].bags.rows.device
    offsets, before = [torch.zeros(1, dtype=torch.int64, device=device)], 0
    for lookup, _ in parts:
        offsets.append(lookup.bags.offsets[1:] + before)
        before += len(lookup.bags.rows)
    scales = None
    if any(lookup.bags.scale is not None for lookup, _ in parts):
        scales = torch.cat(
            [
                torch.ones(len(lookup.bags.rows), device=device)
                if lookup.bags.scale is None
                else lookup.bags.scale
                for lookup, _ in parts
            ]
        )
    sizes = {lookup.bags.bag_size for lookup, _ in parts}
    bags = Bags(
        rows=torch.cat([lookup.bags.rows for lookup, _ in parts]),
        offsets=torch.cat(offsets),
        batch_size=sum(lookup.bags.num_bags for lookup, _ in parts),
        num_features=1,
        scale=scales,
        bag_size=sizes.pop() if len(sizes) == 1 else None,
    )
    grads = [grad.reshape(lookup.bags.num_bags, lookup.dim) for lookup, grad in parts]
    return bags, torch.cat(grads)
