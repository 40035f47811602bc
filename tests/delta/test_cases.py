"""The cases in which a delta of a ZCH table is easily wrong, each staged on its own."""

from __future__ import annotations

import copy
import logging
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.mc_modules import ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.support.faults import log_of, replaced_fsync
from tests.support.models import Spec, Table, answers, loss_of, one_table
from tests.support.schedules import compare
from tests.support.session import Session
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaDumper, DeltaLog
from torchrec_ext.errors import UnsupportedTableError
from torchrec_ext.zch import find_zch_tables

ranks = pytest.mark.parametrize("world_size", [1, 2])

# One id at a time owns the shard's only free row, and every batch may evict it.
one_free_row = partial(one_table, policy="lru", eviction_interval=1)


def _rows_of(ids: list[int]) -> list[int]:
    """The same ids on every shard of a table with ``hash_size=60``."""
    block = 60 // dist.get_world_size()
    return [i + block * rank for rank in range(dist.get_world_size()) for i in ids]


def _admitted_after_its_only_lookup() -> None:
    with Session(one_table(eviction_interval=2, rows=12)) as session:
        session.train(_rows_of([7]))
        assert not session.map_of()
        session.train(_rows_of([8]))
        assert len(session.map_of()) == 2, "both ids are admitted by the second batch"
        rows = session.check()
        assert ("upsert", 7) in rows["mc.t0"]


def _evicted_id_is_deleted() -> None:
    with Session(one_free_row(rows=2 * dist.get_world_size())) as session:
        session.train(_rows_of([1]))
        assert ("upsert", 1) in session.check()["mc.t0"]
        session.train(_rows_of([2]))
        assert 1 not in session.map_of()
        rows = session.check()
        assert ("delete", 1) in rows["mc.t0"]
        assert ("upsert", 2) in rows["mc.t0"]
        state = session.log.replay()["mc.t0"]
        assert 1 not in state.keys
        np.testing.assert_array_equal(state.lookup([1]), state.fallback[:1])


def _readmitted_on_another_row() -> None:
    with Session(one_table(policy="lru", eviction_interval=1, rows=4)) as session:
        session.train([1])
        session.check()
        published_row = session.map_of()[1]
        rng = np.random.default_rng(0)
        while session.map_of().get(1, published_row) == published_row:
            session.train(rng.integers(0, 9, 2).tolist())
        assert session.step < 200
        rows = session.check()["mc.t0"]
        assert ("upsert", 1) in rows
        assert ("delete", 1) not in rows


def _readmitted_on_the_same_row_in_one_interval() -> None:
    with Session(one_free_row(rows=2 * dist.get_world_size())) as session:
        session.train(_rows_of([1]))
        session.check()
        before = session.map_of()
        published = session.log.replay()["mc.t0"].lookup([1])
        session.train(_rows_of([2]))
        session.model.eval()
        session.train([])  # keeps 2 in place
        session.model.train()
        with torch.no_grad():
            session.lookup(_rows_of([1]))  # admits 1 again, on the row as init_fn left it
        assert session.map_of() == before, "the case was not staged"
        rows = session.check()
        assert [key for op, key in rows["mc.t0"] if op == "delete"] == []
        assert ("upsert", 1) in rows["mc.t0"]
        assert (session.log.replay()["mc.t0"].lookup([1]) != published).any()


def _fallback_row_goes_on_training() -> None:
    with Session(one_free_row(rows=2 * dist.get_world_size(), threshold=True)) as session:
        for _ in range(3):
            session.train(_rows_of([1]))
            session.train(_rows_of([2, 2, 3]))
        session.check()
        before = session.log.replay()["mc.t0"].fallback
        session.model.eval()
        session.train(_rows_of([11, 12]))  # never admitted: trains the fallback row only
        rows = session.check()
        assert rows == {}
        assert (session.log.replay()["mc.t0"].fallback != before).all()


def _nothing_happened() -> None:
    with Session(one_table()) as session:
        session.train(_rows_of([1, 2, 3]))
        session.train(_rows_of([1, 2, 3]))
        session.check()
        assert session.check() == {}
        manifest = session.log.dumps()[-1]
        assert manifest.rows == 0
        assert len(manifest.parts) == dist.get_world_size()


