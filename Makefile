# The front door: each target is a few words here and a script or CMake underneath.

SHELL := /bin/bash
BUILD ?= build
JOBS ?= $(shell nproc)
CMAKE_FLAGS ?=
SEEDS ?= 1000
# SECONDS is a variable of the shell; only what is said on the command line counts.
SECONDS_EACH := $(if $(filter command line,$(origin SECONDS)),$(SECONDS),60)
TARGETS ?=
SEED_BASE ?= 1

.DEFAULT_GOAL := help
.PHONY: help deps tools models cuda-toolkit flashinfer cuda-archs simt-ptx simt-mutants simt-tsan simt-msan device device-bundle build demo check unit parity sim e2e tidy deploy lint test test-all asan tsan fuzz bench bench-anchor clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

deps:  ## install what is missing (Debian packages)
	@scripts/install_deps.sh

tools: deps  ## fetch test tools into .cache (ghz, buf, Python with grpcio)
	@scripts/get_tools.sh

models: deps  ## fetch the demo model and Qwen3's tokenizer into .cache
	@scripts/get_demo_model.sh
	@scripts/get_tokenizer.sh

cuda-toolkit: deps  ## assemble a CUDA 13 toolkit in .deps/ where none is installed (BATON_CUDA=OFF: do not)
	@scripts/get_cuda_toolkit.sh || echo "[cuda] no CUDA toolkit: building for the CPU only"

flashinfer: deps  ## take FlashInfer's headers into .deps/; then make build CMAKE_FLAGS=-DBATON_FLASHINFER=ON
	@scripts/get_flashinfer.sh

build: cuda-toolkit  ## compile everything into build/ (binaries in build/bin)
	@cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release -DBATON_BUILD_TESTS=ON -DBATON_CUDA=$${BATON_CUDA:-AUTO} $(CMAKE_FLAGS) >$(BUILD).configure.log 2>&1 || { cat $(BUILD).configure.log; exit 1; }
	@grep "CUDA backend" $(BUILD).configure.log || true
	@rm -f $(BUILD).configure.log
	@ninja -C $(BUILD) -j$(JOBS)

demo:  ## install, build, fetch a small model and stream a first answer from three processes
	@scripts/demo.sh

check: build unit parity tidy  ## before every commit: build, unit, parity, tidy

unit: build models  ## unit tests
	@ctest --test-dir $(BUILD) -L unit --output-on-failure -j$(JOBS)

parity: build  ## ref against cpu, logits against transformers
	@ctest --test-dir $(BUILD) -L parity --output-on-failure

sim: build  ## deterministic simulation; SEEDS=N SEED_BASE=M (a single seed tells its story)
	@BATON_SIM_SEEDS=$(SEEDS) BATON_SIM_SEED_BASE=$(SEED_BASE) $(BUILD)/tests/sim_cluster --gtest_filter='*NothingIsLost*'

e2e: build tools models  ## real processes, driven over gRPC
	@BATON_BUILD_DIR=$(CURDIR)/$(BUILD) .cache/tools/venv/bin/python -m pytest -q -m "not slow" tests/e2e

tidy: tools  ## rules of STYLE: rooms, names, includes, protos
	@.cache/tools/venv/bin/python -m pytest -q tests/tidy

deploy: build tools  ## chart, dashboards, alerts, load recipes and the guide's commands
	@BATON_BUILD_DIR=$(CURDIR)/$(BUILD) .cache/tools/venv/bin/python -m pytest -q -m "not slow" tests/deploy

test: build tools models  ## everything that takes minutes: build, unit, parity, sim, e2e, tidy, deploy
	@scripts/run_tests.sh $(BUILD)

test-all: test asan tsan cuda-archs simt-ptx simt-mutants simt-tsan simt-msan  ## adds what takes longer: sanitizers, exhaustive and long runs, pages in a browser
	@scripts/install_deps.sh --browser
	@BATON_BUILD_DIR=$(CURDIR)/$(BUILD) .cache/tools/venv/bin/python -m pytest -q -m slow tests/e2e tests/deploy
	@ctest --test-dir $(BUILD) -L long --output-on-failure

simt-ptx: build  ## the kernel tests, run on the CPU from the PTX that nvcc emits; then with changed PTX
	@scripts/run_simt.sh ptx $(BUILD) $(JOBS)

simt-mutants: build  ## the kernel tests with one barrier, wait or rule of two devices broken at a time: each must fail
	@scripts/run_simt.sh mutants $(BUILD) $(JOBS)

simt-tsan: build  ## the kernels on the CPU under the thread sanitizer
	@scripts/run_simt.sh tsan $(BUILD) $(JOBS)

simt-msan: cuda-toolkit  ## the kernels on the CPU under clang's memory sanitizer
	@scripts/run_simt.sh msan build-msan $(JOBS)

cuda-archs: cuda-toolkit  ## compile the CUDA kernels for sm_80, sm_89 and sm_100 too
	@cmake -S . -B build-cuda -G Ninja -DBATON_BUILD_TESTS=OFF -DBATON_CUDA=ON "-DBATON_CUDA_ARCHITECTURES=80-real;89-real;100-real" >build-cuda.configure.log 2>&1 || { cat build-cuda.configure.log; exit 1; }
	@rm -f build-cuda.configure.log
	@ninja -C build-cuda -j$(JOBS) baton_cuda_kernels

device-bundle: build  ## one file for a GPU host: build/baton-device.tar.gz
	@ninja -C $(BUILD) -j$(JOBS) device_tests device_bench
	@scripts/make_device_bundle.sh $(BUILD)

device: device-bundle  ## on a machine with a GPU: ceilings, probes, parity, hand-over, models on the device
	@rm -rf $(BUILD)/device && mkdir -p $(BUILD)/device && tar -C $(BUILD)/device -xzf $(BUILD)/baton-device.tar.gz
	@$(BUILD)/device/baton-device/tests/device_check.sh --out $(BUILD)/device_report.json

lint: build tools  ## format, scripts, protos, and clang's check of who holds which mutex
	@scripts/lint.sh $(BUILD)

fuzz: deps  ## libFuzzer over every reader of untrusted data; SECONDS=N each, TARGETS="json gguf"
	@scripts/run_fuzz.sh $(SECONDS_EACH) build-fuzz $(TARGETS)

asan: cuda-toolkit tools models  ## address and undefined-behaviour sanitizers over unit, sim and e2e
	@scripts/run_sanitized.sh address,undefined build-asan

tsan: cuda-toolkit tools models  ## thread sanitizer over unit, sim and e2e
	@scripts/run_sanitized.sh thread build-tsan

bench: build  ## micro-benches, with percent of the measured peak
	@ninja -C $(BUILD) benches
	@for bench in $(BUILD)/tests/*_bench; do echo "== $$bench"; $$bench; done

bench-anchor: build tools  ## CPU speed against llama.cpp, interleaved (fetches llama-cpp-python)
	@ninja -C $(BUILD) benches
	@scripts/bench_cpu_anchor.py --build $(BUILD)

clean:  ## remove build folders
	@rm -rf build build-asan build-tsan build-msan build-fuzz build-cuda
