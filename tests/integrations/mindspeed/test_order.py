"""MindSpeed's patches and our wrappers in every order: with the stand-in, and with the real patch manager where there is a checkout."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspeed_world import STAND_IN, imported_anew, observer, write_megatron

from msprobe_integrations.megatron import patches
from msprobe_integrations.mindspeed import patch_ordering
from msprobe_integrations.patching import MARK

PATH = "megatron.training.training.train_step"
OPERATIONS = ("import", "import loop", "observe", "let go", "decorate", "decorate bare", "replace", "calling", "apply", "remove", "step")


@pytest.fixture(params=["stand-in", "MindSpeed"])
def patch_utils(request: pytest.FixtureRequest) -> ModuleType:
    """A patch manager of one's own, watched by us: the stand-in's, and the real one of a checkout."""
    place = STAND_IN if request.param == "stand-in" else Path(os.environ.get("MSPROBE_MINDSPEED", ""))
    if place == Path():
        pytest.skip("MSPROBE_MINDSPEED does not say where a checkout of MindSpeed is")
    spec = importlib.util.spec_from_file_location(f"patch_utils_of_{place.name}", place / "mindspeed" / "patch_utils.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    patch_ordering.watch(module)
    return module


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_megatron(tmp_path_factory.mktemp("megatron"))


def patch(kind: str, trace: list[str]) -> Any:
    """What a feature of MindSpeed may register."""
    if kind == "replace":

        def train_step(*_: Any) -> Any:
            trace.append("replacement")
            return ("done",)

        return train_step
    if kind == "calling":  # replaces, and calls what it has taken by name before
        original = importlib.import_module("megatron.training.training").train_step

        def calling(*args: Any) -> Any:
            trace.append("calling")
            return original(*args)

        return calling

    def some_wrapper(function: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            trace.append(kind)
            return function(*args)

        return functools.wraps(function)(wrapper) if kind == "decorate" else wrapper

    return some_wrapper


def _same(seen: Any) -> Any:
    return seen


def play(module: ModuleType, operations: Sequence[str], with_probe: bool) -> list[Any]:
    """What the training sees of a sequence of operations, and how often each step was observed (as it should be: once, or not)."""
    manager = module.MindSpeedPatchesManager
    manager.patches_info.clear()
    trace: list[str] = []
    found: list[Any] = []
    seen: Any = None
    for operation in operations:
        if operation == "import":
            importlib.import_module("megatron.training.training")
        elif operation == "import loop":
            importlib.import_module("user_loop")
        elif operation in ("observe", "let go"):
            if with_probe:
                seen = observer() if operation == "observe" else None
                patches.observe(None if seen is None else functools.partial(_same, seen))
        elif operation == "apply":
            manager.apply_patches()
        elif operation == "remove":
            manager.remove_patches()
        elif operation == "step":
            steps = [importlib.import_module("megatron.training.training").train_step, importlib.import_module("user_loop").run]
            training = importlib.import_module("megatron.training.training")
            for step in steps:
                before = seen.iteration.call_count if seen is not None else 0
                result = step(*(() if step is steps[1] else (None,) * 6))
                found.append((result, trace + training.trace))
                trace.clear()
                training.trace.clear()
                assert (seen.iteration.call_count if seen is not None else 0) == before + (seen is not None)
        else:
            with patch_ordering.ours_off():  # features register their patches within apply_features_patches
                function = patch(operation, trace)
            try:
                manager.register_patch(PATH, function)
            except RuntimeError as error:
                found.append(str(error))
    training = sys.modules.get("megatron.training.training")
    patches.observe(None)
    if training is not None:
        assert not hasattr(training.train_step, MARK), "something of ours is left"
    return found


@pytest.mark.fast_cells("stand-in")
@given(operations=st.lists(st.sampled_from(OPERATIONS), max_size=14))
def test_any_order(patch_utils: ModuleType, megatron: Path, operations: list[str]) -> None:
    """Whatever is imported, patched, removed and observed in whatever order: every step runs what it would run without the probe, is
    observed exactly once while somebody observes, and when nobody does any longer nothing of ours is left."""
    results = []
    for with_probe in (False, True):
        with imported_anew(megatron):
            results.append(play(patch_utils, [*operations, "step"], with_probe))
    assert results[0] == results[1]


@pytest.mark.fast_cells("stand-in-operations0", "stand-in-operations1")
@pytest.mark.parametrize(
    "operations",
    [
        ["observe", "import", "import loop", "step", "replace", "apply"],
        ["observe", "import loop", "decorate bare", "replace", "apply", "remove", "decorate", "apply"],
        ["decorate", "apply", "import loop", "observe", "remove"],
        ["observe", "replace", "apply", "import loop"],
        ["import", "observe", "calling", "apply", "import loop", "let go"],
    ],
)
def test_known_orders(patch_utils: ModuleType, megatron: Path, operations: list[str]) -> None:
    """The orders of real launches: ours first, theirs first, Megatron imported by the patches, and MindSpeed-LLM's second list."""
    results = []
    for with_probe in (False, True):
        with imported_anew(megatron):
            results.append(play(patch_utils, [*operations, "step"], with_probe))
    assert results[0] == results[1]


