"""``TracedModule``: what the ``Sparse*`` optimizers need of a module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from torchrec_ext.recstore.trace import Trace
from torchrec_ext.store import StoreOptimizer


class TracedModule(ABC):
    """A module whose backward pass leaves a trace of gradients, which an optimizer consumes.

    Attributes:
        lr: the learning rate for optimizers that bring none.
    """

    lr: float
    _trace: Trace

    @abstractmethod
    def use_optimizer(self, optimizer: StoreOptimizer) -> None:
        """Has the tables keep state for an optimizer; state of the same kind stays."""

    @abstractmethod
    def apply_trace(self, *, lr: float, step: int) -> None:
        """Updates the rows with the trace's gradients, and clears it.

        Args:
            lr: the learning rate.
            step: the update's number, from 1.
        """

    @abstractmethod
    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """State of dense tables that is saved with the optimizer, by ``<table>.<slot>``.

        That of dynamic tables is saved with the module, because it belongs to their keys.
        """

    @abstractmethod
    def load_optimizer_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes ``optimizer_state``'s tensors back.

        Raises:
            ValueError: some are missing, or of another shape.
        """
