# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices that may have data of a server although no claim says so.

That is so for every device when the claim store is new and the host is not:
the file was lost or moved away. And it is so for a card that was gone when its
server was deleted, and comes back. The table ``unsettled`` of the store says
which they are; a new file begins with a row that means all of them. What is
unsettled is fenced, and stays so until everything below is known:

====================================== ======================================
what is found                          what follows
====================================== ======================================
Placement has no provider of           a new host: its devices are offered as
nova_accel, and no guest a device      they are
a guest of libvirt, running or not,    a claim of its server, BOUND
has the handle
the allocations of the provider leave  a claim of that consumer, BOUND
one consumer for all handles left (of
a pool: of all its devices), and VFs
that are not offered now
they leave several; or the card was    the device stays fenced; each start of
at another address, of which a guest   nova-compute and each comparison asks
or Placement says that a server has    again
something
no consumer is left, and the driver    a claim of no server, DELETING: it is
cleans its devices                     cleaned as after any server, tried
                                       again, and fenced where that fails
libvirt or Placement does not answer   the device stays fenced
====================================== ======================================

A part without a handle, as a VF that libvirt left with VFIO, is settled later;
until then its row stays, and lists the parts that are settled already.
A claim that was found does not say what the region carried: the origin of that
is not known. Each device is settled in one transaction; a process that is
killed goes on with those that are left.

