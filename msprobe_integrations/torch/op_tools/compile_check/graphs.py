"""Graphs that `torch.compile` makes: saved as text, and each held against itself uncompiled while the program runs.

A module that fails while all of its graphs pass went wrong where Python was turned into graphs (a branch on
``torch.compiler.is_compiling``, a wrong guess of dynamo); one whose graph fails went wrong in the backend.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from msprobe_engine.accuracy.compile_report import TensorDiff
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.io.output_files import make_directory, write_file
from msprobe_engine.core.log import get_logger
from msprobe_integrations.torch.op_tools.compile_check.runs import same_streams, streams
from msprobe_integrations.torch.op_tools.compile_check.verdict import verdict

_log = get_logger()
Backend = str | Callable[..., Any]


class Graphs:
    """A backend around a backend.

    Args:
        backend: name that `torch.compile` knows, or a function of a graph and its example inputs.
        directory: of the texts of graphs; None: they are not saved.
        check: run every graph uncompiled beside its compiled form.
        faults: where faults of this class go.
    """

    def __init__(self, backend: Backend, directory: Path | None, check: bool, faults: Faults) -> None:
        self._backend, self._directory, self._check, self._faults = backend, directory, check, faults
        self._texts = self._number = 0
        self.runs = 0
        """Runs of compiled graphs so far."""
        self.owner = ""
        """Module that is called, for the names of graphs."""
        self.found: dict[str, list[TensorDiff]] = {}
        """Outputs by name of the graph, ``"graph 3 of layers.0"``; of several calls of one graph that with the largest difference."""
        if directory is not None:
            make_directory(directory, "graph dump")

    def compile_module(self, module: nn.Module) -> Callable[..., Any]:
        """`torch.compile` of the calls of a module with this backend."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        # dynamo counts recompilations by code object: each module has one of its own
        own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
        made: Callable[..., Any] = torch.compile(own, backend=self)
        return made

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """What dynamo calls for every graph."""
        name = f"graph {self._number} of {self.owner or '(model)'}"
        self._number += 1
        self._save("Captured Graph", graph)
        eager = None
        if self._check:
            with self._faults.guard("graph check"):
                eager = copy.deepcopy(graph)
        compiled = self._inner(graph, inputs, options)
        return self._build_checked_call(name, compiled, eager)

    def _inner(self, graph: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
        made: Callable[..., Any]
        if self._backend == "inductor":
            from torch._inductor.compile_fx import compile_fx, compile_fx_inner

            def inner(part: fx.GraphModule, example: Sequence[Any], **kwargs: Any) -> Any:
                self._save("Backward Graph" if kwargs.get("is_backward") else "Forward Graph", part)
                return compile_fx_inner(part, example, **kwargs)

            # eager's random numbers: else dropout drops other elements
            compile_any: Any = compile_fx
            made = compile_any(graph, inputs, inner_compile=inner, config_patches={"fallback_random": True})
            return made
        if self._backend == "aot_eager":
            from torch._dynamo.backends.common import aot_autograd
            from torch._functorch import aot_autograd as tracing
            from torch._functorch.partitioners import min_cut_rematerialization_partition

            make_boxed: Any = tracing.__dict__["make_boxed_func"]  # not exported

            def build_saving_compiler(kind: str) -> Callable[..., Any]:
                def compiler(part: fx.GraphModule, _example: Sequence[Any]) -> Any:
                    self._save(kind, part)
                    return make_boxed(part.forward)

                return compiler

            forward, backward = build_saving_compiler("Forward Graph"), build_saving_compiler("Backward Graph")
            made = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)(graph, inputs)
            return made
        from torch._dynamo.backends.registry import lookup_backend

        made = lookup_backend(self._backend)(graph, list(inputs), **options)
        return made

    def _build_checked_call(self, name: str, compiled: Callable[..., Any], eager: fx.GraphModule | None) -> Callable[..., Any]:
        def both(*args: Any) -> Any:
            kept = None
            self.runs += 1
            if eager is not None and self._faults.is_enabled("graph check"):
                with self._faults.guard("graph check"):
                    kept = [argument.detach().clone() if isinstance(argument, torch.Tensor) else argument for argument in args], streams()
            result = compiled(*args)
            if eager is not None and kept is not None:
                with self._faults.guard("graph check"), torch.no_grad(), same_streams(kept[1]):
                    self._compare(name, eager(*kept[0]), result)
            return result

        return disable_compile(both)

    def _compare(self, name: str, eager: Any, compiled: Any) -> None:
        pairs = zip(eager, compiled) if isinstance(eager, (list, tuple)) else [(eager, compiled)]
        diffs = [verdict(e, c, None) for e, c in pairs if isinstance(e, torch.Tensor) and isinstance(c, torch.Tensor)]
        worst = max((d.scaled for d in self.found.get(name, [])), default=-1.0)
        if max((d.scaled for d in diffs), default=-1.0) > worst:
            self.found[name] = diffs

    def _save(self, kind: str, graph: fx.GraphModule) -> None:
        if self._directory is None:
            return
        with self._faults.guard("graph dump"):
            text = f"# === {kind} ===\n{graph.print_readable(print_output=False)}\n"
            digest = hashlib.sha256(text.encode()).hexdigest()[:8]
            path = self._directory / f"__compiled_fn_{self._texts}.{kind.replace(' ', '_')}.{digest}.py"
            self._texts += 1
            write_file(path, [text.encode()])
            _log.info("graph dump: %s -> %s", kind, path)


def disable_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of which `torch.compile` sees nothing."""
    disabled: Callable[..., Any] = torch.compiler.disable(function)
    return disabled
