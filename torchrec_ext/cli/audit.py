"""``torchrec-ext audit``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from torchrec_ext.cli.output import UserError, json_option, progress, user_errors

_EXAMPLES = """\b
Examples:
  torchrec-ext audit model.pt
  torchrec-ext audit model.pt --json > audited.json
  torchrec-ext audit model.pt --exclude attention.mask
  torchrec-ext audit model.pt --repair repaired.pt
"""


@click.command("audit", epilog=_EXAMPLES)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@json_option
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
def command(
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
    try:
        from torchrec_ext.checkpoint.audit.audit import audit_checkpoint
        from torchrec_ext.checkpoint.audit.repair import repair_checkpoint
        from torchrec_ext.checkpoint.audit.values import MAX_MAGNITUDE
    except ModuleNotFoundError as error:
        raise UserError(f"an audit needs {error.name}, which is not installed: pip install torch") from error

    options: dict[str, Any] = {
        "max_magnitude": MAX_MAGNITUDE if max_magnitude is None else max_magnitude,
        "exclude": exclude,
    }
    repairs = None
    with user_errors(), progress("reading") as shown:
        if repair is None:
            report = audit_checkpoint(checkpoint, progress=shown, **options)
        else:
            repairs = repair_checkpoint(checkpoint, repair, progress=shown, **options)
            report = repairs.audit
    if as_json:
        click.echo((repairs or report).to_json())
    else:
        click.echo(str(report))
    if repairs is not None:
        click.echo(str(repairs), err=as_json)
    if not report.slots or (repairs is not None and repairs.refused):
        context.exit(2)
    context.exit(0 if report.clean else 1)
