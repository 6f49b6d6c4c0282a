"""Plain values of two checkpoints: how far the training was, settings, schedulers, random states; and which differences are expected.

A difference **matters** when training goes on in another way from it: another step, learning rate, random state. Two saves of the same
training differ in times, paths, versions and parallel sizes, and these are listed as harmless, each with a reason.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msprobe_engine.config.settings.aliases import known_terms
from msprobe_engine.config.severity import CHANGES
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.checkpoint.result import GOLDEN, RUN, ValueDifference
from msprobe_engine.formats.checkpoint.model import OPTIMIZER, RANDOM, Checkpoint, value_group
from msprobe_engine.formats.checkpoint.random_states import other_places

_PROGRESS: Mapping[str, tuple[str, ...]] = {
    "step": (
        "iteration",
        "global_steps",
        "global_step",
        "trainer_state.global_step",
        "train_state.step",
        "step_num",
        "lightning.global_step",
        "step",
    ),
    "samples": ("args.consumed_train_samples", "global_samples"),
    "epoch": ("epoch", "epoch_num", "trainer_state.epoch"),
    "skipped steps": ("args.skipped_train_samples", "skipped_steps"),
}
"""How far the training was, and what the frameworks call it: Megatron, DeepSpeed, Lightning, transformers, torchtitan, MindSpore."""
_SETTINGS = frozenset(
    {
        "args", "ds_config", "training_args", "config", "generation_config", "adapter_config", "hyper_parameters",
        "datamodule_hyper_parameters", "job_config", "run_config", "content_metadata", "universal_checkpoint_info",
    }
)  # fmt: skip
"""First parts of paths of settings; all others are states of the training."""
_EXPECTED = (
    (
        re.compile(r"(^|[._])(time|timestamp|date|created|runtime|elapsed|duration|per_second|started|wall_clock)\w*"),
        Sentence("it is a time"),
    ),
    (re.compile(r"(^|[._])(\w*_?(path|dir|directory|folder|file|url|root)s?)$"), Sentence("it says where files lie")),
    (
        re.compile(r"(^|[._-])version$|_version$|^checkpoint_version$|^ds_version$"),
        Sentence("it is the version of what wrote the checkpoint"),
    ),
    (
        re.compile(r"world_size|parallel|(^|[._])(dp|tp|pp|ep|cp|mp)_?(rank|size|world)|(^|[._])n_?gpus?$|partition"),
        Sentence("it is of the layout"),
    ),
    (re.compile(r"floating_point_operations|total_flos|num_input_tokens_seen"), Sentence("it only counts")),
    (re.compile(r"(^|[._])(hostname|host|port|pid|rank|local_rank|job_id|run_id|uuid|user)$"), Sentence("it says where the process ran")),
    (
        re.compile(r"^(callbacks|loops|fit_loop)\b.*(path|dir|progress|_batches_that_stepped)"),
        Sentence("it is about the loop, not the numbers"),
    ),
    (
        re.compile(r"^trainer_state\.(best_model|is_world|is_local|trial|log_history|stateful_callbacks)|^rerun_state_machine"),
        Sentence("it is about the loop, not the numbers"),
    ),
)
_GROUP_SETTING = re.compile(r"param_groups\.[0-9]+\.(?P<name>.+)")
_HYPER = re.compile(
    r"(lr|lrs|initial_lr|max_lr|min_lr|betas|beta[0-9]|eps|weight_decay|wd_mult|lr_mult|momentum|dampening|nesterov|alpha|amsgrad|step|"
    r"maximize|decoupled_weight_decay|bias_correction)(\.[0-9]+)?"
)
_LONGEST = 200
_GOES_ON = Sentence("the optimizer goes on with it")
_FRAMEWORKS = {"args": "megatron", "config": "transformers"}
_OF_MODEL = ("attention_heads", "kv_heads", "head_dim", "norm_eps", "rope_base", "router_topk", "num_layers")
"""Terms of config check that the model's forward depends on, not only its training."""


