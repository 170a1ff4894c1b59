# Each target does all its set-up on a machine that has Python, pip and make.
PYTHON ?= python3
VENV ?= .venv
SEARCH ?= --space auto_thresholds
# Four files of tests at a time, for those that start Ray wait much; PYTEST= runs one file after the other.
PYTEST ?= -n 4 --dist loadfile --no-loadscope-reorder
PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TESTS = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest

.PHONY: search check test claims all-tests lint programs clean

search: $(VENV)/.installed
	$(VENV)/bin/python -m tune_cac search $(SEARCH)

# Before every commit: style, types, and the tests that take less than two seconds each.
check: lint
	$(TESTS) -n 2 --dist loadfile -m 'not slow'

# What README claims; with -j 2 style and types beside the tests.
test: lint claims

claims: $(VENV)/.compiled programs
	$(TESTS) $(PYTEST) -m 'not thorough'

# Everything.
all-tests: $(VENV)/.compiled programs
	$(TESTS) $(PYTEST)

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Tests of pages want Chromium, those of Ray's head Redis. Installed where
# that can be done; without Chromium its tests are skipped, which the run says.
ALSO = { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && echo installing $(1) && apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(1) > /dev/null; } || true
programs:
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || \
		command -v google-chrome > /dev/null || [ -n "$$CHROMIUM" ] || $(call ALSO,chromium)
	@command -v redis-server > /dev/null || $(call ALSO,redis-server)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e .
	touch $@

# cac 1.0.0 is the published optimizer: the tests compare with it step by step. Its dependencies are left out because
# one of them, apex, is needed only by parts that nobody here loads. So are those of curvlinops, the oracle of K-FAC,
# but for what it loads: torchvision, which an unused part of backpack names, does not fit the CPU build of torch. Its
# data sets and models work all the same, and are oracles of ours, as those of timm, which needs it; both have a folder
# of their own, where nothing else finds them and fails.
# moto, an S3 server, asks for an older dateutil than pandas, and works with this one.
$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --no-deps --upgrade --target $(VENV)/torchvision torchvision timm & beside=$$!; $(PIP) -e '.[test]' && \
	$(PIP) --no-deps cac==1.0.0 curvlinops-for-pytorch backpack-for-pytorch einconv einops linear_operator opt_einsum \
		unfoldNd moto boto3 botocore jmespath py-partiql-parser responses s3transfer xmltodict && wait $$beside
	touch $@ $(VENV)/.installed

# Tests are compiled once: each of several processes that begin together would compile all of them.
$(VENV)/.compiled: $(VENV)/.installed-test
	$(TESTS) --collect-only --quiet > /dev/null
	touch $@

clean:
	rm -rf $(VENV)
