# Main commands: run, test, check, fix, docs, demo, bench. `make` alone lists all.
.DEFAULT_GOAL := help
.PHONY: help run demo test test-all check lint fix docs man docs-site docs-links goldens history pictures bench bench-smoke gpu-check clean

BIN := .venv/bin
# A user who may not write to /run gets a socket of their own; the daemon says which.
SOCKET ?= $(shell if [ -n "$$GPUWARDEN_SOCKET" ]; then echo "$$GPUWARDEN_SOCKET"; elif [ -w /run ]; then echo /run/gpuwarden/run.sock; else echo "$${XDG_RUNTIME_DIR:-/tmp/gpuwarden-$$(id -u)}/gpuwarden.sock"; fi)
LISTEN ?= 127.0.0.1:9846
PYTEST_FLAGS ?=
# Test files that run at the same time, three on two cores: much of their time is waiting.
AT_ONCE ?= --numprocesses=3 --dist=loadfile --no-loadscope-reorder

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'To set: PYTHON=python3.12 LISTEN=127.0.0.1:9847 SOCKET=/path/of/run.sock'

run: ## start the daemon, on this machine's GPUs or simulated ones
	@tools/environment.sh
	@exec $(BIN)/gpuwarden serve --source auto --listen $(LISTEN) --socket "$(SOCKET)"

demo: ## a real training climbs to its memory limit, and the alert fires
	@tools/environment.sh demo
	@exec $(BIN)/gpuwarden demo --listen $(LISTEN)

test: ## the quick tests, in minutes; sets up what they need
	@tools/environment.sh test
	$(BIN)/python -m pytest $(AT_ONCE) -m 'not frameworks and not system and not slow and not gpu' $(PYTEST_FLAGS)
	@echo 'Left out: tests with JAX, torch, Keras 2, Prometheus, Alertmanager, Chromium or systemd, and slow ones. All tests: make test-all'

test-all: ## all tests; installs programs from apt as root; 20 minutes
	@tools/environment.sh test frameworks
	@tools/system-parts.sh
	@tools/keras2.sh $(BIN)/python
	$(BIN)/python -m pytest $(AT_ONCE) $(PYTEST_FLAGS)

check: lint docs-site test-all ## what CI runs: lint, the docs site and all tests

lint: ## format, lint and types alone
	@tools/environment.sh lint test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

fix: ## format, and fix what ruff can fix
	@tools/environment.sh lint
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: ## generate the references, rules, dashboards and the map of the code
	@tools/environment.sh test
	$(BIN)/gpuwarden reference cli > docs/reference/cli.md
	$(BIN)/gpuwarden reference metrics > docs/reference/metrics.md
	$(BIN)/gpuwarden reference xid > docs/reference/xids.md
	$(BIN)/gpuwarden reference config > docs/reference/configuration.md
	$(BIN)/gpuwarden reference example > config.example.yaml
	$(BIN)/gpuwarden reference dcgm > docs/reference/dcgm.md
	$(BIN)/gpuwarden reference receipt > docs/use/run-records.md
	$(BIN)/gpuwarden reference state > docs/reference/state.md
	sed -i '/^## Rules/,$$d' docs/understand/oom-diagnosis.md
	$(BIN)/gpuwarden reference verdicts >> docs/understand/oom-diagnosis.md
	$(BIN)/gpuwarden reference alerts > docs/reference/alerts.md
	$(BIN)/gpuwarden rules > deploy/prometheus/rules/gpuwarden.yml
	sed -i '/^# Written by .gpuwarden rules --inhibition/,$$d' deploy/alertmanager/alertmanager.yml
	$(BIN)/gpuwarden rules --inhibition >> deploy/alertmanager/alertmanager.yml
	$(BIN)/python grafana/dashboards.py
	$(BIN)/python -m tools.architecture

man: ## build the man page: build/man/gpuwarden.1
	@tools/environment.sh man
	@mkdir -p build/man
	$(BIN)/python tools/man_page.py > build/man/gpuwarden.1

docs-site: ## build the docs as a web site in build/site; a warning or a broken internal link is an error
	@tools/environment.sh docs
	$(BIN)/python -m sphinx -W -n --keep-going -q -b html docs build/site

docs-links: ## check the external links of the docs; needs a network
	@tools/environment.sh docs
	$(BIN)/python -m sphinx -q -b linkcheck docs build/links

goldens: ## write tests/goldens; review the difference
	@tools/environment.sh test
	$(BIN)/python -m pytest -q tests/end_to_end/test_goldens.py tests/end_to_end/test_scenarios.py --write-goldens

history: ## an hour of two simulated boxes for Prometheus, in build/history
	@tools/environment.sh test
	@tools/system-parts.sh
	$(BIN)/python tools/pictures/history.py build/history

# A first time takes a quarter of an hour, for the day and the renderer's packages; rm -r build/day for another day.
pictures: ## the dashboards of a simulated day, the status page, and both in four situations, for docs/pictures
	@tools/environment.sh test
	@tools/system-parts.sh pictures
	$(BIN)/python tools/pictures

bench-smoke: ## run each benchmark in its shortest form, some five minutes
	@tools/environment.sh bench test
	$(BIN)/python bench/smoke.py

bench: ## measure against peers, by size and over time; an hour
	@tools/environment.sh bench test
	$(BIN)/python bench/exporters.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/callback.py
	$(BIN)/python bench/advice.py
	$(BIN)/python bench/alert_latency.py
	$(BIN)/python bench/many_runs.py
	$(BIN)/python bench/run_records.py
	$(BIN)/python bench/growth.py
	$(BIN)/python bench/headroom.py
	$(BIN)/python bench/alert_noise.py
	$(BIN)/python bench/incidents.py
	$(BIN)/python bench/soak.py

# A GPU box without a network: a Python that has the packages already, GPU_PYTHON=python3 say, spares the virtual one.
gpu-check: ## the tests that need a GPU
	@$(if $(GPU_PYTHON),,tools/environment.sh test)
	$(if $(GPU_PYTHON),PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON),$(BIN)/python) -m pytest -m gpu tests/hardware $(PYTEST_FLAGS)

clean: ## remove what the other commands made
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
