# Everything from a bare checkout with python3.11, pip and make. Second runs skip the set-up.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint deploy/constraints.txt

.PHONY: demo test check bench soak proto clean

demo: $(VENV)/run.stamp
	$(BIN)/pipectl demo

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest tests -m "not soak"

check: $(VENV)/dev.stamp
	PATH=$(abspath $(BIN)):$$PATH tests/check

bench: $(VENV)/dev.stamp
	$(BIN)/python tests/bench/pipeline.py
	$(BIN)/python tests/bench/partition.py
	$(BIN)/python tests/bench/compile.py
	$(BIN)/python tests/bench/predict.py
	$(BIN)/python tests/bench/ddp.py
	$(BIN)/python tests/bench/fleet.py

soak: $(VENV)/dev.stamp
	$(BIN)/python -m pytest tests -m soak

proto: $(VENV)/dev.stamp
	PATH=$(abspath $(BIN)):$$PATH proto/generate

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: pyproject.toml deploy/constraints.txt | $(VENV)/bin/python
	$(PIP) torch numpy
	$(PIP) --editable '.[coordinator,node,worker]'
	touch $@

$(VENV)/dev.stamp: pyproject.toml deploy/constraints.txt | $(VENV)/run.stamp
	$(PIP) --editable '.[dev]'
	touch $@
