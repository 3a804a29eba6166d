# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A simulated PCI device, the base class of all kinds of devices.

A card is frozen and contains the description. The states of the card and of
the host are dictionaries, which the caller passes to each method. A kind of
devices is a subclass in a module of its own and an entry in description.KINDS.
Another package can provide a kind by an entry point (description.NAMESPACE).
"""

import contextlib
import dataclasses
import errno
import functools
import time
import typing
from typing import ClassVar

from nova_accel.sim import reader
from nova_accel.sim import tree as sysfs

#: seconds between two polls of a blocking operation
TICK = 0.02
#: time of the end of an operation that hangs
NEVER = 1e12
#: the state of cards and kernel, see SimulatedKernel
State = dict[str, typing.Any]
#: as Card.KEYS: of all kinds of cards; of kinds whose ids are described
_OF_ALL = {'numa_node': int, 'bridges': reader.bridges,
           'iommu_group': reader.natural, 'reset_method': reader.text,
           'device_serial': reader.text, 'acs': reader.natural}
_OF_FUNCTIONS = {'vf_device': reader.identifier, 'vf_driver': reader.text,
                 'vfio_driver': reader.text, 'firmware': reader.text}


@dataclasses.dataclass(frozen=True)
class Card:
    """A PCI function and its VFs."""

    address: str
    #: vendor, device, subsystem vendor, subsystem device: four hex digits
    ids: tuple[str, str, str, str] = ('8086', '0000', '8086', '0000')
    class_code: str = '0x010601'
    #: initial driver
    driver: str | None = None
    numa_node: int = -1
    #: the root complex ('pci0000:3a') and the bridges above it, from the
    #: widest; empty if it is integrated into a root complex of its own
    bridges: tuple[str, ...] = ()
    iommu_group: int | None = None
    #: maximum number of VFs; 0: the card has no SR-IOV
    total_vfs: int = 0
    #: device id of a VF, None for that of the PF
    vf_device: str | None = None
    #: driver that binds to new VFs
    vf_driver: str | None = None
    #: variant of vfio-pci that libvirt 10.0 and later bind instead, for example
    #: mlx5_vfio_pci (driver model in docs/formatdomain.rst of libvirt)
    vfio_driver: str = 'vfio-pci'
    #: initial number of VFs
    vfs: int = 0
    #: firmware version that devlink shows; '' if its driver reports none
    firmware: str = ''
    #: further attributes of the physical function while it is bound to the
    #: initial driver: path -> text
    attributes: dict = dataclasses.field(default_factory=dict)
    faults: dict = dataclasses.field(default_factory=dict)
    #: the kernel's reset methods of the physical function, in order; empty if
    #: it has none. VFs have a function level reset
    reset_method: str = 'flr'
    #: initial Device Serial Number of the physical function
    device_serial: str = ''
    #: ACS control of the ports above it; None: as Linux sets it if it has an
    #: IOMMU: validation, redirects and upstream forwarding
    acs: int | None = None

    #: name of a fault -> function that checks its value
    FAULTS: ClassVar[dict] = {
        'attributes': reader.attributes,
        #: errno of binding another driver
        'bind': reader.one_of('EBUSY', 'EINVAL', 'ENODEV'),
        'dead': reader.boolean,
        #: the step of inventory.recovery that ends the faults 'dead',
        #: 'controller' and 'attributes'
        'ends_by': reader.one_of('function reset', 'controller reset',
                                 'driver rebind', 'card reset'),
        #: its VFs do not answer, until they are created again
        'lost_vfs': reader.boolean,
        #: spoiled attributes of the port above, like 'attributes' of the card
        'port': reader.attributes,
        #: a process of the host has its device node open: unbinding its driver
        #: blocks, as users of NVIDIA's and AMD's drivers reported
        'in_use': reader.boolean,
        'hang': reader.checked(lambda v: v == 'read', 'read'),
        'renumber': reader.boolean,
        #: errno of a reset, or the state after it
        'reset': reader.one_of('EIO', 'ENOTTY', 'ETIMEDOUT', 'dead', 'hang'),
        'vanish': reader.boolean,
        #: errno of creating VFs
        'vfs': reader.one_of('EBUSY', 'EIO', 'ENOMEM'),
    }

    #: key of the description -> function that converts its value. The field of
    #: the same name has the default
    KEYS: ClassVar[dict[str, typing.Callable]] = {}
    #: keys of its state that reads change
    READ: ClassVar[frozenset[str]] = frozenset()
    #: name of an operation of the driver's own package (Kernel.call()) ->
    #: method that simulates it (self, the state, the VF, further arguments)
    OPERATIONS: ClassVar[dict[str, typing.Callable]] = {}

    # Description

    @classmethod
    def describe(cls, item) -> dict:
        """Read the fields of a card from its mapping in the description.

        :param item: a reader.Mapping, which loses the keys that are read.
        :raises InvalidSimulation: a value is wrong; the error names file, line
            and key.
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
            attributes=item.take('attributes', reader.attributes, {}),
            **cls.taken(item, _OF_FUNCTIONS))

    @classmethod
    def describe_any(cls, item) -> dict:
        """Read the fields that all kinds of cards share, and those of KEYS.
        """
        fields = dict(
            cls.taken(item, _OF_ALL | cls.KEYS),
            address=item.take('address', reader.address),
            faults=cls.describe_faults(item))
        if 'driver' in item.items:
            fields['driver'] = item.take('driver', reader.text, None)
        return fields

    @classmethod
    def taken(cls, item, keys) -> dict:
        """Read keys whose fields have the same names.

        :param keys: a dictionary in the form of KEYS.
        """
        return {key: item.take(key, convert, getattr(cls, key))
                for key, convert in keys.items()}

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
        """Check the value of a fault, and convert it for the state.

        :raises ValueError: no such fault exists, or its value is not allowed.
        """
        if value is None:
            return None
        if name not in cls.FAULTS:
            raise ValueError(
                f'is an unknown fault, the faults are {", ".join(cls.FAULTS)}')
        return cls.FAULTS[name](value)

    def addresses(self) -> list[str]:
        """Return the addresses of all functions that the card can have."""
        return [self.address,
                *(self.vf_address(n) for n in range(self.total_vfs))]

    def vf_address(self, number: int) -> str:
        """Return the address of a VF. VFs directly follow their PF, because
        First VF Offset and VF Stride are 1 (PCI Express Base Specification,
        SR-IOV)."""
        domain, bus, rest = self.address.split(':')
        slot, function = rest.split('.')
        at = (int(bus, 16) << 8) + (int(slot, 16) << 3) + int(function)
        at += 1 + number
        return f'{domain}:{at >> 8:02x}:{at >> 3 & 31:02x}.{at & 7}'

    def place(self, address: str = '') -> str:
        """Return the directory of a function of the card below /sys.

        :param address: address of the function, by default the physical
            function.
        """
        above = self.bridges or (f'pci{self.address[:7]}',)
        return '/'.join(('devices', *above, address or self.address))

    # State

    def fresh(self, state) -> dict[str, typing.Any]:
        """Return the state of the card after the host booted with power.

        :param state: state of the host, from which number() takes numbers.
        """
        return {'driver': self.driver, 'number': number(state), 'vfs': [],
                'faults': {}, 'resets': [],
                'device_serial': self.device_serial, 'ids': list(self.ids)}

    def at_first(self, state) -> dict:
        """Return fresh(), changed by the initial state in the description."""
        mine = self.fresh(state)
        if self.vfs and mine['driver'] == self.driver:
            self.make_vfs(state, mine, self.vfs)
        return mine

    def keeps(self) -> tuple[str, ...]:
        """Return the keys of the state that survive a reboot of the host."""
        return ('faults', 'device_serial', 'ids')

    def power_on(self, mine) -> None:
        """Change the state in the keys of keeps() as a loss of power does."""
        mine['faults'].pop('dead', None)

    def settle(self, mine) -> None:
        """Update the state for the time that passed since the last call."""

    def faulty(self, mine) -> dict:
        """Return name -> value of the present faults."""
        return {name: value for name, value in {
            **self.faults, **mine['faults']}.items() if value is not None}

    # Operations

    def drivers(self) -> set[str]:
        """Return the drivers to which functions of the card can be bound."""
        return {'vfio-pci', self.vfio_driver,
                *filter(None, (self.driver, self.vf_driver))}

    def in_use(self, mine) -> list[str]:
        """Return the names under which a guest may have a part of the card
        open, except the card's own address."""
        return [self.vf_address(n) for n in range(len(mine['vfs']))]

    def is_busy(self, mine) -> bool:
        """Return whether an operation now blocks unbinding the driver."""
        return False

    def is_kept(self, mine, vf) -> bool:
        """Return whether a process of the host keeps a function's node open.

        :param vf: number of the VF, None for the physical function.
        """
        bound = mine['driver'] if vf is None else mine['vfs'][vf]['driver']
        return bool(self.faulty(mine).get('in_use')) and (
            bound is not None and not sysfs.is_for_vfio(bound))

    def bound(self, state, mine, driver) -> None:
        """Update the state after the physical function was bound to another
        driver.

        The card then has no VFs, because each driver calls pci_disable_sriov()
        when it is unbound (pci-iov-howto.rst of Linux).
        """
        mine.update(driver=driver, number=number(state), vfs=[])
        if driver == self.driver:
            self.ends(mine, 'driver rebind')

    def reset(self, mine, vf) -> None:
        """Reset a function of the card.

        Source: reset_store() in drivers/pci/pci-sysfs.c of Linux. Only
        functions with a reset method have the attribute reset.

        :param vf: number of the VF, None for the physical function.
        :raises OSError: as in the kernel.
        """
        address = self.address if vf is None else self.vf_address(vf)
        method = self.reset_method if vf is None else 'flr'
        if not method:
            raise sysfs.error(errno.ENOENT, address)
        fault = self.faulty(mine).get('reset')
        if vf is not None and self.faulty(mine).get('lost_vfs'):
            # pci_dev_wait() in drivers/pci/pci.c, after a minute
            raise sysfs.error(errno.ENOTTY, address)
        if fault == 'dead':
            mine['faults']['dead'] = True
        elif fault:
            raise sysfs.error(getattr(errno, fault), address)
        bound = mine['driver'] if vf is None else mine['vfs'][vf]['driver']
        mine['resets'].append([address, bound])
        forget(mine, vf or 0, 'registers')
        if vf is None:
            self.ends(mine, 'card reset' if mine.get('reset_method') == 'bus'
                      else 'function reset')

    def ends(self, mine, step) -> None:
        if self.faulty(mine).get('ends_by') == step:
            for name in 'dead', 'controller', 'attributes', 'ends_by':
                mine['faults'].pop(name, None)

    def check_vfs(self, mine, count) -> None:
        """Raise OSError if the driver refuses this number of VFs, as
        sriov_numvfs_store() in drivers/pci/iov.c of Linux."""
        if not self.total_vfs or mine['driver'] is None:
            raise sysfs.error(errno.ENOENT, self.address)
        if not 0 <= count <= self.total_vfs:
            raise sysfs.error(errno.ERANGE, self.address)

    def make_vfs(self, state, mine, count) -> None:
        # the kernel binds new VFs at once, unless drivers_autoprobe is 0
        mine['vfs'] = [{'driver': self.vf_driver, 'number': number(state)}
                       for _ in range(count)]
        mine['faults'].pop('lost_vfs', None)

    def ends_vfs(self, attribute, value) -> bool:
        """Return whether writing this value to the attribute removes VFs."""
        return False

    def write(self, mine, vf, attribute, value) -> None:
        """Write an attribute of a function of the card.

        :param vf: number of the VF, None for the physical function.
        :raises OSError: as the kernel does.
        """
        raise sysfs.error(errno.ENOENT, f'{self.address}/{attribute}')

    def operate(self, mine, vf, name, *args):
        """Simulate an operation that a driver's own package defines.

        :param vf: number of the VF, None for the physical function.
        :raises BlockingIOError: the operation has not ended, and must be
            called again.
        :raises OSError: as the operation does, or ENOTTY if this kind of
            devices does not have the operation.
        """
        if name not in self.OPERATIONS:
            raise sysfs.error(errno.ENOTTY, f'{self.address} {name}')
        return self.OPERATIONS[name](self, mine, vf, *args)

    # Sysfs

    def add(self, tree, mine, group) -> None:
        """Add the functions of the card to sysfs.

        :param group: number of the physical function's own IOMMU group, or
            None without IOMMU. The groups of VFs have the next numbers.
        """
        faults = self.faulty(mine)
        if faults.get('vanish'):
            return
        own = group if self.iommu_group is None or group is None else (
            self.iommu_group)
        pf = sysfs.add_function(tree, self.place(), mine['ids'],
                                self.class_code, mine['driver'], own)
        pf['numa_node'] = str(self.numa_node)
        _resettable(pf, mine.get('reset_method') or self.reset_method)
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
        vendor, device, subsystem_vendor, _ = mine['ids']
        for n, vf in enumerate(mine['vfs']):
            address = self.vf_address(n)
            made = sysfs.add_function(
                tree, self.place(address),
                (vendor, self.vf_device or device, subsystem_vendor, '0000'),
                self.class_code, vf['driver'], group and group + 1 + n)
            # ones by the SR-IOV specification, in every state of the card
            made['config'] = (b'\xff' * 64 if faults.get('lost_vfs')
                              else b'\xff\xff' + made['config'][2:])
            made['numa_node'] = str(self.numa_node)
            _resettable(made, 'flr')
            made['physfn'] = sysfs.Link(self.place())
            pf[f'virtfn{n}'] = sysfs.Link(self.place(address))
            self.add_virtual(tree, mine, n, made)
            functions.append(made)
        for made in functions:
            sysfs.spoil(made, faults.get('attributes') or {})

    def add_physical(self, tree, mine, function) -> None:
        """Add attributes that only the physical function has."""

    def add_virtual(self, tree, mine, n, function) -> None:
        """Add attributes that only a VF has."""


