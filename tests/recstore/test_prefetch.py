"""Prefetched batches are bit-identical to those read at the time of use."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec import KeyedJaggedTensor

from tests.recstore.cases import STORES, InterfaceOnly, config, keyed
from torchrec_ext.recstore import (
    PrefetchHandle,
    RecStoreEmbeddingBagCollection,
    SparseAdagrad,
    SparseSGD,
    prefetched,
)
from torchrec_ext.store import CounterFilter, MemoryStore, Rows

FEATURES = ["a", "b", "c"]


def collection(store: Any, **options: Any) -> RecStoreEmbeddingBagCollection:
    configs = [config("t0", 6, 4, ["a", "b"]), config("t1", 6, 8, ["c"])]
    return RecStoreEmbeddingBagCollection(configs, store=store, **options)


def pairs_of(batch: KeyedJaggedTensor) -> set[tuple[str, int]]:
    """The rows a batch needs."""
    table = {"a": "t0", "b": "t0", "c": "t1"}
    return {(table[key], i) for key, ids in batch.to_dict().items() for i in ids.values().tolist()}


BATCHES = st.lists(
    st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=2, max_size=2), min_size=3, max_size=3
).map(lambda bags: keyed(bags, FEATURES))
# Many issues and uses, some writes by others in between, and handles that are never used.
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["issue", "issue", "use", "use", "write", "look", "drop"]), BATCHES),
    min_size=4,
    max_size=25,
)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("store", STORES)
@settings(max_examples=25, deadline=None)
@given(actions=ACTIONS, depth=st.integers(1, 4), waits=st.booleans(), fused=st.booleans())
def test_any_interleaving_gives_what_synchronous_reads_give(
    store: str, dynamic: bool, actions: Any, depth: int, waits: bool, fused: bool
) -> None:
    options: dict[str, Any] = {"enable_fusion": fused}
    if dynamic:
        options["dynamic"] = {
            "t0": {"filter": CounterFilter(2), "evict_after": 1},
            "t1": {"evict_after": 2},
        }
    ahead, plain = collection(STORES[store](), **options), collection(STORES[store](), **options)
    plain.load_state_dict(ahead.state_dict())
    optimizers = [SparseAdagrad([ahead], lr=0.5), SparseAdagrad([plain], lr=0.5)]
    issued: deque[tuple[KeyedJaggedTensor, PrefetchHandle, set[tuple[str, int]]]] = deque()
    for what, batch in actions:
        if what == "issue" and len(issued) < depth:
            handle = ahead.issue_fused_prefetch(batch)
            if waits:
                handle.wait()
            issued.append((batch, handle, set()))
        elif what == "use" and issued:
            batch, handle, written = issued.popleft()
            ahead.set_fused_prefetch_handle(handle)
            values = [ahead(batch).values(), plain(batch).values()]
            assert torch.equal(*values)
            if not dynamic:
                reread = pairs_of(batch) & written
                assert handle.reread_rows == len(reread) if waits else handle.reread_rows <= len(reread)
            for value, optimizer in zip(values, optimizers, strict=True):
                value.square().sum().backward()
                optimizer.step()
            for _, _, later in issued:
                later |= pairs_of(batch)
        elif what == "write":
            for table in ("t0", "t1"):
                keys = torch.tensor(sorted(i for t, i in pairs_of(batch) if t == table), dtype=torch.int64)
                for module in (ahead, plain):
                    grads = torch.ones(len(keys), module.table(table).dim)
                    module.store.update_async(table, keys, grads)
            for _, _, later in issued:
                later |= pairs_of(batch)
        elif what == "look":
            with torch.no_grad():
                assert torch.equal(ahead(batch).values(), plain(batch).values())
        elif what == "drop" and issued:
            issued.popleft()
    states = [module.state_dict() for module in (ahead, plain)]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


def test_the_trace_and_the_weight_gradients_are_those_without_prefetch() -> None:
    ahead = collection(MemoryStore(), is_weighted=True)
    batch = keyed([[[1, 1], []], [[2], [1]], [[], [4, 5]]], FEATURES)
    found = []
    for handle in (None, "yes"):
        weights = torch.arange(1.0, 7.0).requires_grad_()
        given = KeyedJaggedTensor(
            keys=batch.keys(), values=batch.values(), lengths=batch.lengths(), weights=weights
        )
        ahead.set_fused_prefetch_handle(ahead.issue_fused_prefetch(given) if handle else None)
        ahead(given).values().square().sum().backward()
        found.append(([*ahead._trace], weights.grad))
        ahead._trace.clear()
    assert torch.equal(found[0][1], found[1][1])
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])
        assert torch.equal(one[2], other[2])


def test_each_row_is_read_once_and_for_all_tables_in_one_go() -> None:
    store = Watched()
    ahead = collection(store)
    handle = ahead.issue_fused_prefetch(keyed([[[1, 1], [2]], [[1], [2]], [[3, 3], [3]]], FEATURES))
    handle.wait()
    assert store.pulled == [[("t0", [1, 2]), ("t1", [3])]]


def test_a_handle_is_for_one_forward_pass() -> None:
    ahead = collection(MemoryStore())
    batch = keyed([[[1]], [[2]], [[3]]], FEATURES)
    handle = ahead.issue_fused_prefetch(batch)
    ahead.set_fused_prefetch_handle(handle)
    ahead(batch)
    with pytest.raises(RuntimeError, match="one forward pass; this one was used"):
        ahead.set_fused_prefetch_handle(handle)
    ahead(batch)  # reads synchronously


def test_a_handle_of_another_batch_is_refused_and_released() -> None:
    ahead = collection(MemoryStore())
    batch, other = (keyed([[[1]], [[2]], [[i]]], FEATURES) for i in (3, 4))
    handle = ahead.issue_fused_prefetch(batch)
    ahead.set_fused_prefetch_handle(handle)
    with pytest.raises(RuntimeError, match="issued for another batch"):
        ahead(other)
    with pytest.raises(RuntimeError, match="this one was released"):
        ahead.set_fused_prefetch_handle(handle)
    ahead(other)


def test_a_batch_changed_in_place_is_another_batch() -> None:
    ahead = collection(MemoryStore())
    batch = keyed([[[1]], [[2]], [[3]]], FEATURES)
    ahead.set_fused_prefetch_handle(ahead.issue_fused_prefetch(batch))
    batch.values()[0] = 5
    with pytest.raises(RuntimeError, match="changed in place"):
        ahead(batch)


def test_a_copy_of_the_batch_is_the_same_batch() -> None:
    ahead = collection(MemoryStore())
    make = lambda: keyed([[[1]], [[2]], [[3]]], FEATURES)  # noqa: E731
    handle = ahead.issue_fused_prefetch(make())
    ahead.set_fused_prefetch_handle(handle)
    ahead(make())
    assert handle.reread_rows == 0


def test_bags_of_the_same_ids_are_another_batch() -> None:
    ahead = RecStoreEmbeddingBagCollection([config("t0", 6, 4, ["a"])])

    def of_strides(inverse: list[int]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            ["a"],
            torch.tensor([1, 2, 3, 4]),
            lengths=torch.tensor([2, 2]),
            stride_per_key_per_rank=[[2]],
            inverse_indices=(["a"], torch.tensor([inverse])),
        )

    ahead.set_fused_prefetch_handle(ahead.issue_fused_prefetch(of_strides([0, 1, 0])))
    with pytest.raises(RuntimeError, match="issued for another batch"):
        ahead(of_strides([1, 0, 0]))


def test_a_batch_of_inference_mode_changed_in_place_is_another_batch() -> None:
    ahead = collection(MemoryStore())
    with torch.inference_mode():
        batch = keyed([[[1]], [[2]], [[3]]], FEATURES)
        ahead.set_fused_prefetch_handle(ahead.issue_fused_prefetch(batch))
        ahead(batch)
        ahead.set_fused_prefetch_handle(ahead.issue_fused_prefetch(batch))
        batch.values()[0] = 5
        with pytest.raises(RuntimeError, match="changed in place"):
            ahead(batch)


def test_a_handle_of_another_module_is_refused() -> None:
    ahead, other = collection(MemoryStore()), collection(MemoryStore())
    handle = ahead.issue_fused_prefetch(keyed([[[1]], [[2]], [[3]]], FEATURES))
    with pytest.raises(RuntimeError, match="module that issued it"):
        other.set_fused_prefetch_handle(handle)


def test_setting_another_handle_releases_the_one_before() -> None:
    ahead = collection(MemoryStore())
    batch = keyed([[[1]], [[2]], [[3]]], FEATURES)
    handles = [ahead.issue_fused_prefetch(batch) for _ in range(2)]
    for handle in handles:
        ahead.set_fused_prefetch_handle(handle)
    with pytest.raises(RuntimeError, match="released"):
        ahead.set_fused_prefetch_handle(handles[0])
    ahead(batch)
    assert handles[1].reread_rows == 0


def test_ten_thousand_unused_handles_leave_nothing_behind() -> None:
    ahead = collection(MemoryStore())
    threads = threading.active_count()
    reads: list[weakref.ref[Any]] = []
    for _ in range(10_000):
        handle = ahead.issue_fused_prefetch(keyed([[[1]], [[2]], [[3]]], FEATURES))
        reads.append(weakref.ref(handle._read))
    del handle
    # Whatever is still queued runs before this one.
    ahead.issue_fused_prefetch(keyed([[[1]], [[2]], [[3]]], FEATURES)).wait()
    gc.collect()
    assert sum(read() is not None for read in reads) <= threading.active_count()
    assert threading.active_count() <= threads + 4


def test_handles_that_are_released_before_their_turn_are_never_read() -> None:
    store = Held()
    ahead = collection(store)
    handles = [ahead.issue_fused_prefetch(keyed([[[1]], [[2]], [[3]]], FEATURES)) for _ in range(20)]
    assert store.started.acquire(timeout=240)
    for handle in handles[:-1]:
        handle.release()
    store.goes_on.set()
    handles[-1].wait()
    assert len(store.pulled) < 10  # those under way, and the last


def test_an_error_of_the_background_read_surfaces_at_use() -> None:
    store = Failing()
    ahead = collection(store)
    batch = keyed([[[1]], [[2]], [[3]]], FEATURES)
    store.fails = True
    handle = ahead.issue_fused_prefetch(batch)
    handle.wait()
    ahead.set_fused_prefetch_handle(handle)
    with pytest.raises(ConnectionError, match="no store today"):
        ahead(batch)
    store.fails = False
    ahead(batch)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetched_hands_out_every_batch_with_its_handle_set(depth: int) -> None:
    store = Watched()
    ahead = collection(store)
    optimizer = SparseSGD([ahead])
    batches = [(number, keyed([[[number % 6]], [[2]], [[3]]], FEATURES)) for number in range(7)]
    seen = []
    for number, batch in prefetched(ahead, batches, depth=depth, features=lambda pair: pair[1]):
        assert ahead._handle is not None
        ahead(batch).values().sum().backward()
        optimizer.step()
        seen.append(number)
    assert seen == list(range(7))
    assert len(store.pulled) == 7  # none was read at the time of use


def test_prefetched_reads_depth_batches_ahead_and_no_further() -> None:
    ahead = collection(MemoryStore())
    taken = []

    def batches() -> Any:
        for number in range(10):
            taken.append(number)
            yield keyed([[[number % 6]], [[2]], [[3]]], FEATURES)

    iterator = prefetched(ahead, batches(), depth=3)
    next(iterator)
    assert taken == [0, 1, 2, 3]
    next(iterator)
    assert taken == [0, 1, 2, 3, 4]


def test_closing_prefetched_early_releases_its_handles() -> None:
    ahead = collection(MemoryStore())
    iterator = prefetched(ahead, [keyed([[[1]], [[2]], [[3]]], FEATURES)] * 5, depth=2)
    next(iterator)
    handle = ahead._handle
    iterator.close()
    assert ahead._handle is None
    with pytest.raises(RuntimeError, match="released"):
        ahead.set_fused_prefetch_handle(handle)


def test_prefetched_refuses_a_depth_of_zero_at_once() -> None:
    with pytest.raises(ValueError, match="depth"):
        prefetched(collection(MemoryStore()), [], depth=0)


class Watched(InterfaceOnly):
    """Notes what is pulled."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.pulled: list[list[tuple[str, list[int]]]] = []

    def pull_many(self, requests: Sequence[tuple[str, torch.Tensor]], **options: Any) -> list[Rows]:
        self.pulled.append([(table, keys.tolist()) for table, keys in requests])
        return self.behind.pull_many(requests, **options)


class Held(Watched):
    """Lets nobody read until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.goes_on = threading.Semaphore(0), threading.Event()

    def pull_many(self, requests: Sequence[tuple[str, torch.Tensor]], **options: Any) -> list[Rows]:
        self.started.release()
        assert self.goes_on.wait(timeout=240)
        return super().pull_many(requests, **options)


class Failing(InterfaceOnly):
    """Is gone at times."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.fails = False

    def pull_many(self, requests: Sequence[tuple[str, torch.Tensor]], **options: Any) -> list[Rows]:
        if self.fails:
            raise ConnectionError("no store today")
        return self.behind.pull_many(requests, **options)
