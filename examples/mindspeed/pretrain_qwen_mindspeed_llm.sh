#!/bin/bash
# MindSpeed-LLM, 8 NPUs of one machine, with the probe. Run in the MindSpeed-LLM directory; nothing in it is changed.
# Its own launch scripts work as they are below `msprobe run`:
#   msprobe run --config probe.yaml -- bash examples/mcore/<model>/pretrain_<model>_ptd.sh
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True
export HCCL_CONNECT_TIMEOUT=1800
source "${ASCEND_ENV:-/usr/local/Ascend/ascend-toolkit/set_env.sh}"

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PROBE=${PROBE:-$HERE/probe.yaml}
NPUS_PER_NODE=${NPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
DATA_PATH=${DATA_PATH:?path of the preprocessed data}
TOKENIZER_PATH=${TOKENIZER_PATH:?directory of the Hugging Face tokenizer}
CKPT_SAVE_DIR=${CKPT_SAVE_DIR:-./ckpt}

DISTRIBUTED_ARGS=(
    --nproc_per_node "$NPUS_PER_NODE" --nnodes "$NNODES" --node_rank "$NODE_RANK"
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"
)
GPT_ARGS=(
    --use-mcore-models --transformer-impl local --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1
    --sequence-parallel --use-distributed-optimizer --use-flash-attn --use-fused-rmsnorm --use-fused-swiglu
    --use-rotary-position-embeddings --use-fused-rotary-pos-emb --position-embedding-type rope
    --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention --num-query-groups 4
    --seq-length 4096 --max-position-embeddings 32768 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --rotary-base 1000000
    --disable-bias-linear --add-qkv-bias --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1
    --padded-vocab-size 152064 --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$TOKENIZER_PATH"
    --attention-dropout 0.0 --hidden-dropout 0.0 --attention-softmax-in-fp32 --no-masked-softmax-fusion
)
TRAIN_ARGS=(
    --micro-batch-size 1 --global-batch-size 64 --train-iters 2000 --bf16
    --lr 1.25e-6 --min-lr 1.25e-7 --lr-decay-style cosine --weight-decay 1e-1 --clip-grad 1.0 --initial-loss-scale 4096
    --data-path "$DATA_PATH" --split 100,0,0 --log-interval 1 --save-interval 2000 --eval-interval 2000 --eval-iters 0
    --distributed-backend nccl --save "$CKPT_SAVE_DIR"
)

mkdir -p logs
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${GPT_ARGS[@]}" "${TRAIN_ARGS[@]}" \
    --msprobe-config "$PROBE" "$@" | tee logs/pretrain_qwen.log
