# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Files that others read while they are written."""

import contextlib
import os


def replace(path: str, content: str, mode: int | None = None) -> None:
    """Write a file in one step: a reader sees the old content or the new.

    :param content: written as UTF-8.
    :param mode: permissions of the file; by default those of the umask.
    :raises OSError: it cannot be written; the old one is still there.
    """
    new = f'{path}.new'
    try:
        with open(new, 'w', encoding='utf-8') as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content)
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
