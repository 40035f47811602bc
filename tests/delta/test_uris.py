"""A log on a server that speaks S3, and what may go wrong there."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from click.testing import CliRunner
from pyarrow.fs import (
    AwsStandardS3RetryStrategy,
    FileSystem,
    LocalFileSystem,
    S3FileSystem,
    SubTreeFileSystem,
)

from tests.support.faults import MortalRanks
from tests.support.filesystems import watched
from tests.support.models import answers, build, one_table
from tests.support.s3_server import USER, Line, S3Server, needs_moto, no_credentials, objects
from tests.support.trainers import FQN, Trainer, dump
from tests.support.training import train
from tests.support.workers import run_on
from torchrec_ext.cli import main
from torchrec_ext.delta import DeltaDumper, DeltaDumpError, DeltaLog, DeltaLogError, DumpId, FencedError
from torchrec_ext.delta.own_files import remove_own_files
from torchrec_ext.publish import EmbeddingClient, publish

SPEC = one_table(policy="lru", eviction_interval=1, rows=12)
IDS = [*range(-2, 60), 2**62, 2**63 - 1]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


# -- what a user does


def _train(uri: str, seed: int, resume: int | None) -> dict[int, list[list[float]]]:
    model = build(one_table(policy="lru", eviction_interval=1, rows=12, seed=seed))
    answered = {}
    with DeltaDumper(model, uri, interval_steps=2) as dumper:
        if resume is not None:
            dumper.resume(resume)
        for step in range(1 + (resume or 0), 5 + (resume or 0)):
            rng = np.random.default_rng([seed, step, dist.get_rank()])
            train(model, SPEC, (5 * step + rng.integers(0, 30, 12)) % 60)
            dumper.step(step)
            if step % 2 == 0:
                answered[step] = answers(model, SPEC, "mc", "t0", IDS).numpy().tolist()
    return answered


@needs_moto
def test_log_on_s3_says_what_the_model_answers_also_after_a_restart_and_published(
    server: S3Server, tmp_path: Path
) -> None:
    uri, sink = server.uri("trained"), f"parquet://{tmp_path}/snapshots"
    for seed, resume in ((0, None), (1, 2)):
        answered = run_on(2, _train, uri, seed, resume)[0]
        log = DeltaLog(uri)
        for step, expected in answered.items():
            assert np.array_equal(log.replay(upto=step)["mc.t0"].lookup(IDS), np.array(expected, np.float32))
        publish(uri, sink)
        for where in (uri, sink):
            with EmbeddingClient(where) as client:
                assert np.array_equal(client.lookup("mc.t0", IDS), log.replay()["mc.t0"].lookup(IDS))
    assert [(dump.generation, dump.step) for dump in log.dumps()] == [*((0, 2), (1, 2), (1, 4), (1, 6))]
    assert log.dumps()[1].supersedes == (DumpId(0, 4),)
    for content in objects(server, "trained").values():
        assert no_credentials(content.decode("latin-1"))


@needs_moto
def test_commands_take_uris_and_show_no_credentials(server: S3Server, tmp_path: Path) -> None:
    uri, sink = server.uri("commands"), f"parquet://{tmp_path}/snapshots"
    server.client().create_dir("bucket/commands")
    nothing = CliRunner().invoke(main, ["publish", uri, sink])
    trainer = Trainer(1)
    with trainer.attach(uri) as dumper:
        trainer.train(1)
        dumper.step(1)
    done = CliRunner().invoke(main, ["publish", uri, sink])
    found = CliRunner().invoke(main, ["lookup", uri, FQN, str(trainer.keys()[0]), "--json"])
    assert (nothing.exit_code, done.exit_code, found.exit_code) == (0, 0, 0)
    assert json.loads(found.output)["embedding"] == trainer.answers()[trainer.keys()[0]]
    assert nothing.output == "s3://bucket/commands holds no dump yet\n"
    assert no_credentials(nothing.output + done.output + found.output)
    commands: list[tuple[list[str], int]] = [
        (["inspect", uri, "--json"], 0),
        (["verify", uri, "--json"], 0),
        (["diff", uri, "1", "1", "--json"], 0),
        (["diff", uri, "1", "1", "--table", "nothing"], 2),
        (["report", uri, "--out", f"{tmp_path}/report.html", "--json"], 0),
        (["compact", uri], 0),
        (["vacuum", uri], 0),
    ]
    for arguments, code in commands:
        shown = CliRunner().invoke(main, arguments)
        assert shown.exit_code == code, (arguments[0], shown.output)
        assert no_credentials(shown.output), arguments[0]
    page = (tmp_path / "report.html").read_text()
    assert "s3://bucket/commands" in page and USER not in page and "s3cret" not in page


@pytest.mark.parametrize("form", ["path", "uri", "file system"])
def test_local_directory_may_be_a_path_a_uri_or_a_file_system(tmp_path: Path, form: str) -> None:
    directory = tmp_path / "my deltas"
    where: Any = {
        "path": directory,
        "uri": directory.as_uri(),
        "file system": SubTreeFileSystem(str(directory), LocalFileSystem()),
    }[form]
    trainer = Trainer(1)
    with trainer.attach(where) as dumper:
        trainer.train(1)
        dumper.step(1)
    trainer.compare(directory)
    trainer.compare(where)
    # Only what the operating system renames for us is committed by a rename.
    assert (directory / "generations" / "g0000" / "owner.json").exists() == (form != "file system")


# -- a run that is fenced off


def _dump_asleep(tell: Any, root: str, fifo: str, uri: str) -> None:
    def look(operation: str, path: str) -> None:
        if (operation, Path(path).name) == ("write", "manifest.json") and "step_000000000002" in path:
            tell("asleep")
            Path(fifo).read_bytes()  # until somebody writes to it

    inner, root = FileSystem.from_uri(uri)
    trainer = Trainer(1)
    dumper = trainer.attach(watched(root, look, inner))
    dump(dumper, 1)
    trainer.train(2)
    with pytest.raises(FencedError) as raised:
        dump(dumper, 2)
    tell("woke", str(raised.value))
    dumper.__exit__(KeyboardInterrupt, None, None)
    tell("gone")


@needs_moto
def test_process_that_sleeps_between_its_last_look_and_its_commit_misleads_nobody(
    server: S3Server, tmp_path: Path
) -> None:
    uri, fifo = server.uri("asleep"), str(tmp_path / "fifo")
    os.mkfifo(fifo)
    with MortalRanks(1, tmp_path / "meet", _dump_asleep, "", fifo, uri) as old:
        assert old.hear(0) == ("asleep",)
        newer = Trainer(2)
        dumper = newer.attach(uri)
        seen = objects(server, "asleep")
        Path(fifo).write_text("")  # it commits while the newer run has not dumped yet
        kind, text = old.hear(0)
        assert (kind, old.hear(0)) == ("woke", ("gone",))
    assert "the dump of step 2 may count or not, as the newer run saw it" in text
    assert "generation 1 (process " in text and no_credentials(text)
    assert [dump.dump for dump in DeltaLog(uri).dumps()] == [DumpId(0, 1), DumpId(0, 2)]
    sink = f"parquet://{tmp_path}/snapshots"
    publish(uri, sink)
    dump(dumper, 1)
    newer.compare(uri)
    chain, _, strays = DeltaLog(uri).listing()
    assert ([d.dump for d in chain], [d.dump for d in strays]) == (
        [DumpId(0, 1), DumpId(1, 1)],
        [DumpId(0, 2)],
    )
    publish(uri, sink)
    with EmbeddingClient(sink) as client:
        assert client.lookup(FQN, range(40)).tolist() == newer.answers()
    now = objects(server, "asleep")
    assert {name: now[name] for name in seen} == seen
    dumper.close()
    log = DeltaLog(uri)
    remove_own_files(log.place, DumpId(0, 2).directory)
    assert DeltaLog(uri).listing() == (chain, {}, [])
    newer.compare(uri)


# -- a commit of which nobody can tell


class _Unsure:
    """Answers the commit of a step with an error, and knows nothing of it afterwards."""

    def __init__(self, root: Path, step: int, *, carried_out: bool) -> None:
        self._marker, self._carried_out = f"step_{step:012d}", carried_out
        self.filesystem = watched(root, self._look)
        self.asked = False

    def _look(self, operation: str, path: str) -> None:
        if self._marker not in path or not path.endswith("/manifest.json"):
            return
        if operation == "move":
            self.asked = True
            if self._carried_out:
                hidden = Path(path).with_name(".manifest.json.tmp")
                hidden.replace(path)
            raise OSError("the line went dead")
        if operation == "read":
            raise OSError("the line is dead")


@pytest.mark.parametrize("carried_out", [True, False])
def test_dump_that_may_be_committed_or_not_is_said_again_by_the_next_one(
    tmp_path: Path, carried_out: bool
) -> None:
    unsure = _Unsure(tmp_path, 2, carried_out=carried_out)
    there = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    trainer, sink = Trainer(1), f"parquet://{tmp_path}-snapshots"
    dumper = trainer.attach(unsure.filesystem)
    trainer.train(1)
    dumper.dump(1)
    dumper.flush()
    trainer.train(2)
    with pytest.raises(DeltaDumpError, match=r"may be committed or not, nobody can tell; .*line went dead"):
        dump(dumper, 2)
    publish(there, sink)
    trainer.train(3)
    dumper.dump(3)
    dumper.flush()
    trainer.compare(there)
    chain, _, strays = DeltaLog(there).listing()
    assert [d.step for d in chain] == [1, 3] and chain[-1].supersedes == (DumpId(0, 2),)
    assert [d.step for d in strays] == ([2] if carried_out else [])
    publish(there, sink)
    with EmbeddingClient(sink) as client:
        assert client.lookup(FQN, range(40)).tolist() == trainer.answers()
    dumper.close()


def _dump_unsurely(root: str) -> list[int]:
    unsure = _Unsure(Path(root), 2, carried_out=True)
    model, refused = build(SPEC), []
    with DeltaDumper(model, unsure.filesystem, interval_steps=10**9) as dumper:
        for step in (1, 2, 3):
            train(model, SPEC, range(7 * step, 7 * step + 9))
            try:
                dumper.dump(step)
                dumper.flush()
            except DeltaDumpError:
                refused.append(step)
            expected = answers(model, SPEC, "mc", "t0", IDS).numpy()
            assert np.array_equal(DeltaLog(root).replay()["mc.t0"].lookup(IDS), expected)
            dist.barrier()
    return refused


def test_no_rank_takes_its_files_away_from_a_dump_that_may_be_committed(tmp_path: Path) -> None:
    assert run_on(2, _dump_unsurely, str(tmp_path)) == [[2], [2]]
    assert [dump.step for dump in DeltaLog(tmp_path).dumps()] == [1, 3]


def test_dump_that_may_be_committed_is_not_written_a_second_time(tmp_path: Path) -> None:
    unsure = _Unsure(tmp_path, 1, carried_out=True)
    there = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    trainer = Trainer(1)
    dumper = trainer.attach(unsure.filesystem)
    trainer.train(1)
    with pytest.raises(DeltaDumpError, match="may be committed or not"):
        dump(dumper, 1)
    with pytest.raises(DeltaDumpError, match="it may be committed already, and cannot be written again"):
        dumper.close()
    trainer.compare(there)
    with Trainer(2).attach(there) as newer:  # goes on from it: it is there
        newer.dump(1)
        newer.flush()
    assert [d.dump for d in DeltaLog(there).dumps()] == [DumpId(0, 1), DumpId(1, 1)]


def test_error_of_a_commit_that_was_carried_out_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def look(operation: str, path: str) -> None:
        if operation == "move" and path.endswith("/manifest.json"):
            Path(path).with_name(".manifest.json.tmp").replace(path)
            raise OSError("no answer")

    trainer = Trainer(1)
    with caplog.at_level(logging.INFO), trainer.attach(watched(tmp_path, look)) as dumper:
        trainer.train(1)
        dumper.step(1)
    trainer.compare(tmp_path)
    assert "step_000000000001.g0000 is there, although: " in caplog.text


# -- what may go wrong with a server


@needs_moto
def test_server_that_goes_away_costs_no_row(server: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    line = Line(server.port)
    impatient = server.client(line.port, retry_strategy=AwsStandardS3RetryStrategy(max_attempts=1))
    log = SubTreeFileSystem("bucket/away", impatient)
    trainer = Trainer(1)
    with trainer.attach(log) as dumper:
        dump(dumper, 1)
        line.cut()
        trainer.train(2)
        with pytest.raises(DeltaDumpError, match=r"step 2 was not committed; its rows go out with the next"):
            dump(dumper, 2)
        trainer.train(3)  # goes on
        line.mend()
        trainer.train(4)
        dumper.dump(4)
        dumper.flush()
        trainer.compare(log)
    assert [d.step for d in DeltaLog(log).dumps()] == [1, 4]
    line.cut()
    with pytest.raises(DeltaLogError, match=r"s3://bucket/away cannot be reached: .*NETWORK_CONNECTION"):
        DeltaLog(log)
    assert no_credentials(caplog.text)


@needs_moto
def test_damaged_objects_are_errors_that_name_them(server: S3Server) -> None:
    uri, client = server.uri("damaged"), server.client()
    trainer = Trainer(1)
    with trainer.attach(uri) as dumper:
        trainer.train(1)
        dumper.step(1)
    part = "bucket/damaged/step_000000000001.g0000/part_00000_of_00001.parquet"
    content = client.open_input_stream(part).read()
    for damaged, message in (
        (content[:100], f"has 100 bytes, the manifest says {len(content)}"),
        (b"x" + content[1:], "is damaged: its checksum is not the manifest's"),
    ):
        with client.open_output_stream(part) as stream:
            stream.write(damaged)
        with pytest.raises(
            DeltaLogError, match=f"damaged: step_0+1.g0000: part_00000_of_00001.parquet {message}"
        ):
            DeltaLog(uri).replay()
    client.delete_file(part)
    with pytest.raises(DeltaLogError, match=r"part_00000_of_00001\.parquet is missing"):
        DeltaLog(uri).replay()


@needs_moto
def test_what_cannot_be_opened_is_an_error_without_credentials(server: S3Server, tmp_path: Path) -> None:
    client: S3FileSystem = server.client()
    with client.open_output_stream("bucket/file") as stream:
        stream.write(b"mine")
    with client.open_output_stream("bucket/others/notes.txt") as stream:
        stream.write(b"mine")
    model = Trainer(1)
    good = server.uri("deltas")
    with S3Server(knows=False) as stranger:
        cases: list[tuple[str, type[Exception], str]] = [
            (server.uri("x", bucket="none"), OSError, r"s3://none/x cannot be written to: .*[Bb]ucket"),
            (server.uri("file"), ValueError, "output_dir s3://bucket/file is not a directory"),
            (server.uri("others"), ValueError, "s3://bucket/others holds something else than dumps"),
            (stranger.uri("x"), OSError, r"s3://bucket/x cannot be (reached|written to): .*(ACCESS|INVALID)"),
            (
                f"{good}&nope=s3cret",
                ValueError,
                "output_dir s3://bucket/deltas cannot be opened: Unex",
            ),
            (good.replace("%2F", "/ "), ValueError, "output_dir s3://.* cannot be opened: Cannot parse URI"),
            (
                good.replace("s3:", "s4:"),
                ValueError,
                "output_dir s4://bucket/deltas: it must be a path",
            ),
            (good.replace("bucket/deltas", ""), ValueError, "names no directory"),
            ("file://host/deltas", ValueError, "a local file's URI is file:///absolute/path"),
        ]
        for uri, kind, message in cases:
            with pytest.raises(kind, match=message) as raised:
                model.attach(uri)
            assert no_credentials(_shown(raised.value)), uri
    for uri in (server.uri("nothing"), server.uri("x", bucket="none")):
        with pytest.raises(DeltaLogError, match=r"^s3://.*: no such directory$"):
            DeltaLog(uri)


def _shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
