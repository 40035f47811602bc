"""What training really leaves behind is clean, whatever trained it and however it was saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from tests.recstore.test_sharded_checkpoint import train_dynamic_and_save
from tests.support.models import OPTIMIZERS, build, one_table
from tests.support.training import train
from tests.support.workers import run_on
from torchrec_ext import store
from torchrec_ext.checkpoint import AuditReport, audit_checkpoint, reset_evicted_optimizer_state
from torchrec_ext.recstore import (
    RecStoreEmbeddingBagCollection,
    SparseAdagrad,
    SparseAdam,
    SparseRowWiseAdagrad,
)

POPULAR = 1.2  # the exponent of the popularity of ids


def power_law(seed: int, rows: int, count: int) -> torch.Tensor:
    """Ids of which few are very popular, and one, which pads, is in every bag."""
    ids = np.random.default_rng(seed).zipf(POPULAR, count) % rows
    return torch.from_numpy(np.concatenate([ids, np.zeros(count // 4, np.int64)]))


def assert_clean(report: AuditReport, **slots: int) -> None:
    """It is clean, and looked at as many tensors of each slot."""
    assert report.clean, str(report)
    found = [one.slot for one in report.slots]
    assert {slot: found.count(slot) for slot in slots} == slots, str(report)


class Ranker(nn.Module):
    """An embedding, layers, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(500, 8, mode="sum")
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)
        self.unused = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.items(ids.view(-1, 5))))


TORCH_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AMSGrad": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "RowWiseAdagrad": lambda p: RowWiseAdagrad([one for one in p if one.dim() > 1], 0.1),
}


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_torch_optimizers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Ranker()
    optimizer = TORCH_OPTIMIZERS[name](model.parameters())
    for step in range(30):
        optimizer.zero_grad()
        model(power_law(step, 500, 64)).sub(1).square().mean().backward()
        optimizer.step()
    named = get_optimizer_state_dict(model, optimizer)
    flattened = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    for number, state in enumerate((optimizer.state_dict(), named, flattened)):
        content = {"model": model.state_dict(), "optimizer": state, "epoch": 3}
        torch.save(content, tmp_path / f"{number}.pt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.save(content, checkpoint_id=tmp_path / str(number))
        reports = [
            audit_checkpoint(one) for one in (content, tmp_path / f"{number}.pt", tmp_path / str(number))
        ]
        for report in reports:
            assert_clean(report, value=10)
        noted = {note.table for report in reports for note in report.notes}
        assert noted <= {"unused.weight", "unused.bias", "optimizer[5]", "optimizer[6]"}


def test_a_combined_optimizer_of_torchrec() -> None:
    model = Ranker()
    parameters = dict(model.named_parameters())
    dense = KeyedOptimizerWrapper(parameters, lambda those: torch.optim.Adam(those))
    combined = CombinedOptimizer([("dense", dense)])
    for step in range(3):
        combined.zero_grad()
        model(power_law(step, 500, 64)).sub(1).square().mean().backward()
        combined.step()
    content = {"model": model.state_dict(), "optimizer": combined.state_dict()}
    report = audit_checkpoint(content)
    assert_clean(report, exp_avg_sq=5)
    content["optimizer"]["state"]["dense.items.weight"]["exp_avg_sq"][4, 2] = -1.0
    (finding,) = audit_checkpoint(content).findings
    assert (finding.table, finding.slot, finding.rows) == ("items.weight", "exp_avg_sq", (4,))


def _train_zch(optimizer: str, path: str) -> tuple[bool, str]:
    """Trains with evictions, saves, and audits what this rank has in memory."""
    spec = one_table(optimizer=optimizer, rows=40, dim=8, hash_size=200, policy="lru")
    model = build(spec)
    with reset_evicted_optimizer_state(model):
        for step in range(20):
            # The popular ids move on: rows change hands.
            train(model, spec, (power_law(step, 100, 60) + step * 5 + 50 * dist.get_rank()) % 200)
    content = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    dcp.save(content, checkpoint_id=path)
    report = audit_checkpoint(content)
    return report.clean, str(report)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_zch_tables_on_two_ranks(optimizer: str, tmp_path: Path) -> None:
    for clean, told in run_on(2, _train_zch, optimizer, str(tmp_path)):
        assert clean, told
    report = audit_checkpoint(tmp_path)
    assert_clean(report, weight=1, momentum1=0 if optimizer == "sgd" else 1, _mch_sorted_raw_ids=1)
    assert {slot.table for slot in report.slots} == {"mc.t0"} and report.checksums


def _train_ebc(optimizer: str, sharding: str, path: str) -> tuple[bool, str]:
    tables = [EmbeddingBagConfig(name="t", embedding_dim=16, num_embeddings=100, feature_names=["f"])]
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables, device=torch.device("meta"))})
    fused = {"optimizer": OPTIMIZERS[optimizer], "learning_rate": 0.1}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    how = {"rows": row_wise(compute_kernel="fused"), "columns": column_wise([0, 1], compute_kernel="fused")}
    plan = construct_module_sharding_plan(
        model["ebc"], {"t": how[sharding]}, sharder, local_size=2, world_size=2, device_type="cpu"
    )
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
    )
    for step in range(10):
        ids = power_law(step + 100 * dist.get_rank(), 100, 64)
        batch = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones(len(ids), dtype=torch.int64))
        sharded.module["ebc"](batch).wait().values().sum().backward()
    content = {"model": sharded.state_dict(), "optimizer": sharded.fused_optimizer.state_dict()}
    dcp.save(content, checkpoint_id=path)
    report = audit_checkpoint(content)
    return report.clean, str(report)


