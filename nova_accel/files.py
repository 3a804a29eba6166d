# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Write files in directories that other programs use.

Such a directory often belongs to another user, for example a metrics collector,
who may place symbolic links and named pipes in it.
"""

import contextlib
import os
import secrets


def create(path: str, content: str, mode: int | None = None,
           group: int = -1) -> None:
    """Create a file, without following links or opening pipes.

    :param content: text, written as UTF-8, with escape sequences for
        characters that UTF-8 cannot encode.
    :param mode: permissions of the file; by default as the umask determines.
    :param group: id of the file's group; by default the group of new files.
    :raises FileExistsError: the path exists, even as a dangling link.
    :raises OSError: the file cannot be written; no partial file is left.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW,
                 0o666 if mode is None else 0o600)
    with _removed_on_error(path), open(
            fd, 'w', encoding='utf-8', errors='backslashreplace') as file:
        if group != -1:
            os.fchown(fd, -1, group)
        if mode is not None:
            os.fchmod(fd, mode)
        file.write(content)


def replace(path: str, content: str, mode: int | None = None,
            group: int = -1) -> None:
    """Replace a file atomically: a reader gets the old or the new content.

    The new content is first written to a hidden file with a random name in the
    same directory. For the parameters see create().

    :raises OSError: the file cannot be written; the old one is unchanged.
    """
    directory, name = os.path.split(path)
    new = os.path.join(directory, f'.{name}.{secrets.token_hex(8)}')
    try:
        create(new, content, mode, group)
        with _removed_on_error(new):
            os.replace(new, path)
    except OSError as error:
        # without the random name: callers log an equal error once
        raise OSError(error.errno, error.strerror, path) from error


@contextlib.contextmanager
def _removed_on_error(path):
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
