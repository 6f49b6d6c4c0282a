"""Secrets as they are met in environments, command lines, scripts and files are in no byte of a pack or a report; what only looks like them
stays. The cases are in ``secret_corpus.yaml``; random parts are made when the test runs."""

from __future__ import annotations

import base64
import binascii
import bz2
import gzip
import json
import lzma
import random
import re
import shlex
import string
import sys
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from msprobe_engine.cli.main import main
from msprobe_engine.config.collect import system
from msprobe_engine.config.environment import variables as environment
from msprobe_engine.config.pack.reader import read_pack
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.config.secrets.masking import HIDDEN, mask_setting, mask_text, masked_arguments, masked_value
from msprobe_engine.core.process import user_key
from msprobe_engine.formats.pack import entries

_GENERATED = re.compile(r"\{(word|mixed|hex32|hex40|hex64|base64|digits|upper|uuid)\}")
_random = random.Random(7)


class Case(NamedTuple):
    where: str
    name: str
    value: Any  # a text, but for settings, which may be lists and dicts
    secrets: tuple[str, ...]  # empty: the value stays


def _made_up(kind: str) -> str:
    pick = _random.choices
    if kind == "word":
        return "zq" + "".join(pick(string.ascii_lowercase, k=9))
    if kind == "mixed":
        return "".join(
            "".join(pick(kinds)[0] for kinds in (string.ascii_uppercase, string.digits, string.ascii_lowercase)) for _ in range(4)
        )
    if kind == "uuid":
        return str(uuid.UUID(bytes=_random.randbytes(16)))
    if kind.startswith("hex"):
        return _random.randbytes(int(kind[3:]) // 2).hex()
    if kind == "base64":
        return base64.b64encode(_random.randbytes(30)).decode()
    return "".join(pick(string.digits if kind == "digits" else string.ascii_uppercase + string.digits, k=16))


def _cases() -> list[Case]:
    found = []
    for group in yaml.safe_load(Path(__file__).with_name("secret_corpus.yaml").read_text("utf-8")):
        for name, template in group.get("pairs") or [(name, group["value"]) for name in group["names"]]:
            secrets: list[str] = []

            def filled(part: re.Match[str], secrets: list[str] = secrets) -> str:
                secrets.append(_made_up(part[1]))
                return secrets[-1]

            value = template
            if group["secret"]:
                made = _GENERATED.sub(filled, template if isinstance(template, str) else json.dumps(template))
                value = made if isinstance(template, str) else json.loads(made)
            found.append(Case(group["where"], name, value, tuple(secrets)))
    return found


CASES = _cases()
SECRET, HARMLESS = [case for case in CASES if case.secrets], [case for case in CASES if not case.secrets]


def _of(where: str, cases: list[Case] = CASES) -> list[Case]:
    return [case for case in cases if case.where == where]


def test_the_corpus_is_large() -> None:
    """At least 300 names and values, a third of them harmless."""
    assert len(CASES) >= 300
    assert len(HARMLESS) >= 100


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Everything that collecting, comparing and verifying wrote and printed, unpacked: name to content."""
    place = tmp_path_factory.mktemp("corpus")
    options = [word for case in _of("option") for word in (f"--{case.name}", case.value)]
    glued = [f"--{case.name}={case.value}" for case in _of("option")]
    lines = [case.value for case in _of("line")]
    script = ["#!/bin/bash", *lines, "torchrun train.py " + shlex.join(options), "torchrun train.py " + shlex.join(glued), ""]
    (place / "run.sh").write_text("\n".join(script))
    parts = {f"part{i}": {case.name: case.value, "in": [{case.name: [case.value]}]} for i, case in enumerate(_of("setting"))}
    (place / "conf.json").write_text(json.dumps(parts))
    for case in _of("file"):
        (place / case.name).write_text(case.value)
    given = ["run.sh", "conf.json", *(case.name for case in _of("file"))]
    with pytest.MonkeyPatch.context() as patch, _Printed() as printed:
        for case in _of("variable"):
            patch.setenv(case.name, case.value)
        patch.setenv(user_key.KEY, "k" * 40)
        patch.setattr(sys, "argv", ["train.py", *options, *glued])
        patch.chdir(place)
        of_process = json.dumps(system.collect())  # as the pack of a training has it
        for other, lr in (("a", "1"), ("b", "2")):
            patch.setenv("NCCL_ALGO", "Ring" if other == "a" else "Tree")
            assert main(["config_check", "-d", *given, "-o", f"{other}.zip"]) == 0
            patch.setenv("FOO", f"zq-other-{lr}")
        main(["config_check", "-c", "a.zip", "b.zip", "-o", "result", "--html", "page.html", "--json", "all.json"])
        main(["config_check", "--verify", "a.zip", "-d", *given, "-o", "verified"])
        main(["diagnose", "b.zip", "a.zip", "-o", "diagnosis"])
        with zipfile.ZipFile("old.zip", "w") as old:  # as the existing tool writes it: the whole environment, arguments as they are
            old.writestr("env", json.dumps({case.name: case.value for case in _of("variable")}))
            static = {case.name: case.value for case in (*_of("option"), *_of("setting"))}
            old.writestr(entries.STATIC, json.dumps(static))
        main(["config_check", "-c", "old.zip", "a.zip", "-o", "old_result"])
    found = {"printed": printed.text.encode(), "of process": of_process.encode()}
    for path in place.rglob("*"):
        if path.is_file() and path.name not in (*given, "old.zip"):
            found[str(path.relative_to(place))] = path.read_bytes()
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    found |= {f"{path.name}:{name}": archive.read(name) for name in archive.namelist()}
    return found


class _Printed:
    """What was printed to either stream."""

    text = ""

    def __enter__(self) -> _Printed:
        self._streams = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = self  # type: ignore[assignment]
        return self

    def write(self, text: str) -> int:
        self.text += text

        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        return False

    def __exit__(self, *exc: object) -> None:
        sys.stdout, sys.stderr = self._streams


def test_no_secret_is_in_any_byte(artifacts: dict[str, bytes]) -> None:
    """Packs, pages, tables, JSON and what was printed; and the user's key."""
    assert {"a.zip:env", "result/result.html", "result/result.json", "all.json", "page.html"} <= set(artifacts)
    leaks = {
        (case.where, case.name, str(case.value), name)
        for case in SECRET
        for secret in case.secrets
        for name, content in artifacts.items()
        if secret.encode() in content
    }
    assert not leaks
    assert not [name for name, content in artifacts.items() if b"k" * 40 in content]


def test_all_that_is_harmless_is_kept(artifacts: dict[str, bytes]) -> None:
    """Values of variables, words of the command line, and settings of files."""
    variables = json.loads(artifacts["a.zip:env"])
    changed = {case.name for case in _of("variable", HARMLESS) if variables.get(case.name) != case.value} - {"NCCL_ALGO"}
    assert not changed
    arguments = json.loads(artifacts["of process"])["program"]["arguments"]
    words = [(f"--{case.name}", case.value) for case in _of("option", HARMLESS)]
    pairs = set(pairwise(arguments))
    assert not [pair for pair in words if pair not in pairs]
    assert not [pair for pair in words if "=".join(pair) not in arguments]
    settings = json.loads(artifacts["a.zip:msprobe/static.json"])["values"]
    wrong = []
    for i, case in enumerate(_of("setting")):
        found = settings.get(f"part{i}.{case.name}", {}).get("value")
        if not isinstance(case.value, str):  # its parts are settings
            found = [one for key, entry in settings.items() if f"part{i}.{case.name}" in key for one in _texts(entry)]
            if not case.secrets and (HIDDEN in str(found) or not set(_texts(case.value)) <= set(found)):
                wrong.append((case.name, case.value, found))
        elif not case.secrets and found != case.value:
            wrong.append((case.name, case.value, found))
    for case in _of("option", HARMLESS):
        if (found := settings.get(case.name, {}).get("value")) != case.value:
            wrong.append((case.name, case.value, found))
    assert not wrong


def _texts(tree: Any) -> list[Any]:
    """Leaves of nested lists and dicts."""
    if isinstance(tree, (list, dict)):
        return [leaf for child in (tree.values() if isinstance(tree, dict) else tree) for leaf in _texts(child)]
    return [tree]


@pytest.mark.parametrize("case", _of("line", HARMLESS), ids=lambda case: str(case.value)[:40])
def test_lines_without_secrets_stay(case: Case) -> None:
    """Options of one letter are ports, partitions and switches far more often than passwords."""
    assert masked_value("", case.value) == case.value


def test_what_is_masked_is_said_and_recorded(artifacts: dict[str, bytes]) -> None:
    """Count, names and reason when it is collected; all names and reasons in the pack."""
    printed = artifacts["printed"].decode()
    for reason in (
        "no library of the training is known to read them",
        "their names say that they are secrets",
        "their values look like secrets",
    ):
        assert re.search(rf"[0-9]+ variables of the environment .*{reason}", printed)
    withheld = json.loads(artifacts["a.zip:msprobe/withheld/rank0.json"])
    secret = {case.name for case in _of("variable", SECRET)}
    assert secret <= set(withheld["variables"])
    assert all(one["why"] in environment.REASONS and re.fullmatch("[0-9a-f]{32}", one["digest"]) for one in withheld["variables"].values())
    assert "s3-sk" in printed


def test_a_variable_that_is_not_shown_is_compared_by_its_digest(artifacts: dict[str, bytes]) -> None:
    """FOO was another in the second pack: the packs of one key say so; the program may read it."""
    assert any(one["name"] == "FOO" for one in json.loads(artifacts["all.json"])["differences"])


INSIDE = ("HF_TOKEN=hf_{0}", "export OBS_SK={0}", '{{"password": "{0}"}}', "--hub-token {0} --lr 1", "https://me:{0}@host/x", "{0}")
PACKED = (bytes, gzip.compress, zlib.compress, bz2.compress, lzma.compress)


@pytest.mark.parametrize("packed", PACKED, ids=["plain", "gzip", "zlib", "bz2", "xz"])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode, base64.encodebytes, binascii.hexlify])
def test_a_secret_in_an_encoded_text_is_not_shown(encode: Callable[[bytes], bytes], packed: Callable[[bytes], bytes]) -> None:
    """Nor a part of it, in a value and in a line of a script, with and without what fills the last block up."""
    for inside in INSIDE:
        for before in ("", "x" * 80 + " lr=1\n"):
            word = encode(packed((before + inside.format("aB3dE6gH9jK2mN5pQ8sT1vW4")).encode())).decode().strip()
            for shell in (word, word.rstrip("="), f"echo {word} | base64 -d", f"base64 -d <<EOF\n{word}\nEOF\ntorchrun x.py"):
                shown = masked_value("XLA_FLAGS", shell)
                assert HIDDEN in shown
                assert not [line for line in word.split("\n") if line in shown and len(line) > 20], (inside, shell, shown)


