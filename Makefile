# `make demo` and `make test` need Python 3.11 or later and nothing else; both set up .venv.

PYTHON ?= python3
BIN := .venv/bin
WHEEL_ENV := build/wheel
OLDEST_ENV := build/oldest

.PHONY: demo test test-oldest lint wheel-test clean

demo: .venv/ready ## measure the noise scale of a small run on two CPU processes
	@$(BIN)/python examples/digits_ddp.py

test: .venv/ready ## run all tests
	$(BIN)/pytest

test-oldest: $(OLDEST_ENV)/ready ## run all tests with the oldest versions of everything (Python 3.11)
	$(OLDEST_ENV)/bin/pytest

lint: .venv/ready ## check format, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

wheel-test: .venv/ready ## run all tests against the built wheel, out of reach of the sources
	rm -rf dist $(WHEEL_ENV)
	$(BIN)/python -m build --wheel --outdir dist
	$(PYTHON) -m venv $(WHEEL_ENV)/venv
	$(WHEEL_ENV)/venv/bin/python -m pip install -q -c constraints.txt \
		"noisescale[test] @ file://$$(ls $(CURDIR)/dist/*.whl)"
	cp -R tests examples benchmarks docs Makefile pyproject.toml constraints-oldest.txt *.md LICENSE CITATION.cff $(WHEEL_ENV)
	cd $(WHEEL_ENV) && venv/bin/pytest tests --pyargs noisescale

clean:
	rm -rf .venv build dist lightning_logs

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { \
		echo "Python 3.11 or later is needed, $(PYTHON) is older. Name another:" \
			"make PYTHON=python3.12 ..."; exit 1; }
	@echo "Setting up .venv with tested versions (once; a minute or more) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

$(OLDEST_ENV)/ready: pyproject.toml constraints-oldest.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info[:2] != (3, 11))" || { \
		echo "The oldest versions need Python 3.11, $(PYTHON) is another. Name it:" \
			"make test-oldest PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(OLDEST_ENV)
	@$(OLDEST_ENV)/bin/python -m pip install -q --disable-pip-version-check \
		-c constraints-oldest.txt -e ".[test]"
	@touch $@
