# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Compare claims with Placement's allocations and with libvirt's guests.

attach.judgement says what is true of each claim; here it is asked for, and
made good. What has a consequence is judged twice, the second time while the
server is locked (attach.servers).

A server can go without this host hearing of it: deleted while the host was
down, or before it was built. Its claims are released.

A server can have its devices without an allocation: Nova takes it away when a
rebuild or an unshelve fails, and the server stays, or its guest runs; or the
operator does. What a server of this host holds is allocated to it again. Where
that cannot be, it is kept, and reserved, because Placement would give it to
others. The same is true of what a server had before a move, for as long as
Nova may revert that.

A guest can run without its device: nova-compute was killed between its loss
and its return, or the guest let go of it after the wait had ended. And a
device can be in a guest without a claim, where the store was lost and that is
not settled yet (attach.settling).
"""

from collections.abc import Collection
import contextlib
import dataclasses
import time

from nova_accel.attach import carrying as guest_claims
from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import judgement
from nova_accel.attach import moves as server_moves
from nova_accel.attach import plugs as server_plugs
from nova_accel.attach import programming
from nova_accel.attach import publishing
from nova_accel.attach import readiness as device_readiness
from nova_accel.attach import releases as server_releases
from nova_accel.attach import servers as server_locks
from nova_accel.attach import settling as device_settling
from nova_accel import conf
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel.inventory import holds
from nova_accel import log as logging
from nova_accel import model
from nova_accel import text

CONF = conf.CONF
LOG = logging.getLogger(__name__)
#: seconds after which a device that could not go back into its guest is tried
#: again, at first and at most
PAUSE, LONGEST_PAUSE = 120, 3600

_Verdict = judgement.Verdict


class Reconciler:

    def __init__(self, cloud: novas.Cloud,
                 inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings,
                 publisher: publishing.Publisher,
                 readiness: device_readiness.Readiness,
                 settling: device_settling.Settling,
                 servers: server_locks.Servers,
                 releases: server_releases.Releases,
                 moves: server_moves.Moves, plugs: server_plugs.Plugs,
                 carrying: guest_claims.Carrying):
        self._cloud = cloud
        self._inventory = inventory
        self._holdings = holdings
        self._publisher = publisher
        self._readiness = readiness
        self._settling = settling
        self._servers = servers
        self._releases = releases
        self._moves = moves
        self._plugs = plugs
        self._carrying = carrying
        #: server -> (time.monotonic() from which its guest may get back what
        #: it lacks, seconds until the next try), where that has failed, or
        #: where nova-compute may have left it half done when it ended
        self._pauses: dict[str, tuple[float, float]] = {
            c.instance_uuid: (float('-inf'), PAUSE)
            for c in self._holdings.all()}
        #: uuids of claims whose devices running guests had not got back when
        #: claims were last compared
        self.out: frozenset[str] = frozenset()
        self._once = logging.Once()
        self.background = limited.Background(
            self.run, 'Claims could not be compared with libvirt and '
            'Placement, and stay as they are')

    def run_if_due(self) -> None:
        """Compare in the background, at start and then periodically."""
        self.background.start_if_due(CONF.accel.discovery_interval)

    def run(self) -> int:
        """Compare now.

        :returns: how many accelerators were released.
        :raises PlacementUnavailable: what needs no answer of Placement is
            made good all the same.
        """
        self._inventory.recover()
        self._settling.run()
        self._settling.clean()
        released = self._releases.retry(
            self._cloud.admin_context(), self._settling.is_settled)
        snapshot, failure = self._snapshot(self._holdings.all())
        self._withhold_strangers(snapshot)
        self._remember_cards(snapshot)
        judged = judgement.judge(snapshot)
        self._forget_pauses(snapshot, judged)
        unallocated: list[model.Claim] = []
        out: set[str] = set()
        for server_uuid, claims in judgement.by_server(
                judged.values()).items():
            try:
                released += self._make_good(
                    server_uuid, claims, judged, unallocated, out)
            except Exception as error:
                unallocated += [c for c in claims
                                if (c.uuid, _Verdict.LOST) in judged]
                failure = failure or error
        self.out = frozenset(out)
        if snapshot.consumers is not None:
            # what was unallocated stays so where its server has begun
            # something meanwhile, as nothing is judged of that
            before = self._inventory.unallocated
            self._withhold_unallocated([*unallocated, *(
                c for c in self._holdings.all() if c.uuid in before
                and c.state is not model.ClaimState.DELETING
                and snapshot.is_lost(c))])
        # with what was changed above
        self._carrying.run()
        if failure:
            raise failure
        return released

    def _snapshot(self, before: Collection[model.Claim],
                  ) -> tuple[judgement.Snapshot, Exception | None]:
        """Ask about claims, in the order of attach.judgement.

        :returns: what was found, and the error of a Placement that does not
            answer.
        """
        cloud, inventory = self._cloud, self._inventory
        is_plugging = self._plugs.is_under_way
        shown_by = {c.uuid: inventory.provider_of(c) for c in before}
        consumers, failure = None, None
        try:
            consumers = cloud.consumers_of({
                *(c.provider_uuid for c in before),
                *filter(None, shown_by.values())})
        except exception.PlacementUnavailable as error:
            failure = error
        snapshot = judgement.Snapshot(
            before, shown_by, consumers, guests=cloud.guest_devices(),
            running=cloud.running(), after=self._holdings.all(),
            plugging={c.instance_uuid for c in before
                      if is_plugging(c.instance_uuid)})
        moves = snapshot.moves_to_ask()
        if moves:
            snapshot = dataclasses.replace(snapshot, moves=cloud.moves(moves))
        servers = snapshot.servers_to_ask()
        if servers:
            snapshot = dataclasses.replace(snapshot, entries={
                server.uuid: _entry(server)
                for server in cloud.servers(servers)})
        old = snapshot.open_to_ask()
        if old:
            snapshot = dataclasses.replace(
                snapshot, open_moves=frozenset(cloud.open_moves(old)))
        return snapshot, failure

    def _make_good(self, server_uuid, claims, judged, unallocated, out):
        """Act on what is still true of a server, while it is locked.

        :param unallocated: receives claims that no allocation stands behind
            still.
        :param out: receives uuids of claims whose devices are out of the
            guest still, and go back into it.
        :returns: how many accelerators were released.
        """
        with self._servers.exclusive(server_uuid):
            snapshot, failure = self._snapshot(self._holdings.now(claims))
            found: dict[_Verdict, list[model.Claim]] = {
                verdict: [] for verdict in _Verdict}
            for (uuid, verdict), claim in judgement.judge(snapshot).items():
                if (uuid, verdict) in judged:
                    found[verdict].append(claim)
            if found[_Verdict.ARRIVED]:
                found[_Verdict.OUT] = self._arrive(server_uuid)
            if found[_Verdict.OUT]:
                out.update(self._reattach(
                    server_uuid, found[_Verdict.OUT],
                    lasts=bool(found[_Verdict.ARRIVED])))
            if failure:
                raise failure
            if found[_Verdict.LOST]:
                unallocated += self._reallocate(
                    server_uuid, found[_Verdict.LOST])
            gone = [c for c in (
                *found[_Verdict.ABANDONED], *found[_Verdict.NOT_ASKED])
                if self._settling.is_settled(c)]
            if not gone:
                return 0
            LOG.warning(
                'Server %s %s: its accelerators are released', server_uuid,
                'is not on this host and has no allocation'
                if found[_Verdict.ABANDONED] else
                'has a flavor without accelerators, and a guest without them')
            return self._releases.release(
                self._cloud.admin_context(), gone)

    def _remember_cards(self, snapshot):
        """Complete claims that do not name the card, because its serial number
        could not be read then. While a guest has it, the card in the slot is
        the one."""
        inventory = self._inventory
        found = []
        for claim in snapshot.claims():
            device = inventory.present(claim.device_address)
            if device and claim.handle.address in snapshot.running.get(
                    claim.instance_uuid, ()):
                new = {name: value for name, value in
                       inventory.identity_for_claim(device.address).items()
                       if value and not getattr(claim, name)}
                if new:
                    found.append((claim, new))
        self._holdings.remember_cards(found)

    # Servers without an allocation

    def _withhold_unallocated(self, claims):
        """Offer to no other server what servers hold without an allocation."""
        inventory = self._inventory
        before = inventory.unallocated
        inventory.unallocated = frozenset(c.uuid for c in claims)
        changed = before ^ inventory.unallocated
        if changed:
            self._publisher.show_devices(
                self._cloud.admin_context(),
                [c for c in self._holdings.all() if c.uuid in changed])
        self._once.only('unallocated', {c.instance_uuid for c in claims})
        for server_uuid in {c.instance_uuid for c in claims}:
            self._once.say(
                ('unallocated', server_uuid), LOG.warning,
                'Server %s holds accelerators of which Placement has none '
                'allocated to it, as after an unshelve that failed; they are '
                'offered to no other server. Confirm or revert its resize, '
                'shelve and unshelve it, or delete it.', server_uuid)

    def _reallocate(self, server_uuid, claims):
        """Allocate to a server what it holds on this host, and what it had
        here before a move.

        :returns: the claims that stay without an allocation.
        """
        left = []
        for consumer in sorted({c.consumer_uuid for c in claims}):
            mine = [c for c in claims if c.consumer_uuid == consumer]
            server = self._owner_at_rest(mine[0])
            if server is None:
                left += mine
                continue
            try:
                wanted = {(c.provider_uuid, c.resource_class) for c in mine}
                held = [c for c in self._holdings.of(server_uuid, mine[0].role)
                        if c.consumer_uuid == consumer
                        and (c.provider_uuid, c.resource_class) in wanted]
                with self._offered(mine):
                    self._cloud.reallocate(
                        server_uuid, consumer,
                        self._resources(server.accelerators, held))
            except exception.PlacementUnavailable as error:
                self._once.say(('unallocated', server_uuid, 'why'),
                               LOG.warning, '%s', error)
                left += mine
                continue
            LOG.warning('Server %s holds accelerators of which Placement had '
                        'none allocated to %s: they are allocated again',
                        server_uuid, 'it' if consumer == server_uuid
                        else f'its migration {consumer}')
        return left

    def _owner_at_rest(self, claim):
        """Return Nova's entry of the server of a claim, where it is known that
        the claim stays its own, or its move's."""
        if claim.role is model.Role.OLD:
            server = self._cloud.open_moves([claim.consumer_uuid]).get(
                claim.consumer_uuid)
            # before, Nova may have taken the allocation: the move fails
            return server if server and not server.task_state else None
        if self._holdings.of(claim.instance_uuid, model.Role.OLD):
            # of a move that has not ended it is not known what is its own
            return None
        return next((server for server
                     in self._cloud.servers([claim.instance_uuid])
                     if not server.task_state), None)

    @contextlib.contextmanager
    def _offered(self, claims):
        """While Placement must allocate what claims have: it allocates
        nothing that is reserved. After an error it is reserved again."""
        inventory = self._inventory
        uuids = {c.uuid for c in claims} & inventory.unallocated

        def show(unallocated):
            if uuids:
                inventory.unallocated = unallocated
                self._publisher.show_devices(
                    self._cloud.admin_context(), claims)
        show(inventory.unallocated - uuids)
        try:
            yield
        except Exception:
            show(inventory.unallocated | uuids)
            raise

    @staticmethod
    def _resources(server, claims):
        """Return what claims take of providers, with the memory of their
        groups."""
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

    # What an operator orders

    def release(self, name: str) -> str:
        """Release one claim now, for nova-accel release: one that run() would
        release later, or a handle that waits for the operator.

        :param name: address of its handle, or uuid of the claim.
        :returns: what was found, and done.
        :raises DeviceUnavailable: no claim has this name, a guest, an
            allocation or a server needs it, or its device stays unclean.
        """
        found = [c for c in self._holdings.all()
                 if name in (c.uuid, c.handle.address)]
        waiting = [offer.claim for offer in self._inventory.offered().all()
                   if offer.claim and offer.has(holds.Kind.WAITING)
                   and name in (offer.claim.uuid, offer.handle.address)]
        if waiting:
            return self._release_waiting(waiting)
        if not found:
            raise exception.DeviceUnavailable(
                f'No claim on this host is called {text.printable(name)}: '
                f'name a handle that nova-accel claims shows.')
        with self._servers.exclusive(found[0].instance_uuid):
            proof = [line for claim in self._holdings.now(found)
                     for line in self._proof(claim)]
            self._releases.release_to_the_end(found)
        return '\n'.join(proof + [
            f'{c.handle.address} is clean and free.' for c in found])

    def _release_waiting(self, waiting):
        """Offer handles again that waited for the operator."""
        self._holdings.returned(waiting)
        self._publisher.show_devices(
            self._cloud.admin_context(), waiting)
        return '\n'.join(
            f'{c.handle.address} waited for you, and is free.'
            for c in waiting)

    def _proof(self, claim):
        """Sentences that say that nothing stands behind a claim.

        :raises DeviceUnavailable: something does.
        """
        address, server = claim.handle.address, claim.holder
        if claim.state is model.ClaimState.DELETING:
            return [f'Server {server} has released {address} before.']

        def refuse(what, then):
            raise exception.DeviceUnavailable(
                f'The claim of server {server} on {address} cannot be '
                f'released, because {what}: {then}.')
        for guest, devices in sorted(self._cloud.guest_devices().items()):
            if address in devices and (guest, claim.role) != (
                    # its guest is defined until a move is confirmed
                    claim.instance_uuid, model.Role.OLD):
                refuse(f'the guest of server {guest} has the device',
                       'delete or shelve the server')
        snapshot, failure = self._snapshot([claim])
        if failure:
            raise failure
        if snapshot.has_guest(claim):
            refuse('libvirt has the guest of the server',
                   'delete or shelve the server')
        if snapshot.plugging:
            refuse('the server is being built', 'wait for that')
        if snapshot.is_allocated(claim):
            refuse('Placement has it allocated',
                   f'delete or shelve the server; where it does not exist, '
                   f'openstack resource provider allocation delete '
                   f'{claim.consumer_uuid}')
        if snapshot.open_moves:
            refuse('Nova may revert the resize of the server',
                   'confirm or revert it')
        if claim.role is model.Role.CURRENT and self._cloud.servers(
                [claim.instance_uuid]):
            refuse('Nova has the server on this host', 'delete or shelve it')
        return [f'No guest in libvirt has {address}, and none is of server '
                f'{server}.',
                f'Placement has allocated nothing of it to {server}.',
                *([f'Nova has no server {server} on this host.']
                  if claim.role is model.Role.CURRENT else ())]

    # Guests without their devices, and devices without their claims

    def _forget_pauses(self, snapshot, judged):
        """Keep the pauses of guests that are out of a device or cannot be
        judged yet; one that is down gets its devices when it starts."""
        out = {claim.instance_uuid for (_, verdict), claim in judged.items()
               if verdict is _Verdict.OUT}
        busy = {uuid for uuid in snapshot.running
                if any(map(snapshot.lacks, snapshot.of(uuid)))}
        self._pauses = {uuid: pause for uuid, pause in self._pauses.items()
                        if uuid in out | busy}

    def _arrive(self, server_uuid):
        """Make what a move has here its server's.

        :returns: the claims of which its running guest has not got the device.
        """
        LOG.warning('Server %s has come to this host, which has not heard of '
                    'it: the accelerators that wait for it here are its own '
                    'now', server_uuid)
        for server in self._cloud.servers([server_uuid]):
            self._moves.end_earlier(
                self._cloud.admin_context(), server.accelerators)
        there = self._cloud.running().get(server_uuid)
        return [] if there is None else [
            claim for claim in self._holdings.of(server_uuid)
            if claim.handle.address not in there]

    def _reattach(self, server_uuid, claims, lasts):
        """Attach to a running guest the devices that it lost.

        Devices that were detached deliberately (state UNKNOWN) are not
        attached here, unless nova-compute has restarted since: their owner
        knows, and a hard reboot attaches them.

        :param lasts: change the persistent definition of the guest as well.
        :returns: uuids of the claims whose devices are attached later.
        """
        now = time.monotonic()
        due, pause = self._pauses.get(server_uuid, (now, PAUSE))
        if server_uuid not in self._pauses:
            claims = [c for c in claims if c.state is model.ClaimState.BOUND]
        # one of a card that is away goes back once the card is there, without
        # the pause of a try that failed
        claims = [c for c in claims
                  if self._inventory.present(c.device_address)]
        out = {claim.uuid for claim in claims}
        if not claims or due > now:
            return out
        LOG.warning('Server %s runs without its accelerators, which it gets '
                    'back now', server_uuid)
        # before: a call that does not end is not begun each minute
        self._pauses[server_uuid] = (
            now + pause, min(2 * pause, LONGEST_PAUSE))
        for server in self._cloud.servers([server_uuid]):
            # one that cannot go back does not keep the others out
            for mine in programming.by_region(claims).values():
                try:
                    self._readiness.restore(
                        self._cloud.admin_context(), server.accelerators, mine)
                    self._cloud.attach(
                        server_uuid, [c.handle for c in mine], lasts)
                    out -= {claim.uuid for claim in mine}
                except Exception as error:
                    self._holdings.doubt(mine, str(error))
                    LOG.error('Server %s runs without accelerators (virsh '
                              'dumpxml %s), which could not go back into its '
                              'guest; that is tried again in %d minutes: %s',
                              server_uuid, server_uuid, pause // 60, error)
        if not out:
            self._pauses.pop(server_uuid, None)
        return out

    def _withhold_strangers(self, snapshot):
        """Withhold what a guest has without a claim, until it is gone."""
        strangers = snapshot.strangers()
        if any(not self._once.has(('stranger', address))
               for address in strangers):
            # a server that was deleted since its guest was seen has none now
            again = self._snapshot(self._holdings.all())[0].strangers()
            strangers = {address: server for address, server
                         in strangers.items() if address in again}
        found = self._inventory.withhold_in_guests(strangers)
        self._once.only('stranger', found)
        for address, server_uuid in found.items():
            self._once.say(
                ('stranger', address), LOG.error,
                'The guest of server %s has %s, without a claim of it; '
                'it is offered to no other server. See virsh dumpxml %s, and '
                'stop or delete the server.', server_uuid, address,
                server_uuid)


def _entry(server: novas.Instance) -> judgement.Entry:
    try:
        asks = bool(server.accelerators.requests)
    except exception.InvalidRequest:
        # whatever it asks for, it asks for an accelerator
        asks = True
    return judgement.Entry(server.task_state is None, asks)
