"""Every function that draws random numbers, wrapped for two purposes: calls that all start from one state, and a list of the calls.

Python's ``random``, ``numpy.random`` (the functions of the module), ``torch``, methods of ``torch.Tensor`` and what draws inside
``torch.nn.functional`` and recurrent layers (dropout). Calls with a ``generator`` of their own are listed, and left as they are:
their numbers are the program's.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.output_files import AppendFile, make_directory
from msprobe_engine.core.io.safe_cells import safe_cell
from msprobe_engine.core.log import get_logger
from msprobe_integrations.common.capture.stacks import Stacks
from msprobe_integrations.torch.hooks import frames
from msprobe_integrations.torch.hooks.functions import Rebinding
from msprobe_integrations.torch.tensors.devices import in_use, is_capturing

_log = get_logger()

PYTHON = (
    *("betavariate", "binomialvariate", "choice", "choices", "expovariate", "gammavariate", "gauss", "getrandbits", "lognormvariate"),
    *("normalvariate", "paretovariate", "randbytes", "randint", "random", "randrange", "sample", "shuffle", "triangular", "uniform"),
    *("vonmisesvariate", "weibullvariate"),
)
NUMPY = (
    *("beta", "binomial", "bytes", "chisquare", "choice", "dirichlet", "exponential", "f", "gamma", "geometric", "gumbel"),
    *("hypergeometric", "laplace", "logistic", "lognormal", "logseries", "multinomial", "multivariate_normal", "negative_binomial"),
    *("noncentral_chisquare", "noncentral_f", "normal", "pareto", "permutation", "poisson", "power", "rand", "randint", "randn"),
    *("random", "random_integers", "random_sample", "ranf", "rayleigh", "sample", "shuffle", "standard_cauchy", "standard_exponential"),
    *("standard_gamma", "standard_normal", "standard_t", "triangular", "uniform", "vonmises", "wald", "weibull", "zipf"),
)
TORCH = (
    *("bernoulli", "binomial", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
    *("randperm", "_standard_gamma", "_sample_dirichlet"),
)
TENSOR = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal_", "random_",
    "uniform_",
)  # fmt: skip
SOMETIMES_TORCH = (
    *("dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout"),
    *("feature_alpha_dropout_", "native_dropout", "rrelu", "rrelu_"),
)
SOMETIMES_FUNCTIONAL = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "scaled_dot_product_attention"),
)
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""What is "sometimes" random draws only with some arguments (``training``, a probability above 0)."""


class RandomLog:
    """``random_{rank|proc}{id}_{yyyymmddHHMMSS}.csv``: one line per call, with the file in the system's hands after each.

    Columns: ``api_name`` (``torch_random.rand.0``, numbered per function from 0) and ``stack`` (innermost frame first, as in
    stack.json). UTF-8 with a byte order mark, as the existing tool writes it.

    Raises:
        SinkError: the directory or file cannot be created.
    """

    def __init__(self, directory: Path, rank: int | None) -> None:
        make_directory(directory, "random_save")
        who = f"proc{os.getpid()}" if rank is None else f"rank{rank}"
        stem, n = f"random_{who}_{time.strftime('%Y%m%d%H%M%S')}", 1
        self.path = directory / f"{stem}.csv"
        while os.path.lexists(self.path):  # a second one in the same second
            n += 1
            self.path = directory / f"{stem}_{n}.csv"
        self._file = AppendFile(self.path)
        self._file.append(b"\xef\xbb\xbfapi_name,stack\r\n")
        self._counts: dict[str, int] = {}
        self._stacks = Stacks(frames.hides)
        self._pid = os.getpid()

    def add(self, name: str, depth: int) -> None:
        """Note a call of the function `name`; `depth` frames lie between this one and the caller's."""
        if os.getpid() != self._pid:  # a forked worker of a data loader: not this process' calls
            return
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        with torch._C.DisableTorchFunction():
            stack = self._stacks.capture(sys._getframe(depth))
            text = "".join(f"{line} \n" for line in self._stacks.texts()[stack])
            self._file.append(f"{safe_cell(f'{name}.{number}')},{safe_cell(text)}\r\n".encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        self._file.close()


class _Watch:
    """What happens at a call; one per process, because the functions are the process'."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self.log: RandomLog | None = None
        self._states: tuple[Any, Any] = (None, None)
        self._patches = Rebinding()

    def fix(self, seed: int | None) -> None:
        """Let every call start from the state that `seed` makes; None: let the streams run."""
        self.seed = seed
        if seed is not None:
            self._states = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        self._wrap()

    def list_calls(self, log: RandomLog | None) -> None:
        """Write every call to `log`; None: end that."""
        if self.log is not None:
            self.log.close()
        self.log = log
        self._wrap()

    def beneath(self, change: Callable[[], None]) -> None:
        """Let `change` replace some of the same functions: these wrappers are taken off and put around it again."""
        self._patches.undo()
        change()
        self._wrap()

    def _wrap(self) -> None:
        if self.seed is None and self.log is None:
            self._patches.undo()
            return
        if self._patches:
            return
        for owner, group, names, always in (
            (random, "python", PYTHON, True),
            (np.random, "numpy", NUMPY, True),
            (torch, "torch", TORCH, True),
            (torch, "torch", SOMETIMES_TORCH, False),
            (torch.Tensor, "tensor", TENSOR, True),
            (functional, "functional", SOMETIMES_FUNCTIONAL, False),
            (torch._VF, "functional", RECURRENT, False),
        ):
            for name in names:
                self._patches.wrap(owner, name, self._wrapper(group, f"{group}_random.{name}", always))
        self._patches.wrap(np.random, "default_rng", self._seeded_generator)
        self._patches.early_imports()

    def _wrapper(self, group: str, name: str, always: bool) -> Callable[[Any], Any]:
        def wrap(original: Any) -> Any:
            @functools.wraps(original)
            def draw(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
                    return original(*args, **kwargs)
                own = kwargs.get("generator") is not None
                if self.seed is not None and not own:
                    self._start_over(group)
                if always:
                    self._log_call(name)
                    before = None
                else:
                    before = _states() if self.log is not None else None
                try:
                    return original(*args, **kwargs)
                finally:
                    if before is not None and before != _states():
                        self._log_call(name)
                    if self.seed is not None and not own:
                        self._start_over(group)  # what draws without being wrapped finds the same state too

            return draw

        return wrap

    def _seeded_generator(self, original: Any) -> Any:
        @functools.wraps(original)
        def default_rng(seed: Any = None) -> Any:
            if seed is None:  # else from the system's entropy, which no seed reaches
                self._log_call("numpy_random.default_rng")
                seed = self.seed
            return original(seed)

        return default_rng

    def _log_call(self, name: str) -> None:
        log = self.log
        if log is None:
            return
        try:
            log.add(name, 3)
        except SinkError as error:
            self.log = None
            _log.error("random_save is switched off, the program goes on: %s", error)

    def _start_over(self, group: str) -> None:
        seed = self.seed
        if seed is None:
            return
        if group == "python":
            random.setstate(self._states[0])
        elif group == "numpy":
            np.random.set_state(self._states[1])
        else:
            for generator in _generators():
                generator.manual_seed(seed)


def _generators() -> list[torch.Generator]:
    """The generators that torch draws from on this thread: the processor's and the current device's. No device is started for it."""
    found = [torch.default_generator]
    for kind, module in in_use():
        if not is_capturing(kind):
            found.append(module.default_generators[module.current_device()])
    return found


def _states() -> list[bytes]:
    with torch._C.DisableTorchFunction():
        return [generator.get_state().numpy().tobytes() for generator in _generators()]


watch = _Watch()
