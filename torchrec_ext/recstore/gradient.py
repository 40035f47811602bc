"""Keeping a gradient for longer than the backward pass that brings it."""

from __future__ import annotations

import torch


def is_sole_reference(grad: torch.Tensor) -> bool:
    """Whether a gradient that autograd hands over can be kept as it is, without a copy.

    Not if others hold it (the tensor passed to ``backward``, one that also became some parameter's
    ``.grad``), or its memory is seen by others (views, expanded tensors): they may change it.
    """
    # Reference counts have no public name; checked with torch 2.13 and 2.14. Without them, copy.
    tensors = getattr(grad, "_use_count", None)
    storages = getattr(torch._C, "_storage_Use_Count", None)
    if tensors is None or storages is None or not grad.is_contiguous():
        return False
    # One reference to the tensor: the caller's. Two to the memory: the tensor's and the one asked for here.
    return bool(tensors() == 1 and storages(grad.untyped_storage()._cdata) == 2)


class SpareBuffers:
    """Memory for copies of gradients, used again: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def copy(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies a gradient.

        Returns:
            The copy, and the buffer it is in, for ``give_back``.
        """
        size = grad.numel()
        fits = (
            number
            for number, buffer in enumerate(self._buffers)
            if buffer.numel() >= size and (buffer.dtype, buffer.device) == (grad.dtype, grad.device)
        )
        found = next(fits, None)
        if found is None:
            self._buffers.clear()  # all too small by now
            buffer = torch.empty(size, dtype=grad.dtype, device=grad.device)
        else:
            buffer = self._buffers.pop(found)
        return buffer[:size].view(grad.shape).copy_(grad), buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Takes a buffer for the next copy."""
        self._buffers.append(buffer)
