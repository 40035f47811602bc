"""What a module's backward passes leave for its optimizer, and how that asks for it."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchrec_ext.recstore.lookups import KeyedLookup, Lookup, Triple
from torchrec_ext.store import StoreOptimizer
from torchrec_ext.store.bags import Bags

# Backward passes through the same tables that may wait before they are added up: so memory is bounded
# by the rows that have a gradient, as it is for a dense parameter, however many passes there are.
_MAX_ENTRIES = 16


@dataclass(frozen=True)
class TraceEntry:
    """One backward pass through one lookup.

    Attributes:
        lookup: what was looked up.
        grad: the gradient of what was pooled, ``[batch_size, num_features * dim]``.
        buffer: the memory that ``grad`` is in, if it is to be used again.
    """

    lookup: Lookup
    grad: torch.Tensor
    buffer: torch.Tensor | None = None


class Trace:
    """Gradients of looked-up rows, from backward to the optimizer's step.

    Iterating gives ``(table, ids, grads)`` triples: a table's name, ids int64 ``[n]`` with repeats, and the
    gradient of each one's row, float32 ``[n, dim]``. Inside, they are kept as the bags and the gradient of
    what was pooled.

    All backward passes since the last step add up. That more than ``accumulation_steps`` batches do is
    taken for a step that was forgotten, and warned of once. Any thread may run a backward pass.

    Attributes:
        accumulation_steps: how many batches may add up.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._entries: list[TraceEntry] = []
        self._entries_of: Counter[tuple[str, ...]] = Counter()
        self._spare: list[torch.Tensor] = []
        self._lock = threading.RLock()
        self._batch = 0
        self._batches: set[int] = set()
        self._warned = False
        self.accumulation_steps = 1

    def __iter__(self) -> Iterator[Triple]:
        for entry in self._entries:
            yield from entry.lookup.triples(entry.grad)

    def __len__(self) -> int:
        return sum(len(entry.lookup.tables) for entry in self._entries)

    def next_batch(self) -> int:
        """The number of a new forward pass."""
        self._batch += 1
        return self._batch

    def record(self, lookup: Lookup, grad: torch.Tensor, batch: int) -> None:
        """Takes a copy of the gradient of a lookup of batch number ``batch``."""
        with self._lock:
            self._note(batch)
            # Not the gradient itself: hooks and other tensors may hold it too, and change it.
            kept, buffer = self._copy(grad)
            self._entries.append(TraceEntry(lookup, kept, buffer))
            self._entries_of[lookup.tables] += 1
            if self._entries_of[lookup.tables] > _MAX_ENTRIES:
                self._replace_entries(self._added_up())

    @contextmanager
    def applied(self) -> Iterator[list[TraceEntry]]:
        """Gives the entries, and forgets them when the block ends without an error."""
        with self._lock:
            yield self._entries
            self.clear()

    def clear(self) -> None:
        """Forgets all gradients."""
        with self._lock:
            self._replace_entries([])
            self._batches.clear()

    def _note(self, batch: int) -> None:
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

    def _copy(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy, and the memory it is in: some used before, as fresh pages cost more than the copy."""
        fits = (
            number
            for number, buffer in enumerate(self._spare)
            if buffer.numel() >= grad.numel() and (buffer.dtype, buffer.device) == (grad.dtype, grad.device)
        )
        found = next(fits, None)
        if found is None:
            self._spare.clear()  # all too small by now
            buffer = torch.empty(grad.numel(), dtype=grad.dtype, device=grad.device)
        else:
            buffer = self._spare.pop(found)
        return buffer[: grad.numel()].view(grad.shape).copy_(grad), buffer

    def _replace_entries(self, entries: list[TraceEntry]) -> None:
        self._spare += [entry.buffer for entry in self._entries if entry.buffer is not None]
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
            bags = Bags.of_one(torch.arange(len(keys), device=keys.device))
            lookup = KeyedLookup(bags, grads.shape[1], (table,), (keys,))
            entries.append(TraceEntry(lookup, grads))
        return entries


class TracedModule(ABC):
    """A module whose backward pass leaves a trace of gradients, which an optimizer consumes.

    Attributes:
        lr: the learning rate for optimizers that bring none.
    """

    lr: float
    _trace: Trace

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that no optimizer has consumed."""
        return len(self._trace) > 0

    def forget_gradients(self) -> None:
        """Clears the trace."""
        self._trace.clear()

    def expect_gradients_of(self, batches: int) -> None:
        """Says how many batches are meant to add up before the trace is consumed."""
        self._trace.accumulation_steps = batches

    @abstractmethod
    def use_optimizer(self, optimizer: StoreOptimizer) -> None:
        """Has the tables keep state for an optimizer; state of the same kind stays."""

    @abstractmethod
    def apply_trace(self, *, lr: float, step: int) -> None:
        """Updates the rows with the trace's gradients, and clears it.

        Args:
            lr: the learning rate.
            step: the update's number, from 1.
        """

    @abstractmethod
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """State of dense tables that is saved with the optimizer, by ``<table>.<slot>``.

        That of dynamic tables is saved with the module, because it belongs to their keys.
        """

    @abstractmethod
    def load_optimizer_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes ``optimizer_state``'s tensors back.

        Raises:
            ValueError: some are missing, or of another shape.
        """


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
