# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Compare the next Nova with the newest recorded one: make candidate.

    python -m tests.nova.candidate             # the newest of the index
    python -m tests.nova.candidate PATH        # a wheel, an archive of sources
                                               # or a checkout
    python -m tests.nova.candidate PATH PATH   # only compares the two

Counts how many of the methods that we override or wrap have another signature
or another body, names them, and appends the line to build/nova-changes.txt.
Then runs the comparison of signatures, the unit and the functional tests.
"""

from importlib import metadata
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import nova

from tests.nova import record_signatures

ROOT = pathlib.Path(__file__).parents[2]
#: variable of the environment with its path, for test_nova_signatures
CANDIDATE = 'NOVA_ACCEL_CANDIDATE'
RECORD = ROOT / 'build/nova-changes.txt'
#: what has the methods of the table in architecture.rst, the first one counts
OWNERS = (
    'nova.virt.libvirt.driver.LibvirtDriver', 'nova.virt.driver.ComputeDriver',
    'nova.compute.manager.ComputeManager',
    'nova.compute.resource_tracker.ResourceTracker',
    'nova.compute.claims.Claim', 'nova.compute.claims.MoveClaim',
    'nova.scheduler.client.report.SchedulerReportClient',
    'nova.compute.provider_tree.ProviderTree',
    'nova.compute.provider_tree._Provider',
    'nova.compute.pci_placement_translator',
    'nova.scheduler.manager.SchedulerManager',
    'nova.compute.api.API', 'nova.compute.flavors')


def seams(names) -> dict[str, str]:
    """Method that is overridden or wrapped -> its full name among these.

    tests/unit/test_nova_signatures.py compares the table with the code.
    """
    page = (ROOT / 'docs/source/contributor/architecture.rst').read_text()
    table = page.partition('.. _seams:')[2].partition('The rooms\n')[0]
    return {name: full for name in sorted({
                found.rpartition('.')[2]
                for found in re.findall('``([A-Za-z_.]+)``', table)})
            for full in [next((f'{owner}.{name}' for owner in OWNERS
                               if f'{owner}.{name}' in names), None)] if full}


def changes(before: pathlib.Path, after: pathlib.Path,
            ) -> tuple[int, list[str], list[str]]:
    """Return how many seams there are, those whose signature changed or that
    are gone, and those of which only the body did."""
    old, new = map(record_signatures.reader, (before, after))
    signatures, bodies = ([
        record_signatures.record(read, describe) for read in (old, new)]
        for describe in (record_signatures.signature, record_signatures.body))
    found = seams(signatures[0])
    other = [name for name, full in found.items()
             if signatures[0][full] != signatures[1].get(full)]
    return len(found), other, [
        name for name, full in found.items() if name not in other
        and bodies[0][full] != bodies[1][full]]


def newest(directory: str) -> pathlib.Path:
    """Download the newest Nova of the index, also a release candidate."""
    subprocess.run(
        [sys.executable, '-m', 'pip', 'download', '--quiet', '--pre',
         '--no-deps', '--dest', directory, 'nova'], check=True)
    found, = pathlib.Path(directory).iterdir()
    return found


def compare(before: pathlib.Path, after: pathlib.Path) -> None:
    """Print and record what changed."""
    total, other, bodies = changes(before, after)
    line = (f'{_name(before)} -> {_name(after)}: of {total} methods '
            f'{len(other)} have another signature '
            f'({", ".join(other) or "none"}), and {len(bodies)} only another '
            f'body ({", ".join(bodies) or "none"})')
    print(line, flush=True)
    RECORD.parent.mkdir(exist_ok=True)
    with open(RECORD, 'a') as file:
        file.write(f'{line}\n')


def _name(path):
    return path.name.removesuffix('-py3-none-any.whl').removesuffix('.tar.gz')


def check(source: pathlib.Path) -> int:
    """Run the tests with a Nova; how many of the commands failed."""
    failed = 0
    for command in (
            [sys.executable, '-m', 'testtools.run',
             'tests.unit.test_nova_signatures'],
            *(['make', tier, 'VENV=.venv-candidate', f'NOVA_IS={source}',
               'LIMITS='] for tier in (
                   'unit', 'functional', 'functional-rest'))):
        failed += 0 != subprocess.run(command, cwd=ROOT, env={
            **os.environ, CANDIDATE: str(source)}).returncode
    return failed


def main(*paths: str) -> int:
    installed = metadata.version('nova')
    with tempfile.TemporaryDirectory() as directory:
        *others, source = map(pathlib.Path, paths or [newest(directory)])
        if not paths and _name(source) == f'nova-{installed}':
            print(f'The index has no Nova later than {installed}: give the '
                  f'path of a checkout.')
            return 0
        compare(others[0] if others
                else pathlib.Path(nova.__file__).parents[1], source)
        return 0 if others else check(source.absolute())


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
