"""Compares what a state dict holds for each parameter with what its optimizer keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from torchrec_ext.checkpoint.fresh_state import layout
from torchrec_ext.checkpoint.parameters import OptimizerParameter
from torchrec_ext.checkpoint.state_dicts import SavedState, flat
from torchrec_ext.errors import CheckpointError

Form = Literal["flattened", "named", "keyed"]
Entries = Mapping[str, Any]

_LINES_SHOWN = 10


def expected_entries(parameter: OptimizerParameter, saved: SavedState, form: Form) -> Entries:
    """The entries, by flat name, that are loaded into the state of a parameter; values do not count.

    TorchRec copies into the state that is there. torch makes the state anew: from the flattened form by
    the options that the optimizer has, from the other by the options that were saved.
    """
    if form == "keyed":
        return flat(parameter.live)
    options = dict(parameter.group.options)
    if form == "named":
        options.update(saved.options.get(parameter.name, {}))
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
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor, ShardedTensor)):
        return f"a {type(value).__name__}"
    if isinstance(value, (int, float)) or value.dim() == 0:
        dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
        return "a bool" if dtype == torch.bool else "complex" if dtype.is_complex else "a number"
    kinds = {"floating-point": value.dtype.is_floating_point, "complex": value.dtype.is_complex}
    kind = next(
        (name for name, fits in kinds.items() if fits), "bool" if value.dtype == torch.bool else "integer"
    )
    holder = "tensor"
    if form == "keyed":
        holder = next((one.__name__ for one in (ShardedTensor, DTensor) if isinstance(value, one)), holder)
    return f"a {kind} {holder} of shape {tuple(value.size())}"


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))
