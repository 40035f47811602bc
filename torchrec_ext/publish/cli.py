"""The commands ``torchrec-ext publish`` and ``torchrec-ext lookup``."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from torchrec_ext.urls import without_credentials

if TYPE_CHECKING:
    from torchrec_ext.publish.publisher import Published

# What they need is imported when they run, so that `--help` is quick.


class _Unavailable(click.ClickException):
    exit_code = 3


@click.command("publish")
@click.argument("directory", metavar="DIR")
@click.argument("url")
@click.option("--follow", is_flag=True, help="Go on with new dumps until SIGTERM or Ctrl-C.")
@click.option(
    "--on-delete",
    type=click.Choice(["delete", "tombstone", "fallback_vector"]),
    default="delete",
    show_default=True,
    help="What takes the place of a deleted key's row, for readers other than `lookup`.",
)
@click.option("--restart", is_flag=True, help="Write everything anew, and take away what is not in DIR.")
@click.option(
    "--poll", default=1.0, show_default=True, metavar="SECONDS", help="How often to look for dumps."
)
@click.option(
    "--retry",
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for a sink that is down.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per change, on standard output.")
def publish_command(
    directory: str,
    url: str,
    follow: bool,
    on_delete: Any,
    restart: bool,
    poll: float,
    retry: float,
    as_json: bool,
) -> None:
    """Publishes the dumps in DIR to the sink at URL, from where it stands.

    DIR is a path or a URI of a file system that PyArrow knows: s3://, gs://, hdfs://, abfs://, file://.

    \b
    URL is one of
      redis://user:password@host:port/db   rediss://... (TLS)   unix:///path/to/socket
      deltalake://path   feast://path/to/repo   parquet://path
    or one that an installed package adds. Give the password of Redis in
    TORCHREC_EXT_REDIS_PASSWORD rather than in the URL, which others can see.

    \b
    Examples:
      torchrec-ext publish deltas/ redis://localhost:6379/0 --follow
      torchrec-ext publish deltas/ parquet://snapshots/today

    Exits with 0 when done or stopped, 1 on an error, 2 on wrong usage, and 3 if the sink did not answer
    in time: publishing again then goes on where it stopped.
    """  # noqa: D301  # click reads the character that backslash-b is
    from torchrec_ext.publish import publish

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())  # finishes the dump at hand

    def told(done: Published) -> None:
        if as_json:
            click.echo(
                json.dumps(
                    {
                        "generation": done.position.generation,
                        "step": done.position.step,
                        "dumps": done.dumps,
                        "rows": done.rows,
                        "seconds": done.seconds,
                        "lag_seconds": done.lag_seconds,
                    }
                )
            )

    with _errors():
        position = publish(
            directory,
            url,
            follow=follow,
            on_delete=on_delete,
            restart=restart,
            stop=stop,
            poll_seconds=poll,
            retry_seconds=retry,
            on_published=told,
        )
    if not as_json:
        click.echo(
            f"it holds {position}"
            if position is not None
            else f"{without_credentials(directory)} holds no dump yet"
        )


@click.command("lookup", context_settings={"ignore_unknown_options": True})
@click.argument("where", metavar="DIR_OR_URL")
@click.argument("table")
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=int)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per id, on standard output.")
def lookup_command(where: str, table: str, ids: tuple[int, ...], as_json: bool) -> None:
    """Shows what the model answers for the IDs of TABLE, at the last dump in DIR or published at URL.

    \b
    Examples:
      torchrec-ext lookup deltas/ mc.user_table 17 42
      torchrec-ext lookup redis://localhost:6379/0 mc.user_table 17 -- -3

    Exits with 0, with 1 on an error, 2 on wrong usage, and 3 if the sink does not answer.
    """  # noqa: D301
    from torchrec_ext.publish import EmbeddingClient

    with _errors(), EmbeddingClient(where) as client:
        vectors = client.lookup(table, ids)
    for key, vector in zip(ids, vectors.tolist(), strict=True):
        if as_json:
            click.echo(json.dumps({"id": key, "embedding": vector}))
        else:
            click.echo(f"{key}\t[{', '.join(f'{value:.6g}' for value in vector)}]")


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Shows what a user can do something about as one line."""
    from torchrec_ext.errors import DeltaLogError, PublishError, SinkUnavailableError

    try:
        yield
    except SinkUnavailableError as error:
        raise _Unavailable(str(error)) from error
    except (DeltaLogError, PublishError, ValueError, TypeError) as error:
        raise click.ClickException(str(error)) from error
    except KeyError as error:
        raise click.ClickException(str(error.args[0])) from error
