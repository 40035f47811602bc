"""Watches managed-collision compute: which rows were reset for new ids, and which a gradient reached."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.mc_embedding_modules import (
    BaseShardedManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from torchrec_ext.zch import internals
from torchrec_ext.zch.binding import RowBinding
from torchrec_ext.zch.hook import SharedHook


class ZchListener(Protocol):
    """What a ``ZchWatch`` tells of one module."""

    def rows_touched(self, table: str, rows: torch.Tensor) -> None:
        """Local rows (int64, on the table's device, repeats possible) whose vector may have changed."""


class ZchWatch(SharedHook[ZchListener]):
    """The one hook on a sharded managed-collision module, shared by all that listen to it.

    It stands in for the module's ``compute``, where TorchRec remaps ids, resets evicted rows and
    looks up embeddings. Rows are reported

    - when an eviction reset them for another id, whatever the mode;
    - when the gradient of their lookup arrives, however long ago and in whatever mode they were looked
      up: only then does the fused optimizer move them. A lookup without a backward reports nothing.
    """

    def __init__(self, module: BaseShardedManagedCollisionEmbeddingCollection) -> None:
        super().__init__(module, "compute")
        self.module = module
        self.bindings: dict[str, RowBinding] = {
            name: RowBinding(mcm)
            for name, mcm in internals.collision_modules(module).items()
            if isinstance(mcm, MCHManagedCollisionModule)
        }
        self._drops_ids = any(map(internals.drops_ids, internals.collision_modules(module).values()))
        self._lookups = list(
            zip(
                internals.tables_per_lookup(module),
                internals.features_per_table(module),
                strict=True,
            )
        )

    @classmethod
    def attach(
        cls, module: BaseShardedManagedCollisionEmbeddingCollection, listener: ZchListener
    ) -> ZchWatch:
        """Joins the watch on a module, putting it there if this is the first listener."""
        return cls.join(module, listener)

    def detach(self, listener: ZchListener) -> None:
        """Leaves the watch; the last to leave restores the module's own ``compute``."""
        self.leave(listener)
        if not self._users:
            self.bindings.clear()  # where our hook has to stay, inside another's, it holds no memory

    def catch_up(self, *, force: bool = False) -> None:
        """Reports the rows of maps that were changed by anything but an eviction.

        Args:
            force: look at maps, too, that PyTorch counts no write to, as one through ``.data``.
        """
        for table, binding in self.bindings.items():
            changed = binding.catch_up(force=force)
            if changed is not None:
                self._report(table, changed)

    def __call__(self, ctx: Any, dist_input: KJTList) -> list[torch.Tensor]:
        """Stands in for the module's ``compute``: calls it, then reports what it did."""
        if not self._users:
            return self._original(ctx, dist_input)
        self.catch_up()
        outputs = self._original(ctx, dist_input)
        for table, rows in internals.evicted_rows(ctx).items():
            if rows is not None:
                self._report(table, rows)
                if table in self.bindings:
                    self.bindings[table].refresh()
        lookups = zip(self._lookups, dist_input, internals.remapped_features(ctx), outputs, strict=True)
        for (tables, num_features), features, remapped, output in lookups:
            if output.requires_grad:
                # Lengths before the remap are on the host already. Where ids are dropped, TorchRec has
                # waited for the device to tell which, so that one more wait is no harm.
                counted = remapped if self._drops_ids else features
                rows = remapped.values()
                runs = [rows]
                if len(tables) > 1:
                    runs = _split(rows, counted.length_per_key(), num_features)
                output.register_hook(partial(self._gradient_arrived, tables, runs))
        return outputs

    def _gradient_arrived(
        self, tables: Sequence[str], rows: Sequence[torch.Tensor], _gradient: torch.Tensor
    ) -> None:
        # Whoever watches now: the listeners may have changed since the lookup.
        watch = ZchWatch.on(self.module)
        if watch is not None:
            for table, touched in zip(tables, rows, strict=True):
                watch._report(table, touched)

    def _report(self, table: str, rows: torch.Tensor) -> None:
        rows = rows.long()
        for listener in self._users:
            listener.rows_touched(table, rows)


def _split(
    rows: torch.Tensor, lengths: Sequence[int], features_per_table: Sequence[int]
) -> list[torch.Tensor]:
    """Cuts the rows of all features, one after another, into those of each table."""
    tables, feature, start = [], 0, 0
    for num_features in features_per_table:
        stop = start + sum(lengths[feature : feature + num_features])
        tables.append(rows[start:stop])
        feature, start = feature + num_features, stop
    return tables
