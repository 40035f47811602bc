"""Optimizer state dicts are completed exactly, and damage in them is never hidden."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from torchrec_ext.checkpoint import BackfillReport, backfill_optimizer_state
from torchrec_ext.errors import CheckpointError

FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)
NAMED = StateDictOptions()
forms = pytest.mark.parametrize("options", [FLATTENED, NAMED], ids=["flattened", "named"])


class Averaging(Optimizer):
    """Keeps a copy of the weight that it first saw: its start depends on more than the shape."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["z"] = p.clone()
                state["z"] -= group["lr"] * p.grad
                p.lerp_(state["z"], 0.5)


COLD = ["cold.weight", "cold.deep.weight"]
DENSE: dict[str, Callable[..., Optimizer]] = {
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "adam, amsgrad": lambda p: optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1, maximize=True),
    "adam, tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.1)),
    "adamw, fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "adamw, foreach": lambda p: optim.AdamW(p, lr=0.1, foreach=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd, momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd, nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "sgd, dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3),
    "adagrad, inherited": lambda p: HandsOn(p, lr=0.1, initial_accumulator_value=0.3),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "nadam": lambda p: optim.NAdam(p, lr=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.1),
    "adamax": lambda p: optim.Adamax(p, lr=0.1),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "asgd": lambda p: optim.ASGD(p, lr=0.1, t0=2),
    "rprop": lambda p: optim.Rprop(p, lr=0.1),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "muon": lambda p: optim.Muon(p, lr=0.1),
    "rowwise adagrad": lambda p: RowWiseAdagrad(p, lr=0.1, initial_accumulator_value=0.3),
    "averaging": lambda p: Averaging(p),
}


class HandsOn(optim.Adagrad):
    """Does not name the options that it takes."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


class Table(nn.Module):
    """A weight that may have another inside, so that one name begins like the other."""

    def __init__(self, rows: int, dim: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, dim))
        if inner is not None:
            self.deep = inner


class Model(nn.Module):
    """Two weights that always get a gradient, and two that get one if told so."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hot, self.warm = Table(4, 3), Table(4, 3)
        self.cold = Table(4, 3, Table(4, 3))
        self.sparse = sparse

    def forward(self, batch: int, cold: bool) -> torch.Tensor:
        ids = torch.arange(batch % 3, 4)
        tables = [self.hot, self.warm, *([self.cold, self.cold.deep] if cold else [])]
        rows = [nn.functional.embedding(ids, one.weight, sparse=self.sparse) for one in tables]
        return sum(((r * torch.linspace(0.5, 1.5, 3)).sin().sum() for r in rows), torch.zeros(()))


def _train(model: nn.Module, optimizer: Any, batches: range, cold: bool) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model(batch, cold).backward()
        optimizer.step()


def _trained(
    make: Callable[..., Optimizer], options: StateDictOptions, *, cold: bool = False, **arguments: Any
) -> tuple[Model, Optimizer, dict[str, Any]]:
    model = Model(**arguments)
    optimizer = make(model.parameters())
    _train(model, optimizer, range(3), cold)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    if not cold:  # some optimizers have state from the start
        for name in COLD:
            state.get("state", {}).pop(name, None)
            state = {key: value for key, value in state.items() if not key.startswith(f"state.{name}.")}
    return model, optimizer, state


def _loaded(
    make: Callable[..., Optimizer], trained: Model, state: dict[str, Any], options: StateDictOptions
) -> tuple[Model, Optimizer]:
    model = copy.deepcopy(trained)
    optimizer = make(model.parameters())
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=options)
    return model, optimizer


def _backfill(make: Callable[..., Optimizer], state: dict[str, Any], **arguments: Any) -> Any:
    """Into an optimizer that was never used."""
    model = Model()
    return backfill_optimizer_state(make(model.parameters()), state, model=model, **arguments)


def _assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32)), name


