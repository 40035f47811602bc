from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from tests.recstore.cases import InterfaceOnly, config
from tests.recstore.sharded_cases import (
    LR,
    OPTIMIZERS,
    SPARSE,
    Case,
    Oracle,
    assembled,
    build,
    coefficients,
    optimizer_shards,
    shards_of,
    train_step,
)
from tests.support.workers import run_on
from torchrec_ext.recstore import RecStoreEmbeddingBagCollection, RecStoreEmbeddingBagCollectionSharder
from torchrec_ext.store import CounterFilter, MemoryStore, SharedMemoryStore, Store, Uniform

OPTIMIZER_NAMES = list(OPTIMIZERS)


def save(model: DistributedModelParallel, path: str, **more: Any) -> None:
    state = {"model": model.state_dict(), "fused": model.fused_optimizer.state_dict(), **more}
    dcp.save(state, checkpoint_id=path)


def load(model: DistributedModelParallel, path: str, sparse: Any = None) -> None:
    state = {"model": model.state_dict(), "fused": model.fused_optimizer.state_dict()}
    if sparse is not None:
        state["sparse"] = sparse.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["fused"])
    if sparse is not None:
        sparse.load_state_dict(state["sparse"])


def train_and_save(case: Case, path: str) -> None:
    model = build(case)
    sparse = None if case.fused else SPARSE[case.optimizer](model.module.rec)
    for step in range(3):
        train_step(model, step, case, sparse)
    save(model, path, **({} if sparse is None else {"sparse": sparse.state_dict()}))


def load_and_train(case: Case, path: str) -> tuple[Any, Any]:
    model = build(case)
    sparse = None if case.fused else SPARSE[case.optimizer](model.module.rec)
    train_step(model, 9, case, sparse)  # something to be overwritten
    load(model, path, sparse)
    for step in range(3, 5):
        train_step(model, step, case, sparse)
    return shards_of(model.module.rec.state_dict()), optimizer_shards(model, "rec.")


