# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which hosts the servers of a job get, to be near each other.

A level is a kind of domain of hosts: one NVLink domain, one rail, one rack. A
host is in at most one domain of a level. A flavor names levels, the nearest one
first (accel:near). Pure: what hosts have free is passed in. The scheduler and
``nova-accel fits`` decide by choose().
"""

import collections
from collections.abc import Callable, Collection, Mapping, Sequence
import random
import re
import typing

from nova_accel import exception

KEY = 'accel:near'
#: of a level: in a trait it is followed by "_"
LEVEL = '[a-z][a-z0-9]{0,30}'
#: level -> domain, of one host
Domains = Mapping[str, str]


class Level(typing.NamedTuple):

    name: str
    required: bool


class Choice(typing.NamedTuple):

    #: hosts that servers may get -> 0 for those that get them first, 1 for the
    #: next ones, and so on
    order: Mapping[str, int]
    #: a clause with the reason if no host is left; '' otherwise
    refusal: str = ''


def levels(text: str) -> tuple[Level, ...]:
    """Return the levels of a flavor, the nearest one first.

    :param text: <level>=<required or preferred>, with "," between them.
    :raises InvalidRequest: it is something else.
    :raises Contradiction: a level is there twice.
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


def room(level: str, free: Mapping[str, int],
         domains: Mapping[str, Domains]) -> dict[str, int]:
    """Return how many servers fit into each domain of a level.

    :param free: host -> servers that fit on it.
    :param domains: of each host.
    """
    found: dict[str, int] = {}
    for host, servers in free.items():
        domain = domains[host].get(level)
        if domain is not None:
            found[domain] = found.get(domain, 0) + servers
    return found


def choose(wanted: Sequence[Level], servers: int, free: Mapping[str, int],
           domains: Mapping[str, Domains], members: Collection[Domains] = (),
           chance: Callable[[], float] = random.random, *,
           fullest: bool = True) -> Choice:
    """Choose domains for servers that are scheduled together.

    All of them in one domain of each required level: in the one that needs
    the fewest domains of the preferred levels, and of several in the fullest.
    Of preferred levels the farthest one counts first: servers that do not fit
    into an NVLink domain stay in a rack.

    :param wanted: levels(), at least one.
    :param free: host -> servers that fit on it.
    :param domains: of each host.
    :param members: of the host of each server that there is of their group.
    :param chance: decides between domains that are as good: other schedulers
        decide at the same time.
    :param fullest: whether the fullest domain is better than others with room.
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
    if members and required:
        there = {tuple(member.get(name) for name in required)
                 for member in members}
        if len(there) > 1 or None in min(there, key=str):
            return Choice({}, f'the members of the server group are not in '
                              f'one {required[0]}')
        parts = {part: parts[part] for part in there & parts.keys()}
    elif required and not parts:
        missing = [name for name in required if not any(
            name in domains[host] for host in free)]
        return Choice({}, f'no host of them is in a {(missing or required)[0]}')
    fitting = {part: _blocks(hosts, servers, wished, free, domains, members,
                             chance)
               for part, hosts in parts.items() if size[part] >= servers
               or not required}
    if not fitting:
        largest = max((size[part] for part in parts), default=0)
        return Choice({}, (f'the {required[0]} of the server group has'
                           if members else
                           f'the largest free part of a {required[0]} has')
                      + f' {largest} of {servers}')
    best = min(fitting, key=lambda part: (
        _spread(fitting[part], wished, domains), size[part] * fullest,
        chance()))
    order = {host: rank for rank, block in enumerate(fitting[best])
             for host in block}
    # a single server may be tried in other domains, the first one of a group
    # as well
    others = (parts[best] if required and (servers > 1 or members)
              else [host for part in parts.values() for host in part])
    for host in others:
        order.setdefault(host, len(fitting[best]))
    return Choice(order)


def _blocks(hosts, servers, names, free, domains, members, chance):
    """Return the hosts that servers get, by domains of the nearest level, in
    the order in which these are filled."""
    if not names:
        return [hosts]
    name, *nearer = names
    groups = collections.defaultdict(list)
    for host in hosts:
        # a host without a domain is one of its own
        groups[domains[host].get(name, host)].append(host)
    size = {domain: sum(free[host] for host in group)
            for domain, group in groups.items()}
    found: list[list[str]] = []

    def split(domain):
        return _blocks(groups[domain], min(servers, size[domain]), nearer,
                       free, domains, [member for member in members
                                       if member.get(name) == domain], chance)

    # those of members are used already
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
    """Return in how many domains of each level blocks are."""
    return [len({domains[block[0]].get(name, block[0]) for block in blocks})
            for name in names]
