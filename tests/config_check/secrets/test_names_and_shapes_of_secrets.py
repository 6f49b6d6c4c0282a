"""Nothing that looks like a secret is written, by name or by shape; what only sounds like one stays."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.cli.main import main
from msprobe_engine.config.collect.resolved import Resolved, entry
from msprobe_engine.config.environment import variables as environment
from msprobe_engine.config.pack.reader import read_pack
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.config.secrets.masking import HIDDEN, mask_setting, mask_text, masked_arguments
from msprobe_engine.config.secrets.names import secret_setting, secret_variable
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.process import user_key
from msprobe_engine.find.config.comparison import headline
from msprobe_engine.find.config.difference import NO_RANK
from msprobe_engine.find.config.environment import compare_env
from msprobe_engine.find.config.packs import compare_packs
from msprobe_engine.formats.pack import entries

_B64 = base64.urlsafe_b64encode(b"x" * 30).decode().rstrip("=")
SHAPES = {
    "hugging face": "hf_" + "aB3" * 11,
    "github": "ghp_" + "a1B2" * 9,
    "github, fine": "github_pat_" + "11AB" * 8,
    "gitlab": "glpat-" + "x1y2" * 5,
    "openai": "sk-proj-" + "Ab1" * 12,
    "aws": "AKIA" + "ABCD1234" * 2,
    "google": "AIza" + "Sy0" * 12,
    "slack": "xoxb-1234567890-abcdef",
    "slack hook": "https://hooks.slack.com/services/T000/B000/XXXX",
    "pypi": "pypi-" + "AgEI" * 10,
    "jwt": f"eyJ{_B64}.eyJ{_B64}.{_B64}",
    "key": "-----BEGIN RSA PRIVATE KEY-----\nMIIE...\n-----END RSA PRIVATE KEY-----",
    "header": "Authorization: Bearer " + "abcd1234" * 4,
    "connection": "Server=db;User=me;Password=tr0ub4dor;",
    "query": "https://host/x?sig=abcdef123456&v=1",
}


@pytest.mark.parametrize("secret", SHAPES.values(), ids=list(SHAPES))
def test_known_shapes_are_masked_under_any_name(secret: str) -> None:
    """Alone, inside a longer text, and inside of nested settings."""
    parts = [part for part in secret.replace("=", " ").replace("&", " ").replace("?", " ").split() if len(part) > 14 or "tr0" in part]
    for text in (secret, f"run --x {secret} --y 1", mask_setting("notes", {"a": [secret]})["a"][0]):
        assert HIDDEN in mask_text(text)
        assert not any(part in mask_text(text) for part in parts if "://" not in part and "Server" not in part)


@pytest.mark.parametrize(
    "text",
    [
        *('{"token":"8f14e45fceea167a5a36dedd4bea2543deadbeef"}', "{'auth': {'token': 'zzzz9999'}}", '{"hub_token": "abcdef"}'),
        *(json.dumps(json.dumps({"password": "tr0ub4dor"})), '{"secret-key":"q1w2e3"}', "Authorization: Bearer SECRETbearer6"),
        *('{"Authorization":"Bearer ab12"}', "curl -H 'authorization: zz12345'", "Bearer SECRETbearer6"),
    ],
)
def test_pairs_of_json_and_headers_are_masked(text: str) -> None:
    """In a variable of any name: a value under a key that says it is a secret, and a short one in a header."""
    shown = mask_text(text)
    assert HIDDEN in shown
    assert not any(secret in shown for secret in ("8f14", "9999", "abcdef", "tr0ub", "q1w2", "SECRET", "ab12", "zz12"))


@pytest.mark.parametrize(
    "text",
    [
        '{"eos_token": "</s>", "pad_token": "[PAD]", "token": "<unk>"}',
        '{"use_auth_token": "true"}',
        '{"key": "value"}',
        "Bearer of bad news",
    ],
)
def test_words_of_models_are_not_taken_for_secrets(text: str) -> None:
    """Tokens of a tokenizer, switches and plain words stay."""
    assert mask_text(text) == text


def test_user_and_password_of_urls_are_masked_and_the_rest_stays() -> None:
    """Proxies and package indexes keep their host."""
    assert mask_text("https://me:pw@pypi.example.com/simple,http://a.b/c@d") == "https://***@pypi.example.com/simple,http://a.b/c@d"
    assert mask_text("postgresql+psycopg://u:p@db:5432/x") == "postgresql+psycopg://***@db:5432/x"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((n, True) for n in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "db_pwd", "MYPASSWORD")),
        *((n, True) for n in ("SSH_AUTH_SOCK", "XAUTHORITY", "SESSION_COOKIE", "GOOGLE_APPLICATION_CREDENTIALS", "hubToken")),
        *((n, False) for n in ("TOKENIZERS_PARALLELISM", "NCCL_ALGO", "PWD", "OLDPWD", "GIT_AUTHOR_NAME", "KEYBOARD", "PASSED")),
        *((n, False) for n in ("CUBLAS_WORKSPACE_CONFIG", "HCCL_WHITELIST_DISABLE", "CUDA_VISIBLE_DEVICES", "COMPASS", "NCCL_NTHREADS")),
    ],
)  # fmt: skip
def test_names_of_variables(name: str, secret: bool) -> None:
    """What a name says; words that only contain such a word say nothing."""
    assert secret_variable(name) is secret


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("hub_token", "abc", True), ("push_to_hub_token", "abc", True), ("wandb_api_key", "abc", True),
        ("db.password", "x", True), ("auth_token", "x", True),
        ("num_key_value_heads", "8", False), ("eos_token", "</s>", False), ("pad_token_id", 0, False), ("max_tokens", 4096, False),
        ("tokenizer_type", "Llama", False), ("key", "q", False), ("hub_token", None, False), ("tokens_per_batch", "4M", False),
    ],
)  # fmt: skip
def test_names_of_settings(name: str, value: object, secret: bool) -> None:
    """Models are full of keys and tokens that are none."""
    assert secret_setting(name, value) is secret


VARIABLES = {
    "NCCL_ALGO": "Ring",
    "HF_TOKEN": "x",
    "NCCL_OOB_URL": "http://u:p@proxy:3128",
    "XLA_FLAGS": "--key1 " + SHAPES["github"],
    "MY_RECIPE": "7b",
    "BASH_FUNC_x%%": "() { y; }",
    "TORCH_LONG": "x" * 100_000,
}
GOOD_KEY, OTHER_KEY = b"0123456789abcdef", b"fedcba9876543210"


def test_values_are_collected_of_families_that_matter_and_names_of_the_rest() -> None:
    """Values inside of which a secret stands are masked; each name that is withheld has its reason; functions of the shell are left out."""
    found = environment.collect(VARIABLES)
    assert set(found.values) == {"NCCL_ALGO", "NCCL_OOB_URL", "XLA_FLAGS", "TORCH_LONG"}
    assert found.values["NCCL_OOB_URL"] == "http://***@proxy:3128"
    assert found.values["XLA_FLAGS"] == f"--key1 {HIDDEN}"
    assert len(found.values["TORCH_LONG"]) < 40_000
    assert {why: found.names(why) for why in environment.REASONS} == {
        environment.NOT_KNOWN: ["MY_RECIPE"], environment.BY_NAME: ["HF_TOKEN"], environment.BY_VALUE: ["NCCL_OOB_URL", "XLA_FLAGS"],
    }  # fmt: skip
    assert not any(one.digest for one in found.withheld.values())
    assert all(any(name in note for note in found.notes()) for name in found.withheld)


def test_names_that_the_user_adds_are_collected_but_for_secrets() -> None:
    """Patterns are allowed; a name that says it is a secret stays out whatever the pattern, and values pass the masker."""
    found = environment.collect({**VARIABLES, "MY_URL": "http://u:p@h/"}, added=["MY_*", "HF_TOKEN"])
    assert found.values["MY_RECIPE"] == "7b"
    assert found.values["MY_URL"] == "http://***@h/"
    assert found.names(environment.BY_NAME) == ["HF_TOKEN"]


def _compared(a: dict[str, str], b: dict[str, str], keys: tuple[bytes, bytes]) -> tuple[list[str], int, list[str]]:
    sheet = compare_env({NO_RANK: environment.collect(a, key=keys[0])}, {NO_RANK: environment.collect(b, key=keys[1])})
    return [one.name for one in sheet.differences], sheet.not_shown, sheet.notes


def test_values_that_are_not_shown_are_compared_by_digests_of_one_key() -> None:
    """The same and others with one key; with none, one, or two keys they are not comparable: never the same, and one note for all."""
    a, b = {"NCCL_ALGO": "Ring", "FOO": "1", "BAR": "1", "BAZ": ""}, {"NCCL_ALGO": "Ring", "FOO": "1", "BAR": "2", "BAZ": ""}
    assert _compared(a, b, (GOOD_KEY, GOOD_KEY)) == (["BAR"], 0, [])
    for keys in ((b"", b""), (GOOD_KEY, b""), (GOOD_KEY, OTHER_KEY)):
        names, not_shown, notes = _compared(a, b, keys)
        assert (names, not_shown, len(notes)) == ([], 3, 1)
        assert "3 variables" in notes[0]
        assert "cannot be compared" in notes[0]


def test_digests_say_nothing_without_the_key() -> None:
    """Equal values of two names, and equal values under two keys, have nothing in common; the key is nowhere."""
    one, other = (environment.collect({"A": "secret", "B": "secret"}, key=key) for key in (GOOD_KEY, OTHER_KEY))
    digests = [each.digest for found in (one, other) for each in found.withheld.values()]
    assert len(set(digests)) == 4
    assert one.key != other.key
    assert GOOD_KEY.decode() not in json.dumps(one.entry())


def test_keys_come_from_a_file_or_the_environment_and_short_ones_are_refused(tmp_path: Path) -> None:
    """The given file, else the variable, else the file that a variable names; the variables of the key are never collected."""
    file = tmp_path / "key"
    file.write_text("f" * 32 + "\n")
    assert user_key.read_key(file, {user_key.KEY: "e" * 32}) == b"f" * 32
    assert user_key.read_key(None, {user_key.KEY: "e" * 32}) == b"e" * 32
    assert user_key.read_key(None, {user_key.KEY_FILE: str(file)}) == b"f" * 32
    assert user_key.read_key(None, {}) == b""
    file.write_text("short")
    for source, variables in ((file, {}), (None, {user_key.KEY: "short"}), (tmp_path / "none", {}), (tmp_path, {})):
        with pytest.raises(UsageError, match=r"bytes|cannot be read"):
            user_key.read_key(source, variables)
    found = environment.collect({user_key.KEY: "e" * 32, "A": "b"}, key=b"e" * 32)
    assert user_key.KEY not in {*found.values, *found.withheld}


def test_a_masked_variable_that_matters_is_no_all_clear(tmp_path: Path) -> None:
    """Whatever else is equal: a value that may change the numbers and cannot be compared makes 3, and unrelated ones leave 0."""
    packs = {}
    for name, variables in {"plain": {"NCCL_ALGO": "Ring", "MY": "1"}, "masked": {"XLA_FLAGS": "--password abc"}}.items():
        packs[name] = tmp_path / f"{name}.zip"
        about = environment.collect(variables)
        whole = {"pip": "numpy=2.1.0\n", entries.of_rank("system", 0): {"machine": {"architecture": "x86_64"}}}
        PackWriter(packs[name]).add({"env": about.values, entries.of_rank("withheld", 0): about.entry(), **whole})
    plain, masked_one = (compare_packs(packs[name], packs[name]) for name in ("plain", "masked"))
    assert (plain.exit_code, plain.not_shown) == (0, 1)
    assert headline(plain) == "No difference that matters; 1 value cannot be compared, see the notes of config_check."
    assert (masked_one.exit_code, masked_one.unknown) == (3, ["XLA_FLAGS"])
    assert headline(masked_one).startswith("Cannot tell")


def test_command_lines_lose_the_values_of_secret_options() -> None:
    """With a space and with an equals sign; numbers of tokens stay."""
    line = ["--hub_token", "abc", "--api-key=def", "--max-tokens", "4096", "--lr", "1e-3", "--url", "https://u:p@h/"]
    assert masked_arguments(line) == [
        "--hub_token", HIDDEN, f"--api-key={HIDDEN}", "--max-tokens", "4096", "--lr", "1e-3", "--url", "https://***@h/",
    ]  # fmt: skip


@given(
    st.dictionaries(st.text(max_size=10), st.recursive(st.text(max_size=30), lambda x: st.lists(x, max_size=3), max_leaves=5), max_size=4)
)
def test_a_pack_is_json_whatever_texts_hold_and_masks_all_of_them(tmp_path: Path, texts: dict[str, object]) -> None:
    """Masking happens in the values, so it cannot break the JSON around them; whoever adds an entry need not think of it."""
    path = tmp_path / "pack.zip"
    path.unlink(missing_ok=True)
    secret = SHAPES["hugging face"]
    PackWriter(path).add({"env": {**texts, "x": f'"{secret}"', "y": "password=abc\\"}, "pip": f"a={secret}\n"})
    assert secret not in path.read_bytes().decode("latin-1")
    found = read_pack(path)
    assert secret not in json.dumps(found.json("env")) + found.text("pip")


def test_resolved_settings_hide_secrets_by_their_name() -> None:
    """A Trainer's hub_token is not written."""
    found = entry(
        {"hub_token": Resolved("abc", "flag", "--hub_token", "transformers"), "lr": Resolved(1e-3, "default", "", "transformers")}
    )
    assert found["hub_token"]["value"] == HIDDEN
    assert found["lr"]["value"] == 1e-3


