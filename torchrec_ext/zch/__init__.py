"""What this package knows of TorchRec's managed collision (ZCH): tables, bindings, routing, evictions.

Only this folder reads TorchRec's private managed-collision attributes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_ext._lazy import lazy_attributes
from torchrec_ext.zch.routing import NO_ID, ShardRouting

if TYPE_CHECKING:
    from torchrec_ext.zch.binding import RowBinding
    from torchrec_ext.zch.discovery import ZchTable, find_zch_tables, has_unsharded_zch
    from torchrec_ext.zch.sharders import (
        ZchEmbeddingBagCollectionSharder,
        ZchEmbeddingCollectionSharder,
    )
    from torchrec_ext.zch.watch import ZchWatch

__all__ = [
    "NO_ID",
    "RowBinding",
    "ShardRouting",
    "ZchEmbeddingBagCollectionSharder",
    "ZchEmbeddingCollectionSharder",
    "ZchTable",
    "ZchWatch",
    "find_zch_tables",
    "has_unsharded_zch",
]

if not TYPE_CHECKING:  # a type checker reads the imports above
    __getattr__ = lazy_attributes(
        __name__,
        {
            "RowBinding": "torchrec_ext.zch.binding",
            "ZchEmbeddingBagCollectionSharder": "torchrec_ext.zch.sharders",
            "ZchEmbeddingCollectionSharder": "torchrec_ext.zch.sharders",
            "ZchTable": "torchrec_ext.zch.discovery",
            "ZchWatch": "torchrec_ext.zch.watch",
            "find_zch_tables": "torchrec_ext.zch.discovery",
            "has_unsharded_zch": "torchrec_ext.zch.discovery",
        },
    )
