"""Versions of rows as a client has them: the server's clock and, above it, the epoch of the connection.

After a restart the clock may come to the same numbers with other rows.
"""

from __future__ import annotations

import torch

from torchrec_ext.store.flight.connection import Answer
from torchrec_ext.store.store import NO_ROW, UNREAD

_EPOCH_BITS = 40


def version_of(answer: Answer) -> int:
    """The version that a change gave to the rows that it changed."""
    return int(answer.content["clock"]) + first_of(answer.epoch)


def first_of(epoch: int) -> int:
    """The version before all those of an epoch."""
    return epoch << _EPOCH_BITS


def label(versions: torch.Tensor, epoch: int) -> torch.Tensor:
    """A server's versions as those of an epoch; rows that are not there have none."""
    return versions if epoch == 0 else torch.where(versions < 0, versions, versions + first_of(epoch))


def unlabel(versions: torch.Tensor, epoch: int) -> torch.Tensor:
    """The server's versions; rows that were read in an earlier epoch have to be read again."""
    if epoch == 0:
        return versions
    servers = versions - first_of(epoch)
    return torch.where(versions == NO_ROW, versions, torch.where(servers < 0, UNREAD, servers))
