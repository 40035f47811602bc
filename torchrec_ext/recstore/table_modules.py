"""A store's tables as modules, so that a collection's ``state_dict`` holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from torchrec_ext.recstore.whole_tables import read_table, write_rows
from torchrec_ext.store import DenseTable, DynamicTable, LocalStore, Store, StoreSnapshot, TableSnapshot


class DenseRows(nn.Module):
    """A dense table: ``weight``, as in ``nn.EmbeddingBag``.

    The parameter is there if the rows are in reach, and is a view of them: it is not trained by
    autograd but by the store's optimizer. What is written to it by hand, ``LocalStore.touch`` makes known.

    Args:
        store: where the rows are; None: nowhere yet, only their shape is known.
        table: the table.
    """

    def __init__(self, store: Store | None, table: DenseTable) -> None:
        super().__init__()
        self._store, self._table = store, table
        if store is None:
            # With a gradient, which TorchRec's apply_optimizer_in_backward needs to see.
            self.weight = nn.Parameter(torch.empty(table.num_rows, table.dim, device="meta"))
        elif isinstance(store, LocalStore):
            self.weight = nn.Parameter(read_table(store, table), requires_grad=False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._store is not None:
            self._store.drain()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._store is not None and f"{prefix}weight" not in destination:
            destination[f"{prefix}weight"] = read_table(self._store, self._table)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        load_weight(
            self._store, self._table, state_dict, prefix, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Replacing the parameter, as this would, cuts it off from the store.
        for parameter in self.parameters():
            probe = parameter.new_empty(0)
            moved = fn(probe)
            kept = moved.device == parameter.device and moved.dtype == parameter.dtype
            if not kept or moved.is_shared():
                raise RuntimeError(
                    f"the rows of table {self._table.name!r} stay in their store, as {parameter.dtype} on "
                    f"{parameter.device}: move or convert the rest of the model, or use another store"
                )
        return self


def load_weight(
    store: Store | None,
    table: DenseTable,
    state_dict: Mapping[str, Any],
    prefix: str,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Loads a dense table's ``weight`` as ``nn.Module._load_from_state_dict`` loads parameters."""
    key = f"{prefix}weight"
    if strict:
        unexpected_keys += [other for other in state_dict if other.startswith(prefix) and other != key]
    if key not in state_dict:
        missing_keys += [key] if strict else []
        return
    weight = state_dict[key]
    if store is None:
        error_msgs.append(f"{key}: the collection is on the meta device and has no rows")
    elif list(weight.shape) != (expected := [table.num_rows, table.dim]):
        error_msgs.append(f"{key} must be {expected}, not {list(weight.shape)}")
    else:
        write_rows(store, table, weight.detach())


class DynamicRows(nn.Module):
    """All dynamic tables of a collection: ``<table>.keys``, ``.weight``, ``.slots.<name>`` and so on.

    Their keys, rows, optimizer state, frequencies, and the keys that wait to be admitted belong together,
    so all of them are in the ``state_dict``. Loading replaces what the tables hold.

    Args:
        store: where the rows are; None: nowhere yet.
        tables: the tables.
    """

    def __init__(self, store: Store | None, tables: Sequence[DynamicTable]) -> None:
        super().__init__()
        self._store, self._names = store, [table.name for table in tables]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._store is None or not self._names:
            return
        snapshot = self._store.snapshot(self._names)
        destination[f"{prefix}step"] = torch.tensor(snapshot.step)
        for name in self._names:
            for key, tensor in tensors_of(snapshot.tables[name]).items():
                destination[f"{prefix}{name}.{key}"] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        tensors = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        if self._names and self._store is None:
            error_msgs.append(f"{prefix}*: the collection is on the meta device and has no rows")
        elif self._names and self._store is not None:
            now = self._store.snapshot(self._names)
            loaded = {}
            absent = []
            for name in self._names:
                fields = tensors_of(now.tables[name])
                part = {key: tensors.pop(f"{prefix}{name}.{key}", None) for key in fields}
                absent += [f"{prefix}{name}.{key}" for key, tensor in part.items() if tensor is None]
                if not absent:
                    loaded[name] = with_tensors(now.tables[name], part)
            step = int(tensors.pop(f"{prefix}step", now.step))
            # A table without some of what belongs to its keys would be another one.
            if absent:
                missing_keys += absent if strict else []
            elif not (strict and tensors):
                self._store.restore(StoreSnapshot(now.clock, step, loaded))
        unexpected_keys += list(tensors) if strict else []


OF_KEYS = ("keys", "weight", "frequencies", "last_used")
OF_CANDIDATES = ("candidates", "candidate_counts")


def tensors_of(table: TableSnapshot) -> dict[str, torch.Tensor]:
    """A dynamic table's tensors by their names in a ``state_dict``."""
    tensors = {name: getattr(table, name) for name in (*OF_KEYS, *OF_CANDIDATES)}
    return {**tensors, **{f"slots.{name}": values for name, values in table.slots.items()}}


def with_tensors(table: TableSnapshot, tensors: Mapping[str, Any]) -> TableSnapshot:
    """The table with what ``tensors_of`` gives instead of its own."""
    return replace(
        table,
        **{name: tensors[name] for name in (*OF_KEYS, *OF_CANDIDATES)},
        slots={name: tensors[f"slots.{name}"] for name in table.slots},
        versions=torch.zeros_like(tensors["keys"]),
    )
