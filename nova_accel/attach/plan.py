# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Plan which devices a server keeps, takes and releases. Pure, no I/O.

The inputs are requests, allocations in Placement, and claims of the server.
The output is a Plan, or an error with the reason:

============ ============= =====================================
Allocated    Held          Plan
============ ============= =====================================
as requested as allocated  keep
as requested nothing       take
as requested other devices plug: take, and release these;
                           start: refuse
nothing      anything      refuse
otherwise    anything      plug: refuse; start: as allocated
============ ============= =====================================

For example, in the last row, a resize failed on its destination: Nova has
restored the old flavor and kept the allocation of the new one.
"""

import collections
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import dataclasses

from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from nova_accel import request

Requests = Sequence[request.AcceleratorRequest]
#: format of Placement: {provider uuid: {'resources': {class: amount}}}
Allocations = Mapping[str, Mapping]


@dataclasses.dataclass(frozen=True)
class Keep:
    """Devices that the server holds already, for one request."""

    wanted: request.AcceleratorRequest
    claims: tuple[model.Claim, ...]


@dataclasses.dataclass(frozen=True)
class Take:
    """Devices to claim from one provider, for one request."""

    wanted: request.AcceleratorRequest
    provider_uuid: str


@dataclasses.dataclass(frozen=True)
class Plan:
    keep: tuple[Keep, ...] = ()
    take: tuple[Take, ...] = ()
    #: held but not allocated
    surplus: tuple[model.Claim, ...] = ()


def is_complete(requests: Requests, held: Iterable[model.Claim],
                except_for: Collection[str] = ()) -> bool:
    """Return whether a server holds all devices of its flavor, and all its
    claims are BOUND.

    A claim is missing if it was lost, or if the request is for a vGPU of Nova
    (in a standard resource class). Only Placement shows which is the case.

    :param except_for: resource classes of which the server may hold fewer
        devices.
    """
    held = list(held)
    has = collections.Counter(claim.resource_class for claim in held)
    return (bool(held or not requests)
            and all(c.state is model.ClaimState.BOUND for c in held)
            and all(has[name] >= amount
                    for name, amount in _amounts(requests).items()
                    if name not in except_for))


def to_plug(server_uuid: str, requests: Requests, allocations: Allocations,
            own: Sequence[request.Allocation],
            held: Sequence[model.Claim]) -> Plan:
    """Plan for a server that gets devices on this host.

    :param requests: the requests of the server's flavor and image.
    :param allocations: all allocations of the server.
    :param own: the allocations from nova_accel's providers.
    :param held: the present claims of the server, from an earlier try.
    :raises DeviceUnavailable: the allocation does not match the requests.
    """
    if _lacks(_resources(allocations), requests) and not own:
        raise exception.DeviceUnavailable(
            f'Server {server_uuid} must get {_said(requests, ())}, and the '
            f'allocation has no accelerators: schedule the build again.')
    requests = _for_us(requests, own)
    keep, left, surplus = _kept(requests, own, held)
    return Plan(keep, _taken(requests, keep, left), surplus)


def to_start(server_uuid: str, requests: Requests, allocations: Allocations,
             own: Sequence[request.Allocation],
             held: Sequence[model.Claim]) -> Plan:
    """Plan for a server that starts again with missing or unfinished claims.
    The server keeps all its claims.

    :raises DeviceUnavailable: Placement has allocated no devices to the
        server, or other devices than the server holds.
    """
    if not own and (held or _lacks(_resources(allocations), requests) or any(
            # another host has the devices, for example because a move was not
            # undone
            naming.is_custom(wanted.resource_class) for wanted in requests)):
        raise exception.DeviceUnavailable(
            f'Server {server_uuid} cannot start with {_said(requests, held)}, '
            f'because Placement has none allocated to it, as after a '
            f'rebuild or resize that failed: resize, shelve or delete the '
            f'server.')
    requests = _for_us(requests, own)
    if _lacks((allocation.resources for allocation in own), requests):
        requests = list(_as_allocated(own, held))
    keep, left, unallocated = _kept(requests, own, held)
    if unallocated:
        raise exception.DeviceUnavailable(
            f'Server {server_uuid} holds '
            f'{", ".join(c.handle.address for c in unallocated)[:80]}, which '
            f'Placement has not allocated to it: shelve or delete the server, '
            f'or allocate it again.')
    return Plan(keep, _taken(requests, keep, left))


def to_come_back(allocations: Allocations, old: Sequence[model.Claim],
                 current: Sequence[model.Claim],
                 is_reverted: Callable[[], bool]) -> list[model.Claim]:
    """Return the claims from before a move that a server gets again at its
    start, after Placement has no allocation for the move any more.

    ===================== ==================== ===========================
    Present claims        Allocation covers    Claims that return
    ===================== ==================== ===========================
    none                  some old claims      these: the move failed
    fewer, same providers all old claims       all: it was reverted
    as many, same         all old claims       all, if Nova has the move
    providers                                  as reverted
    of other providers    all present claims   none: it was confirmed
    of other providers    all old claims only  all: it was reverted
    any                   neither              none
    ===================== ==================== ===========================

    :param old: claims from before the move, see Reshape.located().
    :param current: the present claims, see Reshape.located().
    :param is_reverted: function that returns whether Nova has reverted the
        move.
    """
    back = _allocated(allocations, old)
    if not current:
        return back
    if len(back) < len(old):
        return []
    if len(_allocated(allocations, current)) < len(current):
        return back
    had, has = _units(old), _units(current)
    return back if has < had or has == had and is_reverted() else []


def _units(claims) -> collections.Counter:
    return collections.Counter(
        (claim.provider_uuid, claim.resource_class) for claim in claims)


def _allocated(allocations, claims) -> list[model.Claim]:
    """Return the claims that the allocation covers."""
    left = collections.Counter({
        (provider_uuid, name): amount
        for provider_uuid, allocation in allocations.items()
        for name, amount in allocation['resources'].items()})
    found = []
    for claim in claims:
        key = claim.provider_uuid, claim.resource_class
        if left[key]:
            left[key] -= 1
            found.append(claim)
    return found


def _as_allocated(own, held):
    """Yield requests that match the allocations: one for the held devices of
    each group, and one for the rest of each class of a provider."""
    has = collections.Counter((claim.provider_uuid, claim.resource_class,
                               claim.group) for claim in held)
    for allocation in own:
        for name, amount in allocation.resources.items():
            for (provider_uuid, class_, group), count in sorted(has.items()):
                if (provider_uuid == allocation.provider_uuid
                        and class_ == name and count <= amount):
                    amount -= count
                    yield request.AcceleratorRequest(group, name, count)
            if amount:
                yield request.AcceleratorRequest('', name, amount)


def _for_us(requests, own):
    """Return the requests that nova_accel has to fulfil. Requests for vGPUs of
    Nova are left out. These are requests for a standard class that is in no
    allocation from nova_accel's providers."""
    offered = {name for allocation in own for name in allocation.resources}
    return [wanted for wanted in requests if wanted.resource_class in offered
            or naming.is_custom(wanted.resource_class)]


