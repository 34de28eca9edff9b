# Forestage on a bare machine with make and Python 3.11 or newer: every target sets itself up in .venv.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-redis serve test check check-page bench image check-deploy rules api-reference engines-sglang engines-vllm
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
CONFIG ?= examples/forestage.toml
ARGS ?=
# Those with an aim; the others run by name: make bench BENCH=benchmarks/tenants.py
AIMED := $(patsubst %,benchmarks/%.py,read_files read_redis http_prefetch urgent index_scale start idle)
BENCH ?= $(AIMED)
IMAGE ?= forestage:dev
IMAGE_ARGS ?=

PIP_INSTALL := $(BIN)/python -m pip --quiet --no-input --disable-pip-version-check install -c constraints.txt
SERVE_READY := $(VENV)/.serve-ready
DEV_READY := $(VENV)/.dev-ready
ENGINES := build/engines

help:
	@echo 'make demo    start the service on made-up pages, prefetch some, show what happened'
	@echo 'make demo-redis   the same with the pages in a Redis of its own'
	@echo 'make serve   run the service; CONFIG=$(CONFIG)'
	@echo 'make test    run all tests; ARGS="-k lease" chooses, ARGS="-n0 --pdb" stays in one process'
	@echo 'make check   formatting, lint, types, layering, dependencies; AUDIT=required insists on advisories'
	@echo 'make check-page   the status page in a real Chromium; PICTURES=FOLDER keeps pictures of it'
	@echo 'make bench   run the benchmarks that have aims, and hold them to these; BENCH=benchmarks/x.py ARGS="--repeat 3" chooses'
	@echo 'make engines-sglang   fetch the SGLang versions that make test then runs the adapter in'
	@echo 'make image   build the image as $(IMAGE), with docker, podman or buildah'
	@echo 'make check-deploy   manifests, alerts and dashboard; then build the image and run it (root, buildah)'
	@echo 'make rules   write the PrometheusRule anew from deploy/components/monitoring/rules.yaml'
	@echo 'make api-reference   write docs/api-reference.md anew from the routes'
	@echo 'make engines-vllm   fetch the vLLM version that make test then runs the tier in'
	@echo
	@echo 'PYTHON=python3.12 chooses the Python that .venv is made with.'
	@echo 'test, check and bench install torch, by default with CUDA; for the smaller build without, set'
	@echo 'PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to where CPU builds lie.'

# A link that leads nowhere counts as absent, so a .venv whose Python is gone is made anew.
$(BIN)/python:
	@echo 'forestage: creating $(VENV)'
	@scripts/make-venv $(VENV)

$(SERVE_READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'forestage: installing the service'
	@$(PIP_INSTALL) -e '.[serve]'
	@touch $@

$(DEV_READY): $(SERVE_READY)
	@echo 'forestage: installing torch and the development tools, some minutes the first time'
	@$(PIP_INSTALL) -e '.[service,dev]'
	@touch $@

demo: $(SERVE_READY)
	@$(BIN)/python -m forestage.demo $(ARGS)

demo-redis: $(SERVE_READY)
	@$(BIN)/python -m forestage.demo_redis $(ARGS)

serve: $(SERVE_READY)
	@exec $(BIN)/forestage serve --config '$(CONFIG)' $(ARGS)

# Most of a test is waiting, so there is one worker more than the cores of the smallest machine; a file's tests share one.
test: $(DEV_READY)
	@$(BIN)/pytest -q -ra -n 3 --dist loadscope $(ARGS)

check: $(DEV_READY)
	@failed=; \
	for tool in 'ruff format --check --quiet .' 'ruff check --quiet .' mypy 'lint-imports --no-logo'; do \
	    echo "-- $$tool"; \
	    $(BIN)/$$tool || failed="$$failed $${tool%% *}"; \
	done; \
	echo '-- audit'; scripts/audit $(VENV) || failed="$$failed audit"; \
	if [ -n "$$failed" ]; then echo "forestage: check failed:$$failed" >&2; exit 1; fi

check-page: $(DEV_READY)
	@$(BIN)/pytest -q -ra tests/browser/check_page.py $(ARGS)

engines-sglang: $(ENGINES)/.sglang-ready

$(ENGINES)/.sglang-ready: scripts/make-engines-sglang $(DEV_READY)
	@echo 'forestage: installing what SGLang imports, and two of its wheels'
	@mkdir -p $(ENGINES)
	@scripts/make-engines-sglang $(ENGINES) $(VENV)
	@touch $@

engines-vllm: $(ENGINES)/.vllm-ready

$(ENGINES)/.vllm-ready: scripts/make-engines-vllm $(DEV_READY)
	@echo 'forestage: installing what vLLM imports, and its wheel'
	@mkdir -p $(ENGINES)
	@scripts/make-engines-vllm $(ENGINES) $(VENV)
	@touch $@

# 77 is what a benchmark ends with that this machine cannot run; it has said why.
bench: $(DEV_READY)
	@mkdir -p build/bench
	@for file in $(BENCH); do \
	    echo "-- $$file"; \
	    name=$${file##*/}; json=; \
	    case ' $(AIMED) ' in *" $$file "*) json="--json build/bench/$${name%.py}.json";; esac; \
	    $(BIN)/python "$$file" $$json $(ARGS) || [ $$? = 77 ] || exit 1; \
	done
	@if ls build/bench/*.json >/dev/null 2>&1; then $(BIN)/python benchmarks/targets.py build/bench/*.json; fi

# The others than docker need to be told its format, the only one that has a health check.
image:
	@for tool in docker podman buildah; do \
	    if $$tool info >/dev/null 2>&1; then \
	        format='--format docker'; [ $$tool != docker ] || format=; \
	        exec $$tool build $$format $(IMAGE_ARGS) --build-arg REVISION="$$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" \
	            -t '$(IMAGE)' -f Dockerfile .; \
	    fi; \
	done; \
	echo 'forestage: no docker, podman or buildah that works here' >&2; exit 1

# BASE=local makes the image on a Debian of its own, for machines that reach no image registry.
check-deploy: $(DEV_READY)
	@$(BIN)/pytest -q -ra tests/deploy $(ARGS)
	@scripts/check-image $(if $(filter local,$(BASE)),--local-base)

rules:
	@scripts/make-prometheusrule

api-reference: $(SERVE_READY)
	@$(BIN)/python scripts/api_reference.py
