from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.streamable import Pipelineable

from tests.recstore.cases import InterfaceOnly
from tests.recstore.sharded_cases import Case, batch, build, loss_of, shards_of, train_step
from tests.support.workers import run_on
from torchrec_ext.recstore import prefetched
from torchrec_ext.store import MemoryStore, Rows, Store

STEPS = 5


def far(rank: int) -> Store:
    return InterfaceOnly(MemoryStore())


STORES: dict[str, Any] = {"near": None, "far": far}


def plain(case: Case) -> Any:
    model = build(case)
    outputs = [train_step(model, step, case) for step in range(STEPS)]
    if case.company:
        outputs = [[ebc, rec] for ebc, _, rec in outputs]
    return outputs, shards_of(model.module.rec.state_dict())


@dataclass
class Batch(Pipelineable):
    features: KeyedJaggedTensor
    step: int

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.features.to(device), self.step)

    def record_stream(self, stream: Any) -> None:
        self.features.record_stream(stream)

    def pin_memory(self) -> Batch:
        return self


class WithLoss(nn.Module):
    """The RecStore collection of a model, and the ordinary one beside it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.ebc, self.rec = model.ebc, model.rec

    def forward(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        return evaluate(self.ebc(batch.features), self.rec(batch.features), batch)


@torch.fx.wrap
def evaluate(ebc: Any, rec: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
    outputs = [ebc.wait(), rec.wait()]
    found = [{key: value.detach().numpy() for key, value in one.to_dict().items()} for one in outputs]
    return loss_of(outputs, batch.step), found


def pipelined(case: Case, store: str) -> Any:
    model = build(case, store=STORES[store])
    pipeline = TrainPipelineSparseDist(
        WithLoss(model.module), model.fused_optimizer, torch.device("cpu"), execute_all_batches=True
    )
    batches = iter([Batch(batch(step, dist.get_rank()), step) for step in range(STEPS)])
    outputs = [pipeline.progress(batches) for _ in range(STEPS)]
    return outputs, shards_of(model.module.rec.state_dict())


def with_handles(case: Case, store: str, depth: int) -> Any:
    model = build(case, store=STORES[store])
    rec = model.module.rec
    outputs = []
    batches = [Batch(batch(step, dist.get_rank()), step) for step in range(STEPS)]
    for one in prefetched(rec, batches, depth=depth, features=lambda one: one.features):
        output = rec(one.features).wait()
        loss_of([output], one.step).backward()
        outputs.append([{key: value.detach().numpy() for key, value in output.to_dict().items()}])
    return outputs, shards_of(rec.state_dict())


def assert_identical(found: Any, expected: Any) -> None:
    for (outputs, shards), (expected_outputs, expected_shards) in zip(found, expected, strict=True):
        for step in range(STEPS):
            for found_one, expected_one in zip(outputs[step], expected_outputs[step], strict=True):
                for key, values in expected_one.items():
                    np.testing.assert_array_equal(found_one[key], values)
        for key, pieces in expected_shards.items():
            for (start, rows), (expected_start, expected_rows) in zip(shards[key], pieces, strict=True):
                assert start == expected_start
                np.testing.assert_array_equal(rows, expected_rows)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("store", ["near", "far"])
def test_a_sparse_dist_pipeline_trains_as_a_plain_loop_does(world_size: int, store: str) -> None:
    case = Case("adagrad", company=True)
    assert_identical(run_on(world_size, pipelined, case, store), run_on(world_size, plain, case))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("store", ["near", "far"])
def test_prefetched_batches_train_as_a_plain_loop_does(store: str, depth: int) -> None:
    case = Case("rowwise_adagrad")
    assert_identical(run_on(2, with_handles, case, store, depth), run_on(2, plain, case))


class Overlapping(InterfaceOnly):
    """Updates of a step wait until the read for the next step has begun."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self._pulled = threading.Semaphore(0)
        self._overlapped = {STEPS: True}

    def pull_many(self, *args: Any, **kwargs: Any) -> list[Rows]:
        self._pulled.release()
        return self.behind.pull_many(*args, **kwargs)

    def update_many(self, *args: Any, step: int, **kwargs: Any) -> None:
        if step not in self._overlapped:
            if step == 1:
                assert self._pulled.acquire(timeout=240)  # of step 1 itself
            self._overlapped[step] = self._pulled.acquire(timeout=240)
        assert self._overlapped[step]
        self.behind.update_many(*args, step=step, **kwargs)


