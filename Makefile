# make demo     train on the Fashion-MNIST sample that the package ships: bar, accuracy, checkpoint
# make test     the tests (8 minutes on 2 cores);  make test ARGS="-k summary"  some of them
# make test-slow  the rest: more drawn cases, more kills, more ranks, the code of the documentation (16 minutes)
# make test-launchers   the MNIST example under every launcher, installed for that (Debian and root for some of them;
#                       HAPI_DATA_HOME; 15 minutes). HAPI_LAUNCHERS_OPTIONAL=1: what cannot be installed is left out
# make lint     ruff and mypy
# make docs     the documentation, into build/docs; a warning is an error
# make bench    the ratios of benchmarks/RESULTS.md (HAPI_DATA_HOME; two hours): bench-hand, then bench-peers
# make bench-hand   fit, evaluate, predict, several processes, the start, growth and saving, against code by hand; prepare's options
# make bench-steps  where the overhead of a step lies: by steps that take turns within one process, and a profile
# make bench-peers  the same training in Lightning, Accelerate, Keras, Ignite, Poutyne and skorch, which are installed into
#               .peers on the same torch;  make bench-peers ARGS="--laps 3 --ways fit lightning"  some of it
# make clean    removes what these commands have made, .venv included
#
# By default everything is installed into a virtual environment of its own: .venv (VENV=folder: another place), made
# with python3 (BASE_PYTHON=python3.12: another one). With PYTHON=/path/to/python an environment that has torch
# already is used instead. hapi is then installed into that environment, as a link to this folder, and nothing else.

VENV ?= .venv
BASE_PYTHON ?= python3
ARGS ?=
python := $(or $(PYTHON),$(VENV)/bin/python)
pip := $(python) -m pip --disable-pip-version-check install

# As pip does it when it installs a package. The tests start many processes, and where Python is told to write no bytecode
# each of them would compile hapi anew.
compile := $(python) -m compileall -q hapi

.PHONY: help demo test test-slow test-launchers lint docs bench bench-hand bench-steps bench-peers clean install

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

demo: install
	$(python) examples/quickstart.py

test: needs := pytest
test: install
	$(compile)
	$(python) -m pytest $(ARGS)

test-slow: needs := pytest
test-slow: install
	$(compile)
	$(python) -m pytest -m slow $(ARGS)

test-launchers: needs := pytest
test-launchers: install
	$(python) tests/real_launchers/install.py
	$(compile)
	$(python) -m pytest -m launchers $(ARGS)

lint: needs := ruff mypy
lint: install
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy hapi

docs: needs := mkdocs mkdocstrings
docs: install
	$(python) tools/make_errors_page.py
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict --quiet

bench: bench-hand bench-peers

bench-hand: install
	$(python) benchmarks/bench_fit.py
	$(python) benchmarks/bench_ddp.py fit hand
	$(python) benchmarks/bench_ddp.py fit-iterable hand-iterable fit-unasked --rounds 3
	$(python) benchmarks/bench_ddp.py fit hand --ranks 4
	$(python) benchmarks/bench_ddp.py fit hand --ranks 8
	$(python) benchmarks/bench_startup.py
	$(python) benchmarks/bench_growth.py
	$(python) benchmarks/bench_saving.py --sizes 1 10 100 1000
	$(python) benchmarks/bench_options.py

bench-steps: install
	$(python) benchmarks/bench_steps.py $(ARGS)
	$(python) benchmarks/profile_steps.py

bench-peers: install
	$(python) benchmarks/peers.py --install
	$(python) benchmarks/peers.py --ranks 1 2 $(ARGS)

clean:
	rm -rf $(VENV) .launchers .peers build dist *.egg-info checkpoints .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ifdef PYTHON

find_missing := import importlib.util, sys; print(*(n for n in sys.argv[1:] if not importlib.util.find_spec(n)))

install:
	@missing=$$($(python) -c '$(find_missing)' torch torchvision tqdm $(needs)); [ -z "$$missing" ] || { \
	  echo "PYTHON=$(PYTHON) lacks: $$missing. make adds nothing but hapi to an environment that is not its own." \
	    "Run $(PYTHON) -m pip install $$missing, or leave PYTHON out." >&2; exit 1; }
	@echo "Installing hapi, as a link to this folder, into the environment of $(PYTHON)"
	@# Without a network if the setuptools there is new enough (77; torch brings a newer one), else with build isolation.
	@$(pip) -q --no-deps --no-build-isolation --no-index -e . 2>/dev/null || $(pip) -q --no-deps -e .

else

# pip is tested each time, since an interrupted `python -m venv` leaves a python without it. The stamp is written after
# pip has succeeded, and holds the name of this folder, since several checkouts may share one VENV.
stamp := $(VENV)/.hapi-installed
too_old := import sys; sys.exit(sys.version_info < (3, 10))

install:
	@$(python) -m pip --version >/dev/null 2>&1 || { \
	  $(BASE_PYTHON) -c '$(too_old)' || { echo "hapi needs Python 3.10 or newer, and $(BASE_PYTHON) is not." \
	    "Name another: make BASE_PYTHON=python3.12" >&2; exit 1; }; \
	  echo "Making the virtual environment $(VENV)"; $(BASE_PYTHON) -m venv --clear $(VENV); }
	@[ "$$(cat $(stamp) 2>/dev/null)" = "$(CURDIR)" ] && [ $(stamp) -nt pyproject.toml ] || { \
	  $(pip) -e '.[dev]' || { echo "pip could not install hapi (see above). Without a network torch must be there" \
	    "already: name the Python that has it, make PYTHON=/path/to/python" >&2; exit 1; }; \
	  echo "$(CURDIR)" >$(stamp); }

endif
