# Shardyard: `make` lists the targets.

PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
PROTOS := $(wildcard protos/shardyard/wire/v1/*.proto)
PROTOC  = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos \
	--plugin=protoc-gen-methods=protos/methods_plugin.py
# what a user needs; what the servers' loops need to be compiled; what a developer needs
USER_STAMP := $(VENV)/.usable
LOOPS_STAMP := $(VENV)/.compilable
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
# what a yard and the example import: imported once here, so that five processes do not make its bytecode at a time
IMPORTS := torch._dynamo, shardyard_launcher.commands.supervisor, shardyard_launcher.scripts.script, \
	shardyard_launcher.scripts.progress, shardyard_launcher.yard.running_yard, shardyard_launcher.checkpoints.resume_notice, \
	shardyard_worker.job.job, shardyard_worker.agent.process, shardyard_ps_server.service.process, \
	shardyard_coordinator.service.process
# test processes side by side: two more than cores, since many a test waits for the processes that it has started
JOBS   ?= $(shell expr $$(nproc 2>/dev/null || echo 2) + 2)
LONGEST := tests/simulation/ tests/chaos/ tests/integration/
TESTS  := $(filter-out $(LONGEST) %/__pycache__/ tests/containers/ tests/golden/ tests/gpu/ tests/support/ tests/simulator/,$(wildcard tests/*/))
BYTECODE := $(VENV)/.bytecode
NODE   := tests/support/node
NODE_STAMP := $(NODE)/node_modules/.installed

# hundreds of processes are started here: each would compile torch anew where the environment forbids to keep bytecode
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help setup node-client kernels up down status protos protos-check docs lock sbom check test test-long test-simulation soak fuzz chaos test-containers test-gpu bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv and install everything, with what tests and documentation need

