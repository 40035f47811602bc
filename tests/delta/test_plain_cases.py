"""The delta dumper follows tables without managed collision: one case at a time."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from tests.support import models
from tests.support.faults import full_disk
from tests.support.plain_models import (
    Collection,
    Spec,
    Table,
    answers,
    build,
    build_unsharded,
    one_table,
    sharding_of,
)
from tests.support.plain_schedules import Session, local_shards
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaDumper, DeltaDumpError, DeltaLog
from torchrec_ext.delta.buffers import CHUNK_BYTES
from torchrec_ext.errors import CorruptTableError, UnsupportedTableError
from torchrec_ext.plain import find_plain_tables
from torchrec_ext.plain.layout import Shard, bands_of
from torchrec_ext.plain.support import why_unsupported
from torchrec_ext.zch import internals

SHARDINGS = {
    "row_wise": {},
    "table_wise": {"ranks": (1,)},
    "column_wise": {"ranks": (1, 0)},
    "table_column_wise": {"ranks": (0, 1)},
    "table_row_wise": {},
    "grid_shard": {"ranks": (0, 0)},
    "data_parallel": {},
}


def _only_looked_up_rows(sharding: str, ranks: dict[str, Any]) -> None:
    spec = one_table(features=("f0", "f1"), sharding=sharding, **ranks)
    with Session(spec) as session:
        assert session.check() == {"ebc.t0": list(range(11))}
        assert session.upserts() == {}
        # Each rank looks up other rows.
        mine = [[1, 2], [2]] if dist.get_rank() == 0 else [[9], [10, 10]]
        session.train({"f0": mine, "f1": [[], [5]]})
        assert session.check() == {"ebc.t0": [1, 2, 5, 9, 10]}
        session.train({"f0": [[], []], "f1": [[], []]})
        assert session.check() == {}


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_rows_that_any_rank_trained_are_dumped_once_and_no_others(sharding: str) -> None:
    run_on(2, _only_looked_up_rows, sharding, SHARDINGS[sharding])


def _a_lookup_without_a_backward() -> None:
    with Session(one_table(), first_dump="delta") as session:
        session.lookup([1, 2])
        with torch.no_grad():
            session.lookup([3])
        assert session.upserts() == {}
        session.model.eval()
        session.train([4])
        assert session.upserts() == {"ebc.t0": [4]}
        # A pipeline looks up the next batch before this batch's backward.
        this, after = session.lookup([5]), session.lookup([6])
        this.backward()
        assert session.upserts() == {"ebc.t0": [5]}
        after.backward()
        assert session.upserts() == {"ebc.t0": [6]}


def test_a_row_is_marked_when_its_gradient_arrives() -> None:
    run_on(2, _a_lookup_without_a_backward)


def _features_of_all_kinds() -> None:
    spec = Spec(
        {
            "ebc": Collection(
                (
                    Table("t0", ("f0", "f1", "f2"), pooling="MEAN"),
                    Table("t1", ("f3",), rows=30, dim=4),
                    # In the same kernel on each rank; of t2 both column shards are on one.
                    Table("t2", ("f4", "f5"), sharding="column_wise", ranks=(1, 1)),
                    Table("t3", ("f6",), dtype="FP16", sharding="column_wise", ranks=(0, 1)),
                ),
                weighted=True,
            )
        },
        optimizer="adagrad",
    )
    with Session(spec) as session:
        session.check()
        bags = {f"f{n}": [[n], [], [n + 1, n]] for n in range(7)}
        session.train(bags)
        expected = {"ebc.t0": [0, 1, 2, 3], "ebc.t1": [3, 4], "ebc.t2": [4, 5, 6], "ebc.t3": [6, 7]}
        assert session.check() == expected


def test_weighted_features_of_several_tables_with_bags_of_any_number() -> None:
    run_on(2, _features_of_all_kinds)


def _variable_batches() -> None:
    tables = (
        Table("t0", ("f0", "f1")),
        Table("t1", ("f2",), rows=30),
        Table("t2", ("f3",), sharding="column_wise", ranks=(1, 0)),
    )
    with Session(Spec({"ebc": Collection(tables)}, variable=True)) as session:
        session.check()
        bags = {"f0": [[9]], "f1": [[1], [2, 0], [3]], "f2": [[]], "f3": [[4, 5], [6]]}
        session.train(bags)
        assert session.check() == {"ebc.t0": [0, 1, 2, 3, 9], "ebc.t2": [4, 5, 6]}


def test_features_with_different_numbers_of_bags() -> None:
    run_on(2, _variable_batches)


def _no_bags(changes: dict[str, Any]) -> None:
    with Session(one_table(features=("f0", "f1"), **changes)) as session:
        session.check()
        session.train({"f0": [], "f1": []})
        assert session.check() == {}
        session.train({"f0": [[1]], "f1": [[2]]})
        assert session.check() == {"ebc.t0": [1, 2]}


@pytest.mark.parametrize("changes", [{}, {"sharding": "table_wise"}, {"sharding": "column_wise"}])
def test_a_batch_without_bags_trains_nothing(changes: dict[str, Any]) -> None:
    run_on(2, _no_bags, changes)


def _ids_out_of_their_table() -> None:
    with Session(one_table(rows=5, sharding="table_wise")) as session:
        session.check()
        session.train({"f0": [[7], [3]]})  # FBGEMM looks row 0 up instead, and says so
        assert session.check() == {"ebc.t0": [0, 3]}


def test_an_id_out_of_its_table_trains_row_0() -> None:
    run_on(2, _ids_out_of_their_table)


def _selected() -> None:
    spec = Spec({"ebc": Collection((Table("t0", ("f0",)), Table("t1", ("f1",))))})
    with Session(spec, tables=["*.t1"]) as session:
        assert session.upserts() == {"ebc.t1": list(range(11))}
        session.train([1, 2])
        assert session.upserts() == {"ebc.t1": [1, 2]}


def test_tables_of_one_kernel_can_be_left_out() -> None:
    run_on(2, _selected)


def _moved_without_a_lookup(kernel: str, optimizer: str, dense_optimizer: str) -> None:
    spec = one_table(kernel=kernel, optimizer=optimizer, dense_optimizer=dense_optimizer)
    with Session(spec) as session:
        session.check()
        session.train([1])
        session.train([2])
        session.check()
        session.train([3])
        session.train([3])  # "ema" moves the table every second step
        assert set(session.check()["ebc.t0"]) > {3}


@pytest.mark.parametrize(
    ("kernel", "optimizer", "dense_optimizer"),
    [
        ("fused", "ema", "sgd"),
        ("dense", "sgd", "momentum"),
        ("dense", "sgd", "weight_decay"),
        ("dense", "sgd", "adam"),
    ],
)
def test_rows_that_the_optimizer_moves_without_a_lookup_are_not_missed(
    kernel: str, optimizer: str, dense_optimizer: str
) -> None:
    run_on(2, _moved_without_a_lookup, kernel, optimizer, dense_optimizer)


def _written(output_dtensor: bool, sharding: str, ranks: dict[str, Any]) -> None:
    spec = one_table(sharding=sharding, output_dtensor=output_dtensor, **ranks)
    with Session(spec) as session:
        session.check()
        for first_row, weight in session.weights("ebc", "t0"):
            if first_row <= 3 < first_row + len(weight):
                weight.data[3 - first_row] += 1.0  # PyTorch does not count what is written so
        session.dumper.mark("ebc.t0", torch.tensor([3, 7]))
        assert session.check() == {"ebc.t0": [3, 7]}
        state = session.model.state_dict()
        for _, weight in local_shards(state["ebc.embedding_bags.t0.weight"]):
            weight.mul_(0.5)
        if output_dtensor:  # writes to whose local tensors PyTorch does not count
            session.model.load_state_dict(state)
        assert session.check() == {"ebc.t0": list(range(11))}
        session.dumper.mark("ebc.t0")
        assert session.check() == {"ebc.t0": list(range(11))}
        for rows in ([11], [-1]):
            with pytest.raises(ValueError, match=r"rows of ebc.t0 are 0 to 10"):
                session.dumper.mark("ebc.t0", torch.tensor(rows))


@pytest.mark.parametrize("output_dtensor", [False, True])
@pytest.mark.parametrize("sharding", ["row_wise", "column_wise", "data_parallel"])
def test_rows_written_by_hand_are_dumped(sharding: str, output_dtensor: bool) -> None:
    run_on(2, _written, output_dtensor, sharding, SHARDINGS[sharding])


def _marked_on_one_rank() -> None:
    with Session(one_table(sharding="column_wise", ranks=(1, 0))) as session:
        session.check()
        if dist.get_rank() == 1:
            session.dumper.mark("ebc.t0", torch.tensor([4]))
        assert session.check() == {"ebc.t0": [4]}


def test_a_mark_on_one_rank_dumps_whole_vectors() -> None:
    run_on(2, _marked_on_one_rank)


def _bags_of_all_modes() -> None:
    with Session(one_table(), attach=False) as session:
        for mode, dtype in itertools.product(("sum", "mean", "max"), (torch.float32, torch.float16)):
            bag = nn.EmbeddingBag(4, 3, mode=mode, dtype=dtype)
            with torch.no_grad():
                bag.weight[1], bag.weight[2] = 0.0, -0.0
            directory = f"{session.directory}/{mode}-{dtype}"
            with DeltaDumper(nn.ModuleDict({"bag": bag}), directory, interval_steps=1) as dumper:
                dumper.step(1)
            expected = bag(torch.arange(4)[:, None]).float().detach().numpy()
            replayed = DeltaLog(directory).replay()["bag"].lookup(range(4))
            assert replayed.tobytes() == expected.tobytes(), (mode, dtype)


def test_bags_of_all_modes_answer_the_sign_of_zero_too() -> None:
    run_on(1, _bags_of_all_modes)


def _negative_zeros(sequence: bool, kernel: str, sharding: str) -> None:
    sharded = {"sharding": sharding, **SHARDINGS[sharding]}
    for dtype in ("FP32", "FP16"):
        with Session(one_table(sequence=sequence, kernel=kernel, dtype=dtype, **sharded)) as session:
            for first_row, weight in session.weights("ebc", "t0"):
                if not first_row:
                    weight[:2] = -0.0
            session.check()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("kernel", "sharding"),
    [
        ("fused", "row_wise"),
        ("fused", "column_wise"),
        ("dense", "table_wise"),
        ("dense", "column_wise"),
        ("dense", "data_parallel"),
    ],
)
def test_the_sign_of_zero_is_the_models(sequence: bool, kernel: str, sharding: str) -> None:
    run_on(2, _negative_zeros, sequence, kernel, sharding)


def _very_long_vectors(dim: int, options: dict[str, Any]) -> None:
    bag = nn.EmbeddingBag(3, dim, mode="sum")
    with Session(one_table(), attach=False) as session:
        with DeltaDumper(
            nn.ModuleDict({"bag": bag}), session.directory, interval_steps=1, **options
        ) as dumper:
            dumper.step(1)
            with torch.no_grad():
                bag.weight[1] = 0.5
            dumper.step(2)
        assert session.log.read(2)["key_id"].to_pylist() == [1]
        replayed = session.log.replay()["bag"].lookup(range(3))
        assert np.array_equal(replayed, bag.weight.detach().numpy())


@pytest.mark.parametrize("options", [{}, {"max_pending_bytes": 1}])
@pytest.mark.parametrize("longer", [0, 1])
def test_a_vector_may_be_longer_than_a_piece_of_the_memory_for_vectors(
    longer: int, options: dict[str, Any]
) -> None:
    run_on(1, _very_long_vectors, CHUNK_BYTES // 4 + longer, options)


def _unsharded() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(6, 4, mode="sum", sparse=True, dtype=torch.bfloat16)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Session(one_table(), attach=False) as session:
        with DeltaDumper(model, session.directory, interval_steps=1) as dumper:
            model.bag(torch.tensor([[1, 2]])).sum().backward()
            optimizer.step()
            dumper.step(1)
            optimizer.zero_grad()
            model.bag(torch.tensor([[5]])).sum().backward()
            optimizer.step()
            dumper.step(2)
        state = session.log.replay()["bag"]
        expected = model.bag(torch.arange(6)[:, None]).float().detach().numpy()
        assert np.array_equal(state.lookup(range(6)), expected)
        assert session.log.read(2)["key_id"].to_pylist() == [5]
        assert state.info.source == "plain"
        assert state.info.dtype == "bfloat16"


def test_an_embedding_bag_of_a_single_process_is_followed() -> None:
    run_on(1, _unsharded)


def _shrunk(directory: Path) -> None:
    for rows in (11, 4):
        spec = one_table(rows=rows, sharding="table_wise", ranks=(1,))
        with DeltaDumper(build(spec), directory, interval_steps=1) as dumper:
            dumper.step(1)
    state = DeltaLog(directory).replay()["ebc.t0"]
    assert state.keys.tolist() == [0, 1, 2, 3]


def test_rows_of_a_larger_table_that_had_the_name_before_are_deleted(tmp_path: Path) -> None:
    run_on(2, _shrunk, tmp_path / "deltas")


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mc = models.build_unsharded(models.one_table()).mc
        self.ebc = models.build_unsharded(models.one_table()).mc._embedding_module


def _found_once() -> list[str]:
    sharded = models.build(models.one_table())
    assert find_plain_tables(sharded) == []
    return [table.fqn for table in find_plain_tables(Both())]


def test_tables_of_managed_collision_modules_are_not_found() -> None:
    assert run_on(1, _found_once) == [["ebc.t0"]]


def _wrapped(kind: str) -> None:
    tables = [
        EmbeddingBagConfig(name=name, feature_names=[f"f{name}"], num_embeddings=11, embedding_dim=8)
        for name in ("t0", "t1")
    ]
    collection: nn.Module
    if kind == "fused":
        collection = FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.1})
        sharder: Any = FusedEmbeddingBagCollectionSharder()
    else:
        weighted = EmbeddingBagCollection(tables=tables, is_weighted=True)
        positions = PositionWeightedModuleCollection({"ft0": 5, "ft1": 5})
        collection = FeatureProcessedEmbeddingBagCollection(weighted, positions)
        sharder = FeatureProcessedEmbeddingBagCollectionSharder(
            EmbeddingBagCollectionSharder({"learning_rate": 0.1})
        )
    params = {
        "t0": sharding_of(one_table(), "ebc", "t0", 2),
        "t1": sharding_of(one_table(sharding="column_wise", ranks=(1, 0)), "ebc", "t0", 2),
    }
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    module = sharder.shard(collection, params, env, torch.device("cpu"))
    inner = module if kind == "fused" else module._embedding_bag_collection

    def batch(ids: list[int]) -> KeyedJaggedTensor:
        values, lengths = torch.tensor(ids * 2), torch.ones(2 * len(ids), dtype=torch.int64)
        return KeyedJaggedTensor(["ft0", "ft1"], values, torch.ones(len(values)), lengths)

    with Session(one_table(), attach=False) as session:
        with DeltaDumper(nn.ModuleDict({"m": module}), session.directory, interval_steps=1) as dumper:
            names = dumper.tables
            dumper.step(1)
            (module(batch([dist.get_rank() + 3])).wait().values() ** 2).sum().backward()
            dumper.step(2)
        changed = session.log.read(2)
        state = session.log.replay()
        with torch.no_grad():
            answered = inner(batch(list(range(11)))).wait()
        for name in names:
            keys = changed.filter(pc.field("table_fqn") == name)["key_id"].to_pylist()
            assert sorted(keys) == [3, 4]
            expected = answered["f" + name[-2:]].detach().numpy()
            assert state[name].lookup(range(11)).tobytes() == expected.tobytes()
        dist.barrier()


@pytest.mark.parametrize("kind", ["fused", "feature processed"])
def test_collections_in_other_modules_answer_as_the_collection_does(kind: str) -> None:
    run_on(2, _wrapped, kind)


def _unknown_modules() -> str:
    table = EmbeddingBagConfig(name="t0", feature_names=["f0"], num_embeddings=4, embedding_dim=4)
    spec = one_table(sharding="table_wise")
    model = nn.ModuleDict(
        {
            "fused": FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 0.1}),
            "tbe": SplitTableBatchedEmbeddingBagsCodegen([(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]),
            "bag": EmbeddingBagSharder({}).shard(
                nn.EmbeddingBag(11, 8, mode="sum"),
                {"weight": sharding_of(one_table(), "ebc", "t0", 1)},
                ShardingEnv.from_process_group(dist.group.WORLD),
                torch.device("cpu"),
            ),
        }
    )
    refusal = _refusal_of(model)
    model["known"] = build_unsharded(spec).ebc
    with Session(spec, attach=False) as session:
        with DeltaDumper(model, session.directory, interval_steps=1) as dumper:
            assert dumper.tables == ("known.t0",)
        with pytest.raises(UnsupportedTableError, match="tbe: a Split"):
            DeltaDumper(model, session.directory, interval_steps=1, tables=["tbe", "known.*"])
    return refusal


def test_modules_that_are_not_looked_into_are_refused_by_name() -> None:
    (found,) = run_on(1, _unknown_modules)
    kinds = {
        "fused": "FusedEmbeddingBagCollection",
        "tbe": "SplitTableBatchedEmbeddingBagsCodegen",
        "bag": "ShardedEmbeddingBag",
    }
    for name, kind in kinds.items():
        assert f"{name}: a {kind} is not looked into; use an EmbeddingBagCollection or Emb" in found


def _refusal_of(model: nn.Module) -> str:
    with pytest.raises(UnsupportedTableError) as caught:
        DeltaDumper(model, "nowhere", interval_steps=1)
    assert not Path("nowhere").exists()
    return str(caught.value)


def _refused_bags() -> list[str]:
    bags = [
        nn.EmbeddingBag(3, 4),
        nn.EmbeddingBag(3, 4, max_norm=1.0),
        nn.EmbeddingBag(3, 4, padding_idx=0),
        nn.EmbeddingBag(3, 4, device="meta"),
        nn.EmbeddingBag(3, 4, dtype=torch.float64),
    ]
    return [_refusal_of(nn.ModuleDict({"bag": bag})) for bag in bags[dist.get_world_size() == 1 :]]


def test_unsharded_tables_that_cannot_be_followed_are_refused_with_the_reason() -> None:
    ((norm, padding, meta, double),) = run_on(1, _refused_bags)
    assert "bag: max_norm rescales rows when they are looked up" in norm
    assert "padding_idx" in padding
    assert "meta device" in meta
    assert "its rows are torch.float64; use float32, float16 or bfloat16" in double
    for first, *_ in run_on(2, _refused_bags):
        assert "bag: it is not sharded, so each of the 2 ranks has its own" in first
        assert "DistributedModelParallel" in first


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(
            ({"kernel": kernel}, f"the kernel {kernel.value}, which is not looked into.*'fused'")
            for kernel in EmbeddingComputeKernel
            if kernel.value not in ("fused", "fused_uvm", "fused_uvm_caching", "dense")
        ),
        ({"data_type": DataType.INT8}, "its rows are INT8; use FP32"),
        ({"fused_params": {"output_dtype": SparseType.INT8}}, "leave output_dtype at FP32"),
        (
            {"fused_params": {"output_dtype": SparseType.FP16}, "divided": True},
            "MEAN pooling of rounded outputs",
        ),
        *(
            (
                {
                    "kernel": EmbeddingComputeKernel.FUSED_UVM_CACHING,
                    "data_type": DataType.FP16,
                    "fused_params": {"cache_precision": precision},
                },
                "its rows are FP16 and FP32 in the cache, .*leave the cache's precision out",
            )
            for precision in (DataType.FP32, SparseType.FP32)
        ),
        (
            {"fused_params": {"weight_decay_mode": WeightDecayMode.DECOUPLE_GLOBAL}},
            "use another weight_decay_mode",
        ),
    ],
)
def test_sharded_tables_that_cannot_be_followed_are_refused(changes: dict[str, Any], reason: str) -> None:
    usual: dict[str, Any] = {
        "kernel": EmbeddingComputeKernel.FUSED,
        "data_type": DataType.FP32,
        "fused_params": {},
        "device": torch.device("cpu"),
        "divided": False,
    }
    assert why_unsupported(**usual) is None
    cached = {
        "kernel": EmbeddingComputeKernel.FUSED_UVM_CACHING,
        "fused_params": {"cache_precision": DataType.FP32},
    }
    assert why_unsupported(**{**usual, **cached}) is None
    found = why_unsupported(**{**usual, **changes})
    assert found is not None
    assert re.search(reason, found)


def _two_dimensional() -> str:
    spec = one_table(sharding="table_wise")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    env = ShardingEnv2D(mesh.get_group("shard"), mesh.get_group("replicate"), dist.group.WORLD, mesh)
    params = {"t0": sharding_of(spec, "ebc", "t0", 2)}
    cpu = torch.device("cpu")
    module = EmbeddingBagCollectionSharder({}).shard(build_unsharded(spec).ebc, params, env, cpu)
    return _refusal_of(nn.ModuleDict({"ebc": module}))


def test_2d_parallel_tables_are_refused() -> None:
    for message in run_on(2, _two_dimensional):
        assert "ebc.t0: 2D parallel replicas differ until DMPCollection.sync()" in message


def test_column_shards_cut_at_different_rows_are_no_bands() -> None:
    even = [Shard(0, 5, 0, 4, 0), Shard(5, 5, 0, 4, 1), Shard(0, 5, 4, 4, 2), Shard(5, 5, 4, 4, 3)]
    bands = bands_of(even)
    assert bands is not None
    assert [band.ranks for band in bands] == [(0, 2), (1, 3)]
    assert (
        bands_of([Shard(0, 5, 0, 4, 0), Shard(5, 5, 0, 4, 1), Shard(0, 4, 4, 4, 2), Shard(4, 6, 4, 4, 3)])
        is None
    )
    assert bands_of([Shard(0, 5, 0, 4, 0), Shard(6, 4, 0, 4, 1)]) is None


def _several_dumpers() -> None:
    spec = one_table()
    with Session(spec, attach=False) as session:
        kernels = internals.embedding_kernels(session.model.module.ebc)
        seen: list[torch.Tensor] = []
        others = [kernel.register_forward_hook(lambda *a: seen.append(a[-1])) for kernel in kernels]
        dumpers = [
            DeltaDumper(session.model, f"{session.directory}/{name}", interval_steps=1) for name in "abc"
        ]
        for number, dumper in enumerate(dumpers, 1):
            session.train([number])
            for each in dumpers[number - 1 :]:
                each.step(number)
            dumper.close()
        assert seen
        assert not any("forward" in vars(kernel) for kernel in kernels), "a hook was left on a kernel"
        for other in others:
            other.remove()
        dist.barrier()
        for number, name in enumerate("abc", 1):
            log = DeltaLog(f"{session.directory}/{name}")
            assert [dump.step for dump in log.dumps()] == list(range(1, number + 1))
        last = log.replay()["ebc.t0"].lookup(range(11))
        table = spec.collections["ebc"].tables[0]
        assert np.array_equal(last, answers(session.model, spec, "ebc", table, range(11)).numpy())
        dist.barrier()


def test_several_dumpers_leave_in_any_order_and_take_their_hooks_along() -> None:
    run_on(2, _several_dumpers)


def _train(spec: Spec, attach: bool) -> dict[str, Any]:
    """Trains with or without a dumper; returns everything that was computed, as bytes."""
    losses = []
    with Session(spec, attach=attach, interval_steps=2) as session:
        rng = np.random.default_rng(dist.get_rank())
        for _ in range(8):
            losses.append(session.train(rng.integers(0, 11, 6).tolist()))
        tensors = {key: value.detach().numpy().tobytes() for key, value in session.model.named_parameters()}
        return {"losses": losses, **tensors}


@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_training_is_bit_identical_with_and_without_a_dumper(kernel: str) -> None:
    tables = tuple(
        Table(f"t{n}", (f"f{n}",), sharding=sharding, kernel=kernel, **SHARDINGS[sharding])
        for n, sharding in enumerate(("row_wise", "column_wise", "data_parallel"))
    )
    spec = Spec({"ebc": Collection(tables)}, optimizer="adagrad", dense_optimizer="adam")
    without = run_on(2, _train, spec, False)
    assert without == run_on(2, _train, spec, True)


def _sharded_anew() -> str:
    with Session(one_table(sharding="table_wise", ranks=(0,))) as session:
        session.check()
        module = session.model.module.ebc
        changed = sharding_of(one_table(sharding="table_wise", ranks=(1,)), "ebc", "t0", 2)
        module.update_shards({"t0": changed}, module._env, torch.device("cpu"))
        try:
            session.upserts()
        except (RuntimeError, DeltaDumpError) as error:
            return str(error)
        finally:
            dist.barrier()
            session.dumper._leave(wait=False)
        return ""


def test_a_module_that_was_sharded_anew_is_noticed() -> None:
    assert any("were sharded anew" in message for message in run_on(2, _sharded_anew))


SPLIT = Spec(
    {
        "ebc": Collection(
            (
                Table("t0", ("f0",), rows=40, sharding="column_wise", ranks=(1, 0)),
                Table("t1", ("f1",), rows=40),
                Table("t2", ("f2",), rows=40, dim=16, sharding="column_wise", ranks=(0, 1)),
            )
        )
    }
)


@contextlib.contextmanager
def _other_defaults(dtype: torch.dtype) -> Iterator[None]:
    """As of a script that has set them; "meta" stands for a device that is not the CPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def _with_other_defaults(dtype: torch.dtype) -> None:
    with Session(SPLIT, attach=False) as session:
        for step in (1, 2):
            with _other_defaults(dtype):
                dumper = DeltaDumper(session.model, session.directory, interval_steps=1)
                if step == 2:
                    dumper.resume(1)
            session.train([step, 7])
            with _other_defaults(dtype):
                dumper.step(step)
                dumper.close()
        assert sorted(set(session.log.read(2)["key_id"].to_pylist())) == [2, 7]
        session.compare()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_defaults_of_torch_do_not_matter(dtype: torch.dtype) -> None:
    run_on(2, _with_other_defaults, dtype)


