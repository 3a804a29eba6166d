# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The room in which the lab runs, seen from the host.

Mounts, processes and network of its own, around the chroot ``tree``. Its
first process is a child of unshare, which is recorded; when unshare ends, in
whatever way, the kernel ends every process of the room and unmounts.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

from tests import lab
from tests.lab import build

ENVIRONMENT = {
    'PATH': '/opt/openstack/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:'
            '/usr/bin:/sbin:/bin',
    'HOME': '/lab', 'LC_ALL': 'C.UTF-8', 'PYTHONDONTWRITEBYTECODE': '1',
    'PYTHONUNBUFFERED': '1', 'PYTHONWARNINGS': 'ignore',
    'OS_AUTH_URL': 'http://controller:5000/v3', 'OS_USERNAME': 'admin',
    'OS_PASSWORD': 'secret', 'OS_PROJECT_NAME': 'admin',
    'OS_USER_DOMAIN_ID': 'default', 'OS_PROJECT_DOMAIN_ID': 'default',
    'OS_IDENTITY_API_VERSION': '3', 'OS_REGION_NAME': 'RegionOne',
    'OS_COMPUTE_API_VERSION': '2.96', 'OS_PLACEMENT_API_VERSION': '1.39'}
#: $0 the chroot, $1 home of the room, $2 the sources, $3 the image of the
#: lab's machine; then a command
ENTER = '''
# the root is a mount: "ip netns" changes its propagation
mount --bind "$0" "$0"
mkdir -p "$0/lab" "$0/src" "$0/image" "$0/seed"
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
mount -t tmpfs tmpfs "$0/tmp"
mount --bind "$1/run" "$0/lab"
mount --bind "$3" "$0/image"
mount --bind "$1/seed" "$0/seed"
mount --bind "$2" "$0/src"
mount -o remount,bind,ro "$0/src"
tree=$0
shift 3
cd "$tree/src"
exec chroot "$tree" /bin/sh -ec 'cd /src; exec "$@"' sh "$@"
'''


def _stat(pid):
    """(state, parent, start time) of a process, or None."""
    try:
        text = pathlib.Path(f'/proc/{pid}/stat').read_text()
    except OSError:
        return None
    fields = text.rsplit(')', 1)[1].split()
    return fields[0], int(fields[1]), fields[19]


def keeper(home) -> int | None:
    """The process that keeps the room, if it lives."""
    try:
        pid, began = (home / 'run/keeper').read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    found = _stat(pid)
    # the start time tells it from a later process with its number
    if found and found[0] != 'Z' and found[2] == began:
        return int(pid)
    return None


def first(home) -> int | None:
    """The first process of the room, by its number on the host."""
    parent = keeper(home)
    for entry in os.listdir('/proc') if parent else ():
        if entry.isdigit() and (_stat(entry) or (0, 0))[1] == parent:
            return int(entry)
    return None


def begin(home, first='tests.lab.first') -> None:
    """Start everything and show how it goes, until it is up.

    :param first: the module of the first process.
    :raises Unfit: it is up already.
    :raises Failed: it does not come up.
    """
    run = home / 'run'
    with build.alone(home):
        if keeper(home):
            raise lab.Unfit(
                f'{home} is up already (process {keeper(home)}): make lab-down '
                f'ends the lab and make lab-test uses it; make tempest-down '
                f'ends the cloud of Tempest.')
        shutil.rmtree(run, ignore_errors=True)
        (run / 'log').mkdir(parents=True)
        (home / 'seed').mkdir(exist_ok=True)
        image = lab.home() / 'image'
        image.mkdir(parents=True, exist_ok=True)
        with open(run / 'log/first.log', 'wb') as log:
            process = subprocess.Popen(
                ['unshare', '--mount', '--uts', '--net', '--pid', '--fork',
                 '--kill-child', '--propagation', 'private', 'sh', '-ec',
                 ENTER, home / 'tree', home, lab.SOURCE, image,
                 '/opt/openstack/bin/python', '-m', first],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd='/',
                env=ENVIRONMENT, start_new_session=True)
        (run / 'keeper').write_text(f'{process.pid} {_stat(process.pid)[2]}')
    try:
        with open(run / 'log/first.log') as log:
            while True:
                sys.stdout.write(log.read())
                sys.stdout.flush()
                if (run / 'ready').exists():
                    return
                if process.poll() is not None:
                    sys.stdout.write(log.read())
                    raise lab.Failed(f'{home} did not come up: its logs are '
                                     f'in {run}/log.')
                time.sleep(0.2)
    except BaseException:
        end(home)
        raise


def end(home) -> bool:
    """End the room's processes; the kernel unmounts. False: it was not up."""
    pid = keeper(home)
    if not pid:
        return False
    inner = first(home)
    os.kill(pid, signal.SIGKILL)
    while keeper(home) or (inner and _stat(inner)
                           and _stat(inner)[0] != 'Z'):
        time.sleep(0.05)
    return True


def enter(home, command, **environment) -> int:
    """Run a command in the room, with this terminal; its exit status.

    :raises Failed: when the lab is not up.
    """
    pid = first(home)
    if not pid:
        raise lab.Failed(f'{home} is not up: make lab-up starts the lab, make '
                         f'tempest-up the cloud of Tempest.')
    env = dict(ENVIRONMENT, TERM=os.environ.get('TERM', 'dumb'),
               **environment)
    return subprocess.run(
        ['nsenter', '--target', str(pid), '--mount', '--uts', '--net',
         '--pid', '--root', '--wdns=/src',
         # nsenter has it as a child, which ends with it
         'setpriv', '--pdeathsig', 'KILL', *command], env=env).returncode