$(USER_STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Shardyard and PyTorch into $(VENV): a minute or two the first time"
	@$(PIP) -e '.[worker]'
	@$(BIN)/python -c 'import $(IMPORTS)'
	@echo "installed $$(ls -d $(VENV)/lib/python3*/site-packages/*.dist-info | wc -l) packages, $$(du -sm $(VENV) | cut -f1) MB"
	@touch $(USER_STAMP)

# apart from the rest, so that the loops can be compiled while that is installed
$(LOOPS_STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"])')
	@touch $(LOOPS_STAMP)

$(STAMP): pyproject.toml constraints.txt $(LOOPS_STAMP)
	@echo "installing Shardyard, and what its tests and documentation need, into $(VENV): a minute or two the first time"
	@$(PIP) -e '.[worker,tensorboard,tables,docs,dev]'
	@touch $(STAMP) $(USER_STAMP)

node-client: $(NODE_STAMP) ## install what the test's client in another language needs (npm)

$(NODE_STAMP): $(STAMP) $(NODE)/package.json $(NODE)/package-lock.json
	@$(BIN)/npm ci --prefix $(NODE) --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $(NODE_STAMP)

up: BEGAN := $(shell date +%s)
up: $(USER_STAMP) ## start a yard on this machine and train the digits on it
	@$(BIN)/shardyard up --began $(BEGAN) -c configs/local.yaml examples/digits/train.py

down: ## stop the yard that `make up` started
	@test ! -x $(BIN)/shardyard || $(BIN)/shardyard down -c configs/local.yaml

status: ## show members, jobs and partitions of the yard that `make up` started
	@$(BIN)/shardyard status -c configs/local.yaml

protos: $(STAMP) ## generate shardyard/wire/v1 and shardyard/wire/methods.py from protos/
	@$(PROTOC) --python_out=. --pyi_out=. --methods_out=. $(PROTOS)

protos-check: $(STAMP) ## fail if the generated code is not fresh
	@rm -rf $(VENV)/protos-check && mkdir -p $(VENV)/protos-check
	@$(PROTOC) --python_out=$(VENV)/protos-check --pyi_out=$(VENV)/protos-check --methods_out=$(VENV)/protos-check \
		$(PROTOS)
	@for f in $$(cd $(VENV)/protos-check && find . -type f); do cmp "$(VENV)/protos-check/$$f" "$$f" || \
		{ echo "$$f is not what protos/ generates: run make protos"; exit 1; }; done

docs: $(STAMP) ## build the documentation as a site, into build/site; dead links fail
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

check: $(STAMP) protos-check docs ## ruff, mypy --strict, import-linter, generated code fresh, documentation
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

SBOM := build/sbom
LOCK := build/lock
lock: ## pin what images install, by version and hash, in docker/requirements.txt
	@rm -rf $(LOCK) && $(PYTHON) -m venv $(LOCK) && $(LOCK)/bin/pip install --quiet --disable-pip-version-check uv==0.13.9
	@$(LOCK)/bin/uv pip compile --quiet --upgrade --generate-hashes --python-version 3.11 --python-platform linux \
		--only-binary :all: --no-emit-index-url --no-annotate --custom-compile-command 'make lock' \
		--constraint constraints.txt --output-file docker/requirements.txt pyproject.toml

sbom: ## list what an installation with torch consists of (CycloneDX), in build/sbom/sbom.json
	@rm -rf $(SBOM) && mkdir -p $(SBOM)
	@$(PYTHON) -m venv $(SBOM)/installed && $(SBOM)/installed/bin/pip install --quiet --disable-pip-version-check \
		-c constraints.txt '.[worker]'
	@$(PYTHON) -m venv $(SBOM)/tool && $(SBOM)/tool/bin/pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0
	@$(SBOM)/tool/bin/cyclonedx-py environment $(SBOM)/installed/bin/python --pyproject pyproject.toml \
		--of JSON --output-reproducible -o $(SBOM)/sbom.json
	@echo "$(SBOM)/sbom.json"

kernels: $(LOOPS_STAMP) ## compile the servers' loops: once, and not in each of the first processes that need them
	@PYTHONPATH=$(CURDIR):$(CURDIR)/ps_server $(BIN)/python -m shardyard_ps_server.jit

# collected once here, so that four test processes do not make the bytecode of torch and of all tests at a time, and what
# cannot be collected is told once
$(BYTECODE): $(STAMP)
	@$(BIN)/python -m pytest --collect-only -qq $(LONGEST) $(TESTS) > $(BYTECODE).log 2>&1 || \
		{ tail -n 40 $(BYTECODE).log; exit 1; }
	@touch $(BYTECODE)

# what takes longest comes first, so that no process of the tests waits long for another at the end
PYTEST_SIDE_BY_SIDE = $(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder

test: kernels $(BYTECODE) $(NODE_STAMP) ## unit, property, simulation and integration tests, and a schedule of chaos
	@$(PYTEST_SIDE_BY_SIDE) -m "not long" $(LONGEST) $(TESTS)

test-long: kernels $(BYTECODE) $(NODE_STAMP) ## the tests that `make test` leaves out: the same promises in more ways
	@$(PYTEST_SIDE_BY_SIDE) -m long $(LONGEST) $(TESTS)

fuzz: $(STAMP) ## give every decoder and service 100,000 inputs that are nearly right (INPUTS=n SEED=n)
	@$(BIN)/python -m tests.fuzz.fuzzing --inputs $(or $(INPUTS),100000) $(if $(SEED),--seed $(SEED))

chaos: $(STAMP) ## kill, stop and cut off real processes by 3 times 40 seeds (SEED=n for 3), and in 50 launches (LAUNCH=n)
	@test -n "$(LAUNCH)" || CHAOS_SEEDS=40 CHAOS_SEED=$(SEED) $(BIN)/python -m pytest tests/chaos/test_chaos.py -k under_fire
	@test -n "$(SEED)" || CHAOS_LAUNCHES=$(or $(LAUNCHES),50) CHAOS_LAUNCH=$(LAUNCH) $(BIN)/python -m pytest \
		tests/chaos/test_launches.py -k under_fire

test-simulation: $(STAMP) ## a thousand seeds of a simulated yard under faults, and each rule of the books switched off
	@$(BIN)/python -m pytest tests/simulation

soak: $(STAMP) ## 20,000 seeds of the simulated yard (SEEDS=A:B for others)
	@$(BIN)/python -m tests.simulator --seeds $(or $(SEEDS),0:20000) --mixed --jobs 0

test-containers: $(STAMP) ## build the images and train in containers; needs a Docker engine
	@$(BIN)/python -m pytest tests/containers -m containers

test-gpu: $(STAMP) ## training on a GPU; needs a CUDA device
	@$(BIN)/python -m pytest tests/gpu -m gpu

BENCHES := $(filter-out %/__init__.py,$(wildcard $(addprefix benchmarks/,exchange/*.py tables/*.py jobs/*.py)))
bench: $(STAMP) ## run benchmarks (BENCH=name for one, ARGS="..." for its options)
	@for f in $(if $(BENCH),$(or $(filter %/$(BENCH).py,$(BENCHES)),$(error no benchmark is named $(BENCH))),$(BENCHES)); \
	do PYTHONPATH=benchmarks $(BIN)/python $$f $(ARGS) || exit 1; done

clean: ## remove .venv and caches
	@rm -rf $(VENV) $(NODE)/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
