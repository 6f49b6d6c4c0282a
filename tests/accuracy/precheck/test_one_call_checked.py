"""One recorded call of torch, run on both sides: what runs, what is compared, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from call_records import Memory, check, names, normal, tensor

from msprobe_engine.accuracy.results import ERROR, NOT_JUDGED, NOT_RUN, PASS, SKIP, CallResult
from msprobe_engine.core.errors import UsageError
from msprobe_integrations.torch.op_tools.accuracy import comparison
from msprobe_integrations.torch.op_tools.accuracy.as_existing import CheckerAsExisting
from msprobe_integrations.torch.op_tools.accuracy.checker import Bench, Checker, Target
from msprobe_integrations.torch.op_tools.accuracy.operators.custom import forget_operator, load_operators, register_operator


def types(result: CallResult) -> list[tuple[str, str]]:
    """Types of both sides of what was compared."""
    return [(t.bench_dtype.removeprefix("torch."), t.device_dtype.removeprefix("torch.")) for t in result.tensors]


COMPILE = torch.compile
C64, F8 = torch.complex64, torch.float8_e4m3fn
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], Any, list[str]]] = {
    "method": ("Tensor.matmul.0", (normal(3, 4, grad=True), normal(4, 5)), {}, normal(3, 5), ["forward.output.0", "backward.output.0"]),
    "gradients of keywords": (
        "Functional.linear.0", (normal(4, 8),), {"weight": normal(3, 8, grad=True), "bias": None}, normal(4, 3),
        ["forward.output.0", "backward.output.1"],
    ),
    "all keywords": (
        "Torch.add.0", (), {"input": normal(4, grad=True), "other": normal(4, grad=True), "alpha": 2}, normal(4),
        ["forward.output.0", "backward.output.0", "backward.output.1"],
    ),
    "several outputs": (
        "Torch.split.0", (normal(4, 8, grad=True), 4), {"dim": -1}, [normal(4, 4), None],
        ["forward.output.0", "forward.output.1", "backward.output.0"],
    ),
    "one of them an index": (
        "Torch.topk.0", (normal(6, 9, grad=True), 3), {}, normal(6, 3), ["forward.output.0", "forward.output.1", "backward.output.0"],
    ),
    "list of tensors": (
        "Torch.cat.0", ([normal(2, 2, grad=True), normal(2, 2, grad=True)],), {"dim": 0}, normal(4, 2),
        ["forward.output.0", "backward.output.0", "backward.output.1"],
    ),
    "in place": (
        "Tensor.add_.0", (normal(4, grad=True), normal(4, grad=True)), {}, normal(4),
        ["forward.output.0", "backward.output.0", "backward.output.1"],
    ),
    "written and not returned": (
        "Tensor.__setitem__.0", (normal(4, 4), (slice(None), 0), normal(4)), {"recorded_output": None}, None, ["forward.input.0.written"],
    ),
    "running statistics": (
        "Functional.batch_norm.0", (normal(8, 4), torch.zeros(4), torch.ones(4)), {"training": True}, None,
        ["forward.output.0", "forward.input.1.written", "forward.input.2.written"],
    ),
    "out": ("Torch.add.1", (normal(4), normal(4)), {"out": torch.zeros(4)}, None, ["forward.output.0"]),
    "integers": ("Tensor.__truediv__.0", (torch.arange(1, 5), 3), {}, None, ["forward.output.0"]),
    "no tensor at all": ("Torch.linspace.0", (0.0, 1.0, 7), {}, None, ["forward.output.0"]),
    "complex": (
        "Torch.mul.0", (normal(4, dtype=C64, grad=True), normal(4, dtype=C64)), {}, normal(4, dtype=C64),
        ["forward.output.0", "backward.output.0"],
    ),
    "operator of aten": ("Aten.silu.0", (normal(4, grad=True),), {}, normal(4), ["forward.output.0", "backward.output.0"]),
    "attention of aten": (
        "Aten._scaled_dot_product_flash_attention_for_cpu.0", (normal(1, 2, 8, 4), normal(1, 2, 8, 4), normal(1, 2, 8, 4)), {}, None,
        ["forward.output.0", "forward.output.1"],
    ),
    "product in 8 bits": (
        "Torch._scaled_mm.0", (normal(16, 32).to(F8), normal(16, 32).to(F8).t(), torch.ones(()), torch.ones(())),
        {"out_dtype": torch.bfloat16}, None, ["forward.output.0"],
    ),
    "lists that are written to": (
        "Torch._foreach_add_.0", ([normal(3), normal(4)], [normal(3), normal(4)]), {"alpha": -0.1}, None,
        ["forward.output.0", "forward.output.1"],
    ),
    "recurrent": (
        "VF.gru.0", (normal(2, 3, 4), normal(1, 3, 5), [normal(15, 4), normal(15, 5)], False, 1, 0.0, True, False, False), {}, None,
        ["forward.output.0", "forward.output.1"],
    ),
    "module of torch": ("Torch.fft.0", (normal(8),), {}, None, ["forward.output.0"]),
    "lists for tuples": (
        "Functional.conv2d.0", (normal(1, 3, 8, 8, grad=True), normal(4, 3, 3, 3), None, [1, 1], [1, 1]), {}, normal(1, 4, 8, 8),
        ["forward.output.0", "backward.output.0"],
    ),
    "nothing in it": ("Torch.matmul.1", (normal(0, 4), normal(4, 5)), {}, None, ["forward.output.0"]),
    "8 bits": ("Tensor.to.0", (normal(4).to(torch.float8_e4m3fn), torch.bfloat16), {}, None, ["forward.output.0"]),
    "cast": ("Tensor.to.1", (normal(4, grad=True), torch.bfloat16), {}, normal(4).bfloat16(), ["forward.output.0", "backward.output.0"]),
    "move": ("Tensor.to.2", (normal(4, grad=True), "npu:3"), {}, normal(4), ["forward.output.0", "backward.output.0"]),
    "move and cast": ("Tensor.to.3", (normal(4),), {"device": "cuda:0", "dtype": torch.int32}, None, ["forward.output.0"]),
    "cast by a name": ("Tensor.type.0", (normal(4), "torch.cuda.HalfTensor"), {}, None, ["forward.output.0"]),
    "move by a method": ("Tensor.npu.0", (normal(4, grad=True), 1), {}, normal(4), ["forward.output.0", "backward.output.0"]),
    "value of Python": ("Tensor.__bool__.0", (torch.tensor(3.0),), {}, None, ["forward.output.0"]),
    "flattened": ("Functional.flatten_dense_tensors.0", ([normal(2, 3), normal(4)],), {}, None, ["forward.output.0"]),
    "taken apart": (
        "Functional.unflatten_dense_tensors.0", (normal(5), [normal(3), normal(2)]), {}, None, ["forward.output.0", "forward.output.1"],
    ),
    "made for its type": ("Torch.nan_to_num.0", (torch.tensor([1.0, torch.inf]),), {}, None, ["forward.output.0"]),
    "bits as another type": ("Tensor.view.0", (normal(4), torch.int32), {}, None, ["forward.output.0"]),
}  # fmt: skip


def test_right_kernels_pass() -> None:
    """Every form of a call runs on both sides; outputs, written arguments and gradients are compared and pass."""
    for case, (name, args, kwargs, grad, compared) in CALLS.items():
        result = check(name, *args, grad=grad, **kwargs)
        assert (result.forward, result.backward, result.message) == (PASS, NOT_RUN if grad is None else PASS, ""), case
        assert names(result) == compared, case


def test_types_of_both_sides() -> None:
    """The bench has float64 whatever the recorded type is, or one step more; the device has the recorded type."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = check("Torch.mul.0", normal(4).to(dtype), normal(4).to(dtype))
        assert types(found) == [("float64", str(dtype).removeprefix("torch."))]
    raised = Checker(None, bench=Bench(dtype="raised"))
    assert types(check("Torch.exp.0", normal(4).bfloat16(), checker=raised)) == [("float32", "bfloat16")]
    same = Checker(None, bench=Bench(dtype="same"))
    assert types(check("Torch.exp.0", normal(4), checker=same)) == [("float32", "float32")]
    rounded = check("Torch.exp.0", normal(4, grad=True), grad=normal(4), checker=Checker(None, Target(dtype="bfloat16")))
    assert types(rounded) == [("float64", "bfloat16")] * 2
    assert (rounded.forward, rounded.backward) == (PASS, PASS)
    for wrong in ({"target": Target(dtype="int8")}, {"target": Target(dtype="load")}, {"bench": Bench(dtype="float8")}):
        with pytest.raises(UsageError):
            Checker(None, **wrong)


