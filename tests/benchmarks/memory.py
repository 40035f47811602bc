"""How much memory an object keeps alive."""

from __future__ import annotations

import gc
import sys
import types
from typing import Any

import numpy as np
import torch

_NOT_FOLLOWED = (type, types.ModuleType, types.CodeType, types.FrameType)


def kept_bytes(root: object) -> dict[int, int]:
    """What an object keeps alive, by address: Python objects, the storages of tensors, NumPy's arrays.

    Classes, modules and the globals of functions are not looked into.
    """
    sizes: dict[int, int] = {}
    seen: dict[int, object] = {}  # by address; keeps temporary objects from giving theirs to others
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _NOT_FOLLOWED):
            continue
        seen[id(one)] = one
        sizes[id(one)] = sys.getsizeof(one, 0) if not isinstance(one, torch.Tensor | np.ndarray) else 0
        if isinstance(one, torch.Tensor):
            _count_tensor(one, sizes)
        elif isinstance(one, np.ndarray):
            base: Any = one
            while isinstance(base.base, np.ndarray):
                base = base.base
            sizes[base.__array_interface__["data"][0]] = base.nbytes
        if isinstance(one, types.FunctionType):
            waiting.extend(one.__closure__ or ())
        else:
            waiting.extend(gc.get_referents(one))
    return sizes


def _count_tensor(tensor: torch.Tensor, sizes: dict[int, int]) -> None:
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # of a tensor subclass; its local part is met by itself
        return
    sizes[storage.data_ptr()] = storage.nbytes()
