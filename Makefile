# `make quickstart` and `make test` need nothing but Python 3.11 or 3.12, make and a C library: each sets up .venv first.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements/constraints.txt
# The CPU build of torch; a GPU machine sets TORCH=2.11.0 (what the pinned SGLang is built for).
TORCH ?= 2.13.0
# Tests that start processes share two cores badly with more workers than this.
TEST_WORKERS ?= 2

.PHONY: quickstart install install-dev install-sglang browser ready check unit test test-main test-sglang test-full test-gpu format lint types imports

quickstart: install
	.venv/bin/fuligo quickstart $(ARGS)

install: .venv/.installed

install-dev: .venv/.installed-dev

.venv/.installed: pyproject.toml requirements/constraints.txt
	@test -n "$(PYTHON)" || { echo "fuligo needs Python 3.11 or 3.12 on the PATH (or: make PYTHON=/path/to/python3.11)"; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(PIP) torch==$(TORCH)
	$(PIP) --editable .
	touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) --editable .[dev]
	touch $@

# SGLang and its router have an environment of their own: engines are processes that fuligo only starts and talks to.
install-sglang: .venv-sglang/.installed

.venv-sglang/.installed: requirements/sglang-cpu.txt
	@test -n "$(PYTHON)" || { echo "SGLang needs Python 3.11 on the PATH (or: make PYTHON=/path/to/python3.11)"; exit 1; }
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements/sglang-cpu.txt
	touch $@

# Tests of pages need a real browser. Where there is none and we may install Debian's, we do; else they skip and say so.
browser:
	@if ! { command -v chromium-headless-shell || command -v chromium; } >/dev/null && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null \
		|| echo "Chromium cannot be installed: the tests of pages are skipped"; fi

# Everything that is fast enough to run while working. The type checker has one core, the tests share both.
check: format
	+@$(MAKE) --no-print-directory --jobs 2 --output-sync=target types lint imports unit

unit: install-dev
	.venv/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m "not gpu and not slow and not sglang" tests/unit

# The checks keep one core busy while SGLang is installed on the other.
ready: install-dev
	+@$(MAKE) --no-print-directory --jobs 2 --output-sync install-sglang browser lint types imports

# SGLang engines leave part of the machine idle while they start, and the other tests use it.
test: ready
	+@$(MAKE) --no-print-directory --jobs 2 --output-sync=line --keep-going test-main test-sglang

test-main: install-dev
	.venv/bin/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "not gpu and not slow and not sglang"

test-sglang: install-sglang install-dev
	.venv/bin/python -m pytest tests/sglang tests/cluster -m "sglang and not slow"

test-full: ready
	.venv/bin/python -m pytest -n $(TEST_WORKERS) --dist worksteal --hypothesis-profile full -m "not gpu and not sglang"
	.venv/bin/python -m pytest tests/sglang tests/cluster -m sglang

test-gpu: install-dev
	.venv/bin/python -m pytest tests/gpu -m gpu

format: install-dev
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

lint: install-dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/python scripts/check_docstrings.py

types: install-dev
	.venv/bin/basedpyright

imports: install-dev
	.venv/bin/lint-imports
