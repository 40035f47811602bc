"""``torchrec-ext publish``."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import click

from torchrec_ext.cli.output import UserError, directory_argument, progress, set_by_signals, user_errors
from torchrec_ext.urls import without_credentials

if TYPE_CHECKING:
    from torchrec_ext.publish.publisher import Published

_EXAMPLES = """\b
Examples:
  torchrec-ext publish deltas/ redis://localhost:6379/0 --follow
  torchrec-ext publish deltas/ parquet://snapshots/today
  torchrec-ext publish deltas/ parquet://snapshots/today --json > published.jsonl
"""


@click.command("publish", epilog=_EXAMPLES)
@directory_argument
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
def command(
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

    The exit code is 0 when done or stopped, 2 if it cannot be published, 3 if the sink did not answer in
    time: publishing again then goes on where it stopped.
    """  # noqa: D301  # click reads the character that backslash-b is
    from torchrec_ext.publish import publish

    logging.getLogger().setLevel(logging.INFO)  # it runs for long, and tells what it does
    stop = set_by_signals()  # finishes the dump at hand

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

    with user_errors(), progress("publishing", unit="rows") as shown:
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
            on_progress=shown,
        )
    if stop.is_set() and not follow:
        raise UserError("stopped before everything was published; what was is complete: publish again")
    if not as_json:
        nothing = "stopped" if stop.is_set() else f"{without_credentials(directory)} holds no dump yet"
        click.echo(f"it holds {position}" if position is not None else nothing)
