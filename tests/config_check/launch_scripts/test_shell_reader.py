"""The reader of shell scripts gives what bash gives: the same programs, words and environment. Only the tests run scripts, their own."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from msprobe_engine.config.launch_scripts.shell.commands.wrappers import unwrap
from msprobe_engine.config.launch_scripts.shell.context import Context
from msprobe_engine.config.launch_scripts.shell.evaluate import read_script
from msprobe_engine.config.launch_scripts.shell.values import Place, State, known_text, show_text

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="bash is not installed")
PROGRAMS = ("torchrun", "deepspeed", "launch")
STUB = """#!/bin/sh
{ printf '%s\\0' START "${0##*/}" "$@" ENVIRONMENT; env -0; } >> "$STUB_OUT"
"""
OF_THE_TEST = {"PATH", "STUB_OUT", "HOME", "PWD", "OLDPWD", "SHLVL", "_", "LD_PRELOAD", "_STDBUF_O"}

_TEXT = Path(__file__).with_name("shell_cases.txt").read_text().split("#### ")[1:]
CASES = {block.partition("\n")[0]: block.partition("\n")[2] for block in _TEXT}

Starts = list[tuple[list[str | None], dict[str, str | None]]]


def by_bash(script: Path, *arguments: str) -> tuple[Starts, dict[str, str]]:
    """The programs that bash starts, with the variables the script sets for them; and the environment it began with."""
    programs = script.parent / "programs"
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).write_text(STUB)
        (programs / name).chmod(0o755)
    out = script.parent / "started"
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "STUB_OUT": str(out), "HOME": "/home/x"}
    subprocess.run([BASH or "", str(script), *arguments], cwd=script.parent, env=environment, capture_output=True, timeout=240, check=False)
    starts: Starts = []
    for block in out.read_text().split("START\0")[1:] if out.exists() else []:
        words, _, variables = block.partition("ENVIRONMENT\0")
        pairs = (line.partition("=") for line in variables.split("\0") if line)
        starts.append((list(words.split("\0")[:-1]), {key: value for key, _, value in pairs if key not in OF_THE_TEST}))
    return starts, environment


def by_reader(script: Path, environment: dict[str, str], *arguments: str) -> tuple[Starts, list[str]]:
    """The same by the reader, and what it says."""
    context = Context({**environment, "PWD": str(script.parent)})

    def find(path: str, state: State, _: Place) -> tuple[str, str] | None:
        if path in state.written:
            return show_text(state.written[path]), path
        file = Path(state.directory or "") / path
        return (file.read_text(), str(file)) if file.is_file() else None

    read_script(script.read_text(), str(script), context, find, arguments)
    starts: Starts = []
    for started in context.started:
        inner = unwrap(started.argv, started.env)
        words = [known_text(word) for word in inner.argv]
        words[0] = (words[0] or "").rpartition("/")[2]
        if words[0] in PROGRAMS:
            variables = {key: known_text(value) for key, value in inner.env.items() if key not in OF_THE_TEST}
            starts.append((words, variables))
    return starts, context.notes


@pytest.mark.parametrize("name", CASES)
def test_programs_are_started_as_bash_starts_them(name: str, tmp_path: Path) -> None:
    """Words and exported variables of every program a script starts are those that bash gives it."""
    script = tmp_path / "run.sh"
    script.write_text(CASES[name])
    expected, environment = by_bash(script)
    assert by_reader(script, environment)[0] == expected
    assert expected, "the case starts something"


def test_arguments_of_the_script_are_followed(tmp_path: Path) -> None:
    """With arguments given, loops over ``$1`` and ``shift`` come out as in bash."""
    script = tmp_path / "run.sh"
    script.write_text(
        'while [[ $# -gt 0 ]]; do\ncase "$1" in\n--lr) LR="$2"; shift 2;;\n--bf16) FLAGS+=(--bf16); shift;;\n'
        '*) REST+=("$1"); shift;;\nesac\ndone\n'
        'torchrun --lr ${LR:-1e-4} "${FLAGS[@]}" "${REST[@]}"\n'
    )
    arguments = ("--lr", "3e-4", "a b", "--bf16", "c")
    expected, environment = by_bash(script, *arguments)
    assert by_reader(script, environment, *arguments)[0] == expected == [(["torchrun", "--lr", "3e-4", "--bf16", "a b", "c"], {})]


_NAMES = ("A", "B", "C", "X1", "ARR", "L")
_SUMS = ("3", "N", "N+1", "2*N", "N%2", "N>1", "(N+2)*3")
_PATTERNS = ("*", "a*", "*b", "?", "[a-c]", "*.", ".*", "/*", "*/*", '"a"', "x", "*[0-9]", "", "'*'")


class Scripts:
    """Random scripts of what launch scripts are made of; they end, and start nothing but `launch`.

    Left out is what bash 5.2 does against its manual: double quotes inside ``"${X:-...}"`` lose what stands before them.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def script(self) -> str:
        body = [self._statement(0) for _ in range(self._random.randrange(3, 9))]
        first = ["N=2", "A=a", 'B="b c"', 'ARR=(1 "2 3" x)']
        return "\n".join([*first, *body, 'launch end "$A" "$B" "$C" "${ARR[@]}" "${L[@]}" $N', ""])

    def _one(self, *of: str) -> str:
        return self._random.choice(of)

    def _name(self) -> str:
        return self._one(*_NAMES)

    def _word(self, depth: int) -> str:
        return "".join(self._part(depth) for _ in range(self._random.choice((1, 1, 1, 2, 3))))

    def _part(self, depth: int) -> str:
        name, kind = self._name(), self._random.randrange(18)
        if kind == 7 and depth < 3:
            name = self._one(*_NAMES[:4])  # ``:=`` into an array that is being filled has no defined order
            return f"${{{name}{self._one(':-', '-', ':+', '+', ':=', '=')}{self._word(depth + 1)}}}"
        if kind == 8 and depth < 3:
            inner = self._word(depth + 1).replace('"', "")
            return f'"${{{name}{self._one(":-", "-", ":+", "+")}{inner}}}"'
        if kind == 13 and depth < 2:
            return f"$(echo {self._word(depth + 1)})"
        forms = {
            4: f"${name}",
            5: f'"${name}"',
            6: f"${{{name}}}",
            9: f"${{{name}{self._one('#', '##', '%', '%%')}{self._one(*_PATTERNS)}}}",
            10: f'"${{{name}{self._one("/", "//", "/#", "/%")}{self._one(*_PATTERNS)}/{self._one("z", "$A")}}}"',
            11: self._one(f'"${{{name}[@]}}"', f"${{{name}[*]}}", f"${{#{name}[@]}}", f'"${{{name}[1]}}"', f'"${{!{name}[@]}}"'),
            12: f"$(({self._one(*_SUMS)}{self._one('+', '*', '-', '<')}{self._random.randrange(5)}))",
            14: '"a b"',
            15: f"'{self._one('q r', '$A', '', 'x')}'",
            16: f"${{{name}:{self._one('1', '0:2', '2:1', ' -2')}}}",
            17: self._one("{1..3}", "{a,b}", "\\ ", '\\"', "$#", '"$@"', "$*", "${#A}", "$1", '"${@:2}"', "${B,,}"),
        }
        return forms.get(kind) or self._one("a", "b", "--lr", "7", "x/y", ".", "=", "a:b", "1")

    def _condition(self) -> str:
        name = self._name()
        return self._one(
            f'[ "${name}" = {self._one("a", "b", "7")} ]',
            f'[ -z "${name}" ]',
            f"[[ -n ${name} ]]",
            f"[[ ${name} == {self._one('a*', '*b*', '7', '?')} ]]",
            f"((N {self._one('<', '>', '==')} {self._random.randrange(6)}))",
            f"[ $N -{self._one('lt', 'eq', 'ge')} 3 ]",
            "true",
            "! false",
            f'[[ "${name}" != a && $N -gt 1 || -z $B ]]',
        )

    def _statement(self, depth: int) -> str:
        kind, word = self._random.randrange(15), self._word
        if depth < 3 and kind == 0:
            tail = self._one(f"else {self._statement(depth + 1)};", f"elif {self._condition()}; then {self._statement(depth + 1)};", "")
            return f"if {self._condition()}; then {self._statement(depth + 1)}; {tail} fi"
        if depth < 2 and kind == 1:
            return f"for i in {word(0)} {word(0)}; do B=$i; {self._statement(depth + 1)}; done"
        if depth < 2 and kind == 2:
            first, second = self._statement(depth + 1), self._statement(depth + 1)
            subject = self._one("$A", '"$B"', "x$N", "${A:-7}", "$1")
            return f"case {subject} in {self._one('a*', '7', 'b')}) {first};; *x*|[0-9]*) {second};; *) launch c;; esac"
        if depth < 3 and kind == 3:
            return f"{self._condition()} {self._one('&&', '||')} {self._statement(depth + 1)}"
        if depth < 3 and kind == 4:
            return f"({self._statement(depth + 1)}; launch $A)"
        simple = {
            5: f"{self._one('ARR', 'L')}{self._one('=', '+=')}({' '.join(word(0) for _ in range(self._random.randrange(4)))})",
            6: f"{self._one('A', 'B')}+={word(0)}",
            7: f"N=$((N+{self._random.randrange(3)}))",
            8: f"set -- {word(0)} {word(0)}",
            9: f'f() {{ local C={word(2)}; launch "$C" "$@"; A=$1; }}; f {word(0)}',
            10: f"{self._one('A', 'B', 'C', 'X1')}={word(0)}",
            11: f"{self._one('A', 'B', 'C', 'X1')}={word(0)}",
        }
        return simple.get(kind) or "launch " + " ".join(word(0) for _ in range(self._random.randrange(1, 4)))


