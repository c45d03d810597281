# `make demo` and `make test` need only Python 3.11 to 3.13, a C++ compiler and a network that reaches PyPI.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= 3.9.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup build demo test lint gate bench wheel clean

setup: $(STAMP)

# torch is named with its version: a bare `torch` would bring gigabytes of CUDA packages to a CPU machine.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip "setuptools>=77" wheel ninja
	$(BIN)/python -m pip install -q "$(TORCH)" "triton==$(TRITON)" numpy safetensors
	$(BIN)/python -m pip install -q --no-build-isolation -e ".[dev]"
	touch $@

# Rebuilds the C++ extension in place.
build: $(STAMP)
	TILEWRIGHT_REQUIRE_CPP=1 $(BIN)/python setup.py -q build_ext --inplace
