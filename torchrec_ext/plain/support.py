"""Which tables can be followed exactly, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.modules.embedding_configs import DataType

FLOATS = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}

_FUSED = {
    EmbeddingComputeKernel.FUSED,
    EmbeddingComputeKernel.FUSED_UVM,
    EmbeddingComputeKernel.FUSED_UVM_CACHING,
}

# Fused optimizers whose backward writes to the rows of its batch and to no other, with any weight decay.
_MOVE_LOOKED_UP_ROWS_ONLY = {
    "EXACT_SGD",
    "LARS_SGD",
    "EXACT_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
    "ADAM",
    "PARTIAL_ROWWISE_ADAM",
    "LAMB",
    "PARTIAL_ROWWISE_LAMB",
}


def moves_looked_up_rows_only(kernel: EmbeddingComputeKernel, fused_params: Mapping[str, Any]) -> bool:
    """Whether training moves no row but those whose lookup got a gradient, as far as we can prove."""
    return kernel in _FUSED and _optimizer(fused_params) in _MOVE_LOOKED_UP_ROWS_ONLY


def output_dtype(
    kernel: EmbeddingComputeKernel, fused_params: Mapping[str, Any], device: torch.device
) -> torch.dtype:
    """The dtype to which a kernel rounds what it answers."""
    if kernel is EmbeddingComputeKernel.DENSE and device.type == "cpu":
        return torch.float32  # whatever it was told
    dtype: SparseType = fused_params.get("output_dtype", SparseType.FP32)
    return dtype.as_dtype()


def adds_up(kernel: EmbeddingComputeKernel, device: torch.device, *, pooled: bool) -> bool:
    """Whether a kernel adds rows up, if only one to zeros: a sequence's are copied."""
    return pooled or (kernel is EmbeddingComputeKernel.DENSE and device.type == "cpu")


def why_unsupported(
    kernel: EmbeddingComputeKernel,
    data_type: DataType,
    fused_params: Mapping[str, Any],
    device: torch.device,
    *,
    divided: bool,
) -> str | None:
    """Why a sharded table cannot be followed exactly; None if it can.

    Args:
        kernel: its compute kernel.
        data_type: of its weights.
        fused_params: of its kernel.
        device: the kernel's.
        divided: whether its module divides what is pooled by the bags' lengths.
    """
    if kernel not in _FUSED and kernel is not EmbeddingComputeKernel.DENSE:
        return (
            f"its rows are up to the kernel {kernel.value}, which is not looked into; shard it with "
            "compute_kernel 'fused', 'fused_uvm', 'fused_uvm_caching' or 'dense'"
        )
    if data_type not in FLOATS:
        return f"its rows are {data_type.value}; use FP32, FP16 or BF16"
    cached = getattr(fused_params.get("cache_precision"), "name", data_type.name)
    if kernel is EmbeddingComputeKernel.FUSED_UVM_CACHING and cached != data_type.name:
        return (
            f"its rows are {data_type.name} and {cached} in the cache, so that answers change when a row "
            "enters or leaves it, without a write; leave the cache's precision out"
        )
    output = output_dtype(kernel, fused_params, device)
    if output not in FLOATS.values():
        return "it answers with quantised vectors; leave output_dtype at FP32, or use FP16 or BF16"
    if divided and output != torch.float32:
        return "MEAN pooling of rounded outputs; leave output_dtype at FP32"
    if getattr(fused_params.get("weight_decay_mode"), "name", None) == "DECOUPLE_GLOBAL":
        return (
            "with global weight decay a row's answer changes with every step, without a write; use another "
            "weight_decay_mode"
        )
    return None


def _optimizer(fused_params: Mapping[str, Any]) -> str:
    optimizer = fused_params.get("optimizer", "EXACT_SGD")
    return str(getattr(optimizer, "name", optimizer))
