# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Real machines, from files of facts: tests/unit/data/machines/README.rst.

A file becomes a directory like /sys, which the drivers read through
nova_accel's own Kernel.
"""

import errno
import os
import pathlib
import struct

import fixtures
import yaml

from nova_accel import drivers
from nova_accel import inventory
from nova_accel.host import kernel as host_kernel
from nova_accel.host import nvme_admin
from nova_accel.host import pci
from nova_accel import model
from nova_accel.sim import captured
from nova_accel.store import claim_store

DATA = pathlib.Path(__file__).parents[1] / 'unit/data/machines'
FILES = sorted(path.stem for path in DATA.glob('*.yaml'))
#: those that find devices without further options
DRIVERS = ('dfl', 'gpu', 'nvme', 'qat', 'timecard', 'vgpu', 'xrt')
_UNITS = {'K': 1 << 10, 'M': 1 << 20, 'G': 1 << 30, 'T': 1 << 40}
_READS = frozenset(('read', 'read_bytes', 'read_some', 'listdir', 'exists',
                    'readlink', 'call'))


class RecordedKernel(host_kernel.Kernel):
    """Reads the directory of a machine.

    What a device has to answer is not in it: the answers are those of a
    device that is empty and can be cleaned. What would change the host fails
    with EROFS.
    """

    def __init__(self, root, facts):
        super().__init__(root, os.path.join(root, '../proc'))
        self._facts = facts

    def changes(self, over):
        while not over.wait(1):
            yield None

    def mounted_devices(self):
        return dict(self._facts.get('mounted', {}))

    def physical_address_bits(self):
        return self._facts.get('address_bits')

    def vfio_module(self, function):
        return None

    def has_iova_bitmap(self):
        return True

    def read_device_serial(self, function):
        return next(one.get('serial', '') for one in self._facts['functions']
                    if one['at'] == function)

    def read_acs(self, function):
        return 0x1d

    def read_firmware(self, function):
        return {}

    def read_signatures(self, function):
        return []

    def read_nvme(self, function):
        return nvme_admin.Controller('', '', 'crypto', True, True, (), 0, 0)

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        if (name.startswith('_') or name in RecordedKernel.__dict__
                or name in _READS or name not in host_kernel.Kernel.__dict__):
            return value
        number = errno.ENODATA if name in captured.QUESTIONS else errno.EROFS

        def refuse(*args, **_):
            raise OSError(number, os.strerror(number), name)
        return refuse


class Machine(fixtures.Fixture):
    """The machine of a file, or of functions as files have them."""

    def __init__(self, name: str = '', functions=()):
        super().__init__()
        self.facts = yaml.safe_load(
            (DATA / f'{name}.yaml').read_text()) if name else {
                'functions': functions}

    def _setUp(self):
        place = pathlib.Path(self.useFixture(fixtures.TempDir()).path)
        self.sys = place / 'sys'
        for empty in (pci.DEVICES, 'bus/pci/drivers'):
            (self.sys / empty).mkdir(parents=True)
        for number, one in enumerate(self.facts['functions']):
            self._function(one, one.get('group', 10000 + number))
        for one in self.facts['functions']:
            self._parts(one)
        for path, value in self.facts.get('attributes', {}).items():
            _write(self.sys / path, value)
        for module in self.facts.get('modules', ()):
            (self.sys / 'module' / module).mkdir(parents=True)
        self.kernel = RecordedKernel(str(self.sys), self.facts)

    def devices(self, names=DRIVERS) -> dict[str, model.Device]:
        """Return what a scan of nova-compute ends with, by address."""
        loaded = {}
        for name in names:
            loaded.update(drivers.load([name], self.kernel))
        found = inventory.Inventory(
            loaded, claim_store.ClaimStore(claim_store.MEMORY),
            reads_serials=False)
        try:
            found.scanner.scan()
            return dict(found.devices.items())
        finally:
            found.close()

    def write(self, address, **attributes):
        """Give a function other attributes."""
        for name, value in attributes.items():
            _write(self.sys / pci.DEVICES / address / name, value)

    def _place(self, one):
        above = one.get('below') or [f'pci{one["at"].rsplit(":", 1)[0]}']
        return self.sys.joinpath('devices', *above, one['at'])

    def _function(self, one, group):
        place = self._place(one)
        ids = one['ids'].split(':')
        for name, value in _attributes(one, ids).items():
            _write(place / name, value)
        (place / 'config').write_bytes(struct.pack(
            '<HH', *(int(part, 16) for part in ids)).ljust(64, b'\0'))
        _link(self.sys / pci.DEVICES / one['at'], place)
        if one.get('driver'):
            driver = self.sys / 'bus/pci/drivers' / one['driver']
            _link(driver / one['at'], place)
            _link(place / 'driver', driver)
        members = self.sys / f'kernel/iommu_groups/{group}'
        _link(members / 'devices' / one['at'], place)
        _link(place / 'iommu_group', members)

    def _parts(self, one):
        """VFs, network interfaces, and disks of a function."""
        place = self._place(one)
        for number, vf in enumerate(one.get('vfs', ())):
            its = (self.sys / pci.DEVICES / vf).resolve()
            _link(place / f'virtfn{number}', its)
            _link(its / 'physfn', place)
        for name in one.get('net', ()):
            _write(place / 'net' / name / 'flags', '0x1003')
            _link(self.sys / 'class/net' / name, place / 'net' / name)
        for name, about in one.get('nvme', {}).items():
            self._controller(place / 'nvme' / name, about)

    def _controller(self, place, about):
        for attribute, value in {
                'state': 'live', 'firmware_rev': '1', 'serial': place.name,
                'subsysnqn': f'nqn.{place.name}',
                **about.get('attributes', {})}.items():
            _write(place / attribute, value)
        _link(self.sys / 'class/nvme' / place.name, place)
        for disk, number in about.get('disks', {}).items():
            for attribute, value in {
                    'dev': number, 'nsid': 1, 'size': 2048,
                    'queue/logical_block_size': 512,
                    'stat': ' '.join(['0'] * 17)}.items():
                _write(place / disk / attribute, value)
            (place / disk / 'holders').mkdir()
            _link(self.sys / 'class/block' / disk, place / disk)


def _attributes(one, ids):
    found = {
        'vendor': f'0x{ids[0]}', 'device': f'0x{ids[1]}',
        'class': f'0x{one["class"].ljust(6, "0")}', 'revision': '0x00',
        'numa_node': one.get('numa', -1), 'enable': one.get('enable', 0),
        'modalias': 'pci:v0000{}d0000{}'.format(*(i.upper() for i in ids)),
        'resource': _resource(one.get('bars', {}))}
    if 'sub' in one:
        found['subsystem_vendor'], found['subsystem_device'] = (
            f'0x{part}' for part in one['sub'].split(':'))
    if reset := one.get('reset', 'flr'):
        found['reset_method'] = reset
    if 'link' in one:
        for end in ('current', 'max'):
            found[f'{end}_link_speed'] = f'{one["link"][0]} GT/s PCIe'
            found[f'{end}_link_width'] = one['link'][1]
    return {**found, **one.get('attributes', {})}


def _resource(bars):
    """The attribute resource, with regions of these sizes ('256G')."""
    rows = ['0x0000000000000000 0x0000000000000000 0x0000000000000000'] * 13
    at = 1 << 41
    for number, size in bars.items():
        length = int(size[:-1]) * _UNITS[size[-1]]
        at += -at % length
        rows[int(number)] = (f'0x{at:016x} 0x{at + length - 1:016x} '
                             f'0x000000000014220c')
        at += length
    return '\n'.join(rows)


def _write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{value}\n')


def _link(path, target):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))
