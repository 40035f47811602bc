"""The numbers of the steps that a dumper is told of: they grow, whatever comes between."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec_ext.delta.arguments import is_integer


@dataclass
class Steps:
    """Which steps there were.

    Attributes:
        last: the last that ``step`` was told of.
        dumped: the last that was dumped.
        resumed: that of the checkpoint from which training went on.
    """

    last: int | None = None
    dumped: int | None = None
    resumed: int | None = None

    def take(self, global_step: int) -> int:
        """Takes note of a step that is over.

        Raises:
            ValueError: its number does not grow.
        """
        global_step = checked_step(global_step, self.resumed if self.last is None else self.last)
        if global_step != self.dumped:
            checked_step(global_step, self.dumped)
        self.last = global_step
        return global_step

    def checked_dump(self, global_step: int) -> int:
        """The step of a dump that somebody asks for.

        Raises:
            ValueError: its number does not grow.
        """
        if self.dumped is None and self.resumed is not None:
            checked_step(global_step, self.resumed - 1)  # of this step there may be none yet
        global_step = checked_step(global_step, self.dumped)
        if global_step != self.last:
            checked_step(global_step, self.last)
        return global_step

    @property
    def told(self) -> int | None:
        """The newest step that is known: taken, dumped or resumed from."""
        known = [step for step in (self.resumed, self.dumped, self.last) if step is not None]
        return max(known, default=None)

    @property
    def undumped(self) -> int | None:
        """The last step, if it was not dumped."""
        last = -1 if self.dumped is None else self.dumped
        return self.last if self.last is not None and self.last > last else None


def checked_step(global_step: int, before: int | None) -> int:
    """A step's number, after a check that it comes after another.

    Raises:
        ValueError: it does not, or is no number of a step.
    """
    if not is_integer(global_step) or global_step < 0:
        raise ValueError(f"global_step must be an integer >= 0, not {global_step!r}")
    if before is not None and global_step <= before:
        raise ValueError(
            f"global_step must grow: got {global_step} after {before}. After a restart, construct a "
            "new DeltaDumper on the same directory, load the checkpoint and call resume()"
        )
    return int(global_step)
