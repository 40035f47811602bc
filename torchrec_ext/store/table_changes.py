"""Changes of a store's tables, which all processes see at once: new ones, and another optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from torchrec_ext.store.group import RowGroup
from torchrec_ext.store.init_fns import InitFn
from torchrec_ext.store.optimizers import StoreOptimizer
from torchrec_ext.store.state import StoreState
from torchrec_ext.store.tables import ByFunction, DenseTable, KeyOf, Table, fill_initial_rows, is_same

logger = logging.getLogger(__name__)


def create_tables(
    state: StoreState,
    tables: Sequence[Table],
    optimizer: StoreOptimizer,
    init_fns: Mapping[str, InitFn],
    key_of: KeyOf | None,
) -> list[str]:
    """Makes tables, or finds them; see ``LocalStore.create_tables``."""
    tables = [
        replace(table, initializer=ByFunction())
        if isinstance(table, DenseTable) and table.name in init_fns
        else table
        for table in tables
    ]
    if len({table.name for table in tables}) < len(tables):
        raise ValueError(f"tables of one name: {[table.name for table in tables]}")
    place = state.place
    with state.locked(exclusive=True):
        missing: dict[int, list[Table]] = {}
        for table in tables:
            if table.name not in state.names:
                missing.setdefault(table.dim, []).append(table)
            elif not is_same(there := state.group_of(table.name).tables[table.name], table):
                raise ValueError(f"the store holds another table of this name: {there}, not {table}")
        if not missing:
            return []
        first = len(state.groups)
        prefixes = [f"group_{number}_" for number in range(first, first + len(missing))]
        try:
            made: list[RowGroup] = []
            for prefix, (dim, members) in zip(prefixes, missing.items(), strict=True):
                place.drop(prefix)  # of a process that died
                made.append(RowGroup(place, f"{prefix}dim_{dim}", members, optimizer, create=True))
            group_of = {table: group for group in made for table in group.tables}
            for table in tables:  # in their order, as they may share a random generator
                if table.name not in group_of or not isinstance(table, DenseTable):
                    continue
                rows = group_of[table.name].rows_of(table.name)
                if not isinstance(table.initializer, ByFunction):
                    fill_initial_rows(table, table.initializer, rows, key_of)
                elif table.name in init_fns:
                    with torch.no_grad():
                        init_fns[table.name](rows)
        except BaseException:
            for prefix in prefixes:
                place.drop(prefix)
            raise
        state.publish([*state.groups, *made])
        return [name for group in made for name in group.tables]


def set_optimizer(state: StoreState, names: set[str], optimizer: StoreOptimizer) -> None:
    """Changes the optimizer of tables; see ``Store.set_optimizer``."""
    with state.locked(exclusive=True):
        groups = {id(group): group for group in map(state.group_of, names)}
        for group in groups.values():
            if left_out := set(group.tables) - names:
                raise ValueError(
                    f"tables {sorted(left_out)} were created together with {sorted(names)} "
                    "and share their optimizer; change it for all"
                )
        replaced = [group for group in groups.values() if not optimizer.keeps_state_of(group.optimizer)]
        for group in replaced:
            if group.slots and group.versions.any():
                logger.warning(
                    "the state of %s of tables %s is discarded: they get %s now, which starts anew",
                    group.optimizer,
                    ", ".join(group.tables),
                    optimizer,
                )
        try:
            new_slots = {group.name: group.new_slots(optimizer) for group in replaced}
        except BaseException:
            for group in replaced:
                group.drop_new_slots()
            raise
        for group in groups.values():
            group.set_optimizer(optimizer, new_slots.get(group.name))
        state.publish(state.groups)
        for group in replaced:
            group.drop_old_slots()
