# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Accelerators for servers: plug, resume, unplug.

The calls of the os-acc specification, inside nova-compute:

plug    a server gets devices: plan, release what is surplus, claim, program,
        prepare, bind, publish. What fails undoes what this call did.
resume  a server that had devices starts again: it gets the same ones, as they
        were, or an error that keeps its guest down.
unplug  a server loses just these claims; each ends once its device is clean.
"""

import collections
from collections.abc import Mapping
import contextlib
import dataclasses

import os_resource_classes
from oslo_utils import uuidutils

from nova_accel.attach import choice
from nova_accel.attach import cleaning
from nova_accel.attach import cloud as novas
from nova_accel.attach import handles
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import orders
from nova_accel.attach import plan
from nova_accel.attach import plugs
from nova_accel.attach import programming
from nova_accel.attach import publishing
from nova_accel.attach import readiness
from nova_accel.attach import releases
from nova_accel.attach import reshape
from nova_accel.attach import settling
from nova_accel import conf
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel import request
from nova_accel.store import claim_store

CONF = conf.CONF
LOG = logging.getLogger(__name__)
#: classes of which Nova's own libvirt driver has devices as well
_NOVAS = (os_resource_classes.VGPU,)
_Got = tuple[request.AcceleratorRequest, model.Device, model.AttachHandle]


class Accelerators:
    """Every accelerator of one compute host."""

    def __init__(self, cloud: novas.Cloud, store: claim_store.ClaimStore,
                 inventory: host_inventory.Inventory, kernel=None):
        """:param kernel: nova_accel.host.kernel.Kernel or a simulated one."""
        self.store = store
        self.inventory = inventory
        self.kernel = kernel
        self.holdings = server_holdings.Holdings(store)
        self._cloud = cloud
        self.publisher = publishing.Publisher(inventory, cloud)
        self.programming = programming.Programming(
            inventory, self.holdings, cloud, self.publisher)
        regions = cleaning.Regions(inventory, self.programming)
        self.device_handles = handles.Handles(
            inventory, self.holdings, cloud, regions)
        self.readiness = readiness.Readiness(
            inventory, self.holdings, self.device_handles, self.programming,
            regions)
        self.settling = settling.Settling(
            inventory, self.holdings, self.publisher, cloud)
        self.reshape = reshape.Reshape(
            inventory, self.holdings, cloud)
        self.orders = orders.Orders(store, inventory, self.publisher, cloud)
        self._servers = locks.Locks(
            'server', 'The accelerators of server {}',
            programming.seconds_at_most)
        self.releases = releases.Releases(
            cloud, self.holdings, self.device_handles, self.readiness,
            self.publisher, self.exclusive)
        self.plugs = plugs.Plugs(self, cloud)
        self._choice = choice.Choice(
            inventory, self.holdings, self.settling, kernel)

    # The service

    def report(self, tree, node: str, allocations: dict | None = None,
               starting: bool = False) -> bool:
        """Show our devices in Nova's provider tree.

        Under Nova's resource tracker's lock.

        :param tree: nova.compute.provider_tree.ProviderTree of the host.
        :param node: name of its root.
        :param allocations: those of the host, which Nova writes together with
            the tree; changed in place. None: they stay as they are.
        :param starting: whether Nova would do that.
        :returns: False, with nothing changed, where that is needed: the
            caller then calls again with the allocations.
        """
        if not self.settling.before_report(tree, node):
            return True
        if allocations is not None:
            moved = self.reshape.move(
                allocations, self.inventory.providers_of(
                    node, tree.data(node).uuid))
            self.inventory.update_tree(
                tree, node, self.publisher.placement_at_start(allocations),
                moved)
            return True
        if self.reshape.is_needed(node, tree.data(node).uuid) and starting:
            return False
        # Nova's copy of a provider is older than the last server that was
        # scheduled to it, and Placement would refuse its report
        self.inventory.update_tree(
            tree, node, self.publisher.placement(self._cloud.admin_context()))
        return True

    def close(self) -> None:
        """Stop the scans of devices; plugs that run are left to their end."""
        self.plugs.close()
        self.orders.close()
        self.inventory.close()

    # Plug

    def plug(self, context, server: request.Server,
             allocations: plan.Allocations | None,
             claimed: list[model.Claim] | None = None,
             migration: str | None = None) -> list[model.Claim]:
        """Claim and prepare what was allocated to a server.

        Idempotent: devices that the server holds and that are allocated to it
        stay as they are. After an error it holds what it held before.

        :param allocations: ``{provider uuid: {'resources': {class: n}}}``.
        :param claimed: receives what this call claims.
        :param migration: uuid of the one by which the server comes while it
            runs, with what it has on its old host: all is claimed for that.
        :returns: all that the server, or the migration, holds.
        :raises AcceleratorError: of many kinds, each in one sentence.
        """
        requests = server.wanted
        if allocations is None:
            found = (f'Server {server.uuid} must get its accelerators, and '
                     f'Placement did not say which')
            raise exception.PlacementUnavailable(
                f'{found}: see that it answers nova-compute.', found=found)
        self.releases.finish(server.uuid)
        with self.exclusive(server.uuid):
            held = [] if migration else self._located(
                self.holdings.of(server.uuid), allocations)
            steps = plan.to_plug(server.uuid, requests, allocations,
                                 self._ours(allocations, held), held)
            if steps.surplus:
                LOG.warning('Server %s holds devices that are not allocated '
                            'to it; they are released', server.uuid)
                self.holdings.releasing(steps.surplus)
        if steps.surplus:
            self.releases.clean(context, steps.surplus)
        return self._carry_out(context, server, steps, claimed, migration)

    def _ours(self, allocations, held):
        """Return the part of a server's allocations that nova_accel gave."""
        ours = self.inventory.allocated(
            allocations, unused={c.part for c in held})
        # The claims name those of providers whose devices are shown by others
        # now; and all of them while guests of a host that has booted start
        # before Nova has told which node this is
        known = {allocation.provider_uuid for allocation in ours}
        named = {claim.provider_uuid for claim in held} - known
        return ours + [
            request.Allocation(
                uuid, naming.accelerators(allocation['resources']),
                frozenset())
            for uuid, allocation in allocations.items() if uuid in named]

    def _located(self, held, allocations):
        """Claims as if allocated from the present provider of their device,
        where that is not written down yet (attach.reshape)."""
        def locate(claim):
            now = self.inventory.provider_of(claim)
            if claim.provider_uuid in allocations or now not in allocations:
                return claim
            return dataclasses.replace(claim, provider_uuid=now)
        return [locate(claim) for claim in held]

    def _carry_out(self, context, server, steps, claimed=None,
                   migration=None):
        """Claim, program, prepare, bind and publish, as planned."""
        taken = [] if claimed is None else claimed
        try:
            todo = self._claim(
                context, server, steps, taken, migration or server.uuid)
            for keep in steps.keep:
                self.readiness.again(context, server, keep)
            self.readiness.first(context, server, todo)
        except Exception:
            if taken:
                self.releases.clean(
                    context, self.releases.let_go(server.uuid, taken))
                taken.clear()
            raise
        claims = (self.holdings.of_migration(server.uuid, migration)
                  if migration else self.holdings.of(server.uuid))
        self.readiness.rescan_siblings(claims)
        self.publisher.show(context, self._still_open(claims))
        return claims

    def _still_open(self, claims):
        """Providers with free inventory left. The scheduler may pick them for
        reprogramming, or give what is used up; full ones can wait for the
        periodic report."""
        held = {c.handle for c in (*self.holdings.all(),
                                   *self.holdings.waiting())}
        for (_, index), mine in programming.by_region(claims).items():
            if mine[0].created_type:
                yield mine[0].provider_uuid
            elif index is not None:
                region = self.programming.region_of(mine)
                if region and not held.issuperset(region.handles):
                    yield mine[0].provider_uuid

    def _claim(self, context, server, steps, taken, consumer):
        """Claim free handles of the allocated providers, all or none.

        Waits for regions that are being cleaned after another server: the
        function that a server wants is mostly there again sooner than
        on another host.

        :param taken: receives the claims.
        :returns: each request with its claims.
        """
        takes = steps.take
        if not takes:
            return []
        self._await_clean(context, {take.provider_uuid for take in takes})
        # where a device was disabled just now, another one of its pool will do
        self.store.refresh()
        with self.inventory.claiming:
            chosen = self._choice.choose(server, takes, [
                claim for keep in steps.keep for claim in keep.claims])
            todo = []
            for take in takes:
                mine = [chosen[take.provider_uuid].pop(0)
                        for _ in range(take.wanted.amount)]
                todo.append((take.wanted, self._new_claims(
                    server, take, mine, consumer)))
            claims = [claim for _, chosen in todo for claim in chosen]
            self.holdings.claim(claims)
            taken += claims
        # from now on none begins
        self.programming.await_ordered(claims)
        return todo

    def _await_clean(self, context, provider_uuids):
        """Wait for what cleans regions, or clean them where a crash left
        them."""
        left = [claim for claim in self.holdings.being_released()
                if claim.provider_uuid in provider_uuids
                and claim.region_index is not None and not claim.error]
        if left:
            self.releases.clean(context, left, patient=True)

    def can_have(self, server: request.Server,
                 allocations: plan.Allocations, moving: bool = False) -> bool:
        """Return whether plug() would find what the flavor of a server demands.

        A look in memory and in the store, which claims nothing: Nova calls it
        under the lock that each build needs. What is being cleaned after
        another server counts as free, because plug() waits for it.

        :param server: numa_nodes are those on which its guest may be.
        :param allocations: as for plug().
        :param moving: the server moves, perhaps within this host: what it has
            is set aside before plug(), and no server gets it until the move
            is confirmed.
        """
        try:
            self.would_get(server, allocations, moving)
        except exception.AcceleratorError:
            return False
        return True

    def would_get(self, server: request.Server, allocations: plan.Allocations,
                  moving: bool) -> list[_Got]:
        """Return what plug() would take; see can_have().

        :raises AcceleratorError: it would not find all.
        """
        held = [] if moving else self._located(
            self.holdings.of(server.uuid), allocations)
        steps = plan.to_plug(server.uuid, server.wanted, allocations,
                             self._ours(allocations, held), held)
        chosen = self._choice.choose(
            server, steps.take,
            [claim for keep in steps.keep for claim in keep.claims],
            [*steps.surplus, *self.holdings.being_released()])
        return [(take.wanted, *chosen[take.provider_uuid].pop(0))
                for take in steps.take for _ in range(take.wanted.amount)]

    def _new_claims(self, server, take, chosen, consumer):
        wanted = take.wanted
        for device, _ in chosen:
            self._check_keys(wanted, device)
        created_type = self.device_handles.type_for(wanted, chosen[0][0])
        index = self.inventory.providers()[take.provider_uuid].region_index
        return [model.Claim(
            uuid=uuidutils.generate_uuid(), instance_uuid=server.uuid,
            consumer_uuid=consumer, project_id=server.project_id,
            **self.inventory.identity_for_claim(device.address),
            provider_uuid=take.provider_uuid,
            resource_class=wanted.resource_class, group=wanted.group,
            device_address=device.address,
            region_index=index,
            handle=handle, created_type=created_type,
            driver_request=handles.for_driver(wanted),
            operators_bitstream=None if index is None
            else device.region(index).operators_bitstream)
            for device, handle in chosen]

    def _check_keys(self, wanted, device):
        known = self.inventory.driver_of(device).KEYS
        for name in sorted(set(wanted.driver_keys) - known):
            raise exception.InvalidRequest(
                f'The extra spec accel{wanted.group}:driver_{name} is for a '
                f'driver that knows it, and the driver {device.driver} of '
                f'{device.address} knows {", ".join(sorted(known)) or "none"}: '
                f'correct it, or remove it from the flavor or profile.')

    # Resume

    def handles_to_start(self, context, server: request.Server,
                         ) -> list[model.AttachHandle]:
        """Return what the guest that is about to start must have, ready for it.

        A server whose devices are being plugged waits for that; every other
        one had its devices before.

        :raises AcceleratorError: the guest must not start.
        """
        if not server.requests:
            return []
        if not self.plugs.wait(server.uuid):
            self.wait_until_idle(server.uuid)
            self.resume(context, server)
        return self.handles(server.uuid)

    def resume(self, context, server: request.Server,
               requests: plan.Requests | None = None,
               claimed: list[model.Claim] | None = None) -> None:
        """Restore the devices of a server before it starts again.

        Releases nothing that the server held, and asks Placement only where a
        claim is missing or half done.

        :param requests: those of the flavor, by default, or of the flavor and
            a new image.
        :param claimed: receives what this call claims.
        :raises AcceleratorError: the guest must not start.
        """
        requests = server.requests if requests is None else requests
        self.releases.finish(server.uuid)
        if not self.holdings.of(server.uuid):
            self.settling.settle_now()
        self.end_move(context, server)
        held = self.holdings.of(server.uuid)
        self.readiness.rescan(held)
        steps = plan.Plan(keep=tuple(
            plan.Keep(wanted, tuple(claims)) for wanted, claims
            in _by_request(requests, held)))
        if not plan.is_complete(server.requests, held):
            try:
                steps = self._as_allocated(context, server, held)
            except exception.AcceleratorError:
                # what no claim answers is a vGPU of Nova's own, as long as
                # nothing was lost: Nova knows it by the guest that was there
                if self.settling.in_doubt() or not plan.is_complete(
                        server.requests, held, but_for=_NOVAS):
                    raise
        self._carry_out(context, server, steps, claimed)

    def _as_allocated(self, context, server, held):
        """Return what must be done where a claim is missing or half done.

        :raises AcceleratorError: the guest must not start.
        """
        allocations = self._cloud.allocations(context, server.uuid)
        held = self._located(held, allocations)
        ours = self._ours(allocations, held)
        self.settling.check_settled(server.uuid, allocations, held)
        return plan.to_start(
            server.uuid, server.wanted, allocations, ours, held)

    def end_move(self, context, server: request.Server) -> None:
        """Finish a move that failed or was reverted, or a live migration that
        has come here, where that could not be written: Placement has allocated
        to the server what the move has."""
        old = self.holdings.of(server.uuid, model.Role.OLD)
        if not old:
            return
        allocations = self._cloud.allocations(context, server.uuid)
        located = self._located(old, allocations)
        providers = {claim.provider_uuid for claim in located}
        moves = {claim.consumer_uuid for claim in old}
        if providers - set(allocations) or any(
                # from a pool the server may have its new devices, too
                providers & set(self._cloud.allocations(context, consumer))
                for consumer in moves):
            return
        back = plan.to_come_back(
            allocations, located,
            self._located(self.holdings.of(server.uuid), allocations),
            lambda: any(map(self._cloud.is_reverted, moves)))
        if back:
            uuids = {claim.uuid for claim in back}
            self.releases.clean(context, self.holdings.revert(server.uuid, [
                claim for claim in old if claim.uuid in uuids]), wait=False)

    def restore(self, context, server: request.Server) -> None:
        """Restore the devices of a server whose guest goes on, and is not
        created again.

        :raises AcceleratorError: one is not.
        """
        self.releases.finish(server.uuid)
        self.readiness.restore(context, server, self.holdings.of(server.uuid))

    # Unplug

    def unplug(self, context, server_uuid: str,
               role: model.Role = model.Role.CURRENT,
               wait: bool = True) -> int:
        """Release what a server holds, when its guest is gone.

        :param wait: for the devices to be clean, at most [accel]
            device_timeout; what takes longer goes on.
        :returns: how many accelerators the server lost.
        """
        if role is model.Role.CURRENT:
            self.plugs.end(server_uuid)
        if not self.holdings.of(server_uuid, role):
            return 0
        claims = self.releases.lose(
            server_uuid, lambda: self.holdings.of(server_uuid, role))
        self.releases.clean(context, claims, wait)
        return len(claims)

    # What is held

    def mediated_devices(self) -> set[str]:
        """Return the UUIDs of our mediated devices, also of those that are
        not there now."""
        found = [c.handle for c in self.holdings.all()]
        for device in self.inventory.devices.values():
            found += device.handles
        return {h.address for h in found if h.type is model.HandleType.MDEV}

    def holds(self, server_uuid: str) -> bool:
        """Return whether a server has, had or is getting anything here."""
        return (self.plugs.is_under_way(server_uuid)
                or bool(self.store.claims(server_uuid)))

    def handles(self, server_uuid: str) -> list[model.AttachHandle]:
        """Return what the guest of a server has to have, in a stable order."""
        return [claim.handle for claim in self.holdings.of(server_uuid)]

    def give_back(self, server_uuid: str, when: str) -> None:
        """Give a guest that goes on what was taken out of it, and nothing that
        was left out of it in doubt.

        Raises nothing: attach.reconcile tries again what fails.

        :param when: what has happened, the beginning of a sentence.
        """
        try:
            with self.exclusive(server_uuid):
                handles = [claim.handle for claim
                           in self.holdings.of(server_uuid)
                           if claim.state is model.ClaimState.BOUND]
                if handles:
                    self._cloud.attach(server_uuid, handles)
        except Exception as error:
            LOG.error('%s, and the accelerators of server %s could not go '
                      'back into its guest; that is tried again: %s', when,
                      server_uuid, error)

    def to_tell(self, server: request.Server, metadata: Mapping[str, str],
                ) -> dict[str, str]:
        """Return what the owner of a server has to read in its metadata: which
        of the functions that a group lists the server got, and which of the
        traits that it prefers its device has.

        A key of an earlier flavor is corrected, and no other is touched.

        :param metadata: as they are.
        :returns: what has to change: ``accel<group>:function`` -> function id
            or function name, as the flavor lists it; ``accel<group>:prefer``
            -> trait, or 'none'.
        """
        if not any(wanted.programs or wanted.prefer
                   for wanted in server.requests):
            return {}
        changes = {}
        held = self.holdings.of(server.uuid)
        for wanted, claims in _by_request(server.requests, held):
            changes.update(self._liked(wanted, claims, metadata))
            key = f'accel{wanted.group}:function'
            if not wanted.programs or not (
                    wanted.alternatives or key in metadata):
                continue
            region = self.programming.region_of(claims)
            got = region and wanted.got(region)
            if got and metadata.get(key) != got:
                changes[key] = got
        return changes

    def _liked(self, wanted, claims, metadata):
        provider = self.inventory.providers().get(
            self.inventory.provider_of(claims[0]) or '')
        if not wanted.prefer or not provider:
            return {}
        key = f'accel{wanted.group}:prefer'
        got = wanted.preferred(provider.traits) or 'none'
        return {key: got} if metadata.get(key) != got else {}

    def numa_nodes(self, server_uuid: str) -> dict[str, int]:
        """Return where in the host the devices of a server are.

        :returns: address of a handle -> NUMA node of its device, where that
            is known.
        """
        devices = self.inventory.devices
        return {
            claim.handle.address: node
            for claim in self.holdings.of(server_uuid)
            if (device := devices.get(claim.device_address))
            and (node := device.numa_node) is not None}

    def roles(self, server_uuid: str) -> dict[str, tuple[str, ...]]:
        """Return what each device of a server is for its guest.

        :returns: address of each function -> its group as in the flavor, its
            type, and the function of a region: its name, else its id.
        """
        found = {}
        for claim in self.holdings.of(server_uuid):
            device = self.inventory.devices.get(claim.device_address)
            region = device.find_region(claim.region_index) if device else None
            found.update(dict.fromkeys(
                claim.handle.functions, tuple(filter(None, (
                    f'accel{claim.group}', device.type if device else '',
                    region.function_name or region.function_uuid if region
                    else '')))))
        return found

    def exclusive(self, server_uuid: str,
                  ) -> contextlib.AbstractContextManager[None]:
        """Hold the server's lock: its claims, or the devices in its running
        guest, are changed.

        A caller that begins under it sees by the server's task_state whether
        Nova is at it; Nova's operations wait_until_idle() before they touch
        devices. Not Nova's own lock: calls that may not be late wait for that.

        :raises LockTimeout: another operation of the server does not end.
        """
        return self._servers.held(server_uuid)

    def wait_until_idle(self, server_uuid: str) -> None:
        """Wait until the server is in no exclusive() section.

        :raises LockTimeout: that takes too long.
        """
        with self.exclusive(server_uuid):
            pass

    def set_aside(self, context, server_uuid: str,
                  migration_uuid: str) -> None:
        """Keep what a server that moves away has for its return, and release
        what an earlier move has left."""
        self.releases.finish(server_uuid)
        self.unplug(context, server_uuid, model.Role.OLD)
        self.holdings.set_aside(server_uuid, migration_uuid)

    def revert(self, context, server_uuid: str, migration_uuid: str) -> None:
        """Release what the server has, and return what it had before the
        move to it.

        :raises AcceleratorsUnavailable: that cannot be written; nothing has
            changed.
        """
        with self.exclusive(server_uuid):
            back = self.holdings.of_migration(server_uuid, migration_uuid)
            # where it has nothing, that has been done
            lost = self.holdings.revert(server_uuid, back) if back else []
        self.releases.clean(context, lost, wait=False)

    def confirm(self, context, server_uuid: str, migration_uuid: str) -> None:
        """Release what the server had before it moved."""
        self.releases.clean(context, self.releases.lose(
            server_uuid, lambda: self.holdings.of_migration(
                server_uuid, migration_uuid)))


def _by_request(requests, held):
    """Yield what a server holds, by what it was asked for."""
    asked = {(r.group, r.resource_class): r for r in requests}
    groups: dict = collections.defaultdict(list)
    for claim in held:
        groups[claim.group, claim.resource_class].append(claim)
    for (group, resource_class), claims in groups.items():
        yield asked.get((group, resource_class)) or request.AcceleratorRequest(
            group, resource_class, len(claims)), claims
