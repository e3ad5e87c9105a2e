#!/usr/bin/env bash
# Several hosts over ssh, by DeepSpeed's launcher (which needs pdsh on this host, and the same paths on all).
#
#   examples/launch/several_hosts.sh HOSTFILE [arguments of train_gpt.py]
#
# Without ssh between them, start torchrun on every host instead, with the same first three options:
#   torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node-1:29500 --nproc-per-node 8 examples/train_gpt.py
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
hostfile=${1:?name a hostfile, such as examples/launch/hostfile}
shift
# DeepSpeed passes on what ~/.deepspeed_env and the launcher's own list name; PYTHONPATH is in that list.
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"
exec deepspeed --hostfile "$hostfile" ${MASTER_ADDR:+--master_addr "$MASTER_ADDR"} "$here/train_gpt.py" "$@"
