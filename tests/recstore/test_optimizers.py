"""The protocol between modules that leave a trace and the optimizers that consume it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from tests.recstore.cases import STORES, InterfaceOnly, config, dyadic, keyed, random_batch, various
from torchrec_ext.recstore import (
    DistEmbedding,
    RecStoreEmbeddingBagCollection,
    SparseAdagrad,
    SparseAdam,
    SparseRowWiseAdagrad,
    SparseSGD,
)
from torchrec_ext.store import SGD, AdaGrad, Adam, MemoryStore, RowWiseAdaGrad

SPARSE = [SparseSGD, SparseAdagrad, SparseRowWiseAdagrad, SparseAdam]


def collection(store: str = "local", **options: Any) -> RecStoreEmbeddingBagCollection:
    return RecStoreEmbeddingBagCollection(
        [config("t0", 9, 4, ["a"]), config("t1", 9, 4, ["b"])], store=STORES[store](), **options
    )


def batch_of(*bags: list[list[int]]) -> Any:
    return keyed(bags, ["a", "b"][: len(bags)])


def backward(module: Any, batch: Any) -> None:
    module(batch).values().square().sum().backward()


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_the_trace_is_of_tables_ids_and_gradients() -> None:
    module = collection(is_weighted=True)
    batch = keyed([[[1, 1], [2]], [[], [3]]], ["a", "b"], weights=torch.tensor([2.0, 3.0, 5.0, 7.0]))
    slopes = torch.arange(16.0).view(2, 8)
    (module(batch).values() * slopes).sum().backward()
    found = {table: (ids, grads) for table, ids, grads in module._trace}
    assert {table: ids.tolist() for table, (ids, _) in found.items()} == {"t0": [1, 1, 2], "t1": [3]}
    assert torch.equal(found["t0"][1], torch.stack([2 * slopes[0, :4], 3 * slopes[0, :4], 5 * slopes[1, :4]]))
    assert torch.equal(found["t1"][1], 7 * slopes[1:, 4:])


@pytest.mark.parametrize("make", SPARSE)
@pytest.mark.parametrize("store", STORES)
def test_step_applies_and_clears_the_trace(store: str, make: Any) -> None:
    module = collection(store)
    optimizer = make([module], lr=0.5)
    before = weights(module)
    backward(module, batch_of([[1], [2]], [[3], []]))
    assert len(module._trace) == 2
    optimizer.step()
    assert not module._trace and not list(module._trace)
    after = weights(module)
    moved = {key: (after[key] != before[key]).any(dim=1).nonzero().flatten().tolist() for key in after}
    assert moved == {"embedding_bags.t0.weight": [1, 2], "embedding_bags.t1.weight": [3]}
    optimizer.step()  # nothing to apply
    assert same(weights(module), after)


@pytest.mark.parametrize("make", SPARSE)
def test_zero_grad_forgets_the_trace(make: Any) -> None:
    module = collection()
    optimizer = make([module])
    before = weights(module)
    backward(module, batch_of([[1]], [[3]]))
    optimizer.zero_grad()
    assert not module._trace
    optimizer.step()
    assert same(weights(module), before)


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("make", SPARSE)
@pytest.mark.parametrize("store", STORES)
def test_backward_passes_before_a_step_add_up_before_the_formula(
    store: str, make: Any, prefetched: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    module, at_once = (RecStoreEmbeddingBagCollection(various(), store=STORES[store]()) for _ in range(2))
    at_once.load_state_dict(module.state_dict())
    batches = [random_batch(generator, batch_size=3, lengths_from=[0, 1, 2, 4]) for _ in range(3)]
    joined = keyed(
        [
            [bag.tolist() for batch in batches for bag in batch[key].to_dense()]
            for key in batches[0].keys()  # noqa: SIM118 (not a dict)
        ],
        batches[0].keys(),
    )
    slopes = dyadic(generator, 9, 28)
    optimizer = make([module], accumulation_steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, batch in enumerate(batches):
            if prefetched and number != 1:  # entries of both kinds
                module.set_fused_prefetch_handle(module.issue_fused_prefetch(batch))
            (module(batch).values() * slopes[3 * number : 3 * number + 3]).sum().backward()
    (at_once(joined).values() * slopes).sum().backward()
    optimizer.step()
    make([at_once]).step()
    assert same(weights(module), weights(at_once))


def test_two_backward_passes_through_one_forward_add_up() -> None:
    module = collection()
    optimizer = SparseSGD([module], lr=1.0)
    before = weights(module)["embedding_bags.t0.weight"]
    values = module(batch_of([[1]], [[]])).values()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one batch: nothing is left over
        values.sum().backward(retain_graph=True)
        values.sum().backward()
    optimizer.step()
    assert torch.equal(weights(module)["embedding_bags.t0.weight"][1], before[1] - 2)


def test_a_trace_left_over_from_an_earlier_batch_is_warned_of_once() -> None:
    module = collection()
    optimizer = SparseSGD([module])
    backward(module, batch_of([[1]], [[3]]))
    with pytest.warns(UserWarning, match=r"2 batches wait .* step\(\) or zero_grad\(\)"):
        backward(module, batch_of([[2]], [[3]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(module, batch_of([[2]], [[3]]))
        optimizer.step()
        backward(module, batch_of([[2]], [[3]]))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("store", STORES)
def test_a_module_that_is_never_stepped_keeps_no_more_than_its_rows(store: str, dynamic: bool) -> None:
    module = collection(store, dynamic={"t0": {}} if dynamic else None)
    optimizer = SparseSGD([module], lr=0.5, accumulation_steps=1000)
    module(batch_of([[*range(9)]], [[]]))  # every id has a row
    ids = torch.arange(9)
    before = module.store.pull("t0", ids)
    generator = torch.Generator().manual_seed(0)
    held = []
    total = torch.zeros(9, 4)
    for _ in range(100):
        some = torch.randint(9, (5,), generator=generator)
        slopes = dyadic(generator, 5, 8)
        (module(batch_of([[i] for i in some.tolist()], [[]] * 5)).values() * slopes).sum().backward()
        total.index_add_(0, some, slopes[:, :4])
        held.append(sum(grads.numel() for _, _, grads in module._trace))
    assert max(held) <= 9 * 4 + 17 * 20
    optimizer.step()
    assert torch.equal(module.store.pull("t0", ids), before.sub(total, alpha=0.5))


@pytest.mark.parametrize("store", STORES)
def test_a_forward_pass_without_gradients_leaves_no_trace(store: str) -> None:
    module = collection(store)
    with torch.no_grad():
        assert not module(batch_of([[1]], [[3]])).values().requires_grad
    with torch.inference_mode():
        module(batch_of([[1]], [[3]]))
    assert not module._trace
    module.eval()  # as EmbeddingBagCollection's, its rows still have gradients
    backward(module, batch_of([[1]], [[3]]))
    assert module._trace


def hand_over(values: torch.Tensor, grad: torch.Tensor) -> Callable[[], Any]:
    values.backward(grad)
    return lambda: grad.zero_()


def through_a_view(values: torch.Tensor, grad: torch.Tensor) -> Callable[[], Any]:
    values.view(-1).backward(grad.view(-1))
    return lambda: grad.zero_()


def through_a_parameter(values: torch.Tensor, grad: torch.Tensor) -> Callable[[], Any]:
    # The same gradient becomes another tensor's, which clipping, for one, changes in place.
    other = torch.zeros_like(values).requires_grad_()
    ((values + other) * grad).sum().backward()
    return lambda: other.grad.zero_()


def through_a_viewed_parameter(values: torch.Tensor, grad: torch.Tensor) -> Callable[[], Any]:
    other = torch.zeros(values.numel()).requires_grad_()
    ((other.view_as(values) + values) * grad).sum().backward()
    return lambda: other.grad.zero_()


def through_a_hook(values: torch.Tensor, grad: torch.Tensor) -> Callable[[], Any]:
    kept: list[torch.Tensor] = []
    values.register_hook(lambda seen: kept.append(seen))  # no reference that autograd knows of
    (values * 1).backward(grad.clone())
    return lambda: kept[0].data.zero_()


def through_a_hook_that_replaces_it(values: torch.Tensor, grad: torch.Tensor) -> Callable[[], Any]:
    values.register_hook(lambda seen: grad)
    values.sum().backward()
    return lambda: grad.zero_()


def through_a_retained_gradient(values: torch.Tensor, grad: torch.Tensor) -> Callable[[], Any]:
    values.retain_grad()
    (values * grad).sum().backward()
    return lambda: values.grad.zero_()


@pytest.mark.parametrize(
    "how",
    [
        hand_over,
        through_a_view,
        through_a_parameter,
        through_a_viewed_parameter,
        through_a_hook,
        through_a_hook_that_replaces_it,
        through_a_retained_gradient,
    ],
)
def test_a_gradient_that_somebody_reuses_is_still_there_at_the_step(how: Any) -> None:
    module = collection()
    optimizer = SparseSGD([module], lr=1.0)
    before = weights(module)["embedding_bags.t0.weight"]
    spoil = how(module(batch_of([[1], [2]], [[], []])).values(), torch.full((2, 8), 3.0))
    spoil()
    optimizer.step()
    after = weights(module)["embedding_bags.t0.weight"]
    assert torch.equal(after[1:3], before[1:3] - 3)


def test_an_expanded_gradient_counts_for_every_row() -> None:
    module = collection()
    optimizer = SparseSGD([module], lr=1.0)
    before = weights(module)["embedding_bags.t0.weight"]
    module(batch_of([[1], [2]], [[], []])).values().sum().backward()
    optimizer.step()
    assert torch.equal(weights(module)["embedding_bags.t0.weight"][1:3], before[1:3] - 1)


def test_a_batch_that_is_overwritten_before_the_step_still_trains_its_rows() -> None:
    table = [config("t0", 9, 4, ["a"])]
    module = RecStoreEmbeddingBagCollection(tables=table, is_weighted=True)
    embedding = DistEmbedding(9, 4, "words")
    optimizer = SparseSGD([module, embedding], lr=1.0)
    of_module, of_words = module.store.weight("t0").clone(), embedding.weight[torch.arange(9)]
    ids, scale = torch.tensor([1, 2]), torch.tensor([2.0, 3.0])
    features = KeyedJaggedTensor(["a"], ids, weights=scale, lengths=torch.tensor([1, 1]))
    loss = module(features).values().sum() + embedding(ids).sum()
    ids.fill_(5)
    loss.backward()
    scale.zero_()
    optimizer.step()
    torch.testing.assert_close(of_module - module.store.weight("t0"), by_row({1: 2.0, 2: 3.0}))
    torch.testing.assert_close(of_words - embedding.weight[torch.arange(9)], by_row({1: 1.0, 2: 1.0}))


def by_row(values: dict[int, float]) -> torch.Tensor:
    return torch.tensor([values.get(row, 0.0) for row in range(9)]).unsqueeze(1).expand(9, 4)


def test_backward_passes_on_several_threads_lose_nothing() -> None:
    module = collection(dynamic={"t0": {}})
    module(batch_of([[*range(9)]], [[]]))  # every id has a row
    before = module.store.pull("t0", torch.arange(9))
    optimizer = SparseSGD([module], lr=1.0, accumulation_steps=10_000)

    def train(thread: int) -> None:
        for _ in range(100):
            (module(batch_of([[thread], [8]], [[], []])).values()[:, :4] / 8).sum().backward()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(train, range(8)))
    optimizer.step()
    expected = torch.full((9,), 100 / 8)
    expected[8] *= 8
    torch.testing.assert_close(
        before - module.store.pull("t0", torch.arange(9)), expected.unsqueeze(1).expand(9, 4)
    )


@pytest.mark.parametrize("single", [False, True])
def test_gradients_that_the_store_refused_are_applied_by_the_next_try(single: bool) -> None:
    far: Any = InterfaceOnly(MemoryStore())
    module: Any
    if single:
        module = DistEmbedding(9, 4, "t0", store=far)
    else:
        module = RecStoreEmbeddingBagCollection([config("t0", 9, 4, ["a"])], store=far)
    optimizer = SparseAdam([module], lr=1.0)
    before = far.pull("t0", torch.tensor([1]))
    if single:
        module(torch.tensor([1])).sum().backward()
    else:
        backward(module, batch_of([[1]]))
    store, far.behind = far.behind, None  # the server is gone
    with pytest.raises(AttributeError):
        optimizer.step()
    far.behind = store
    assert optimizer.param_groups[0]["step"] == 0
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert not torch.equal(far.pull("t0", torch.tensor([1])), before)
    assert not module._trace


def test_adam_counts_steps_and_not_batches() -> None:
    modules = [collection() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    often, seldom = SparseAdam([modules[0]]), SparseAdam([modules[1]], accumulation_steps=2)
    for _ in range(2):
        backward(modules[0], batch_of([[1]], [[2]]))
        backward(modules[1], batch_of([[1]], [[2]]))
        often.step()
    seldom.step()
    assert often.state_dict()["param_groups"][0]["step"] == 2
    assert seldom.state_dict()["param_groups"][0]["step"] == 1


def test_the_optimizers_learning_rate_counts_and_else_the_modules() -> None:
    for given, expected in ((0.25, 0.25), (None, 2.0)):
        module = collection(lr=2.0)
        optimizer = SparseSGD([module], lr=given)
        before = weights(module)["embedding_bags.t0.weight"]
        module(batch_of([[1]], [[]])).values().sum().backward()
        optimizer.step()
        assert torch.equal(weights(module)["embedding_bags.t0.weight"][1], before[1] - expected)


@pytest.mark.parametrize("make", SPARSE)
def test_schedulers_change_the_learning_rate(make: Any) -> None:
    modules = [collection() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    scheduled, by_hand = make([modules[0]], lr=0.5), make([modules[1]], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(scheduled, step_size=1, gamma=0.5)
    for number in range(3):
        for module in modules:
            backward(module, batch_of([[1]], [[number]]))
        by_hand.param_groups[0]["lr"] = 0.5 * 0.5**number
        scheduled.step()
        by_hand.step()
        scheduler.step()
    assert same(weights(modules[0]), weights(modules[1]))


def test_a_hyperparameter_changed_later_counts() -> None:
    module = collection()
    optimizer = SparseAdagrad([module], lr=1.0)
    optimizer.param_groups[0]["eps"] = 1e10  # nothing moves any more
    before = weights(module)
    backward(module, batch_of([[1]], [[2]]))
    optimizer.step()
    after = weights(module)
    assert torch.allclose(before["embedding_bags.t0.weight"], after["embedding_bags.t0.weight"], atol=1e-8)


def test_making_an_optimizer_gives_the_tables_its_state_and_keeps_state_of_its_kind() -> None:
    module = collection()
    store = module.store
    assert isinstance(store, MemoryStore)
    assert store.optimizer("t0") == SGD(0.01)
    optimizer = SparseAdagrad([module], lr=0.5, eps=0.1, initial_accumulator_value=0.25)
    assert store.optimizer("t0") == AdaGrad(0.5, 0.1, 0.25)
    backward(module, batch_of([[1]], [[2]]))
    optimizer.step()
    state = store.read("t0", torch.tensor([1]))[1]["sum"]
    assert (state > 0.25).all()
    SparseAdagrad([module], lr=0.1, eps=0.2, initial_accumulator_value=0.25)
    assert torch.equal(store.read("t0", torch.tensor([1]))[1]["sum"], state)
    SparseRowWiseAdagrad([module])
    assert store.optimizer("t1") == RowWiseAdaGrad(0.01)
    assert store.read("t0", torch.tensor([1]))[1]["sum"].tolist() == [[0.0]]
    SparseAdam([module], lr=0.1, betas=(0.5, 0.75))
    assert store.optimizer("t1") == Adam(0.1, 0.5, 0.75)


def test_only_modules_with_a_trace_are_taken() -> None:
    with pytest.raises(TypeError, match=r"Linear has no rows in a store"):
        SparseSGD([nn.Linear(2, 2)])
    with pytest.raises(TypeError, match=r"modules must be a list"):
        SparseSGD(collection())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="accumulation_steps"):
        SparseSGD([collection()], accumulation_steps=0)
    with pytest.raises(ValueError, match="lr"):
        SparseSGD([collection()], lr=-1.0)
    with pytest.raises(NotImplementedError):
        SparseSGD([collection()]).add_param_group({"params": [torch.zeros(1)]})


def test_closures_are_called_with_gradients_on() -> None:
    module = collection()
    optimizer = SparseSGD([module])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(batch_of([[1]], [[2]])).values().sum()
        loss.backward()
        return loss

    assert isinstance(optimizer.step(closure), torch.Tensor)
    assert not module._trace


@pytest.mark.parametrize("make", SPARSE)
@pytest.mark.parametrize("store", STORES)
def test_training_goes_on_from_saved_state_as_if_it_had_not_stopped(store: str, make: Any) -> None:
    def batch(number: int) -> Any:
        return random_batch(torch.Generator().manual_seed(number))

    def modules() -> list[Any]:
        return [
            RecStoreEmbeddingBagCollection(various(), store=STORES[store]()),
            DistEmbedding(9, 4, "e", store=STORES[store]()),
        ]

    def train(module: list[Any], optimizer: Any, numbers: range) -> None:
        for number in numbers:
            backward(module[0], batch(number))
            module[1](torch.tensor([number, 1, 1])).square().sum().backward()
            optimizer.step()

    first = modules()
    optimizer = make(first, lr=0.25)
    train(first, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": nn.ModuleList(first).state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(first, optimizer, range(3, 6))

    file.seek(0)
    content = torch.load(file, weights_only=True)
    second = modules()
    nn.ModuleList(second).load_state_dict(content["model"])
    resumed = make(second, lr=99.0)
    resumed.load_state_dict(content["optimizer"])
    train(second, resumed, range(3, 6))
    assert same(weights(nn.ModuleList(first)), weights(nn.ModuleList(second)))
    assert resumed.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_optimizer_state_of_another_kind_is_refused_and_changes_nothing() -> None:
    module = collection()
    saved = SparseAdam([collection()]).state_dict()
    optimizer = SparseAdagrad([module])
    with pytest.raises(ValueError, match="is not one of SparseAdagrad"):
        optimizer.load_state_dict(saved)
    incomplete = {**optimizer.state_dict(), "state": {}}
    with pytest.raises(ValueError, match=r"must be of \['t0.sum', 't1.sum'\], not of \[\]"):
        optimizer.load_state_dict(incomplete)
    other = SparseRowWiseAdagrad([collection()], lr=7.0, eps=0.5)  # whose hyperparameters have the same names
    with pytest.raises(ValueError, match=r"'t0.sum' must be \[9, 4\], not \[9, 1\]"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="of 2 modules, not of 1"):
        optimizer.load_state_dict(SparseAdagrad([collection(), collection()], lr=7.0).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert module.store is not None
    assert module.store.optimizer("t0") == AdaGrad(0.01)
    assert not module.store.read("t1", torch.tensor([1]))[1]["sum"].any()


@pytest.mark.parametrize("store", STORES)
def test_optimizer_state_travels_as_torchrecs_fused_optimizers_does(store: str) -> None:
    def combined(module: Any, dense: nn.Module) -> CombinedOptimizer:
        wrapped = KeyedOptimizerWrapper(dict(dense.named_parameters()), torch.optim.Adam)
        return CombinedOptimizer([("sparse", module.fused_optimizer), ("dense", wrapped)])

    module = collection(store)
    optimizer = SparseAdagrad([module])
    backward(module, batch_of([[1]], [[2]]))
    optimizer.step()
    saved = combined(module, nn.Linear(2, 2)).state_dict()["state"]
    assert set(saved) == {"sparse.embedding_bags.t0.weight", "sparse.embedding_bags.t1.weight"}
    other = collection(store)
    SparseAdagrad([other])
    combined(other, nn.Linear(2, 2)).load_state_dict({"state": saved})
    assert same(other.optimizer_state(), module.optimizer_state())
    assert other.optimizer_state()["t0.sum"].any()


def test_replacing_an_embedding_bag_collection_in_a_model_trains_the_same() -> None:
    class Model(nn.Module):
        def __init__(self, ebc: nn.Module) -> None:
            super().__init__()
            self.ebc, self.over = ebc, nn.Linear(28, 1)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.over(self.ebc(batch).values()).sum()

    losses = []
    for make in (EmbeddingBagCollection, RecStoreEmbeddingBagCollection):
        torch.manual_seed(0)
        model = Model(make(various()))
        sparse: Any = (
            torch.optim.SGD(model.ebc.parameters(), lr=0.1)
            if make is EmbeddingBagCollection
            else SparseSGD([model.ebc], lr=0.1)
        )
        dense = torch.optim.Adam(model.over.parameters())
        generator = torch.Generator().manual_seed(1)
        of_run = []
        for _ in range(5):
            loss = model(random_batch(generator))
            for optimizer in (sparse, dense):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (sparse, dense):
                optimizer.step()
            of_run.append(loss.detach())
        losses.append(torch.stack(of_run))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
