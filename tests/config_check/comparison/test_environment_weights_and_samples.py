"""Environment, packages, weights, samples and random calls of two runs, as plain entries."""

from __future__ import annotations

from typing import Any

import pytest

from msprobe_engine.config.environment import variables
from msprobe_engine.config.severity import CHANGES, HARMLESS, MAY
from msprobe_engine.find.config.difference import NO_RANK, Difference, Sheet
from msprobe_engine.find.config.environment import NOT_SHOWN, compare_env
from msprobe_engine.find.config.packages import compare_packages
from msprobe_engine.find.config.random_calls import compare_random
from msprobe_engine.find.config.system import compare_system
from msprobe_engine.find.config.tensors import Tensors, compare_dataset, compare_weights


def _matter(sheet: Sheet) -> list[Difference]:
    return [one for one in sheet.differences if one.matters]


def _env(a: dict[str, str], b: dict[str, str]) -> Sheet:
    return compare_env({NO_RANK: variables.collect(a)}, {NO_RANK: variables.collect(b)})


def test_a_variable_in_no_row_may_matter() -> None:
    """The program may read a variable that no library does: where one side lacks it, it is named. Values that neither pack has cannot be
    compared, which is said and makes no difference; terminals, temporary directories and job numbers never make one."""
    usual = {"HOME": "/a", "TMPDIR": "/tmp/1", "SSH_CONNECTION": "1 2", "SLURM_JOB_ID": "1", "WINDOWID": "1"}
    (one,) = [one for one in _env(usual | {"LATE": "1", "MODE": "x"}, {"HOME": "/b", "MODE": "y"}).differences if one.matters]
    assert (one.name, one.severity, one.both) == ("LATE", "may change numerics", ("not set", NOT_SHOWN))
    assert _env({"MODE": "x"}, {"MODE": "y"}).not_shown == 1


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({}, {"ASCEND_LAUNCH_BLOCKING": "0"}),
        ({}, {"HCCL_DETERMINISTIC": "False"}),
        ({"HCCL_DETERMINISTIC": "True"}, {"HCCL_DETERMINISTIC": "true"}),
        ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "ring"}),
        ({"NCCL_ALGO": ""}, {}),
        ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1.0"}),
        ({"RANK": "0", "HOSTNAME": "a"}, {"RANK": "1", "HOSTNAME": "b"}),
        ({"MSPROBE_OWNER": "0:1:2", "MSPROBE_CONFIG": "a.yaml"}, {"MSPROBE_OWNER": "0:3:4", "MSPROBE_SET": "monitor.parameters=true"}),
        ({}, {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default"}),
        ({}, {"ACCELERATE_DYNAMO_USE_FULLGRAPH": "False", "ACCELERATE_USE_CPU": "False"}),
    ],
)
def test_variables_that_mean_the_same_are_equal(a: dict[str, str], b: dict[str, str]) -> None:
    """Not set is the default, words have no case, and a rank's own variables are no difference."""
    assert not _env(a, b).differences


@pytest.mark.parametrize(
    ("a", "b", "severity"),
    [
        ({}, {"NCCL_PROTO": "LL128"}, MAY),
        ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}, MAY),
        ({}, {"NVIDIA_TF32_OVERRIDE": "0"}, CHANGES),
        ({"INF_NAN_MODE_ENABLE": "1"}, {"INF_NAN_MODE_ENABLE": "0"}, CHANGES),
        ({}, {"CLOSE_MATMUL_K_SHIFT": "1"}, MAY),
        ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}, HARMLESS),
        ({}, {"CUDA_LAUNCH_BLOCKING": "1"}, HARMLESS),
        ({}, {"NCCL_DETERMINISTIC": "1"}, HARMLESS),
        ({"HF_HOME": "/a"}, {"HF_HOME": "/b"}, HARMLESS),
        ({}, {"ACCELERATE_MIXED_PRECISION": "bf16"}, CHANGES),
        ({}, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, MAY),
    ],
)
def test_variables_have_a_severity(a: dict[str, str], b: dict[str, str], severity: str) -> None:
    """What changes the arithmetic, what only the order of sums, and what neither."""
    (one,) = _env(a, b).differences
    assert (one.severity, bool(one.why)) == (severity, True)


def test_bench_and_cmp_are_not_swapped() -> None:
    """The bench value is that of the first pack (the existing tool has them the other way round)."""
    (one,) = _env({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}).differences
    assert (one.bench, one.cmp, one.verdict) == ("Ring", "Tree", "error")


