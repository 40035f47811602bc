"""A repaired copy is clean, loads, and differs from the checkpoint where it says so and nowhere else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.audit_cases import (
    PARAMETER,
    SAVE,
    SLOT,
    TABLE,
    Tensors,
    as_state_dict,
    files_of,
    flip,
    offset_of,
    save_file,
    tensors,
)
from torchrec_ext.checkpoint import audit_checkpoint, repair_checkpoint
from torchrec_ext.errors import CheckpointError
from torchrec_ext.store import (
    Adam,
    DenseTable,
    DynamicTable,
    MemoryStore,
    RowWiseAdaGrad,
    StoreSnapshot,
    Uniform,
)

KINDS = list(SAVE)
ROWS = 300


def load(kind: str, path: Path) -> Tensors:
    """What a checkpoint holds, as its own readers read it."""
    if kind == "snapshot":
        table = StoreSnapshot.load(path).tables[TABLE.name]
        return {"weight": table.weight, "sum": table.slots["sum"].squeeze(1), "keys": table.keys}
    content: dict[str, Any] = as_state_dict(tensors(ROWS))
    if kind == "dcp":
        for value in (content["model"][PARAMETER], content["optimizer"]["state"][PARAMETER]["t0.momentum1"]):
            value.fill_(99.0)
        dcp.load(content, checkpoint_id=path)
    else:
        content = torch.load(path, weights_only=True)
    assert content["step"] == 7
    state = content["optimizer"]["state"][PARAMETER]["t0.momentum1"]
    return {"weight": content["model"][PARAMETER], "sum": state, "keys": tensors(ROWS)["keys"]}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_damaged_start_anew_and_others_stay(kind: str, tmp_path: Path) -> None:
    content = tensors(ROWS)
    damaged = {name: value.clone() for name, value in content.items()}
    damaged["weight"][7, 3] = math.nan
    damaged["sum"][100] = -1.0
    damaged["sum"][101] = 1e38
    SAVE[kind](damaged, tmp_path / "damaged")
    before = {file: file.read_bytes() for file in files_of(tmp_path / "damaged")}

    report = repair_checkpoint(tmp_path / "damaged", tmp_path / "repaired")
    assert report.out == tmp_path / "repaired" and not report.audit.clean
    assert {file: file.read_bytes() for file in files_of(tmp_path / "damaged")} == before
    assert audit_checkpoint(tmp_path / "repaired").clean

    found = load(kind, tmp_path / "repaired")
    anew = torch.tensor([7, 100, 101])
    expected = {name: value.clone() for name, value in content.items()}
    expected["sum"][anew] = 0.0
    initial = TABLE.initializer.rows(content["keys"][7:8], 16) if kind == "snapshot" else 0.0
    expected["weight"][7:8] = initial
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    named = content["keys"][anew].tolist() if kind == "snapshot" else anew.tolist()
    told = {one.slot: (one.count, list(one.rows)) for one in report.repaired}
    assert told == {"weight": (1, named[:1]), SLOT[kind]: (3, named)}
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_of_which_one_bit_was_flipped_in_the_file_is_brought_back(kind: str, tmp_path: Path) -> None:
    content = tensors(ROWS)
    SAVE[kind](content, tmp_path / "damaged")
    (file,) = [
        f for f in files_of(tmp_path / "damaged") if content["weight"].numpy().tobytes() in f.read_bytes()
    ]
    at = offset_of(file, content["weight"]) + 4 * (16 * 55 + 3)
    with file.open("r+b") as opened:
        opened.seek(at + 3)
        highest = opened.read(1)[0]
        opened.seek(at + 3)
        opened.write(bytes([highest ^ 0x40]))
    report = repair_checkpoint(tmp_path / "damaged", tmp_path / "repaired")
    assert {finding.kind for finding in report.audit.findings} == {"absurd", "checksum"}
    (repaired,) = report.repaired
    assert (repaired.slot, repaired.count) == ("weight", 1)
    found = load(kind, tmp_path / "repaired")
    assert all(torch.equal(found[name], value) for name, value in content.items())


@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_which_the_place_is_not_known_is_not_repaired(kind: str, tmp_path: Path) -> None:
    content = tensors(ROWS)
    SAVE[kind](content, tmp_path / "damaged")
    (file,) = [
        f for f in files_of(tmp_path / "damaged") if content["weight"].numpy().tobytes() in f.read_bytes()
    ]
    flip(file, offset_of(file, content["weight"]) + 1000, 2)
    report = repair_checkpoint(tmp_path / "damaged", tmp_path / "repaired")
    assert report.out is None and not (tmp_path / "repaired").exists()
    assert "checksum" in {finding.kind for finding in report.audit.findings}
    assert len(report.refused) == 1 and "use another checkpoint" in report.refused[0]


def test_keys_that_slots_lack_get_initial_values_as_restoring_gives_them(tmp_path: Path) -> None:
    table = DynamicTable("t", 4, 1000, initializer=Uniform(-1.0, 1.0, seed=9))
    generator = torch.Generator().manual_seed(0)
    arrays = {}
    for slot, count in (("weight", 50), ("exp_avg", 70), ("exp_avg_sq", 90)):
        keys = torch.randperm(1000, generator=generator)[:count] * 10**12
        arrays[slot] = keys, torch.rand(count, 4, generator=generator)
    snapshot = StoreSnapshot.from_arrays({"t": arrays}, [table], Adam(), step=12)
    # Damage on top, in a row of which other slots have other numbers.
    key = int(arrays["exp_avg_sq"][0][5])
    snapshot.tables["t"].slots["exp_avg_sq"][snapshot.tables["t"].keys_of("exp_avg_sq") == key] = math.inf
    snapshot.save(tmp_path / "damaged")

    report = repair_checkpoint(tmp_path / "damaged", tmp_path / "repaired")
    assert audit_checkpoint(tmp_path / "repaired").clean
    added = {one.slot: one.count for one in report.repaired if one.start.startswith("added")}
    assert added == {
        finding.slot: finding.count for finding in report.audit.findings if finding.rows != (key,)
    }

    repaired = StoreSnapshot.load(tmp_path / "repaired").tables["t"]
    store = MemoryStore()
    store.create_tables([table], Adam())
    slots = snapshot.tables["t"].slots
    for name, values in slots.items():
        values[snapshot.tables["t"].keys_of(name) == key] = 0.0
    store.restore(snapshot, on_mismatch="initialize")
    expected = store.snapshot().tables["t"]
    assert torch.equal(repaired.keys, expected.keys) and torch.equal(repaired.weight, expected.weight)
    assert all(torch.equal(repaired.slots[name], expected.slots[name]) for name in slots)


def test_a_slot_that_was_not_saved_starts_anew(tmp_path: Path) -> None:
    keys = torch.arange(20)
    snapshot = StoreSnapshot.from_arrays(
        {"ebc.t0": {"weight": (keys, torch.ones(20, 16))}},
        [TABLE],
        RowWiseAdaGrad(initial_accumulator_value=0.5),
    )
    snapshot.save(tmp_path / "damaged")
    repair_checkpoint(tmp_path / "damaged", tmp_path / "repaired")
    table = StoreSnapshot.load(tmp_path / "repaired").tables["ebc.t0"]
    assert torch.equal(table.slots["sum"], torch.full((20, 1), 0.5))


def test_all_state_of_a_row_starts_anew_with_the_optimizers_initial_value(tmp_path: Path) -> None:
    model = torch.nn.Embedding(10, 4)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.25)
    model(torch.arange(10)).square().sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["sum"][3, 1] = math.nan
    torch.save(optimizer.state_dict(), tmp_path / "damaged.pt")
    report = repair_checkpoint(tmp_path / "damaged.pt", tmp_path / "repaired.pt")
    repaired = torch.load(tmp_path / "repaired.pt", weights_only=True)
    optimizer.load_state_dict(repaired)
    assert optimizer.state[model.weight]["sum"][3].tolist() == [0.25] * 4
    assert optimizer.state[model.weight]["sum"][2].min() > 0.25
    assert "0.25" in str(report)


def test_weights_whose_state_is_numbered_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Embedding(10, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.arange(10)).sum().backward()
    optimizer.step()
    model.weight.data[2, 2] = math.nan
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    report = repair_checkpoint(tmp_path / "x.pt", tmp_path / "out.pt")
    assert report.out is None and "is not said" in report.refused[0]


def test_what_has_no_known_initial_value_is_refused(tmp_path: Path) -> None:
    state = {"step": torch.tensor(-1.0), "exp_avg": torch.zeros(4, 2), "exp_avg_sq": torch.zeros(4, 2)}
    torch.save({"state": {"a": state}, "param_groups": [{"params": ["a"]}]}, tmp_path / "x.pt")
    report = repair_checkpoint(tmp_path / "x.pt", tmp_path / "out.pt")
    assert "what a new row has in 'step' is not known" in report.refused[0]
    del state["exp_avg"], state["step"]
    other = {"a": {"exp_avg_sq": state["exp_avg_sq"]}, "b": {**state, "exp_avg": torch.zeros(4, 2)}}
    torch.save({"state": other, "param_groups": [{"params": ["a", "b"]}]}, tmp_path / "y.pt")
    assert "backfill_optimizer_state" in repair_checkpoint(tmp_path / "y.pt", tmp_path / "out.pt").refused[0]


def test_a_weight_is_not_repaired_without_all_of_its_state(tmp_path: Path) -> None:
    weight, state = torch.ones(4, 2), {"t.momentum1": torch.ones(8)}  # of two shards of columns
    weight[2, 1] = math.nan
    name = "embedding_bags.t.weight"
    torch.save({"model": {name: weight}, "optimizer": {"state": {name: state}}}, tmp_path / "x.pt")
    report = repair_checkpoint(tmp_path / "x.pt", tmp_path / "out.pt")
    assert report.out is None and "what a new row has in ['momentum1'] is not known" in report.refused[0]


def test_values_in_another_order_than_rows_are_refused(tmp_path: Path) -> None:
    weight = torch.ones(4, 6).t()
    weight[1, 1] = math.nan
    torch.save({"w": weight}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="not stored row by row"):
        repair_checkpoint(tmp_path / "x.pt", tmp_path / "out.pt")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.pt"]


def test_nothing_is_written_where_nothing_is_wrong_or_something_is_there(tmp_path: Path) -> None:
    save_file(tensors(5), tmp_path / "x.pt")
    report = repair_checkpoint(tmp_path / "x.pt", tmp_path / "out.pt")
    assert report.out is None and not report.refused and "nothing to repair" in str(report)
    (tmp_path / "out.pt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"out\.pt exists"):
        repair_checkpoint(tmp_path / "x.pt", tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_text() == "mine"
    with pytest.raises(CheckpointError, match="exists"):
        repair_checkpoint(tmp_path / "x.pt", tmp_path / "x.pt")


def test_links_that_lead_out_of_the_checkpoint_are_not_followed(tmp_path: Path) -> None:
    damaged = tensors(ROWS)
    damaged["weight"][1, 1] = math.nan
    SAVE["dcp"](damaged, tmp_path / "damaged")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "damaged" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
        repair_checkpoint(tmp_path / "damaged", tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["damaged", "secret"]


# Tensors of one name


def test_the_state_of_another_optimizer_stays_as_it_is(tmp_path: Path) -> None:
    def state() -> dict[str, torch.Tensor]:
        return {"exp_avg": torch.rand(10, 2), "exp_avg_sq": torch.rand(10, 2)}

    def content(**of: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: {"state": {"w": one}, "param_groups": [{"params": ["w"]}]} for name, one in of.items()}

    generator, discriminator = state(), state()
    generator["exp_avg"][3] = math.nan
    torch.save(content(gen=generator, disc=discriminator), tmp_path / "x.pt")
    report = repair_checkpoint(tmp_path / "x.pt", tmp_path / "out.pt")
    assert {one.key for one in report.repaired} == {"gen.state.w.exp_avg", "gen.state.w.exp_avg_sq"}
    assert "[gen.state.w.exp_avg]" in str(report) and "[gen.state.w.exp_avg]" in str(report.audit)
    found = torch.load(tmp_path / "out.pt")
    for name, value in discriminator.items():
        assert torch.equal(found["disc"]["state"]["w"][name], value)
        assert not found["gen"]["state"]["w"][name][3].any()
        assert torch.equal(found["gen"]["state"]["w"][name][4:], generator[name][4:])

    # With the weight, the state of both starts anew.
    weight = torch.rand(10, 2)
    weight[5] = math.inf
    content_of_all = {"model": {"w": weight}, **content(gen=generator, disc=discriminator)}
    torch.save(content_of_all, tmp_path / "y.pt")
    repair_checkpoint(tmp_path / "y.pt", tmp_path / "out_y.pt")
    found = torch.load(tmp_path / "out_y.pt")
    for optimizer, rows in (("gen", [3, 5]), ("disc", [5])):
        for values in found[optimizer]["state"]["w"].values():
            assert (values == 0).all(1).nonzero().flatten().tolist() == rows


@pytest.mark.parametrize("first", ["emb.weight", "module.emb.weight"])
def test_a_tensor_whose_name_differs_by_a_wrapper_stays_as_it_is(first: str, tmp_path: Path) -> None:
    damaged, healthy = torch.rand(10, 2), torch.rand(10, 2)
    damaged[3] = math.nan
    content = {"emb.weight": damaged, "module.emb.weight": healthy}
    torch.save(
        {name: content[name] for name in sorted(content, key=lambda one: one != first)}, tmp_path / "x"
    )
    assert [one.table for one in audit_checkpoint(tmp_path / "x").findings] == ["emb.weight"]
    repair_checkpoint(tmp_path / "x", tmp_path / "out")
    found = torch.load(tmp_path / "out")
    assert torch.equal(found["module.emb.weight"], healthy) and not found["emb.weight"][3].any()


def test_parameters_of_one_table_are_each_repaired_alone(tmp_path: Path) -> None:
    """Of names that a combined optimizer put a key before, several may end in one table's name."""
    states = {name: {"exp_avg": torch.rand(6, 2), "exp_avg_sq": torch.rand(6, 2)} for name in ("a.w", "b.w")}
    states["a.w"]["exp_avg"][1] = math.nan
    content = {"model": {"w": torch.rand(6, 2)}, "optimizer": {"state": states, "param_groups": []}}
    torch.save(content, tmp_path / "x.pt")
    repair_checkpoint(tmp_path / "x.pt", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt")["optimizer"]["state"]
    assert torch.equal(found["b.w"]["exp_avg"], states["b.w"]["exp_avg"])
    assert not found["a.w"]["exp_avg_sq"][1].any() and found["a.w"]["exp_avg_sq"][2].all()


# The copy and where it is


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("of_files", "of_directory"), [(0o600, 0o700), (0o640, 0o750), (0o444, 0o755)])
def test_a_copy_is_for_the_same_readers(kind: str, of_files: int, of_directory: int, tmp_path: Path) -> None:
    damaged = tensors(ROWS)
    damaged["weight"][7, 3] = math.nan
    path, out = tmp_path / "damaged", tmp_path / "out"
    SAVE[kind](damaged, path)
    if path.is_dir():
        path.chmod(of_directory)
    for file in [path] if path.is_file() else path.iterdir():
        file.chmod(of_files)
    assert repair_checkpoint(path, out).out == out
    modes = {file.stat().st_mode & 0o777 for file in ([out] if out.is_file() else out.iterdir())}
    assert modes == {of_files}
    assert not out.is_dir() or out.stat().st_mode & 0o777 == of_directory


