from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D, ShardingPlan

from tests.recstore.cases import config
from tests.recstore.sharded_cases import (
    LR,
    TABLES,
    Case,
    Model,
    Oracle,
    assembled,
    batch,
    build,
    coefficients,
    load_weights,
    loss_of,
    optimizer_shards,
    shards_of,
    train_step,
    weights,
)
from tests.support.workers import run_on
from torchrec_ext.recstore import (
    DistEmbedding,
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingBagCollectionSharder,
    SparseAdagrad,
    SparseSGD,
)
from torchrec_ext.store import CounterFilter, FileStore, MemoryStore, SharedMemoryStore, Store
from torchrec_ext.store.flight.remote import RemoteStore
from torchrec_ext.store.flight.server import StoreServer

FUSED = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}


def sharded(collection: torch.nn.Module, sharder: Any, **changes: Any) -> Any:
    """A module sharded row-wise by hand."""
    world_size = dist.get_world_size()
    plan = construct_module_sharding_plan(
        collection,
        {table.name: changes.get("kind", row_wise(compute_kernel="fused")) for table in TABLES},
        sharder=sharder,
        world_size=world_size,
        local_size=world_size,
        device_type="cpu",
    )
    changes.get("change_plan", lambda plan: None)(plan)
    return DistributedModelParallel(
        torch.nn.ModuleDict({"rec": collection}),
        env=changes.get("env", ShardingEnv.from_process_group(dist.group.WORLD)),
        device=torch.device("cpu"),
        plan=ShardingPlan({"rec": plan}),
        sharders=[sharder],
    ).module["rec"]


def collection(**kwargs: Any) -> RecStoreEmbeddingBagCollection:
    return RecStoreEmbeddingBagCollection(tables=list(TABLES), **{"device": "meta", **kwargs})


# Ids


def wrong_ids(case: Case) -> None:
    rec = build(case).module.rec
    if dist.get_rank() == 1:  # before anything is sent: the other rank does not take part
        for ids, message in (
            ([11, 0, 0, 0], r"feature 'a', table 't0': id 11 is not in the table, which has 0 to 10"),
            ([0, 0, -1, 0], r"feature 'c', table 't1': id -1 is negative"),
            ([0, 1 << 40, 0, 0], r"feature 'b', table 't0': id 1099511627776 is not in the table"),
        ):
            features = KeyedJaggedTensor(
                ["a", "b", "c", "d"], torch.tensor(ids), lengths=torch.ones(4, dtype=torch.int32)
            )
            with pytest.raises(ValueError, match=message):
                rec(features)
        with pytest.raises(KeyError, match="no feature 'b'"):
            rec(KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1])))
    train_step(build(case), 0, case)


def test_a_wrong_id_is_refused_by_the_rank_that_has_it_before_anything_is_sent() -> None:
    run_on(2, wrong_ids, Case())


def int32_and_other_features() -> Any:
    rec = build(Case()).module.rec
    features = batch(0, dist.get_rank())
    jagged = {key: features[key] for key in reversed(features.keys())}
    jagged["other"] = features["a"]
    reordered = KeyedJaggedTensor(
        list(jagged),
        torch.cat([one.values() for one in jagged.values()]).int(),
        weights=torch.rand(sum(len(one.values()) for one in jagged.values())),
        lengths=torch.cat([one.lengths() for one in jagged.values()]).int(),
    )
    expected, found = rec(features).wait(), rec(reordered).wait()
    torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=0)


def test_order_dtype_weights_and_other_features_of_a_batch_do_not_matter() -> None:
    run_on(2, int32_and_other_features)


def of_various_batch_sizes() -> None:
    rank = dist.get_rank()
    inverse = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 2, 3], [2, 2, 1, 0]])
    strides = [2, 1, 4, 3]
    lengths = torch.tensor([1, 2, 0, 1, 0, 2, 1, 1, 0, 3])
    features = KeyedJaggedTensor(
        ["a", "b", "c", "d"],
        torch.randint(2, (int(lengths.sum()),), generator=torch.Generator().manual_seed(rank)),
        lengths=lengths,
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(["a", "b", "c", "d"], inverse),
    )
    plain = collection(device=None)
    load_weights(plain)
    assert_close(build(Case()).module.rec(features).wait(), plain(features))


def test_features_may_differ_in_batch_size() -> None:
    run_on(2, of_various_batch_sizes)


# Weights


