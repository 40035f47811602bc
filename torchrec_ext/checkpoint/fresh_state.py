"""What an optimizer holds for a parameter that it has never updated, found by trying it.

No list of optimizers: a throw-away optimizer of the same class and options is made for one parameter.
It either has state from the start, or writes it in its first step. The values that it writes first are
then what it starts with, if training from them is, bit for bit, training from no state.
"""

from __future__ import annotations

import copy
import inspect
from collections import UserDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchrec_ext.checkpoint.state_dicts import flat
from torchrec_ext.errors import CheckpointError

# Options that choose an implementation, some for one kind of device only. They change no layout.
_IMPLEMENTATION = ("foreach", "fused", "capturable")
_STEPS = 3


def layout(optimizer: Optimizer, options: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """The entries that an updated parameter has, by flat name; tensors have shape and dtype, no values.

    Args:
        optimizer: it is not changed; its class counts.
        options: those of the parameter's group.
        parameter: any tensor with ``shape``, ``dtype`` and ``device``; of a ``DTensor`` the whole.

    Raises:
        CheckpointError: no such optimizer can be made and make a step.
    """
    plain = {name: False if name in _IMPLEMENTATION else value for name, value in options.items()}
    shape, dtype = parameter.shape, parameter.dtype
    try:
        trial = _Trial(optimizer, plain, torch.zeros(shape, dtype=dtype, device="meta"))
        return flat(trial.state() or trial.first_step())
    except Exception:  # it reads values: torch's ASGD and Adafactor do
        return flat(
            _first_values(optimizer, options, torch.zeros(shape, dtype=dtype, device=parameter.device))
        )


def fresh_state(optimizer: Optimizer, options: Mapping[str, Any], like: torch.Tensor) -> dict[str, Any]:
    """The state from which training goes on as if the parameter had none.

    Takes up to about ten times the memory of the parameter for a moment.

    Args:
        optimizer: it is not changed; its class counts.
        options: those of the parameter's group.
        like: shape, dtype and device of the parameter, and how a ``DTensor`` is laid out.

    Returns:
        The state, new tensors. Empty if no state does as none does: SGD with dampening starts with its
        first gradient, others with a copy of the weight.

    Raises:
        CheckpointError: no such optimizer can be made and make a step.
    """
    trial = _attempt(optimizer, options, like)
    if trial.state():
        return trial.state()
    small = torch.zeros([min(size, 3) for size in like.shape], dtype=like.dtype, device=like.device)
    try:
        exact = _goes_on_as_from_none(optimizer, options, small)
    except Exception as error:
        raise _cannot(optimizer, error) from error
    return _first_values(optimizer, options, like) if exact else {}


def _first_values(optimizer: Optimizer, options: Mapping[str, Any], like: torch.Tensor) -> dict[str, Any]:
    trial = _attempt(optimizer, options, like)
    try:
        return trial.state() or trial.first_step()
    except Exception as error:
        raise _cannot(optimizer, error) from error


def _attempt(optimizer: Optimizer, options: Mapping[str, Any], like: torch.Tensor) -> _Trial:
    try:
        # Zeros: weight decay then adds nothing to the zero gradient of the first step.
        return _Trial(optimizer, options, torch.zeros_like(like.detach()))
    except Exception as error:
        raise _cannot(optimizer, error) from error


def _cannot(optimizer: Optimizer, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot find out what {type(optimizer).__qualname__} holds for a new parameter: it cannot be "
        f"made from the options of a group alone and take steps ({error})"
    )


def _goes_on_as_from_none(optimizer: Optimizer, options: Mapping[str, Any], like: torch.Tensor) -> bool:
    """Whether some steps from the first values give the bits that they give from no state."""
    ramp = torch.linspace(-1.0, 1.5, like.numel(), dtype=like.dtype, device=like.device).reshape(like.shape)
    without, with_start = (_Trial(optimizer, options, ramp.clone()) for _ in range(2))
    with_start.optimizer.state[with_start.parameter] = _first_values(optimizer, options, like)
    for number in range(1, _STEPS + 1):
        without.step(0.3 * number - ramp)
        with_start.step(0.3 * number - ramp)
        expected, found = ({**flat(one.state()), "": one.parameter} for one in (without, with_start))
        if expected.keys() != found.keys() or not all(_same(expected[k], found[k]) for k in expected):
            return False
    return True


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(type(one) is type(other) and one == other)


class _FirstValues(UserDict[str, Any]):
    """A parameter's state that remembers what each entry was first set to."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = (
                value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            )
        super().__setitem__(key, value)


class _Trial:
    """An optimizer like another, for one parameter of its own."""

    def __init__(self, optimizer: Optimizer, options: Mapping[str, Any], value: torch.Tensor) -> None:
        self.parameter = nn.Parameter(value)
        options = copy.deepcopy(dict(options))
        accepted = _constructor_arguments(type(optimizer))
        # As arguments, for what a constructor makes of them, and in the group, which may hold more.
        self.optimizer = type(optimizer)(
            [{**options, "params": [self.parameter]}], **{k: v for k, v in options.items() if k in accepted}
        )

    def state(self) -> dict[str, Any]:
        return dict(self.optimizer.state.get(self.parameter, {}))

    def step(self, gradient: torch.Tensor) -> None:
        self.parameter.grad = gradient
        try:
            self.optimizer.step()
        except RuntimeError as error:  # SparseAdam takes no dense gradient
            try:
                self.parameter.grad = _sparse(gradient)
                self.optimizer.step()
            except Exception:
                raise error from None

    def first_step(self) -> dict[str, Any]:
        """What a step with gradient zero first sets each entry to."""
        states: defaultdict[torch.Tensor, Any] = defaultdict(_FirstValues)
        self.optimizer.state = states
        self.step(torch.zeros_like(self.parameter))
        state = states[self.parameter]
        return state.first if isinstance(state, _FirstValues) else dict(state)


def _sparse(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.is_meta:
        rows = torch.empty(1, 0, dtype=torch.int64, device="meta")
        return torch.sparse_coo_tensor(rows, gradient[:0], gradient.shape, check_invariants=False)
    return gradient.to_sparse(1)


def _constructor_arguments(kind: type) -> set[str]:
    """The names that a class's constructor takes, those that it hands on to its base's among them."""
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" in vars(base):
            arguments = inspect.signature(vars(base)["__init__"]).parameters.values()
            names.update(argument.name for argument in arguments)
            if not any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
                break
    return names - {"self", "params"}
