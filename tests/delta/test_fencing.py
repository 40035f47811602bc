"""Of all runs that opened a log only the last may write to it, whenever the others wake up."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.faults import MortalRanks
from tests.support.models import build, one_table
from tests.support.pauses import Outcome, Sleeper, Stepped, dump_steps, leave
from tests.support.schedules import compare
from tests.support.trainers import FQN, IDS, Trainer
from tests.support.training import train
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaDumper, DeltaDumpError, DeltaLog, DumpId, FencedError, Manifest
from torchrec_ext.delta.manifest import MANIFEST_NAME

# -- two trainers, a file operation at a time


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Stepped, Stepped]]:
    trainers = Stepped(), Stepped()
    yield trainers
    for trainer in trainers:
        trainer.stop()


def _chain(log: Path) -> list[Manifest]:
    return DeltaLog(log).dumps(superseded=True) if log.exists() else []


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(turns=st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(1, 30)), min_size=2, max_size=12))
def test_two_trainers_never_break_a_log_in_whatever_order_they_touch_its_files(
    pair: tuple[Stepped, Stepped], turns: list[tuple[int, int]]
) -> None:
    _take_turns(pair, turns)


def test_trainer_may_be_overtaken_before_anything_it_does_to_files(pair: tuple[Stepped, Stepped]) -> None:
    seen = []
    for count in range(1, 100):
        generation, dumps, _ = _take_turns(pair, [(0, count), (1, 10**6)])[0]
        seen.append((generation, *dumps.values()))
        if seen[-1] == (1, True, True):
            break  # it was done before the other began
    # Which of the two is the newer is decided while they open the log.
    assert list(dict.fromkeys(seen)) == [
        (2, True, True),
        (1, False, False),
        (1, True, False),
        (1, True, True),
    ]
    assert len(seen) > 30


def _take_turns(pair: tuple[Stepped, Stepped], turns: list[tuple[int, int]]) -> dict[int, Outcome]:
    """Lets them do so many things each, turn by turn, and then each the rest; what came of it, by trainer."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "deltas"
        first = Trainer(7)
        dump_steps(first, log, [1])  # so that there is something to go on from
        chain = _chain(log)
        outcomes: dict[int, Outcome] = {}
        for number, trainer in enumerate(pair):
            trainer.begin(log, number, [1, 2])
        for number, count in [*turns, (0, 10**6), (1, 10**6)]:
            for _ in range(count):
                if number in outcomes:
                    break
                outcome = pair[number].go()
                if outcome is not None:
                    outcomes[number] = outcome
                now = _chain(log)
                assert now[: len(chain)] == chain, "what was committed is committed"
                chain = now
        committed = {dump.dump for dump in chain} - {DumpId(0, 1)}
        told = {
            DumpId(generation, step)
            for generation, dumps, _ in outcomes.values()
            for step, was_committed in dumps.items()
            if was_committed
        }
        assert committed == told
        _, dumps, answers = max(outcomes.values(), key=lambda outcome: outcome[0])
        assert all(dumps.values()), "nobody came after the newest"
        _compare(log, answers)
        _replay_one_after_another(log, chain, answers)
        return outcomes


def _compare(log: Path, answers: list[list[float]]) -> None:
    assert np.array_equal(DeltaLog(log).replay()[FQN].lookup(IDS), np.array(answers, np.float32))


def _replay_one_after_another(log: Path, chain: list[Manifest], answers: list[list[float]]) -> None:
    """What a consumer holds that took in each dump when it was committed."""
    latest: dict[int, list[float] | None] = {}
    for dump in chain:
        for row in DeltaLog(log).read(dump.step, dump.generation).to_pylist():
            latest[row["key_id"]] = row["embedding"]
    held = {key for key, vector in latest.items() if vector is not None}
    assert held == set(DeltaLog(log).replay()[FQN].keys.tolist())
    for key in held:
        assert latest[key] == answers[key]


# -- a trainer that is paused for a while


