# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Choose free handles of the allocated providers, and claim them for a server.

Healthy handles come before suspect handles. Then handles with which fewer
guests failed to start come first. Among equal handles, the closest handles are
chosen (attach.closeness). For example, Placement has allocated two GPUs of a
pool of four, and one of the four is suspect. Of the three healthy GPUs, the
two that share a PCIe switch are chosen.

The handles are chosen from memory without a lock, because asking the kernel
whether a process of the host has them open may take long. Then, under the lock
"choice", the handles are claimed if they are still offered. Otherwise other
handles are chosen, again without the lock. For example, two builds choose the
same VF: the second build finds the VF HELD under the lock, releases the lock,
and chooses another VF.
"""

import collections
from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import textwrap
import typing

from oslo_utils import uuidutils

from nova_accel.attach import closeness
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import plan
from nova_accel.attach import readiness as device_readiness
from nova_accel.attach import regions as free_regions
from nova_accel.attach import releases as server_releases
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import inventory as host_inventory
from nova_accel.inventory import holds
from nova_accel.inventory import offers
from nova_accel import model
from nova_accel import naming
from nova_accel import request
from nova_accel.store import claim_store
from nova_accel import text

#: provider uuid -> the offers of that provider that a server gets
Chosen = dict[str, list[offers.Offer]]


@dataclasses.dataclass(eq=False)
class Choice:
    _kernel: typing.Any
    _store: claim_store.ClaimStore
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _readiness: device_readiness.Readiness
    _regions: free_regions.Regions
    _releases: server_releases.Releases

    def __post_init__(self) -> None:
        #: handle -> number of consecutive guests that failed to start with
        #: it. In memory only: after a restart of nova-compute, a bad handle
        #: costs one more build
        self._failures: collections.Counter[model.AttachHandle] = (
            collections.Counter())

    def note_failed(self, handles: Iterable[model.AttachHandle]) -> None:
        """Note that a guest failed to start with these handles. From now on,
        equal handles without a failed start are chosen first."""
        known = {handle for device in self._inventory.devices.values()
                 for handle in device.all_handles}
        with self._inventory.claiming:
            self._failures.update(known.intersection(handles))
            # handles of vGPUs come and go
            for handle in self._failures.keys() - known:
                del self._failures[handle]

    def note_started(self, handles: Iterable[model.AttachHandle]) -> None:
        """Note that a guest has started with these handles, which ends the
        effect of note_failed()."""
        for handle in handles:
            self._failures.pop(handle, None)

    def choose(self, server, takes, kept, soon=()) -> Chosen:
        """Choose free handles from all allocated providers at once.

        :param takes: the allocated devices (plan.Take).
        :param kept: claims that the server keeps. The new devices should be
            close to the devices of these claims.
        :param soon: claims that end soon. Their handles count as free.
        :returns: provider uuid -> one offer for each device allocated.
        :raises DeviceUnavailable: too few handles are free, or the free
            devices are not as close as the flavor demands.
        """
        offered = self._inventory.table.offered({claim.uuid for claim in soon})
        amounts: dict = collections.Counter()
        for take in takes:
            amounts[take.provider_uuid] += take.wanted.amount
        free = {}
        for uuid, amount in amounts.items():
            provider = self._inventory.shown.providers()[uuid]
            free[uuid] = self._not_outlasted(server, _not_refused(
                self._free(provider, offered),
                [t.wanted for t in takes if t.provider_uuid == uuid]))
            if len(free[uuid]) < amount:
                in_use, planned = (
                    _because(kind, provider, offered)
                    for kind in (holds.Kind.IN_USE, holds.Kind.PLANNED))
                raise exception.DeviceUnavailable(
                    f'Server {server.uuid} was allocated {amount} of '
                    f'{provider.name}, and {len(free[uuid])} of it are free '
                    f'on this host{in_use}'
                    f'{planned if server.max_hours else ""}: the build is '
                    f'retried on another host.',
                    found=f'Server {server.uuid} was allocated {amount} '
                          f'accelerators of a provider, and '
                          f'{len(free[uuid])} of it are free')
        devices = self._inventory.devices
        there = [closeness.Want([devices[claim.device_address].place], 1)
                 for claim in kept if claim.device_address in devices]
        if server.affinity.close:
            there += [closeness.Want(
                [self._place(address)], 1, anywhere=True)
                for address in server.pci_devices]
        for candidates in self._by_preference(free, amounts):
            wants = [closeness.Want(
                [one.device.place for one in candidates[uuid]], amount)
                for uuid, amount in amounts.items()]
            for limit in _limits(server):
                chosen = closeness.choose(
                    [*wants, *there], limit, server.affinity.close)
                if chosen is not None:
                    return {uuid: [candidates[uuid][n] for n in numbers]
                            for uuid, numbers in zip(amounts, chosen)}
        where = textwrap.shorten(_where(
            (one.device for found in free.values() for one in found),
            server.affinity.one_root), 70, placeholder=' ...')
        raise exception.DeviceUnavailable(
            f'Server {server.uuid} needs all accelerators '
            f'{server.affinity}{_of_guest(server)}, and the free ones on this '
            f'host are {where}: the build is retried on another host.')

    def _by_preference(self, free, amounts):
        """Yield sets of the free offers of all providers, the best offers
        first.

        Each set contains the previous set. A choice from an earlier set that
        meets the limits is taken, even if a later set has closer devices.
        """
        well = {uuid: _well(found, amounts[uuid])
                for uuid, found in free.items()}
        best = {uuid: self._without_failures(found, amounts[uuid])
                for uuid, found in well.items()}
        yield best
        if well != best:
            yield well
        if free != well:
            yield free

    def _without_failures(self, free, amount):
        """Return the needed amount of a provider's offers, those with the
        fewest failed starts of guests, and all other offers with equally few.
        """
        failures = [self._failures[found.handle] for found in free]
        most = sorted(failures)[amount - 1]
        return [found for found, count in zip(free, failures)
                if count <= most]

    def _free(self, provider, offered):
        """Return the free handles of a provider, as offers.

        :raises DeviceUnavailable: the provider is not a pool, and its device
            or region is withheld.
        """
        if not provider.pool:
            self._inventory.find(
                provider.addresses[0], provider.region_index)
        return [one for address in provider.addresses
                for one in offered.of((address, provider.region_index))
                if one.state is offers.State.FREE]

    def _not_outlasted(self, server, free):
        """Return the offers of devices on which no work is planned before the
        server ends. If the flavor has no max_hours, return all offers."""
        work = self._inventory.table.planned_work() if server.max_hours else {}
        return [found for found in free
                if found.device.address not in work
                or work[found.device.address].at >= text.now(
                    -server.max_hours / 24)]

    def _place(self, address):
        """Return the place (model.Device.place) of a PCI device that Nova
        itself assigned."""
        return (pci.numa_node(self._kernel, address),
                *pci.bridges(self._kernel, address), address)

    # Claims

    def claim(self, server: request.Server, steps: plan.Plan,
              consumer: str, taken: list[model.Claim]) -> list[
                  tuple[request.AcceleratorRequest, list[model.Claim]]]:
        """Claim free handles of the allocated providers, all or none.

        Waits for regions that are being cleaned after another server, because
        that takes less time than a build on another host.

        :param consumer: uuid of the server, or of its migration, to which the
            devices are allocated.
        :param taken: a list to which the claims are appended.
        :returns: each request with its claims.
        :raises AcceleratorError: nothing was claimed except the claims in
            taken.
        """
        takes = steps.take
        if not takes:
            return []
        self._await_clean({take.provider_uuid for take in takes})
        # a device may have been disabled just now, and its pool have others
        self._store.refresh()
        kept = [claim for keep in steps.keep for claim in keep.claims]
        with self._chosen_unused(server, takes, kept) as chosen:
            todo = []
            for take in takes:
                offered = [chosen[take.provider_uuid].pop(0)
                           for _ in range(take.wanted.amount)]
                todo.append((take.wanted, self._new_claims(
                    server, take, offered, consumer)))
            claims = [claim for _, new in todo for claim in new]
            self._holdings.claim(claims)
            taken += claims
        # an operator's programming may have begun before the claim
        self._regions.gate.wait(claims)
        return todo

    @contextlib.contextmanager
    def _chosen_unused(self, server, takes, kept,
                       ) -> Iterator[Chosen]:
        """Choose handles that no process of the host has open, and hold the
        lock "choice" inside the context.

        Between the question and the lock, another build may claim one of the
        handles. Then choose again without the lock.
        """
        asked: set[model.AttachHandle] = set()
        while True:
            chosen = self.choose(server, takes, kept)
            new = [offer for found in chosen.values() for offer in found
                   if offer.handle not in asked]
            self._inventory.ask_users(new)
            asked.update(offer.handle for offer in new)
            with self._inventory.claiming:
                if self._is_current(chosen):
                    yield chosen
                    return

    def _is_current(self, chosen: Chosen) -> bool:
        offered = self._inventory.table.offered()
        return all(offer in offered.of(offer.part)
                   for found in chosen.values() for offer in found)

    def _await_clean(self, provider_uuids):
        """Clean regions that other servers have released, or wait until a
        cleaning that has begun ends."""
        left = [claim for claim in self._holdings.being_released()
                if claim.provider_uuid in provider_uuids
                and claim.region_index is not None and not claim.error]
        if left:
            self._releases.clean(left, patient=True)

    def _new_claims(self, server, take, offered, consumer):
        wanted = take.wanted
        for offer in offered:
            self._check_keys(wanted, offer.device)
        created_type = self._readiness.type_for(wanted, offered[0].device)
        shown = self._inventory.shown.providers()
        index = shown[take.provider_uuid].region_index
        return [model.Claim(
            uuid=uuidutils.generate_uuid(), instance_uuid=server.uuid,
            consumer_uuid=consumer, project_id=server.project_id,
            flavor=server.flavor, product=offer.device.product,
            **self._inventory.identity_for_claim(offer.device.address),
            provider_uuid=take.provider_uuid,
            resource_class=wanted.resource_class, group=wanted.group,
            device_address=offer.device.address,
            region_index=index,
            handle=offer.handle, created_type=created_type,
            driver_request=device_readiness.for_driver(wanted),
            operators_bitstream=None if index is None
            else offer.device.region(index).operators_bitstream)
            for offer in offered]

    def _check_keys(self, wanted, device):
        known = self._inventory.driver_of(device).KEYS
        for name in sorted(set(wanted.driver_keys) - known):
            raise exception.InvalidRequest(
                f'The driver {device.driver} of {device.address} does not '
                f'support the extra spec accel{wanted.group}:driver_{name}, '
                f'and supports {", ".join(sorted(known)) or "none"}: '
                f'correct it, or remove it from the flavor or profile.')


def _because(kind: holds.Kind, provider, offered) -> str:
    """Return why handles of a provider have holds of one kind: the reasons in
    brackets, or '' if no handle has such a hold."""
    why = holds.reasons(
        hold for address in provider.addresses
        for offer in offered.of((address, provider.region_index))
        for hold in offer.all_holds if hold.kind is kind)
    return why and f' ({why})'


def _is_suspect(offer):
    return offer.has(holds.Kind.SUSPECT)


def _not_refused(free, wanted):
    """Return the offers that the requests accept. A request may forbid or
    require the trait SUSPECT. If only some devices of a pool are suspect,
    Placement does not show this trait. Hence the host checks the devices."""
    if any(naming.SUSPECT in one.forbidden for one in wanted):
        return [found for found in free if not _is_suspect(found)]
    if any(naming.SUSPECT in one.required for one in wanted):
        return [found for found in free if _is_suspect(found)]
    return free


def _well(free, amount):
    """Return the offers that are not suspect and that the operator does not
    plan to drain. If these are too few, return all offers."""
    well = [found for found in free if not (
        _is_suspect(found) or found.has(holds.Kind.PLANNED))]
    return well if len(well) >= amount else free


def _limits(server: request.Server) -> Iterator[closeness.Limit | None]:
    """Yield the limits for the devices of a server, the preferred limit first.
    """
    affinity, nodes = server.affinity, server.numa_nodes
    limit = None
    if affinity.one_root:
        limit = closeness.Limit(depth=2, most=1)
    elif affinity.nodes is not None:
        limit = closeness.Limit(depth=1, most=affinity.nodes)
    if nodes and affinity.close:
        # None: the kernel shows no node
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
    """Return a text about where free handles are, for example '2 GPU on node
    0' or '2 GPU below pci0000:3a'."""
    def place(device):
        if by_root:
            return f' below {device.bridges[0]}' if device.bridges else ''
        return ('' if device.numa_node is None
                else f' on node {device.numa_node}')
    counts = collections.Counter(
        f'{device.type}{place(device)}' for device in devices)
    return ', '.join(f'{count} {what}' for what, count in counts.items())