def _no_grad_in_train_mode_admits_and_resets() -> None:
    with Session(one_free_row(rows=2 * dist.get_world_size())) as session:
        session.train(_rows_of([1]))
        session.check()
        with torch.no_grad():
            session.lookup(_rows_of([2]))
        rows = session.check()
        assert ("delete", 1) in rows["mc.t0"]
        assert ("upsert", 2) in rows["mc.t0"]


def _eval_mode_with_a_backward_trains() -> None:
    with Session(one_table()) as session:
        session.train(_rows_of([1, 2, 3]))
        session.train(_rows_of([1, 2, 3]))
        session.check()
        session.model.eval()
        session.train([2])
        assert session.check() == {"mc.t0": [("upsert", 2)]}


def _lookup_without_a_backward_marks_nothing() -> None:
    with Session(one_table(eviction_interval=1)) as session:
        session.train(_rows_of([1, 2, 3]))
        session.check()
        session.lookup(_rows_of([1, 2, 3]))
        session.model.eval()
        with torch.no_grad():
            session.lookup(_rows_of([1, 2, 3]))
        assert session.check() == {}


def _lookup_of_the_next_batch_before_this_backward() -> None:
    with Session(one_free_row(rows=2 * dist.get_world_size())) as session:
        held = session.lookup(_rows_of([1]))
        session.check()
        for number in range(2, 8):
            # The next lookup evicts the id whose gradient is still to come.
            following = session.lookup(_rows_of([number % 3]))
            session.check()
            held.backward()
            held = following
            session.end_step()
            session.check()
        held.backward()
        session.check()


def _same_table_name_in_two_modules() -> None:
    spec = Spec(
        {
            "a": (Table("t0", ("f0",), rows=8, policy="lru", eviction_interval=1),),
            "b": (Table("t0", ("f1",), rows=12, dim=4, policy="lru", eviction_interval=1),),
        }
    )
    with Session(spec) as session:
        for start in range(0, 20, 3):
            session.train({"f0": [_rows_of([start, start + 1])], "f1": [_rows_of([start + 5])]})
            session.check()
        assert session.dumper.tables == ("a.t0", "b.t0")


def _one_feature_on_two_tables() -> None:
    spec = Spec(
        {
            "mc": (
                Table("t0", ("f0", "f1"), rows=8, policy="lru", eviction_interval=1),
                Table("t1", ("f0",), rows=14, dim=4, policy="lfu", eviction_interval=2),
            )
        }
    )
    with Session(spec) as session:
        for start in range(0, 20, 3):
            session.train({"f0": [_rows_of([start, start + 1])], "f1": [_rows_of([start + 5])]})
            session.check()


def _id_on_a_shard_that_it_does_not_route_to() -> None:
    """As a checkpoint leaves it that was loaded at another world size."""
    with Session(one_table(rows=4 * dist.get_world_size(), eviction_interval=1)) as session:
        session.train(_rows_of([1, 2]))
        session.check()
        if dist.get_rank() == 1:
            mcm = session.collision_module()
            state = {name: tensor.clone() for name, tensor in mcm.state_dict().items()}
            state["_mch_sorted_raw_ids"][0] = 7  # routes to rank 0
            mcm.load_state_dict(state)
            assert 7 in session.map_of()
        session.train(_rows_of([2]))
        rows = session.check()
        assert ("upsert", 7) not in rows["mc.t0"]


@ranks
@pytest.mark.parametrize(
    "case",
    [
        _admitted_after_its_only_lookup,
        _evicted_id_is_deleted,
        _readmitted_on_the_same_row_in_one_interval,
        _fallback_row_goes_on_training,
        _nothing_happened,
        _no_grad_in_train_mode_admits_and_resets,
        _eval_mode_with_a_backward_trains,
        _lookup_without_a_backward_marks_nothing,
        _lookup_of_the_next_batch_before_this_backward,
        _same_table_name_in_two_modules,
        _one_feature_on_two_tables,
    ],
    ids=lambda case: case.__name__.strip("_"),
)
def test_case(case: Any, world_size: int) -> None:
    run_on(world_size, case)


