# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What a driver reads to find its devices among 1,400 functions.

Two hosts, as files below a directory; the kernel is that of a machine, and
reads these files. On the first, "foreign", the driver has nothing: 1,024
functions are VFs of network cards, and the others are network cards, bridges
and more. On the second, "own", all functions are of the driver's cards and
their VFs, and the driver examines each. Less than 100 ms of the processor are
the aim. Run with ``python -m tests.bench.discover [functions [rounds
[directory]]]``; the directory should be in memory, as /dev/shm.

Counted: attributes, listings and links that are read. Times are of the
processor, the least of the rounds.

Not measured: how long a device takes to answer, such as a disk.
"""

import collections
import os
import sys
import tempfile
import time

import yaml

from nova_accel import conf
from nova_accel import drivers
from nova_accel.host import kernel as host_kernel
from nova_accel import sim
from tests.bench import health

CONF = conf.CONF
DRIVERS = ('dfl', 'gpu', 'nvme', 'pci', 'qat', 'timecard', 'vgpu', 'xrt')
#: driver -> kind of its cards on a simulated host, functions of a card, and
#: what else describes it
OWN = {
    'pci': ('others', 64, {'vendor': '1da3', 'total_vfs': 63, 'vfs': 63}),
    'qat': ('qats', 17, {'vfs': 16}),
    'vgpu': ('vgpus', 17, {
        'framework': 'sriov', 'vendor': '8086', 'device': '56c0',
        'driver': 'xe', 'types': [], 'total_vfs': 16, 'vfs': 16}),
}


class Kernel(host_kernel.Kernel):

    def __init__(self, root):
        super().__init__(root)
        self.counts = collections.Counter()


def _counted(name, what):
    def counted(self, path, *args):
        self.counts[what] += 1
        return getattr(host_kernel.Kernel, name)(self, path, *args)
    return counted


for _name, _what in (('read', 'attributes'), ('read_bytes', 'attributes'),
                     ('read_some', 'attributes'), ('listdir', 'listings'),
                     ('readlink', 'links'), ('exists', 'links')):
    setattr(Kernel, _name, _counted(_name, _what))


def address(number):
    return f'{1 + number // 128:04x}:{number % 128 + 1:02x}:00.0'


def foreign(functions):
    vfs = functions * 3 // 4 // 65 * 65
    found = [('15b3', '101d', '0x020000', {'total_vfs': 64, 'vfs': 64})] * (
        vfs // 65) + [
        ('8086', '1592', '0x020000', {}), ('1022', '14ab', '0x060400', {}),
        ('8086', '3450', '0x088000', {})] * ((functions - vfs) // 3)
    return {'others': [
        {'address': address(n), 'vendor': vendor, 'device': device,
         'class': class_code, **more}
        for n, (vendor, device, class_code, more) in enumerate(found)]}


def own(kind, size, more, functions):
    return {kind: [{'address': address(n), **more}
                   for n in range(max(1, functions // size))]}


def measure(names, description, rounds, directory):
    """Print what each driver reads of a host, and for how long."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        path = os.path.join(place, 'host.yaml')
        with open(path, 'w') as file:
            yaml.safe_dump(description, file)
        root = os.path.join(place, 'sys')
        os.mkdir(root)
        health.write(root, sim.SimulatedKernel(path, writes=False)._tree())
        functions = len(os.listdir(os.path.join(root, 'bus/pci/devices')))
        for name, driver in drivers.load(names, Kernel(root)).items():
            times = []
            for _ in range(rounds):
                driver.kernel.counts.clear()
                began = time.process_time()
                found = driver.discover()
                times.append(time.process_time() - began)
            handles = sum(len([*d.all_handles]) for d in found.values())
            print(f'{name:9}{min(times) * 1000:8.1f} ms  {functions} '
                  f'functions, {handles} handles  '
                  f'{dict(driver.kernel.counts)}')


def main():
    numbers = [*map(int, sys.argv[1:3])]
    functions, rounds = [*numbers, *(1400, 5)[len(numbers):]]
    directory = (sys.argv[3:] or [None])[0]
    CONF([], project='nova-accel-bench')
    CONF.set_override('pci_devices', ['vendor=1da3 type=CARD'], 'accel')
    CONF.set_override('include_devices', ['vendor=*'], 'accel')
    print('foreign')
    measure(DRIVERS, foreign(functions), rounds, directory)
    print('own')
    for driver, (kind, size, more) in OWN.items():
        measure([driver], own(kind, size, more, functions), rounds, directory)


if __name__ == '__main__':
    main()
