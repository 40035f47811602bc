"""Train online on MovieLens, dump what changes, and check the dumps against the model, bit for bit.

Run it in two processes; it takes seconds on two CPU cores:

    torchrun --nproc_per_node=2 examples/movielens_online.py

A recommender learns from 100,000 ratings in the order in which people gave them. Its two tables
are zero-collision hash (ZCH) tables with far fewer rows than there are users and films: all along,
ids are given a row, lose it to others, and come back to another one. Every few steps the rows that
changed are dumped as Parquet, keyed by raw id, and published to a Redis by a process of its own. At
the end every rank rebuilds the tables from the dumps alone, asks Redis as a service would, and compares
both with what the model says, for all ids and for some that never were.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import movielens
import numpy as np
import serving
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tqdm import tqdm

from torchrec_ext.checkpoint import reset_evicted_optimizer_state
from torchrec_ext.delta import DeltaDumper, DeltaLog
from torchrec_ext.publish import EmbeddingClient
from torchrec_ext.zch import ZchEmbeddingBagCollectionSharder

CPU = torch.device("cpu")
DIM = 16
FEATURES = ["user_id", "item_id"]
TABLES = {"user_id": "mc.user_table", "item_id": "mc.item_table"}  # as the dumps name them


class Recommender(nn.Module):
    """Predicts whether a user likes an item: a vector for each, a small network over the two."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name="user_table", feature_names=["user_id"], num_embeddings=400, embedding_dim=DIM
            ),
            EmbeddingBagConfig(
                name="item_table", feature_names=["item_id"], num_embeddings=600, embedding_dim=DIM
            ),
        ]
        collisions = {
            "user_table": collision_module(num_rows=400, num_ids=944),
            "item_table": collision_module(num_rows=600, num_ids=1683),
        }
        self.mc = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables, device=CPU),
            ManagedCollisionCollection(collisions, tables),
        )
        self.over = nn.Sequential(nn.Linear(3 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns a logit per rating, ``[B]``."""
        vectors, _ = self.mc(features)
        user, item = vectors.values().split(DIM, dim=1)
        return self.over(torch.cat([user, item, user * item], dim=1)).squeeze(1)


def collision_module(num_rows: int, num_ids: int) -> MCHManagedCollisionModule:
    """Maps raw ids to a table's rows; now and then, rows of ids gone quiet go to new ids."""
    return MCHManagedCollisionModule(
        zch_size=num_rows,
        device=CPU,
        eviction_policy=DistanceLFU_EvictionPolicy(),
        # In batches. TorchRec sizes its history by the first: that one needs ids of every rank.
        eviction_interval=5,
        # Each rank owns an equal range of the ids below this: with the default, 2^63 - 1, all the
        # small ids would live on rank 0.
        input_hash_size=num_ids,
        buckets=dist.get_world_size(),
    )


def shard(model: Recommender) -> DistributedModelParallel:
    """Spreads the tables over the ranks, as TorchRec's own planner sees fit."""
    # Fused: the tables are updated within the backward pass.
    apply_optimizer_in_backward(RowWiseAdagrad, model.mc.parameters(), {"lr": 0.1})
    sharders = [ZchEmbeddingBagCollectionSharder()]
    return DistributedModelParallel(model, device=CPU, sharders=sharders)


def train(
    model: DistributedModelParallel,
    ratings: movielens.Ratings,
    rank_batch_size: int,
    deltas: Path,
    interval_steps: int,
) -> None:
    """Goes over the ratings once, in time order; each rank takes its share of every batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_size = rank_batch_size * world_size
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=0.003)
    starts = range(0, len(ratings) - batch_size + 1, batch_size)
    predictions = []

    with (
        reset_evicted_optimizer_state(model),  # who takes over a row does not inherit its accumulator
        DeltaDumper(model, deltas, interval_steps=interval_steps) as dumper,
        tqdm(starts, unit="batch", disable=True if rank else None) as bar,  # None: on a terminal
    ):
        for step, start in enumerate(bar, 1):
            batch = ratings[start + rank : start + batch_size : world_size]
            logits = model(to_features(batch))
            loss = binary_cross_entropy_with_logits(logits, batch.liked)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            result = dumper.step(step)

            predictions.append(torch.stack([logits.detach(), batch.liked]))
            if rank == 0 and result is not None:
                bar.set_postfix(loss=f"{loss.item():.3f}")
                tqdm.write(
                    f"step {step:>4}: rank 0 dumped {result.rows:>4} rows, {result.vector_bytes:>7,} "
                    f"bytes of vectors; training stood still for {1000 * result.stall_seconds:.1f} ms"
                )
    report_learning(torch.stack(predictions))


def to_features(batch: movielens.Ratings) -> KeyedJaggedTensor:
    """One user and one item per example, in TorchRec's format."""
    return KeyedJaggedTensor(
        keys=FEATURES,
        values=torch.cat([batch.user_id, batch.item_id]),
        lengths=torch.ones(2 * len(batch), dtype=torch.int64),
    )


def report_learning(predictions: torch.Tensor) -> None:
    """Prints how well ratings were predicted just before the model trained on them.

    Args:
        predictions: this rank's logits and labels by step, ``[steps, 2, B]``.
    """
    of_ranks = [torch.empty_like(predictions) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, predictions)
    first, *_, last = torch.cat(of_ranks, dim=2).tensor_split(4)
    auc = [binary_auroc(part[:, 0].flatten(), part[:, 1].long().flatten()) for part in (first, last)]
    say(f"AUC on ratings to come: {auc[0]:.3f} in the first quarter, {auc[1]:.3f} in the last")


def check(model: DistributedModelParallel, ratings: movielens.Ratings, deltas: Path, served: str) -> int:
    """Compares what the dumps give, and what is served, with what the model says.

    Args:
        model: what was trained.
        ratings: what it was trained on.
        deltas: where it was dumped to.
        served: where ``EmbeddingClient`` finds what was published.

    Returns:
        How many ids differ.
    """
    log = DeltaLog(deltas)
    state = log.replay()
    last_vectors = replay_naively(log)
    extreme = torch.tensor([-(2**63), -1, 0, 2**62, 2**63 - 2])
    never_seen = torch.cat([extreme, torch.randint(2_000, 2**62, (245,))])

    counts = torch.zeros(5, dtype=torch.int64)
    for feature, table in TABLES.items():
        ids = torch.cat([getattr(ratings, feature).unique(), never_seen])
        expected = ask(model, feature, ids)
        replayed = state[table].lookup(ids.numpy())
        known = [row for row, key in enumerate(ids.tolist()) if key in last_vectors[table]]
        naive = np.stack([last_vectors[table][key] for key in ids[known].tolist()])
        counts += torch.tensor(
            [
                len(ids),
                num_different(replayed, expected),
                num_different(look_up(served, table, ids), expected),
                num_different(naive, expected[known]),
                len(ids) - len(known),
            ]
        )
    dist.all_reduce(counts)
    checked, wrong, served_wrong, stale, missing = counts.tolist()
    dumps = log.dumps()
    say(
        f"{len(dumps)} dumps, the last one at the end, hold {sum(d.upserts for d in dumps):,} upserts and "
        f"{sum(d.deletes for d in dumps):,} deletes in {sum(d.nbytes for d in dumps):,} bytes of files"
    )
    say(f"checked {checked:,} ids on {dist.get_world_size()} ranks: {wrong:,} wrong")
    say(f"EmbeddingClient({served!r}) answered the same ids: {served_wrong:,} wrong")
    say(f"(with each id's last vector instead: {stale:,} wrong, {missing:,} without an answer)")
    return wrong + served_wrong


@torch.no_grad()
def ask(model: DistributedModelParallel, feature: str, ids: torch.Tensor) -> np.ndarray:
    """What the model says for each id of a feature, ``[n, DIM]``; all ranks must ask together."""
    model.eval()
    lengths = torch.tensor([int(key == feature) for key in FEATURES]).repeat_interleave(len(ids))
    vectors, _ = model.module.mc(KeyedJaggedTensor(keys=FEATURES, values=ids, lengths=lengths))
    return vectors[feature].numpy()


def look_up(served: str, table: str, ids: torch.Tensor) -> np.ndarray:
    """What a service gets for each id, ``[n, DIM]``."""
    with EmbeddingClient(served) as client:
        return client.lookup(table, ids.numpy())


def num_different(found: np.ndarray, expected: np.ndarray) -> int:
    """How many of the vectors ``[n, DIM]`` differ in any bit."""
    bits = [np.ascontiguousarray(vectors).view(np.int32) for vectors in (found, expected)]
    return int((bits[0] != bits[1]).any(axis=1).sum())


def replay_naively(log: DeltaLog) -> dict[str, dict[int, np.ndarray]]:
    """What a consumer holds that only ever overwrites: the last vector of each id, by table."""
    tables: dict[str, dict[int, np.ndarray]] = {table: {} for table in TABLES.values()}
    for dump in log.dumps():
        for row in log.read(dump.step, dump.generation).to_pylist():
            if row["op"] == "upsert":
                vector = np.array(row["embedding"], np.float32)
                tables[row["table_fqn"]][row["key_id"]] = vector
    return tables


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def run(args: argparse.Namespace) -> int:
    try:
        ratings = movielens.load(args.data or movielens.download_on_rank_zero(Path(".data")))
    except movielens.MovieLensError as error:
        say(str(error))
        return 1
    folder = [args.out or Path("demo-deltas", time.strftime("%Y%m%d-%H%M%S"))]
    dist.broadcast_object_list(folder)  # rank 0's, whatever the clocks of the others say
    deltas = folder[0]

    torch.manual_seed(0)
    model = shard(Recommender())
    if missing := serving.what_is_missing():
        train(model, ratings, args.batch_size, deltas, args.interval_steps)
        say(f"{missing}: the client reads the dumps themselves")
        wrong = check(model, ratings, deltas, served=str(deltas))
    else:
        with serving.redis_server() as redis:
            with serving.publisher(deltas, redis):
                train(model, ratings, args.batch_size, deltas, args.interval_steps)
            wrong = check(model, ratings, deltas, served=redis)
    say(f"the dumps are in {deltas}: .venv/bin/torchrec-ext inspect {deltas}")
    return 1 if wrong else 0


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be positive")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="ml-100k's u.data; by default it is downloaded")
    parser.add_argument("--out", type=Path, help="for the dumps; by default a new one in demo-deltas/")
    parser.add_argument("--batch-size", type=positive, default=128, help="ratings per rank and step")
    parser.add_argument("--interval-steps", type=positive, default=40, help="steps between two dumps")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun --nproc_per_node=2, or by make demo")

    warnings.filterwarnings("ignore", category=FutureWarning)  # TorchRec's uses of older torch
    for noisy in ("torchrec", "torch.fx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # What torchrun sends when another rank failed: Redis and the publisher are to end as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    dist.init_process_group("gloo")
    try:
        sys.exit(run(args))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
