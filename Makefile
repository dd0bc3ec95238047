# The commands anyone needs. Each sets up what it uses, but check, lint, types and unit, which take the environment as it is.
#
#   make demo       the e-mail sender on the embedded default, against a real SMTP server
#
#   make quick      after each edit: format, lint, mypy and the tests without I/O; half a minute
#   make store STORE=redis
#                   after a change of one store: its tests, some minutes. STORE: see tests/by_store.py
#   make test       before a commit is handed in: everything
#
#   make check      what `make test` does, without setting up: lint, types and unit
#   make lint       the formatter and the linter;  make unit: all tests
#   make types      both type checkers, and whether public types are complete;  make mypy;  make pyright;  make complete
#   make chaos      workers are killed for minutes, far more often than in `make test`
#   make matrix     every pair of stores, into docs/reference/matrix.md
#   make platforms  the tests on newer Pythons and servers
#   make docs       the documentation site, into build/site
#   make bench      measured figures; `python -m benchmarks ceiling` or `growth` for a part of them
#   make clean      removes the environment, what was built, and the caches

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Processes of pytest. Many tests wait, for a lease or a server: more than the processors are worth it.
WORKERS ?= 3

# Pure tests: no server, no file, no waiting.
QUICK := tests/config tests/inspection tests/registry tests/tasks tests/values tests/wire \
	tests/connections/redis/test_tags.py tests/schedules/test_timetable.py tests/worker/test_refusals.py \
	$(patsubst %,tests/test_%.py,app architecture events loops names public_api queues texts)

.PHONY: demo quick store test check lint types mypy pyright complete unit chaos matrix platforms docs bench clean

demo: $(STAMP)
	$(BIN)/python examples/email_sender/demo.py

quick: $(STAMP)
	$(MAKE) --no-print-directory lint
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" $(QUICK)

store: $(STAMP)
	@$(BIN)/python -m tests.by_store "$(STORE)"
	scripts/get-servers
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --store "$(STORE)" tests

test: $(STAMP)
	scripts/get-servers
	$(MAKE) --no-print-directory check

check: lint types unit

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# Side by side; what each says is printed when it has ended.
types:
	$(MAKE) --no-print-directory --jobs 2 --output-sync mypy pyright complete

mypy:
	$(BIN)/mypy

pyright:
	$(BIN)/pyright --pythonpath $(BIN)/python

complete:
	$(BIN)/python -m tests.typing.completeness

# Compiled first: the tests start the command line hundreds of times, some where nothing may be written.
unit:
	$(BIN)/python -m compileall -q machinery_py
	$(BIN)/python -m tests.interop.golang
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

chaos: $(STAMP)
	MACHINERY_TEST_FULL=1 CHAOS_KILLS=$${CHAOS_KILLS:-200} $(BIN)/python -m pytest tests/system/test_kills.py tests/system/test_flows.py tests/system/test_crash_points.py tests/chaos tests/brokers/rabbitmq/test_cluster.py tests/brokers/rabbitmq/test_faults.py -v
	MACHINERY_TEST_FULL=1 CHAOS_POISON=$${CHAOS_POISON:-100} CHAOS_HELD_KILLS=$${CHAOS_HELD_KILLS:-40} $(BIN)/python -m pytest tests/system/test_poison.py -v --timeout 7200
	MACHINERY_TEST_FULL=1 $(BIN)/python -m pytest tests/system/test_pairs.py tests/stores/test_store_pairs.py tests/stores/redis/test_sentinel.py tests/system/test_unique.py tests/system/test_unique_kills.py tests/system/test_endings.py tests/system/test_stall_faults.py -v
	MACHINERY_TEST_FULL=1 $(BIN)/python -m pytest tests/system/test_limit_faults.py tests/system/test_flow_crash_points.py -v --timeout 3600
	MACHINERY_TEST_FULL=1 $(BIN)/python -m pytest tests/interop -v
	MODEL_EXAMPLES=$${MODEL_EXAMPLES:-1000} $(BIN)/python -m pytest tests/models tests/stores/test_model.py -v --timeout 3600
	CHAOS_SCHEDULE_SECONDS=300 SCHEDULE_CHANGES=100000 $(BIN)/python -m pytest tests/system/test_schedulers.py tests/schedules/test_timetable.py -v --timeout 3600
	$(BIN)/python -m tests.chaos.run --url sqlite --tasks 20000 --kill-every 1
	$(BIN)/python -m tests.chaos.run --url postgresql --tasks 50000 --kill-every 2 --lease 10
	$(BIN)/python -m tests.chaos.run --url redis --tasks 100000 --kill-every 2 --lease 10
	$(BIN)/python -m tests.chaos.run --url amqp+redis --tasks 25000 --kill-every 1.5
	MACHINERY_TEST_FULL=1 $(BIN)/python -m pytest tests/backends/rabbitmq/test_restart.py tests/system/test_benchmarks.py tests/system/test_peers.py tests/interop/test_amqp_results.py -v

matrix: $(STAMP)
	MACHINERY_TEST_PAIRS=1 $(BIN)/python -m pytest -n $(WORKERS) --write-matrix tests/backends tests/brokers tests/stores tests/system/test_workflows*.py tests/system/test_pairs.py

# On newer Pythons and servers, in Debian roots; needs root and debootstrap, and makes the roots in .platforms the first time.
platforms: $(STAMP)
	$(BIN)/python -m tests.platforms $(PLATFORMS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

bench: $(STAMP)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks ceiling
	$(BIN)/python -m benchmarks growth
	$(BIN)/python -m benchmarks bloat

# The environment is made anew when what it consists of has changed.
$(STAMP): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("machinery_py needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (make PYTHON=python3.12 …)" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
