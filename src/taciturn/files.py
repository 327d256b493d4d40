"""Files that a command is to write: refused before the work, and whole when they are there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from taciturn.errors import InputError

__all__ = ["check_file", "write_whole"]


def check_file(option: str, path: Path) -> None:
    """Refuse a file that cannot be written, by trying; leaves it as it is.

    Raises:
        InputError: a folder, no such folder, or no permission.
    """
    try:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            path.open("xb").close()
            path.unlink()
            return
        if stat.S_ISFIFO(mode):  # to open it would wait for its reader
            if not os.access(path, os.W_OK):
                raise PermissionError(13, "Permission denied")
            return
        path.open("ab").close()
    except OSError as error:
        raise InputError(
            f"{option}: cannot write {path}: {error.strerror}; name a file in a folder that is "
            "there and in which you may write"
        ) from error


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all, for whoever reads it at the same time.

    Raises:
        OSError: it cannot be written; what was there before is left as it was.
    """
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(text, "utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
