# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A simulated kernel with simulated cards.

The simulated kernel behaves like Linux 6.12 with the DFL drivers, errors
included, as observed. The modules of other kinds of devices name the sources
of their behavior. The common behavior is from drivers/pci (pci-sysfs.c, iov.c,
pci-driver.c), drivers/iommu (iommu.c) and drivers/vfio (group.c, vfio_main.c,
pci/vfio_pci.c, pci/vfio_pci_core.c) of Linux 7.2.

The file ``<file>.state`` beside the description keeps the state of the cards
and of the kernel for all processes. Operations take real time: while a card is
programmed, the process sleeps, without holding a lock.
"""

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
import typing
import uuid

from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel.host import pci
from nova_accel.sim import card as cards
from nova_accel.host import usage
from nova_accel.sim import description
from nova_accel.sim import dfl
from nova_accel.sim import gpu
from nova_accel.sim import nvme
from nova_accel.sim import qat
from nova_accel.sim import timecard
from nova_accel.sim import tree as sysfs
from nova_accel.sim import vgpu
from nova_accel.sim import xrt

_PCI = 'bus/pci/devices'
#: drivers that VFIO accepts on other members of an IOMMU group
_HARMLESS = frozenset(('vfio-pci', 'pci-stub', 'pcieport'))
#: seconds between two checks whether devices appeared or disappeared
_LOOK = 1
#: attributes of PCI functions that the kernel has in memory
_IN_MEMORY = frozenset((
    'vendor', 'device', 'subsystem_vendor', 'subsystem_device', 'class',
    'numa_node', 'boot_vga', 'reset_method', 'sriov_numvfs',
    'sriov_totalvfs', 'serial', 'firmware_rev', 'subsysnqn'))
#: ids of the ports of a switch
_BRIDGE = ('10b5', '8747', '10b5', '8747')
#: drivers that create VFs when they are loaded (gim_driver in gim_drv.c of
#: amd/MxGPU-Virtualization)
_OWN_VFS = frozenset(('gim',))
#: (vendor, device) that vfio-pci refuses without disable_denylist
_DENYLIST = frozenset(('8086', device) for device in (
    '0435', '0443', '19e2', '19e3', '37c8', '37c9', '0b25', '0cfe'))


class SimulatedKernel(sysfs.Reads,
                      dfl.DflOperations,
                      nvme.NvmeOperations,
                      xrt.XrtOperations,
                      qat.QatOperations,
                      timecard.TimecardOperations,
                      vgpu.MdevOperations,
                      gpu.GpuOperations):
    """A kernel with simulated cards, with the interface of host.kernel.Kernel.

    Thread-safe. Several processes can use one file.
    """

    def __init__(self, path: str, writes: bool = True):
        """
        :param path: the description, a YAML file.
        :param writes: whether to write changes for other processes. If False,
            changes stay in memory, and no file is written."""
        self.path = os.path.abspath(path)
        self._state_path = f'{self.path}.state'
        self._writes = writes
        # guards the three caches below; never held while waiting
        self._lock = threading.RLock()
        #: (stamp of the file, description)
        self._description: tuple[typing.Any, ...] = (None, None)
        #: (stamp of the file, description, state)
        self._state: tuple[typing.Any, ...] = (None, None, None)
        #: (state, whether each card is busy, the tree of both)
        self._sys: tuple[typing.Any, ...] = (None, None, None)
        self._described()
        try:
            with self._update():
                pass
        except OSError as e:
            raise exception.InvalidSimulation(
                f'The state of the simulated host {path} cannot be written '
                f'beside it ({e}): move the file to a directory that '
                f'nova-compute may write.') from e
        except (ValueError, KeyError, TypeError) as e:
            raise exception.InvalidSimulation(
                f'{self._state_path} was not written by this release '
                f'({e!r}): remove it.') from e

    # Reads, see Kernel

    def listdir(self, path):
        if path.strip('/') == _PCI:
            self._renumber()
        return super().listdir(path)

    def changes(self, over):
        before, said = self._functions(), len(self._look()[1]['said'])
        while not over.wait(_LOOK):
            now, messages = self._functions(), self._look()[1]['said']
            for function in sorted(now ^ before):
                yield host_kernel.Change('pci', function)
            for message in messages[said:]:
                yield host_kernel.Change(*message)
            yield None
            before, said = now, len(messages)

    def _functions(self):
        return set(sysfs.find(self._tree(), _PCI)[0])

    def _reads(self, place):
        self._wait_while_it_hangs(place)

    def _wait_while_it_hangs(self, place):
        while self._hangs(place):
            time.sleep(cards.TICK)

    def _hangs(self, place):
        host, state = self._look()
        if os.path.basename(place) in _IN_MEMORY:
            return False
        return any(f'/{address}/' in place and card.faulty(
                       state['cards'][address]).get('hang') == 'read'
                   for address, card in host.cards.items())

    # Operations, see Kernel

    @cards.blocking
    def call(self, host, state, operation, function, *args):
        card, mine, vf = self._owner(host, state, function)
        return card.operate(mine, vf, operation.__name__, *args)

    def rebind(self, function, driver, by=None):
        self._bind(function, driver)
        if driver and self._driver(function) is None:
            raise sysfs.error(errno.EBUSY, function)

    def _bind(self, function, driver):
        waited = False
        while True:
            with self._update() as (host, state):
                if waited and driver is None and (
                        function not in state['unbinding']):
                    # _settle() has unbound it
                    return
                if driver and not sysfs.is_for_vfio(driver) and (
                        _is_of_a_guest(host, state, function)):
                    # iommu_device_use_default_domain() in iommu/iommu.c
                    driver = None
                if self._rebind(host, state, function, driver):
                    return
            waited = True
            time.sleep(cards.TICK)

    def _driver(self, function):
        found = sysfs.find(self._tree(), f'{_PCI}/{function}')[0]
        return found.get('driver')

    def unbind(self, function):
        self.rebind(function, None)

    def probe(self, function):
        self._bind(function, _hosts_driver(
            *self._owner(*self._look(), function)))

    def read_device_serial(self, function):
        card, mine, vf = self._owner(*self._look(), function)
        self._wait_while_it_hangs(f'/{card.address}/config')
        return '' if vf is not None or card.faulty(mine).get('dead') else (
            mine['device_serial'])

    def read_acs(self, function):
        host, _ = self._look()
        for card in host.cards.values():
            # in a switch, the ports to its devices have ACS
            if function in pci.below_root(card.bridges)[::-2]:
                return card.acs if card.acs is not None else (
                    0x1d if host.iommu else 0)
        return None

    def is_group_open(self, function):
        opened = self._look()[1]['guests']
        return any(member in opened
                   for member in _members(self._tree(), function))

    def processes(self, functions):
        host, state = self._look()
        found = []
        for function in functions:
            card, mine, vf = self._owner(host, state, function)
            if card.is_kept(mine, vf):
                found.append(usage.Process(
                    function, 4711, 'exporter', f'/dev/{function}'))
            group = pci.group(self, function)
            found += [usage.Process(
                function, 4712, 'testpmd', f'/dev/vfio/{group}')
                for member in _members(self._tree(), function)
                if member in state['guests']]
        return found

    @cards.blocking
    def reset_function(self, host, state, function, hot=False):
        """Reset a function, as Kernel.reset_function().

        :param hot: whether to do VFIO's hot reset, which resets the bus.
        """
        card, mine, vf = self._owner(host, state, function)
        if (card.faulty(mine).get('reset') == 'hang'
                or function in state['unbinding']):
            raise BlockingIOError
        method = mine.get('reset_method')
        mine['reset_method'] = 'bus' if hot else method
        card.reset(mine, vf)
        mine['reset_method'] = method
        if function in state['guests']:
            # reset_store() in pci/pci-sysfs.c does not check it
            state['disturbed'].append(function)

    @cards.blocking
    def set_numvfs(self, host, state, pf, count, probe=True):
        card, mine, vf = self._owner(host, state, pf)
        if vf is not None:
            raise sysfs.error(errno.ENOENT, pf)
        card.check_vfs(mine, count)
        if not count:
            self._wait_for_guests(card, mine, state)
            mine['vfs'] = []
            return
        refused = card.faulty(mine).get('vfs')
        if refused:
            raise sysfs.error(getattr(errno, refused), pf)
        if mine['driver'] in _OWN_VFS:
            # it has no sriov_configure (sriov_numvfs_store() in pci/iov.c)
            raise sysfs.error(errno.ENOENT, pf)
        mine['autoprobe'] = probe
        if count == len(mine['vfs']):
            return
        if mine['vfs']:
            raise sysfs.error(errno.EBUSY, pf)
        card.make_vfs(state, mine, count)
        for made in mine['vfs'] * (not probe):
            # pci_device_can_probe() in pci-driver.c
            made['driver'] = None

    @staticmethod
    def _wait_for_guests(card, mine, state):
        # vfio_unregister_group_dev() waits until no guest has a VF
        if mine['vfs'] and _held(card, mine, state):
            raise BlockingIOError

    @cards.blocking
    def write_attribute(self, host, state, function, attribute, value,
                        by=None):
        card, mine, vf = self._owner(host, state, function)
        if attribute == 'reset_method':
            mine[attribute] = '' if value == 'default' else value
            return
        if card.ends_vfs(attribute, value):
            self._wait_for_guests(card, mine, state)
        card.write(mine, vf, attribute, value)

    @staticmethod
    def _owner(host, state, function) -> tuple[
            typing.Any, dict[str, typing.Any], int | None]:
        for address, card in host.cards.items():
            mine = state['cards'][address]
            if card.faulty(mine).get('vanish'):
                continue
            if function == address:
                return card, mine, None
            for number in range(len(mine['vfs'])):
                if function == card.vf_address(number):
                    return card, mine, number
        raise sysfs.error(errno.ENODEV, function)

    @classmethod
    def _rebind(cls, host, state, function, driver) -> bool:
        """Bind a function to a driver, unless its present driver blocks.

        :returns: whether the function was bound. If not, the function has no
            link to its driver any more, and the caller tries again. If the
            caller is killed, Linux still unbinds the function
            (__device_release_driver() in drivers/base/dd.c of Linux 6.16).
        """
        card, mine, vf = cls._owner(host, state, function)
        if driver not in (None, *card.drivers()):
            raise sysfs.error(errno.EINVAL, driver)
        vendor, device, *_ = mine['ids']
        ids = vendor, vf is not None and card.vf_device or device
        if (driver == 'vfio-pci' and ids in _DENYLIST
                and not host.disable_denylist):
            raise sysfs.error(errno.EINVAL, function)
        refused = card.faulty(mine).get('bind')
        if refused:
            raise sysfs.error(getattr(errno, refused), function)
        unbinding = state['unbinding']
        if _blocks(card, mine, vf, state, function):
            if function not in unbinding:
                unbinding.append(function)
            return False
        _bind_now(card, mine, vf, state, driver)
        if function in unbinding:
            unbinding.remove(function)
        return True

    # Actions of tests and demonstrations on the host

    def set_fault(self, address: str, **fault) -> None:
        """Set or end faults of a card.

        :param fault: names and values, as ``faults`` in the description. The
            value None ends a fault.

        :raises KeyError: unknown card.
        :raises ValueError: unknown fault, or a wrong value.
        """
        with self._update() as (host, state):
            card, mine = host.cards[address], state['cards'][address]
            for name, value in fault.items():
                try:
                    mine['faults'][name] = card.fault(name, value)
                except ValueError as e:
                    raise ValueError(f'{name} {e}') from None
            mine['failed'] = 0
            if 'port_errors' in fault:
                mine['errors'] = {}

    def exchange_cards(self, one: str, other: str) -> None:
        """Exchange the cards in two slots, while the host has no power.

        A slot whose card has the fault ``vanish`` is empty. The description
        must have the same kind of cards in both slots.
        """
        with self._update() as (_, state):
            cards = state['cards']
            cards[one], cards[other] = cards[other], cards[one]
        self.reboot()

    def guest_takes(self, *addresses: str, guest: str = '') -> None:
        """Give functions to a guest, as libvirt does for managed hostdevs
        (virHostdevPreparePCIDevices() in virhostdev.c).

        libvirt attaches all functions of a starting guest at once, and
        functions of a running guest one by one. VFIO refuses an IOMMU group if
        a function of it is bound to a driver of the host (vfio.rst in
        Documentation/driver-api). Only one process can open functions of a
        group (vfio_group_fops_open() in drivers/vfio/group.c).

        :param guest: name of the process that gets the functions, or '' for a
            new process.
        :raises OSError: EPERM if the host has a function of an IOMMU group,
            ENODEV if a function does not exist, EBUSY if another guest has a
            function of the same group.
        """
        guest = guest or f'process {uuid.uuid4()}'
        self._check_groups(addresses, guest)
        taken: list[str] = []
        try:
            for address in addresses:
                self._guest_takes(
                    address, guest, os.path.basename(sysfs.find(
                        self._tree(), f'{_PCI}/{address}')[0].get(
                            'driver', '')))
                taken.append(address)
        except OSError:
            for address in taken:
                self.guest_returns(address)
            raise

    def _check_groups(self, addresses, guest):
        tree, opened = self._tree(), self._look()[1]['opened']
        for address in addresses:
            for member in _members(tree, address):
                if opened.get(member, guest) != guest:
                    raise sysfs.error(errno.EBUSY, member)
                if member not in addresses and not _is_harmless(tree, member):
                    raise sysfs.error(errno.EPERM,
                                      f'the IOMMU group of {address}')

    @cards.blocking
    def _guest_takes(self, host, state, address, guest, bound):
        if address in state['guests']:
            raise sysfs.error(errno.EBUSY, address)
        driver = bound if sysfs.is_for_vfio(bound) else self._owner(
            host, state, address)[0].vfio_driver
        if not self._rebind(host, state, address, driver):
            raise BlockingIOError
        state['guests'].append(address)
        state['opened'][address] = guest
        if sysfs.is_for_vfio(bound):
            state['stay'].append(address)

    def guest_returns(self, address: str) -> None:
        """Take a function from a guest, as libvirt does when the guest ends.

        If the function was bound to VFIO before guest_takes(), it stays bound
        to VFIO. Otherwise, the kernel chooses its driver again.
        """
        with self._update() as (host, state):
            state['guests'].remove(address)
            state['opened'].pop(address, None)
            if address in state['stay']:
                state['stay'].remove(address)
                return
            try:
                found = self._owner(host, state, address)
            except OSError:
                # the function has vanished from the bus meanwhile
                return
            self._rebind(host, state, address, _hosts_driver(*found))

    def reboot(self) -> None:
        """Reboot the host. Of a card's state, only Card.keeps() survives."""
        with self._update() as (host, state):
            state.update(guests=[], stay=[], opened={}, unbinding=[])
            for address, card in host.cards.items():
                mine = state['cards'][address]
                state['cards'][address] = {
                    **card.fresh(state), **{n: mine[n] for n in card.keeps()}}

    def physical_address_bits(self):
        return self._described().address_bits

    def has_iova_bitmap(self):
        return self._described().iova_bitmap

    def vfio_module(self, function):
        card, _, _ = self._owner(*self._look(), function)
        # modules.alias has underscores in the names of modules
        return card.vfio_driver.replace('-', '_')

    def guest_writes(self, function: str, **what: str) -> None:
        """Let the guest that has an FPGA region write data into it.

        :param function: PCI address of the guest's function.
        :param what: data for ``registers``, which a reset clears, or for
            ``memory`` of the card, which only a special bitstream clears.
        :raises OSError: ENODEV if no guest has the function.
        """
        with self._update() as (host, state):
            port, mine = self._region_of_guest(host, state, function)
            for kind, value in what.items():
                mine.setdefault('left', {}).setdefault(
                    cards.place_of(port, kind), {})[kind] = value

    def guest_reads(self, function: str) -> dict[str, str]:
        """Return the data of guest_writes() that a guest finds, by place.

        :raises OSError: ENODEV if no guest has the function.
        """
        port, mine = self._region_of_guest(*self._look(), function)
        left = mine.get('left', {})
        return {**left.get('card', {}), **left.get(str(port), {})}

    def _region_of_guest(self, host, state, function):
        _, mine, vf = self._owner(host, state, function)
        if function not in state['guests']:
            raise sysfs.error(errno.ENODEV, function)
        port = 0 if vf is None else mine['vfs'][vf].get('port', vf)
        return port or 0, mine

    def power_cycle(self) -> None:
        """Switch the power off and on: reboot the host, and load the factory
        functions of the cards.

        A card with the fault ``dead`` answers again.
        """
        self.reboot()
        with self._update() as (host, state):
            for address, card in host.cards.items():
                card.power_on(state['cards'][address])

    # The state

    def _described(self):
        """Return the description. Read it again if its file has changed."""
        with self._lock:
            stamp = _stamp(self.path)
            if self._description[0] != stamp or stamp is None:
                self._description = stamp, description.load(self.path)
            return self._description[1]

    def _look(self) -> tuple[cards.Host, cards.State]:
        with self._lock:
            host = self._described()
            stamp = _stamp(self._state_path)
            if self._state[0] != stamp or self._state[1] is not host:
                self._state = stamp, host, self._load(host)
            state = self._state[2]
            _settle(host, state)
            return host, state

    def _load(self, host):
        try:
            with open(self._state_path, encoding='utf-8') as file:
                state = json.load(file)
        except FileNotFoundError:
            state = {}
        # another release may have written the file
        state = {'number': 0, 'cards': {}, 'guests': [], 'stay': [],
                 'opened': {}, 'unbinding': [], 'disturbed': [], 'said': [],
                 **state}
        for address, card in host.cards.items():
            if address not in state['cards']:
                state['cards'][address] = card.at_first(state)
        return state

    @contextlib.contextmanager
    def _update(self):
        if not self._writes:
            with self._lock:
                yield self._look()
                self._sys = None, None, None
            return
        with open(f'{self._state_path}.lock', 'w') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            host = self._described()
            state = self._load(host)
            before = json.dumps(state)
            _settle(host, state)
            yield host, state
            after = json.dumps(state)
            if after != before or not os.path.exists(self._state_path):
                fresh = f'{self._state_path}.new'
                with open(fresh, 'w', encoding='utf-8') as file:
                    file.write(after)
                os.replace(fresh, self._state_path)

    def _renumber(self):
        def renumbered(host, state):
            return [state['cards'][address]
                    for address, card in host.cards.items()
                    if card.faulty(state['cards'][address]).get('renumber')]
        if renumbered(*self._look()):
            with self._update() as (host, state):
                for mine in renumbered(host, state):
                    for function in (mine, *mine['vfs']):
                        function['number'] = cards.number(state)

    def _tree(self):
        """Return /sys as nested dictionaries."""
        with self._lock:
            host, state = self._look()
            busy = [card.is_busy(state['cards'][address])
                    for address, card in host.timed.items()]
            if self._sys[0] is not state or self._sys[1] != busy:
                self._sys = state, busy, _build(host, state)
            return self._sys[2]


