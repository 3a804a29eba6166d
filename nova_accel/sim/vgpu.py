# Licensed under the Apache License, Version 2.0. See LICENSE.
"""GPUs divided into vGPUs, and parents of mediated devices without PCI.

Sources: drivers/vfio/mdev and samples/vfio-mdev of Linux, and reports about
NVIDIA's vGPU drivers. Unless configured otherwise, all vGPUs of a GPU have the
same size at any time. If a VF has a vGPU, the types that still fit on the GPU
decrease in the catalogs of the other VFs.
"""

import dataclasses
import errno
import re
import time
from typing import ClassVar

from nova_accel.sim import card
from nova_accel.sim import reader
from nova_accel.sim import tree as sysfs

FRAMEWORKS = ('mdev', 'sriov-mdev', 'vendor-vfio', 'sriov')

#: attributes from sysfs-driver-intel-xe-sriov in Documentation/ABI of Linux
_BULK = frozenset(f'sriov_admin/.bulk_profile/{name}' for name in (
    'vram_quota', 'exec_quantum_ms', 'preempt_timeout_us'))
_UUID = re.compile('[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}')


@dataclasses.dataclass(frozen=True)
class VgpuType:
    #: 'nvidia-558', or '558' if the catalog has numbers
    id: str
    name: str | None
    #: units of the GPU that one vGPU occupies
    units: int


@dataclasses.dataclass(frozen=True)
class MdevParent(card.Card):
    """A parent of mediated devices that is not a PCI device, like mtty."""

    types: tuple[VgpuType, ...] = ()
    units: int = 0
    #: whether vGPUs of several sizes can exist at a time
    mixed: bool = True
    device_api: str = 'vfio-pci'

    FAULTS: ClassVar[dict] = {
        **card.Card.FAULTS,
        'busy': reader.boolean,
        'create': reader.checked(
            lambda v: isinstance(getattr(errno, str(v), None), int),
            'the name of an errno'),
        'hang': reader.one_of('read', 'create'),
    }
    KEYS: ClassVar[dict] = {
        'units': reader.natural, 'mixed': reader.boolean,
        'device_api': reader.text}

    @classmethod
    def describe(cls, item):
        return dict(cls.taken(item, cls.KEYS), types=cls.describe_types(item),
                    address=item.take('name', reader.text),
                    faults=cls.describe_faults(item))

    @classmethod
    def describe_types(cls, item) -> tuple[VgpuType, ...]:
        types = []
        for one in item.sequence('types'):
            types.append(VgpuType(
                one.take('id', reader.text),
                one.take('name', reader.text, None),
                one.take('units', reader.up_to(1024), 1)))
            one.done()
        return tuple(types)

    def addresses(self):
        return [self.address]

    def fresh(self, state):
        return {**super().fresh(state), 'mdevs': {}}

    def in_use(self, mine):
        return list(mine['mdevs'])

    # Shares

    def type(self, name) -> VgpuType:
        for found in self.types:
            if found.id == name:
                return found
        raise sysfs.error(errno.ENOENT, f'{self.address} {name}')

    def made(self, mine) -> list[VgpuType]:
        return [self.type(m['type']) for m in mine['mdevs'].values()]

    def room(self, mine, wanted: VgpuType) -> int:
        """Return how many vGPUs of a type can still be created."""
        made = self.made(mine)
        if not self.mixed and any(t.units != wanted.units for t in made):
            return 0
        return (self.units - sum(t.units for t in made)) // wanted.units

    def parents(self, mine) -> list[str]:
        """Return the functions on which mediated devices are created."""
        return [self.address]

    def available(self, mine, parent, wanted) -> int:
        """Return available_instances of a type of mediated devices."""
        return self.room(mine, wanted)

    # Sysfs

    def add(self, tree, mine, group):
        if self.faulty(mine).get('vanish'):
            return
        made: sysfs.Directory = {}
        top = f'devices/virtual/{self.address}'
        tree['devices'].setdefault('virtual', {})[self.address] = {
            self.address: made}
        self.add_parent(tree, mine, self.address, f'{top}/{self.address}',
                        made)
        sysfs.spoil(made, self.faulty(mine).get('attributes') or {})

    def add_parent(self, tree, mine, name, place, function):
        """Add the attributes of a parent of mediated devices."""
        tree['class'].setdefault('mdev_bus', {})[name] = sysfs.Link(place)
        devices = tree['bus'].setdefault('mdev', {}).setdefault('devices', {})
        supported = function['mdev_supported_types'] = {}
        for one in self.types:
            supported[one.id] = {
                'available_instances': str(self.available(mine, name, one)),
                'create': sysfs.Errno(errno.EACCES),
                'device_api': self.device_api, 'devices': {},
                **({'name': one.name} if one.name else {}),
                **self.more_of(one)}
        for uuid, mdev in mine['mdevs'].items():
            if mdev['parent'] != name:
                continue
            made: sysfs.Directory = {
                'iommu_group': sysfs.Link(
                    f'kernel/iommu_groups/{mdev["group"]}')}
            function[uuid] = made
            tree['kernel']['iommu_groups'][str(mdev['group'])] = {
                'devices': {uuid: sysfs.Link(f'{place}/{uuid}')}}
            if not mdev['removing']:
                # the kernel removes the links before it waits for the last
                # close
                type_ = f'{place}/mdev_supported_types/{mdev["type"]}'
                made['remove'] = sysfs.Errno(errno.EACCES)
                made['mdev_type'] = sysfs.Link(type_)
                devices[uuid] = sysfs.Link(f'{place}/{uuid}')
                supported[mdev['type']]['devices'][uuid] = devices[uuid]

    def more_of(self, one) -> dict:
        """Return attributes of a type that only some kinds of parents have."""
        return {}


