"""``vacuum`` strikes before each operation of everybody who reads a log: all find what they came for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.delta.test_compact import NOW
from tests.support.filesystems import Striker, watched
from tests.support.logs import LogWriter, Rows, dense, zch
from tests.support.trainers import Trainer
from torchrec_ext.delta import (
    DeltaLog,
    DeltaLogError,
    VacuumedError,
    compact,
    diff_log,
    figures_of,
    inspect_log,
    vacuum,
    verify_log,
    write_state,
)
from torchrec_ext.publish import Change, Position, PublishError, Sink, publish
from torchrec_ext.publish.directory import DirectoryReader

State = dict[str, dict[int, list[float]]]
"""The vector of each key, by table."""

TABLES = {"mc.t0": zch(4, 2), "rows": dense(2, 5)}


class Log:
    """A log that a trainer adds to, and that is compacted and vacuumed after that.

    Attributes:
        directory: of it.
        states: what its dumps have made of the tables, oldest first.
    """

    def __init__(self, directory: Path) -> None:
        """Three dumps, of which one is void; one after them, and a base."""
        self._writer = LogWriter(directory, TABLES)
        self._step = 0
        self.directory = directory
        self.states: list[State] = []
        for _ in range(3):
            self._dump()
        self._writer.resume(20)
        self._dump()
        compact(directory, 10)

    def _dump(self) -> None:
        self._step += 10
        number = self._step // 10
        upserts = {"mc.t0": [number, number + 1, number + 2], "rows": [number % 5, 4]}
        self._writer.dump(self._step, upserts, {"mc.t0": [number - 1]}, world_size=1)
        self.states.append({fqn: as_lists(table.rows) for fqn, table in self._writer.tables.items()})

    def strike(self) -> None:
        """A dump comes, and all others go."""
        self._dump()
        compact(self.directory, self._step)
        vacuum(self.directory, **NOW)


def as_lists(rows: Rows) -> dict[int, list[float]]:
    return {key: vector.tolist() for key, vector in rows.items()}


class Memory(Sink):
    """A dictionary."""

    def __init__(self) -> None:
        self.rows: State = {}
        self._position: Position | None = None

    def __str__(self) -> str:
        return "memory"

    def position(self) -> Position | None:
        return self._position

    def apply(self, change: Change) -> None:
        for fqn, keys, vectors in change.upserts():
            self.rows.setdefault(fqn, {}).update(zip(keys.tolist(), vectors.tolist(), strict=True))
        for fqn, keys, _ in change.deletes():
            for key in keys.tolist():
                self.rows.setdefault(fqn, {}).pop(key, None)
        if change.base is None:  # it may have been cut short before
            kept = change.keys()
            self.rows = {
                fqn: {key: row for key, row in rows.items() if key in set(kept[fqn].tolist())}
                for fqn, rows in self.rows.items()
            }
        self._position = change.position


def replayed(log: DeltaLog, _: Path) -> State:
    return {
        fqn: dict(zip(state.keys.tolist(), state.vectors.tolist(), strict=True))
        for fqn, state in log.replay().items()
    }


def written(log: DeltaLog, scratch: Path) -> State:
    found: State = {fqn: {} for fqn in write_state(log, scratch).rows}
    for row in pq.read_table(scratch).to_pylist():
        found[row["table_fqn"]][row["key_id"]] = row["embedding"]
    return found


def published(log: DeltaLog, _: Path) -> tuple[int, State]:
    sink = Memory()
    with contextlib.suppress(PublishError):  # it stands at a dump that is gone by now
        publish(log, sink, retry_seconds=600.0)
    position = sink.position()
    assert position is not None
    return position.step, sink.rows


def served(log: DeltaLog, _: Path) -> tuple[int, State]:
    position, tables = DirectoryReader(log.place).load()
    rows = {
        fqn: dict(zip(table.keys.tolist(), table.vectors.tolist(), strict=True))
        for fqn, table in tables.items()
    }
    return position.step, rows


def keys(log: DeltaLog, _: Path) -> dict[str, list[int]]:
    return {fqn: found.tolist() for fqn, found in log.keys().items()}


def compacted(log: DeltaLog, scratch: Path) -> State:
    assert compact(log).base.is_base
    return replayed(log, scratch)


def vacuumed(log: DeltaLog, scratch: Path) -> State:
    vacuum(log, **NOW)
    return replayed(log, scratch)


def verified(log: DeltaLog, _: Path) -> None:
    verification = verify_log(log)
    assert verification.clean, verification.findings


def looked_at(log: DeltaLog, _: Path) -> None:
    assert inspect_log(log).tables
    assert log.files().num_rows


def drawn(log: DeltaLog, _: Path) -> None:
    assert figures_of(log).dumps


def compared(log: DeltaLog, _: Path) -> None:
    try:
        difference = diff_log(log, 20, 40)
    except DeltaLogError as error:
        assert "removed by vacuum" in str(error)
    else:
        assert difference.tables["mc.t0"].came.tolist() == [5, 6]


def read(log: DeltaLog, _: Path) -> None:
    try:
        rows = log.read(40)
    except VacuumedError as error:
        assert "removed by vacuum" in str(error)
    else:
        assert set(rows["key_id"].to_pylist()) == {2, 3, 4, 5, 6}


Reader = Callable[[DeltaLog, Path], Any]
OF_STATES: list[Reader] = [replayed, written, compacted, vacuumed]
OF_STEPS: list[Reader] = [published, served]
OF_OTHERS: list[Reader] = [keys, verified, looked_at, drawn, compared, read]


def run(reader: Reader, tmp_path: Path, at: tuple[int, ...], *, remote: bool) -> Striker:
    """Lets somebody read, strikes before some operations, and checks what was found."""
    tmp_path.mkdir()
    log = Log(tmp_path / "deltas")
    striker = Striker(log.strike, at)
    if remote:
        found = reader(DeltaLog(watched(log.directory, striker)), tmp_path / "scratch")
    else:
        with striker.on_local_places():
            found = reader(DeltaLog(log.directory), tmp_path / "scratch")
    if reader in OF_STATES:
        assert found in log.states
    if reader in OF_STEPS:
        step, state = found
        assert state == log.states[step // 10 - 1]
    if reader is keys:
        assert found in [{fqn: sorted(rows) for fqn, rows in state.items()} for state in log.states]
    return striker


@pytest.mark.parametrize(
    ("reader", "remote"),
    [
        *[(reader, False) for reader in (*OF_STATES, *OF_STEPS, *OF_OTHERS)],
        *[(reader, True) for reader in (replayed, compacted, vacuumed, published, verified)],
    ],
)
def test_everybody_finds_a_state_that_was(tmp_path: Path, reader: Reader, remote: bool) -> None:
    count = run(reader, tmp_path / "undisturbed", (), remote=remote).count
    assert count > 3
    for number in range(count):
        assert run(reader, tmp_path / f"{number}", (number,), remote=remote).struck == 1
    # And again and again, while it begins anew.
    for number in range(1, count, 11):
        at = tuple(range(number, 5 * count, max(3, count // 2)))[:5]
        run(reader, tmp_path / f"{number}.again", at, remote=remote)


def trained(directory: Path) -> dict[str, Any]:
    """Leaves a log with dumps up to step 8, and a base; a checkpoint of step 6."""
    trainer = Trainer(1)
    saved: dict[str, Any] = {}
    with trainer.attach(directory) as dumper:
        for step in range(1, 9):
            trainer.train(step)
            if step % 2 == 0:
                dumper.dump(step)
            dumper.step(step)
            if step == 6:
                saved = trainer.save(dumper)
    compact(directory, 2)
    return saved


@pytest.mark.parametrize(("with_state", "remote"), [(False, False), (True, True)])
def test_trainer_resumes(tmp_path: Path, with_state: bool, remote: bool) -> None:
    def resume(name: str, at: Collection[int]) -> Striker:
        log = tmp_path / name
        saved = trained(log)

        def strike() -> None:
            # Once the trainer has gone back, a base that was begun is void.
            with contextlib.suppress(DeltaLogError):
                compact(log)
            vacuum(log, **NOW)

        striker = Striker(strike, at)
        trainer = Trainer(9)
        with contextlib.nullcontext() if remote else striker.on_local_places():
            dumper = trainer.attach(watched(log, striker) if remote else log)
            trainer.load(saved, dumper if with_state else None)
            dumper.resume(6)
        trainer.compare(log)
        trainer.train(7)
        dumper.dump(7)
        dumper.close()
        trainer.compare(log)
        assert verify_log(log).clean
        return striker

    count = resume("undisturbed", ()).count
    for number in range(count):
        assert resume(f"{number}", (number,)).struck == 1
    for number in range(1, count, 11):
        resume(f"{number}.again", range(number, 5 * count, 9))
