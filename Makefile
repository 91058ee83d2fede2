# tensorferry: `make run` shows it at work, `make test` proves it. `make help` lists the rest.

PYTHON ?= python3
PORT ?= 8001
# cpu or cuda; by default cuda where the NVIDIA driver finds a GPU.
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
EXTRA := $(if $(filter cuda,$(DEVICE)),gpu,cpu)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# grpcio-tools of this version makes code that runs on protobuf 5.29 to 7; newer ones do not.
PROTOC_VENV := $(VENV)/protoc
OLDEST := $(VENV)/oldest
# requirements/oldest.lock is for this one.
OLDEST_PYTHON ?= $(shell command -v python3.11 || echo $(PYTHON))
PROTOS := protos/tensorferry/protos
GRPCURL := v1.9.3
KUSTOMIZE := v5.7.1
# What `make tools` builds, beside what it puts into $(BIN).
CLIENTS := $(VENV)/clients
UV := 0.13.8
SERVING := PYTHONPATH=benchmarks $(BIN)/python -m serving
# The load generator of `make bench`.
LOAD := $(VENV)/load

.DEFAULT_GOAL := help
.PHONY: help run demo test test-ray test-installs fuzz soak conformance batching-evidence compat lint format simulate bench-overhead bench-overload bench-closed bench bench-peers bench-report bench-memory bench-observability gpu-bench protos protos-check docs docs-check locks tools train gpu-check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

run: $(VENV)/.$(EXTRA) ## start the server with the demo model, show real answers, go on serving
	@$(BIN)/python examples/digits/demo.py --port $(PORT) --device $(DEVICE)

demo: $(VENV)/.$(EXTRA) ## the same, and stop after the answers
	@$(BIN)/python examples/digits/demo.py --port 0 --device $(DEVICE) --once

test: $(VENV)/.dev ## all tests (PROCESSES=4: how many at once)
	$(BIN)/python -m pytest -q -n $(or $(PROCESSES),4) --dist loadfile --no-loadscope-reorder --ignore tests/deploy/test_ray.py --ignore tests/installs

test-ray: $(VENV)/.dev $(CLIENTS)/ray/.done ## the Ray Serve application in a Ray of its own (three minutes)
	$(BIN)/python -m pytest -q tests/deploy/test_ray.py

test-installs: $(VENV)/.dev ## the server in environments with other packages, and every protobuf that it allows (a minute, needs network)
	$(PIP) install -q uv==$(UV)
	$(BIN)/python -m pytest -q tests/installs

fuzz: $(VENV)/.fuzz ## a million malformed inputs, found by coverage (RUNS=, or SECONDS=: other amounts; ONLY=infer: one target)
	PYTHONPATH=tests $(BIN)/python -m fuzz $(if $(RUNS),--runs $(RUNS)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(ONLY),--only $(ONLY))

conformance: $(VENV)/.dev ## every backend test of the onnx package through real servers (minutes; ONLY=reduce_: some of them)
	PYTHONPATH=tests $(BIN)/python -m conformance $(if $(ONLY),--only $(ONLY))

batching-evidence: $(VENV)/.dev ## what the graph analysis says of models, against what running them shows (some minutes; ONLY=reduce_: some of them)
	PYTHONPATH=tests $(BIN)/python -m conformance.batching $(if $(ONLY),--only $(ONLY))
	$(if $(ONLY),,PYTHONPATH=tests $(BIN)/python -m conformance.compositions)

compat: $(OLDEST)/.done ## the lane's tests with the oldest supported grpcio, protobuf, numpy, onnxruntime (Python 3.11)
	$(OLDEST)/bin/python tests/compat.py

soak: $(VENV)/.dev ## everything that goes wrong at once, in real processes, for MINUTES=10 (SEED=1; OUT=DIR keeps ledgers and logs)
	PYTHONPATH=tests $(BIN)/python -m chaos --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1) $(if $(OUT),--out $(OUT))

lint: $(VENV)/.dev ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev ## let ruff format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

