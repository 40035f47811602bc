"""A dump directory as one HTML page that needs no network: ``write_report``."""

from __future__ import annotations

from torchrec_ext.report.page import write_report

__all__ = ["write_report"]
