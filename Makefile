# Two commands from a fresh clone: `make train` and `make test`.
#
#   make train                    install, train on a generated graph, print a summary
#   make train ARGS='--dataset Cora --root data'
#   make test                     install, run the tests
#
# PYTHON (3.10 or later) and VENV can be set: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
SOURCES := $(wildcard csrc/*.h csrc/*.cpp csrc/cuda/*)

.PHONY: train test lint cpp-test install clean

train: install
	$(BIN)/python examples/train_gas.py $(ARGS)

test: install
	$(BIN)/python -m pytest $(ARGS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# C++ tests: plain, and under the sanitizers.
cpp-test: install
	for sanitizer in "" address,undefined thread; do \
	    cmake=$(BIN)/cmake; dir=build/cpp-tests-$${sanitizer:-plain}; \
	    $$cmake -S . -B $$dir -DGAS_BUILD_MODULE=OFF -DGAS_BUILD_TESTS=ON -DGAS_WITH_CUDA=OFF \
	        -DGAS_SANITIZE=$$sanitizer && \
	    $$cmake --build $$dir --parallel && \
	    $(BIN)/ctest --test-dir $$dir --output-on-failure || exit 1; \
	done

install: $(VENV)/installed

$(VENV)/installed: constraints.txt pyproject.toml setup.py CMakeLists.txt gas/_native.py $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,examples]'
	touch $@

clean:
	rm -rf $(VENV) build gas/*.so
