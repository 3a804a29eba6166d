# Licensed under the Apache License, Version 2.0. See LICENSE.
"""NVMe disks with their uses by the host and their data."""

import dataclasses
import errno
import re
import time
from typing import ClassVar

from nova_accel.sim import card
from nova_accel.sim import operations
from nova_accel.sim import reader
from nova_accel.sim import tree as sysfs

#: seconds between two polls of a blocking operation
_TICK = 0.02
_USES = re.compile('mounted at /.*|used as swap|dm-[0-9]+|md[0-9]+|btrfs|zfs')


_use = reader.checked(
    lambda v: isinstance(v, str) and _USES.fullmatch(v),
    '"mounted at <directory>", "used as swap", "btrfs", "zfs", or the name of '
    'a device on the disk, dm-<n> or md<n>')


@dataclasses.dataclass(frozen=True)
class NvmeCard(card.Card):
    """A controller with namespaces of one partition each."""

    ids: tuple[str, str, str, str] = ('144d', 'a824', '144d', '0000')
    class_code: str = '0x010802'
    driver: str | None = 'nvme'
    namespaces: int = 1
    #: whether other controllers may have paths to the namespaces, which then
    #: belong to the subsystem
    multipath: bool = False
    #: the host's use of the last partition
    use: str | None = None
    #: the data on the disk
    data: str = ''

    FAULTS: ClassVar[dict] = {
        **card.Card.FAULTS,
        #: result of Format NVM
        'format': reader.one_of('refused', 'unsupported', 'unattached'),
        'hang': reader.one_of('read', 'format'),
    }

    @classmethod
    def describe(cls, item):
        vendor = item.take('vendor', reader.identifier, '144d')
        total = item.take('total_vfs', reader.natural, 0)
        return dict(
            cls.describe_any(item),
            ids=(vendor, item.take('device', reader.identifier, 'a824'),
                 vendor, '0000'),
            total_vfs=total, vfs=item.take('vfs', reader.up_to(total), 0),
            namespaces=item.take('namespaces', reader.natural, 1),
            multipath=item.take('multipath', reader.boolean, False),
            use=item.take('use', _use, None),
            data=item.take('data', reader.text, ''))

    def fresh(self, state):
        return {**super().fresh(state), 'data': self.data, 'use': self.use}

    def keeps(self):
        return (*super().keeps(), 'data')

    def drivers(self):
        return {*super().drivers(), 'nvme'}

    def bound(self, state, mine, driver):
        super().bound(state, mine, driver)
        mine['use'] = None

    # Sysfs

    def add_physical(self, tree, mine, function):
        if mine['driver'] != 'nvme':
            return
        # numbers of controllers change, those of namespaces do not
        number = mine['number']
        controller: sysfs.Directory = {
            'state': 'live', 'model': 'SIMULATED', 'dev': f'240:{number}'}
        function['nvme'] = {f'nvme{number}': controller}
        top = f'{sysfs.place(self.address)}/nvme/nvme{number}'
        for n in range(1, self.namespaces + 1):
            disk = f'nvme{number}n{n}'
            node: sysfs.Directory = {
                'dev': f'259:{number * 100 + 2 * n}', 'holders': {},
                f'{disk}p1': {'partition': '1', 'holders': {},
                              'dev': self._number(mine, n)}}
            if self.multipath:
                controller[f'nvme{number}c0n{n}'] = {'hidden': '1',
                                                     'holders': {}}
                _in_class(tree, f'nvme{number}c0n{n}', top)
                subsystem = f'nvme-subsys{number}'
                tree['devices'].setdefault('virtual', {}).setdefault(
                    'nvme-subsystem', {}).setdefault(subsystem, {})[
                        disk] = node
                at = f'devices/virtual/nvme-subsystem/{subsystem}'
            else:
                controller[disk] = node
                at = top
            _in_class(tree, disk, at)
            _in_class(tree, f'{disk}p1', f'{at}/{disk}')
        if mine['use'] and self.namespaces:
            self._add_use(tree, mine['use'], node[f'{disk}p1'], disk)

    @staticmethod
    def _add_use(tree, use, partition, disk):
        if use == 'btrfs':
            tree.setdefault('fs', {}).setdefault('btrfs', {})[
                '11111111-2222-4333-8444-555555555555'] = {'devices': {
                    f'{disk}p1': sysfs.Link(f'class/block/{disk}p1')}}
        elif use != 'zfs' and ' ' not in use:
            tree['devices'].setdefault('virtual', {}).setdefault(
                'block', {})[use] = {'dev': '253:0', 'holders': {}}
            _in_class(tree, use, 'devices/virtual/block')
            partition['holders'][use] = sysfs.Link(
                f'devices/virtual/block/{use}')

    @staticmethod
    def _number(mine, n):
        return f'259:{mine["number"] * 100 + 2 * n + 1}'

    def mounted(self, mine):
        """Return its entries of Kernel.mounted_devices()."""
        if mine['driver'] == 'nvme' and ' ' in (mine['use'] or ''):
            return {self._number(mine, self.namespaces): mine['use']}
        return {}


def _in_class(tree, name, place):
    tree['class'].setdefault('block', {})[name] = sysfs.Link(
        f'{place}/{name}')


class NvmeOperations(operations.Operations):
    """Operations of a simulated kernel on NVMe disks."""

    def mounted_devices(self):
        host, state = self._look()
        return {number: use for address, found in host.cards.items()
                if isinstance(found, NvmeCard)
                for number, use in found.mounted(
                    state['cards'][address]).items()}

    def check_disks(self, function):
        host, state = self._look()
        found = host.cards.get(function)
        if isinstance(found, NvmeCard):
            mine = state['cards'][function]
            if mine['driver'] == 'nvme' and mine['use']:
                raise sysfs.error(errno.EBUSY, function)

    def format_nvme(self, function):
        while True:
            with self._update() as (host, state):
                found, _ = self._owner(host, state, function)
                mine = state['cards'][function]
                faults = found.faulty(mine)
                if mine['driver'] != 'nvme':
                    raise sysfs.error(errno.ENODEV, function)
                if mine['use'] or faults.get('format') == 'unattached':
                    raise sysfs.error(errno.EBUSY, function)
                if faults.get('format') == 'unsupported':
                    raise sysfs.error(errno.EOPNOTSUPP, function)
                if faults.get('format') == 'refused':
                    raise sysfs.error(errno.EIO, function)
                if faults.get('hang') != 'format':
                    mine['data'] = ''
                    return
            time.sleep(_TICK)

    # What tests and demonstrations do to the host

    def use_disk(self, address: str, use: str | None) -> None:
        """Mount or otherwise use the disk; None ends the use.

        :param use: as in the description.
        """
        with self._update() as (_, state):
            state['cards'][address]['use'] = use and _use(use)

    def write_disk(self, address: str, data: str) -> None:
        """Write data to the disk, as a guest does."""
        with self._update() as (_, state):
            state['cards'][address]['data'] = data

    def data_of_disk(self, address: str) -> str:
        """Return what a server with the disk can read from it."""
        return self._look()[1]['cards'][address]['data']
