# MoH-LLM with all that the quick start and a server need; for a CPU, or for a GPU with CUDA 13.
#
#   docker build -t moh-llm .
#   docker build -t moh-llm --build-arg TORCH=cu130 .
#   docker run --rm -v "$PWD:/work" moh-llm quickstart                # with a GPU: --gpus all
#   docker run --rm -v "$PWD:/work" moh-llm convert BASE --keys 0.5 --output-dir out/moh
FROM python:3.11-slim

# The index of PyTorch's builds: cpu, cu130, ...
ARG TORCH=cpu

# Triton and Inductor compile small C files at first use.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*

# PyTorch first: a change of the sources then does not download it again.
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/${TORCH}

COPY setup.cfg setup.py pyproject.toml constraints.txt MANIFEST.in README.md LICENSE /src/
COPY moh_llm /src/moh_llm
COPY recipes /src/recipes
COPY data_mixtures /src/data_mixtures
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[data,quickstart,serve]" && rm -rf /src

WORKDIR /work
ENTRYPOINT ["moh-llm"]
CMD ["--help"]
