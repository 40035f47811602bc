"""What a module's backward passes leave for its optimizer."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchrec_ext.recstore.gradient import SpareBuffers, is_sole_reference
from torchrec_ext.recstore.lookups import KeyedLookup, Lookup, Triple, one_each

# Backward passes through the same tables that may wait before they are added up: so memory is bounded
# by the rows that have a gradient, as it is for a dense parameter, however many passes there are.
_MAX_ENTRIES = 16


@dataclass(frozen=True)
class TraceEntry:
    """One backward pass through one lookup.

    Attributes:
        lookup: what was looked up.
        grad: the gradient of what was pooled, ``[batch_size, num_features * dim]``.
        grad_version: torch's count of changes to ``grad``.
        buffer: the spare buffer that ``grad`` is in, if any.
    """

    lookup: Lookup
    grad: torch.Tensor
    grad_version: int
    buffer: torch.Tensor | None = None

    def check(self) -> None:
        """Checks that nobody changed the gradient.

        Raises:
            RuntimeError: somebody did.
        """
        if self.grad._version != self.grad_version:
            raise RuntimeError(
                f"the gradient of tables {list(self.lookup.tables)} was changed in place between its "
                "backward pass and the optimizer's step; change a copy"
            )


class Trace:
    """Gradients of looked-up rows, from backward to the optimizer's step.

    Iterating gives ``(table, ids, grads)`` triples: a table's name, ids int64 ``[n]`` with repeats, and the
    gradient of each one's row, float32 ``[n, dim]``. Inside, they are kept as the bags and the gradient of
    what was pooled.

    All backward passes since the last step add up. That more than ``accumulation_steps`` batches do is
    taken for a step that was forgotten, and warned of once.

    Attributes:
        accumulation_steps: how many batches may add up.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._entries: list[TraceEntry] = []
        self._entries_of: Counter[tuple[str, ...]] = Counter()
        self._spare = SpareBuffers()
        self._batch = 0
        self._batches: set[int] = set()
        self._warned = False
        self.accumulation_steps = 1

    def __iter__(self) -> Iterator[Triple]:
        for entry in self._entries:
            entry.check()
            yield from entry.lookup.triples(entry.grad)

    def __len__(self) -> int:
        return sum(len(entry.lookup.tables) for entry in self._entries)

    def next_batch(self) -> int:
        """The number of a new forward pass."""
        self._batch += 1
        return self._batch

    def record(self, lookup: Lookup, grad: torch.Tensor, batch: int) -> None:
        """Takes the gradient of a lookup of batch number ``batch``."""
        if not self._warned:
            self._batches.add(batch)
            if len(self._batches) > self.accumulation_steps:
                self._warned = True
                warnings.warn(
                    f"{self._owner}: the gradients of {len(self._batches)} batches wait for one optimizer "
                    "step, which will add them up. If a step was forgotten or skipped, call the Sparse "
                    "optimizer's step() or zero_grad() after each batch; if they are meant to add up, give "
                    "the optimizer accumulation_steps=<batches per step>.",
                    stacklevel=2,
                )
        buffer = None
        if not is_sole_reference(grad):
            grad, buffer = self._spare.copy(grad)
        self._entries.append(TraceEntry(lookup, grad, grad._version, buffer))
        self._entries_of[lookup.tables] += 1
        if self._entries_of[lookup.tables] > _MAX_ENTRIES:
            self._replace_entries(self._added_up())

    def take(self) -> list[TraceEntry]:
        """The entries, which are not in the trace any more; good until the next ``record``."""
        entries = self._entries
        self.clear()
        for entry in entries:
            entry.check()
        return entries

    def clear(self) -> None:
        """Forgets all gradients."""
        self._replace_entries([])
        self._batches.clear()

    def _replace_entries(self, entries: list[TraceEntry]) -> None:
        for entry in self._entries:
            if entry.buffer is not None:
                self._spare.give_back(entry.buffer)
        self._entries = entries
        self._entries_of.clear()

    def _added_up(self) -> list[TraceEntry]:
        ids_of: dict[str, list[torch.Tensor]] = {}
        grads_of: dict[str, list[torch.Tensor]] = {}
        for table, ids, grads in self:
            ids_of.setdefault(table, []).append(ids)
            grads_of.setdefault(table, []).append(grads)
        entries = []
        for table in list(ids_of):
            keys, grads = sum_by_id(torch.cat(ids_of.pop(table)), torch.cat(grads_of.pop(table)))
            bags = one_each(torch.arange(len(keys), device=keys.device))
            lookup = KeyedLookup(bags, grads.shape[1], (table,), (keys,))
            entries.append(TraceEntry(lookup, grads, grads._version))
        return entries


def sum_by_id(ids: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds up the gradients of each id.

    Args:
        ids: int64 ``[n]``, with repeats.
        grads: ``[n, dim]``.

    Returns:
        The ids, ascending, int64 ``[u]``, and their gradients, ``[u, dim]``.
    """
    unique, inverse = torch.unique(ids, return_inverse=True)
    return unique, grads.new_zeros(len(unique), grads.shape[1]).index_add_(0, inverse, grads)
