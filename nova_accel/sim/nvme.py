# Licensed under the Apache License, Version 2.0. See LICENSE.
"""NVMe disks: their use by the host, their namespaces and their data.

The data of a disk are a text in the simulation. Format NVM erases it only if
the namespaces cover the whole capacity, and Sanitize always.

Sources: the NVM Express Base Specification 2.0 for the behavior of a
controller (Format NVM; Sanitize, during which and in whose failure mode other
commands are refused; Namespace Management; secondary controllers, which lose
their flexible resources when they go offline, and which a reset of the primary
controller takes offline); drivers/nvme/host of Linux for sysfs and for the
states of a controller (nvme_ctrl_state). Errors are those into which
host.nvme_admin converts a status. Trials with QEMU's controller are in
tests/lab.
"""

import dataclasses
import errno
import re
import time
from typing import ClassVar

from nova_accel.host import nvme_admin
from nova_accel.sim import card
from nova_accel.sim import reader
from nova_accel.sim import tree as sysfs

#: blocks, and bytes of a block, of an initial namespace
_BLOCKS, _BLOCK_SIZE = 1 << 30, 512
#: supported formats of a block: (bytes of data, bytes of metadata)
_FORMATS = ((512, 0), (4096, 0), (512, 8))
#: queues and interrupts of an online VF
_RESOURCES = 3, 2
_USES = re.compile('mounted at /.*|used as swap|dm-[0-9]+|md[0-9]+|btrfs|zfs')


_use = reader.checked(
    lambda v: isinstance(v, str) and _USES.fullmatch(v),
    '"mounted at <directory>", "used as swap", "btrfs", "zfs", or the name of '
    'a device on the disk, dm-<n> or md<n>')


def _kinds(value):
    if not isinstance(value, list) or not all(
            isinstance(kind, str) and kind for kind in value):
        raise ValueError('it has to be a list of types as of wipefs')
    return tuple(value)


def _methods(value):
    if not isinstance(value, list) or not set(value) <= {
            'crypto', 'block', 'overwrite'}:
        raise ValueError('it has to be a list of crypto, block, overwrite')
    return tuple(value)


#: health log of a healthy disk (nvme_admin.HealthLog)
_WELL = {'warning': 0, 'spare': 100, 'least_spare': 10, 'used': 3}


