"""``torchrec-ext serve-store``."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import click

from torchrec_ext.cli.output import UserError, set_by_signals, user_errors
from torchrec_ext.waits import wait_until_set

_EXAMPLES = """\b
Examples:
  torchrec-ext serve-store file:///data/rows --listen grpc://0.0.0.0:8815 --token-file token
  torchrec-ext serve-store --ready-file url
"""


@click.command("serve-store", epilog=_EXAMPLES)
@click.argument("store", default="memory:")
@click.option("--listen", default="grpc://127.0.0.1:8815", show_default=True, metavar="URL")
@click.option("--token-file", type=click.Path(path_type=Path), help="Holds the token that clients must know.")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="Certificate chain, PEM, for grpc+tls.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its private key, PEM.")
@click.option("--insecure", is_flag=True, help="Serve other hosts without a token.")
@click.option("--ready-file", type=click.Path(path_type=Path), help="Is written the URL to, once it serves.")
@click.option("--grace", default=30.0, show_default=True, help="Seconds that requests get to finish.")
def command(
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

    SIGTERM and SIGINT finish what is under way, write files to the disk, and end it. The exit code is then
    0, or 1 if requests took longer than --grace; 2 if it cannot serve.
    """
    try:
        from torchrec_ext.store import LocalStore
        from torchrec_ext.store.flight.server import StoreServer
        from torchrec_ext.store.urls import environment_token, open_store, read_token
    except ModuleNotFoundError as error:
        raise UserError(f"a store needs {error.name}, which is not installed: pip install torch") from error

    logging.getLogger().setLevel(logging.INFO)  # it runs for long, and tells what it does
    stop = set_by_signals()
    with user_errors():
        if (tls_cert is None) != (tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        tls = None if tls_cert is None or tls_key is None else (tls_cert.read_bytes(), tls_key.read_bytes())
        token = read_token(token_file) if token_file else environment_token()
        if store.startswith(("grpc://", "grpc+tls://")):
            raise ValueError(f"{store} is served already")
        opened = open_store(store)
        assert isinstance(opened, LocalStore)
        server = StoreServer(opened, listen, token=token, tls=tls, insecure=insecure)

    if ready_file is not None:
        hidden = ready_file.with_name(f".{ready_file.name}.{os.getpid()}")
        hidden.write_text(server.url)
        hidden.replace(ready_file)
    click.echo(f"serving {store} on {server.url}")
    wait_until_set(stop)
    click.echo("finishing requests and closing the store")
    if not server.close(grace):
        # Their threads would keep the process from ending.
        click.echo(f"gave up on requests that took longer than {grace:g} s", err=True)
        os._exit(1)
