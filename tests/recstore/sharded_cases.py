"""Sharded collections, what they are compared with, and how both are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from numpy.typing import NDArray
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor
from torchrec.optim import RowWiseAdagrad

from tests.recstore.cases import MEAN, SUM, config
from tests.support import models
from torchrec_ext.recstore import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingBagCollectionSharder,
    SparseAdagrad,
    SparseAdam,
    SparseRowWiseAdagrad,
    SparseSGD,
)
from torchrec_ext.zch import ZchEmbeddingBagCollectionSharder

# Two features on one table, one feature on two tables, two dimensions, shards of different sizes; with
# three ranks, one without rows.
TABLES = (
    config("t0", 11, 4, ["a", "b"]),
    config("t1", 7, 8, ["c"], MEAN),
    config("t2", 5, 4, ["b"], MEAN),
    config("t3", 2, 8, ["d"], SUM),
)
ROWS = {"a": 11, "b": 5, "c": 7, "d": 2}
LR = 0.5
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
SPARSE = {
    "sgd": lambda module: SparseSGD([module], lr=LR),
    "adagrad": lambda module: SparseAdagrad([module], lr=LR, eps=1e-8),
    "rowwise_adagrad": lambda module: SparseRowWiseAdagrad([module], lr=LR, eps=1e-8),
    "adam": lambda module: SparseAdam([module], lr=LR),
}
Arrays = dict[str, NDArray[Any]]


def weights() -> dict[str, torch.Tensor]:
    """Initial rows: small multiples of 1/8."""
    generator = torch.Generator().manual_seed(7)
    shapes = {table.name: (table.num_embeddings, table.embedding_dim) for table in TABLES}
    return {name: torch.randint(-16, 17, shape, generator=generator) / 8 for name, shape in shapes.items()}


def batch(step: int, rank: int, *, weighted: bool = False) -> KeyedJaggedTensor:
    """Bags have 0, 1, 2 or 4 ids; rank 1's second batch has none at all."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    size = 4 + step % 2
    lengths = torch.tensor([0, 1, 2, 4])[torch.randint(4, (len(ROWS), size), generator=generator)]
    if (step, rank) == (1, 1):
        lengths.zero_()
    counts = lengths.sum(dim=1).tolist()
    ids = [
        torch.randint(rows, (count,), generator=generator)
        for rows, count in zip(ROWS.values(), counts, strict=True)
    ]
    scale = torch.randint(1, 5, (sum(counts),), generator=generator) / 4 if weighted else None
    return KeyedJaggedTensor(list(ROWS), torch.cat(ids), weights=scale, lengths=lengths.view(-1))


def coefficients(step: int, rank: int, shape: torch.Size) -> torch.Tensor:
    """The gradient of an output: multiples of 3/8, so that a third of it is exact too."""
    generator = torch.Generator().manual_seed(100 * step + rank + 50)
    return torch.randint(-4, 5, shape, generator=generator) * 3 / 8


# What it has to be: torch on one process


