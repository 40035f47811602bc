"""``DistTensor``: a matrix whose rows are a store's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchrec_ext.recstore.whole_tables import create_tables
from torchrec_ext.store import SGD, ByFunction, Constant, DenseTable, MemoryStore, Store
from torchrec_ext.store.tables import Initializer

InitFunc = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""From a shape and a dtype to the initial values, as in DGL."""


class DistTensor:
    """Rows of a store, read and written by number: ``t[ids]``, ``t[ids] = rows``.

    Whoever opens the same store under the same name has the same rows.

    Args:
        shape: ``(num_rows, dim)``.
        dtype: float32.
        name: the table's name in the store.
        init_func: gives the initial values when the rows are made; None: ``initializer``'s.
        store: where the rows live, by default a new ``MemoryStore``.
        initializer: the store's way to the initial values, by default zeros.

    Raises:
        ValueError: the name is empty, the shape is not a matrix's, the dtype is another, or the store
            has another table of this name.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        name: str = "",
        init_func: InitFunc | None = None,
        store: Store | None = None,
        *,
        initializer: Initializer | None = None,
    ) -> None:
        if len(shape) != 2:
            raise ValueError(f"DistTensor {name!r}: the shape must be (num_rows, dim), not {tuple(shape)}")
        if dtype != torch.float32:
            raise ValueError(f"DistTensor {name!r}: a store's rows are float32, not {dtype}")
        self.store = store if store is not None else MemoryStore()
        drawn = initializer or Constant(0.0)
        wanted = DenseTable(name, shape[1], shape[0], initializer=ByFunction() if init_func else drawn)

        def fill(rows: torch.Tensor) -> None:
            assert init_func is not None
            rows.copy_(init_func(tuple(shape), dtype))

        init_fns: dict[str, Any] = {} if init_func is None else {name: fill}
        (table,) = create_tables(self.store, [wanted], SGD(), init_fns)
        assert isinstance(table, DenseTable)
        self.table = table

    @property
    def name(self) -> str:
        """The table's name in the store."""
        return self.table.name

    @property
    def shape(self) -> torch.Size:
        """``(num_rows, dim)``."""
        return torch.Size([self.table.num_rows, self.table.dim])

    @property
    def dtype(self) -> torch.dtype:
        """float32."""
        return torch.float32

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, ids: Any) -> torch.Tensor:
        """Rows, float32 ``[*ids.shape, dim]``.

        Raises:
            ValueError: an id is not one of a row.
        """
        keys = self._keys(ids)
        return self.store.pull(self.name, keys.reshape(-1)).view(*keys.shape, self.table.dim)

    def __setitem__(self, ids: Any, rows: torch.Tensor) -> None:
        """Overwrites rows; ids must not repeat."""
        keys = self._keys(ids)
        expected = torch.Size([*keys.shape, self.table.dim])
        values = rows.detach().to(keys.device, torch.float32).expand(expected)
        self.store.write(self.name, keys.reshape(-1), values.reshape(-1, self.table.dim))

    def _keys(self, ids: Any) -> torch.Tensor:
        keys = torch.as_tensor(ids, device=self.store.device)
        if keys.is_floating_point() or keys.dtype == torch.bool:
            raise ValueError(f"DistTensor {self.name!r}: ids must be integers, not {keys.dtype}")
        return keys.long()