def move_weights() -> None:
    rank = dist.get_rank()
    features = batch(0, rank)
    plain = EmbeddingBagCollection(tables=list(TABLES), device=torch.device("cpu"))
    rec = build(Case()).module.rec
    load_weights(plain)
    expected = plain(features)

    # from EmbeddingBagCollection: whole tensors (as `load_weights` does)
    rec.load_state_dict(plain.state_dict())
    assert_close(rec(features).wait(), expected)
    # to TorchRec's sharded one, and from it
    theirs = sharded(
        EmbeddingBagCollection(tables=list(TABLES), device=torch.device("meta")),
        EmbeddingBagCollectionSharder(FUSED),
    )
    assert rec.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(rec.state_dict())
    assert_close(theirs(features).wait(), expected, rtol=1e-5)  # its mean adds 1e-6 to the length
    mine = sharded(collection(), RecStoreEmbeddingBagCollectionSharder(FUSED))
    mine.load_state_dict(theirs.state_dict())
    assert_close(mine(features).wait(), expected)
    # to EmbeddingBagCollection
    state = {}
    for key, value in mine.state_dict().items():
        state[key] = torch.empty(value.size()) if rank == 0 else None
        value.gather(0, state[key])
    if rank == 0:
        fresh = EmbeddingBagCollection(tables=list(TABLES), device=torch.device("cpu"))
        fresh.load_state_dict(state)
        assert_close(fresh(features), expected)


def assert_close(found: Any, expected: Any, rtol: float = 0.0) -> None:
    for key, values in expected.to_dict().items():
        torch.testing.assert_close(found[key], values, rtol=rtol, atol=rtol)


def test_weights_move_to_and_from_torchrecs_collections() -> None:
    run_on(2, move_weights)


def carried() -> Any:
    before = collection(device=None, dynamic={"t1": {"filter": CounterFilter(2)}}, enable_fusion=False)
    state = {f"embedding_bags.{name}.weight": w for name, w in weights().items() if name != "t1"}
    before.load_state_dict(state, strict=False)
    for step in range(2):  # admits some ids
        before(batch(step, 0))
    features = batch(0, dist.get_rank())
    with torch.no_grad():
        expected = before.eval()(features)
    for optimizer in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD):
        rec = sharded(before, RecStoreEmbeddingBagCollectionSharder({"optimizer": optimizer})).eval()
        with torch.no_grad():
            assert_close(rec(features).wait(), expected)


def test_rows_that_a_collection_has_before_it_is_sharded_go_along() -> None:
    run_on(2, carried)


def reopened(path: str) -> None:
    """Trains in a store of this rank's own, and shards another collection over the same store."""

    def of_rank(rank: int) -> Store:
        return FileStore(f"{path}/{rank}")

    dynamic = {"dynamic": {"t1": {}}, "enable_fusion": False}
    sharder = RecStoreEmbeddingBagCollectionSharder(FUSED, store=of_rank)
    features = batch(2, dist.get_rank())
    rec = sharded(collection(**dynamic), sharder)
    for step in range(2):
        train_step_of(rec, step)
    with torch.no_grad():
        expected = rec.eval()(features).wait()
    rec.store.close()
    again = sharded(collection(device=None, **dynamic), sharder).eval()
    with torch.no_grad():
        assert_close(again(features).wait(), expected)


def test_rows_that_a_store_has_already_stay(tmp_path: Path) -> None:
    run_on(2, reopened, str(tmp_path))


def wrong_state() -> None:
    rec = build(Case()).module.rec
    state = {f"embedding_bags.{name}.weight": rows for name, rows in weights().items()}
    with pytest.raises(RuntimeError, match=r"Missing key.*embedding_bags.t1.weight"):
        rec.load_state_dict({key: rows for key, rows in state.items() if "t1" not in key})
    with pytest.raises(RuntimeError, match=r"embedding_bags.t0.weight: expected 11 rows, not 12"):
        rec.load_state_dict({**state, "embedding_bags.t0.weight": torch.zeros(12, 4)})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*embedding_bags.t0.bias"):
        rec.load_state_dict({**state, "embedding_bags.t0.bias": torch.zeros(4)})


def test_a_state_that_does_not_fit_is_refused() -> None:
    run_on(2, wrong_state)


def touched() -> None:
    rec = build(Case()).module.rec
    first = rec.tables.rows["t0"].first
    held = rec.store.pull_many([("t0", torch.arange(first, first + 2))])
    assert rec.store.refresh_many([("t0", held[0])]) == 0
    load_weights(rec)
    assert rec.store.refresh_many([("t0", held[0])]) == 2
    rec.reset_parameters()
    assert rec.store.refresh_many([("t0", held[0])]) == 2


def test_a_store_knows_of_rows_that_were_loaded() -> None:
    run_on(2, touched)


# Optimizers


