"""Training schedules drawn by hypothesis, run on real ranks and checked against the model itself."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

from tests.support.bits import assert_same_answers
from tests.support.models import Spec, Table, answers, build, keyed, loss_of
from tests.support.rounding import STORAGE_DTYPES, rounded
from torchrec_ext.checkpoint import reset_evicted_optimizer_state
from torchrec_ext.delta import DeltaDumper, DeltaLog

INT64_MAX = 2**63 - 1
STRANGE_IDS = (INT64_MAX, INT64_MAX - 1, -(2**63), -1, -2, 2**62, 2**40 + 1)
NEVER_SEEN = (987_654_321, -987_654_321, 5 * 2**59)

KINDS = {
    "train": "forward and backward in train mode",
    "hold": "forward now, backward after the next batch's forward: a loop that looks ahead",
    "no_grad": "a lookup under no_grad in train mode: admits and resets, trains nothing",
    "forward_only": "a lookup in train mode whose loss is dropped",
    "eval_backward": "eval mode with a backward: trains, admits nothing",
    "empty": "a batch in which every bag is empty",
}


@dataclass(frozen=True)
class Step:
    """One step of a schedule; ids are drawn per rank from ``seed``."""

    kind: str
    dump: bool
    seed: int


@dataclass(frozen=True)
class Schedule:
    """A model and what is done with it."""

    spec: Spec
    steps: tuple[Step, ...]
    vocabulary: int
    strange: float
    storage_dtype: str | None = None


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Random models and schedules."""
    sequence = draw(st.booleans())
    num_tables = draw(st.integers(1, 3))
    dim = draw(st.sampled_from([4, 8]))
    hash_size = draw(st.sampled_from([40, 64, 100, 1000, INT64_MAX]))
    shared = draw(st.booleans())
    tables = []
    for index in range(num_tables):
        features = [f"f{index}"]
        if draw(st.booleans()):
            features.append(f"g{index}")
        if shared and index:
            features.append("f0")
        tables.append(
            Table(
                f"t{index}",
                tuple(features),
                rows=draw(st.sampled_from([6, 9, 12, 24])),
                dim=dim if sequence else draw(st.sampled_from([4, 8, 16])),
                # Tables that share a feature must route it alike.
                hash_size=hash_size if shared else draw(st.sampled_from([40, 64, 1000])),
                policy=draw(st.sampled_from(["lfu", "lru", "distance_lfu"])),
                threshold=draw(st.booleans()),
                eviction_interval=draw(st.integers(1, 5)),
                pooling=draw(st.sampled_from(["SUM", "SUM", "MEAN"])),
            )
        )
    split = num_tables > 1 and not shared and draw(st.booleans())
    modules = {"a": tuple(tables[:1]), "b": tuple(tables[1:])} if split else {"mc": tuple(tables)}
    dump_one_in = draw(st.sampled_from([1, 1, 4, 10]))
    steps = draw(
        st.lists(
            st.builds(
                Step,
                kind=st.sampled_from(["train"] * 4 + list(KINDS)),
                dump=st.integers(1, dump_one_in).map(lambda n: n == 1),
                seed=st.integers(0, 2**32 - 1),
            ),
            min_size=8,
            max_size=24,
        )
    )
    return Schedule(
        Spec(
            modules,
            optimizer=draw(st.sampled_from(["sgd", "adagrad", "rowwise_adagrad"])),
            sequence=sequence,
            seed=draw(st.integers(0, 1000)),
        ),
        tuple(steps),
        vocabulary=draw(st.sampled_from([15, 40, 120])),
        strange=draw(st.sampled_from([0.0, 0.05, 0.3])),
        storage_dtype=draw(st.sampled_from([None, *STORAGE_DTYPES])),
    )


def churn(world_size: int) -> Schedule:
    """Few rows that many ids fight for: each event that must be seen happens in it."""
    table = Table("t0", ("f0",), rows=3 * world_size, hash_size=64, policy="lru", eviction_interval=1)
    steps = (Step("train", dump=number % 6 == 5, seed=number) for number in range(60))
    return Schedule(Spec({"mc": (table,)}), tuple(steps), vocabulary=40, strange=0.0)


def run_schedule(schedule: Schedule) -> Counter[str]:
    """Runs a schedule on this rank, comparing log and model after each dump.

    Returns:
        How often what was seen: dumps, answers compared, admissions, evictions, ...
    """
    spec = schedule.spec
    model = build(spec)
    observer = CollisionObserver(model, spec)
    seen: set[int] = {*STRANGE_IDS, *NEVER_SEEN}
    counts: Counter[str] = Counter()
    held: torch.Tensor | None = None
    # Row-wise Adagrad fails on CPU at the first eviction without it.
    fresh_state = spec.optimizer == "rowwise_adagrad"
    with (
        reset_evicted_optimizer_state(model) if fresh_state else contextlib.nullcontext(),
        shared_directory() as directory,
    ):
        stored = schedule.storage_dtype
        with DeltaDumper(model, directory, interval_steps=10**9, storage_dtype=stored) as dumper:
            for number, step in enumerate(schedule.steps, 1):
                bags = _bags(schedule, number, step)
                seen.update(i for feature in bags.values() for bag in feature for i in bag)
                batch = keyed(spec.features, bags)
                held = _take(model, batch, step.kind, held)
                observer.look()
                dumper.step(number)
                if step.dump:
                    dumper.dump(number)
                    dumper.flush()
                    counts["dumps"] += 1
                    counts += compare(model, spec, directory, gather_ids(seen), stored)
                    observer.interval_ends()
        counts += compare(model, spec, directory, gather_ids(seen), stored)
    counts[f"stored as {stored or 'float32'}"] += 1
    return counts + observer.counts