@dataclass
class ValuesCompared:
    """What was found: differences (those that matter first), how many values are the same, and what was passed over."""

    different: list[ValueDifference] = field(default_factory=list)
    equal: int = 0
    notes: list[str] = field(default_factory=list)
    lacking: dict[str, list[str]] = field(default_factory=dict)
    """Side (`RUN`, `GOLDEN`) -> values at the top that only the other one has, of two checkpoints of one format."""


def compare_values(a: Checkpoint, b: Checkpoint) -> ValuesCompared:
    """Compare the values that both checkpoints have. Of what one of them lacks only settings are named; the rest is counted.

    Where one framework's checkpoint was made of another's, each counts its steps on its own: that they differ is said and does not matter.
    """
    out = ValuesCompared()
    converted = a.format.split(" ", 1)[0] != b.format.split(" ", 1)[0]
    rest_a, rest_b = dict(a.values), dict(b.values)
    for name, keys in _PROGRESS.items():
        key_a, key_b = _first(keys, rest_a), _first(keys, rest_b)
        if key_a and key_b:
            label = key_a if key_a == key_b else f"{name} ({key_a}; {key_b})"
            counts = (rest_a.pop(key_a), rest_b.pop(key_b))
            if converted and not _same(*counts):
                out.different.append(
                    ValueDifference(label, *counts, value_group(label), False, Sentence("each framework counts on its own"))
                )
            else:
                _one(out, label, *counts, Sentence("the training was at another point"))
    if other_places(a, b):
        for rest in (rest_a, rest_b):
            for key in [key for key in rest if value_group(key) == RANDOM]:
                del rest[key]
        out.notes.append(Sentence("random states were not compared: the checkpoints are of other ranks"))
    for key in [key for key in rest_a if key in rest_b]:
        _one(out, key, rest_a.pop(key), rest_b.pop(key))
    _by_meaning(out, rest_a, rest_b)
    alike = len({side.format.removeprefix("digests of ") for side in (a, b)}) == 1
    _one_sided(out, rest_a, rest_b, alike)
    if alike:
        pairs = ((RUN, rest_b), (GOLDEN, rest_a))
        out.lacking = {side: sorted(key for key, value in rest.items() if _is_comparable(key, value)) for side, rest in pairs}
    out.different.sort(key=lambda d: not d.matters)
    return out


def _is_comparable(key: str, value: Any) -> bool:
    """A value at the top that both would have: no time, path or place of the process. Whole states (of an optimizer) may be left out."""
    at_top = "." not in key and isinstance(value, bool | int | float | str)
    return at_top and value_group(key) != RANDOM and not any(pattern.search(key) for pattern, _ in _EXPECTED)


def _first(keys: tuple[str, ...], values: Mapping[str, Any]) -> str:
    return next((key for key in keys if isinstance(values.get(key), int | float)), "")


def _one(out: ValuesCompared, name: str, a: Any, b: Any, why: str = "") -> None:
    if _same(a, b):
        out.equal += 1
        return
    matters, reason = (True, why) if why else _weight(name, a, b)
    out.different.append(ValueDifference(name, _short(a), _short(b), value_group(name), matters, reason))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def _weight(name: str, a: Any, b: Any) -> tuple[bool, str]:
    """Whether a difference matters, and why (not)."""
    first = name.split(".", 1)[0]
    if first in _SETTINGS:
        return _classify_setting(name, a, b)
    if value_group(name) == RANDOM:
        return True, Sentence("the next random numbers are others")
    for pattern, reason in _EXPECTED:
        if pattern.search(name):
            return False, reason
    if _paths(a, b):
        return False, Sentence("it says where files lie")
    group = _GROUP_SETTING.search(name)
    if group is not None:
        known = _HYPER.fullmatch(group["name"]) is not None
        return known, _GOES_ON if known else Sentence("it is not about the update")
    return True, _GOES_ON if value_group(name) == OPTIMIZER else Sentence("the training goes on with it")


