# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Choose hosts near each other for the servers of one job.

A level is a kind of domain: NVLink domain, rail or rack. A host is in at most
one domain of each level. A flavor names levels, the nearest one first
(accel:near). nova-scheduler and ``nova-accel fits`` call choose() with the
free capacity of hosts. This module does no I/O.
"""

import collections
from collections.abc import (
    Callable, Collection, Iterable, Mapping, Sequence)
import random
import re
import typing

from nova_accel import exception

KEY = 'accel:near'
#: name of a level; in a trait, "_" separates it from the domain
LEVEL = '[a-z][a-z0-9]{0,30}'
#: domains of one host: level -> domain
Domains = Mapping[str, str]


class Level(typing.NamedTuple):

    name: str
    required: bool


class Choice(typing.NamedTuple):

    #: host -> rank; servers get hosts of rank 0 first, then those of rank 1.
    #: Other hosts are excluded
    order: Mapping[str, int]
    #: a clause with the reason if no host is left; '' otherwise
    refusal: str = ''


def levels(text: str) -> tuple[Level, ...]:
    """Return the levels that a flavor names, the nearest one first.

    :param text: value of the extra spec: <level>=<required or preferred>,
        separated by ",".
    :raises InvalidRequest: the text has another form.
    :raises Contradiction: the text has a level twice.
    """
    found: dict[str, bool] = {}
    for item in text.split(','):
        name, _, wish = (part.strip() for part in item.partition('='))
        if not re.fullmatch(LEVEL, name) or wish not in (
                'required', 'preferred'):
            raise exception.InvalidRequest(
                f'{KEY} has {item.strip()[:60]!r}, which is not '
                f'<level>=required or <level>=preferred: write levels of '
                f'[accel] near, the nearest one first, with "," between them.')
        if name in found:
            raise exception.Contradiction(
                f'{KEY} has the level {name} twice: keep one of them.')
        found[name] = wish == 'required'
    return tuple(map(Level._make, found.items()))


def shared(wanted: Iterable[Level], members: Iterable[Domains],
           ) -> dict[str, str]:
    """Return level -> domain, for each required level of which all members are
    in the same domain."""
    found: dict[str, str] = {}
    for level in wanted:
        there = {member.get(level.name) for member in members}
        if level.required and len(there) == 1 and None not in there:
            found[level.name] = str(there.pop())
    return found


def unreported(wanted: Iterable[Level], domains: Iterable[Domains],
               ) -> dict[Level, str]:
    """Return a clause for each level of which no host has a domain: level ->
    clause.

    :param domains: domains of each host that satisfies all other conditions.
    """
    known = set().union(*domains)
    return {level: f'{KEY} {"requires" if level.required else "prefers"} the '
                   f'level {level.name}, and no suitable host reports a domain '
                   f'of it' for level in wanted if level.name not in known}


def room(level: str, free: Mapping[str, int],
         domains: Mapping[str, Domains], wanted: Iterable[Level] = (),
         ) -> dict[str, int]:
    """Return how many servers that are scheduled together fit into each domain
    of a level.

    :param free: host -> number of servers that fit on it.
    :param domains: host -> its domains.
    :param wanted: levels(). All servers get one domain of each required level.
    """
    names = [level, *(one.name for one in wanted if one.required)]
    parts: dict[tuple, int] = {}
    for host, servers in free.items():
        part = tuple(map(domains[host].get, names))
        parts[part] = parts.get(part, 0) + servers
    found: dict[str, int] = {}
    for (domain, *_), servers in parts.items():
        if domain is not None:
            found[domain] = max(found.get(domain, 0), servers)
    return found


def choose(wanted: Sequence[Level], servers: int, free: Mapping[str, int],
           domains: Mapping[str, Domains], members: Collection[Domains] = (),
           chance: Callable[[], float] = random.random, *,
           fullest: bool = True) -> Choice:
    """Choose domains, and hosts in them, for servers that are scheduled
    together.

    All servers get one domain of each required level: the domain in which they
    use the fewest domains of the preferred levels, of which farther levels
    count first. Hence servers that do not fit into one NVLink domain stay in
    one rack. Among equal domains, the fullest one is chosen.

    :param wanted: levels(), at least one.
    :param free: host -> number of servers that fit on it.
    :param domains: host -> its domains.
    :param members: for each existing server of the server group, the domains
        of its host.
    :param chance: returns a random number, which breaks ties: schedulers that
        decide at the same time then choose different domains.
    :param fullest: whether the fullest domain wins among equal ones.
    """
    required = [level.name for level in wanted if level.required]
    wished = [level.name for level in reversed(wanted) if not level.required]
    parts: dict[tuple, list[str]] = collections.defaultdict(list)
    for host in free:
        part = tuple(domains[host].get(name) for name in required)
        if None not in part:
            parts[part].append(host)
    size = {part: sum(free[host] for host in hosts)
            for part, hosts in parts.items()}
    there = shared(wanted, members)
    if members and required:
        apart = [name for name in required if name not in there]
        if apart:
            return Choice({}, f'the members of the server group are not in '
                              f'one {apart[0]}')
        parts = {part: hosts for part, hosts in parts.items()
                 if part == tuple(there.values())}
    elif required and not parts:
        return Choice({}, next(
            (clause for level, clause in unreported(
                wanted, map(domains.__getitem__, free)).items()
             if level.required),
            f'no suitable host reports a domain of each of '
            f'{", ".join(required)}'))
    fitting = {part: _blocks(hosts, servers, wished, free, domains, members,
                             chance)
               for part, hosts in parts.items() if size[part] >= servers
               or not required}
    if not fitting:
        largest = max((size[part] for part in parts), default=0)
        return Choice({}, full(there, largest, servers) if members else
                      f'the largest free part of a {required[0]} has '
                      f'{largest} of {servers}')
    best = min(fitting, key=lambda part: (
        _spread(fitting[part], wished, domains), size[part] * fullest,
        chance()))
    order = {host: rank for rank, block in enumerate(fitting[best])
             for host in block}
    # a single server, or the first one of a group, may also be tried in other
    # domains
    others = (parts[best] if required and (servers > 1 or members)
              else [host for part in parts.values() for host in part])
    for host in others:
        order.setdefault(host, len(fitting[best]))
    return Choice(order)


def full(there: Mapping[str, str], fitting: int, servers: int) -> str:
    """Return a clause: not all servers fit into the domain of the first
    member.

    :param there: shared(), not empty.
    :param fitting: how many of the servers fit.
    """
    level, domain = next(iter(there.items()))
    return (f'the free part of {level} {domain} of the first member has '
            f'{fitting} of {servers}')


def _blocks(hosts, servers, names, free, domains, members, chance):
    """Return the hosts in the order in which servers fill them, in a list for
    each domain of the nearest level."""
    if not names:
        return [hosts]
    name, *nearer = names
    groups = collections.defaultdict(list)
    for host in hosts:
        # a host without a domain counts as a domain of its own
        groups[domains[host].get(name, host)].append(host)
    size = {domain: sum(free[host] for host in group)
            for domain, group in groups.items()}
    found: list[list[str]] = []

    def split(domain):
        return _blocks(groups[domain], min(servers, size[domain]), nearer,
                       free, domains, [member for member in members
                                       if member.get(name) == domain], chance)

    # start with the domains that members use already, the most used one first
    there = [domain for domain, _ in collections.Counter(
        member.get(name) for member in members).most_common()
        if size.get(domain)]
    while servers > 0 and groups:
        fitting = [domain for domain in groups if size[domain] >= servers]
        if there:
            best = there.pop(0)
        elif fitting:
            best = min(fitting, key=lambda domain: (
                _spread(split(domain), nearer, domains), size[domain],
                chance()))
        else:
            best = max(groups, key=lambda domain: (size[domain], chance()))
        found += split(best)
        servers -= size[best]
        del groups[best]
    return found


def _spread(blocks, names, domains):
    """Return, for each of these levels, in how many domains the blocks are."""
    return [len({domains[block[0]].get(name, block[0]) for block in blocks})
            for name in names]
