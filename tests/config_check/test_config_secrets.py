"""Nothing that looks like a secret is written, by name or by shape; what only sounds like one stays."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.config_check import environment, system
from msprobe_engine.config_check.pack import PackWriter, read_pack
from msprobe_engine.config_check.resolved import Resolved, entry
from msprobe_engine.config_check.secrets import HIDDEN, cleaned, masked, secret_setting, secret_variable

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
    for text in (secret, f"run --x {secret} --y 1", cleaned("notes", {"a": [secret]})["a"][0]):
        assert HIDDEN in masked(text)
        assert not any(part in masked(text) for part in parts if "://" not in part and "Server" not in part)


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
    shown = masked(text)
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
    assert masked(text) == text


def test_user_and_password_of_urls_are_masked_and_the_rest_stays() -> None:
    """Proxies and package indexes keep their host."""
    assert masked("https://me:pw@pypi.example.com/simple,http://a.b/c@d") == "https://***@pypi.example.com/simple,http://a.b/c@d"
    assert masked("postgresql+psycopg://u:p@db:5432/x") == "postgresql+psycopg://***@db:5432/x"


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


def test_the_environment_keeps_what_decides_numbers_and_counts_what_is_left_out() -> None:
    """Names of secrets are not written either; values with one inside are masked; functions of the shell are left out."""
    found = environment.collect(
        {
            "NCCL_ALGO": "Ring",
            "HF_TOKEN": "x",
            "HTTPS_PROXY": "http://u:p@proxy:3128",
            "EXTRA": "--key1 " + SHAPES["github"],
            "BASH_FUNC_x%%": "() { y; }",
            "LONG": "x" * 100_000,
        }
    )
    assert len(found.left_out) == 1
    assert set(found.values) == {"NCCL_ALGO", "HTTPS_PROXY", "EXTRA", "LONG"}
    assert found.values["HTTPS_PROXY"] == "http://***@proxy:3128"
    assert found.values["EXTRA"] == HIDDEN
    assert len(found.values["LONG"]) < 40_000
    assert found.hidden == ("EXTRA", "HTTPS_PROXY")


def test_command_lines_lose_the_values_of_secret_options() -> None:
    """With a space and with an equals sign; numbers of tokens stay."""
    line = ["--hub_token", "abc", "--api-key=def", "--max-tokens", "4096", "--lr", "1e-3", "--url", "https://u:p@h/"]
    assert system.clean_arguments(line) == [
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
