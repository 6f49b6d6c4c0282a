# Everything a clean machine needs is installed here, into .venv; only python3 >= 3.10 has to be there.
# Targets: demo, test, test-mindspore, lint, lint-js, bench, device-check, clean. Stamp files in .venv make repeated calls quick.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
MCORE ?= megatron-core==0.16.1
MCORE19 ?= megatron-core==0.19.2
VENV := .venv
BIN := $(VENV)/bin
MCORE19_DIR := .venvs/mcore19
MINDSPORE ?= mindspore==2.10.0
MINDSPORE_PYTHON ?= $(BIN)/python
MINDSPORE_DIR := .venvs/mindspore
PYTEST_ARGS ?=

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of processes that import the package: all but the first are to find it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-full test-touched venv-existing test-mindspore lint lint-js bench device-check venv venv-mcore19 venv-mindspore system-packages clean

help:
	@echo "make demo   a real Megatron run with a planted fault, found by the probe"
	@echo "make test   lint, types, import contracts and the fast tier of the tests"
	@echo "make test-full           all tests, those beside the existing tool too"
	@echo "make test-touched        what the fast tier leaves out, of the packages that changed since BASE=COMMIT"
	@echo "make test-mindspore      of these the tests inside MindSpore's own environment"
	@echo "make lint   lint, types and import contracts only"
	@echo "make lint-js  lint and types of the scripts of the pages (needs node 20.19)"
	@echo "make bench  cost of the probe, side by side with no tool"
	@echo "make device-check  is everything right on this GPU or NPU, and what does it cost? (ARGS=\"--json FILE\"; needs torch, installs nothing)"
	@echo "make clean  remove the environments and everything generated"

venv: $(VENV)/.installed

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "$(PYTHON) is older than 3.10; name another one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@# Debian and Ubuntu ship python3 without what venv needs.
	@if ! $(PYTHON) -c 'import ensurepip' 2>/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-venv >/dev/null; \
	fi
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "no environment could be made; on Debian and Ubuntu install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	@touch $@

# Modules are compiled when they are imported (--no-compile): most of what the frameworks install never is.
# torch first and alone: a changed pyproject.toml must not fetch it again.
$(VENV)/.torch-$(TORCH): $(VENV)/.created
	$(BIN)/python -m pip install --quiet --no-compile '$(TORCH)'
	@rm -f $(VENV)/.torch-*; touch '$@'

