"""From TorchRec's ``fused_params`` to a store's optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType

from torchrec_ext.store import SGD, AdaGrad, Adam, RowWiseAdaGrad, StoreOptimizer

# By TorchRec's name of a hyperparameter: the store's.
_SGD = {"learning_rate": "lr"}
_ADAGRAD = {**_SGD, "eps": "eps"}
_ADAM = {**_ADAGRAD, "beta1": "beta1", "beta2": "beta2"}
_OPTIMIZERS: dict[EmbOptimType, tuple[type[StoreOptimizer], dict[str, str]]] = {
    EmbOptimType.EXACT_SGD: (SGD, _SGD),
    EmbOptimType.EXACT_ADAGRAD: (AdaGrad, _ADAGRAD),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (RowWiseAdaGrad, _ADAGRAD),
    EmbOptimType.ADAM: (Adam, _ADAM),
}
# What FBGEMM's kernels take where nothing is said.
_DEFAULTS = {"learning_rate": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999}


def store_optimizer(fused_params: Mapping[str, Any] | None) -> StoreOptimizer | None:
    """The store's optimizer that ``fused_params`` ask for.

    Args:
        fused_params: as TorchRec's sharders and ``apply_optimizer_in_backward`` take them: ``optimizer``
            (an ``EmbOptimType``), ``learning_rate`` or ``lr``, ``eps``, and ``beta1`` and ``beta2``, or
            ``betas``; by default what FBGEMM's kernels have.

    Returns:
        None if they name no optimizer: then rows are trained by a ``Sparse*`` optimizer.

    Raises:
        ValueError: a store has no such optimizer, or its optimizer no such hyperparameter.
    """
    params = dict(fused_params or {})
    kind = params.pop("optimizer", None)
    if kind is None:
        if params:
            raise ValueError(f"fused_params {sorted(params)} need an optimizer, an EmbOptimType")
        return None
    if kind not in _OPTIMIZERS:
        known = [f"EmbOptimType.{optimizer.name}" for optimizer in _OPTIMIZERS]
        raise ValueError(f"a store has no optimizer {kind!r}; it has {known}")
    make, names = _OPTIMIZERS[kind]
    if "lr" in params:
        params["learning_rate"] = params.pop("lr")
    if "betas" in params:
        params["beta1"], params["beta2"] = params.pop("betas")
    if params.get("weight_decay") == 0:
        del params["weight_decay"]
    if unknown := set(params) - set(names):
        raise ValueError(
            f"fused_params: a store's {make.__name__} has {sorted(names)}, but no {sorted(unknown)}"
        )
    values = {name: params.get(name, _DEFAULTS[name]) for name in names}
    return make(**{names[name]: float(value) for name, value in values.items()})