def test_torch_alone_fails_on_a_parameter_without_gradient_and_loads_it_backfilled() -> None:
    trained, _, state = _trained(DENSE["adam"], FLATTENED)
    with pytest.raises(TypeError, match="not 'dict'"):  # if it does no more: torch has mended it, say so
        _loaded(DENSE["adam"], trained, state, FLATTENED)
    filled, report = _backfill(DENSE["adam"], state, allow=["cold.*"])
    assert report == BackfillReport(complete=("hot.weight", "warm.weight"), allowed=tuple(COLD))
    _loaded(DENSE["adam"], trained, filled, FLATTENED)


@forms
@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE)
def test_training_goes_on_as_from_no_state(make: Callable[..., Optimizer], options: StateDictOptions) -> None:
    trained, optimizer, state = _trained(make, options)
    filled, _ = _backfill(make, state, missing="initialize")
    model, loaded = _loaded(make, trained, filled, options)
    for batches, cold in ((range(3, 5), False), (range(5, 9), True)):
        _train(trained, optimizer, batches, cold)
        _train(model, loaded, batches, cold)
        _assert_same_bits(trained, model)


def _sparse_adam(parameters: Any) -> Optimizer:
    return optim.SparseAdam(list(parameters), lr=0.1)


@forms
def test_training_goes_on_as_from_no_state_with_sparse_gradients(options: StateDictOptions) -> None:
    # torch cannot make up the state of SparseAdam by itself: a new optimizer takes a step first.
    trained, optimizer, state = _trained(_sparse_adam, options, sparse=True)
    filled, report = _backfill(_sparse_adam, state, missing="initialize")
    assert report.initialized == tuple(COLD)
    model = copy.deepcopy(trained)
    loaded = _sparse_adam(model.parameters())
    _train(model, loaded, range(1), True)
    model.load_state_dict(trained.state_dict())
    set_optimizer_state_dict(model, loaded, filled, options=options)
    _train(trained, optimizer, range(3, 6), True)
    _train(model, loaded, range(3, 6), True)
    _assert_same_bits(trained, model)


