"""What all tests share."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine, and what else runs there, than about the code.
NO_CLOCK: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

# The same examples in every run; new ones in every run with --hypothesis-profile=explore.
settings.register_profile("same", derandomize=True, **NO_CLOCK)
settings.register_profile("explore", derandomize=False, **NO_CLOCK)
settings.load_profile("same")
