"""``python -m torchrec_ext.cli``."""

from __future__ import annotations

from torchrec_ext.cli import main

main(prog_name="torchrec-ext")