@dataclasses.dataclass(frozen=True)
class NicCard(Card):
    """A network card with one port, which an operator's rule may match by
    mistake.

    Source of interface flags: include/uapi/linux/if.h of Linux.
    """

    ids: tuple[str, str, str, str] = ('8086', '1572', '8086', '0000')
    class_code: str = '0x020000'
    driver: str | None = 'i40e'
    vf_driver: str | None = 'iavf'
    #: whether its interface is up
    up: bool = True

    KEYS: ClassVar[dict] = {'up': reader.boolean}

    def add_physical(self, tree, mine, function):
        self._add(tree, mine, function, self.address, self.driver, self.up)

    def add_virtual(self, tree, mine, n, function):
        self._add(tree, mine['vfs'][n], function, self.vf_address(n),
                  self.vf_driver, False)

    def _add(self, tree, mine, function, address, driver, up):
        if mine['driver'] != driver:
            return
        name = f'eth{mine["number"]}'
        function['net'] = {name: {
            # broadcast and multicast, running, and up
            'flags': '0x1043' if up else '0x1002',
            'operstate': 'up' if up else 'down'}}
        tree['class'].setdefault('net', {})[name] = sysfs.Link(
            f'{self.place(address)}/net/{name}')


def _resettable(function, method):
    """Add the attributes of reset to a function, if it has a reset method."""
    if method:
        # root may write the attribute, and no user may read it
        function.update(reset_method=method, reset=sysfs.Errno(errno.EACCES))


