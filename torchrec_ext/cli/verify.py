"""``torchrec-ext verify``."""

from __future__ import annotations

import click

from torchrec_ext.cli.output import (
    directory_argument,
    json_option,
    plain,
    print_json,
    progress,
    size,
    user_errors,
)
from torchrec_ext.terminal import counted, printable

_EXAMPLES = """\b
Examples:
  torchrec-ext verify deltas/
  torchrec-ext verify deltas/ --json > findings.json
  torchrec-ext verify deltas/ && torchrec-ext publish deltas/ parquet://snapshots/today
"""


@click.command("verify", epilog=_EXAMPLES)
@directory_argument
@json_option
@click.pass_context
def command(context: click.Context, directory: str, as_json: bool) -> None:
    """Looks for faults in DIR: reads every manifest, file and row, and tells all that is wrong.

    Checks checksums, the chain of dumps, schemas, counts, keys, ops, vectors, fallback rows and routing.
    Dumps that are just being written are no faults.

    The exit code is 0 if nothing is wrong, 1 if there are findings, 2 if DIR cannot be read or holds no dump.
    """
    from torchrec_ext.delta import verify_log

    with user_errors(), progress("reading") as shown:
        found = verify_log(directory, progress=shown)
    if as_json:
        print_json({"clean": found.clean, **plain(found)})
    else:
        for finding in found.findings:
            click.echo(f"FINDING  {printable(str(finding))}")
        verdict = counted(len(found.findings), "finding") if found.findings else "clean"
        if not found.findings and not found.dumps:
            verdict = "nothing was verified: there is no dump"
        read = ((found.dumps, "dump"), (found.files, "file"), (found.rows, "row"))
        click.echo(f"{verdict}; read {', '.join(counted(*one) for one in read)}, {size(found.nbytes)}")
    context.exit(1 if found.findings else 0 if found.clean else 2)
