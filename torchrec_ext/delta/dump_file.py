"""A file of a committed dump, which ``vacuum`` may remove at any moment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow.parquet as pq

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.chain import void_dumps
from torchrec_ext.delta.listing import Listing, list_log
from torchrec_ext.delta.manifest import Manifest
from torchrec_ext.delta.places import Place, PlacedFile
from torchrec_ext.errors import DeltaLogError, MissingFileError, VacuumedError


@dataclass(frozen=True)
class DumpFile(PlacedFile):
    """A file that a dump's manifest lists.

    Errors of whatever is done with it name it. If it is not there, they tell whether ``vacuum`` removed it,
    and a reader has to list the dumps again, or whether it is missing from the log.

    Attributes:
        dump: the dump.
    """

    dump: Manifest = field(compare=False, repr=False)

    @classmethod
    def of(cls, place: Place, dump: Manifest, name: str) -> DumpFile:
        """One of a dump's files."""
        return cls(place, dump.directory, name, dump)

    def row_groups(self, file: pq.ParquetFile) -> Iterator[tuple[int, str]]:
        """Its row groups, once it is open: index, and the table that all its rows belong to.

        Raises:
            ValueError: as ``format.row_groups``, or the manifest does not list the table; ``open`` makes a
                ``DeltaLogError`` of it that names the file.
        """
        for index, fqn in fmt.row_groups(file):
            if fqn not in self.dump.tables:
                raise ValueError(f"rows of {fqn}, which its manifest does not list")
            yield index, fqn

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """See ``PlacedFile``.

        Raises:
            VacuumedError: it was removed, and something else holds its rows.
            DeltaLogError: it is missing, cannot be read, or is not what ``format`` says.
        """
        try:
            with super().explained():
                yield
        except MissingFileError:
            _check_not_vacuumed(self.place, self.dump)
            raise
        except ValueError as error:
            raise DeltaLogError(f"{self}: {error}") from error


def taken_by(base: Manifest) -> str:
    """What to say of dumps that a base has taken the place of."""
    return f"the dumps up to step {base.step} were compacted into {base.directory} and removed by vacuum"


def _check_not_vacuumed(place: Place, dump: Manifest) -> None:
    listing = list_log(place)
    if dump.dump in void_dumps(listing.chain) and not dump.is_base:
        raise VacuumedError(
            f"{place}: {dump.directory} was superseded, and its rows were removed by vacuum: "
            "list the dumps again"
        )
    check_listed(place, dump, listing)


def check_listed(place: Place, dump: Manifest, listing: Listing) -> None:
    """Checks that nothing has taken the place of a dump, or of a base.

    Raises:
        VacuumedError: a base has.
    """
    chain, bases, strays = listing
    listed = bases.values() if dump.is_base else [*chain, *strays]
    newer = [base for base in bases.values() if base.dump >= dump.dump]
    if newer and dump.directory not in {other.directory for other in listed}:
        raise VacuumedError(f"{place}: {dump.directory} is gone: {taken_by(newer[0])}. List the dumps again")