@pytest.mark.parametrize("text", ["lr=1e-4 warmup=2000 layers=32", '{"localhost": [0, 1, 2, 3]}', "path/to/some_data/of_a_long_name/x"])
def test_an_encoded_text_without_a_secret_stays(text: str) -> None:
    """DeepSpeed hands on its hosts so."""
    word = base64.urlsafe_b64encode(text.encode()).decode()
    for shell in (word, f"--world_info={word}", text):
        assert mask_text(shell) == shell


@pytest.mark.parametrize("inside", [inside.format("zqabcdefghijk") for inside in INSIDE[1:5]])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("around", ["{0}", "x={0}", "https://h/x?lr=1&next={0}&y=2", "--url https://h/{0}", '{{"a": "{0}"}}', "a\n{0}\nb"])
def test_a_secret_in_a_percent_encoded_text_is_not_shown(inside: str, times: int, around: str) -> None:
    """Nor where only one sign is encoded, in digits of either case, or where blanks are plus signs; what stands around it stays."""
    for encode in (quote, quote_plus, lambda text, safe: re.sub("%..", lambda found: found[0].lower(), quote(text, safe=safe))):
        text = inside
        for _ in range(times):
            text = encode(text, safe="")
        shown = masked_value("XLA_FLAGS", around.format(text))
        assert "zqabcdefghijk" not in shown
        assert HIDDEN in shown
        assert shown.startswith(around.partition("{0}")[0].replace("{{", "{"))


