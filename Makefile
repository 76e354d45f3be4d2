# Two commands matter to a newcomer: `make demo` and `make test`. Each makes .venv by itself, with
# the versions that constraints.txt pins, and leaves it alone until pyproject.toml or
# constraints.txt change.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_FRAMEWORKS := $(VENV)/.installed-frameworks
INSTALLED_SITE := $(VENV)/.installed-site
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-newest check gpu sanitize poison golden bench fuzz soak figures docs site address release clean

help:  ## list these commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

# The stamp is touched last, so an interrupted installation is done again.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -c constraints.txt -e '.[test,transformers,demo]'
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	@$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

$(INSTALLED_FRAMEWORKS): $(INSTALLED)
	@$(PIP_INSTALL) -c constraints.txt -e '.[frameworks]'
	@touch $@

$(INSTALLED_SITE): $(INSTALLED)
	@$(PIP_INSTALL) -c constraints.txt -e '.[site]'
	@touch $@

demo: $(INSTALLED)  ## train a small Llama with and without the backend, and compare
	@$(PY) -m memeff_compile demo

# Triton reads TRITON_INTERPRET when it is imported: interpreted kernels have a run of their own.
INTERPRETED = $(shell grep -rlE 'mark\.interpreter\b' tests --include='test_*.py')
# NumPy, of which the interpreter is made, starts as many threads as there are cores in each process.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal
define TESTS
	env -u TRITON_INTERPRET $(PYTEST) -m 'not gpu and not slow and not interpreter'
	TRITON_INTERPRET=1 $(PYTEST) -m 'interpreter and not slow' $(INTERPRETED)
endef
# What one process has compiled of our modules and tests is read by the others and by the next run.
unexport PYTHONDONTWRITEBYTECODE

test: $(INSTALLED)  ## every CPU test, in two runs
	$(TESTS)

test-all: $(INSTALLED_FRAMEWORKS)  ## the CPU tests, those that take minutes, and whole frameworks (TRL, Lightning, diffusers, torchao)
	env -u TRITON_INTERPRET $(PYTEST) -m 'not gpu and not interpreter'
	TRITON_INTERPRET=1 $(PYTEST) -m interpreter $(INTERPRETED)

test-newest: PY := .venv-newest/bin/python
test-newest:  ## the CPU tests against the newest torch and transformers, in .venv-newest
	$(PYTHON) -m venv .venv-newest
	$(PY) -m pip install --quiet --upgrade -e '.[test,transformers,demo]'
	$(PY) -m memeff_compile doctor
	$(TESTS)

gpu:  ## only what a GPU can show; uses the python it finds, installs nothing
	env -u TRITON_INTERPRET PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -q -m gpu tests

TOOL ?= memcheck
sanitize:  ## a share of the kernels' GPU tests under compute-sanitizer (TOOL=racecheck, initcheck; SHARD=0/4)
	PYTHONPATH=$(CURDIR) PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $(TOOL) \
	  --target-processes all $(PYTHON) -m pytest -q -p tests.support.sanitized -m gpu tests/kernels

poison:  ## the GPU tests with NaN in memory that nobody has written
	env -u TRITON_INTERPRET PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -q -p tests.support.poisoned -m gpu tests/kernels

check: $(INSTALLED_DEV)  ## lint, format, types, import directions, spelling, generated pages
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell
	$(PY) -m memeff_compile options --page | diff docs/options.md - \
	  || { echo "docs/options.md is out of date: run 'make docs'"; exit 1; }

golden: $(INSTALLED)  ## accept new goldens, after reading the diff
	EXPECTTEST_ACCEPT=1 $(PY) -m pytest -q $$(grep -rlE 'assertExpectedInline|assert_expected_inline' tests examples)
	find tests examples -name '*.py.bak' -delete

OP ?= linear_cross_entropy
SCRIPT = $(or $(wildcard benchmarks/*/$(OP).py),$(error no benchmarks/*/$(OP).py))
bench:  ## measure with the python it finds: make bench OP=models ARGS="--model llama3.2-1b"
	PYTHONPATH=$(CURDIR) $(PYTHON) $(SCRIPT) $(ARGS)

SECONDS ?= 600
SEED ?= 0
PART ?= a,b,c,d,e,f
OUT ?=
fuzz: $(INSTALLED)  ## random programs against eager PyTorch: make fuzz SECONDS=600 SEED=1 PART=a,b OUT=counts.jsonl
	PYTHONPATH=$(CURDIR) $(PY) -m fuzz --seconds $(SECONDS) --seed $(SEED) --part $(PART) \
	  $(if $(filter command,$(firstword $(origin JOBS))),--jobs $(JOBS)) $(if $(OUT),--out $(OUT))

soak: $(INSTALLED)  ## thousands of steps, compilations and generations: memory and live tensors flat
	PYTHONPATH=$(CURDIR) $(PY) -m fuzz soak

figures: $(INSTALLED)  ## redraw every figure from the raw results
	$(PY) benchmarks/plot.py

docs: $(INSTALLED)  ## rewrite the generated pages
	$(PY) -m memeff_compile options --page > docs/options.md.new
	mv docs/options.md.new docs/options.md

# Not --quiet: a warning that is not logged does not count in strict mode.
# The variable stops an advertisement of the theme's authors.
site: $(INSTALLED_SITE)  ## build/site: these pages and the API reference; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build
	@echo "Look at it, with search: python3 -m http.server --directory build/site"

URL ?=
# Every file but this one and tests: those name the placeholder itself.
address:  ## write the repository's address wherever readers need it: make address URL=https://host/owner/name
	@case "$(URL)" in https://*) ;; *) echo "URL is '$(URL)': give https://host/owner/name"; exit 1;; esac
	git grep -lF 'https://ADDRESS' -- ':!Makefile' ':!tests' | xargs sed -i 's#https://ADDRESS#$(URL)#g'

TAG ?=
release: $(INSTALLED_DEV)  ## check, build dist/ and say what is missing; with TAG=1 tag it here; pushes nothing
	.ci/run
	rm -rf dist build
	$(PY) -m build --quiet --outdir dist .
	$(PY) .ci/release.py $(if $(TAG),--tag)

clean:  ## remove everything that the commands above made
	rm -rf .venv .venv-newest build dist demo_output *.egg-info \
	  .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
