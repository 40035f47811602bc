"""Keeping a gradient for longer than the backward pass that brings it."""

from __future__ import annotations

import torch


def kept(grad: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with a gradient's values that nobody else writes to.

    It is the gradient itself if autograd hands over the only reference to it, which saves the copy of
    the largest tensor of a step. A gradient that others hold (the tensor passed to ``backward``, one that
    also became some parameter's ``.grad``) or whose memory others see (views, expanded tensors) is copied.
    """
    return grad if _is_ours(grad) else grad.clone(memory_format=torch.contiguous_format)


def _is_ours(grad: torch.Tensor) -> bool:
    # Reference counts have no public name; checked with torch 2.13. Without them, copy.
    tensors = getattr(grad, "_use_count", None)
    storages = getattr(torch._C, "_storage_Use_Count", None)
    if tensors is None or storages is None or not grad.is_contiguous():
        return False
    # One reference to the tensor: the caller's. Two to the memory: the tensor's and the one asked for here.
    return bool(tensors() == 1 and storages(grad.untyped_storage()._cdata) == 2)
