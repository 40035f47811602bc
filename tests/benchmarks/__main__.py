"""Runs the benchmarks, prints a table of each and writes all of them to ``bench-results/``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from tests.benchmarks.machine import Machine
from tests.benchmarks.process import run_alone

BENCHMARKS = ("dumper", "delta_cost", "writing", "scaling", "recstore", "prefetch", "dynamic_keys", "publish")
OUTPUT = Path(__file__).parents[2] / "bench-results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=BENCHMARKS, help="just this one; repeatable")
    parser.add_argument("--quick", action="store_true", help="few repetitions: shows that it runs")
    arguments = parser.parse_args()

    machine = Machine.this()
    print(machine, flush=True)
    results = []
    for name in arguments.only or BENCHMARKS:
        print(f"running {name} ...", file=sys.stderr)
        result = run_alone(name, arguments.quick)
        print(f"\n{result.table()}", flush=True)
        results.append(result)

    OUTPUT.mkdir(exist_ok=True)
    path = OUTPUT / f"{datetime.now():%Y%m%dT%H%M%S}.json"
    document = {
        "machine": asdict(machine),
        "quick": arguments.quick,
        "benchmarks": {result.name: result.to_json() for result in results},
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
