# Two commands on a fresh machine with Python 3.11, 3.12 or 3.13: `make quickstart` and `make test`.
# VENV can point elsewhere; PYTHON names the interpreter the environment is made with.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# The fast tests in four parts of about the same time, each in a process of its own; the fourth is all other tests.
# Tests of commands and of images are with the servers, which wait more than they compute.
# Tests of sandboxes are in one part: no two of them compete for a user's limits.
SANDBOXES := tests/sandbox tests/rewards
SERVERS := tests/dist tests/serve tests/tools tests/cli tests/vision tests/test_docs.py tests/engine/test_engine_remote.py tests/engine/test_engine_remote_eval.py
RUNS := tests/training
OTHERS := $(addprefix --ignore=,$(SANDBOXES) $(SERVERS) $(RUNS))

.PHONY: quickstart test test-slow test-worlds test-gpu lint format bench docs shape clean help

help:  ## What can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

quickstart: $(VENV)/.installed  ## Install, and train a small agent on the CPU (about 5 minutes)
	$(BIN)/ludus train recipes/safe.toml $(ARGS)

test: $(VENV)/.installed-dev  ## Lint, type check and the fast tests, in four parts beside each other
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@trap 'kill $$runs $$servers $$others $$types 2>/dev/null' INT TERM; \
	$(BIN)/python -m pytest $(RUNS) >$(VENV)/runs.log 2>&1 & runs=$$!; \
	$(BIN)/python -m pytest $(SERVERS) >$(VENV)/servers.log 2>&1 & servers=$$!; \
	$(BIN)/python -m pytest $(OTHERS) >$(VENV)/others.log 2>&1 & others=$$!; \
	$(BIN)/mypy >$(VENV)/types.log 2>&1 & types=$$!; \
	echo 'a quarter of the tests; the others run meanwhile and are shown when all have ended'; \
	$(BIN)/python -m pytest $(SANDBOXES); failed=$$?; \
	for part in $$runs $$servers $$others $$types; do wait $$part || failed=1; done; \
	cat $(VENV)/runs.log $(VENV)/servers.log $(VENV)/others.log $(VENV)/types.log; exit $$failed

test-slow: $(VENV)/.installed-dev  ## The tests that take minutes: learning, soak, peers, and properties with more examples
	$(BIN)/python -m pytest -m 'slow or hypothesis' --hypothesis-profile thorough --timeout 1800

test-worlds: $(VENV)/.installed-worlds  ## The tests of prebuilt environments that need Java, large packages or data (docs/envs.md)
	$(BIN)/python -m pytest -m worlds --timeout 1800

test-gpu: $(VENV)/.installed-dev  ## The tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.installed-dev  ## ruff and mypy alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev  ## Put every file into its format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev  ## The benchmarks that need neither a GPU nor a peer's installation (an hour)
	$(BIN)/python benchmarks/latency.py
	$(BIN)/python benchmarks/turns.py
	$(BIN)/python benchmarks/async_training.py
	$(BIN)/python benchmarks/engine_cpu.py
	$(BIN)/python benchmarks/sandbox.py
	$(BIN)/python benchmarks/tool_server.py
	$(BIN)/python benchmarks/remote_tools.py
	$(BIN)/python benchmarks/worlds.py
	$(BIN)/python benchmarks/quickstart.py
	$(BIN)/python benchmarks/algorithms/compare.py

# torch first, and pinned, so that no other package's range decides which build is installed.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Ludus needs Python 3.11 or later")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r constraints.txt
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-worlds: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,worlds,worlds-references]'
	touch $@ $(VENV)/.installed $(VENV)/.installed-dev

docs: $(VENV)/.installed-docs  ## The documentation as a site, in site/ (a broken link is an error)
	$(BIN)/zensical build --strict
	@echo 'open site/index.html, or: $(BIN)/zensical serve'

shape: $(VENV)/.installed-dev  ## Files, lines, names used twice, files on the walk of a step (ARGS=-v lists them; ARGS=--weights hashes a run)
	$(BIN)/python dev/shape.py $(ARGS)

$(VENV)/.installed-docs: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

clean:  ## Remove what was built; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
