"""Schedules over tables without managed collision, drawn by hypothesis, checked against the model itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from tests.support.bits import assert_same_answers
from tests.support.models import loss_of
from tests.support.plain_models import (
    Collection,
    Spec,
    Table,
    Trainer,
    answers,
    build,
    keyed,
    variable_keyed,
)
from tests.support.rounding import STORAGE_DTYPES, rounded
from tests.support.schedules import Step
from tests.support.session import Attached

Bags = Mapping[str, Sequence[Sequence[int]]]

KINDS = {
    "train": "forward, backward and update in train mode",
    "hold": "forward now, backward after the next batch's forward: a loop that looks ahead",
    "no_grad": "a lookup under no_grad",
    "forward_only": "a lookup whose loss is dropped",
    "eval_backward": "eval mode with a backward: trains",
    "empty": "a batch in which every bag is empty",
    "mark": "some rows written by hand, past PyTorch's counting, and marked",
    "save": "keeps a copy of the state dict",
    "load": "loads what was kept last, if anything was",
}


class Session(Attached):
    """A small model under training with a dumper attached.

    All ranks must do the same; ids may differ per rank.
    """

    def __init__(self, spec: Spec, *, attach: bool = True, **options: Any) -> None:
        super().__init__(build(spec), attach=attach, **options)
        self.spec = spec
        self.trainer = Trainer(self.model, spec)

    def lookup(self, bags: Bags | Sequence[int]) -> torch.Tensor:
        """A forward in the model's present mode; a list of ids stands for a bag each of every feature."""
        if not isinstance(bags, Mapping):
            bags = {feature: [[i] for i in bags] for feature in self.spec.features}
        make = variable_keyed if self.spec.variable else keyed
        return loss_of(self.model(make(self.spec.features, bags)))

    def train(self, bags: Bags | Sequence[int]) -> float:
        """A whole training step."""
        loss = self.lookup(bags)
        self.trainer.finish(loss)
        self.end_step()
        return float(loss)

    def upserts(self) -> dict[str, list[int]]:
        """Dumps; returns the keys that the dump upserts, of all ranks, in order, by table."""
        rows = self.dump()
        assert all(op == "upsert" for found in rows.values() for op, _ in found)
        dist.barrier()
        return {fqn: sorted(key for _, key in found) for fqn, found in rows.items()}

    def check(self) -> dict[str, list[int]]:
        """Dumps and compares the log with the model for every row; returns what ``upserts`` does."""
        keys = self.upserts()
        self.compare()
        return keys

    def compare(self) -> int:
        """Compares the log with the model for every row; returns how many answers were compared."""
        state = self.log.replay()
        compared = 0
        for module, collection in self.spec.collections.items():
            for table in collection.tables:
                ids = list(range(table.rows))
                expected = answers(self.model, self.spec, module, table, ids).numpy()
                expected = rounded(expected, self.options.get("storage_dtype"))
                replayed = state[f"{module}.{table.name}"].lookup(ids)
                assert_same_answers(replayed, expected, ids, f"{module}.{table}")
                compared += len(ids)
        dist.barrier()
        return compared

    def weights(self, module: str, table: str) -> list[tuple[int, torch.Tensor]]:
        """This rank's live weights of a table: for each shard the row it starts at, and its rows."""
        (value,) = (
            value
            for key, value in self.model.state_dict().items()
            if key.startswith(f"{module}.") and f".{table}.weight" in key
        )
        return local_shards(value)


def local_shards(value: Any) -> list[tuple[int, torch.Tensor]]:
    """What of a state dict's value is on this rank: for each shard the row it starts at, and its rows."""
    if hasattr(value, "to_local"):
        local = value.to_local()
        # Where there is no shard, there is the offset of one all the same.
        return [(o[0], t) for o, t in zip(local.local_offsets(), local.local_shards(), strict=False)]
    if hasattr(value, "local_shards"):
        return [(shard.metadata.shard_offsets[0], shard.tensor) for shard in value.local_shards()]
    return [(0, value.detach())]


@dataclass(frozen=True)
class Schedule:
    """A model and what is done with it."""

    spec: Spec
    steps: tuple[Step, ...]
    vocabulary: int
    options: tuple[tuple[str, Any], ...]


