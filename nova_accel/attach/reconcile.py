# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Compare claims with Placement's allocations and with libvirt's guests.

attach.judgement gives verdicts about claims, and the Reconciler acts on them.
Before the Reconciler acts, it locks the server (service.Host.servers) and
judges the claims again. It acts on verdicts that are still the same.

=========  ===================================================================
Verdict    Action
=========  ===================================================================
ABANDONED  the claim is released
NOT_ASKED  the claim is released
LOST       the device is allocated again, or withheld
OUT        the device is attached to the running guest
ARRIVED    claims of the migration become those of the server
=========  ===================================================================

For example, a server is deleted while its host is down. Nova deletes the
allocation, and after the start neither libvirt nor Nova has the server here:
its claim is ABANDONED twice, and is released. If the same server is built
again between the two judgements, the second one finds its new claim, and
nothing is released.

An allocation is lost if a rebuild or an unshelve fails, because Nova removes it
although the server stays or its guest runs. An operator may also remove it.
Placement would then allocate the device to other servers. Until it is allocated
to the server again, the device is withheld ("unallocated"), and the provider
shows no free inventory for it.

A running guest lacks a device if nova-compute was killed between detaching and
attaching it, or if the guest released it after the wait had ended. Failed
attempts are repeated after 2 minutes, then after 4, and so on up to an hour.

