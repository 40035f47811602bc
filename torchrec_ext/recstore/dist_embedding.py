"""``DistEmbedding``: one table of a store as an embedding, whose update is computed here."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from torchrec_ext.recstore.dist_tensor import DistTensor, InitFunc
from torchrec_ext.recstore.lookups import KeyedLookup
from torchrec_ext.recstore.table_modules import load_weight
from torchrec_ext.recstore.trace import Trace, TracedModule, sum_by_id
from torchrec_ext.recstore.whole_tables import (
    load_optimizer_state,
    optimizer_state,
    read_table,
    warn_of_replicas,
)
from torchrec_ext.store import Store, StoreOptimizer, Uniform
from torchrec_ext.store.bags import Bags


class DistEmbedding(nn.Module, TracedModule):
    """An embedding of ids, from rows that live in a store.

    Its optimizer reads the rows and their state, computes the update in Python, and writes them back; so
    two processes must not train the same rows at the same time. ``RecStoreEmbeddingBagCollection``
    leaves the update to the store.

    Args:
        num_embeddings: the number of ids.
        embedding_dim: the dimension of a row.
        name: the table's name in the store.
        init_func: gives the initial rows from a shape and a dtype; None: uniform, as TorchRec's tables.
        lr: the learning rate for optimizers that bring none.
        store: where the rows live, by default a new ``MemoryStore``.

    Raises:
        ValueError: the store has another table of this name.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        name: str,
        init_func: InitFunc | None = None,
        lr: float = 0.01,
        store: Store | None = None,
    ) -> None:
        super().__init__()
        self.lr = lr
        bound = sqrt(1 / num_embeddings) if num_embeddings else 0.0
        self._tensor = DistTensor(
            (num_embeddings, embedding_dim),
            name=name,
            init_func=init_func,
            store=store,
            initializer=Uniform(-bound, bound),
        )
        self._trace = Trace(f"DistEmbedding {name!r}")
        self._anchor = torch.empty(0, requires_grad=True)

    @property
    def weight(self) -> DistTensor:
        """The rows."""
        return self._tensor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ids.

        Args:
            ids: integers of any shape.

        Returns:
            float32 ``[*ids.shape, embedding_dim]``.

        Raises:
            ValueError: an id is not in the table.
        """
        if not torch.is_grad_enabled():
            return self._tensor[ids]
        return _LookedUp.apply(self._anchor, ids, self, self._trace.next_batch())

    def use_optimizer(self, optimizer: StoreOptimizer) -> None:
        """See ``TracedModule``."""
        warn_of_replicas(self._tensor.store, [self._tensor.name])
        self._tensor.store.set_optimizer([self._tensor.name], optimizer)

    def apply_trace(self, *, lr: float, step: int) -> None:
        """See ``TracedModule``."""
        store, name = self._tensor.store, self._tensor.name
        with self._trace.applied() as entries:
            triples = [triple for entry in entries for triple in entry.lookup.triples(entry.grad)]
            ids, grads = sum_by_id(
                torch.cat([ids for _, ids, _ in triples]), torch.cat([grads for _, _, grads in triples])
            )
            rows, slots = store.read(name, ids)
            store.optimizer(name).apply_(rows, slots, grads, lr=lr, step=step)
            store.write(name, ids, rows, slots)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """See ``TracedModule``."""
        return optimizer_state(self._tensor.store, [self._tensor.table])

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """See ``TracedModule``."""
        load_optimizer_state(self._tensor.store, [self._tensor.table], state)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = read_table(self._tensor.store, self._tensor.table)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        load_weight(self._tensor.store, self._tensor.table, state_dict, prefix, strict, *messages)


class _LookedUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, ids: torch.Tensor, module: DistEmbedding, batch: int
    ) -> torch.Tensor:
        # A copy: the optimizer's step needs them when others may have put new ones there.
        ctx.ids, ctx.module, ctx.batch = ids.reshape(-1).to(torch.int64, copy=True), module, batch
        return module.weight[ids]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        name, dim = ctx.module.weight.name, grad.shape[-1]
        bags = Bags.of_one(torch.arange(len(ctx.ids), device=ctx.ids.device))
        lookup = KeyedLookup(bags, dim, (name,), (ctx.ids,))
        ctx.module._trace.record(lookup, grad.reshape(-1, dim), ctx.batch)
        return None, None, None, None
