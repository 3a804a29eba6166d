# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Explain why a host cannot serve a request: the first unmet condition.

The reasons are for people. Placement itself decides. Pure: callers pass the
providers of a host.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import typing

from nova_accel import matching
from nova_accel import naming
from nova_accel import request
from nova_accel import text


@dataclasses.dataclass(frozen=True)
class Provider:
    """A resource provider in Placement."""

    uuid: str
    name: str
    #: UUID of the provider of its host
    root: str
    #: class -> total, reserved, allocation_ratio, min_unit, max_unit,
    #: step_size
    inventories: Mapping[str, Mapping[str, typing.Any]] = dataclasses.field(
        default_factory=dict)
    traits: frozenset[str] = frozenset()
    #: consumer -> class -> amount
    allocations: Mapping[str, Mapping[str, int]] = dataclasses.field(
        default_factory=dict)
    #: UUID of its parent provider; None for a host
    parent: str | None = None

    def used(self, name: str) -> int:
        return sum(given.get(name, 0) for given in self.allocations.values())

    def free(self, name: str) -> int:
        """Return the free amount as Placement counts it, below 0 if the
        inventory shrank below the allocations."""
        item = self.inventories.get(name)
        if item is None:
            return 0
        return int((item['total'] - item['reserved'])
                   * item['allocation_ratio']) - self.used(name)


@dataclasses.dataclass(frozen=True)
class Need:
    """The resources that one provider has to offer."""

    #: suffix of the request group
    group: str
    #: class -> amount
    resources: Mapping[str, int] = dataclasses.field(hash=False)
    required: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return ' and '.join(f'{amount} {name}' for name, amount
                            in sorted(self.resources.items()))


def needs(groups: Mapping[str, request.Group]) -> list[Need]:
    """Return the needs of all groups. One provider must satisfy a whole need.

    Each class of the unnumbered group is a need without traits: the classes
    may come from several providers, and the traits from any provider of the
    host (Placement API, 1.29).

    :param groups: the result of request.groups().
    """
    result = []
    for suffix, group in groups.items():
        resources = {name: amount for name, amount
                     in group.resources.items() if amount}
        if suffix and resources:
            result.append(Need(
                suffix, resources, group.required, group.forbidden))
        result += [] if suffix else [
            Need('', {name: amount}) for name, amount in resources.items()]
    return result


def of_provider(need: Need, provider: Provider,
                who: Callable[[str], str]) -> str | None:
    """Return why a provider does not satisfy a need.

    Permanent reasons come before temporary ones. For example, if a card is of
    another vendor and is also in use, the reason is its vendor.

    :param provider: has the classes of the need.
    :param who: function that names the consumer of an allocation.
    :returns: a clause without a subject, or None if the provider satisfies the
        need.
    """
    lacks = sorted(t for t in need.required - provider.traits
                   if not naming.is_volatile(t))
    if lacks:
        return f'lacks the trait {", ".join(lacks)}'
    has = sorted(need.forbidden & provider.traits)
    if has:
        return f'has the trait {", ".join(has)}, which the flavor forbids'
    for name, amount in sorted(need.resources.items()):
        found = _of_class(name, amount, provider, who)
        if found:
            return found
    lacks = sorted(need.required - provider.traits)
    if lacks:
        return f'lacks the trait {", ".join(lacks)} now'
    return None


