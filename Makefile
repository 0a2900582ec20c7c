# Every command of a checkout. `make` alone lists them.
#
# A virtual environment in .venv holds the exact versions of constraints.txt. Stamp files in it record
# what is installed, so only the first run takes time, and one after a change of pyproject.toml or
# constraints.txt. PYTHON=python3.13 selects an interpreter, which has an environment of its own
# (.venv-3.13), so switching between versions reinstalls nothing.

# The interpreter; empty: the first supported one on the PATH, in .venv.
PYTHON ?=
VENV := .venv$(if $(PYTHON),-$(shell "$$(deploy/find-python $(PYTHON) 2>/dev/null)" \
	-c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null))
BIN := $(VENV)/bin
PIP_INSTALL := PIP_USER=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--no-input -c constraints.txt
# A worker that dies ends the run: with a new one in its place, pytest-xdist waits for the old one's tests for ever.
PYTEST := $(BIN)/python -m pytest -q -n 4 --dist loadgroup --max-worker-restart=0 --tb=short -rfE

# Arguments of the command: make run ARGS="--port 0", make test ARGS="-k segment", make bench ARGS=…
ARGS ?=
# The directory that make dist fills.
DIST ?= dist
# The supported versions. pyproject.toml lists those that the tests have passed on.
VERSIONS = $(shell sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml)
# The oldest and the newest PySpark of pyproject.toml.
SPARK_VERSIONS = 4.0 4.3

# Some images forbid Python to keep bytecode. Then every process of the tests compiles everything again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help run demo test test-pythons test-spark-versions test-bare slow check format docs dist bench bench-cluster bench-peers bench-spark cluster-spark crash faults faults-cluster faults-spark fuzz spark venv clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

run: $(VENV)/.has-run ## start a broker (ARGS="--port 9999 --http-port 8080 …")
	@$(BIN)/headrace serve $(ARGS)

demo: $(VENV)/.has-$(if $(filter --no-spark,$(ARGS)),run,spark) ## four services, a broker and Spark, in two minutes (ARGS="--no-spark")
	@$(BIN)/python examples/demo $(ARGS)

test: $(VENV)/.has-test $(VENV)/.has-classes $(VENV)/.has-browser ## run the tests (ARGS="-k name …")
	@$(PYTEST) -m "not slow" $(ARGS)

test-pythons: ## run the tests on each supported Python that is installed
	@missing=; failed=; \
	for version in $(VERSIONS); do \
		if python=$$(deploy/find-python python$$version 2>/dev/null); then \
			echo "Python $$version: $$python"; \
			$(MAKE) --no-print-directory test PYTHON="$$python" || failed="$$failed $$version"; \
		else \
			missing="$$missing $$version"; \
		fi; \
	done; \
	[ -z "$$missing" ] || echo "Not installed, not tested: Python$$missing"; \
	[ -z "$$failed" ] || { echo "Failed on Python$$failed" >&2; exit 1; }

test-spark-versions: $(VENV)/.has-test ## run the tests of Spark on the oldest and the newest supported PySpark
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); failed=; \
	for version in $(SPARK_VERSIONS); do \
		home=$(VENV)-spark-$$version; \
		if [ ! -e $$home/.made ]; then \
			echo "Installing PySpark $$version into $$home …"; \
			$(BIN)/python -m venv --clear $$home && \
			$$home/bin/python -m pip install --quiet --disable-pip-version-check "pyspark==$$version.*" && \
			echo "import site; site.addsitedir('$$site')" > \
				$$($$home/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth && \
			touch $$home/.made || exit 1; \
		fi; \
		$$home/bin/python -c 'import pyspark; print("PySpark", pyspark.__version__)'; \
		$$home/bin/python -m pytest -q -n 2 --dist loadgroup --tb=short -rfE -m "not slow" tests/spark $(ARGS) || \
			failed="$$failed $$version"; \
	done; \
	[ -z "$$failed" ] || { echo "Failed on PySpark$$failed" >&2; exit 1; }

test-bare: ## make run and make test in a new Debian with git, make and python3 (needs root, debootstrap)
	@ARGS='$(ARGS)' tests/bare_debian.sh

slow: $(VENV)/.has-test $(VENV)/.has-classes $(VENV)/.has-browser ## run the tests marked slow
	@$(PYTEST) -m slow $(ARGS)

check: $(VENV)/.has-dev $(VENV)/.has-classes $(VENV)/.has-browser ## format, lint, types and tests: run it before a commit
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(PYTEST) -m "not slow" $(ARGS)

format: $(VENV)/.has-dev ## format the code and apply the fixes of the linter
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

docs: $(VENV)/.has-docs ## build the documentation site into build/site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean
	@echo "Open build/site/index.html in a browser."

dist: $(VENV)/.made ## build a wheel and an sdist into dist/
	@$(BIN)/python -c 'import build' 2>/dev/null || $(PIP_INSTALL) build
	@rm -f $(DIST)/headrace-*
	@$(BIN)/python -m build --outdir $(DIST)

bench: $(VENV)/.has-run ## run the benchmarks (ARGS="--quick net_http", ARGS="--against OTHER_CHECKOUT --quick")
	@$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(VENV)/.has-test ## compare with Redis, NATS, RabbitMQ and Kafka, which it fetches (ARGS="--quick", ARGS="--peers redis,headrace queue")
	@$(PIP_INSTALL) -e '.[peers]'
	@$(BIN)/python -m benchmarks.peers $(ARGS)

bench-cluster: $(VENV)/.has-test ## compare a node over Kafka with Kafka's own Python client (ARGS="--quick", ARGS="latency failover")
	@$(BIN)/python -m benchmarks.cluster $(ARGS)

bench-spark: $(VENV)/.has-test ## run the benchmarks of Spark, with Kafka for comparison (ARGS="--records 1000000 scan")
	@$(BIN)/python -m benchmarks.spark $(ARGS)

cluster-spark: $(VENV)/.has-test ## start a Spark cluster on this machine (ARGS="--workers 2")
	@$(BIN)/python -m tests.spark.sessions.cluster $(ARGS)

crash: $(VENV)/.has-test ## kill a broker 100 times under load and look for lost messages
	@$(BIN)/python -m tests.crash --kills 100 $(ARGS)

faults: $(VENV)/.has-test ## break a broker in every way we know and check everything (ARGS="--quick", ARGS="kills --seed 5"; an hour)
	@command -v strace >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		echo "Installing strace …" && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq strace >/dev/null; } || \
		echo "strace is not installed: no sync is made to fail with it"
	@$(BIN)/python -m tests.faults $(ARGS)