@pytest.mark.parametrize("seed", range(3))
def test_random_scripts_come_out_as_in_bash(seed: int, tmp_path: Path) -> None:
    """Random scripts of quotes, expansions, arrays, conditions and loops start the same programs with the same words as under bash."""
    scripts = Scripts(seed)
    texts = [scripts.script() for _ in range(40)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.sh").write_text(text)
    prelude = 'launch() { printf "<%s>" "$@"; printf "\\0"; }; for i in $(seq 0 39); do (. ./$i.sh p1 "p 2" 2>$i.err); printf "\\1"; done'
    done = subprocess.run(
        [BASH or "", "--norc", "-f", "-c", prelude], cwd=tmp_path, env={"PATH": os.defpath}, capture_output=True, timeout=240, check=False
    )
    compared = 0
    for i, (text, out) in enumerate(zip(texts, done.stdout.decode("utf-8", "replace").split("\1"))):
        said = (tmp_path / f"{i}.err").read_text(errors="replace")
        if said:
            continue  # a script that bash complains of, such as a slice before the first element
        context = Context({"PATH": os.defpath, "PWD": str(tmp_path)})
        read_script(text, f"./{i}.sh", context, lambda *_: None, ("p1", "p 2"))
        starts = [started.argv for started in context.started if known_text(started.argv[0]) == "launch" and not started.captured]
        mine = ["".join(f"<{known_text(word)}>" for word in argv[1:]) or "<>" for argv in starts]
        assert mine == out.split("\0")[:-1], text
        compared += 1
    assert compared > 20


class UndecidedScripts(Scripts):
    """Half of the conditions ask for a file; loops over the output of a command have as many turns as that has lines. Functions and loops
    are left under a condition, and what a shell of its own prints is read."""

    def _condition(self) -> str:
        asked = self._one("[ -f mark ]", "[[ -f mark ]]", "test -e mark", "! [ -f mark ]", "grep -q x mark 2>/dev/null")
        return self._one(asked, super()._condition())

    def _statement(self, depth: int) -> str:
        if depth < 2 and self._random.random() < 0.08:
            name = f"k{depth}"  # a loop in the loop would change its counter
            count = f"for (({name} = 0; {name} < $(cat mark | wc -l); {name}++))"
            loop = self._one(f"for {name} in $(cat mark 2>/dev/null)", f"while read {name}", count)
            tail = " < mark" if loop.startswith("while") else ""
            leaves = self._one("", f"{self._condition()} && {self._one('break', 'continue')};")
            return f"{loop}; do A=$B; B=$C; {self._statement(depth + 1)}; {leaves} C=i; done{tail}"
        if depth < 2 and self._random.random() < 0.08:
            leaves = self._one("break", "continue", "return", "B=x; break", "A=r; return 1")
            body = f"for k in 1 2; do {self._statement(depth + 1)}; {self._condition()} && {{ {leaves}; }}; B=$B$k; done; C=f"
            return f"g{depth}() {{ {body}; }}; g{depth}; {self._statement(depth + 1)}"
        if depth < 2 and self._random.random() < 0.1:
            ends = self._one("echo $B", "exit", "return", "echo x; exit 1", f"echo {self._word(0)}", "B=7")
            pipe = self._one("", "", " | tr a b")
            inner = f"{self._statement(depth + 2)} >/dev/null; {self._condition()} {self._one('&&', '||')} {{ {ends}; }}; echo $A"
            return f"h() {{ {inner}; }}; {self._one('A', 'B', 'C')}=$(h{pipe})"
        return super()._statement(depth)

    def script(self) -> str:
        fields = '"$A" "$B" "$C" "${#ARR[@]}" "${ARR[0]}" "${ARR[1]}" "${L[0]}" "${#L[@]}" "$N" "$#" "$1"'
        return super().script().rpartition("launch end")[0] + f"launch end {fields}\n"


@pytest.mark.parametrize("seed", range(2))
def test_what_is_said_to_be_known_is_so_whatever_a_run_finds(seed: int, tmp_path: Path) -> None:
    """Random scripts with conditions and loops that only a run decides: every value that the reader knows is bash's, with the file there,
    with three lines in it, and without it."""
    scripts = UndecidedScripts(seed)
    texts = [scripts.script() for _ in range(40)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.sh").write_text(text)
    prelude = 'launch() { printf "%s\\0" "$@" END; }; for i in $(seq 0 39); do (. ./$i.sh p1 "p 2" 2>>$i.err); printf "\\1"; done'
    runs = []
    for content in (None, "x\n", "x\ny z\nx\n"):
        if content is not None:
            (tmp_path / "mark").write_text(content)
        words = [BASH or "", "--norc", "-f", "-c", prelude]
        done = subprocess.run(words, cwd=tmp_path, env={"PATH": os.defpath}, capture_output=True, timeout=240, check=False)
        runs.append(done.stdout.decode("utf-8", "replace").split("\1"))
    compared = known_values = 0
    for i, (text, *outs) in enumerate(zip(texts, *runs)):
        complaints = (tmp_path / f"{i}.err").read_text(errors="replace").splitlines()
        ends = [out.split("\0END\0")[-2].rpartition("END\0")[2].split("\0") for out in outs if out]
        if len(ends) < len(runs) or any("mark: No such file" not in line for line in complaints):
            continue
        context = Context({"PATH": os.defpath, "PWD": str(tmp_path)})
        read_script(text, f"./{i}.sh", context, lambda *_: None, ("p1", "p 2"))
        last = next(
            started.argv for started in reversed(context.started) if [known_text(word) for word in started.argv[:2]] == ["launch", "end"]
        )
        mine = [known_text(word) for word in last[1:]]
        for end in ends:
            assert [value for value in mine if value is not None] == [real for value, real in zip(mine, end) if value is not None], text
            assert len(end) == len(mine)
        compared += 1
        known_values += sum(value is not None for value in mine)
    assert compared > 20
    assert known_values > 6 * compared


def test_what_a_pattern_has_matched_is_not_taken_for_nothing(tmp_path: Path) -> None:
    """``BASH_REMATCH`` is set by the shell itself: its value is not known, and so it is not empty either."""
    script = tmp_path / "run.sh"
    script.write_text('if [[ abc =~ ^a(b)c$ ]]; then torchrun --x "${BASH_REMATCH[1]}"; fi\n')
    assert by_reader(script, {})[0] == [(["torchrun", "--x", None], {})]
