"""The reference page of the settings, made from the schema.

``python -m msprobe_engine.core.settings.document > docs/reference/settings.md``
"""

from __future__ import annotations

import re
import sys
from typing import Any

from msprobe_engine.core.process.variables import VARIABLES
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.core.settings.tree import Key, keys_of

_INTRODUCTION = """\
# Settings

One tree, written as YAML or JSON, usually in `probe.yaml`. `msprobe settings check FILE` prints what a file resolves to, or all its
mistakes; `msprobe init` writes a file with comments. For completion in an editor save `msprobe settings schema` as `probe.schema.json` and
begin the file with `# yaml-language-server: $schema=probe.schema.json`. Unknown keys are errors. This page is made from the code:
`python -m msprobe_engine.core.settings.document > docs/reference/settings.md`.

```yaml
output_dir: out
monitor:
  gradients: true
  interval: 10
rules: recommended
sinks:
  tensorboard: true
```

In short: `monitor: true`, `dump: false`, `sinks: {tensorboard: true}`, `rules: [nan_inf, loss_spike]`, `step: 5`, `rank: 0-3`. In a
list of steps or ranks `"3-6"` means 3, 4, 5 and 6, and `[]` all. Relative directories are relative to the working directory of the run.

Ranks may be chosen by what they are: `rank: one_replica`, `rank: first_of_node`, `rank: {sample: 16}` (so many, evenly spread), or
coordinates, `rank: {dp: 0, pp: [0, 3]}` with the axes `tp`, `cp`, `ep`, `dp`, `pp`. Megatron's command line says how ranks are laid out;
elsewhere say it: `{dp: 0, sizes: {tp: 8, pp: 4}}` (`sizes: {}`: data parallelism alone).

The existing `config.json` and `monitor_config.json` are accepted as they are. In `config.json` the keys of [`dump`](#dump) stand at the
top, but for `scope`, `list`, `tensor_list`, `data_mode`, `summary_mode`, `slice`, `request_id`, `bench_path`, `diff_nums`,
`overflow_nums`, `check_mode`, `tensor_format`, `max_disk_gb`, `memory_budget_mb` and those of [`free_benchmark`](#dumpfree_benchmark),
which stand in the section of the task. The section `tensor` has the keys of [`online`](#dumponline), too: `online_run_ut` (true
switches it on), `online_run_ut_recompute` (`recompute`), `online_policy`, `online_longest_wait`, and the others under their own names:

```json
{"task": "tensor", "dump_path": "out", "level": "mix", "step": [1], "tensor": {"list": ["layers.3."], "tensor_format": "packed"}}
```

What costs how much (step time over no probe, one CPU core; [benchmarks](../evidence/benchmarks.md)):

| setting | cost |
| --- | --- |
| `monitor.gradients`, with unreduced ones | 1.01 of a step of 365 ms |
| + `monitor.parameters`, `optimizer_states` | 1.05 |
| everything the monitor has, every step | 1.15; a step that is not due (`interval`): nothing |
| `dump.level: L0`, `L1`, `mix` in a dumped step | 1.43, 1.57, 1.83 (many small calls); 1.03, 1.09, 1.06 (large ones) |
| `dump.summary_mode: digest` or `md5` | within 10 % of `statistics` |
| `dump.task: tensor` | 2.4 to 4.1 (70 to 110 MB a step); `tensor_format: packed` 1.8 to 2.8 |
| `incident.level: mix` | a dump of every step, kept in memory |
| `monitor.replica_check.interval: 100` | 0.04 % |
| `monitor.layer_features` | more than a pass: give the monitor an `interval` |
| `sinks.prometheus` | a scrape every second: 1.01 |

Environment:

{variables}
Keys by section, defaults in brackets:
"""


_OF_SINKS = ("enabled", "path", "ops")
"""Keys of sinks that the section ``sinks`` explains once."""
_MANY = 5
"""Values that are listed at one key only."""


def page() -> str:
    """The whole page, Markdown."""
    return _INTRODUCTION.replace("{variables}\n", _variables()) + "".join(_section(ProbeSettings, "", "", {}))


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


def _section(cls: type[Any], path: str, summary: str, shown: dict[tuple[str, ...], str]) -> list[str]:
    """The keys of one section with their defaults, then those of the sections in it, which have no line but a title.

    Args:
        shown: long lists of values, with the key that lists them.
    """
    keys = keys_of(cls)
    rows = []
    for key in keys:
        name = f"{path}.{key.name}" if path else key.name
        if key.section is None and not (path.startswith("sinks.") and key.name in _OF_SINKS):
            rows.append(f"* `{key.name}` ({_default(key)}): {_escape(_help(key))}{_values(key, name, shown)}\n")
    between = "\n" if rows and summary else ""
    out = [f"\n## {f'`{path}`' if path else 'The root'}\n\n{summary}{between}{''.join(rows)}"]
    for key in keys:
        if key.section is not None:
            name = f"{path}.{key.name}" if path else key.name
            out += _section(key.section, f"{name}[]" if key.many else name, _summary(key), shown)
    return out


def _help(key: Key) -> str:
    """The help without what the page says once of all lists of steps and ranks."""
    return key.help.partition(", [] is all")[0] if key.ranges else key.help


def _values(key: Key, name: str, shown: dict[tuple[str, ...], str]) -> str:
    """Allowed values that neither the help nor the default names, and an upper bound."""
    bound = f"; at most {key.maximum}" if key.maximum is not None and not key.ranges else ""
    if len(key.choices) > _MANY and shown.setdefault(key.choices, name) != name:
        return f"; values as of `{shown[key.choices]}`"
    words = set(re.findall(r"\w+", f"{key.help} {_default(key)}"))
    if all(choice in words for choice in key.choices if choice):
        return bound
    return ": " + ", ".join(f"`{choice}`" for choice in key.choices if choice) + bound


def _summary(key: Key) -> str:
    text = " ".join(((key.section.__doc__ if key.section else None) or "").split())
    if not text or text.startswith("{}(".format(key.section.__name__ if key.section else "")):  # what dataclasses write by themselves
        text = f"{key.help[:1].upper()}{key.help[1:]}."
    return f"{text}\n"


def _default(key: Key) -> str:
    value = key.default
    if value is None:
        return "absent"
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
