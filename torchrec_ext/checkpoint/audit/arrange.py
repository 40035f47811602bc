"""Which entry of a checkpoint is which slot of which table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torchrec_ext.checkpoint import state_dicts
from torchrec_ext.checkpoint.audit.reading.tensors import NotRead, TensorEntry
from torchrec_ext.checkpoint.audit.report import Finding, Note
from torchrec_ext.store.tables import DenseTable

Role = Literal["weight", "state", "ids", "rows", "keys", "other"]

# Optimizer state by the names that torch, TorchRec, FBGEMM and this package's stores give it. Squares of
# gradients, or sums and averages of such; they have the weight's rows, and none is negative.
SQUARES = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "acc_delta", "momentum2", "moment2", "moment_2"}
)
# Has the weight's rows too.
PER_ROW = SQUARES | {"exp_avg", "momentum_buffer", "momentum1", "exp_inf", "grad_avg", "moment1", "moment_1"}
# Whoever keeps one of these for a parameter keeps it for all of its group.
_ALWAYS = PER_ROW | {"step"}
_NOT_NEGATIVE = SQUARES | {"exp_inf", "step"}

_EMBEDDINGS = ("embedding_bags.", "embeddings.", "dynamic_tables.")
_COLLISION = "_managed_collision_collection._managed_collision_modules."
_WRAPPERS = ("_dmp_wrapped_module", "_fsdp_wrapped_module", "_orig_mod", "_embedding_module", "module")
_COLLISION_ROLES: dict[str, Role] = {"_mch_sorted_raw_ids": "ids", "_mch_remapped_ids_mapping": "rows"}
_DYNAMIC_FIELDS = ("frequencies", "last_used", "candidates", "candidate_counts", "has_key", "versions")


@dataclass(frozen=True)
class Slot:
    """One tensor of a table.

    Attributes:
        table: the table's name, or the parameter's.
        name: ``weight`` of a table, ``value`` of another tensor of a module, or the optimizer's name for it.
        tensor: where its values are.
        role: what it is.
        owner: of optimizer state, whose: the place of its optimizer in the checkpoint, and the parameter's
            name there. One table may have state of two optimizers.
        squares: whether its values may be squares.
        not_negative: whether none of its values can be negative.
        keys: of a table with keys, the keys of its rows.
        in_use: of keys, which of them are in use; None: all.
        initial: what it holds before its row's first update; None: not known.
        dense: of a weight in a store, the table if it has a row for every key of a range.
    """

    table: str
    name: str
    tensor: TensorEntry
    role: Role
    owner: str = ""
    squares: bool = False
    not_negative: bool = False
    keys: TensorEntry | None = None
    in_use: TensorEntry | None = None
    initial: float | None = None
    dense: DenseTable | None = None


@dataclass
class Arrangement:
    """A checkpoint's tables.

    Attributes:
        slots: all their tensors, in order.
        findings: what is wrong with their structure.
        notes: what to know of it.
    """

    slots: list[Slot] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


@dataclass
class _Parameter:
    """Optimizer state of one parameter.

    Attributes:
        name: the parameter's, or its number.
        state: its entries by flat name.
        saved: whether it has a state, of whatever.
        peers: the entries that parameters of its group have; empty if groups are not known.
        options: its group's.
    """

    name: str
    state: Mapping[str, Any]
    saved: bool = True
    peers: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)


def arrange(tree: Any) -> Arrangement:
    """Sorts the entries of a state dict.

    Args:
        tree: as ``reading`` gives it.
    """
    found = Arrangement()
    optimizers: list[tuple[str, Mapping[Any, Any]]] = []
    tensors: list[tuple[tuple[Any, ...], TensorEntry]] = []
    _walk(tree, (), optimizers, tensors, found)
    names = _names_in_modules([path for path, _ in tensors])
    by_key = {entry.key: entry for _, entry in tensors}
    of_modules = [_of_module(name, entry, by_key) for name, (_, entry) in zip(names, tensors, strict=True)]
    taken = Counter((slot.table, slot.name) for slot in of_modules)  # of a module and what wraps it, say
    found.slots += [
        slot if taken[slot.table, slot.name] == 1 else replace(slot, table=slot.tensor.key)
        for slot in of_modules
    ]
    weights = {slot.table for slot in found.slots if slot.role == "weight"}
    for where, node in optimizers:
        for parameter in _parameters(node, where, found):
            _add_state(parameter, where, weights, found)
    return found


def _walk(
    node: Any,
    path: tuple[Any, ...],
    optimizers: list[tuple[str, Mapping[Any, Any]]],
    tensors: list[tuple[tuple[Any, ...], TensorEntry]],
    found: Arrangement,
) -> None:
    if isinstance(node, TensorEntry):
        tensors.append((path, node))
    elif isinstance(node, NotRead):
        _add_unread(".".join(map(str, path)), "", node, found)
    elif isinstance(node, Mapping) and _is_optimizer(node):
        optimizers.append((".".join(map(str, path)), node))
        for name, inner in node.items():  # options, and what else an optimizer keeps
            if str(name).partition(".")[0] != state_dicts.STATE:
                _walk(inner, (*path, name), optimizers, tensors, found)
    elif isinstance(node, (Mapping, list)):
        inside = node.items() if isinstance(node, Mapping) else enumerate(node)
        for name, inner in inside:
            _walk(inner, (*path, name), optimizers, tensors, found)


def _add_unread(table: str, slot: str, entry: NotRead, found: Arrangement) -> None:
    if entry.damaged:
        found.findings.append(Finding(table, slot, "unreadable", 1, (), entry.reason))
    else:
        found.notes.append(Note(table, f"not audited: {entry.reason}"))


# What modules save


def _names_in_modules(paths: Sequence[tuple[Any, ...]]) -> list[str]:
    """Each tensor's name within its module: without the key that a checkpoint has its model under."""
    short = [
        ".".join(map(str, path[1:] if len(path) > 1 and "model" in str(path[0]) else path)) for path in paths
    ]
    taken = Counter(short)  # of a model and its moving average, say
    return [
        name if taken[name] == 1 or path[0] == "model" else ".".join(map(str, path))
        for name, path in zip(short, paths, strict=True)
    ]


