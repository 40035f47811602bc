"""Collections with dynamic tables: any id, rows for those that are admitted."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from tests.recstore.cases import MEAN, STORES, config, keyed
from torchrec_ext.recstore import RecStoreEmbeddingBagCollection, SparseAdagrad, SparseSGD
from torchrec_ext.store import Constant, CounterFilter, DynamicTable, Uniform

HUGE = (1 << 30) - 1


def collection(store: str = "local", **options: Any) -> RecStoreEmbeddingBagCollection:
    """A dynamic table between two dense ones, all of one dimension."""
    given = {"initializer": Constant(1.0), "default_value": 0.5, **options}
    return RecStoreEmbeddingBagCollection(
        [config("d0", 9, 2, ["a"]), config("dyn", 3, 2, ["b", "c"]), config("d1", 9, 2, ["b"])],
        store=STORES[store](),
        dynamic={"dyn": given},
    )


def batch_of(b: list[list[int]], c: list[list[int]] | None = None) -> Any:
    # The dense table that shares feature b has nine rows.
    return keyed([[[0]] * len(b), b, c or [[]] * len(b)], ["a", "b", "c"])


def keys(module: RecStoreEmbeddingBagCollection) -> list[int]:
    assert module.store is not None
    return module.store.snapshot().tables["dyn"].keys.tolist()


@pytest.mark.parametrize("store", STORES)
def test_training_admits_and_other_lookups_do_not(store: str) -> None:
    module = collection(store)
    batch = batch_of([[]], [[HUGE]])
    module.eval()
    assert module(batch)["c"].tolist() == [[0.5, 0.5]]
    module.train()
    with torch.no_grad():
        assert module(batch)["c"].tolist() == [[0.5, 0.5]]
    assert keys(module) == []
    assert module(batch)["c"].tolist() == [[1.0, 1.0]]
    assert keys(module) == [HUGE]


@pytest.mark.parametrize("prefetched", [False, True])
@pytest.mark.parametrize("enable_fusion", [False, True])
@pytest.mark.parametrize("store", STORES)
def test_the_filter_counts_every_occurrence_over_all_features_of_the_table(
    store: str, enable_fusion: bool, prefetched: bool
) -> None:
    module = RecStoreEmbeddingBagCollection(
        [config("dyn", 9, 2, ["b", "c"])],
        store=STORES[store](),
        enable_fusion=enable_fusion,
        dynamic={"dyn": {"filter": CounterFilter(4)}},
    )

    def look_up(*bags: list[list[int]]) -> None:
        batch = keyed(bags, ["b", "c"])
        if prefetched:
            module.set_fused_prefetch_handle(module.issue_fused_prefetch(batch))
        module(batch)

    look_up([[7, 7]], [[7, 8]])
    assert keys(module) == []
    look_up([[8, 8]], [[7]])
    assert keys(module) == [7]
    assert module.store is not None
    table = module.store.snapshot().tables["dyn"]
    assert table.frequencies is not None and table.candidates is not None
    assert table.frequencies.tolist() == [4]
    assert table.candidates.tolist() == [8]


@pytest.mark.parametrize("store", STORES)
def test_ids_without_a_row_share_the_default_row_and_train_nothing(store: str) -> None:
    module = collection(store, filter=CounterFilter(2))
    optimizer = SparseSGD([module], lr=1.0)
    module(batch_of([[]], [[5, 6]])).values().sum().backward()
    assert {table: ids.tolist() for table, ids, _ in module._trace}["dyn"] == []
    optimizer.step()
    module.eval()
    assert module(batch_of([[]], [[5]]))["c"].tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("store", STORES)
def test_ids_that_get_a_row_after_their_lookup_are_not_trained_by_it(store: str) -> None:
    module = collection(store, filter=CounterFilter(2))
    optimizer = SparseSGD([module], lr=1.0, accumulation_steps=2)
    first = module(batch_of([[]], [[5]]))
    second = module(batch_of([[]], [[5]]))  # admits 5
    first.values().sum().backward()
    optimizer.step()
    assert second["c"].tolist() == [[1.0, 1.0]]
    module.eval()
    assert module(batch_of([[]], [[5]]))["c"].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("store", STORES)
def test_a_gradient_never_reaches_the_row_of_another_id(store: str) -> None:
    # Between lookup and step, id 1 loses its row to id 4.
    module = collection(store, evict_after=1)
    optimizer = SparseSGD([module], lr=1.0)
    late = module(batch_of([[]], [[1, 2, 3]]))
    for step in (1, 2, 3):
        module.store.update("d0", torch.tensor([0]), torch.zeros(1, 2), step=step)
    module(batch_of([[]], [[4, 2, 3]]))
    assert keys(module) == [2, 3, 4]
    late.values().sum().backward()
    optimizer.step()
    module.eval()
    values = [module(batch_of([[]], [[i]]))["c"][0, 0].item() for i in (1, 2, 3, 4)]
    assert values == [0.5, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("store", STORES)
def test_dynamic_tables_train_as_dense_ones_of_the_same_rows(store: str) -> None:
    def make(**options: Any) -> RecStoreEmbeddingBagCollection:
        return RecStoreEmbeddingBagCollection(
            [config("t0", 9, 4, ["a", "b"], MEAN), config("t1", 9, 8, ["c"])],
            store=STORES[store](),
            **options,
        )

    dense, dynamic = make(), make(dynamic={"t0": {}, "t1": {}})
    optimizers = [SparseAdagrad([module]) for module in (dense, dynamic)]
    every = keyed([[[*range(9)]], [[]], [[*range(9)]]], ["a", "b", "c"])
    dynamic(every)
    for table in ("t0", "t1"):
        weight = dense.state_dict()[f"embedding_bags.{table}.weight"]
        dynamic.store.write(table, torch.arange(9), weight)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        bags = [
            [torch.randint(9, (n,), generator=generator).tolist() for n in (0, 1, 4, 2)] for _ in range(3)
        ]
        values = [module(keyed(bags, ["a", "b", "c"])).values() for module in (dense, dynamic)]
        assert torch.equal(*values)
        for value, optimizer in zip(values, optimizers, strict=True):
            value.square().sum().backward()
            optimizer.step()
    for table in ("t0", "t1"):
        one, other = (module.store.read(table, torch.arange(9)) for module in (dense, dynamic))
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1]["sum"], other[1]["sum"])


@pytest.mark.parametrize("store", STORES)
def test_state_dict_holds_all_that_belongs_to_the_keys(store: str) -> None:
    def make() -> tuple[Any, Any]:
        module = collection(store, filter=CounterFilter(2), evict_after=2)
        return module, SparseAdagrad([module], lr=0.5)

    def train(module: Any, optimizer: Any, ids: list[int]) -> torch.Tensor:
        values = module(batch_of([[]], [ids])).values()
        values.square().sum().backward()
        optimizer.step()
        return values.detach()

    first, optimizer = make()
    for ids in ([5, 5], [6], [7, 7, 5], [8]):
        train(first, optimizer, ids)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    content = torch.load(file, weights_only=True)
    second, resumed = make()
    train(second, resumed, [HUGE, HUGE])  # makes room for what is loaded
    second.load_state_dict(content["model"])
    resumed.load_state_dict(content["optimizer"])
    assert keys(second) == [5, 7]
    for ids in ([8], [6], [9, 9, 9], [10, 10], [5, 7, 8]):  # admissions by counts, evictions by age
        assert torch.equal(train(first, optimizer, ids), train(second, resumed, ids))
        assert keys(first) == keys(second)
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key


def test_state_that_does_not_fit_is_refused_and_the_tables_stay() -> None:
    first, second = collection(), collection()
    SparseAdagrad([first])
    first(batch_of([[]], [[5]]))
    second(batch_of([[]], [[6]]))
    content = nn.ModuleDict({"ebc": first}).state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"ebc.dynamic_tables.dyn.slots.sum"'):
        nn.ModuleDict({"ebc": second}).load_state_dict(content)
    assert keys(second) == [6]
    with pytest.raises(RuntimeError, match=r'Missing key.*"dynamic_tables.dyn.slots.sum"'):
        first.load_state_dict(second.state_dict())
    assert keys(first) == [5]
    incomplete = {key: value for key, value in second.state_dict().items() if "frequencies" not in key}
    with pytest.raises(RuntimeError, match=r'Missing key.*"dynamic_tables.dyn.frequencies"'):
        second.load_state_dict(incomplete)
    assert keys(second) == [6]


def test_options_of_dynamic_tables_are_checked() -> None:
    with pytest.raises(ValueError, match=r"dynamic names tables \['other'\]"):
        RecStoreEmbeddingBagCollection([config("t", 9, 2, ["a"])], dynamic={"other": {}})
    with pytest.raises(ValueError, match=r"'t' has no options \['max_rows'\]"):
        RecStoreEmbeddingBagCollection([config("t", 9, 2, ["a"])], dynamic={"t": {"max_rows": 3}})
    custom = config("t", 9, 2, ["a"])
    custom.init_fn = nn.init.zeros_
    with pytest.raises(ValueError, match="pass an initializer"):
        RecStoreEmbeddingBagCollection([custom], dynamic={"t": {}})


def test_rows_start_as_the_configuration_says() -> None:
    given = config("t", 16, 2, ["a"])
    module = RecStoreEmbeddingBagCollection([given], dynamic={"t": {}})
    assert module.table("t") == DynamicTable("t", 2, 16, Uniform(-0.25, 0.25))
    rows = module(keyed([[[i] for i in range(16)]], ["a"])).values()
    assert rows.min() >= -0.25 and rows.max() < 0.25 and rows.unique().numel() > 16