def test_autocast() -> None:
    """A call that was recorded with a result of another type than its inputs runs under autocast, and gradients that were computed in 16
    bits are judged as such."""
    x, w = normal(8, 16, grad=True), normal(4, 16, grad=True)
    result = check("Functional.linear.0", x, w, grad=normal(8, 4).bfloat16(), recorded_output=torch.zeros(8, 4, dtype=torch.bfloat16))
    assert (result.forward, result.backward, result.message) == (PASS, PASS, "")
    assert types(result) == [("float64", "bfloat16"), ("float64", "float32"), ("float64", "float32")]
    wide = check("Functional.softmax.0", normal(4, 8).bfloat16(), -1, recorded_output=torch.zeros(4, 8))
    assert (wide.forward, types(wide)) == (PASS, [("float64", "float32")])


def _lstm_by_hand(x: torch.Tensor, state: Any, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """Both directions in bfloat16, each with its own casts, as oneDNN's LSTM under autocast (which not every processor can run)."""
    found = []
    for turned in (False, True):
        given = [t.bfloat16() for t in (x.flip(1) if turned else x, *(s[int(turned)][None] for s in state))]
        own = [w.bfloat16() for w in weights[4 * turned : 4 * turned + 4]]
        out, *ends = torch._VF.lstm(given[0], given[1:], own, True, 1, 0.0, True, False, True)
        found.append([out.flip(1) if turned else out, *ends])
    return [torch.cat(pair, -1 if n == 0 else 0) for n, pair in enumerate(zip(*found))]


@pytest.mark.parametrize("region", [False, True])
def test_autocast_sums(region: bool) -> None:
    """Under autocast a gradient that is the sum of several of 16 bits (of an LSTM's input, by its two directions) is judged as one of
    these; a wrong one is none."""
    if region and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no LSTM under autocast: torch stops at it")
    cell = torch.nn.LSTM(16, 16, bidirectional=True, batch_first=True)
    x, zero, weights = normal(2, 5, 16, grad=True), torch.zeros(2, 2, 16), [w.detach().requires_grad_() for w in cell._flat_weights]
    call = (x, (zero, zero), weights, True, 1, 0.0, True, True, True)
    if region:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = torch._VF.lstm(*call)
    else:
        outputs = _lstm_by_hand(x, (zero, zero), weights)
    g = normal(2, 5, 32).bfloat16()
    (gradient,) = torch.autograd.grad(outputs[0], [x], g)
    assert not torch.equal(gradient.bfloat16().float(), gradient), "more digits than 16 bits have"
    right = check("VF.lstm.0", *call, grad=[g, None, None], recorded_output=outputs)
    assert (right.forward, right.backward) == (PASS, PASS), right.message
    assert types(right)[0] == ("float64", "bfloat16"), "as it was recorded, on any processor"
    for factor, status in ((1.0, PASS), (1.05, ERROR)):
        memory = Memory()
        record, backward = memory.record(call, {}, outputs), memory.backward(g, None, None)
        given = Checker(memory).check("VF.lstm.0", record, backward, gradients=[factor * gradient])
        assert given.result.backward == status, given.result.message


def test_autocast_without_its_kernel() -> None:
    """Where the kernel that autocast picks cannot be run here, the inputs are cast by hand: the call is judged in the recorded types."""

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") and x.dtype is torch.float32:
            raise RuntimeError("could not create a primitive descriptor")
        return torch.mm(x, y)

    x, y, g = normal(8, 16, grad=True), normal(16, 4, grad=True), normal(8, 4).bfloat16()
    try:
        register_operator("Torch.mm", product, torch.mm)
        result = check("Torch.mm.0", x, y, grad=g, recorded_output=torch.zeros(8, 4, dtype=torch.bfloat16))
        assert (result.forward, result.backward, result.message) == (PASS, PASS, "")
        assert types(result) == [("float64", "bfloat16")] * 3
        register_operator("Torch.mm", lambda x, y: 1.05 * product(x, y), torch.mm)
        assert check("Torch.mm.0", x, y, recorded_output=torch.zeros(8, 4, dtype=torch.bfloat16)).forward == ERROR
    finally:
        forget_operator("Torch.mm")


@pytest.mark.parametrize(
    ("given", "made", "status"), [("Partial", "Replicate", SKIP), ("Shard", "Replicate", SKIP), ("Shard", "Shard", PASS)]
)
def test_operators_that_communicate(given: str, made: str, status: str) -> None:
    """The recorded result of an operator on DTensors that asks other ranks is not held against the local tensors."""
    memory, x = Memory(), normal(8)
    local = torch.linalg.vector_norm(x)
    result = local if status == PASS else 2 * local
    record = memory.record((x, 2.0), {}, result)
    record["input_args"][0]["placements"], record["output"][0]["placements"] = [{given: {}}], [{made: {}}]
    found = Checker(memory).check("Torch.vector_norm.0", record, None, recorded=True).result
    assert found.forward == status
    assert Checker(memory).check("Torch.vector_norm.0", record, None).result.forward == PASS, "run here, it is the local operator"


def test_names_of_types() -> None:
    """What names a type is no number: the bench has another type because it is meant to."""
    named = check("Tensor.type.0", normal(4), recorded_output="torch.FloatTensor")
    assert (named.forward, named.message) == (SKIP, "there is nothing to compare: the call gives no values")
    cast = check("Tensor.type.1", normal(4), torch.bfloat16, recorded_output=torch.zeros(4, dtype=torch.bfloat16))
    assert (cast.forward, types(cast)) == (PASS, [("float64", "bfloat16")])


def test_what_an_index_was() -> None:
    """JSON has a list for a tuple: the recorded shape tells ``x[0, 1]`` from ``x[[0, 1]]``."""
    x = normal(4, 4)
    both = (
        check("Tensor.__getitem__.0", x, [0, 1], recorded_output=x[[0, 1]]),
        check("Tensor.__getitem__.0", x, [0, 1], recorded_output=x[0, 1]),
    )
    assert [result.tensors[0].shape for result in both] == [(2, 4), ()]
    assert check("Torch.norm.0", x, ord="nuc", recorded_output=torch.tensor(1.0)).forward == PASS  # only torch.linalg.norm has it


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("Torch.randn.0", (3,), "random"),
        ("Torch.bernoulli.0", (torch.rand(3),), "random"),
        ("Functional.scaled_dot_product_attention.0", (*(normal(1, 1, 4, 4) for _ in range(3)), None, 0.5), "random"),
        ("Torch.empty.0", (3,), "nobody has written"),
        ("Distributed.all_reduce.0", (normal(3),), "communication"),
        ("NPU.npu_nothing.0", (normal(3),), "torch_npu"),
        ("NPU.npu_swiglu.0", (normal(3, 4),), "cannot be run here"),
        ("my.kernel.0", (normal(3),), "register_operator"),
        ("Torch.load.0", ("x",), "computes nothing"),
        ("Aten.from_file.0", ("/etc/passwd",), "computes nothing"),
        ("Torch.matmul.0", (normal(2, 3), normal(2, 3)), "cannot be multiplied"),
        ("Torch.mul.0", ({"a"},), "argument of type set"),
        ("Torch.__import__.0", ("os",), "no operator"),
        ("Functional.os.0", (), "no operator"),
        ("", (), ""),
    ],
)
def test_what_is_skipped_says_why(name: str, args: tuple[Any, ...], reason: str) -> None:
    """Communication, random numbers, memory without values, unknown names, and whatever torch refuses: one row with the reason."""
    result = check(name, *args)
    assert (result.forward, result.backward, result.tensors) == (SKIP, NOT_RUN, ())
    assert reason in result.message


