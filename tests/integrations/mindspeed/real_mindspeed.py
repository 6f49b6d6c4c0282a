"""Runs ``pretrain_gpt.py`` of Megatron-LM on the real MindSpeed, or of MindSpeed-LLM, on a CPU: what is left out is the NPU.

python real_mindspeed.py SCRIPT <its arguments>       with PYTHONPATH = MindSpeed, Megatron-LM (core_v0.12.1) [, MindSpeed-LLM]
"""

# ruff: noqa: E402
# What redirects the device comes before torch's users.

from __future__ import annotations

import functools
import importlib.util
import os
import runpy
import sys
import types
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
HERE = Path(__file__).resolve().parent
for _place in (HERE, HERE.parents[2] / "examples" / "megatron"):
    sys.path.insert(0, str(_place))
import cpu_shim
import npu_stand_in

ARGUMENTS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2
--global-batch-size 4 --train-iters 3 --lr 1e-2 --min-lr 1e-3 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer
--vocab-size 4200 --make-vocab-size-divisible-by 8 --transformer-impl local --distributed-backend gloo
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
--no-persist-layer-norm --log-interval 1 --eval-iters 1 --eval-interval 2 --num-workers 0 --position-embedding-type rope --seed 1234
--use-cpu-initialization --attention-dropout 0.0 --hidden-dropout 0.0 --split 90,5,5
"""
UNFUSED = ("--no-rope-fusion", "--no-gradient-accumulation-fusion")


def built_helpers() -> None:
    """A checkout has the sources of its index builder only; the installed megatron-core has it built."""
    name = "megatron.core.datasets.helpers_cpp"
    for place in sys.path:
        for file in (Path(place) / "megatron" / "core" / "datasets").glob("helpers_cpp*.so"):
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
            if importlib.util.find_spec("megatron.core.datasets.helpers") is None:  # 0.8: the built one itself, for int32
                old = sys.modules["megatron.core.datasets.helpers"] = types.ModuleType("megatron.core.datasets.helpers")
                vars(old).update(vars(sys.modules[name]), build_sample_idx=sys.modules[name].build_sample_idx_int32)
                sys.modules["megatron.core.datasets"].helpers = old
            return


def without_cuda() -> None:
    """Megatron's loop asserts that CUDA exists and compiles helper kernels."""
    import megatron.training.initialize as initialize
    import megatron.training.training as training

    allowed = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    for module in list(sys.modules.values()):
        if getattr(module, "initialize_megatron", None) is training.initialize_megatron and module is not training:
            module.initialize_megatron = allowed
    training.initialize_megatron = allowed
    initialize._compile_dependencies = lambda: None
    for module in list(sys.modules.values()):
        if hasattr(module, "set_jit_fusion_options"):
            module.set_jit_fusion_options = lambda *_, **__: None


def main(script: str, argv: list[str]) -> None:
    given = ARGUMENTS.split()
    if "--use-fused-rotary-pos-emb" in argv:
        given = [one for one in given if one not in UNFUSED]
    sys.argv = [script, *given, *argv]
    sys.path.insert(0, str(Path(script).resolve().parent))
    patch_megatron, cpu_shim._patch_megatron = cpu_shim._patch_megatron, lambda _: None  # MindSpeed wants to be there before Megatron
    cpu_shim.install()
    import torch

    kept = npu_stand_in.install()
    if os.environ.get("MSPROBE_TRANSFER"):
        npu_stand_in.transfer(Path(os.environ["MSPROBE_TRANSFER"]))
    torch.set_num_threads(1)
    if os.environ.get("MSPROBE_BY_HAND"):
        import msprobe_integrations.mindspeed  # noqa: F401
    if (Path(script).resolve().parent / "mindspeed_llm").is_dir():
        from mindspeed_llm import megatron_adaptor  # noqa: F401
    else:
        import mindspeed.megatron_adaptor  # noqa: F401  # the line that MindSpeed's users put into the script
    npu_stand_in.extensions()
    patch_megatron(torch)
    built_helpers()
    without_cuda()
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    del kept


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
