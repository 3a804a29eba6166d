# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a run has left in the cloud, in logs and in processes."""

import json
import os
import pathlib
import re
import subprocess
import time

from tests.lab import cloud
from tests.lab import databases
from tests.lab import processes
from tests.tempest import COMPUTES, computes, hosts

#: seconds in which devices are cleaned, and deleted servers gone
SETTLES = 120
#: most by which a service grows in a run: MiB, threads, files. Pools of Nova
#: and of nova_accel keep idle threads
GROWTH = {'MiB': 128, 'threads': 160, 'files': 32}
_SERVICE = re.compile('nova-|placement')
#: each NoValidHost of Nova passes scheduler/seam.py
_OURS = re.compile(r'^.* (?:ERROR|CRITICAL) .*nova_accel(?!/scheduler/seam).*$'
                   r'|^hostdevs: .*$', re.M)


def _status(*command):
    return subprocess.run(
        [str(word) for word in (databases.BIN / 'nova-manage',
                                *hosts.controller(), *command)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def claims(host):
    """Return the claims of a host that a server has, or that are not done."""
    return [claim for claim in hosts.claims(host)
            if claim['Server'] or claim['State'] != 'free']


def in_cloud() -> list[str]:
    """Return a sentence for each thing that is still there."""
    there = cloud.Cloud()
    found = [f'server {s.id} is {s.status}'
             for s in there.compute.servers(all_projects=True)]
    for host in hosts.names():
        found += [f'{host} has the claim {claim}' for claim in claims(host)]
        found += [f'{host} has the guest {name}'
                  for name in hosts.guests(host)]
    for host in () if hosts.is_machine() else COMPUTES:
        state = computes.devices(host).with_suffix('.yaml.state')
        if state.exists():
            guests = json.loads(state.read_text())['guests']
            found += [f'{host} has {device} in a guest' for device in guests]
    for provider in there.placement('/resource_providers')[
            'resource_providers']:
        uri = f'/resource_providers/{provider["uuid"]}'
        used = there.placement(f'{uri}/usages')['usages']
        reserved = {
            name: inventory['reserved'] for name, inventory in there.placement(
                f'{uri}/inventories')['inventories'].items()
            if name not in ('MEMORY_MB', 'DISK_GB', 'VCPU')}
        found += [f'{provider["name"]} has {number} {name} {what}'
                  for what, numbers in (('used', used),
                                        ('reserved', reserved))
                  for name, number in numbers.items() if number]
    if _status('placement', 'audit'):
        found.append('nova-manage placement audit finds orphans')
    # 4: nothing to heal
    if _status('placement', 'heal_allocations', '--dry-run') != 4:
        found.append('nova-manage placement heal_allocations has something to '
                     'do')
    return found


def settled() -> list[str]:
    """Return what is still there after at most SETTLES seconds."""
    end = time.monotonic() + SETTLES
    while (found := in_cloud()) and time.monotonic() < end:
        time.sleep(3)
    return found


def size(name) -> dict[str, int]:
    """Return what a service has; nothing while it does not run."""
    pid = processes.running(name)
    if not pid:
        return {}
    # its workers are children in its session
    members = []
    for path in pathlib.Path('/proc').glob('[0-9]*'):
        try:
            if os.getsid(int(path.name)) == os.getsid(pid):
                members.append((
                    int((path / 'statm').read_text().split()[1]),
                    len(os.listdir(path / 'task')),
                    len(os.listdir(path / 'fd'))))
        except OSError:
            continue
    pages, threads, files = map(sum, zip(*members, strict=True))
    return {'MiB': pages * os.sysconf('SC_PAGE_SIZE') >> 20,
            'threads': threads, 'files': files}


class Marks:
    """How services were before a run."""

    def __init__(self) -> None:
        self._sizes = {name: size(name) for name in processes.names()
                       if _SERVICE.match(name)}
        self._logs = {path: path.stat().st_size
                      for path in processes.LOG.glob('*.log')}

    def since(self) -> tuple[list[str], list[str]]:
        """Return (faults, what is worth a line)."""
        faults, lines = [], []
        for name, before in self._sizes.items():
            now = size(name)
            if not now:
                faults.append(f'{name} does not run')
                continue
            lines.append(f'{name}: ' + ', '.join(
                f'{before.get(what)} -> {now[what]} {what}' for what in now))
            faults += [
                f'{name} has {now[what]} {what}, and had {before[what]}'
                for what, most in GROWTH.items()
                if before and now[what] > before[what] + most]
        for path in sorted(processes.LOG.glob('*.log')):
            with open(path, errors='replace') as file:
                file.seek(self._logs.get(path, 0))
                errors = _OURS.findall(file.read())
            faults += [f'{path.name}: {line[:300]}'
                       for line in dict.fromkeys(errors[:5])]
        return faults, lines
