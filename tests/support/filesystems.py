"""File systems of PyArrow that let a test look on, stop them, or make them fail."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import (
    FileInfo,
    FileSelector,
    FileSystem,
    FileSystemHandler,
    FileType,
    LocalFileSystem,
    PyFileSystem,
    SubTreeFileSystem,
)

from tests.support.pauses import Outcome, dump_steps
from tests.support.trainers import Trainer
from torchrec_ext.delta import DeltaDumper
from torchrec_ext.delta.places import LocalPlace

Look = Callable[[str, str], None]
"""Is told an operation and a path, and may do what it likes; before the operation happens."""


class Watched(FileSystemHandler):
    """Hands everything on to another file system, and tells of it first."""

    def __init__(self, inner: FileSystem, look: Look) -> None:
        self._inner = inner
        self._look = look

    def get_type_name(self) -> str:
        return self._inner.type_name

    def normalize_path(self, path: str) -> str:
        return self._inner.normalize_path(path)

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        for path in paths:
            self._look("get_file_info", path)
        return self._inner.get_file_info(paths)

    def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
        self._look("list", selector.base_dir)
        return self._inner.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._look("create_dir", path)
        self._inner.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._look("delete_dir", path)
        self._inner.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        raise NotImplementedError

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._look("delete_file", path)
        self._inner.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        self._look("move", dest)
        self._inner.move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        raise NotImplementedError

    def open_input_stream(self, path: str) -> Any:
        self._look("read", path)
        return self._inner.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        self._look("read", path)
        return self._inner.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self._look("write", path)
        return self._inner.open_output_stream(path, metadata=metadata)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError


class Hiding(Watched):
    """Shows a directory as it is without the entries of some names, as before or after a change.

    Attributes:
        names: which; nothing is hidden any more once they have been ``times`` times.
        times: how often.
    """

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner, lambda operation, path: None)
        self.names: Collection[str] = ()
        self.times = 1

    def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
        found = super().get_file_info_selector(selector)
        left = [info for info in found if info.base_name not in self.names]
        if len(left) < len(found):
            self.times -= 1
            self.names = self.names if self.times else ()
        return left


def watched(root: Path | str, look: Look, inner: FileSystem | None = None) -> FileSystem:
    """A directory as a file system that does not promise to rename, or one of ``inner``."""
    return SubTreeFileSystem(str(root), PyFileSystem(Watched(inner or LocalFileSystem(), look)))


def exists(filesystem: FileSystem, path: str) -> bool:
    """Whether there is such a file or directory."""
    return filesystem.get_file_info(path).type != FileType.NotFound


class SteppedRun:
    """A trainer on a thread of its own that changes and lists files only when it is told to go on."""

    _PAUSES = frozenset({"list", "create_dir", "delete_dir", "delete_file", "move", "write"})

    def __init__(self, root: Path, seed: int, steps: list[int]) -> None:
        self._told: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._go: queue.Queue[None] = queue.Queue()
        self._free = False
        self.where = ""
        self.outcome: Outcome | None = None
        self._thread = threading.Thread(target=self._run, args=(root, seed, steps), daemon=True)
        self._thread.start()
        self._listen()

    def go(self) -> None:
        """Lets it do what it stands before."""
        if self.outcome is None:
            self._go.put(None)
            self._listen()

    def _listen(self) -> None:
        kind, what = self._told.get(timeout=240)
        assert kind != "failed", what
        if kind == "done":
            self.outcome = what
            self._thread.join()
        else:
            self.where = what

    def _run(self, root: Path, seed: int, steps: list[int]) -> None:
        try:
            outcome = dump_steps(Trainer(seed), watched(root, self._look), steps, self._leave)
        except BaseException as error:
            self._told.put(("failed", repr(error)))
        else:
            self._told.put(("done", outcome))

    def _leave(self, dumper: DeltaDumper) -> None:
        self._free = True
        dumper.__exit__(KeyboardInterrupt, None, None)

    def _look(self, operation: str, path: str) -> None:
        if operation in self._PAUSES and not self._free:
            self._told.put(("before", f"{operation} {Path(path).name}"))
            self._go.get()


class Striker:
    """Does something just before some of the operations on a place, counted from 0; never within itself.

    Args:
        strike: what it does.
        at: before which operations.
    """

    def __init__(self, strike: Callable[[], object], at: Collection[int] = ()) -> None:
        self.count = 0
        self.struck = 0
        self._strike = strike
        self._at = frozenset(at)
        self._striking = False
        self._lock = threading.Lock()

    def __call__(self, *_: object) -> None:
        with self._lock:
            if self._striking:
                return
            self._striking = self.count in self._at
            self.count += 1
            if not self._striking:
                return
        try:
            self._strike()
            self.struck += 1
        finally:
            self._striking = False

    @contextlib.contextmanager
    def on_local_places(self) -> Iterator[None]:
        """Every operation on a directory of this machine counts."""
        names = "entries has read size crc32 parquet make_folder locked create put remove prune sync"
        with pytest.MonkeyPatch.context() as patch:
            for name in names.split():
                patch.setattr(LocalPlace, name, self._before(getattr(LocalPlace, name)))
            yield

    def _before(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(place: LocalPlace, *arguments: Any) -> Any:
            self()
            return operation(place, *arguments)

        return counted
