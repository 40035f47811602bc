"""``verify_log``: reads all of a log, and tells everything that is wrong with it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.chain import in_chain_order, void_dumps
from torchrec_ext.delta.keys import NO_KEYS, Keys, difference, union
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import MANIFEST_NAME, DumpId, FileEntry, Manifest, TableInfo
from torchrec_ext.delta.verification.findings import Check, Findings, Verification
from torchrec_ext.delta.verification.rows import DumpRows
from torchrec_ext.errors import DeltaLogError, FileSchemaError, VacuumedError

_NAMED = re.compile(r"((?:step|base)_\d+\.g\d+(?:: \S+\.(?:parquet|json))?):? (.*)", re.DOTALL)


def verify_log(
    log: DeltaLog | str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Looks for faults in a log: in its manifests, their chain, its files and every row.

    What is being written, or was left half-written by a process that died, is no fault; nor is that
    ``vacuum`` took the files of superseded dumps. Memory: the keys of each table, and those of one dump.

    Args:
        log: a dump directory.
        progress: is told how many bytes of how many have been read.

    Raises:
        DeltaLogError: there is no such directory.
    """
    log = DeltaLog.of(log)
    return log.undisturbed(lambda: _verified(log, progress))


def _verified(log: DeltaLog, progress: Callable[[int, int], None] | None) -> Verification:
    findings = Findings()
    chain, bases = _listed(log, findings)
    return _Verifier(log, chain, bases, findings, progress).run()


def _listed(log: DeltaLog, findings: Findings) -> tuple[list[Manifest], dict[DumpId, Manifest]]:
    """The dumps whose manifests can be read, oldest first, and the bases, by the last dump in each."""
    with contextlib.suppress(DeltaLogError):
        chain, bases, _ = log.listing()
        return chain, bases
    # It stops at the first fault, and all are to be told.
    manifests: dict[DumpId, Manifest] = {}
    bases = {}
    for name in log.entries():
        if DumpId.from_directory(name) is None and DumpId.from_base_directory(name) is None:
            continue
        try:
            manifest = log.manifest(name)
        except DeltaLogError as error:
            _add(findings, "manifest", error, name, log)
        else:
            if manifest is not None:
                (bases if manifest.is_base else manifests)[manifest.dump] = manifest
    try:
        if not findings.found:  # else there is a gap for sure
            return in_chain_order(manifests, bases), bases
    except DeltaLogError as error:
        _add(findings, "chain", error, str(log.place), log)
    return [manifests[dump] for dump in sorted(manifests)], bases


def _add(findings: Findings, check: Check, error: Exception, where: str, log: DeltaLog) -> None:
    """Takes note of what a reader says; it names the log and the place in it first."""
    said = str(error).removeprefix(f"{log.place}: ")
    named = _NAMED.fullmatch(said)
    findings.add(check, *((named[1], named[2]) if named else (where, said)))


