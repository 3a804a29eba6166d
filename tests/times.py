# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Seconds of long tests, for a clone in which no tests have run.

stestr divides the tests among its processes by their times in former runs. A
fresh clone has none, and one process would work minutes longer than the
others. ``tests/times.txt`` has the tests of a second and more::

    python -m tests.times unit      tell stestr those that it does not know
    python -m tests.times --record  write the file, after a run of all tests

What stestr keeps is in a folder for each tier: tiers run side by side.
"""

from dbm import dumb
import pathlib
import sys

from stestr.repository import file

ROOT = pathlib.Path(__file__).parents[1]
#: of stestr, below the root; the Makefile names it, too
KEPT = 'build/stestr'
#: seconds of the shortest test in the file
LONG = 1


def _open(root, tier):
    directory = root / KEPT / tier
    if not (directory / '.stestr').exists():
        directory.mkdir(parents=True, exist_ok=True)
        file.RepositoryFactory().initialise(str(directory))
    return dumb.open(str(directory / '.stestr' / 'times.dbm'), 'c')


def tell(tier: str, root: pathlib.Path = ROOT) -> None:
    """Give stestr the seconds of tests that it has not run itself."""
    with _open(root, tier) as known:
        for line in (root / 'tests/times.txt').read_text().splitlines():
            seconds, test = line.split()
            if test.startswith(f'tests.{tier}.') and test not in known:
                known[test] = seconds


def record(root: pathlib.Path = ROOT) -> None:
    """Write what stestr knows into tests/times.txt."""
    found = []
    for directory in (root / KEPT).iterdir():
        with _open(root, directory.name) as known:
            found += [(test.decode(), float(known[test])) for test in known]
    (root / 'tests/times.txt').write_text(''.join(
        f'{seconds:.1f} {test}\n' for test, seconds in sorted(found)
        if seconds >= LONG))


if __name__ == '__main__':
    record() if sys.argv[1:] == ['--record'] else tell(*sys.argv[1:])