def test_variables_of_other_devices_are_held_against_each_other() -> None:
    """Between a GPU and an NPU the variable of the same meaning is compared."""
    found = _env({"CUDA_LAUNCH_BLOCKING": "1", "CUDA_VISIBLE_DEVICES": "0"}, {"ASCEND_RT_VISIBLE_DEVICES": "0"}).differences
    assert [(one.bench_name, one.cmp_name, one.bench, one.cmp) for one in found] == [
        ("CUDA_LAUNCH_BLOCKING", "ASCEND_LAUNCH_BLOCKING", "1", "0")
    ]


def test_secrets_of_a_foreign_pack_are_not_shown() -> None:
    """Packs of the existing tool hold the whole environment; that tokens in it are others is harmless, and no value is shown."""
    sheet = _env({"HF_TOKEN": "hf_" + "a" * 24, "DB_PASSWORD": "x"}, {"HF_TOKEN": "hf_" + "b" * 24, "DB_PASSWORD": "y"})
    assert not [one for one in sheet.differences if one.matters or {one.bench, one.cmp} != {NOT_SHOWN}]


@pytest.mark.parametrize(
    ("name", "value", "cannot_tell"),
    [
        ("NCCL_SECRET_KEY", "ab", False),
        ("VLLM_API_KEY", "ab", False),
        ("NCCL_OOB_URL", "http://u:{}@h/", False),
        ("XLA_FLAGS", "--password {}", True),
    ],
)
def test_a_masked_value_matters_by_its_family_unless_its_name_says_secret(name: str, value: str, cannot_tell: bool) -> None:
    """As the table of docs/guide/config-check.md has it, without a key: always counted as not compared, `Cannot tell` for what may
    matter."""
    sheet = _env(*({name: value.format(f"ab{number}") if "{" in value else f"{value}{number}"} for number in "cx"))
    assert (sheet.unknown, sheet.not_shown, sheet.differences) == ((name,) if cannot_tell else (), 1, [])


def test_a_variable_of_one_rank_only_is_told_with_the_rank() -> None:
    """What differs on one rank of four names that rank."""
    ring, tree = variables.collect({"NCCL_ALGO": "Ring"}), variables.collect({"NCCL_ALGO": "Tree"})
    ranks = dict.fromkeys(range(4), ring)
    (one,) = compare_env(ranks, ranks | {2: tree}).differences
    assert one.ranks == (2,)
    (one,) = compare_env(ranks, dict.fromkeys(ranks, tree)).differences
    assert one.ranks == ()


def test_packages_under_their_names_on_the_index() -> None:
    """torch, megatron-core and Transformer Engine count, whatever case and signs; what numbers do not depend on is harmless."""
    a = {"torch": ["2.7.0"], "megatron-core": ["0.15"], "Transformer_Engine": ["2.1"], "rich": ["13"], "numpy": ["2.0"]}
    b = {"torch": ["2.8.0"], "megatron_core": ["0.16"], "transformer-engine": ["2.1"], "rich": ["14"]}
    sheet = compare_packages(a, b)
    assert {one.name for one in _matter(sheet)} == {"torch", "megatron-core", "numpy"}
    assert {one.verdict for one in _matter(sheet)} == {"error"}
    assert next(one for one in sheet.differences if one.name == "numpy").cmp == "None"


def _stats(value: float) -> dict[str, float]:
    return {"max": value, "min": -value, "mean": value / 2, "norm": value * 3}


def _tensor(digest: str, value: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"shape": [4, 2], "dtype": "float32", "digest": digest, **_stats(value), **more}


def test_one_bit_of_a_weight_is_found_by_its_digest() -> None:
    """Bits that no statistic shows are a difference, and the sentence says so."""
    a = Tensors({(0, 0): {"w": _stats(1), "v": _stats(2)}}, {(0, 0): {"w": _tensor("aa"), "v": _tensor("bb", 2)}})
    b = Tensors({(0, 0): {"w": _stats(1), "v": _stats(2)}}, {(0, 0): {"w": _tensor("ab"), "v": _tensor("bb", 2)}})
    sheet = compare_weights(a, b)
    (one,) = sheet.differences
    assert (one.name, one.severity) == ("w", CHANGES)
    assert "bits differ" in one.why
    assert [(row["weight_name"], row["equal"]) for row in sheet.rows] == [("v", True), ("w", False)]