class Oracle:
    """One process that trains the batches of all ranks with torch alone."""

    def __init__(self, optimizer: str, *, weighted: bool = False) -> None:
        self.weighted = weighted
        self.sparse = optimizer == "adam"
        self.weights = {name: nn.Parameter(rows.clone()) for name, rows in weights().items()}
        parameters = list(self.weights.values())
        self._optimizer = {
            "sgd": lambda: torch.optim.SGD(parameters, lr=LR),
            "adagrad": lambda: torch.optim.Adagrad(parameters, lr=LR, eps=1e-8),
            "rowwise_adagrad": lambda: RowWiseAdagrad(parameters, lr=LR, eps=1e-8),
            "adam": lambda: torch.optim.SparseAdam(parameters, lr=LR),
        }[optimizer]()

    def step(self, step: int, world_size: int) -> list[Arrays]:
        """Trains one step; each rank's outputs by key."""
        self._optimizer.zero_grad()
        outputs, losses = [], []
        for rank in range(world_size):
            output = self.outputs(batch(step, rank, weighted=self.weighted))
            values = torch.cat(list(output.values()), dim=1)
            losses.append((values * coefficients(step, rank, values.shape) / world_size).sum())
            outputs.append({key: value.detach().numpy() for key, value in output.items()})
        sum(losses).backward()
        self._optimizer.step()
        return outputs

    def outputs(self, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Bags one by one."""
        outputs = {}
        for table in TABLES:
            for name in table.feature_names:
                shared = sum(name in other.feature_names for other in TABLES) > 1
                jagged = features[name]
                rows = nn.functional.embedding(jagged.values(), self.weights[table.name], sparse=self.sparse)
                if self.weighted:
                    rows = rows * jagged.weights().unsqueeze(1)
                lengths = jagged.lengths()
                pooled = torch.zeros(len(lengths), table.embedding_dim)
                pooled = pooled.index_add(0, torch.arange(len(lengths)).repeat_interleave(lengths), rows)
                if table.pooling == MEAN:
                    pooled = pooled / lengths.clamp(min=1).unsqueeze(1)
                outputs[f"{name}@{table.name}" if shared else name] = pooled
        return outputs


# The sharded model


@dataclass(frozen=True)
class Case:
    """How the RecStore collection of a model is made and trained."""

    optimizer: str = "sgd"
    fused: bool = True
    weighted: bool = False
    device: str = "meta"
    company: bool = False
    alone: bool = False  # without RecStore
    kwargs: dict[str, Any] = field(default_factory=dict)


class Model(nn.Module):
    """A RecStore collection, in the company of an ordinary one and a ZCH one, or these alone."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        kwargs = {"device": case.device, "is_weighted": case.weighted, **case.kwargs}
        if case.company:
            torch.manual_seed(3)
            tables = [config("e0", 11, 4, ["a"]), config("e1", 7, 4, ["c"])]
            self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
            self.mc = models.build_unsharded(ZCH).mc
        if not case.alone:
            self.rec = RecStoreEmbeddingBagCollection(tables=list(TABLES), **kwargs)

    def forward(self, features: KeyedJaggedTensor) -> list[Any]:
        outputs = [module(features) for module in self.children()]
        outputs = [output[0] if isinstance(output, tuple) else output for output in outputs]
        return [output.wait() if hasattr(output, "wait") else output for output in outputs]


ZCH = models.Spec({"mc": (models.Table("z0", ("a",), rows=12, dim=4, hash_size=12),)}, optimizer="adagrad")


def build(case: Case, **sharder: Any) -> DistributedModelParallel:
    """The model, planned by TorchRec's planner and sharded over all ranks."""
    torch.manual_seed(3)
    if case.fused:
        sharder["fused_params"] = {"optimizer": OPTIMIZERS[case.optimizer], "learning_rate": LR}
    sgd = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}
    model = DistributedModelParallel(
        Model(case),
        device=torch.device("cpu"),
        sharders=[
            RecStoreEmbeddingBagCollectionSharder(**sharder),
            EmbeddingBagCollectionSharder(sgd),
            ZchEmbeddingBagCollectionSharder(
                EmbeddingBagCollectionSharder({**sgd, "optimizer": EmbOptimType.EXACT_ADAGRAD})
            ),
        ],
    )
    if not case.alone:
        load_weights(model.module.rec)
    torch.manual_seed(dist.get_rank())
    for name in ("ebc", "mc"):
        for parameter in getattr(model.module, name, nn.Module()).parameters():
            parameter.data.uniform_(-1, 1)
    return model


def load_weights(module: nn.Module) -> None:
    """Loads ``weights()``, whole tensors."""
    state = {f"embedding_bags.{name}.weight": rows for name, rows in weights().items()}
    module.load_state_dict(state)


def train_step(model: nn.Module, step: int, case: Case, optimizer: Any = None) -> list[Arrays]:
    """One step of this rank; the modules' outputs by key."""
    rank = dist.get_rank()
    outputs = model(batch(step, rank, weighted=case.weighted))
    loss_of(outputs, step).backward()
    if optimizer is not None:
        optimizer.step()
    return [{key: value.detach().numpy() for key, value in output.to_dict().items()} for output in outputs]


def loss_of(outputs: Sequence[Any], step: int) -> torch.Tensor:
    """The loss of this rank."""
    rank = dist.get_rank()
    return sum(
        (output.values() * coefficients(step, rank, output.values().shape)).sum() for output in outputs
    )


def shards_of(state: Mapping[str, Any]) -> dict[str, list[tuple[int, NDArray[Any]]]]:
    """This rank's parts of sharded tensors: where each starts, and its values."""
    return {
        key: [
            (shard.metadata.shard_offsets[0], shard.tensor.detach().numpy().copy())
            for shard in value.local_shards()
        ]
        for key, value in state.items()
        if isinstance(value, ShardedTensor)
    }


def assembled(parts: Sequence[Mapping[str, list[tuple[int, NDArray[Any]]]]]) -> Arrays:
    """Whole tensors from all ranks' parts."""
    whole: Arrays = {}
    for key in parts[0]:
        pieces = sorted((piece for part in parts for piece in part[key] if len(piece[1])), key=lambda p: p[0])
        whole[key] = np.concatenate([values for _, values in pieces])
    return whole


def optimizer_shards(model: DistributedModelParallel, path: str) -> dict[str, list[tuple[int, NDArray[Any]]]]:
    """This rank's parts of the optimizer state of a module."""
    state = model.fused_optimizer.state_dict()["state"]
    of_module = [slots for name, slots in state.items() if name.startswith(path)]
    return shards_of({key: value for slots in of_module for key, value in slots.items()})