@pytest.mark.parametrize(
    ("a", "b", "code"),
    [
        ("--seed 1234 --password 1234", "--seed 4321 --password 4321", 1),  # what is no secret of its own is compared
        (f"--cache-id {'3f786850e387550fdab836ed7e6dc881de23001b'}", f"--cache-id {'aa786850e387550fdab836ed7e6dc881de23001b'}", 3),
        ("--hub-token x8Kd93hfKQ1mz", "--hub-token pl20dkEJw8273", 0),  # by its name no setting of the numbers
    ],
)
def test_a_masked_setting_is_no_all_clear(a: str, b: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A setting that is masked is named as not compared, and "cannot tell" unless its name says that it is a secret."""
    for name, options in (("a", a), ("b", b)):
        (tmp_path / f"{name}.sh").write_text(f"python train.py --lr 1e-3 {options}\n")
        assert main(["config_check", "-d", str(tmp_path / f"{name}.sh"), "-o", str(tmp_path / f"{name}.zip")]) == 0
    assert main(["config_check", "-c", str(tmp_path / "a.zip"), str(tmp_path / "b.zip"), "-o", str(tmp_path / "r")]) == code
    assert "settings that are masked were not compared" in capsys.readouterr().out


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_resolved_settings_of_the_probe_are_printed_without_passwords(
    as_json: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """People show what ``check-config`` prints to others."""
    path = tmp_path / "probe.yaml"
    path.write_text(
        f"output_dir: {tmp_path}\nsinks: {{prometheus: {{enabled: true, mode: push, push_url: 'http://me:tr0ub4dor@gateway:9091'}}}}\n"
    )
    assert main(["check-config", str(path), *as_json]) == 0
    said = capsys.readouterr().out
    assert "tr0ub4dor" not in said
    assert "***@gateway:9091" in said


@pytest.mark.parametrize("url", ["http://me:tr0ub4dor@127.0.0.1:1", "http://me:tr0ub4dor@127.0.0.1:no-port"])
def test_a_gateway_that_fails_is_named_without_its_password(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The address, and what the library says of it."""
    pytest.importorskip("prometheus_client")
    from prometheus_client import CollectorRegistry

    from msprobe_engine.probe.sinks.prometheus.sink import Pusher

    pusher = Pusher(url, "job", 0, CollectorRegistry())
    with caplog.at_level("WARNING", logger="msprobe.prometheus"):
        pusher.close()
    said = [record.getMessage() for record in caplog.records if "push to" in record.getMessage()]
    assert said
    assert not any("tr0ub4dor" in text for text in said)
