# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a round costs in which nova-compute reads the health of its devices.

Devices of the driver pci, each below a root port of its own, as files below a
directory; the kernel is that of a machine, and reads these files. Rounds with
[accel] health = off and = observe: the difference is what health costs, of
which "reading" is the part without threads. A glance, of which there are two
between two rounds, reads the bus alone; "a minute" is all of both in a minute
with [accel] health = observe. A scan is a round in which this driver, which is
POLLED, examines all devices as well: one each [accel] discovery_interval, with
any health. Run with
``python -m tests.bench.health [devices [rounds [directory]]]``; the directory
should be in memory, as /dev/shm.

Counted: files and directories that are opened. Times are of the processor;
"judging" is the part that draws conclusions from what was read.

Not measured: how long a device takes to answer. Three of the attributes are
read from its configuration space.
"""

import itertools
import os
import statistics
import sys
import tempfile
import time
from unittest import mock

import yaml

from nova_accel import conf
from nova_accel.drivers import contract
from nova_accel.drivers import pci_rule
from nova_accel.host import kernel as host_kernel
from nova_accel import inventory
from nova_accel.inventory import looks as looking
from nova_accel import sim
from nova_accel.sim import tree as sysfs
from nova_accel.store import claim_store

CONF = conf.CONF
MODES = ('off', 'observe')


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
        kernel = host_kernel.Kernel(host(root, devices))
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
        minute, intervals = 0., itertools.count(60)

        def scan():
            CONF.set_override('discovery_interval', next(intervals), 'accel')
            looks.run()
        for mode in MODES:
            CONF.set_override('health', [mode], 'accel')
            for name, run in {'round': looks.run, 'glance': looks.glance,
                              'scan': scan}.items():
                if mode == 'off' and name != 'round':
                    continue
                # the first reads more
                run()
                with mock.patch.object(os, 'open', wraps=os.open) as opened:
                    run()
                times = []
                judging.clear()
                for _ in range(rounds):
                    began = time.process_time()
                    run()
                    times.append(time.process_time() - began)
                of_round, of_judging = (
                    statistics.median(taken or [0]) * 1000
                    for taken in (times, judging))
                print(f'{mode:8} {name:6} {of_round:7.1f}  judging '
                      f'{of_judging:6.1f}  {opened.call_count} opened')
                minute += of_round * {
                    ('observe', 'round'): 1, ('observe', 'glance'): 2}.get(
                        (mode, name), 0) / 3 / looking._PART
        print(f'a minute {minute:.0f}')


if __name__ == '__main__':
    main()
