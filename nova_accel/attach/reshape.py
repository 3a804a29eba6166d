# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Move allocations when another provider shows their device.

The provider that shows a device may change while a server has the device: at an
upgrade to pools, or if [accel] pools or the traits of the card change. A claim
names the provider of its allocation. Placement is changed first, then the
claim. For example, server A has a GPU of its own provider, and the operator
adds GPUs to [accel] pools. When nova-compute starts, the provider of the pool
shows the GPU. Nova moves the allocation of A there, and then the claim names
the pool.

=================  ===================  =====================================
Claim names        Allocation is from   Action
=================  ===================  =====================================
present provider   any provider         none
former provider    former provider      move allocation and claim when
                                        nova-compute starts; until then the
                                        present provider reserves the device
former provider    present provider     change the claim: nova-compute was
                                        killed before it did so
former provider    both, because two    change the claims
                   devices of one
                   server changed
                   places
former provider    none                 change the claim; attach.reconcile
                                        restores the allocation
former provider,   former provider      none, unless the server has all of the
present one is a                        set: Placement allocates a set as a
set                                     whole
=================  ===================  =====================================

All claims of a server on one provider move, or none: otherwise a part of a set
would stay allocated.

Nova moves allocations only when nova-compute starts, all in one request (its
driver raises ReshapeNeeded). Other consumers of the former provider keep their
allocations, and the former provider stays fenced until all of them end.
"""

import collections
from collections.abc import Iterable, Mapping
import dataclasses
import typing

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel import inventory as host_inventory
from nova_accel.inventory import providers
from nova_accel import log as logging
from nova_accel import model

LOG = logging.getLogger(__name__)

Providers = Mapping[str, providers.Provider]


class _Move(typing.NamedTuple):
    claim: model.Claim
    #: uuid of the provider that shows its device now
    to: str


class Reshape:

    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings, cloud: novas.Cloud):
        self._inventory = inventory
        self._holdings = holdings
        self._cloud = cloud
        #: moves for which Placement was asked; None: ask again
        self._asked: list[_Move] | None = []
        #: providers, and what _moves() returned for them
        self._computed: tuple[Providers, list[_Move]] = {}, []
        #: moves whose allocation is still from the former provider
        self._left: list[_Move] = []
        #: True until nova-compute has started: allocations may move
        self._starting = True
        self._once = logging.Once()

    def located(self, claims: Iterable[model.Claim],
                allocations: Mapping[str, typing.Any]) -> list[model.Claim]:
        """Return claims with the provider that has their allocation.

        If the allocation is from the provider that shows the device now, the
        claim gets this provider. Otherwise the claim is unchanged.

        :param allocations: allocations of the consumer of the claims, by
            provider uuid.
        """
        def locate(claim):
            now = self._inventory.shown.provider_of(claim)
            if claim.provider_uuid in allocations or now not in allocations:
                return claim
            return dataclasses.replace(claim, provider_uuid=now)
        return [locate(claim) for claim in claims]

    def is_needed(self, node: str, root_uuid: str) -> bool:
        """Return whether Placement has allocations that have to move.

        Costs nothing if each claim names its present provider, or if nothing
        has changed since the last call.

        :param node: name of the compute node.
        :param root_uuid: uuid of the provider of this node.
        """
        try:
            moves = self._moves(
                self._inventory.shown.providers_of(node, root_uuid))
            if moves != self._asked:
                self._ask(moves)
        except Exception as error:
            self._asked = None
            LOG.warning('Allocations of servers cannot be compared with the '
                        'providers of their accelerators: %s', error)
        if not self._starting:
            self._once.only('allocation', self._left)
            for move in self._left:
                self._once.log(
                    ('allocation', move), LOG.warning,
                    '%s of server %s is allocated from a provider that does '
                    'not show it any more. The server keeps what it has, and '
                    'the allocation moves when nova-compute is started again',
                    move.claim.handle.address, move.claim.holder)
        return bool(self._left)

    def end_start(self) -> None:
        """Store that Nova has tried to move allocations. Allocations that did
        not move wait for the next start of nova-compute."""
        self._starting = False
        node = self._inventory.shown.root
        if self._left and node:
            self._asked = None
            self.is_needed(*node)

    def move(self, allocations: dict, shown: Providers) -> list[model.Claim]:
        """Move allocations in the body of Nova's reshape request.

        :param allocations: ``{consumer: {'allocations': {provider uuid:
            {'resources': {class: amount}}}}}`` of every consumer of this host;
            changed in place.
        :returns: the claims as they are after Placement has accepted the
            request.
        """
        moved = []
        for move in self._moves(shown):
            claim = move.claim
            holder = self._holder(claim, (
                consumer for consumer, given in allocations.items()
                if _amount(given['allocations'], claim)))
            if holder is None:
                continue
            given = allocations[holder]['allocations']
            _take(given, claim)
            resources = given.setdefault(
                move.to, {'resources': {}})['resources']
            resources[claim.resource_class] = resources.get(
                claim.resource_class, 0) + 1
            LOG.info('The allocation of %s to %s moves from provider %s to '
                     'provider %s', claim.handle.address, holder,
                     claim.provider_uuid, move.to)
            moved.append(dataclasses.replace(claim, provider_uuid=move.to))
        return moved

    def _moves(self, shown: Providers) -> list[_Move]:
        # shown is another object after a claim or a device has changed
        if self._computed[0] is not shown:
            self._computed = shown, self._compute(shown)
        return self._computed[1]

    def _compute(self, shown: Providers) -> list[_Move]:
        parts = providers.by_part(shown)
        found, stay = [], set()
        for claim in self._holdings.all():
            to = parts.get(claim.part)
            if to == claim.provider_uuid and shown[to].step > 1 and (
                    not self._has_all(claim, shown[to])):
                # [accel] device_sets has the addresses from before a boot that
                # renumbered the buses
                stay.add(_together(claim))
            if (to in (None, claim.provider_uuid)
                    or claim.state is model.ClaimState.DELETING
                    # another driver has the card now
                    or claim.resource_class not in shown[to].inventory):
                continue
            if (shown[to].step > 1 and not self._has_all(claim, shown[to])
                    # the card at the address is not the server's
                    or self._inventory.table.is_misplaced(
                        claim.device_address)):
                stay.add(_together(claim))
            found.append(_Move(claim, to))
        # a part of a set would stay allocated, which Placement refuses
        return [move for move in found if _together(move.claim) not in stay]

    def _has_all(self, claim: model.Claim, provider: providers.Provider,
                 ) -> bool:
        """Return whether the server of a claim has every device of a set.

        The claims of these devices name the same provider as this claim. If
        nova-compute was killed between the changes, some name the set already.

        :param provider: the provider of the set.
        """
        whole = {_together(claim), _together(dataclasses.replace(
            claim, provider_uuid=provider.uuid))}
        return sum(_together(other) in whole
                   and other.device_address in provider.addresses
                   and other.state is not model.ClaimState.DELETING
                   for other in self._holdings.all()) == provider.step

    def _ask(self, moves: list[_Move]) -> None:
        """Ask Placement which allocations have moved already, and change their
        claims.

        :raises PlacementUnavailable: no claim has changed.
        """
        self._left = []
        given = self._cloud.consumers_of({uuid for move in moves for uuid in (
            move.claim.provider_uuid, move.to)})
        needed = collections.Counter(
            (c.consumer_uuid, self._inventory.shown.provider_of(c),
             c.resource_class) for c in self._holdings.all()
            if c.state is not model.ClaimState.DELETING)
        left, done = [], []
        for move in moves:
            claim = move.claim
            before = given[claim.provider_uuid]
            # if two devices of one server have changed places, the server has
            # from each provider the amount that its claims need there
            if all(there.get(claim.consumer_uuid, {}).get(
                    claim.resource_class, 0) == needed[
                        claim.consumer_uuid, uuid, claim.resource_class]
                    for uuid, there in given.items()):
                done.append(move)
            elif self._holder(claim, before):
                left.append(move)
            # an allocation of an unknown consumer may be the one of the claim
            elif not before or self._holder(claim, given[move.to]):
                done.append(move)
        for move in done:
            self._holdings.reshaped(move.claim, move.to)
        self._left = left
        self._asked = [move for move in moves if move not in done]

    def _holder(self, claim: model.Claim, consumers: Iterable[str],
                ) -> str | None:
        """Return the consumer that has the allocation of a claim, if any.

        The consumer is the server or one of its moves. When a move begins or
        is reverted, Placement changes before the claim.

        :param consumers: the consumers with allocations from a provider.
        """
        consumers = set(consumers)
        for uuid in (claim.consumer_uuid, claim.instance_uuid):
            if uuid in consumers:
                return uuid
        if not consumers:
            return None
        moves = self._cloud.moves(consumers)
        return next((uuid for uuid, server in sorted(moves.items())
                     if server == claim.instance_uuid), None)


def _together(claim: model.Claim) -> tuple:
    """Return a key that is equal for claims that are allocated together."""
    return claim.instance_uuid, claim.role, claim.provider_uuid


def _amount(given: Mapping[str, Mapping], claim: model.Claim) -> int:
    return given.get(claim.provider_uuid, {}).get('resources', {}).get(
        claim.resource_class, 0)


def _take(given: dict, claim: model.Claim) -> None:
    resources = given[claim.provider_uuid]['resources']
    resources[claim.resource_class] -= 1
    if not resources[claim.resource_class]:
        del resources[claim.resource_class]
    if not resources:
        del given[claim.provider_uuid]
