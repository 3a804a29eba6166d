# Licensed under the Apache License, Version 2.0. See LICENSE.
"""python3 -m tests.buyer [CHECKOUT]: run NVIDIA's suite on a simulated cloud.

CHECKOUT is a directory with the suite; by default git fetches it.
"""

import os
import pathlib
import shutil
import subprocess
import sys

from tests import buyer

SUITE = 'https://github.com/NVIDIA/ai-cloud-validation'
#: of 19 August 2026, version 0.11.0
COMMIT = '1207cb75ec6ed5ffbf05e787a0fa16f93752f08a'
#: that the suite allows
PYTHONS = 'python3.14', 'python3.13', 'python3.12'
REQUIREMENTS = buyer.HERE / 'requirements.txt'
#: all addresses that Nova's imitation of Neutron gives are of this machine
NETWORK = '''
ip link set lo up
ip route add local 192.168.0.0/16 dev lo
exec "$@"
'''


def checkout():
    path = buyer.HOME / f'suite-{COMMIT[:8]}'
    if not path.exists():
        new = path.with_suffix('.new')
        shutil.rmtree(new, ignore_errors=True)
        for command in (['init', '--quiet', new], ['-C', new, 'fetch',
                        '--quiet', '--depth', '1', SUITE, COMMIT],
                        ['-C', new, 'checkout', '--quiet', 'FETCH_HEAD']):
            subprocess.run(['git', *command], check=True)
        new.rename(path)
    return path


def environment():
    """Return the Python that runs the suite, with what it imports."""
    wanted = REQUIREMENTS.read_bytes()
    path = buyer.HOME / 'venv'
    stamp = path / 'stamp'
    if not stamp.exists() or stamp.read_bytes() != wanted:
        name = os.environ.get('SUITE_PYTHON') or next((
            name for name in PYTHONS if not subprocess.run(
                ['sh', '-c', f'{name} -c ""'], capture_output=True
            ).returncode), None)
        if not name:
            sys.exit('The suite needs Python 3.12 or later: name one, make '
                     'buyer SUITE_PYTHON=<path>.')
        subprocess.run([name, '-m', 'venv', '--clear', path], check=True)
        subprocess.run([path / 'bin/python', '-m', 'pip', '--quiet', 'install',
                        '-r', REQUIREMENTS], check=True)
        stamp.write_bytes(wanted)
    return path / 'bin/python'


def main(suite=None):
    buyer.HOME.mkdir(parents=True, exist_ok=True)
    suite = pathlib.Path(suite).absolute() if suite else checkout()
    os.execvp('unshare', [
        'unshare', '--map-root-user', '--net', 'sh', '-ec', NETWORK, 'sh',
        sys.executable, '-W', 'ignore', '-m', 'tests.buyer.judge', str(suite),
        str(environment())])


if __name__ == '__main__':
    main(*sys.argv[1:])
