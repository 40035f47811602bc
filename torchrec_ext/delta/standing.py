"""How the rows of a table stand to what a log says of their keys."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_ext.delta.buffers import CHUNK_BYTES
from torchrec_ext.delta.keys import NO_KEYS
from torchrec_ext.delta.storage import StorageDtype, rounded
from torchrec_ext.delta.tracked import RowSource, TrackedTable, copy_rows


class Standing:
    """Which of a table's rows on this rank need not be dumped: their keys have these vectors in the log.

    Args:
        table: the table.
        source: its rows.
        moment: from ``RowSource.changed``, with which ``rows`` came.
        rows: local rows that a key may own, int64 ``[n]``.
        owners: their keys, int64 ``[n]``; anything for a row without one.
        owned: whether a key owns them, bool ``[n]``.

    Attributes:
        said: whether the log says of the row's key what the model does, bool ``[n]``; at first of none.
    """

    def __init__(
        self,
        table: TrackedTable,
        source: RowSource,
        moment: int,
        rows: torch.Tensor,
        owners: NDArray[np.int64],
        owned: NDArray[np.bool_],
    ) -> None:
        self.moment = moment
        self.rows = rows
        self.owners = owners
        self.owned = owned
        self.said = np.zeros(len(owned), np.bool_)
        self._table = table
        self._source = source
        places = np.flatnonzero(owned)
        self._places = places[np.argsort(owners[places], kind="stable")]
        self._keys = owners[self._places]

    def trust(self) -> None:
        """Takes the log's word for all rows."""
        self.said[:] = self.owned

    def doubt(self, keys: NDArray[np.int64]) -> None:
        """Takes no word of the log for the rows of keys, int64 ``[n]``."""
        self.said[self._find(keys)[0]] = False

    @torch.no_grad()
    def confirm(
        self, keys: NDArray[np.int64], vectors: NDArray[np.float32], storage_dtype: StorageDtype
    ) -> tuple[int, int] | None:
        """Compares vectors in the log, bit for bit, with those that the model has for the same keys now.

        Args:
            keys: int64 ``[n]``, each once.
            vectors: float32, whole ones.
            storage_dtype: how the log stores them: the model's are rounded in the same way first.

        Returns:
            How many keys have the same vector in the model, and how many another one; others have none.
            None if this rank cannot tell, and says of no row that it is in the log as it is.
        """
        if storage_dtype == "int8" and vectors.shape[1] != self._table.dim:
            return None  # that rounding takes whole vectors, and this rank has some of the columns
        places, found = self._find(keys)
        confirmed = 0
        chunk = max(1, CHUNK_BYTES // (4 * self._table.dim))
        for start in range(0, len(places), chunk):
            here = places[start : start + chunk]
            rows = torch.from_numpy(here).to(self.rows.device)
            with self._source.at_rest():
                matrix = torch.empty(len(here), self._table.dim, dtype=torch.float32, device="cpu")
                copy_rows(self._source.weights(), self.rows.index_select(0, rows), matrix)
            self._table.as_answered_(matrix)
            logged = np.ascontiguousarray(vectors[found[start : start + chunk]][:, self._table.columns])
            stored = rounded(matrix.numpy(), storage_dtype)
            same = (stored.view(np.int32) == logged.view(np.int32)).all(axis=1)
            self.said[here] = same
            confirmed += int(same.sum())
        return confirmed, len(places) - confirmed

    def _find(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the rows of keys are in ``rows``, of those that own one, and which keys these are."""
        at = np.searchsorted(self._keys, keys)
        at[at == len(self._keys)] = 0
        found = np.flatnonzero(self._keys[at] == keys) if len(self._keys) else NO_KEYS
        return self._places[at[found]], found
