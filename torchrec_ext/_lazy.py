"""Module attributes that are imported on first use (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_attributes(package: str, origins: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a module ``__getattr__`` that imports ``name`` from ``origins[name]`` when asked for it."""

    def resolve(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(origins[name]), name)

    return resolve