def test_trainer_that_wakes_up_in_the_middle_of_a_dump_cannot_commit_it(tmp_path: Path) -> None:
    sleeper = Sleeper()
    seen = []
    try:
        for nth in range(1, 100):
            log = tmp_path / str(nth)
            sleeper.open_and_dump(log, seed=1)
            where = sleeper.dump_asleep(2, nth)
            if where is None:
                assert sleeper.outcome[0] == "committed"
                break
            seen.append(where)
            newer = Trainer(2)
            generation, dumps, answers = dump_steps(newer, log, [1, 2])
            assert generation == 1 and dumps == {1: True, 2: True}
            chain, files = _chain(log), _files(log)
            outcome, text = sleeper.wake()
            if DumpId(0, 2) in {dump.dump for dump in chain}:  # it fell asleep after the commit
                assert outcome == "committed"
            else:
                assert outcome == "FencedError"
                assert f"the dump of step 2 was not committed: this run is generation 0 of {log}" in text
                assert "generation 1 (process " in text
            assert _chain(log) == chain
            _compare(log, answers)
            after = _files(log)
            assert {path: after[path] for path in files} == files, "it changes nothing of the newer run"
            assert not [path for path in after if path not in files and path.endswith("manifest.json")]
            shutil.rmtree(log)
    finally:
        sleeper.stop()
    names = [f"{event} {Path(name).name}" for event, name in seen]
    assert "os.rename step_000000000002.g0000.json" in names, "it must sleep right before the commit, too"
    assert len(seen) >= 10


def _dump_until_refused(tell: Callable[..., None], log: Path) -> None:
    spec = one_table(policy="lru", eviction_interval=1)
    model = build(spec)
    dumper = DeltaDumper(model, log, interval_steps=1)
    for step in itertools.count(1):
        train(model, spec, range(step, step + 12))
        try:
            dumper.step(step)
            dumper.flush()
        except DeltaDumpError as error:
            tell("refused", type(error).__name__, str(error))
            break
        tell("dumped", step)
    with pytest.raises(FencedError, match="was not committed"):
        dumper.close()
    tell("closed")


def _continue(log: Path) -> None:
    spec = one_table(policy="lru", eviction_interval=1, seed=1)
    model = build(spec)
    with DeltaDumper(model, log, interval_steps=1) as dumper:
        train(model, spec, range(30, 40))
        dumper.step(1)
    compare(model, spec, str(log), [*range(60), -1])


def test_run_of_several_ranks_that_wakes_up_is_refused_on_each_of_them(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    with MortalRanks(2, tmp_path / "meet", _dump_until_refused, log) as old:
        assert old.hear(0) == old.hear(1) == ("dumped", 1)
        old.pause()
        run_on(1, _continue, log)
        chain = _chain(log)
        old.wake()
        for rank in range(2):
            while (message := old.hear(rank))[0] == "dumped":
                assert DumpId(0, message[1]) in {dump.dump for dump in chain}
            assert message[:2] == ("refused", "FencedError")
            assert "generation 0" in message[2]
            assert "generation 1 (process " in message[2]
            assert old.hear(rank) == ("closed",)
    assert _chain(log) == chain


def _files(log: Path) -> dict[str, bytes]:
    return {str(path.relative_to(log)): path.read_bytes() for path in log.glob("step_*/*") if path.is_file()}


# -- a file system that repeats requests


def test_commit_whose_answer_was_lost_counts_and_one_that_was_refused_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, carried_out = os.rename, True

    def of_nfs(source: Path, target: Path) -> None:
        if Path(target).name != MANIFEST_NAME or carried_out:
            rename(source, target)
        if Path(target).name == MANIFEST_NAME:
            raise FileNotFoundError(errno.ENOENT, "as said of a request that is repeated", str(source))

    monkeypatch.setattr(os, "rename", of_nfs)

    trainer = Trainer(3)
    dumper = trainer.attach(tmp_path / "deltas")
    for step in (1, 2, 3):
        trainer.train(step)
        carried_out = step != 2
        dumper.dump(step)
        with pytest.raises(DeltaDumpError) if step == 2 else nullcontext():
            dumper.flush()
        assert [dump.step for dump in _chain(tmp_path / "deltas")] == [1, *([3] if step == 3 else [])]
    _compare(tmp_path / "deltas", trainer.answers())
    leave(dumper)
