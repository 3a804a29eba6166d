# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The devices of this host, and the resource providers that show them.

A scan asks the drivers and may take long; it runs in a thread. The provider
tree is made from what the last scan found and from the claims, in memory: Nova
asks for it under the lock that every build needs.
"""

import collections
from collections.abc import Callable, Iterable, Mapping
import contextlib
import dataclasses
import threading
import time

from oslo_log import log as logging

from nova_accel import conf
from nova_accel.drivers import rules
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import model
from nova_accel import naming
from nova_accel import request

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: subsystems of the kernel whose devices drivers look for
_WATCHED = frozenset(('', 'pci', 'mdev', 'fpga_region', 'ptp'))


@dataclasses.dataclass(frozen=True)
class Provider:
    """One resource provider of ours and what stands behind it."""

    uuid: str
    name: str
    parent: str
    address: str
    #: None for the provider of the whole device
    region_index: int | None
    #: resource class -> total; 0 means no inventory
    inventory: Mapping[str, int]
    #: what we say of it now
    traits: frozenset[str]
    #: nothing of it may be given to anybody: reserved = total
    fenced: bool = False
    #: ours, of a state that it is not in now
    lost_traits: frozenset[str] = frozenset()
    #: what it has depends on what is in use
    follows_use: bool = False

    def traits_beside(self, present: Iterable[str]) -> set[str]:
        """Ours now, and of those there the ones that others set."""
        return self.traits | {
            t for t in set(present) - self.traits - self.lost_traits
            if not naming.is_volatile(t)}

    def inventory_beside(self, there: Mapping[str, Mapping],
                         was_fenced: bool, in_use: Callable[[str], bool],
                         ) -> dict[str, dict]:
        """Ours, with the reserved and allocation_ratio that others set.

        :param there: the inventory that the provider has now.
        :param was_fenced: whether its reserved is ours.
        :param in_use: whether anything is allocated from a provider uuid.
        """
        inventory = {}
        for resource_class, total in self.inventory.items():
            item = there.get(resource_class, {})
            reserved = item.get('reserved', 0)
            if self.fenced:
                reserved = total
            elif was_fenced:
                reserved = 0
            inventory[resource_class] = {
                **item,
                'total': total, 'reserved': min(reserved, total),
                'min_unit': 1, 'max_unit': total, 'step_size': 1,
                'allocation_ratio': item.get('allocation_ratio', 1.0)}
        for resource_class, item in there.items():
            # Placement refuses to drop an inventory with allocations, and
            # Nova's whole report would fail with it
            if resource_class not in inventory and in_use(self.uuid):
                inventory[resource_class] = {
                    **item, 'reserved': item['total']}
        return inventory


class Inventory:

    def __init__(self, drivers: Mapping, store):
        """:param drivers: name -> drivers.base.AcceleratorDriver."""
        self._drivers = drivers
        self._store = store
        self._lock = threading.Lock()
        self._scanning = threading.Lock()
        self._devices: dict[str, model.Device] = store.devices()
        self._loaded = store.loaded()
        self._fingerprints = {}
        self._pending: dict[str, object] = {}
        #: driver -> why its last look at its devices failed
        self._failed: dict[str, Exception] = {}
        self._scanned_at = None
        self._closed = False
        self.rules = rules.DeviceRules()
        #: function -> the driver that has it
        self._owners: dict[str, str] = {}
        #: address -> the two drivers that find it
        self.shared: dict[str, tuple[str, str]] = {}
        #: counts the changes that we make to a device, so that a scan that
        #: began before one does not undo it
        self._changes = collections.Counter()
        self._programming = collections.Counter()
        #: one thread at a time works on a card
        self.device_locks = collections.defaultdict(threading.Lock)
        #: held while a handle is chosen and claimed
        self.claiming = threading.Lock()
        #: address -> reasons for which a recovery has been tried
        self._recovered: dict[str, list[str]] = {}
        #: name of the root provider -> its uuid, as Nova's tree has it
        self.node = None
        self._root_uuid = None
        #: our providers in Nova's tree -> address of the device
        self._reported: dict[str, str] = {}
        #: traits on our providers that others set, as of the last pass
        self._foreign_traits: dict[str, frozenset[str]] = {}

    # What there is

    @property
    def devices(self) -> dict[str, model.Device]:
        """By address; those of a driver that failed are quarantined."""
        with self._lock:
            devices, failed = dict(self._devices), dict(self._failed)
        for address, device in devices.items() if failed else ():
            if device.driver in failed:
                devices[address] = dataclasses.replace(
                    device, health=model.Health.QUARANTINED,
                    reason=f'its driver failed: {failed[device.driver]}')
        return devices

    def attends(self, device: model.Device) -> bool:
        """Whether a device's driver prepares and releases each handle."""
        return getattr(self._drivers.get(device.driver), 'ATTENDS', False)

    def find(self, address: str, index: int | None,
             ) -> tuple[model.Device, model.Region | None]:
        """The device that was allocated, and the region if any, both well.

        :raises DeviceUnavailable: one is gone or quarantined.
        """
        name = address if index is None else f'{address} region{index}'
        device = self.devices.get(address)
        try:
            region = (None if device is None or index is None
                      else device.region(index))
        except KeyError:
            device = None
        if device is None:
            raise exception.DeviceUnavailable(
                f'{name} was allocated, and the device is not on this host '
                f'any more: the server has to go elsewhere.')
        for part in filter(None, (device, region)):
            if part.health is not model.Health.OK:
                raise exception.DeviceUnavailable(
                    f'{name} was allocated, and it is {part.health.value} '
                    f'({part.reason}).')
        return device, region

    def driver_of(self, device: model.Device):
        """:raises DeviceUnavailable: its driver is not enabled any more."""
        try:
            return self._drivers[device.driver]
        except KeyError:
            raise exception.DeviceUnavailable(
                f'{device.address} needs the driver {device.driver}, which '
                f'[accel] enabled_drivers does not name: enable it.') from None

    def scan(self, names: Iterable[str] | None = None) -> None:
        """Ask the drivers, and take over what they say.

        A driver that raises or takes too long costs only its own devices:
        those stay as they were, fenced, until it answers again.

        :param names: of the drivers to ask, by default all.
        """
        with self._scanning:
            with self._lock:
                known, changes = dict(self._devices), self._changes.copy()
            hanging = {name for name, future in self._pending.items()
                       if not future.done()}
            started = {
                name: self._start_discovery(name, driver, known)
                for name, driver in self._drivers.items()
                if names is None or name in names}
            found, self._owners = {}, {}
            deadline = time.monotonic() + CONF.accel.discovery_timeout
            for name in self._drivers:
                if name in started:
                    devices = self._discovered(
                        name, started[name], 0 if name in hanging
                        else deadline, known)
                else:
                    devices = {a: d for a, d in known.items()
                               if d.driver == name
                               and d.health is not model.Health.GONE}
                found.update(self._sorted_out(name, devices))
            self._take(found, known, changes)
            self._scanned_at = time.monotonic()

    def _sorted_out(self, name, devices):
        """Those that the operator's rules leave, and that no other driver
        has."""
        chosen = {}
        for address, device in devices.items():
            device = self.rules.applied(device)
            if device is None:
                continue
            owners = {self._owners.get(function, name)
                      for function in device.functions()} - {name}
            if owners:
                self.shared[address] = (owners.pop(), name)
                LOG.error('Device %s is found by the drivers %s; the first '
                          'has it', address, ' and '.join(
                              self.shared[address]))
                continue
            self._owners.update(dict.fromkeys(device.functions(), name))
            chosen[address] = device
        return chosen

    def check_configuration(self) -> None:
        """At start, after the first scan.

        :raises ConfigurationError: two drivers find the same device, or an
            option cannot be read.
        """
        for address, names in self.shared.items():
            raise exception.ConfigurationError(
                f'{address} is found by the drivers {" and ".join(names)} of '
                f'[accel] enabled_drivers: disable one of the two, or narrow '
                f'the rules of [accel] pci_devices.')
        unused = self.rules.unused() + [
            f'{sriov.OPTION} names {address}, which no driver of [accel] '
            f'enabled_drivers finds: correct the address, or enable its '
            f'driver.' for address in sriov.wanted()
            if address not in self._owners]
        for text in unused:
            LOG.warning('%s', text)

    def _start_discovery(self, name, driver, known):
        # a driver that still hangs in its last call is not called again
        future = self._pending.get(name)
        if future is None or future.done():
            def discover():
                self._fingerprints[name] = driver.fingerprint()
                return driver.discover(known)
            future = self._pending[name] = limited.start(discover)
        return future

    def _discovered(self, name, future, deadline, known):
        try:
            devices = limited.wait(
                future, max(0.0, deadline - time.monotonic()),
                f'The driver {name} looking for its devices')
            self._pending.pop(name, None)
            self._failed.pop(name, None)
            return devices
        except Exception as error:
            if not isinstance(error, exception.AcceleratorError):
                LOG.exception('The driver %s failed', name)
            LOG.error('Devices of the driver %s are fenced: %s', name, error)
            with self._lock:
                self._failed[name] = error
            return {a: d for a, d in known.items() if d.driver == name}

    def _take(self, found, known, changes):
        used = {c.device_address for c in self._store.claims()}
        for address, device in known.items():
            if address in found:
                continue
            if device.health is not model.Health.GONE:
                LOG.warning('Device %s is not found any more', address)
            # its provider stays until nothing is allocated from it
            found[address] = dataclasses.replace(
                device, health=model.Health.GONE,
                reason='its driver does not find it any more' + (
                    ', and a server holds it' if address in used else ''))
        found = {a: self._with_loaded(d) for a, d in found.items()}
        with self._lock:
            for address, device in self._devices.items():
                if (self._programming[address]
                        or self._changes[address] != changes[address]):
                    found[address] = device
            changed = found != self._devices
            self._devices = found
        if changed:
            self._store.set_devices(found)

    def _with_loaded(self, device):
        regions = []
        for region in device.regions:
            loaded = self._loaded.get((device.address, region.index))
            fits = loaded and loaded.function_uuid == region.function_uuid
            regions.append(dataclasses.replace(
                region, bitstream_id=loaded.bitstream_id if fits else None,
                function_name=loaded.function_name if fits else None))
        return dataclasses.replace(device, regions=tuple(regions))

    def scan_if_due(self) -> None:
        """Start a scan in the background when devices may have changed."""
        if (self._scanned_at is not None and time.monotonic()
                - self._scanned_at < CONF.accel.discovery_interval):
            return
        self._scanned_at = time.monotonic()
        limited.start(self._scan_if_changed)

    def watch(self, kernel) -> None:
        """Scan soon after the kernel says that a device came or went.

        Where it does not say, scan_if_due() finds out.

        :param kernel: nova_accel.host.kernel.Kernel or a simulated one.
        """
        def listen():
            changed = False
            try:
                for subsystem in kernel.changes():
                    if self._closed:
                        return
                    if subsystem in _WATCHED:
                        # as for VFs, many come at a time
                        changed = True
                    elif subsystem is None and changed:
                        changed = False
                        self._scan_if_changed()
            except Exception as error:
                LOG.warning('The kernel does not say when devices come and '
                            'go (%s); they are noticed within %d s', error,
                            CONF.accel.discovery_interval)
        limited.start(listen)

    def close(self) -> None:
        """Listen no more."""
        self._closed = True

    def _scan_if_changed(self):
        """Ask those drivers of which another answer is to be expected."""
        try:
            changed = [name for name, driver in self._drivers.items()
                       if name in self._pending or driver.fingerprint()
                       != self._fingerprints.get(name)]
            if changed:
                self.scan(changed)
        except Exception:
            LOG.exception('Looking for changed devices failed')

    def recover(self) -> None:
        """Have drivers bring back quarantined regions of unused devices.

        A programming that failed just before nova-compute was killed leaves
        such regions, and others that a guest of the same card prevented from
        being brought back at once.
        """
        tried = False
        for address, device in self.devices.items():
            reasons = sorted(
                r.reason for r in device.regions
                if r.health is model.Health.QUARANTINED)
            if (device.health is not model.Health.OK
                    or reasons in ([], self._recovered.get(address))):
                continue
            if not self.device_locks[address].acquire(blocking=False):
                continue
            with contextlib.ExitStack() as stack:
                stack.callback(self.device_locks[address].release)
                stack.enter_context(self.programming(address))
                if self._set_apart(address):
                    self._recovered[address], tried = reasons, True
                    LOG.info('Device %s is recovered: %s', address,
                             '; '.join(reasons))
                    self._recover(address, device, stack)
        if tried:
            self.scan()

    def _set_apart(self, address):
        """Give nothing more of a device; False where a server has some."""
        with self.claiming:
            if any(c.device_address == address for c in self._store.claims()):
                return False
            with self._lock:
                self._devices[address] = dataclasses.replace(
                    self._devices[address], health=model.Health.QUARANTINED,
                    reason='it is being recovered')
            return True

    def _recover(self, address, device, stack):
        running = limited.start(self.driver_of(device).recover, address)
        try:
            limited.wait(running, CONF.accel.programming_timeout,
                         f'Recovering {address}')
        except exception.DeviceTimeout as error:
            LOG.error('%s', error)
            later = stack.pop_all()

            def returned(_future):
                later.close()
                self.scan()
            running.add_done_callback(returned)
        except Exception as error:
            LOG.error('Device %s could not be recovered: %s', address, error)

    @contextlib.contextmanager
    def programming(self, address: str):
        """While a device is programmed what a scan sees of it means nothing."""
        with self._lock:
            self._programming[address] += 1
        try:
            yield
        finally:
            with self._lock:
                self._programming[address] -= 1
                self._changes[address] += 1

    def is_open(self, address: str, index: int | None) -> bool:
        """Whether a guest can change the region without our seeing it."""
        device = self.devices.get(address)
        return any(r.open_to_guest for r in device.regions
                   if r.index == index) if device else False

    def changed(self, address: str) -> None:
        """What a scan that began before now sees of a device is old."""
        with self._lock:
            self._changes[address] += 1

    def set_loaded(self, address: str, index: int,
                   loaded: model.Loaded | None) -> None:
        """Record what a region carries after a programming, at once."""
        if loaded:
            self._store.set_loaded(address, index, loaded)
        else:
            self._store.drop_loaded(address, index)
        with self._lock:
            if loaded:
                self._loaded[address, index] = loaded
            else:
                self._loaded.pop((address, index), None)
            device = self._devices[address]
            self._devices[address] = self._with_loaded(device.with_region(
                index, function_uuid=loaded and loaded.function_uuid))
            devices = dict(self._devices)
        self._store.set_devices(devices)

    # What Placement shows

    def providers(self, node: str, root_uuid: str,
                  ) -> dict[str, Provider]:
        """Our providers by uuid, parents before children."""
        claims = self._store.claims()
        used = {(c.device_address, c.region_index) for c in claims}
        # a driver tells what can be made now; what was made is in the claims
        made = collections.defaultdict(set)
        # free in Placement, and not yet in truth
        held_up = set()
        for claim in claims:
            if claim.state is model.ClaimState.DELETING:
                held_up.add(claim.handle)
            elif claim.created_type:
                made[claim.device_address].add(claim.handle)
        result = {}
        for device in self.devices.values():
            try:
                for provider in self._providers_of(
                        device, node, root_uuid, used, made[device.address],
                        held_up):
                    result[provider.uuid] = provider
            except exception.InvalidName as error:
                LOG.error('Device %s is not reported: %s',
                          device.address, error)
        return result

    def _providers_of(self, device, node, root_uuid, used, made, held_up):
        name = naming.device_provider_name(node, device.address)
        uuid = naming.provider_uuid(root_uuid, node, name)
        resource_class = naming.resource_class(device.type)
        device_ok = device.health is model.Health.OK
        inventory = {}
        if device.memory_mib:
            inventory[naming.MEMORY_CLASS] = device.memory_mib
        handles = {*device.handles, *made}
        left = handles - held_up
        # with none left it is fenced, and not without inventory: that is kept
        # reserved while it is allocated, and nobody would give it back
        fenced = not device_ok or not left and bool(
            handles or device.creatable)
        if handles:
            inventory[resource_class] = len(left or handles)
        traits = naming.device_traits(device)
        yield Provider(uuid=uuid, name=name, parent=node,
                       address=device.address, region_index=None,
                       inventory=inventory,
                       traits=frozenset(traits | (
                           {naming.FENCED} if fenced else set())),
                       fenced=fenced,
                       lost_traits=frozenset(device.volatile_traits) - traits,
                       follows_use=(bool(device.creatable)
                                    or self.attends(device)))
        for region in device.regions:
            traits = naming.region_traits(device, region)
            key = (device.address, region.index)
            if region.programmable and key not in used:
                traits.add(naming.PROGRAMMABLE)
            name = naming.region_provider_name(
                node, device.address, region.index)
            ok = device_ok and region.health is model.Health.OK
            if not ok:
                traits.add(naming.FENCED)
            yield Provider(
                uuid=naming.provider_uuid(root_uuid, node, name), name=name,
                parent=uuid, address=device.address,
                region_index=region.index,
                inventory={resource_class: len(region.handles)}
                if region.handles else {},
                traits=frozenset(traits), fenced=not ok)

    def own_providers(self) -> dict[str, Provider]:
        """providers() of the node that Nova told us last."""
        if self._root_uuid is None:
            return {}
        return self.providers(self.node, self._root_uuid)

    def update_tree(self, tree, node: str,
                    in_use: Callable[[str], bool]) -> None:
        """Make Nova's provider tree show our devices; touch nothing else.

        :param tree: nova.compute.provider_tree.ProviderTree of the host.
        :param in_use: whether anything is allocated from a provider; asked
            only for providers whose device or region is gone.
        """
        root_uuid = tree.data(node).uuid
        self._find_reported(tree, node, root_uuid)
        wanted = self.providers(node, root_uuid)
        fenced_before = set()
        # asked once: Nova's tree searches itself for each provider named
        there = set(tree.get_provider_uuids())
        for provider in wanted.values():
            if provider.uuid not in there:
                if tree.exists(provider.name):
                    # made by somebody else under our name
                    tree.remove(provider.name)
                    there = set(tree.get_provider_uuids())
                tree.new_child(provider.name, provider.parent,
                               uuid=provider.uuid)
            data = tree.data(provider.uuid)
            was_fenced = naming.FENCED in data.traits
            if was_fenced:
                fenced_before.add(provider.uuid)
            inventory = provider.inventory_beside(
                data.inventory, was_fenced, in_use)
            if inventory != data.inventory:
                tree.update_inventory(provider.uuid, inventory)
            traits = provider.traits_beside(data.traits)
            self._foreign_traits[provider.uuid] = traits - provider.traits
            if traits != data.traits:
                tree.update_traits(provider.uuid, traits)
            self._reported[provider.uuid] = provider.address
        self._remove_stale(tree, wanted, fenced_before, in_use)

    def _find_reported(self, tree, node, root_uuid):
        """Which providers of the tree are ours, also from an earlier life."""
        if self._root_uuid == root_uuid:
            return
        self.node, self._root_uuid = node, root_uuid
        self._reported = {}
        for uuid in tree.get_provider_uuids(node):
            address = naming.address_of_provider(node, tree.data(uuid).name)
            if address:
                self._reported[uuid] = address

    def _remove_stale(self, tree, wanted, fenced_before, in_use):
        """Take away what has no device any more, when nobody holds it.

        First fenced, so that nothing new comes, and removed in a later pass:
        removing a provider with allocations fails, and Nova's whole report
        with it.
        """
        gone = {a for a, d in self.devices.items()
                if d.health is model.Health.GONE}
        if gone:
            gone -= {c.device_address for c in self._store.claims()}
        stale = [uuid for uuid, address in self._reported.items()
                 if uuid not in wanted or address in gone]
        if not stale:
            return
        kept = set()
        # regions before their device
        for uuid in sorted((u for u in stale if tree.exists(u)),
                           key=lambda u: tree.data(u).name, reverse=True):
            data = tree.data(uuid)
            address = self._reported[uuid]
            fenced = uuid in fenced_before or (
                uuid not in wanted and naming.FENCED in data.traits)
            if (fenced and address not in kept
                    and not in_use(uuid)):
                tree.remove(uuid)
                del self._reported[uuid]
                continue
            kept.add(address)
            tree.update_inventory(uuid, {
                name: {**item, 'reserved': item['total']}
                for name, item in data.inventory.items()})
            tree.add_traits(uuid, naming.FENCED)
        for address in gone - kept:
            self._forget(address)

    def quarantine(self, address: str, index: int, reason: str) -> None:
        """Keep a region from everybody until a scan says otherwise."""
        with self._lock:
            self._devices[address] = self._devices[address].with_region(
                index, health=model.Health.QUARANTINED, reason=reason)

    def _forget(self, address):
        with self._lock:
            self._devices.pop(address, None)
            devices = dict(self._devices)
        self._store.set_devices(devices)

    # What was allocated

    def offers(self, allocations: Mapping[str, Mapping] | None,
               free: Iterable[tuple[str, int | None]] = (),
               ) -> list[request.Allocation]:
        """The part of an instance's allocations that is ours.

        :param allocations: as Nova hands them to the driver,
            ``{provider uuid: {'resources': {class: amount}}}``; during an
            evacuation those of both hosts.
        :param free: (address, region index) that count as unused, because the
            claims on them are of this very instance.
        """
        offers = []
        free = set(free)
        own = self.own_providers()
        for uuid, allocation in (allocations or {}).items():
            provider = own.get(uuid)
            if provider is None:
                continue
            resources = {
                name: amount
                for name, amount in allocation['resources'].items()
                if naming.is_accelerator_class(name)}
            if not resources:
                continue
            traits = provider.traits | self._foreign_traits.get(
                uuid, frozenset())
            if (provider.address, provider.region_index) in free:
                traits |= {naming.PROGRAMMABLE}
            offers.append(request.Allocation(uuid, resources, traits))
        return offers
