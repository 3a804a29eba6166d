# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Any simulated PCI device, and what kinds of devices may have of their own.

A card is what the description says, frozen; what it and the kernel remember of
it is a dictionary of the state, called mine. A kind of devices is a subclass
in a module of its own, and an entry in description.KINDS.
"""

import dataclasses
import errno
from typing import ClassVar

from nova_accel.sim import reader
from nova_accel.sim import tree as sysfs


@dataclasses.dataclass(frozen=True)
class Card:
    """A PCI function with its VFs, if any."""

    address: str
    #: vendor, device, subsystem vendor, subsystem device: four hex digits
    ids: tuple[str, str, str, str] = ('8086', '0000', '8086', '0000')
    class_code: str = '0x010601'
    #: at the beginning
    driver: str | None = None
    numa_node: int = -1
    iommu_group: int | None = None
    #: how many VFs it can have; with 0 it has no SR-IOV
    total_vfs: int = 0
    #: device id of a VF, None for that of the PF
    vf_device: str | None = None
    #: that takes VFs when they are made
    vf_driver: str | None = None
    #: VFs that are there at the beginning
    vfs: int = 0
    #: further attributes of the physical function while it is bound to the
    #: driver of the beginning: path -> text
    attributes: dict = dataclasses.field(default_factory=dict)
    faults: dict = dataclasses.field(default_factory=dict)

    #: fault -> what checks its value
    FAULTS: ClassVar[dict] = {
        'attributes': reader.attributes,
        #: what binding another driver gives
        'bind': reader.one_of('EBUSY', 'EINVAL', 'ENODEV'),
        'dead': reader.boolean,
        'hang': reader.checked(lambda v: v == 'read', 'read'),
        'renumber': reader.boolean,
        'vanish': reader.boolean,
    }

    # Description

    @classmethod
    def describe(cls, item) -> dict:
        """The fields of a card, from its mapping in the description.

        :param item: a reader.Mapping, from which every known key is taken.
        :raises InvalidSimulation: naming file, line and key.
        """
        total = item.take('total_vfs', reader.natural, 0)
        vendor = item.take('vendor', reader.identifier, cls.ids[0])
        return dict(
            cls.describe_any(item),
            ids=(vendor, item.take('device', reader.identifier, cls.ids[1]),
                 item.take('subsystem_vendor', reader.identifier, vendor),
                 item.take('subsystem_device', reader.identifier, '0000')),
            class_code=item.take('class', reader.text, cls.class_code),
            total_vfs=total,
            vfs=item.take('vfs', reader.up_to(total), 0),
            vf_device=item.take('vf_device', reader.identifier, None),
            vf_driver=item.take('vf_driver', reader.text, None),
            attributes=item.take('attributes', reader.attributes, {}))

    @classmethod
    def describe_any(cls, item) -> dict:
        """Those fields that a card of every kind has."""
        fields = dict(
            address=item.take('address', reader.address),
            numa_node=item.take('numa_node', int, -1),
            iommu_group=item.take('iommu_group', reader.natural, None),
            faults=cls.describe_faults(item))
        if 'driver' in item.items:
            fields['driver'] = item.take('driver', reader.text, None)
        return fields

    @classmethod
    def describe_faults(cls, item) -> dict:
        faults = {}
        for name, value, where in item.pairs('faults'):
            try:
                faults[name] = cls.fault(name, value)
            except ValueError as e:
                raise item.error(name, where, str(e)) from None
        return faults

    @classmethod
    def fault(cls, name, value):
        """A fault as it is kept, checked.

        :raises ValueError: saying what is wrong.
        """
        if value is None:
            return None
        if name not in cls.FAULTS:
            raise ValueError(
                f'is no fault; known are {", ".join(cls.FAULTS)}')
        return cls.FAULTS[name](value)

    def addresses(self) -> list[str]:
        """Of all functions that it may ever have."""
        return [self.address,
                *(self.vf_address(n) for n in range(self.total_vfs))]

    def vf_address(self, number: int) -> str:
        """VFs follow their PF in the space of bus, slot and function."""
        domain, bus, rest = self.address.split(':')
        slot, function = rest.split('.')
        at = (int(bus, 16) << 8) + (int(slot, 16) << 3) + int(function)
        at += 1 + number
        return f'{domain}:{at >> 8:02x}:{at >> 3 & 31:02x}.{at & 7}'

    # What is remembered

    def fresh(self, state) -> dict:
        """As the kernel has it after boot, and the card after power on.

        :param state: of the host; number(state) gives numbers of devices.
        """
        return {'driver': self.driver, 'number': number(state), 'vfs': [],
                'faults': {}}

    def at_first(self, state) -> dict:
        """fresh(), and what the description says of the beginning."""
        mine = self.fresh(state)
        if self.vfs and mine['driver'] == self.driver:
            self.make_vfs(state, mine, self.vfs)
        return mine

    def keeps(self) -> tuple[str, ...]:
        """What of it outlives a reboot of the host."""
        return ('faults',)

    def power_on(self, mine) -> None:
        """What the loss of power changes of that which outlives a reboot."""
        mine['faults'].pop('dead', None)

    def settle(self, mine) -> None:
        """Bring it to the present, where something goes on by itself."""

    def faulty(self, mine) -> dict:
        """Faults that it has now, by name."""
        return {**self.faults, **mine['faults']}

    # Operations

    def drivers(self) -> set[str]:
        """Those that its functions can be bound to."""
        return {'vfio-pci', *filter(None, (self.driver, self.vf_driver))}

    def in_use(self, mine) -> list[str]:
        """What of it a guest may have open beside its physical function."""
        return [self.vf_address(n) for n in range(len(mine['vfs']))]

    def is_busy(self, mine) -> bool:
        """Whether unbinding its driver has to wait."""
        return False

    def bound(self, state, mine, driver) -> None:
        """Its physical function gets another driver."""
        mine.update(driver=driver, number=number(state), vfs=[])

    def check_vfs(self, mine, count) -> None:
        """:raises OSError: the driver refuses to make so many VFs."""
        if not self.total_vfs or mine['driver'] is None:
            raise sysfs.error(errno.ENOENT, self.address)
        if not 0 <= count <= self.total_vfs:
            raise sysfs.error(errno.ERANGE, self.address)

    def make_vfs(self, state, mine, count) -> None:
        # without drivers_autoprobe=0 the kernel binds them at once
        mine['vfs'] = [{'driver': self.vf_driver, 'number': number(state)}
                       for _ in range(count)]

    def ends_vfs(self, attribute, value) -> bool:
        """Whether writing that attribute takes the VFs away."""
        return False

    def write(self, mine, vf, attribute, value) -> None:
        """Write an attribute of one of its functions.

        :param vf: number of the VF, None for the physical function.
        :raises OSError: as the kernel does.
        """
        raise sysfs.error(errno.ENOENT, f'{self.address}/{attribute}')

    # Sysfs

    def add(self, tree, mine, group) -> None:
        """Put all of it into sysfs.

        :param group: number of the IOMMU group where it is the first of its
            own, those of VFs follow; None without IOMMU.
        """
        faults = self.faulty(mine)
        if faults.get('vanish'):
            return
        own = group if self.iommu_group is None or group is None else (
            self.iommu_group)
        pf = sysfs.add_function(tree, self.address, self.ids, self.class_code,
                                mine['driver'], own)
        pf['numa_node'] = str(self.numa_node)
        functions = [pf]
        if faults.get('dead'):
            pf['config'] = b'\xff' * 64
        if mine['driver'] == self.driver:
            for path, text in self.attributes.items():
                *parents, name = path.split('/')
                directory = pf
                for parent in parents:
                    directory = directory.setdefault(parent, {})
                directory[name] = text
        self.add_physical(tree, mine, pf)
        if self.total_vfs:
            pf.update(sriov_totalvfs=str(self.total_vfs),
                      sriov_numvfs=str(len(mine['vfs'])))
        vendor, device, subsystem_vendor, _ = self.ids
        for n, vf in enumerate(mine['vfs']):
            address = self.vf_address(n)
            made = sysfs.add_function(
                tree, address, (vendor, self.vf_device or device,
                                subsystem_vendor, '0000'), self.class_code,
                vf['driver'], group and group + 1 + n)
            # by the SR-IOV specification, whatever state the card is in
            made['config'] = b'\xff\xff' + made['config'][2:]
            made['numa_node'] = str(self.numa_node)
            made['physfn'] = sysfs.Link(sysfs.place(self.address))
            pf[f'virtfn{n}'] = sysfs.Link(sysfs.place(address))
            self.add_virtual(tree, mine, n, made)
            functions.append(made)
        for made in functions:
            sysfs.spoil(made, faults.get('attributes') or {})

    def add_physical(self, tree, mine, function) -> None:
        """What its physical function has beside what all have."""

    def add_virtual(self, tree, mine, n, function) -> None:
        """The same of a VF."""


def number(state) -> int:
    """A number that no device name had before; names of ten may use it."""
    state['number'] += 10
    return state['number']