def test_statistics_decide_where_a_pack_has_no_digests() -> None:
    """Against a pack of the existing tool its four numbers are compared, NaN being NaN."""
    ours = Tensors({(0, 0): {"w": _stats(float("nan"))}}, {(0, 0): {"w": _tensor("aa", float("nan"))}})
    assert not compare_weights(ours, Tensors({(0, 0): {"w": _stats(float("nan"))}})).differences
    assert compare_weights(ours, Tensors({(0, 0): {"w": _stats(2)}})).differences


def test_missing_names_ranks_and_steps_are_differences() -> None:
    """A parameter, a rank or a step of one side only fails; with another number of ranks the extra ranks do not."""
    a = {(step, rank): {"w": _stats(1), "v": _stats(1)} for step in range(2) for rank in range(2)}
    without = {place: {"w": _stats(1)} if place[1] == 1 else one for place, one in a.items()}
    (one,) = compare_weights(Tensors(a), Tensors(without)).differences
    assert (one.bench_name, one.cmp_name, one.ranks, one.steps) == ("v", "", (1,), (0, 1))
    less = {place: one for place, one in a.items() if place[1] == 0}
    (one,) = compare_weights(Tensors(a), Tensors(less)).differences
    assert (one.ranks, one.severity, one.verdict) == ((1,), MAY, "error")
    assert not compare_weights(Tensors(a), Tensors(less), other_ranks=True).differences
    early = {place: one for place, one in a.items() if place[0] == 0}
    (one,) = compare_weights(Tensors(early), Tensors(a)).differences
    assert (one.steps, one.bench_name, one.cmp_name) == ((1,), "", "recorded")


def test_a_model_that_is_dealt_out_otherwise() -> None:
    """What a rank lacks then, or has a part of, may be another rank's: no more than a hint. Other numbers of the same shape are a fault."""
    a = {(0, 0): {"w": _tensor("aa"), "v": _tensor("bb"), "u": _tensor("cc")}}
    b = {(0, 0): {"w": _tensor("aa"), "u": {**_tensor("cd"), "shape": [2, 2]}}}
    for other, severity in ((False, CHANGES), (True, MAY)):
        found = {one.name: one for one in compare_weights(Tensors(a, a), Tensors(b, b), other_cut=other).differences}
        assert {name: one.severity for name, one in found.items()} == {"v": severity, "u": severity}
        assert all(("deal the model out" in one.why) == other for one in found.values())
    dealt = {(0, 0): {**b[0, 0], "u": {**_tensor("cd"), "shape": [2], "placements": ["S(0)"]}}}
    one = next(one for one in compare_weights(Tensors(a, a), Tensors(dealt, dealt)).differences if one.name == "u")
    assert one.severity == MAY, "a wrapper holds its part of it alone"
    b[0, 0]["w"] = _tensor("ab")
    found = {one.name: one for one in compare_weights(Tensors(a, a), Tensors(b, b), other_cut=True).differences}
    assert found["w"].severity == CHANGES


@pytest.mark.parametrize(("digest", "severity"), [("second", MAY), ("drawn anew", CHANGES)])
def test_a_stage_that_numbers_its_layers_from_zero(digest: str, severity: str) -> None:
    """Its first layer bears the name of another one; the golden run has its numbers elsewhere. Numbers that it has nowhere are a fault."""
    a = {(0, rank): {"layers.0.w": _tensor("first"), "layers.1.w": _tensor("second")} for rank in (0, 1)}
    b = {(0, 0): {"layers.0.w": _tensor("first")}, (0, 1): {"layers.0.w": _tensor(digest)}}
    found = {one.name: one for one in compare_weights(Tensors(a, a), Tensors(b, b), other_cut=True).differences}
    assert (found["layers.0.w"].severity, found["layers.0.w"].ranks) == (severity, (1,))
    assert ("as layers.1.w" in found["layers.0.w"].why) == (severity == MAY)


def test_weights_that_part_later_are_one_difference() -> None:
    """What is equal before the first update and not after is said once, not parameter by parameter."""
    a = {(step, 0): {name: _stats(1) for name in "abcdef"} for step in range(3)}
    b = {place: {name: _stats(1 + place[0]) for name in "abcdef"} for place in a}
    (one,) = compare_weights(Tensors(a), Tensors(b)).differences
    assert "from step 1 on" in one.why


def _batch(*samples: str) -> dict[str, Any]:
    return {"ids": {"shape": [len(samples), 8], "dtype": "int64", "digest": "+".join(samples), "samples": list(samples)}}