def _stamp(path):
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _members(tree, function):
    """Return all functions in the IOMMU group of a function, itself included.
    If the function has no group, return only the function."""
    try:
        return sysfs.find(tree, f'{_PCI}/{function}/iommu_group/devices')[0]
    except OSError:
        return [function]


def _is_of_a_guest(host, state, function):
    """Return whether a guest has another function of the same IOMMU group."""
    return bool(state['guests']) and any(
        member in state['guests'] and member != function
        for member in _members(_build(host, state), function))


def _is_harmless(tree, function):
    """Return whether the driver of a function permits VFIO to give the other
    functions of the IOMMU group to guests."""
    bound = sysfs.find(tree, f'{_PCI}/{function}')[0].get('driver')
    return bound is None or os.path.basename(bound) in _HARMLESS or (
        sysfs.is_for_vfio(os.path.basename(bound)))


def _held(card, mine, state):
    """Return whether a guest has a VF or a mediated device of the card."""
    return any(name in state['guests'] for name in card.in_use(mine))


def _blocks(card, mine, vf, state, function):
    """Return whether unbinding a function blocks: a guest has the function or
    a VF of it, a process has its node open, or the card is busy
    (vfio_unregister_group_dev() in drivers/vfio/vfio_main.c).

    :param vf: number of the VF, None for the physical function.
    """
    return function in state['guests'] or card.is_kept(mine, vf) or (
        vf is None and (card.is_busy(mine) or _held(card, mine, state)))


