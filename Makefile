# Everything starts here and works in .venv; `make help` lists it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SELDOM := /tests/|/site-packages/(transformers|ray|mlflow|databricks|sqlalchemy|numba|mypyc?|pip|setuptools|fontTools|pygments|onnxruntime|pyro|sentry_sdk|tensorboard)/# is compiled when somebody asks for it

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-gpu example docs bench bench-train bench-growth faults-numbers constraints licences sbom audit release-check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1@/' | awk -F@ '{printf "make %-14s %s\n", $$1, $$2}'

setup: $(READY) ## create .venv and install fedlas with all extras and the development tools

demo: $(READY) ## train five losses on handwritten digits and compare what their confidence is worth
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/fedlas demo --overwrite

test: $(READY) ## format, lint, types and the fast tests, as CI runs them (8 minutes on two cores)
	@scripts/browser
	@scripts/check

test-all: $(READY) ## all of that with every test, campaigns included, then the lowest supported versions (no time limit)
	@scripts/browser
	@scripts/check --all
	@scripts/lowest

test-gpu: $(READY) ## only the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

example: $(READY) ## train FeDLaS-LS on scikit-learn's digits beside plain label smoothing
	$(BIN)/python examples/digits.py

docs: $(READY) ## build the pages of docs/ into build/site, a site that can be read offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

bench: $(READY) ## time every loss against F.cross_entropy, and every metric against other libraries
	$(BIN)/python benchmarks/losses.py
	$(BIN)/python benchmarks/metrics.py

bench-train: $(READY) ## images per second of training, step by step from a plain loop to a captured graph; needs a GPU
	$(BIN)/python benchmarks/train.py

bench-growth: $(READY) ## how cost grows with samples, classes and width, with fitted exponents
	$(BIN)/python benchmarks/growth.py

faults-numbers: $(READY) ## the long campaigns: numbers, streams and files from strangers
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/fuzz_numbers.py --jobs 2 --seconds 1500 --resume
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/stream_numbers.py --n 50000000
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/strangers.py --copies 20

licences: $(READY) ## write docs/licences.md from what is installed
	@scripts/licences

sbom: $(READY) ## write a bill of materials to build/fedlas.cdx.json
	@$(BIN)/python scripts/supply.py sbom

audit: $(READY) ## ask a database of advisories about the pinned versions
	@$(BIN)/python scripts/supply.py audit

release-check: $(READY) ## build wheel and sdist, install each into an empty environment and try it
	@$(BIN)/python scripts/release_check

constraints: ## write the versions that .venv holds now to constraints.txt
	@scripts/constraints
	@touch $(READY)

clean: ## remove .venv, caches and build results
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is younger than the files it depends on, so a second call has nothing to install.
$(READY): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "fedlas needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Name another one, for example: PYTHON=python3.12 make test" >&2; \
	    exit 1; }; \
	  echo "Creating .venv and installing; this takes a few minutes, once."; \
	  $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }; \
	fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip setuptools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  --build-constraint constraints.txt --no-compile -e '.[all,dev]'
	@$(BIN)/python -W ignore -m compileall -qq -j 0 -x '$(SELDOM)' .venv/lib || true # pip would do one file after the other
	@touch $@