@pytest.mark.parametrize(
    ("mine", "theirs", "severity", "said"),
    [
        ({(0, 0): _batch("p", "q")}, {(0, 0): _batch("q", "p")}, MAY, "another order"),
        ({(0, 0): _batch("p", "q")}, {(0, 0): _batch("p", "z")}, CHANGES, "1 of 2 samples are others (index 1)"),
        (
            {(0, 0): _batch("p", "q"), (1, 0): _batch("r", "s")},
            {(0, 0): _batch("r", "s"), (1, 0): _batch("p", "q")},
            MAY,
            "other ranks or steps",
        ),
        ({(0, 0): _batch("p", "q", "r", "s")}, {(0, 0): _batch("p", "q"), (1, 0): _batch("r", "s")}, MAY, "other micro batches"),
    ],
)
def test_samples_are_compared_one_by_one(mine: Any, theirs: Any, severity: str, said: str) -> None:
    """Other samples, the same in another order, at other steps, or cut into other micro batches are told apart."""
    sheet = compare_dataset(Tensors(ours=mine), Tensors(ours=theirs))
    found = [one for one in sheet.differences if said in one.why]
    assert [one.severity for one in found] == [severity]
    assert all(one.severity != CHANGES for one in sheet.differences) or severity == CHANGES


def test_plain_arguments_of_the_model_are_compared() -> None:
    """A number that the model is called with counts as its input."""
    a, b = ({(0, 0): {"kwargs.scale": {"value": value}}} for value in (1.0, 2.0))
    (one,) = compare_dataset(Tensors(ours=a), Tensors(ours=b)).differences
    assert (one.bench, one.cmp) == ("1.0", "2.0")
    assert not compare_dataset(Tensors(ours=a), Tensors(ours=a)).rows


def _call(code: str, count: int = 1, line: int = 5, file: str = "/a/train.py") -> dict[str, Any]:
    return {"count": count, "stack": [f"File {file}, line 90, in <module>, main()", f"File {file}, line {line}, in main, {code}"]}


def test_moved_lines_and_directories_are_the_same_calls() -> None:
    """Line numbers and directories are no difference."""
    a, b = {0: {"torch.rand": [_call("x = torch.rand(3)")]}}, {0: {"torch.rand": [_call("x = torch.rand(3)", line=77, file="/b/train.py")]}}
    sheet = compare_random(a, b)
    assert not sheet.differences
    assert [row["check_result"] for row in sheet.rows] == [True]


def test_an_added_call_on_the_next_line_is_found() -> None:
    """Each stack is matched once, so a further call in the same function is left over."""
    a = {0: {"torch.rand": [_call("x = torch.rand(3)")]}}
    b = {0: {"torch.rand": [_call("x = torch.rand(3)"), _call("y = torch.rand(3)", line=6)]}}
    (one,) = compare_random(a, b).differences
    assert one.severity == MAY
    assert "target side only" in one.why
    assert compare_random(a, a | {0: {"torch.rand": [_call("x = torch.rand(3)", count=2)]}}).differences


def test_another_seed_is_found_in_the_arguments_or_in_the_line() -> None:
    """With arguments by these, in packs of the existing tool by the text of the line."""
    a, b = ({0: {"torch.manual_seed": [_call(f"torch.manual_seed({seed})")]}} for seed in (1234, 7))
    (one,) = compare_random(a, b).differences
    assert (one.severity, one.name) == (CHANGES, "torch.manual_seed")
    same = {0: {"torch.manual_seed": [_call("torch.manual_seed(args.seed)")]}}
    ours = [
        {0: {"calls": [{"name": "torch.manual_seed", "where": "/a/train.py:5 in main", "arguments": text, "seeds": [text]}]}}
        for text in ("1234", "7")
    ]
    (one,) = compare_random(same, same, (ours[0], ours[1])).differences
    assert (one.severity, one.bench, one.cmp) == (CHANGES, "['1234']", "['7']")
    assert not compare_random(same, same, (ours[0], ours[0])).differences


def test_states_of_generators_say_where_streams_part() -> None:
    """Without a call that explains it, the first point of other states is told."""
    ours = [{0: {"states": {"start": {"torch": "a"}, "step0": {"torch": state}}}} for state in ("b", "c")]
    (one,) = compare_random({0: {}}, {0: {}}, (ours[0], ours[1])).differences
    assert "equal start, another one step0" in one.why


def test_a_stream_that_nobody_has_seeded_is_not_said_to_have_been_equal() -> None:
    """Python's and numpy's streams are recorded when they have moved; before, nothing is known of them."""
    ours = [{0: {"states": {"constructed": {"torch": "a"}, "step0": {"torch": "a", "python": state}}}} for state in ("b", "c")]
    (one,) = compare_random({0: {}}, {0: {}}, (ours[0], ours[1])).differences
    assert one.name == "state of python"
    assert "equal constructed" not in one.why
    assert "neither run had seeded or used it before (constructed)" in one.why


