"""Scripts and settings files that mean harm: nothing in them runs, and reading them ends soon, with a word on why."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.config.launch_scripts.shell.context import Context
from msprobe_engine.config.launch_scripts.shell.evaluate import read_script
from msprobe_engine.config.launch_scripts.static import collect_static
from msprobe_engine.core.errors import DumpFormatError, ProbeError

DEEP = 10_000
HOSTILE = {
    "fork bomb": ":(){ :|:& };:\ntorchrun a",
    "function that calls itself": "f() { f; }; f; torchrun a",
    "function that calls itself twice, undecided": "f() { if [ -f a ]; then f; else f; fi; }; f",
    "eval of itself": 'X=\'eval "$X"\'; eval "$X"',
    "shell in a shell": 'export X=\'bash -c "$X"\'; bash -c "$X"',
    "nested substitutions": "echo " + "$(" * DEEP + ")" * DEEP,
    "nested sums": "echo $((" + "(" * DEEP + "1" + ")" * DEEP + "))",
    "open sums": "((" * 5000 + "$((" * 5000,
    "nested defaults": "echo " + "${A:-" * DEEP + "}" * DEEP,
    "nested ifs": "if true; then " * DEEP + ":; " + "fi; " * DEEP,
    "nested groups": "{ " * DEEP + ":; " + "} " * DEEP,
    "nested tests": "[[ " + "( " * DEEP + "a",
    "open quotes": '"$(' * DEEP,
    "open backquotes": "echo `" + "\\`" * DEEP,
    "open functions": "f(){ " * DEEP,
    "a text that doubles": "X=aaaaaaaa\n" + "X=$X$X\n" * 60,
    "an array that doubles": "A=(a b)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40,
    "a loop without end": "while true; do X=$((X+1)); done; torchrun $X",
    "loops in loops": "for i in {1..20000}; do for j in {1..20000}; do X=$i$j; done; done",
    "braces": "echo " + "{a,b}" * 40 + " {1..999999999999}",
    "a pattern that searches for ever": "X=" + "a" * 20_000 + "; Y=${X//*a*a*a*a*a*b/}; echo ${X%%" + "*a" * 2000 + "b}",
    "a pattern of case": "case " + "a" * 5000 + " in " + "*a" * 2000 + "b) ;; esac",
    "a line of many words": "torchrun " + "a " * 150_000,
    "an open text of many variables": 'A="' + "$X " * 120_000,
    "a huge power": "echo $((2**" + "9" * 5000 + ")) $((2**62**62**62)) " + "$((" + "1+" * 50_000 + "1))",
    "variables that name each other": "A=B; B=A; echo $((A)) ${!A}; declare -n R=A; echo $R",
    "many undecided conditions": "".join(f"if [ -f f{i} ]; then A{i}=1; B={i}; else B=x; fi\n" for i in range(400)),
    "a long chain of conditions": "if [ -f a ]; then :; " + "elif [ -f b ]; then X=1; " * 2000 + "fi",
    "many here-documents": "cat " + "<<A " * 5000 + "\nA\n" * 5000,
    "many pipes": "a|" * 8000 + "b",
    "many ands": "a&&" * 8000 + "b",
    "wide numbers": 'printf "%999999999d" 1; X=$(printf "%99999999d" 1); echo $(seq 1 999999999)',
    "splitting again and again": 'X="' + "a " * 20_000 + '"; for i in {1..5000}; do set -- $X; done',
    "zero bytes": "torchrun a\0b $'\\0' \"\0",
}


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("name", HOSTILE)
def test_reading_a_hostile_script_ends(name: str) -> None:
    """Work, depth and memory are bounded whatever the text: seconds and some hundred MB, no exception, no recursion error."""
    context = Context()
    begin, memory = time.process_time(), _memory()
    read_script(HOSTILE[name], "x.sh", context, lambda *_: None)
    assert time.process_time() - begin < 20
    assert _memory() - memory < 600_000
    assert not [note for note in context.notes if len(note) > 1000]


def test_nothing_of_a_script_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Substitutions, here-documents, traps, eval, functions named like commands, arithmetic with an index: no process, no file."""
    mark = tmp_path / "mark"
    for name in ("system", "popen", "fork", "execv", "execve", "posix_spawn", "posix_spawnp"):
        monkeypatch.setattr(os, name, lambda *_, **__: pytest.fail("a process was started"))
    (tmp_path / "run.sh").write_text(
        f"X=$(touch {mark}; echo 1) Y=`touch {mark}`\n"
        f"cat <<END > {mark}\n$(touch {mark})\nEND\n"
        f"eval 'touch {mark}'; trap 'touch {mark}' EXIT; ((a[$(touch {mark})]++)); echo > {mark}; : > {mark}\n"
        f"echo() {{ touch {mark}; }}; echo hi; A[$(touch {mark})]=1; cat <(touch {mark}); rm -rf {tmp_path}; $(rm -rf {tmp_path})\n"
        f"torchrun --lr $(rm -rf {tmp_path}) train.py --seed $(touch {mark})\n"
    )
    found = collect_static([tmp_path / "run.sh"])
    assert found.launches[0].program == "train.py"
    assert not found.values["seed"].known
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sh"]