@forms
@pytest.mark.parametrize("kind", ["adam", "sgd, momentum", "sgd, dampening", "adagrad", "nadam", "averaging"])
def test_what_was_loaded_can_be_saved_and_loaded_again(kind: str, options: StateDictOptions) -> None:
    trained, _, state = _trained(DENSE[kind], options)
    filled, _ = _backfill(DENSE[kind], state, missing="initialize")
    model, optimizer = _loaded(DENSE[kind], trained, filled, options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    again, report = _backfill(DENSE[kind], state, missing="initialize")
    assert len(report.complete) == (2 if kind in ("sgd, dampening", "averaging") else 4)
    assert _leaves(again) == _leaves(filled)


@forms
@pytest.mark.parametrize("alone", [False, True], ids=["in a group", "in its own group"])
def test_frozen_and_new_parameters_and_an_empty_group_load(options: StateDictOptions, alone: bool) -> None:
    def make(model: Model, lr: float) -> Optimizer:
        groups = [
            {"params": [model.hot.weight], "lr": lr},
            {"params": []},
            {"params": [model.cold.weight, model.warm.weight], "lr": 0.2},
        ]
        return optim.Adam(groups)

    def add_new(model: Model, optimizer: Optimizer) -> None:
        if alone:
            optimizer.add_param_group({"params": [model.cold.deep.weight], "lr": 0.1})
        else:
            optimizer.param_groups[0]["params"].insert(0, model.cold.deep.weight)

    trained = Model()
    trained.cold.weight.requires_grad_(False)
    optimizer = make(trained, 0.3)
    _train(trained, optimizer, range(3), False)
    state = copy.deepcopy(get_optimizer_state_dict(trained, optimizer, options=options))
    add_new(trained, optimizer)

    model = copy.deepcopy(trained)
    loaded = make(model, 0.7)  # overwritten by what was saved, and by that for the new one
    add_new(model, loaded)
    filled, report = backfill_optimizer_state(loaded, state, model=model, missing="initialize")
    assert report.stateless == ("cold.weight",)
    assert report.initialized == ("cold.deep.weight",)
    set_optimizer_state_dict(model, loaded, filled, options=options)
    for one, other in zip(loaded.param_groups, optimizer.param_groups, strict=True):
        assert {**one, "params": 0} == {**other, "params": 0}
    assert not loaded.state[model.cold.weight]
    _train(trained, optimizer, range(3, 6), True)
    _train(model, loaded, range(3, 6), True)
    _assert_same_bits(trained, model)


@forms
def test_a_new_parameter_takes_the_options_of_its_group(options: StateDictOptions) -> None:
    trained = Model()
    optimizer = optim.Adam([trained.hot.weight], lr=0.3)
    _train(trained, optimizer, range(3), False)
    state = get_optimizer_state_dict(trained, optimizer, options=options)
    model = Model()
    loaded = optim.Adam([model.cold.weight, model.hot.weight], lr=0.7)
    filled, _ = backfill_optimizer_state(loaded, state, model=model, missing="initialize")
    assert ("state" in filled) == (options is NAMED)
    set_optimizer_state_dict(model, loaded, filled, options=options)
    assert [group["lr"] for group in loaded.param_groups] == [0.3]


@forms
def test_an_optimizer_that_was_given_names_loads(options: StateDictOptions) -> None:
    trained = Model()
    optimizer = optim.Adam(trained.named_parameters(), lr=0.1)
    _train(trained, optimizer, range(3), False)
    state = copy.deepcopy(get_optimizer_state_dict(trained, optimizer, options=options))
    model = copy.deepcopy(trained)
    loaded = optim.Adam(model.named_parameters(), lr=0.1)
    filled, _ = backfill_optimizer_state(loaded, state, model=model, missing="initialize")
    set_optimizer_state_dict(model, loaded, filled, options=options)
    _train(trained, optimizer, range(3, 6), True)
    _train(model, loaded, range(3, 6), True)
    _assert_same_bits(trained, model)


def test_torch_alone_loads_no_flattened_state_into_an_optimizer_with_an_empty_group() -> None:
    model = Model()
    optimizer = optim.Adam([{"params": model.parameters()}, {"params": []}])
    _train(model, optimizer, range(1), True)
    state = get_optimizer_state_dict(model, optimizer, options=FLATTENED)
    with pytest.raises(IndexError):  # if it does now: what comes back may stay flattened
        set_optimizer_state_dict(model, optimizer, state, options=FLATTENED)


@forms
def test_nothing_is_left_out_when_loading_into_an_optimizer_in_use(options: StateDictOptions) -> None:
    # torch reads the flattened form by the entries that the optimizer has, and this one has none for cold.
    trained, optimizer, state = _trained(DENSE["adam"], options, cold=True)
    model = copy.deepcopy(trained)
    used = DENSE["adam"](model.parameters())
    _train(model, used, range(1), False)
    model.load_state_dict(trained.state_dict())
    filled, _ = backfill_optimizer_state(used, state, model=model)
    set_optimizer_state_dict(model, used, filled, options=options)
    _train(trained, optimizer, range(3, 6), True)
    _train(model, used, range(3, 6), True)
    _assert_same_bits(trained, model)


def test_groups_of_which_some_keep_state_load() -> None:
    def make(parameters: Iterator[nn.Parameter]) -> Optimizer:
        first, *others = parameters
        return optim.SGD([{"params": [first], "momentum": 0.0}, {"params": others}], lr=0.1, momentum=0.9)

    for options in (FLATTENED, NAMED):
        trained, optimizer, state = _trained(make, options)
        filled, report = _backfill(make, state, allow=COLD)
        assert report.stateless == ("hot.weight",)
        model, loaded = _loaded(make, trained, filled, options)
        _train(trained, optimizer, range(3, 6), True)
        _train(model, loaded, range(3, 6), True)
        _assert_same_bits(trained, model)


@forms
def test_absent_state_is_an_error_that_names_the_parameters(options: StateDictOptions) -> None:
    _, _, state = _trained(DENSE["adam"], options)
    with pytest.raises(
        CheckpointError, match=r"2 of 4 parameters: cold\.weight, cold\.deep\.weight\. .*allow="
    ):
        _backfill(DENSE["adam"], state)
    with pytest.raises(CheckpointError, match=r"1 of 4 parameters: cold\.deep\.weight\. "):
        _backfill(DENSE["adam"], state, allow="cold.weight")


def test_it_logs_once_if_it_initialized_something(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="torchrec_ext")
    _, _, state = _trained(DENSE["adam"], FLATTENED)
    for arguments, level in (
        ({"missing": "warn"}, logging.WARNING),
        ({"missing": "initialize"}, logging.INFO),
        ({"missing": "warn", "allow": COLD}, logging.INFO),
    ):
        caplog.clear()
        filled, report = _backfill(DENSE["adam"], state, **arguments)
        assert [(one.levelno, one.message) for one in caplog.records] == [(level, str(report))]
    assert str(report) == (
        "optimizer state: 2 parameters complete, 2 without state, as allowed, initialized "
        "(cold.weight, cold.deep.weight)"
    )
    caplog.clear()
    _backfill(DENSE["adam"], filled)
    assert not caplog.records


def _leaves(state: Any) -> Any:
    """A state dict that can be compared: tensors as their values, groups by their first parameter."""
    if isinstance(state, torch.Tensor):
        return state.dtype, tuple(state.shape), state.tolist()
    if isinstance(state, dict):
        return {key: _leaves(value) for key, value in state.items()}
    return [_leaves(one) for one in state] if isinstance(state, list) else state


@forms
def test_neither_the_input_nor_the_optimizer_changes_and_new_tensors_are_nobody_elses(
    options: StateDictOptions,
) -> None:
    _, _, state = _trained(DENSE["adagrad"], options)
    before = _leaves(state)
    model = Model()
    optimizer = DENSE["adagrad"](model.parameters())
    own = _leaves(optimizer.state_dict())
    filled, report = backfill_optimizer_state(optimizer, state, model=model, missing="initialize")
    assert report.initialized == tuple(COLD)

    def tensors(found: Any) -> Iterator[torch.Tensor]:
        if isinstance(found, torch.Tensor):
            yield found
        elif isinstance(found, dict):
            for one in found.values():
                yield from tensors(one)

    old = {one.data_ptr() for one in [*tensors(state), *tensors(dict(optimizer.state)), *model.parameters()]}
    new = [one for one in tensors(filled) if one.data_ptr() not in {o.data_ptr() for o in tensors(state)}]
    assert len(new) == 4
    assert len({one.data_ptr() for one in new} - old) == 4
    for one in new:
        one += 1
    if "state" in filled:
        filled["state"]["hot.weight"].clear()
        filled["param_groups"][0]["params"].clear()
    assert _leaves(state) == before
    assert _leaves(optimizer.state_dict()) == own
    _assert_same_bits(model, Model())


def test_a_lazy_optimizer_stays_without_state() -> None:
    _, _, state = _trained(DENSE["adam"], FLATTENED)
    model = Model()
    optimizer = DENSE["adam"](model.parameters())
    backfill_optimizer_state(optimizer, state, model=model, missing="initialize")
    assert not optimizer.state


def test_an_ordinary_state_dict_comes_back_untouched() -> None:
    _, optimizer, _ = _trained(DENSE["adam"], NAMED)
    state = optimizer.state_dict()
    del state["state"][0]["exp_avg"]
    before = _leaves(state)
    same, report = backfill_optimizer_state(optimizer, state)
    assert same is state
    assert _leaves(state) == before
    assert report == BackfillReport()


class Container:
    """Optimizers whose joint state dict is flattened, as trainers make them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        halves = [model.hot, model.cold], [model.warm]
        self.optimizers = [
            optim.Adam([p for m in half for p in m.parameters()], lr=lr)
            for half, lr in zip(halves, (0.1, 0.2), strict=True)
        ]

    def zero_grad(self) -> None:
        for one in self.optimizers:
            one.zero_grad()

    def step(self) -> None:
        for one in self.optimizers:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizers, options=FLATTENED)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizers, state, options=FLATTENED)


@pytest.mark.parametrize("names", ["its own", "the model's", "a list's"])
def test_a_container_of_optimizers_loads(names: str) -> None:
    trained = Model()
    optimizer = Container(trained)
    _train(trained, optimizer, range(3), False)
    state = copy.deepcopy(optimizer.state_dict())
    model = copy.deepcopy(trained)
    loaded = Container(model)
    filled, report = backfill_optimizer_state(
        loaded.optimizers if names == "a list's" else loaded,  # type: ignore[arg-type]
        state,
        model=None if names == "its own" else model,
        missing="initialize",
    )
    assert report.initialized == tuple(COLD)
    loaded.load_state_dict(filled)
    _train(trained, optimizer, range(3, 6), True)
    _train(model, loaded, range(3, 6), True)
    _assert_same_bits(trained, model)


def test_without_names_it_says_where_they_come_from() -> None:
    model, optimizer, state = _trained(DENSE["adam"], FLATTENED)
    with pytest.raises(ValueError, match="pass the model"):
        backfill_optimizer_state(optimizer, state)
    with pytest.raises(ValueError, match="4 parameters that are not in the model"):
        backfill_optimizer_state(optimizer, state, model=copy.deepcopy(model))
    with pytest.raises(ValueError, match="missing must be"):
        backfill_optimizer_state(optimizer, state, model=model, missing="ignore")  # type: ignore[arg-type]


ADAM = ["step", "exp_avg", "exp_avg_sq"]
NAMES = ["hot.weight", "warm.weight", *COLD]
CHANGES = {
    "shape": lambda value: value.new_zeros((*value.shape, 2)),
    "more": lambda value: value.new_zeros(5),
    "integers": lambda value: value.to(torch.int64).expand(4, 3),
    "complex": lambda value: value.to(torch.complex64),
    "text": lambda value: "lost",
}


@forms
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_state_never_loads(options: StateDictOptions, data: st.DataObject) -> None:
    _, _, state = _trained(DENSE["adam"], NAMED, cold=True)
    entries = state["state"]
    removed = data.draw(st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(ADAM))))
    for name in data.draw(st.sets(st.sampled_from(NAMES))):
        removed |= {(name, entry) for entry in ADAM}
    for name, entry in removed:
        del entries[name][entry]
    lost = {name for name in NAMES if not entries[name]}
    damaged = {name for name in NAMES if 0 < len(entries[name]) < len(ADAM)}
    there = [(name, entry) for name in NAMES for entry in entries[name]]
    for name, entry in data.draw(st.sets(st.sampled_from(there), max_size=2)) if there else ():
        change = data.draw(st.sampled_from(sorted(CHANGES)))
        entries[name][entry] = CHANGES[change](entries[name][entry])
        damaged.add(name)
    for name in data.draw(st.sets(st.sampled_from(["ghost", "hot", *NAMES]), max_size=1)):
        entries.setdefault(name, {})["other"] = torch.zeros(4, 3)
        lost.discard(name)
        damaged.add(name)
    if options is FLATTENED:
        groups = {f"param_groups.{n}.{k}": v for n in NAMES for k, v in state["param_groups"][0].items()}
        flat = {f"state.{n}.{k}": v for n, one in entries.items() for k, v in one.items()}
        state = flat | {key: value for key, value in groups.items() if not key.endswith(".params")}

    if damaged:
        with pytest.raises(CheckpointError) as error:
            _backfill(DENSE["adam"], state, missing="initialize", allow=["*"])
        blamed = {line.strip().split(":")[0] for line in str(error.value).split("\n")[1:-1]}
        assert not blamed & set(NAMES) - damaged
        assert all(name in str(error.value) for name in damaged)
    else:
        filled, report = _backfill(DENSE["adam"], state, missing="initialize")
        assert set(report.initialized) == lost
        assert set(report.complete) == set(NAMES) - lost
        _loaded(DENSE["adam"], Model(), filled, options)


@given(removed=st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(["lr", "betas", "eps"]))))
@settings(max_examples=20, deadline=None)
def test_options_that_torch_would_miss_are_damage(removed: set[tuple[str, str]]) -> None:
    _, _, state = _trained(DENSE["adam"], FLATTENED, cold=True)
    for name, option in removed:
        del state[f"param_groups.{name}.{option}"]
    if not removed:
        _backfill(DENSE["adam"], state)
        return
    with pytest.raises(CheckpointError) as error:
        _backfill(DENSE["adam"], state)
    for name in {name for name, _ in removed}:
        lacking = ", ".join(sorted(option for other, option in removed if other == name))
        assert f"param_groups.{name} lacks {lacking}\n" in str(error.value)


@forms
def test_state_of_a_parameter_in_no_group_is_damage(options: StateDictOptions) -> None:
    _, _, state = _trained(DENSE["adam"], options, cold=True)
    if options is NAMED:
        state["param_groups"][0]["params"].remove("hot.weight")
    else:
        state = {key: value for key, value in state.items() if not key.startswith("param_groups.hot.")}
    with pytest.raises(CheckpointError, match=r"hot\.weight: it has state and is in no parameter group"):
        _backfill(DENSE["adam"], state)


def test_options_that_ask_for_other_entries_are_refused_where_torch_would_load_half() -> None:
    make = DENSE["adam, amsgrad"]
    trained, optimizer, state = _trained(make, FLATTENED)
    with pytest.raises(CheckpointError, match=r"hot\.weight: max_exp_avg_sq not kept by this optimizer"):
        _backfill(DENSE["adam"], state, missing="initialize")
    # By name torch loads the options with the entries.
    state = get_optimizer_state_dict(trained, optimizer)
    filled, _ = _backfill(DENSE["adam"], state, missing="initialize")
    model, loaded = _loaded(DENSE["adam"], trained, filled, NAMED)
    _train(trained, optimizer, range(3, 6), True)
    _train(model, loaded, range(3, 6), True)
    _assert_same_bits(trained, model)


@pytest.mark.parametrize("state", [{}, {"model": 1}, {"state": [1]}, {"state.x": 1, "other": 2}])
def test_what_is_no_optimizer_state_dict_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="this is no optimizer state dict"):
        _backfill(DENSE["adam"], state)


class Configured(optim.Adam):
    """Needs an argument that its groups do not have."""

    def __init__(self, params: Any, plan: str) -> None:
        super().__init__(params, lr=0.1)


def test_an_optimizer_that_cannot_be_tried_is_refused_if_it_has_to_be() -> None:
    def make(parameters: Any) -> Optimizer:
        return Configured(parameters, "plan")

    trained, optimizer, state = _trained(make, FLATTENED)
    with pytest.raises(CheckpointError, match=r"cannot find out what Configured holds .*'plan'"):
        _backfill(make, state, missing="initialize")
    _train(trained, optimizer, range(1), True)
    state = get_optimizer_state_dict(trained, optimizer, options=FLATTENED)
    _, report = backfill_optimizer_state(optimizer, state, model=trained)
    assert len(report.complete) == 4


class KeepsNested(Optimizer):
    """Its entries are nested, and it hands its arguments on."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                if not self.state[p]:
                    self.state[p].update(outer={"inner": {"sum": torch.zeros_like(p)}, "n": torch.zeros(())})
                outer = self.state[p]["outer"]
                outer["n"] += 1
                outer["inner"]["sum"] += p.grad
                p -= outer["inner"]["sum"] / outer["n"]


@forms
def test_nested_state_is_filled(options: StateDictOptions) -> None:
    trained, optimizer, state = _trained(KeepsNested, options)
    filled, _ = _backfill(KeepsNested, state, missing="initialize")
    model, loaded = _loaded(KeepsNested, trained, filled, options)
    _train(trained, optimizer, range(3, 6), True)
    _train(model, loaded, range(3, 6), True)
    _assert_same_bits(trained, model)
    damaged = copy.deepcopy(state)
    if options is FLATTENED:
        del damaged["state.hot.weight.outer.inner.sum"]
    else:
        del damaged["state"]["hot.weight"]["outer"]["inner"]["sum"]
    with pytest.raises(CheckpointError, match=r"hot\.weight: outer\.inner\.sum missing, and outer\.n there"):
        _backfill(KeepsNested, damaged, missing="initialize")


def _keyed(model: Model, make: Callable[..., Optimizer]) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dict(model.named_parameters()), make)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("kind", ["adam", "sgd, momentum", "rowwise adagrad", "nadam"])
def test_training_goes_on_as_from_no_state_with_a_keyed_optimizer(kind: str, groups: bool) -> None:
    trained = Model()
    optimizer = _keyed(trained, DENSE[kind])
    optimizer.save_param_groups(groups)
    _train(trained, optimizer, range(3), False)
    state = copy.deepcopy(optimizer.state_dict())
    for name in COLD:
        state["state"].pop(name, None)  # some optimizers have state from the start
    model = Model()
    loaded = _keyed(model, DENSE[kind])
    loaded.save_param_groups(groups)
    loaded.init_state()
    with pytest.raises(ValueError, match="Different parameter count"):
        loaded.load_state_dict(state)
    filled, _ = backfill_optimizer_state(loaded, state, allow=["cold.*"])
    loaded.load_state_dict(filled)
    model.load_state_dict(trained.state_dict())
    _train(trained, optimizer, range(3, 6), True)
    _train(model, loaded, range(3, 6), True)
    _assert_same_bits(trained, model)


