"""Fused ids: what is refused, and that fusion changes no result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recstore.cases import STORES, config, keyed, random_batch, various
from torchrec_ext.recstore import RecStoreEmbeddingBagCollection, SparseAdagrad
from torchrec_ext.recstore.batch import split_batch
from torchrec_ext.recstore.fused_ids import FusedIds
from torchrec_ext.recstore.layout import Layout
from torchrec_ext.store import DenseTable, DynamicTable, MemoryStore

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@pytest.mark.parametrize("how", ["lookup", "prefetch"])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("feature", "table", "wrong", "why"),
    [
        ("a", "t0", 16, "is not in the table, which has 0 to 10"),
        ("a", "t0", 11, "not in the table, which has 0 to 10"),
        ("a", "t0", -1, "is negative"),
        ("b", "t2", 7, "not in the table, which has 0 to 4"),
        ("d", "t3", 40, "does not fit into fusion_k=4 bits"),  # although the table has it
        ("d", "t3", 1 << 62, "is not in the table, which has 0 to 299"),
    ],
)
def test_a_wrong_id_is_named_before_anything_is_read(
    feature: str, table: str, wrong: int, why: str, store: str, how: str
) -> None:
    # A dynamic table would show that it was looked up.
    configs = [*various(), config("seen", 9, 4, ["e"])]
    ours = RecStoreEmbeddingBagCollection(configs, fusion_k=4, store=STORES[store](), dynamic={"seen": {}})
    keys = ["a", "b", "c", "d", "e"]
    batch = keyed([[[wrong]] if key == feature else [[3]] for key in keys], keys)
    look_up = ours if how == "lookup" else ours.issue_fused_prefetch
    with pytest.raises(ValueError, match=rf"feature '{feature}', table '{table}': id {wrong} .*{why}"):
        look_up(batch)
    assert ours.store is not None
    assert not len(ours.store.snapshot().tables["seen"].keys)
    assert not ours._trace


def test_ids_out_of_a_table_are_refused_without_fusion_too() -> None:
    ours = RecStoreEmbeddingBagCollection([config("t", 4, 2, ["f"])], enable_fusion=False)
    for wrong in (-1, 4, 1 << 40):
        with pytest.raises(ValueError, match=f"feature 'f', table 't': id {wrong} "):
            ours(keyed([[[0, wrong]]], ["f"]))


@pytest.mark.parametrize("fusion_k", [61, 62])
def test_tables_beyond_the_prefix_are_refused(fusion_k: int) -> None:
    room = 1 << (63 - fusion_k)
    configs = [config(f"t{number}", 4, 2, [f"f{number}"]) for number in range(room + 1)]
    with pytest.raises(ValueError, match=rf"room for {room} tables; table 't{room}' .* its id 0 "):
        RecStoreEmbeddingBagCollection(configs, fusion_k=fusion_k)
    fits = RecStoreEmbeddingBagCollection(configs[:room], fusion_k=fusion_k, store=STORES["interface only"]())
    keys = [f"f{number}" for number in range(room)]
    output = fits(keyed([[[]]] * (room - 1) + [[[3]]], keys))
    assert torch.equal(output[keys[-1]], fits.state_dict()[f"embedding_bags.t{room - 1}.weight"][[3]])


@pytest.mark.parametrize("fusion_k", [0, 63, -1])
def test_fusion_k_that_leaves_no_room_is_refused(fusion_k: int) -> None:
    with pytest.raises(ValueError, match="fusion_k"):
        RecStoreEmbeddingBagCollection(various(), fusion_k=fusion_k)


@given(data=st.data(), num_features=st.integers(1, 4), num_tables=st.integers(1, 3))
def test_unique_ids_are_the_same_with_and_without_fusion(
    data: Any, num_features: int, num_tables: int
) -> None:
    configs = [config(f"t{t}", 64, 2, [f"f{f}" for f in range(num_features)]) for t in range(num_tables)]
    layout = Layout.of(configs, dynamic=(), lies_in=lambda _: None)
    bags = data.draw(
        st.lists(
            st.lists(st.lists(st.integers(0, 63), max_size=4), min_size=2, max_size=2),
            min_size=num_features,
            max_size=num_features,
        )
    )
    (batch,) = split_batch(keyed(bags, [f"f{f}" for f in range(num_features)]), layout, is_weighted=False)
    tables = [DenseTable(c.name, 2, 64) for c in configs]
    fused, plain = (FusedIds(tables, k).unique(batch) for k in (6, None))
    assert fused.tables == plain.tables
    for one, other in zip(fused.keys + fused.counts, plain.keys + plain.counts, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(fused.positions, plain.positions)
    assert torch.equal(torch.cat(fused.keys)[fused.positions], torch.cat(batch.ids))


@settings(max_examples=50)
@given(ids=st.lists(INT64, min_size=1, max_size=8))
def test_dynamic_tables_take_any_int64_without_fusion_and_k_bits_with(ids: list[int]) -> None:
    tables = [DynamicTable("t", 2, 100)]
    layout = Layout.of([config("t", 100, 2, ["f"])], dynamic={"t"}, lies_in=lambda _: None)
    (batch,) = split_batch(keyed([[ids]], ["f"]), layout, is_weighted=False)
    FusedIds(tables, None).check([batch])
    assert FusedIds(tables, None).unique(batch).keys[0].tolist() == sorted(set(ids))
    fused = FusedIds(tables, 30)
    if all(0 <= i < 1 << 30 for i in ids):
        fused.check([batch])
    else:
        with pytest.raises(ValueError, match="feature 'f', table 't': id "):
            fused.check([batch])


@pytest.mark.parametrize("store", STORES)
def test_training_is_bit_identical_with_and_without_fusion(store: str) -> None:
    collections = [
        RecStoreEmbeddingBagCollection(various(), store=STORES[store](), enable_fusion=fused)
        for fused in (True, False)
    ]
    collections[1].load_state_dict(collections[0].state_dict())
    optimizers = [SparseAdagrad([collection]) for collection in collections]
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        batch = random_batch(generator)
        values = [collection(batch).values() for collection in collections]
        assert torch.equal(*values)
        for value, optimizer in zip(values, optimizers, strict=True):
            value.square().sum().backward()
            optimizer.step()
    for one, other in zip(*(collection.state_dict().values() for collection in collections), strict=True):
        assert torch.equal(one, other)


def test_a_store_that_knows_nothing_of_fusion_sees_raw_ids() -> None:
    store = MemoryStore()
    ours = RecStoreEmbeddingBagCollection(
        [config("t0", 9, 2, ["a"]), config("t1", 9, 2, ["b"])], store=store, dynamic={"t0": {}, "t1": {}}
    )
    ours(keyed([[[5, 7]], [[5]]], ["a", "b"]))
    tables = store.snapshot().tables
    assert (tables["t0"].keys.tolist(), tables["t1"].keys.tolist()) == ([5, 7], [5])
