# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A line of nova-accel check."""

import dataclasses
import re

OK, WARNING, FAILURE = 'ok', 'warning', 'failure'


@dataclasses.dataclass(frozen=True)
class Line:
    """What one check found."""

    result: str
    found: str
    #: what to do
    remedy: str = ''


def split(sentence: str) -> tuple[str, str]:
    """Return (what was found, what to do) of an error of nova_accel."""
    found, colon, remedy = sentence.rstrip('.').rpartition(': ')
    return (found, remedy) if colon else (remedy, '')


def short(error: object) -> str:
    """Return the text of an error on one line, for a sentence."""
    return re.sub(r'\s+', ' ', str(error) or type(error).__name__)[:160]
