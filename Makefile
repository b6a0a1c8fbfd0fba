# make train   sets .venv up and trains on the bundled digits
# make test    sets .venv up and runs every check and test
# make docs    builds the documentation's site in build/site
# make soak    runs the long tests: kills, hosts, containers, other processors, planted bugs
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test soak check docs clean

train: $(VENV)/.train
	$(BIN)/python train.py --config experiments/digits.yaml

test: check
	$(BIN)/python -m pytest -n 2

soak: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m soak
	$(BIN)/python tests/planted/plant.py

docs: $(VENV)/.test
	rm -rf build/docs && mkdir -p build/docs/benchmarks
	cp -r *.md LICENSE CITATION.cff docs build/docs/
	cp benchmarks/*.md benchmarks/*.png build/docs/benchmarks/
	$(BIN)/mkdocs build --strict

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/.train: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/.test: requirements-dev.txt $(VENV)/.train
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) runs build .mypy_cache .pytest_cache .ruff_cache