def _failing(how: str) -> None:
    """Dumps that fail on rank 0 only, in different ways; what they held must be in the next one."""
    mine = dist.get_rank() == 0
    options = {"max_pending_bytes": 1} if how == "streamed" or (how == "streamed on one" and mine) else {}
    with Session(SPLIT, **options) as session:
        session.check()
        session.train([1, 2, 3])
        if how == "disk":
            with full_disk() if mine else contextlib.nullcontext(), pytest.raises(DeltaDumpError):
                session.upserts()
            dist.barrier()
        elif how == "broken table":
            (weight,) = [weight for _, weight in session.weights("ebc", "t2")]
            before = weight[3].clone()
            if mine:
                weight.data[3] = float("nan")
            with pytest.raises(CorruptTableError if mine else DeltaDumpError):
                session.upserts()
            weight.data[3] = before
            dist.barrier()
            session.step += 1
        else:
            session.check()
        session.train([2, 7])
        keys = session.check()
        assert set(keys["ebc.t0"]) >= {2, 7}
        assert session.check() == {}


@pytest.mark.parametrize("how", ["disk", "broken table", "streamed", "streamed on one"])
def test_no_column_is_missing_after_a_dump_that_failed_on_one_rank(how: str) -> None:
    run_on(2, _failing, how)