$(VENV)/.installed: $(VENV)/.torch-$(TORCH) pyproject.toml setup.py $(wildcard msprobe_engine/native/*.[ch] msprobe_integrations/common/*.c)
	$(BIN)/python -m pip install --quiet --no-compile '$(TORCH)' -e '.[test]'
	@touch $@

# A second megatron-core, with megatron.training, outside the environment; tests put it first on the path of a child process.
venv-mcore19: $(MCORE19_DIR)/.installed

$(MCORE19_DIR)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-compile --target $(MCORE19_DIR) --no-deps --ignore-requires-python --upgrade '$(MCORE19)'
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-compile triton
	$(BIN)/python -c 'import typing_extensions, packaging' || $(BIN)/python -m pip install --quiet --no-compile typing_extensions packaging
	@touch $@

# MindSpore in an environment of its own: its compiled part needs numpy < 2, other frameworks do not want that (docs/frameworks/mindspore.md). Where
# it has no wheel the environment stays empty, and what needs it is skipped with that reason.
venv-mindspore: $(MINDSPORE_DIR)/.installed

$(MINDSPORE_DIR)/.installed: $(VENV)/.created pyproject.toml setup.py $(wildcard msprobe_engine/native/*.[ch] msprobe_integrations/common/*.c)
	@mkdir -p $(MINDSPORE_DIR)
	@if $(MINDSPORE_PYTHON) -c 'import sys; sys.exit(not (3, 9) < sys.version_info[:2] < (3, 13))'; then \
	  [ -x $(MINDSPORE_DIR)/bin/python ] || $(MINDSPORE_PYTHON) -m venv $(MINDSPORE_DIR); \
	  $(MINDSPORE_DIR)/bin/python -m pip install --quiet --no-compile '$(MINDSPORE)' -e '.[test-mindspore]'; \
	else \
	  echo "$(MINDSPORE) has no wheel for this Python, its tests will be skipped; to name another one: make MINDSPORE_PYTHON=python3.11 ..." >&2; \
	fi
	@touch $@

# The real prometheus and promtool, and a browser, where they can be installed; without them the tests that need them are skipped with
# that reason.
system-packages:
	@for pair in promtool:prometheus amtool:prometheus-alertmanager chromium:chromium; do \
	  if ! command -v $${pair%%:*} >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    echo "installing the Debian package $${pair##*:}"; \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $${pair##*:} >/dev/null; } \
	      || echo "$${pair##*:} could not be installed; its tests will be skipped" >&2; \
	  fi; \
	done

# What the tests need on top (Trainers, DeepSpeed, ...) would make the demo wait.
$(VENV)/.demo: $(VENV)/.torch-$(TORCH) pyproject.toml setup.py $(wildcard msprobe_engine/native/*.[ch] msprobe_integrations/common/*.c)
	@[ -e $(VENV)/.installed ] || $(BIN)/python -m pip install --quiet --no-compile '$(TORCH)' '$(MCORE)' -e '.[megatron,tensorboard,prometheus,cli]'
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python examples/megatron/demo.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What package-lock.json pins is installed on first use. A machine without node may skip it, CI may not.
lint-js:
	@if ! node -e 'const [a, b] = process.versions.node.split("."); process.exit(a > 20 || (a == 20 && b >= 19) ? 0 : 1)' 2>/dev/null; then \
	  echo "lint-js needs node 20.19 or later with npm, and did not run"; [ -z "$${CI:-}" ]; \
	else \
	  [ node_modules/.package-lock.json -nt package-lock.json ] || npm ci --silent --no-audit --no-fund; \
	  npm run --silent check; \
	fi

# The environments, then lint and groups of tests, three at a time on two cores, because much of it waits for other processes; each is shown
# when it has ended. The longest come first. In a process of their own: tests with the device shim that lets Megatron train on a CPU, which
# wraps functions of torch for good, and tests inside MindSpore's environment. What no group names is in the group `others`.
SHARES ?= 3
TIER ?= -m "not slow and not existing_tool"
GROUPS := others comparisons torch files shimmed integrations
TESTS_torch := tests/torch tests/probe tests/dump tests/training
TESTS_shimmed := tests/megatron tests/monitor_faults
TESTS_comparisons := tests/readers tests/compare tests/cross_framework tests/trends tests/redaction tests/diagnose tests/deepspeed tests/web
TESTS_files := tests/accuracy tests/launch tests/checkpoint tests/config_check
TESTS_integrations := tests/integrations
TESTS_others = $(addprefix --ignore=,$(foreach group,$(filter-out others,$(GROUPS)),$(TESTS_$(group))))
MINDSPORE_TESTS = if [ -x $(MINDSPORE_DIR)/bin/python ]; then GLIBC_TUNABLES=$(HUGE_PAGES) $(MINDSPORE_DIR)/bin/python -m pytest $(TIER) tests/mindspore $(PYTEST_ARGS); \
  else echo "tests/mindspore skipped: no environment with $(MINDSPORE)"; fi
# Tests make tens of thousands of small files: in memory where there is room for them, else where temporary files go.
IN_MEMORY := $(shell [ "$$(df --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 8388608 ] 2>/dev/null && ! grep -q '^[^ ]* /dev/shm .*noexec' /proc/mounts && echo /dev/shm)
# What tests allocate, too, lies in huge pages where the system has them (tests/frameworks/ending.py); another C library ignores it.
HUGE_PAGES := glibc.malloc.hugetlb=1
test: system-packages $(VENV)/.created
	@$(MAKE) --no-print-directory -j2 --output-sync=target venv venv-mindspore venv-mcore19
	@TMPDIR=$(or $(TMPDIR),$(IN_MEMORY),/tmp) $(MAKE) --no-print-directory -j$(SHARES) --keep-going --output-sync=target lint tests-mindspore $(addprefix tests-,$(GROUPS))

.PHONY: tests-mindspore $(addprefix tests-,$(GROUPS))
$(addprefix tests-,$(GROUPS)): tests-%: $(VENV)/.installed
	@unset MAKEFLAGS MFLAGS; export GLIBC_TUNABLES='$(HUGE_PAGES)' MCORE19_ENVIRONMENT='$(CURDIR)/$(MCORE19_DIR)'; mindspore='$(CURDIR)/$(MINDSPORE_DIR)'; [ ! -x "$$mindspore/bin/python" ] || export MINDSPORE_ENVIRONMENT="$$mindspore"; \
	$(BIN)/python -m pytest $(TIER) $(TESTS_$*) $(PYTEST_ARGS)

tests-mindspore:
	@$(MINDSPORE_TESTS)

test-full: venv-existing
	@$(MAKE) --no-print-directory test TIER=--hypothesis-profile=full

# The slow tests of what changed since the commit BASE.
test-touched: venv-mcore19
	@places=$$($(BIN)/python tests/frameworks/touched.py '$(BASE)'); for place in $$places; do \
	  MCORE19_ENVIRONMENT='$(CURDIR)/$(MCORE19_DIR)' $(BIN)/python -m pytest -m "slow and not existing_tool" $$place $(PYTEST_ARGS) || [ $$? -eq 5 ]; \
	done

# The existing tool beside the torch and the MindSpore that are here already: its environments see theirs. 8.1.1 has an old pyOpenSSL and any
# Twisted, which (26.10) cannot be imported without service-identity: 24.2.0 is of the age of that pyOpenSSL. MindSpore crashes beside numpy 2.
venv-existing: $(VENV)/.installed venv-mindspore
	@make_existing() { \
	  [ -x "$$2/bin/python" ] || return 0; \
	  [ -x "$$1/bin/python" ] || "$$2/bin/python" -m venv "$$1"; \
	  site=$$("$$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  "$$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$site/zz_base.pth"; \
	  "$$1/bin/python" -m pip install --quiet --no-compile "mindstudio-probe==$$3" $$4; \
	}; \
	identity=service-identity==24.2.0; \
	make_existing .venvs/existing-26 $(VENV) 26.2.0 ""; make_existing .venvs/existing-81 $(VENV) 8.1.1 $$identity; \
	make_existing .venvs/existing-ms-26 $(MINDSPORE_DIR) 26.2.0 "numpy<2"; make_existing .venvs/existing-ms-81 $(MINDSPORE_DIR) 8.1.1 "$$identity numpy<2"

# Tests in the main environment that start MindSpore programs find this environment by MINDSPORE_ENVIRONMENT, which `tests-%` sets.
test-mindspore: venv-mindspore tests-mindspore

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/overhead.py

# Runs from the source tree and installs nothing: what it needs is torch, numpy and PyYAML in some Python.
device-check:
	@python='$(BIN)/python'; [ -x "$$python" ] || python='$(PYTHON)'; PYTHONPATH="$(CURDIR):$${PYTHONPATH:-}" "$$python" -m msprobe_integrations.doctor $(ARGS)

clean:
	rm -rf $(VENV) .venvs .nox node_modules build dist *.egg-info demo_output msprobe_output .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
