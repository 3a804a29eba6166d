# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Judge each claim by snapshots of Nova, Placement and libvirt. Pure, no I/O.

A snapshot reads the claims, Placement, libvirt, the claims again, and Nova, in
this order. A server that is built meanwhile has a claim in the second reading
only; a server that is deleted meanwhile loses its claim before its allocation.
Therefore a claim is judged only if both readings agree on it, it is not
DELETING, and its server is not being built.

========= ========== ========= ================ =========================
Claim of  Allocated  Guest     Nova's server    Verdict
========= ========== ========= ================ =========================
a server  no         none      not here         ABANDONED
a server  no         none      here             LOST
a server  no         there     any              LOST
a server  too few    any       any              LOST, as many as there are
                                                too few
a server  any        lacks it  asks for none    NOT_ASKED in place of LOST
a server  any        lacks it  asks for some    OUT if it runs, beside LOST
a move    no         lacks it  any, move ended  ABANDONED
a move    no         lacks it  any, move open   LOST
a move    no         has it    any              LOST
a move    its server any       here, at rest    ARRIVED
========= ========== ========= ================ =========================

For the claim of a move, only a running guest counts, because libvirt keeps the
definition of the guest that was shut off for the move. A server with a
task_state is never OUT, NOT_ASKED or ARRIVED, and a server with other claims
here is never ARRIVED. A move is open as long as Nova may revert it.
"""

import collections
from collections.abc import Collection, Iterator, Mapping
import dataclasses
import enum
import functools
import typing

from nova_accel import model


class Entry(typing.NamedTuple):
    """The facts about a server of this host by which claims are judged."""

    #: whether it has no task_state: Nova does not work on it
    rests: bool = True
    #: whether its flavor asks for accelerators
    asks: bool = True


class Verdict(enum.Enum):
    #: no server has the claim: it is released
    ABANDONED = 'abandoned'
    #: the flavor asks for no accelerators any more, and the guest has none,
    #: for example after a resize that failed on its destination: released
    NOT_ASKED = 'not asked'
    #: held without an allocation: allocated again, or withheld
    LOST = 'lost'
    #: the running guest of the server lacks the device
    OUT = 'out'
    #: the move has ended here, and this host did not notice it, for example a
    #: live migration while nova-compute was down: the server gets the claim
    ARRIVED = 'arrived'


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The facts about claims, in the order in which they were read."""

    #: the claims before the first query
    before: Collection[model.Claim] = ()
    #: uuid of a claim -> the provider that shows its device now
    shown_by: Mapping[str, str | None] = dataclasses.field(
        default_factory=dict)
    #: provider uuid -> its consumers with their amounts of each resource
    #: class; None: Placement did not answer, and every claim counts as
    #: allocated
    consumers: Mapping[str, Mapping[str, Mapping[str, int]]] | None = None
    #: migration uuid -> server uuid, of consumers that are migrations
    moves: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: server uuid -> addresses of devices, of every guest that is defined
    guests: Mapping[str, Collection[str]] = dataclasses.field(
        default_factory=dict)
    #: the same for each running guest
    running: Mapping[str, Collection[str]] = dataclasses.field(
        default_factory=dict)
    #: the claims after the last query
    after: Collection[model.Claim] = ()
    #: servers that are being built here
    plugging: Collection[str] = ()
    #: server uuid -> Nova's entry, of servers of this host that are in doubt
    entries: Mapping[str, Entry] = dataclasses.field(default_factory=dict)
    #: the moves of open_to_ask() that Nova may still revert
    open_moves: Collection[str] = ()

    def claims(self) -> Iterator[model.Claim]:
        """Yield the claims to judge: claims that both readings have, that are
        not ending, and whose server is not being built."""
        owners = {c.uuid: c.consumer_uuid for c in self.before}
        for claim in self.after:
            if (owners.get(claim.uuid) == claim.consumer_uuid
                    and claim.state is not model.ClaimState.DELETING
                    and claim.instance_uuid not in self.plugging):
                yield claim

    @functools.cached_property
    def _by_server(self) -> dict[str, list[model.Claim]]:
        return by_server(self.after)

    def of(self, server_uuid: str) -> list[model.Claim]:
        """Return the present claims of one server."""
        return [c for c in self._by_server.get(server_uuid, ())
                if c.role is model.Role.CURRENT
                and c.state is not model.ClaimState.DELETING]

    def providers_of(self, claim: model.Claim) -> set[str]:
        """Return the providers from which a claim may be allocated: the
        provider that the claim names, and the provider that shows its device
        now."""
        return {claim.provider_uuid,
                self.shown_by.get(claim.uuid) or claim.provider_uuid}

    def is_allocated(self, claim: model.Claim) -> bool:
        """Return whether Placement has an allocation for a claim. When a move
        begins or ends, Placement changes before the claim. Hence an allocation
        to the consumer that the claim will then get counts, too."""
        if self.consumers is None:
            return True
        owners = self._owners(claim)
        return any(not owners.isdisjoint(self.consumers.get(uuid, ()))
                   for uuid in self.providers_of(claim))

    def is_lost(self, claim: model.Claim) -> bool:
        """Return whether a claim has no allocation. If the allocation is
        smaller than the number of claims of the server, the claims in excess
        have no allocation."""
        if not self.is_allocated(claim):
            return True
        if self.consumers is None or claim.role is model.Role.OLD:
            return False
        owners = self._owners(claim)
        given = sum(
            self.consumers.get(uuid, {}).get(owner, {}).get(
                claim.resource_class, 0)
            for uuid in self.providers_of(claim) for owner in owners)
        return 0 < given <= sum(
            (c.provider_uuid, c.resource_class)
            == (claim.provider_uuid, claim.resource_class)
            and c.uuid < claim.uuid for c in self.of(claim.instance_uuid))

    def _owners(self, claim):
        server = claim.instance_uuid
        owners = {claim.consumer_uuid}
        if claim.role is model.Role.CURRENT:
            owners |= {move for move, of in self.moves.items()
                       if of == server} - {
                           c.consumer_uuid
                           for c in self._by_server.get(server, ())}
        # the allocation of the server may be for the old claim, unless its
        # guest has a new device of the same pool (a confirmed move); a revert
        # ends that guest before it changes Placement
        elif not any(c.provider_uuid == claim.provider_uuid
                     and c.handle.address in self.guests.get(server, ())
                     for c in self.of(server)):
            owners.add(server)
        return owners

    def is_servers(self, claim: model.Claim) -> bool:
        """Return whether the claim of a move belongs to the server: Placement
        has allocated the device to the server, not to the move, and the server
        has no other claims here."""
        consumers = {consumer for uuid in self.providers_of(claim)
                     for consumer in (self.consumers or {}).get(uuid, ())}
        return (claim.role is model.Role.OLD
                and claim.instance_uuid in consumers
                and claim.consumer_uuid not in consumers
                and not self.of(claim.instance_uuid))

    def lacks(self, claim: model.Claim) -> bool:
        """Return whether the server of a claim has a guest that lacks the
        device."""
        there = self.running.get(claim.instance_uuid, self.guests.get(
            claim.instance_uuid))
        return there is not None and claim.handle.address not in there

    def has_guest(self, claim: model.Claim) -> bool:
        """Return whether the server of a claim has a guest. For the claim of a
        move, only a running guest with the device counts."""
        if claim.role is model.Role.OLD:
            return claim.handle.address in self.running.get(
                claim.instance_uuid, ())
        return (claim.instance_uuid in self.guests
                or claim.instance_uuid in self.running)

    def stands_alone(self, claim: model.Claim) -> bool:
        """Return True if a claim has neither an allocation nor a guest."""
        return not self.is_allocated(claim) and not self.has_guest(claim)

    def moves_to_ask(self) -> set[str]:
        """Return consumers that may be moves, to ask Nova about them. They
        have no claims, but allocations from the providers of lost claims."""
        owners = {uuid for c in (*self.before, *self.after)
                  for uuid in (c.instance_uuid, c.consumer_uuid)}
        return {consumer for claim in self.claims()
                if claim.role is model.Role.CURRENT and self.is_lost(claim)
                for uuid in self.providers_of(claim)
                for consumer in (self.consumers or {}).get(uuid, ())} - owners

    def servers_to_ask(self) -> set[str]:
        """Return the servers whose claims cannot be judged without Nova's
        entry."""
        return {claim.instance_uuid for claim in self.claims()
                if self.is_servers(claim)
                or claim.role is model.Role.CURRENT
                and (self.lacks(claim) or self.is_lost(claim))}

    def open_to_ask(self) -> set[str]:
        """Return the moves that have neither an allocation nor a guest, to ask
        Nova whether they are open."""
        return {claim.consumer_uuid for claim in self.claims()
                if claim.role is model.Role.OLD and self.stands_alone(claim)}

    def strangers(self) -> dict[str, str]:
        """Return the unclaimed devices in running guests: address ->
        server of the guest."""
        claimed = {c.handle.address for c in (*self.before, *self.after)}
        return {address: server for server, addresses in self.running.items()
                for address in set(addresses) - claimed}


