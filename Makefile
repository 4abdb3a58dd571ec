# make up · make test · make check · make bench · make gpu
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SERVING := $(VENV)/.serving
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=
SUBJECT ?= kv_transfer
CLIENTS := .clients

.PHONY: help install up test e2e chaos elastic soak fuzz check format manifests diagrams locks images test-images clients control-plane gpu gpu-wheels bench clean

help:
	@echo "make up             a whole cluster on this machine, one answer streamed (ARGS=--once to exit after it, ARGS=--agent for a tool loop as well)"
	@echo "make test           unit and integration tests (a quarter of an hour on 2 cores)"
	@echo "make e2e            the whole product on an embedded and, if it was built, a real control plane (about 11 minutes)"
	@echo "make chaos          kill -9, SIGSTOP, network cuts and damaged bytes, for workers, engines, hand-off, expert groups and servers; pods deleted and evicted; the operator under random faults (about 50 minutes)"
	@echo "make elastic        expert-parallel groups: every size, 10 cycles of scaling and 100 deaths under load, the operator on a real control plane (about 27 minutes)"
	@echo "make soak           random traffic against one engine for 10 minutes, then 10,000 KV transfers: nothing wrong, no leak"
	@echo "make fuzz           100,000 random requests, messages or connections at each port of gateways, engines, coordinators, rank stores and KV transports, from BATON_FUZZ_SEED (BATON_FUZZ_CASES=1000 for fewer; make test sends 300)"
	@echo "make check          ruff, codespell, mypy, import-linter, whether generated files are current, and pip-audit where PyPI answers"
	@echo "make manifests      regenerate the CRD, RBAC and the references in docs/ from the code"
	@echo "make locks          lock the packages of the images with uv, after a change of constraints.txt or pyproject.toml"
	@echo "make images         build the images of docker/ with buildah, each with an archive and an SBOM in build/images (ARGS=\"--only gateway\")"
	@echo "make test-images    run the built images as pods run them: user 65532, a read-only root (as root)"
	@echo "make clients        conversations with LiteLLM, LangChain, Instructor, and the npm packages openai and ai, in environments of their own (needs npm; 4 minutes after the installation)"
	@echo "make control-plane  build a real kube-apiserver once per machine (Debian, about 6 minutes)"
	@echo "make bench          benchmarks/<SUBJECT>: a table and benchmarks/results/<machine>/<SUBJECT>.json (SUBJECT=engine ARGS=\"--peers --repeats 5\": beside vLLM, llama.cpp, OpenVINO and sentence-transformers, 75 minutes, and 6 GB once)"
	@echo "make gpu            tests and benchmarks on a machine with a GPU, with its python3, torch and triton (PARTS=\"tests engine tune bench\")"
	@echo "make gpu-wheels     downloads what make gpu needs on a machine without a network"

