from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.recstore.sharded_cases import (
    SPARSE,
    Case,
    Oracle,
    assembled,
    build,
    shards_of,
    train_step,
)
from tests.support.workers import run_on

STEPS = 4


def train(case: Case, steps: int = STEPS, **sharder: Any) -> tuple[Any, Any]:
    model = build(case, **sharder)
    optimizer = None if case.fused else SPARSE[case.optimizer](model.module.rec)
    outputs = [train_step(model, step, case, optimizer) for step in range(steps)]
    return outputs, shards_of(model.module.rec.state_dict())


def check(case: Case, world_size: int, outcomes: list[Any]) -> None:
    oracle = Oracle(case.optimizer, weighted=case.weighted)
    exact = case.optimizer == "sgd"
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-5}
    for step in range(STEPS):
        expected = oracle.step(step, world_size)
        for rank, (outputs, _) in enumerate(outcomes):
            assert outputs[step][0].keys() == expected[rank].keys()
            for key, values in expected[rank].items():
                np.testing.assert_allclose(outputs[step][0][key], values, **tolerance)
    trained = assembled([shards for _, shards in outcomes])
    for name, rows in oracle.weights.items():
        np.testing.assert_allclose(
            trained[f"embedding_bags.{name}.weight"], rows.detach().numpy(), **tolerance
        )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("fused", [True, False])
def test_trains_as_one_process_does(world_size: int, optimizer: str, fused: bool) -> None:
    case = Case(optimizer, fused, weighted=optimizer == "rowwise_adagrad")
    check(case, world_size, run_on(world_size, train, case))


@pytest.mark.parametrize("world_size", [2, 3])
def test_other_modules_beside_it_train_as_they_do_without_it(world_size: int) -> None:
    together = run_on(world_size, train, Case(company=True))
    apart = run_on(world_size, train_company)
    check(Case(), world_size, [([step[-1:] for step in outputs], shards) for outputs, shards in together])
    for rank in range(world_size):
        for step in range(STEPS):
            for found, expected in zip(together[rank][0][step][:2], apart[rank][step], strict=True):
                for key in expected:
                    np.testing.assert_array_equal(found[key], expected[key])


def train_company() -> Any:
    case = Case(company=True, alone=True)
    model = build(case)
    return [train_step(model, step, case) for step in range(STEPS)]
