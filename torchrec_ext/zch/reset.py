"""Gives an id that takes over an evicted id's row fresh optimizer state, for every fused optimizer."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import nn

from torchrec_ext.errors import UnsupportedTableError
from torchrec_ext.zch import internals
from torchrec_ext.zch.discovery import find_zch_tables
from torchrec_ext.zch.hook import SharedHook


def reset_evicted_optimizer_state(model: nn.Module) -> OptimizerStateReset:
    """Makes every eviction put the optimizer state of the rows it resets to its initial value.

    TorchRec resets the vector of an evicted id's row, and the optimizer state for row-wise Adagrad on
    CUDA alone. With another optimizer the id that gets the row inherits the accumulator of the one that
    lost it; with row-wise Adagrad on CPU the first eviction fails. With this, all of a row's state is
    that of a row never trained (zero in every optimizer of FBGEMM), and row-wise Adagrad trains on CPU.

    In a loop that looks up the next batch before this one's backward, a gradient of the evicted id may
    still arrive after its row was reset, and moves the row and its state.

    Args:
        model: a model with sharded managed-collision modules.

    Returns:
        A handle that takes it off again with ``remove()``, and a context manager.

    Raises:
        ValueError: the model has no sharded managed-collision table.
        UnsupportedTableError: a table has a compute kernel that cannot reset rows.

    Example::

        with reset_evicted_optimizer_state(model):
            train(model)
    """
    tables = find_zch_tables(model)
    if not tables:
        raise ValueError(
            "the model has no sharded managed-collision table: wrap it in DistributedModelParallel first"
        )
    tbes: dict[nn.Module, None] = {}
    for table in tables:
        tbe, _ = internals.table_batched_embedding(table.module, table.name)
        if not internals.can_reset_rows(tbe):
            raise UnsupportedTableError(
                f"{table.fqn}: a dense compute kernel keeps its optimizer state elsewhere and cannot reset "
                "the rows of evicted ids; shard it with compute_kernel='fused'"
            )
        tbes[tbe] = None
    return OptimizerStateReset(list(tbes))


class OptimizerStateReset:
    """Keeps the reset on a model until ``remove()``; several on one model do no harm."""

    def __init__(self, tbes: list[nn.Module]) -> None:
        self._hooks = [_ResetHook.join(tbe, self) for tbe in tbes]

    def remove(self) -> None:
        """Takes the reset off; a second call does nothing."""
        for hook in self._hooks:
            hook.leave(self)
        self._hooks = []

    def __enter__(self) -> OptimizerStateReset:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


class _ResetHook(SharedHook[OptimizerStateReset]):
    """Stands in for the method of a TBE that TorchRec calls at each eviction."""

    def __init__(self, tbe: nn.Module) -> None:
        super().__init__(tbe, internals.RESET_ROWS)
        self._tbe = tbe

    @torch.no_grad()
    def __call__(
        self,
        pruned_indices: torch.Tensor,
        pruned_indices_offsets: torch.Tensor,
        logical_table_ids: torch.Tensor,
        buffer_ids: torch.Tensor,
    ) -> None:
        """See ``SplitTableBatchedEmbeddingBagsCodegen.reset_embedding_weight_momentum``."""
        on_cpu = pruned_indices.device.type == "cpu"
        if not on_cpu or not self._users:
            # On CPU it does nothing, or (row-wise Adagrad) fails for want of a kernel.
            self._original(pruned_indices, pruned_indices_offsets, logical_table_ids, buffer_ids)
        if not self._users:
            return
        states = internals.optimizer_states(self._tbe)
        bounds = pruned_indices_offsets.tolist()
        for place, table in enumerate(logical_table_ids.tolist()):
            rows = pruned_indices[bounds[place] : bounds[place + 1]]
            # Through .data, as the kernel writes: autograd must not count it, or a loop that looked up
            # another batch before could not run that one's backward any more.
            if on_cpu:
                internals.local_weight(self._tbe, table).data.index_fill_(0, rows, 0.0)
            for state in states[table]:
                state.data.index_fill_(0, rows, 0)
