# Two commands set up a fresh machine: `make demo` (no torch, under three minutes) and `make test`.
# Every target brings what it needs into .venv; a stamp per environment makes the second run start at once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SHARED_OUT := -n logical --maxprocesses 8 --dist loadgroup --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest $(SHARED_OUT)
# Triton 3.9 fuses multiplications and additions, and warns that 3.10 will not.
export TRITON_DEFAULT_FP_FUSION := 1

NATIVE_SOURCES := CMakeLists.txt $(wildcard moe_rl/csrc/*.cpp moe_rl/csrc/*.h)

.PHONY: help env demo examples test quick test-sync test-docs test-slow mutants test-oldest test-frameworks-newest test-integrations test-integrations-slow test-browser test-wheel wheel wheels lock fuzz fuzz-planner sanitize \
    lint format bench bench-kernels bench-kernels-baseline gpu-pack kernel-carried test-first-call kernel-proof kernel-compile test-emulator kernel-emulate tables docs clean
help:
	@echo "make demo         simulate the bundled trace, write out/report.html   (numpy-class dependencies only)"
	@echo "make env          .venv with everything that make test and make lint need; runs nothing"
	@echo "make test         CPU torch + megatron-core + Triton interpreter, then the tests that are not slow; those that take seconds every tenth day (CASES=all: all)"
	@echo "make quick        of these the ones of one process that run no kernel: about two minutes"
	@echo "make test-slow    the tests marked slow"
	@echo "make mutants      100 small faults of the day in the Megatron runtime: at least 95 of them must fail a test (MUTANTS=10: ten)"
	@echo "make test-oldest  the kernel tests on the oldest Triton that is supported, in .venv-oldest"
	@echo "make test-integrations  the adapters inside verl, Transformers and DeepSpeed themselves, sweeps on Ray, in .venv-frameworks; tests that take seconds every second day (CASES=all: all)"
	@echo "make test-integrations-slow  the other breaks of the day in these frameworks, and a checkpoint that half the ranks resume"
	@echo "make test-frameworks-newest  the runtime and the adapters on the newest releases of megatron-core, verl, Transformers, TRL, Ray and tensordict: what breaks, and whose fault it is"
	@echo "make examples     examples/, the notebook and runs of the Countdown recipe among them; those of frameworks are part of make test-integrations"
	@echo "make test-docs    the tutorial, literally, for every rollout engine; every command of README.md and docs/ that can run here"
	@echo "make test-sync    weight syncs through the loaders of SGLang and vLLM as released, whose wheels it unpacks into .venv-sync (400 MB)"
	@echo "make test-browser the pages in Chromium, which it installs where it may; says so where it cannot"
	@echo "make test-wheel   wheels of a checkout and of git's archives in an empty environment, without a compiler"
	@echo "make fuzz-planner 60 settings of the day: does any policy beat moe-rl with the same slots?"
	@echo "make fuzz         a million seeded cases of the planner's C++, and a million damaged streams of routes (FUZZ_CASES=100000)"
	@echo "make sanitize     the tests that reach the C++ core, on one with address and undefined-behavior sanitizers"
	@echo "make lint         ruff, mypy, how dense statements and what names are, room by room, words that no page or message has, and how long README.md and docs/ are"
	@echo "make bench        pytest-benchmark suites into out/benchmarks.json"
	@echo "make bench-kernels  a figure per problem of the kernels beside the committed baseline: device time, or issue slots and waits without a GPU"
	@echo "make gpu-pack     a checkout made ready for a GPU machine: python3 benchmarks/first_call.py --out DIR runs there"
	@echo "make kernel-carried  the machine code that is carried: the reference's bits on the emulator, every launch"
	@echo "make test-first-call  the first call's phases and faults as a GPU machine has them: Python 3.12, Triton 3.6, no pydantic"
	@echo "make kernel-proof what the kernels' machine code says about their speed, beside DeepGEMM's, without a GPU"
	@echo "make kernel-compile  every launch compiled for Hopper and Blackwell: spills, tensor cores, offsets"
	@echo "make test-emulator  some launches on an emulator of PTX, in 4 schedules, with mutants; every backend and recipe interpreted"
	@echo "make kernel-emulate  every launch on an emulator of PTX, in 20 schedules, and mutants of its synchronization"
	@echo "make wheel        dist/moe_rl-*.whl for this Python"
	@echo "make wheels       wheels built and run on every Python from 3.11 that is here, and the Dockerfile's commands in an empty root"
	@echo "make lock         requirements.lock: every version of the environment that the tests run in"
	@echo "make tables       what README.md and docs/ take from the code"
	@echo "make docs         the site of docs/, with the references of Python and the command line, in out/site"

# --- environments -------------------------------------------------------------------------------------------
$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The editable install compiles moe_rl._native when a compiler is there and falls back to numpy when not. Meanwhile pip
# installs what moe_rl requires (pyproject.toml, dependencies); Python compiles these files when it first imports them.
$(VENV)/.core: $(VENV)/.created pyproject.toml constraints.txt $(NATIVE_SOURCES)
	@echo "Installing moe_rl and the dozen packages that it needs into $(VENV); its C++ core is compiled, which takes half a minute."
	@$(MAKE) --no-print-directory -j 2 install-core install-dependencies
	@touch $@

.PHONY: install-core install-dependencies
install-core:
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --disable-pip-version-check --no-deps -e .

install-dependencies:
	@$(PIP) --no-compile $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'])")

# torch first and alone: a looser request would pull gigabytes of CUDA. triton without its dependencies for the same reason.
$(VENV)/.test: $(VENV)/.core
	$(PIP) torch==2.13.0
	$(PIP) "moe-rl[test]"
	$(PIP) --no-deps triton
	@touch $@

# On top of the test environment: mypy has to see torch to check what uses it.
$(VENV)/.lint: $(VENV)/.test
	$(PIP) "moe-rl[lint]"
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	$(PIP) "moe-rl[docs]"
	@touch $@

$(VENV)/.examples: $(VENV)/.test
	$(PIP) "moe-rl[examples]"
	@touch $@

# Only files of these wheels are read: none of their requirements is installed, and nothing of them runs on a GPU.
.venv-sync/.created: $(VENV)/.test constraints.txt
	$(PIP) --no-deps --no-compile --upgrade --target .venv-sync sglang vllm
	@touch $@

env: $(VENV)/.lint

# --- what people run ----------------------------------------------------------------------------------------
demo: $(VENV)/.core
	@mkdir -p out
	$(BIN)/moe-rl demo --html out/report.html

# Those of several ranks come first (tests/conftest.py): while a worker waits for its ranks, another one has the cores.
# Of these and of the `lengthy` ones each has its turn every tenth day, for 15 minutes on two cores; CASES=all, as in
# .ci/nightly, runs all of them.
CASES ?= day
in-days = MOE_RL_TEST_DAYS=$(if $(filter all,$(CASES)),1,$(1))
test: $(VENV)/.test
	$(call in-days,10) $(PYTEST) -m "not slow and not framework and not browser and not example"

quick: $(VENV)/.test
	$(PYTEST) -m "not slow and not framework and not browser and not example and not multi_rank and not triton and not lengthy"

test-slow: $(VENV)/.examples
	$(BIN)/python -m pytest -m slow

# An optional job: GPU images carry older releases of Triton, whose interpreter and compiler differ.
OLDEST_TRITON ?= 3.6.0
OLDEST := .venv-oldest
$(OLDEST)/.created:
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    numpy pydantic PyYAML typer rich jinja2 msgpack pytest hypothesis
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps triton==$(OLDEST_TRITON)
	@touch $@

# Faults of the day in the runtime, and whether tests notice. Alone on the machine: it uses two cores. In CI:
# MUTANTS="10 --minutes 8".
MUTANTS ?= 100
mutants: $(VENV)/.test
	PYTHONPATH=tests $(BIN)/python -m mutants --count $(MUTANTS)

test-oldest: $(OLDEST)/.created
	PYTHONPATH=. $(OLDEST)/bin/python -m pytest tests/kernels

# verl's metadata caps transformers below what the adapters are tested with, and runs with it: so without its dependencies.
FRAMEWORKS := .venv-frameworks
FRAMEWORK_PIP := $(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
VERL_NEEDS := mbridge tensordict orjson ray hydra-core omegaconf codetiming accelerate datasets peft torchdata pandas pyarrow dill \
    pylatexenc cachetools packaging einops fastapi uvicorn
# DeepSpeed comes as source alone, and its build looks at the torch that is there. It compiles nothing with DS_BUILD_OPS=0.
DEEPSPEED_NEEDS := setuptools wheel ninja hjson py-cpuinfo tqdm
$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt $(NATIVE_SOURCES)
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORK_PIP) torch==2.13.0
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test,trl]"
	$(FRAMEWORK_PIP) $(VERL_NEEDS) $(DEEPSPEED_NEEDS)
	$(FRAMEWORK_PIP) --no-deps verl sglang triton
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(FRAMEWORK_PIP) --no-deps --no-build-isolation deepspeed
	@touch $@

# Tests of several ranks that need no framework have run in `make test`; those of one process find the real package here.
# Those that take seconds have their turn every second day, for 9 minutes on two cores; CASES=all, as in .ci/nightly.
test-integrations: $(FRAMEWORKS)/.installed
	$(call in-days,2) $(FRAMEWORKS)/bin/python -m pytest $(SHARED_OUT) tests/docs/test_examples.py tests/frameworks \
	    tests/study/test_ray.py tests/routes/test_shard.py -m "not slow and (framework or not multi_rank)"

test-integrations-slow: $(FRAMEWORKS)/.installed
	$(FRAMEWORKS)/bin/python -m pytest $(SHARED_OUT) tests/frameworks -m slow

# The newest releases that pip finds, of what moves: an environment of its own, because all other tests run on the versions of
# constraints.txt. From 0.17 on megatron-core asks for Python 3.12, for which PyPI has the CUDA build of torch alone: 5 GB.
NEWEST := .venv-frameworks-newest
NEWEST_PYTHON ?= $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python; do \
    if $$python -c "import venv" 2>/dev/null; then echo $$python; break; fi; done)
MOVING := megatron-core verl transformers trl ray tensordict mbridge
NEWEST_PIP := $(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check
$(NEWEST)/.installed: pyproject.toml constraints.txt $(NATIVE_SOURCES)
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	grep -v $(foreach name,$(MOVING) triton,-e '^$(name)==') constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST_PIP) -c $(NEWEST)/constraints.txt torch==2.13.0
	PIP_CONSTRAINT=$(CURDIR)/$(NEWEST)/constraints.txt $(NEWEST_PIP) -e ".[test,trl]"
	@touch $@

test-frameworks-newest:
ifeq ($(NEWEST_PYTHON),)
	@echo "make test-frameworks-newest: skipped, no Python 3.12 was found; name one by NEWEST_PYTHON=..."
else
	$(MAKE) $(NEWEST)/.installed
	$(NEWEST_PIP) --upgrade -c $(NEWEST)/constraints.txt $(filter-out verl,$(MOVING)) $(VERL_NEEDS)
	$(NEWEST_PIP) --upgrade --no-deps -c $(NEWEST)/constraints.txt verl
	PYTHONPATH=tests $(NEWEST)/bin/python -m newest $(SHARED_OUT)
endif

examples: $(VENV)/.examples
	$(BIN)/python -m pytest -m "not framework" tests/docs/test_examples.py
	$(BIN)/python -m pytest -m "example and not slow" tests/countdown

test-docs: $(VENV)/.test
	$(BIN)/python -m pytest -m slow tests/docs/test_tutorial.py tests/docs/test_commands.py

test-sync: $(VENV)/.test
	@$(MAKE) --no-print-directory .venv-sync/.created || { echo "NOT RUN: pip could not bring the wheels of sglang and vllm"; exit 0; }; \
	MOE_RL_ENGINES=$(CURDIR)/.venv-sync $(BIN)/python -m pytest -n 0 tests/sync/test_engine_loaders.py

test-browser: $(VENV)/.test
	sh tests/browser/run.sh $(BIN)/python

test-wheel: $(VENV)/.test
	$(BIN)/python -m pytest -m slow tests/packaging/test_build.py -k "empty_environment or archive"

# With pip's build isolation: it needs a Python and a registry, and no environment of ours.
wheel:
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

wheels: $(VENV)/.test
	$(BIN)/python -m pytest -m slow tests/packaging/test_interpreters.py

FUZZ_CASES ?= 1000000
fuzz: $(VENV)/.test
	FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest -m slow tests/planner/test_native_fuzz.py tests/routes/test_fuzz.py

fuzz-planner: $(VENV)/.core
	PYTHONPATH=. $(BIN)/python benchmarks/fuzz_planner.py

sanitize: $(VENV)/.test
	sh tests/native/sanitize.sh

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/readability.py
	$(BIN)/python tests/plain_words.py
	$(BIN)/python tests/page_lengths.py

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.test
	@mkdir -p out
	$(BIN)/python -m pytest benchmarks -m "not slow" --benchmark-json=out/benchmarks.json

# Without a GPU the figures are counted in machine code, the same on every machine. A GPU has a baseline of its own, once
# somebody has measured one there: GROWTH=10%.
GROWTH ?= 1%
bench-kernels: $(VENV)/.test
	PYTHONPATH=. $(BIN)/python benchmarks/bench_kernel_figures.py --growth $(GROWTH)

bench-kernels-baseline: $(VENV)/.test
	PYTHONPATH=. $(BIN)/python benchmarks/bench_kernel_figures.py --write-baseline

# Compiles what is carried (three CPU minutes, no GPU), and lays beside the checkout what a GPU image lacks: git ignores
# carried/, so a copy of the checkout has to take it along. Then, there: python3 benchmarks/first_call.py --out DIR
gpu-pack: $(VENV)/.test
	PYTHONPATH=. $(BIN)/python -m benchmarks.kernels.carry
	PYTHONPATH=. $(BIN)/python -m benchmarks.gpu.pack

# At most thirty CPU minutes; six of the launches are part of `make test`.
kernel-carried: $(VENV)/.test
	PYTHONPATH=tests:. $(BIN)/python -m emulator.carried

# What a GPU machine has, but for its GPU. torch 2.11 brings Triton 3.6.0 along.
BARE := .venv-bare
BARE_PYTHON ?= $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python; do \
    if $$python -c "import venv" 2>/dev/null; then echo $$python; break; fi; done)
$(BARE)/.created:
	$(BARE_PYTHON) -m venv $(BARE)
	$(BARE)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.11.0 triton==3.6.0
	$(BARE)/bin/python -m pip install --quiet --disable-pip-version-check "numpy>=2.5" PyYAML typer msgpack packaging
	@touch $@

test-first-call: $(VENV)/.test
ifeq ($(BARE_PYTHON),)
	@echo "make test-first-call: skipped, no Python 3.12 was found; name one by BARE_PYTHON=..."
else
	$(MAKE) $(BARE)/.created
	@[ -d carried ] || PYTHONPATH=. $(BIN)/python -m benchmarks.gpu.pack
	FIRST_CALL_PYTHON=$(CURDIR)/$(BARE)/bin/python $(BIN)/python -m pytest -m "slow or not slow" tests/kernels/test_first_call.py
endif

# Kernels of others come in wheels, which are unpacked and not installed: DeepGEMM's headers for nvcc, FBGEMM's and Liger's
# Triton sources. The page says what is missing.
PEERS := out/kernel-peers
kernel-proof: $(VENV)/.test
	@mkdir -p $(PEERS)
	-@for peer in sgl-deep-gemm==0.1.5.post1 fbgemm-gpu-genai==1.9.0 liger-kernel==0.8.5; do \
	    $(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(PEERS) $$peer; done
	PYTHONPATH=. $(BIN)/python -m benchmarks.kernels.proof --peers $(PEERS)

# Two processes hold 3 GB each: the launches that are shipped are recorded with their tensors.
kernel-compile: $(VENV)/.test
	$(BIN)/python -m pytest -m slow tests/kernels/test_aot.py

test-emulator: $(VENV)/.test
	$(BIN)/python -m pytest -m slow tests/kernels/test_emulated.py tests/conformance

kernel-emulate: $(VENV)/.test
	@mkdir -p out
	PYTHONPATH=tests:. $(BIN)/python -m emulator --mutants --json out/kernel_emulate.json

lock: $(VENV)/.lint $(VENV)/.docs $(VENV)/.examples
	$(PIP) "moe-rl[browser]"
	$(BIN)/python -m pip freeze --quiet --disable-pip-version-check --exclude-editable > requirements.lock

tables: $(VENV)/.examples
	PYTHONPATH=. $(BIN)/python benchmarks/make_tables.py

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

clean:
	rm -rf build out .pytest_cache .mypy_cache .ruff_cache
