"""Reading a batch's rows before they are needed."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Batch = TypeVar("Batch")

# Reads wait for a store more than they compute.
_READERS = 4


class Read(Protocol):
    """What happens to the rows of a batch; see ``BatchRead``."""

    def pull(self, *, admit: bool, ahead: bool = False) -> None:
        """Reads all rows."""

    def refresh(self, *, admit: bool) -> int:
        """Brings the rows up to date; returns how many were read again."""


ReadT = TypeVar("ReadT", bound=Read)


class PrefetchHandle(Generic[ReadT]):
    """Rows of one batch that are read in the background, for one forward pass.

    It holds the batch's ids, and each row that they need once.

    Attributes:
        reread_rows: how many rows were read again when the handle was used; None before.

    Args:
        owner: the module that looks up.
        features: the batch.
        read: reads its rows.
        with_weights: whether the batch's weights are in use already.
    """

    def __init__(
        self, owner: object, features: KeyedJaggedTensor, read: ReadT, *, with_weights: bool = False
    ) -> None:
        self.reread_rows: int | None = None
        self._owner = weakref.ref(owner)
        self._of = _Identity(features, with_weights=with_weights)
        self._state = "not used"
        self._read: ReadT | None = read
        # The task refers to the read and not to the handle, so that a handle nobody has is released.
        self._done: Future[None] | None = readers().submit(read.pull, admit=False, ahead=True)

    def check_usable(self, module: object) -> None:
        """Checks that a module's next forward pass may use it.

        Raises:
            RuntimeError: it was used or released before, or is another module's.
        """
        if self._owner() is not module:
            raise RuntimeError("a prefetch handle is for the module that issued it")
        if self._done is None:
            raise RuntimeError(f"a prefetch handle is for one forward pass; this one was {self._state}")

    def wait(self) -> None:
        """Waits until the rows were read; what went wrong is for the forward pass to raise."""
        if self._done is not None:
            wait([self._done])

    def use(self, module: object, features: KeyedJaggedTensor, *, admit: bool) -> ReadT:
        """Waits for the rows, and brings them up to date.

        Args:
            module: the one that looks up.
            features: the batch that is looked up.
            admit: whether this is a lookup in training.

        Raises:
            RuntimeError: the handle cannot be used, or is of another batch.
            Exception: what the read in the background raised.
        """
        self.check_usable(module)
        done, read = self._done, self._read
        assert done is not None and read is not None
        if not self._of.matches(features):
            self.release()
            raise RuntimeError(
                "the prefetch handle was issued for another batch than the one that is looked up, or the "
                "batch was changed in place; it is released now"
            )
        self._drop("used")
        done.result()
        self.reread_rows = read.refresh(admit=admit)
        return read

    def release(self) -> None:
        """Lets go of the rows, read or not; idempotent."""
        if self._done is not None:
            self._done.cancel()
            self._drop("released")

    def _drop(self, state: str) -> None:
        self._state, self._done, self._read = state, None, None

    def __del__(self) -> None:
        if getattr(self, "_done", None) is not None:
            self.release()


class PrefetchingModule(ABC, Generic[ReadT]):
    """A module that can read a batch's rows ahead."""

    _handle: PrefetchHandle[ReadT] | None = None

    @abstractmethod
    def issue_fused_prefetch(self, features: KeyedJaggedTensor) -> PrefetchHandle[ReadT]:
        """Starts to read a batch's rows."""

    def set_fused_prefetch_handle(self, handle: PrefetchHandle[ReadT] | None) -> None:
        """Has the next forward pass use what a handle reads; a handle set before is released.

        The pass gives what it would give without: rows that changed since they were read are read again.

        Raises:
            RuntimeError: the handle was used before, or is another module's.
        """
        if handle is not None:
            handle.check_usable(self)
        if self._handle is not None and self._handle is not handle:
            self._handle.release()
        self._handle = handle

    def _take_handle(self) -> PrefetchHandle[ReadT] | None:
        """The handle that was set, which is not set any more."""
        handle, self._handle = self._handle, None
        return handle


def prefetched(
    module: PrefetchingModule[Any],
    batches: Iterable[Batch],
    *,
    depth: int = 2,
    features: Callable[[Batch], KeyedJaggedTensor] | None = None,
) -> Iterator[Batch]:
    """Iterates over batches while the rows of the next ones are read.

    The handle of a batch is set right before the batch is handed out, so its forward pass has to come
    before the next batch is asked for. Closing the iterator early releases all handles.

    Args:
        module: whose rows.
        batches: the batches.
        depth: how many batches ahead.
        features: what ``module`` looks up of a batch, by default the batch itself.

    Yields:
        The batches, in their order.

    Raises:
        ValueError: ``depth`` is not positive.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, not {depth}")
    return _prefetched(module, batches, depth, features)


def _prefetched(
    module: PrefetchingModule[Any],
    batches: Iterable[Batch],
    depth: int,
    features: Callable[[Batch], KeyedJaggedTensor] | None,
) -> Iterator[Batch]:
    issued: deque[tuple[Batch, PrefetchHandle[Any]]] = deque()
    rest = iter(batches)
    try:
        while True:
            for batch in rest:
                lookup: Any = batch if features is None else features(batch)
                issued.append((batch, module.issue_fused_prefetch(lookup)))
                if len(issued) > depth:
                    break
            if not issued:
                return
            batch, handle = issued.popleft()
            module.set_fused_prefetch_handle(handle)
            yield batch
    finally:
        module.set_fused_prefetch_handle(None)
        for _, handle in issued:
            handle.release()


class _Identity:
    """Tells whether a batch has the bags of another one, without a copy of them."""

    def __init__(self, features: KeyedJaggedTensor, *, with_weights: bool) -> None:
        self._with_weights = with_weights
        self._shape = _shape(features)
        # Inference tensors do not count their changes.
        self._tensors = [
            tensor.clone() if tensor.is_inference() else tensor for tensor in self._tensors_of(features)
        ]
        self._versions = self._versions_now()

    def matches(self, features: KeyedJaggedTensor) -> bool:
        if self._versions != self._versions_now() or self._shape != _shape(features):
            return False
        theirs_of = self._tensors_of(features)
        return len(theirs_of) == len(self._tensors) and all(
            mine is theirs or (mine.dtype == theirs.dtype and torch.equal(mine, theirs))
            for mine, theirs in zip(self._tensors, theirs_of, strict=True)
        )

    def _tensors_of(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        inverse = features.inverse_indices_or_none()
        weights = features.weights_or_none() if self._with_weights else None
        tensors = [features.values(), features.lengths(), None if inverse is None else inverse[1], weights]
        return [tensor for tensor in tensors if tensor is not None]

    def _versions_now(self) -> list[int]:
        return [0 if tensor.is_inference() else tensor._version for tensor in self._tensors]


def _shape(features: KeyedJaggedTensor) -> tuple[list[str], list[int], list[str] | None]:
    """The features, how many bags each has, and those that the inverse indices are of."""
    inverse = features.inverse_indices_or_none()
    return list(features.keys()), features.stride_per_key(), None if inverse is None else list(inverse[0])


@cache
def readers() -> ThreadPoolExecutor:
    """The threads that read."""
    return ThreadPoolExecutor(_READERS, thread_name_prefix="recstore-prefetch")


# Threads do not survive a fork.
os.register_at_fork(after_in_child=readers.cache_clear)
