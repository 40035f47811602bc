"""Compares what a state dict holds for each parameter with what its optimizer keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import ShardedTensor

from torchrec_ext.checkpoint.fresh_state import layout
from torchrec_ext.checkpoint.parameters import OptimizerParameter
from torchrec_ext.checkpoint.state_dicts import SavedState, flat
from torchrec_ext.errors import CheckpointError

Form = Literal["flattened", "named", "keyed"]
Entries = Mapping[str, Any]

_LINES_SHOWN = 10


def expected_entries(
    parameters: Sequence[OptimizerParameter], saved: SavedState, form: Form
) -> dict[str, Entries]:
    """The entries, by flat name, that are loaded into each parameter's state; values do not count.

    TorchRec copies into the state that is there. torch makes the state anew: from the flattened form by
    the options that the optimizer has, from the other by the options that were saved.
    """
    if form == "keyed":
        return {one.name: flat(one.live) for one in parameters}
    expected: dict[str, Entries] = {}
    known: dict[Any, Entries] = {}  # finding one out takes a trial, and parameters are alike
    for one in parameters:
        own = saved.options.get(one.name, {}) if form == "named" else {}
        key = id(one.group), id(own) if own else None, one.value.shape, one.value.dtype
        if key not in known:
            known[key] = _layout(one, {**one.group.options, **own})
        expected[one.name] = known[key]
    return expected


def _layout(parameter: OptimizerParameter, options: Mapping[str, Any]) -> Entries:
    try:
        return layout(parameter.group.optimizer, options, parameter.value)
    except CheckpointError:
        if parameter.live:
            return flat(parameter.live)
        raise


def raise_damage(
    parameters: Sequence[OptimizerParameter],
    expected: Mapping[str, Entries],
    saved: SavedState,
    form: Form,
) -> None:
    """Raises a ``CheckpointError`` that names every parameter and entry that does not fit."""
    lines = [f"{key}: the optimizer has no such parameter" for key in saved.strangers]
    for parameter in parameters:
        entries = saved.entries.get(parameter.name, {})
        problems = [
            *_group_problems(parameter, saved, form),
            *(_entry_problems(expected[parameter.name], entries, form) if entries else ()),
        ]
        if problems:
            lines.append(f"{parameter.name}: {'; '.join(problems)}")
    if lines:
        shown = "\n  ".join(lines[:_LINES_SHOWN])
        more = f"\n  and {len(lines) - _LINES_SHOWN} more" if len(lines) > _LINES_SHOWN else ""
        raise CheckpointError(
            f"the optimizer state is damaged, or of another optimizer:\n  {shown}{more}\n"
            "Load another checkpoint, or build the optimizer, options too, as it was when this was saved. "
            "To go on with fresh state for a parameter, take out all of its entries and name it in allow="
        )


def _group_problems(parameter: OptimizerParameter, saved: SavedState, form: Form) -> Iterator[str]:
    if form == "keyed" or parameter.name not in parameter.group.names:
        return
    options = saved.options.get(parameter.name)
    if options is None:
        if saved.entries.get(parameter.name):
            yield "it has state and is in no parameter group"
    elif form == "flattened" and (lost := parameter.group.options.keys() - options.keys()):
        # torch reads each of them from here; in the other form it has defaults for newer ones.
        yield f"param_groups.{parameter.name} lacks {_listed(lost)}"


def _entry_problems(expected: Entries, entries: Entries, form: Form) -> Iterator[str]:
    if form == "keyed" and not expected:
        yield (
            f"it has {_listed(entries)}, and the optimizer holds no state for it. TorchRec loads into state "
            "that is there: call init_state() first"
        )
        return
    if lost := expected.keys() - entries.keys():
        yield f"{_listed(lost)} missing, and {_listed(entries)} there"
    if extra := entries.keys() - expected.keys():
        yield f"{_listed(extra)} not kept by this optimizer"
    for name in sorted(expected.keys() & entries.keys()):
        wanted, found = _described(expected[name], form), _described(entries[name], form)
        if wanted != found:
            yield f"{name} is {found}, not {wanted}"


def _described(value: Any, form: Form) -> str:
    """What of a value must fit. Numbers and tensors without dimensions stand in for each other."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "a number"
    if not isinstance(value, (torch.Tensor, ShardedTensor)):
        return f"a {type(value).__name__}"
    kind = _kind(value.dtype)
    if value.dim() == 0:
        return "a number" if kind in ("floating-point", "integer") else f"a {kind} number"
    holder = "tensor"
    if form == "keyed":
        holder = next((one.__name__ for one in (ShardedTensor, DTensor) if isinstance(value, one)), holder)
    return f"a {kind} {holder} of shape {tuple(value.size())}"


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point or dtype.is_complex:
        return "complex" if dtype.is_complex else "floating-point"
    return "bool" if dtype == torch.bool else "integer"


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))
