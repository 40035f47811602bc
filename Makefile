# Every target first makes the environment in .venv; once it stands, nothing is installed again until
# requirements/cpu.txt or pyproject.toml changes. The documentation has its own, in .venv-docs.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
FEAST := .venv-feast
DOCS := .venv-docs
ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-recstore test test-feast bench lint typecheck wheel docs clean

help: ## Print this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(READY) ## Train on MovieLens in two processes, dumping deltas, and check them against the model
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc_per_node=2 \
		examples/movielens_online.py $(ARGS)

demo-recstore: $(READY) ## The same with embeddings in a store, read ahead of time
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc_per_node=2 \
		examples/movielens_recstore.py $(ARGS)

# Files side by side: a test's own processes wait for one another more than they compute.
test: $(READY) ## Run the tests; ARGS="-k zch" goes to pytest
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

test-feast: $(FEAST)/.installed ## Run the tests of the Feast sink, in an environment of their own
	$(FEAST)/bin/python -m pytest tests/publish/test_feast.py $(ARGS)

bench: $(READY) ## Run the benchmarks: prints a table, writes JSON to bench-results/
	$(BIN)/python -m tests.benchmarks $(ARGS)

lint: $(READY) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(READY) ## Check types
	$(BIN)/mypy torchrec_ext

# -I keeps the checkout off sys.path, so that the wheel is what gets imported.
wheel: $(READY) ## Build the wheel, and check that its reading side works without torch
	rm -rf dist build/wheel-venv
	$(BIN)/python -m build --no-isolation --quiet
	$(BIN)/python -m venv build/wheel-venv
	build/wheel-venv/bin/pip install --quiet --constraint requirements/cpu.txt dist/*.whl
	build/wheel-venv/bin/python -I -c 'import importlib.util as u; assert not u.find_spec("torch")'
	build/wheel-venv/bin/python -I -c 'import torchrec_ext; from torchrec_ext.delta import DeltaLog'
	build/wheel-venv/bin/torchrec-ext --help >/dev/null
	cd build/wheel-venv/lib/python*/site-packages/torchrec_ext && test -f py.typed && test -f report/assets/page.js

docs: $(DOCS)/.installed ## Build the documentation site in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

clean: ## Remove build outputs and caches; keeps environments and what was measured or dumped
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

# Why in these steps: see requirements/cpu.txt. Where pip's index offers a CUDA build of torch only,
# name an index that has the CPU build in PIP_EXTRA_INDEX_URL to save some gigabytes; both work.
$(READY): requirements/cpu.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or \
		sys.exit("the pinned stack needs Python 3.11 or newer: make PYTHON=/path/to/one")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --constraint requirements/cpu.txt torch
	$(BIN)/pip install --no-deps --requirement requirements/cpu.txt
	$(BIN)/pip install --no-deps --no-build-isolation --editable .
	touch $@

$(FEAST)/.installed: requirements/feast.txt pyproject.toml
	$(PYTHON) -m venv $(FEAST)
	$(FEAST)/bin/pip install --quiet --no-deps --requirement requirements/feast.txt
	$(FEAST)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(DOCS)/.installed: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --no-deps --requirement requirements/docs.txt
	touch $@
