# Licensed under the Apache License, Version 2.0. See LICENSE.
"""python -m tests.tempest.judge [--part] [--only REGEX] [SUITE ...]

Runs suites in the room, and returns the verdict: a test that fails and is not
in permitted.txt, one in it that passes, and whatever a run leaves.
"""

import argparse
import collections
import os
import pathlib
import shutil
import subprocess
import sys
import time

import tempest

from tests import outcomes
from tests.lab import processes
from tests.nova import suites as lists
from tests.tempest import leftovers, suites, verdict

#: not its own directory: it has a package "tests"
TOP = pathlib.Path(tempest.__file__).parents[1]


def run(name: str, patterns: list[str], content: suites.Content) -> dict:
    """Run the tests of a suite; each by its id."""
    directory = processes.RUN / 'tempest' / name
    shutil.rmtree(directory, ignore_errors=True)
    (directory / 'stestr').mkdir(parents=True)
    suite = suites.here()[name]
    conf = content.configure(suite, directory)
    stestr = [sys.executable, '-m', 'stestr', '--test-path',
              TOP / 'tempest/test_discover', '--top-dir', TOP, '--repo-url',
              directory / 'stestr']
    with open(directory / 'stestr.log', 'w') as log:
        for command in (['init'], [
                'run', '--concurrency', str(suite.workers), '--group_regex',
                r'([^\.]*\.)*', *patterns]):
            subprocess.run(
                [*stestr, *command], stdout=log, stderr=log, cwd=directory,
                env={**os.environ, 'PYTHONPATH': '/src', 'PYTHON':
                     sys.executable, 'TEMPEST_CONFIG_DIR': str(conf.parent),
                     'TEMPEST_CONFIG': conf.name})
    return outcomes.of_last_run(str(directory / 'stestr'))


def main() -> int:
    parser = argparse.ArgumentParser(prog='python -m tests.tempest test')
    parser.add_argument('suites', nargs='*', metavar='SUITE',
                        help=f'of {", ".join(suites.here())}; default: all')
    which = parser.add_mutually_exclusive_group()
    which.add_argument('--part', action='store_true',
                       help='the fixed selection of part.txt')
    which.add_argument('--only', metavar='REGEX',
                       help='tests whose id has this in it')
    arguments = parser.parse_args()
    unknown = set(arguments.suites) - suites.here().keys()
    if unknown:
        parser.error(f'no such suite: {", ".join(sorted(unknown))}')
    directory = processes.RUN / 'tempest'
    directory.mkdir(exist_ok=True)
    content = suites.Content(directory)
    marks = leftovers.Marks()
    wrong = []
    for name in arguments.suites or suites.here():
        patterns = [suites.here()[name].tests]
        if arguments.only:
            patterns = [arguments.only]
        elif arguments.part:
            patterns = [p.pattern for p in lists.part(name, suites.PART)]
        if not patterns:
            continue
        began = time.monotonic()
        tests = run(name, patterns, content)
        found = verdict.faults(name, tests, patterns,
                               not (arguments.part or arguments.only))
        count = collections.Counter(t['status'] for t in tests.values())
        for line in found:
            print(f'FAILED {line}')
        print(f'{name}: {count.pop("success", 0)} passed, {len(found)} '
              f'failed, {count.pop("skip", 0)} skipped, '
              f'{count.total()} did not pass, in '
              f'{time.monotonic() - began:.0f} s', flush=True)
        wrong += found
    left = leftovers.settled()
    grown, lines = marks.since()
    for line in lines:
        print(line)
    for line in left + grown:
        print(f'LEFT {line}')
    print(f'leftovers: {int(not left + grown)} passed, {len(left + grown)} '
          f'failed, 0 skipped')
    return int(bool(wrong or left or grown))


if __name__ == '__main__':
    sys.exit(main())
