"""Tables without managed collision: which a model has, how they are cut into shards, what is looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_ext._lazy import lazy_attributes

if TYPE_CHECKING:
    from torchrec_ext.plain.discovery import find_plain_tables
    from torchrec_ext.plain.lookups import LookupWatch
    from torchrec_ext.plain.tables import PlainTable, TablePart

__all__ = ["LookupWatch", "PlainTable", "TablePart", "find_plain_tables"]

if not TYPE_CHECKING:  # a type checker reads the imports above
    __getattr__ = lazy_attributes(
        __name__,
        {
            "LookupWatch": "torchrec_ext.plain.lookups",
            "PlainTable": "torchrec_ext.plain.tables",
            "TablePart": "torchrec_ext.plain.tables",
            "find_plain_tables": "torchrec_ext.plain.discovery",
        },
    )
