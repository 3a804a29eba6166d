# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Compare claims with libvirt's guests and with Placement's allocations.

A server can go without this host hearing of it: deleted while the host was
down, or before it was built. Its claim is released when it is certain that
the device is free: no guest of the server is on this host, Placement names no
consumer that the server could be, and for Nova the server is not on this host.
What is released is judged twice, the second time while no other operation of
ours can begin on the server.

A server can have its devices without an allocation: Nova takes it away when a
rebuild or an unshelve fails, and the server stays, or its guest runs; or the
operator does. What a server of this host holds is allocated to it again. Where
that cannot be, it is kept, and held back from others, to whom Placement would
give it.

A guest can run without its device: nova-compute was killed between its loss
and its return, or the guest let go of it after the wait had ended. And a
device can be in a guest without a claim, where the store was lost and that is
not settled yet (attach.settling).
"""

import contextlib
import time

from nova_accel.attach import accelerators as server_accelerators
from nova_accel.attach import cloud as novas
from nova_accel import conf
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import log as logging
from nova_accel import model
from nova_accel import text

CONF = conf.CONF
LOG = logging.getLogger(__name__)


class Reconciler:

    def __init__(self, accelerators: server_accelerators.Accelerators,
                 cloud: novas.Cloud):
        self._accelerators = accelerators
        self._holdings = accelerators.holdings
        self._cloud = cloud
        self._ran_at: float | None = None
        #: whether a run has come to its end since nova-compute started
        self._has_run = False
        #: servers that nova-compute may have left half done when it ended,
        #: and that could not be looked at since
        self._unseen: set[str] = set()
        #: whether a run has noted which those are; once, although a run that
        #: does not come to its end is the first one again
        self._has_seen = False
        #: device without a claim -> guest that has it, as the log has told
        self._strange: dict[str, str] = {}
        #: servers of which an operation failed, as of the last run
        self._failed: frozenset[str] = frozenset()
        #: servers without an allocation, as the log has told
        self._not_allocated: set[str] = set()
        self._background = limited.Background(self._logged_run)
        accelerators.words.learn('release', self.release)

    def run_if_due(self) -> None:
        """Compare in the background, at start and then periodically."""
        now = time.monotonic()
        if (self._ran_at is None or now - self._ran_at
                >= CONF.accel.discovery_interval) and self._background.start():
            self._ran_at = now

    def _logged_run(self):
        try:
            self.run(first=not self._has_run)
            self._has_run = True
        except Exception as error:
            LOG.warning('Claims could not be compared with libvirt and '
                        'Placement, and stay as they are: %s', error)

    def run(self, first: bool = False) -> int:
        """Compare now; asks Placement only for claims without a guest.

        :param first: nova-compute has just started; what it was doing when it
            ended may be half done.
        :returns: how many accelerators were released.
        """
        self._accelerators.inventory.recover()
        settled = self._accelerators.settling.run()
        self._accelerators.settling.clean()
        released = self._accelerators.retry_releases(
            self._cloud.admin_context())
        running = self._cloud.running()
        # after the guests: a guest that runs had its claim before
        claims = self._holdings.all()
        if first and not self._has_seen:
            self._has_seen = True
            self._unseen = {c.instance_uuid for c in claims}
        self._fence_what_has_no_claim(claims, running)
        self._remember_cards(claims, running)
        if claims:
            self._reattach_all(claims, running)
            for server_uuid, judged in _by_server(
                    self._without_a_server(claims)).items():
                released += self._release(server_uuid, judged)
        self._hold_back(first or settled)
        return released

    def _remember_cards(self, claims, running):
        """Claims of an earlier release do not name the card. While a guest has
        it, the card in the slot is the one."""
        inventory = self._accelerators.inventory
        for claim in claims:
            device = inventory.devices.get(claim.device_address)
            if (device and device.health is not model.Health.GONE
                    and claim.handle.address in running.get(
                        claim.instance_uuid, ())):
                new = {name: value for name, value in
                       inventory.identity_for_claim(device.address).items()
                       if value and not getattr(claim, name)}
                if new:
                    self._holdings.remember_card(claim, **new)

    # Claims without a server, and servers without an allocation

    def _without_a_server(self, claims):
        """Claims behind which nothing stands."""
        in_guest = self._in_guest()
        found = _by_server(self._without_an_allocation(
            c for c in claims if not in_guest(c)))
        here = {server.uuid for server in self._cloud.servers(found)
                } if found else set()
        return [claim for server_uuid, mine in found.items() for claim in mine
                if claim.role is model.Role.OLD or server_uuid not in here]

    def _in_guest(self):
        """A function that says whether a guest stands behind a claim, as
        libvirt answers now."""
        guests, running = self._cloud.guests(), self._cloud.running()
        return lambda claim: (
            claim.instance_uuid in guests
            if claim.role is model.Role.CURRENT
            # the old self of a server that moved stays defined; a guest that
            # runs may be the new self on the same host
            else claim.handle.address in running.get(
                claim.instance_uuid, ()))

    def _without_an_allocation(self, claims):
        """Claims of which Placement knows nothing; it is asked once for each
        provider."""
        current = {(c.instance_uuid, c.provider_uuid)
                   for c in self._holdings.all()
                   if c.role is model.Role.CURRENT}
        consumers: dict[str, set[str]] = {}
        for claim in claims:
            if (claim.state is model.ClaimState.DELETING
                    or self._accelerators.is_plugging(claim.instance_uuid)):
                continue
            # or the one to which its allocation may have moved
            providers = {claim.provider_uuid, self._accelerators.inventory
                         .provider_of(claim)} - {None}
            for provider_uuid in providers - consumers.keys():
                consumers[provider_uuid] = self._cloud.consumers(provider_uuid)
            owners = {claim.consumer_uuid}
            if (claim.instance_uuid, claim.provider_uuid) not in current:
                # Placement hears first of a move that is reverted or failed
                owners.add(claim.instance_uuid)
            if not any(owners & consumers[uuid] for uuid in providers):
                yield claim

    def _hold_back(self, first):
        """Offer to no other server what a server holds without an allocation.

        Placement is asked for servers that may be so: at start for all, then
        for those whose guest is gone or of which an operation failed, and
        again for those that were so.
        """
        inventory = self._accelerators.inventory
        claims, before = self._holdings.all(), inventory.held_back
        failed = self._accelerators.failed()
        if not claims and not before:
            self._looked_at(failed)
            return
        in_guest = self._in_guest()
        found = list(self._without_an_allocation(
            c for c in claims if first or c.handle in before
            or c.instance_uuid in failed or not in_guest(c)))
        # one that moved between the questions for its two providers was seen
        # in neither
        found = list(self._without_an_allocation(found))
        # without those of servers that were deleted meanwhile
        found = [c for c in self._holdings.now(found)
                 if c.state is not model.ClaimState.DELETING]
        self._looked_at(failed)
        found = self._put_back(found)
        inventory.hold_back(c.handle for c in found)
        changed = before ^ inventory.held_back
        self._accelerators.publisher.show_devices(
            self._cloud.admin_context(),
            [c for c in claims if c.handle in changed])
        servers = {c.instance_uuid for c in found}
        for server_uuid in servers - self._not_allocated:
            LOG.warning(
                'Server %s holds accelerators of which Placement has none '
                'allocated to it, as after an unshelve that failed; they are '
                'offered to no other server. Shelve and unshelve the server, '
                'or delete it.', server_uuid)
        self._not_allocated = servers

    def _put_back(self, claims):
        """Have Placement count what servers of this host hold.

        :returns: the claims of which it does not.
        """
        left = set(claims)
        for server in self._cloud.servers({c.instance_uuid for c in claims}
                                          ) if claims else ():
            mine = [c for c in claims if c.instance_uuid == server.uuid
                    and c.role is model.Role.CURRENT]
            if not mine or server.task_state or self._holdings.of(
                    server.uuid, model.Role.OLD):
                # of a move that has not ended it is not known what is its own
                continue
            with self._accelerators.exclusive(server.uuid):
                mine = [c for c in self._holdings.now(mine)
                        if c.state is not model.ClaimState.DELETING]
                try:
                    with self._offered(mine):
                        self._cloud.put_back(server.uuid, self._resources(
                            server.accelerators, mine))
                except exception.PlacementUnavailable as error:
                    if server.uuid not in self._not_allocated:
                        LOG.warning('%s', error)
                    continue
            LOG.warning('Server %s holds accelerators of which Placement had '
                        'none allocated to it: they are allocated to it again',
                        server.uuid)
            left -= {c for c in claims if c.instance_uuid == server.uuid}
        return [c for c in claims if c in left]

    @contextlib.contextmanager
    def _offered(self, claims):
        """While Placement is to allocate what is held back: it allocates
        nothing that is reserved. After an error it is held back again."""
        inventory = self._accelerators.inventory
        handles = {c.handle for c in claims} & inventory.held_back

        def show(held_back):
            if handles:
                inventory.hold_back(held_back)
                self._accelerators.publisher.show_devices(
                    self._cloud.admin_context(), claims)
        show(inventory.held_back - handles)
        try:
            yield
        except Exception:
            show(inventory.held_back | handles)
            raise

    @staticmethod
    def _resources(server, claims):
        """What claims take of providers, with the memory of their groups."""
        found: dict[str, dict[str, int]] = {}
        memory = {wanted.group: wanted.memory for wanted in server.requests}
        for group in {c.group for c in claims}:
            mine = [c for c in claims if c.group == group]
            for claim in mine:
                amounts = found.setdefault(claim.provider_uuid, {})
                amounts[claim.resource_class] = amounts.get(
                    claim.resource_class, 0) + 1
            for name, mib in memory.get(group, {}).items():
                amounts = found[mine[0].provider_uuid]
                amounts[name] = amounts.get(name, 0) + mib
        return found

    def _looked_at(self, failed):
        """Servers that failed are looked at twice: the first time Nova may
        not have taken the allocation away yet."""
        self._accelerators.forget_failed(failed & self._failed)
        self._failed = failed

    def _release(self, server_uuid, judged):
        """Release the claims of a server that still have nothing behind them,
        now that no plug of the server can begin."""
        with self._accelerators.exclusive(server_uuid):
            stale = list(self._without_a_server(self._holdings.now(judged)))
            if not stale:
                return 0
            LOG.warning('Server %s is not on this host and has no '
                        'allocation: its accelerators are released',
                        server_uuid)
            return self._accelerators.release(
                self._cloud.admin_context(), stale, patient=True)

    def release(self, name: str) -> str:
        """Release one claim now, which run() would release by itself, or say
        why it is not: for nova-accel release.

        :param name: address of its handle, or uuid of the claim.
        :returns: what was found, and done.
        :raises DeviceUnavailable: no claim has this name, a guest, an
            allocation or a server needs it, or its device stays unclean.
        """
        found = [c for c in self._holdings.all()
                 if name in (c.uuid, c.handle.address)]
        if not found:
            raise exception.DeviceUnavailable(
                f'No claim on this host is called {text.printable(name)}: '
                f'name a handle that nova-accel claims shows.')
        with self._accelerators.exclusive(found[0].instance_uuid):
            proof = [line for claim in self._holdings.now(found)
                     for line in self._proof(claim)]
            self._accelerators.release_to_the_end(found)
        return '\n'.join(proof + [
            f'{c.handle.address} is clean and free.' for c in found])

    def _proof(self, claim):
        """Sentences that say that nothing stands behind a claim.

        :raises DeviceUnavailable: something does.
        """
        address, server = claim.handle.address, claim.holder
        if claim.state is model.ClaimState.DELETING:
            return [f'Server {server} has released {address} before.']

        def refuse(what, then):
            raise exception.DeviceUnavailable(
                f'The claim of server {server} on {address} was to be '
                f'released, and {what}: {then}.')
        for guest, devices in sorted(self._cloud.guest_devices().items()):
            if address in devices and (guest, claim.role) != (
                    # its guest is defined until a move is confirmed
                    claim.instance_uuid, model.Role.OLD):
                refuse(f'the guest of server {guest} has the device',
                       'delete or shelve the server')
        if self._in_guest()(claim):
            refuse('libvirt has the guest of the server',
                   'delete or shelve the server')
        if self._accelerators.is_plugging(claim.instance_uuid):
            refuse('the server is being built', 'wait for that')
        if not list(self._without_an_allocation([claim])):
            refuse('Placement has it allocated',
                   f'delete or shelve the server; where it does not exist, '
                   f'openstack resource provider allocation delete '
                   f'{claim.consumer_uuid}')
        if claim.role is model.Role.CURRENT and self._cloud.servers(
                [claim.instance_uuid]):
            refuse('Nova has the server on this host', 'delete or shelve it')
        return [f'No guest in libvirt has {address}, and none is of server '
                f'{server}.',
                f'Placement has allocated nothing of it to {server}.',
                *([f'Nova has no server {server} on this host.']
                  if claim.role is model.Role.CURRENT else ())]

    # Guests without their devices, and devices without their claims

    def _reattach_all(self, claims, running):
        found = {c.instance_uuid for c in claims} & set(running)
        # a guest that is down gets its devices when it starts
        self._unseen &= found
        for server_uuid in found:
            if not self._lacking(claims, server_uuid, running):
                self._unseen.discard(server_uuid)
                continue
            try:
                self._reattach(server_uuid)
            except Exception as error:
                LOG.error('Server %s runs and may be without its '
                          'accelerators (virsh dumpxml %s): %s',
                          server_uuid, server_uuid, error)

    def _reattach(self, server_uuid):
        """Give a running guest back what it lost, and touch nothing else."""
        with self._accelerators.exclusive(server_uuid):
            lacking = self._lacking(self._holdings.of(server_uuid),
                                    server_uuid, self._cloud.running())
            for server in self._cloud.servers([server_uuid]):
                if not lacking or server.task_state is not None:
                    continue
                self._unseen.discard(server_uuid)
                LOG.warning('Server %s runs without its accelerators, which '
                            'it gets back now', server_uuid)
                try:
                    self._accelerators.readiness.restore(
                        self._cloud.admin_context(), server.accelerators,
                        lacking)
                    self._cloud.attach(
                        server_uuid, [c.handle for c in lacking])
                except Exception as error:
                    # not each minute: the next start tries again
                    self._holdings.doubt(lacking, str(error))
                    raise

    def _lacking(self, claims, server_uuid, running):
        """Claims whose devices the running guest of their server has not got.

        Of those that were left without their function, which are not bound,
        the owner has been told; a crash may have left others so.
        """
        return [c for c in claims
                if c.instance_uuid == server_uuid
                and c.role is model.Role.CURRENT
                and c.state is not model.ClaimState.DELETING
                and (c.state is model.ClaimState.BOUND
                     or server_uuid in self._unseen)
                and c.handle.address not in running.get(server_uuid, ())]

    def _fence_what_has_no_claim(self, claims, running):
        """A device of ours that a guest has without a claim is offered to no
        other server until the guest is gone."""
        claimed = {c.handle.address for c in claims}
        strange = _without(running, claimed)
        if strange.keys() - self._strange.keys():
            # the server may have been deleted since its guest was seen
            now = _without(self._cloud.running(), claimed)
            strange = {address: server_uuid for address, server_uuid
                       in strange.items() if address in now}
        found = self._accelerators.inventory.fence_in_guests(strange)
        for address, server_uuid in found.items():
            if self._strange.get(address) != server_uuid:
                LOG.error(
                    'The guest of server %s has %s, for which there is no '
                    'claim; it is offered to no other server. See virsh '
                    'dumpxml %s, and stop or delete the server.',
                    server_uuid, address, server_uuid)
        self._strange = found


def _without(running, claimed):
    """Address of a device in a guest, that no claim has -> the guest."""
    return {address: server_uuid for server_uuid, addresses
            in running.items() for address in addresses - claimed}


def _by_server(claims):
    found: dict[str, list[model.Claim]] = {}
    for claim in claims:
        found.setdefault(claim.instance_uuid, []).append(claim)
    return found
