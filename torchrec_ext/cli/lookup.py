"""``torchrec-ext lookup``."""

from __future__ import annotations

import json

import click

from torchrec_ext.cli.output import UserError, user_errors

_EXAMPLES = """\b
Examples:
  torchrec-ext lookup deltas/ mc.user_table 17 42
  torchrec-ext lookup redis://localhost:6379/0 mc.user_table 17 -- -3
  torchrec-ext lookup deltas/ mc.user_table 17 42 --json > vectors.jsonl
"""


@click.command("lookup", epilog=_EXAMPLES, context_settings={"ignore_unknown_options": True})
@click.argument("where", metavar="DIR_OR_URL")
@click.argument("table")
@click.argument("ids", metavar="ID...", nargs=-1, required=True, type=int)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per id, on standard output.")
def command(where: str, table: str, ids: tuple[int, ...], as_json: bool) -> None:
    """Shows what the model answers for the IDs of TABLE, at the last dump in DIR or published at URL.

    An id that was evicted, or was never known, gets what the model would answer. The exit code is 0, 2 if
    there is no such table or nothing was published, 3 if the sink does not answer.
    """
    from torchrec_ext.publish import EmbeddingClient

    with user_errors(), EmbeddingClient(where) as client:
        try:
            vectors = client.lookup(table, ids)
        except KeyError as error:
            raise UserError(str(error.args[0])) from error
    for key, vector in zip(ids, vectors.tolist(), strict=True):
        if as_json:
            click.echo(json.dumps({"id": key, "embedding": vector}))
        else:
            click.echo(f"{key}\t[{', '.join(f'{value:.6g}' for value in vector)}]")
