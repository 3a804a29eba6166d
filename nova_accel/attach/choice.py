# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which free handles of the allocated providers a server gets."""

import collections
from collections.abc import Iterable, Iterator
import textwrap

from nova_accel.attach import closeness
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import settling as device_settling
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import inventory as host_inventory
from nova_accel import model
from nova_accel import naming
from nova_accel import request


class Choice:

    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings,
                 settling: device_settling.Settling, kernel):
        """:param kernel: nova_accel.host.kernel.Kernel or a simulated one."""
        self._inventory = inventory
        self._holdings = holdings
        self._settling = settling
        self._kernel = kernel

    def choose(self, server, takes, kept, soon=()):
        """Choose free handles of the allocated providers, all of them
        together.

        :param kept: claims that the server keeps.
        :param soon: claims that end soon; their handles count as free.
        :returns: provider uuid -> [(device, handle)], as many as are taken.
        """
        ends = {claim.uuid for claim in soon}
        held = [c for c in self._holdings.all() if c.uuid not in ends]
        amounts: dict = collections.Counter()
        for take in takes:
            amounts[take.provider_uuid] += take.wanted.amount
        free = {}
        suspects = self._inventory.table.suspects()
        for uuid, amount in amounts.items():
            provider = self._inventory.providers()[uuid]
            free[uuid] = _not_refused(
                self._free(provider, held), suspects,
                [t.wanted for t in takes if t.provider_uuid == uuid])
            if len(free[uuid]) < amount:
                raise exception.DeviceUnavailable(
                    f'Server {server.uuid} was allocated {amount} of '
                    f'{provider.name}, and {len(free[uuid])} of it are free '
                    f'on this host: the build is retried on another host.',
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
        # those that are suspect last, also before what is merely close
        well = {uuid: _well(found, suspects, amounts[uuid])
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
        """Return each (device, handle) of a provider that no server has.

        :param held: claims of servers.
        """
        taken: dict = collections.defaultdict(set)
        for holder in (*held, *self._holdings.waiting()):
            taken[holder.part].add(holder.handle)
        everywhere = self._settling.uncleaned().union(*taken.values())
        return [
            (device, handle) for device, part in self._parts(provider)
            if not model.is_held_otherwise(
                part, device.address,
                taken[device.address, provider.region_index])
            for handle in part.handles if handle not in everywhere]

    def _place(self, address):
        """As model.Device.place, of a PCI function that is Nova's own."""
        return (pci.numa_node(self._kernel, address),
                *pci.bridges(self._kernel, address), address)

    def _parts(self, provider):
        """Return the devices behind a provider, each with what has the handles:
        itself or its region. Of a pool those that are well.

        :raises DeviceUnavailable: the only one is not.
        """
        if provider.pool:
            devices = self._inventory.devices
            found = [devices.get(address) for address in provider.addresses]
            return [(device, device) for device in found
                    if device and device.health is model.Health.OK]
        device, region = self._inventory.find(
            provider.addresses[0], provider.region_index)
        return [(device, region or device)]


def _not_refused(free, suspects, wanted):
    """Return those of the (device, handle) of a provider that its groups take:
    of a pool with devices that are suspect and others Placement shows no
    trait."""
    if any(naming.SUSPECT in one.forbidden for one in wanted):
        return [found for found in free
                if found[0].address not in suspects]
    if any(naming.SUSPECT in one.required for one in wanted):
        return [found for found in free if found[0].address in suspects]
    return free


def _well(free, suspects, amount):
    """(device, handle) of a provider without those that are suspect, where
    enough are left."""
    well = [found for found in free if found[0].address not in suspects]
    return well if len(well) >= amount else free


def _limits(server: request.Server) -> Iterator[closeness.Limit | None]:
    """Yield what the devices of a server have to satisfy, the best limit
    first."""
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
    """Return where free handles are: '2 GPU on node 0' or '2 GPU below
    pci0000:3a'."""
    def place(device):
        if by_root:
            return f' below {device.bridges[0]}' if device.bridges else ''
        return ('' if device.numa_node is None
                else f' on node {device.numa_node}')
    counts = collections.Counter(
        f'{device.type}{place(device)}' for device in devices)
    return ', '.join(f'{count} {what}' for what, count in counts.items())
