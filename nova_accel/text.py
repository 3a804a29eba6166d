# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Text from users, images and files as a part of an error."""


def printable(value: object, limit: int = 60) -> str:
    """Return value in quotes, in ASCII and cut off after limit characters.

    Escapes keep control characters out of logs and faults.

    :param value: text or any other value; None becomes an empty text.
    """
    shown = ascii('' if value is None else value)
    if len(shown) <= limit:
        return shown
    end = shown[-1] if isinstance(value, (str, bytes)) else ''
    return f'{shown[:limit]}...{end}'
