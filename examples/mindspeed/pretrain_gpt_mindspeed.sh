#!/bin/bash
# Megatron-LM (core_v0.12.1) on MindSpeed, 8 NPUs of one machine, with the probe. Run in the Megatron-LM directory.
# pretrain_gpt.py has MindSpeed's line below `import torch`: import mindspeed.megatron_adaptor
# For the probe one argument is added: --msprobe-config. Without it the probe is not loaded.
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
export HCCL_CONNECT_TIMEOUT=3600
source "${ASCEND_ENV:-/usr/local/Ascend/ascend-toolkit/set_env.sh}"

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PROBE=${PROBE:-$HERE/probe.yaml}
NPUS_PER_NODE=${NPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
DATA_PATH=${DATA_PATH:?path of the preprocessed data, without its suffix}
VOCAB_FILE=${VOCAB_FILE:?vocabulary of the GPT-2 tokenizer}
MERGE_FILE=${MERGE_FILE:?merges of the GPT-2 tokenizer}
SAVE=${SAVE:-./ckpt}

DISTRIBUTED_ARGS=(
    --nproc_per_node "$NPUS_PER_NODE" --nnodes "$NNODES" --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"
)
MODEL_ARGS=(
    --transformer-impl local --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
    --num-layers 8 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 64
    --seq-length 4096 --max-position-embeddings 4096 --normalization RMSNorm --swiglu
    --tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE" --make-vocab-size-divisible-by 1
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 16 --train-iters 1000 --bf16
    --lr 1.0e-6 --min-lr 1.0e-7 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
    --data-path "$DATA_PATH" --split 949,50,1 --log-interval 1 --save-interval 1000 --eval-interval 1000 --eval-iters 10
    --distributed-backend nccl --save "$SAVE"
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    --msprobe-config "$PROBE" "$@"
