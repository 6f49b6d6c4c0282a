#!/usr/bin/env bash
# The launch line of the training, with the probe in front. RANKS: processes on this machine.
set -euo pipefail
cd "$(dirname "$0")"
exec msprobe run --config probe.yaml -- torchrun --standalone --nproc_per_node "${RANKS:-2}" train.py "$@"