def test_flags_drivers_and_the_commit_are_compared() -> None:
    """TF32 changes numbers, a driver or commit may, a host name does not; what one side did not collect says nothing."""
    a = {
        0: {
            "flags": {"matmul.allow_tf32": False, "threads": 2},
            "drivers": {"nvidia": "550"},
            "host": "a",
            "program": {"git": {"commit": "1"}},
        }
    }
    b = {
        0: {
            "flags": {"matmul.allow_tf32": True, "threads": 2},
            "drivers": {"nvidia": "560"},
            "host": "b",
            "program": {"git": {"commit": "2"}},
        }
    }
    found = {one.name: one.severity for one in compare_system(a, b).differences}
    assert found == {"flags.matmul.allow_tf32": CHANGES, "drivers.nvidia": MAY, "program.git.commit": MAY}
    assert not compare_system(a, {0: {"host": "c"}}).differences


def _run_of(files: object, **more: object) -> dict[int, dict[str, Any]]:
    git = {"commit": "1", "changed": 1, "changed_files": files, "files_digest": str(files), "unread": 0, **more}
    return {0: {"program": {"git": {name: value for name, value in git.items() if value is not None}}}}


@pytest.mark.parametrize(
    ("golden", "target", "names", "cannot_tell"),
    [
        (_run_of({"train.py": "a"}), _run_of({"train.py": "a"}), [], ""),
        (_run_of({"train.py": "a"}), _run_of({"train.py": "b"}), ["program.git: train.py"], ""),
        (_run_of({"train.py": "a"}, commit=""), _run_of({"train.py": "b"}, commit=""), ["program.git: train.py"], ""),
        (_run_of({}, changed=0), _run_of({"train.py": "b"}), ["program.git: train.py"], ""),
        (_run_of({}, files_digest="staged"), _run_of({}, files_digest="other"), ["program.git: files_digest"], ""),
        (_run_of({}), _run_of({}, unread=2), [], "2 files of the program were too large"),
        (_run_of(["train.py"], files_digest=None), _run_of(["train.py"], files_digest=None), [], "of an earlier version"),
        (
            _run_of(["train.py"], files_digest=None),
            _run_of(["model.py"], files_digest=None),
            ["program.git: model.py", "program.git: train.py"],
            "earlier",
        ),
        (_run_of({}, untracked=1, untracked_files={"x.py": "a"}, untracked_digest="a"), _run_of({}), [], "not in its repository"),
        (
            _run_of({}, untracked=1, untracked_files={"x.py": "a"}, untracked_digest="a"),
            _run_of({}, untracked=1, untracked_files={"x.py": "b"}, untracked_digest="b"),
            ["program.git: x.py"],
            "",
        ),
    ],
)
def test_files_of_a_program_of_one_commit(golden: Any, target: Any, names: list[str], cannot_tell: str) -> None:
    """Changed, staged and untracked files are compared by what they hold; what no digest says cannot be told."""
    sheet = compare_system(golden, target)
    assert [(one.name, one.severity) for one in sheet.differences] == [(name, MAY) for name in names]
    assert bool(sheet.unknown) == bool(cannot_tell)
    assert cannot_tell in "".join(sheet.notes)


def test_models_without_a_common_name_are_one_difference() -> None:
    """Weights of two frameworks are not listed as missing one by one: what compares them is named."""
    a, b = ({(0, 0): {f"{prefix}.{i}": _stats(i) for i in range(5)}} for prefix in ("decoder", "model"))
    (one,) = compare_weights(Tensors(a), Tensors(b)).differences
    assert (one.severity, "ckpt diff" in one.why) == (MAY, True)


def test_another_shape_or_type_is_said() -> None:
    """The sentence says what differs, the values show it."""
    a, b = (Tensors(ours={(0, 0): {"w": _tensor("aa") | more}}) for more in ({}, {"shape": [2, 2]}))
    (one,) = compare_weights(a, b).differences
    assert ("another shape" in one.why, one.bench[:14], one.cmp[:14]) == (True, "float32 [4, 2]", "float32 [2, 2]")
    (one,) = compare_weights(a, Tensors(ours={(0, 0): {"w": _tensor("aa", dtype="bfloat16")}})).differences
    assert one.why == "it is kept in bfloat16, golden float32"