def test_damaged_records() -> None:
    """A damaged record is a row, no exception."""
    checker = Checker(None)
    bad: list[Any] = [{}, {"input_args": 3}, {"input_args": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1 << 40]}]}]
    bad += [{"input_args": [{"type": "torch.Tensor", "dtype": "torch.os", "shape": [2]}]}, {"input_args": [[[[]]]]}]
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for record in [*bad, {"input_args": deep}]:
        assert checker.check("Torch.mul.0", record, None).result.forward == SKIP
        assert checker.check("Torch.mul.0", record, {"input": "x"}).result.message


def test_custom_operators(tmp_path: Any) -> None:
    """A registered name runs by its function and is judged by its formula; drawn inputs go through its own maker; a file of
    registrations can be loaded."""
    seen = []

    def inputs(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        seen.append(len(args))
        return [args[0].abs() + 1], kwargs

    try:
        register_operator("my.kernels.log", torch.log, lambda x: torch.log(x), inputs)
        result = check("my.kernels.log.3", normal(4, grad=True), grad=normal(4), saved=False)
        assert (result.forward, result.backward, seen) == (PASS, PASS, [1])
        register_operator("my.kernels.log", lambda x: torch.log(x) + 0.1, torch.log)
        assert check("my.kernels.log.0", normal(4).abs() + 1).forward == ERROR
        for bad in (("nodots", torch.log), ("a.b", None), ("a.b", 3), ("a/b.c", torch.log)):
            with pytest.raises(UsageError):
                register_operator(*bad)
        file = tmp_path / "operators.py"
        file.write_text(
            "from msprobe.pytorch import register_operator\nregister_operator('my.kernels.twice', lambda x: x + x, lambda x: 2 * x)\n"
        )
        load_operators(str(file))
        assert check("my.kernels.twice.0", normal(3)).forward == PASS
        file.write_text("1 / 0\n")
        for source in (str(file), str(tmp_path / "none.py"), "no_such_module_here"):
            with pytest.raises(UsageError, match="operators"):
                load_operators(source)
    finally:
        forget_operator("my.kernels.log")
        forget_operator("my.kernels.twice")


def test_operators_of_libraries() -> None:
    """What a library has registered with torch is run when it is loaded; nothing that takes text, and so may open files."""

    @torch.library.custom_op("probed::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.library.custom_op("probed::keep", mutates_args=())
    def keep(x: torch.Tensor, name: str) -> torch.Tensor:
        raise AssertionError(name, x)

    assert check("probed.twice.0", normal(3)).forward == PASS
    assert twice is not keep
    for name in ("probed.keep.0", "probed.none.0", "prim.device.0", "nothing.here.0"):
        assert "register_operator" in check(name, normal(3), "x").message


def test_operators_of_torch_with_text() -> None:
    """Words that say what is computed are taken; an operator whose text may be anything, as that of a library, is not."""
    assert check("Aten.div.Tensor_mode.0", normal(3), normal(3), rounding_mode="trunc").forward == PASS
    assert check("Aten.gelu.0", normal(3), approximate="tanh").forward == PASS
    for name in ("Aten.from_file.0", "Aten._assert_async.0", "Aten._test_string_default.0"):
        assert check(name, normal(3), "/etc/passwd").forward == SKIP


def test_the_same_inputs_in_any_order() -> None:
    """What is drawn for a call depends on its name and the seed, not on what was checked before; the name and the seed do change it."""
    memory = Memory()
    record = memory.record((normal(4, 4), normal(4, 4)), {})
    for item in record["input_args"]:
        del item["data_name"]

    def product(checker: Checker, name: str = "Torch.matmul.0") -> torch.Tensor:
        found = checker.check(name, record, None).data["forward.output.device.0"]
        assert isinstance(found, torch.Tensor)
        return found

    checker = Checker(None)
    first = product(checker)
    product(checker, "Torch.matmul.1")
    assert torch.equal(product(checker), first)
    assert torch.equal(product(Checker(None)), first)
    assert not torch.equal(product(Checker(None, seed=1)), first)
    assert not torch.equal(product(checker, "Torch.matmul.1"), first)


def test_the_process_is_left_as_it_was() -> None:
    """Random state, default type and the saved tensors are those of before, whatever a call writes to."""
    state, saved = torch.get_rng_state(), normal(4)
    before = saved.clone()
    memory = Memory()
    record = memory.record((saved, 1.0), {})
    memory.tensors["0.pt"] = saved
    Checker(memory).check("Tensor.add_.0", record, None)
    check("Functional.dropout.0", normal(50, 50), 0.5)
    torch.set_rng_state(state)
    check("Functional.dropout.0", saved, 0.5)
    assert torch.equal(saved, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is torch.float32


def test_data_of_a_call() -> None:
    """Both sides, under the names that the files of error data have."""
    memory = Memory()
    x = normal(3, grad=True)
    data = Checker(memory).check("Torch.mul.0", memory.record((x, 2.0), {}), memory.backward(normal(3))).data
    assert set(data) == {
        *("forward.input.0", "forward.input.1", "forward.output.bench.0", "forward.output.device.0", "backward.input.0"),
        *("backward.output.bench.0", "backward.output.device.0"),
    }
    assert data["forward.input.1"] == 2.0
    assert data["forward.output.bench.0"].dtype is torch.float64


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target may be the compiled call; inductor, torch's own choice, takes a C++ compiler many seconds."""
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: compiled.append(call) or COMPILE(call, backend=backend, **options))
    result = check("Functional.gelu.0", normal(4, 8, grad=True), grad=normal(4, 8), checker=Checker(None, Target(compiled=True)))
    assert (result.forward, result.backward, len(compiled)) == (PASS, PASS, 1)


def test_a_fault_of_ours_is_no_refusal_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operator says of its arguments is a reason to skip; what our verdict raises is told as such, with its place."""
    record = {"input_args": [tensor(torch.ones(2, 3)), tensor(torch.ones(2, 3))], "input_kwargs": {}, "output": []}
    refused = Checker(None).check("Torch.matmul.0", record, None).result
    assert refused.forward == SKIP
    assert not refused.message.startswith(NOT_JUDGED)
    monkeypatch.setattr(comparison, "judge", lambda *_, **__: {}["standard"])
    for check_call in (Checker(None), CheckerAsExisting(None)):
        assert check_call.check("Torch.matmul.0", record, None).result.message == refused.message
    record["input_args"][1] = tensor(torch.ones(3, 2))
    failed = Checker(None).check("Torch.matmul.0", record, None).result
    assert failed.forward == SKIP
    assert failed.message.startswith(f"{NOT_JUDGED}: KeyError: 'standard' (comparison.py:")
