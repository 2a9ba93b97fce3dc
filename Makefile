# `make` or `make help` lists what there is. Only python3 (3.11 or newer, with venv), git and make are needed.

PYTHON ?=
VENV ?= .venv
ARGS ?=
PYTHON312 ?=

install = @PYTHON='$(PYTHON)' VENV='$(VENV)' scripts/venv.sh
python = $(VENV)/bin/python
# The tests' tolerances are set on a CPU, and two workers would share one accelerator's memory: it is chosen by name only.
pytest = JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(python) -m pytest -n 2 --dist worksteal

.PHONY: help demo recall hybrid generate test test-thorough test-slow test-mesh test-distributed test-smoke test-aot lint types docs dist bench bench-peers bench-step tpu-schedule conformance-peers hooks clean
.NOTPARALLEL: # every target installs into the one environment

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /make \1|/p' Makefile | while IFS='|' read -r name text; do printf '%-20s %s\n' "$$name" "$$text"; done
	@echo
	@echo 'ARGS="..." is passed on, as in: make demo ARGS="--mixer kda", make test ARGS="-k packing -x".'
	@echo 'PYTHON=python3.12 builds .venv with that interpreter; VENV=DIRECTORY uses another environment.'
	@echo 'JAX_PLATFORMS=cuda runs the tests on a GPU for which the environment has a plugin (default: cpu).'

demo: ## train a small hybrid language model on real text, about 4 minutes on 2 cores
	$(install) examples
	@$(python) examples/language_model.py $(ARGS)

recall: ## train every variant on associative recall, with and without its erase gate, about 2 minutes on 2 cores
	$(install) examples
	@$(python) examples/recall.py $(ARGS)

hybrid: ## load tiny published-style checkpoints as whole models and compare their logits, about 1 minute on 2 cores
	$(install) examples
	@$(python) examples/hybrid_from_checkpoint.py $(ARGS)

generate: ## serve a queue of requests from one pool of states, with the demo's model if there is one, about 1 minute
	$(install) examples
	@$(python) examples/generate.py $(ARGS)

test: ## run the tests, at most 12 minutes on 2 cores
	$(install) test
	@$(pytest) $(ARGS)

test-thorough: ## run them with 500 examples for each law (hours)
	$(install) test
	@HYPOTHESIS_PROFILE=thorough $(pytest) -m 'not slow' $(ARGS)

test-slow: ## run only the tests marked slow
	$(install) test
	@$(pytest) -m slow $(ARGS)

test-mesh: ## layers and the operator over every mesh of eight virtual devices (half an hour on 2 cores)
	$(install) test
	@$(pytest) -m 'slow or not slow' tests/property/test_sharding.py tests/property/test_sharded_layers.py \
		tests/property/test_context_parallel.py $(ARGS)

test-distributed: ## two processes on this machine: every mesh, killed, hung, resumed (15 minutes on 2 cores)
	$(install) test distributed
	@JAX_PLATFORMS=cpu $(python) -m pytest -m slow tests/test_train_distributed.py $(ARGS)

test-smoke: ## run the smoke set three times: plain, in x64, and with JAX's own checks on
	$(install) test
	@$(pytest) -m smoke $(ARGS)
	@JAX_ENABLE_X64=1 $(pytest) -m smoke $(ARGS)
	@JAX_DEBUG_NANS=1 JAX_NUMPY_RANK_PROMOTION=raise $(pytest) -m smoke $(ARGS)

test-aot: ## have libtpu compile every kernel for four TPUs that are not there, at real models' shapes (hours; into .venv-aot)
	@PYTHON='$(PYTHON)' VENV=.venv-aot scripts/venv.sh test tpu
	@JAX_PLATFORMS=cpu .venv-aot/bin/python -m pytest -m aot tests/hardware $(ARGS)

lint: ## ruff: rules and formatting
	$(install) dev
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check

types: ## pyright
	$(install) dev test
	@$(VENV)/bin/pyright --pythonpath $(python)

docs: ## run the code of every page and build the site into site/, strictly: open site/index.html
	$(install) docs test
	@$(pytest) -q -m docs tests/test_docs.py $(ARGS)
	@JAX_PLATFORMS=cpu NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --quiet

dist: ## build sdist and wheel, then run the README's first example with the wheel in an empty environment
	$(install) dev
	@rm -rf dist
	@$(python) -m build >$(VENV)/build.log 2>&1 || { tail -n 40 $(VENV)/build.log; exit 1; }
	@$(python) scripts/check_wheel.py

bench: ## time every variant on a CPU beside what others wrote, where `make bench-peers` has installed it (an hour)
	$(install) bench
	@JAX_PLATFORMS=cpu $(python) benchmarks/bench_op.py $(ARGS)

bench-peers: ## install what others wrote for `make bench` into .venv-conformance (Python 3.12) and .venv-conformance-torch
	@PYTHON312='$(PYTHON312)' scripts/peer_venv.sh conformance
	@scripts/peer_venv.sh conformance-torch 3.11

bench-step: ## time one token of 1, 8 and 64 requests on a CPU core, beside others' steps and a copy of the states (5 minutes)
	$(install) bench
	@JAX_PLATFORMS=cpu $(python) benchmarks/bench_step.py $(ARGS)

tpu-schedule: ## cycles of our TPU kernels and of others', by the compiler's schedule: no TPU needed (an hour; Python 3.12)
	$(install) bench
	@PYTHON312='$(PYTHON312)' scripts/peer_venv.sh tpu-peers
	@$(python) benchmarks/tpu_peers.py --python .venv-tpu-peers/bin/python $(ARGS)

conformance-peers: bench-peers ## ask what others wrote for our laws, and write the tables of docs/conformance.md (about 20 minutes; Python 3.12 and 3.11)
	@for peers in conformance conformance-torch; do [ ! -x .venv-$$peers/bin/python ] || PYTHONPATH=src JAX_PLATFORMS=cpu \
		.venv-$$peers/bin/python scripts/conformance_peers.py --environment $$peers $(ARGS) || exit 1; done

hooks: ## run `make lint types` before every commit
	$(install) dev test
	@$(VENV)/bin/pre-commit install

clean: ## remove the environments, builds and caches
	rm -rf .venv .venv312 .venv-* dist build site .pytest_cache .ruff_cache .hypothesis