@pytest.mark.parametrize(
    "text",
    ["https://h/a%20b/c%2Fd?x=1%2C2", "50%25 of it", "%Y%m%d-%H%M", "date+%20", "x=1+2", "git%2Bhttps://h/x@v1", "a%3Db%26lr%3D1e-4"],
)
def test_a_percent_encoded_text_without_a_secret_stays(text: str) -> None:
    assert masked_value("XLA_FLAGS", text) == text


SECRETS = st.text(string.ascii_letters + string.digits + "!#%*+./:?^_~-", min_size=5, max_size=40).map(lambda text: f"Zq{text}x")
"""With a beginning that no word of a pack has."""
_NAMES = st.sampled_from(
    ("password", "hub-token", "s3_sk", "wandb_api_key", "DB_PASSWORD", "HUAWEICLOUD_SDK_SK", "client-secret", "github_pat")
)
_WRAPPED = st.sampled_from(
    r"""--{name} {secret}
--{name}={secret}
{name}={secret}
export {name}={secret}
x --{name} '{secret}' y
--{name}="{secret}"
{{"{name}": "{secret}"}}
{{'{name}': '{secret}'}}
{name}: {secret} # a comment
['--{name}', '{secret}']
-{name} {secret}
f({name}='{secret}', lr=1)
run --x 1 --{name}	{secret}
"{{\"{name}\": \"{secret}\"}}"
os.environ['{name}'] = '{secret}'
prefix.{name}={secret}
{name}  =  {secret}
--x=--{name}={secret}
A=1 {name}={secret} python t.py
{name}: '{secret}'
${{{name}:-{secret}}}
lr=1,{name}={secret},x=2""".splitlines()
)