gpu-check: $(VENV)/.dev ## on a GPU machine: CUDA against CPU, a GPU that fails, the end-to-end tests on CUDA (ONLY=models, failures or tests; SECONDS=540; TESTS=tests/e2e)
	$(BIN)/python tests/gpu_check.py $(if $(ONLY),--only $(ONLY)) $(if $(SECONDS),--seconds $(SECONDS)) $(TESTS)

simulate: $(if $(QUICK),$(VENV)/.$(EXTRA),$(VENV)/.plots) ## the shipping scheduler in virtual time, against its peers (QUICK=1: two minutes, no plots)
	@$(BIN)/python benchmarks/closed_loop.py $(if $(QUICK),--seconds 2)
	@$(BIN)/python benchmarks/closed_pipeline.py $(if $(QUICK),--seconds 2)
	@$(BIN)/python benchmarks/simulate/run.py $(if $(QUICK),--quick,--plots docs/results/plots)

bench-overhead: $(VENV)/.$(EXTRA) ## what the scheduler costs per request
	@$(BIN)/python benchmarks/overhead.py

bench-overload: $(VENV)/.dev ## a real server under up to 10 times its capacity (QUICK=1: 20 s; APART=4,9: on a device of its own)
	@$(BIN)/python benchmarks/overload.py $(if $(QUICK),--quick) $(if $(APART),--apart $(APART))

bench-closed: $(VENV)/.dev ## callers in closed loops against a real server (QUICK=1: 20 s)
	@$(BIN)/python benchmarks/closed_server.py $(if $(QUICK),--quick)

bench: $(LOAD) $(VENV)/.dev $(if $(QUICK),,$(VENV)/.plots) ## against bare gRPC, raw ONNX Runtime and other servers; writes docs/results/performance.md (40 minutes; QUICK=1: ours only, one minute, no page)
	@$(SERVING).run --load $(LOAD) $(if $(QUICK),--quick)
	@$(if $(QUICK),,$(SERVING).report)

bench-peers: ## install the other servers that `make bench` compares with (minutes, 3 GB, Python 3.11)
	@benchmarks/serving/install_peers.sh

bench-report: $(VENV)/.dev $(VENV)/.plots ## make docs/results/performance.md and its plots again from the last `make bench`
	@$(SERVING).report

bench-memory: $(LOAD) $(VENV)/.dev ## memory over a million calls and ten thousand dropped streams (QUICK=1: a tenth)
	@$(SERVING).memory --load $(LOAD) $(if $(QUICK),--quick)

bench-observability: $(LOAD) $(VENV)/.dev ## what metrics and the like cost: throughput and CPU of a real server with and without (QUICK=1: one minute)
	@$(SERVING).observability --load $(LOAD) $(if $(QUICK),--quick)

gpu-bench: $(VENV)/.bench-gpu ## on a GPU: BERT-base and ResNet-50 beside a bare loop, and in MLPerf LoadGen's scenarios (ONLY=bert or resnet; SECONDS=300 for each; RESULTS=FILE; elsewhere and with QUICK=1 small models on the CPU)
	@$(BIN)/python benchmarks/gpu/run.py $(if $(QUICK),--quick,--docs) $(if $(ONLY),--only $(ONLY)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(RESULTS),--results $(RESULTS))