Whether a handle is clean is a fact of the card, and not of the policy at its
last release. What was released under the policies none or reset is noted as
``unclean`` with its card until it is cleaned. While the policy is the same, the
handle is given on as it is. Once [accel] handover demands more, it is given to
no server, and gets a claim of no server that is being released: it is cleaned
as after any server, tried again, and fenced where that fails.
"""

import collections
import dataclasses

from oslo_utils import uuidutils

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import publishing
from nova_accel import conf
from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import inventory as host_inventory
from nova_accel.inventory import holds
from nova_accel.inventory import offers
from nova_accel.inventory import tree as provider_tree
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming

CONF = conf.CONF
LOG = logging.getLogger(__name__)

_State = model.ClaimState
_Policy = handover.Policy


class _Unknown(Exception):
    """Why a device cannot be settled now; one clause."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """A device without regions, or a region: what has a provider."""

    device: model.Device
    region: model.Region | None
    provider_uuid: str
    #: every device behind the provider
    members: tuple[model.Device, ...]
    #: addresses of handles that have been settled
    settled: frozenset[str]

    @property
    def index(self) -> int | None:
        return self.region.index if self.region else None

    @property
    def handles(self) -> tuple[model.AttachHandle, ...]:
        return tuple(h for h in (self.region or self.device).handles
                     if h.address not in self.settled)

    @property
    def all_handles(self) -> tuple[model.AttachHandle, ...]:
        """Of every device behind the provider."""
        return self.handles if self.region else tuple(
            handle for device in self.members for handle in device.handles)


class Settling:

    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings,
                 publisher: publishing.Publisher, cloud: novas.Cloud):
        self._inventory = inventory
        self._holdings = holdings
        self._publisher = publisher
        self._cloud = cloud
        #: held while devices are settled
        self._lock = locks.Lock('settling')
        self._once = logging.Once()

    def before_report(self, tree, node: str) -> bool:
        """Find out whether the host is as new as the store.

        Under Nova's resource tracker's lock; libvirt is asked only where the
        store is new and Placement has nothing of nova_accel.

        :param tree: nova.compute.provider_tree.ProviderTree, with what
            Placement has.
        :returns: whether they may be shown. The reason why not is logged.
        """
        if model.EVERYTHING not in self._holdings.unsettled():
            return True
        try:
            shown = provider_tree.accelerators(tree, node)
            # all devices that are here are meant in any case
            todo = {part for part in shown if not naming.is_pool(part)}
            if not shown and not self._in_guests():
                LOG.info('The claim store is new, and so is this host: its '
                         'accelerators are offered as they are')
            else:
                LOG.warning(
                    'The claim store is new, and this host is not: which '
                    'server has which device is asked of libvirt and '
                    'Placement, and what no server has is cleaned before it '
                    'is offered again')
                todo |= set(self._inventory.devices)
            self._holdings.settle(
                done=[model.EVERYTHING],
                todo=[model.Unsettled(address) for address in todo])
            return True
        except Exception as error:
            self._say('', str(error) or repr(error))
            return False

    def _in_guests(self) -> bool:
        ours = {function for device in self._inventory.devices.values()
                for function in (*device.functions(), *(
                    h.address for h in device.handles))}
        return any(ours & there
                   for there in self._cloud.guest_devices().values())

    def settle_now(self) -> None:
        """Settle what can be, when a server needs it: also what its guest
        has just returned."""
        addresses = {row.address for row in self._holdings.unsettled()
                     if row.address}
        if addresses:
            self._inventory.scanner.scan(addresses=addresses)
            self.run()

    def check_settled(self, server_uuid, allocations, held):
        """Check that nothing is unsettled that a server may have had, to which
        a claim is missing.

        :raises DeviceUnavailable: what it had may be a device that is not
            settled yet (attach.settling).
        """
        unsettled = self.in_doubt()
        if not unsettled:
            return

        has = collections.Counter(claim.provider_uuid for claim in held)
        if any(self._may_be_unsettled(uuid, resources, unsettled)
               for uuid, allocation in allocations.items()
               for resources in [naming.accelerators(allocation['resources'])]
               if sum(resources.values()) > has[uuid]):
            raise exception.DeviceUnavailable(
                f'Server {server_uuid} was about to start, and which devices '
                f'it has is being found out, as the claim store is new: start '
                f'it again in some minutes; the log of nova-compute says what '
                f'is missing.',
                found=f'Server {server_uuid} was about to start, and which '
                      f'devices it has is being found out; start it again in '
                      f'some minutes')

    def in_doubt(self):
        """Return the rows that can be about a server's device: a row whose
        unsettled parts show no handle is not."""
        devices = self._inventory.devices.values()
        return [row for row in self._holdings.unsettled()
                if not row.but_for or any(map(row.means, devices))]

    def _may_be_unsettled(self, provider_uuid, resources, unsettled):
        """Return whether an unsettled device may be behind this provider."""
        provider = self._inventory.providers().get(provider_uuid)
        if provider:
            devices = self._inventory.devices
            return any(row.address == address or row.means(devices[address])
                       for row in unsettled for address in provider.addresses)
        # of a device that is away, unless it is a vGPU of Nova's own
        return any(map(naming.is_custom, resources)) or bool(
            self._cloud.find_providers(
                trait=CONF.accel.owner_trait, uuid=provider_uuid))

    def run(self) -> bool:
        """Settle what can be; the others stay fenced.

        :returns: whether something was.
        """
        with self._lock:
            before = self._holdings.unsettled()
            self._run(before)
            return self._holdings.unsettled() != before

    def _run(self, unsettled):
        todo = unsettled - {model.EVERYTHING}
        if not todo:
            return
        # of the node that Nova told last, if it has
        parts = self._inventory.shown_by()
        devices = [d for d in self._inventory.devices.values()
                   if d.health is not model.Health.GONE
                   and (d.address, None) in parts]
        guests = None
        for device in devices:
            rows = [row for row in todo if row.means(device)]
            if not rows:
                continue
            try:
                if guests is None:
                    guests = self._cloud.guest_devices()
                self._settle(device, rows, parts, guests)
                self._once.forget('device', device.address)
            except Exception as error:
                self._say(device.address, str(error) or repr(error))
                if guests is None:
                    return

    def _say(self, address, why):
        self._once.say(('device', address), LOG.error,
                       'What %s may have of a server is not known, and it is '
                       'offered to none: %s', address or 'each accelerator',
                       why)

    def _settle(self, device, rows, parts, guests):
        """Write down, at once, who has a device and which parts need cleaning.

        :raises _Unknown: it cannot be known now.
        :raises AcceleratorError: Placement does not answer.
        """
        before = frozenset.intersection(*(row.but_for for row in rows))
        shown = model.Unsettled.parts(device) - before
        mine = [self._part(device, region, parts[device.address, index],
                           before)
                for index, region in (
                    [(r.index, r) for r in device.regions] or [(None, None)])
                if (device.address, index) in parts
                and str(index) not in before]
        if len(mine) < len(device.regions) - len(before):
            raise _Unknown('it cannot be reported')
        if not device.creatable and not shown:
            raise _Unknown(f'it shows nothing that a server could have '
                           f'({device.reason or "no handle"})')
        held = {c.handle for c in self._holdings.all()
                if c.device_address == device.address}
        # a card that came back is known by more
        by_address = any(row.by_address for row in rows)
        moved = {row.address for row in rows
                 if row.moved} - {device.address}
        for address in sorted(moved):
            if self._is_had(address, device, mine, guests):
                raise _Unknown(
                    f'it was at {address}, where servers have something; put '
                    f'it back there, or shelve or delete them')
        if (moved or not by_address) and self._inventory.table.is_misplaced(
                device.address):
            raise _Unknown('servers have claims on another card at its '
                           'address, or on it at another one; shelve or '
                           'delete them')
        found: list[model.Claim] = []
        for part in mine:
            # the VFs of a server, which a boot of the host has taken, would be
            # cleaned with the whole function, or be its server's with that
            if model.is_held_otherwise(
                    part.region or device, device.address, {
                        c.handle for c in self._holdings.all()
                        if c.part == (device.address, part.index)}):
                raise _Unknown('servers have VFs of it that are not there, or '
                               'all of it; create the VFs again, or shelve or '
                               'delete these servers')
            if by_address and not moved:
                found += self._ties(part, guests, held, found)
            taken = held | {claim.handle for claim in found}
            if part.region or self._inventory.prepares_every_handle(device):
                found += [self._claim(part, handle)
                          for handle in part.handles if handle not in taken]
        if by_address:
            for part in mine:
                if part.region:
                    self._inventory.contents.forget(
                        device.address, part.region.index, None)
        self._holdings.settle(rows, _left(device, rows, before | shown), found)
        for claim in found:
            if claim.instance_uuid:
                LOG.warning('%s of %s is what server %s has',
                            claim.handle.address, device.address,
                            claim.instance_uuid)
            else:
                LOG.warning('%s of %s, which no server has, is cleaned before '
                            'it is offered', claim.handle.address,
                            device.address)
        self._publisher.show(self._cloud.admin_context(),
                             {part.provider_uuid for part in mine})

    def _part(self, device, region, provider_uuid, settled) -> _Part:
        """Return the part of a device to settle.

        If the device will join a pool but Placement still has a provider of
        its own, this provider: its allocation has not moved.
        """
        provider = self._inventory.providers()[provider_uuid]
        devices = self._inventory.devices
        root = self._inventory.root
        if provider.pool and root:
            node, root_uuid = root
            own = naming.provider_uuid(root_uuid, node,
                                       naming.device_provider_name(
                                           node, device.address))
            if self._cloud.consumers(own):
                return _Part(device, region, own, (device,), settled)
        return _Part(device, region, provider_uuid, tuple(
            devices[a] for a in provider.addresses if a in devices), settled)

    # Who has it

    def _is_had(self, address, device, mine, guests) -> bool:
        """Return whether a server may have a card from an address at which it
        is not any more."""
        claims = self._holdings.all()
        claimed = {a for claim in claims for a in claim.handle.addresses}
        # with VFs, of which nothing is known any more
        bus = address.rpartition(':')[0]
        if any(function not in claimed and (
                function == address or bus and function.startswith(f'{bus}:'))
               for there in guests.values() for function in there):
            return True
        assert self._inventory.root
        node, root_uuid = self._inventory.root
        names = [naming.device_provider_name(node, address), *(
            naming.region_provider_name(node, address, region.index)
            for region in device.regions)]
        providers = self._inventory.providers()
        pools = {part.provider_uuid for part in mine
                 if providers[part.provider_uuid].pool}
        known = {claim.consumer_uuid for claim in claims}
        return any(self._cloud.consumers(uuid) - known for uuid in (*(
            naming.provider_uuid(root_uuid, node, name) for name in names),
            *pools))

    def _ties(self, part, guests, held, found):
        """Claims of those who have handles of a part.

        :param held: handles with a claim.
        :param found: claims on other parts of the device.
        """
        consumers = self._cloud.consumers(part.provider_uuid)
        by_handle = {handle: server for handle in part.handles
                     for server, there in guests.items()
                     if handle.address in there and handle not in held}
        entries = {s.uuid: s for s in self._cloud.servers(
            consumers | set(by_handle.values()))}
        moves = self._cloud.moves(consumers - entries.keys())
        owners = []
        for handle, server in by_handle.items():
            owners.append(
                (handle, server, _consumer_of(server, consumers, moves)))
        rest, left = self._rest(part, consumers, owners, guests, moves)
        if rest:
            if len(rest) > 1 or min(rest.values()) != len(left):
                raise _Unknown(
                    f'{", ".join(sorted(rest))} have some of it by Placement, '
                    f'and no guest says which; shelve or delete these servers')
            consumer, = rest
            owners += [(h, moves.get(consumer, consumer), consumer)
                       for h in left if h in part.handles]
        result: list[model.Claim] = []
        for server in sorted({server for _, server, _ in owners}):
            mine = [o for o in owners if o[1] == server]
            requests = self._requests(
                part, entries.get(server), len(mine),
                [*self._holdings.of(server), *found])
            for (handle, _, consumer), wanted in zip(
                    mine, requests, strict=True):
                result += self._tied(part, handle, server, consumer,
                                     entries.get(server), wanted)
        return result

    def _rest(self, part, consumers, owners, guests, moves):
        """Consumers of a provider with more than is known to be theirs.

        :param owners: of the handles of the part that guests have.
        :returns: {consumer: how many more}, and the handles of the provider
            of which it is not known who has them.
        """
        known: collections.Counter = collections.Counter()
        mine = {handle: consumer for handle, _, consumer in owners}
        claims = {c.handle: c for c in self._holdings.all()}
        left = []
        members = {member.address for member in part.members}
        for held in claims.values():
            # on what is not there now, as VFs that a boot of the host took
            if (held.handle not in part.all_handles
                    and held.device_address in members
                    and held.region_index == part.index):
                known[held.consumer_uuid] += 1
        for handle in (*part.all_handles, *self._hidden(part, claims)):
            claim = claims.get(handle)
            server = next((s for s, there in guests.items()
                           if handle.address in there), None)
            if claim:
                known[claim.consumer_uuid] += 1
            elif handle in mine:
                known[mine[handle]] += 1
            elif server:
                known[_consumer_of(server, consumers, moves)] += 1
            elif handle.address not in part.settled:
                left.append(handle)
        if part.device.creatable or not any(
                handle in left for handle in part.handles):
            return {}, []
        amounts = {c: self._amount(c, part) - known[c] for c in consumers}
        return {c: n for c, n in amounts.items() if n > 0}, left

    def _hidden(self, part, claims) -> list[model.AttachHandle]:
        """Return VFs that are not offered now, as while a host boots: what no
        guest has may be one of them.

        :param claims: by handle: these have been counted.
        """
        if part.region:
            return []
        claimed = {handle.address for handle in claims}
        return [
            model.AttachHandle(model.HandleType.PCI, function)
            for device in part.members for function in pci.virtual_functions(
                self._inventory.driver_of(device).kernel, device.address)
            if function not in device.functions() | claimed]

    def _amount(self, consumer, part):
        found = self._cloud.allocations(
            self._cloud.admin_context(), consumer)
        return found.get(part.provider_uuid, {}).get('resources', {}).get(
            naming.resource_class(part.device.type), 0)

    def _tied(self, part, handle, server, consumer, entry, wanted):
        """Yield the claim of a server on a handle; none where it gets a new
        one when it starts."""
        created_type = None
        if part.device.creatable:
            created_type = (self._made(part.device, handle)
                            or _type_of(part.device, wanted))
            if created_type is None:
                LOG.warning('The vGPU %s of server %s is of a type that is '
                            'not known; the server gets another one when it '
                            'is started again', handle.address, server)
                return
        yield self._claim(
            part, handle, instance_uuid=server, consumer_uuid=consumer,
            state=_State.BOUND,
            group=wanted.group if wanted else '',
            project_id=entry.project_id if entry else None,
            created_type=created_type)

    @staticmethod
    def _requests(part, entry, count, others):
        """Return which request of the flavor each of some handles of a part
        answers.

        Nova does not say; handles are given to the requests of the class one
        after the other, a request of just that amount first.

        :param entry: attach.cloud.Instance, None where it is not known.
        :param others: what else the server has.
        """
        name = naming.resource_class(part.device.type)
        try:
            asked = [r for r in (entry.accelerators.requests if entry
                                 else ()) if r.resource_class == name]
        except exception.InvalidRequest:
            asked = []
        answered = {c.group for c in others if entry
                    and c.instance_uuid == entry.uuid
                    and c.resource_class == name}
        left = [r for r in asked if r.group not in answered]
        result: list = []
        while len(result) < count:
            room = count - len(result)
            fitting = [r for r in left if r.amount <= room]
            chosen = next((r for r in fitting if r.amount == room),
                          next(iter(fitting), None))
            if chosen is None:
                return result + [None] * room
            left.remove(chosen)
            result += [chosen] * chosen.amount
        return result

    def _made(self, device, handle):
        """Return the type that an existing vGPU has."""
        return self._inventory.cards.call(
            handle.key, f'Reading the type of {handle.address}',
            self._inventory.driver_of(device).created_type, device, handle,
            seconds=CONF.accel.device_timeout)

    def _claim(self, part, handle, **fields):
        return claim_of_none(
            self._inventory, part.device, part.region and part.region.index,
            handle, part.provider_uuid, **fields)

    # Handles that are not clean

    def clean(self) -> None:
        """Have cleaned what has to be; a handle that a server has is cleaned
        after that server."""
        shown = self._inventory.shown_by()
        claims = [
            claim_of_none(self._inventory, offer.device, offer.part[1],
                          offer.handle, shown[offer.part])
            for offer in self._inventory.offered().all()
            if offer.device and offer.has(holds.Kind.UNCLEAN)
            and not offer.has(holds.Kind.GONE)
            and offer.state is offers.State.WITHHELD and offer.part in shown]
        if not claims:
            return
        with self._inventory.claiming:
            taken = {claim.handle for claim in self._holdings.all()}
            claims = [c for c in claims if c.handle not in taken]
            self._holdings.settle(claims=claims)
        for claim in claims:
            LOG.warning('%s of %s was released by its last server while '
                        '%s had less done to it than now: it is cleaned '
                        'before it is offered', claim.handle.address,
                        claim.device_address, handover.OPTION)
        self._publisher.show_devices(self._cloud.admin_context(), claims)


def _left(device, rows, done):
    """Return the rows that stay, because a part of the card may show its first
    handle later. A card without such a part leaves no row.

    :param done: parts that are settled now.
    """
    if (device.creatable or device.address in done
            or device.regions and len(done) == len(device.regions)):
        return ()
    return {dataclasses.replace(row, ids=row.ids or (
        '' if row.serial else device.ids), but_for=done) for row in rows}


def _consumer_of(server, consumers, moves) -> str:
    """Return who has the allocation of a server: itself, or one of its
    moves."""
    if server in consumers:
        return server
    return next((c for c in consumers if moves.get(c) == server), server)


def _type_of(device, wanted) -> str | None:
    """Return the vGPU type that a request had to get, where there is only
    one."""
    asked = [t.name for t in device.creatable
             if wanted is None or t.trait in wanted.required]
    names = asked or [t.name for t in device.creatable]
    return names[0] if len(names) == 1 else None


def _parts(device):
    for handle in device.handles:
        yield None, handle
    for region in device.regions:
        for handle in region.handles:
            yield region.index, handle


def claim_of_none(inventory: host_inventory.Inventory, device: model.Device,
                  index: int | None, handle: model.AttachHandle,
                  provider_uuid: str, **fields) -> model.Claim:
    """Return a claim of no server, with which a handle is cleaned as after one.

    :param fields: others of model.Claim, or other values.
    """
    return model.Claim(**{
        'uuid': uuidutils.generate_uuid(), 'instance_uuid': '',
        'consumer_uuid': '', 'group': '',
        'provider_uuid': provider_uuid,
        'resource_class': naming.resource_class(device.type),
        'device_address': device.address, 'region_index': index,
        **inventory.identity_for_claim(device.address), 'handle': handle,
        'state': _State.DELETING, 'prepared': True, **fields})