@dataclasses.dataclass(frozen=True)
class NvmeCard(card.Card):
    """A controller with namespaces of one partition each."""

    ids: tuple[str, str, str, str] = ('144d', 'a824', '144d', '0000')
    class_code: str = '0x010802'
    driver: str | None = 'nvme'
    namespaces: int = 1
    #: whether other controllers may have paths to the namespaces, which belong
    #: to the subsystem then
    multipath: bool = False
    #: the host's use of the last partition
    use: str | None = None
    #: the data on the disk
    data: str = ''
    #: signatures that wipefs finds on the first namespace
    signatures: tuple[str, ...] = ()
    #: supported methods of Sanitize, and the seconds that one takes
    sanitize: tuple[str, ...] = ()
    sanitize_seconds: float = 0
    #: whether it has Namespace Management
    namespace_management: bool = True
    #: qualified name of its NVM subsystem, None for one of its own
    subsystem: str | None = None
    #: state of the secondary controllers of new VFs: online, offline, or none
    #: (without Virtualization Management)
    secondary: str = 'online'
    #: private namespaces of each VF
    vf_namespaces: int = 1
    #: whether Format NVM of one namespace erases all namespaces
    formats_all: bool = False

    KEYS: ClassVar[dict] = {
        'namespaces': reader.natural, 'multipath': reader.boolean,
        'use': _use, 'data': reader.text, 'signatures': _kinds,
        'sanitize': _methods, 'sanitize_seconds': reader.seconds,
        'namespace_management': reader.boolean, 'subsystem': reader.text,
        'secondary': reader.one_of('online', 'offline', 'none'),
        'vf_namespaces': reader.natural, 'formats_all': reader.boolean}
    FAULTS: ClassVar[dict] = {
        **card.Card.FAULTS,
        #: result of Format NVM
        'format': reader.one_of('refused', 'unsupported'),
        'hang': reader.one_of('read', 'format', 'sanitize'),
        'controller': reader.one_of('dead', 'resetting'),
        #: changed fields of the health log: field -> number
        'health': lambda value: {name: int(value[name]) for name in value
                                 if name in _WELL},
        #: the controller refuses Identify
        'identify': reader.one_of('refused'),
        #: Namespace Management is refused, or has no effect
        'namespaces': reader.one_of('refused', 'ignored'),
        'reset': reader.one_of('refused'),
        #: Sanitize is refused; fails; or fails permanently
        'sanitize': reader.one_of('refused', 'fails', 'locked'),
        #: errno of reading signatures; ENOENT: wipefs is missing
        'signatures': reader.one_of('ENOENT', 'EIO', 'ETIMEDOUT'),
        #: Virtualization Management is refused; refused only to go online; or
        #: going online has no effect
        'virtualization': reader.one_of('refused', 'offline', 'ignored'),
    }

    def fresh(self, state):
        serial = self.address.replace(':', '').replace('.', '')
        return {**super().fresh(state), 'data': self.data, 'use': self.use,
                'signatures': list(self.signatures), 'writes': 0,
                'serial': f'S{serial}', 'firmware': 'SIM1',
                # blocks, bytes of a block, bytes of metadata, attached
                'namespaces': [[_BLOCKS, _BLOCK_SIZE, 0, True]
                               for _ in range(self.namespaces)],
                'sanitize': {'state': 'never', 'method': None, 'until': 0},
                'vf_data': {},
                # VF -> numbers of the VFs that share its namespaces, 0 for
                # the PF
                'shared': {}}

    def keeps(self):
        return (*super().keeps(), 'data', 'signatures', 'serial', 'firmware',
                'namespaces', 'sanitize', 'vf_data', 'shared')

    def settle(self, mine):
        operation = mine['sanitize']
        faults = self.faulty(mine)
        if (operation['state'] != 'running' or faults.get('hang') == 'sanitize'
                or time.time() < operation['until']):
            return
        if faults.get('sanitize') in ('fails', 'locked'):
            operation['state'] = 'failed'
        else:
            operation['state'] = 'done'
            _erase(mine)

    def make_vfs(self, state, mine, count):
        super().make_vfs(state, mine, count)
        for vf in mine['vfs']:
            _set_online(vf, self.secondary == 'online')

    # The controller

    def capacity(self) -> int:
        """Return the size of the disk in bytes."""
        return max(1, self.namespaces) * _BLOCKS * _BLOCK_SIZE

    @staticmethod
    def allocated(mine) -> int:
        """Return the bytes that all namespaces occupy."""
        return sum(n[0] * n[1] for n in mine['namespaces'])

    def report(self, mine) -> nvme_admin.Controller:
        attached = [n for n in mine['namespaces'] if n[3]]
        managed = self.namespace_management
        return nvme_admin.Controller(
            mine['serial'], mine['firmware'],
            next((m for m in ('crypto', 'block', 'overwrite')
                  if m in self.sanitize), None),
            self.faulty(mine).get('format') != 'unsupported', managed,
            tuple(nvme_admin.Namespace(*n[:3]) for n in attached),
            len(mine['namespaces']) - len(attached) if managed else 0,
            self.capacity() - self.allocated(mine) if managed else 0,
            self.formats_all, tuple(
                name for method, name in (('crypto', 'CES'), ('block', 'BES'))
                if method in self.sanitize))

    def secondaries(self, mine) -> list[nvme_admin.Secondary]:
        # one for each possible VF
        states = [(vf['online'], *vf['resources']) for vf in mine['vfs']]
        states += [(False, 0, 0)] * (self.total_vfs - len(states))
        found = []
        for vf, (online, *resources) in enumerate(states, 1):
            spaces = others = None
            if self.namespace_management:
                # namespaces of its own, and shared ones
                theirs = [int(n) for n, with_ in mine['shared'].items()
                          if vf in with_]
                spaces = tuple(100 * owner + number
                               for owner in sorted((vf, *theirs))
                               for number in range(self.vf_namespaces))
                others = tuple(sorted({
                    *theirs, *mine['shared'].get(str(vf), ()),
                    *(other for n in theirs
                      for other in mine['shared'][str(n)])} - {vf}))
            found.append(nvme_admin.Secondary(vf, vf, online, spaces,
                                              others or (), *resources))
        return found

    def drivers(self):
        return {*super().drivers(), 'nvme'}

    def bound(self, state, mine, driver):
        super().bound(state, mine, driver)
        mine['use'] = None

    # Sysfs

    def add_physical(self, tree, mine, function):
        if mine['driver'] != 'nvme':
            return
        # the numbers of controllers change, the numbers of namespaces do not
        number = mine['number']
        controller: sysfs.Directory = {
            'state': self.faulty(mine).get('controller', 'live'),
            'model': 'SIMULATED', 'dev': f'240:{number}',
            # padded with spaces, as in the data structure
            'serial': mine['serial'].ljust(20),
            'firmware_rev': mine['firmware'].ljust(8),
            'subsysnqn': self.subsystem or (
                f'nqn.2014-08.org.nvmexpress:{mine["serial"]}')}
        function['nvme'] = {f'nvme{number}': controller}
        top = f'{self.place()}/nvme/nvme{number}'
        tree['class'].setdefault('nvme', {})[f'nvme{number}'] = (
            sysfs.Link(top))
        present = [(n, *fields) for n, fields in enumerate(
            mine['namespaces'], 1) if fields[3]]
        for n, blocks, size, metadata, _ in present:
            disk = f'nvme{number}n{n}'
            node: sysfs.Directory = {
                'nsid': str(n), 'size': str(blocks * size // 512),
                'metadata_bytes': str(metadata),
                'queue': {'logical_block_size': str(size)},
                'dev': f'259:{number * 100 + 2 * n}', 'holders': {},
                # the fifth number counts writes
                'stat': f'    0 0 0 0 {mine["writes"]} 0 0 0 0 0 0',
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
        if mine['use'] and present:
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
        """Return the card's items of Kernel.mounted_devices()."""
        if mine['driver'] == 'nvme' and ' ' in (mine['use'] or ''):
            return {self._number(mine, len(mine['namespaces'])): mine['use']}
        return {}


def _set_online(vf, online, resources=_RESOURCES):
    """Set a secondary controller online, with resources, or offline, without
    any."""
    vf['online'], vf['resources'] = online, resources if online else (0, 0)


def _erase(mine):
    mine.update(data='', signatures=[])


def _in_class(tree, name, place):
    tree['class'].setdefault('block', {})[name] = sysfs.Link(
        f'{place}/{name}')


class NvmeOperations(card.Operations):
    """Operations of a simulated kernel on NVMe disks."""

    def mounted_devices(self):
        host, state = self._look()
        return {number: use for address, found in host.cards.items()
                if isinstance(found, NvmeCard)
                for number, use in found.mounted(
                    state['cards'][address]).items()}

    def check_disks(self, function):
        found, mine, vf = self._owner(*self._look(), function)
        if isinstance(found, NvmeCard):
            if vf is not None:
                mine = mine['vfs'][vf]
            if mine['driver'] == 'nvme' and mine.get('use'):
                raise sysfs.error(errno.EBUSY, function)

    def read_signatures(self, function):
        found, mine, vf = self._owner(*self._look(), function)
        if (vf is not None or not isinstance(found, NvmeCard)
                or mine['driver'] != 'nvme' or not mine['namespaces']):
            return []
        fault = found.faulty(mine).get('signatures')
        if fault:
            raise sysfs.error(getattr(errno, fault), function)
        kinds = mine['signatures'] or (
            [nvme_admin.UNSIGNED] if mine['data'] else [])
        return [(f'nvme{mine["number"]}n1', kind) for kind in kinds]

    def _nvme(self, host, state, function, hold=False):
        """Return (card, its state, its faults) of a disk with the driver nvme.

        :param hold: whether the caller opens the disk exclusively.
        """
        found, mine, vf = self._owner(host, state, function)
        if vf is not None or mine['driver'] != 'nvme':
            raise sysfs.error(errno.ENODEV, function)
        if hold and mine['use']:
            raise sysfs.error(errno.EBUSY, function)
        return found, mine, found.faulty(mine)

    def reset_nvme(self, function):
        with self._update() as (host, state):
            found, mine, faults = self._nvme(host, state, function)
            if faults.get('reset'):
                raise sysfs.error(errno.EBUSY, function)
            found.ends(mine, 'controller reset')
            for vf in mine['vfs']:
                vf['online'] = False

    def read_nvme(self, function):
        found, mine, faults = self._nvme(*self._look(), function)
        if faults.get('identify'):
            raise sysfs.error(errno.EIO, function)
        return found.report(mine)

    def read_nvme_health(self, function):
        _, _, faults = self._nvme(*self._look(), function)
        return nvme_admin.HealthLog(**{
            **_WELL, **(faults.get('health') or {})})

    def read_nvme_sanitize(self, function):
        found, mine, _ = self._nvme(*self._look(), function)
        if not found.sanitize:
            raise sysfs.error(errno.EIO, function)
        operation = mine['sanitize']
        return nvme_admin.SanitizeStatus(
            operation['state'], 50 if operation['state'] == 'running' else 100,
            operation['method'])

    def start_nvme_sanitize(self, function, method):
        with self._update() as (host, state):
            found, mine, faults = self._nvme(host, state, function, hold=True)
            if (faults.get('sanitize') == 'refused'
                    or method not in found.sanitize
                    or mine['sanitize']['state'] == 'running'):
                raise sysfs.error(errno.EIO, function)
            mine['sanitize'] = {
                'state': 'running', 'method': method,
                'until': time.time() + found.sanitize_seconds}

    def exit_nvme_sanitize_failure(self, function):
        with self._update() as (host, state):
            _, mine, faults = self._nvme(host, state, function)
            if (faults.get('sanitize') == 'locked'
                    or mine['sanitize']['state'] == 'running'):
                raise sysfs.error(errno.EIO, function)
            mine['sanitize']['state'] = 'never'

    @staticmethod
    def _check_sanitize(mine, function):
        # during Sanitize, and in failure mode, other commands are refused
        if mine['sanitize']['state'] in ('running', 'failed'):
            raise sysfs.error(errno.EIO, function)

    @card.blocking
    def format_nvme(self, host, state, function, formats=()):
        found, mine, faults = self._nvme(host, state, function, hold=True)
        if faults.get('format') == 'unsupported':
            raise sysfs.error(errno.EOPNOTSUPP, function)
        if not all(n[3] for n in mine['namespaces']):
            raise sysfs.error(errno.EBUSY, function)
        if faults.get('format') == 'refused':
            raise sysfs.error(errno.EIO, function)
        self._check_sanitize(mine, function)
        if formats and len(formats) != len(mine['namespaces']):
            raise sysfs.error(errno.EINVAL, function)
        if faults.get('hang') == 'format':
            raise BlockingIOError
        for there, wanted in zip(mine['namespaces'], formats, strict=False):
            size = there[0] * there[1]
            there[:3] = [size // wanted.block_size,
                         *self._block_format(wanted, function)]
        if found.allocated(mine) == found.capacity():
            _erase(mine)

    @staticmethod
    def _block_format(wanted, function):
        chosen = wanted.block_size, wanted.metadata or 0
        if chosen not in _FORMATS:
            raise sysfs.error(errno.EOPNOTSUPP, function)
        return chosen

    def restore_nvme_namespaces(self, function, namespaces):
        with self._update() as (host, state):
            found, mine, faults = self._nvme(host, state, function, hold=True)
            if not found.namespace_management:
                raise sysfs.error(errno.EOPNOTSUPP, function)
            if faults.get('namespaces') == 'refused':
                raise sysfs.error(errno.EIO, function)
            self._check_sanitize(mine, function)
            if faults.get('namespaces') == 'ignored':
                return
            size = (mine['namespaces'][0][1] if mine['namespaces']
                    else _BLOCK_SIZE)
            mine['namespaces'] = [
                [n.blocks, *self._block_format(n, function), True]
                for n in namespaces] or [
                    [found.capacity() // size, size, 0, True]]

    # VFs, by the PF

    def read_nvme_vfs(self, pf):
        found, mine, _ = self._nvme(*self._look(), pf)
        if found.secondary == 'none':
            raise sysfs.error(errno.EOPNOTSUPP, pf)
        return found.secondaries(mine)

    def _secondary(self, host, state, pf, vf):
        found, mine, faults = self._nvme(host, state, pf)
        if found.secondary == 'none':
            raise sysfs.error(errno.EOPNOTSUPP, pf)
        if not 1 <= vf <= len(mine['vfs']):
            raise sysfs.error(errno.ENODEV, pf)
        if faults.get('virtualization') == 'refused':
            raise sysfs.error(errno.EIO, pf)
        return found, mine, faults, mine['vfs'][vf - 1]

    def format_nvme_vf(self, pf, vf):
        with self._update() as (host, state):
            found, mine, _, secondary = self._secondary(host, state, pf, vf)
            if not found.namespace_management:
                raise sysfs.error(errno.EOPNOTSUPP, pf)
            if {*found.secondaries(mine)[vf - 1].others} - {0}:
                raise sysfs.error(errno.EBUSY, pf)
            _set_online(secondary, False)
            if found.formats_all:
                raise sysfs.error(errno.EOPNOTSUPP, pf)
        self._format_vf(pf, vf)
        return found.vf_namespaces

    @card.blocking
    def _format_vf(self, host, state, pf, vf):
        found, mine, faults, _ = self._secondary(host, state, pf, vf)
        if faults.get('format'):
            raise sysfs.error(
                errno.EIO if faults['format'] == 'refused'
                else errno.EOPNOTSUPP, pf)
        if faults.get('hang') == 'format':
            raise BlockingIOError
        if found.vf_namespaces:
            mine['vf_data'].pop(str(vf), None)
            # the namespace was attached to the PF meanwhile
            mine['shared'].pop(str(vf), None)

    def reset_nvme_vf(self, pf, vf, queues, interrupts):
        with self._update() as (host, state):
            _, _, faults, secondary = self._secondary(host, state, pf, vf)
            _set_online(secondary, False)
        with self._update() as (host, state):
            *_, secondary = self._secondary(host, state, pf, vf)
            secondary['resources'] = [queues, interrupts]
            if (faults.get('virtualization') == 'offline'
                    or not (queues and interrupts)):
                raise sysfs.error(errno.EIO, pf)
            secondary['online'] = faults.get('virtualization') != 'ignored'
