# kvconn: `make demo` shows the main job, `make test` runs all tests that need no vLLM.
# Both do all their set-up; `make help` lists the rest.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# A Go that is missing or too old is put into .venv-go by scripts/need-tools.sh.
GO      ?= go
export PATH := $(CURDIR)/.venv-go/tool:$(PATH)
PYTHON  ?= python3
BUILD   := build
# What .ci/run keeps the log, the status and the time of: scripts/digest.py reads them.
STAGE   := scripts/stage.py
VENV    := .venv
VENV_VLLM ?= .venv-vllm
VENV_SGLANG ?= .venv-sglang
GOFILES := $(shell find . \( -name '*.go' -o -name '*.[chs]' \) -type f -not -path './.venv*' -not -path './build/*' -not -path './licenses/*' 2>/dev/null) capi/exports.map go.mod go.sum
PYFILES := $(shell find python -name '*.py' 2>/dev/null) setup.py pyproject.toml README.md
LDFLAGS := -s -w -extldflags "-Wl,--version-script=$(CURDIR)/capi/exports.map -Wl,-soname,libkvconn.so.0"
export CGO_ENABLED := 1

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# --- what must be there -------------------------------------------------------

tools: ## checks the compiler, Go and Python; installs a missing compiler where it may
	@scripts/need-tools.sh $(GO) $(PYTHON)

# --- builds -------------------------------------------------------------------

lib: $(BUILD)/libkvconn.so licenses/go/LICENSE ## build/libkvconn.so, and licenses/
$(BUILD)/libkvconn.so: $(GOFILES) | tools
	@mkdir -p $(BUILD)
	$(GO) build -trimpath -buildvcs=false -buildmode=c-shared -ldflags '$(LDFLAGS)' -o $@ ./capi
	@rm -f $(BUILD)/libkvconn.h

# The programs are compiled as the library is (pie), so that all share what is compiled of the packages below them.
cmd: $(BUILD)/kvconn ## build/kvconn, the command as a program of its own
$(BUILD)/kvconn: $(GOFILES) | tools
	@mkdir -p $(BUILD)
	$(GO) build -trimpath -buildvcs=false -buildmode=pie -ldflags '-s -w' -o $@ ./cmd/kvconn

rig: $(BUILD)/kvconn-rig ## build/kvconn-rig, what tests and measures kvconn
$(BUILD)/kvconn-rig: $(GOFILES) | tools
	@mkdir -p $(BUILD)
	$(GO) build -trimpath -buildvcs=false -buildmode=pie -ldflags '-s -w' -o $@ ./cmd/kvconn-rig

licenses: licenses/go/LICENSE ## licenses/, of all modules that libkvconn.so links; the wheel carries them
licenses/go/LICENSE: $(GOFILES) | tools
	GO=$(GO) $(GO) run ./rig/licences licenses ./capi