def test_directories_within_a_checkpoint_are_copied(tmp_path: Path) -> None:
    damaged = tensors(ROWS)
    damaged["weight"][7, 3] = math.nan
    SAVE["dcp"](damaged, tmp_path / "x")
    (tmp_path / "x" / "more" / "empty").mkdir(parents=True, mode=0o700)
    (tmp_path / "x" / "more" / "notes.txt").write_text("mine")
    repair_checkpoint(tmp_path / "x", tmp_path / "out")
    assert (tmp_path / "out" / "more" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "out" / "more" / "empty").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["dcp", "snapshot"])
def test_a_copy_is_not_written_into_the_checkpoint(kind: str, tmp_path: Path) -> None:
    damaged = tensors(ROWS)
    damaged["weight"][7, 3] = math.nan
    SAVE[kind](damaged, tmp_path / "x")
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for out in (tmp_path / "x" / "out", tmp_path / "x" / "a" / "b", tmp_path / "link" / "out"):
        with pytest.raises(CheckpointError, match="is inside of"):
            repair_checkpoint(tmp_path / "x", out)
    (tmp_path / "link").unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_that_is_not_there_is_said(tmp_path: Path) -> None:
    damaged = tensors(ROWS)
    damaged["weight"][7, 3] = math.nan
    for kind in KINDS:
        SAVE[kind](damaged, tmp_path / kind)
        with pytest.raises(CheckpointError, match="No such file or directory"):
            repair_checkpoint(tmp_path / kind, tmp_path / "no" / "where")
    assert not (tmp_path / "no").exists()


