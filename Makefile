# Each target sets up what it needs. `make demo` and `make test` are all a newcomer has to know.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt

SOURCES := pyproject.toml CMakeLists.txt $(shell find src core -name '*.py' -o -name '*.pyi' -o -name '*.cc' -o -name '*.h')
CORE_SOURCES := CMakeLists.txt $(shell find core -name '*.cc' -o -name '*.h')

.PHONY: demo test test-python test-core bench lint format clean
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

lint: $(VENV)/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'core/*.h' 'core/*.cc')

format: $(VENV)/tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'core/*.h' 'core/*.cc')

$(VENV)/created:
	$(PYTHON) -m venv $(VENV)
	touch $@

# The package as users get it: built in isolation, installed from a wheel.
$(VENV)/installed: $(VENV)/created constraints.txt $(SOURCES)
	$(PIP) '.[test,bench]'
	touch $@

$(VENV)/tools: $(VENV)/installed
	$(PIP) ruff==0.17.4 mypy==2.4.1 clang-format==23.1.3
	touch $@

$(VENV)/cmake: $(VENV)/created
	$(PIP) cmake ninja
	touch $@

build/core/core_test: $(VENV)/cmake $(CORE_SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/core -G Ninja -DCPUMOE_PYTHON=OFF -DCPUMOE_TESTS=ON > build-core.log
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/core >> build-core.log || (cat build-core.log; exit 1)
	rm build-core.log
	touch $@

clean:
	rm -rf build $(VENV) build-core.log
