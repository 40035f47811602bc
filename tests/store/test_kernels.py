from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec.optim import RowWiseAdagrad

from torchrec_ext.store import kernels
from torchrec_ext.store.bags import Bags
from torchrec_ext.store.optimizers import SGD, AdaGrad, Adam, RowWiseAdaGrad, StoreOptimizer

OPTIMIZERS = (SGD(), AdaGrad(), AdaGrad(initial_accumulator_value=0.5), RowWiseAdaGrad(), Adam())
NUM_ROWS = 9

property_test = settings(
    max_examples=40,
    deadline=None,  # the first example may compile
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # both ways of running suit every example
)


@pytest.fixture(params=["numba", "operators"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates by machine code, and by torch's operators alone."""
    if request.param == "numba":
        pytest.importorskip("numba")
        monkeypatch.delenv("TORCHREC_EXT_NUMBA", raising=False)
        assert kernels._fused_kernels() is not None
    else:
        monkeypatch.setenv("TORCHREC_EXT_NUMBA", "0")


@pytest.fixture(params=[200, kernels.CHUNK_BYTES], ids=["few rows at a time", "all rows"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHUNK_BYTES", request.param)


@dataclass(frozen=True)
class Batch:
    """Bags of ids as a ``KeyedJaggedTensor`` holds them. Weights and gradients are multiples of 1/4."""

    features: int
    size: int
    dim: int
    lengths: torch.Tensor
    ids: torch.Tensor
    scale: torch.Tensor | None
    grad: torch.Tensor

    def bags(self) -> Bags:
        bags = kernels.batch_major(self.ids, self.lengths, self.size, self.scale)
        return bags if self.size else replace(bags, num_features=self.features)


@st.composite
def batches(draw: st.DrawFn, dim: int | None = None) -> Batch:
    features, size = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    dim = dim or draw(st.sampled_from([1, 3, 16, 20]))
    bag_size = draw(st.none() | st.integers(0, 3))
    length = st.integers(0, 3) if bag_size is None else st.just(bag_size)
    lengths = draw(st.lists(length, min_size=features * size, max_size=features * size))
    n = sum(lengths)
    ids = draw(st.lists(st.integers(0, NUM_ROWS - 1), min_size=n, max_size=n))
    quarters = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=quarters) / 4

    return Batch(
        features,
        size,
        dim,
        torch.tensor(lengths, dtype=draw(st.sampled_from([torch.int32, torch.int64]))),
        torch.tensor(ids, dtype=torch.int64),
        some(n) if draw(st.booleans()) else None,
        some(size, features * dim),
    )


class Oracle:
    """A table that torch looks up, differentiates and trains. Knows nothing of ``torchrec_ext.store``."""

    def __init__(self, weight: torch.Tensor, optimizer: StoreOptimizer, lr: float) -> None:
        self.weight = nn.Parameter(weight.clone())
        self._optimizer: Any = {
            SGD: lambda: torch.optim.SGD([self.weight], lr),
            AdaGrad: lambda: torch.optim.Adagrad(
                [self.weight], lr, initial_accumulator_value=optimizer.initial(optimizer.slots[0])
            ),
            RowWiseAdaGrad: lambda: RowWiseAdagrad([self.weight], lr),
            Adam: lambda: torch.optim.SparseAdam([self.weight], lr),
        }[type(optimizer)]()

    def pool(self, batch: Batch, scale: torch.Tensor | None) -> torch.Tensor:
        per_bag = batch.ids.split(batch.lengths.tolist())
        factors = torch.ones(len(batch.ids)) if scale is None else scale
        factors_per_bag = factors.split(batch.lengths.tolist())
        pooled = [
            (self.weight[ids] * factor.unsqueeze(1)).sum(0)
            for ids, factor in zip(per_bag, factors_per_bag, strict=True)
        ]
        if not pooled:
            return self.weight.new_empty(batch.size, batch.features * batch.dim)
        by_feature = torch.stack(pooled).view(batch.features, batch.size, batch.dim)
        return by_feature.transpose(0, 1).reshape(batch.size, -1)

    def train(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        self.weight.grad = torch.zeros_like(self.weight)
        out = self.pool(batch, batch.scale)
        if out.requires_grad:
            out.backward(batch.grad)
        if isinstance(self._optimizer, torch.optim.SparseAdam):
            rows = batch.ids.unique()
            self.weight.grad = torch.sparse_coo_tensor(
                rows.unsqueeze(0), self.weight.grad[rows], self.weight.shape, check_invariants=True
            )
        self._optimizer.step()


class Rows:
    """What a store holds of a table."""

    def __init__(self, weight: torch.Tensor, optimizer: StoreOptimizer) -> None:
        num_rows, dim = weight.shape
        self.weight = weight.clone()
        self.slots = {
            slot.name: torch.full((num_rows, slot.columns(dim)), optimizer.initial(slot))
            for slot in optimizer.slots
        }
        self.versions = torch.zeros(num_rows, dtype=torch.int64)
        self.optimizer = optimizer

    def update(self, bags: Bags, grad: torch.Tensor, lr: float, step: int = 1) -> None:
        kernels.update_(
            self.weight,
            self.slots,
            self.versions,
            bags,
            grad,
            self.optimizer,
            lr=lr,
            step=step,
            version=10 + step,
        )

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight, *self.slots.values(), self.versions]


def quarters(num_rows: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-8, 9, (num_rows, dim), generator=torch.Generator().manual_seed(seed)) / 4


def scatter(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(NUM_ROWS, values.shape[1]).index_copy_(0, rows, values)


@property_test
@given(batches())
def test_pooling_is_exact(batch: Batch) -> None:
    weight = quarters(NUM_ROWS, batch.dim)
    oracle = Oracle(weight, SGD(), lr=0.5)
    pooled = kernels.pool(weight, batch.bags())
    assert torch.equal(pooled, oracle.pool(batch, batch.scale).detach())


@property_test
@given(batches())
def test_aggregated_gradients_are_exact_and_those_of_the_rows_that_occur(batch: Batch) -> None:
    oracle = Oracle(torch.zeros(NUM_ROWS, batch.dim), SGD(), lr=1.0)
    oracle.train(batch)
    rows, grads = kernels.aggregate(batch.bags(), batch.grad)
    assert torch.equal(rows, batch.ids.unique())
    assert torch.equal(scatter(rows, grads), -oracle.weight.detach())


@property_test
@given(batches())
def test_the_gradient_of_weights_comes_back_in_the_order_of_the_ids(batch: Batch) -> None:
    weight = quarters(NUM_ROWS, batch.dim)
    scale = (torch.ones(len(batch.ids)) if batch.scale is None else batch.scale).requires_grad_()
    out = Oracle(weight, SGD(), lr=1.0).pool(batch, scale)
    expected = torch.zeros(len(batch.ids))
    if len(batch.ids):
        (expected,) = torch.autograd.grad(out, scale, batch.grad)
    bags = batch.bags()
    found = kernels.feature_major(bags, kernels.scale_gradient(weight, bags, batch.grad))
    assert torch.equal(found, expected)


@property_test
@given(batches())
def test_feature_major_undoes_batch_major(batch: Batch) -> None:
    places = torch.arange(len(batch.ids), dtype=torch.float32)
    bags = kernels.batch_major(batch.ids, batch.lengths, batch.size, places)
    assert bags.scale is not None
    assert torch.equal(kernels.feature_major(bags, bags.scale), places)


@pytest.mark.usefixtures("chunk_bytes")
@property_test
@given(st.data())
def test_sgd_is_exact_over_several_steps(data: st.DataObject) -> None:
    dim = data.draw(st.sampled_from([1, 3, 16, 20]))
    weight = quarters(NUM_ROWS, dim)
    rows, oracle = Rows(weight, SGD()), Oracle(weight, SGD(), lr=0.25)
    for step in range(1, 4):
        batch = data.draw(batches(dim))
        rows.update(batch.bags(), batch.grad, 0.25, step)
        oracle.train(batch)
        assert torch.equal(rows.weight, oracle.weight.detach())


@pytest.mark.usefixtures("chunk_bytes")
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@property_test
@given(st.data())
def test_every_optimizer_is_torchs(optimizer: StoreOptimizer, data: st.DataObject) -> None:
    dim = data.draw(st.sampled_from([1, 3, 16, 20]))
    weight = quarters(NUM_ROWS, dim)
    rows, oracle = Rows(weight, optimizer), Oracle(weight, optimizer, lr=0.1)
    written = torch.zeros(NUM_ROWS, dtype=torch.int64)
    for step in range(1, 4):
        batch = data.draw(batches(dim))
        rows.update(batch.bags(), batch.grad, 0.1, step)
        oracle.train(batch)
        torch.testing.assert_close(rows.weight, oracle.weight.detach(), rtol=1e-6, atol=1e-6)
        written[batch.ids] = 10 + step
        assert torch.equal(rows.versions, written)


def test_row_wise_adagrad_is_exact_where_its_roots_are() -> None:
    # Row 4 gets 1 + 2 = 3 in every column, then 4: its mean squares are 9, then 9 + 16 = 25.
    rows = Rows(torch.zeros(5, 16), RowWiseAdaGrad())
    rows.update(Bags(torch.tensor([4, 4]), torch.tensor([0, 1, 2]), 2, 1), _columns(1, 2), lr=1.25)
    assert torch.equal(rows.weight[4], torch.full((16,), -1.25))
    rows.update(Bags(torch.tensor([4]), torch.tensor([0, 1]), 1, 1), _columns(4), lr=1.25)
    assert torch.equal(rows.weight[4], torch.full((16,), -2.25))
    assert rows.slots["sum"].flatten().tolist() == [0, 0, 0, 0, 25]
    assert not rows.weight[:4].any()


def _columns(*values: float) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(1).repeat(1, 16)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize(
    "grad",
    [torch.ones(()).expand(3, 8), quarters(8, 3).t(), quarters(3, 16)[:, ::2], quarters(3, 8).double()],
    ids=["of a sum", "transposed", "strided", "double"],
)
def test_the_layout_of_a_gradient_does_not_matter(optimizer: StoreOptimizer, grad: torch.Tensor) -> None:
    bags = kernels.batch_major(torch.tensor([1, 5, 5, 2, 1, 0]), torch.tensor([1, 2, 0, 1, 1, 1]), 3)
    found, expected = Rows(quarters(6, 4), optimizer), Rows(quarters(6, 4), optimizer)
    found.update(bags, grad, lr=0.1)
    expected.update(bags, grad.float().clone(memory_format=torch.contiguous_format), lr=0.1)
    assert torch.equal(found.weight, expected.weight)
    assert not torch.equal(found.weight, quarters(6, 4))


def test_rows_may_lie_apart() -> None:
    wide = quarters(6, 8)
    rows = Rows(wide, SGD())
    rows.weight = rows.weight[:, :4]
    bags = Bags(torch.tensor([1, 5]), torch.tensor([0, 2]), 1, 1)
    assert torch.equal(kernels.pool(rows.weight, bags)[0], wide[1, :4] + wide[5, :4])
    rows.update(bags, torch.ones(1, 4), lr=0.5)
    expected = wide[:, :4].clone()
    expected[[1, 5]] -= 0.5
    assert torch.equal(rows.weight, expected)


def test_a_parameter_is_updated_without_a_gradient_of_it() -> None:
    rows = Rows(quarters(6, 4), SGD())
    rows.weight = nn.Parameter(rows.weight)
    bags = Bags(torch.tensor([1]), torch.tensor([0, 1]), 1, 1, scale=torch.ones(1, requires_grad=True))
    assert not kernels.pool(rows.weight, bags).requires_grad
    rows.update(bags, torch.ones(1, 4), lr=0.5)
    assert torch.equal(rows.weight[1], quarters(6, 4)[1] - 0.5)


@dataclass(frozen=True)
class _Doubled(SGD):
    """Another formula than that of the class it is derived from; overwrites its gradients."""

    def apply_(self, weight: torch.Tensor, slots: Any, grads: torch.Tensor, **rest: Any) -> None:
        super().apply_(weight, slots, grads.mul_(2), **rest)


def test_a_derived_optimizers_own_formula_counts() -> None:
    grad = torch.ones(1, 4)
    rows = Rows(torch.zeros(3, 4), _Doubled())
    rows.update(Bags(torch.tensor([1]), torch.tensor([0, 1]), 1, 1), grad, lr=0.5)
    assert torch.equal(rows.weight, torch.tensor([0.0, -1.0, 0.0]).unsqueeze(1).expand(3, 4))
    assert torch.equal(grad, torch.ones(1, 4))


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_that_is_not_there_is_refused_before_any_is_changed(row: int) -> None:
    rows = Rows(torch.zeros(3, 4), SGD())
    with pytest.raises(IndexError, match=f"{row}.*3 rows"):
        rows.update(Bags(torch.tensor([1, row]), torch.tensor([0, 2]), 1, 1), torch.ones(1, 4), lr=1.0)
    assert not rows.weight.any()


def test_bags_that_do_not_fit_their_ids_are_refused() -> None:
    ids = torch.arange(4)
    with pytest.raises(ValueError, match="add up to 3"):
        kernels.batch_major(ids, torch.tensor([1, 2]), 2)
    with pytest.raises(ValueError, match="-1 at least"):
        kernels.batch_major(ids, torch.tensor([-1, 5]), 2)
    with pytest.raises(ValueError, match="offsets"):
        Bags(ids, torch.tensor([0, 4]), 2, 1)
    with pytest.raises(ValueError, match="factors"):
        Bags(ids, torch.tensor([0, 4]), 1, 1, scale=torch.ones(3))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _large(seed: int = 0, weighted: bool = True) -> tuple[Bags, torch.Tensor]:
    """Enough ids for several threads, some of them much more often than others."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 20, (3 * 1000,), generator=generator)
    n = int(lengths.sum())
    ids = (5000 * torch.rand(n, generator=generator) ** 3).long()
    scale = torch.rand(n, generator=generator) if weighted else None
    grad = torch.randn(1000, 3 * 8, generator=generator)
    return kernels.batch_major(ids, lengths, 1000, scale), grad


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_the_result_does_not_depend_on_the_number_of_threads(
    optimizer: StoreOptimizer, weighted: bool, two_threads: None
) -> None:
    bags, grad = _large(weighted=weighted)
    found = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        rows = Rows(torch.ones(5000, 8), optimizer)
        rows.update(bags, grad, lr=0.1)
        found.append(rows.tensors())
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_updates_of_several_threads_do_not_disturb_each_other(two_threads: None) -> None:
    work = [_large(seed) for seed in range(3)]

    def train(number: int, rows: Rows) -> None:
        for step in range(1, 4):
            rows.update(*work[number], lr=0.1, step=step)

    alone = [Rows(torch.ones(5000, 8), RowWiseAdaGrad()) for _ in work]
    for number, rows in enumerate(alone):
        train(number, rows)
    together = [Rows(torch.ones(5000, 8), RowWiseAdaGrad()) for _ in work]
    threads = [threading.Thread(target=train, args=each) for each in enumerate(together)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.weight, other.weight)
