"""Commands that start other commands: ``nohup``, ``env``, ``srun``, ``ssh``, ``bash -c``. What they start is found in their words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from msprobe_engine.config.launch_scripts.shell.values import Known, Place, Text, known_text, show_text

# fmt: off
WRAPPERS = frozenset({
    "nohup", "time", "nice", "ionice", "env", "sudo", "numactl", "taskset", "timeout", "stdbuf", "setsid", "unbuffer", "srun", "mpirun",
    "mpiexec", "mpiexec.hydra", "orterun", "prun", "docker", "podman", "nerdctl", "singularity", "apptainer", "enroot", "nsys", "ncu",
    "msprof", "msprobe", "ray", "py-spy", "xargs", "catchsegv", "chrt", "prlimit", "flock", "horovodrun", "jsrun", "aprun", "ibrun",
    "bsub", "torchx", "kubectl",
})
# fmt: on
REMOTE = frozenset(["ssh", "pdsh", "clush", "pssh", "parallel-ssh"])
SHELLS = frozenset(["bash", "sh", "zsh", "dash", "ksh"])
_PROGRAMS = re.compile(
    r"python[0-9.]*|torchrun|deepspeed|accelerate|msrun|torchpippy|llamafactory-cli|xtuner|axolotl|tune|swift|.+\.(?:sh|bash|py)"
)
_REMOTE_VALUES = {"ssh": "bcDEeFIiJLlmOopQRSWw", "pdsh": "wxfltuRMg", "clush": "wxgXlftuo", "pssh": "hHlpoetO", "parallel-ssh": "hHlpoetO"}
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """What a command comes to.

    Attributes:
        kind: ``command`` (argv is the program and its words), ``script`` (argv is a shell script and its arguments), ``text`` (argv[0] is
            a script as text, then ``$0`` and arguments), ``input`` (a shell that reads its input; argv[1:] are arguments).
        argv: see `kind`.
        env: of the innermost command.
        outer: the words of the wrappers, outermost first.
    """

    kind: str
    argv: tuple[Text, ...]
    env: dict[str, Text]
    outer: tuple[tuple[Text, ...], ...] = ()


def name_of(text: Text) -> str:
    """The name of a program without its directory, also where the directory is not known."""
    return show_text(text).rstrip("/").rpartition("/")[2]


def unwrap(fields: Sequence[Text], env: dict[str, Text]) -> Unwrapped:
    """Go through wrappers to what they start."""
    outer: list[tuple[Text, ...]] = []
    env = dict(env)
    argv = list(fields)
    for _ in range(20):
        name = name_of(argv[0])
        if name in WRAPPERS:
            start = _find_command_start(name, argv)
            _environment(name, argv[1:start] if start else argv[1:], env)
            if not start:
                break
            outer.append(tuple(argv[:start]))
            argv = argv[start:]
        elif name in ("sbatch", "qsub") and (text := _option(argv, "--wrap")) is not None:
            return Unwrapped("text", (text,), env, tuple(outer))
        elif name == "sbatch":
            start = next((i for i, word in enumerate(argv[1:], 1) if show_text(word).endswith((".sh", ".sbatch", ".slurm", ".bash"))), 0)
            return (
                Unwrapped("script", tuple(argv[start:]), env, (*outer, tuple(argv[:start])))
                if start
                else Unwrapped("command", tuple(argv), env)
            )
        elif name in REMOTE:
            text = _remote(name, argv)
            return Unwrapped("text", (text,), {}, tuple(outer)) if text else Unwrapped("input", tuple(argv[:1]), {}, tuple(outer))
        elif name in SHELLS:
            return _shell(argv, env, tuple(outer))
        elif name.endswith((".sh", ".bash")):
            return Unwrapped("script", tuple(argv), env, tuple(outer))
        else:
            break
    return Unwrapped("command", tuple(argv), env, tuple(outer))


_ENV_WITH_VALUE = ("-u", "--unset", "-C", "--chdir")


def _find_command_start(name: str, argv: list[Text]) -> int:
    """Where in the words of a wrapper the command begins; 0: there is none.

    Options of wrappers are many, and which of them take a value differs; the first word that is a known program is taken, else for
    those whose options are few the first that is no option.
    """
    if name == "env":
        words = [show_text(word) for word in argv]
        return next(
            (
                i
                for i, word in enumerate(words[1:], 1)
                if not _ASSIGNED.match(word) and not word.startswith("-") and words[i - 1] not in _ENV_WITH_VALUE
            ),
            0,
        )
    for i, word in enumerate(argv[1:], 1):
        text, base = show_text(word), name_of(word)
        if text == "--" and name in ("msprobe", "ray", "kubectl"):
            return i + 1 if i + 1 < len(argv) else 0
        if text.startswith("-"):
            continue
        if base in SHELLS or base in WRAPPERS or _PROGRAMS.fullmatch(base):
            return i
    if name in ("nohup", "time", "setsid", "unbuffer", "catchsegv"):
        return next((i for i, word in enumerate(argv[1:], 1) if not show_text(word).startswith("-")), 0)
    return 0


def _environment(name: str, options: list[Text], env: dict[str, Text]) -> None:
    """Variables that a wrapper sets: ``env A=1``, ``sudo A=1``, ``mpirun -x A=1``, ``srun --export=ALL,A=1``, ``docker run -e A=1``."""
    texts = [show_text(option) for option in options]
    for i, (text, option) in enumerate(zip(texts, options)):
        before = texts[i - 1] if i else ""
        if (name in ("env", "sudo") and _ASSIGNED.match(text)) or (
            (before in ("-x", "-genv", "-env", "-e", "--env") and _ASSIGNED.match(text)) and name != "srun"
        ):
            _store_variable(option, env)
        elif text.startswith("--export=") or (before == "--export" and name == "srun"):
            for piece in text.removeprefix("--export=").split(","):
                if _ASSIGNED.match(piece) and known_text(option) is not None:
                    env[piece.partition("=")[0]] = (Known(piece.partition("=")[2], _place(option)),)


def _store_variable(option: Text, env: dict[str, Text]) -> None:
    first = option[0]
    if isinstance(first, Known) and "=" in first.text:
        key, _, rest = first.text.partition("=")
        env[key] = (Known(rest, first.at), *option[1:])


def _place(text: Text) -> Place:
    return text[0].at if text else Place("", 0)


def _option(argv: list[Text], name: str) -> Text | None:
    """The value of ``--name value`` or ``--name=value``."""
    for i, word in enumerate(argv):
        first = word[0]
        if isinstance(first, Known) and first.text.startswith(name + "="):
            return (Known(first.text[len(name) + 1 :], first.at), *word[1:])
        if show_text(word) == name and i + 1 < len(argv):
            return argv[i + 1]
    return None


def _remote(name: str, argv: list[Text]) -> Text | None:
    """The command line that runs on other machines; None: the machines read it from the input."""
    values = _REMOTE_VALUES[name]
    i, host = 1, name != "ssh"
    while i < len(argv):
        text = show_text(argv[i])
        if text.startswith("-") and len(text) > 1:
            i += 2 if len(text) == 2 and text[1] in values else 1
        elif not host:
            host, i = True, i + 1
        else:
            break
    words = argv[i:]
    if not words:
        return None
    out: list[object] = []
    for word in words:
        out.extend([*([Known(" ", _place(word))] if out else []), *word])
    return tuple(out)  # type: ignore[arg-type]


def _shell(argv: list[Text], env: dict[str, Text], outer: tuple[tuple[Text, ...], ...]) -> Unwrapped:
    """``bash -c text``, ``bash script arguments``, ``bash -s``, ``bash``."""
    i = 1
    while i < len(argv):
        text = show_text(argv[i])
        if text in ("-o", "+o", "-O", "--rcfile", "--init-file"):
            i += 2
        elif text == "--":
            i += 1
            break
        elif text.startswith("-") and not text.startswith("--") and "c" in text:
            return (
                Unwrapped("text", tuple(argv[i + 1 :]), env, outer) if i + 1 < len(argv) else Unwrapped("command", tuple(argv), env, outer)
            )
        elif text.startswith(("-", "+")):
            i += 1
        else:
            break
    if i < len(argv):
        return Unwrapped("script", tuple(argv[i:]), env, outer)
    return Unwrapped("input", tuple(argv[:1]), env, outer)
