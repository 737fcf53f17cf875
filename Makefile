# All tasks of the project; they use the environment in .venv. `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO_READY := .venv/.ready-demo
TOOLS := build/tools
# Large packages of which few modules are imported: their bytecode is compiled at the first import, not at set-up.
COMPILE_ON_IMPORT := /tests/|/site-packages/(transformers|ray|mlflow|databricks|sqlalchemy|numba|mypyc?|pip|setuptools|fontTools|pygments|onnxruntime|pyro|sentry_sdk|tensorboard)/

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-gpu example docs bench bench-train bench-growth faults-numbers constraints licences sbom audit release-check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1@/' | awk -F@ '{printf "make %-14s %s\n", $$1, $$2}'

setup: $(READY) ## create .venv and install fedlas with all extras and the development tools

demo: $(or $(wildcard $(READY)),$(DEMO_READY)) ## train five losses on handwritten digits, compare their calibration, write an HTML report
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/fedlas demo

test: $(READY) ## run format, lint, type checks and the fast tests, as CI does (8 minutes on two cores)
	@scripts/browser
	@scripts/check

test-all: $(READY) ## run every test, campaigns included, then the tests with the lowest supported versions (no time limit)
	@scripts/browser
	@scripts/check --all
	@scripts/lowest

test-gpu: $(READY) ## run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

example: $(READY) ## train FeDLaS-LS on scikit-learn's digits beside plain label smoothing
	$(BIN)/python examples/digits.py

docs: $(READY) ## build the documentation into build/site; it can be read offline
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

bench: $(READY) ## time every loss against F.cross_entropy, and every metric against other libraries
	$(BIN)/python benchmarks/losses.py
	$(BIN)/python benchmarks/metrics.py

bench-train: $(READY) ## measure images per second, from a plain training loop to a captured CUDA graph; needs a GPU
	$(BIN)/python benchmarks/train.py

bench-growth: $(READY) ## measure how time and memory grow with samples, classes and width
	$(BIN)/python benchmarks/growth.py

faults-numbers: $(READY) ## run the long fuzzing campaigns: numerics and untrusted files
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/fuzz_numbers.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/untrusted_files.py --copies 20

licences: $(READY) $(TOOLS) ## write the licences of all installed packages to build/licences.md
	$(TOOLS)/bin/pip-licenses --python $(BIN)/python --format markdown --output-file build/licences.md

sbom: $(READY) $(TOOLS) ## write a CycloneDX bill of materials to build/fedlas.cdx.json
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --of JSON -o build/fedlas.cdx.json $(BIN)/python

audit: $(TOOLS) ## look up the versions in constraints.txt in a database of vulnerabilities
	$(TOOLS)/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

release-check: $(READY) $(TOOLS) ## build sdist and wheel, check both, and try the wheel in an environment of its own
	@scripts/release_check

constraints: ## write the versions installed in .venv to constraints.txt
	@scripts/constraints
	@touch $(READY)

clean: ## remove .venv, caches and build results
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Create .venv, then install with $(EXTRAS) and $(CONSTRAINTS), which each stamp below sets. A stamp newer than these files means that nothing has changed.
define install
	@if [ ! -x $(BIN)/python ]; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "fedlas needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
	    echo "Choose another interpreter, for example: PYTHON=python3.12 make test" >&2; \
	    exit 1; }; \
	  echo "Creating .venv and installing; this takes a few minutes, once."; \
	  $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }; \
	fi
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip setuptools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) \
	  --build-constraint constraints.txt --no-compile -e '.[$(EXTRAS)]'
endef

$(READY): EXTRAS := all,dev
$(READY): CONSTRAINTS := -c constraints.txt
$(READY): pyproject.toml constraints.txt
	$(install)
	@$(BIN)/python -W ignore -m compileall -qq -j 0 -x '$(COMPILE_ON_IMPORT)' .venv/lib || true # in parallel; pip's is serial
	@touch $@

# A torch that is already in .venv is kept, with whatever versions it needs.
$(DEMO_READY): EXTRAS := demo
$(DEMO_READY): CONSTRAINTS = $$($(BIN)/python -m pip show --quiet torch 2> /dev/null || echo -c constraints.txt)
$(DEMO_READY): pyproject.toml constraints.txt
	$(install)
	@touch $@

# Tools of releases, apart from .venv. They are not pinned: an audit should use the newest.
$(TOOLS):
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  build twine check-wheel-contents pip-audit cyclonedx-bom pip-licenses hatchling || { rm -rf $@; exit 1; }