def in_backward(classes: bool) -> Any:
    model = Model(Case())
    if classes:
        apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": LR})
    sharder = RecStoreEmbeddingBagCollectionSharder(
        None if classes else {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": LR}
    )
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), sharders=[sharder])
    load_weights(dmp.module.rec)
    outputs = [train_step(dmp, step, Case()) for step in range(3)]
    assert all(hasattr(parameter, "_in_backward_optimizers") for parameter in dmp.parameters())
    return outputs


def test_an_optimizer_in_backward_is_the_fused_one() -> None:
    for found, expected in zip(run_on(2, in_backward, True), run_on(2, in_backward, False), strict=True):
        for step in range(3):
            for key, values in expected[step][0].items():
                np.testing.assert_array_equal(found[step][0][key], values)


def as_torchrec_does(theirs: bool, optimizer: EmbOptimType) -> Any:
    fused = {"optimizer": optimizer, "learning_rate": LR}
    if theirs:
        collections = EmbeddingBagCollection(tables=list(TABLES), device=torch.device("meta"))
        rec = sharded(collections, EmbeddingBagCollectionSharder(fused))
    else:
        rec = sharded(collection(), RecStoreEmbeddingBagCollectionSharder(fused))
    load_weights(rec)
    schedule = torch.optim.lr_scheduler.StepLR(rec.fused_optimizer, step_size=1, gamma=0.5)
    for step in range(4):
        rec.fused_optimizer.zero_grad()
        output = rec(batch(step, dist.get_rank())).wait().to_dict()
        # TorchRec puts averaged features behind the others.
        values = torch.cat([output[key] for key in sorted(output)], dim=1)
        (values * coefficients(step, dist.get_rank(), values.shape)).sum().backward()
        rec.fused_optimizer.step()
        schedule.step()
    state = rec.fused_optimizer.state_dict()["state"]
    slots = shards_of({key: value for slots in state.values() for key, value in slots.items()})
    return shards_of(rec.state_dict()), slots, sorted(state)


@pytest.mark.parametrize(
    "optimizer", [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]
)
def test_weights_optimizer_state_and_schedules_are_those_of_torchrecs_fused_optimizers(
    optimizer: EmbOptimType,
) -> None:
    found, expected = (run_on(2, as_torchrec_does, theirs, optimizer) for theirs in (False, True))
    assert found[0][2] == expected[0][2]
    for position in (0, 1):
        mine = assembled([part[position] for part in found])
        theirs = assembled([part[position] for part in expected])
        assert mine.keys() == theirs.keys()
        for key, values in theirs.items():
            assert mine[key].shape == values.shape
            np.testing.assert_allclose(mine[key], values, rtol=1e-4, atol=1e-4)


def two_optimizers() -> None:
    rec = build(Case()).module.rec
    with pytest.raises(ValueError, match="fused_params or of apply_optimizer_in_backward"):
        SparseAdagrad([rec])


def test_a_sparse_optimizer_does_not_train_what_is_fused() -> None:
    run_on(2, two_optimizers)


