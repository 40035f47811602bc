"""Completes an optimizer state dict, and tells state that never was from state that was lost."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import ShardedTensor
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.checkpoint import state_dicts
from torchrec_ext.checkpoint.damage import Entries, Form, expected_entries, raise_damage
from torchrec_ext.checkpoint.fresh_state import fresh_state
from torchrec_ext.checkpoint.parameters import Group, OptimizerParameter, Optimizers, find_parameters
from torchrec_ext.checkpoint.state_dicts import SavedState, flat
from torchrec_ext.errors import CheckpointError

logger = logging.getLogger(__name__)

_NAMES_SHOWN = 10


@dataclass(frozen=True)
class BackfillReport:
    """What ``backfill_optimizer_state`` found on this rank: parameter names, each in one place.

    ``complete``: their state was there. ``initialized``: they had none and got a fresh one.
    ``allowed``: the same, and ``allow`` names them. ``stateless``: they had none and need none; they are
    frozen, or their optimizer keeps none. All are empty for an ordinary state dict.
    """

    complete: tuple[str, ...] = ()
    initialized: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    stateless: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = f"optimizer state: {len(self.complete)} parameters complete"
        parts = [
            f"{len(names)} {what} ({_some(names)})"
            for what, names in (
                ("without state initialized", self.initialized),
                ("without state, as allowed, initialized", self.allowed),
                ("that need none", self.stateless),
            )
            if names
        ]
        return ", ".join([counts, *parts])


def backfill_optimizer_state(
    optimizer: Optimizers,
    state_dict: Mapping[str, Any],
    *,
    model: nn.Module | None = None,
    missing: Literal["error", "warn", "initialize"] = "error",
    allow: Sequence[str] = (),
) -> tuple[dict[str, Any], BackfillReport]:
    """Completes an optimizer state dict for loading, without hiding that state was lost.

    A parameter of which all entries are absent *never had state*: it gets the state from which training
    goes on, bit for bit, as if it had none. A parameter of which some entries are absent or do not fit,
    and state of a parameter that the optimizer does not have, is *damage*, and always an error.

    A frozen parameter needs no state: torch loads none for it. Every rank of a sharded model calls this
    with its own state dict. No collective is issued, except by optimizers whose step on a ``DTensor`` does.

    Args:
        optimizer: the optimizer to load into, a container or wrapper of optimizers, several of them, or
            TorchRec's ``KeyedOptimizer``. It is not changed, unless asking for its ``state_dict()`` does.
        state_dict: a state dict in the flattened form of ``torch.distributed.checkpoint.state_dict``,
            in the one with parameter names, or of a ``KeyedOptimizer``. An ordinary one, in which
            parameters are numbered, is given back as it is: torch loads it without what is absent.
        model: gives the names, unless the optimizer's own ``state_dict()`` has them.
        missing: what to do if a parameter never had state: raise, or initialize and log a warning, or
            initialize.
        allow: ``fnmatch`` patterns of parameters for which that is expected, whatever ``missing`` says.

    Returns:
        The completed state dict and a report, which rank 0 logs if anything was initialized. The dict is
        a new one that shares the tensors that were there. It has the form it had, with one exception:
        what torch cannot load flattened comes back in the form with parameter names. That is an optimizer
        with an empty group; one that has state, but none for a parameter that has some in the dict; one
        for which no tensors mean the same as no state (SGD with dampening).

    Raises:
        CheckpointError: state is damaged, or absent and not to be initialized; names what and says what
            to do. Also if the optimizer cannot be tried out to find what a fresh one holds.
        ValueError: an argument is wrong, or nothing gives the names.

    Example::

        state, report = backfill_optimizer_state(optimizer, state, model=model, allow=["experts.*"])
        set_optimizer_state_dict(model, optimizer, state)
    """
    if missing not in ("error", "warn", "initialize"):
        raise ValueError(f"missing must be 'error', 'warn' or 'initialize', not {missing!r}")
    if state_dicts.is_ordinary(state_dict):
        return state_dict, BackfillReport()  # type: ignore[return-value]  # untouched, whatever it is
    parameters, groups = find_parameters(optimizer, model)
    form = _form(optimizer, state_dict)
    saved = state_dicts.read(state_dict, {one.name for one in parameters})
    expected = expected_entries(parameters, saved, form)
    raise_damage(parameters, expected, saved, form)

    names: dict[str, list[str]] = {"complete": [], "initialized": [], "allowed": [], "stateless": []}
    patterns = (allow,) if isinstance(allow, str) else tuple(allow)
    for one in parameters:
        names[_fate(one, expected[one.name], saved, form, patterns)].append(one.name)
    report = BackfillReport(**{fate: tuple(those) for fate, those in names.items()})
    if report.initialized and missing == "error":
        raise CheckpointError(
            f"no optimizer state for {len(report.initialized)} of {len(parameters)} parameters: "
            f"{_some(report.initialized)}. If they never received a gradient before it was saved, name "
            "them in allow= or pass missing='initialize'; if they did, it was lost: load another checkpoint"
        )
    filling = {*report.initialized, *report.allowed}
    whole = _holds_whole_tensors(parameters, saved)
    states = {
        one.name: _fresh(one, expected[one.name], saved, form, whole)
        for one in parameters
        if one.name in filling
    }
    filled = _fill(state_dict, states, saved, form, parameters, groups)
    if states and not (dist.is_available() and dist.is_initialized() and dist.get_rank() > 0):
        level = logging.WARNING if report.initialized and missing == "warn" else logging.INFO
        logger.log(level, "%s", report)
    return filled, report


def _form(optimizer: Optimizers, state_dict: Mapping[str, Any]) -> Form:
    flattened = state_dicts.is_flattened(state_dict)
    if not isinstance(optimizer, KeyedOptimizer):
        return "flattened" if flattened else "named"
    if flattened:
        raise CheckpointError("the state dict is flattened, and TorchRec's KeyedOptimizer loads none that is")
    return "keyed"


def _fate(
    parameter: OptimizerParameter, expected: Entries, saved: SavedState, form: Form, allow: Sequence[str]
) -> str:
    """The field of the report in which a parameter is named."""
    if saved.entries.get(parameter.name):
        return "complete"
    # TorchRec's fused parameters require no gradient, and have state.
    if not expected or (form != "keyed" and not parameter.value.requires_grad):
        return "stateless"
    return "allowed" if any(fnmatchcase(parameter.name, pattern) for pattern in allow) else "initialized"


def _fresh(
    parameter: OptimizerParameter, expected: Entries, saved: SavedState, form: Form, whole: bool
) -> dict[str, Any]:
    """The state of a parameter that was never updated, as new tensors; empty if none stand for that."""
    optimizer, options = parameter.group.optimizer, parameter.group.options
    if isinstance(optimizer, FusedOptimizer):
        # FBGEMM starts every state of every optimizer at zero.
        return {name: _zeros(value) for name, value in parameter.live.items()}
    if isinstance(optimizer, KeyedOptimizer):
        raise CheckpointError(
            f"{parameter.name}: TorchRec's {type(optimizer).__name__} cannot initialize its state"
        )
    like = parameter.value
    if isinstance(like, DTensor) and whole:
        like = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    try:
        state = fresh_state(optimizer, {**options, **saved.options.get(parameter.name, {})}, like)
    except CheckpointError as error:
        raise CheckpointError(f"{parameter.name}: {error}") from error
    if flat(state).keys() == expected.keys() or (not state and form != "keyed"):
        return state
    raise CheckpointError(
        f"{parameter.name}: {type(optimizer).__name__} with the options that were saved starts with "
        f"{sorted(flat(state)) or 'no state'}, which cannot be loaded into {sorted(expected)}"
    )


def _zeros(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, ShardedTensor)):
        return torch.zeros_like(value)
    return type(value)()


def _holds_whole_tensors(parameters: Sequence[OptimizerParameter], saved: SavedState) -> bool:
    """Whether whole tensors were saved (``full_state_dict=True``) for parameters that are sharded."""
    sharded = [one.name for one in parameters if isinstance(one.value, DTensor)]
    values = [value for name in sharded for value in saved.entries.get(name, {}).values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]
    return bool(tensors) and not any(isinstance(value, DTensor) for value in tensors)


def _fill(
    state_dict: Mapping[str, Any],
    states: Mapping[str, Mapping[str, Any]],
    saved: SavedState,
    form: Form,
    parameters: Sequence[OptimizerParameter],
    groups: Sequence[Group],
) -> dict[str, Any]:
    options = {}
    for group in groups:
        kept = next((saved.options[name] for name in group.names if name in saved.options), group.options)
        new = [name for name in group.names if name not in saved.options]
        options.update({name: copy.deepcopy(dict(kept)) for name in new})
    if form == "keyed":
        return state_dicts.fill_named(state_dict, states, options, groups)
    if form == "flattened":
        if all(states.values()) and not _flattened_loads_in_part(parameters, groups, saved):
            return state_dicts.fill_flattened(state_dict, states, options)
        state_dict = state_dicts.named(saved, groups)
    # torch wants an entry for each parameter that is not frozen, even if it keeps nothing in it.
    empty: dict[str, Mapping[str, Any]] = {
        one.name: {} for one in parameters if one.value.requires_grad and one.name not in state_dict["state"]
    }
    return state_dicts.fill_named(state_dict, {**empty, **states}, options, groups)


def _flattened_loads_in_part(
    parameters: Sequence[OptimizerParameter], groups: Sequence[Group], saved: SavedState
) -> bool:
    """Whether torch would fail to load a flattened dict, or leave out what is in it.

    It wants a first parameter in each group, and once an optimizer has any state, it loads only what
    that has entries for.
    """
    in_use = {id(one.group.optimizer) for one in parameters if one.live}
    left_out = (
        bool(saved.entries.get(one.name)) and one.value.requires_grad and not one.live
        for one in parameters
        if id(one.group.optimizer) in in_use
    )
    return any(left_out) or not all(group.names for group in groups)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
