"""The first line says what and where in the words of the source: names of arguments, settings that explain it, other samples."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.config.severity import CHANGES, MAY
from msprobe_engine.core.text.source_line import parse_line, place_in_source
from msprobe_engine.find.argument_names import argument_name
from msprobe_engine.find.config.difference import ENV, SETTINGS, WEIGHTS, Difference
from msprobe_engine.find.config_and_checkpoint import blame_settings, find_explaining_setting
from msprobe_engine.find.difference.optimizer.updated_parameters import name_learning_rate
from msprobe_engine.find.findings import Diagnosis, Suspect
from msprobe_engine.find.origin import TAKEN
from msprobe_engine.find.run import diagnose

LINE = "File /job/model.py, line {0}, in {1}, \n {2}"
PACKS = Path(__file__).parents[2] / "fixtures" / "config_packs" / "26.2.0"
NAMES = [
    ("Tensor.__rpow__.0.forward", "input.1", "inv = 1.0 / (base ** (torch.arange(0, d).float() / d))", "base"),
    ("Tensor.__mul__.9.forward", "input.1", "a = torch.softmax(q @ k.T * self.scale + m, -1)", "self.scale"),
    ("Tensor.__mul__.9.forward", "input.1", "a = x * self.one + y * self.two", "factor"),
    ("Tensor.__truediv__.9.forward", "input.1", "a = x / 3", "divisor"),
    ("Tensor.mul_.0.forward", "input.1", "optimizer.step()", "factor"),
    ("Functional.rms_norm.2.forward", "input.3", "return F.rms_norm(x, (8,), self.w, self.eps)", "rms_norm eps"),
    ("Tensor.mul_.0.forward", "input.1", "param.mul_(1 - lr * weight_decay)", "1 - lr * weight_decay"),
    ("Tensor.lerp_.0.forward", "input.2", "exp_avg.lerp_(grad, 1 - device_beta1)", "1 - device_beta1"),
    ("Tensor.addcdiv_.0.forward", "input.value", "param.addcdiv_(exp_avg, denom, value=-step_size)  # type: ignore", "-step_size"),
    ("Tensor.clamp.0.forward", "input.1", "x = x.clamp(0.5)", "clamp min"),
    ("Functional.gelu.0.forward", "input.approximate", "h = F.gelu(x)", "gelu approximate"),
    ("Tensor.to.2.forward", "input.0", "freqs = ids[..., None].float() * self.inv_freq.to(device=x.device)", "self.inv_freq"),
    ("Tensor.to.2.forward", "input.0", "y = self.cos.to(x.device) * self.sin.to(x.device)", "input.0"),
    ("Torch.own.0.forward", "input.2", "if own(a, b, self.sizes[0]):", "self.sizes[0]"),
    ("Torch.own.0.forward", "input.2", "own(*a, b, c)", "input.2"),
    ("Torch.own.0.forward", "input.2", "own(a,", "input.2"),
    ("Torch.own.0.forward", "input.2", "", "input.2"),
    ("Module.layers.0.Linear.forward.0", "input.1", "x = self.layers[0](a, b)", "input.1"),
]


@pytest.mark.parametrize(("record", "place", "code", "expected"), NAMES)
def test_what_an_argument_is_called(record: str, place: str, code: str, expected: str) -> None:
    """The function's own word, else that of the source, else the operand's; a number where none is sure."""
    assert argument_name(record, place, [LINE.format(7, "forward", code)] if code else []) == expected


def test_places_in_source() -> None:
    """File, line and function of the user's own source; nothing of a library's, and nothing of what is no such line."""
    assert place_in_source(LINE.format(7, "forward", "x = y")) == "model.py:7 forward"
    assert place_in_source(LINE.format(62, "<module>", "x = y")) == "model.py:62"
    assert place_in_source("File /usr/lib/python3.11/site-packages/torch/nn/functional.py, line 7, in linear, return x") == ""
    assert place_in_source("own words") == ""
    assert parse_line(r"File C:\job\model.py, line 3, in f, x") == (r"C:\job\model.py", 3, "f", "x")


def _tensor(value: float, dtype: str = "float32") -> dict[str, Any]:
    four = {"Max": value, "Min": -value, "Mean": value / 8, "Norm": 3 * value}
    return {"type": "torch.Tensor", "dtype": f"torch.{dtype}", "shape": [4, 4], **four, "requires_grad": False}


def _run(root: Path, record: str, given: list[Any], result: float, pack: str = "", kind: str = "float32") -> Path:
    """A run of one call, with its line of source and a pack of what it was started with."""
    directory = root / "dump" / "step0" / "rank0"
    directory.mkdir(parents=True)
    values = [{"type": type(one).__name__, "value": one} if isinstance(one, (int, float)) else one for one in given]
    data = {record: {"input_args": values, "input_kwargs": {}, "output": [_tensor(result, kind)]}}
    header = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (directory / "dump.json").write_text(json.dumps(header | {"data": data}))
    (directory / "construct.json").write_text(json.dumps({record: None}))
    (directory / "stack.json").write_text(json.dumps({record: [LINE.format(7, "f", "y = g(x)")]}))
    if pack:
        shutil.copy(PACKS / f"{pack}.zip", root / "config_check_pack.zip")
    return root


def _first_line(target: Path, golden: Path) -> str:
    return diagnose(target, golden).headline()


def test_an_argument(tmp_path: Path) -> None:
    """By its name, with both values."""
    runs = [_run(tmp_path / str(eps), "Functional.rms_norm.0.forward", [_tensor(2.0), [4], None, eps], 1 + eps) for eps in (1e-2, 1e-6)]
    said = "First difference: model.py:7 f: rms_norm eps = 0.01, golden 1e-06 (step 0, rank 0, Functional.rms_norm.0.forward)"
    assert _first_line(*runs) == said


def _masked(root: Path, diagonal: dict[str, Any], digest: str, result: float) -> Path:
    """A run that makes a mask, which takes in `diagonal`, and uses it by another call."""
    mask = {"type": "torch.Tensor", "dtype": "torch.bool", "shape": [4, 4], "Max": True, "Min": False, "Mean": None, "Norm": None}
    mask |= {"requires_grad": False} | ({"digest": digest} if digest else {})
    _run(root, "Tensor.masked_fill.0.forward", [_tensor(2.0) | ({"digest": "same"} if digest else {}), mask], result)
    file = root / "dump" / "step0" / "rank0" / "dump.json"
    document = json.loads(file.read_text())
    made = {"input_args": [mask | {"Min": True}], "input_kwargs": diagonal, "output": [mask]}
    document["data"] = {"Torch.triu.0.forward": made} | document["data"]
    file.write_text(json.dumps(document))
    return root


@pytest.mark.parametrize(
    ("digests", "arguments", "first", "said"),
    [
        (("", ""), (2, 1), "triu diagonal = 2, golden 1 (step 0, rank 0, Torch.triu.0.forward)", ""),
        (("", ""), (2, None), "only this run gives triu diagonal = 2", ""),
        (("", ""), (1, 1), "masked_fill", "; input.1 could not be compared (of bool the dumps hold Max"),
        (("a", "a"), (1, 1), "masked_fill", "; what goes in is the same"),
        (("a", "b"), (2, 1), "triu diagonal = 2, golden 1", "; the result differs by"),
    ],
)
def test_a_mask_that_was_not_compared(
    digests: tuple[str, str], arguments: tuple[int | None, int | None], first: str, said: str, tmp_path: Path
) -> None:
    """Max and Min of truth values do not say that two masks are the same: the call that made them with another argument is to blame, and
    what goes in is called the same only where digests say so."""
    runs = []
    for k, (name, digest, value) in enumerate(zip(("target", "golden"), digests, arguments)):
        diagonal = {} if value is None else {"diagonal": {"type": "int", "value": value}}
        runs.append(_masked(tmp_path / name, diagonal, digest, 3.0 - k))
    found = diagnose(*runs)
    assert first in found.headline()
    assert (said or "its result could not be compared (of bool the dumps hold Max and Min alone)") in found.suspects[0].why


@pytest.mark.parametrize(
    ("given", "extra", "said"),
    [
        (_tensor(2.0), "", "what goes in has the same statistics"),
        (_tensor(2.0) | {"digest": "a"}, "roll", "what goes in is the same"),
        (_tensor(2.0) | {"Min": 2.0}, "roll", "what goes in is the same"),
        (_tensor(2.0), "roll", "its elements may stand in other places: only this run calls Tensor.roll.0.forward"),
        (_tensor(2.0), "relu", "what goes in has the same statistics"),
    ],
)
def test_statistics_do_not_say_that_elements_are_the_same(given: dict[str, Any], extra: str, said: str, tmp_path: Path) -> None:
    """Elements that changed place have the same statistics: only digests, and equal extremes, say that what goes in is the same. A call of
    one run that moves as many elements is named, though its result was not seen to go in."""
    runs = [_run(tmp_path / name, "Torch.own.0.forward", [given], 3.0 - k) for k, name in enumerate(("target", "golden"))]
    if extra:
        file = runs[0] / "dump" / "step0" / "rank0" / "dump.json"
        document = json.loads(file.read_text())
        moved = {"input_args": [_tensor(7.0)], "input_kwargs": {}, "output": [_tensor(7.0)]}
        document["data"][f"Tensor.{extra}.0.forward"] = moved
        file.write_text(json.dumps(document))
    found = diagnose(*runs)
    assert found.suspects[0].record == "Torch.own.0.forward"
    assert found.suspects[0].why.endswith(said)


def test_runs_of_other_types(tmp_path: Path) -> None:
    """Numbers that agree within the round-off of another type are no all-clear."""
    runs = [_run(tmp_path / kind, "Torch.abs.0.forward", [_tensor(2.0, kind)], 2.0, kind=kind) for kind in ("bfloat16", "float32")]
    said = "The runs are of different precision, and agree within its round-off: model.py:7 f: bfloat16, golden float32 (step 0, rank 0"
    assert _first_line(*runs).startswith(said)


def test_other_samples(tmp_path: Path) -> None:
    """Integers that no call has made are samples."""
    runs = [_run(tmp_path / str(n), "Functional.embedding.0.forward", [_tensor(n, "int64"), _tensor(2.0)], n) for n in (50.0, 62.0)]
    said = "First difference: model.py:7 f: other samples, or another order of them: input.0 holds other integers (step 0"
    assert _first_line(*runs).startswith(said)


def test_a_setting_with_the_values_of_the_call_comes_first(tmp_path: Path) -> None:
    """The name of the setting, as the pack has it, and what it does; the call shows it."""
    pairs = ((1e-4, "planted"), (3e-4, "base"))
    found = diagnose(*(_run(tmp_path / pack, "Tensor.mul_.0.forward", [_tensor(2.0), lr], 2 * lr, pack) for lr, pack in pairs))
    assert found.headline() == "First difference: model.py:7 f: lr = 1e-4, golden 3e-4 (step 0, rank 0, Tensor.mul_.0.forward)"
    assert found.suspects[0].why.startswith(
        "lr = 1e-4, golden 3e-4 in the settings (every update is scaled by it); factor = 0.0001, golden"
    )


@pytest.mark.parametrize("fsdp", [True, False], ids=["FSDP", "other"])
def test_weights_of_the_start_that_fsdp_gathers(fsdp: bool, tmp_path: Path) -> None:
    """Where the first difference is what FSDP gathers of its weights, those that the packs say are other ones are named; of a gather of
    anything else, whatever the packs say, they are not."""
    record, runs = "Distributed.all_gather_single.0.forward", []
    for size, pack in ((2.0, "planted"), (3.0, "base")):
        run = _run(tmp_path / pack, record, [_tensor(size)], size, pack)
        frame = "File /lib/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, line 119, in __call__, \n return gather("
        stack = [frame] * fsdp + [LINE.format(7, "forward", "x = b(x)")]
        (run / "dump/step0/rank0/stack.json").write_text(json.dumps({record: stack}))
        runs.append(run)
    weights = "a weight differs before the first step: inner.bias"
    found = diagnose(*runs).headline()
    assert found.startswith("First difference: model.py:7 forward")
    assert (f": {weights} (step 0" in found) is fsdp


DECAY = Difference(SETTINGS, "optimizer.weight_decay", "optimizer.weight_decay", "0.01", "0.1", CHANGES, "weights shrink", "weight_decay")
THETA = Difference(SETTINGS, "rope_theta", "rope_theta", "10000", "5e5", CHANGES, "another base", "")
RING = Difference(ENV, "NCCL_ALGO", "NCCL_ALGO", "Ring", "Tree", MAY, "another order", "")


@pytest.mark.parametrize(
    ("values", "parameter", "expected"),
    [
        ((500000.0, 10000.0), "", THETA),
        ((10000.0, 500000.0), "", None),
        ((0.99, 0.999), "layer.weight", DECAY),
        ((0.99, 0.999), "", None),
        ((None, None), "layer.weight", DECAY),
        ((None, None), "", None),
    ],
)
def test_which_setting_explains_it(values: tuple[float | None, float | None], parameter: str, expected: Difference | None) -> None:
    """One with the very values of the call, each on its side; in an update one of the optimizer; no other."""
    numbers = {side: {"value": value} for side, value in zip(("target", "golden"), values)}
    assert (
        find_explaining_setting(Suspect("Tensor.x.0.forward", "", 0, 0, parameter=parameter, numbers=numbers), [RING, THETA, DECAY])
        is expected
    )


EPS = Difference(SETTINGS, "Only in benchmark", "train.py arguments: --eps", "", "1e-3", MAY, "not known")


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([THETA, RING], THETA),
        ([THETA, DECAY], THETA),
        ([EPS], EPS),
        ([EPS, THETA], THETA),
        ([EPS, RING], None),
        ([DECAY], None),
        ([RING], None),
        ([THETA, THETA], None),
        ([], None),
    ],
)
def test_the_only_setting_leads_where_no_call_is_known(differences: list[Difference], expected: Difference | None) -> None:
    """Of what a monitor saw: the only thing that changes numbers, else the only one that may; an update has a series of its own."""
    assert find_explaining_setting(Suspect("loss", "", 0, 0, kind="series"), differences) is expected
    known = expected if expected is not EPS else None  # one that only may matter does not stand in place of the two numbers of a step
    assert find_explaining_setting(Suspect("loss", "", 0, 0, kind="series", cause="loss 2, golden 1"), differences) is known


TYPES = Difference(
    SETTINGS, "model.parameter_dtypes", "model.parameter_dtypes", "['torch.float32']", "['torch.bfloat16']", MAY, "", "parameter_dtypes"
)


@pytest.mark.parametrize(("distance", "expected"), [(1e-3, TYPES), (0.007, TYPES), (0.5, None), (math.inf, None), (None, None)])
def test_a_shorter_type_explains_what_it_does_not_resolve(distance: float | None, expected: Difference | None) -> None:
    """Parameters that one run keeps in bfloat16 lead where numbers part by less than a unit of it, whatever else may matter; they do not
    hide a difference that no type explains."""
    first = Suspect("loss", "", 0, 2, kind="series", cause="loss 4.3619, golden 4.3576", distance=distance)
    assert find_explaining_setting(first, [RING, EPS, TYPES]) is expected


ROTARY = Difference(WEIGHTS, "m.rotary.cos", "m.rotary.cos", "digest a", "digest b", CHANGES, "other numbers in it", "")
BASE = Difference(SETTINGS, "rope_theta", "rope_theta", "10000", "5e5", CHANGES, "another base", "rope_base")
LAYERS = Difference(SETTINGS, "layers", "layers", "2", "3", CHANGES, "another depth", "num_layers")


@pytest.mark.parametrize(
    ("differences", "module", "cause", "expected"),
    [
        ([BASE, LAYERS, ROTARY], "m.rotary", "self.cos is not the same", "rope_theta = 5e5, golden 10000"),
        ([LAYERS, ROTARY], "m.rotary", "factor is not the same", "a weight differs before the first step: m.rotary.cos"),
        ([LAYERS, ROTARY], "m.rotary", "self.cos is not the same", "self.cos is not the same"),
        ([BASE, ROTARY], "m.mlp", "factor is not the same", "factor is not the same"),
        ([BASE], "m.rotary", "factor is not the same", "factor is not the same"),
    ],
)
def test_a_buffer_is_named_and_the_setting_that_made_it(differences: list[Difference], module: str, cause: str, expected: str) -> None:
    """A module takes in a buffer of its own that was another one before the first step: the only setting that buffers are made with is the
    cause, else the buffer is named where the line of source does not name it."""
    found = Diagnosis("divergence", [Suspect("Tensor.__mul__.0.forward", module, 0, 0, kind=TAKEN, cause=cause)])
    blame_settings(found, differences)
    assert found.suspects[0].cause == expected


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("input.0", "the input data hold NaN already: input.0 [4, 4]"),
        ("parameters.weight", "parameter weight was not finite before the step used it"),
    ],
)
def test_what_brought_a_nan(place: str, said: str, tmp_path: Path) -> None:
    """A NaN that comes in is said to come in, of an input and of a parameter."""
    bad, fine = _tensor(float("nan")), _tensor(1.0)
    directory = tmp_path / "step0" / "rank0"
    directory.mkdir(parents=True)
    record = "Module.fc.Linear.forward.0"
    of_module = {"input_args": [bad if place == "input.0" else fine], "input_kwargs": {}, "output": [bad]}
    data = {record: of_module | {"parameters": {"weight": bad if place != "input.0" else fine}}}
    (directory / "dump.json").write_text(json.dumps({"task": "statistics", "level": "L0", "framework": "pytorch", "data": data}))
    (directory / "construct.json").write_text(json.dumps({record: None}))
    (directory / "stack.json").write_text(json.dumps({record: [LINE.format(7, "f", "y = fc(x)")]}))
    assert diagnose(tmp_path).headline().startswith(f"First NaN or Inf: model.py:7 f: {said} (step 0, rank 0, module fc")


@pytest.mark.parametrize(
    ("first", "others", "rate"),
    [
        ("1 - lr * weight_decay = 0.99998, golden 0.99999", ["-step_size = -0.002, golden -0.001"], True),
        ("1 - lr * weight_decay = 0.99998, golden 0.99999", ["1 - beta2 = 0.1, golden 0.05"], False),
        ("-step_size = -0.002, golden -0.001", [], True),
        ("eps = 1e-06, golden 1e-08", ["-step_size = -0.002, golden -0.001"], False),
    ],
)
def test_the_learning_rate_is_told_from_the_weight_decay(first: str, others: list[str], rate: bool) -> None:
    """Both are in one factor of a parameter; the size of the step has the rate alone."""
    suspect, *rest = (Suspect(f"Tensor.mul_.{at}.forward", "", 0, 3, cause=cause) for at, cause in enumerate((first, *others)))
    name_learning_rate(suspect, rest)
    assert suspect.cause.endswith("(the size of the step: the learning rate)") is rate
    assert suspect.cause.startswith(first)


@pytest.mark.parametrize(
    ("counts", "code", "said"),
    [
        ((6, 6), 0, "All numbers are the same"),
        ((6, 5), 1, "masked_fill mask is not the same (step 0, rank 0, Tensor.masked_fill.0.forward)"),
        ((6, None), 3, "1 row has true_count on one side only; of it only the rest was compared"),
        ((None, None), 0, "All numbers are the same"),
    ],
)
def test_masks_are_compared_by_the_number_of_their_true_values(
    counts: tuple[int | None, int | None], code: int, said: str, tmp_path: Path
) -> None:
    """A mask with as many True values is taken for the same one, with others it is what differs. Where one side says no number, it is not
    compared; where neither does, as the existing tool, that alone makes no result uncertain."""
    runs = []
    for name, count in zip(("target", "golden"), counts):
        mask = {"type": "torch.Tensor", "dtype": "torch.bool", "shape": [4, 4], "Max": True, "Min": False, "Mean": None, "Norm": None}
        mask |= {"requires_grad": False} | ({} if count is None else {"true_count": count})
        runs.append(_run(tmp_path / name, "Tensor.masked_fill.0.forward", [_tensor(2.0), mask], 3.0))
    found = diagnose(*runs)
    assert (1 if found.suspects else 3 if found.problems else 0) == code
    assert said in found.text()
    told = [side["true_count"] for one in found.suspects for side in one.numbers.values()]
    assert told == ([6, 5] if code == 1 else [])


def test_a_mask_that_a_module_is_given_comes_before_what_is_made_of_it(tmp_path: Path) -> None:
    """Where modules alone are recorded, a linear layer in an attention takes in numbers that its code has made with the mask, and the
    attention was given the mask by the block around it: what the outermost of them is given differs first."""
    names = [f"Module.{path}.forward.0" for path in ("layers.0.attention.o.Linear", "layers.0.attention.Attention", "layers.0.Block")]
    runs = []
    for k, name in enumerate(("target", "golden")):
        mask = {"type": "torch.Tensor", "dtype": "torch.bool", "shape": [4, 4], "Max": True, "Min": False, "Mean": None, "Norm": None}
        mask |= {"requires_grad": False, "true_count": 6 - k}
        made = _tensor(3.0 + k)
        given = ([made], [_tensor(2.0), mask], [_tensor(2.0), mask])
        directory = tmp_path / name / "step0" / "rank0"
        directory.mkdir(parents=True)
        data = {record: {"input_args": some, "input_kwargs": {}, "output": [made]} for record, some in zip(names, given)}
        header = {"task": "statistics", "level": "L0", "framework": "pytorch", "dump_data_dir": None}
        (directory / "dump.json").write_text(json.dumps(header | {"data": data}))
        (directory / "construct.json").write_text(json.dumps(dict(zip(names, [*names[1:], None]))))
        (directory / "stack.json").write_text("{}")
        runs.append(tmp_path / name)
    first = diagnose(*runs).first_suspect
    assert first is not None
    assert (first.record, first.tensor) == (names[2], f"{names[2]}.input.1")
