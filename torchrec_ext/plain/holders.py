"""What holds a table's weights: a kernel of a sharded module, or a module that is not sharded."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torchrec.distributed.embedding_kernel import BaseEmbedding

from torchrec_ext.zch import internals


class WeightHolder(Protocol):
    """Holds the weights of some tables, or shards, on this rank."""

    def weights(self) -> list[torch.Tensor]:
        """The live weights, one ``[rows, columns]`` for each."""

    def flush(self) -> None:
        """Writes back rows that are newer in a cache; the weights are current then."""


class KernelHolder:
    """A kernel of a sharded module.

    Args:
        kernel: the kernel.
    """

    def __init__(self, kernel: BaseEmbedding) -> None:
        self.kernel = kernel

    def weights(self) -> list[torch.Tensor]:
        """See ``WeightHolder``."""
        return internals.kernel_weights(self.kernel)

    def flush(self) -> None:
        """See ``WeightHolder``."""
        internals.flush_kernel(self.kernel)


class ModuleHolder:
    """``nn.Embedding`` or ``nn.EmbeddingBag``.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Embedding | nn.EmbeddingBag) -> None:
        self._module = module

    def weights(self) -> list[torch.Tensor]:
        """See ``WeightHolder``."""
        return [self._module.weight.detach()]

    def flush(self) -> None:
        """See ``WeightHolder``; there is no cache."""