def test_id_on_a_shard_that_it_does_not_route_to_answers_nobody() -> None:
    run_on(2, _id_on_a_shard_that_it_does_not_route_to)


def test_id_that_returns_to_another_row_is_not_deleted() -> None:
    run_on(1, _readmitted_on_another_row)


def _two_dumpers(first_closes_first: bool) -> None:
    with Session(one_table(policy="lru", eviction_interval=1), attach=False) as session:
        sharded = session.model.module.mc
        often = DeltaDumper(session.model, f"{session.directory}/often", interval_steps=1)
        seldom = DeltaDumper(session.model, f"{session.directory}/seldom", interval_steps=3)
        dumpers = [often, seldom] if first_closes_first else [seldom, often]
        for start in range(0, 21, 3):
            session.train(_rows_of([start, start + 1]))
            for dumper in (often, seldom):
                dumper.step(session.step)
        dumpers[0].close()
        assert "compute" in vars(sharded)
        session.train(_rows_of([1, 2]))
        dumpers[1].step(session.step)
        dumpers[1].close()
        assert "compute" not in vars(sharded), "the last to leave restores the module"
        assert not [name for name in vars(sharded) if "torchrec_ext" in name]
        last = "seldom" if first_closes_first else "often"
        compare(session.model, session.spec, f"{session.directory}/{last}", sorted(session.seen))
        steps = [dump.step for dump in DeltaLog(f"{session.directory}/seldom").dumps()]
        assert steps[:2] == [3, 6]


@ranks
@pytest.mark.parametrize("first_closes_first", [True, False])
def test_two_dumpers_on_one_model(first_closes_first: bool, world_size: int) -> None:
    run_on(world_size, _two_dumpers, first_closes_first)


def _someone_else_wraps_compute(wraps_first: bool) -> None:
    with Session(one_table(eviction_interval=1), attach=False) as session:
        sharded = session.model.module.mc
        calls = []

        def wrap() -> Any:
            inner = sharded.compute

            def theirs(*args: Any) -> Any:
                calls.append(1)
                return inner(*args)

            sharded.compute = theirs
            return theirs

        theirs = wrap() if wraps_first else None
        dumper = DeltaDumper(session.model, session.directory, interval_steps=1)
        theirs = theirs or wrap()
        session.train([1, 2])
        dumper.step(1)
        dumper.flush()
        compare(session.model, session.spec, session.directory, sorted(session.seen))
        dumper.close()
        assert vars(sharded)["compute"] is theirs
        before = len(calls)
        session.train([3])
        assert len(calls) == before + 1


@pytest.mark.parametrize("wraps_first", [True, False])
def test_other_users_of_compute_keep_their_hook(wraps_first: bool) -> None:
    run_on(1, _someone_else_wraps_compute, wraps_first)


def _torchrec_delta_tracker() -> None:
    with Session(one_table(policy="lru", eviction_interval=1), attach=False) as session:
        tracker = ModelDeltaTrackerTrec(session.model)
        inner = session.model.module.mc._embedding_module
        recorded = inner.post_lookup_tracker_fn
        assert recorded is not None
        with DeltaDumper(session.model, session.directory, interval_steps=1) as dumper:
            for start in range(0, 12, 2):
                session.train(_rows_of([start, start + 1]))
                tracker.step()
                dumper.step(session.step)
                dumper.flush()
                compare(session.model, session.spec, session.directory, sorted(session.seen))
        assert inner.post_lookup_tracker_fn is recorded
        tracker.get_unique_ids()


@ranks
def test_torchrec_own_delta_tracker_on_the_same_model(world_size: int) -> None:
    run_on(world_size, _torchrec_delta_tracker)


def _pipeline() -> None:
    spec = one_table(policy="lru", eviction_interval=1, rows=8)
    with Session(spec, attach=False) as session:
        model = session.model
        pipeline = TrainPipelineSparseDist(
            model,
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1),
            device=torch.device("cpu"),
            custom_model_fwd=lambda batch: (loss_of(model(batch)), None),
        )
        batches = iter([session.batch(_rows_of([i, (i * i) % 13])) for i in range(12)])
        steps = 0
        with DeltaDumper(model, session.directory, interval_steps=4) as dumper:
            while True:
                try:
                    pipeline.progress(batches)
                except StopIteration:
                    break
                steps += 1
                dumper.step(steps)
        assert steps == 12
        assert [dump.step for dump in session.log.dumps()] == [4, 8, 12]
        pipeline.detach()
        compare(model, spec, session.directory, sorted(session.seen))