def _of_four_ranks() -> None:
    tables = (
        Table("t0", ("f0", "g0"), rows=11, sharding="grid_shard", ranks=(0, 1)),
        Table("t1", ("f1",), rows=7, dim=16, sharding="grid_shard", ranks=(1, 0)),
        Table("t2", ("f2",), sharding="table_row_wise", ranks=(1,)),
    )
    with Session(Spec({"ebc": Collection(tables)}, local_size=2)) as session:
        session.check()
        session.train([dist.get_rank(), 6])
        assert session.check() == {f"ebc.t{n}": [0, 1, 2, 3, 6] for n in range(3)}


def test_grid_shards_of_two_hosts_are_put_together() -> None:
    run_on(4, _of_four_ranks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="caching kernels and index dedup are for CUDA only")
@pytest.mark.parametrize(
    "changes", [{"kernel": "fused_uvm_caching"}, {"sequence": True, "index_dedup": True}]
)
def test_on_cuda_caches_are_flushed_and_deduplicated_ids_are_marked(changes: dict[str, Any]) -> None:
    run_on(1, _on_cuda, changes)


def _on_cuda(changes: dict[str, Any]) -> None:
    with Session(one_table(device="cuda", **changes)) as session:
        session.check()
        session.train([1, 2, 1])
        assert session.check() == {"ebc.t0": [1, 2]}
