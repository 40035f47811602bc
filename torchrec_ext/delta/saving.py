"""What a checkpoint keeps of a dumper: where it stands in its log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from torchrec_ext.delta.commit import Committer
from torchrec_ext.delta.following import Followers
from torchrec_ext.delta.keys import NO_KEYS, Keys
from torchrec_ext.delta.position import LogPosition, merged
from torchrec_ext.delta.tracker import Tracker
from torchrec_ext.ranks import gather, on_every_rank

_NAME = "log_position"  # in a state dict
_FORMAT = "format"


def current_position(
    resumed_from: LogPosition,
    run_id: str,
    committer: Committer,
    followers: Followers,
    trackers: Mapping[str, Tracker],
    step: int | None,
) -> LogPosition:
    """Where a dumper stands whose writer has nothing to do; all ranks ask together.

    Args:
        resumed_from: where in the log training resumed; nowhere if it did not.
        run_id: of its run.
        committer: of this rank.
        followers: of the tables' modules and stores.
        trackers: of this rank.
        step: the last that it was told of.

    Raises:
        CorruptTableError: a table of this rank contradicts itself.
    """
    dump = committer.last_committed
    last = resumed_from if dump is None else LogPosition(dump, run_id)
    if last.dump is None:
        return last
    unsaid = on_every_rank(committer.group, lambda: _unsaid(committer, followers, trackers))
    return replace(last, unsaid=merged(gather(committer.group, unsaid)), step=step)


def _unsaid(committer: Committer, followers: Followers, trackers: Mapping[str, Tracker]) -> dict[str, Keys]:
    """The keys of this rank of which the next dump would say anything, by table."""
    try:
        followers.pause()
        diffs = [(tracker.table.fqn, tracker.compare()) for tracker in trackers.values()]
    finally:
        followers.resume()
    kept = committer.uncommitted_keys()
    return merged(
        [{fqn: np.concatenate([diff.upsert_keys, diff.delete_keys])} for fqn, diff in diffs]
        + [{fqn: kept.get(fqn, NO_KEYS)} for fqn, _ in diffs]
    )


def to_state_dict(position: LogPosition) -> dict[str, Any]:
    """What a checkpoint keeps of a position."""
    # Where a rank lacks a table (table-wise), DCP reads a checkpoint as one of before PyTorch 2.4: it finds
    # what is in a mapping only if a tensor is among it (checked with 2.13 and 2.14).
    return {_NAME: position.to_bytes(), _FORMAT: torch.tensor(1, device="cpu")}


def from_state_dict(state_dict: Mapping[str, Any]) -> LogPosition:
    """The position that a checkpoint kept.

    Raises:
        ValueError: it holds something else.
    """
    if _NAME not in state_dict:
        raise ValueError(f"state_dict has no {_NAME!r}: it is not one of a DeltaDumper")
    try:
        return LogPosition.from_bytes(state_dict[_NAME])
    except ValueError as error:
        raise ValueError(f"state_dict[{_NAME!r}] is not one of a DeltaDumper: {error}") from error
