"""The bags of ids that a lookup pools, and the form of them that lookup and update share."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Bags:
    """Which rows are pooled into which bag.

    Bags are batch-major: bag ``b * num_features + f`` is that of feature ``f`` and example ``b``, so that
    what a lookup pools is the ``[batch_size, num_features * dim]`` of TorchRec's ``KeyedTensor`` as it is.

    Attributes:
        rows: the row of each id, int64 ``[n]``, bag by bag.
        offsets: where each bag begins and the last one ends, int64 ``[batch_size * num_features + 1]``.
        batch_size: the number of examples.
        num_features: the number of features.
        scale: what each row is multiplied with before it is added up (weights, and one over the
            length of a bag that is averaged), float32 ``[n]``; None: 1.
        bag_size: the number of ids of every bag, if they all have the same.

    Raises:
        ValueError: the tensors' lengths do not fit.
    """

    rows: torch.Tensor
    offsets: torch.Tensor
    batch_size: int
    num_features: int
    scale: torch.Tensor | None = None
    bag_size: int | None = None

    def __post_init__(self) -> None:
        if len(self.offsets) != self.num_bags + 1:
            raise ValueError(f"{self.num_bags} bags have {len(self.offsets)} offsets, not one more than bags")
        if self.scale is not None and len(self.scale) != len(self.rows):
            raise ValueError(f"{len(self.rows)} ids have {len(self.scale)} factors")

    @property
    def num_bags(self) -> int:
        """The number of bags."""
        return self.batch_size * self.num_features

    @classmethod
    def of_one(cls, rows: torch.Tensor) -> Bags:
        """Bags of one row each; rows int64 ``[n]``."""
        return cls(rows, torch.arange(len(rows) + 1, device=rows.device), len(rows), 1, bag_size=1)

    def bag_of_each(self) -> torch.Tensor:
        """The bag that each id is in, int64 ``[n]``."""
        numbers = torch.arange(self.num_bags, device=self.rows.device)
        return torch.repeat_interleave(numbers, self.offsets.diff(), output_size=len(self.rows))

    def without(self, rows: torch.Tensor) -> Bags:
        """The bags less some rows, int64 ``[m]``."""
        kept = torch.isin(self.rows, rows, invert=True)
        if kept.all():
            return self
        before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
        return replace(
            self,
            rows=self.rows[kept],
            offsets=before[self.offsets],
            scale=None if self.scale is None else self.scale[kept],
            bag_size=None,
        )
