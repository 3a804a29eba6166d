# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Settle devices that may contain data of a server without a claim.

The table ``holds`` of the store lists such devices: all devices of a host
whose store is new or an older copy (attach.store_age), and cards that were
absent when their servers were deleted (attach.handles). The devices are
withheld until they are *settled*, that is, until each handle has a claim or is
clean:

====================================== ======================================
State of a device                      Action
====================================== ======================================
each handle has a claim                settle it; from now on attach.reconcile
                                       judges the claims
a guest has a handle without a claim   withhold it
Placement has allocated more of its    withhold it, unless each of its handles
class to a server than the server has  has a claim that Placement or a guest
claims                                 confirms
otherwise, if the driver cleans its    settle it; its free handles get DELETING
devices                                claims without a server, and are cleaned
                                       as after any server
libvirt or Placement does not answer   withhold it
====================================== ======================================

For example, the claim store was lost, and a GPU has two VFs. The guest of
server A carries the claim of the first VF, which attach.store_age restores. No
guest has the second VF, and no server has an allocation without a claim. Hence
the GPU is settled: the second VF is cleaned and then offered.

Each start of nova-compute and each comparison tries again. A part without a
handle, for example a VF that libvirt left bound to vfio-pci, is settled later.
Until then the row of the device stays, and lists the settled parts. Each
device is settled in one transaction. After a crash, the next start settles the
remaining devices.

