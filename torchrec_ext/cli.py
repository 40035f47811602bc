"""The command ``torchrec-ext``."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from torchrec_ext import __version__
from torchrec_ext.publish.cli import lookup_command, publish_command

# Imported by the commands that need them, so that `--help` is quick: torch, and what imports it.


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="torchrec-ext")
def main() -> None:
    """TorchRec extensions: fresh embeddings, from training to serving."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


main.add_command(publish_command)
main.add_command(lookup_command)


@main.command("serve-store")
@click.argument("store", default="memory:")
@click.option("--listen", default="grpc://127.0.0.1:8815", show_default=True, metavar="URL")
@click.option("--token-file", type=click.Path(path_type=Path), help="Holds the token that clients must know.")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="Certificate chain, PEM, for grpc+tls.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its private key, PEM.")
@click.option("--insecure", is_flag=True, help="Serve other hosts without a token.")
@click.option("--ready-file", type=click.Path(path_type=Path), help="Is written the URL to, once it serves.")
@click.option("--grace", default=30.0, show_default=True, help="Seconds that requests get to finish.")
def serve_store(
    store: str,
    listen: str,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    insecure: bool,
    ready_file: Path | None,
    grace: float,
) -> None:
    """Serves the rows of STORE to trainers on other hosts.

    STORE is memory: (the default), shm://name, file:///path or a path. --listen takes grpc://host:port
    or grpc+tls://host:port; port 0 is any free one. The token may also be in the environment, in
    TORCHREC_EXT_STORE_TOKEN or in the file that TORCHREC_EXT_STORE_TOKEN_FILE names.

    SIGTERM and SIGINT finish what is under way, write files to the disk, and end it.
    """
    from torchrec_ext.errors import StoreError

    try:
        from torchrec_ext.store import LocalStore
        from torchrec_ext.store.flight.server import StoreServer
        from torchrec_ext.store.urls import environment_token, open_store, read_token
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"a store needs {error.name}, which is not installed: pip install torch"
        ) from error

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        if (tls_cert is None) != (tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        tls = None if tls_cert is None or tls_key is None else (tls_cert.read_bytes(), tls_key.read_bytes())
        token = read_token(token_file) if token_file else environment_token()
        if store.startswith(("grpc://", "grpc+tls://")):
            raise ValueError(f"{store} is served already")
        opened = open_store(store)
        assert isinstance(opened, LocalStore)
        server = StoreServer(opened, listen, token=token, tls=tls, insecure=insecure)
    except (StoreError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error

    if ready_file is not None:
        hidden = ready_file.with_name(f".{ready_file.name}.{os.getpid()}")
        hidden.write_text(server.url)
        hidden.replace(ready_file)
    click.echo(f"serving {store} on {server.url}")
    stop.wait()
    click.echo("finishing requests and closing the store")
    if not server.close(grace):
        # Their threads would keep the process from ending.
        click.echo(f"gave up on requests that took longer than {grace:g} s", err=True)
        os._exit(1)


_AUDIT_EXAMPLES = """\b
Examples:
  torchrec-ext audit checkpoints/1000
  torchrec-ext audit model.pt --json | jq .findings
  torchrec-ext audit model.pt --exclude attention.mask
  torchrec-ext audit checkpoints/1000 --repair checkpoints/1000.repaired
"""


@main.command("audit", epilog=_AUDIT_EXAMPLES)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as a JSON object.")
@click.option(
    "--repair",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="Write a copy in which what is damaged is initialized again. OUT must not exist.",
)
@click.option(
    "--max-magnitude",
    type=click.FloatRange(min=0, min_open=True),
    help="Larger weights are findings, and second moments larger than its square.  [default: 2^32]",
)
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Leave out tables of this name; may be repeated."
)
@click.pass_context
def audit(
    context: click.Context,
    checkpoint: Path,
    as_json: bool,
    repair: Path | None,
    max_magnitude: float | None,
    exclude: tuple[str, ...],
) -> None:
    """Looks for damaged, uninitialized and missing state in CHECKPOINT.

    CHECKPOINT is a directory of torch.distributed.checkpoint, a file of torch.save, or a saved snapshot of
    a store. Nothing that is in it is run, and it may be larger than memory.

    The exit code is 0 if it is clean, 1 if there are findings, 2 if it cannot be read or repaired, or nothing
    in it was audited.
    """
    from torchrec_ext.errors import CheckpointError

    try:
        from torchrec_ext.checkpoint.audit.audit import audit_checkpoint
        from torchrec_ext.checkpoint.audit.repair import repair_checkpoint
        from torchrec_ext.checkpoint.audit.report import printable
        from torchrec_ext.checkpoint.audit.values import MAX_MAGNITUDE
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"an audit needs {error.name}, which is not installed: pip install torch"
        ) from error

    limit = MAX_MAGNITUDE if max_magnitude is None else max_magnitude
    repairs = None
    try:
        with _progress("reading") as progress:
            if repair is None:
                report = audit_checkpoint(checkpoint, max_magnitude=limit, exclude=exclude, progress=progress)
            else:
                repairs = repair_checkpoint(
                    checkpoint, repair, max_magnitude=limit, exclude=exclude, progress=progress
                )
                report = repairs.audit
    except (CheckpointError, ValueError, OSError) as error:
        click.echo(f"Error: {printable(str(error))}", err=True)
        context.exit(2)
    if as_json:
        click.echo((repairs or report).to_json())
    else:
        click.echo(str(report))
    if repairs is not None:
        click.echo(str(repairs), err=as_json)
    if not report.slots or (repairs is not None and repairs.refused):
        context.exit(2)
    context.exit(0 if report.clean else 1)


@contextlib.contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Shows on a terminal how many of how many bytes are done, on stderr; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label=label, file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield show


if __name__ == "__main__":
    main()
