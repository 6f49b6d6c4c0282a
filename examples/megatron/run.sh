#!/bin/sh
# Megatron with the probe, two ranks:
#   MEGATRON_LM=/path/to/Megatron-LM ./run.sh [more of Megatron's arguments]   its own pretrain_gpt.py on mock data; needs accelerators
#   ./run.sh [more arguments of train_gpt.py]                                  a loop on megatron-core, on a CPU as well
set -e
cd "$(dirname "$0")"
ranks=${RANKS:-2}
output=${OUTPUT:-msprobe_output}

if [ -n "$MEGATRON_LM" ]; then
    # the probe is the last line: an argument more, known to Megatron's own parser
    torchrun --standalone --nproc_per_node "$ranks" "$MEGATRON_LM/pretrain_gpt.py" \
        --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 \
        --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 \
        --micro-batch-size 2 --global-batch-size 16 --train-iters 50 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --bf16 \
        --tensor-model-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
        --log-interval 1 --eval-interval 25 --eval-iters 2 --split 90,5,5 "$@" \
        --msprobe-config probe.yaml --msprobe-output-dir "$output"
else
    # a script with a parser of its own: the command before the launch line asks for the probe
    msprobe run --config probe.yaml --output-dir "$output" -- \
        torchrun --standalone --nproc_per_node "$ranks" train_gpt.py --steps 6 --distopt "$@"
fi
