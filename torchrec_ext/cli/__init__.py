"""The command ``torchrec-ext``: one module per command, imported when the command is used.

Exit codes of all commands: 0, fine; 1, findings; 2, wrong usage, or what was named cannot be read or
written; 3, a sink did not answer; 130, interrupted.
"""

from __future__ import annotations

import logging

import click

from torchrec_ext import __version__
from torchrec_ext.cli.lazy import Command, LazyGroup
from torchrec_ext.cli.output import log_to_stderr

_COMMANDS = {
    "inspect": Command("inspect", "Shows what is in a dump directory."),
    "verify": Command("verify", "Looks for faults in a dump directory."),
    "diff": Command("diff", "Shows which ids came, went and moved between two steps."),
    "lookup": Command("lookup", "Shows what the model answers for some ids."),
    "replay": Command("replay", "Writes the rows that a model holds into one Parquet file."),
    "report": Command("report", "Draws a dump directory as one HTML page."),
    "compact": Command("compact", "Writes one base that stands for many dumps."),
    "vacuum": Command("vacuum", "Removes dumps that nobody needs any more."),
    "publish": Command("publish", "Publishes dumps to a store that serves."),
    "audit": Command("audit", "Looks for damaged, uninitialized and missing state in a checkpoint."),
    "serve-store": Command("serve_store", "Serves the rows of a store to trainers on other hosts."),
}

_EPILOG = """\b
Examples:
  torchrec-ext inspect deltas/
  torchrec-ext publish deltas/ redis://localhost:6379/0 --follow
  torchrec-ext report deltas/ --out report.html

Each command has examples: torchrec-ext COMMAND --help. Exit codes: 0 fine, 1 findings, 2 wrong usage or
unreadable, 3 a sink does not answer.
"""


@click.group(
    cls=LazyGroup,
    commands_by_name=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_EPILOG,
)
@click.version_option(__version__, prog_name="torchrec-ext")
@click.option("-v", "--verbose", is_flag=True, help="Log what is being done, on stderr.")
def main(verbose: bool) -> None:
    """TorchRec extensions: fresh embeddings, from training to serving."""
    log_to_stderr(logging.INFO if verbose else logging.WARNING)