wheel: $(BUILD)/wheel.stamp ## dist/kvconn-*.whl
$(BUILD)/wheel.stamp: $(BUILD)/libkvconn.so licenses/go/LICENSE $(PYFILES) | $(VENV)/stamp
	@rm -rf dist $(BUILD)/lib $(BUILD)/bdist.* python/*.egg-info
	$(VENV)/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl
	@touch $@

# The environment that builds and checks; tests of the wheel get a clean one.
$(VENV)/stamp: scripts/requirements-dev.txt scripts/requirements-test.txt | tools
	$(PYTHON) -m venv --clear $(VENV)
	@scripts/thrice.sh 'what scripts/requirements-dev.txt names' $(VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r scripts/requirements-dev.txt
	@touch $@

generate: ## the MessagePack code of wire/
	$(GO) generate ./...

install: ## after `make lib`; PREFIX=/usr/local: library, header, kvconn.pc and licences
	@PREFIX=$${PREFIX:-/usr/local} scripts/install.sh

# --- the main job -------------------------------------------------------------

demo: wheel ## two real vLLM servers, KV caches carried between them, texts compared
	@scripts/vllm-demo.sh $(VENV_VLLM)

bench: cmd ## kvconn bench: tcp beside iperf3 where it is installed, local beside the kernel's own copies
	$(BUILD)/kvconn bench --transport tcp
	$(BUILD)/kvconn bench --transport local
	$(BUILD)/kvconn bench --transport local --memory shared

# --- the pages ----------------------------------------------------------------

.PHONY: docs
docs: | tools ## the pages as a site, build/_site, with their links checked
	@scripts/check-docs.sh $(PYTHON)

# --- tests --------------------------------------------------------------------

test: lint gpu-double test-go test-chaos side-by-side attacks ## all tests that need no vLLM

# What takes no figures, and leaves a processor idle for half of its time, runs two at a time. What several need is built before.
side-by-side: cmd wheel | tools
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target bench-once mutants test-wheel referee test-core test-c

# What takes longest goes first: else one core waits for it at the end. With -bench, go runs one package after the other,
# so that the benchmarks have a run of their own.
LONGEST := ./node ./local ./tcp/conformance ./tcp ./devices ./natsbus ./rig/conformance ./cuda ./core/machine ./kv
# Packages at once: four of them used 67 % of two cores, since tests wait.
AT_ONCE := $(shell echo $$(($$(nproc) + 4)))
# rig/attack is not among them: its figures are of machines without a race detector, and `make attack` has it to itself. The
# tests of node, natsbus and tcp have the same code under the race detector.
# Up to three tests that fail without a race or a panic run once more, alone, at the end, and are told as flaky if they pass.
# First all is compiled: the compiler would be the busy neighbour of the tests that run first.
test-go: | tools ## Go, with the race detector and the invariants on
	@$(STAGE) go-compile bash -c '$(GO) list -race -tags invariants -test -deps -export ./... >/dev/null; $(GO) list -tags faults -test -deps -export ./cuda >/dev/null' || :
	@$(STAGE) go scripts/test-go.sh go $(GO) -p $(AT_ONCE) -race -tags invariants -timeout 20m -- $(LONGEST) $$($(GO) list ./... | grep -v -e /rig/attack$$ -e /rig/chaos$$)

# rig/chaos runs alone: its agents are processes, and the peers of one that gets no processor are right to take it for gone.
test-chaos: | tools ## the tests of rig/chaos, as test-go
	@$(STAGE) go-chaos scripts/test-go.sh go-chaos $(GO) -race -tags invariants -timeout 20m -- ./rig/chaos

# core and kv have no goroutines of their own. Their long tests and the simulator run here, ten times as fast.
test-core: | tools ## core and kv without the race detector, with the simulator's 2000 seeds
	@$(STAGE) core scripts/test-go.sh core $(GO) -tags invariants -timeout 10m -- ./core/... ./kv

bench-once: | tools ## each benchmark of Go once, so that none rots
	@$(STAGE) benchmarks $(GO) test -tags invariants -run '^$$' -bench . -benchtime 1x -timeout 20m $(sort $(dir $(shell grep -l '^func Benchmark' $(filter %_test.go,$(GOFILES)))))

test-c: $(BUILD)/libkvconn.so licenses/go/LICENSE ## the C program, as C and as C++, and the library's symbols
	@$(STAGE) c scripts/test-c.sh

test-wheel: wheel ## Python tests on the wheel, in a clean environment
	@$(STAGE) wheel scripts/test-wheel.sh $(PYTHON)

# It leaves the table's row for `attacks`.
referee: cmd ## the router before engines of real FastAPI releases; a part of attack. REFEREE='--seed 2 --chance 9000 --seconds 90' for options
	@rm -f $(BUILD)/disguises.txt
	@$(STAGE) referee scripts/referee.sh $(PYTHON) $(BUILD)/kvconn --row $(BUILD)/disguises.txt $(REFEREE)

gpu-double: | tools ## build/gpu-double/, the tests' own CUDA driver, and its tests under both sanitizers
	@$(STAGE) gpu-double bash -c 'scripts/gpu-double.sh --test || { status=$$?; ((status == 75)) || exit $$status; }'
	@scripts/gpu-real-driver.sh >/dev/null || (($$? == 75))

gpu-kit: | tools ## build/kvconn-gpu-kit.tar.gz: what a machine with a GPU is to confirm, in one command
	@GO=$(GO) scripts/gpu-kit.sh

attack: ## attacks on real agents in processes of their own: what each got once, and gets now; what the defence costs a load
	@$(MAKE) --no-print-directory referee
	@$(MAKE) --no-print-directory attacks

# Its figures are of a machine that does nothing else.
attacks: cmd | tools
	@rm -f $(BUILD)/attacks.txt
	@$(STAGE) attack scripts/test-go.sh attack $(GO) -count=1 -timeout 1800s -- ./rig/attack -args -table $(CURDIR)/$(BUILD)/attacks.txt -disguises $(CURDIR)/$(BUILD)/disguises.txt
	@cat $(BUILD)/attacks.txt
	@$(STAGE) allocations $(GO) test ./node ./core/machine -count=1 -run '^(TestLoadAllocates|TestTransferAllocates)$$'

TIME ?= 5m
# Their seed is fixed elsewhere.
RANDOM_TESTS := ^(TestChoosePathsRandom|TestDealRandom|TestEvictedSession|TestMatchAgainstNaive|TestMergeRangesRandom|TestNewLayoutAgainstNaive|TestOrderAgainstNaive|TestReplays|TestSendQueueRandom|TestSplitShares|TestWritesRandom)$$
soak: | tools ## seeds of the simulator from a random start, for TIME=5m
	KVCONN_SEED=random $(GO) test -tags invariants -count=20 -run '$(RANDOM_TESTS)' ./kv ./rdma ./natsbus
	$(GO) test -count=1 -run '^TestHostileSim$$' ./natsbus -sim.from $$(date +%s) -sim.seeds 500
	$(GO) test -tags invariants -timeout 0 -v -run '^TestSoak$$' ./core/machine -sim.soak $(TIME)

# TIME's default is the soak's; unless it is given, a target gets a minute.
fuzz: | tools ## every fuzz test, for TIME=1m each; what is found stays in testdata/fuzz
	GO=$(GO) scripts/fuzz.sh $(if $(filter file,$(origin TIME)),1m,$(TIME)) $(if $(ONLY),'$(ONLY)')

mutants: | tools ## deliberate defects, each of which the simulator must find
	@$(STAGE) mutants $(GO) run ./rig/mutants

rdma-test: | tools ## rdma/ on real queue pairs, in a small virtual machine; STAGES='go' for some
	@GO=$(GO) scripts/rdma-test.sh $(STAGES)

e2e: wheel rig ## faults on agents in processes of their own, rdma-test, then the real vLLM and SGLang pairs, also with failures
	@GO=$(GO) scripts/e2e.sh $(VENV_VLLM) $(VENV_SGLANG)

environments: ## .venv-vllm and .venv-sglang, which e2e makes where they are missing
	@$(PYTHON) e2e/setup_vllm.py $(VENV_VLLM) && $(PYTHON) e2e/setup_sglang.py $(VENV_SGLANG)

e2e-sglang: wheel ## the real SGLang pair, also with failures and with several ranks; a part of e2e
	@scripts/sglang-e2e.sh $(VENV_SGLANG)

e2e-versions: wheel ## the real pair on the newest vLLM and the two minor releases before it; VERSIONS='0.31.0' for some
	@scripts/vllm-versions.sh $(VENV_VLLM) $(VERSIONS)

chaos: rig ## real agents under load and faults; CHAOS='--short --seed 1' for options
	$(BUILD)/kvconn-rig chaos $(CHAOS)

lint: $(VENV)/stamp | tools ## gofmt, vet, staticcheck, ruff, generated code up to date, nothing of other projects
	@$(STAGE) lint scripts/lint.sh $(VENV)

quick: $(VENV)/stamp | tools ## before the whole check: the style, the pages, the tests of lists; a minute when all is compiled
	@scripts/lint.sh $(VENV) --quick

clean: ## removes what was built, but not the environments
	rm -rf $(BUILD) dist licenses python/*.egg-info .demo

.PHONY: help tools attack lib cmd rig licenses wheel generate install demo bench test side-by-side test-go test-chaos test-core bench-once test-c test-wheel attacks referee gpu-double gpu-kit soak fuzz mutants rdma-test environments e2e e2e-sglang e2e-versions lint quick clean chaos
