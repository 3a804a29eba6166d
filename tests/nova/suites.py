# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The suites: which tests of Nova, in whose place, on which host."""

import dataclasses
import pathlib
import re

#: environment variables for the workers: the name of a suite; set for Nova's
#: own driver
SUITE = 'NOVA_TESTS_SUITE'
STOCK = 'NOVA_TESTS_STOCK'

_HERE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Suite:
    #: module or package
    tests: str
    #: how our driver comes in: the name of a function of tests.nova.place
    place: str
    #: whether each host has an FPGA card
    card: bool = False

    def put(self) -> None:
        """Put our driver in the place of Nova's, in this process."""
        from tests.nova import place
        getattr(place, self.place)()


SUITES = {
    'unit': Suite('nova.tests.unit.virt.libvirt.test_driver',
                  'put_under_the_class'),
    'functional': Suite('nova.tests.functional.libvirt',
                        'put_under_the_name'),
    'functional-card': Suite('nova.tests.functional.libvirt',
                             'put_under_the_name', card=True)}


@dataclasses.dataclass(frozen=True)
class Exclusion:
    """A line of excluded.txt."""

    pattern: re.Pattern
    reason: str


def exclusions(suite: str, path: pathlib.Path = _HERE / 'excluded.txt',
               names=SUITES) -> list[Exclusion]:
    """What is not run of a suite: lines of suites (comma), regex, reason.

    :raises ValueError: a line lacks a field or names an unknown suite.
    """
    found = []
    for line in _lines(path):
        try:
            which, pattern, reason = line.split(maxsplit=2)
        except ValueError:
            raise ValueError(f'{path}: {line!r} is not "suites regex reason".')
        named = set(names if which == 'all' else which.split(','))
        if named - names.keys():
            raise ValueError(f'{path}: {which!r} names an unknown suite.')
        if suite in named:
            found.append(Exclusion(re.compile(pattern), reason))
    return found


def part(suite: str, path: pathlib.Path = _HERE / 'part.txt'
         ) -> list[re.Pattern]:
    """The fixed selection that every change has to pass."""
    return [re.compile(pattern) for name, pattern in
            (line.split() for line in _lines(path)) if name == suite]


def _lines(path):
    with open(path) as file:
        lines = [line.strip() for line in file]
    return [line for line in lines if line and not line.startswith('#')]
