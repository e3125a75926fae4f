# Two commands set everything up on a fresh machine: `make demo` and `make test`.
.PHONY: help demo test test-rest test-all matrix pythons site docs sbom lock lint format env system clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Containers often set it: every process that a test starts would then compile our modules again.
export PYTHONDONTWRITEBYTECODE :=

help:
	@echo "make demo     environment, then train the bundled digits on a two-host virtual cluster"
	@echo "make test     environment and virtual cluster, then the quick tests"
	@echo "make test-all all tests: also Slurm, MPI, Docker, network disks, documents and the soak"
	@echo "make matrix   users' journeys in every environment of the matrix; ONLY=17 in one of them"
	@echo "make pythons  the unit tests under every Python from 3.10 on that is here"
	@echo "make docs     the documentation as a site in build/docs/site; broken links fail"
	@echo "make sbom     build/paceline.cdx.json: the packages of all extras, as CycloneDX"
	@echo "make lock     constraints.txt anew: pins and hashes; UPGRADE=numpy for a newer numpy"
	@echo "make lint     ruff, mypy, import-linter"
	@echo "make clean    remove the environment and caches"

# Builds of torch for CPUs, CUDA and ROCm have the same version and different hashes, so the files
# of constraints leave it out with the packages that only its builds for GPUs need.
TORCH := torch==2.13.0
GPU_PACKAGES := triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti \
  cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 \
  nvjitlink nvshmem-cu13 nvtx)
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet
LOCKED := --require-hashes --no-deps -r

# Compiling these takes as long as all others together; Python compiles what it imports of them.
SELDOM_IMPORTED := site-packages/(.*/tests?|transformers/models|torch/testing|databricks|mypyc?)/

# the environment is remade when what it is made from has changed
env: $(VENV)/.made

$(VENV)/.made: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("make needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and other packages into $(VENV): this takes several minutes"
	$(PIP) install --no-compile $(LOCKED) constraints.txt
	$(PIP) install --no-compile --no-build-isolation '$(TORCH)' -e '.[recipes,trackers,dev]'
	@# pip would do it on one CPU; packages have templates in them that do not compile
	@$(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM_IMPORTED)' "$(CURDIR)/$(VENV)/lib" || true
	touch $@

system:
	@PYTHON=$(PYTHON) tools/system-parts.sh $(PARTS)

demo: PARTS = lab
demo: env system
	@$(BIN)/python tools/demo.py

# What a change can break most easily, with the parts that `make demo` needs.
SMOKE := tests/lab/test_check.py tests/lab/test_lost_ranks.py tests/lab/test_run_endings.py tests/lab/test_run_arguments.py
PYTEST := $(BIN)/python -m pytest -q
# Labs wait more than they work, so more go at once than there are CPUs; each has a network of its
# own (tests/conftest.py).
LABS = -n $$(($$(nproc) + 3)) --dist loadfile --no-loadscope-reorder

# The other tests wait now and then, too: one more at once than there are CPUs. They compute while
# labs wait, whose output is shown at the end.
test: PARTS = lab
test: env system
	@status=0; output=$$(mktemp); \
	$(PYTEST) $(LABS) $(SMOKE) tests/matrix >"$$output" 2>&1 & labs=$$!; \
	$(PYTEST) -n $$(($$(nproc) + 1)) --dist worksteal -m "not slow" tests/unit tests/contract || status=1; \
	wait $$labs || status=1; \
	cat "$$output"; rm -f "$$output"; exit $$status

# With the first three, which `make test` runs, these environments have every value of every axis.
REST_OF_MATRIX := 4,5,6,19
SLOW := $(shell grep -l "mark.slow" tests/unit/*.py tests/contract/*.py)

test-rest: PARTS = all
test-rest: site system
	@PACELINE_MATRIX=$(REST_OF_MATRIX) $(PYTEST) $(LABS) --durations 20 $(SLOW) \
	tests/package tests/train tests/lab tests/matrix $(SMOKE:%=--ignore=%)

test-all: test test-rest

matrix: PARTS = all
matrix: env system
	@$(BIN)/python bench/matrix/matrix.py $(if $(ONLY),--only $(ONLY))

pythons: env
	@$(BIN)/python tools/pythons.py

# builds the site: 90 MB that `make demo` and `make test` do without
site: env
	@$(PIP) install $(LOCKED) constraints-docs.txt

docs: site
	$(PYTEST) tests/unit/test_document_links.py
	$(BIN)/python tools/site/build.py
	@echo "Open build/docs/site/index.html in a browser."

sbom: env
	@mkdir -p build
	$(BIN)/python tools/sbom.py recipes parquet language export trackers >build/paceline.cdx.json

# keeps the versions in the files, except those named in UPGRADE
COMPILE := uv pip compile pyproject.toml --universal --python-version 3.11 --quiet --generate-hashes \
  --no-annotate --custom-compile-command 'make lock' $(UPGRADE:%=--upgrade-package %)
lock: env
	$(PIP) install uv
	$(BIN)/$(COMPILE) --extra recipes --extra trackers --extra dev --upgrade-package '$(TORCH)' \
	  --no-emit-package torch $(GPU_PACKAGES:%=--no-emit-package %) -o constraints.txt
	$(BIN)/$(COMPILE) --extra docs -c constraints.txt -o constraints-docs.txt

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-pythons build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
