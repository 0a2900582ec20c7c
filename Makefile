# Everything that can be done with Headrace from a checkout. `make` alone lists it.
#
# A virtual environment in .venv holds the exact versions of constraints.txt. Stamp files in it say
# what is installed, so that only the first run, or one after a change of pyproject.toml or
# constraints.txt, takes time.

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := PIP_USER=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--no-input -c constraints.txt
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadgroup --tb=short -rfE

# What to hand on: make run ARGS="--port 0", make test ARGS="-k segment", make bench ARGS=…
ARGS ?=
# The interpreter to build .venv with; empty: the first on the PATH that runs and is new enough.
PYTHON ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run test slow check format bench bench-spark cluster-spark crash faults-spark fuzz spark venv clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

run: $(VENV)/.has-run ## start a broker (ARGS="--port 9999 --http-port 8080 …")
	@$(BIN)/headrace serve $(ARGS)

test: $(VENV)/.has-test ## run the tests (ARGS="-k name …")
	@$(PYTEST) -m "not slow" $(ARGS)

slow: $(VENV)/.has-test ## run the tests marked slow
	@$(PYTEST) -m slow $(ARGS)

check: $(VENV)/.has-dev ## all that must hold before a commit: format, lint, types, tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(PYTEST) -m "not slow" $(ARGS)

format: $(VENV)/.has-dev ## format the code and repair what the linter can repair
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: $(VENV)/.has-run ## run the benchmarks (ARGS="…")
	@$(BIN)/python -m benchmarks $(ARGS)

bench-spark: $(VENV)/.has-test ## run those of Spark, a real Kafka beside it (ARGS="--records 1000000 scan")
	@$(BIN)/python -m benchmarks.spark $(ARGS)

cluster-spark: $(VENV)/.has-test ## a Spark cluster on this machine, to try pipelines on (ARGS="--workers 2")
	@$(BIN)/python -m tests.spark.sessions.cluster $(ARGS)

crash: $(VENV)/.has-test ## kill a broker 100 times under load and look for what it lost
	@$(BIN)/python -m tests.crash --kills 100 $(ARGS)

faults-spark: $(VENV)/.has-test ## kill drivers, workers and brokers 30 times and compare what Spark wrote
	@$(BIN)/python -m tests.faults_spark --kills 30 $(ARGS)

fuzz: $(VENV)/.has-test ## throw bytes at everything that reads them (ARGS="--seconds 600")
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP_INSTALL) atheris
	@$(BIN)/python -m tests.wire.fuzz $(ARGS)

spark: $(VENV)/.has-spark ## install what Spark needs as well, Java included

venv: $(VENV)/.has-dev ## make .venv with all the tools of development, for an editor

clean: ## remove .venv, caches and what was built
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each set holds the one before it, so its stamp stands for those too.
$(VENV)/.has-run: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing Headrace into $(VENV) …"
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.has-spark: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing Headrace and Spark into $(VENV) …"
	@$(PIP_INSTALL) -e '.[spark]'
	@touch $(VENV)/.has-run $@

$(VENV)/.has-test: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing Headrace and its test tools into $(VENV) …"
	@$(PIP_INSTALL) -e '.[test]'
	@touch $(VENV)/.has-run $(VENV)/.has-spark $@

$(VENV)/.has-dev: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing Headrace and its development tools into $(VENV) …"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.has-run $(VENV)/.has-spark $(VENV)/.has-test $@

# A name on the PATH proves nothing (a version manager leaves shims that fail), so each candidate is
# run. Debian splits venv off from Python: where it is missing and we may, it is installed.
$(VENV)/.made:
	@new_enough() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }; \
	has_venv() { "$$1" -c 'import ensurepip, venv' 2>/dev/null; }; \
	found=; bare=; \
	for candidate in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python); do \
		new_enough "$$candidate" || continue; \
		if has_venv "$$candidate"; then found=$$candidate; break; fi; \
		bare=$${bare:-$$candidate}; \
	done; \
	if [ -z "$$found$$bare" ]; then \
		echo "Headrace needs Python 3.11 or newer, and none was found. Install it, or name it:" >&2; \
		echo "make PYTHON=/path/to/python3 …" >&2; \
		exit 1; \
	fi; \
	if [ -z "$$found" ]; then \
		package=$$(basename "$$bare")-venv; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "Installing $$package, which $$bare lacks …"; \
			{ apt-get update -qq && \
			DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$$package"; } >/dev/null || true; \
		fi; \
		if ! has_venv "$$bare"; then \
			echo "$$bare has no venv module. Install the package $$package and run make again." >&2; \
			exit 1; \
		fi; \
		found=$$bare; \
	fi; \
	echo "Making $(VENV) with $$("$$found" --version) …"; \
	"$$found" -m venv --clear $(VENV)
	@touch $@