def _bind_now(card, mine, vf, state, driver):
    if vf is None:
        card.bound(state, mine, driver)
    else:
        mine['vfs'][vf].update(driver=driver, number=cards.number(state),
                               since=time.time())


def _settle(host, state):
    for address, card in host.timed.items():
        card.settle(state['cards'][address])
    for function in state['unbinding'][:]:
        with contextlib.suppress(OSError):
            found = SimulatedKernel._owner(host, state, function)
            if _blocks(*found, state, function):
                continue
            _bind_now(*found, state, None)
        state['unbinding'].remove(function)


def _add_bridges(tree, host):
    """Add root ports and ports of switches, which also are PCI functions."""
    for card in host.cards.values():
        place = f'devices/{"/".join(card.bridges[:1])}'
        for bridge in card.bridges[1:]:
            place = f'{place}/{bridge}'
            if bridge not in tree['bus']['pci']['devices']:
                made = sysfs.add_function(
                    tree, place, _BRIDGE, '0x060400', 'pcieport',
                    2000 + len(tree['kernel']['iommu_groups'])
                    if host.iommu else None)
                made['numa_node'] = str(card.numa_node)


def _hosts_driver(card, mine, vf) -> str | None:
    """Return the driver to which the kernel by default binds a function."""
    if vf is None:
        return card.driver
    return card.vf_driver if mine.get('autoprobe', True) else None


