"""Finding ZCH tables in a model."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from tests.support.models import Spec, Table, build, one_table
from tests.support.workers import run_on
from torchrec_ext.errors import TorchRecVersionError
from torchrec_ext.zch import find_zch_tables


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.tower = inner


def _names() -> None:
    spec = Spec(
        {
            "a": (Table("t0", ("f0", "f1"), rows=12), Table("t1", ("f2",), rows=10, dim=4)),
            "b": (Table("t0", ("f3",), rows=8, hash_size=1000),),
        }
    )
    model = build(spec)
    tables = find_zch_tables(model)
    assert [table.fqn for table in tables] == ["a.t0", "a.t1", "b.t0"]
    assert [t.fqn for t in find_zch_tables(Outer(model))] == ["tower.a.t0", "tower.a.t1", "tower.b.t0"]
    assert [t.fqn for t in find_zch_tables(model.module.b)] == ["t0"]
    first = tables[0]
    assert first.features == ("f0", "f1")
    assert (first.num_embeddings, first.dim) == (12, 8)
    assert first.num_rows == 12 // dist.get_world_size()
    assert first.first_row == first.num_rows * dist.get_rank() == first.num_rows * first.shard
    assert first.weight().shape == (first.num_rows, 8)
    weight = model.module.a._embedding_module.embedding_bags.t0.weight
    assert first.weight().data_ptr() == weight.data_ptr()
    assert tables[2].routing.block_size == 1000 // dist.get_world_size()
    assert all(table.unsupported is None for table in tables)


@pytest.mark.parametrize("world_size", [1, 2])
def test_tables_are_named_by_their_path_without_wrappers(world_size: int) -> None:
    run_on(world_size, _names)


def _ambiguous_routing() -> None:
    spec = Spec(
        {
            "mc": (
                Table("t0", ("f0", "f1"), hash_size=60),
                Table("t1", ("f0",), hash_size=1000),
            )
        }
    )
    tables = find_zch_tables(build(spec))
    assert tables[0].unsupported is not None
    assert "'f0': 1000, 'f1': 60" in tables[0].unsupported
    assert tables[1].unsupported is None


def test_a_table_whose_features_route_differently_is_not_supported() -> None:
    run_on(2, _ambiguous_routing)


def _missing_attribute() -> None:
    model = build(one_table())
    del model.module.mc._table_to_tbe_and_index
    with pytest.raises(TorchRecVersionError, match=r"no '_table_to_tbe_and_index'.*checked against"):
        find_zch_tables(model)


def test_a_torchrec_without_what_we_read_is_said_so() -> None:
    run_on(1, _missing_attribute)


def test_a_model_without_zch_has_no_tables() -> None:
    assert find_zch_tables(nn.Sequential(nn.Linear(2, 2), nn.EmbeddingBag(3, 4))) == []