@ranks
def test_train_pipeline_sparse_dist(world_size: int) -> None:
    run_on(world_size, _pipeline)


class Modulo(ManagedCollisionModule):
    """A managed-collision module of a kind that keeps no map of ids to rows."""

    def __init__(self, zch_size: int, device: torch.device, buckets: int, offset: int = 0, **_: Any) -> None:
        super().__init__(device, [0, zch_size], skip_state_validation=True)
        self._size, self._buckets, self._offset = zch_size, buckets, offset

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        return features

    profile = preprocess

    def remap(self, features: dict[str, JaggedTensor], *_: Any, **__: Any) -> dict[str, JaggedTensor]:
        return {
            name: JaggedTensor(values=f.values() % self._size + self._offset, lengths=f.lengths())
            for name, f in features.items()
        }

    def forward(self, features: dict[str, JaggedTensor], *_: Any, **__: Any) -> dict[str, JaggedTensor]:
        return self.remap(features)

    def evict(self) -> None:
        return None

    def output_size(self) -> int:
        return self._size

    def input_size(self) -> int:
        return 60

    def buckets(self) -> int:
        return self._buckets

    def validate_state(self) -> None: ...

    def open_slots(self) -> torch.Tensor:
        return torch.zeros(1)

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> Modulo:
        first, last = output_id_range
        return Modulo(last - first, self._device, len(output_segments) - 1, first)


def _unknown_collision_module() -> None:
    spec = Spec(
        {
            "mc": (
                Table("t0", ("f0",), policy="lru", eviction_interval=1),
                Table("odd", ("f1",), mch_class=Modulo),
            )
        }
    )
    with Session(spec, attach=False) as session:
        messages: list[str] = []
        with (
            log_of("torchrec_ext.delta.opening", messages.append),
            DeltaDumper(session.model, session.directory, interval_steps=1) as dumper,
        ):
            for start in range(4):
                session.train({"f0": [_rows_of([start])], "f1": [_rows_of([start])]})
                dumper.step(session.step)
        assert dumper.tables == ("mc.t0",)
        (warning,) = messages
        assert "mc.odd" in warning and "Modulo" in warning
        state = session.log.replay()
        assert list(state) == ["mc.t0"]
        ids = sorted(session.seen)
        with torch.no_grad():
            session.model.eval()
            answer = session.model(session.batch({"f0": [[i] for i in ids]}))["mc"]["f0"]
        np.testing.assert_array_equal(state["mc.t0"].lookup(ids), answer.numpy())
        for patterns in (["mc.*"], ["mc.odd"]):
            with pytest.raises(UnsupportedTableError, match=r"mc\.odd.*Modulo"):
                DeltaDumper(session.model, session.directory, interval_steps=1, tables=patterns)


@ranks
def test_unknown_collision_module_is_skipped_with_one_warning(world_size: int) -> None:
    run_on(world_size, _unknown_collision_module)


def _double_hash(ids: torch.Tensor, hash_size: int) -> torch.Tensor:
    return (ids * 2 + 1) % hash_size


def _hashed_keys() -> None:
    with Session(one_table(hash_func=_double_hash, policy="lru", eviction_interval=1)) as session:
        for start in range(0, 12, 2):
            session.train(_rows_of([start, start + 1]))
        session.dump()
        ids = [i for i in sorted(session.seen) if abs(i) < 2**61]
        expected = answers(session.model, session.spec, "mc", "t0", ids).numpy()
        raw = session.log.replay(hash_fns={"mc.t0": _double_hash})["mc.t0"]
        np.testing.assert_array_equal(raw.lookup(ids), expected)
        hashed = session.log.replay()["mc.t0"]
        assert hashed.info.key_space == "hashed"
        keys = _double_hash(torch.tensor(ids), 60).numpy()
        np.testing.assert_array_equal(hashed.lookup(keys), expected)


