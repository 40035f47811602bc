"""Where rows live, and their optimizer state with them: in this process, on this host, on disk, elsewhere."""

from __future__ import annotations

from torchrec_ext.errors import StoreError
from torchrec_ext.store.bags import Bags
from torchrec_ext.store.local import LocalStore
from torchrec_ext.store.optimizers import SGD, AdaGrad, Adam, RowWiseAdaGrad, StoreOptimizer
from torchrec_ext.store.store import Rows, Store, StoreSnapshot, TableSnapshot
from torchrec_ext.store.stores import FileStore, MemoryStore, SharedMemoryStore
from torchrec_ext.store.tables import Constant, CounterFilter, DenseTable, DynamicTable, Table, Uniform

__all__ = [
    "SGD",
    "AdaGrad",
    "Adam",
    "Bags",
    "Constant",
    "CounterFilter",
    "DenseTable",
    "DynamicTable",
    "FileStore",
    "LocalStore",
    "MemoryStore",
    "RowWiseAdaGrad",
    "Rows",
    "SharedMemoryStore",
    "Store",
    "StoreError",
    "StoreOptimizer",
    "StoreSnapshot",
    "Table",
    "TableSnapshot",
    "Uniform",
]
