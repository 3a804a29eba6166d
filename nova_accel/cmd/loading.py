# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Check that the nova-compute of this host can import its driver."""

import os
import shlex
import shutil
import subprocess
import sys

#: the imports of main() in nova/cmd/compute.py until it loads the driver: the
#: first one chooses between threads and eventlet, os-vif loads its plug-ins
#: (nova_accel.virt.door), and nova.virt.driver.load_compute_driver() imports
#: the driver
_PROGRAM = """
import sys
from nova.cmd import compute
import os_vif
from oslo_utils import importutils
os_vif.initialize()
importutils.import_class('nova.virt.' + sys.argv[1])
"""


def nova_compute() -> str:
    """Return the path of nova-compute, or '' if it is not found. The directory
    of the running command is searched first, then PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), 'nova-compute')
    return (beside if os.path.exists(beside)
            else shutil.which('nova-compute') or '')


def python_of(program: str) -> str:
    """Return the path of the Python interpreter of an installed program, from
    its first line. If that line names none, return sys.executable."""
    try:
        with open(program, encoding='utf-8') as file:
            first = file.readline(1024)
    except (OSError, ValueError):
        return sys.executable
    words = shlex.split(first[2:]) if first.startswith('#!') else []
    if words and os.path.basename(words[0]).startswith('python'):
        return words[0]
    return sys.executable


def failure(driver: str, seconds: float) -> tuple[str, str] | None:
    """Import the driver in a process, as nova-compute does.

    :param driver: a value of [DEFAULT] compute_driver.
    :param seconds: time limit.
    :returns: the finding and the remedy, or None if the import succeeded.
    """
    program = nova_compute()
    python = python_of(program)
    name = program or f'nova-compute of {python}'
    try:
        # the child must not import modules of the working directory
        done = subprocess.run(
            [python, '-W', 'ignore', '-c', _PROGRAM, driver], cwd='/',
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors='replace', timeout=seconds)
    except subprocess.TimeoutExpired:
        return (f'{name} did not import the driver within {seconds} s',
                'run check again when this host has less to do')
    except OSError as error:
        return (f'{python}, which runs {name}, cannot be started '
                f'({error.strerror})', 'install Nova again')
    if done.returncode == 0:
        return None
    why = (done.stderr.strip().splitlines() or [f'status {done.returncode}'])
    kind, _, text = why[-1].partition(': ')
    if kind == 'ImportError' and text.startswith('nova_accel '):
        # the driver exits with a sentence of nova_accel.versions
        found, _, remedy = text.rstrip('.').rpartition(': ')
        return found, remedy
    return (f'{name} cannot import the driver ({why[-1][:160]})',
            f'install nova_accel with pip of {python}, and see that pip check '
            f'finds nothing')
