# make goodput  the main job on a synthetic trace: goodput of four schemes, a table and an HTML report
# make experiments       the controlled experiments: docs/experiments.md and its figures (may be interrupted)
# make experiments-full  the same on whole traces, under every condition, without a time limit
# make test     the whole test suite         (ARGS="tests/analysis -k report" for a part of it)
# make lint     ruff and mypy
# make bench    the speed benchmarks
# make fidelity docs/fidelity.md anew: the packaged profiles, and the replays of measured engines (minutes)
# make clean    remove the environment and what was built

VENV := .venv
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell command -v $(name) >/dev/null 2>&1 && $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt
ARGS ?=
# Machine code for the event loop, where there is a C compiler; an existing build of the same sources is kept.
COMPILE = @$(VENV)/bin/confsim compile quiet=true || echo "confsim runs interpreted: slower, with the same results" >&2

.PHONY: goodput experiments experiments-full test lint bench clean

goodput: $(VENV)/.base
	$(COMPILE)
	$(VENV)/bin/confsim goodput $(ARGS)

experiments: $(VENV)/.base
	$(COMPILE)
	$(VENV)/bin/confsim experiments $(ARGS)

experiments-full: $(VENV)/.base
	$(COMPILE)
	$(VENV)/bin/confsim experiments requests=null full=true page=docs/experiments-full.md $(ARGS)

test: $(VENV)/.test
	$(COMPILE)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(VENV)/.test
	$(COMPILE)
	$(VENV)/bin/python -m pytest tests/benchmarks --benchmark-only $(ARGS)

fidelity: $(VENV)/.test
	$(COMPILE)
	$(VENV)/bin/confsim validate source=silicon silicon.record=docs/silicon.json $(ARGS)
	$(VENV)/bin/python -m analysis.validate.fidelity

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis confsim/_native

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "confsim needs Python 3.11 or newer: set PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing confsim into $(VENV)"
	@$(PIP) -e '.[compile]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing confsim and its test extras into $(VENV) (a few minutes, once)"
	@$(PIP) -e '.[test]'
	@touch $(VENV)/.base $@
