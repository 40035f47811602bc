"""The ``Sparse*`` optimizers: they take a module's trace of gradients to the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from torchrec_ext.recstore.trace import TracedModule
from torchrec_ext.store import SGD, AdaGrad, Adam, RowWiseAdaGrad, StoreOptimizer


class SparseOptimizer(torch.optim.Optimizer):
    """Trains the rows of modules by their traces; learning-rate schedulers work as with any optimizer.

    ``step`` adds up all gradients that backward passes have left since the last step, row by row, and
    applies the formula once. Making an optimizer has the modules' tables keep its state; state that they
    have already stays, if it is of the same kind. There is one parameter group per module.

    Args:
        modules: what to train, each with a trace.
        lr: the learning rate; None: each module's own.
        accumulation_steps: how many batches are meant to add up to one step. More make the modules warn,
            because then a step was probably forgotten.
        hyperparameters: of the formula.

    Raises:
        TypeError: a module has no trace.
        ValueError: a hyperparameter is out of range.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        lr: float | None,
        accumulation_steps: int,
        **hyperparameters: Any,
    ) -> None:
        if isinstance(modules, nn.Module):
            raise TypeError(f"modules must be a list: [{type(modules).__name__}(...)]")
        self._modules: list[TracedModule] = []
        for given in modules:
            if not isinstance(given, TracedModule):
                raise TypeError(
                    f"{type(given).__name__} has no rows in a store; give the collections and embeddings "
                    "themselves, and the rest of the model to an optimizer of torch.optim"
                )
            self._modules.append(given)
        if accumulation_steps < 1:
            raise ValueError(f"accumulation_steps must be at least 1, not {accumulation_steps}")
        # torch.optim wants tensors to tell groups apart.
        groups = [
            {"params": [torch.empty(0, requires_grad=True)], "lr": module.lr if lr is None else lr, "step": 0}
            for module in self._modules
        ]
        super().__init__(groups, {"lr": lr, "step": 0, **hyperparameters})
        self._in_use = [self._formula(group) for group in self.param_groups]
        for module, formula in zip(self._modules, self._in_use, strict=True):
            module.use_optimizer(formula)
            module.expect_gradients_of(accumulation_steps)

    def _formula(self, group: dict[str, Any]) -> StoreOptimizer:
        """The store's optimizer with a group's hyperparameters."""
        raise NotImplementedError(f"{type(self).__name__}: use one of its subclasses")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the gradients of all traces, and clears them.

        A module without gradients since the last step is left out, as ``torch.optim`` leaves out
        parameters without; its step number does not count on. Gradients whose update the store refused
        stay for another try, or for ``zero_grad``.

        Args:
            closure: computes the loss anew, gradients included.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, (module, group) in enumerate(zip(self._modules, self.param_groups, strict=True)):
            if not module.has_gradients:
                continue
            formula = self._formula({**group, "lr": self._in_use[number].lr})
            if formula != self._in_use[number]:  # a scheduler or a user changed a hyperparameter
                module.use_optimizer(formula)
                self._in_use[number] = formula
            step = group["step"] + 1
            module.apply_trace(lr=float(group["lr"]), step=step)
            group["step"] = step
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of all traces."""
        for module in self._modules:
            module.forget_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for the constructor: an optimizer's modules do not change."""
        if len(self.param_groups) == len(self._modules):
            raise NotImplementedError("make a new optimizer for other modules")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Hyperparameters and step numbers, and the state of dense tables, by the module's position.

        The state of dynamic tables is in their module's ``state_dict``. Tensors of a local store are views.
        """
        content: dict[str, Any] = super().state_dict()
        content["state"] = {number: module.optimizer_state() for number, module in enumerate(self._modules)}
        return content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what ``state_dict`` gave.

        Raises:
            ValueError: it is of other modules or another optimizer.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self._modules):
            raise ValueError(f"the state is of {len(groups)} modules, not of {len(self._modules)}")
        for ours, theirs in zip(self.param_groups, groups, strict=True):
            if set(ours) - {"initial_lr"} != set(theirs) - {"initial_lr"}:  # a scheduler's
                raise ValueError(
                    f"the state of an optimizer with {sorted(theirs)} is not one of {type(self).__name__}"
                )
        for number, (module, formula) in enumerate(zip(self._modules, self._in_use, strict=True)):
            module.use_optimizer(formula)  # another may have come since
            module.load_optimizer_state(state_dict["state"].get(number, {}))
        super().load_state_dict({**state_dict, "state": {}})
        self._in_use = [self._formula(group) for group in self.param_groups]
        for module, formula in zip(self._modules, self._in_use, strict=True):
            module.use_optimizer(formula)


class SparseSGD(SparseOptimizer):
    """``w -= lr * g``, as ``torch.optim.SGD`` without momentum.

    Args:
        modules: what to train.
        lr: the learning rate; None: each module's own.
        accumulation_steps: how many batches are meant to add up to one step.
    """

    def __init__(
        self, modules: Iterable[nn.Module], lr: float | None = None, *, accumulation_steps: int = 1
    ) -> None:
        super().__init__(modules, lr, accumulation_steps)

    def _formula(self, group: dict[str, Any]) -> StoreOptimizer:
        return SGD(float(group["lr"]))


class _SparseAdagrad(SparseOptimizer):
    """What both kinds of Adagrad have; see there."""

    _kind: ClassVar[type[AdaGrad] | type[RowWiseAdaGrad]]

    def __init__(
        self,
        modules: Iterable[nn.Module],
        lr: float | None = None,
        *,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
        accumulation_steps: int = 1,
    ) -> None:
        super().__init__(
            modules,
            lr,
            accumulation_steps,
            eps=eps,
            initial_accumulator_value=initial_accumulator_value,
        )

    def _formula(self, group: dict[str, Any]) -> StoreOptimizer:
        return self._kind(float(group["lr"]), group["eps"], group["initial_accumulator_value"])


class SparseAdagrad(_SparseAdagrad):
    """As ``torch.optim.Adagrad``, with an accumulator per element.

    Args:
        modules: what to train.
        lr: the learning rate; None: each module's own.
        eps: is added to the accumulator's root.
        initial_accumulator_value: what the accumulator starts from.
        accumulation_steps: how many batches are meant to add up to one step.
    """

    _kind = AdaGrad


class SparseRowWiseAdagrad(_SparseAdagrad):
    """As ``torchrec.optim.RowWiseAdagrad``, with an accumulator per row.

    Args:
        modules: what to train.
        lr: the learning rate; None: each module's own.
        eps: is added to the accumulator's root.
        initial_accumulator_value: what the accumulator starts from.
        accumulation_steps: how many batches are meant to add up to one step.
    """

    _kind = RowWiseAdaGrad


class SparseAdam(SparseOptimizer):
    """As ``torch.optim.SparseAdam``: only rows that have a gradient move, and their moments.

    Args:
        modules: what to train.
        lr: the learning rate; None: each module's own.
        betas: the decay of the moments.
        eps: is added to the second moment's root.
        accumulation_steps: how many batches are meant to add up to one step.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        lr: float | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        accumulation_steps: int = 1,
    ) -> None:
        super().__init__(modules, lr, accumulation_steps, betas=tuple(betas), eps=eps)

    def _formula(self, group: dict[str, Any]) -> StoreOptimizer:
        beta1, beta2 = group["betas"]
        return Adam(float(group["lr"]), beta1, beta2, group["eps"])
