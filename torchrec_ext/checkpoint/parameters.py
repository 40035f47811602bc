"""Which parameters an optimizer holds, under which names, and which optimizer updates each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.checkpoint.state_dicts import is_ordinary, parameter_names

Optimizers = Optimizer | Iterable[Optimizer]


@dataclass(frozen=True, eq=False)
class Group:
    """A parameter group: the optimizer it is in, its options and the names of its parameters.

    The optimizer is the one that makes the updates, inside of any container or wrapper.
    """

    optimizer: Optimizer
    options: Mapping[str, Any]
    names: Sequence[str]


@dataclass(frozen=True, eq=False)
class OptimizerParameter:
    """One parameter of an optimizer; ``live`` is the state that it has now, empty if it has none."""

    name: str
    value: torch.Tensor
    group: Group
    live: Mapping[str, Any]


def innermost(optimizer: Optimizers) -> list[Optimizer]:
    """The optimizers in a container or wrapper, in order; the optimizer itself if it is neither."""
    return list(_innermost(optimizer))


def _innermost(optimizer: Any) -> Iterator[Optimizer]:
    contained = getattr(optimizer, "optimizers", None)
    if contained is None and not isinstance(optimizer, Optimizer):
        contained = optimizer
    if contained is not None:
        for one in contained:
            # TorchRec's CombinedOptimizer holds (key, optimizer) pairs.
            yield from _innermost(one[1] if isinstance(one, tuple) else one)
        return
    for attribute in ("optimizer", "_optimizer"):
        if isinstance(wrapped := getattr(optimizer, attribute, None), Optimizer):
            yield from _innermost(wrapped)
            return
    yield optimizer


def find_parameters(
    optimizer: Optimizers, model: nn.Module | None
) -> tuple[list[OptimizerParameter], list[Group]]:
    """Every parameter of an optimizer, by the name under which its state is saved, and every group.

    Raises:
        ValueError: there are no names: no ``model``, and an optimizer that numbers its parameters; or a
            model that has others than its optimizer.
    """
    numbered = [(one, group) for one in innermost(optimizer) for group in one.param_groups]
    values = [value for _, group in numbered for value in group["params"]]
    if isinstance(optimizer, KeyedOptimizer):
        name_of = {id(value): name for name, value in optimizer.params.items()}
    else:
        names = _own_names(optimizer) if model is None else _names_in(model, values)
        if len(names) != len(values):
            raise ValueError(
                f"the optimizer's state_dict() names {len(names)} parameters and its groups hold "
                f"{len(values)}: pass the model, which gives the names"
            )
        name_of = {id(value): name for name, value in zip(names, values, strict=True)}
    parameters, groups = [], []
    for one, group in numbered:
        states = dict(one.state)
        options = {name: value for name, value in group.items() if name != "params"}
        groups.append(Group(one, options, [name_of.pop(id(value)) for value in group["params"]]))
        parameters += [
            OptimizerParameter(name, value, groups[-1], states.get(value, {}))
            for name, value in zip(groups[-1].names, group["params"], strict=True)
        ]
    if isinstance(optimizer, KeyedOptimizer):
        # TorchRec's warm-up keeps its counter as the state of a parameter that is in no group.
        states, alone = dict(optimizer.state), Group(optimizer, {}, [])
        for name in name_of.values():
            value = optimizer.params[name]
            parameters.append(OptimizerParameter(name, value, alone, states.get(value, {})))
    return parameters, groups


def _own_names(optimizer: Optimizers) -> list[str]:
    """The names in an optimizer's own state dict, in the order of its groups."""
    state_dict = optimizer.state_dict() if hasattr(optimizer, "state_dict") else None
    if state_dict is None or is_ordinary(state_dict):
        raise ValueError(
            "the state dict names its parameters and the optimizer numbers them: pass the model, "
            "which gives the names"
        )
    return parameter_names(state_dict)


def _names_in(model: nn.Module, values: list[torch.Tensor]) -> list[str]:
    """The names that ``torch.distributed.checkpoint`` gives to parameters of a model."""
    if FullyShardedDataParallel.fsdp_modules(model):
        raise ValueError(
            "the model has FullyShardedDataParallel modules, which flatten their parameters: use fully_shard"
        )
    strangers = {id(value) for value in values} - {id(value) for value in model.parameters()}
    if strangers:
        raise ValueError(f"the optimizer holds {len(strangers)} parameters that are not in the model")
    if not values:
        return []
    # An optimizer made for its names. It has some state already, or torch would make it take a step.
    named = torch.optim.SGD(values, lr=0.0)
    named.state[values[0]]["seen"] = torch.zeros(())
    state_dict: dict[str, Any] = get_optimizer_state_dict(model, named)
    (group,) = state_dict["param_groups"]
    return list(group["params"])
