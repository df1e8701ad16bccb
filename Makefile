# The words to learn: run, test, check, fix, docs, demo, bench. `make` alone lists them.
.DEFAULT_GOAL := help
.PHONY: help run demo test check lint fix docs history bench gpu-check clean

BIN := .venv/bin
# A user who may not write to /run gets a socket of their own; the daemon says which.
SOCKET ?= $(shell if [ -w /run ]; then echo /run/gpuwarden/run.sock; else echo "$${XDG_RUNTIME_DIR:-/tmp/gpuwarden-$$(id -u)}/gpuwarden.sock"; fi)
LISTEN ?= 127.0.0.1:9846
PYTEST_FLAGS ?=

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: ## start the daemon: on this machine's GPUs, or on simulated ones with a warning
	@tools/environment.sh
	@exec $(BIN)/gpuwarden serve --source auto --listen $(LISTEN) --socket "$(SOCKET)"

demo: ## the same with a real Keras training that climbs towards its memory limit, and Prometheus if it is installed
	@tools/environment.sh demo
	@exec $(BIN)/gpuwarden demo --listen $(LISTEN)

test: ## all tests; sets up what it needs
	@tools/environment.sh test
	@tools/system-parts.sh
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

check: lint test ## what CI runs: format, lint, types, tests, generated files in step

lint:
	@tools/environment.sh lint test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

fix: ## format, and mend what can be mended
	@tools/environment.sh lint
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: ## write the generated files: metrics, configuration and its example, the dashboard
	@tools/environment.sh test
	$(BIN)/gpuwarden reference metrics > docs/metrics.md
	$(BIN)/gpuwarden reference config > docs/configuration.md
	$(BIN)/gpuwarden reference example > config.example.yaml
	$(BIN)/python grafana/dashboards.py

history: ## write an hour of the simulated box as Prometheus blocks into build/history, to look at dashboards with
	@tools/environment.sh test
	@tools/system-parts.sh
	$(BIN)/python grafana/history.py build/history

bench: ## measure beside peers: scrape, poll, memory, callback, HTTP servers
	@tools/environment.sh bench test
	$(BIN)/python bench/exporters.py
	$(BIN)/python bench/callback.py
	$(BIN)/python bench/http_servers.py

gpu-check: ## on a machine with a GPU: what its driver answers, and the tests that need one
	@tools/environment.sh test
	$(BIN)/python -m pytest -m gpu $(PYTEST_FLAGS)

clean: ## remove what the other words made
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
