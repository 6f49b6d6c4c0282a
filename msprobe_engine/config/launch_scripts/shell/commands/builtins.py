"""Commands that the shell has in itself: what they set, and where they lead; nothing more."""

from __future__ import annotations

import os.path

from msprobe_engine.config.launch_scripts.shell import conditions
from msprobe_engine.config.launch_scripts.shell.assignments import declare, unset
from msprobe_engine.config.launch_scripts.shell.commands import printing
from msprobe_engine.config.launch_scripts.shell.commands.call import Builtin, Call
from msprobe_engine.config.launch_scripts.shell.context import short
from msprobe_engine.config.launch_scripts.shell.control_exceptions import Break, Exit, Return
from msprobe_engine.config.launch_scripts.shell.expansion import arithmetic
from msprobe_engine.config.launch_scripts.shell.expansion.parameters import NotKnown
from msprobe_engine.config.launch_scripts.shell.syntax import Literal, Word
from msprobe_engine.config.launch_scripts.shell.values import (
    Known,
    Place,
    State,
    Status,
    Text,
    Unknown,
    certain_before,
    known_text,
    readable,
    show_text,
)

_ASKING = frozenset("grep egrep fgrep which type hash ls find curl wget ping pgrep nvidia-smi npu-smi diff cmp git kill".split())  # noqa: SIM905
"""Commands that are used to ask something; how they end is known only to a run. Others are taken to do what they are there for."""


def external_status(fields: list[Text]) -> Status:
    """How a started command ends: well, unless it is one of those that ask."""
    name = show_text(fields[0]).rpartition("/")[2]
    inline = name.startswith("python") and len(fields) > 1 and show_text(fields[1]) in ("-c", "-")
    return None if inline or name in _ASKING else True


def _set(call: Call) -> Status:
    words = [show_text(field) for field in call.fields]
    i = 1
    while i < len(words) and words[i].startswith(("-", "+")) and words[i] != "--":
        word = words[i]
        option = ""
        if "o" in word[1:] and i + 1 < len(words):
            i += 1
            option = words[i]
        if "a" in word[1:] or option == "allexport":
            call.state.allexport = word[0] == "-"
        i += 1
    if i < len(words):
        call.state.positional = tuple(call.fields[i + (words[i] == "--") :])
    return True


def _shift(call: Call) -> Status:
    count = known_text(call.fields[1]) if len(call.fields) > 1 else "1"
    positional = call.state.positional
    if positional is None:
        return True
    if count is None or not count.isdigit() or not certain_before(positional, int(count[:9]) - 1):
        call.state.positional = ((Unknown("$@", "is what is left of arguments that are not known", call.at, many=True),),)
        return None
    if int(count[:9]) > len(positional):
        return False
    call.state.positional = positional[int(count[:9]) :]
    return True


def _exit(call: Call) -> Status:
    raise Exit(_code(call.fields, call.state))


def _return(call: Call) -> Status:
    raise Return(_code(call.fields, call.state))


def _code(fields: list[Text], state: State) -> Status:
    if len(fields) < 2:
        return state.status
    code = known_text(fields[1])
    return None if code is None else code == "0"


def _break(call: Call) -> Status:
    count = known_text(call.fields[1]) if len(call.fields) > 1 else "1"
    raise Break(int(count) if count and count.isdigit() and len(count) < 4 else 1, show_text(call.fields[0]) == "continue")


def _exec(call: Call) -> Status:
    if len(call.fields) == 1:
        return True
    raise Exit(call.evaluator.command(call.fields[1:], [], {}, call.state, call.at))


def _command(call: Call) -> Status:
    if len(call.fields) > 1 and show_text(call.fields[1]) in ("-v", "-V"):
        call.evaluator.unknown_output("command -v", call.at)
        return None
    rest = [field for i, field in enumerate(call.fields[1:]) if i or show_text(field) != "-p"]
    return call.evaluator.command(rest, [], {}, call.state, call.at) if rest else True


def _eval(call: Call) -> Status:
    line: list[Known | Unknown] = []
    for field in call.fields[1:]:
        line.extend([*([Known(" ", call.at)] if line else []), *field])
    if not readable(tuple(line)):
        call.evaluator.context.add_note(call.at, f"'eval' of a text that is not known ({short(show_text(tuple(line)))}) is not read")
        return None
    call.evaluator.script(call.evaluator.context.paste(tuple(line)), call.at.file, call.state, call.at.line)
    return call.state.status


def _source(call: Call) -> Status:
    if len(call.fields) < 2:
        return False
    path = known_text(call.fields[1])
    script = call.evaluator.find(path, call.state, call.at) if path is not None else None
    if script is None:
        if path is None:
            call.evaluator.context.add_note(call.at, f"the sourced file {show_text(call.fields[1])} is not known; what it sets is not read")
        return True
    positional = call.state.positional
    if len(call.fields) > 2:
        call.state.positional = tuple(call.fields[2:])
    status: Status = True
    try:
        with call.evaluator.joining(call.state, Return) as joined:
            try:
                call.evaluator.script(script[0], script[1], call.state)
            except Return as leave:
                status = leave.status
    finally:
        if len(call.fields) > 2:
            call.state.positional = positional
    return None if joined else status


