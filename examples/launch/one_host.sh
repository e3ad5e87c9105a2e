#!/usr/bin/env bash
# All accelerators of this host. Everything after the script's name goes to `train_gpt.py`.
#
#   examples/launch/one_host.sh                  # DeepSpeed's launcher, all accelerators
#   LAUNCHER=torchrun RANKS=2 examples/launch/one_host.sh --steps 10
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}"

if [[ "${LAUNCHER:-deepspeed}" == torchrun ]]; then
    exec torchrun --nproc-per-node "${RANKS:-gpu}" "$here/train_gpt.py" "$@"
fi
exec deepspeed ${RANKS:+--num_gpus "$RANKS"} "$here/train_gpt.py" "$@"
