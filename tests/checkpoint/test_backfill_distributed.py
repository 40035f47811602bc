"""Checkpoints of distributed training load, completed, at another world size too."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.support.models import keyed
from tests.support.workers import run_on
from torchrec_ext.checkpoint import backfill_optimizer_state
from torchrec_ext.errors import CheckpointError

FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)
loaded_on = pytest.mark.parametrize("world_size", [1, 2, 3])


class Dense(nn.Module):
    """A model of which a part never gets a gradient, and another is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.hot, self.cold = nn.Linear(3, 5), nn.Linear(5, 1)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, batch: int, cold: bool) -> torch.Tensor:
        hidden = self.frozen(self.hot(torch.full((2, 3), batch + 1.0)).sin())
        return self.cold(hidden).sum() if cold else hidden.sum()


def _dense(wrapper: str, empty_group: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Dense()
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    elif wrapper == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model.hot, model.cold, model):
            fully_shard(part, mesh=mesh)
    groups = [{"params": list(model.parameters())}, *([{"params": []}] if empty_group else [])]
    return model, torch.optim.Adam(groups[::-1], lr=0.1)


def _train(model: nn.Module, optimizer: Any, batches: range, cold: bool) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model(batch, cold).backward()
        optimizer.step()


def _save_dense(wrapper: str, directory: str, empty_group: bool) -> dict[str, Any]:
    """Trains and saves; returns the state of each parameter that has some, whole."""
    model, optimizer = _dense(wrapper, empty_group)
    _train(model, optimizer, range(3), cold=False)
    dcp.save(
        {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=FLATTENED),
        },
        checkpoint_id=directory,
    )
    whole = StateDictOptions(full_state_dict=True)
    return copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=whole))["state"]


def _held(state: dict[str, Any], directory: str) -> dict[str, Any]:
    """What of a flattened state dict a checkpoint holds."""
    held = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    return {key: value for key, value in state.items() if f"optimizer.{key}" in held}


def _assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        a, b = (p.to_local() if isinstance(p, DTensor) else p for p in (a.detach(), b.detach()))
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), name


def _load_dense(wrapper: str, directory: str, empty_group: bool, saved: dict[str, Any]) -> None:
    model, optimizer = _dense(wrapper, empty_group)
    weights = get_model_state_dict(model)
    state = get_optimizer_state_dict(model, optimizer, options=FLATTENED)
    assert any(key.startswith("state.cold.") for key in state)
    with pytest.raises(
        CheckpointException, match=r"Missing key in checkpoint state_dict: optimizer\.state\.cold"
    ):
        dcp.load({"optimizer": state}, checkpoint_id=directory)
    state = _held(state, directory)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=directory)
    with pytest.raises(CheckpointError, match=r"cold\.weight, cold\.bias\. "):
        backfill_optimizer_state(optimizer, state, model=model)
    filled, report = backfill_optimizer_state(optimizer, state, model=model, allow=["cold.*"])
    assert report.complete == ("hot.weight", "hot.bias")
    assert report.allowed == ("cold.weight", "cold.bias")
    assert report.stateless == ("frozen.weight", "frozen.bias")
    set_model_state_dict(model, dict(weights))  # it empties what it is given
    set_optimizer_state_dict(model, optimizer, filled, options=FLATTENED)

    # The oracle: an optimizer that was given the states that were saved, and for cold none.
    expected, oracle = _dense(wrapper, empty_group)
    set_model_state_dict(expected, dict(weights))
    for name, parameter in expected.named_parameters():
        for entry, value in saved.get(name.removeprefix("module."), {}).items():
            if isinstance(parameter, DTensor) and value.dim():
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            oracle.state[parameter][entry] = value.clone()
    for batches, cold in ((range(3, 5), False), (range(5, 8), True)):
        _train(model, optimizer, batches, cold)
        _train(expected, oracle, batches, cold)
        _assert_same_bits(model, expected)


