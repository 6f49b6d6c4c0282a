"""The examples of a page: its code blocks, by language and by the heading or the bold words they stand under."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str, under: str = "") -> list[str]:
    """The code blocks of a page in one language, of all of it or of what follows `under` up to the next heading or bold word."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if under:
        begin = text.index(under) + len(under)
        prose = re.sub(r"^```.*?^```", lambda code: " " * len(code[0]), text, flags=re.DOTALL | re.MULTILINE)
        end = re.compile(r"^(#|\*\*)", re.MULTILINE).search(prose, begin)
        text = text[begin : end.start() if end else None]
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def block(page: str, language: str, under: str) -> str:
    """The one block there."""
    (found,) = blocks(page, language, under)
    return found


def run(code: str, page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Execute an example in a namespace."""
    exec(compile(code, page, "exec"), names)
    return names


def commands(code: str, program: str = "msprobe") -> list[list[str]]:
    """The arguments of every line of a shell block that calls `program`."""
    return [words[1:] for line in code.splitlines() if (words := shlex.split(line, comments=True)) and words[0] == program]


class Tokens(nn.Sequential):
    """What the examples call `model`: three layers that can be told apart."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().pow(2).mean()  # type: ignore[no-any-return]


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]
