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


def compare_values(target: Checkpoint, golden: Checkpoint) -> ValuesCompared:
    """Compare the values that both checkpoints have. Of what one of them lacks only settings are named; the rest is counted.

    Where one framework's checkpoint was made of another's, each counts its steps on its own: that they differ is said and does not matter.
    """
    out = ValuesCompared()
    converted = target.format.split(" ", 1)[0] != golden.format.split(" ", 1)[0]
    target_rest, golden_rest = dict(target.values), dict(golden.values)
    for name, keys in _PROGRESS.items():
        target_key, golden_key = _first(keys, target_rest), _first(keys, golden_rest)
        if target_key and golden_key:
            label = target_key if target_key == golden_key else f"{name} ({target_key}; {golden_key})"
            counts = (target_rest.pop(target_key), golden_rest.pop(golden_key))
            if converted and not _same(*counts):
                out.different.append(
                    ValueDifference(label, *counts, value_group(label), False, Sentence("each framework counts on its own"))
                )
            else:
                _one(out, label, *counts, Sentence("the training was at another point"))
    if other_places(target, golden):
        for rest in (target_rest, golden_rest):
            for key in [key for key in rest if value_group(key) == RANDOM]:
                del rest[key]
        out.notes.append(Sentence("random states were not compared: the checkpoints are of other ranks"))
    for key in [key for key in target_rest if key in golden_rest]:
        _one(out, key, target_rest.pop(key), golden_rest.pop(key))
    _by_meaning(out, target_rest, golden_rest)
    alike = len({side.format.removeprefix("digests of ") for side in (target, golden)}) == 1
    _one_sided(out, target_rest, golden_rest, alike)
    if alike:
        pairs = ((RUN, golden_rest), (GOLDEN, target_rest))
        out.lacking = {side: sorted(key for key, value in rest.items() if _is_comparable(key, value)) for side, rest in pairs}
    out.different.sort(key=lambda d: not d.matters)
    return out


def _is_comparable(key: str, value: Any) -> bool:
    """A value at the top that both would have: no time, path or place of the process. Whole states (of an optimizer) may be left out."""
    at_top = "." not in key and isinstance(value, bool | int | float | str)
    return at_top and value_group(key) != RANDOM and not any(pattern.search(key) for pattern, _ in _EXPECTED)


def _first(keys: tuple[str, ...], values: Mapping[str, Any]) -> str:
    return next((key for key in keys if isinstance(values.get(key), int | float)), "")


def _one(out: ValuesCompared, name: str, target: Any, golden: Any, why: str = "") -> None:
    if _same(target, golden):
        out.equal += 1
        return
    matters, reason = (True, why) if why else _weight(name, target, golden)
    out.different.append(ValueDifference(name, _short(target), _short(golden), value_group(name), matters, reason))


def _same(target: Any, golden: Any) -> bool:
    if isinstance(target, float) and isinstance(golden, float) and math.isnan(target) and math.isnan(golden):
        return True
    if isinstance(target, list | tuple) and isinstance(golden, list | tuple):
        return len(target) == len(golden) and all(_same(target_item, golden_item) for target_item, golden_item in zip(target, golden))
    if isinstance(target, Mapping) and isinstance(golden, Mapping):
        return target.keys() == golden.keys() and all(_same(target[key], golden[key]) for key in target)
    return bool(target == golden)


def _weight(name: str, target: Any, golden: Any) -> tuple[bool, str]:
    """Whether a difference matters, and why (not)."""
    first = name.split(".", 1)[0]
    if first in _SETTINGS:
        return _classify_setting(name, target, golden)
    if value_group(name) == RANDOM:
        return True, Sentence("the next random numbers are others")
    for pattern, reason in _EXPECTED:
        if pattern.search(name):
            return False, reason
    if _paths(target, golden):
        return False, Sentence("it says where files lie")
    group = _GROUP_SETTING.search(name)
    if group is not None:
        known = _HYPER.fullmatch(group["name"]) is not None
        return known, _GOES_ON if known else Sentence("it is not about the update")
    return True, _GOES_ON if value_group(name) == OPTIMIZER else Sentence("the training goes on with it")


