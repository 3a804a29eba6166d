# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A line of nova-accel check."""

import dataclasses
import re

OK, WARNING, FAILURE = 'ok', 'warning', 'failure'


@dataclasses.dataclass(frozen=True)
class Line:
    """The result of one check."""

    result: str
    found: str
    #: the remedy
    remedy: str = ''


def split(sentence: str) -> tuple[str, str]:
    """Split an error of nova_accel into its finding and its remedy."""
    found, colon, remedy = sentence.rstrip('.').rpartition(': ')
    return (found, remedy) if colon else (remedy, '')


def short(error: object) -> str:
    """Return the text of an error on one line, for use in a sentence."""
    return re.sub(r'\s+', ' ', str(error) or type(error).__name__)[:160]
