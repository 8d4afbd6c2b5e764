#!/usr/bin/env bash
# Several machines, to be started on each of them, with the same arguments and a shared file system.
#
#     NODES=4 NODE_RANK=0 MASTER=node0 recipes/launch/many_nodes.sh fsdp2 RECIPE --option value
#
# NODES machines, NODE_RANK this one's number from 0, MASTER the address of number 0, GPUS those of one machine (8),
# without GPUs the processes of one machine.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)  # paths in the arguments are relative to the caller's folder
strategy=$1
shift
exec python -m moh_llm.commands.launch --config_file "$root/recipes/accelerate/$strategy.yaml" \
    --num_machines "$NODES" --machine_rank "$NODE_RANK" --num_processes "$((NODES * ${GPUS:-8}))" \
    --main_process_ip "$MASTER" --main_process_port "${PORT:-29500}" -m moh_llm.cli train "$@"
