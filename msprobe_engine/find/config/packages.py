"""Versions of installed packages of two runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from msprobe_engine.config.severity import ERROR, HARMLESS, MAY
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.config.difference import PIP, Difference, Sheet

Versions = Mapping[str, Sequence[str]]

_KERNELS = Sentence("kernels, and with them rounding, change from release to release")
_RULES = Sentence("what the framework does, and what it takes by default, changes from release to release")
_DATA = Sentence("samples can become other tokens or come in another order")
_UNKNOWN = Sentence("numbers are not known to depend on it")
RELEVANT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *(
                "torch",
                "torch-npu",
                "torchvision",
                "torchaudio",
                "triton",
                "triton-*",
                "pytorch-triton*",
                "transformer-engine*",
                "flash-attn*",
            ),
            *("flash-linear-attention", "fla-core", "xformers", "apex", "amdgpu-*", "mindspore*", "numpy", "liger-kernel", "causal-conv1d"),
            *(
                "mamba-ssm",
                "nvidia-cublas*",
                "nvidia-cudnn*",
                "nvidia-nccl*",
                "nvidia-cuda-*",
                "nvidia-cusparse*",
                "bitsandbytes",
                "torchao",
            ),
            *("grouped-gemm", "nv-grouped-gemm", "deep-gemm", "deep-ep", "cupy*", "jax*", "scipy", "te-*", "hccl", "opc-tool", "acl"),
        ),
        _KERNELS,
    ),
    **dict.fromkeys(
        (
            *(
                "transformers",
                "deepspeed",
                "megatron*",
                "mindspeed*",
                "mindformers",
                "peft",
                "accelerate",
                "lightning*",
                "pytorch-lightning",
            ),
            *("torchtitan", "trl", "verl", "slime", "nemo*", "nvidia-modelopt", "optimum*", "vllm*", "sglang*", "msadapter", "colossalai"),
        ),
        _RULES,
    ),
    **dict.fromkeys(("datasets", "tokenizers", "sentencepiece", "tiktoken", "mosaicml-streaming", "webdataset", "megatron-energon"), _DATA),
}
"""Packages that numbers depend on; the existing tool looks at eight of them."""
_EXACT = {name: why for name, why in RELEVANT.items() if "*" not in name}
_STARS = {name: why for name, why in RELEVANT.items() if "*" in name}


def canonical(name: str) -> str:
    """A distribution's name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def why_it_matters(name: str) -> str:
    """One sentence; empty for a package that numbers are not known to depend on."""
    plain = canonical(name)
    return _EXACT.get(plain) or next((why for pattern, why in _STARS.items() if fnmatchcase(plain, pattern)), "")


def compare_packages(bench: Versions, cmp: Versions) -> Sheet:
    """Compare the packages of two runs."""
    golden_packages, target_packages = (
        {canonical(golden_name): (golden_name, ", ".join(sorted(set(versions)))) for golden_name, versions in side.items()}
        for side in (bench, cmp)
    )
    sheet = Sheet(PIP, compared=len(golden_packages.keys() | target_packages.keys()))
    for plain in sorted(golden_packages.keys() | target_packages.keys()):
        (golden_name, golden_versions), (target_name, target_versions) = (
            golden_packages.get(plain, ("", "")),
            target_packages.get(plain, ("", "")),
        )
        if golden_versions == target_versions:
            continue
        why = why_it_matters(plain)
        severity, verdict = (MAY, ERROR) if why else (HARMLESS, "")
        sheet.differences.append(
            Difference(
                PIP,
                golden_name,
                target_name,
                golden_versions or "None",
                target_versions or "None",
                severity,
                why or _UNKNOWN,
                level=verdict,
            )
        )
    return sheet
