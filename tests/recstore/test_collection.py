"""What ``RecStoreEmbeddingBagCollection`` takes, gives and refuses, as ``EmbeddingBagCollection`` does."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface

from tests.recstore.cases import KEYS, STORES, config, keyed, random_batch, various
from torchrec_ext.recstore import RecStoreEmbeddingBagCollection, SparseAdagrad
from torchrec_ext.store import AdaGrad, DenseTable, MemoryStore, Uniform


def test_it_has_what_an_embedding_bag_collection_has() -> None:
    theirs, ours = EmbeddingBagCollection(various()), RecStoreEmbeddingBagCollection(various())
    assert isinstance(ours, EmbeddingBagCollectionInterface)
    assert [c.name for c in ours.embedding_bag_configs()] == ["t0", "t1", "t2", "t3"]
    assert not ours.is_weighted()
    assert RecStoreEmbeddingBagCollection(various(), is_weighted=True).is_weighted()
    assert ours.device == theirs.device
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert ours.embedding_names_by_table() == [["a", "b@t0"], ["c"], ["b@t2"], ["d"]]


@pytest.mark.parametrize("argument", ["tables", "embedding_bag_configs"])
def test_configurations_may_be_mappings(argument: str) -> None:
    given = [
        {"name": "t0", "num_embeddings": 9, "embedding_dim": 4, "pooling": "mean"},
        {"name": "t1", "num_embeddings": 9, "embedding_dim": 4, "feature_names": ["f"], "pooling": "SUM"},
        config("t2", 9, 4, ["f"]),
    ]
    ours = RecStoreEmbeddingBagCollection(**{argument: given})  # type: ignore[arg-type]
    configs = ours.embedding_bag_configs()
    assert [c.pooling for c in configs] == [PoolingType.MEAN, PoolingType.SUM, PoolingType.SUM]
    assert [c.feature_names for c in configs] == [["t0"], ["f"], ["f"]]


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ([], "at least one table"),
        ([config("t", 9, 4, ["f"]), config("t", 9, 4, ["g"])], "Duplicate table name t"),
        ([{"name": "t", "num_embeddings": 9, "embedding_dim": 4, "rows": 3}], r"no fields \['rows'\]"),
        ([{"name": "t", "num_embeddings": 9}], "table 't' is incomplete"),
        ([{"name": "t", "num_embeddings": 9, "embedding_dim": 4, "pooling": "MAX"}], "not 'MAX'"),
        (
            [{"name": "t", "num_embeddings": 9, "embedding_dim": 4, "pooling": PoolingType.NONE}],
            "table 't': pooling must be SUM or MEAN",
        ),
        (
            [{"name": "t", "num_embeddings": 9, "embedding_dim": 4, "data_type": DataType.FP16}],
            "table 't': a store's rows are FP32, not FP16",
        ),
    ],
)
def test_wrong_configurations_are_named(tables: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RecStoreEmbeddingBagCollection(tables)


def test_the_tables_are_given_once() -> None:
    with pytest.raises(ValueError, match="give the tables once"):
        RecStoreEmbeddingBagCollection()
    with pytest.raises(ValueError, match="give the tables once"):
        RecStoreEmbeddingBagCollection(various(), embedding_bag_configs=various())


def test_batches_may_have_other_features_and_another_order() -> None:
    ours = RecStoreEmbeddingBagCollection(various())
    batch = random_batch(torch.Generator().manual_seed(0))
    expected = ours(batch).values()
    for order in ([3, 1, 4, 0], [0, 1, 2, 3, 4], [4, 3, 1, 0]):
        assert torch.equal(ours(batch.permute(order)).values(), expected)


def test_batches_may_be_tensor_dicts() -> None:
    theirs, ours = EmbeddingBagCollection(various()), RecStoreEmbeddingBagCollection(various())
    ours.load_state_dict(theirs.state_dict())
    parts = {
        key: JaggedTensor(values=torch.tensor([1, 2, 0]), lengths=torch.tensor([1, 0, 2])) for key in KEYS
    }
    batch = TensorDict(parts, batch_size=[3])
    assert torch.equal(ours(batch).values(), theirs(batch).values())


def test_a_missing_feature_is_named() -> None:
    ours = RecStoreEmbeddingBagCollection(various())
    with pytest.raises(KeyError, match=r"no feature 'c'; it has \['d', 'b', 'a'\]"):
        ours(keyed([[[0]], [[0]], [[0]]], ["d", "b", "a"]))


def test_ids_that_are_no_integers_and_weights_that_are_missing_are_refused() -> None:
    ours = RecStoreEmbeddingBagCollection([config("t", 9, 4, ["f"])])
    with pytest.raises(ValueError, match=r"ids must be int32 or int64, not torch\.float32"):
        ours(keyed([[[1]]], ["f"], dtype=torch.float32))
    weighted = RecStoreEmbeddingBagCollection([config("t", 9, 4, ["f"])], is_weighted=True)
    with pytest.raises(ValueError, match="the batch has no weights"):
        weighted(keyed([[[1]]], ["f"]))


def test_weights_of_a_batch_do_not_count_for_an_unweighted_collection() -> None:
    ours = RecStoreEmbeddingBagCollection([config("t", 9, 4, ["f"])])
    plain, weighted = (keyed([[[1, 2]]], ["f"], weights=w) for w in (None, torch.tensor([2.0, 3.0])))
    assert torch.equal(ours(plain).values(), ours(weighted).values())


@pytest.mark.parametrize("store", STORES)
def test_weights_move_to_and_from_an_embedding_bag_collection(store: str) -> None:
    theirs = EmbeddingBagCollection(various())
    ours = RecStoreEmbeddingBagCollection(various(), store=STORES[store]())
    ours.load_state_dict(theirs.state_dict())
    batch = random_batch(torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(batch).values(), theirs(batch).values())
    SparseAdagrad([ours]).step()
    back = EmbeddingBagCollection(various())
    back.load_state_dict(ours.state_dict())
    assert all(map(torch.equal, back.state_dict().values(), theirs.state_dict().values()))


@pytest.mark.parametrize("store", STORES)
def test_loading_itself_changes_nothing(store: str) -> None:
    ours = RecStoreEmbeddingBagCollection(various(), store=STORES[store]())
    before = copy.deepcopy(ours.state_dict())
    ours.load_state_dict(ours.state_dict())
    assert all(map(torch.equal, before.values(), ours.state_dict().values()))


@pytest.mark.parametrize("store", STORES)
def test_a_prefetched_batch_sees_rows_that_are_loaded_or_reset_meanwhile(store: str) -> None:
    ours = RecStoreEmbeddingBagCollection(various(), store=STORES[store]())
    other = RecStoreEmbeddingBagCollection(various())
    batch = random_batch(torch.Generator().manual_seed(0))
    handle = ours.issue_fused_prefetch(batch)
    handle.wait()
    ours.load_state_dict(other.state_dict())
    ours.set_fused_prefetch_handle(handle)
    assert torch.equal(ours(batch).values(), other(batch).values())
    handle = ours.issue_fused_prefetch(batch)
    handle.wait()
    ours.reset_parameters()
    ours.set_fused_prefetch_handle(handle)
    prefetched = ours(batch).values()
    assert torch.equal(prefetched, ours(batch).values())
    assert not torch.equal(prefetched, other(batch).values())


@pytest.mark.parametrize("store", STORES)
def test_what_cannot_be_loaded_is_named_and_leaves_the_rows(store: str) -> None:
    ours = RecStoreEmbeddingBagCollection(various(), store=STORES[store]())
    before = copy.deepcopy(ours.state_dict())
    wrong = {**before, "embedding_bags.t0.weight": torch.zeros(3, 4)}
    with pytest.raises(RuntimeError, match=r"t0.weight must be \[11, 4\], not \[3, 4\]"):
        ours.load_state_dict(wrong)
    missing = {key: value for key, value in before.items() if "t1" not in key}
    with pytest.raises(RuntimeError, match=r'Missing key.*"embedding_bags.t1.weight"'):
        ours.load_state_dict(missing)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"embedding_bags.t1.scale"'):
        ours.load_state_dict({**before, "embedding_bags.t1.scale": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"dynamic_tables.t.keys"'):
        ours.load_state_dict({**before, "dynamic_tables.t.keys": torch.zeros(1)})
    ours.load_state_dict(missing, strict=False)
    assert all(map(torch.equal, before.values(), ours.state_dict().values()))


def test_parameters_are_the_rows_themselves() -> None:
    ours = RecStoreEmbeddingBagCollection(various())
    assert isinstance(ours.store, MemoryStore)
    weight = dict(ours.named_parameters())["embedding_bags.t2.weight"]
    assert not weight.requires_grad  # a dense optimizer, or DDP, has nothing to do with it
    ours.store.write("t2", torch.tensor([3]), torch.full((1, 4), 7.0))
    assert torch.equal(weight[3], torch.full((4,), 7.0))


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.double, nn.Module.share_memory])
def test_rows_cannot_be_taken_out_of_their_store(change: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), RecStoreEmbeddingBagCollection(various()))
    with pytest.raises(RuntimeError, match="the rows of table 't0' stay in their store"):
        change(model)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_store_is_not_copied_with_a_module(duplicate: Any) -> None:
    ours = RecStoreEmbeddingBagCollection(various())
    for what in (ours.store, ours) if duplicate is not copy.copy else (ours.store,):
        with pytest.raises(TypeError, match="a MemoryStore cannot be copied or pickled"):
            duplicate(what)


def test_moving_to_where_it_is_keeps_the_rows_in_the_store() -> None:
    ours = RecStoreEmbeddingBagCollection(various())
    pointer = ours.embedding_bags.t0.weight.data_ptr()
    ours.to("cpu").float().cpu()
    assert ours.embedding_bags.t0.weight.data_ptr() == pointer


def test_on_the_meta_device_there_are_shapes_only() -> None:
    ours = RecStoreEmbeddingBagCollection(various(), device="meta")
    assert ours.store is None
    assert ours.device == torch.device("meta")
    assert {value.device.type for value in ours.state_dict().values()} == {"meta"}
    assert ours.table("t0") == RecStoreEmbeddingBagCollection(various()).table("t0")
    ours.reset_parameters()
    with pytest.raises(RuntimeError, match="meta device and has no rows"):
        ours(random_batch(torch.Generator()))
    with pytest.raises(RuntimeError, match="meta device and has no rows"):
        ours.load_state_dict(RecStoreEmbeddingBagCollection(various()).state_dict())
    with pytest.raises(RuntimeError, match="stay in their store"):
        ours.to_empty(device="cpu")
    with pytest.raises(ValueError, match="meta device has no store"):
        RecStoreEmbeddingBagCollection(various(), device="meta", store=MemoryStore())


def test_a_device_that_is_not_the_stores_is_refused() -> None:
    with pytest.raises(ValueError, match="device is cuda, but the store gives rows on cpu"):
        RecStoreEmbeddingBagCollection(various(), device="cuda", store=MemoryStore())


@pytest.mark.parametrize("store", STORES)
def test_tables_that_are_in_the_store_keep_their_rows_and_state(store: str) -> None:
    shared = STORES[store]()
    first = RecStoreEmbeddingBagCollection(various(), store=shared, optimizer=AdaGrad())
    shared.write("t0", torch.tensor([2]), torch.full((1, 4), 7.0), {"sum": torch.full((1, 4), 3.0)})
    more = [*various(), config("t9", 5, 4, ["z"])]
    second = RecStoreEmbeddingBagCollection(more, store=shared)
    batch = random_batch(torch.Generator().manual_seed(0))
    wider = KeyedJaggedTensor(
        keys=[*batch.keys(), "z"],
        values=torch.cat([batch.values(), torch.tensor([1])]),
        lengths=torch.cat([batch.lengths(), torch.tensor([1] + [0] * 5)]),
    )
    assert torch.equal(second(wider).values()[:, :28], first(batch).values())
    assert second.table("t9").num_rows == 5
    assert shared.read("t0", torch.tensor([2]))[1]["sum"].tolist() == [[3.0] * 4]
    # Whoever made the table chose its initial rows; what matters is that it is the same table.
    shared.create_tables([DenseTable("other", 4, 9, initializer=Uniform(0, 1))], AdaGrad())
    RecStoreEmbeddingBagCollection([config("other", 9, 4, ["f"])], store=shared)
    with pytest.raises(ValueError, match="another table of this name"):
        RecStoreEmbeddingBagCollection([config("t0", 12, 4, ["f"])], store=shared)


def test_tables_of_one_dimension_that_lie_apart_are_looked_up_apart() -> None:
    shared = MemoryStore()
    RecStoreEmbeddingBagCollection([config("t2", 5, 4, ["b"])], store=shared)
    apart = RecStoreEmbeddingBagCollection(various(), store=shared)
    together = RecStoreEmbeddingBagCollection(various())
    together.load_state_dict(apart.state_dict())
    optimizers = [SparseAdagrad([apart]), SparseAdagrad([together])]
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        batch = random_batch(generator)
        values = [apart(batch).values(), together(batch).values()]
        assert torch.equal(*values)
        for value, optimizer in zip(values, optimizers, strict=True):
            value.square().sum().backward()
            optimizer.step()
    assert all(map(torch.equal, apart.state_dict().values(), together.state_dict().values()))


def test_custom_init_fns_make_the_initial_rows() -> None:
    given = EmbeddingBagConfig(
        name="t", num_embeddings=9, embedding_dim=4, init_fn=lambda weight: nn.init.constant_(weight, 3.0)
    )
    for make in STORES.values():
        ours = RecStoreEmbeddingBagCollection([given], store=make())
        assert torch.equal(ours.state_dict()["embedding_bags.t.weight"], torch.full((9, 4), 3.0))
