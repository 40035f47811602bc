"""Which place a path or a URI means."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow.fs as pafs

from torchrec_ext.delta.places.local import LocalPlace
from torchrec_ext.delta.places.place import Place
from torchrec_ext.delta.places.remote import OBJECT_STORES, RemotePlace, kind_of, said
from torchrec_ext.urls import without_credentials

SCHEMES = ("file", "s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss")
"""Of the URIs that name a place."""


def open_place(where: str | os.PathLike[str] | pafs.FileSystem | Place) -> Place:
    """The place that a path, a URI or a file system of PyArrow means; of the last it is the root.

    Raises:
        ValueError: it is a URI that PyArrow does not take.
        OSError: it was not reached.
    """
    if isinstance(where, Place):
        return where
    if isinstance(where, pafs.FileSystem):
        base = where.base_fs if isinstance(where, pafs.SubTreeFileSystem) else where
        root = where.base_path if isinstance(where, pafs.SubTreeFileSystem) else ""
        return RemotePlace(base, root.strip("/") if kind_of(base) in OBJECT_STORES else root.rstrip("/"))
    text = os.fspath(where)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return LocalPlace(Path(text))
    if scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"{without_credentials(text)}: it must be a path, or a URI of {known}")
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc or not parts.path:
            raise ValueError(f"{text}: a local file's URI is file:///absolute/path")
        return LocalPlace(Path(unquote(parts.path)))
    try:
        filesystem, root = pafs.FileSystem.from_uri(text)
    except Exception as error:
        why = said(error, text)
        kind = OSError if isinstance(error, OSError) else ValueError
        # Not "from error", whose text may quote the URI.
        raise kind(f"{without_credentials(text)} cannot be opened: {why}") from None
    if not root.strip("/"):
        raise ValueError(f"{without_credentials(text)} names no directory")
    return RemotePlace(filesystem, root.rstrip("/"), text)
