"""Plays a schedule of dumps, publishes some of them, and compares the client's answers with the oracle's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.support.logs import TABLES, Event, LogWriter, play
from torchrec_ext.publish import EmbeddingClient, Sink, open_sink, publish

SEEN: Counter[str] = Counter()
"""What the schedules showed: a test that compares nothing, or never sees a restart, proves nothing."""


def check(client: EmbeddingClient, writer: LogWriter) -> int:
    """Compares every answer, bit for bit; returns how many."""
    count = 0
    for fqn in writer.tables:
        ids = writer.served(fqn)
        expected = writer.answer(fqn, ids).view(np.int32) if ids else np.empty((0, 0), np.int32)
        found = client.lookup(fqn, ids).view(np.int32)
        wrong = (expected != found).any(axis=1) if ids else np.empty(0, bool)
        assert not wrong.any(), f"{fqn}: {[i for i, w in zip(ids, wrong, strict=True) if w]}"
        count += len(ids)
    return count


def follow_schedule(
    events: Sequence[Event],
    directory: Path,
    url: str,
    on_delete: str = "delete",
    client_url: str | None = None,
) -> None:
    """Publishes along a schedule, from one process that keeps its sink and from others that do not."""
    writer = LogWriter(directory, TABLES)
    steps: list[int] = []
    kept: Sink | None = None
    with EmbeddingClient(client_url or url) as client:
        for number, event in enumerate(events, 1):
            play(writer, event, number, steps)
            SEEN["restarts"] += event.back is not None
            if not event.publish and event is not events[-1]:
                continue
            if event.world_size == 1:
                kept = kept or open_sink(url)
                with_sink: Sink | str = kept
            else:
                with_sink = url
                if kept is not None:
                    kept.close()
                    kept = None
            publish(directory, with_sink, on_delete=on_delete)  # type: ignore[arg-type]
            client.refresh()
            SEEN["compared"] += check(client, writer)
            SEEN["published"] += 1
    if kept is not None:
        kept.close()
