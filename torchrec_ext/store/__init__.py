"""Where rows live, and their optimizer state with them: in this process, on this host, on disk, elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_ext._lazy import lazy_attributes
from torchrec_ext.errors import StoreError, TableFullError
from torchrec_ext.store.bags import Bags
from torchrec_ext.store.local import LocalStore
from torchrec_ext.store.mismatches import MissingKeys, RestoreReport
from torchrec_ext.store.optimizers import SGD, AdaGrad, Adam, RowWiseAdaGrad, StoreOptimizer
from torchrec_ext.store.snapshots import StoreSnapshot, TableSnapshot
from torchrec_ext.store.store import Rows, Store
from torchrec_ext.store.stores import FileStore, MemoryStore, SharedMemoryStore
from torchrec_ext.store.tables import (
    ByFunction,
    Constant,
    CounterFilter,
    DenseTable,
    DynamicTable,
    Table,
    Uniform,
)

if TYPE_CHECKING:
    from torchrec_ext.store.flight.remote import RemoteStore
    from torchrec_ext.store.flight.server import StoreServer
    from torchrec_ext.store.urls import open_store

__all__ = [
    "SGD",
    "AdaGrad",
    "Adam",
    "Bags",
    "ByFunction",
    "Constant",
    "CounterFilter",
    "DenseTable",
    "DynamicTable",
    "FileStore",
    "LocalStore",
    "MemoryStore",
    "MissingKeys",
    "RemoteStore",
    "RestoreReport",
    "RowWiseAdaGrad",
    "Rows",
    "SharedMemoryStore",
    "Store",
    "StoreError",
    "StoreOptimizer",
    "StoreServer",
    "StoreSnapshot",
    "Table",
    "TableFullError",
    "TableSnapshot",
    "Uniform",
    "open_store",
]

if not TYPE_CHECKING:  # a type checker reads the imports above; the others need Arrow Flight
    __getattr__ = lazy_attributes(
        __name__,
        {
            "RemoteStore": "torchrec_ext.store.flight.remote",
            "StoreServer": "torchrec_ext.store.flight.server",
            "open_store": "torchrec_ext.store.urls",
        },
    )
