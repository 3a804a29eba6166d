# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What Placement has allocated to the servers of this host, and no claim says
of which device.
"""

import collections
from collections.abc import Collection, Iterable, Mapping
import dataclasses

from nova_accel.attach import cloud as novas
from nova_accel import model
from nova_accel import naming


@dataclasses.dataclass(frozen=True)
class Allocated:
    """What Placement has allocated to servers of this host."""

    #: (server uuid, resource class) -> amount, with what its moves have
    amounts: Mapping[tuple[str, str], int]
    #: resource class -> servers that have fewer claims than that
    short: Mapping[str, Collection[str]]
    #: the keys of amounts that count as ended, see ask()
    ended: Collection[tuple[str, str]]

    def confirms(self, claim: model.Claim) -> bool:
        """Return whether the server of a claim has some of its class."""
        return (claim.instance_uuid, claim.resource_class) in self.amounts


def ask(cloud: novas.Cloud, provider_uuids: Iterable[str],
        claims: Collection[model.Claim], created: Collection[str],
        ended: Collection[tuple[str, str]],
        only_known: bool = False) -> Allocated:
    """Compare the allocations of this host in Placement with claims.

    :param provider_uuids: of this host, also of providers of earlier options.
    :param created: resource classes whose devices are created again where they
        are lost, as vGPUs are: nothing that is free has data of their servers.
    :param ended: (server, resource class) of claims that have ended: Nova
        deletes the allocation later, or leaves it, as after a failed resize.
    :param only_known: count as short only servers that Nova has on this host
        and does nothing with, and moves: others may be about to come.
    :raises PlacementUnavailable: it is not known.
    """
    amounts: collections.Counter = collections.Counter()
    for consumers in cloud.consumers_of({
            *provider_uuids, *(c.provider_uuid for c in claims)}).values():
        for consumer, resources in consumers.items():
            amounts.update({
                (consumer, name): amount for name, amount
                in naming.accelerators(resources).items()})
    claimed = collections.Counter(
        (c.instance_uuid, c.resource_class) for c in claims)
    moves = cloud.moves({key[0] for key, amount in amounts.items()
                         if amount > claimed[key]})
    by_server: collections.Counter = collections.Counter()
    for (consumer, name), amount in amounts.items():
        by_server[moves.get(consumer, consumer), name] += amount
    over = {key for key, amount in by_server.items()
            if amount > claimed[key] and key[1] not in created}
    short = over.difference(ended)
    # a server that never ran has no data, and may be being built
    counts = {
        server.uuid: server.launched and not (only_known and server.task_state)
        for server in (cloud.servers({owner for owner, _ in short})
                       if short else ())}
    found: dict[str, set[str]] = collections.defaultdict(set)
    for owner, name in short:
        if counts.get(owner, owner in moves.values() or not only_known):
            found[name].add(owner)
    return Allocated(by_server, found, over.intersection(ended))