protos: $(PROTOC_VENV)/.done ## regenerate the code from the .proto files
	$(PROTOC_VENV)/bin/python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos $(PROTOS)/*.proto $(PROTOS)/standard/*.proto
	$(PROTOC_VENV)/bin/python -m grpc_tools.protoc -Iprotos --grpc_python_out=protos $(PROTOS)/inference.proto
	sed -i 's/^from google.protobuf import descriptor_pool as _descriptor_pool$$/from tensorferry.protos import pool as _descriptor_pool/' $(PROTOS)/*_pb2.py $(PROTOS)/standard/*_pb2.py

protos-check: protos ## fail if the checked-in code is not what `make protos` makes
	git diff --exit-code -- protos

docs: $(VENV)/.dev ## write the generated page of the reference, docs/reference/options.md
	$(BIN)/python -m tensorferry.server.config.reference >docs/reference/options.md

docs-check: docs ## fail if a generated page of the reference is not what `make docs` writes
	git diff --exit-code -- docs/reference

locks: $(VENV)/.python ## compile requirements/*.in into lock files
	$(PIP) install -q uv==$(UV)
	UV=$(CURDIR)/$(BIN)/uv requirements/lock.sh

tools: $(BIN)/grpcurl $(BIN)/promtool $(CLIENTS)/go/.done $(CLIENTS)/node/.done $(CLIENTS)/java/.done $(CLIENTS)/kserve/.done $(CLIENTS)/perf_analyzer/.done $(CLIENTS)/chromium/.done $(CLIENTS)/kustomize $(CLIENTS)/manifests/.done $(CLIENTS)/nginx/.done ## clients of other makers, a browser, and what deploy/ is tested with (needs Go, Node and npm, Java and Maven, Debian's apt-get)

train: $(VENV)/.dev ## train the demo model again (installs scikit-learn)
	$(PIP) install -q scikit-learn
	$(BIN)/python examples/digits/train.py

clean: ## remove the environment and everything generated
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .fuzz .grimp_cache .import_linter_cache

# The base install and the extras are in one environment, since `make run` and `make test` are
# both the first thing that somebody does. A stamp stands for each lock file that is installed.
$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "tensorferry needs Python 3.11 or newer, this is " + sys.version + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.cpu $(VENV)/.gpu: $(VENV)/.%: requirements/%.lock pyproject.toml | $(VENV)/.python
	@echo "installing requirements/$*.lock into $(VENV) ..."
	@rm -f $(VENV)/.cpu $(VENV)/.gpu
	@# Both wheels own the module onnxruntime: neither may be left under the other.
	@$(PIP) uninstall -q -y onnxruntime onnxruntime-gpu 2>/dev/null || true
	@$(PIP) install -q --require-hashes -r $<
	@$(PIP) install -q --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements/dev.lock | $(VENV)/.$(EXTRA)
	@echo "installing $< into $(VENV) ..."
	@$(PIP) install -q --require-hashes -r $<
	@touch $@

$(VENV)/.fuzz: requirements/fuzz.lock | $(VENV)/.dev
	@echo "installing $< into $(VENV) ..."
	@$(PIP) install -q --require-hashes -r $<
	@touch $@

$(VENV)/.bench-gpu: requirements/bench-gpu.lock | $(VENV)/.$(EXTRA)
	@echo "installing $< into $(VENV) ..."
	@$(PIP) install -q --require-hashes -r $<
	@touch $@

$(VENV)/.plots: requirements/plots.lock | $(VENV)/.$(EXTRA)
	@echo "installing $< into $(VENV) ..."
	@$(PIP) install -q --require-hashes -r $<
	@touch $@

$(LOAD): $(wildcard benchmarks/serving/generator/*.[ch]) | $(VENV)/.python
	@echo '#include <nghttp2/nghttp2.h>' | $(CC) -E -x c - >/dev/null 2>&1 || { \
		echo "the load generator needs a C compiler and nghttp2: apt-get install gcc libnghttp2-dev" \
			"(Debian, Ubuntu) or dnf install gcc libnghttp2-devel (Fedora)" >&2; exit 1; }
	$(CC) -O2 -std=gnu11 -Wall -Wextra -o $@ $(filter %.c,$^) -lnghttp2 -lm

$(OLDEST)/.done: requirements/oldest.lock pyproject.toml | $(VENV)/.python
	@echo "installing $< into $(OLDEST) ..."
	@$(OLDEST_PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip --disable-pip-version-check install -q --require-hashes -r $<
	@$(OLDEST)/bin/python -m pip --disable-pip-version-check install -q --no-deps --no-build-isolation -e .
	@touch $@

$(PROTOC_VENV)/.done: | $(VENV)/.python
	$(PYTHON) -m venv $(PROTOC_VENV)
	$(PROTOC_VENV)/bin/python -m pip install -q grpcio-tools==1.71.2 setuptools
	touch $@

$(BIN)/grpcurl: | $(VENV)/.python
	GOBIN=$(CURDIR)/$(BIN) go install github.com/fullstorydev/grpcurl/cmd/grpcurl@$(GRPCURL)

$(BIN)/promtool: $(wildcard tests/deploy/promtool/*) | $(VENV)/.python
	tests/deploy/promtool/build.sh $(BIN) $(CLIENTS)/promtool
	@touch $@

PROTO_FILES := $(wildcard $(PROTOS)/*.proto)

$(CLIENTS)/go/.done: $(wildcard tests/wire/go/*) $(PROTO_FILES) | $(PROTOC_VENV)/.done
	tests/wire/go/build.sh $(CLIENTS)/go $(CURDIR)/$(PROTOC_VENV)/bin/python
	@touch $@

$(CLIENTS)/node/.done: $(wildcard tests/wire/node/*) | $(VENV)/.python
	tests/wire/node/build.sh $(CLIENTS)/node
	@touch $@

$(CLIENTS)/chromium/.done: $(wildcard tests/browser/*.sh tests/browser/*.js*) | $(VENV)/.python
	tests/browser/install.sh $(CLIENTS)/chromium
	@mkdir -p $(@D) && touch $@

$(CLIENTS)/java/.done: $(wildcard tests/wire/java/*) $(PROTO_FILES) | $(VENV)/.python
	tests/wire/java/build.sh $(CLIENTS)/java
	@touch $@

# By uv, since pip takes a minute for what KServe requires.
$(CLIENTS)/kserve/.done: requirements/kserve.lock | $(VENV)/.python
	$(PYTHON) -m venv $(CLIENTS)/kserve
	$(CLIENTS)/kserve/bin/python -m pip --disable-pip-version-check install -q uv==$(UV)
	$(CLIENTS)/kserve/bin/uv pip install -q --python $(CLIENTS)/kserve/bin/python --require-hashes -r $<
	@# Imported once for its bytecode, which uv does not make and the tests may be told not to write.
	env -u PYTHONDONTWRITEBYTECODE $(CLIENTS)/kserve/bin/python -c 'import kserve'
	@touch $@

$(CLIENTS)/perf_analyzer/.done: tests/wire/perf_analyzer.sh | $(VENV)/.python
	tests/wire/perf_analyzer.sh $(CLIENTS)/perf_analyzer $(CURDIR)/$(BIN)/python
	@touch $@

$(CLIENTS)/kustomize: | $(VENV)/.python
	GOBIN=$(CURDIR)/$(CLIENTS) go install sigs.k8s.io/kustomize/kustomize/v5@$(KUSTOMIZE)

# Environments of their own: what they hold does not go with the tests', or is large.
$(CLIENTS)/manifests/.done $(CLIENTS)/ray/.done: $(CLIENTS)/%/.done: requirements/%.lock | $(VENV)/.python
	$(PYTHON) -m venv $(CLIENTS)/$*
	$(CLIENTS)/$*/bin/python -m pip --disable-pip-version-check install -q uv==$(UV)
	@# Compiled here: each of Ray's many processes would compile what it imports, where bytecode may not be written.
	$(CLIENTS)/$*/bin/uv pip install -q --python $(CLIENTS)/$*/bin/python --compile-bytecode --require-hashes -r $<
	$(if $(filter ray,$*),$(CLIENTS)/ray/bin/uv pip install -q --python $(CLIENTS)/ray/bin/python --no-deps --no-build-isolation -e .)
	@touch $@

$(CLIENTS)/nginx/.done: tests/deploy/nginx.sh | $(VENV)/.python
	@# Which other systems do not have: the tests that are about it are skipped there.
	tests/deploy/nginx.sh $(CLIENTS)/nginx && touch $@ || echo "no nginx: tests/deploy/test_nginx.py is skipped" >&2
