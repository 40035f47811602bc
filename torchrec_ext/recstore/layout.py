"""Which features a collection pools, from which tables, and where each stands in the output."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType


@dataclass(frozen=True)
class Feature:
    """One feature of one table: a block of the output's columns.

    Attributes:
        name: its key in the batch.
        table: the table's name.
        table_index: where the table is in the collection's order; the prefix of its fused ids.
        mean: whether bags are averaged, not added up.
    """

    name: str
    table: str
    table_index: int
    mean: bool


@dataclass(frozen=True)
class Group:
    """Features whose tables are looked up together: they are of one dimension and lie together.

    Attributes:
        dim: the embedding dimension.
        dynamic: whether the tables are dynamic; dense tables are in other groups.
        features: in the collection's order, so those of one table are next to each other.
    """

    dim: int
    dynamic: bool
    features: tuple[Feature, ...]

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables' names, in the order of their features."""
        return tuple(dict.fromkeys(feature.table for feature in self.features))


@dataclass(frozen=True)
class Layout:
    """All features of a collection.

    Attributes:
        groups: its lookups.
        runs: the output's blocks from left to right, as (group, number of columns); a group's blocks
            come in the order of its own output.
    """

    groups: tuple[Group, ...]
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls,
        configs: Sequence[EmbeddingBagConfig],
        *,
        dynamic: Collection[str],
        lies_in: Callable[[str], Hashable],
    ) -> Layout:
        """The layout of a collection.

        Args:
            configs: its tables.
            dynamic: the names of the dynamic ones.
            lies_in: from a table's name to what is the same for tables that one lookup can serve.
        """
        Key = tuple[int, bool, Hashable]
        members: dict[Key, list[Feature]] = {}
        blocks: list[tuple[Key, int]] = []
        for index, config in enumerate(configs):
            key = (config.embedding_dim, config.name in dynamic, lies_in(config.name))
            for name in config.feature_names:
                feature = Feature(name, config.name, index, config.pooling == PoolingType.MEAN)
                members.setdefault(key, []).append(feature)
                if blocks and blocks[-1][0] == key:
                    blocks[-1] = (key, blocks[-1][1] + config.embedding_dim)
                else:
                    blocks.append((key, config.embedding_dim))
        position = {key: number for number, key in enumerate(members)}
        return cls(
            tuple(Group(dim, kind, tuple(features)) for (dim, kind, _), features in members.items()),
            tuple((position[key], columns) for key, columns in blocks),
        )

    def assemble(self, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
        """The collection's output from its groups'.

        Args:
            pooled: ``[B, number of features * dim]`` of each group.

        Returns:
            ``[B, sum of all features' dims]``.
        """
        if len(self.runs) == 1:
            return pooled[0]
        blocks = [
            iter(values.split([columns for group, columns in self.runs if group == number], dim=1))
            for number, values in enumerate(pooled)
        ]
        return torch.cat([next(blocks[group]) for group, _ in self.runs], dim=1)