@ranks
def test_tables_with_a_hash_function_answer_hashed_keys_or_raw_ids(world_size: int) -> None:
    run_on(world_size, _hashed_keys)


def _state_loaded_under_the_dumper() -> None:
    with Session(one_table(policy="lru", eviction_interval=1, rows=8)) as session:
        session.train(_rows_of([1, 2]))
        saved = {name: tensor.clone() for name, tensor in session.collision_module().state_dict().items()}
        for start in range(3, 15, 2):
            session.train(_rows_of([start, start + 1]))
        session.check()
        session.collision_module().load_state_dict(saved)
        rows = session.check()
        assert ("upsert", 1) in rows["mc.t0"]
        # A map that was loaded and then changed by an eviction before the next dump.
        session.collision_module().load_state_dict(saved)
        session.train(_rows_of([20]))
        session.check()
        # A whole model, in which the same ids own the same rows.
        whole = {
            name: one.clone() if isinstance(one, torch.Tensor) else copy.deepcopy(one)
            for name, one in session.model.state_dict().items()
        }
        session.train(_rows_of([20]))
        session.check()
        session.model.load_state_dict(whole)
        assert ("upsert", 20) in session.check()["mc.t0"]
        # Weights alone, in all ways that there are to load them.
        collection = session.model.module.mc._embedding_module
        for module in (session.model, session.model.module.mc, collection):
            state = {key: one for key, one in module.state_dict().items() if key.endswith(".weight")}
            assert state
            for one in state.values():
                for shard in one.local_shards():
                    shard.tensor.mul_(0.5)
            module.load_state_dict(state, strict=False)
            session.check()
        # Weights written by other means have to be marked.
        session.dumper.mark("mc.t0")
        session.model.module.mc._embedding_module.embedding_bags.t0.weight.data.add_(1.0)
        session.check()


@ranks
def test_a_collision_map_loaded_under_the_dumper_is_noticed(world_size: int) -> None:
    run_on(world_size, _state_loaded_under_the_dumper)


def _half_precision() -> None:
    spec = one_table(policy="lru", eviction_interval=1, dtype="FP16")
    with Session(spec) as session:
        for start in range(0, 12, 2):
            session.train(_rows_of([start, start + 1]))
            session.check()
        assert session.log.dumps()[-1].tables["mc.t0"].dtype == "float16"


@ranks
def test_half_precision_weights_are_exact(world_size: int) -> None:
    run_on(world_size, _half_precision)


def _by_the_clock() -> None:
    with Session(one_table(), interval_steps=None, interval_seconds=0.05) as session:
        while len(session.log.dumps()) < 3 and session.step < 10_000:
            session.train(_rows_of([session.step % 20]))
            session.dumper.flush()
            dist.barrier()
        assert session.step < 10_000
        compare_steps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(compare_steps, [d.step for d in session.log.dumps()])
        assert all(steps == compare_steps[0] for steps in compare_steps)


@ranks
def test_dumps_by_the_clock_happen_at_the_same_step_on_every_rank(world_size: int) -> None:
    run_on(world_size, _by_the_clock)


def _mean_pooling() -> None:
    spec = Spec(
        {
            "mc": (
                Table("t0", ("f0",), policy="lru", eviction_interval=1, pooling="MEAN"),
                Table("t1", ("f1",), dim=4, policy="lru", eviction_interval=1),
            )
        }
    )
    with Session(spec) as session:
        for start in range(0, 12, 2):
            ids = _rows_of([start, start + 1])
            session.train({"f0": [ids, ids[:1]], "f1": [ids, []]})
            session.check()


@ranks
def test_mean_pooling_answers_what_torchrec_makes_of_a_bag_of_one(world_size: int) -> None:
    run_on(world_size, _mean_pooling)


def _rounded_outputs(dtype: str) -> None:
    with Session(one_table(policy="lru", eviction_interval=1, output_dtype=dtype)) as session:
        for start in range(0, 12, 2):
            session.train(_rows_of([start, start + 1]))
            session.check()


@ranks
def test_rounded_outputs_are_dumped_as_answered(world_size: int) -> None:
    run_on(world_size, _rounded_outputs, "FP16")