def compare(
    model: nn.Module, spec: Spec, directory: str, ids: list[int], storage_dtype: str | None = None
) -> Counter[str]:
    """Compares what the log replays with what the model answers, rounded as it is stored, bit for bit.

    All ranks must call it, with the same ids.
    """
    state = DeltaLog(directory).replay()
    counts: Counter[str] = Counter()
    for module, tables in spec.modules.items():
        for table in tables:
            expected = rounded(answers(model, spec, module, table.name, ids).numpy(), storage_dtype)
            replayed = state[f"{module}.{table.name}"].lookup(ids)
            assert_same_answers(replayed, expected, ids, f"{module}.{table.name}")
            counts["compared"] += len(ids)
    dist.barrier()
    return counts


class shared_directory(tempfile.TemporaryDirectory):
    """A temporary directory that all ranks see, removed when all have left it."""

    def __enter__(self) -> str:
        names = [self.name]
        dist.broadcast_object_list(names, src=0)
        return names[0]

    def __exit__(self, *args: object) -> None:
        if args[0] is None:
            dist.barrier()
        super().__exit__(*args)


class CollisionObserver:
    """Counts admissions and evictions by looking at TorchRec's own collision maps after each step."""

    def __init__(self, model: nn.Module, spec: Spec) -> None:
        self.counts: Counter[str] = Counter()
        self._maps = [
            mcm
            for module in model.modules()
            for mcm in getattr(module, "_managed_collision_modules", {}).values()
        ]
        self._bound = [self._read(mcm) for mcm in self._maps]
        self._last_row: list[dict[int, int]] = [{} for _ in self._maps]
        self._evicted_now: list[set[int]] = [set() for _ in self._maps]

    def look(self) -> None:
        """Takes note of what changed since the last look."""
        for index, mcm in enumerate(self._maps):
            before, now = self._bound[index], self._read(mcm)
            self._bound[index] = now
            for raw_id, row in before.items():
                if raw_id not in now:
                    self.counts["evictions"] += 1
                    self._last_row[index][raw_id] = row
                    self._evicted_now[index].add(raw_id)
            for raw_id, row in now.items():
                if raw_id in before:
                    continue
                self.counts["admissions"] += 1
                last = self._last_row[index].get(raw_id)
                self.counts["re-admissions"] += last is not None
                self.counts["same-row re-admissions"] += last == row
                if last == row and raw_id in self._evicted_now[index]:
                    self.counts["same-row re-admissions within an interval"] += 1

    def interval_ends(self) -> None:
        """Takes note of a dump."""
        for evicted in self._evicted_now:
            evicted.clear()

    @staticmethod
    def _read(mcm: nn.Module) -> dict[int, int]:
        ids, rows = mcm._mch_sorted_raw_ids.tolist(), mcm._mch_remapped_ids_mapping.tolist()
        return {i: row for i, row in zip(ids, rows, strict=True) if i != INT64_MAX}


def _take(model: nn.Module, batch: object, kind: str, held: torch.Tensor | None) -> torch.Tensor | None:
    """Does one step; returns the loss whose backward the next step has to run."""
    model.train(kind != "eval_backward")
    with torch.set_grad_enabled(kind != "no_grad"):
        loss = loss_of(model(batch))
    model.train()
    if held is not None:
        held.backward()
    if kind == "hold":
        return loss
    if kind in ("train", "eval_backward", "empty"):
        loss.backward()
    return None


def _bags(schedule: Schedule, number: int, step: Step) -> dict[str, list[list[int]]]:
    rng = np.random.default_rng([step.seed, dist.get_rank()])
    # Which ids are popular changes to and fro: what was admitted gets evicted, and comes back.
    start = schedule.vocabulary // 2 * (step.seed % 3)
    bags: dict[str, list[list[int]]] = {}
    for feature in schedule.spec.features:
        bags[feature] = []
        for _ in range(3):
            size = 0 if step.kind == "empty" and number > 1 else rng.integers(0, 5)
            ids = start + rng.integers(0, schedule.vocabulary, size) ** 2 // schedule.vocabulary
            strange = rng.random(size) < schedule.strange
            ids[strange] = rng.choice(np.array(STRANGE_IDS, np.int64), strange.sum())
            bags[feature].append(ids.tolist())
    if number == 1:
        # A shard that sees no id in its first batch never admits any (TorchRec sizes a buffer by it).
        for table in (t for tables in schedule.spec.modules.values() for t in tables):
            block = -(-table.hash_size // dist.get_world_size())
            for feature in table.features:
                bags[feature][0] = [block * r for r in range(dist.get_world_size())] * 6
    return bags


def gather_ids(seen: set[int]) -> list[int]:
    """The ids that any rank has seen."""
    everyones: list[set[int]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everyones, seen)
    return sorted(set().union(*everyones))
