# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Check the files of a release, each in a virtual environment of its own.

    python -m tests.released dist VERSION --constraint=constraints.txt nova

Installs the wheel, then the sdist, beside Nova, and runs commands of
nova-accel on the simulated host that the package contains. Both must install
the same files. Ends with 1 and the output of the command that failed.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import venv

#: arguments of nova-accel; {share} is that of the environment
COMMANDS = (
    '--version', 'help', 'profile check {share}/nlb.yaml',
    'discover --simulated-host {share}/simulated-host.yaml --driver gpu',
    'complete')


def run(*words) -> str:
    done = subprocess.run([*map(str, words)], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f'{" ".join(map(str, words))}:\n{done.stdout}')
    return done.stdout


def check(archive: pathlib.Path, version: str, nova: list[str]) -> set[str]:
    """Install an archive, run its commands, and return its files."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = pathlib.Path(folder, 'bin/python')
        run(python, '-m', 'pip', 'install', '--quiet', *nova, archive)
        run(python, '-m', 'pip', 'check')
        command = python.with_name('nova-accel')
        share = pathlib.Path(folder, 'share/nova_accel')
        for words in COMMANDS:
            said = run(command, *words.format(share=share).split())
            if words == '--version' and version not in said:
                raise SystemExit(f'{archive} has version {said}')
        return {line for line in run(
            python, '-m', 'pip', 'show', '--files', 'nova_accel').splitlines()
            if line.startswith('  ') and '.dist-info/' not in line
            and '__pycache__' not in line}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('version')
    parser.add_argument('nova', nargs='+', help='arguments of pip install')
    known, more = parser.parse_known_args()
    name = f'nova_accel-{known.version}'
    wheel, = known.folder.glob(f'{name}-*.whl')
    installed = [check(archive, known.version, [*known.nova, *more])
                 for archive in (wheel, known.folder / f'{name}.tar.gz')]
    if installed[0] != installed[1]:
        sys.exit(f'Wheel and sdist differ: {installed[0] ^ installed[1]}')
    print(f'{wheel.name} and {name}.tar.gz install the same '
          f'{len(installed[0])} files, and their commands run.')


if __name__ == '__main__':
    main()
