#!/bin/bash
# Two ranks of Hugging Face's Trainer with the probe; train.py is an ordinary training script. Arguments go to it.
cd "$(dirname "$0")" || exit 1
exec msprobe run --config probe.yaml ${MSPROBE_OUTPUT:+--output-dir "$MSPROBE_OUTPUT"} -- \
  torchrun --nproc_per_node 2 --master_port "${MASTER_PORT:-29511}" train.py "$@"
