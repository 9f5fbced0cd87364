# `make demo` and `make test` do their own set-up in .venv, on a machine with or without a GPU.
PYTHON ?= python3
VENV := .venv
# What pip installs as torch. Without a GPU a CPU build is enough, where your index has one.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo "torch>=2.8" || echo "torch==2.13.0")
PYTEST := $(VENV)/bin/python -m pytest

.PHONY: demo test bench example lint clean

demo: $(VENV)/installed
	$(VENV)/bin/draftgather demo

test: $(VENV)/installed
	$(PYTEST) tests

bench: $(VENV)/installed
	$(VENV)/bin/draftgather bench

# A prefill and a decode node over a real transfer engine, which needs libibverbs.so.1 (Debian: libibverbs1), over TCP too.
example: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet mooncake-transfer-engine-non-cuda==0.3.13.post1
	PYTHONPATH=examples $(VENV)/bin/python -m pd_pair

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict -p draftgather
	MYPYPATH=examples $(VENV)/bin/mypy --strict -p pd_pair

# An editable install links single files: a new file needs a new install.
$(VENV)/installed: setup.py pyproject.toml $(wildcard assembler/*.py kernels/*.py bench/*.py)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV)/bin/python -m pip install --quiet --editable ".[test,lint,plot,metrics]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
