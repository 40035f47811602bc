"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# The same examples in every run; new ones in every run with --hypothesis-profile=explore.
settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile("same")
