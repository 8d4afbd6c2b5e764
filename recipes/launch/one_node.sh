#!/usr/bin/env bash
# One machine, one process per GPU.
# Give the same command again after an interruption and the run goes on.
#
#     recipes/launch/one_node.sh ddp recipes/smollm2_recovery.yaml --model out/moh
#
# The first argument names a file of recipes/accelerate; GPUS sets the number of processes (default: all GPUs). On a
# machine without a GPU they are processes of the CPU (default: 1).
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)  # paths in the arguments are relative to the caller's folder
strategy=$1
shift
gpus=${GPUS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
exec python -m moh_llm.commands.launch --config_file "$root/recipes/accelerate/$strategy.yaml" --num_processes "$gpus" \
    -m moh_llm.cli train "$@"