def _bare(name: str) -> str:
    """A name without the modules that only wrap others."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _table_of(parameter: str) -> str:
    """The table whose weight a parameter is, ``mc.t0``; the parameter's own name if it is of no table."""
    bare = _bare(parameter)
    for part in _EMBEDDINGS:
        head, found, tail = bare.rpartition(part)
        if found and (not head or head.endswith(".")) and tail.endswith(".weight"):
            return head + tail.removesuffix(".weight")
    return bare


def _joined(head: str, table: str) -> str:
    return ".".join(part for part in (_bare(head.rstrip(".")), table) if part)


def _of_module(name: str, entry: TensorEntry, others: Mapping[str, TensorEntry]) -> Slot:
    if _COLLISION in name:
        head, _, tail = name.rpartition(_COLLISION)
        table, _, buffer = tail.rpartition(".")
        return Slot(_joined(head, table), buffer, entry, _COLLISION_ROLES.get(buffer, "other"))
    head, dynamic, tail = name.rpartition("dynamic_tables.")
    if dynamic and "." not in tail:  # the step of all of them
        return Slot(name.removesuffix(f".{tail}"), tail, entry, "other")
    if dynamic:
        table, _, slot = tail.partition(".")
        prefix = entry.key.removesuffix(slot)
        keys, in_use = others.get(f"{prefix}keys"), others.get(f"{prefix}has_key")
        table = _joined(head, table)
        if slot == "keys":
            return Slot(table, "keys", entry, "keys", in_use=in_use)
        if slot in _DYNAMIC_FIELDS:
            return Slot(table, slot, entry, "other")
        if slot == "weight":
            return Slot(table, "weight", entry, "weight", keys=keys)
        return replace(_state_slot(table, slot.removeprefix("slots."), entry, frozenset()), keys=keys)
    table = _table_of(name)
    return Slot(table, "value" if table == _bare(name) else "weight", entry, "weight")


# What optimizers save


def _is_optimizer(node: Mapping[Any, Any]) -> bool:
    if all(isinstance(key, str) for key in node) and state_dicts.is_flattened(node):
        return True
    state = node.get(state_dicts.STATE)
    if not isinstance(state, Mapping):
        return False
    groups = node.get(state_dicts.GROUPS)
    return groups is not None or all(isinstance(one, Mapping) for one in state.values())


def _parameters(node: Mapping[Any, Any], where: str, found: Arrangement) -> Iterator[_Parameter]:
    """The parameters of an optimizer's state dict, whatever its form, also those without state."""
    if state_dicts.is_flattened(node):
        names = state_dicts.parameter_names(node)
        saved = state_dicts.read(node, names)
        states: dict[str, dict[str, Any]] = {name: dict(entries) for name, entries in saved.entries.items()}
        for key in saved.strangers:
            name, _, slot = key.partition(".")[2].rpartition(".")
            if key.startswith(f"{state_dicts.STATE}."):
                states.setdefault(name, {})[slot] = node[key]
        options = saved.options
        # In this form every parameter has its own options: those of one group have the same.
        alike: dict[str, list[str]] = {}
        for name in names:
            alike.setdefault(repr(sorted(options.get(name, {}).items())), []).append(name)
        groups = [(members, options.get(members[0], {})) for members in alike.values()]
    else:
        states = {
            str(name): state_dicts.flat(entries) if isinstance(entries, Mapping) else {"": entries}
            for name, entries in node[state_dicts.STATE].items()
        }
        options, groups = {}, list(_groups(node, where, found))
        for members, group in groups:
            options.update(dict.fromkeys(members, group))
    peers = {
        name: frozenset(slot for other in members for slot in states.get(other, {}))
        for members, _ in groups
        for name in members
    }
    for name in dict.fromkeys([*states, *peers]):
        own = {slot: value for slot, value in states.get(name, {}).items() if value is not None}
        yield _Parameter(name, own, name in states, peers.get(name, frozenset()), options.get(name, {}))


