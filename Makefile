# `make quickstart`, `make check` and `make test` need only Python 3.11 or 3.12 and a C library; each sets up .venv first.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
PIP := -m pip install --quiet --disable-pip-version-check
# Every file must have a hash of requirements/hashed/, except torch for CPUs, which comes from another index.
HASHED := $(PIP) --no-deps --require-hashes --requirement requirements/hashed
# Version of torch for CPUs. On GPUs it is that of requirements/gpu.txt, which the pinned SGLang is built for.
TORCH ?= 2.13.0
# Workers of pytest. A third slows the others down on two cores: many tests start processes, and engines that wait for a core lose time.
TEST_WORKERS ?= 2
# Tests start many processes, which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart install install-dev install-sglang install-verifiers install-gpu browser ready check unit test test-main test-servers test-verifiers test-full test-gpu chaos format lint licenses lock types imports

quickstart: install
	.venv/bin/fuligo quickstart $(ARGS)

install: .venv/.installed

install-dev: .venv/.installed-dev

.venv/.installed: pyproject.toml requirements/constraints.txt requirements/hashed/base.txt
	@test -n "$(PYTHON)" || { echo "fuligo needs Python 3.11 or 3.12 on the PATH (or: make PYTHON=/path/to/python3.11)"; exit 1; }
	@test ! -e .venv/.for-gpus || { echo "pyproject.toml or requirements/ have changed since make install-gpu; run it again"; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python $(HASHED)/base.txt
	.venv/bin/python $(PIP) --constraint requirements/constraints.txt torch==$(TORCH)
	.venv/bin/python $(PIP) --no-deps --no-build-isolation --editable .
	touch $@

.venv/.installed-dev: .venv/.installed requirements/hashed/dev.txt
	.venv/bin/python $(HASHED)/dev.txt
	touch $@

# SGLang and its router have their own environment, since fuligo only starts them and talks to them.
install-sglang: .venv-sglang/.installed

.venv-sglang/.installed: requirements/hashed/sglang-cpu.txt
	@test -n "$(PYTHON)" || { echo "SGLang needs Python 3.11 on the PATH (or: make PYTHON=/path/to/python3.11)"; exit 1; }
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python $(PIP) torch==$(TORCH)
	.venv-sglang/bin/python $(HASHED)/sglang-cpu.txt
	touch $@

# verifiers needs other versions of mcp and openai than the other tests: its environment has those above the packages of .venv.
install-verifiers: .venv-verifiers/.installed

.venv-verifiers/.installed: .venv/.installed-dev requirements/hashed/verifiers.txt
	test -x .venv-verifiers/bin/python || $(PYTHON) -m venv .venv-verifiers
	.venv/bin/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$(.venv-verifiers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/above_venv.pth"
	.venv-verifiers/bin/python $(HASHED)/verifiers.txt --ignore-installed
	touch $@

# On a machine with NVIDIA GPUs: fuligo with its trainers in .venv, SGLang in .venv-sglang, where runs find it. docs/install-gpu.md has the details.
# MEGATRON=1 adds the Megatron trainer, for which Transformer Engine compiles its PyTorch part.
install-gpu:
	@test -n "$(PYTHON)" || { echo "fuligo needs Python 3.11 or 3.12 on the PATH (or: make PYTHON=/path/to/python3.11)"; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python $(HASHED)/base.txt
	.venv/bin/python $(HASHED)/gpu.txt --requirement requirements/hashed/ray.txt
	.venv/bin/python $(PIP) --no-deps --no-build-isolation --editable .
	test -z "$(MEGATRON)" || .venv/bin/python $(HASHED)/megatron-gpu.txt --no-build-isolation
	touch .venv/.for-gpus .venv/.installed
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python $(HASHED)/sglang-gpu.txt
	touch .venv-sglang/.installed
	.venv/bin/fuligo doctor

# Tests of pages need Chromium. Debian's package is installed if that is possible; otherwise these tests are skipped.
browser:
	@if ! { command -v chromium-headless-shell || command -v chromium; } >/dev/null && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null \
		|| echo "Chromium cannot be installed: the tests of pages are skipped"; fi

# All checks that are fast enough to run while working: without the long unit tests. The type checker runs beside the tests.
check: format
	+@$(MAKE) --no-print-directory --jobs 2 --output-sync=target types lint imports unit

unit: install-dev
	.venv/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m "not gpu and not slow and not sglang and not long" tests/unit

# SGLang is installed beside the rest, and while the checks run.
ready:
	+@$(MAKE) --no-print-directory --jobs 2 --output-sync install-sglang install-verifiers browser lint imports

# Tests that wait for other processes. Those of Ray use the SGLang that those of SGLang have imported.
BESIDE := tests/browser tests/chaos tests/sglang tests/cluster

# The other tests leave a core idle at times: beside them run the type checker, then the tests `BESIDE`, which together take as long as the
# others.
test: ready
	+@$(MAKE) --no-print-directory --jobs 2 --output-sync=line --keep-going test-main types test-servers test-verifiers

test-main: install-dev
	.venv/bin/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "not slow" $(BESIDE:%=--ignore %) --ignore tests/gpu

# The tests for GPUs are only collected, which shows that they can be imported; one process is enough for this.
test-servers: install-sglang install-dev
	.venv/bin/python -m pytest $(BESIDE) tests/gpu -m "not slow and not gpu"

test-verifiers: install-verifiers
	.venv-verifiers/bin/python -m pytest -q tests/unit/environments/adapters/test_verifiers.py

test-full: ready types
	.venv/bin/python -m pytest -n $(TEST_WORKERS) --dist worksteal --hypothesis-profile full -m "not gpu and not sglang"
	.venv/bin/python -m pytest tests/sglang tests/cluster -m sglang
	.venv-verifiers/bin/python -m pytest -q tests/unit/environments/adapters/test_verifiers.py

test-gpu: install-dev
	.venv/bin/python -m pytest tests/gpu -m gpu

# Draws faults against whole runs (docs/reliability.md). It needs root. SEED repeats a draw.
MINUTES ?= 30
chaos: install-dev
	.venv/bin/python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

format: install-dev
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

lint: install-dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/python scripts/check_docstrings.py
	.venv/bin/pip-licenses >/dev/null
	.venv/bin/shellcheck --shell bash --severity warning scripts/*.sh examples/slurm/*.sbatch
	.venv/bin/hadolint docker/*.Dockerfile

licenses: install-dev
	.venv/bin/pip-licenses --format markdown --order license

# After a change of requirements/*.txt.
lock: install-dev
	.venv/bin/python $(PIP) uv==0.13.9
	.venv/bin/python scripts/lock.py

types: install-dev
	.venv/bin/pyrefly check

imports: install-dev
	.venv/bin/lint-imports
