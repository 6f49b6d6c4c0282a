"""The reference page of the settings, made from the schema.

``python -m msprobe_engine.core.settings.document > docs/reference/settings.md``
"""

from __future__ import annotations

import sys
from typing import Any

from msprobe_engine.core.process.variables import VARIABLES
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.core.settings.tree import Key, keys_of

_INTRODUCTION = """\
# Settings

One tree, written as YAML or JSON, usually in `probe.yaml`. `msprobe settings check FILE` prints what a file resolves to, or all its
mistakes at once. This page is made from the code: `python -m msprobe_engine.core.settings.document > docs/reference/settings.md`.

The existing `config.json` and `monitor_config.json` are accepted as they are and become the same tree; the kind of a file is
recognised by its keys. Keys whose feature is not built yet are named in one warning each; unknown keys are errors.

In `config.json` the keys of [`dump`](#dump) stand at the top. Only `scope`, `list`, `tensor_list`, `data_mode`, `summary_mode`, `slice`,
`request_id`, `bench_path`, `diff_nums`, `overflow_nums`, `check_mode`, `tensor_format`, `max_disk_gb` and `memory_budget_mb` stand in the
section that has the name of the task, as do those of [`free_benchmark`](#dumpfree_benchmark); the sections of other tasks are not read.
The section `tensor` has the keys of [`online`](#dumponline) too: `online_run_ut` (true switches it on), `online_run_ut_recompute`
(`recompute`), `online_policy`, `online_longest_wait`, and the others under their own names:

```json
{"task": "tensor", "dump_path": "out", "level": "mix", "step": [1], "tensor": {"list": ["layers.3."], "tensor_format": "packed"}}
```

What is off or on as it is can be written in short: `monitor: true`, `dump: false`, `sinks: {tensorboard: true}`; so can one rule
(`rules: recommended`, `rules: [nan_inf, loss_spike]`) and one step or rank (`step: 5`, `rank: 0-3`). `msprobe init` writes a file with
comments to begin with; `msprobe settings schema` prints the JSON Schema for editors, which then complete keys and mark mistakes.

A small example:

```yaml
output_dir: out
monitor:
  gradients: true
  interval: 10
rules: recommended
sinks:
  tensorboard: true
```

What costs how much (step time over no probe, one CPU core: a small model of many calls, and a larger one;
[benchmarks](../evidence/benchmarks.md)):

| setting | cost |
| --- | --- |
| `monitor.gradients`, with unreduced ones | 1.01 of a step of 365 ms; about one pass over the gradients |
| + `monitor.parameters`, `optimizer_states` | 1.05 |
| everything the monitor has, every step | 1.15; a step that is not due (`interval`): nothing that can be measured |
| `dump.level: L0`, `L1`, `mix` in a dumped step | 1.42, 1.54, 1.76 (small calls); 1.05, 1.05, 1.07 (large ones) |
| `dump.summary_mode: digest` or `md5` | within 10 % of `statistics` |
| `dump.task: tensor` | 2.4 to 4.1 (a model of 5 M parameters, 70 to 110 MB a step); `tensor_format: packed` 1.8 to 2.8 |
| `incident.level: mix` | a dump of every step, kept in memory |
| `incident.level: ""` (default) | nothing beside the monitor |
| `monitor.replica_check.interval: 100` | 0.04 % |
| `monitor.layer_features` | more than a pass: give the monitor an `interval` |
| `sinks.prometheus` | a scrape every second: 1.01 |

Environment:

{variables}
Relative directories are relative to the working directory of the run. In a list with ranges, `"3-6"` means 3, 4, 5 and 6.
"""


def page() -> str:
    """The whole page, Markdown."""
    return _INTRODUCTION.replace("{variables}\n", _variables()) + "".join(_section(ProbeSettings, ""))


def _variables() -> str:
    return "| variable | meaning |\n| --- | --- |\n" + "".join(f"| `{name}` | {meaning} |\n" for name, meaning in VARIABLES.items()) + "\n"


def key_paths(cls: type[Any] = ProbeSettings, path: str = "") -> list[str]:
    """Every key of the tree as ``section.key``, items of lists as ``section[].key``."""
    out: list[str] = []
    for key in keys_of(cls):
        name = f"{path}.{key.name}" if path else key.name
        out.append(name)
        if key.section is not None:
            out += key_paths(key.section, f"{name}[]" if key.many else name)
    return out


def _section(cls: type[Any], path: str) -> list[str]:
    """The table of one section, then those of the sections in it."""
    keys = keys_of(cls)
    rows = [f"| `{key.name}` | {_default(key)} | {_escape(key.allowed)} | {_escape(key.help)} |" for key in keys]
    title = f"`{path}`" if path else "The root"
    out = [f"\n## {title}\n\n{_summary(cls)}| key | default | allowed | meaning |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"]
    for key in keys:
        if key.section is not None:
            name = f"{path}.{key.name}" if path else key.name
            out += _section(key.section, f"{name}[]" if key.many else name)
    return out


def _summary(cls: type[Any]) -> str:
    text = (cls.__doc__ or "").strip()
    # dataclasses write a signature where a class has no docstring of its own
    return "" if text.startswith(f"{cls.__name__}(") or not text else f"{text}\n\n"


def _default(key: Key) -> str:
    if key.section is not None and not key.many:
        return "absent" if key.optional else "see below"
    value = key.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(map(str, value)) + "]`"
    return f"`{value}`" if value != "" else "empty"


def _escape(text: str) -> str:
    # Markdown and HTML would take these signs for their own.
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    sys.stdout.write(page())