def _of_class(name, amount, provider, who):
    item = provider.inventories[name]
    if amount > min(item['total'], item['max_unit']):
        return (f'{amount} {name} asked, and it has '
                f'{min(item["total"], item["max_unit"])} in all')
    if amount < item['min_unit'] or amount % item['step_size']:
        return (f'{amount} {name} asked, and it gives '
                f'{item["step_size"]} at a time'
                + (', which are a set ([accel] device_sets)'
                   if naming.SET in provider.traits else ''))
    if naming.FENCED in provider.traits:
        return ('is fenced by nova_accel: nova-accel discover and nova-accel '
                'claims on that host say why')
    free = provider.free(name)
    if amount <= free:
        return None
    reserved = item['reserved']
    if reserved >= item['total']:
        return f'all of it ({reserved} {name}) is reserved in Placement'
    used = provider.used(name)
    parts = [f'{reserved} reserved'] * bool(reserved)
    if used:
        parts.append(f'{used} held by {_holders(name, provider, who)}')
    if item['total'] == 1 and used:
        return f'is held by {_holders(name, provider, who)}'
    return (f'{amount} {name} asked, {max(0, free)} free of {item["total"]} '
            f'({", ".join(parts)})')


def _holders(name, provider, who):
    holders = sorted(consumer for consumer, given
                     in provider.allocations.items() if given.get(name))
    return text.some(holders, who)


def of_host(groups: Mapping[str, request.Group],
            providers: Sequence[Provider], who: Callable[[str], str],
            policy: str | None = None) -> list[str]:
    """Return why a host as a whole cannot serve a request.

    :param groups: the result of request.groups().
    :param providers: all providers of the host.
    :param policy: group_policy of the flavor.
    :returns: sentences without a full stop. [] if the only known reasons are
        those of single providers, see of_provider().
    """
    found = []
    traits = frozenset().union(*(p.traits for p in providers))
    plain = groups.get('', request.Group({}))
    lacks = sorted(plain.required - traits)
    if lacks:
        found.append(f'no provider of the host has the trait '
                     f'{", ".join(lacks)}')
    wanted = needs(groups)
    fitting: list[list[Provider]] = []
    for need in wanted:
        having = having_classes(need, providers)
        if not having and need.resources.keys() == {'DISK_GB'}:
            # hosts may share the provider, which is then in none of their
            # trees
            continue
        if not having:
            found.append(_no_class(need, providers))
        fitting.append([p for p in having
                        if of_provider(need, p, who) is None])
        if (not need.group and not fitting[-1] and having
                and not is_of_accelerators(need)):
            # the traits of the host itself; other providers have rows of their
            # own
            (name, amount), = need.resources.items()
            free = max(p.free(name) for p in having)
            found.append(f'{amount} {name} asked, {max(0, free)} free')
    if not found and all(fitting) and not _together(
            wanted, fitting, providers, policy):
        found.append(
            f'each group alone finds a device, and there are not enough for '
            f'all {sum(map(is_of_accelerators, wanted))} together'
            + (', because group_policy=isolate requires another provider for '
               'each' if policy == 'isolate' else ''))
    return found


def having_classes(need: Need, providers: Iterable[Provider],
                   ) -> list[Provider]:
    """Return the providers that have all classes of a need, free or not."""
    return [p for p in providers if need.resources.keys()
            <= p.inventories.keys()]


def is_of_accelerators(need: Need) -> bool:
    return any(map(naming.is_accelerator_class, need.resources))


def _no_class(need, providers):
    there = sorted({name for p in providers for name in p.inventories
                    if naming.is_accelerator_class(name)})
    said = f'no provider of the host has {" and ".join(need.resources)}'
    if not is_of_accelerators(need):
        return said
    # their classes are unknown: Placement has no inventory of 0
    empty = sorted(p.name for p in providers
                   if naming.FENCED in p.traits and not p.inventories)
    return (f'{said} (of accelerators it has {", ".join(there) or "none"})'
            + (f'; fenced, with nothing to give: {", ".join(empty)}, see '
               f'nova-accel discover and nova-accel claims on the host'
               if empty else ''))


def _together(wanted, fitting, providers, policy):
    isolated = {'': 1} if policy == 'isolate' else {}
    return matching.assign(
        [matching.Item(
            {**need.resources, **(isolated if need.group else {})},
            {p.uuid: 0 for p in found})
         for need, found in zip(wanted, fitting)],
        {p.uuid: {**{name: max(0, p.free(name)) for name in p.inventories},
                  **isolated} for p in providers}) is not None
