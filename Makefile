# `make demo` and `make test` need Python 3.11 or later and nothing else; both set up .venv.

PYTHON ?= python3
BIN := .venv/bin
LINT_ENV := build/lint
WHEEL_ENV := build/wheel
OLDEST_ENV := build/oldest
DOCS_ENV := build/docs
DIST_ENV := build/dist
DEEPSPEED_ENV := build/deepspeed

# Of the packages little is ever imported: that is compiled when it first is, for all later processes.
PIP := -m pip -q --disable-pip-version-check
INSTALL := install --no-compile
export PYTHONDONTWRITEBYTECODE :=

# Tests of several ranks start two to four processes each.
WORKERS := -n logical --maxprocesses 4 --dist worksteal

# The CPU seconds of tests, the most first. Without the "=" pytest would take a file that is there
# already for a test, and would not know the option.
TOOK = --save-durations=build/durations

# Both tiers: what `make test` runs, and the slow tests that it leaves out.
ALL := -m "not weekly"

# What takes a device runs once more on one without hardware: tests/fake_device. There has to be a
# C++ compiler, else these tests are skipped; `make DEVICE=--require-device ...` fails instead.
DEVICE :=
ON_FAKE = $(ALL) --device fake $(DEVICE) tests

.PHONY: demo test test-all test-weekly test-gpu test-mps test-deepspeed test-oldest lint docs dist wheel-test release-test clean

demo: .venv/ready ## measure the noise scale of a small run on two CPU processes
	@$(BIN)/python examples/digits_ddp.py

test: .venv/ready ## test every claim once
	$(BIN)/pytest $(WORKERS) $(TOOK).csv

test-all: .venv/ready ## run the tests that `make test` leaves out: the slow ones, and those on a device
	$(BIN)/pytest $(WORKERS) $(TOOK)_of_slow.csv -m slow
	$(BIN)/pytest $(WORKERS) $(TOOK)_on_fake.csv $(ON_FAKE)
	@if $(MAKE) -s $(DEEPSPEED_ENV)/ready; then $(MAKE) test-deepspeed; \
	else echo "DeepSpeed cannot be installed here: its tests were left out."; fi

test-weekly: .venv/ready ## run the benchmarks that repeat what other tests test
	$(BIN)/pytest $(WORKERS) -m weekly tests

# In the second run torch looks for streams that do not wait. What both find is in build.
test-gpu: .venv/ready ## run the tests that take a device on a GPU; .venv needs a torch with CUDA
	$(BIN)/pytest $(ALL) --device cuda --require-device tests
	TORCH_CUDA_SANITIZER=1 $(BIN)/pytest $(ALL) --device cuda --require-device tests/collectors/test_contract.py

test-mps: .venv/ready ## run the tests that take a device on a Mac's GPU
	$(BIN)/pytest $(ALL) --device mps --require-device tests

test-deepspeed: $(DEEPSPEED_ENV)/ready ## run the tests with DeepSpeed, on CPU
	$(DEEPSPEED_ENV)/bin/python -m pytest $(WORKERS) $(ALL) $$(find tests -name test_deepspeed.py)

test-oldest: $(OLDEST_ENV)/ready ## run all tests with the oldest versions of everything (Python 3.11)
	$(OLDEST_ENV)/bin/pytest $(WORKERS) $(ALL)
	$(OLDEST_ENV)/bin/pytest $(WORKERS) $(ON_FAKE)

lint: .venv/ready $(LINT_ENV)/ready ## check format, lint, spelling and types
	$(LINT_ENV)/bin/ruff format --check
	$(LINT_ENV)/bin/ruff check
	$(LINT_ENV)/bin/codespell
	$(LINT_ENV)/bin/mypy --python-executable $(BIN)/python

docs: $(DOCS_ENV)/ready ## build the documentation site into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(DOCS_ENV)/bin/mkdocs build --quiet --strict --site-dir build/site

