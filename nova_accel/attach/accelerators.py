# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Accelerators for servers: initialize, plug, resume, unplug.

The calls of the os-acc specification, inside nova-compute:

plug    a server gets devices: plan, release what is surplus, claim, program,
        prepare, bind, publish. What fails undoes what this call did.
resume  a server that had devices starts again: it gets the same ones, as they
        were, or an error that keeps its guest down.
unplug  a server loses just these claims; each ends once its device is clean.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
import contextlib
import dataclasses
import os
import textwrap
import typing

import os_resource_classes
from oslo_utils import uuidutils

from nova_accel.attach import cleaning
from nova_accel.attach import closeness
from nova_accel.attach import cloud as novas
from nova_accel.attach import handles
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import names as function_names
from nova_accel.attach import plan
from nova_accel.attach import programming
from nova_accel.attach import publishing
from nova_accel.attach import readiness
from nova_accel.attach import relocation
from nova_accel.attach import settling
from nova_accel.attach import words
from nova_accel import conf
from nova_accel import drivers
from nova_accel.drivers import options
from nova_accel import exception
from nova_accel.host import limited
from nova_accel.host import pci
from nova_accel import inventory as host_inventory
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel import request
from nova_accel.store import claim_store
from nova_accel.store import sole

CONF = conf.CONF
LOG = logging.getLogger(__name__)
#: classes of which Nova's own libvirt driver has devices as well
_NOVAS = (os_resource_classes.VGPU,)
#: seconds in which the devices of a server are ready or an error has come:
#: longer than the limits of all its parts, of which Placement's may be missing
#: ([placement] timeout)
_PLUG_SECONDS = 3600

Allocations = Callable[[], plan.Allocations]


def initialize(host: str, state_path: str, kernel, cloud: novas.Cloud,
               taken_elsewhere: Callable[[model.Device], str],
               ) -> 'Accelerators':
    """Find the devices and read the claims; ends when both are known.

    :param host: name of this compute host.
    :param state_path: directory for the claim store.
    :param kernel: nova_accel.host.kernel.Kernel or a simulated one.
    :param taken_elsewhere: which of Nova's own options has a device, too.
    :raises AcceleratorsUnavailable: the claim store cannot be used.
    :raises ConfigurationError: [accel] names what is not there, or has a value
        that cannot be read.
    """
    if CONF.accel.enabled_drivers:
        for sentence in conf.malformed():
            raise exception.ConfigurationError(sentence)
    loaded = {}
    for name in CONF.accel.enabled_drivers:
        try:
            loaded.update(drivers.load([name], kernel))
        except exception.UnusableDriver as error:
            # of another package, as a rule, which costs its devices only
            LOG.error('%s', error)
    store = _open_store(
        os.path.join(state_path, claim_store.file_name(host)))
    accelerators = Accelerators(
        cloud, store, host_inventory.Inventory(
            loaded, store, taken_elsewhere), kernel)
    accelerators.start()
    return accelerators


def _open_store(path):
    try:
        sole.use(path)
        return claim_store.ClaimStore(path)
    except exception.AcceleratorsUnavailable as error:
        if CONF.accel.enabled_drivers:
            raise
        # a host without accelerators works without it
        LOG.error('%s', error)
        return claim_store.ClaimStore(claim_store.MEMORY)


def none(cloud: novas.Cloud) -> 'Accelerators':
    """Those of a nova-compute that is not initialized: there are none."""
    store = claim_store.ClaimStore(claim_store.MEMORY)
    return Accelerators(cloud, store, host_inventory.Inventory({}, store))


