# Two commands on a fresh machine with Python 3.11 or newer, venv and make:  make demo   make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOMS := $(filter-out tests/packaging/ tests/process/ tests/__pycache__/,$(wildcard tests/*/))
# A file is not shared out, so what takes longest begins first. Files of seconds come last: they fill the gaps.
FIRST := tests/sql/test_plans.py tests/property/test_fuzz.py tests/host/test_bounce.py tests/docs/ tests/embedded/ tests/property/ \
  tests/cli/test_run.py tests/servers/ tests/host/ tests/worker/ tests/bench/ tests/testing/ tests/client/ tests/cli/ \
  tests/schema/ tests/gpu/ tests/examples/ tests/simulator/ tests/watchdogs/
LAST := tests/interleaving/ tests/acceptance/ tests/sql/ tests/placement/
# What measures time, kills processes or mostly waits.
WAITS := $(addprefix tests/process/test_,process_watchdogs.py process_secrets.py process_not_reported.py process_devices.py \
  process_frozen.py process_gil.py statements.py process_outage.py supervisor.py supervisor_killed.py) \
  tests/watchdogs/test_trip.py $(addprefix tests/process/test_,failover.py process_told.py process_wire.py process_kill.py) \
  tests/watchdogs/test_judged.py tests/watchdogs/test_unread_log.py tests/process/
NAMED := $(FIRST) $(LAST) $(WAITS)
$(if $(filter-out $(wildcard $(NAMED)),$(NAMED)),$(error not there: $(filter-out $(wildcard $(NAMED)),$(NAMED))))
PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
QUICK := -m "not slow and not soak and not torch and not gpu"
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# The tests start hundreds of programs. Without compiled modules each needs 0.4 s more of a processor to start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-servers test-gpu test-torch soak bench simulate five docs lint wheel-check clean help

help:
	@echo "make demo        a training gang survives the death of a rank (private PostgreSQL, nothing to configure)"
	@echo "make test        the tests, on real PostgreSQL with real processes: ten minutes on two cores"
	@echo "make test-slow   proofs that cost seconds of a processor each; CI runs them after make test"
	@echo "make test-servers what is about SQL, all of it on every PostgreSQL found"
	@echo "make soak        the long proofs"
	@echo "make bench       gangq beside its floors and other queues, as tables and pictures (BENCH=--quick: one small round)"
	@echo "make simulate    5,000 jobs under several policies: utilisation, waits and slowdown as a table and a picture"
	@echo "make five        five numbers that queues seldom publish, measured here (FIVE=--quick: little of each)"
	@echo "make docs        the manual as a site (site/), with a reference made from the code"
	@echo "make lint        ruff and mypy --strict"
	@echo "make wheel-check sql/ is found from a wheel, a wheel built from the sdist, an editable install, a checkout"
	@echo "make test-gpu    what a real GPU says under each kind of load, as a table (needs one, and torch)"
	@echo "make test-torch  the training as an unmodified torch.distributed script (needs torch in $(VENV))"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) -e '.[bench]'
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP) -e '.[docs]'
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/gangq demo

# What measures time runs apart from what computes. First the tests are compiled: six processes at once would each do it.
test: $(VENV)/.dev
	printf '%s\n' tests/*/ | xargs -n 8 -P 2 $(BIN)/python -m pytest --collect-only -qq > /dev/null
	$(PYTEST) $(QUICK) -n 5 $(FIRST) $(filter-out $(FIRST) $(LAST),$(ROOMS)) $(LAST) $(addprefix --ignore=,$(filter-out tests/process/,$(WAITS)))
	$(PYTEST) $(QUICK) -n 7 $(WAITS)

test-slow: $(VENV)/.dev
	$(PYTEST) -m "slow and not soak" -n 4 $(FIRST) $(WAITS) tests/

test-servers: $(VENV)/.dev
	GANGQ_TEST_EVERY_SERVER=1 $(BIN)/python -m pytest -m "not soak" -n 3 --dist loadfile tests/sql tests/schema tests/interleaving

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu -s tests/gpu tests/process/test_process_real_gpu.py

test-torch: $(VENV)/.dev
	$(BIN)/python -m pytest -m torch

soak: $(VENV)/.dev
	GANGQ_SOAK=1 $(BIN)/python -m pytest -s -m "soak or not soak" tests/property tests/interleaving tests/watchdogs tests/process tests/placement/test_properties.py tests/simulator tests/sql/test_mutation.py tests/sql/test_claim_pace.py

bench: $(VENV)/.bench
	$(BIN)/python tests/bench/run.py $(BENCH)

simulate: $(VENV)/.dev
	$(BIN)/python tests/simulator/simulate.py $(SIMULATE)

five: $(VENV)/.dev
	$(BIN)/python tests/bench/five.py $(FIVE)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file docs/mkdocs.yml

wheel-check: $(VENV)/.dev
	$(BIN)/python tests/packaging/check_wheels.py

clean:
	rm -rf $(VENV) dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