@example(secret="Zq:::::x", name="hub-token", wrapped="prefix.{name}={secret}", before="")  # "prefix" is a word of tokenizers
@given(SECRETS, _NAMES, _WRAPPED, st.sampled_from(("", "bash -c ", "cd /x; ")))
def test_a_secret_under_its_name_is_never_in_a_pack(tmp_path: Path, secret: str, name: str, wrapped: str, before: str) -> None:
    """Whatever the value is and however name and value are put together."""
    text = before + wrapped.format(name=name, secret=secret)
    path = tmp_path / "pack.zip"
    path.unlink(missing_ok=True)
    about = environment.collect({"XLA_FLAGS": text, "MY": secret, name.upper(): secret}, key=b"x" * 16)
    PackWriter(path, run="a").add(
        {
            "env": about.values,
            entries.of_rank("withheld", 0): about.entry(),
            entries.of_rank("system", 0): {
                "program": {"arguments": masked_arguments(["--a", text, f"--{name}", secret, f"--{name}={secret}"])}
            },
            entries.of_rank("hyperparameters", 0): {"notes": {"value": text}, name: {"value": secret}},
            entries.STATIC: {"notes": [text], "deep": {name: [secret, {"x": text}]}},
        }
    )
    pack = read_pack(path)
    assert not [entry for entry in pack.names if secret in pack.text(entry)]


@given(SECRETS, st.sampled_from(("https://u:{0}@h/x", "https://h/?token={0}", "https://h/x?a=1&api_key={0}&b=2", "redis://:{0}@h:1/0")))
def test_a_secret_in_a_url_is_never_shown(secret: str, url: str) -> None:
    """As a password, and as a parameter."""
    secret = re.sub(r"[^A-Za-z0-9_~-]", "", secret).rjust(8, "q")
    assert secret not in masked_value("", url.format(secret))


@given(
    st.recursive(
        st.text(max_size=40),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
        max_leaves=6,
    )
)
def test_masking_twice_is_masking_once(value: Any) -> None:
    """Several layers mask; none of them may change what another one has masked."""
    once = mask_setting("x", value)
    assert mask_setting("x", once) == once


LONG = [
    *("a", "password", "--a ", "a=b", "://", "a:", '"', "=", "\\", "aA1", "token=,", "A1/b", "x ", "-----BEGIN ", "a@:", 'k="'),
    *("login ", "eyJ"),
    *("password=\\'", " ", "-u a:", "sk-", "key=", "key=a", "--key ", "--token --token ", "a.b=", "https://a:", "'", "\\\""),
    *("1e-3,", "aB3" * 15 + " "),
    *("{", "[\"--x\", ", "_", "-", "A_KEY=", "authorization:", "bearer ", "-----BEGIN A PRIVATE KEY-----"),
]  # fmt: skip


@pytest.mark.parametrize("size", [60_000, pytest.param(240_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("piece", LONG)
def test_long_texts_take_no_longer_than_they_are(piece: str, size: int) -> None:
    """Much of what patterns could stumble over."""
    text = piece * (size // len(piece))
    started = time.process_time()
    masked_value("", text)
    masked_value("", text + "!")
    assert time.process_time() - started < size / 12_000


def test_the_mark_says_what_it_is() -> None:
    """A reader of a pack sees that something stood there."""
    assert mask_setting("password", "x") == HIDDEN