@st.composite
def schedules(draw: st.DrawFn, world_size: int) -> Schedule:
    """Random models and schedules for a number of ranks."""
    sharded = world_size > 1 or draw(st.integers(0, 3)) > 0
    variable = sharded and draw(st.integers(0, 4)) == 4
    collections = {}
    names = iter(range(10))
    for module in draw(st.sampled_from([("a",), ("a", "b")])):
        sequence = not variable and draw(st.booleans())
        dense = not variable and draw(st.integers(0, 2)) == 2
        dim = draw(st.sampled_from([8, 16]))
        tables: list[Table] = []
        # TorchRec's dense kernel of sequences answers right for one feature only on CPU.
        for _ in range(1 if sequence and dense and sharded else draw(st.integers(1, 3))):
            table = _table(draw, next(names), world_size, sequence, dense, dim)
            if variable:  # all that TorchRec takes then on CPU is one kernel for each kind of sharding
                if table.sharding not in ("row_wise", "table_wise", "column_wise"):
                    table = replace(table, sharding="row_wise", rows=23)
                table = replace(table, dtype="FP32", pooling="SUM")
            tables.append(table)
        collections[module] = Collection(
            tuple(tables), sequence=sequence, weighted=not sequence and sharded and draw(st.booleans())
        )
    half = any(t.dtype != "FP32" for c in collections.values() for t in c.tables)
    spec = Spec(
        collections,
        optimizer=draw(
            st.sampled_from(["sgd", "rowwise_adagrad"] + ([] if variable else ["adagrad", "ema"]))
        ),
        # Adagrad's and Adam's epsilon is 0 in half precision.
        dense_optimizer=draw(
            st.sampled_from(["sgd", "momentum", "weight_decay"] + ([] if half else ["adagrad", "adam"]))
        ),
        output_dtype=draw(st.sampled_from(["FP32", "FP32", "FP16"])) if _may_round(collections) else "FP32",
        # TorchRec makes no DTensor of a table-column-wise table on a rank without a shard.
        output_dtensor=draw(st.booleans()) and not _has(collections, "table_column_wise"),
        sharded=sharded,
        variable=variable,
        seed=draw(st.integers(0, 1000)),
    )
    steps = draw(
        st.lists(
            st.builds(
                Step,
                kind=st.sampled_from(["train"] * 6 + list(KINDS)),
                dump=st.integers(1, 3).map(lambda n: n == 1),
                seed=st.integers(0, 2**32 - 1),
            ),
            min_size=4,
            max_size=14,
        )
    )
    options = draw(st.sampled_from([(), (), (("max_pending_bytes", 1),)]))
    options += (("storage_dtype", draw(st.sampled_from([None, *STORAGE_DTYPES]))),)
    return Schedule(
        spec,
        tuple(steps),
        vocabulary=draw(st.sampled_from([5, 30])),
        options=options,
    )


# On CPU TorchRec fails with a shard that has no row.
_ROWS_SPLIT = ("row_wise", "table_row_wise", "grid_shard")


