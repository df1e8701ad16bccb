# `make` lists the targets.
.DEFAULT_GOAL := help
.PHONY: help run demo test test-all check lint fix docs man deb image manifests release docs-site docs-links goldens history pictures bench bench-smoke gpu-check clean

BIN := .venv/bin
# A user without write access to /run gets a socket of their own.
SOCKET ?= $(shell if [ -n "$$GPUWARDEN_SOCKET" ]; then echo "$$GPUWARDEN_SOCKET"; elif [ -w /run ]; then echo /run/gpuwarden/run.sock; else echo "$${XDG_RUNTIME_DIR:-/tmp/gpuwarden-$$(id -u)}/gpuwarden.sock"; fi)
LISTEN ?= 127.0.0.1:9846
PYTEST_FLAGS ?=
# Tests start a thousand Python processes. Where this variable is set, each of them compiles the package again.
unexport PYTHONDONTWRITEBYTECODE
# Files of tests run in parallel, one more than there are cores, because tests wait. Each process collects all tests.
AT_ONCE ?= --numprocesses=$(shell echo $$(($$(nproc) + 1))) --dist=loadfile --no-loadscope-reorder --max-worker-restart=0

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo 'Variables: PYTHON=python3.12 LISTEN=127.0.0.1:9847 SOCKET=/path/of/run.sock'

run: ## start the daemon; without an NVIDIA driver, with simulated GPUs
	@tools/environment.sh
	@echo 'In another terminal: GPUWARDEN_LISTEN=$(LISTEN) $(BIN)/gpuwarden top'
	@echo '                     GPUWARDEN_LISTEN=$(LISTEN) $(BIN)/gpuwarden runs'
	@echo 'Where you train:     export GPUWARDEN_SOCKET=$(SOCKET)'
	@exec $(BIN)/gpuwarden serve --source auto --listen $(LISTEN) --socket "$(SOCKET)"

demo: ## see a training run out of memory on a simulated GPU: forecast, alert and diagnosis
	@tools/environment.sh demo
	@exec $(BIN)/gpuwarden demo --listen $(LISTEN)

test: ## run the quick tests (minutes)
	@tools/environment.sh test
	$(BIN)/python -m pytest $(AT_ONCE) -m 'not frameworks and not system and not slow and not gpu' $(PYTEST_FLAGS)
	@echo 'Not run: tests that need JAX, torch, Keras 2, Prometheus, Alertmanager, Chromium, systemd or Slurm, and slow tests. All: make test-all'

test-all: ## run all tests (20 minutes); installs programs with apt, as root
	@tools/environment.sh test frameworks release
	@tools/system-parts.sh
	@tools/keras2.sh $(BIN)/python
	$(BIN)/python -m pytest $(AT_ONCE) --hypothesis-profile=thorough $(PYTEST_FLAGS)

check: lint docs-site test-all ## run lint, the docs site and all tests, as CI does

lint: ## check format, lint and types, and list unusual sizes
	@tools/environment.sh lint test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	@$(BIN)/python -m tools.architecture.sizes

fix: ## format the code and fix lint errors
	@tools/environment.sh lint
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: ## regenerate references, alert rules, dashboards and the architecture map
	@tools/environment.sh test
	$(BIN)/gpuwarden reference cli > docs/reference/cli.md
	$(BIN)/gpuwarden reference metrics > docs/reference/metrics.md
	$(BIN)/gpuwarden reference xid > docs/reference/xids.md
	$(BIN)/gpuwarden reference config > docs/reference/configuration.md
	$(BIN)/gpuwarden reference example > config.example.yaml
	$(BIN)/gpuwarden reference dcgm > docs/reference/dcgm.md
	$(BIN)/gpuwarden reference doctor > docs/reference/doctor.md
	$(BIN)/gpuwarden reference checks > docs/reference/checks.md
	$(BIN)/gpuwarden reference api > docs/reference/http-api.md
	sed -i '/^## Rules/,$$d' docs/understand/oom-diagnosis.md
	$(BIN)/gpuwarden reference diagnoses >> docs/understand/oom-diagnosis.md
	sed -i '/^## Error kinds/,$$d' docs/use/troubleshooting.md
	$(BIN)/gpuwarden reference errors >> docs/use/troubleshooting.md
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

deb: ## build the Debian package: build/deb/gpuwarden_VERSION_all.deb
	@tools/environment.sh man
	deploy/deb/build.sh $(BIN)/python build/deb

image: deb ## build the container image gpuwarden:VERSION with podman or buildah
	deploy/image.sh build/deb

manifests: ## pack the Helm chart and render Kubernetes manifests from it in build/kubernetes
	@tools/environment.sh release
	$(BIN)/python -m tools.manifests build/kubernetes

release: ## build all packages of a release with checksums, SBOM and notes in build/release; needs a committed tree
	@tools/environment.sh release
	$(BIN)/python -m tools.release build/release

docs-site: ## build the docs site in build/site; warnings and broken links are errors
	@tools/environment.sh docs
	$(BIN)/python -m sphinx -W -n --keep-going -q -b html docs build/site

docs-links: ## check the external links of the docs; needs a network
	@tools/environment.sh docs
	$(BIN)/python -m sphinx -q -b linkcheck docs build/links

goldens: ## regenerate tests/goldens; review the diff
	@tools/environment.sh test
	$(BIN)/python -m pytest -q tests/end_to_end/test_goldens.py tests/end_to_end/test_scenarios.py tests/records/test_record.py --write-goldens

history: ## write an hour of two simulated hosts for Prometheus to build/history
	@tools/environment.sh test
	@tools/system-parts.sh
	$(BIN)/python tools/pictures/history.py build/history

# The first run takes 15 minutes, for a simulated day and the renderer's packages; remove build/day for another day.
pictures: ## redraw docs/pictures: dashboards and status page
	@tools/environment.sh test
	@tools/system-parts.sh pictures
	$(BIN)/python tools/pictures

bench-smoke: ## run each benchmark in its shortest form (3 minutes)
	@tools/environment.sh bench test
	$(BIN)/python bench/smoke.py

bench: ## run the benchmarks (2 hours)
	@tools/environment.sh bench test
	$(BIN)/python bench/exporters.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/callback.py
	$(BIN)/python bench/alert_latency.py
	$(BIN)/python bench/many_runs.py
	$(BIN)/python bench/accuracy.py
	$(BIN)/python bench/batch_size.py
	$(BIN)/python bench/alert_noise.py
	$(BIN)/python bench/incidents.py
	$(BIN)/python bench/soak.py
	$(BIN)/python bench/last_messages.py

# On a host without a network, GPU_PYTHON=python3 uses a Python that has the packages, without a virtual environment.
gpu-check: ## run the tests that need a GPU
	@$(if $(GPU_PYTHON),,tools/environment.sh test)
	$(if $(GPU_PYTHON),PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON),$(BIN)/python) -m pytest -m gpu tests/hardware $(PYTEST_FLAGS)

clean: ## remove build output and the virtual environment
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
