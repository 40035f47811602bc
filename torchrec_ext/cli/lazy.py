"""A group of commands whose modules are imported when they are used, so that ``--help`` is quick."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

_INTERRUPTED = 130  # what shells report of a program that Ctrl-C ended


@dataclass(frozen=True)
class Command:
    """A command that is not imported yet.

    Attributes:
        module: its module in this package, which has it as ``command``.
        summary: the first line of its help.
    """

    module: str
    summary: str

    def load(self) -> click.Command:
        """Imports it."""
        command = importlib.import_module(f"torchrec_ext.cli.{self.module}").command
        assert isinstance(command, click.Command)
        return command


class LazyGroup(click.Group):
    """A group of commands that are imported when they are used.

    Args:
        commands_by_name: the commands, in the order in which the help lists them.
        kwargs: of ``click.Group``.
    """

    def __init__(self, *, commands_by_name: Mapping[str, Command], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.commands_by_name = commands_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See ``click.Group``."""
        return list(self.commands_by_name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See ``click.Group``."""
        known = self.commands_by_name.get(cmd_name)
        return None if known is None else known.load()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands, importing none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, known.summary) for name, known in self.commands_by_name.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """See ``click.Group``."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)