faults-cluster: $(VENV)/.has-test ## break three nodes over three Kafka nodes 100 times and check everything
	@$(BIN)/python -m tests.faults cluster $(ARGS)

faults-spark: $(VENV)/.has-test ## kill drivers, workers, brokers and an S3 server 60 times and check the tables (ARGS="--pipeline s3")
	@$(BIN)/python -m tests.faults_spark --kills 12 $(ARGS)

fuzz: $(VENV)/.has-test ## feed random bytes to every parser (ARGS="--seconds 600")
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP_INSTALL) atheris
	@$(BIN)/python -m tests.wire.fuzz $(ARGS)

spark: $(VENV)/.has-spark ## install PySpark as well, and Java if it is missing

venv: $(VENV)/.has-dev ## make .venv with all development tools, for an editor

clean: ## remove the environments, caches and builds
	@rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# test contains the three before it, and dev contains test: their stamps cover those, too.
$(VENV)/.has-run: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing Headrace into $(VENV) …"
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.has-spark: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing Headrace and Spark into $(VENV) …"
	@$(PIP_INSTALL) -e '.[spark]'
	@touch $(VENV)/.has-run $@

$(VENV)/.has-docs: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing Headrace and mkdocs into $(VENV) …"
	@$(PIP_INSTALL) -e '.[docs]'
	@touch $(VENV)/.has-run $@

$(VENV)/.has-test: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing Headrace and its test tools into $(VENV) …"
	@$(PIP_INSTALL) -e '.[test]'
	@touch $(VENV)/.has-run $(VENV)/.has-spark $(VENV)/.has-docs $@

$(VENV)/.has-dev: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing Headrace and its development tools into $(VENV) …"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.has-run $(VENV)/.has-spark $(VENV)/.has-docs $(VENV)/.has-test $@

# Spark starts in half the time from an archive of its classes. Without one the tests only take longer.
$(VENV)/.has-classes: $(VENV)/.has-test
	@echo "Archiving the classes of Spark for the tests …"
	@$(BIN)/python -m tests.fixtures.java || true
	@touch $@

# The tests of the console need a Chromium. If it is missing and we may install it, we do. Without it those tests
# are not run, and the summary says so.
$(VENV)/.has-browser: $(VENV)/.made
	@if ! { command -v chromium && command -v chromedriver; } >/dev/null && \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing Chromium for the tests of the console …"; \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			chromium chromium-driver; } >/dev/null 2>&1 || true; \
	fi
	@touch $@

# Debian packages the venv module separately. If it is missing and we may install it, we do.
$(VENV)/.made:
	@python=$$(deploy/find-python $(PYTHON)) || exit 1; \
	has_venv() { "$$python" -c 'import ensurepip, venv' 2>/dev/null; }; \
	package=$$(basename "$$python")-venv; \
	if ! has_venv && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing $$package, which $$python lacks …"; \
		{ apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$$package"; } >/dev/null || true; \
	fi; \
	if ! has_venv; then \
		echo "$$python has no venv module. Install the package $$package and run make again." >&2; \
		exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$python" --version) …"; \
	"$$python" -m venv --clear $(VENV)
	@touch $@
