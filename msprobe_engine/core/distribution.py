"""The name under which package indexes have this project. ``msprobe`` there is a foreign program: no hint may name it."""

NAME = "msprobe-integrations"


def install_command(extra: str = "") -> str:
    """What to type to install the project, with an extra."""
    return f"pip install '{NAME}[{extra}]'" if extra else f"pip install {NAME}"