def _table(draw: st.DrawFn, number: int, world_size: int, sequence: bool, dense: bool, dim: int) -> Table:
    kinds = ["row_wise", "table_wise", "column_wise", "data_parallel"]
    if sequence:
        kinds.remove("data_parallel")
    else:
        kinds += ["table_row_wise", "table_column_wise", "grid_shard"]
    sharding = draw(st.sampled_from(kinds))
    if sequence and dense:
        sharding = draw(st.sampled_from(["table_wise", "data_parallel"]))
    features = [f"f{number}"]
    if not (sequence and (dense or sharding == "data_parallel")) and draw(st.booleans()):
        features.append(f"g{number}")
    if sequence:
        dim = 8
    width = 4 if sequence else draw(st.sampled_from([4, 8]))
    ranks: tuple[int, ...] = (draw(st.integers(0, world_size - 1)),)
    if sharding in ("column_wise", "table_column_wise"):
        ranks = tuple(draw(st.integers(0, world_size - 1)) for _ in range(dim // width))
    elif sharding == "grid_shard":
        ranks = (0,) * (dim // width)
    elif sharding == "table_row_wise":
        ranks = (0,)
    return Table(
        f"t{number}",
        tuple(features),
        rows=draw(st.sampled_from([7, 23] if sharding in _ROWS_SPLIT else [1, 2, 7, 23])),
        dim=dim,
        sharding=sharding,
        kernel="dense" if dense else "fused",
        pooling=draw(st.sampled_from(["SUM", "SUM", "MEAN"])),
        dtype=draw(st.sampled_from(["FP32", "FP32", "FP16"])),
        ranks=ranks,
    )


def _has(collections: Mapping[str, Collection], sharding: str) -> bool:
    return any(t.sharding == sharding for collection in collections.values() for t in collection.tables)


def _may_round(collections: Mapping[str, Collection]) -> bool:
    """Whether the model may answer in FP16.

    TorchRec garbles such answers if a rank looks up nothing, and MEAN pooling divides what was rounded.
    """
    return all(
        table.sharding in ("row_wise", "data_parallel")
        and not (table.pooling == "MEAN" and table.sharding == "row_wise")
        for collection in collections.values()
        for table in collection.tables
    )


def run_schedule(schedule: Schedule) -> Counter[str]:
    """Runs a schedule on this rank, comparing log and model after each dump.

    Returns:
        How often what was seen.
    """
    spec = schedule.spec
    counts: Counter[str] = Counter()
    tables = [table for collection in spec.collections.values() for table in collection.tables]
    counts["variable"] += spec.variable
    for table in tables:
        counts[table.sharding if spec.sharded else "unsharded"] += 1
    all_fused = spec.sharded and not any(t.kernel == "dense" or t.sharding == "data_parallel" for t in tables)
    saved: dict[str, list[torch.Tensor]] = {}
    held: torch.Tensor | None = None
    with Session(spec, **dict(schedule.options)) as session:
        for number, step in enumerate(schedule.steps, 1):
            kind = step.kind
            if kind in ("hold", "forward_only") and not all_fused:
                kind = "train"  # DistributedDataParallel and dense kernels want their backward at once
            session.step += 1
            if kind == "mark":
                _write_by_hand(session, step.seed)
            elif kind == "save":
                state = session.model.state_dict()
                saved = {key: [t.clone() for _, t in local_shards(value)] for key, value in state.items()}
            elif kind == "load":
                if held is not None:  # autograd minds weights that were written since the forward
                    session.trainer.finish(held)
                    held = None
                _load(session, saved, step.seed)
            else:
                held = _take(session, schedule, step, kind, held)
            session.dumper.step(session.step)
            if step.dump or number == len(schedule.steps):
                keys = session.upserts()
                counts["compared"] += session.compare()
                counts["dumps"] += 1
                rows = sum(table.rows for table in tables)
                counts["dumps of some rows"] += 0 < sum(map(len, keys.values())) < rows
                assert all(len(set(found)) == len(found) for found in keys.values())
            counts[kind] += 1
    return counts


def _take(
    session: Session, schedule: Schedule, step: Step, kind: str, held: torch.Tensor | None
) -> torch.Tensor | None:
    """Does one step; returns the loss whose backward the next step has to run."""
    session.model.train(kind != "eval_backward")
    with torch.set_grad_enabled(kind != "no_grad"):
        loss = session.lookup(_bags(schedule, step))
    session.model.train()
    if held is not None:
        session.trainer.finish(held)
    if kind == "hold":
        return loss
    if kind in ("train", "eval_backward", "empty"):
        session.trainer.finish(loss)
    return None


def _bags(schedule: Schedule, step: Step) -> dict[str, list[list[int]]]:
    rng = np.random.default_rng([step.seed, dist.get_rank()])
    numbers = np.random.default_rng(step.seed)  # of bags: the same on all ranks
    bags: dict[str, list[list[int]]] = {}
    for collection in schedule.spec.collections.values():
        for table in collection.tables:
            # TorchRec's dense kernel of sequences does not take empty bags on CPU.
            one = collection.sequence and (table.kernel == "dense" or table.sharding == "data_parallel")
            for feature in table.features:
                num_bags = int(numbers.integers(1, 4)) if schedule.spec.variable else 3
                sizes = rng.integers(0, 4, num_bags) * (step.kind != "empty")
                bags[feature] = [
                    rng.integers(0, min(schedule.vocabulary, table.rows), 1 if one else size).tolist()
                    for size in sizes
                ]
    return bags


def _write_by_hand(session: Session, seed: int) -> None:
    """Writes rows in a way that PyTorch does not count, the same on all ranks, and marks them."""
    rng = np.random.default_rng(seed)
    for module, collection in session.spec.collections.items():
        for table in collection.tables:
            rows = torch.from_numpy(rng.choice(table.rows, rng.integers(0, table.rows + 1), replace=False))
            for first_row, weight in session.weights(module, table.name):
                local = rows[(rows >= first_row) & (rows < first_row + len(weight))] - first_row
                weight.data[local] = weight.data[local] * 0.75 + 0.125
            session.dumper.mark(f"{module}.{table.name}", None if seed % 5 == 0 else rows)


def _load(session: Session, saved: Mapping[str, list[torch.Tensor]], seed: int) -> None:
    """Goes back to what was saved, in place as a distributed checkpoint does, and maybe as a whole."""
    state = session.model.state_dict()
    for key, tensors in saved.items():
        for (_, live), before in zip(local_shards(state[key]), tensors, strict=True):
            live.copy_(before)
    if seed % 2 or session.spec.output_dtensor:  # PyTorch does not count writes to local tensors of DTensors
        session.model.load_state_dict(state)