@pytest.mark.parametrize("world_size", [3, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
@pytest.mark.parametrize("fused", [True, False])
def test_a_checkpoint_goes_on_at_another_world_size(
    tmp_path: Path, world_size: int, optimizer: str, fused: bool
) -> None:
    case = Case(optimizer, fused)
    run_on(2, train_and_save, case, str(tmp_path))
    outcomes = run_on(world_size, load_and_train, case, str(tmp_path))

    oracle = Oracle(optimizer)
    for step in range(5):
        oracle.step(step, 2 if step < 3 else world_size)
    trained = assembled([weights for weights, _ in outcomes])
    for name, rows in oracle.weights.items():
        found = trained[f"embedding_bags.{name}.weight"]
        np.testing.assert_allclose(found, rows.detach().numpy(), rtol=1e-5, atol=1e-5)
    state = assembled([state for _, state in outcomes])
    names = {"sgd": [], "adagrad": ["momentum1"], "rowwise_adagrad": ["momentum1"]}
    expected = names.get(optimizer, ["momentum1", "exp_avg_sq"])
    assert set(state) == {f"{name}.{slot}" for name in oracle.weights for slot in expected}


# Dynamic tables, against a collection on one process

ANY_IDS = torch.tensor([-(2**63), -7, -1, 0, 1, 2, 3, 5, 10**12, 10**12 + 1, 2**62, 2**63 - 1])
ROOM = 40


def dynamic_collection(device: str | None) -> RecStoreEmbeddingBagCollection:
    options = {"initializer": Uniform(-1.0, 1.0, seed=5), "default_value": 0.25}
    return RecStoreEmbeddingBagCollection(
        tables=[config("x", ROOM, 4, ["a"]), config("y", ROOM, 4, ["b"]), config("z", 30, 4, ["c"])],
        device=device,
        enable_fusion=False,
        dynamic={"x": {**options, "filter": CounterFilter(3)}, "y": options},
    )


def dynamic_batch(step: int, rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (3, 5), generator=generator)
    counts = lengths.sum(dim=1).tolist()
    ids = [ANY_IDS[torch.randint(len(ANY_IDS), (n,), generator=generator)] for n in counts[:2]]
    ids.append(torch.randint(30, (counts[2],), generator=generator))
    return KeyedJaggedTensor(["a", "b", "c"], torch.cat(ids), lengths=lengths.view(-1))


def far(rank: int) -> Store:
    return InterfaceOnly(MemoryStore())


class Opened:
    """Opens the store of this name on each rank."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> SharedMemoryStore:
        return SharedMemoryStore(self.name)


def build_dynamic(optimizer: str, store: Any) -> DistributedModelParallel:
    torch.manual_seed(0)
    if isinstance(store, Opened):
        store = store()
    fused = {"optimizer": OPTIMIZERS[optimizer], "learning_rate": LR}
    model = DistributedModelParallel(
        torch.nn.ModuleDict({"rec": dynamic_collection("meta")}),
        device=torch.device("cpu"),
        sharders=[RecStoreEmbeddingBagCollectionSharder(fused, store=store)],
    )
    rec = model.module["rec"]
    rec.load_state_dict({"embedding_bags.z.weight": torch.zeros(30, 4)}, strict=False)
    return model


def step_dynamic(model: DistributedModelParallel, step: int) -> Any:
    rank = dist.get_rank()
    values = model.module["rec"](dynamic_batch(step, rank)).wait().values()
    (values * coefficients(step, rank, values.shape)).sum().backward()
    return values.detach().numpy()


def contents(store: Store) -> Any:
    """What a store holds of the dynamic tables."""
    snapshot = store.snapshot()
    found = {}
    for name in ("x", "y"):
        table = snapshot.tables[name]
        rows = {
            int(key): (
                table.weight[n].numpy(),
                {slot: values[n].numpy() for slot, values in table.slots.items()},
                int(table.frequencies[n]),
                int(table.last_used[n]),
            )
            for n, key in enumerate(table.keys)
        }
        waiting = dict(zip(table.candidates.tolist(), table.candidate_counts.tolist(), strict=True))
        found[name] = (rows, waiting)
    return found


def train_dynamic_and_save(optimizer: str, path: str, store: Any = None) -> Any:
    model = build_dynamic(optimizer, store)
    outputs = [step_dynamic(model, step) for step in range(3)]
    save(model, path)
    return outputs, contents(model.module["rec"].store)


def load_dynamic_and_train(optimizer: str, path: str, store: Any = None) -> Any:
    model = build_dynamic(optimizer, store)
    step_dynamic(model, 9)
    load(model, path)
    outputs = [step_dynamic(model, step) for step in range(3, 5)]
    dist.barrier()  # the last updates of all ranks are in a store that they share
    return outputs, contents(model.module["rec"].store)


def one_process(optimizer: str, world_sizes: list[int]) -> Any:
    """The outputs of each step by rank, and the contents, of all ranks' batches on one process."""
    collection = dynamic_collection(None)
    collection.load_state_dict({"embedding_bags.z.weight": torch.zeros(30, 4)}, strict=False)
    train = SPARSE[optimizer](collection)
    outputs = []
    for step, world_size in enumerate(world_sizes):
        batches = [dynamic_batch(step, rank) for rank in range(world_size)]
        together = [[part[name] for part in batches] for name in ("a", "b", "c")]
        values = collection(
            KeyedJaggedTensor(
                ["a", "b", "c"],
                torch.cat([part.values() for parts in together for part in parts]),
                lengths=torch.cat([part.lengths() for parts in together for part in parts]),
            )
        ).values()
        per_rank = values.split(len(values) // world_size)
        grads = [coefficients(step, rank, part.shape) / world_size for rank, part in enumerate(per_rank)]
        values.backward(torch.cat(grads))
        train.step()
        outputs.append([part.detach().numpy() for part in per_rank])
    return outputs, contents(collection.store)


def merged(parts: list[Any]) -> Any:
    """The contents of all ranks; no key may be on two."""
    merged = {}
    for name in parts[0]:
        rows: dict[int, Any] = {}
        waiting: dict[int, int] = {}
        for part in parts:
            assert not rows.keys() & part[name][0].keys() and not waiting.keys() & part[name][1].keys()
            rows.update(part[name][0])
            waiting.update(part[name][1])
        merged[name] = (rows, waiting)
    return merged


def assert_same_contents(found: Any, expected: Any) -> None:
    for name, (rows, waiting) in expected.items():
        assert found[name][1] == waiting
        assert found[name][0].keys() == rows.keys()
        for key, (weight, slots, *counts) in rows.items():
            found_weight, found_slots, *found_counts = found[name][0][key]
            assert found_counts == counts
            np.testing.assert_allclose(found_weight, weight, rtol=1e-5, atol=1e-5)
            for slot, values in slots.items():
                np.testing.assert_allclose(found_slots[slot], values, rtol=1e-5, atol=1e-5)


def assert_same_outputs(found: list[Any], expected: list[Any], first_step: int) -> None:
    for rank, (outputs, _) in enumerate(found):
        for step, values in enumerate(outputs, first_step):
            np.testing.assert_allclose(values, expected[step][rank], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world_size", [3, 1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
def test_dynamic_tables_train_as_on_one_process_and_go_on_at_another_world_size(
    tmp_path: Path, world_size: int, optimizer: str
) -> None:
    store = far if optimizer == "adagrad" else None
    before = run_on(2, train_dynamic_and_save, optimizer, str(tmp_path), store)
    after = run_on(world_size, load_dynamic_and_train, optimizer, str(tmp_path), store)

    outputs, expected = one_process(optimizer, [2, 2, 2])
    assert_same_outputs(before, outputs, 0)
    assert_same_contents(merged([found for _, found in before]), expected)
    outputs, expected = one_process(optimizer, [2, 2, 2, world_size, world_size])
    assert_same_outputs(after, outputs, 3)
    assert_same_contents(merged([found for _, found in after]), expected)


@pytest.mark.parametrize(("from_shared", "to_shared"), [(True, False), (False, True), (True, True)])
def test_dynamic_tables_move_between_a_shared_store_and_stores_of_each_rank(
    tmp_path: Path, from_shared: bool, to_shared: bool
) -> None:
    names = [f"test-{uuid.uuid4().hex}" for _ in range(2)]
    first, second = (
        Opened(name) if is_shared else None
        for name, is_shared in zip(names, (from_shared, to_shared), strict=True)
    )
    try:
        before = run_on(2, train_dynamic_and_save, "adam", str(tmp_path), first)
        after = run_on(3, load_dynamic_and_train, "adam", str(tmp_path), second)
    finally:
        for name in names:
            SharedMemoryStore(name).unlink()
    outputs, _ = one_process("adam", [2, 2, 2])
    assert_same_outputs(before, outputs, 0)
    outputs, expected = one_process("adam", [2, 2, 2, 3, 3])
    assert_same_outputs(after, outputs, 3)
    found = [found for _, found in after]
    assert_same_contents(found[0] if to_shared else merged(found), expected)