# What serves. It is all that `make up` needs.
$(SERVING): pyproject.toml constraints.txt $(wildcard kernels/baton_kernels/cpu/source/*)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Baton needs Python >= 3.11; set PYTHON=")'
	@echo "installing into $(VENV): about three minutes the first time, with 1.5 GB of packages"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) -e ".[engine,gateway,operator,local,fetch]"
	@echo "compiling the CPU kernels: one or two minutes, if their sources have changed"
	@$(BIN)/python -m baton_kernels.cpu.build
	@touch $@

# What checks, tests and benchmarks need besides.
$(STAMP): $(SERVING)
	@echo "installing the packages of checks and tests into $(VENV)"
	@$(PIP) -e ".[cuda,ray,nixl,dev]"
	@touch $@

install: $(STAMP)

up: $(SERVING)
	$(BIN)/baton up$(if $(MODEL), --model $(MODEL)) -f manifests/samples/demo.yaml $(ARGS)

test: $(STAMP)
	BATON_REQUIRE_CPU_KERNELS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests --ignore tests/e2e --ignore tests/images --ignore tests/clients -n 3 --dist loadfile $(ARGS)

e2e: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/e2e -n 3 --dist loadfile $(ARGS)

chaos: $(STAMP)
	BATON_CHAOS_ROUNDS=20 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/chaos tests/unit/operator/reconcile/reconciler/test_convergence_chaos.py tests/unit/operator/process/operator_process/test_faults.py tests/e2e/service/test_rolling_update.py tests/e2e/service/test_pod_loss.py -m chaos $(ARGS)

elastic: $(STAMP)
	BATON_CHAOS_CYCLES=10 BATON_CHAOS_KILLS=50 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration/test_expert_group.py tests/chaos/test_elastic.py tests/e2e/service/test_expert_service.py -m chaos -s $(ARGS)

soak: $(STAMP)
	BATON_SOAK_SECONDS=600 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration/test_engine_soak.py -k long -s $(ARGS)
	BATON_SOAK_TRANSFERS=10000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration/test_kv_soak.py -k long -s $(ARGS)

fuzz: $(STAMP)
	BATON_FUZZ_CASES=$${BATON_FUZZ_CASES:-100000} BATON_FUZZ_SEED=$${BATON_FUZZ_SEED:-0} OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fuzz -s $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m baton_operator.manifests --check manifests
	$(BIN)/python hack/api_reference.py --check docs/reference/api.md
	$(BIN)/python hack/metrics_reference.py --check docs/reference/metrics.md
	$(BIN)/python hack/openai_reference.py --check docs/reference/openai.md
	$(BIN)/python hack/options_reference.py --check docs/reference/options.md
	$(BIN)/python hack/licence_reference.py --check docs/reference/licences.md
	@if curl --silent --fail --max-time 10 --output /dev/null https://pypi.org/pypi/pip/json; \
	then $(BIN)/pip-audit --disable-pip -r docker/locks/operator.txt -r docker/locks/engine-cuda.txt; \
	else echo "pip-audit did not run: https://pypi.org/pypi does not answer"; fi

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

manifests: $(STAMP)
	$(BIN)/python -m baton_operator.manifests manifests
	$(BIN)/python hack/api_reference.py docs/reference/api.md
	$(BIN)/python hack/metrics_reference.py docs/reference/metrics.md
	$(BIN)/python hack/openai_reference.py docs/reference/openai.md
	$(BIN)/python hack/options_reference.py docs/reference/options.md
	$(BIN)/python hack/licence_reference.py docs/reference/licences.md

diagrams: # needs Graphviz
	for source in docs/internals/diagrams/*.dot; do dot -Tsvg $$source -o $${source%.dot}.svg; done

# The packages of the images with their hashes. torch and Triton come from PyTorch's index, which has other builds.
LOCK := uv pip compile --quiet --generate-hashes --no-annotate --python-version 3.11 --python-platform x86_64-manylinux_2_28 --constraints constraints.txt --no-emit-package torch --no-emit-package triton
locks: # needs uv
	$(LOCK) pyproject.toml --extra operator -o docker/locks/operator.txt
	$(LOCK) pyproject.toml --extra gateway --extra fetch -o docker/locks/gateway.txt
	$(LOCK) pyproject.toml --extra engine --extra gateway --extra fetch -o docker/locks/engine-cpu.txt
	$(LOCK) pyproject.toml --extra engine --extra cuda --extra gateway --extra fetch --extra nixl -o docker/locks/engine-cuda.txt
	$(LOCK) --group build -o docker/locks/build.txt
	$(LOCK) --group sbom -o docker/locks/sbom.txt

images: # needs buildah
	$(PYTHON) hack/build_images.py $(ARGS)

test-images: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/images $(ARGS)

# The packages of other clients. Some of their dependencies exclude versions of Baton's.
$(CLIENTS)/installed: tests/clients/requirements.txt tests/clients/package.json
	$(PYTHON) -m venv $(CLIENTS)/venv
	$(CLIENTS)/venv/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	cp tests/clients/package.json $(CLIENTS)
	npm install --prefix $(CLIENTS) --silent --no-audit --no-fund --no-package-lock --ignore-scripts
	@touch $@

clients: $(STAMP) $(CLIENTS)/installed # needs npm
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clients $(ARGS)

control-plane:
	hack/control-plane.sh

bench: $(STAMP)
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/$(SUBJECT)/bench.py $(ARGS)

gpu:
	hack/gpu.sh $(PYTHON)

gpu-wheels:
	hack/gpu-wheels.sh $(PYTHON)

clean:
	rm -rf $(VENV) $(CLIENTS) .gpu-wheels .gpu-site .mypy_cache .ruff_cache .pytest_cache .hypothesis
