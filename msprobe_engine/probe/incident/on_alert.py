"""What the user wants done when an incident begins: a command is started, a JSON object is posted, the training is ended. Never by
default, once per incident.

Ranks that begin the same incident in the same step agree by a file in its directory; on nodes without a common file system each node does
it. Both happen on a thread of their own: the training does not wait, and a failure is one line in the log.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import threading
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from msprobe_engine.core.io.regular_files import FILE_MODE, NEW_FILE
from msprobe_engine.core.log import get_logger, one_line
from msprobe_engine.core.process.variables import PREFIX
from msprobe_engine.core.settings.schema import OnAlertSettings
from msprobe_engine.probe.incident.event import Event

STOPPED = 86
"""Exit code of a process that ``on_alert.stop`` has ended."""
CLAIM = ".on_alert"
"""File in the directory of an incident: who has made it does it."""
TIMEOUT_SECONDS = 10.0
_log = get_logger()


class StopTraining(SystemExit):
    """Ends the training because the user wants it after an alert (``on_alert.stop``)."""


def act_once(settings: OnAlertSettings, event: Event, directory: Path) -> threading.Thread | None:
    """Do what `settings` want, if no other rank does; the thread that does it, for who wants to wait."""
    if not settings.command and not settings.webhook:
        return None
    try:
        os.close(os.open(directory / CLAIM, NEW_FILE, FILE_MODE))
    except FileExistsError:
        return None
    thread = threading.Thread(target=_act, args=(settings, event, directory), name="msprobe-on-alert", daemon=True)
    thread.start()
    return thread


def _act(settings: OnAlertSettings, event: Event, directory: Path) -> None:
    facts = {
        "incident": str(directory.absolute()),
        "rule": event.rule,
        "step": event.step,
        "rank": event.rank,
        "host": platform.node(),
        "message": event.message,
    }
    process = _start(settings.command, facts) if settings.command else None  # it outlives a training that ends now
    if settings.webhook:
        _post(settings.webhook, facts)
    if process is not None and (code := process.wait()):
        _log.error("on_alert.command: %s ended with %d", shlex.split(settings.command)[0], code)


def _start(command: str, facts: Mapping[str, object]) -> subprocess.Popen[bytes] | None:
    """Start the command with the facts in its environment. No shell: texts of the training are no commands."""
    environment = {**os.environ, "MSPROBE_AUTOLOAD": "0"}  # it is no training
    environment |= {f"{PREFIX}ALERT_{name.upper()}": str(value).replace("\0", "") for name, value in facts.items()}
    try:
        return subprocess.Popen(shlex.split(command), env=environment, stdin=subprocess.DEVNULL)
    except (OSError, ValueError) as error:
        _log.error("on_alert.command cannot be run: %s", one_line(str(error)))
        return None


def _post(address: str, facts: Mapping[str, object]) -> None:
    """Post the facts; the address is not shown, because it is a password in most services."""
    try:
        if urlsplit(address).scheme not in ("http", "https"):
            raise ValueError("the address begins with neither http:// nor https://")
        body = json.dumps({"text": f"msprobe: {facts['message']}", **facts}).encode()
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
            pass
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        said = one_line(str(error if isinstance(error, ValueError) else reason).replace(address, "..."))
        _log.error("on_alert.webhook (%s): nothing was posted: %s", urlsplit(address).hostname or "no host", said)
