# Every target makes what it needs: the environment, then the build. `make help` lists them.
#
# TORCH comes first, so that no version range of a later package pulls another build of it.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FUZZ_SECONDS ?= 3600
FAULTS ?= 10000
TRAIN_FLAGS ?= --mesh dp=2,pp=2,tp=2
PYTEST := $(BIN)/python -P -m pytest
# Two workers on two cores; each test that starts ranks forks them from one prepared server.
WORKERS ?= 2

.PHONY: help build train test test-fast test-long faults history sanitize fuzz lint types bench clean

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet 'setuptools>=77' 'pybind11>=2.12' 'ninja>=1.11'
	$(BIN)/python -m pip install --quiet --no-build-isolation -e '.[train,hf,bench,remote,dev]'
	touch $@

# Editable installs compile the extension once; a changed source is compiled again here, in place.
SOURCES := $(wildcard csrc/*.cpp csrc/*.hpp csrc/vendor/*.h)
$(VENV)/.built: $(STAMP) $(SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

build: $(VENV)/.built ## the environment in .venv and the C++ extension

train: build ## the main job: a small language model on 8 local ranks
	$(BIN)/plait train $(TRAIN_FLAGS)

test: build ## all tests, in three processes: plain, interpreter, offline compilation
	$(PYTEST) tests -n $(WORKERS) -m "not gpu and not long and not interpret and not offline"
	TRITON_INTERPRET=1 $(PYTEST) tests -n $(WORKERS) -m "interpret and not long"
	$(PYTEST) tests -n $(WORKERS) -m "offline and not long"

test-fast: build ## the tests that start no ranks and compile nothing
	$(PYTEST) tests -n $(WORKERS) -m "not gpu and not long and not interpret and not offline and not ranks"

test-long: build ## the longer walks: more kills, more faults, more grids
	$(PYTEST) tests -n $(WORKERS) -m "long and not gpu and not interpret"
	$(BIN)/python -m tests.walk --faults 10000
	TRITON_INTERPRET=1 $(PYTEST) tests -n $(WORKERS) -m "long and interpret"

faults: build ## 10,000 injected faults in saves, commits, copies and restores, counted; the record in tests/results
	$(BIN)/python -m tests.walk --faults $(FAULTS)

history: build ## 30 s of writers, readers and a pruner on one root, killed and stopped; the record in tests/results
	$(BIN)/python -m tests.walk --history 30

sanitize: build ## the extension's own tests on builds with ASan, UBSan and TSan
	$(BIN)/python -P tests/sanitize.py address
	$(BIN)/python -P tests/sanitize.py undefined
	$(BIN)/python -P tests/sanitize.py thread

# With atheris libFuzzer chooses by coverage; where it has no wheel, a seeded generator does.
fuzz: build ## damaged snapshots for all that reads one, for FUZZ_SECONDS (an hour)
	$(BIN)/python -m pip install --quiet --only-binary :all: 'atheris>=3.0' || true
	$(BIN)/python -m tests.fuzz_manifest --guided --seconds $(FUZZ_SECONDS)

lint: build ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: build ## mypy over the packages
	$(BIN)/mypy

bench: build ## the main job beside torch's own stack
	$(BIN)/plait bench train

clean: ## removes the environment and what was built; runs stay
	rm -rf $(VENV) build dist *.egg-info runtime/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
