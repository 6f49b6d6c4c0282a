"""Commands whose output is a function of their words: ``echo``, ``printf``, ``cat <<END``, ``dirname``, ``seq``; ``read``."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable

from msprobe_engine.config.launch_scripts.shell.commands.call import Builtin, Call
from msprobe_engine.config.launch_scripts.shell.expansion import arithmetic
from msprobe_engine.config.launch_scripts.shell.expansion.expand import WHITESPACE, split_fields
from msprobe_engine.config.launch_scripts.shell.values import Known, State, Status, Text, Unknown, Variable, known_text, show_text


def echo(call: Call) -> Status:
    rest, newline, escapes = call.fields[1:], True, False
    while rest and re.fullmatch(r"-[neE]+", show_text(rest[0])):
        newline &= "n" not in show_text(rest[0])
        escapes |= "e" in show_text(rest[0])
        rest = rest[1:]
    out: list[Known | Unknown] = []
    for i, field in enumerate(rest):
        if i:
            out.append(Known(" ", call.at))
        out.extend(field)
    if escapes:
        out = [Known(_replace_escapes(piece.text), piece.at) if isinstance(piece, Known) else piece for piece in out]
    call.evaluator.emit((*out, *([Known("\n", call.at)] if newline else [])))
    return True


def _replace_escapes(text: str) -> str:
    return re.sub(
        r"\\([\\abefnrtv])",
        lambda m: {"n": "\n", "t": "\t", "\\": "\\", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}[m[1]],
        text,
    )


def printf(call: Call) -> Status:
    target = None
    rest = call.fields[1:]
    if len(rest) > 1 and show_text(rest[0]) == "-v":
        target, rest = show_text(rest[1]), rest[2:]
    texts = [known_text(field) for field in rest]
    text = _format_printf(texts[0] or "", [text or "" for text in texts[1:]]) if texts and all(text is not None for text in texts) else None
    result: Text = (Unknown("printf", "is the output of a command", call.at),) if text is None else (Known(text, call.at),)
    if target is not None:
        call.evaluator.expander.assign(target, result, call.state)
    else:
        call.evaluator.emit(result)
    return True


def _format_printf(form: str, values: list[str]) -> str | None:
    """``printf`` with %s, %d, %q-free forms; None where the form is another."""
    pieces = re.split(r"(%%|%[-0]?\d{0,3}[sdi])", _replace_escapes(form))
    slots = sum(piece not in ("", "%%") and piece[0] == "%" for piece in pieces[1::2])
    if any("%" in piece for piece in pieces[::2]):
        return None
    out, rest = "", list(values)
    while True:
        for i, piece in enumerate(pieces):
            if i % 2 == 0 or piece == "%%":
                out += piece.replace("%%", "%")
                continue
            value = rest.pop(0) if rest else ""
            if piece[-1] in "di":
                if not re.fullmatch(r"-?\d{1,18}|", value):
                    return None
                out += piece % int(value or 0)
            else:
                out += piece % value
        if not rest or not slots:
            return out


def read(call: Call) -> Status:
    array, names, skip = "", [], False
    for field in call.fields[1:]:
        word = show_text(field)
        if skip:
            skip = False
            array = word if array == "?" else array
        elif word.startswith("-") and len(word) > 1:
            array = "?" if "a" in word else array
            skip = word[-1] in "adinNptu"
        else:
            names.append(word)
    text = known_text(call.evaluator.input) if call.evaluator.input is not None else None
    if text is None:
        for name in [*names, *([array] if array else [])]:
            unknown = Unknown(f"${name}", "is read from a file or the output of a command", call.at, many=name == array)
            if name == array:
                call.state.set_variable(name, Variable(items={0: (unknown,)}))
            else:
                call.evaluator.expander.assign(name, (unknown,), call.state)
        return None
    line, _, rest = text.partition("\n")
    call.evaluator.input = (Known(rest, call.at),)
    separators = call.state.lookup("IFS")
    value = known_text(separators.value() or ()) if separators is not None else WHITESPACE
    words = [content for kind, content in split_fields(line, value if value is not None else WHITESPACE) if kind == "text"]
    if array:
        call.state.set_variable(array, Variable(items={i: (Known(word, call.at),) for i, word in enumerate(words)}))
    for i, name in enumerate(names or (["REPLY"] if not array else [])):
        last = i == len(names) - 1
        content = (
            (words[i] if i < len(words) else "")
            if not last or len(words) <= i + 1
            else line.strip().split(None, i)[-1]
            if value == WHITESPACE
            else None
        )
        call.evaluator.expander.assign(
            name, (Known(content, call.at),) if content is not None else (Unknown(f"${name}", "is read", call.at),), call.state
        )
    return bool(text)


def read_lines(call: Call) -> Status:
    name = show_text(call.fields[-1]) if len(call.fields) > 1 and not show_text(call.fields[-1]).startswith("-") else "MAPFILE"
    text = known_text(call.evaluator.input) if call.evaluator.input is not None else None
    if text is not None and any(show_text(field) == "-t" for field in call.fields):
        call.state.set_variable(name, Variable(items={i: (Known(line, call.at),) for i, line in enumerate(text.splitlines())}))
        return True
    call.state.set_variable(
        name, Variable(items={0: (Unknown(f"${name}", "is read from a file or the output of a command", call.at, many=True),)})
    )
    return None


def cat(call: Call) -> Status:
    """``cat <<END``; of files only those that the script wrote are known."""
    names = [show_text(field) for field in call.fields[1:] if not show_text(field).startswith("-") or show_text(field) == "-"]
    for name in names or ["-"]:
        if name == "-" and call.evaluator.input is not None:
            call.evaluator.emit(call.evaluator.input)
        elif name in call.state.written:
            call.evaluator.emit(call.state.written[name])
        else:
            call.evaluator.unknown_output(f"cat {name}", call.at)
    return True


def tee(call: Call) -> Status:
    for field in call.fields[1:]:
        path = known_text(field)
        if call.evaluator.input is not None and path and not path.startswith("-"):
            call.state.write(path, any(show_text(field) == "-a" for field in call.fields), call.evaluator.input)
    if call.evaluator.input is not None:
        call.evaluator.emit(call.evaluator.input)
    else:
        call.evaluator.unknown_output("tee", call.at)
    return True


def path_word(change: Callable[[str, State], str | None]) -> Builtin:
    """A command whose output is a function of one path, and of the working directory."""

    def act(call: Call) -> Status:
        words = [field for field in call.fields[1:] if not show_text(field).startswith("-")]
        path = known_text(words[0]) if words else ""
        result = change(path, call.state) if path is not None and len(words) <= 1 else None
        if result is None:
            call.evaluator.unknown_output(" ".join(map(show_text, call.fields)), call.at)
        else:
            call.evaluator.emit((Known(result + "\n", call.at),))
        return True

    return act


def basename(call: Call) -> Status:
    texts = [known_text(field) for field in call.fields[1:]]
    if not texts or len(texts) > 2 or any(text is None or text.startswith("-") for text in texts):
        call.evaluator.unknown_output("basename", call.at)
        return True
    base = (texts[0] or "").rstrip("/").rpartition("/")[2]
    suffix = texts[1] or "" if len(texts) > 1 else ""
    call.evaluator.emit((Known((base.removesuffix(suffix) if base != suffix else base) + "\n", call.at),))
    return True


def directory_of(path: str, _: State) -> str:
    head = path.rstrip("/").rpartition("/")
    return (head[0].rstrip("/") or "/") if head[1] else "."


def real(path: str, state: State) -> str | None:
    """Where a path leads; of a relative one only if the working directory, or the script it names, is known."""
    if not os.path.isabs(path):
        base = state.directory
        if base is None and path and (path == state.name or path == directory_of(state.name, state)):
            base = os.getcwd()
        if base is None:
            return None
        path = os.path.join(base, path)
    try:
        return os.path.realpath(path)
    except (OSError, ValueError):  # too long, a zero byte
        return None


def seq(call: Call) -> Status:
    texts = [known_text(field) for field in call.fields[1:]]
    if not texts or len(texts) > 3 or not all(text is not None and re.fullmatch(r"-?\d{1,9}", text) for text in texts):
        call.evaluator.unknown_output("seq", call.at)
        return True
    numbers = [int(text or 0) for text in texts]
    first, step, last = (1, 1, numbers[0]) if len(numbers) == 1 else (numbers[0], 1, numbers[1]) if len(numbers) == 2 else tuple(numbers)
    if not step or (last - first) // step > 100_000:
        call.evaluator.unknown_output("seq", call.at)
        return True
    text = "".join(f"{n}\n" for n in range(first, last + (1 if step > 0 else -1), step))
    call.evaluator.context.spend(len(text))
    call.evaluator.emit((Known(text, call.at),))
    return True


def _no_variable(_: str) -> str:
    return ""


def _no_assignment(_: str, __: int) -> None:
    """``expr`` has no variables."""


def expr(call: Call) -> Status:
    texts = [known_text(field) for field in call.fields[1:]]
    if texts and all(text is not None and re.fullmatch(r"-?\d{1,18}|[-+*/%()]", text) for text in texts):
        try:
            number = arithmetic.value(" ".join(text or "" for text in texts), _no_variable, _no_assignment)
            call.evaluator.emit((Known(f"{number}\n", call.at),))
            return number != 0
        except arithmetic.SumError:
            pass
    call.evaluator.unknown_output("expr", call.at)
    return None


def pwd(_: str, state: State) -> str | None:
    return state.directory
