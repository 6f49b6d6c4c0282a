"""Operators that a check has to live through: loaded by the processes of a check (``--operators``), no test module."""

from __future__ import annotations

import os
import signal
import time

import torch

from msprobe.pytorch import register_operator


def good(x: torch.Tensor) -> torch.Tensor:
    """Right."""
    return x * 2


def wrong(x: torch.Tensor) -> torch.Tensor:
    """Wrong by 1 % where it is tested, that is in float32."""
    return x * (2.02 if x.dtype is torch.float32 else 2)


def fault(_: torch.Tensor) -> torch.Tensor:
    """A fault in native code."""
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def out_of_memory(x: torch.Tensor) -> torch.Tensor:
    """What the system does to a process that takes too much; the second time there is room."""
    if not os.path.exists(os.environ["MSPROBE_TEST_MARK"]):
        open(os.environ["MSPROBE_TEST_MARK"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return x * 2


def hangs(x: torch.Tensor) -> torch.Tensor:
    """A kernel that does not come back."""
    time.sleep(600)
    return x


def slow(x: torch.Tensor) -> torch.Tensor:
    """Takes a while, so that a check can be killed."""
    time.sleep(0.02)
    return x * 2


for operator in (good, wrong, fault, out_of_memory, hangs, slow):
    register_operator(f"bombs.{operator.__name__}", operator)
