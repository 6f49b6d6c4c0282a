"""The source line that a finding names is the one that computes; that of the user who called a library stands behind it."""

from __future__ import annotations

import pytest

from msprobe_engine.core.text.source_line import argument_text, source_of

LIBRARY = "File /venv/lib/python3.11/site-packages/"
MODEL = f"{LIBRARY}transformers/models/gemma2/modeling_gemma2.py, line 196, in eager_attention_forward, scores = scores / softcap"
WRAPPER = f"{LIBRARY}transformers/utils/generic.py, line 943, in wrapper, output = func(self, *args, **kwargs)"
TORCH = f"{LIBRARY}torch/nn/modules/module.py, line 1775, in _call_impl, return forward_call(*args, **kwargs)"
PYTHON = "File /usr/lib/python3.11/contextlib.py, line 81, in inner, return func(*args, **kwds)"
OWN = "File /job/train.py, line 89, in train, out = model(**batch)"
LAUNCH = "File /job/main.py, line 3, in <module>, train()"


@pytest.mark.parametrize(
    ("stack", "source"),
    [
        ([MODEL, WRAPPER, TORCH, OWN, LAUNCH], f"{MODEL}; called by {OWN}"),
        ([TORCH, PYTHON, OWN, LAUNCH], OWN),
        ([WRAPPER, PYTHON, OWN], OWN),
        ([TORCH, MODEL], MODEL),
        ([TORCH, PYTHON], TORCH),
        ([], ""),
    ],
)
def test_the_line_that_computes_is_named_and_who_called_it(stack: list[str], source: str) -> None:
    assert source_of(stack) == source


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("self.eps", "self.eps"),
        ("1 - lr * weight_decay", "1 - lr * weight_decay"),
        ("1e-5", ""),
        ("-" * 440 + "a", ""),
        ("a" + ".a" * 220, ""),
        ("(" * 150 + "a" + ")" * 150, "a"),
        ("(" * 400 + "a", ""),
    ],
)
def test_an_argument_is_named_as_it_is_written_however_deep_a_recorded_line_is_nested(argument: str, shown: str) -> None:
    assert argument_text(f"y = F.layer_norm(x, eps={argument})", "layer_norm", "eps") == shown
