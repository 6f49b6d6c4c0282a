#!/bin/sh
# Two ranks. The probe is asked for by the key "msprobe" of ds_config.json: the line is that of any DeepSpeed job.
# Without an accelerator: DS_ACCELERATOR=cpu ./run.sh
set -e
cd "$(dirname "$0")"
ranks=${RANKS:-2}

deepspeed --num_accelerators "$ranks" train.py --deepspeed_config ds_config.json "$@"
