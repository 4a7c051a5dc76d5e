# Everything below sets up what it needs: a virtual environment in $(VENV), with the versions of constraints.txt.

PYTHON ?= python3
VENV ?= .venv
OUT ?= runs/digits
# What `make check` runs: the quickest tests of truth of every room. It is
# a list and no marker, since pytest imports every test file to find marks: 17 s in each process, 6 s more than these.
CHECK := $(addprefix tests/, \
  test_bad_calls.py test_floors.py test_models.py test_weights.py \
  alignment/test_assignment.py \
  canonical/test_overlap.py \
  compare/test_distances.py compare/test_scores.py \
  test_datasets.py \
  discovery/test_model_check.py \
  distributions/test_matchings.py distributions/test_signed.py \
  distributions/test_symmetrized.py \
  test_ensembles.py \
  groups/test_action.py groups/test_element.py \
  guides/test_objectives.py guides/test_evidence.py guides/test_transport.py \
  mcmc/test_integrators.py mcmc/test_mass.py density/test_layers.py density/test_density.py \
  posterior/test_posterior.py posterior/test_statistics.py \
  store/test_damage.py \
  study/test_methods.py)
# The default study has few images and many units, where symmetrised training changes predictions. Other arguments replace
# these: make compare ARGS="--data wine --methods mean-field,symmetrized,hmc" takes all rows and 16 units.
COMPARE := --max-train 100 --hidden 32 --activation tanh --draws 200 --methods \
  mean-field,symmetrized,symmetrized-blocks:steps=1000,aligned,ensemble,sghmc,hmc
ARGS ?=
# Passed on: make test PYTEST_ARGS="tests/mcmc -x", and
# make test PYTEST_ARGS="-m 'stochastic and not slow' --seed 7": what tests statistics, from another seed
PYTEST_ARGS ?=
# make test SLOW=1 runs the tests marked slow, too.
SLOW ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STUDY := $(VENV)/.installed-study
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs

.DEFAULT_GOAL := help
.PHONY: help compare quick check test lint types format docs dist clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12

compare: $(STUDY)  ## fit, sample and compare on real data; ends with the report to open
	$(BIN)/pyro-symmetric compare --out $(OUT) $(or $(ARGS),$(COMPARE))
	@echo "Open $(abspath $(OUT)/report.html)"

quick: $(STUDY)  ## the same in a short setting, under 2 minutes
	$(BIN)/pyro-symmetric compare --quick --out runs/quick $(ARGS)
	@echo "Open $(abspath runs/quick/report.html)"

# One thread a process: the tests' tensors are small, and the processes share the cores. Work stealing keeps the tests
# of a module, which share what is costly to set up, together as long as there is enough to do.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal $(if $(SLOW),,-m "not slow")

check: lint types  ## format, lint, types and the quickest tests of every room, in a minute
	$(PYTEST) $(CHECK) $(PYTEST_ARGS)

test: lint types  ## format, lint, types and tests; SLOW=1 adds the slow tests
	$(PYTEST) $(PYTEST_ARGS)

lint: $(DEV)  ## ruff: format and lint, changing nothing; devices of tensors; prose and spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/open_devices.py pyro_symmetric
	$(BIN)/python tools/prose.py
	$(BIN)/codespell

types: $(DEV)  ## mypy
	$(BIN)/mypy

format: $(DEV)  ## ruff: format, and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DOCS)  ## the site, into docs/_build/index.html; nothing is fetched but packages, and warnings are errors
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html docs docs/_build
	@echo "Open $(abspath docs/_build/index.html)"

dist: $(DEV)  ## wheel and sdist into dist/, checked; the wheel is installed by itself and runs the quick study
	rm -rf dist build
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tools/contents.py dist
	$(PYTHON) -m venv build/installed
	cd build && installed/bin/python -m pip --disable-pip-version-check install -c ../constraints.txt torch
	cd build && installed/bin/python -m pip --disable-pip-version-check install -c ../constraints.txt \
	  "$$(ls ../dist/*.whl)[study]"
	cd build && PYTHONPATH= installed/bin/pyro-symmetric compare --quick --out quick $(ARGS)

clean:  ## remove the virtual environment, builds and caches; data/ and runs/ stay
	rm -rf $(VENV) build dist docs/_build docs/jupyter_execute *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment: made once, and installed into again only when the requirements change. A stamp is written last, so
# an interrupted installation resumes. Our own package is installed in editable mode: the sources are always current.
$(STUDY): $(VENV)/.installed-torch
	$(PIP) install -c constraints.txt -e '.[study,vision]'
	@touch $@

$(DEV): $(VENV)/.installed-torch
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(DOCS): $(VENV)/.installed-torch
	$(PIP) install -c constraints.txt -e '.[docs,study]'
	@touch $@

# torch first, by itself and pinned: where pip is configured to offer a CPU-only build of that version, it is taken, and
# what depends on torch is then content with it. Asked for by a range, the largest CUDA build would come.
# torchvision must be compiled for that very build. PyPI's isn't compiled for a CPU-only torch: then PyTorch's own index
# has the one that fits. Without it the library's own imports still work (pyro_symmetric/networks.py).
$(VENV)/.installed-torch: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt torch torchvision
	@$(BIN)/python -c 'import torchvision' 2>/dev/null || \
	  { build=$$($(BIN)/python -c 'import torch; print(torch.__version__.partition("+")[2] or "cpu")'); \
	    found=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torchvision").partition("+")[0])'); \
	    $(PIP) install --quiet --retries 0 --timeout 20 --no-deps --index-url https://download.pytorch.org/whl/$$build \
	      "torchvision==$$found+$$build"; } || \
	  echo "No torchvision that fits this torch was found: image data and its networks work, but a plain 'import" \
	       "torchvision', and so torchmetrics and Lightning, fail before pyro_symmetric.networks.import_torchvision()." >&2
	@touch $@

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "There is no $(PYTHON); say where Python 3.11 or later is: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed, but $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
	         "say where one is: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@