#: capability register of the IOMMU, with Scalable Mode and dirty tracking in
#: its second stage (bits 43 and 45)
_ECAP = '280000f050da'


def _nodes(host):
    """Return the NUMA nodes of the host, with their huge pages."""
    found: sysfs.Directory = {}
    for kib, counts in host.huge_pages.items():
        for node, count in enumerate(counts):
            found.setdefault(f'node{node}', {'hugepages': {}})['hugepages'][
                f'hugepages-{kib}kB'] = {'nr_hugepages': str(count)}
    return found


def _build(host, state):
    tree: sysfs.Directory = {'bus': {'pci': {'devices': {}, 'drivers': {
                'dfl-pci': {}, 'vfio-pci': {}}}},
            'class': {'fpga_region': {}, 'fpga_manager': {}},
            'devices': {'system': {'node': _nodes(host)}},
            'kernel': {'iommu_groups': {}},
            'module': {'vfio_pci': {'parameters': {
                'disable_denylist': 'Y' if host.disable_denylist else 'N'}}}}
    _add_bridges(tree, host)
    group = 1000
    for address, card in host.cards.items():
        group += 100
        card.add(tree, state['cards'][address], group if host.iommu else None)
        of_port = card.faulty(state['cards'][address]).get('port')
        if of_port and card.bridges[1:]:
            port, _ = sysfs.find(tree, f'{_PCI}/{card.bridges[-1]}')
            own = {name: node for name, node in port.items()
                   if not isinstance(node, dict)}
            sysfs.spoil(own, of_port)
            for name in of_port:
                # the functions below the port are not affected
                port.pop(name, None)
            port.update(own)
    if host.iommufd:
        # Documentation/ABI/testing/sysfs-class-iommu-intel-iommu of Linux, and
        # drivers/iommu/iommufd/main.c: a misc device
        tree['class']['misc'] = {'iommu': {}}
        tree['devices']['virtual'] = {'iommu': {'dmar0': {
            'intel-iommu': {'ecap': _ECAP}}}}
        for name in tree['bus']['pci']['devices']:
            sysfs.find(tree, f'{_PCI}/{name}')[0]['iommu'] = sysfs.Link(
                'devices/virtual/iommu/dmar0')
    for name in state['guests']:
        # mediated devices have no entry there
        if name in tree['bus']['pci']['devices']:
            sysfs.find(tree, f'{_PCI}/{name}')[0]['enable'] = '1'
    for name in state['unbinding']:
        function = sysfs.find(tree, f'{_PCI}/{name}')[0]
        tree['bus']['pci']['drivers'][os.path.basename(
            function.pop('driver'))].pop(name)
        # vfio_device_del() precedes the wait
        function.pop('vfio-dev', None)
    return tree
