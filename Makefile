# Two commands from a fresh clone: `make train` and `make test`.
#
#   make train                    install, train on a generated graph, print a summary
#   make train ARGS='--dataset Cora --root data'
#   make test                     install, run the fast tests in as many processes as there are cores
#   make test ARGS=--all          run the tests marked slow, too
#   make docs                     build the documentation into build/site
#
# PYTHON (3.10 or later) and VENV can be set: make test PYTHON=python3.12
# The extension is compiled for the GPUs of this machine; GAS_WITH_CUDA=ON: for those of others.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
CORES := $(shell getconf _NPROCESSORS_ONLN)
# The interface's number is read from the module that checks it.
SOURCES := $(shell find csrc -type f) $(shell grep -rl --include='*.py' '^INTERFACE = ' gas)

.PHONY: train test gpu lint docs hooks mutants regression cpp-test install clean

train: $(VENV)/installed
	$(BIN)/python examples/train_gas.py --overwrite $(ARGS)

test: install
	$(BIN)/python -m pytest -n $(CORES) --maxprocesses 8 --dist worksteal $(ARGS)

# With what $(PYTHON) has: PyTorch, PyG, pybind11, pytest-xdist; and CMake and nvcc. Where there is no
# GPU, make gpu ARGS=--rehearse takes the same steps on the CPU.
gpu:
	$(PYTHON) benchmarks/gpu.py $(ARGS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Sources are read, not imported: gas and PyTorch needn't be installed. Open build/site/index.html.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# Checks of the changed files before every commit: .pre-commit-config.yaml.
hooks: install
	$(BIN)/python -m pip install --quiet pre-commit
	$(BIN)/pre-commit install

# Is training slower than at a commit? make regression COMMIT=main [ARGS='--sets 24']
REGRESSION := build/regression
regression: install
	@test -n "$(COMMIT)" || { echo "make regression: COMMIT is empty. Pass one, such as COMMIT=main."; exit 2; }
	-git worktree remove --force $(REGRESSION) 2>/dev/null
	git worktree add --quiet --detach $(REGRESSION) $(COMMIT)
	$(BIN)/python -m pip install --quiet --no-deps --target $(REGRESSION)/installed ./$(REGRESSION)
	$(BIN)/python benchmarks/versions.py --other $(REGRESSION)/installed --root build/data --limit 1.02 \
	    --cases "planted:50000, GCN 3x64" "planted:50000, PyG's GraphSAGE 3x64" $(ARGS)
	git worktree remove --force $(REGRESSION)

# Do the tests notice? make mutants FILES="gas/nn/spmm.py gas/models/gcn2.py" [N=50] [SEED=0]
mutants: install
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py $(FILES) -n $(or $(N),50) --seed $(or $(SEED),0)

# C++ tests: as they are compiled for use, and under the sanitizers, which slow compilation down the
# more is optimised: attention.cpp takes 8 s without optimisation, 56 s with -O1 and all of -g. New
# memory is poisoned, as in the tests of Python.
cpp-test: install
	for build in "" address,undefined:-O0 thread:-O1; do \
	    sanitizer=$${build%%:*}; level=$${build##*:}; \
	    cmake=$(BIN)/cmake; dir=build/cpp-tests-$${sanitizer:-plain}; \
	    $$cmake -S . -B $$dir -DGAS_BUILD_MODULE=OFF -DGAS_BUILD_TESTS=ON -DGAS_WITH_CUDA=OFF \
	        -DGAS_SANITIZE=$$sanitizer $${level:+-DCMAKE_CXX_FLAGS_RELEASE=$$level} && \
	    $$cmake --build $$dir --parallel $(CORES) && \
	    MALLOC_PERTURB_=128 GLIBC_TUNABLES=glibc.malloc.tcache_count=0 \
	        $(BIN)/ctest --test-dir $$dir --output-on-failure --parallel $(CORES) || exit 1; \
	done

install: $(VENV)/tools

$(VENV)/installed: constraints.txt pyproject.toml setup.py CMakeLists.txt $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	# The extension doesn't link PyTorch, and is compiled while that is installed.
	$(BIN)/python -m pip install --quiet -c constraints.txt torch & torch=$$!; \
	    $(BIN)/python -m pip install --quiet --no-deps -e . || { wait $$torch; exit 1; }; \
	    wait $$torch
	$(BIN)/python -m pip install --quiet -c constraints.txt 'gas-gnn[cli,examples]'
	touch $@

$(VENV)/tools: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt --group dev
	touch $@

$(VENV)/docs: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --group docs
	touch $@

clean:
	rm -rf $(VENV) build dist wheelhouse *.egg-info gas/*.so
