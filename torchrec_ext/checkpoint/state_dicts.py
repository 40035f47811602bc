"""The forms in which optimizer state dicts come, read into one and written back.

- *ordinary*: ``Optimizer.state_dict()``; parameters are numbered.
- *named*: the same with names for numbers, from ``get_optimizer_state_dict`` or TorchRec's
  ``KeyedOptimizer`` (which saves no groups unless told to).
- *flattened*: ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict=True``; one key
  ``state.<name>.<entry>`` per entry and ``param_groups.<name>.<option>`` per parameter and option.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrec_ext.errors import CheckpointError

if TYPE_CHECKING:
    from torchrec_ext.checkpoint.parameters import Group

STATE, GROUPS = "state", "param_groups"


@dataclass(frozen=True)
class SavedState:
    """What a state dict holds, by parameter name.

    ``entries`` are flat: those nested in dictionaries are named ``outer.inner``. An entry that is None
    counts as absent, as it does for the optimizers that write one. ``options`` are those of the
    parameter's group; a parameter in no group has none. ``strangers`` are keys of no known parameter.
    """

    entries: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Mapping[str, Any]]
    strangers: Sequence[str]


def is_flattened(state_dict: Mapping[str, Any]) -> bool:
    """Whether this is the flattened form."""
    return bool(state_dict) and all(key.startswith((f"{STATE}.", f"{GROUPS}.")) for key in state_dict)


def is_ordinary(state_dict: Mapping[str, Any]) -> bool:
    """Whether this is the form in which parameters are numbered."""
    if not isinstance(state_dict.get(STATE), Mapping) or GROUPS not in state_dict:
        return False
    keys = [*state_dict[STATE], *(key for group in state_dict[GROUPS] for key in group.get("params", ()))]
    return all(isinstance(key, int) for key in keys)


def parameter_names(state_dict: Mapping[str, Any]) -> list[str]:
    """The names of all parameters in the groups of a named or flattened state dict, in its order."""
    if is_flattened(state_dict):
        options = [key.removeprefix(f"{GROUPS}.") for key in state_dict if key.startswith(f"{GROUPS}.")]
        return list(dict.fromkeys(option.rpartition(".")[0] for option in options))
    return [name for group in state_dict.get(GROUPS, ()) for name in group["params"]]


def read(state_dict: Mapping[str, Any], names: Collection[str]) -> SavedState:
    """Reads a named or flattened state dict.

    Args:
        state_dict: it is not changed.
        names: the optimizer's parameters.

    Raises:
        CheckpointError: it is in neither form.
    """
    if is_flattened(state_dict):
        return _read_flattened(state_dict, names)
    state = state_dict.get(STATE)
    if not isinstance(state, Mapping):
        raise CheckpointError(
            "this is no optimizer state dict: it has neither a 'state' nor keys like "
            f"'state.<parameter>.<entry>', but {sorted(map(str, state_dict))[:5]}"
        )
    options = {}
    for group in state_dict.get(GROUPS, ()):
        shared = {key: value for key, value in group.items() if key != "params"}
        options.update(dict.fromkeys(group["params"], shared))
    return SavedState(
        {name: _present(entries) for name, entries in state.items() if name in names},
        {name: those for name, those in options.items() if name in names},
        [str(name) for name in dict.fromkeys([*state, *options]) if name not in names],
    )


def _read_flattened(state_dict: Mapping[str, Any], names: Collection[str]) -> SavedState:
    entries: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    strangers = []
    for key, value in state_dict.items():
        part, _, rest = key.partition(".")
        name = next((head for head in _heads(rest) if head in names), None)
        if name is None:
            strangers.append(key)
        elif part == GROUPS:
            options.setdefault(name, {})[rest[len(name) + 1 :]] = value
        else:
            entries.setdefault(name, {})[rest[len(name) + 1 :]] = value
    return SavedState({name: _present(those) for name, those in entries.items()}, options, strangers)


def _heads(key: str) -> Iterator[str]:
    """What stands before each dot, the longest first."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _present(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat(entries).items() if value is not None}


def flat(entries: Mapping[Any, Any]) -> dict[str, Any]:
    """A parameter's state without nesting, as torch flattens it."""
    found: dict[str, Any] = {}
    for key, value in entries.items():
        if isinstance(value, Mapping):
            found.update({f"{key}.{inner}": one for inner, one in flat(value).items()})
        else:
            found[str(key)] = value
    return found


def nested(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The opposite of ``flat``."""
    found: dict[str, Any] = {}
    for key, value in entries.items():
        *outer, last = key.split(".")
        place = found
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def fill_flattened(
    state_dict: Mapping[str, Any],
    states: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """A flattened state dict with the states and options of more parameters."""
    filled = dict(state_dict)
    for name, state in states.items():
        filled.update({f"{STATE}.{name}.{entry}": value for entry, value in flat(state).items()})
    for name, those in options.items():
        filled.update({f"{GROUPS}.{name}.{option}": value for option, value in those.items()})
    return filled


def fill_named(
    state_dict: Mapping[str, Any],
    states: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Mapping[str, Any]],
    groups: Sequence[Group],
) -> dict[str, Any]:
    """A named state dict with the states of more parameters, and each of them in a group.

    Args:
        state_dict: it is not changed.
        states: the states to fill in.
        options: the options of the parameters that are in no group yet.
        groups: the optimizer's.
    """
    kept = {name: dict(entries) for name, entries in state_dict[STATE].items()}
    filled = {**state_dict, STATE: {**kept, **states}}
    if GROUPS not in state_dict:
        return filled
    saved = [{**group, "params": list(group["params"])} for group in state_dict[GROUPS]]
    holder = {name: group for group in saved for name in group["params"]}
    for group in groups:
        for name in group.names:
            if name not in options:
                continue
            place = next((holder[other] for other in group.names if other in holder), None)
            if place is None:
                place = {**copy.deepcopy(dict(options[name])), "params": []}
                saved.append(place)
            place["params"].append(name)
            holder[name] = place
        if not group.names and all(one["params"] for one in saved):
            saved.append({**copy.deepcopy(dict(group.options)), "params": []})
    # torch takes the last group for the empty one, wherever that stands.
    saved.sort(key=lambda one: not one["params"])
    return {**filled, GROUPS: saved}


def named(saved: SavedState, groups: Sequence[Group]) -> dict[str, Any]:
    """The named form of what was read from a flattened state dict."""
    regrouped = []
    for group in groups:
        members = [name for name in group.names if name in saved.options]
        if members:
            regrouped.append({**saved.options[members[0]], "params": members})
    states = {name: nested(entries) for name, entries in saved.entries.items()}
    return {STATE: states, GROUPS: regrouped}