STORES["overlapping"] = lambda rank: Overlapping()


@pytest.mark.parametrize("loop", ["pipeline", "handles"])
def test_the_next_rows_are_read_while_this_batch_trains(loop: str) -> None:
    case = Case("sgd", company=loop == "pipeline")
    if loop == "pipeline":
        found = run_on(2, pipelined, case, "overlapping")
    else:
        found = run_on(2, with_handles, case, "overlapping", 1)
    assert_identical(found, run_on(2, plain, case))


class Broken(InterfaceOnly):
    broken = False

    def pull_many(self, *args: Any, **kwargs: Any) -> list[Rows]:
        if self.broken:
            raise OSError("the line is down")
        return self.behind.pull_many(*args, **kwargs)


def misuse() -> None:
    first, second = batch(0, dist.get_rank()), batch(2, dist.get_rank())
    rec = build(Case(), store=far).module.rec
    other = build(Case(), store=far).module.rec

    handle = rec.issue_fused_prefetch(first)
    with pytest.raises(RuntimeError, match="for the module that issued it"):
        other.set_fused_prefetch_handle(handle)
    rec.set_fused_prefetch_handle(handle)
    rec(first).wait()
    assert handle.reread_rows == 0
    with pytest.raises(RuntimeError, match="this one was used"):
        rec.set_fused_prefetch_handle(handle)

    rec.set_fused_prefetch_handle(rec.issue_fused_prefetch(first))
    with pytest.raises(RuntimeError, match="issued for another batch"):
        rec(second)
    rec(second).wait()  # and the next pass goes on without


def other_weights() -> None:
    """They are sent with the ids, when the handle is issued."""
    rec = build(Case(weighted=True)).module.rec
    features = batch(0, dist.get_rank(), weighted=True)
    others = KeyedJaggedTensor(
        features.keys(), features.values(), weights=features.weights() * 2, lengths=features.lengths()
    )
    rec.set_fused_prefetch_handle(rec.issue_fused_prefetch(features))
    with pytest.raises(RuntimeError, match="issued for another batch"):
        rec(others)
    rec.set_fused_prefetch_handle(rec.issue_fused_prefetch(features))
    rec(features).wait()


def test_a_handle_is_for_the_weights_that_were_sent() -> None:
    run_on(2, other_weights)


def reread() -> list[int | None]:
    """Rows that one step changes are read again for the next batch."""
    rec = build(Case(), store=far).module.rec
    features = batch(0, dist.get_rank())
    handle = rec.issue_fused_prefetch(features)
    loss_of([rec(features).wait()], 0).backward()
    rec.set_fused_prefetch_handle(handle)
    rec(features).wait()
    again = rec.issue_fused_prefetch(features)
    rec.set_fused_prefetch_handle(again)
    rec(features).wait()
    return [handle.reread_rows, again.reread_rows]


def broken_line() -> None:
    stores = []

    def make(rank: int) -> Store:
        stores.append(Broken(MemoryStore()))
        return stores[-1]

    rec = build(Case(), store=make).module.rec
    stores[0].broken = True
    rec.set_fused_prefetch_handle(rec.issue_fused_prefetch(batch(0, dist.get_rank())))
    with pytest.raises(OSError, match="the line is down"):
        rec(batch(0, dist.get_rank()))


def test_a_handle_is_for_one_pass_of_one_batch_of_one_module() -> None:
    run_on(2, misuse)


def test_only_rows_that_changed_are_read_again() -> None:
    for first, second in run_on(2, reread):
        assert first > 0
        assert second == 0


def test_what_goes_wrong_in_the_background_is_raised_where_the_handle_is_used() -> None:
    run_on(2, broken_line)
