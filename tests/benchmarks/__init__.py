"""Benchmarks: ``python -m tests.benchmarks``.

One module each, with a function ``run(quick: bool) -> Result``, named in ``__main__.BENCHMARKS``. Each
runs in a process of its own. What is compared runs side by side in that process, in shuffled order, and
the medians of paired ratios count: machines have slow phases, which then slow both sides.
"""
