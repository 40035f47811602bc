"""TorchRec extensions: embeddings in stores, and exact deltas of them from training to serving.

Names are resolved on first use, so that readers of a dump directory never import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_ext._lazy import lazy_attributes

if TYPE_CHECKING:
    from torchrec_ext.delta import DeltaDumper, DeltaLog
    from torchrec_ext.recstore import (
        RecStoreEmbeddingBagCollection,
        RecStoreEmbeddingBagCollectionSharder,
    )

__version__ = "0.1.0"
__all__ = [
    "DeltaDumper",
    "DeltaLog",
    "RecStoreEmbeddingBagCollection",
    "RecStoreEmbeddingBagCollectionSharder",
    "__version__",
]

if not TYPE_CHECKING:  # a type checker reads the imports above
    __getattr__ = lazy_attributes(
        __name__,
        {
            "DeltaDumper": "torchrec_ext.delta",
            "DeltaLog": "torchrec_ext.delta",
            "RecStoreEmbeddingBagCollection": "torchrec_ext.recstore",
            "RecStoreEmbeddingBagCollectionSharder": "torchrec_ext.recstore",
        },
    )
