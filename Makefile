# vivavoce: `make run` starts it, `make test` checks it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
PIP := $(BIN)/pip --disable-pip-version-check -q

.PHONY: gpu-check gpu-soak gpu-bench run test soak screenshots lint types bench clean

run: $(VENV)/.run
	@$(BIN)/vivavoce serve $(ARGS)

test: $(VENV)/.dev system
	$(BIN)/python -m pytest $(ARGS)

soak: $(VENV)/.dev
	VIVAVOCE_SOAK=10 $(BIN)/python -m pytest -m hypothesis tests/engine tests/gateway $(ARGS)

screenshots: $(VENV)/.dev system
	VIVAVOCE_SCREENSHOTS=docs $(BIN)/python -m pytest -q tests/browser/test_demo.py -k screenshots

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.dev system
	$(BIN)/python -m engine bench
	$(BIN)/python -m tests.gateway.measure --calls 10 30 50 --seconds 5 --tries 2 --stock
	$(BIN)/python -m tests.gateway.memory
	$(BIN)/python -m tests.browser.measure --utterances 12 --pause 5 6
	$(BIN)/python -m tests.browser.measure --utterances 12 --pause 5 6 --embedded

# On a machine with a GPU and PyTorch's CUDA build; GPU_PYTHON is its interpreter.
GPU_PYTHON ?= python3
gpu-check:
	PYTHONPATH=.:$$PYTHONPATH $(GPU_PYTHON) -m pytest -q tests/engine/gpu
	PYTHONPATH=.:$$PYTHONPATH $(GPU_PYTHON) -m engine conform tests/fixtures --device cuda
	PYTHONPATH=.:$$PYTHONPATH $(GPU_PYTHON) tools/gpu_check.py $(ARGS)

# Slow: a memory checker over the kernels' tests, and minutes of utterances that are cancelled at random.
gpu-soak:
	PYTHONPATH=.:$$PYTHONPATH compute-sanitizer --tool memcheck --error-exitcode 1 $(GPU_PYTHON) -m pytest -q -x tests/engine/gpu/test_linear.py \
		tests/engine/gpu/test_attention.py tests/engine/gpu/test_frame_attention.py tests/engine/gpu/test_sample.py tests/engine/gpu/test_conv.py \
		tests/engine/gpu/test_post.py tests/engine/gpu/test_slot.py
	PYTHONPATH=.:$$PYTHONPATH $(GPU_PYTHON) tools/gpu_check.py --only soak $(ARGS)

gpu-bench:
	PYTHON=$(GPU_PYTHON) tools/gpu-bench --rate 1 10 20 60 $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info

.PHONY: system
system:
	@tools/debian-packages chromium=chromium espeak-ng=espeak-ng sox=sox turnserver=coturn

# torch goes first and by its pin: a plain requirement would take the newest build, with gigabytes of CUDA libraries.
$(VENV)/.run: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once, about a minute)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install "$(TORCH)"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@
