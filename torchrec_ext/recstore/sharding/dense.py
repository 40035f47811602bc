"""``DenseShard``: this rank's rows of a dense table as a module, for a sharded ``state_dict``."""

from __future__ import annotations

from typing import Any

from torchrec.optim.fused import EmptyFusedOptimizer

from torchrec_ext.recstore.row_shards import RowShards
from torchrec_ext.recstore.table_modules import DenseRows, load_weight
from torchrec_ext.recstore.whole_tables import read_table
from torchrec_ext.store import DenseTable, Store
from torchrec_ext.zch import internals


class DenseShard(DenseRows):
    """This rank's rows of a dense table: ``weight``, in the ``state_dict`` a tensor over all ranks.

    The parameter is there if the rows are in reach.

    Args:
        store: where the rows are; its table may be larger than the shard.
        table: the shard as a table of its own.
        rows: which rows they are.
    """

    def __init__(self, store: Store, table: DenseTable, rows: RowShards) -> None:
        super().__init__(store, table)
        self._shards = rows
        for parameter in self.parameters():
            setattr(parameter, internals.OPTIMIZED_ELSEWHERE, [EmptyFusedOptimizer()])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        assert self._store is not None
        destination[f"{prefix}weight"] = self._shards.sharded(read_table(self._store, self._table))

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
        key = f"{prefix}weight"
        if key in state_dict:
            try:
                state_dict = {**state_dict, key: self._shards.local(state_dict[key])}
            except ValueError as error:
                error_msgs.append(f"{key}: {error}")
                return
        load_weight(
            self._store, self._table, state_dict, prefix, strict, missing_keys, unexpected_keys, error_msgs
        )
