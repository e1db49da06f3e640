# The verbs of dlp. A fresh clone needs nothing but python3: the first verb makes .venv and installs into it, once.
# With PYTHON=python3 (any interpreter) nothing is installed and no network is used; a torch that exists is never replaced.

CONFIG ?= tiny
WORLD  ?= 8
ARGS   ?=
ARCHS  ?= sm_90a sm_100a

VENV := .venv
ifdef PYTHON
READY :=
else
PYTHON := $(VENV)/bin/python
READY  := $(VENV)/.installed
endif
# On a machine with a GPU and without nvcc, the compiler of the kernels is installed as well
TOOLKIT = $(or $(CUDA_HOME),/usr/local/cuda)/bin/nvcc
EXTRAS  = dev$(shell command -v nvidia-smi >/dev/null && ! command -v nvcc >/dev/null && ! test -x $(TOOLKIT) && echo ,gpu)

RANKS  ?=
DEVICE ?= $(shell $(PYTHON) -c "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')" 2>/dev/null)
NEEDS   = @$(PYTHON) tools/check_env.py

.DEFAULT_GOAL := help
ORDER  ?= forward

# exec: a signal to the shell of a verb reaches the program, which would else run on without it.
.PHONY: help install pretrain plan ledger fidelity test test-all test-fast multigpu lint docs kernels-compile gpu-test emulate sanitize bench bench-quantize bench-gemm bench-linear bench-comm

help: ## this list
	@echo "make VERB [PYTHON=python3] [ARGS=\"...\"]"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 20

install: $(READY) ## make .venv, as each verb does that needs it

pretrain: $(READY) ## train CONFIG=tiny on every GPU, or on 2 CPU ranks: ARGS="--train.steps 10", RANKS=4
	$(NEEDS)
	@exec env OMP_NUM_THREADS=1 $(PYTHON) -m launch.local $(if $(RANKS),--ranks $(RANKS)) $(CONFIG) $(ARGS)

plan: $(READY) ## print mesh and layer plan of CONFIG=tiny for WORLD=8 ranks, without starting them
	$(NEEDS)
	@$(PYTHON) -m launch.train $(CONFIG) --plan --world $(WORLD) $(ARGS)

ledger: $(READY) ## planned and counted bytes on the wire: every recipe on 2 and 4 CPU ranks; exit 1 where they differ
	$(NEEDS)
	@exec env OMP_NUM_THREADS=1 $(PYTHON) -m bench.ledger $(ARGS)

fidelity: $(READY) ## gradients of every recipe beside bf16's and an independent fake quantization, on one rank; exit 1 where they part
	$(NEEDS)
	@$(PYTHON) -m bench.gradient_fidelity $(ARGS)

# A worker takes file by file, as tests/conftest.py orders them. Bytecode is kept, whatever the shell says: compiling the tests
# anew is half of what starting a worker takes.
SPREAD := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
test test-all test-fast: export PYTHONDONTWRITEBYTECODE :=

test: $(READY) ## run the tests, multi-rank ones on gloo: ARGS="-k groups"
	$(NEEDS) pytest hypothesis xdist
	@$(PYTHON) -m pytest $(SPREAD) $(ARGS)

test-all: $(READY) ## the same with all cases of each test (tests/conftest.py), as a nightly run does
	$(NEEDS) pytest hypothesis xdist
	@$(PYTHON) -m pytest $(SPREAD) --all-cases $(ARGS)

test-fast: $(READY) ## the tests for daily work, in about two minutes: nothing that compiles or starts programs, a case of each with ranks
	$(NEEDS) pytest hypothesis xdist
	@$(PYTHON) -m pytest $(SPREAD) --fast $(ARGS)

multigpu: $(READY) ## run the multi-rank tests over NCCL, a GPU per rank (without GPUs: gloo)
	$(NEEDS) pytest
	@$(PYTHON) -m pytest tests/multigpu --all-cases --device $(DEVICE) $(ARGS)

lint: $(READY) ## ruff and mypy
	$(NEEDS) ruff mypy
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy dlp launch bench tests/gpu

docs: $(READY) $(if $(READY),$(VENV)/.installed-docs) ## build the documentation site into build/site; a broken link or reference is an error
	$(NEEDS) mkdocs material mkdocstrings
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict $(ARGS)

kernels-compile: $(READY) ## compile the CUDA kernels for ARCHS="sm_90a sm_100a", GPU or not (exit 2: no nvcc)
	$(NEEDS) ninja pybind11
	@$(PYTHON) -m dlp.kernels.build --compile-only $(ARCHS)

gpu-test: $(READY) ## test the CUDA kernels against the reference, bit for bit, on this machine's GPU
	$(NEEDS) pytest ninja pybind11
	@$(PYTHON) -m pytest tests/gpu --all-cases $(ARGS)

emulate: $(READY) ## the same on this machine's CPU, but for cuBLASLt's GEMMs: ORDER=backward or a number, in which the threads of a block run
	$(NEEDS) pytest ninja pybind11
	@exec env EMULATOR_ORDER=$(ORDER) $(PYTHON) -m pytest tests/gpu --all-cases --emulated $(ARGS)

sanitize: $(READY) ## small GPU cases under compute-sanitizer: ARGS="memcheck --cases 8"; exit 3 where a tool does not work
	$(NEEDS) pytest ninja pybind11
	@$(PYTHON) -m tools.sanitize $(ARGS)

bench: $(READY) ## host, quantizers, producers, GEMMs, linears, step boundary of one GPU beside peers, JSON and PNG: ARGS="linear --quick"
	$(NEEDS) ninja pybind11
	@$(PYTHON) -m bench $(ARGS)

bench-quantize: $(READY) ## bandwidth of the quantizers beside a copy: ARGS="--only cast --sizes 256 --json FILE --plot FILE.png"
	$(NEEDS) ninja pybind11
	@$(PYTHON) -m bench.quantize $(ARGS)

bench-gemm: $(READY) ## TFLOP/s of each recipe's GEMMs beside bf16 and torch._scaled_mm: ARGS="--shapes 8192x4096x4096"
	$(NEEDS) ninja pybind11
	@$(PYTHON) -m bench.gemm $(ARGS)

bench-linear: $(READY) ## one linear per recipe beside bf16 nn.Linear: ARGS="--shapes 8192x4096x4096 --recipes fp8_current"
	$(NEEDS) ninja pybind11
	@$(PYTHON) -m bench.linear $(ARGS)

bench-comm: $(READY) ## time of gathers and sums beside bf16, on every GPU or RANKS=2 CPU ranks: ARGS="--only gather"
	$(NEEDS)
	@exec env OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone \
		--nproc-per-node $(or $(RANKS),$(if $(filter cuda,$(DEVICE)),gpu,2)) -m bench.collectives $(ARGS)

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing dlp and its dependencies into $(VENV) (once)"
	@test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	@$(VENV)/bin/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' \
		>$(VENV)/constraints.txt 2>/dev/null || cp constraints.txt $(VENV)/constraints.txt
	@$(VENV)/bin/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable ".[$(EXTRAS)]" $(PIP_ARGS) || \
		{ echo "install failed; to use an interpreter as it is, without network: make VERB PYTHON=python3" >&2; exit 1; }
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@$(VENV)/bin/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable ".[docs]" $(PIP_ARGS)
	@touch $@