@dataclasses.dataclass(frozen=True)
class VgpuCard(MdevParent):
    """A simulated GPU under one of the FRAMEWORKS."""

    ids: tuple[str, str, str, str] = ('10de', '26b9', '10de', '0000')
    class_code: str = '0x030200'
    mixed: bool = False
    framework: str = 'mdev'
    #: whether the catalogs of VFs have a header line
    header: bool = True
    #: MiB that the VFs of a GPU under xe share
    vram_mib: int = 0
    #: version of the driver nvidia
    driver_version: str = '550.54.16'

    KEYS: ClassVar[dict] = {
        **MdevParent.KEYS, 'framework': reader.one_of(*FRAMEWORKS),
        'header': reader.boolean, 'driver_version': reader.text,
        'vram_mib': reader.natural}

    @classmethod
    def describe(cls, item):
        fields = {'types': cls.describe_types(item),
                  **super(MdevParent, cls).describe(item)}
        if fields['framework'] != 'sriov':
            fields.update(driver='nvidia', vf_driver='nvidia')
        return fields

    def addresses(self):
        return card.Card.addresses(self)

    # State

    def fresh(self, state):
        mine = super().fresh(state)
        if self.framework != 'sriov' or self.driver == 'gim':
            # at boot, a service of the vendor runs sriov-manage
            self.make_vfs(state, mine, self.vfs)
        return mine

    def at_first(self, state):
        mine = self.fresh(state)
        self.make_vfs(state, mine, self.vfs)
        return mine

    def in_use(self, mine):
        return [*super().in_use(mine), *card.Card.in_use(self, mine)]

    # Operations

    def drivers(self):
        drivers = super().drivers()
        if self.framework in ('sriov-mdev', 'vendor-vfio'):
            # its VFs do not bind to it; the GPU itself is not tested
            drivers.discard('vfio-pci')
        return drivers

    def bound(self, state, mine, driver):
        super().bound(state, mine, driver)
        mine['mdevs'] = {}

    def make_vfs(self, state, mine, count):
        super().make_vfs(state, mine, count)
        if not count:
            # xe releases all provisioning (sysfs-driver-intel-xe-sriov)
            mine.pop('quotas', None)
        elif self.driver == 'xe':
            # equal parts, unless the operator has set quotas
            mine.setdefault('quotas', {}).setdefault(
                'vram_quota', str((self.vram_mib << 20) // count))
        for vf in mine['vfs']:
            vf.update(type='0', open=False)

    def write(self, mine, vf, attribute, value):
        if self.driver == 'xe' and vf is None and attribute in _BULK:
            name = attribute.rpartition('/')[2]
            if name == 'vram_quota' and int(value) > self.vram_mib << 20:
                # the firmware refuses (sysfs-driver-intel-xe-sriov)
                raise sysfs.error(errno.EIO, self.address)
            mine.setdefault('quotas', {})[name] = value
            return
        if (self.framework != 'vendor-vfio' or vf is None
                or attribute != 'nvidia/current_vgpu_type'):
            super().write(mine, vf, attribute, value)
        vf = mine['vfs'][vf]
        if vf['open'] or value != '0' != vf['type']:
            raise sysfs.error(errno.EPERM, self.address)
        if value != '0' and value not in self.catalog(mine):
            raise sysfs.error(errno.EINVAL, self.address)
        vf['type'] = value

    # Shares

    def made(self, mine):
        return [*super().made(mine), *(
            self.type(vf['type']) for vf in mine['vfs']
            if vf.get('type', '0') != '0')]

    def parents(self, mine):
        if self.framework == 'mdev':
            return [self.address] if mine['driver'] == self.driver else []
        if self.framework == 'sriov-mdev':
            return [self.vf_address(n) for n, vf in enumerate(mine['vfs'])
                    if vf['driver'] == self.vf_driver]
        return []

    def available(self, mine, parent, wanted):
        room = super().available(mine, parent, wanted)
        if self.framework == 'mdev':
            return room
            # each VF has one vGPU, and ignores what its siblings will occupy
        there = any(m['parent'] == parent for m in mine['mdevs'].values())
        return 0 if there else min(room, 1)

    def catalog(self, mine) -> dict[str, str | None]:
        """Return number -> name of the vGPU types that can be created now.

        The catalogs of all VFs are equal.
        """
        return {t.id: t.name for t in self.types if self.room(mine, t)}

    # Sysfs

    def add(self, tree, mine, group):
        card.Card.add(self, tree, mine, group)
        if self.driver == 'nvidia':
            tree['module']['nvidia'] = {'version': self.driver_version}

    def add_physical(self, tree, mine, function):
        self._add_shares(tree, mine, self.address, function)

        if self.driver == 'xe' == mine['driver']:
            # attributes below .bulk_profile are write-only
            function['sriov_admin'] = {'.bulk_profile': {
                path.rpartition('/')[2]: sysfs.Errno(errno.EACCES)
                for path in _BULK}, **{
                f'vf{n + 1}': {'profile': {
                    'exec_quantum_ms': '0', 'preempt_timeout_us': '0',
                    'vram_quota': '0', **mine.get('quotas', {})}}
                for n in range(self.total_vfs)}}

    def add_virtual(self, tree, mine, n, function):
        self._add_shares(tree, mine, self.vf_address(n), function)
        vf = mine['vfs'][n]
        if self.framework == 'vendor-vfio' and vf['driver'] == 'nvidia':
            lines = ['ID    : vGPU Name'] if self.header else []
            lines += [f'{number:<6}: {name}' for number, name
                      in self.catalog(mine).items()]
            function['nvidia'] = {
                'creatable_vgpu_types': '\n'.join(lines),
                'current_vgpu_type': vf['type'], 'gpu_instance_id': '0',
                'placement_id': '0', 'vgpu_params': '', 'warm_update': '0'}

    def _add_shares(self, tree, mine, address, function):
        if address in self.parents(mine):
            self.add_parent(tree, mine, address, self.place(address),
                            function)

    def more_of(self, one):
        return {'description': (
            f'num_heads=4, frl_config=60, framebuffer={one.units * 1024}M, '
            f'max_resolution=7680x4320, '
            f'max_instance={self.units // one.units}')}


class MdevOperations(card.Operations):
    """Operations of a simulated kernel on vGPUs."""

    def create_mdev(self, parent, type_name, uuid):
        while True:
            with self._update() as (host, state):
                found, mine = self._sharing(host, state, parent)
                wanted = found.type(type_name)
                if not _UUID.fullmatch(uuid):
                    raise sysfs.error(errno.EINVAL, uuid)
                if any(uuid in s.get('mdevs', ())
                       for s in state['cards'].values()):
                    raise sysfs.error(errno.EEXIST, uuid)
                faults = found.faulty(mine)
                if faults.get('create'):
                    raise sysfs.error(getattr(errno, faults['create']), parent)
                if faults.get('hang') != 'create':
                    if not found.available(mine, parent, wanted):
                        raise sysfs.error(errno.ENOSPC, parent)
                    mine['mdevs'][uuid] = {
                        'parent': parent, 'type': type_name,
                        'removing': False, 'group': card.number(state)}
                    return
            time.sleep(card.TICK)

    @staticmethod
    def _sharing(host, state, parent):
        """Return (card, its state) of a parent of mediated devices."""
        for address, found in host.cards.items():
            mine = state['cards'][address]
            if (isinstance(found, MdevParent)
                    and not found.faulty(mine).get('vanish')
                    and parent in found.parents(mine)):
                return found, mine
        raise sysfs.error(errno.ENOENT, parent)

    def remove_mdev(self, uuid):
        first = True
        while True:
            with self._update() as (host, state):
                try:
                    found, mine = self._mdev(host, state, uuid)
                except OSError:
                    if first:
                        raise
                    # the parent and its devices have disappeared
                    return
                mdev = mine['mdevs'][uuid]
                if first and mdev['removing']:
                    # the first removal has removed the attribute
                    raise sysfs.error(errno.ENOENT, uuid)
                if first and found.faulty(mine).get('busy'):
                    raise sysfs.error(errno.EBUSY, uuid)
                first, mdev['removing'] = False, True
                if uuid not in state['guests']:
                    del mine['mdevs'][uuid]
                    return
            # the kernel waits for the last close
            time.sleep(card.TICK)

    @staticmethod
    def _mdev(host, state, uuid):
        for address, found in host.cards.items():
            mine = state['cards'][address]
            if uuid in mine.get('mdevs', ()):
                return found, mine
        raise sysfs.error(errno.ENOENT, uuid)

    # Actions of tests and demonstrations on the host

    def guest_opens(self, name: str) -> None:
        """Let a guest open a device that has a VFIO driver already. The device
        is a mediated device, or the function of a hostdev that libvirt does
        not manage.

        :param name: UUID of the mediated device, or PCI address.
        :raises OSError: ENODEV if the device does not exist, EINVAL if the
            function has no vGPU type, EBUSY if a guest has the device.
        """
        with self._update() as (host, state):
            if name in state['guests']:
                raise sysfs.error(errno.EBUSY, name)
            if _UUID.fullmatch(name):
                try:
                    _, mine = self._mdev(host, state, name)
                except OSError:
                    raise sysfs.error(errno.ENODEV, name) from None
                if mine['mdevs'][name]['removing']:
                    raise sysfs.error(errno.ENODEV, name)
            else:
                _, mine, vf = self._owner(host, state, name)
                if vf is None or mine['vfs'][vf].get('type', '0') == '0':
                    raise sysfs.error(errno.EINVAL, name)
                mine['vfs'][vf]['open'] = True
            state['guests'].append(name)

    def guest_closes(self, name: str) -> None:
        """Let the guest that called guest_opens() close the device."""
        with self._update() as (host, state):
            state['guests'].remove(name)
            if not _UUID.fullmatch(name):
                _, mine, vf = self._owner(host, state, name)
                mine['vfs'][vf]['open'] = False