def number(state) -> int:
    """Return an unused number for the names of a device. The caller may also
    use the next nine numbers."""
    state['number'] += 10
    return state['number']


def forget(mine, port: int, *kinds: str) -> None:
    """Remove data that guests have left on a card.

    :param port: number of the VF or region.
    :param kinds: 'registers' (of the VF or region) or 'memory' (of the card).
    """
    for kind in kinds:
        mine.get('left', {}).get(place_of(port, kind), {}).pop(kind, None)


def place_of(port: int, kind: str) -> str:
    """Return the key under which the state of a card has the data of a guest.
    All regions share one key for the memory of the card."""
    return 'card' if kind == 'memory' else str(port)


@dataclasses.dataclass(frozen=True)
class Host:
    """The description of a host."""

    iommu: bool
    #: whether vfio_pci was loaded with disable_denylist
    disable_denylist: bool
    #: number of physical address bits
    address_bits: int
    #: whether VFIO can report which memory a device has written
    iova_bitmap: bool
    #: whether the kernel has iommufd, and an IOMMU of Intel that logs writes of
    #: devices
    iommufd: bool
    #: KiB of a huge page -> number reserved on each NUMA node (hugetlbpage.rst
    #: of Linux)
    huge_pages: dict[int, list[int]]
    #: PCI address of the physical function -> card
    cards: dict[str, Card]
    #: cards whose state changes as time passes
    timed: dict[str, Card] = dataclasses.field(default_factory=dict)


