"""Files and folders of keys, tokens and logs, which other users must neither read nor control."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def create_private_folder(folder: Path) -> None:
    """Create a folder with mode 0700, or check the owner and the mode of an existing folder.

    Raises:
        PermissionError: the folder belongs to another user, or other users may write to it.
        OSError: the folder cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private_folder(folder)


def check_private_folder(folder: Path) -> None:
    """Check that no other user owns the folder or may write to it.

    Raises:
        PermissionError: the folder belongs to another user, or other users may write to it.
        FileNotFoundError: there is no such folder.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid():
        why = "the folder belongs to another user"
    elif status.st_mode & 0o022:
        why = "other users may write to the folder; run chmod go-w on it"
    else:
        return
    raise PermissionError(errno.EPERM, why, str(folder))


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read. The file appears at `path` only when complete."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    part.replace(path)