@pytest.mark.parametrize("sharding", ["rows", "columns"])
@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
def test_tables_of_torchrec_on_two_ranks(optimizer: str, sharding: str, tmp_path: Path) -> None:
    for clean, told in run_on(2, _train_ebc, optimizer, sharding, str(tmp_path)):
        assert clean, told
    report = audit_checkpoint(tmp_path)
    assert_clean(report, weight=1, momentum1=1)
    assert {slot.table for slot in report.slots} == {"ebc.t"}


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_sharded_dynamic_tables(optimizer: str, tmp_path: Path) -> None:
    run_on(2, train_dynamic_and_save, optimizer, str(tmp_path), None)
    slots = {"sgd": [], "rowwise_adagrad": ["sum"], "adam": ["exp_avg", "exp_avg_sq"]}[optimizer]
    report = audit_checkpoint(tmp_path)
    assert_clean(report, keys=2, weight=3)
    found = {(slot.table, slot.slot) for slot in report.slots}
    assert found >= {(table, slot) for table in ("rec.x", "rec.y") for slot in ("keys", "weight", *slots)}


SPARSE = {"adagrad": SparseAdagrad, "rowwise_adagrad": SparseRowWiseAdagrad, "adam": SparseAdam}


@pytest.mark.parametrize("optimizer", SPARSE)
def test_recstore_modules_and_their_store(optimizer: str, tmp_path: Path) -> None:
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=400, feature_names=[name])
        for name in ("dense", "other", "dynamic")
    ]
    module = RecStoreEmbeddingBagCollection(tables=tables, dynamic={"dynamic": {}})
    sparse = SPARSE[optimizer]([module], lr=0.1)
    for step in range(20):
        ids = power_law(step, 300, 64)
        batch = KeyedJaggedTensor(
            keys=["dense", "other", "dynamic"],
            values=torch.cat([ids, ids, ids * 10**6]),
            lengths=torch.ones(3 * len(ids), dtype=torch.int64),
        )
        module(batch).values().square().sum().backward()
        sparse.step()
    content = {
        "model": module.state_dict(),
        "sparse": sparse.state_dict(),
        "fused": module.fused_optimizer.state_dict(),
    }
    torch.save(content, tmp_path / "module.pt")
    assert_clean(audit_checkpoint(content), keys=1, weight=3)
    assert_clean(audit_checkpoint(tmp_path / "module.pt"), keys=1, weight=3)

    assert module.store is not None
    snapshot = module.store.snapshot()
    snapshot.save(tmp_path / "snapshot")
    for source in (snapshot, tmp_path / "snapshot"):
        assert_clean(audit_checkpoint(source), keys=3, weight=3)


@pytest.mark.parametrize("optimizer", [store.SGD, store.AdaGrad, store.RowWiseAdaGrad, store.Adam])
def test_a_store_after_a_power_law_of_updates_without_bounds(optimizer: Any) -> None:
    """A loss that is summed over a large batch and ever popular ids: as far as accumulators get."""
    rows = store.MemoryStore()
    rows.create_tables([store.DenseTable("t", 8, 20_000)], optimizer(lr=0.001))
    for step in range(1, 40):
        keys = power_law(step, 20_000, 5_000)
        grads = 1e3 * torch.randn(len(keys), 8, generator=torch.Generator().manual_seed(step))
        rows.update("t", keys, grads, step=step)
    assert_clean(audit_checkpoint(rows.snapshot()), weight=1)
