"""Initial rows that are those of an ``EmbeddingBagCollection`` under the same seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrec_ext.store import DenseTable

# A multiple of 16: torch draws normal values in blocks of that.
_CHUNK = 1 << 20


def draw_like_embedding_bags(tables: Sequence[DenseTable], device: torch.device) -> None:
    """Takes as many random numbers as making the tables' ``nn.EmbeddingBag`` does.

    It draws normal values for its weight, which the configuration's ``init_fn`` overwrites. Drawing them
    here too makes this module's rows, and whatever is initialised after it, those of a model with an
    ``EmbeddingBagCollection`` instead.
    """
    for table in tables:
        left = table.num_rows * table.dim
        scratch = torch.empty(min(left, 2 * _CHUNK), device=device)
        while left:
            piece = scratch[: left if left <= len(scratch) else _CHUNK].normal_()
            left -= len(piece)
