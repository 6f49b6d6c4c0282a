"""Launchers: which command of a script starts the training, with which options of the launcher and which of the program.

The options without a value are those of the launchers' own parsers: torch 2.13 ``torch.distributed.run`` (and ``--use-env`` of
``torch.distributed.launch``), DeepSpeed 0.19 ``deepspeed.launcher.runner``, Accelerate 1.15 ``accelerate launch``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from msprobe_engine.config.launch_scripts.arguments import Note, Options, is_option, place_of, read_options
from msprobe_engine.config.launch_scripts.shell.commands.wrappers import name_of, unwrap
from msprobe_engine.config.launch_scripts.shell.context import Started
from msprobe_engine.config.launch_scripts.shell.values import Known, Piece, Text, Unknown, show_text
from msprobe_engine.config.launch_scripts.static_values import Found

FLAGS: dict[str, frozenset[str]] = {
    "torchrun": frozenset({"help", "h", "module", "m", "no-python", "run-path", "standalone", "virtual-local-rank", "use-env"}),
    "deepspeed": frozenset(
        {"bind-cores-to-rank", "force-multi", "help", "h", "module", "no-local-rank", "no-python", "no-ssh", "no-ssh-check", "quiet", "q"}
        | {"save-pid", "elastic-training"}
    ),
    "accelerate": frozenset(
        {"cpu", "debug", "downcast-bf16", "dynamo-use-dynamic", "dynamo-use-fullgraph", "dynamo-use-regional-compilation", "help", "h", "m"}
        | {"enable-cpu-affinity", "fp8-use-autocast-during-eval", "module", "multi-gpu", "no-python", "no-tpu-cluster", "quiet", "q"}
        | {"same-network", "tpu", "tpu-cluster", "tpu-use-sudo", "use-deepspeed", "use-fsdp", "use-megatron-lm", "use-parallelism-config"}
    ),
    "msrun": frozenset({"help", "h"}),
}
"""Options of launchers that take no value, with dashes for underscores."""

_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "torch.distributed.elastic.multiprocessing": "torchrun",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate",
    "mindspore.parallel.cluster.run": "msrun",
}
_SCRIPTS = {"torch/distributed/run.py": "torchrun", "torch/distributed/launch.py": "torchrun", "deepspeed/launcher/runner.py": "deepspeed"}
_TRAINERS: dict[str, frozenset[str]] = {
    "llamafactory-cli": frozenset({"train"}),
    "axolotl": frozenset({"train", "preprocess"}),
    "xtuner": frozenset({"train"}),
    "swift": frozenset({"sft", "pt", "rlhf"}),
    "megatron": frozenset({"sft", "pt", "rlhf"}),
    "tune": frozenset({"run"}),
    "colossalai": frozenset({"run"}),
    "trl": frozenset({"sft", "dpo", "grpo", "kto", "reward"}),
}
"""Programs that train by themselves, with the sub-commands that do."""

_PYTHON = re.compile(r"python[0-9.]*t?")
_PYTHON_VALUES = ("-X", "-W", "--check-hash-based-pycs")
DISTRIBUTED = frozenset({"torchrun", "deepspeed", "accelerate", "msrun"})
STARTING_RANKS = frozenset({"srun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "horovodrun", "jsrun", "aprun", "ibrun"})


@dataclass(frozen=True, slots=True)
class Parsed:
    """A command that starts a training, taken apart.

    Attributes:
        launcher: what starts the ranks, ``python`` where nothing does.
        program: script or module; known as far as the script says it.
        options: of the program.
        of_launcher: options of the launcher and of the wrappers around it.
        started: the command.
    """

    launcher: str
    program: str
    options: Options
    of_launcher: dict[str, Found]
    started: Started


def parse(started: Started, note: Note) -> Parsed | None:
    """The command as a start of a training; None where it is none."""
    inner = unwrap(started.argv, started.env)
    if inner.kind not in ("command", "script"):
        return None
    wrappers = [word_list for word_list in (*started.outer, *inner.outer) if name_of(word_list[0]) in STARTING_RANKS]
    of_launcher: dict[str, Found] = {}
    if inner.kind == "script":
        launcher, options, program, rest = _of_launch_script(inner.argv, of_launcher)
    else:
        launcher, options, program, rest = _program(list(inner.argv))
    if program is None:
        return None
    for words in wrappers:
        launcher = launcher if launcher in DISTRIBUTED else name_of(words[0])
        of_launcher |= read_options(_before_program(words), "launcher", _silent).found
    of_launcher |= _launcher_options(options, FLAGS.get(launcher, frozenset()), note)
    return Parsed(launcher or "python", show_text(program), read_options(rest, "flag", note), of_launcher, started)


def _silent(*_: object) -> None:
    """Options of a wrapper are taken as far as they go."""


def _before_program(words: Sequence[Text]) -> list[Text]:
    """The options of a wrapper; what it starts through a shell is not among them."""
    out: list[Text] = []
    for word in words[1:]:
        base = name_of(word)
        if base in ("bash", "sh") or base.endswith((".sh", ".py")) or _PYTHON.fullmatch(base):
            break
        out.append(word)
    return out


def _of_launch_script(argv: Sequence[Text], of_launcher: dict[str, Found]) -> tuple[str, list[Text], Text | None, list[Text]]:
    """A script that is not at hand and gets the command as one argument, as MindFormers' ``msrun_launcher.sh`` does (then the number of
    processes, and of those on this machine)."""
    if len(argv) < 2 or not re.match(r"(?:python3? )?\S+\.py(\s|$)", show_text(argv[1])):
        return "", [], None, []
    _, options, program, rest = _program(_words(argv[1]))
    name = name_of(argv[0])
    for key, word in zip(("worker_num", "local_worker_num"), argv[2:]):
        if name.startswith("msrun") and show_text(word).isdigit():
            of_launcher[key] = Found(show_text(word), "launcher", place_of(word).file, place_of(word).line)
    return ("msrun" if name.startswith("msrun") else name), options, program, rest


def _words(text: Text) -> list[Text]:
    """The words of a text, split at blanks; what is not known stays in one piece."""
    words: list[list[Piece]] = [[]]
    for piece in text:
        if isinstance(piece, Unknown):
            words[-1].append(piece)
            continue
        for i, part in enumerate(re.split(r"\s+", piece.text)):
            if i:
                words.append([])
            if part:
                words[-1].append(Known(part, piece.at))
    return [tuple(word) for word in words if word]


def _name(word: Text) -> str:
    """The name of a program; of ``$(which torchrun)`` it is in the script too."""
    found = re.fullmatch(r"\$\((?:which|command -v)\s+([\w.-]+)\)|`which\s+([\w.-]+)`", show_text(word).strip())
    return (found[1] or found[2]) if found else name_of(word)


def _program(argv: list[Text]) -> tuple[str, list[Text], Text | None, list[Text]]:
    """Launcher, its options, the program, its words; no program: this command starts none."""
    name = _name(argv[0])
    if name in ("torchrun", "deepspeed", "msrun"):
        return _split_launcher_words(name, argv[1:])
    if name in ("accelerate", "accelerate-launch"):
        if name == "accelerate-launch":
            return _split_launcher_words("accelerate", argv[1:])
        return _split_launcher_words("accelerate", argv[2:]) if len(argv) > 1 and show_text(argv[1]) == "launch" else ("", [], None, [])
    if name in _TRAINERS:
        if len(argv) > 1 and show_text(argv[1]) in _TRAINERS[name]:
            return name, [], (Known(f"{name} {show_text(argv[1])}", argv[1][0].at if argv[1] else argv[0][0].at),), argv[2:]
        return "", [], None, []
    if name.endswith(".py"):
        return "python", [], argv[0], argv[1:]
    if _PYTHON.fullmatch(name) or re.search(r"python3?\}?$|^\$\{?PYTHON", show_text(argv[0]), re.IGNORECASE):
        return _of_python(argv)
    return "", [], None, []


def _of_python(argv: list[Text]) -> tuple[str, list[Text], Text | None, list[Text]]:
    i = 1
    while i < len(argv):
        text = show_text(argv[i])
        if text in ("-m",) and i + 1 < len(argv):
            module = show_text(argv[i + 1])
            if module in _MODULES:
                return _split_launcher_words(_MODULES[module], argv[i + 2 :])
            if module == "accelerate.commands.accelerate_cli" and i + 2 < len(argv):
                return _split_launcher_words("accelerate", argv[i + 3 :])
            return (
                ("", [], None, [])
                if module.split(".")[0] in ("pip", "venv", "json", "http")
                else ("python", [], argv[i + 1], argv[i + 2 :])
            )
        if text in ("-c", "-"):
            return "", [], None, []
        if text in _PYTHON_VALUES:
            i += 2
        elif is_option(argv[i]):
            i += 1
        else:
            break
    if i >= len(argv):
        return "", [], None, []
    launcher = next((launcher for path, launcher in _SCRIPTS.items() if show_text(argv[i]).endswith(path)), "")
    return _split_launcher_words(launcher, argv[i + 1 :]) if launcher else ("python", [], argv[i], argv[i + 1 :])


def _split_launcher_words(launcher: str, words: list[Text]) -> tuple[str, list[Text], Text | None, list[Text]]:
    """The options of a launcher end at the first word that belongs to none of them."""
    flags = FLAGS.get(launcher, frozenset())
    i = 0
    while i < len(words):
        text = show_text(words[i])
        if text == "--":
            i += 1
            break
        if not is_option(words[i]):
            break
        name = text.lstrip("-").partition("=")[0].replace("_", "-")
        i += 1 if "=" in text or name in flags else 2
    if i >= len(words):
        return launcher, words, None, []
    rest = words[i + 1 :]
    if launcher in ("torchrun", "msrun", "deepspeed", "accelerate") and _PYTHON.fullmatch(_name(words[i])):
        inner = _of_python(words[i:])
        return launcher, words[:i], inner[2], inner[3]
    return launcher, words[:i], words[i], rest


def _launcher_options(words: Sequence[Text], flags: frozenset[str], note: Note) -> dict[str, Found]:
    """Options of a launcher: each has one value or none."""
    out: dict[str, Found] = {}
    i = 0
    while i < len(words):
        text = show_text(words[i])
        name = text.lstrip("-").partition("=")[0]
        take = 1 if "=" in text or name.replace("_", "-") in flags else 2
        out |= read_options(words[i : i + take], "launcher", note).found
        i += take
    return {name: found for name, found in out.items() if name not in ("m", "module")}
