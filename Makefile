# The tasks of the project. `make` alone lists them.
#
# PYTHON       the interpreter that creates .venv     (default python3; run make clean before a change)
# TORCH_INDEX  the source of torch only: cpu (no CUDA: smaller by gigabytes), or the address of an index
# WORKERS      processes that run tests               (default: one more than cores below four, else four)
# OTHERS       interpreters of `make test-others`     (default python3.12 python3.13)
# ARGS         passed on: make serve ARGS="--port 9000", make test ARGS="-k sampler"

PYTHON ?= python3
OTHERS ?= python3.12 python3.13
VENV := .venv
BIN := $(VENV)/bin
PYTHONS := 3.11 3.12 3.13
TORCH := torch==2.13.0
UV := uv>=0.13,<1
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Each worker gets a contiguous part of the tests, so most servers and trained models that several
# tests use are created once. An idle worker takes half of another worker's remaining tests. There is
# one worker more than cores because tests of deadlines and stalled readers mostly wait.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 4)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 15

# Tests start dozens of processes, and each would compile every source again.
test test-slow: export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup serve train test test-slow test-others lint audit format client map lock clean
.DEFAULT_GOAL := help

help:  ## list the tasks
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(VENV)/.runtime  ## create .venv and install what serving and training need

serve: setup  ## serve the bundled checkpoint on 127.0.0.1:8000
	@exec $(BIN)/logitd serve $(ARGS)

train: setup  ## train on Python's own reference text and sources, into runs/
	@exec $(BIN)/logitd train $(ARGS)

test: $(VENV)/.dev  ## run the test suite
	$(PYTEST) $(ARGS)

test-slow: $(VENV)/.slow  ## run the tests that take minutes, and property tests with more examples
	$(PYTEST) -m 'slow or hypothesis' --hypothesis-profile full --timeout 1200 $(ARGS)

test-others:  ## run the test suite on every other installed Python, each in its own .venv
	@for python in $(OTHERS); do \
	  if ! "$$python" -c 'import venv' 2> /dev/null; then \
	    echo "skipped $$python: it is not installed"; \
	  else \
	    echo "testing on $$python"; \
	    $(MAKE) test PYTHON="$$python" VENV=".venv-$$(basename "$$python")" || exit 1; \
	  fi; \
	done

# Complete resources of Kubernetes itself: no patches, and no resources of operators.
MANIFESTS := deploy/kubernetes/base/[dps]*.yaml deploy/kubernetes/training/[jmr]*.yaml \
  deploy/kubernetes/components/autoscaling/autoscaler.yaml

lint: $(VENV)/.dev  ## ruff, mypy (strict), Dockerfile, compose and Kubernetes checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	$(BIN)/kubernetes-validate -k 1.34 --strict --quiet $(MANIFESTS)

audit: $(VENV)/.runtime  ## look up known vulnerabilities of the pinned packages (needs a network)
	$(PIP) install --quiet 'pip-audit>=2.10,<3'
	$(BIN)/pip-audit --requirement requirements.lock --no-deps --disable-pip

format: $(VENV)/.dev  ## let ruff format and fix the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

map:  ## print every source file with its first sentence
	@$(PYTHON) tests/file_map.py

client: $(VENV)/.dev  ## generate the parts of the client that follow from the operations
	$(BIN)/python -m logitd.service.generate_client
	$(BIN)/ruff format --quiet service/client

SLOW_PART := \# Needed only by make test-slow.
UV_COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
  --no-emit-package torch --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
  $(UV_ARGS) --extra train --extra constrain pyproject.toml -c build-torch.in

# requirements-dev.lock has two parts, so `make test` does not install the forty packages of `make
# test-slow`: that takes a minute, and transformers imports those it finds. The second part repeats a
# package that the first requires only under a condition (colorama on Windows).
lock:  ## update the requirements*.lock files (needs uv)
	echo '$(TORCH)+cpu' > build-torch.in
	cat requirements-dev.lock > build-all.lock
	$(UV_COMPILE) --group dev --group slow -o build-all.lock
	$(UV_COMPILE) --group dev -c build-all.lock -o build-dev.lock
	$(UV_COMPILE) -c build-all.lock -o build-runtime.lock
	grep -v build-all.lock build-runtime.lock > requirements.lock
	{ grep -v build-all.lock build-dev.lock; echo '$(SLOW_PART)'; \
	  awk 'NR == FNR { known[$$0] = 1; next } /^[^ ]/ { new = /^[^#]/ && !known[$$0] } new' \
	    build-dev.lock build-all.lock; } > requirements-dev.lock
	rm build-torch.in build-*.lock

