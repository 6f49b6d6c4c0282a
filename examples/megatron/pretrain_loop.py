"""Megatron-LM's own training loop (`megatron.training.pretrain`) with a small GPT and random tokens. It knows nothing of the probe:

    torchrun --nproc_per_node 2 -m msprobe_integrations.megatron examples/megatron/pretrain_loop.py --msprobe-config probe.yaml \\
        --train-iters 10 --tensor-model-parallel-size 2

Needs `megatron.training`: a checkout of Megatron-LM, or the wheel of megatron-core 0.17 or newer (it runs on Python 3.11 too:
``pip install --no-deps --ignore-requires-python megatron-core==0.19.2``). All of Megatron's arguments are accepted.
"""

# ruff: noqa: E402
# The shim comes before torch and Megatron.

from __future__ import annotations

import functools
import inspect
import os
import sys
import typing
import warnings
from pathlib import Path
from typing import Any

import typing_extensions

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).resolve().parent))
if not hasattr(typing, "override"):  # the only thing that 0.18 and newer want of Python 3.12
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
import cpu_shim

cpu_shim.install()
import megatron.training.arguments as arguments
import megatron.training.initialize as initialize
import megatron.training.training as training
import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

DEFAULTS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2
--global-batch-size 4 --train-iters 4 --lr 1e-2 --min-lr 1e-3 --lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 63
--make-vocab-size-divisible-by 8 --transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
--attention-backend unfused --log-interval 1 --eval-iters 1 --eval-interval 2 --dataloader-type cyclic --num-workers 0
--position-embedding-type rope --seed 1234 --use-cpu-initialization
"""


def without_cuda() -> None:
    """The loop asserts that CUDA exists and compiles helper kernels; neither is needed here."""
    if torch.cuda.is_available():
        return
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    initialize._compile_dependencies = lambda: None
    if hasattr(training, "set_jit_fusion_options"):
        training.set_jit_fusion_options = lambda *_, **__: None


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: Any = None, config: Any = None, **_: Any) -> Any:
    """A GPT of what the arguments say."""
    args = training.get_args()
    wanted = {
        "config": config or arguments.core_transformer_config_from_args(args),
        "transformer_layer_spec": get_gpt_layer_local_spec(num_experts=args.num_experts),
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": "rope",
        "vp_stage": vp_stage,
    }
    known = inspect.signature(GPTModel.__init__).parameters
    return GPTModel(**{k: v for k, v in wanted.items() if k in known})


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The i-th item is always the same."""

    def __init__(self, n: int, length: int, vocabulary: int) -> None:
        self.n, self.length, self.vocabulary = n, length, vocabulary

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(i)
        return {"tokens": torch.randint(0, self.vocabulary, (self.length + 1,), generator=generator)}


def data_provider(sizes: Any, vp_stage: Any = None) -> tuple[RandomTokens, ...]:  # noqa: ARG001
    """Training, validation and test data."""
    args = training.get_args()
    return tuple(RandomTokens(max(n or 1, 64), args.seq_length, args.padded_vocab_size) for n in sizes)


data_provider.is_distributed = True  # type: ignore[attr-defined]


def forward_step(data: Any, model: Any, **_: Any) -> Any:
    """One micro batch."""
    tokens = next(data)["tokens"]
    length = tokens.shape[1] - 1
    mask = torch.tril(torch.ones(1, 1, length, length)) < 0.5
    positions = torch.arange(length)[None].expand(tokens.shape[0], -1)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())

    def loss(out: torch.Tensor) -> Any:
        total = out.float().sum()
        count = torch.tensor(out.numel(), dtype=torch.int)
        return total, count, {"lm loss": torch.cat([total.detach().clone().view(1), count.view(1).float()])}

    return output, loss


def main(argv: list[str]) -> None:
    torch.set_num_threads(1)
    sys.argv = [sys.argv[0], *DEFAULTS.split(), *argv]
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}.items():
        os.environ.setdefault(key, value)
    without_cuda()
    names = list(inspect.signature(training.pretrain).parameters)
    kind = ModelType.encoder_or_decoder
    if names[0] != "cfg_container":  # up to 0.17
        training.pretrain(data_provider, model_provider, kind, forward_step)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args as container

    args = arguments.parse_and_validate_args()  # since 0.18 the script parses
    if "model_provider" in names[:3]:  # 0.18
        training.pretrain(container(args), data_provider, model_provider, kind, forward_step)
        return
    try:
        from megatron.training.argument_utils import gpt_config_from_args
    except ImportError:
        from megatron.training.arguments import gpt_config_from_args
    training.pretrain(container(args, gpt_config_from_args(args)), data_provider, kind, forward_step)


if __name__ == "__main__":
    main(sys.argv[1:])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
