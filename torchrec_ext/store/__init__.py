"""Where rows and their optimizer state live: in this process, on this host, on disk, on another host."""

from __future__ import annotations
