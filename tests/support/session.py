"""A small model under training with a dumper attached, for tests that stage one case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from tests.support.models import Spec, build, keyed, loss_of
from tests.support.schedules import STRANGE_IDS, compare, gather_ids, shared_directory
from torchrec_ext.delta import DeltaDumper, DeltaLog

Bags = Mapping[str, Sequence[Sequence[int]]]


class Attached:
    """A model with a dumper attached, which dumps when it is told to.

    Args:
        model: the model; all ranks have it.
        attach: whether there is a dumper.
        options: of the dumper.
    """

    def __init__(self, model: nn.Module, *, attach: bool, **options: Any) -> None:
        self.model = model
        self.step = 0
        self.options = {"interval_steps": 10**9, **options}
        self._directory = shared_directory()
        self._attach = attach

    def __enter__(self) -> Self:
        self.directory = self._directory.__enter__()
        if self._attach:
            self.dumper = DeltaDumper(self.model, self.directory, **self.options)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._attach:
            self.dumper.__exit__(kind, error, traceback)
        self._directory.__exit__(kind, error, traceback)

    @property
    def log(self) -> DeltaLog:
        return DeltaLog(self.directory)

    def end_step(self) -> None:
        self.step += 1
        if self._attach:
            self.dumper.step(self.step)

    def dump(self) -> dict[str, list[tuple[str, int]]]:
        """Dumps; returns the dump's (op, key) rows of all ranks by table."""
        self.step += 1
        self.dumper.dump(self.step)
        self.dumper.flush()
        rows: dict[str, list[tuple[str, int]]] = {}
        for row in self.log.read(self.step).select(["table_fqn", "op", "key_id"]).to_pylist():
            rows.setdefault(row["table_fqn"], []).append((row["op"], row["key_id"]))
        return rows


class Session(Attached):
    """Trains step by step; ``check`` dumps and compares the log with the model for every id seen.

    All ranks must do the same; ids may differ per rank.
    """

    def __init__(self, spec: Spec, *, attach: bool = True, **options: Any) -> None:
        super().__init__(build(spec), attach=attach, **options)
        self.spec = spec
        self.seen: set[int] = {*range(-3, 30), *STRANGE_IDS}

    def batch(self, bags: Bags | Sequence[int]) -> Any:
        """A batch; a plain list of ids stands for one bag of the first feature."""
        if not isinstance(bags, Mapping):
            bags = {self.spec.features[0]: [bags]}
        self.seen.update(i for feature in bags.values() for bag in feature for i in bag)
        return keyed(self.spec.features, bags)

    def lookup(self, bags: Bags | Sequence[int]) -> torch.Tensor:
        """A forward in the model's present mode; returns the loss."""
        return loss_of(self.model(self.batch(bags)))

    def train(self, bags: Bags | Sequence[int]) -> float:
        """A whole training step."""
        loss = self.lookup(bags)
        loss.backward()
        self.end_step()
        return float(loss)

    def check(self) -> dict[str, list[tuple[str, int]]]:
        """Dumps and compares; returns what ``dump`` does."""
        rows = self.dump()
        compare(self.model, self.spec, self.directory, gather_ids(self.seen))
        return rows

    def map_of(self, module: str = "mc", table: str = "t0") -> dict[int, int]:
        """This rank's collision map, raw id to global row, read from TorchRec itself."""
        mcm = self.collision_module(module, table)
        ids, rows = mcm._mch_sorted_raw_ids.tolist(), mcm._mch_remapped_ids_mapping.tolist()
        return {i: row for i, row in zip(ids, rows, strict=True) if i != 2**63 - 1}

    def collision_module(self, module: str = "mc", table: str = "t0") -> Any:
        sharded = getattr(self.model.module, module)
        return sharded._managed_collision_collection._managed_collision_modules[table]
