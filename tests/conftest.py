"""What all tests share."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine, and what else runs there, than about the code.
NO_CLOCK: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

# The same examples in every run; new ones in every run with --hypothesis-profile=explore.
settings.register_profile("same", derandomize=True, **NO_CLOCK)
settings.register_profile("explore", derandomize=False, **NO_CLOCK)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Commands log more than libraries do, and catch signals: no test sees what another one has run."""
    level = logging.getLogger().level
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    logging.getLogger().setLevel(level)
    for number, handler in handlers.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