def blocking(operation):
    """Decorate an operation that gets the description and the state to change,
    and is repeated while it raises BlockingIOError. Changes of each try are
    stored."""
    @functools.wraps(operation)
    def until_it_ends(self, *args, **kwargs):
        while True:
            with self._update() as (host, state), contextlib.suppress(
                    BlockingIOError):
                return operation(self, host, state, *args, **kwargs)
            time.sleep(TICK)
    return until_it_ends


class Operations:
    """The methods of SimulatedKernel that the operations of each kind of cards
    need."""

    #: the description
    path: str

    def _look(self) -> tuple[Host, State]:
        """Return the present description and state, for reading only."""
        raise NotImplementedError

    def _update(self) -> contextlib.AbstractContextManager[
            tuple[Host, State]]:
        """Lock the state for changes. Store it if the context succeeds."""
        raise NotImplementedError

    # Any stands for the card class that the caller expects
    @staticmethod
    def _owner(host: Host, state: State, function: str,
               ) -> tuple[typing.Any, dict[str, typing.Any], int | None]:
        """Return (card, its state, number of the VF or None) of a function.

        :raises OSError: ENODEV if no card has this function.
        """
        raise NotImplementedError

    def _await_program(self, found, seconds: float) -> None:
        """Wait until a card is programmed, or for the end of the fault hang.

        :param seconds: the time that programming the card takes.
        """
        while True:
            time.sleep(min(seconds, TICK))
            mine = self._look()[1]['cards'][found.address]
            if not mine['program']:
                return
            if (mine['program']['until'] == NEVER
                    and found.faulty(mine).get('hang') != 'program'):
                with self._update() as (_, state):
                    state['cards'][found.address]['program'].update(
                        until=time.time())