def _classify_setting(name: str, a: Any, b: Any) -> tuple[bool, str]:
    """As config check has it: what changes the numbers of a training matters."""
    for pattern, reason in _EXPECTED:
        if pattern.search(name):
            return False, reason
    terms = known_terms()
    alias = terms.of(name, "megatron" if name.startswith("args.") else "")
    if alias is not None:
        return alias.term.severity == CHANGES and not _paths(a, b), alias.term.why
    row = terms.pattern(name)
    return False, Sentence("it says where files lie") if _paths(a, b) else row.why


def _paths(a: Any, b: Any) -> bool:
    """Both are texts that look like paths of a file system."""
    return all(isinstance(value, str) and value.startswith(("/", "./", "../", "~")) for value in (a, b))


def _by_meaning(out: ValuesCompared, rest_a: dict[str, Any], rest_b: dict[str, Any]) -> None:
    """Settings of the model that two frameworks call differently and that the weights do not show: heads, bases of rotary positions.

    They do not decide whether the checkpoints are equal: converters often leave default arguments beside the weights.
    """
    terms_a, terms_b = _model_terms(rest_a), _model_terms(rest_b)
    for name in [name for name in terms_a if name in terms_b]:
        (key_a, a), (key_b, b) = terms_a[name], terms_b[name]
        if key_a.split(".", 1)[0] == key_b.split(".", 1)[0]:
            continue  # of one framework, which has one name for it
        for rest, key in ((rest_a, key_a), (rest_b, key_b)):
            rest.pop(key)
        if _same(a, b):
            out.equal += 1
            continue
        label = f"{name} ({key_a}; {key_b})"
        out.different.append(
            ValueDifference(label, _short(a), _short(b), value_group(key_a), False, Sentence("the weights do not show it"))
        )
        out.notes.append(Sentence("{0}: {1} and {2}; with it even equal weights compute something else", label, _short(a), _short(b)))


def _model_terms(values: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Common name -> path and value, of the settings of a model."""
    found: dict[str, tuple[str, Any]] = {}
    for key, value in values.items():
        framework = _FRAMEWORKS.get(key.split(".", 1)[0])
        if framework is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        alias = known_terms().of(key, framework)
        if alias is not None and alias.framework == framework and alias.term.name in _OF_MODEL and not alias.form:
            found.setdefault(alias.term.name, (key, value))
    return found


def _one_sided(out: ValuesCompared, rest_a: Mapping[str, Any], rest_b: Mapping[str, Any], alike: bool) -> None:
    """Values that one side lacks: settings of a section that both have, and, of one format, what stands at the top (a step) are listed."""
    sections_a, sections_b = ({key.split(".", 1)[0] for key in rest} for rest in (rest_a, rest_b))
    both = sections_a & sections_b
    for side, rest in ((RUN, rest_a), (GOLDEN, rest_b)):
        alone: Counter[str] = Counter()
        for key, value in rest.items():
            section = key.split(".", 1)[0]
            at_top = alike and section == key and isinstance(value, bool | int | float | str)
            setting = section in both and section in _SETTINGS
            if at_top or setting:
                first, second = (_short(value), None) if side == RUN else (None, _short(value))
                out.different.append(ValueDifference(key, first, second, value_group(key), False, Sentence("only {0} has it", side)))
            if not setting:
                alone[section] += 1
        if alone:
            found = ", ".join(f"{section} ({count})" if count > 1 else section for section, count in sorted(alone.items())[:20])
            more = f" and {len(alone) - 20} more" if len(alone) > 20 else ""
            out.notes.append(Sentence("values that only {0} has were not compared: {1}{2}", side, found, more))


def _short(value: Any) -> Any:
    """A value for a report: long ones cut off."""
    if isinstance(value, bool | int | float) or value is None:
        return value
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= _LONGEST:
        return value if isinstance(value, str) else text
    return f"{text[:_LONGEST]}... ({len(text)} characters)"