class _Verifier:
    def __init__(
        self,
        log: DeltaLog,
        chain: Sequence[Manifest],
        bases: Mapping[DumpId, Manifest],
        findings: Findings,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._log = log
        self._chain = chain
        self._bases = {base.dump: base for base in bases.values() if base not in chain}
        self._void = void_dumps(chain)
        self._findings = findings
        self._progress = progress
        self._total = sum(manifest.nbytes for manifest in (*chain, *self._bases.values()))
        self._dumps = self._files = self._rows = self._nbytes = 0
        self._known: dict[str, TableInfo] = {}
        # None: nobody knows which keys own a row, as a dump is missing.
        self._held: dict[str, Keys] | None = None if findings.found else {}

    def run(self) -> Verification:
        before: Manifest | None = None
        for manifest in self._chain:
            if before is not None and manifest.dump <= before.dump:
                message = f"follows {before.directory}, which is not older"
                self._findings.add("chain", manifest.directory, message)
            rows = self._check_dump(manifest)
            if rows is not None:
                self._check_superseded(manifest, rows)
            if not self._is_void(manifest):
                self._check_occupancy(manifest, rows)
            if (base := self._bases.pop(manifest.dump, None)) is not None:
                self._check_base(base, void=self._is_void(manifest))
            before = manifest
        for base in self._bases.values():  # of dumps that are gone
            self._check_dump(base)
        return Verification(
            str(self._log.place),
            self._dumps,
            self._files,
            self._rows,
            self._nbytes,
            self._findings.found,
        )

    def _is_void(self, manifest: Manifest) -> bool:
        return manifest.dump in self._void and not manifest.is_base

    def _check_dump(self, manifest: Manifest) -> DumpRows | None:
        """Checks a dump by itself; its rows, if all of them can be read."""
        self._dumps += 1
        self._check_tables(manifest)
        self._check_strays(manifest)
        rows = self._check_files(manifest)
        if rows is not None:
            rows.check_shards()
            rows.check_sums()
        return rows

    def _check_tables(self, manifest: Manifest) -> None:
        for fqn, info in manifest.tables.items():
            known = self._known.get(fqn, info)
            self._known[fqn] = info
            if (known.dim, known.key_space) != (info.dim, info.key_space):
                self._findings.add(
                    "table",
                    manifest.directory,
                    f"{fqn} has {info.key_space} keys and dimension {info.dim}, before it had "
                    f"{known.key_space} keys and dimension {known.dim}",
                )

    def _check_strays(self, manifest: Manifest) -> None:
        named = {entry.name for entry in (*manifest.parts, *manifest.fallbacks)} | {MANIFEST_NAME}
        for name in self._log.entries(manifest.directory):
            if name not in named and not name.startswith("."):
                where = f"{manifest.directory}: {name}"
                self._findings.add("file", where, "is not of this dump; readers that use a glob take it in")

    def _check_files(self, manifest: Manifest) -> DumpRows | None:
        """Checks the files of a dump; its rows, if all of them can be read."""
        rows = DumpRows(manifest, self._findings)
        whole = True
        for entry in manifest.fallbacks:
            whole &= self._check_file(manifest, entry, rows, fmt.FALLBACK_SCHEMA)
        for entry in manifest.parts:
            whole &= self._check_file(manifest, entry, rows, fmt.PART_SCHEMA)
        self._rows += rows.rows
        return rows if whole else None

    def _check_file(self, manifest: Manifest, entry: FileEntry, rows: DumpRows, schema: pa.Schema) -> bool:
        where = f"{manifest.directory}: {entry.name}"
        self._files += 1
        self._nbytes += entry.nbytes
        try:
            if self._is_void(manifest) and entry.name not in self._log.entries(manifest.directory):
                return False  # vacuum takes them
            self._log.checked_file(manifest, entry, schema)
            with self._log.opened(manifest, entry) as file:
                (rows.check_part if schema is fmt.PART_SCHEMA else rows.check_fallbacks)(entry, file)
        except VacuumedError:
            raise
        except FileSchemaError as error:
            for fault in error.faults:
                self._findings.add("schema", where, fault)
            return False
        except DeltaLogError as error:
            _add(self._findings, "file", error, where, self._log)
            return False
        except (pa.ArrowException, OSError, ValueError) as error:
            self._findings.add("file", where, f"cannot be read: {error}")
            return False
        finally:
            if self._progress is not None:
                self._progress(self._nbytes, self._total)
        return True

    def _check_superseded(self, manifest: Manifest, rows: DumpRows) -> None:
        """Checks that a dump says anew all that those said which it makes void, as far as they are there."""
        # Who supersedes a base may have listed its dumps before, and says what the void ones of them said.
        void = [o for o in self._chain if o.dump in manifest.supersedes and not o.is_base]
        try:
            history = self._log.history(void)
        except (DeltaLogError, pa.ArrowException):
            return  # is a finding already, or vacuum took the rows
        for fqn in manifest.tables:
            missing = difference(history.said_of(fqn), rows.said_of(fqn))
            what = f"{fqn}: keys of dumps that it supersedes, of which it says nothing"
            self._findings.add_keys("supersedes", manifest.directory, what, missing)
        self._findings.close(manifest.directory)

    def _check_occupancy(self, manifest: Manifest, rows: DumpRows | None) -> None:
        """Checks that no more keys own a row than there are rows."""
        if rows is None or self._held is None:
            self._held = None
            return
        for fqn, info in manifest.tables.items():
            held = difference(self._held.get(fqn, NO_KEYS), rows.said_of(fqn, fmt.DELETE))
            self._held[fqn] = held = union(held, rows.said_of(fqn, fmt.UPSERT))
            if len(held) > info.num_embeddings > 0:
                message = f"{fqn}: {len(held)} keys own a row of {info.num_embeddings}: deletes are missing"
                self._findings.add("occupancy", manifest.directory, message)

    def _check_base(self, base: Manifest, *, void: bool) -> None:
        """Checks that a base holds the keys that own a row after the dumps that it stands for."""
        rows = self._check_dump(base)
        if rows is None or void or self._held is None:
            return
        for fqn in base.tables:
            keys, held = rows.said_of(fqn, fmt.UPSERT), self._held.get(fqn, NO_KEYS)
            for what, found in (("missing", difference(held, keys)), ("too many", difference(keys, held))):
                self._findings.add_keys("base", base.directory, f"{fqn}: keys {what}", found)
        self._findings.close(base.directory)
