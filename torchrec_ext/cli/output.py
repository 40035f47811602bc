"""What commands have in common: errors as one line, tables, JSON, progress on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from torchrec_ext.terminal import printable

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

Progress = Callable[[int, int], None]
"""Is told how much of how much is done."""

_LAYOUT = "\n\t"  # of our own messages, some of which have several lines
_PIPED_WIDTH = 400  # columns where there is no terminal: nothing may be cut off for a program

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
upto_option = click.option(
    "--upto", type=int, metavar="STEP", help="The last step to take in.  [default: the newest]"
)
directory_argument = click.argument("directory", metavar="DIR")


class UserError(click.ClickException):
    """What a user can do something about: wrong usage, or what cannot be read or written."""

    exit_code = 2

    def format_message(self) -> str:
        """See ``click.ClickException``."""
        return printable(self.message, keep=_LAYOUT)


class _Unavailable(click.ClickException):
    exit_code = 3


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Shows the errors that say what to do as one line, without a traceback."""
    from torchrec_ext.errors import (
        CheckpointError,
        DeltaLogError,
        PublishError,
        SinkUnavailableError,
        StoreError,
    )

    try:
        yield
    except SinkUnavailableError as error:
        raise _Unavailable(str(error)) from error
    except (
        CheckpointError,
        DeltaLogError,
        ImportError,  # names the extra to install
        OSError,
        PublishError,
        StoreError,
        TypeError,
        ValueError,
    ) as error:
        raise UserError(str(error)) from error


def new_file(path: Path, *, replace: bool = False) -> None:
    """Checks that a file can be made, before hours go into what it shall hold."""
    if path.is_dir():
        raise UserError(f"{path} is a directory: name a file")
    if path.exists() and not replace:
        raise UserError(f"{path} is there already: remove it, or name another file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{path.parent} is not a directory: make it first")


def set_by_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set, instead of ending the process."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # On a thread: a handler runs on the main one, which may hold the event's lock at that moment.
        signal.signal(number, lambda *_: threading.Thread(target=stop.set).start())
    return stop


def log_to_stderr(level: int) -> None:
    """Sends log records of this level and above to stderr, above a progress bar if there is one."""
    handler = _Handler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


class _Handler(logging.Handler):
    # Not a StreamHandler: that would keep the stderr of its making, and not the one of a progress bar.
    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


@contextlib.contextmanager
def progress(label: str, *, unit: str = "bytes") -> Iterator[Progress | None]:
    """Shows a bar on stderr if that is a terminal; elsewhere nothing.

    Args:
        label: what is being done.
        unit: what is counted: ``bytes``, or anything else.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    count = bars.DownloadColumn() if unit == "bytes" else bars.MofNCompleteColumn()
    shown = [bars.TextColumn("{task.description}"), bars.BarColumn(), count, bars.TimeRemainingColumn()]
    with bars.Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_json(value: Any) -> None:
    """Prints a value, or a dataclass, as one JSON document."""
    click.echo(json.dumps(plain(value), indent=1, allow_nan=False))


def plain(value: Any) -> Any:
    """A value made of what JSON knows; what is not a number is null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def table(*columns: str, left: Sequence[str] = ()) -> Table:
    """A table whose columns stand to the right, but those in ``left``."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold")
    for place, name in enumerate(columns):
        justify: JustifyMethod = "left" if name in left else "right"
        # Of a narrow terminal the first column gives way: it has the long names.
        made.add_column(name, justify=justify, overflow="fold", no_wrap=place > 0)
    return made


def print_lines(lines: Iterable[Table | str]) -> None:
    """Prints tables and lines of text on stdout."""
    from rich.console import Console

    # No markup: a table may be named [red].
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    for line in lines:
        if isinstance(line, str):
            console.print(printable(line, keep=_LAYOUT), soft_wrap=True)
        else:
            console.print(line)


def size(nbytes: float) -> str:
    """A number of bytes, as people read it."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"


def duration(seconds: float) -> str:
    """A time span, as people read it."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def moment(unix: float) -> str:
    """A point in time, local."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
