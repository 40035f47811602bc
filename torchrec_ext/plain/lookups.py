"""Watches the lookups of fused kernels: which rows a gradient reached."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, Protocol

import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_kernel import BaseEmbedding

from torchrec_ext.zch.hook import SharedHook


class LookupListener(Protocol):
    """What a ``LookupWatch`` tells of one kernel."""

    def gradient_arrived(self, kernel: BaseEmbedding, rows: torch.Tensor, counts: torch.Tensor) -> None:
        """Rows whose vectors the kernel's optimizer moves now.

        Args:
            kernel: the kernel.
            rows: of one feature after another, counted from the start of the feature's shard, int64 or
                int32 ``[n]`` on the kernel's device; repeats, and numbers that no row has, are possible.
            counts: how many each feature has, int64 or int32 ``[num_features]`` on the same device.
        """


class LookupWatch(SharedHook[LookupListener]):
    """The one hook on a kernel of a sharded module, shared by all that listen to it.

    It stands in for the kernel's ``forward``. Rows are reported when the gradient of their lookup
    arrives, however long ago and in whatever mode they were looked up: only then does the fused optimizer
    move them. Nothing here waits for the device.
    """

    def __init__(self, kernel: BaseEmbedding) -> None:
        super().__init__(kernel, "forward")
        self._kernel = kernel

    def __call__(self, features: KeyedJaggedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stands in for the kernel's ``forward``."""
        output: torch.Tensor = self._original(features, *args, **kwargs)
        if self._users and output.requires_grad:
            output.register_hook(partial(self._gradient_arrived, features.values(), counts_of(features)))
        return output

    def _gradient_arrived(self, rows: torch.Tensor, counts: torch.Tensor, _gradient: torch.Tensor) -> None:
        # Whoever watches now: the listeners may have changed since the lookup.
        watch = LookupWatch.on(self._kernel)
        if watch is not None:
            for listener in watch._users:
                listener.gradient_arrived(self._kernel, rows, counts)


def counts_of(features: KeyedJaggedTensor) -> torch.Tensor:
    """How many values each feature has, ``[num_features]`` on the features' device."""
    offsets = features.offsets()
    if features.variable_stride_per_key():
        ends = list(itertools.accumulate(features.stride_per_key(), initial=0))
        return offsets[torch.tensor(ends, device=offsets.device)].diff()
    if not features.stride():
        return offsets.new_zeros(len(features.keys()))  # a batch without bags
    return offsets[:: features.stride()].diff()
