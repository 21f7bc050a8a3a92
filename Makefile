# One word each; every word does its own set-up in .venv (and, as root on Debian or Ubuntu, installs what that needs).

PYTHON ?= python3
CANDIDATES := $(PYTHON) $(if $(filter file,$(origin PYTHON)),python3.13 python3.12 python3.11)
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py awa/_core.pyx
TOGETHER := -n 3 --dist worksteal
CORE := tests/migrations $(patsubst %,tests/storage/test_%.py,claim settle ring jobs limits unique consequences rescue \
	promote engine_model limits_model statistics overviews descriptors runtimes)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help demo test slow lint bench docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/demo.stamp ## run real jobs on a private PostgreSQL, kill a worker, lose nothing
	@AWA_EMBEDDED=$${AWA_EMBEDDED:-1} $(BIN)/awa demo

test: $(VENV)/dev.stamp ## run the quick tests on the system's PostgreSQL, the engine's core on the embedded one too
	@rm -f build/unsteady.txt
	if $(BIN)/python -c 'import os, sys; from awa.embedded import from_system; sys.exit(not from_system(os.environ))'
	then
		$(BIN)/python -m tests.steady $(TOGETHER) --pg=system -m 'not slow'
		AWA_PROPERTY_STEPS=500 $(BIN)/python -m tests.steady $(TOGETHER) --pg=embedded -m 'not slow' -- $(CORE)
	else
		$(BIN)/python -m tests.steady $(TOGETHER) --pg=embedded -m 'not slow'
	fi
	[ ! -e build/unsteady.txt ] || cat build/unsteady.txt

slow: $(VENV)/dev.stamp ## run the tests that take more than five seconds, and all storage tests on the embedded PostgreSQL
	@rm -f build/unsteady.txt
	$(BIN)/python -m tests.steady $(TOGETHER) -m slow
	$(BIN)/python -m tests.steady $(TOGETHER) --pg=embedded -m 'not slow' -- tests/storage
	[ ! -e build/unsteady.txt ] || cat build/unsteady.txt

lint: $(VENV)/dev.stamp ## check style and types
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest awa._core

bench: $(VENV)/dev.stamp ## measure inserts, draining, latency and many producers
	@$(BIN)/python -m benchmarks.run insert drain latency producers

docs: $(VENV)/dev.stamp ## make the site of docs/ in build/docs
	@$(BIN)/python -m sphinx -b html -W --keep-going -n -q -d build/doctrees docs build/docs
	echo 'made build/docs/index.html'

clean: ## remove what make made, .venv included
	@rm -rf $(VENV) build dist *.egg-info awa/*.so .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up: `demo` needs what a user needs, everything else the whole of it

$(VENV)/demo.stamp: $(SOURCES) | $(VENV)/made.stamp
	@echo 'Building awa in $(VENV) ...'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[embedded,cli]'
	touch $@

$(VENV)/dev.stamp: $(SOURCES) | $(VENV)/made.stamp
	@echo 'Building awa in $(VENV), with what its tests and linters need ...'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@ $(VENV)/demo.stamp

$(VENV)/made.stamp:
	@is_new_enough() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
	has() { "$$python" -c "$$1" 2>/dev/null; }
	python=
	for candidate in $(CANDIDATES); do
		if is_new_enough "$$candidate"; then python=$$candidate; break; fi
	done
	if [ -z "$$python" ]; then
		echo 'awa needs Python 3.11 or later: install one, or name it: make PYTHON=/path/to/python3.11' >&2
		exit 1
	fi
	version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	home=$$("$$python" -c 'import os, sys; print(os.path.dirname(os.path.realpath(sys.executable)))')

	# psycopg and the core are compiled here: a compiler, libpq, and the headers of this very interpreter
	missing=()
	command -v gcc >/dev/null && [ -e /usr/include/stdlib.h ] || missing+=(gcc libc6-dev)
	libpq=$$(pg_config --includedir 2>/dev/null) && [ -e "$$libpq/libpq-fe.h" ] || missing+=(libpq-dev)
	own=()
	has 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' || own+=("python$$version-dev")
	has 'import venv, ensurepip' || own+=("python$$version-venv")
	if [ $${#own[@]} -gt 0 ] && [ "$$home" != /usr/bin ]; then
		echo "$$python ($$home) lacks its C headers or the venv module: install it whole, or choose another:" >&2
		echo '    make PYTHON=/usr/bin/python3' >&2
		exit 1
	fi
	missing+=("$${own[@]}")
	if [ $${#missing[@]} -gt 0 ]; then
		if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
			echo 'awa is compiled here, and something for that is missing. Run this, then make again:' >&2
			echo "    sudo apt-get update && sudo apt-get install -y $${missing[*]}" >&2
			exit 1
		fi
		echo "Installing $${missing[*]} ..."
		apt-get update -qq
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$${missing[@]}"
	fi

	echo "Making $(VENV) with $$python ($$version) ..."
	"$$python" -m venv --clear $(VENV)
	touch $@