def test_a_keyed_optimizer_takes_no_damaged_state() -> None:
    model = Model()
    optimizer = _keyed(model, DENSE["adam"])
    _train(model, optimizer, range(3), True)
    state = optimizer.state_dict()

    def entry(value: Any) -> dict[str, Any]:
        return {"state": {**state["state"], "hot.weight": {**state["state"]["hot.weight"], "exp_avg": value}}}

    for damaged, why in (
        (entry(None), r"hot\.weight: exp_avg missing, and exp_avg_sq, step there"),
        (entry(torch.zeros(2, 3)), r"exp_avg is a floating-point tensor of shape \(2, 3\), not .* \(4, 3\)"),
        ({"state": {**state["state"], "ghost": {"step": 1}}}, "ghost: the optimizer has no such parameter"),
    ):
        with pytest.raises(CheckpointError, match=why):
            backfill_optimizer_state(optimizer, damaged, missing="initialize")
    with pytest.raises(CheckpointError, match=r"call init_state\(\) first"):
        backfill_optimizer_state(_keyed(Model(), DENSE["adam"]), state)
    flattened = {f"state.{n}.{k}": v for n, one in state["state"].items() for k, v in one.items()}
    with pytest.raises(CheckpointError, match="KeyedOptimizer loads none that is"):
        backfill_optimizer_state(optimizer, flattened)


def test_a_keyed_optimizer_that_starts_with_its_first_gradient_is_refused() -> None:
    model = Model()
    optimizer = _keyed(model, DENSE["sgd, dampening"])
    _train(model, optimizer, range(3), True)
    state = optimizer.state_dict()
    del state["state"]["cold.weight"]
    with pytest.raises(CheckpointError, match=r"cold\.weight: .* no state, which cannot be loaded"):
        backfill_optimizer_state(optimizer, state, missing="initialize")


def test_the_counter_of_a_warm_up_is_not_made_up() -> None:
    def make(model: Model) -> WarmupOptimizer:
        stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)]
        return WarmupOptimizer(_keyed(model, DENSE["adam"]), stages)

    model = Model()
    optimizer = make(model)
    _train(model, optimizer, range(3), True)
    state = optimizer.state_dict()
    backfill_optimizer_state(optimizer, state)
    del state["state"]["__warmup"]
    with pytest.raises(CheckpointError, match=r"__warmup: .* cannot initialize its state"):
        backfill_optimizer_state(optimizer, state, missing="initialize")