@loaded_on
@pytest.mark.parametrize("empty_group", [False, True], ids=["", "empty group"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_checkpoint_of_two_ranks_loads(
    wrapper: str, empty_group: bool, world_size: int, tmp_path: Path
) -> None:
    directory = str(tmp_path / "checkpoint")
    saved, _ = run_on(2, _save_dense, wrapper, directory, empty_group)
    assert sorted(saved) == ["hot.bias", "hot.weight"]
    run_on(world_size, _load_dense, wrapper, directory, empty_group, saved)


def _load_whole() -> None:
    whole = StateDictOptions(full_state_dict=True)  # torch takes no flattened one with it
    trained, optimizer = _dense("fsdp")
    _train(trained, optimizer, range(3), cold=False)
    state = copy.deepcopy(get_optimizer_state_dict(trained, optimizer, options=whole))
    model, loaded = _dense("fsdp")
    set_model_state_dict(model, get_model_state_dict(trained))
    filled, _ = backfill_optimizer_state(loaded, state, model=model, missing="initialize")
    assert type(filled["state"]["cold.weight"]["exp_avg"]) is torch.Tensor
    set_optimizer_state_dict(model, loaded, filled, options=whole)
    _train(trained, optimizer, range(3, 6), cold=True)
    _train(model, loaded, range(3, 6), cold=True)
    _assert_same_bits(trained, model)


def test_whole_tensors_load_into_a_sharded_model() -> None:
    run_on(2, _load_whole)


def _flattened_parameters() -> None:
    trained, optimizer = _dense("ddp")
    _train(trained, optimizer, range(1), cold=True)
    state = get_optimizer_state_dict(trained, optimizer, options=FLATTENED)
    model = FullyShardedDataParallel(Dense(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="use fully_shard"):
        backfill_optimizer_state(optimizer, state, model=model)


def test_flattened_parameters_are_refused() -> None:
    run_on(1, _flattened_parameters)


class Recommender(nn.Module):
    """Tables sharded in three ways, and dense layers of which one gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t{i}", feature_names=[f"f{i}"], num_embeddings=7, embedding_dim=4)
            for i in range(3)
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        self.dense = Dense()
        self.over = nn.Linear(12, 3)

    def forward(self, batch: int, cold: bool) -> torch.Tensor:
        ids = [[batch % 7, (2 * batch + 1) % 7]]
        pooled = self.tables(keyed(["f0", "f1", "f2"], {"f0": ids, "f1": ids, "f2": ids})).values()
        return self.over(pooled).sin().sum() + self.dense(batch, cold)


def _recommender(dtensor: bool) -> tuple[nn.Module, CombinedOptimizer]:
    """The model, and its optimizer with all state there to be loaded into."""
    torch.manual_seed(0)
    model = Recommender()
    world_size = dist.get_world_size()
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    )
    plan = construct_module_sharding_plan(
        model.tables,
        {
            "t0": row_wise(compute_kernel="fused"),
            "t1": table_wise(rank=world_size - 1, compute_kernel="fused"),
            "t2": data_parallel(),
        },
        sharder=sharder,
        world_size=world_size,
        local_size=world_size,
        device_type="cpu",
    )
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv(world_size, dist.get_rank(), dist.group.WORLD, output_dtensor=dtensor),
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": plan}),
        sharders=[sharder],
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True),
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    )
    return sharded, CombinedOptimizer([("tables", sharded.fused_optimizer), ("dense", dense)])


T0, T1 = (f"tables.tables.embedding_bags.t{i}.weight" for i in (0, 1))
COLD = ["dense.dense.cold.weight", "dense.dense.cold.bias"]


def _save_recommender(dtensor: bool, directory: str, without: str | None) -> None:
    model, optimizer = _recommender(dtensor)
    _train(model, optimizer, range(3), cold=False)
    state = optimizer.state_dict()
    if without is not None:
        state["state"].pop(without, None)
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=directory)


def _load_recommender(dtensor: bool, directory: str) -> dict[str, Any]:
    model, optimizer = _recommender(dtensor)
    dict(optimizer.optimizers)["dense"].init_state()
    weights, state = model.state_dict(), optimizer.state_dict()
    held = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    state["state"] = {
        name: entries
        for name, all_entries in state["state"].items()
        if (entries := {k: v for k, v in all_entries.items() if f"optimizer.state.{name}.{k}" in held})
    }
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=directory)
    with pytest.raises(CheckpointError, match=r"no optimizer state for .*dense\.dense\.cold\.weight"):
        backfill_optimizer_state(optimizer, state)
    filled, report = backfill_optimizer_state(optimizer, state, allow=["*.cold.*"], missing="initialize")
    model.load_state_dict(weights)
    optimizer.load_state_dict(filled)
    _, again = backfill_optimizer_state(optimizer, optimizer.state_dict())
    assert not again.allowed and not again.initialized
    _train(model, optimizer, range(3, 6), cold=True)
    return {"report": report, **_answers(model)}


def _train_on(dtensor: bool) -> dict[str, Any]:
    model, optimizer = _recommender(dtensor)
    _train(model, optimizer, range(3), cold=False)
    _train(model, optimizer, range(3, 6), cold=True)
    return _answers(model)


def _answers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The dense weights, and the vector that each table has for each id."""
    found = {n: p.detach().clone() for n, p in model.named_parameters() if n.startswith(("dense.", "over."))}
    ids = {f"f{i}": [[n] for n in range(7)] for i in range(3)}
    tables = model.module.tables
    found["vectors"] = tables(keyed(["f0", "f1", "f2"], ids)).values().detach()
    return found


@pytest.mark.parametrize("dtensor", [False, True], ids=["ShardedTensor", "DTensor"])
def test_a_combined_optimizer_goes_on_as_if_not_interrupted(dtensor: bool, tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    run_on(2, _save_recommender, dtensor, directory, None)
    expected = run_on(2, _train_on, dtensor)
    for loaded, uninterrupted in zip(run_on(2, _load_recommender, dtensor, directory), expected, strict=True):
        report = loaded.pop("report")
        assert list(report.allowed) == COLD
        assert not report.initialized
        assert loaded.keys() == uninterrupted.keys()
        for name, value in loaded.items():
            assert torch.equal(value, uninterrupted[name]), name


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_combined_optimizer_loads_at_another_world_size(world_size: int, tmp_path: Path) -> None:
    directory = str(tmp_path / "checkpoint")
    run_on(2, _save_recommender, False, directory, None)
    (uninterrupted, _) = run_on(2, _train_on, False)
    for loaded in run_on(world_size, _load_recommender, False, directory):
        report = loaded.pop("report")
        assert list(report.allowed) == COLD
        for name, value in loaded.items():
            torch.testing.assert_close(value, uninterrupted[name], msg=name)


def _fused_state_is_zero(dtensor: bool, directory: str, table: str) -> list[str]:
    model, optimizer = _recommender(dtensor)
    dict(optimizer.optimizers)["dense"].init_state()
    _train(model, optimizer, range(2), cold=True)
    state = optimizer.state_dict()
    state["state"].pop(table, None)
    filled, report = backfill_optimizer_state(optimizer, state, missing="initialize")
    optimizer.load_state_dict(filled)
    for value in optimizer.state_dict()["state"].get(table, {}).values():
        local = [s.tensor for s in value.local_shards()] if not dtensor else value.to_local().local_shards()
        assert local and not any(one.any() for one in local)
    return list(report.initialized)


@pytest.mark.parametrize("dtensor", [False, True], ids=["ShardedTensor", "DTensor"])
def test_a_table_without_state_starts_at_zero(dtensor: bool, tmp_path: Path) -> None:
    assert run_on(2, _fused_state_is_zero, dtensor, "", T0) == [[T0], [T0]]
    assert run_on(2, _fused_state_is_zero, dtensor, "", T1) == [[], [T1]]  # the rank that has the table


def _damaged() -> None:
    model, optimizer = _recommender(False)
    _train(model, optimizer, range(2), cold=True)
    good = optimizer.state_dict()["state"]
    (entry,) = good[T0]
    over = "dense.over.weight"
    for name, entries, why in (
        (
            T0,
            {entry: good[over]["exp_avg"]},
            r"tensor of shape \(3, 12\), not a floating-point ShardedTensor",
        ),
        (T0, {**good[T0], "t0.momentum2": good[T0][entry]}, r"t0\.momentum2 not kept"),
        (T0, {f"{entry}x": good[T0][entry]}, rf"{entry} missing"),
        (over, {"step": good[over]["step"]}, r"exp_avg, exp_avg_sq missing, and step there"),
        ("dense.ghost", {"step": 1}, "the optimizer has no such parameter"),
    ):
        with pytest.raises(CheckpointError, match=f"{name}: .*{why}"):
            backfill_optimizer_state(
                optimizer, {"state": {**good, name: entries}}, missing="initialize", allow=["*"]
            )


def test_damaged_state_of_a_sharded_model_never_loads() -> None:
    run_on(2, _damaged)


def _logged() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchrec_ext.checkpoint")
    logger.addHandler(handler)
    try:
        model, optimizer = _dense("ddp")
        _train(model, optimizer, range(1), cold=False)
        state = get_optimizer_state_dict(model, optimizer, options=FLATTENED)
        backfill_optimizer_state(optimizer, state, model=model, missing="warn")
    finally:
        logger.removeHandler(handler)
    return messages


def test_rank_0_alone_logs() -> None:
    first, second = run_on(2, _logged)
    assert len(first) == 1 and "cold.weight" in first[0]
    assert not second
