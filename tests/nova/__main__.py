# Licensed under the Apache License, Version 2.0. See LICENSE.
"""python -m tests.nova [--stock] [--part | --only REGEX] [SUITE ...]"""

import argparse
import collections
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from tests import environment
from tests import outcomes
from tests.nova import suites

_RESULTS = pathlib.Path('build', 'nova-tests')
#: how subunit calls an outcome -> under what we count it
_COUNTED = {'success': 'passed', 'xfail': 'passed', 'skip': 'skipped',
            'fail': 'failed', 'uxsuccess': 'failed'}


class _Stestr:
    """stestr for one suite, which runs once."""

    def __init__(self, suite: str, stock: bool) -> None:
        self._directory = _RESULTS / (f'{suite}-stock' if stock else suite)
        # nothing of an earlier run may count
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        self._environment = {
            **os.environ, suites.SUITE: suite,
            # which stestr takes; a shell runs it, for which a whole path may
            # have spaces
            'PYTHON': os.path.relpath(sys.executable),
            # Nova's tests of LVM take what is in /dev for volumes
            'TMPDIR': tempfile.gettempdir()}
        if stock:
            self._environment[suites.STOCK] = '1'

    def _call(self, *arguments, **options):
        return subprocess.run(
            [sys.executable, '-m', 'stestr', '--test-path',
             './tests/nova/suite', '--top-dir', '.', '--repo-url',
             str(self._directory), *arguments],
            env=self._environment, **options)

    def ids(self) -> list[str]:
        self._call('init', check=True)
        listed = self._call('list', check=True, text=True,
                            stdout=subprocess.PIPE).stdout.splitlines()
        return [line for line in listed if line.startswith('nova.')]

    def run(self, ids: list[str]) -> dict[str, str]:
        """Run tests; test id -> how it ended."""
        if not ids:
            return {}
        listed = self._directory / 'ids'
        listed.write_text('\n'.join(ids) + '\n')
        # what each worker imports takes as long as ten tests
        workers = 2 if len(ids) > 10 else 1
        self._call('run', '--concurrency', str(workers),
                   '--load-list', str(listed),
                   '--suppress-attachments', '--abbreviate')
        return {i: _COUNTED[test['status']] for i, test in
                outcomes.of_last_run(str(self._directory)).items()
                if test['status'] in _COUNTED}


class _Selection:
    """The tests of a suite that are to run, and those that are not."""

    def __init__(self, ids: list[str], wanted: list[re.Pattern],
                 exclusions: list[suites.Exclusion]) -> None:
        """
        :param wanted: patterns of which one has to be in a test's id.
        """
        unwanted = [e.pattern for e in exclusions]
        chosen = [i for i in ids if _any(wanted, i)]
        self.excluded = [i for i in chosen if _any(unwanted, i)]
        self.ids = [i for i in chosen if not _any(unwanted, i)]
        #: patterns that find no test of the suite: Nova's has gone
        self.stale = [p.pattern for p in wanted + unwanted
                      if not any(p.search(i) for i in ids)]


def _any(patterns, test_id):
    return any(p.search(test_id) for p in patterns)


def run(suite: str, stock: bool, wanted: list[re.Pattern]) -> bool:
    """Run the tests of one suite that are wanted, and print its totals.

    :returns: whether all of it passed. A test that did not end, as when its
        worker dies, has failed; so has a pattern that finds no test.
    """
    stestr = _Stestr(suite, stock)
    selection = _Selection(
        stestr.ids(), wanted, [] if stock else suites.exclusions(suite))
    outcome = stestr.run(selection.ids)
    count = collections.Counter(outcome.values())
    unended = [i for i in selection.ids if i not in outcome]
    for test in sorted(i for i, how in outcome.items() if how == 'failed'):
        print(f'FAILED {test}')
    for test in unended:
        print(f'DID NOT END {test}')
    for pattern in selection.stale:
        print(f'FINDS NO TEST {pattern}')
    print(f'{suite}{" with LibvirtDriver" if stock else ""}: '
          f'{count["passed"]} passed, {count["failed"] + len(unended)} '
          f'failed, {count["skipped"]} skipped, '
          f'{len(selection.excluded)} excluded', flush=True)
    return not (count['failed'] or unended or selection.stale)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog='python -m tests.nova',
        description="Run Nova's tests of its libvirt driver with ours in its "
                    "place.")
    parser.add_argument('suites', nargs='*', metavar='SUITE',
                        help=f'of {", ".join(suites.SUITES)}; default: all')
    parser.add_argument('--stock', action='store_true',
                        help="with Nova's own driver and no exclusions, to "
                             "compare")
    which = parser.add_mutually_exclusive_group()
    which.add_argument('--part', action='store_true',
                       help='the fixed selection of part.txt')
    which.add_argument('--only', metavar='REGEX', type=re.compile,
                       help='tests whose id has this in it')
    arguments = parser.parse_args()
    unknown = set(arguments.suites) - suites.SUITES.keys()
    if unknown:
        parser.error(f'no such suite: {", ".join(sorted(unknown))}')
    environment.clear()
    passed = True
    for suite in arguments.suites or suites.SUITES:
        wanted = (suites.part(suite) if arguments.part
                  else [arguments.only or re.compile('')])
        if wanted:
            passed = run(suite, arguments.stock, wanted) and passed
    return 0 if passed else 1


if __name__ == '__main__':
    sys.exit(main())