def judge(snapshot: Snapshot) -> dict[tuple[str, Verdict], model.Claim]:
    """Judge every claim. A claim can be both LOST and OUT.

    :returns: (uuid of the claim, verdict) -> the claim as it is now.
    """
    return {(claim.uuid, verdict): claim for claim in snapshot.claims()
            for verdict in _verdicts(snapshot, claim)}


def _verdicts(snapshot, claim) -> Iterator[Verdict]:
    entry = snapshot.entries.get(claim.instance_uuid)
    is_old = claim.role is model.Role.OLD
    if snapshot.stands_alone(claim) and (
            claim.consumer_uuid not in snapshot.open_moves if is_old
            else entry is None):
        yield Verdict.ABANDONED
        return
    if entry is not None and entry.rests and snapshot.is_servers(claim):
        yield Verdict.ARRIVED
        return
    out = (not is_old and snapshot.lacks(claim)
           and entry is not None and entry.rests)
    if out and not entry.asks:
        yield Verdict.NOT_ASKED
        return
    if snapshot.is_lost(claim):
        yield Verdict.LOST
    if out and claim.instance_uuid in snapshot.running:
        yield Verdict.OUT


def by_server(claims: Collection[model.Claim],
              ) -> dict[str, list[model.Claim]]:
    found: dict[str, list[model.Claim]] = collections.defaultdict(list)
    for claim in claims:
        found[claim.instance_uuid].append(claim)
    return dict(found)