clean:  ## remove .venv and every cache
	rm -rf $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Checks that an existing environment has a supported Python and pip.
USABLE := import pip, sys; sys.exit("%d.%d" % sys.version_info[:2] not in "$(PYTHONS)".split())
VERSION := import sys; print("%d.%d" % sys.version_info[:2])
define MAKE_VENV
version=$$($(PYTHON) -c '$(VERSION)' 2> /dev/null); \
case " $(PYTHONS) " in *" $${version:-none} "*) ;; *) \
  echo "logitd needs Python $(firstword $(PYTHONS)) to $(lastword $(PYTHONS)), and" \
    "$(PYTHON) is $${version:-not installed}"; \
  for other in $(PYTHONS:%=python%); do \
    if "$$other" -c '' 2> /dev/null; then \
      echo "a supported one is installed:  make $(or $(MAKECMDGOALS),setup) PYTHON=$$other"; break; \
    fi; \
  done; \
  exit 1;; \
esac >&2; \
$(PYTHON) -m venv $(if $(wildcard $(VENV)/pyvenv.cfg),--clear) $(VENV) || { rm -rf $(VENV); exit 1; }
endef

# uv knows the addresses of PyTorch's builds by name: cpu, cu130.
INSTALL_TORCH = $(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
ifneq ($(TORCH_INDEX),)
ifeq ($(findstring /,$(TORCH_INDEX)),)
INSTALL_TORCH = $(PIP) install --quiet '$(UV)' && \
  $(BIN)/python -m uv pip install --quiet --python $(BIN)/python --torch-backend $(TORCH_INDEX) '$(TORCH)'
endif
endif

# The advice when the named index cannot be reached, for example behind a mirror of PyPI.
ifneq ($(TORCH_INDEX),)
TORCH_ELSE = || { echo 'torch could not be installed from $(TORCH_INDEX); to install it from the' \
  'index of all other packages, leave out TORCH_INDEX:  make setup' >&2; exit 1; }
endif

# Without the native kernels a token takes several times as long, so a missing compiler is installed.
COMPILER := ziglang==0.17.1
HAS_COMPILER = for name in $${CXX:-c++ g++ clang++}; do command -v $$name > /dev/null && exit 0; done; false
# With a stamp file per stage, a second `make` starts at once and a changed lock installs again. An
# environment left incomplete by an interruption, or of an unsupported Python, is created again.
# torch is installed separately so that TORCH_INDEX affects nothing else.
$(VENV)/.runtime: requirements.lock pyproject.toml
	@$(BIN)/python -c '$(USABLE)' 2> /dev/null || { $(MAKE_VENV); }
	$(PIP) install --quiet --require-hashes -r requirements.lock
	@echo "$(INSTALL_TORCH)"; { $(INSTALL_TORCH); } $(TORCH_ELSE)
	$(PIP) install --quiet --no-deps --editable .
	@($(HAS_COMPILER)) || { echo 'no C++ compiler is installed: installing one as a package (400 MB)'; \
	  $(PIP) install --quiet '$(COMPILER)'; } || echo 'and it could not be installed'
	@$(BIN)/python -m logitd.model.inference.kernels
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.lock
	sed '/^$(SLOW_PART)/,$$d' requirements-dev.lock > $(VENV)/dev.lock
	$(PIP) install --quiet --require-hashes -r $(VENV)/dev.lock
	@touch $@

# --no-deps: the lock is complete, and pip cannot match hashes of packages with extras.
$(VENV)/.slow: $(VENV)/.dev
	$(PIP) install --quiet --no-deps --require-hashes -r requirements-dev.lock
	@touch $@