def _lacks(resources: Iterable[Mapping[str, int]], requests) -> bool:
    """Return whether resources together have less of a class than requests."""
    given: collections.Counter = collections.Counter()
    for amounts in resources:
        given.update(amounts)
    return any(given[name] < amount
               for name, amount in _amounts(requests).items())


def _resources(allocations: Allocations) -> list[Mapping[str, int]]:
    return [allocation['resources'] for allocation in allocations.values()]


def _kept(requests, own, held):
    """Find the requests that held devices fulfil.

    :returns: (a Keep for each of these requests, rest of the allocations,
        claims that fulfil no request).
    """
    left = {a.provider_uuid: dict(a.resources) for a in own}
    by_request: dict = collections.defaultdict(list)
    for claim in held:
        by_request[claim.group, claim.resource_class,
                   claim.provider_uuid].append(claim)
    keep = []
    for wanted in requests:
        name = wanted.resource_class
        for provider_uuid in sorted(left):
            claims = by_request[wanted.group, name, provider_uuid]
            if (len(claims) == wanted.amount
                    and left[provider_uuid].get(name, 0) >= wanted.amount):
                left[provider_uuid][name] -= wanted.amount
                keep.append(Keep(wanted, tuple(claims)))
                claims.clear()
                break
    kept = {claim.uuid for step in keep for claim in step.claims}
    return tuple(keep), [
        dataclasses.replace(a, resources=resources) for a in own
        if any((resources := left[a.provider_uuid]).values())
    ], tuple(claim for claim in held if claim.uuid not in kept)


def _taken(requests, keep, left):
    answered = [step.wanted for step in keep]
    open_requests = []
    for wanted in requests:
        if wanted in answered:
            answered.remove(wanted)
        else:
            open_requests.append(wanted)
    if not open_requests:
        return ()
    return tuple(Take(wanted, allocation.provider_uuid) for wanted, allocation
                 in request.match(open_requests, left))


def _amounts(requests) -> collections.Counter:
    amounts: collections.Counter = collections.Counter()
    for wanted in requests:
        amounts[wanted.resource_class] += wanted.amount
    return amounts


def _said(requests, held) -> str:
    """Return the requests as a short text for an error. Without requests,
    return the held devices."""
    if requests:
        return ', '.join(map(str, requests))[:85]
    return ', '.join(claim.handle.address for claim in held)[:85]
