# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Run the tests of each mutant on a copy of the tree.

    python -m tests.mutants [--processes 2] [ROOM or FILE or TEXT ...]

Ends with 1 where a mutant survives that does not say why, or does not apply.
"""

import argparse
from concurrent import futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from tests import mutants

#: seconds for each name of its tests, after which a mutant that makes them
#: hang is killed
LIMIT = 300
_COPIED = 'nova_accel', 'tests', 'etc', 'docs', 'setup.cfg', 'README.rst'


def _copy(directory):
    for name in _COPIED:
        source, target = mutants.ROOT / name, directory / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(
                '__pycache__', 'build'))
        else:
            shutil.copy(source, target)


def _run(tests, directory):
    """Run tests in a copy.

    :returns: whether they pass, and the end of their output.
    """
    command = [
        sys.executable, '-m', 'testtools.run', '--failfast',
        *(f'tests.{name}' for name in tests)]
    limit = LIMIT * len(tests)
    with subprocess.Popen(
            command, cwd=directory, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # a file of the same size and second is compiled again
            env={**os.environ, 'PYTHONPATH': str(directory),
                 'PYTHONDONTWRITEBYTECODE': '1'}) as process:
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return False, f'They ran for more than {limit} s.'
    return process.returncode == 0, said[-3000:]


def _judge(mutant):
    """What became of a mutant: a word, and whether that is right."""
    try:
        changed = mutant.apply()
    except ValueError as error:
        return f'no longer applies: {error}', False
    if not mutant.tests:
        return f'not run: {mutant.survives}', True
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        _copy(directory)
        (directory / 'nova_accel' / mutant.file).write_text(changed)
        passed, _ = _run(mutant.tests, directory)
    if not passed:
        return 'killed', not mutant.survives
    if mutant.survives:
        return f'survived: {mutant.survives}', True
    return 'SURVIVED', False


def main():
    parser = argparse.ArgumentParser(prog='python -m tests.mutants')
    parser.add_argument('--processes', type=int, default=os.cpu_count())
    parser.add_argument('what', nargs='*', help='part of a file or of a text')
    arguments = parser.parse_args()
    chosen = [m for m in mutants.read() if not arguments.what or any(
        what in f'{m.file} {m.text} {m.instead}' for what in arguments.what)]
    if not chosen:
        sys.exit('No mutant has that in its file or text.')
    tests = sorted({name for m in chosen for name in m.tests})
    with tempfile.TemporaryDirectory() as name:
        _copy(pathlib.Path(name))
        passed, said = _run(tests, pathlib.Path(name)) if tests else (True, '')
    if not passed:
        sys.exit(f'{said}\nThe tests fail without a mutant: mend them first.')
    began, counts, wrong = time.monotonic(), {}, 0
    with futures.ThreadPoolExecutor(arguments.processes) as pool:
        for mutant, (said, right) in zip(chosen, pool.map(_judge, chosen)):
            wrong += not right
            word = said.partition(':')[0].lower()
            counts[word] = counts.get(word, 0) + 1
            print(f'{mutant}: {said}', flush=True)
    print(f'{len(chosen)} mutants in {time.monotonic() - began:.0f} s: '
          + ', '.join(f'{count} {word}' for word, count in counts.items())
          + (f'; {wrong} to mend' if wrong else ''))
    sys.exit(bool(wrong))


if __name__ == '__main__':
    main()