def test_a_fault_of_a_patch_is_raised_and_ours_are_back(patch_utils: ModuleType, megatron: Path) -> None:
    """A patch that cannot be applied raises as without the probe, and what was wrapped is wrapped again."""
    with imported_anew(megatron):
        manager = patch_utils.MindSpeedPatchesManager
        manager.patches_info.clear()
        training = importlib.import_module("megatron.training.training")
        patches.observe(observer)
        manager.register_patch("megatron.nothing.of.this", patch("replace", []))
        with pytest.raises(ModuleNotFoundError):
            manager.apply_patches()
        assert hasattr(training.train_step, MARK)


def test_what_suffers_is_named_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement of something the probe relies on is one line with both names; a decoration is none."""
    monkeypatch.setattr(patch_ordering, "_said", set())
    path = "megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving"
    with caplog.at_level(logging.WARNING, "msprobe"):
        patch_ordering.say_degraded({path: SimpleNamespace(patch_func=None, wrappers=[play])})
        assert not caplog.messages
        for _ in range(2):
            patch_ordering.say_degraded({path: SimpleNamespace(patch_func=play), "torch.compile": SimpleNamespace(patch_func=play)})
    assert len(caplog.messages) == 1
    assert all(text in caplog.messages[0] for text in (path, "test_order.play", "micro batch"))


LOOP_OF_MM = """
import functools
from megatron.training.global_vars import get_args
def decorator(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper
@decorator
def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, call_backs):
    return {"loss": 1.5}, 0, 2.5, None
def training_log(loss_dict, total_loss_dict, learning_rate, decoupled_learning_rate, iteration, loss_scale, report_memory_flag,
                 skipped_iter, grad_norm, params_norm, num_zeros_in_grad):
    return False
def train():
    get_args().curr_iteration = 40
    result = train_step(None, None, [], None, None, None, None)
    training_log(result[0], {}, 0.1, None, 41, 1.0, False, *result[1:3], 7.0, result[3])
    return result
"""


def test_loop_of_mindspeed_mm(tmp_path: Path) -> None:
    """A step of MindSpeed-MM's own loop, which takes its schedule from elsewhere and has no optimizer here, is a step with the number of
    the loop (after a checkpoint not 0), its loss, its gradient norm and what its log line says; it is let go as Megatron's functions
    are."""
    place = write_megatron(tmp_path / "megatron")
    (place / "megatron" / "training" / "global_vars.py").write_text("class A: pass\na = A()\ndef get_args():\n    return a\n")
    (place / "mindspeed_mm").mkdir()
    (place / "mindspeed_mm" / "training.py").write_text(LOOP_OF_MM)
    seen = observer()
    scalars: dict[str, Any] = {}
    seen.iteration.return_value.__enter__.return_value = scalars
    with imported_anew(place):
        plain = importlib.import_module("mindspeed_mm.training").train()
        patches.observe(lambda: seen)
        module = importlib.import_module("mindspeed_mm.training")
        assert module.train() == plain
        patches.observe(None)
        assert not hasattr(module.train_step, MARK)
    assert [call.args for call in seen.iteration.call_args_list] == [(40,)]
    assert scalars == {"loss": 1.5, "skipped": 0.0, "grad_norm": 2.5}
    assert [call.args for call in seen.add_logged_scalars.call_args_list] == [
        ({"params_norm": 7.0, "num_zeros": None, "max_attention_logit": None},)
    ]
