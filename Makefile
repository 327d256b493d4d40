# Two commands do everything, the environment included: make demo, make test.
#
#   make venv    .venv with the package (editable) and every tool the tests need
#   make demo    a small comparison of training methods on two networks; demo/report.html
#   make test    lint, types, import rules, the site, all tests
#   make lint | types | imports | site | tests    one of them; the site is site/index.html
#   make bench   all-reduces of 8 emulated ranks at 200 Mbit/s; bench/bench.json, bench/bench.html
#   make format  rewrite the sources as `make lint` wants them
#   make clean   remove what these made
#
# Variables: PYTHON=... (an interpreter >= 3.11), TESTS="..." (arguments for pytest), WORKERS=...
# (processes that run tests side by side; many tests wait more than they compute; 0: in this one),
# REPEATS=9 (timed calls of each method of `make bench`; the default keeps it under five minutes on
# two cores).

VENV := .venv
STAMP := $(VENV)/.stamp
BIN := $(VENV)/bin
TESTS :=
WORKERS := 2
REPEATS := 3

# An interpreter counts if it is new enough (and not newer than the pinned packages) and can make
# an environment.
SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
CANDIDATES := python3 python3.13 python3.12 python3.11 python3.14 python
PYTHON = $(shell for p in $(CANDIDATES); do \
  if $$p -c '$(SUITABLE)' >/dev/null 2>&1; then echo $$p; break; fi; done)

BENCH_METHODS := backend; backend:wire=bf16; ring; \
  coded:passes=2; coded:passes=4; coded:passes=8; \
  coded:passes=16,code=fourier; \
  coded:passes=16,code=fourier,shuffle=true,wire=bf16; \
  coded:passes=16,code=fourier,wire=int8; \
  quantized:wire=bf16; quantized:bits=8; quantized:bits=4; direct:bits=8

.PHONY: venv demo bench test lint types imports site tests format clean

venv: $(STAMP)

# An environment that was copied or moved still points at its old folder: make it anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 to 3.14 with venv found; install one" \
	  "(Debian: apt-get install python3 python3-venv) or say make PYTHON=/path/to/python3" >&2; exit 1; }
	@rm -f $(STAMP)
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@echo '$(CURDIR)' > $(STAMP)

demo: $(STAMP)
	$(BIN)/taciturn compare --quick --out demo

bench: $(STAMP)
	@mkdir -p bench
	$(BIN)/taciturn bench --ranks 8 --rate 200mbit --size 1MiB,32MiB --repeats $(REPEATS) --warmup 1 \
	  --methods "$(BENCH_METHODS)" --json bench/bench.json --html bench/bench.html

test: lint types imports site tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports --no-cache

site: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --quiet

tests: $(STAMP)
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(TESTS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist demo bench site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