@dataclasses.dataclass
class _Plugging:
    """A plug() that has begun, until the operation that needs it ends."""

    future: typing.Any = None
    #: what it has claimed so far
    claimed: list[model.Claim] = dataclasses.field(default_factory=list)

    def wait(self, server_uuid: str) -> None:
        """Wait for its end.

        :raises DeviceTimeout: after _PLUG_SECONDS; it goes on.
        """
        limited.wait(self.future, _PLUG_SECONDS,
                     f'Preparing accelerators for server {server_uuid}')


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
        self.names = function_names.Names(inventory, self.publisher, cloud)
        self.programming = programming.Programming(
            inventory, self.holdings, cloud, self.publisher, self.names)
        regions = cleaning.Regions(inventory, self.programming)
        self._handles = handles.Handles(inventory, self.holdings, regions)
        self.readiness = readiness.Readiness(
            inventory, self.holdings, self._handles, self.programming,
            regions)
        self.settling = settling.Settling(
            inventory, self.holdings, self.publisher, cloud)
        self.relocation = relocation.Relocation(
            inventory, self.holdings, cloud)
        self.words = words.Words(store, inventory, self.publisher, cloud)
        self._plugging: dict[str, _Plugging] = {}
        self._servers = locks.Locks(
            'server', 'The accelerators of server {}',
            programming.seconds_at_most)
        #: server -> claims that it has lost, which could not be written
        self._unwritten: dict[str, set[str]] = {}

    # The service

    def start(self) -> None:
        """Find devices, and put right what a crash or a host boot left.

        :raises ConfigurationError: [accel] names what is not there.
        """
        options.check()
        for sentence in conf.unknown():
            LOG.warning('%s', sentence)
        self.inventory.configure()
        self.inventory.scan()
        self.inventory.check_configuration()
        self.inventory.watch(self.kernel)
        # an earlier release did not prepare the handles of every driver that
        # cleans them now
        for claim in self.holdings.all():
            device = self.inventory.devices.get(claim.device_address)
            if (device and claim.state is model.ClaimState.BOUND
                    and not claim.prepared
                    and self.inventory.prepares_every_handle(device)):
                self.holdings.mark_prepared(claim, True)
        # what a process that is gone was doing when it went; an earlier
        # release wrote that a bind had failed before it released
        self.holdings.releasing(
            [c for c in self.holdings.all()
             if c.state is model.ClaimState.BIND_FAILED])
        self.holdings.doubt(
            [c for c in self.holdings.all() if c.state in (
                model.ClaimState.INITIAL, model.ClaimState.PROVISIONING)],
            'nova-compute stopped while the device was prepared')
        self._make_again()
        self.names.start()
        self.words.start()

    def _make_again(self):
        """Make the vGPUs of servers again, which the kernel has forgotten if
        the host booted, before their room goes to others."""
        by_device = collections.defaultdict(list)
        for claim in self.holdings.all():
            if claim.created_type and claim.state is model.ClaimState.BOUND:
                by_device[claim.device_address].append(claim)

        def make(claims):
            for claim in claims:
                try:
                    self._handles.prepare([claim], fresh=False)
                except Exception as error:
                    LOG.error('A vGPU of server %s could not be made again: '
                              '%s', claim.instance_uuid, error)
                    if isinstance(error, exception.DeviceTimeout):
                        return
        started = {limited.start(make, claims): address
                   for address, claims in by_device.items()}
        _, late = futures.wait(started, CONF.accel.programming_timeout)
        for future in late:
            LOG.error('vGPUs of servers on %s are still being created after '
                      '%d s; the start of nova-compute does not wait for them '
                      'any more', started[future],
                      CONF.accel.programming_timeout)
        self.readiness.look_at_siblings(
            [c for claims in by_device.values() for c in claims])

    def report(self, tree, node: str, allocations: dict | None = None,
               starting: bool = False) -> bool:
        """Show our devices in Nova's provider tree.

        Under Nova's resource tracker's lock.

        :param tree: nova.compute.provider_tree.ProviderTree of the host.
        :param node: name of its root.
        :param allocations: those of the host, which Nova writes together with
            the tree; changed in place. None: they stay as they are.
        :param starting: whether Nova would do that.
        :returns: False, with nothing changed, where that is needed: this is
            to be called again with the allocations.
        """
        if not self.settling.before_report(tree, node):
            return True
        if allocations is not None:
            moved = self.relocation.move(
                allocations, self.inventory.providers_of(
                    node, tree.data(node).uuid))

            def used(uuid):
                return sum(
                    amount for given in allocations.values() for name, amount
                    in given['allocations'].get(uuid, {}).get(
                        'resources', {}).items()
                    if naming.is_accelerator_class(name))
            self.inventory.update_tree(
                tree, node, lambda uuid: any(
                    uuid in given['allocations']
                    for given in allocations.values()), moved, used,
                self.publisher.named,
                configured=self._cloud.configured_classes)
            return True
        if self.relocation.is_needed(node, tree.data(node).uuid) and starting:
            return False
        # Nova's copy of a provider is older than the last server that was
        # scheduled to it, and Placement would refuse its report
        self.inventory.update_tree(
            tree, node, self.publisher.in_use, named=self.publisher.named,
            write=self.publisher.writer(self._cloud.admin_context()),
            configured=self._cloud.configured_classes)
        return True

    def reported(self) -> None:
        """Nova has written at its start what report() gave it."""
        self.relocation.look_again()

    def close(self) -> None:
        """Stop looking at devices; plugs that run are left to their end."""
        self._plugging.clear()
        self.words.close()
        self.inventory.close()
        sole.leave(self.store.path)

    # Plug

    def start_plug(self, context, server: request.Server,
                   allocations: Allocations, rebuilt: bool = False) -> None:
        """Begin plug() in the background; once, however often it is called.

        Costs nothing for a server without accelerators.

        :param allocations: gives what Placement has allocated to the server;
            called in the background.
        :param rebuilt: the server had its devices here before, and keeps
            them: resume() in place of plug().
        """
        if server.uuid in self._plugging or not server.requests:
            return
        self.wait_until_idle(server.uuid)
        plugging = _Plugging()

        def plug():
            context.update_store()
            if rebuilt:
                self.resume(context, server, server.wanted, plugging.claimed)
            else:
                self.plug(context, server, allocations(), plugging.claimed)
        plugging.future = limited.start(plug)
        self._plugging[server.uuid] = plugging

    def is_plugging(self, server_uuid: str) -> bool:
        return server_uuid in self._plugging

    @contextlib.contextmanager
    def plugged(self, context, server: request.Server,
                allocations: Allocations, rebuilt: bool = False,
                ) -> Iterator[None]:
        """While Nova builds a guest: its devices are plugged meanwhile.

        When it fails, the server loses what it got for this guest, unless the
        guest runs: then a device under it would be given to another one.
        """
        self.start_plug(context, server, allocations, rebuilt)
        try:
            yield
        except Exception as error:
            self._give_up(context, server.uuid, error)
            raise
        finally:
            self._plugging.pop(server.uuid, None)

    def abandon(self, context, server_uuid: str) -> None:
        """The build failed before its guest was to be made."""
        try:
            self._give_up(context, server_uuid, None)
        finally:
            self._plugging.pop(server_uuid, None)

    def _give_up(self, context, server_uuid, error):
        plugging = self._plugging.get(server_uuid)
        if plugging is None:
            return
        with contextlib.suppress(Exception):
            # its failure was told where it was joined
            plugging.wait(server_uuid)
        claimed = self.holdings.now(plugging.claimed)
        if not claimed:
            return
        if self._runs_with(server_uuid, claimed):
            LOG.error('Server %s failed after its guest had started (%s); it '
                      'keeps its accelerators until the guest is gone',
                      server_uuid, error)
            return
        self._clean(context, self._let_go(server_uuid, claimed))

    def _runs_with(self, server_uuid, claims):
        try:
            there = self._cloud.running().get(server_uuid, frozenset())
        except Exception as error:
            LOG.warning('It is not known whether the guest of server %s runs '
                        '(%s); it keeps its accelerators', server_uuid, error)
            return True
        return bool(there & {c.handle.address for c in claims})

    def plug(self, context, server: request.Server,
             allocations: plan.Allocations | None,
             claimed: list[model.Claim] | None = None) -> list[model.Claim]:
        """Claim and prepare what was allocated to a server.

        Idempotent: devices that the server holds and that are allocated to it
        stay as they are. After an error it holds what it held before.

        :param allocations: ``{provider uuid: {'resources': {class: n}}}``.
        :param claimed: receives what this call claims.
        :returns: all that the server holds.
        :raises AcceleratorError: of many kinds, each in one sentence.
        """
        requests = server.wanted
        if allocations is None:
            raise exception.PlacementUnavailable(
                f'Server {server.uuid} was to get its accelerators, and '
                f'Placement did not say which: see that it answers '
                f'nova-compute.')
        self._finish(server.uuid)
        with self.exclusive(server.uuid):
            held = self._located(self.holdings.of(server.uuid), allocations)
            steps = plan.to_plug(server.uuid, requests, allocations,
                                 self._ours(allocations, held), held)
            if steps.surplus:
                LOG.warning('Server %s holds devices that are not allocated '
                            'to it; they are released', server.uuid)
                self.holdings.releasing(steps.surplus)
        if steps.surplus:
            self._clean(context, steps.surplus)
        return self._carry_out(context, server, steps, claimed)

    def _ours(self, allocations, held):
        """The part of a server's allocations that is ours."""
        ours = self.inventory.allocated(
            allocations, mine={(c.device_address, c.region_index)
                               for c in held})
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
        where that is not written down yet (attach.relocation)."""
        def locate(claim):
            now = self.inventory.provider_of(claim)
            if claim.provider_uuid in allocations or now not in allocations:
                return claim
            return dataclasses.replace(claim, provider_uuid=now)
        return [locate(claim) for claim in held]

    def _carry_out(self, context, server, steps, claimed=None):
        """Claim, program, prepare, bind and publish, as planned."""
        taken = [] if claimed is None else claimed
        try:
            todo = self._claim(context, server, steps, taken)
            for keep in steps.keep:
                self.readiness.again(context, server, keep)
            self.readiness.first(context, server, todo)
        except Exception:
            if taken:
                self._clean(context, self._let_go(server.uuid, taken))
                taken.clear()
            raise
        claims = self.holdings.of(server.uuid)
        self.readiness.look_at_siblings(claims)
        self.publisher.show(context, self._still_open(claims))
        return claims

    def _still_open(self, claims):
        """Providers with free inventory left. The scheduler may pick them for
        reprogramming, or give what is used up; full ones can wait for the
        periodic report."""
        held = {c.handle for c in self.holdings.all()}
        held |= self.holdings.waiting()
        for (_, index), mine in programming.by_region(claims).items():
            if mine[0].created_type:
                yield mine[0].provider_uuid
            elif index is not None:
                region = self.programming.region_of(mine)
                if region and not held.issuperset(region.handles):
                    yield mine[0].provider_uuid

    def _claim(self, context, server, steps, taken):
        """Claim free handles of the allocated providers, all or none.

        Waits for regions that are being cleaned after another server: the
        function that a server wants is mostly there again sooner than
        elsewhere.

        :param taken: receives the claims.
        :returns: each request with its claims.
        """
        takes = steps.take
        if not takes:
            return []
        self._await_clean(context, {take.provider_uuid for take in takes})
        # where a device was disabled just now, another one of its pool will do
        self.store.look()
        with self.inventory.claiming:
            chosen = self._chosen(server, takes, [
                claim for keep in steps.keep for claim in keep.claims])
            todo = []
            for take in takes:
                mine = [chosen[take.provider_uuid].pop(0)
                        for _ in range(take.wanted.amount)]
                todo.append((take.wanted, self._new_claims(
                    server, take, mine)))
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
            self._clean(context, left, patient=True)

    def can_have(self, server: request.Server,
                 allocations: plan.Allocations, moving: bool = False) -> bool:
        """Whether plug() would find what the flavor of a server demands.

        A look in memory and in the store, which claims nothing: Nova calls it
        under the lock that each build needs. What is being cleaned after
        another server counts as free, because plug() waits for it.

        :param server: numa_nodes are those on which its guest may be.
        :param allocations: as for plug().
        :param moving: the server moves, perhaps within this host: what it has
            is set aside before plug(), and nobody's until the move is
            confirmed.
        """
        try:
            held = [] if moving else self._located(
                self.holdings.of(server.uuid), allocations)
            steps = plan.to_plug(server.uuid, server.wanted, allocations,
                                 self._ours(allocations, held), held)
            self._chosen(
                server, steps.take,
                [claim for keep in steps.keep for claim in keep.claims],
                [*steps.surplus, *self.holdings.being_released()])
        except exception.AcceleratorError:
            return False
        return True

    def _chosen(self, server, takes, kept, soon=()):
        """Free handles of the allocated providers, all of them chosen
        together.

        :param kept: claims that the server keeps.
        :param soon: claims that end soon; their handles count as free.
        :returns: provider uuid -> [(device, handle)], as many as are taken.
        """
        ends = {claim.uuid for claim in soon}
        held = [c for c in self.holdings.all() if c.uuid not in ends]
        amounts: dict = collections.Counter()
        for take in takes:
            amounts[take.provider_uuid] += take.wanted.amount
        free = {}
        for uuid, amount in amounts.items():
            provider = self.inventory.providers()[uuid]
            free[uuid] = _not_refused(
                self._free(provider, held),
                [t.wanted for t in takes if t.provider_uuid == uuid])
            if len(free[uuid]) < amount:
                raise exception.DeviceUnavailable(
                    f'Server {server.uuid} was allocated {amount} of '
                    f'{provider.name}, and {len(free[uuid])} of it are free '
                    f'on this host: the build is retried on another host.',
                    found=f'Server {server.uuid} was allocated {amount} '
                          f'accelerators of a provider, and '
                          f'{len(free[uuid])} of it are free')
        devices = self.inventory.devices
        there = [closeness.Want([devices[claim.device_address].place], 1)
                 for claim in kept if claim.device_address in devices]
        if server.affinity.close:
            there += [closeness.Want(
                [self._place(address)], 1, anywhere=True)
                for address in server.pci_devices]
        # those that are suspect last, also before what is merely close
        well = {uuid: _well(found, amounts[uuid])
                for uuid, found in free.items()}
        for offered in [well, *[free] * (well != free)]:
            wants = [closeness.Want(
                [device.place for device, _ in offered[uuid]], amount)
                for uuid, amount in amounts.items()]
            for limit in _limits(server):
                chosen = closeness.choose(
                    [*wants, *there], limit, server.affinity.close)
                if chosen is not None:
                    return {uuid: [offered[uuid][number]
                                   for number in numbers]
                            for uuid, numbers in zip(amounts, chosen)}
        where = textwrap.shorten(_where(
            (device for found in free.values() for device, _ in found),
            server.affinity.one_root), 70, placeholder=' ...')
        raise exception.DeviceUnavailable(
            f'Server {server.uuid} wants all accelerators '
            f'{server.affinity}{_of_guest(server)}, and of what it was '
            f'allocated this host '
            f'has free {where}: the build is retried on another host.')

    def _free(self, provider, held):
        """(device, handle) of a provider that no server has.

        :param held: claims of servers.
        """
        taken: dict = collections.defaultdict(set)
        for holder in (*held, *self.holdings.to_be_given_back()):
            taken[holder.device_address, holder.region_index].add(
                holder.handle)
        everywhere = self.settling.uncleaned().union(*taken.values())
        return [
            (device, handle) for device, part in self._parts(provider)
            if not model.is_held_otherwise(
                part, device.address,
                taken[device.address, provider.region_index])
            for handle in part.handles if handle not in everywhere]

    def _place(self, address):
        """As model.Device.place, of a PCI function that is Nova's own."""
        return (pci.numa_node(self.kernel, address),
                *pci.bridges(self.kernel, address), address)

    def _new_claims(self, server, take, chosen):
        wanted = take.wanted
        for device, _ in chosen:
            self._check_keys(wanted, device)
        created_type = self._handles.type_for(wanted, chosen[0][0])
        index = self.inventory.providers()[take.provider_uuid].region_index
        return [model.Claim(
            uuid=uuidutils.generate_uuid(), instance_uuid=server.uuid,
            consumer_uuid=server.uuid, project_id=server.project_id,
            **self.inventory.identity_for_claim(device.address),
            provider_uuid=take.provider_uuid,
            resource_class=wanted.resource_class, group=wanted.group,
            device_address=device.address,
            region_index=index,
            handle=handle, created_type=created_type,
            asked=handles.asked(wanted),
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

    def _parts(self, provider):
        """The devices behind a provider, each with what has the handles:
        itself or its region. Of a pool those that are well.

        :raises DeviceUnavailable: the only one is not.
        """
        if provider.pool:
            devices = self.inventory.devices
            found = [devices.get(address) for address in provider.addresses]
            return [(device, device) for device in found
                    if device and device.health is model.Health.OK]
        device, region = self.inventory.find(
            provider.addresses[0], provider.region_index)
        return [(device, region or device)]

    # Resume

    def handles_to_start(self, context, server: request.Server,
                         ) -> list[model.AttachHandle]:
        """What the guest that is about to start is to have, ready for it.

        A server whose devices are being plugged waits for that; every other
        one had its devices before.

        :raises AcceleratorError: the guest must not start.
        """
        if not server.requests:
            return []
        plugging = self._plugging.get(server.uuid)
        if plugging is not None:
            plugging.wait(server.uuid)
        else:
            self.wait_until_idle(server.uuid)
            self.resume(context, server)
        return self.handles(server.uuid)

    def resume(self, context, server: request.Server,
               requests: plan.Requests | None = None,
               claimed: list[model.Claim] | None = None) -> None:
        """Make the devices of a server as they were, before it starts again.

        Releases nothing that the server held, and asks Placement only where a
        claim is missing or half done.

        :param requests: those of the flavor, by default, or of the flavor and
            a new image.
        :param claimed: receives what this call claims.
        :raises AcceleratorError: the guest must not start.
        """
        requests = server.requests if requests is None else requests
        self._finish(server.uuid)
        if not self.holdings.of(server.uuid):
            self.settling.look_again()
        self._end_move(context, server)
        held = self.holdings.of(server.uuid)
        self.readiness.look_again(held)
        steps = plan.Plan(keep=tuple(
            plan.Keep(wanted, tuple(claims)) for wanted, claims
            in _by_request(requests, held)))
        if not plan.is_complete(server.requests, held):
            try:
                steps = self._as_allocated(context, server, held)
            except exception.AcceleratorError:
                # what no claim answers is a vGPU of Nova's own, as long as
                # nothing was lost: Nova knows it by the guest that was there
                if self._unsettled() or not plan.is_complete(
                        server.requests, held, but_for=_NOVAS):
                    raise
        self._carry_out(context, server, steps, claimed)

    def _as_allocated(self, context, server, held):
        """What is to be done where a claim is missing or half done.

        :raises AcceleratorError: the guest must not start.
        """
        allocations = self._cloud.allocations(context, server.uuid)
        held = self._located(held, allocations)
        ours = self._ours(allocations, held)
        self._check_settled(server.uuid, allocations, held)
        return plan.to_start(
            server.uuid, server.wanted, allocations, ours, held)

    def _check_settled(self, server_uuid, allocations, held):
        """Before a server starts to which a claim is missing.

        :raises DeviceUnavailable: what it had may be a device that is not
            settled yet (attach.settling).
        """
        unsettled = self._unsettled()
        if not unsettled:
            return

        has = collections.Counter(claim.provider_uuid for claim in held)
        if any(self._may_be_unsettled(uuid, resources, unsettled)
               for uuid, allocation in allocations.items()
               for resources in [naming.accelerators(allocation['resources'])]
               if sum(resources.values()) > has[uuid]):
            raise exception.DeviceUnavailable(
                f'Server {server_uuid} is to start, and which devices it has '
                f'is being found out, because the claim store is new: start '
                f'it again in some minutes; the log of nova-compute says what '
                f'is missing.')

    def _unsettled(self):
        """The rows that can be about a server's device: a row whose unsettled
        parts show no handle is not."""
        devices = self.inventory.devices.values()
        return [row for row in self.holdings.unsettled()
                if not row.but_for or any(map(row.means, devices))]

    def _may_be_unsettled(self, provider_uuid, resources, unsettled):
        """Whether what a provider gave may be a device that is not settled."""
        provider = self.inventory.providers().get(provider_uuid)
        if provider:
            devices = self.inventory.devices
            return any(row.means(devices[address]) for row in unsettled
                       for address in provider.addresses)
        # of a device that is away, unless it is a vGPU of Nova's own
        return any(map(naming.is_custom, resources)) or bool(
            self._cloud.find_providers(
                trait=CONF.accel.owner_trait, uuid=provider_uuid))

    def _end_move(self, context, server):
        """Finish a move that failed, or was reverted, where that could not be
        written: Placement has allocated to the server what it had before."""
        old = self.holdings.of(server.uuid, model.Role.OLD)
        if not old:
            return
        allocations = self._cloud.allocations(context, server.uuid)
        located = self._located(old, allocations)
        providers = {claim.provider_uuid for claim in located}
        if providers - set(allocations) or any(
                # from a pool the server may have its new devices, too
                providers & set(self._cloud.allocations(context, consumer))
                for consumer in {c.consumer_uuid for c in old}):
            return
        back = plan.to_come_back(allocations, located, self._located(
            self.holdings.of(server.uuid), allocations))
        if back:
            uuids = {claim.uuid for claim in back}
            self._clean(context, self.holdings.revert(server.uuid, [
                claim for claim in old if claim.uuid in uuids]), wait=False)

    def restore(self, context, server: request.Server) -> None:
        """Make the devices of a server as they were, whose guest is not to
        be made, but goes on.

        :raises AcceleratorError: one is not.
        """
        self._finish(server.uuid)
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
            self._settle(server_uuid)
        if not self.holdings.of(server_uuid, role):
            return 0
        claims = self._lose(
            server_uuid, lambda: self.holdings.of(server_uuid, role))
        self._clean(context, claims, wait)
        return len(claims)

    def _lose(self, server_uuid, claims):
        """As _let_go(), while the server is locked; a lock that is not to be
        had does not stop the server either.

        :param claims: tells which; it is called under the lock.
        """
        try:
            with self.exclusive(server_uuid):
                return self._let_go(server_uuid, claims())
        except exception.LockTimeout as error:
            return self._later(server_uuid, claims(), error)

    def _let_go(self, server_uuid, claims):
        """Release the claims of a server that goes, as Holdings.releasing().

        A store that cannot be written does not stop the server. Its claims
        stay then until its next operation or the next comparison.
        """
        try:
            return self.holdings.releasing(claims)
        except exception.AcceleratorsUnavailable as error:
            return self._later(server_uuid, claims, error)

    def _later(self, server_uuid, claims, error):
        LOG.error('What server %s had here is released later, as that cannot '
                  'be written down now: %s', server_uuid, error)
        self._unwritten.setdefault(server_uuid, set()).update(
            claim.uuid for claim in claims)
        return []

    def _finish(self, server_uuid):
        """Write that a server has lost what it lost, before it gets or moves
        anything.

        :raises AcceleratorsUnavailable: that cannot be written still.
        """
        uuids = self._unwritten.get(server_uuid)
        if not uuids:
            return
        with self.exclusive(server_uuid):
            lost = self.holdings.releasing(self.store.by_uuid(uuids))
            self._unwritten.pop(server_uuid, None)
        self._clean(self._cloud.admin_context(), lost, wait=False)

    def _settle(self, server_uuid):
        """Wait for a plug of this server that nothing waits for any more."""
        plugging = self._plugging.pop(server_uuid, None)
        if plugging is not None:
            with contextlib.suppress(Exception):
                plugging.wait(server_uuid)

    def release(self, context, claims: Iterable[model.Claim],
                patient: bool = False) -> int:
        """Release just these claims; the caller has judged them.

        :param patient: wait for regions that are programmed again, too.
        :returns: how many the server lost.
        """
        claims = self.holdings.releasing(claims)
        self._clean(context, claims, patient=patient)
        return len(claims)

    def release_to_the_end(self, claims: Iterable[model.Claim]) -> None:
        """Release just these claims, as release() does, and wait for that.

        :raises DeviceUnavailable: a device is not clean by then; it is tried
            again.
        """
        claims = list(claims)
        self.release(self._cloud.admin_context(), claims, patient=True)
        for claim in self.holdings.now(claims):
            raise exception.DeviceUnavailable(
                f'{claim.handle.address} belongs to no server, and cannot be '
                f'offered ({claim.error or "it is being cleaned"}): it is '
                f'tried again each minute.')

    def _clean(self, context, claims, wait=True, patient=False):
        claims = self.holdings.now(claims)
        self._handles.release(
            claims, lambda claim: self._freed(context, claim),
            lambda kept: self.publisher.show_devices(context, kept),
            # an error of the last moment is to be written
            CONF.accel.device_timeout + 1 if wait else 0,
            CONF.accel.programming_timeout + 1 if patient else 0)
        # what is not clean yet must not be offered
        left = self.holdings.now(claims)
        self.publisher.show_devices(context, left)

    def _freed(self, context, claim):
        self.readiness.look_at_cards([claim])
        self.readiness.look_at_siblings([claim])
        self.holdings.released([claim])
        self.publisher.show_devices(context, [claim])

    def retry_releases(self, context) -> int:
        """Try again what could not be cleaned.

        :returns: how many accelerators are free now.
        """
        for server_uuid in list(self._unwritten):
            with contextlib.suppress(exception.AcceleratorsUnavailable,
                                     exception.LockTimeout):
                self._finish(server_uuid)
        left = self.holdings.being_released()
        if left:
            self._clean(context, left, patient=True)
        return len(left) - len(self.holdings.now(left))

    # What is held

    def mediated_devices(self) -> set[str]:
        """UUIDs that are ours, whether there is such a device now or not."""
        found = [c.handle for c in self.holdings.all()]
        for device in self.inventory.devices.values():
            found += device.handles
        return {h.address for h in found if h.type is model.HandleType.MDEV}

    def holds(self, server_uuid: str) -> bool:
        """Whether a server has, had or is getting anything here."""
        return (self.is_plugging(server_uuid)
                or bool(self.store.claims(server_uuid)))

    def handles(self, server_uuid: str) -> list[model.AttachHandle]:
        """What the guest of a server has to have, in a stable order."""
        return [claim.handle for claim in self.holdings.of(server_uuid)]

    def to_tell(self, server: request.Server, metadata: Mapping[str, str],
                ) -> dict[str, str]:
        """What the owner of a server is to read in its metadata: which of the
        functions that a group lists the server got, and which of the traits
        that it prefers its device has.

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
        """Where in the host what a server holds is.

        :returns: address of a handle -> NUMA node of its device, where that
            is known.
        """
        devices = self.inventory.devices
        return {
            claim.handle.address: node
            for claim in self.holdings.of(server_uuid)
            if (device := devices.get(claim.device_address))
            and (node := device.numa_node) is not None}

    def exclusive(self, server_uuid: str,
                  ) -> contextlib.AbstractContextManager[None]:
        """While the claims, or the devices in a running guest, are changed.

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

    def set_aside(self, server_uuid: str, migration_uuid: str) -> None:
        """The server moves away; what it has is kept for its return."""
        self._finish(server_uuid)
        self.holdings.set_aside(server_uuid, migration_uuid)

    def revert(self, context, server_uuid: str, migration_uuid: str) -> None:
        """The server is back from where it moved: what it has goes, and what
        it had before is its own again.

        :raises AcceleratorsUnavailable: that cannot be written; nothing has
            changed.
        """
        with self.exclusive(server_uuid):
            lost = self.holdings.revert(
                server_uuid, self.holdings.of_migration(
                    server_uuid, migration_uuid))
            self._unwritten.pop(server_uuid, None)
        self._clean(context, lost, wait=False)

    def confirm(self, context, server_uuid: str, migration_uuid: str) -> None:
        """The server stays where it moved; what it had before goes."""
        self._clean(context, self._lose(
            server_uuid, lambda: self.holdings.of_migration(
                server_uuid, migration_uuid)))


def _not_refused(free, wanted):
    """Those of the (device, handle) of a provider that its groups take: of a
    pool with devices that are suspect and others Placement shows no trait."""
    if any(naming.SUSPECT in one.forbidden for one in wanted):
        return [found for found in free if not found[0].suspect]
    if any(naming.SUSPECT in one.required for one in wanted):
        return [found for found in free if found[0].suspect]
    return free


def _well(free, amount):
    """(device, handle) of a provider without those that are suspect, where
    enough are left."""
    well = [found for found in free if not found[0].suspect]
    return well if len(well) >= amount else free


def _limits(server: request.Server) -> Iterator[closeness.Limit | None]:
    """What the devices of a server have to satisfy, the best limit first."""
    affinity, nodes = server.affinity, server.numa_nodes
    limit = None
    if affinity.one_root:
        limit = closeness.Limit(depth=2, most=1)
    elif affinity.nodes is not None:
        limit = closeness.Limit(depth=1, most=affinity.nodes)
    if nodes and affinity.close:
        # None: where the kernel tells no node
        yield (limit or closeness.Limit(1, len(nodes)))._replace(
            within={*nodes, None})
        if affinity.with_guest:
            return
    yield limit


def _of_guest(server: request.Server) -> str:
    if not (server.affinity.with_guest and server.numa_nodes):
        return ''
    nodes = ', '.join(map(str, sorted(server.numa_nodes)))
    return f' of its guest ({nodes})'


def _where(devices: Iterable[model.Device], by_root: bool) -> str:
    """Where free handles are: '2 GPU on node 0' or '2 GPU below pci0000:3a'."""
    def place(device):
        if by_root:
            return f' below {device.bridges[0]}' if device.bridges else ''
        return ('' if device.numa_node is None
                else f' on node {device.numa_node}')
    counts = collections.Counter(
        f'{device.type}{place(device)}' for device in devices)
    return ', '.join(f'{count} {what}' for what, count in counts.items())


def _by_request(requests, held):
    """What a server holds, by what it was asked for."""
    asked = {(r.group, r.resource_class): r for r in requests}
    groups: dict = collections.defaultdict(list)
    for claim in held:
        groups[claim.group, claim.resource_class].append(claim)
    for (group, resource_class), claims in groups.items():
        yield asked.get((group, resource_class)) or request.AcceleratorRequest(
            group, resource_class, len(claims)), claims