def _groups(
    node: Mapping[Any, Any], where: str, found: Arrangement
) -> Iterator[tuple[list[str], Mapping[str, Any]]]:
    """The groups of an optimizer: the names of their parameters, and their options."""
    table = ".".join(part for part in (where, state_dicts.GROUPS) if part)

    def listed(value: Any, name: str) -> list[Any]:
        if value is None or isinstance(value, NotRead):  # that it could not be read was found before
            return []
        if isinstance(value, (list, Mapping)):
            return list(value.values()) if isinstance(value, Mapping) else value
        message = f"it is no list, but of type {type(value).__name__}"
        found.findings.append(Finding(table, name, "unreadable", 1, (), message))
        return []

    for number, group in enumerate(listed(node.get(state_dicts.GROUPS), "")):
        if isinstance(group, Mapping):
            yield [str(one) for one in listed(group.get("params"), f"{number}.params")], group
        elif not isinstance(group, NotRead):
            message = f"it is no group of parameters, but of type {type(group).__name__}"
            found.findings.append(Finding(table, str(number), "unreadable", 1, (), message))


def _add_state(parameter: _Parameter, where: str, weights: Collection[str], found: Arrangement) -> None:
    table = _match(parameter, where, weights)
    owner = f"{where}.{parameter.name}"
    short = {name: name.rpartition(".")[2] for name in parameter.state}
    siblings = frozenset(short.values())
    for name, value in parameter.state.items():
        if isinstance(value, NotRead):
            _add_unread(table, short[name], value, found)
        elif isinstance(value, TensorEntry):
            own = _match(_Parameter(parameter.name, {name: value}), where, weights)
            slot = replace(_state_slot(own, short[name], value, siblings), owner=owner)
            initial = parameter.options.get("initial_accumulator_value")
            if short[name] == "sum" and isinstance(initial, (int, float)):
                slot = replace(slot, initial=float(initial))
            found.slots.append(slot)
    _check_presence(parameter, table, siblings, found)


def _check_presence(parameter: _Parameter, table: str, present: frozenset[str], found: Arrangement) -> None:
    if present and "momentum1" not in present:  # what TorchRec calls the first state, whichever it is
        for name in sorted((parameter.peers & _ALWAYS) - present):
            message = f"it has {', '.join(sorted(present))}, and no {name}"
            found.findings.append(Finding(table, name, "missing_slot", 1, (), message))
    elif not present and parameter.peers:
        slots = ", ".join(sorted(parameter.peers))
        if parameter.saved:
            message = "its state is empty, where other parameters of its group have some"
            found.findings.append(Finding(table, slots, "empty_state", 1, (), message))
        else:
            message = f"no optimizer state ({slots}): it was never updated, or its state was lost"
            found.notes.append(Note(table, message))


def _match(parameter: _Parameter, where: str, weights: Collection[str]) -> str:
    """The name of the table that optimizer state belongs to."""
    if parameter.name.isdigit():
        # Optimizers that number their parameters may name their slots by table: "t0.exp_avg".
        head = next((name.rpartition(".")[0] for name in parameter.state if "." in name), "")
        named = [name for name in weights if head and (name == head or name.endswith(f".{head}"))]
        if len(named) == 1:
            return named[0]
        return head or f"{where or 'optimizer'}[{parameter.name}]"
    table = _table_of(parameter.name)
    if table in weights:
        return table
    # CombinedOptimizer puts a key before the names.
    behind = [name for name in weights if table.endswith(f".{name}")]
    if behind:
        return max(behind, key=len)
    before = [name for name in weights if name.endswith(f".{table}")]
    return before[0] if len(before) == 1 else table


def _state_slot(
    table: str,
    name: str,
    entry: TensorEntry,
    siblings: frozenset[str],
) -> Slot:
    squares = name in SQUARES
    not_negative = squares or name in _NOT_NEGATIVE
    if name == "momentum1":
        # TorchRec calls the first state so, whichever it is: of Adam the average of gradients. With a value
        # per column and alone it is either squares (Adagrad) or signed (LARS-SGD).
        squares = not siblings & {"exp_avg_sq", "momentum2"}
        not_negative = squares and len(entry.size) == 1
    return Slot(
        table,
        name,
        entry,
        "state",
        squares=squares,
        not_negative=not_negative,
        initial=0.0 if name in PER_ROW else None,
    )
