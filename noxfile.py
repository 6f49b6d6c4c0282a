"""Tests against released versions of the frameworks, and against the oldest and the newest of everything.

    nox -l                                what there is
    nox -t megatron                       all versions of Megatron that are listed here
    nox -s 'versions(megatron-0.8.0)'     one of them
    nox -s lowest newest                  lowest bounds on Python 3.10; newest releases on the newest Python

Each session has an environment of its own in .nox; uv makes it of files that all of them share. The versions that `make test-full` itself
uses are not repeated here.
"""

from __future__ import annotations

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

PROJECT = nox.project.load_toml("pyproject.toml")
EXTRAS = PROJECT["project"]["optional-dependencies"]
LINTERS = ("mypy", "import-linter", "types-", "ruff")
TOOLS = [requirement for requirement in EXTRAS["test"] if "==" not in requirement and not requirement.startswith(LINTERS)]
"""What tests need without the frameworks, whose versions are pinned."""
TORCH = "torch==2.13.0"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}

CHECKS = {
    "megatron": "tests/megatron/test_versions.py",
    "deepspeed": "tests/integrations/deepspeed/test_ds_versions.py",
    "transformers": "tests/integrations/transformers/test_hf_versions.py",
    "accelerate": "tests/integrations/accelerate/test_accelerate.py",
    "lightning": "tests/integrations/lightning/test_pl_ways.py",
    "torchtitan": "tests/integrations/torchtitan/test_torchtitan.py",
}
CASES = "tests/integrations/test_training_cases.py"
CASES_OF = {
    "torch": "torch_loop",
    "deepspeed": "deepspeed_engine",
    "transformers": "transformers_trainer",
    "accelerate": "accelerate_loop",
    "lightning": "lightning_trainer",
    "torchtitan": "torchtitan_trainer",
}
"""Core checks of an integration, the same for all its versions: a file of its own, and its cases in the file that all share."""
CORE = [f"tests/{name}" for name in ("core", "settings", "engine", "dump", "compare", "sinks", "rules", "trends")]
"""What needs no framework but torch, of any version."""

_HF = {
    "4.45.2": ["transformers==4.45.2", "accelerate==0.34.2", "tokenizers==0.20.3", "huggingface_hub==0.25.2"],
    "4.46.3": ["transformers==4.46.3", "accelerate==1.0.1", "tokenizers==0.20.3", "huggingface_hub==0.26.5"],
    "4.57.6": ["transformers==4.57.6", "accelerate==1.8.1", "tokenizers==0.22.1", "huggingface_hub==0.35.3"],
}
_MEGATRON = ("0.8.0", "0.9.0", "0.10.0", "0.11.0", "0.12.1", "0.13.1", "0.14.0", "0.15.3", "0.17.1", "0.18.2", "0.19.2")
VERSIONS = {
    # 2.3 and older are not supported: 2.2 has no torch.compiler.is_compiling, 2.3 was not tried.
    "torch": {version: [f"torch=={version}"] for version in ("2.4.1", "2.6.0", "2.10.0")},
    "megatron": {version: [f"megatron-core=={version}"] for version in _MEGATRON},
    "deepspeed": {version: [f"deepspeed=={version}"] for version in ("0.15.4", "0.16.9", "0.17.6", "0.18.9")},
    # Before 4.45 a callback is not called before the update: learning rate and loss scale are missing, which the probe says by name.
    "transformers": _HF,
    "accelerate": {"0.34.2": _HF["4.45.2"], "1.0.1": _HF["4.46.3"], "1.8.1": _HF["4.57.6"]},
    # Lightning 2.2 imports pkg_resources, which setuptools has no longer.
    "lightning": {
        "2.2.5": ["lightning==2.2.5", "pytorch_lightning==2.2.5", "setuptools==80.9.0"],
        "2.4.0": ["lightning==2.4.0", "pytorch_lightning==2.4.0"],
        "2.5.5": ["lightning==2.5.5", "pytorch_lightning==2.5.5"],
    },
    "torchtitan": {"0.2.2": ["torchtitan==0.2.2"]},
}
"""Framework to version to what is installed in place of what the extra ``test`` pins."""
ROWS = [
    nox.param(framework, version, id=f"{framework}-{version}", tags=[framework]) for framework, rows in VERSIONS.items() for version in rows
]


@nox.session
@nox.parametrize("framework, version", ROWS)
def versions(session: nox.Session, framework: str, version: str) -> None:
    """Core checks of one integration against one released version of its framework."""
    if framework == "torch":  # with all that this version needs of CUDA: its wheels for Linux link to it
        session.install(*VERSIONS[framework][version], "-e", ".", *TOOLS)
    else:
        session.install(TORCH, "-e", ".[test]")
        # Without what it asks for: releases pin torch, numpy and each other more tightly than they need.
        session.install("--no-deps", "--no-build-isolation", *VERSIONS[framework][version], env=ENVIRONMENT)
    _check(session, framework)


@nox.session(python="3.10")
def lowest(session: nox.Session) -> None:
    """The oldest release of everything that the bounds in pyproject.toml allow, but of what wants newer ones: DeepSpeed, torchtitan."""
    lightning = next(text for text in EXTRAS["lightning"] if text.startswith("lightning"))  # the same under its other name
    session.install("--resolution", "lowest-direct", "-e", ".[transformers,lightning]", f"pytorch_{lightning}", *TOOLS)
    _test(session, *CORE)
    _check(session, "torch", "megatron", "transformers", "accelerate", "lightning")


@nox.session(python=["3.13", "3.14"])
def newest(session: nox.Session) -> None:
    """The newest release of everything, on the newest releases of Python."""
    session.install("--upgrade", "-e", ".[transformers,lightning]", *TOOLS)
    _test(session, *CORE)
    _check(session, "torch", "transformers", "accelerate", "lightning")


@nox.session(default=False)
def wheels(session: nox.Session) -> None:
    """Source distribution and manylinux wheels of a release, in dist/; needs Docker or Podman."""
    session.install("build==1.6.1", "cibuildwheel==4.3.5")
    session.run("python", "-m", "build", "--sdist")
    session.run("cibuildwheel", "--output-dir", "dist", *session.posargs)


def _check(session: nox.Session, *frameworks: str) -> None:
    if files := [CHECKS[name] for name in frameworks if name in CHECKS]:
        _test(session, *files)
    if cases := [CASES_OF[name] for name in frameworks if name in CASES_OF]:
        _test(session, CASES, "-k", " or ".join(cases))


def _test(session: nox.Session, *tests: str) -> None:
    session.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *session.posargs, env=ENVIRONMENT)
