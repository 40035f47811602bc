"""A dumper's figures as TensorBoard scalars. Needs a writer, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torchrec_ext.delta.cut import DumpResult
    from torchrec_ext.delta.figures import DumpFigures


class ScalarWriter(Protocol):
    """What is needed of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Takes note of a value at a step."""


def write(result: DumpResult | None, writer: ScalarWriter, prefix: str = "delta") -> None:
    """Writes this rank's share of a dump as it is handed over: rows, bytes, the stall.

    Args:
        result: what ``DeltaDumper.step`` or ``dump`` returned; None, as of most steps, writes nothing.
        writer: a ``SummaryWriter``.
        prefix: of the tags.

    Example::

        write(dumper.step(step), writer)
    """
    if result is None:
        return
    values = {
        "upserts": result.upserts,
        "deletes": result.deletes,
        "vector_bytes": result.vector_bytes,
        "stall_ms": 1000 * result.stall_seconds,
    }
    for name, value in values.items():
        writer.add_scalar(f"{prefix}/{name}", value, result.step)


def write_figures(dumps: tuple[DumpFigures, ...], writer: ScalarWriter, prefix: str = "delta") -> None:
    """Writes what a report shows, of all ranks: rows, bytes, stalls, lag; per table norms, moves, occupancy.

    Args:
        dumps: of ``figures_of``.
        writer: a ``SummaryWriter``.
        prefix: of the tags.
    """
    for dump in dumps:
        step = dump.dump.step
        totals: dict[str, float] = dict.fromkeys(("updated", "admitted", "evicted", "deleted"), 0)
        values: dict[str, float] = {
            "bytes": dump.nbytes,
            "stall_ms": 1000 * dump.longest_stall_seconds,
        }
        if dump.lag_seconds is not None:
            values["lag_to_commit_ms"] = 1000 * dump.lag_seconds
        for fqn, table in dump.tables.items():
            for name in totals:
                totals[name] += getattr(table, name)
            values[f"occupancy/{fqn}"] = table.held / table.num_embeddings
            for name, spread in (("norm", table.norms), ("move", table.moves)):
                if spread is not None:
                    values |= {f"{name}_p50/{fqn}": spread.p50, f"{name}_max/{fqn}": spread.max}
        for name, value in {**totals, **values}.items():
            writer.add_scalar(f"{prefix}/{name}", value, step)
