# logitd: every task of the project. `make` alone lists them.
#
# PYTHON       the interpreter that makes .venv       (default python3)
# TORCH_INDEX  another index for torch alone, e.g. PyTorch's CPU wheel index
# ARGS         passed on: make serve ARGS="--port 9000", make test ARGS="-k sampler"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

.PHONY: help setup serve train test test-slow lint format client map lock clean
.DEFAULT_GOAL := help

help:  ## list the tasks
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(VENV)/.runtime  ## create .venv and install what serving and training need

serve: setup  ## serve the bundled checkpoint on 127.0.0.1:8000
	@exec $(BIN)/logitd serve $(ARGS)

train: setup  ## train on the text that Python itself carries, into runs/
	@exec $(BIN)/logitd train $(ARGS)

test: $(VENV)/.dev  ## run the test suite
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(VENV)/.slow  ## run the tests that take minutes
	$(BIN)/python -m pytest -m slow --timeout 1200 $(ARGS)

lint: $(VENV)/.dev  ## ruff, mypy (strict), Dockerfile and compose checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml

format: $(VENV)/.dev  ## let ruff format and fix the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

map:  ## print every source file with the sentence it opens with
	@$(PYTHON) tests/file_map.py

client: $(VENV)/.runtime  ## write service/client/client.py anew from async_client.py
	$(BIN)/python -m service.client.generate_sync

UV_COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
  --no-emit-package torch --no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
  $(UV_ARGS) --extra train --extra constrain pyproject.toml -c build-lock.in

lock:  ## write the requirements*.lock files anew (needs uv)
	echo '$(TORCH)+cpu' > build-lock.in
	$(UV_COMPILE) --group dev --group slow -o requirements-slow.lock
	$(UV_COMPILE) --group dev -c requirements-slow.lock -o requirements-dev.lock
	$(UV_COMPILE) -c requirements-slow.lock -o requirements.lock
	rm build-lock.in

clean:  ## remove .venv and every cache
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp per stage: a second `make` starts at once, a changed lock installs again.
# torch has a step of its own so that TORCH_INDEX touches nothing else.
$(VENV)/.runtime: requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --require-hashes -r requirements.lock
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(PIP) install --quiet --no-deps --editable .
	@$(BIN)/python -m model.inference.kernels
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.lock
	$(PIP) install --quiet --require-hashes -r requirements-dev.lock
	@touch $@

# --no-deps: the lock is complete, and pip cannot match hashes of packages with extras.
$(VENV)/.slow: $(VENV)/.dev requirements-slow.lock
	$(PIP) install --quiet --no-deps --require-hashes -r requirements-slow.lock
	@touch $@