def _error_of(path: Path) -> str | None:
    """What reading a file says when it cannot; None: it gives values that JSON can hold."""
    try:
        assert json.dumps(collect_static([path]).existing_shape())
    except ProbeError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{n}: &{n} [{', '.join([f'*{b}'] * 9)}]\n" for b, n in zip("abcdefghijk", "bcdefghijkl")),
        "a: &a {k1: 1, k2: 2}\n"
        + "".join(f"{n}: &{n} {{<<: [{', '.join([f'*{b}'] * 20)}]}}\n" for b, n in zip("abcdefghijk", "bcdefghijkl")),
        "[" * DEEP,
        "a: " * 300,
        "a: !!python/object/apply:os.system ['touch mark']\n" * 2,
        "? [a]\n: 1\n? {b: 1}\n: 2\n",
        "a: &a\n  b: *a\n",
        "- " * 5000 + "x",
        "x: 0x" + "f" * 5000 + "\ny: 1" + "0" * 5000 + "\nz: 190:20:30:40:50\nd: 2001-99-99\n",
    ],
    ids=["aliases", "merges", "brackets", "colons", "objects", "keys", "cycle", "lists", "numbers"],
)
@pytest.mark.fast_cells("aliases", "colons", "cycle", "keys", "lists", "merges", "numbers", "objects")
def test_hostile_yaml_is_an_error_or_plain_data(text: str, tmp_path: Path) -> None:
    """Aliases that grow, nesting, tags of objects, cycles: an error that names the file, or plain values; soon and without objects."""
    (tmp_path / "a.yaml").write_text(text)
    begin = time.process_time()
    said = _error_of(tmp_path / "a.yaml")
    assert said is None or ("a.yaml" in said and len(said) < 2000)
    assert time.process_time() - begin < 10
    assert not Path("mark").exists()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.sh", b"x" * (2 << 20), "larger than"),
        ("a.json", b"[" * 100_000, "nested too deep|not valid JSON"),
        ("a.json", b'{"a": 1', "not valid JSON"),
        ("a.toml", b"a = [" * 5000, "nested too deep|not valid TOML|Python 3.11"),
        ("a.py", b"a = " + b"(" * 5000, "not valid Python|nested too deep"),
        ("a.py", b"a = \x00", "not valid Python|is no text file"),
        ("a.yaml", b"\xff\xfe\x00a", "is no text file|not valid YAML"),
    ],
)
def test_damaged_files_are_errors_that_name_them(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    """Too large, damaged, too deep or no text: the error names the file and what is wrong."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DumpFormatError, match=says) as error:
        collect_static([tmp_path / name])
    assert name in str(error.value)


def test_devices_and_pipes_do_not_hold_the_reader_up(tmp_path: Path) -> None:
    """A script that sources a pipe, a device or itself, and names such files as settings, is read to its end."""
    os.mkfifo(tmp_path / "pipe.sh")
    os.mkfifo(tmp_path / "ds.json")
    (tmp_path / "run.sh").write_text(
        "source pipe.sh; source /dev/zero; source ./run.sh; . /dev/stdin\n"
        "torchrun train.py --lr 1 --deepspeed ds.json --config_file /dev/zero.json\n"
    )
    begin = time.monotonic()
    found = collect_static([tmp_path / "run.sh"])
    assert found.values["lr"].value == "1"
    assert time.monotonic() - begin < 20
    assert any("pipe.sh" in note for note in found.notes)


def test_names_that_are_no_paths(tmp_path: Path) -> None:
    """Names that are too long, empty, or have characters of terminals: the rest is read, and notes stay short and printable."""
    long = "x" * 20_000
    (tmp_path / "run.sh").write_text(
        f"source {long}; bash {long}.sh; source ''; . $'a\\0b'; source $'\\e[31mred'; cd {long}; source y.sh\n"
        f"torchrun {long}.py --lr 1 --config {long}.json --config_file '' --deepspeed $'\\e[31m.json' --hostfile {long}\n"
    )
    found = collect_static([tmp_path / "run.sh"])
    assert found.values["lr"].value == "1"
    assert all(len(note) < 1000 and note.isprintable() for note in found.notes)


def test_files_that_name_each_other_are_read_once(tmp_path: Path) -> None:
    """A circle of settings files ends."""
    (tmp_path / "a.yaml").write_text("config_file: b.yaml\nlr: 1\n")
    (tmp_path / "b.yaml").write_text("config_file: a.yaml\nseed: 2\n")
    (tmp_path / "run.sh").write_text("torchrun train.py --config_file a.yaml\n")
    found = collect_static([tmp_path / "run.sh"])
    assert found.values["seed"].value == 2
    assert len(found.files) == 3


_TOKENS = (
    *"ab=$(){}[]<>|&;\"'`\\ \n#!*?@:-+/%~,.0",
    "if ",
    "then ",
    "fi\n",
    "for ",
    "do ",
    "done\n",
    "case ",
    "in ",
    "esac ",
    "${",
    "$((",
    "<<",
)


@given(st.lists(st.sampled_from(_TOKENS), max_size=40).map("".join))
def test_any_text_is_read_without_an_exception(text: str) -> None:
    """Whatever stands in a script, reading it ends without an exception."""
    read_script(text, "x.sh", Context(), lambda *_: None)
    read_script(text, "x.sh", Context({}), lambda *_: None, ("a",))