dist: $(DIST_ENV)/ready ## build the sdist, from it the wheel, and check both as PyPI does
	rm -rf dist
	$(DIST_ENV)/bin/python -m build --quiet
	$(DIST_ENV)/bin/twine --no-color check --strict dist/*

# What the wheel needs is in .venv already: its folder of packages is named, and so is none of the
# sources, which .venv finds by a file in that folder. What the wheel asks for beyond is installed.
# The tests are those of the sdist.
$(WHEEL_ENV)/ready: dist .venv/ready
	rm -rf $(WHEEL_ENV)
	$(BIN)/python -m venv --without-pip $(WHEEL_ENV)/venv
	$(BIN)/python -c "import site; print(*site.getsitepackages(), sep='\n')" \
		> $$(echo $(WHEEL_ENV)/venv/lib/python*/site-packages)/packages.pth
	$(BIN)/python $(PIP) --python $(WHEEL_ENV)/venv/bin/python $(INSTALL) -c constraints.txt \
		"noisescale[test] @ file://$$(ls $(CURDIR)/dist/*.whl)"
	tar -xzf dist/*.tar.gz --strip-components=1 -C $(WHEEL_ENV)
	rm -r $(WHEEL_ENV)/noisescale
	touch $@

wheel-test: $(WHEEL_ENV)/ready ## try the built wheel, out of reach of the sources
	cd $(WHEEL_ENV) && venv/bin/python -m pytest tests/installed_wheel.py

release-test: $(WHEEL_ENV)/ready ## run all tests against the built wheel, out of reach of the sources
	cd $(WHEEL_ENV) && venv/bin/python -m pytest $(WORKERS) $(ALL) tests --pyargs noisescale
	cd $(WHEEL_ENV) && venv/bin/python -m pytest $(WORKERS) $(ON_FAKE)

clean:
	rm -rf .venv build dist lightning_logs

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { \
		echo "Python 3.11 or later is needed, $(PYTHON) is older. Name another:" \
			"make PYTHON=python3.12 ..."; exit 1; }
	@echo "Setting up .venv with tested versions (once; a minute or more) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python $(PIP) install -c constraints.txt pip
	@$(BIN)/python $(PIP) $(INSTALL) -c constraints.txt -e ".[test,trl]"
	@touch $@

# Beside .venv: what these tools bring along is nothing that the package may count on.
$(LINT_ENV)/ready: .venv/ready
	@$(BIN)/python -m venv --without-pip $(LINT_ENV)
	@$(BIN)/python $(PIP) --python $(LINT_ENV)/bin/python $(INSTALL) -c constraints.txt \
		codespell mypy pre-commit pre-commit-hooks ruff
	@touch $@

$(DIST_ENV)/ready: constraints.txt
	@$(PYTHON) -m venv $(DIST_ENV)
	@$(DIST_ENV)/bin/python $(PIP) $(INSTALL) -c constraints.txt build twine
	@touch $@

# DeepSpeed asks for torch where it is built: the one in .venv, as its tests do.
$(DEEPSPEED_ENV)/ready: .venv/ready
	@rm -rf $(DEEPSPEED_ENV)
	@$(BIN)/python -m venv --without-pip $(DEEPSPEED_ENV)
	@$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> $$(echo $(DEEPSPEED_ENV)/lib/python*/site-packages)/venv.pth
	@DS_ACCELERATOR=cpu $(BIN)/python $(PIP) --python $(DEEPSPEED_ENV)/bin/python $(INSTALL) -c constraints.txt \
		--no-build-isolation setuptools "deepspeed>=0.17"
	@touch $@

$(DOCS_ENV)/ready: docs/requirements.txt
	@$(PYTHON) -m venv $(DOCS_ENV)
	@$(DOCS_ENV)/bin/python $(PIP) $(INSTALL) -c constraints.txt -r docs/requirements.txt
	@touch $@

$(OLDEST_ENV)/ready: pyproject.toml constraints-oldest.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info[:2] != (3, 11))" || { \
		echo "The oldest versions need Python 3.11, $(PYTHON) is another. Name it:" \
			"make test-oldest PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(OLDEST_ENV)
	@$(OLDEST_ENV)/bin/python $(PIP) install -c constraints.txt pip
	@$(OLDEST_ENV)/bin/python $(PIP) $(INSTALL) -c constraints-oldest.txt -e ".[test]"
	@touch $@