def _cd(call: Call) -> Status:
    words = [field for field in call.fields[1:] if not show_text(field).startswith("-")]
    path = known_text(words[0]) if words else None
    if path is None:
        call.state.directory = None
    elif os.path.isabs(path):
        call.state.directory = os.path.normpath(path)
    else:
        base = call.state.directory
        call.state.directory = os.path.normpath(os.path.join(base, path)) if base is not None else _from_here(path, call.at)
    return True


def _from_here(path: str, at: Place) -> str | None:
    """A relative directory without a known working directory: only a path of the script itself, as it was given, can be found."""
    if path == os.path.dirname(at.file) or (path == "." and not os.path.dirname(at.file)):
        return os.path.abspath(path)
    return None


def _let(call: Call) -> Status:
    status: Status = None
    for field in call.fields[1:]:
        text = known_text(field)
        try:
            status = (
                None
                if text is None
                else call.evaluator.expander.number(Word((Literal(text, call.at.line),), call.at.line), call.state) != 0
            )
        except (NotKnown, arithmetic.SumError):
            status = None
    return status


def _bracket(call: Call) -> Status:
    operands = call.fields[1:]
    if show_text(call.fields[0]) == "[":
        if not operands or show_text(operands[-1]) != "]":
            return False
        operands = operands[:-1]
    return conditions.bracket(operands, call.evaluator.expander, call.state)


def _getopts(call: Call) -> Status:
    """The next option of the positional parameters, or of the words behind the name. In ``-ab`` the place within the word is kept beside
    ``OPTIND``, where the shell has it, too."""
    state, assign = call.state, call.evaluator.expander.assign
    if state.positional is None and len(call.fields) < 4:
        call.evaluator.context.add_note(call.at, "the options of the script are not given; taken as none")
        return False
    given = call.fields[3:] or list(state.positional or ())
    options, name = (known_text(field) for field in call.fields[1:3]) if len(call.fields) > 2 else (None, None)
    index, within = (_number_of(state, variable) for variable in ("OPTIND", _WITHIN))
    word = known_text(given[index - 1]) if index is not None and 0 < index <= len(given) else ""
    if options is None or not name or index is None or within is None or word is None:
        for variable in ("OPTARG", "OPTIND", *([name] if name else [])):
            assign(variable, (Unknown(f"${variable}", "is of options that are not known", call.at),), state)
        return None
    if word == "--" or not word.startswith("-") or len(word) < 2:
        assign(name, (Known("?", call.at),), state)
        assign("OPTIND", (Known(str(index + (word == "--")), call.at),), state)
        return False
    letter, rest = word[within], word[within + 1 :]
    takes = f"{letter}:" in options
    argument: Text = (Known(rest, call.at),) if takes and rest else given[index] if takes and index < len(given) else ()
    right = letter in options and letter != ":" and (not takes or bool(argument))
    assign(name, (Known(letter if right else "?", call.at),), state)
    assign("OPTARG", argument, state)
    finished = takes or not rest
    assign("OPTIND", (Known(str(index + finished + (takes and not rest)), call.at),), state)
    assign(_WITHIN, (Known(str(1 if finished else within + 1), call.at),), state)
    return True


_WITHIN = "OPTIND within a word"


def _number_of(state: State, name: str) -> int | None:
    """A number that a variable holds, 1 where it is not set; None where that is not known."""
    value = state.value_of(name)
    text = "1" if value is None else known_text(value)
    return int(text) if text is not None and text.isdigit() and len(text) < 8 else None


def _constant(status: Status) -> Builtin:
    def act(call: Call) -> Status:  # noqa: ARG001 - has the form of all
        return status

    return act


TABLE: dict[str, Builtin] = {
    **dict.fromkeys(("export", "declare", "typeset", "local", "readonly"), declare),
    **dict.fromkeys(
        (":", "true", "shopt", "ulimit", "trap", "wait", "alias", "unalias", "umask", "sleep", "bg", "fg", "disown", "bind"),
        _constant(True),
    ),
    "false": _constant(False),
    "unset": unset,
    "set": _set,
    "shift": _shift,
    "exit": _exit,
    "return": _return,
    **dict.fromkeys(("break", "continue"), _break),
    "exec": _exec,
    **dict.fromkeys(("command", "builtin"), _command),
    "eval": _eval,
    **dict.fromkeys(("source", "."), _source),
    **dict.fromkeys(("cd", "pushd"), _cd),
    "echo": printing.echo,
    "printf": printing.printf,
    "read": printing.read,
    **dict.fromkeys(("mapfile", "readarray"), printing.read_lines),
    "cat": printing.cat,
    "tee": printing.tee,
    "dirname": printing.path_word(printing.directory_of),
    "basename": printing.basename,
    **dict.fromkeys(("realpath", "readlink"), printing.path_word(printing.real)),
    "pwd": printing.path_word(printing.pwd),
    "seq": printing.seq,
    "expr": printing.expr,
    "let": _let,
    **dict.fromkeys(("[", "test"), _bracket),
    "getopts": _getopts,
}
