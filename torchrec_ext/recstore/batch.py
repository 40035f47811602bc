"""From a ``KeyedJaggedTensor`` to the bags of a collection's features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.recstore.layout import Group, Layout


@dataclass(frozen=True)
class GroupBatch:
    """The bags of one group's features, feature by feature as in the ``KeyedJaggedTensor``.

    Attributes:
        group: the features.
        batch_size: the number of examples.
        ids: each feature's ids, int64 ``[n_f]``.
        lengths: the number of ids of each bag, int32 or int64 ``[num_features * batch_size]``.
        scale: what each id's row is multiplied with, float32 ``[n]`` over all features: its weight, and
            one over the length of a bag that is averaged; None: 1. May require a gradient.
    """

    group: Group
    batch_size: int
    ids: tuple[torch.Tensor, ...]
    lengths: torch.Tensor
    scale: torch.Tensor | None

    @property
    def num_ids(self) -> int:
        """The number of ids of all features."""
        return sum(map(len, self.ids))


def split_batch(features: KeyedJaggedTensor, layout: Layout, *, is_weighted: bool) -> list[GroupBatch]:
    """The bags of each group of a collection.

    Args:
        features: a batch; features that the collection has not are ignored.
        layout: the collection's features.
        is_weighted: whether the batch's weights count.

    Raises:
        KeyError: a feature is missing.
        ValueError: the ids are not integers, or weights are missing.
    """
    position_of = {key: position for position, key in enumerate(features.keys())}
    values = features.values()
    if values.dtype != torch.int64:
        if values.dtype != torch.int32 and values.numel():
            raise ValueError(f"ids must be int32 or int64, not {values.dtype}")
        values = values.long()
    weights = features.weights_or_none() if is_weighted else None
    if is_weighted and weights is None:
        raise ValueError("the collection is weighted (is_weighted=True), the batch has no weights")
    lengths = features.lengths()
    if features.variable_stride_per_key():
        values, weights, lengths = _to_one_batch_size(features, values, weights)
        lengths = lengths.view(len(position_of), -1)
        ends = lengths.sum(dim=1).cumsum(0).tolist()
        offsets = [0, *ends]
    else:
        lengths = lengths.view(len(position_of), features.stride())
        offsets = features.offset_per_key()
    batches = []
    for group in layout.groups:
        try:
            positions = [position_of[feature.name] for feature in group.features]
        except KeyError as error:
            raise KeyError(f"the batch has no feature {error}; it has {features.keys()}") from None
        spans = [slice(offsets[position], offsets[position + 1]) for position in positions]
        in_order = positions == list(range(len(position_of)))
        of_group = lengths if in_order else lengths[positions]
        if weights is None or in_order:
            group_weights = weights
        else:
            group_weights = torch.cat([weights[span] for span in spans])
        batches.append(
            GroupBatch(
                group,
                lengths.shape[1],
                tuple(values[span] for span in spans),
                of_group.reshape(-1),
                _scale(group, of_group, group_weights),
            )
        )
    return batches


def _scale(group: Group, lengths: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor | None:
    """See ``GroupBatch.scale``; lengths ``[num_features, batch_size]``."""
    if weights is not None:
        # A copy: the optimizer's step needs them when others may have put new ones there.
        weights = weights.to(torch.float32, copy=True)
    if not any(feature.mean for feature in group.features):
        return weights
    per_bag = lengths.clamp(min=1).float().reciprocal_()
    summed = [position for position, feature in enumerate(group.features) if not feature.mean]
    per_bag[summed] = 1.0
    scale = torch.repeat_interleave(per_bag.view(-1), lengths.reshape(-1))
    return scale if weights is None else scale * weights


def _to_one_batch_size(
    features: KeyedJaggedTensor, values: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Repeats the bags of features of various batch sizes as the batch's inverse indices say."""
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        raise ValueError("a batch whose features differ in batch size needs inverse_indices")
    row_of = {key: row for row, key in enumerate(inverse[0])}
    strides = features.stride_per_key()
    first_bag = 0
    bags = []
    for key, stride in zip(features.keys(), strides, strict=True):
        bags.append(inverse[1][row_of[key]] + first_bag)
        first_bag += stride
    bag = torch.cat(bags)
    lengths = features.lengths()[bag].long()
    ends = lengths.cumsum(0)
    shift = torch.repeat_interleave(features.offsets()[bag] - (ends - lengths), lengths)
    order = shift + torch.arange(len(shift), device=shift.device)
    return values[order], None if weights is None else weights[order], lengths