# Tables that a function filled


def test_rows_that_a_function_filled_become_zero_and_that_is_said(tmp_path: Path) -> None:
    with MemoryStore() as store:
        store.create_tables(
            [DenseTable("t", 4, 10)], RowWiseAdaGrad(), init_fns={"t": lambda rows: rows.fill_(0.5)}
        )
        snapshot = store.snapshot()
    snapshot.tables["t"].weight[5, 1] = math.nan
    snapshot.save(tmp_path / "x")
    report = repair_checkpoint(tmp_path / "x", tmp_path / "out")
    assert {one.slot: one.start for one in report.repaired} == {
        "weight": "ZERO",
        "sum": "at the initial value 0",
    }
    weight = StoreSnapshot.load(tmp_path / "out").tables["t"].weight
    assert not weight[5].any() and (weight[[4, 6]] == 0.5).all()

    part = snapshot.tables["t"]
    arrays = {"weight": (part.keys[:7], torch.ones(7, 4)), "sum": (part.keys, part.slots["sum"])}
    StoreSnapshot.from_arrays({"t": arrays}, [part.table], RowWiseAdaGrad()).save(tmp_path / "y")
    report = repair_checkpoint(tmp_path / "y", tmp_path / "out_y")
    assert [(one.slot, one.count, one.start) for one in report.repaired] == [("weight", 3, "added, as ZERO")]
    assert not StoreSnapshot.load(tmp_path / "out_y").tables["t"].weight[7:].any()
