# Every target sets up .venv on first use, and again when the C++ core or pyproject.toml changes.

PYTHON ?= python3
# Installed first, and exactly: pyproject.toml allows a range, but this release is the one we test. Override it
# for another build of torch, e.g. TORCH='torch==2.13.0+cpu' where pip would fetch gigabytes of CUDA.
TORCH ?= torch==2.13.0
# More arguments for the command behind `make demo` or `make test`.
ARGS ?=
# Files of tests at the same time: for two cores four, because many tests wait.
WORKERS ?= 4

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_INPUT = 1
export PYTHONDONTWRITEBYTECODE =  # where it is set: thousands of processes would compile the same files again

BIN := .venv/bin
READY := .venv/.ready
NATIVE := $(shell find native -type f)
STUB := src/tacit/_core.pyi
STUBGEN := $(BIN)/python -m nanobind.stubgen -q -m tacit._core -o

.PHONY: help demo test test-fast test-failed check stub fuzz bench bench-aggregator bench-clicks bench-loss bench-loopback bench-overlap bench-plan bench-auto bench-codec bench-error bench-accuracy bench-sparse chaos hostile clean distclean
.DELETE_ON_ERROR:

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-25s%s\n", $$1, $$2 }'

demo: $(READY)  ## train a small model with several strategies, and compare them
	@$(BIN)/tacit demo $(ARGS)

test: $(READY)  ## run the tests, and show how long each room took
	@$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: $(READY)  ## run the tests that start no processes
	@$(BIN)/pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-failed: $(READY)  ## run what failed the last time once more, one test after another
	@$(BIN)/pytest --last-failed --last-failed-no-failures none $(ARGS)

check: $(READY)  ## lint, formats, types, and the stub of the C++ core
	@echo "ruff check";   $(BIN)/ruff check -q
	@echo "ruff format";  $(BIN)/ruff format -q --check || { echo "run: $(BIN)/ruff format"; exit 1; }
	@echo "mypy";         $(BIN)/mypy --no-error-summary
	@echo "clang-format"; $(BIN)/clang-format --dry-run -Werror $(filter %.cpp %.h,$(NATIVE)) $(wildcard fuzz/*.cpp)
	@echo "stub";         mkdir -p build && $(STUBGEN) build/_core.pyi && diff -u $(STUB) build/_core.pyi || { echo "$(STUB) is out of date; run: make stub"; exit 1; }

stub: $(READY)  ## write the stub of the C++ core again
	@$(STUBGEN) $(STUB)

fuzz:  ## ten million mutated packets through the aggregator's plane, and some into the ends of row flows, under sanitizers (about two minutes)
	@fuzz/run $(ARGS)
	@fuzz/run row_flows

bench: $(READY)  ## run the short benchmarks: one JSON record a line
	@$(BIN)/python benchmarks/blocks.py
	@$(BIN)/python benchmarks/codec.py

bench-aggregator: $(READY)  ## the aggregator in the lab, against gloo and one server (about 3 minutes; kernel plane: root and clang)
	@$(BIN)/python benchmarks/aggregator_lab.py $(ARGS)

bench-clicks: $(READY)  ## the click model in shards and with codecs against plain DDP, 200 Mbit, 3 seeds (about 10 minutes)
	@$(BIN)/python benchmarks/click_model.py $(ARGS)

bench-loss: $(READY)  ## star(loss=...) against exact recovery: lost packets, a late rank (lab, about 2 minutes)
	@$(BIN)/python benchmarks/bounded_loss.py $(ARGS)

bench-loopback: $(READY)  ## what tacit costs where nothing can be won: loopback, against plain DDP
	@$(BIN)/python benchmarks/loopback.py $(ARGS)

bench-auto: $(READY)  ## `auto` against every fixed choice on three links, in the lab (about 8 minutes; ARGS=--quick: 2)
	@$(BIN)/python benchmarks/auto.py $(ARGS)

bench-plan: $(READY)  ## predicted steps against measured ones, 24 set-ups in the lab (about 20 minutes; ARGS=--quick: 3)
	@$(BIN)/python benchmarks/plan.py $(ARGS)

bench-overlap: $(READY)  ## steps that overlap with the next forward pass, FSDP2 that overlaps at all (lab, about 10 minutes)
	@$(BIN)/python benchmarks/overlap.py $(ARGS)

bench-codec: $(READY)  ## what the 4-bit codecs cost, against a copy
	@$(BIN)/python benchmarks/codec.py $(ARGS)

bench-error: $(READY)  ## errors of the codecs on real gradients
	@$(BIN)/python benchmarks/real_gradients.py $(ARGS)

bench-accuracy: $(READY)  ## training to equal accuracy, 3 seeds (about 25 minutes)
	@$(BIN)/python benchmarks/accuracy.py $(ARGS)

bench-sparse: $(READY)  ## sparse tables in the lab: shards, row servers and hot rows against DDP (about 45 minutes; ARGS=--quick: 3)
	@$(BIN)/python benchmarks/sparse.py $(ARGS)

chaos: $(READY)  ## kill and cut off ranks that gossip, 10 seeds, and hold them to what is promised (about 45 minutes)
	@$(BIN)/python benchmarks/chaos.py $(ARGS)

hostile: $(READY)  ## attack every port that tacit opens, on loopback, and count what was refused (10 minutes)
	@$(BIN)/python tests/hostile/run.py $(ARGS)

clean:  ## remove what builds, tests and runs leave
	@rm -rf build dist runs .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name .venv -prune -o -name __pycache__ -exec rm -rf {} +

distclean: clean  ## clean, and remove .venv
	@rm -rf .venv

$(READY): pyproject.toml CMakeLists.txt $(NATIVE)
	@PYTHON="$(PYTHON)" scripts/bootstrap
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tacit needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || { echo "creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing $(TORCH)"; $(BIN)/pip install -q "$(TORCH)"
	@echo "building tacit and installing what it needs"; $(BIN)/pip install -q -e '.[dev]'
	@touch $@
