"""Train on MovieLens with embeddings that live in a store, read ahead, and dump what changes.

Run it in two processes; it takes seconds on two CPU cores:

    torchrun --nproc_per_node=2 examples/movielens_recstore.py

The model is that of movielens_online.py, its tables are other ones. The users' table has a row for every
user. The films' table is dynamic: a film gets a row when it was rated twice, and has a constant one before.
Each rank keeps its share of the rows in memory-mapped files, and reads those of the next two batches while
it trains on this one. At the end the dumps alone are compared with what the model says.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import movielens
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from movielens_online import CPU, DIM, num_different, positive, report_learning, say, to_features
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_ext.delta import DeltaDumper, DeltaLog
from torchrec_ext.recstore import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingBagCollectionSharder,
    prefetched,
)
from torchrec_ext.store import CounterFilter, FileStore

TABLES = {"user_id": "ebc.user_table", "item_id": "ebc.item_table"}  # as the dumps name them


class Recommender(nn.Module):
    """Predicts whether a user likes an item: a vector for each, a small network over the two."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name="user_table", feature_names=["user_id"], num_embeddings=944, embedding_dim=DIM
            ),
            EmbeddingBagConfig(
                name="item_table", feature_names=["item_id"], num_embeddings=2000, embedding_dim=DIM
            ),
        ]
        self.ebc = RecStoreEmbeddingBagCollection(
            tables=tables,
            device="meta",  # its rows come when it is sharded
            dynamic={"item_table": {"filter": CounterFilter(2)}},
        )
        self.over = nn.Sequential(nn.Linear(3 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns a logit per rating, ``[B]``."""
        user, item = self.ebc(features).values().split(DIM, dim=1)
        return self.over(torch.cat([user, item, user * item], dim=1)).squeeze(1)


def shard(model: Recommender, rows: Path) -> DistributedModelParallel:
    """Spreads the rows over the ranks, as TorchRec's planner sees fit; they train in the backward pass."""
    sharder = RecStoreEmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1},
        store=lambda rank: FileStore(rows / f"rank_{rank}"),
    )
    return DistributedModelParallel(model, device=CPU, sharders=[sharder])


def train(
    model: DistributedModelParallel,
    ratings: movielens.Ratings,
    rank_batch_size: int,
    deltas: Path,
    interval_steps: int,
) -> None:
    """Goes over the ratings once, in time order; each rank takes its share of every batch."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=0.003)
    shares = share_of_batches(ratings, rank_batch_size)
    predictions = []
    with DeltaDumper(model, deltas, interval_steps=interval_steps) as dumper:
        ahead = prefetched(model.module.ebc, shares, depth=2, features=lambda share: share[0])
        for step, (features, liked) in enumerate(ahead, 1):
            logits = model(features)
            loss = binary_cross_entropy_with_logits(logits, liked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            dumper.step(step)
            predictions.append(torch.stack([logits.detach(), liked]))
    report_learning(torch.stack(predictions))


def share_of_batches(
    ratings: movielens.Ratings, rank_batch_size: int
) -> Iterator[tuple[KeyedJaggedTensor, torch.Tensor]]:
    """This rank's part of each batch: features and labels."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_size = rank_batch_size * world_size
    for start in range(0, len(ratings) - batch_size + 1, batch_size):
        batch = ratings[start + rank : start + batch_size : world_size]
        yield to_features(batch), batch.liked


@torch.no_grad()
def check(model: DistributedModelParallel, ratings: movielens.Ratings, deltas: Path) -> int:
    """Compares what the dumps give with what the model says; returns how many ids differ."""
    log = DeltaLog(deltas)
    state = log.replay()
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64)
    for feature, table in TABLES.items():
        ids = getattr(ratings, feature).unique()
        if feature == "item_id":
            ids = torch.cat([ids, torch.randint(2_000, 2**30, (250,))])  # a dynamic table knows all ids
        lengths = torch.tensor([int(key == feature) for key in TABLES]).repeat_interleave(len(ids))
        expected = model.module.ebc(KeyedJaggedTensor(list(TABLES), values=ids, lengths=lengths))
        replayed = state[table].lookup(ids.numpy())
        counts += torch.tensor([len(ids), num_different(replayed, expected[feature].numpy())])
    dist.all_reduce(counts)
    checked, wrong = counts.tolist()
    say(
        f"{len(log.dumps())} dumps; checked {checked:,} ids on {dist.get_world_size()} ranks: {wrong:,} wrong"
    )
    return wrong


def run(args: argparse.Namespace, scratch: Path) -> int:
    try:
        ratings = movielens.load(args.data or movielens.download_on_rank_zero(Path(".data")))
    except movielens.MovieLensError as error:
        say(str(error))
        return 1
    torch.manual_seed(0)
    model = shard(Recommender(), scratch / "rows")
    train(model, ratings, args.batch_size, scratch / "deltas", args.interval_steps)
    return 1 if check(model, ratings, scratch / "deltas") else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="ml-100k's u.data; by default it is downloaded")
    parser.add_argument("--batch-size", type=positive, default=128, help="ratings per rank and step")
    parser.add_argument("--interval-steps", type=positive, default=40, help="steps between two dumps")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun --nproc_per_node=2, or by make demo-recstore")

    warnings.filterwarnings("ignore", category=FutureWarning)  # TorchRec's uses of older torch
    for noisy in ("torchrec", "torch.fx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as scratch:
        folder = [scratch]
        dist.broadcast_object_list(folder)
        try:
            status = run(args, Path(folder[0]))
            dist.barrier()  # nobody removes what others still read
        finally:
            dist.destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    main()
