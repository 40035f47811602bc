"""Outputs and trained weights are those of TorchRec's ``EmbeddingBagCollection``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.optim import RowWiseAdagrad

from tests.recstore.cases import STORES, SUM, config, dyadic, keyed, random_batch, various
from torchrec_ext.recstore import (
    RecStoreEmbeddingBagCollection,
    SparseAdagrad,
    SparseAdam,
    SparseRowWiseAdagrad,
    SparseSGD,
)
from torchrec_ext.store import FileStore, MemoryStore

# Ours, and TorchRec's dense one; powers of two keep learning rates exact.
OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sgd": (
        lambda m: SparseSGD([m], lr=0.5),
        lambda p: torch.optim.SGD(p, lr=0.5),
    ),
    "adagrad": (
        lambda m: SparseAdagrad([m], lr=0.5, eps=0.25, initial_accumulator_value=0.5),
        lambda p: torch.optim.Adagrad(p, lr=0.5, eps=0.25, initial_accumulator_value=0.5),
    ),
    "rowwise adagrad": (
        lambda m: SparseRowWiseAdagrad([m], lr=0.5),
        lambda p: RowWiseAdagrad(p, lr=0.5),
    ),
}


def pair(
    configs: Callable[[], Any], store: str, generator: torch.Generator, **options: Any
) -> tuple[EmbeddingBagCollection, RecStoreEmbeddingBagCollection]:
    weighted = options.get("is_weighted", False)
    theirs = EmbeddingBagCollection(tables=configs(), is_weighted=weighted)
    for weight in theirs.state_dict().values():
        weight.copy_(dyadic(generator, *weight.shape))
    ours = RecStoreEmbeddingBagCollection(tables=configs(), store=STORES[store](), **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def assert_same_output(theirs: Any, ours: Any, exact: bool) -> None:
    assert theirs.keys() == ours.keys()
    assert theirs.length_per_key() == ours.length_per_key()
    if exact:
        assert torch.equal(theirs.values(), ours.values())
    else:
        torch.testing.assert_close(theirs.values(), ours.values(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("enable_fusion", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("store", STORES)
def test_training_is_exact_with_exact_gradients(
    store: str, weighted: bool, enable_fusion: bool, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHREC_EXT_NUMBA", "0")  # its machine code rounds a root's update once less
    generator = torch.Generator().manual_seed(3)
    mean = SUM if weighted else various()[1].pooling  # EmbeddingBag cannot average weighted bags
    theirs, ours = pair(
        lambda: various(mean), store, generator, is_weighted=weighted, enable_fusion=enable_fusion
    )
    our_optimizer, their_optimizer = OPTIMIZERS[optimizer]
    steps = our_optimizer(ours), their_optimizer(theirs.parameters())
    for number in range(4):
        # Lengths whose inverses are exact, for the averages.
        batch = random_batch(generator, lengths_from=[0, 1, 2, 4], weighted=weighted)
        outputs = theirs(batch), ours(batch)
        # After a root, rows are no dyadic numbers any more, and the order of sums counts.
        assert_same_output(*outputs, exact=number == 0 or optimizer == "sgd")
        slopes = dyadic(generator, *outputs[0].values().shape)
        for output in outputs:
            (output.values() * slopes).sum().backward()
        for step in steps:
            step.step()
            step.zero_grad()
        for key, weight in theirs.state_dict().items():
            assert torch.equal(weight, ours.state_dict()[key]), key


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("store", STORES)
def test_training_is_close_for_any_numbers(store: str, optimizer: str) -> None:
    generator = torch.Generator().manual_seed(4)
    theirs, ours = pair(various, store, generator)
    our_optimizer, their_optimizer = OPTIMIZERS[optimizer]
    steps = our_optimizer(ours), their_optimizer(theirs.parameters())
    for _ in range(5):
        batch = random_batch(generator, longest=5)
        slopes = torch.randn(6, 28, generator=generator)
        for collection in (theirs, ours):
            (collection(batch).values() * slopes).sum().backward()
        for step in steps:
            step.step()
            step.zero_grad()
    assert_same_output(theirs(batch), ours(batch), exact=False)
    for key, weight in theirs.state_dict().items():
        torch.testing.assert_close(weight, ours.state_dict()[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("store", STORES)
def test_adam_is_sparse_adam_over_sparse_embedding_bags(
    store: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if exact:
        monkeypatch.setenv("TORCHREC_EXT_NUMBA", "0")
    generator = torch.Generator().manual_seed(5)
    ours = RecStoreEmbeddingBagCollection([config("t", 9, 4, ["f"])], store=STORES[store]())
    theirs = nn.EmbeddingBag(9, 4, mode="sum", sparse=True, include_last_offset=True)
    with torch.no_grad():
        theirs.weight.copy_(ours.state_dict()["embedding_bags.t.weight"])
    steps = (
        SparseAdam([ours], lr=0.1, betas=(0.8, 0.95), eps=1e-3),
        torch.optim.SparseAdam(theirs.parameters(), lr=0.1, betas=(0.8, 0.95), eps=1e-3),
    )
    bags = [[[1, 1, 2], [], [0]], [[], [], []], [[8], [2, 2], [5]], [[1], [1], [3]]]
    for of_batch in bags:  # the second is empty: SparseAdam counts it
        batch = keyed([of_batch], ["f"])
        slopes = dyadic(generator, 3, 4) if exact else torch.randn(3, 4, generator=generator)
        (ours(batch).values() * slopes).sum().backward()
        (theirs(batch.values(), batch.offsets()) * slopes).sum().backward()
        for step in steps:
            step.step()
            step.zero_grad()
        after = ours.state_dict()["embedding_bags.t.weight"]
        if exact:
            assert torch.equal(after, theirs.weight)
        else:
            torch.testing.assert_close(after, theirs.weight.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("batch_size", [0, 1, 3])
def test_a_batch_of_empty_bags_gives_zeros_and_trains_nothing(store: str, batch_size: int) -> None:
    ours = RecStoreEmbeddingBagCollection(various(), store=STORES[store]())
    before = {key: value.clone() for key, value in ours.state_dict().items()}
    batch = keyed([[[]] * batch_size] * 5)
    if batch_size == 0:
        batch = KeyedJaggedTensor(
            keys=batch.keys(), values=batch.values(), lengths=torch.empty(0, dtype=torch.int32), stride=0
        )
    optimizer = SparseAdagrad([ours])
    output = ours(batch)
    assert torch.equal(output.values(), torch.zeros(batch_size, 28))
    output.values().sum().backward()
    optimizer.step()
    for key, value in ours.state_dict().items():
        assert torch.equal(value, before[key])


def test_averages_of_weighted_bags_are_those_of_fbgemm() -> None:
    # The weighted sum over the number of ids, whatever the weights add up to.
    ours = RecStoreEmbeddingBagCollection(
        [dict(name="t", num_embeddings=4, embedding_dim=2, pooling="mean")], is_weighted=True
    )
    rows = ours.state_dict()["embedding_bags.t.weight"]
    batch = keyed([[[1, 2], [3]]], ["t"], weights=torch.tensor([3.0, 5.0, 7.0]))
    expected = torch.stack([(3 * rows[1] + 5 * rows[2]) / 2, 7 * rows[3]])
    torch.testing.assert_close(ours(batch).values(), expected)


@pytest.mark.parametrize("store", STORES)
def test_weights_of_the_batch_get_their_gradient(store: str) -> None:
    generator = torch.Generator().manual_seed(6)
    theirs, ours = pair(lambda: various(SUM), store, generator, is_weighted=True)
    batch = random_batch(generator, weighted=True)
    grads = []
    for collection in (theirs, ours):
        weights = batch.weights().clone().requires_grad_()
        given = KeyedJaggedTensor(
            keys=batch.keys(), values=batch.values(), lengths=batch.lengths(), weights=weights
        )
        slopes = dyadic(torch.Generator().manual_seed(0), 6, 28)
        (collection(given).values() * slopes).sum().backward()
        grads.append(weights.grad)
    assert torch.equal(*grads)
    assert ours._trace


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_may_be_int32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    theirs, ours = pair(various, "local", generator)
    batch = random_batch(generator, dtype=dtype)
    assert_same_output(theirs(batch), ours(batch), exact=False)


@pytest.mark.parametrize("store", STORES)
def test_features_of_different_batch_sizes_follow_their_inverse_indices(store: str) -> None:
    generator = torch.Generator().manual_seed(8)
    configs = [config("t0", 9, 4, ["a"]), config("t1", 9, 8, ["b"]), config("t2", 9, 4, ["b", "a"])]
    theirs, ours = pair(lambda: configs, store, generator)
    batch = KeyedJaggedTensor(
        keys=["b", "a"],
        values=torch.tensor([1, 2, 3, 4, 5, 6]),
        lengths=torch.tensor([2, 1, 0, 3, 0]),
        stride_per_key_per_rank=[[3], [2]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 1, 1, 0], [2, 0, 1, 0]])),
    )
    steps = SparseSGD([ours], lr=0.5), torch.optim.SGD(theirs.parameters(), lr=0.5)
    outputs = theirs(batch), ours(batch)
    assert_same_output(*outputs, exact=True)
    for output, step in zip(outputs, reversed(steps), strict=True):
        output.values().sum().backward()
        step.step()
    assert_same_output(theirs(batch), ours(batch), exact=True)


def test_the_same_seed_gives_the_same_rows_and_leaves_the_same_generator() -> None:
    configs = [*various(), config("large", 3, 1 << 20, ["e"]), config("small", 3, 3, ["f"])]
    states = []
    for make in (EmbeddingBagCollection, RecStoreEmbeddingBagCollection):
        torch.manual_seed(9)
        states.append([*make(configs).state_dict().values(), torch.rand(3)])
    assert all(torch.equal(*values) for values in zip(*states, strict=True))


@pytest.mark.parametrize("store", STORES)
def test_reset_parameters_draws_anew_as_torchrec_does(store: str) -> None:
    theirs, ours = pair(various, store, torch.Generator().manual_seed(1))
    for collection in (theirs, ours):
        torch.manual_seed(10)
        collection.reset_parameters()
    for key, value in theirs.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key])


def test_a_file_store_trains_as_memory_does(tmp_path: Any) -> None:
    generator = torch.Generator().manual_seed(11)
    collections = [
        RecStoreEmbeddingBagCollection(various(), store=store)
        for store in (MemoryStore(), FileStore(tmp_path / "rows"))
    ]
    collections[1].load_state_dict(collections[0].state_dict())
    optimizers = [SparseRowWiseAdagrad([collection]) for collection in collections]
    for _ in range(3):
        batch = random_batch(generator)
        for collection, optimizer in zip(collections, optimizers, strict=True):
            collection(batch).values().square().sum().backward()
            optimizer.step()
    for one, other in zip(*(collection.state_dict().values() for collection in collections), strict=True):
        assert torch.equal(one, other)