@pytest.mark.parametrize(
    ("fused_params", "message"),
    [
        ({"optimizer": EmbOptimType.LAMB}, "no optimizer .*LAMB"),
        ({"learning_rate": 0.1}, "need an optimizer"),
        ({"optimizer": EmbOptimType.EXACT_SGD, "eps": 1e-3}, "SGD has .*no .'eps'"),
        ({"optimizer": EmbOptimType.ADAM, "weight_decay": 0.1}, "no .'weight_decay'"),
        ({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": -1.0}, "lr must not be negative"),
    ],
)
def test_fused_params_that_a_store_does_not_know_are_refused(
    fused_params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RecStoreEmbeddingBagCollectionSharder(fused_params)


def codecs() -> Any:
    registry = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16),
        device=torch.device("cpu"),
    )
    rec = sharded(collection(), RecStoreEmbeddingBagCollectionSharder(FUSED, registry))
    load_weights(rec)
    return [train_step_of(rec, step) for step in range(3)]


def train_step_of(rec: Any, step: int) -> Any:
    output = rec(batch(step, dist.get_rank())).wait()
    loss_of([output], step).backward()
    return {key: value.detach().numpy() for key, value in output.to_dict().items()}


def test_pooled_rows_can_travel_in_torchrecs_codecs() -> None:
    outcomes, oracle = run_on(2, codecs), Oracle("sgd")
    for step in range(3):
        for rank, expected in enumerate(oracle.step(step, 2)):
            for key, values in expected.items():
                np.testing.assert_allclose(outcomes[rank][step][key], values, rtol=1e-2, atol=1e-2)


# Stores


def train_in(store: Any, own: bool = False) -> Any:
    opened = store() if callable(store) else store
    case = Case("adagrad", device=None, kwargs={"store": opened}) if own else Case("adagrad")
    model = build(case) if own else build(case, store=opened)
    assert model.module.rec.store is opened
    assert model.module.rec.tables.shared
    dist.barrier()  # `build` loads each rank's rows
    for step in range(3):
        train_step(model, step, case)
    dist.barrier()
    shards = shards_of(model.module.rec.state_dict()), optimizer_shards(model, "rec.")
    return shards, opened.pull("t0", torch.arange(11)).numpy()


def remote(urls: list[str]) -> RemoteStore:
    return RemoteStore(urls)


class Opener:
    """Opens a store in the process of a rank."""

    def __init__(self, kind: Callable[..., Store], *args: Any) -> None:
        self.kind, self.args = kind, args

    def __call__(self) -> Store:
        return self.kind(*self.args)


def check_shared(outcomes: Any) -> None:
    oracle = Oracle("adagrad")
    for step in range(3):
        oracle.step(step, 2)
    trained = assembled([shards[0] for shards, _ in outcomes])
    for name, rows in oracle.weights.items():
        expected = rows.detach().numpy()
        np.testing.assert_allclose(trained[f"embedding_bags.{name}.weight"], expected, rtol=1e-5, atol=1e-5)
    for _, whole in outcomes:  # each rank sees the rows of all
        np.testing.assert_allclose(whole, oracle.weights["t0"].detach().numpy(), rtol=1e-5, atol=1e-5)
    assert set(assembled([shards[1] for shards, _ in outcomes])) == {f"t{n}.momentum1" for n in range(4)}


@pytest.mark.parametrize("own", [True, False])
def test_ranks_share_a_store_in_shared_memory(own: bool) -> None:
    name = f"test-{uuid.uuid4().hex}"
    try:
        check_shared(run_on(2, train_in, Opener(SharedMemoryStore, name), own))
    finally:
        SharedMemoryStore(name).unlink()


@pytest.mark.parametrize("own", [True, False])
def test_ranks_share_a_store_on_another_host(own: bool) -> None:
    server = StoreServer(MemoryStore())
    try:
        check_shared(run_on(2, train_in, Opener(remote, [server.url]), own))
    finally:
        server.close()


# What is refused


def uneven(plan: Any) -> None:
    first, second = plan["t0"].sharding_spec.shards
    first.shard_sizes, second.shard_sizes, second.shard_offsets = [5, 4], [6, 4], [5, 0]


def refused() -> None:
    world = dist.group.WORLD
    sharder = RecStoreEmbeddingBagCollectionSharder(FUSED)
    with pytest.raises(ValueError, match="table 't0': RecStore tables are sharded row_wise, not table_wise"):
        sharded(collection(), sharder, kind=table_wise(rank=0, compute_kernel="fused"))
    with pytest.raises(ValueError, match=r"table 't0': 11 rows on 2 ranks are .* blocks of 6, not \[5, 6\]"):
        sharded(collection(), sharder, change_plan=uneven)
    env = ShardingEnv.from_process_group(world)
    env.output_dtensor = True
    with pytest.raises(ValueError, match="output_dtensor"):
        sharded(collection(), sharder, env=env)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="cannot be replicated"):
        sharded(collection(), sharder, env=ShardingEnv2D(world, world, world, mesh, 2))
    tiny = RecStoreEmbeddingBagCollection(tables=[config("x", 1, 4, ["a"])], device="meta", dynamic={"x": {}})
    with pytest.raises(ValueError, match="table 'x': num_embeddings=1 leave rank 1 of 2 without rows"):
        DistributedModelParallel(
            torch.nn.ModuleDict({"rec": tiny}), device=torch.device("cpu"), sharders=[sharder]
        )


def unsharded() -> list[list[str]]:
    """What is said of rows that each rank would train alone."""
    parts = {"rec": collection(device=None), "over": torch.nn.Linear(2, 2)}
    forgotten = DistributedModelParallel(torch.nn.ModuleDict(parts), device=torch.device("cpu"))
    said = []
    for module in (
        forgotten.module["rec"],
        DistEmbedding(4, 4, "words"),
        build(Case(fused=False)).module.rec,
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            SparseSGD([module])
        said.append([str(warning.message) for warning in caught])
    return said


def test_ranks_that_train_their_own_rows_of_an_unsharded_collection_are_warned() -> None:
    (of_collection,), (of_embedding,), of_sharded = run_on(2, unsharded)[0]
    assert "each of the 2 ranks trains its own rows of tables ['t0', 't1', 't2', 't3']" in of_collection
    assert "tables ['words']" in of_embedding
    assert not of_sharded


def test_what_cannot_be_sharded_is_refused() -> None:
    run_on(2, refused)
