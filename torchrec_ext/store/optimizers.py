"""The optimizers a store applies: their hyperparameters, the state they keep per row, their formulas.

The formulas are those of ``torch.optim`` and ``torchrec.optim``, on the rows that have a gradient.
Gradients of a key that occurs several times in a batch are added up before.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from torchrec_ext.store.tables import check_types


@dataclass(frozen=True)
class Slot:
    """One kind of optimizer state.

    Attributes:
        name: as in the optimizer's formula.
        per_row: whether a row has one value (``[n, 1]``) or one per column (``[n, dim]``).
        initial: what it holds before a row's first update.
    """

    name: str
    per_row: bool
    initial: float = 0.0

    def columns(self, dim: int) -> int:
        """How many values a row of ``dim`` columns has."""
        return 1 if self.per_row else dim


@dataclass(frozen=True)
class StoreOptimizer(ABC):
    """An optimizer that a store applies to the rows it holds.

    Args:
        lr: the learning rate; each update may bring another.
    """

    lr: float = 0.01

    slots: ClassVar[tuple[Slot, ...]] = ()

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ValueError(f"lr must not be negative, not {self.lr}")

    def initial(self, slot: Slot) -> float:
        """What ``slot`` holds before a row's first update."""
        return slot.initial

    @abstractmethod
    def apply_(
        self,
        weight: torch.Tensor,
        slots: dict[str, torch.Tensor],
        grads: torch.Tensor,
        *,
        lr: float,
        step: int,
    ) -> None:
        """Updates rows in place.

        Args:
            weight: rows, float32 ``[n, dim]``.
            slots: their state by slot name, float32 ``[n, 1]`` or ``[n, dim]``.
            grads: their gradients, float32 ``[n, dim]``; may be overwritten.
            lr: the learning rate of this update.
            step: its number, from 1.
        """

    def to_json(self) -> dict[str, Any]:
        """It as a JSON object."""
        return {"kind": type(self).__name__, **asdict(self)}

    def keeps_state_of(self, other: StoreOptimizer) -> bool:
        """Whether state that ``other`` left behind means the same to this optimizer."""
        return type(self) is type(other) and [self.initial(s) for s in self.slots] == [
            other.initial(s) for s in other.slots
        ]


@dataclass(frozen=True)
class SGD(StoreOptimizer):
    """``w -= lr * g``, as ``torch.optim.SGD`` without momentum."""

    def apply_(
        self,
        weight: torch.Tensor,
        slots: dict[str, torch.Tensor],
        grads: torch.Tensor,
        *,
        lr: float,
        step: int,
    ) -> None:
        """See ``StoreOptimizer``."""
        weight.sub_(grads, alpha=lr)


@dataclass(frozen=True)
class AdaGrad(StoreOptimizer):
    """``s += g * g; w -= lr * g / (sqrt(s) + eps)``, as ``torch.optim.Adagrad`` without lr_decay."""

    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    slots: ClassVar[tuple[Slot, ...]] = (Slot("sum", per_row=False),)

    def initial(self, slot: Slot) -> float:
        """What the accumulator starts from."""
        return self.initial_accumulator_value

    def apply_(
        self,
        weight: torch.Tensor,
        slots: dict[str, torch.Tensor],
        grads: torch.Tensor,
        *,
        lr: float,
        step: int,
    ) -> None:
        """See ``StoreOptimizer``."""
        accumulator = slots["sum"].addcmul_(grads, grads)
        weight.addcdiv_(grads, accumulator.sqrt().add_(self.eps), value=-lr)


@dataclass(frozen=True)
class RowWiseAdaGrad(StoreOptimizer):
    """``s += mean(g * g); w -= lr * g / (sqrt(s) + eps)``, as ``torchrec.optim.RowWiseAdagrad``."""

    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    slots: ClassVar[tuple[Slot, ...]] = (Slot("sum", per_row=True),)

    def initial(self, slot: Slot) -> float:
        """What the accumulator starts from."""
        return self.initial_accumulator_value

    def apply_(
        self,
        weight: torch.Tensor,
        slots: dict[str, torch.Tensor],
        grads: torch.Tensor,
        *,
        lr: float,
        step: int,
    ) -> None:
        """See ``StoreOptimizer``."""
        accumulator = slots["sum"].add_(grads.square().mean(dim=1, keepdim=True))
        weight.addcdiv_(grads, accumulator.sqrt().add_(self.eps), value=-lr)


@dataclass(frozen=True)
class Adam(StoreOptimizer):
    """Adam on the rows that have a gradient, as ``torch.optim.SparseAdam``.

    The moments of other rows stay as they are; the bias correction goes by the update's step number.
    """

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    slots: ClassVar[tuple[Slot, ...]] = (Slot("exp_avg", per_row=False), Slot("exp_avg_sq", per_row=False))

    def apply_(
        self,
        weight: torch.Tensor,
        slots: dict[str, torch.Tensor],
        grads: torch.Tensor,
        *,
        lr: float,
        step: int,
    ) -> None:
        """See ``StoreOptimizer``."""
        exp_avg, exp_avg_sq = slots["exp_avg"], slots["exp_avg_sq"]
        exp_avg.add_(grads.sub(exp_avg).mul_(1 - self.beta1))
        exp_avg_sq.add_(grads.square().sub_(exp_avg_sq).mul_(1 - self.beta2))
        step_size = lr * math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
        # Rounded after each operation, as SparseAdam does; addcdiv_ would round less often.
        weight.add_(exp_avg.div(exp_avg_sq.sqrt().add_(self.eps)).mul_(-step_size))


def optimizer_from_json(content: dict[str, Any]) -> StoreOptimizer:
    """The optimizer that ``StoreOptimizer.to_json`` described.

    Raises:
        ValueError: it describes none.
    """
    kinds = {kind.__name__: kind for kind in (SGD, AdaGrad, RowWiseAdaGrad, Adam)}
    fields = dict(content)
    try:
        kind = kinds[fields.pop("kind")]
        check_types(fields, **dict.fromkeys(fields, float))
        return kind(**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an optimizer's description: {content}") from error
