"""The last mile: committed dumps into a store that serves, and the client that answers from it.

Training side: ``publish`` into what ``open_sink`` opens. Serving side: ``EmbeddingClient``. Neither needs
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_ext._lazy import lazy_attributes
from torchrec_ext.errors import PublishError, SinkUnavailableError

if TYPE_CHECKING:
    from torchrec_ext.publish.changes import Change
    from torchrec_ext.publish.client import EmbeddingClient
    from torchrec_ext.publish.publisher import Published, publish
    from torchrec_ext.publish.served import Position, ServedTable
    from torchrec_ext.publish.sink import Sink, open_sink

__all__ = [
    "Change",
    "EmbeddingClient",
    "Position",
    "PublishError",
    "Published",
    "ServedTable",
    "Sink",
    "SinkUnavailableError",
    "open_sink",
    "publish",
]

if not TYPE_CHECKING:  # a type checker reads the imports above
    __getattr__ = lazy_attributes(
        __name__,
        {
            "Change": "torchrec_ext.publish.changes",
            "EmbeddingClient": "torchrec_ext.publish.client",
            "Position": "torchrec_ext.publish.served",
            "Published": "torchrec_ext.publish.publisher",
            "ServedTable": "torchrec_ext.publish.served",
            "Sink": "torchrec_ext.publish.sink",
            "open_sink": "torchrec_ext.publish.sink",
            "publish": "torchrec_ext.publish.publisher",
        },
    )