def _classify_setting(name: str, target: Any, golden: Any) -> tuple[bool, str]:
    """As config check has it: what changes the numbers of a training matters."""
    for pattern, reason in _EXPECTED:
        if pattern.search(name):
            return False, reason
    terms = known_terms()
    alias = terms.of(name, "megatron" if name.startswith("args.") else "")
    if alias is not None:
        return alias.term.severity == CHANGES and not _paths(target, golden), alias.term.why
    row = terms.pattern(name)
    return False, Sentence("it says where files lie") if _paths(target, golden) else row.why


def _paths(target: Any, golden: Any) -> bool:
    """Both are texts that look like paths of a file system."""
    return all(isinstance(value, str) and value.startswith(("/", "./", "../", "~")) for value in (target, golden))


def _by_meaning(out: ValuesCompared, target_rest: dict[str, Any], golden_rest: dict[str, Any]) -> None:
    """Settings of the model that two frameworks call differently and that the weights do not show: heads, bases of rotary positions.

    They do not decide whether the checkpoints are equal: converters often leave default arguments beside the weights.
    """
    target_terms, golden_terms = _model_terms(target_rest), _model_terms(golden_rest)
    for name in [name for name in target_terms if name in golden_terms]:
        (target_key, target_value), (golden_key, golden_value) = target_terms[name], golden_terms[name]
        if target_key.split(".", 1)[0] == golden_key.split(".", 1)[0]:
            continue  # of one framework, which has one name for it
        for rest, key in ((target_rest, target_key), (golden_rest, golden_key)):
            rest.pop(key)
        if _same(target_value, golden_value):
            out.equal += 1
            continue
        label = f"{name} ({target_key}; {golden_key})"
        out.different.append(
            ValueDifference(
                label, _short(target_value), _short(golden_value), value_group(target_key), False, Sentence("the weights do not show it")
            )
        )
        out.notes.append(
            Sentence(
                "{0}: {1} and {2}; with it even equal weights compute something else", label, _short(target_value), _short(golden_value)
            )
        )


def _model_terms(values: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Common name -> path and value, of the settings of a model."""
    terms: dict[str, tuple[str, Any]] = {}
    for key, value in values.items():
        framework = _FRAMEWORKS.get(key.split(".", 1)[0])
        if framework is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        alias = known_terms().of(key, framework)
        if alias is not None and alias.framework == framework and alias.term.name in _OF_MODEL and not alias.form:
            terms.setdefault(alias.term.name, (key, value))
    return terms


def _one_sided(out: ValuesCompared, target_rest: Mapping[str, Any], golden_rest: Mapping[str, Any], alike: bool) -> None:
    """Values that one side lacks: settings of a section that both have, and, of one format, what stands at the top (a step) are listed."""
    target_sections, golden_sections = ({key.split(".", 1)[0] for key in rest} for rest in (target_rest, golden_rest))
    sections_of_both = target_sections & golden_sections
    for side, rest in ((RUN, target_rest), (GOLDEN, golden_rest)):
        alone: Counter[str] = Counter()
        for key, value in rest.items():
            section = key.split(".", 1)[0]
            at_top = alike and section == key and isinstance(value, bool | int | float | str)
            setting = section in sections_of_both and section in _SETTINGS
            if at_top or setting:
                target_value, golden_value = (_short(value), None) if side == RUN else (None, _short(value))
                out.different.append(
                    ValueDifference(key, target_value, golden_value, value_group(key), False, Sentence("only {0} has it", side))
                )
            if not setting:
                alone[section] += 1
        if alone:
            counted = ", ".join(f"{section} ({count})" if count > 1 else section for section, count in sorted(alone.items())[:20])
            more = f" and {len(alone) - 20} more" if len(alone) > 20 else ""
            out.notes.append(Sentence("values that only {0} has were not compared: {1}{2}", side, counted, more))


def _short(value: Any) -> Any:
    """A value for a report: long ones cut off."""
    if isinstance(value, bool | int | float) or value is None:
        return value
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= _LONGEST:
        return value if isinstance(value, str) else text
    return f"{text[:_LONGEST]}... ({len(text)} characters)"
