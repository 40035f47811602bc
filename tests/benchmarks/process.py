"""Runs a benchmark in a process of its own."""

from __future__ import annotations

import importlib
import logging
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor

from tests.benchmarks.results import Result


def run_alone(name: str, quick: bool) -> Result:
    """Calls ``run`` of the module ``name`` of this package in a fresh process."""
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as process:
        return process.submit(_run, name, quick).result()


def _run(name: str, quick: bool) -> Result:
    module = importlib.import_module(f"tests.benchmarks.{name}")
    for noisy in ("torch", "torchrec"):  # only now: importing torch sets its levels anew
        logging.getLogger(noisy).setLevel(logging.ERROR)
    return module.run(quick)
