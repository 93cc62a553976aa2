# Two commands do everything here: `make demo` trains a draft and serves it, `make test` runs the tests.
PYTHON := .venv/bin/python
STAGES := 01_prepare_data 02_extract_hidden_states 03_build_vocab_mapping 04_train 05_convert_checkpoint
DEMO := configs/smollm2_135m.yaml
QUICK := configs/smollm2_135m_quick.yaml
RUN ?= runs/smollm2_135m

.PHONY: setup demo demo-quick test test-fast lint status report clean

setup: .venv/installed

.venv/installed: requirements-cpu.txt
	python3 -m venv .venv
	@.venv/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-cpu.txt || { \
	  echo "setup: pip could not install requirements-cpu.txt (its message is above)."; \
	  echo "  If torch==2.13.0+cpu is what it did not find: PyTorch publishes that wheel in its own CPU index"; \
	  echo "  (pytorch.org, Get started, compute platform CPU). Put the wheel where pip looks, by"; \
	  echo "  PIP_FIND_LINKS=DIR or PIP_EXTRA_INDEX_URL=URL, and run make setup again."; exit 2; }
	@touch $@

demo: setup
	@for stage in $(STAGES); do $(PYTHON) $$stage.py --config $(DEMO) || exit $$?; done
	@$(PYTHON) -m common.status runs/smollm2_135m

demo-quick: setup
	@for stage in $(STAGES); do $(PYTHON) $$stage.py --config $(QUICK) || exit $$?; done
	@$(PYTHON) -m common.status runs/smollm2_135m_quick

test: setup
	$(PYTHON) -m pytest

test-fast: setup
	$(PYTHON) -m pytest -m "not slow and not gpu"

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

report: setup
	@$(PYTHON) -m common.report $(RUN)

status: setup
	@$(PYTHON) -m common.status $(RUN)

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
