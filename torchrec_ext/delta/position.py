"""Where in its log a dumper stands: what a checkpoint keeps of it, and where a restart goes on."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from torchrec_ext.delta.keys import Keys, union
from torchrec_ext.delta.manifest import DumpId, Manifest

logger = logging.getLogger(__name__)

_VERSION = 1


@dataclass(frozen=True)
class LogPosition:
    """What a dumper has said so far; the same on every rank, whatever the world size.

    Attributes:
        dump: the last dump that was committed; None if nothing is known.
        run_id: of the run that wrote it.
        unsaid: by table, the keys of all ranks that changed since: int64, sorted.
        step: of training when it was saved, as far as the dumper was told.
    """

    dump: DumpId | None = None
    run_id: str = ""
    unsaid: Mapping[str, Keys] = field(default_factory=dict)
    step: int | None = None

    def to_bytes(self) -> bytes:
        """One line of JSON, then the keys, little-endian."""
        head = {
            "version": _VERSION,
            "dump": None if self.dump is None else [self.dump.generation, self.dump.step],
            "run_id": self.run_id,
            "step": self.step,
            "unsaid": {fqn: len(keys) for fqn, keys in self.unsaid.items()},
        }
        keys = b"".join(keys.astype("<i8").tobytes() for keys in self.unsaid.values())
        return json.dumps(head).encode() + b"\n" + keys

    @classmethod
    def from_bytes(cls, data: object) -> LogPosition:
        """Reads what ``to_bytes`` wrote.

        Raises:
            ValueError: it is something else, or of a version that is not known.
        """
        if not isinstance(data, bytes):
            raise ValueError(f"a {type(data).__name__} instead of bytes")
        line, _, rest = data.partition(b"\n")
        try:
            head = json.loads(line)
            if (version := head["version"]) != _VERSION:
                raise ValueError(f"version {version!r}; this torchrec_ext knows version {_VERSION}")
            dump = None if head["dump"] is None else DumpId(*map(int, head["dump"]))
            unsaid, start = {}, 0
            for fqn, count in head["unsaid"].items():
                unsaid[fqn] = np.frombuffer(rest, "<i8", count, 8 * start).astype(np.int64)
                start += count
            step = head.get("step")  # as the first ones were saved, without
            return cls(dump, str(head["run_id"]), unsaid, None if step is None else int(step))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not what a DeltaDumper saves: {error!r}") from error


def merged(shares: Sequence[Mapping[str, Keys]]) -> dict[str, Keys]:
    """The keys of all ranks, by table."""
    names = sorted({fqn for share in shares for fqn in share})
    return {fqn: union(*(share[fqn] for share in shares if fqn in share)) for fqn in names}


@dataclass(frozen=True)
class Branch:
    """How a run that goes on from an earlier step divides its log.

    Attributes:
        kept: the dumps that stand, oldest first.
        ahead: those after them, which show what the model has not been trained to yet.
        saved: the checkpoint's position, if its dump is among ``kept``; else None.
        since: those of ``kept`` that came after the checkpoint's position.
    """

    kept: Sequence[Manifest]
    ahead: Sequence[Manifest]
    saved: LogPosition | None = None
    since: Sequence[Manifest] = ()


def branch_at(dumps: Sequence[Manifest], step: int, saved: LogPosition | None) -> Branch:
    """Divides a log at a step.

    With a position, what was dumped after it is ahead, unless its step is not: a checkpoint may be saved
    before the dump of its own step. Without one, the last dump at or before the step is the last to stand.

    Args:
        dumps: those that are not superseded, oldest first.
        step: of the checkpoint.
        saved: the position that was saved with it; None if none was.

    Raises:
        ValueError: the position is that of a later step.
    """
    if saved is not None and saved.dump is not None:
        of_step = max(saved.dump.step, saved.step or 0)
        if of_step > step:
            raise ValueError(
                f"the state that was loaded into the dumper is of step {of_step} or later, training "
                f"cannot go on from step {step} with it: pass the step of the checkpoint"
            )
        if saved.step is not None and any(saved.step < dump.step <= step for dump in dumps):
            logger.warning(
                "the state that was loaded into the dumper was saved after step %d, and the log has dumps "
                "after that, up to step %d from which training goes on: if the checkpoint is of step %d, "
                "say so to resume()",
                saved.step,
                step,
                saved.step,
            )
    for place, dump in enumerate(dumps):
        if saved is not None and dump.dump == saved.dump and dump.run_id == saved.run_id:
            stop = place + 1
            while stop < len(dumps) and dumps[stop].step <= step:
                stop += 1
            return Branch(dumps[:stop], dumps[stop:], saved, dumps[place + 1 : stop])
    stop = max((place + 1 for place, dump in enumerate(dumps) if dump.step <= step), default=0)
    return Branch(dumps[:stop], dumps[stop:])