def _negative_zero(sequence: bool) -> None:
    with Session(one_table(eviction_interval=1, sequence=sequence)) as session:
        session.train(_rows_of([1, 2]))
        table = find_zch_tables(session.model)[0]
        table.weight().fill_(-0.0)
        session.dumper.mark("mc.t0")
        session.check()


@pytest.mark.parametrize("sequence", [False, True])
def test_negative_zeros_are_dumped_as_answered(sequence: bool) -> None:
    run_on(2, _negative_zero, sequence)


def _lookup_before_a_dumper_joins_or_returns() -> None:
    with Session(one_table(policy="lru", eviction_interval=1), attach=False) as session:
        session.train(_rows_of([1, 2]))
        first = DeltaDumper(session.model, session.directory, interval_steps=1)
        first.step(1)
        held = session.lookup(_rows_of([1, 2]))
        first.close()
        second = DeltaDumper(session.model, session.directory, interval_steps=1)
        second.step(2)
        held.backward()
        second.step(3)
        second.close()
        compare(session.model, session.spec, session.directory, sorted(session.seen))


@ranks
def test_gradient_of_a_lookup_under_an_earlier_dumper_is_not_missed(world_size: int) -> None:
    run_on(world_size, _lookup_before_a_dumper_joins_or_returns)


def _marked_after_the_last_dump() -> None:
    messages: list[str] = []
    with (
        log_of("torchrec_ext.delta.dumper", messages.append),
        Session(one_table(eviction_interval=1)) as session,
    ):
        session.train(_rows_of([1, 2]))
        session.check()
        if dist.get_rank() == 0:
            session.dumper.mark("mc.t0")
    told = [message for message in messages if "rows marked after the last dump" in message]
    assert len(told) == (dist.get_rank() == 0)


@ranks
def test_marks_after_the_last_dump_are_said_to_be_lost_and_hang_no_rank(world_size: int) -> None:
    run_on(world_size, _marked_after_the_last_dump)


def _marked_under_two_dumpers() -> None:
    with Session(one_table(policy="lru", eviction_interval=1, rows=8), attach=False) as session:
        directories = [f"{session.directory}/{name}" for name in ("a", "b")]
        dumpers = [DeltaDumper(session.model, d, interval_steps=1) for d in directories]
        session.train(_rows_of([1, 2]))
        saved = {name: t.clone() for name, t in session.collision_module().state_dict().items()}
        for start in range(3, 9, 2):
            session.train(_rows_of([start, start + 1]))
        for dumper in dumpers:
            dumper.step(1)
        session.collision_module().load_state_dict(saved)
        dumpers[0].mark("mc.t0")
        for dumper, directory in zip(dumpers, directories, strict=True):
            dumper.step(2)
            dumper.close()
            compare(session.model, session.spec, directory, sorted(session.seen))


@ranks
def test_a_mark_of_one_dumper_does_not_hide_a_loaded_map_from_another(world_size: int) -> None:
    run_on(world_size, _marked_under_two_dumpers)


def _log_handler_that_raises() -> None:
    def fail(message: str) -> None:
        raise OSError("no room for logs")

    with log_of("torchrec_ext.delta.writer", fail), Session(one_table(eviction_interval=1)) as session:
        logging.getLogger("torchrec_ext.delta.writer").setLevel(logging.INFO)
        for step in range(1, 4):
            session.train(_rows_of([step]))
            session.check()
    logging.getLogger("torchrec_ext.delta.writer").setLevel(logging.NOTSET)


@ranks
def test_a_log_handler_that_raises_does_not_stop_the_writer(world_size: int) -> None:
    run_on(world_size, _log_handler_that_raises)


def _dump_then_step() -> None:
    with Session(one_table(eviction_interval=1), interval_steps=2) as session:
        for step in range(1, 5):
            session.lookup(_rows_of([step])).backward()
            if step == 2:
                session.dumper.dump(step, metadata={"checkpoint": "two"})
            assert (session.dumper.step(step) is not None) == (step == 4)
        session.dumper.flush()
        dumps = session.log.dumps()
        assert [(d.step, d.metadata) for d in dumps] == [(2, {"checkpoint": "two"}), (4, {})]


