"""What one writes first to dump changed rows: append ids at every lookup, make them unique."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from torchrec_ext.zch import ZchTable, find_zch_tables, internals


class AppendAndUnique:
    """The baseline: appends the rows of every lookup, and writes a file while training waits.

    It is as quick as this approach can be made: vectors reach Arrow without a copy, no row becomes a
    Python object, and nothing is done for exactness (rows that an eviction reset and nobody looked up,
    ids that lost their row) or against a crash. Each table needs a feature of its own.

    Args:
        model: the model.
        every_step: whether rows become unique at every lookup, so that memory is bounded, as TorchRec's
            own tracker does it with ``auto_compact``; else at the dump.
    """

    def __init__(self, model: nn.Module, *, every_step: bool = False) -> None:
        self._every_step = every_step
        self._tables = find_zch_tables(model)
        self._rows: dict[str, list[torch.Tensor]] = {table.fqn: [] for table in self._tables}
        for module in {id(table.module): table.module for table in self._tables}.values():
            self._watch(module, [table for table in self._tables if table.module is module])

    @torch.no_grad()
    def dump(self, path: Path) -> int:
        """Writes the rows looked up since the last dump, and returns how many."""
        tables = []
        for table in self._tables:
            rows = torch.unique(torch.cat(self._rows[table.fqn]))
            self._rows[table.fqn].clear()
            vectors = table.weight()[rows].numpy()
            offsets = pa.array(range(0, vectors.size + 1, table.dim), pa.int32())
            columns = {
                "table": pa.repeat(table.fqn, len(rows)),
                "key_id": pa.array(_raw_ids(table)[rows].numpy()),
                "embedding": pa.ListArray.from_arrays(offsets, pa.array(vectors.reshape(-1))),
            }
            tables.append(pa.table(columns))
        everything = pa.concat_tables(tables)
        pq.write_table(everything, path)
        return everything.num_rows

    def _watch(self, module: Any, tables: list[ZchTable]) -> None:
        compute = module.compute

        def compute_and_append(ctx: Any, features: Any) -> list[torch.Tensor]:
            outputs = compute(ctx, features)
            for remapped in ctx.remapped_kjt:
                for table in tables:
                    rows = self._rows[table.fqn]
                    rows.extend(remapped[feature].values() for feature in table.features)
                    if self._every_step:
                        rows[:] = [torch.cat(rows).unique()]
            return outputs

        module.compute = compute_and_append


def _raw_ids(table: ZchTable) -> torch.Tensor:
    """The id that owns each row."""
    sorted_ids, rows = internals.slots(internals.collision_modules(table.module)[table.name])
    raw_ids = torch.empty_like(sorted_ids)
    raw_ids[rows - table.first_row] = sorted_ids
    return raw_ids
