# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a round costs in which nova-compute reads the health of its devices.

Devices of the driver pci, each below a root port of its own, as files below a
directory; the kernel is that of a machine, and reads these files. Rounds with
[accel] health = off and = observe: the difference is what health costs, of
which "reading" is the part without threads. A glance, of which there are five
between two rounds, reads the bus alone. Run with
``python -m tests.bench.health [devices [rounds [directory]]]``; the directory
should be in memory, as /dev/shm.

Counted: calls of read_some(), of which each opens one directory, and the
attributes that they read. Times are of the processor; "judging" is the part
that draws conclusions from what was read.

Not measured: how long a device takes to answer. Three of the attributes are
read from its configuration space.
"""

import os
import statistics
import sys
import tempfile
import time

import yaml

from nova_accel import conf
from nova_accel.drivers import contract
from nova_accel.drivers import pci_rule
from nova_accel.host import kernel as host_kernel
from nova_accel import inventory
from nova_accel import sim
from nova_accel.sim import tree as sysfs
from nova_accel.store import claim_store

CONF = conf.CONF
MODES = ('off', 'observe')


class Kernel(host_kernel.Kernel):

    def __init__(self, root):
        super().__init__(root)
        self.counts = {'calls': 0, 'attributes': 0}

    def read_some(self, path, names):
        found = super().read_some(path, names)
        self.counts['calls'] += 1
        self.counts['attributes'] += len(found)
        return found


def write(root, tree, place=''):
    """Write a simulated /sys as files."""
    for name, node in tree.items():
        path = os.path.join(root, place, name)
        if isinstance(node, sysfs.Link):
            os.symlink(os.path.relpath(
                os.path.join(root, node), os.path.dirname(path)), path)
        elif isinstance(node, dict):
            os.mkdir(path)
            write(root, node, os.path.join(place, name))
        elif not isinstance(node, sysfs.Errno):
            with open(path, 'wb') as file:
                file.write(node if isinstance(node, bytes)
                           else f'{node}\n'.encode())


def host(directory, devices):
    """Return the directory of sysfs of a host with so many devices."""
    path = os.path.join(directory, 'host.yaml')
    with open(path, 'w') as file:
        yaml.safe_dump({'others': [
            {'address': f'{n >> 7:04x}:{n & 127:02x}:00.0',
             'bridges': [f'pci{n >> 7:04x}:00', f'{n >> 7:04x}:ff:'
                         f'{(n & 127) >> 3:02x}.{n & 7}']}
            for n in range(devices)]}, file)
    root = os.path.join(directory, 'sys')
    os.mkdir(root)
    write(root, sim.SimulatedKernel(path)._tree())
    return root


def main():
    numbers = [*map(int, sys.argv[1:3])]
    devices, rounds = [*numbers, *(512, 9)[len(numbers):]]
    CONF([], project='nova-accel-bench')
    CONF.set_override('pci_devices', ['vendor=8086 type=CARD'], 'accel')
    with tempfile.TemporaryDirectory(dir=(sys.argv[3:] or [None])[0]) as root:
        kernel = Kernel(host(root, devices))
        found = inventory.Inventory(
            {'pci': pci_rule.PciRuleDriver(kernel)},
            claim_store.ClaimStore(claim_store.MEMORY), reads_serials=False)
        found.scanner.scan()
        assert len(found.devices) == devices
        looks, judge = found.looks, found.health.round
        judging = []

        def judged(*args, **kwargs):
            began = time.process_time()
            found = judge(*args, **kwargs)
            judging.append(time.process_time() - began)
            return found
        found.health.round = judged
        print(f'{devices} devices, median of {rounds} rounds, ms')
        driver, reading = found._drivers['pci'], []
        for _ in range(rounds):
            began = time.process_time()
            for device in found.devices.values():
                contract.readings('pci', driver.health(device))
            reading.append(time.process_time() - began)
        print(f'reading {statistics.median(reading) * 1000:.1f} in one thread')
        for mode in MODES:
            CONF.set_override('health', [mode], 'accel')
            for name, run in {'round': looks.run, 'glance': looks.glance
                              }.items():
                if (mode, name) == ('off', 'glance'):
                    continue
                times = []
                judging.clear()
                for _ in range(rounds + 1):
                    kernel.counts = dict.fromkeys(kernel.counts, 0)
                    began = time.process_time()
                    run()
                    times.append(time.process_time() - began)
                of_round, of_judging = (
                    statistics.median(taken[1:] or [0]) * 1000
                    for taken in (times, judging))
                print(f'{mode:8} {name:6} {of_round:7.1f}  judging '
                      f'{of_judging:6.1f}  {kernel.counts}')


if __name__ == '__main__':
    main()