A handle that was released under the policy none or reset is stored as
``unclean`` with its card until it is cleaned. Under the same policy, the next
server gets the handle as it is. Once [accel] handover demands more, the handle
gets a DELETING claim without a server, and is cleaned as after any server.
"""

import collections
import dataclasses
import functools

from oslo_utils import uuidutils

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import publishing
from nova_accel.attach import store_age as age
from nova_accel import conf
from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import inventory as host_inventory
from nova_accel.inventory import holds
from nova_accel.inventory import offers
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel.store import claim_store
from nova_accel.store import values

CONF = conf.CONF
LOG = logging.getLogger(__name__)

_State = model.ClaimState
_ADVICE = 'shelve or delete this server'


class _Unknown(Exception):
    """A device cannot be settled now. The message is the reason, as a clause.
    """


@dataclasses.dataclass(eq=False)
class Settling:
    _store: claim_store.ClaimStore
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _publisher: publishing.Publisher
    store_age: age.StoreAge
    _cloud: novas.Cloud

    def __post_init__(self) -> None:
        #: held while devices are settled
        self._lock = locks.Lock('settling')
        self._once = logging.Once()

    def settle_now(self) -> None:
        """Scan and settle unsettled devices now, for a server that starts. The
        last guest of the server may have released such a device a moment ago.
        """
        addresses = {row.address for row in self._store.unsettled()
                     if row.address}
        if addresses:
            self._inventory.scanner.scan(addresses=addresses)
            self.run()

    def check_settled(self, server_uuid, allocations, held):
        """Check that no unsettled device can belong to a server.

        This is possible if more devices of a provider are allocated to the
        server than it has claims.

        :param allocations: allocations of the server, by provider uuid.
        :param held: claims of the server.
        :raises DeviceUnavailable: an unsettled device may belong to the
            server.
        """
        unsettled = self.in_doubt()
        if not unsettled:
            return

        has = collections.Counter(claim.provider_uuid for claim in held)
        if any(self._may_be_unsettled(uuid, resources, unsettled)
               for uuid, allocation in allocations.items()
               for resources in [naming.accelerators(allocation['resources'])]
               if sum(resources.values()) > has[uuid]):
            found = (f'Server {server_uuid} cannot start before nova-compute '
                     f'has determined its devices')
            raise exception.DeviceUnavailable(
                f'{found}, because the claim store is new or an older copy: '
                f'start it again in some minutes, or read the log of '
                f'nova-compute.',
                found=f'{found}; start it again in some minutes')

    def in_doubt(self):
        """Return the rows of unsettled devices, which may belong to a server.
        A partly settled row counts only if a part that is not settled has a
        handle."""
        devices = self._inventory.devices.values()
        return [row for row in self._store.unsettled()
                if not row.settled or any(map(row.means, devices))]

    def _may_be_unsettled(self, provider_uuid, resources, unsettled):
        provider = self._inventory.shown.providers().get(provider_uuid)
        if provider:
            devices = self._inventory.devices
            return any(row.address == address or row.means(devices[address])
                       for row in unsettled for address in provider.addresses)
        # an absent device, unless the claim is of a vGPU of Nova's own
        return any(map(naming.is_custom, resources)) or bool(
            self._cloud.find_providers(
                trait=CONF.accel.owner_trait, uuid=provider_uuid))

    def is_settled(self, claim: model.Claim) -> bool:
        """Return whether the device of a claim is settled or absent. Before
        that, the claim must not end."""
        device = self._inventory.present(claim.device_address)
        return device is None or not any(
            row.means(device) for row in self._store.unsettled())

    def run(self) -> None:
        """Settle the devices that can be settled. The others stay withheld."""
        with self._lock:
            self._run()

    def _run(self):
        todo = self._store.unsettled() - {values.EVERYTHING}
        if not todo or not self.store_age.begin():
            return
        # of the node in the last report to Nova, if there was one
        parts = self._inventory.shown.by_part()
        # queried once, for the first device that needs it
        guests = functools.cache(self._cloud.guest_devices)
        given = functools.cache(
            lambda: self.store_age.allocated(
                self._inventory.shown.providers()))
        for device in self._inventory.devices.values():
            rows = [row for row in todo if row.means(device)]
            if not (rows and self._inventory.present(device.address)
                    and (device.address, None) in parts):
                continue
            try:
                self._settle(device, rows, parts, guests, given)
                self._once.forget('device', device.address)
            except Exception as error:
                self._once.log(
                    ('device', device.address), LOG.error,
                    'Device %s may have data of a server, and is withheld: %s',
                    device.address, str(error) or repr(error))

    def _settle(self, device, rows, parts, guests, given):
        """Settle a device, and begin to clean the handles that no server has
        a claim on.

        :param rows: the unsettled rows about the device.
        :param guests: function that returns Cloud.guest_devices().
        :param given: function that returns StoreAge.allocated().
        :raises _Unknown: the device cannot be settled now.
        """
        before = frozenset.intersection(*(row.settled for row in rows))
        claims = self._holdings.all()
        shown = (values.Unsettled.parts(device) | {
            str(c.region_index) if device.regions else c.handle.address
            for c in claims if c.device_address == device.address}) - before
        found = [(region, parts[device.address, index])
                 for index, region in (
                     [(r.index, r) for r in device.regions] or [(None, None)])
                 if (device.address, index) in parts
                 and str(index) not in before]
        if len(found) < len(device.regions) - len(before):
            raise _Unknown('it cannot be reported')
        if not device.creatable and not shown:
            raise _Unknown(f'it has no handle now '
                           f'({device.reason or "for an unknown reason"})')
        self._check_in_place(device, found)
        taken = {claim.handle for claim in claims}
        free = [(region, provider, handle) for region, provider in found
                for handle in (region or device).handles
                if handle not in taken and handle.address not in before]
        self._check_no_guest_has(device, rows, free, guests())
        self._check_placement(device, free, claims, guests(), given())
        released = [
            claim_of_none(self._inventory, device,
                          region and region.index, handle, provider)
            for region, provider, handle in free
            if region or self._inventory.prepares_every_handle(device)]
        for region, _ in found:
            if region and any(row.by_address for row in rows):
                self._inventory.contents.forget(
                    device.address, region.index, None)
        self._holdings.settle(
            rows, _left(device, rows, before | shown), released)
        for claim in released:
            LOG.warning('%s of %s, which no server has, is cleaned before it '
                        'is offered', claim.handle.address, device.address)
        self._publisher.show({provider for _, provider in found})

    def _check_in_place(self, device, found):
        """Check that all claims at the address of a device are on this card,
        and match its present division into PF, VFs or sets."""
        if self._inventory.table.is_misplaced(device.address):
            raise _Unknown('servers have claims on another card at its '
                           'address, or on it at another one; shelve or '
                           'delete them')
        offered = self._inventory.table.offered()
        for region, _ in found:
            # VFs of a server that a boot of the host has removed would be
            # cleaned with the whole function
            if any(hold.kind is holds.Kind.OVERLAP for hold in offered.holds_of(
                    (device.address, region.index if region else None))):
                raise _Unknown('servers have VFs of it that do not exist now, '
                               'or all of it; create the VFs again, or shelve '
                               'or delete these servers')

    def _check_no_guest_has(self, device, rows, free, guests):
        """Check that no guest has a free handle of the device.

        :param free: handles without a claim.
        """
        claimed = {address for claim in self._holdings.all()
                   for address in claim.handle.addresses}
        # guests that do not run still have the addresses from before the card
        # moved
        claimed |= {
            pci.moved(address, device.address, row.address)
            for row in rows if row.moved
            for claim in self._holdings.all()
            if claim.device_address == device.address
            and claim.handle.type is model.HandleType.PCI
            for address in claim.handle.addresses}
        addresses = {handle.address for _, _, handle in free}
        # guests may have VFs of its former address, which are not visible
        moved = tuple({row.address.rpartition(':')[0] + ':' for row in rows
                       if row.moved and row.address != device.address})
        for server, there in sorted(guests.items()):
            for address in sorted(set(there) - claimed):
                if address in addresses or moved and address.startswith(moved):
                    why = self.store_age.refused.get(
                        server, 'it carries no claim')
                    raise _Unknown(f'the guest of server {server} has '
                                   f'{address}, and {why}; {_ADVICE}')

    def _check_placement(self, device, free, claims, guests, given):
        # cards may have changed slots: an allocation without a claim may be
        # for any device of the class
        name = naming.resource_class(device.type)
        owners = given.short.get(name)
        if owners and (free or any(
                not given.confirms(c) and c.handle.address not in guests.get(
                    c.instance_uuid, ())
                for c in claims if c.device_address == device.address)):
            raise _Unknown(
                f'Placement has allocated {name} to '
                f'{", ".join(sorted(owners))}, and neither a claim nor a guest '
                f'shows which device; {_ADVICE}')

    # Unclean handles

    def clean(self) -> None:
        """Clean unclean handles that no server has. Unclean handles of servers
        are cleaned when the servers release them."""
        shown = self._inventory.shown.by_part()
        claims = [
            claim_of_none(self._inventory, offer.device, offer.part[1],
                          offer.handle, shown[offer.part])
            for offer in self._inventory.table.offered().all()
            if offer.device and offer.has(holds.Kind.UNCLEAN)
            and not offer.has(holds.Kind.GONE)
            and not offer.has(holds.Kind.LEFT_OUT)
            and offer.state is offers.State.WITHHELD and offer.part in shown]
        if not claims:
            return
        with self._inventory.claiming:
            taken = {claim.handle for claim in self._holdings.all()}
            claims = [c for c in claims if c.handle not in taken]
            self._holdings.settle(claims=claims)
        for claim in claims:
            LOG.warning('%s of %s was cleaned less after its last server than '
                        '%s demands now: it is cleaned before it is offered',
                        claim.handle.address, claim.device_address,
                        handover.OPTION)
        self._publisher.show_devices(claims)


def _left(device, rows, done):
    """Return the rows to keep after parts of a device were settled. Another
    part of the card may have no handle yet.

    :param done: all settled parts.
    """
    if (device.creatable or device.address in done
            or device.regions and len(done) == len(device.regions)):
        return ()
    return {dataclasses.replace(row, ids=row.ids or (
        '' if row.serial else device.ids), settled=done) for row in rows}


def claim_of_none(inventory: host_inventory.Inventory, device: model.Device,
                  index: int | None, handle: model.AttachHandle,
                  provider_uuid: str, **fields) -> model.Claim:
    """Return a DELETING claim without a server, to clean a free handle.

    :param fields: fields of model.Claim to add, or to use instead of these.
    """
    return model.Claim(**{
        'uuid': uuidutils.generate_uuid(), 'instance_uuid': '',
        'consumer_uuid': '', 'group': '',
        'provider_uuid': provider_uuid,
        'resource_class': naming.resource_class(device.type),
        'device_address': device.address, 'region_index': index,
        **inventory.identity_for_claim(device.address), 'handle': handle,
        'state': _State.DELETING, 'prepared': True, **fields})
