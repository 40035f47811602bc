"""``DistTensor`` and ``DistEmbedding``, and where their updates are computed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim import RowWiseAdagrad

from tests.recstore.cases import STORES, InterfaceOnly, config, dyadic, keyed
from torchrec_ext.recstore import (
    DistEmbedding,
    DistTensor,
    RecStoreEmbeddingBagCollection,
    SparseAdagrad,
    SparseAdam,
    SparseRowWiseAdagrad,
    SparseSGD,
)
from torchrec_ext.store import MemoryStore, Store


class Noting(InterfaceOnly):
    """Notes the calls that change rows."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.calls: list[tuple[str, Any]] = []

    def update_many(self, requests: Any, **options: Any) -> None:
        self.calls.append(("update_many", [(table, keys.tolist()) for table, keys, _ in requests]))
        self.behind.update_many(requests, **options)

    def write(
        self,
        table: str,
        keys: torch.Tensor,
        rows: torch.Tensor | None = None,
        slots: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.calls.append(("write", (table, keys.tolist(), rows, dict(slots or {}))))
        self.behind.write(table, keys, rows, slots)


def ones(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize("store", STORES)
def test_a_dist_tensor_reads_and_writes_rows(store: str) -> None:
    tensor = DistTensor((5, 3), torch.float32, "t", store=STORES[store]())
    assert tensor.shape == (5, 3) and tensor.dtype == torch.float32 and len(tensor) == 5
    assert torch.equal(tensor[torch.arange(5)], torch.zeros(5, 3))
    tensor[torch.tensor([1, 4])] = torch.tensor([[1.0, 2, 3], [4, 5, 6]])
    tensor[[0]] = torch.tensor(7.0)
    assert tensor[[[4, 1], [0, 2]]].tolist() == [[[4, 5, 6], [1, 2, 3]], [[7, 7, 7], [0, 0, 0]]]
    assert tensor[1].tolist() == [1, 2, 3]
    for wrong in ([5], [-1]):
        with pytest.raises(ValueError, match="keys 0 to 4"):
            tensor[wrong]
    with pytest.raises(ValueError, match="must not repeat"):
        tensor[[1, 1]] = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="ids must be integers"):
        tensor[[0.5]]


def test_a_dist_tensor_is_the_stores_table_of_its_name() -> None:
    store = MemoryStore()
    first = DistTensor((5, 3), name="t", init_func=ones, store=store)
    first[[2]] = torch.tensor(7.0)
    second = DistTensor((5, 3), name="t", store=store)
    assert second[[1, 2]].tolist() == [[1, 1, 1], [7, 7, 7]]
    with pytest.raises(ValueError, match="another table of this name"):
        DistTensor((5, 4), name="t", store=store)
    with pytest.raises(ValueError, match="shape"):
        DistTensor((5,), name="u", store=store)
    with pytest.raises(ValueError, match="float32, not"):
        DistTensor((5, 3), torch.float64, "u", store=store)


@pytest.mark.parametrize(
    ("ours", "theirs", "sparse"),
    [
        (
            lambda m: SparseSGD([m], lr=0.5),
            lambda p: torch.optim.SGD(p, lr=0.5),
            False,
        ),
        (
            lambda m: SparseAdagrad([m], lr=0.5, initial_accumulator_value=0.5),
            lambda p: torch.optim.Adagrad(p, lr=0.5, initial_accumulator_value=0.5),
            False,
        ),
        (
            lambda m: SparseRowWiseAdagrad([m], lr=0.5),
            lambda p: RowWiseAdagrad(p, lr=0.5),
            False,
        ),
        (
            lambda m: SparseAdam([m], lr=0.5, betas=(0.8, 0.95)),
            lambda p: torch.optim.SparseAdam(p, lr=0.5, betas=(0.8, 0.95)),
            True,
        ),
    ],
    ids=["sgd", "adagrad", "rowwise adagrad", "adam"],
)
@pytest.mark.parametrize("store", STORES)
def test_training_is_exactly_that_of_an_embedding(store: str, ours: Any, theirs: Any, sparse: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = nn.Embedding(9, 4, sparse=sparse)
    module = DistEmbedding(9, 4, "e", store=STORES[store]())
    module.load_state_dict(embedding.state_dict())
    steps = ours(module), theirs(embedding.parameters())
    for _ in range(4):
        ids = torch.randint(9, (2, 3), generator=generator)
        slopes = dyadic(generator, 2, 3, 4)
        for one in (module, embedding):
            output = one(ids)
            assert output.shape == (2, 3, 4)
            (output * slopes).sum().backward()
        for step in steps:
            step.step()
            step.zero_grad()
        assert torch.equal(module.state_dict()["weight"], embedding.weight)


def test_its_step_computes_current_minus_lr_times_grad_here_and_writes_back() -> None:
    store = Noting()
    module = DistEmbedding(9, 2, "e", store=store)
    optimizer = SparseSGD([module], lr=0.5)
    current = module.weight[[3, 7]]
    module(torch.tensor([7, 3, 7])).sum().backward()
    store.calls.clear()
    optimizer.step()
    ((what, (table, ids, rows, slots)),) = store.calls
    assert (what, table, ids, slots) == ("write", "e", [3, 7], {})
    assert torch.equal(rows, current - 0.5 * torch.tensor([[1.0, 1.0], [2.0, 2.0]]))


def test_its_rows_and_their_state_are_written_together() -> None:
    store = Noting()
    module = DistEmbedding(9, 2, "e", store=store)
    optimizer = SparseAdam([module])
    module(torch.tensor([7])).sum().backward()
    store.calls.clear()
    optimizer.step()
    ((what, (_, ids, _, slots)),) = store.calls
    assert (what, ids, set(slots)) == ("write", [7], {"exp_avg", "exp_avg_sq"})


def test_the_collections_step_goes_to_the_stores_optimizer() -> None:
    store = Noting()
    module = RecStoreEmbeddingBagCollection(
        [config("t0", 9, 2, ["a"]), config("t1", 9, 4, ["b"])], store=store
    )
    optimizer = SparseSGD([module], lr=0.5)
    module(keyed([[[7, 3, 7]], [[2]]], ["a", "b"])).values().sum().backward()
    store.calls.clear()
    optimizer.step()
    ((what, requests),) = store.calls
    assert (what, sorted(requests)) == ("update_many", [("t0", [3, 7]), ("t1", [2])])


def test_a_read_sees_an_update_that_nobody_waited_for() -> None:
    store = MemoryStore()
    module = RecStoreEmbeddingBagCollection([config("t", 9, 2, ["a"])], store=store)
    embedding = DistEmbedding(9, 2, "t", store=store)
    for number in range(20):
        before = embedding(torch.tensor([3])).detach()
        store.update_async("t", torch.tensor([3]), torch.ones(1, 2), lr=1.0)
        read = [
            lambda: embedding(torch.tensor([3])),
            lambda: module(keyed([[[3]]], ["a"])).values(),
            lambda: module.state_dict()["embedding_bags.t.weight"][[3]],
        ][number % 3]
        assert torch.equal(read(), before - 1)


def test_its_trace_has_the_protocol_of_the_collections() -> None:
    module = DistEmbedding(9, 2, "e")
    with torch.no_grad():
        module(torch.tensor([1]))
    assert not module._trace
    (module(torch.tensor([[1, 2], [1, 1]])) * 3.0).sum().backward()
    ((table, ids, grads),) = module._trace
    assert (table, ids.tolist()) == ("e", [1, 2, 1, 1])
    assert torch.equal(grads, torch.full((4, 2), 3.0))
    optimizer = SparseSGD([module])
    optimizer.zero_grad()
    assert not module._trace
    before = module.weight[torch.arange(9)]
    module(torch.empty(0, dtype=torch.int64)).sum().backward()
    optimizer.step()
    assert torch.equal(module.weight[torch.arange(9)], before)


def test_its_first_rows_are_uniform_or_those_of_init_func() -> None:
    rows = DistEmbedding(16, 4, "e").state_dict()["weight"]
    assert rows.min() >= -0.25 and rows.max() < 0.25 and rows.unique().numel() > 32
    assert torch.equal(DistEmbedding(16, 4, "e", ones).state_dict()["weight"], torch.ones(16, 4))


@pytest.mark.parametrize("store", STORES)
def test_its_state_dict_is_an_embeddings(store: str) -> None:
    module = DistEmbedding(9, 2, "e", store=STORES[store]())
    embedding = nn.Embedding(9, 2)
    embedding.load_state_dict(module.state_dict())
    ids = torch.tensor([[1, 2]])
    assert torch.equal(embedding(ids), module(ids))
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(RuntimeError, match=r"weight must be \[9, 2\]"):
        module.load_state_dict({"weight": torch.zeros(2, 2)})
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight"'):
        module.load_state_dict({})
    assert torch.equal(before["weight"], module.state_dict()["weight"])


def test_one_optimizer_trains_collections_and_embeddings() -> None:
    store: Store = MemoryStore()
    modules = [
        RecStoreEmbeddingBagCollection([config("t", 9, 2, ["a"])], store=store, lr=0.5),
        DistEmbedding(9, 2, "e", store=store, lr=0.25),
    ]
    optimizer = SparseSGD(modules)
    before = [store.pull(name, torch.tensor([3])) for name in ("t", "e")]
    loss = modules[0](keyed([[[3]]], ["a"])).values().sum() + modules[1](torch.tensor([3])).sum()
    loss.backward()
    optimizer.step()
    assert torch.equal(store.pull("t", torch.tensor([3])), before[0] - 0.5)
    assert torch.equal(store.pull("e", torch.tensor([3])), before[1] - 0.25)