@ranks
def test_a_dump_of_ones_own_takes_the_place_of_the_one_that_is_due(world_size: int) -> None:
    run_on(world_size, _dump_then_step)


def _some_tables_only() -> None:
    spec = Spec(
        {
            "a": (Table("t0", ("f0",), policy="lru", eviction_interval=1),),
            "b": (Table("t0", ("f1",), policy="lru", eviction_interval=1),),
        }
    )
    with Session(spec, attach=False) as session:
        for step, tables in enumerate((None, ["a.*"], ["b.*"], None), 1):
            session.train({"f0": [_rows_of([step])], "f1": [_rows_of([step + 9])]})
            with DeltaDumper(session.model, session.directory, interval_steps=1, tables=tables) as dumper:
                dumper.step(step)
            assert tuple(session.log.replay()) == dumper.tables
        compare(session.model, spec, session.directory, sorted(session.seen))


@ranks
def test_replay_answers_for_the_tables_of_the_last_dump_only(world_size: int) -> None:
    run_on(world_size, _some_tables_only)


class Interrupt(BaseException):
    """As a signal handler may raise it anywhere on the training thread."""


def _interrupted(max_pending_bytes: int | None, moment: str) -> None:
    options = {"policy": "lru", "eviction_interval": 1, "rows": 8}
    with Session(one_table(**options), max_pending_bytes=max_pending_bytes) as session:
        for start in range(3):
            session.train(_rows_of([start, start + 1]))
        session.check()
        for start in range(3, 9):
            session.train(_rows_of([start, start + 1]))
        writer = session.dumper._writer
        whole = getattr(writer, moment)

        def interrupt(*args: Any) -> None:
            setattr(writer, moment, whole)
            raise Interrupt

        setattr(writer, moment, interrupt)
        with pytest.raises(Interrupt):
            session.dump()
        for start in range(9, 12):
            session.train(_rows_of([start, start + 1]))
        session.check()


@pytest.mark.parametrize("moment", ["submit", "wait_until_written"])
@pytest.mark.parametrize("max_pending_bytes", [None, 1])
def test_a_dump_that_was_interrupted_loses_nothing(max_pending_bytes: int | None, moment: str) -> None:
    run_on(1, _interrupted, max_pending_bytes, moment)


def _stall() -> None:
    training_waits = threading.Event()
    waited, took, results = [], [], []

    def slow(descriptor: int) -> None:
        assert training_waits.wait(240)
        if len(waited) == 1:
            threading.Event().wait(0.05)
            waited.append(time.perf_counter())

    def heard(message: str) -> None:
        if "training waits" in message and not waited:
            waited.append(time.perf_counter())
            training_waits.set()

    with Session(one_table(eviction_interval=1), max_pending=1, interval_steps=1) as session:
        with log_of("torchrec_ext.delta.writer", heard), replaced_fsync(slow):
            for step in range(1, 5):
                session.lookup(_rows_of([step])).backward()
                began = time.perf_counter()
                results.append(session.dumper.step(step))
                took.append(time.perf_counter() - began)
            session.dumper.flush()
        stalls = [dump.stats[dist.get_rank()].stall_seconds for dump in session.log.dumps()]
    assert stalls == [result.stall_seconds for result in results]
    assert all(stall <= seconds for stall, seconds in zip(stalls, took, strict=True))
    began, ended = waited
    assert stalls[1] > ended - began, "the second dump waits until the first one's files are synced"


@ranks
def test_the_manifest_says_how_long_training_stood_still_waiting_included(world_size: int) -> None:
    run_on(world_size, _stall)


def _forgotten() -> None:
    messages: list[str] = []
    with (
        log_of("torchrec_ext.delta.dumper", messages.append),
        Session(one_table(), attach=False) as session,
    ):
        with DeltaDumper(session.model, session.directory, interval_steps=1):
            pass
        dumper = DeltaDumper(session.model, session.directory, interval_steps=1)
        dumper.step(1)
        dumper.flush()
        del dumper
    assert "step() was never called" in messages[0]
    assert "a DeltaDumper was not closed" in messages[-1]


def test_forgetting_to_step_or_to_close_is_said_so() -> None:
    run_on(1, _forgotten)
