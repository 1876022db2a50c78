# Every target does all of its own set-up, once.
# Needs Python >= 3.11 and a package index. pip's own settings (PIP_INDEX_URL, ...) hold as usual.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
ARGS ?=
# Test processes, of one thread each.
JOBS ?= 2
# The same on a GPU, whose memory they share.
GPU_JOBS ?= 4

BIN := $(VENV)/bin

.PHONY: help install train test test-extended test-slow test-layouts test-benchmarks test-faults test-cluster test-gpu test-peers test-floor test-newest check format docs dist pages
.NOTPARALLEL:
.DELETE_ON_ERROR:

help:
	@echo "make train            train the quick start's GPT (ARGS='--flag value' adds flags)"
	@echo "make test             run the tests (ARGS='-k resume' adds pytest's)"
	@echo "make test-extended    repeat tests for further families, layouts, precisions, and extensions"
	@echo "make test-slow        run slow tests, which repeat others at larger sizes"
	@echo "make test-layouts     train whole runs in every layout that fits 4 processes"
	@echo "make test-benchmarks  run every benchmark at toy size"
	@echo "make test-faults      kill, stop and starve training runs, and compare their results"
	@echo "make test-cluster     run the job scripts in Slurm and under mpiexec, and train on two hosts"
	@echo "make test-gpu         run the tests that compare a CUDA GPU with a CPU"
	@echo "make test-peers       run the tests against Megatron-LM's own reader and writer"
	@echo "make test-floor       run the tests with the lowest versions of all libraries"
	@echo "make test-newest      run the tests with the newest versions of all libraries"
	@echo "make check            lint, format check, types, spelling, container"
	@echo "make format           format and sort imports"
	@echo "make docs             build the documentation into site/"
	@echo "make dist             build a wheel and an sdist into dist/, and check them"
	@echo "make pages            write the generated parts of docs/ (options, packages, diagrams)"
	@echo "make install          only make $(VENV) with everything for development"

train: $(VENV)/.core
	$(BIN)/python -m llm quickstart $(ARGS)

# Which of them: a condition on markers such as "not ranks", which .ci/run runs first.
PART ?=
ORDINARY := not slow and not faults and not layouts and not benchmarks and not cluster

# Files in their order, since xdist would start files with few but long tests last.
# The tests of `make test-gpu` are rehearsed on the CPU.
PYTEST := LLM_TEST_DEVICE=cpu OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.dev
	$(PYTEST) -m "$(ORDINARY) and not extended$(if $(PART), and ($(PART)))" $(ARGS)

# Only files with such tests are collected.
test-extended: $(VENV)/.dev
	$(PYTEST) -m "$(ORDINARY) and extended" $$(grep -rlE --include='test_*.py' 'mark.extended|every_family' tests) $(ARGS)

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow $(ARGS)

test-layouts: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m layouts $(ARGS)

test-benchmarks: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m benchmarks $(ARGS)

# Sequential, since some of them measure how soon a run ends.
test-faults: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m faults $(ARGS)

# In a real Slurm of virtual nodes, and under mpiexec; missing programs are skipped and named.
test-cluster: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster tests/cluster $(ARGS)

# On one GPU; without one they are skipped.
test-gpu: $(VENV)/.dev
	LLM_TEST_DEVICE=cuda $(BIN)/python -m pytest -n $(GPU_JOBS) -m gpu tests/gpu $(ARGS)

# The import fails where pytest would only skip.
test-peers: $(VENV)/.peers
	$(BIN)/python -W ignore -c 'import megatron.core.datasets.indexed_dataset'
	$(BIN)/python -m pytest tests/data/test_megatron_interop.py $(ARGS)

# In environments of several GB. Where no version is given, pip takes the newest.
test-floor: .venv-floor/lowest.txt
	@$(MAKE) test test-extended VENV=.venv-floor CONSTRAINTS=$<

.venv-floor/lowest.txt: pyproject.toml tests/support/lowest_versions.py
	@mkdir -p $(@D)
	@$(PYTHON) tests/support/lowest_versions.py >$@

test-newest:
	@rm -f .venv-newest/.core .venv-newest/.dev
	@PIP_UPGRADE=1 PIP_UPGRADE_STRATEGY=eager $(MAKE) test test-extended VENV=.venv-newest CONSTRAINTS=/dev/null

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/hadolint Containerfile

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(VENV)/.release
	$(BIN)/python .ci/dist.py

pages: $(VENV)/.core
	$(BIN)/python docs/generate.py

install: $(VENV)/.dev $(VENV)/.docs

# $(1): description for the log; $(2): requirement for pip. Quiet, unless it fails.
define pip_install
	@echo "Installing $(1) into $(VENV) (log: $(VENV)/pip.log) ..."
	@$(BIN)/python -m pip install -c $(CONSTRAINTS) -e "$(2)" >$(VENV)/pip.log 2>&1 \
		|| { cat $(VENV)/pip.log; exit 1; }
	@touch $@
endef

# An interrupted environment has no working pip, and is made again.
$(VENV)/.core: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is no Python >= 3.11; name one: make PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 \
		|| { echo "Making $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	$(call pip_install,llm-trainers and its libraries (PyTorch among them: this takes minutes),.)

$(VENV)/.dev: $(VENV)/.core
	$(call pip_install,the tools for tests and checks,.[dev])

$(VENV)/.docs: $(VENV)/.core
	$(call pip_install,the tools for the documentation,.[docs])

$(VENV)/.release: $(VENV)/.core
	$(call pip_install,the tools for a release,.[release])

$(VENV)/.peers: $(VENV)/.dev
	@echo "Installing megatron-core into $(VENV) (log: $(VENV)/pip.log) ..."
	@$(BIN)/python -m pip install -c $(CONSTRAINTS) megatron-core >$(VENV)/pip.log 2>&1 \
		|| { cat $(VENV)/pip.log; exit 1; }
	@touch $@