A device that a guest has without a claim is withheld, for example if the store
was lost and the claim is not restored yet (attach.store_age).
"""

import collections
from collections.abc import Collection, Iterable, Iterator
import contextlib
import dataclasses
import time

from nova_accel.attach import accelerators as server_accelerators
from nova_accel.attach import carrying as guest_claims
from nova_accel.attach import cloud as novas
from nova_accel.attach import following as claim_following
from nova_accel.attach import guests as server_guests
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import judgement
from nova_accel.attach import publishing
from nova_accel.attach import readiness as device_readiness
from nova_accel.attach import releases as server_releases
from nova_accel.attach import settling as device_settling
from nova_accel import conf
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model

CONF = conf.CONF
LOG = logging.getLogger(__name__)
#: seconds until the first retry of a device that could not be attached, and
#: the maximum
PAUSE, LONGEST_PAUSE = 120, 3600

_Verdict = judgement.Verdict


@dataclasses.dataclass(eq=False)
class Reconciler:
    _cloud: novas.Cloud
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _settling: device_settling.Settling
    _servers: locks.Locks
    _releases: server_releases.Releases
    _accelerators: server_accelerators.Accelerators
    _carrying: guest_claims.Carrying
    _guests: server_guests.Guests
    _readiness: device_readiness.Readiness
    _publisher: publishing.Publisher
    _following: claim_following.Following

    def __post_init__(self) -> None:
        #: uuids of claims whose devices running guests lacked after the last
        #: comparison
        self.out: frozenset[str] = frozenset()
        #: server -> (time.monotonic() of the next try to attach its devices,
        #: seconds until the one after it). Initially all servers, because the
        #: last nova-compute may have ended between detaching and attaching
        self._pauses: dict[str, tuple[float, float]] = {
            c.instance_uuid: (float('-inf'), PAUSE)
            for c in self._holdings.all()}
        self._once = logging.Once()
        self.background = limited.Background(
            self.run, 'Claims could not be compared with libvirt and '
            'Placement, and stay as they are')

    def run_if_due(self) -> None:
        """Compare in the background, at start and then periodically."""
        self.background.start_if_due(CONF.accel.discovery_interval)

    def run(self) -> int:
        """Compare claims with Placement, Nova and libvirt now.

        :returns: how many accelerators were released.
        :raises PlacementUnavailable: only the parts that do not need Placement
            were done.
        """
        self._inventory.recover()
        self._publisher.show_devices(self._following.run())
        self._settling.run()
        self._settling.clean()
        released = self._releases.retry(self._settling.is_settled)
        snapshot, failure = self.ask(self._holdings.all())
        self._withhold_strangers(snapshot)
        self._remember_cards(snapshot)
        judged = judgement.judge(snapshot)
        self._forget_pauses(snapshot, {
            claim.instance_uuid for (_, verdict), claim in judged.items()
            if verdict is _Verdict.OUT})
        unallocated: list[model.Claim] = []
        out: set[str] = set()
        for server_uuid, claims in judgement.by_server(
                judged.values()).items():
            try:
                released += self._act(
                    server_uuid, claims, judged, unallocated, out)
            except Exception as error:
                unallocated += [c for c in claims
                                if (c.uuid, _Verdict.LOST) in judged]
                failure = failure or error
        self.out = frozenset(out)
        if snapshot.consumers is not None:
            # claims of a server that Nova works on are not judged: those
            # without an allocation stay withheld
            before = self._inventory.table.unallocated
            self._withhold_unallocated([*unallocated, *(
                c for c in self._holdings.all() if c.uuid in before
                and c.state is not model.ClaimState.DELETING
                and snapshot.is_lost(c))])
        # last, because guests carry the claims as changed above
        self._carrying.run()
        if failure:
            raise failure
        return released

    def ask(self, before: Collection[model.Claim],
            ) -> tuple[judgement.Snapshot, Exception | None]:
        """Ask Placement, libvirt and Nova about claims, in the order of
        attach.judgement.

        :returns: the answers, and the error if Placement does not answer.
        """
        cloud, failure = self._cloud, None
        shown_by = {c.uuid: self._inventory.shown.provider_of(c)
                    for c in before}
        consumers = None
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
                      if self._guests.is_under_way(c.instance_uuid)})
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

    def _act(self, server_uuid, claims, judged, unallocated, out):
        """Act on the verdicts about a server that are still true while the
        server is locked.

        :param unallocated: collects claims that stay without an allocation.
        :param out: collects uuids of claims whose devices the guest still
            lacks.
        :returns: how many accelerators were released.
        """
        with self._servers.held(server_uuid):
            snapshot, failure = self.ask(self._holdings.now(claims))
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
            return self._releases.release(gone)

    def _remember_cards(self, snapshot):
        """Store the serial number, ids and ports of cards in claims that lack
        them. This needs a running guest with the device of the claim: only
        then is the card in the slot certainly the claimed card."""
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

    def _arrive(self, server_uuid):
        """Transfer the claims of a migration to the server, which has arrived
        on this host without a call of Nova.

        :returns: the claims of devices that the running guest lacks.
        """
        LOG.warning('Server %s has arrived on this host without a call of '
                    'Nova: the claims of its migration are its own now',
                    server_uuid)
        for server in self._cloud.servers([server_uuid]):
            self._accelerators.end_earlier(
                self._cloud.admin_context(), server.accelerators)
        addresses = self._cloud.running().get(server_uuid)
        return [] if addresses is None else [
            claim for claim in self._holdings.of(server_uuid)
            if claim.handle.address not in addresses]

    def _withhold_strangers(self, snapshot):
        strangers = snapshot.strangers()
        if any(not self._once.has(('stranger', address))
               for address in strangers):
            # the server may have been deleted after its guest was read
            again = self.ask(self._holdings.all())[0].strangers()
            strangers = {address: server for address, server
                         in strangers.items() if address in again}
        found = self._inventory.withhold_in_guests(strangers)
        self._once.only('stranger', found)
        for address, server_uuid in found.items():
            self._once.log(
                ('stranger', address), LOG.error,
                'The guest of server %s has %s without a claim: the device is '
                'withheld. See virsh dumpxml %s, and stop or delete the '
                'server.', server_uuid, address,
                server_uuid)

    # Lost allocations

    def _withhold_unallocated(self, claims: Iterable[model.Claim]) -> None:
        """Withhold the devices of claims that have no allocation.

        :param claims: all such claims. Devices of other claims are no longer
            withheld for this reason.
        """
        claims, inventory = list(claims), self._inventory
        before = inventory.table.unallocated
        inventory.table.unallocated = frozenset(c.uuid for c in claims)
        changed = before ^ inventory.table.unallocated
        if changed:
            self._publisher.show_devices(
                [c for c in self._holdings.all() if c.uuid in changed])
        self._once.only('unallocated', {c.instance_uuid for c in claims})
        for server_uuid in {c.instance_uuid for c in claims}:
            self._once.log(
                ('unallocated', server_uuid), LOG.warning,
                'Server %s holds accelerators that Placement has not allocated '
                'to it, for example after a failed unshelve; no other server '
                'gets them. Confirm or revert its resize, '
                'shelve and unshelve it, or delete it.', server_uuid)

    def _reallocate(self, server_uuid: str, claims: Collection[model.Claim],
                    ) -> list[model.Claim]:
        """Restore the allocations of a server for the devices that it holds on
        this host, including devices from before a move.

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
                self._once.log(('unallocated', server_uuid, 'why'),
                               LOG.warning, '%s', error)
                left += mine
                continue
            LOG.warning('Server %s holds accelerators that Placement had not '
                        'allocated to %s: they are allocated again',
                        server_uuid, 'it' if consumer == server_uuid
                        else f'its migration {consumer}')
        return left

    def _owner_at_rest(self, claim):
        """Return Nova's entry of the server of a claim if the server is at
        rest. Return None if Nova may end or move the claim now."""
        if claim.role is model.Role.OLD:
            server = self._cloud.open_moves([claim.consumer_uuid]).get(
                claim.consumer_uuid)
            # during a task, the move may fail, and Nova removes its allocation
            return server if server and not server.task_state else None
        if self._holdings.of(claim.instance_uuid, model.Role.OLD):
            # until the move ends, either set of devices may be released
            return None
        return next((server for server
                     in self._cloud.servers([claim.instance_uuid])
                     if not server.task_state), None)

    @contextlib.contextmanager
    def _offered(self, claims: Collection[model.Claim]) -> Iterator[None]:
        """Offer the devices of claims while the context allocates them again,
        because Placement does not allocate withheld devices.

        After an error the devices are withheld again.
        """
        inventory = self._inventory
        uuids = {c.uuid for c in claims} & inventory.table.unallocated

        def show(unallocated):
            if uuids:
                inventory.table.unallocated = unallocated
                self._publisher.show_devices(claims)
        show(inventory.table.unallocated - uuids)
        try:
            yield
        except Exception:
            show(inventory.table.unallocated | uuids)
            raise

    @staticmethod
    def _resources(server, claims):
        found: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter)
        memory = {wanted.group: wanted.memory for wanted in server.requests}
        for group in {c.group for c in claims}:
            mine = [c for c in claims if c.group == group]
            for claim in mine:
                found[claim.provider_uuid][claim.resource_class] += 1
            found[mine[0].provider_uuid].update(memory.get(group, {}))
        return found

    # Devices that running guests lack

    def _forget_pauses(self, snapshot: judgement.Snapshot,
                       out: Collection[str]) -> None:
        """Forget the pauses between attempts for guests that have all their
        devices, and for guests that do not run. A start attaches all devices.

        :param out: uuids of servers whose guests run without a device.
        """
        busy = {uuid for uuid in snapshot.running
                if any(map(snapshot.lacks, snapshot.of(uuid)))}
        self._pauses = {uuid: pause for uuid, pause in self._pauses.items()
                        if uuid in busy.union(out)}

    def _reattach(self, server_uuid: str, claims: Iterable[model.Claim],
                  lasts: bool) -> set[str]:
        """Attach to a running guest the devices that it lost.

        Devices that were detached deliberately (state UNKNOWN) stay detached
        until nova-compute restarts, or until the owner reboots the server
        hard. The metadata of the server show the owner such devices.

        :param lasts: see Cloud.attach().
        :returns: uuids of the claims whose devices are not attached yet.
        """
        now = time.monotonic()
        due, pause = self._pauses.get(server_uuid, (now, PAUSE))
        if server_uuid not in self._pauses:
            claims = [c for c in claims if c.state is model.ClaimState.BOUND]
        # an absent card is attached when it returns, without a pause
        claims = [c for c in claims
                  if self._inventory.present(c.device_address)]
        out = {claim.uuid for claim in claims}
        if not claims or due > now:
            return out
        LOG.warning('Server %s runs without its accelerators: they are '
                    'attached again', server_uuid)
        # set first: a call that hangs must not begin again each minute
        self._pauses[server_uuid] = (
            now + pause, min(2 * pause, LONGEST_PAUSE))
        for server in self._cloud.servers([server_uuid]):
            # a region or device that cannot be attached does not affect the
            # others
            for mine in server_holdings.by_region(claims).values():
                try:
                    self._readiness.restore(
                        self._cloud.admin_context(), server.accelerators, mine)
                    self._cloud.attach(
                        server_uuid, [c.handle for c in mine], lasts)
                    out -= {claim.uuid for claim in mine}
                except Exception as error:
                    self._holdings.doubt(mine, str(error))
                    LOG.error('Server %s runs without accelerators (virsh '
                              'dumpxml %s), which could not be attached to '
                              'its guest; that is tried again in %d minutes: '
                              '%s',
                              server_uuid, server_uuid, pause // 60, error)
        if not out:
            self._pauses.pop(server_uuid, None)
        return out


def _entry(server: novas.Instance) -> judgement.Entry:
    try:
        asks = bool(server.accelerators.requests)
    except exception.InvalidRequest:
        # the request is for accelerators, although it cannot be parsed
        asks = True
    return judgement.Entry(server.task_state is None, asks)
