"""Can a directory be made and written where a setting wants it? Asked once, before the training begins."""

from __future__ import annotations

import errno
import os

from msprobe_engine.core.errors import SettingsError

_LONGEST = 100  # bytes below dump_path: /step1000000/proc4194304/dump_tensor_data/.construct.json.4194304.tmp


def check_directory(path: str | os.PathLike[str], source: str, key: str) -> None:
    """A directory that exists or can be made, and that this process may write. Links to directories are followed: clusters have them.

    Args:
        source, key: where the setting stands, for the message (``config.json``, ``dump_path``).

    Raises:
        SettingsError: it cannot be used; the message says why and what to do.
    """
    text = os.fspath(path)

    def refuse(why: str, what: str) -> SettingsError:
        return SettingsError(f"{source}: {key}: '{text[:200]}' cannot be used: {why}; {what}")

    current = os.path.abspath(text)
    if len(os.fsencode(current)) + _LONGEST > os.pathconf("/", "PC_PATH_MAX"):
        raise refuse(f"the path is too long ({len(os.fsencode(current))} bytes)", f"give a shorter {key}")
    while True:
        try:
            os.stat(current)
            break
        except FileNotFoundError:
            if os.path.islink(current):
                raise refuse(f"{current} is a link that leads nowhere", "make its target or give another one") from None
        except NotADirectoryError:
            pass  # a file is further up: found below
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise refuse("a part of the path is too long", f"give a shorter {key}") from None
            if error.errno == errno.ELOOP:
                raise refuse(f"{current} is a link that leads to itself", "remove it or give another one") from None
            raise refuse(f"{current}: {error.strerror}", "check the permissions of the directories above it") from None
        current = os.path.dirname(current)
    if not os.path.isdir(current):
        raise refuse(f"{current} is a file", "remove it or give another directory")
    if os.statvfs(current).f_flag & os.ST_RDONLY:
        raise refuse(f"the file system of {current} is read-only", f"give a {key} on another one")
    if not os.access(current, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise refuse(f"this user may not write in {current}", f"change its owner or mode, or give another {key}")
