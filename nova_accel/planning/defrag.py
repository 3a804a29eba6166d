# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The fewest cold migrations that make room for servers of a flavor, or bring
the servers of a job together.

Pure. Migrations are simulated one after the other: a server occupies room on
its new host before it frees the room on its old one. The search tries plans of
one migration, then of two, and so on. Hence the first plan that it finds has
the fewest migrations. The search skips states that cannot succeed even if all
remaining migrations only freed room.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import hashlib

from nova_accel import naming
from nova_accel.planning import capacity

#: maximum number of states that are tried for plans of one length, and for how
#: many lengths
_STATES, _LENGTHS = 2000, 5
#: maximum length of a plan
_LONGEST = 32


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that can be migrated."""

    uuid: str
    #: the demands of its own flavor
    wanted: capacity.Wanted
    #: UUID of a provider -> class -> amount
    allocations: Mapping[str, Mapping[str, int]]


@dataclasses.dataclass(frozen=True)
class Goal:
    """The number of servers to reach in one domain. Members that are in the
    domain count, and servers of the flavor for which the domain has room."""

    #: flavor of these servers; None if members have several
    wanted: capacity.Wanted | None
    amount: int
    #: of [accel] near; None if all hosts are one domain
    level: str | None = None
    #: UUIDs of the servers to bring together
    members: frozenset[str] = frozenset()
    #: whether two members must not be on one host
    is_apart: bool = False


@dataclasses.dataclass(frozen=True)
class Move:
    server: str
    source: str
    target: str


@dataclasses.dataclass(frozen=True)
class Plan:

    moves: tuple[Move, ...]
    #: of the amount of the goal: now, and after the plan
    now: int
    then: int
    #: whether no shorter plan exists; False if not all were tried
    is_shortest: bool = True

    @property
    def id(self) -> str:
        """Return an identifier of these migrations in this order."""
        return hashlib.sha256('\n'.join(
            f'{m.server} {m.source} {m.target}' for m in self.moves
        ).encode()).hexdigest()[:12]


class Changed(Exception):
    """A migration of a plan cannot be done: its server has moved, or its room
    on the new host is taken."""


class _Kind:
    """Servers of a host with the same demand and the same devices."""

    def __init__(self, server, host, goal):
        self.wanted = server.wanted
        self.is_member = server.uuid in goal.members
        #: the inventory that such a server frees, in the order of the host
        self.held = tuple(
            tuple(server.allocations.get(p.uuid, {}).get(name, 0)
                  for name in names)
            for p, names in zip(host.providers, host.classes))
        self.key = id(server.wanted), self.held, self.is_member

    def __eq__(self, other):
        return self.key == other.key

    def __hash__(self):
        return hash(self.key)


def plan(hosts: Mapping[str, capacity.Host],
         servers: Mapping[str, Iterable[Server]], goal: Goal,
         states: int = _STATES) -> Plan | None:
    """Return the fewest migrations that reach a goal.

    A server whose flavor requires a level (accel:near) stays in its domain,
    unless it is a member.

    :param hosts: name of a host -> the host.
    :param servers: name of a host -> its servers that may be migrated. Servers
        with equal flavors share one object as wanted.
    :param states: maximum number of states tried for plans of one length.
    :returns: None if no plan was found.
    """
    amount = goal.amount
    search = _Search(hosts, servers, goal, states)
    start = search.start
    now = search.fitting(start)
    is_shortest = True
    left = states * _LENGTHS
    # a server may make room and return
    longest = min(_LONGEST, 2 * sum(map(len, start.servers)))
    if search.most(start, longest) < amount:
        return None
    for moves in range(longest + 1):
        if search.most(start, moves) < amount:
            continue
        if left <= 0:
            break
        found = search.within(start, moves)
        if found is not None:
            path, end = found
            return Plan(tuple(path), now, search.fitting(end), is_shortest)
        is_shortest = is_shortest and not search.is_cut
        left -= search.looked_at
    return None


def after(moves: Iterable[Move], hosts: Mapping[str, capacity.Host],
          servers: Mapping[str, Iterable[Server]], goal: Goal) -> int:
    """Return how much of a goal is reached after these migrations.

    :raises Changed: a migration cannot be done; the error names its server.
    """
    search = _Search(hosts, servers, goal, 0)
    cloud = search.start
    for move in moves:
        cloud = search.done(cloud, move)
    return search.fitting(cloud)


@dataclasses.dataclass(frozen=True)
class _Cloud:
    """A state of all hosts, in the order of their names."""

    free: tuple[capacity.State, ...]
    #: of each host: (kind, UUID of a server)
    servers: tuple[tuple[tuple[_Kind, str], ...], ...]
    #: of each host: a number that hosts have in common if they are alike
    alike: tuple[int, ...]


class _Search:

    def __init__(self, hosts, servers, goal, states):
        self._names = sorted(hosts)
        self._hosts: Sequence[capacity.Host] = [
            hosts[name] for name in self._names]
        self._goal, self._states = goal, states
        self._domains = [naming.near_of(host.providers[0].traits)
                         for host in self._hosts]
        names = [goal.level] if goal.level else []
        if names and goal.wanted and not goal.members:
            # a job would not get the room of several domains
            names += [level.name for level in goal.wanted.affinity.levels
                      if level.required]
        #: of each host: its domain of each of these levels
        self._part_of = [tuple(map(domains.get, names))
                         for domains in self._domains]
        #: domains -> numbers of the hosts in them
        self._parts: dict[tuple, list[int]] = {}
        for number, part in enumerate(self._part_of):
            if None not in part:
                self._parts.setdefault(part, []).append(number)
        #: see _once()
        self._results: dict = {}
        self.looked_at, self.is_cut = 0, False
        self._numbers: dict = {}
        there = [tuple(sorted(((_Kind(one, host, goal), one.uuid)
                               for one in servers.get(name, ())),
                              key=lambda pair: pair[1]))
                 for name, host in zip(self._names, self._hosts)]
        self.start = _Cloud(
            tuple(host.free for host in self._hosts), tuple(there),
            tuple(self._alike(number, host.free, there[number])
                  for number, host in enumerate(self._hosts)))

    def _alike(self, number, free, servers):
        return self._numbers.setdefault(
            (self._hosts[number].kind, free,
             tuple(sorted(hash(kind) for kind, _ in servers))),
            len(self._numbers))

    def _once(self, key, function, *args):
        """Return the result of a function, which is computed once for a key.
        """
        if key not in self._results:
            self._results[key] = function(*args)
        return self._results[key]

    def _count(self, number, free):
        host = self._hosts[number]
        return self._once(('count', host.kind, free), capacity.count,
                          self._goal.wanted, host, free)

    def _place(self, kind, number, free):
        host = self._hosts[number]
        return self._once(('place', id(kind.wanted), host.kind, free),
                          capacity.place, kind.wanted, host, free)

    def fitting(self, cloud):
        """Return how much of the goal is reached."""
        return max(self._of_parts(cloud).values(), default=0)

    def _of_parts(self, cloud):
        of_part = self._members if self._goal.members else self._room
        return {domain: self._of_alike(of_part, cloud, part)
                for domain, part in self._parts.items()}

    def _of_alike(self, function, cloud, part, *args):
        """Return the result of a function of some hosts, which is computed
        only once for hosts that are alike."""
        return self._once((function.__name__, *args, tuple(
            sorted(cloud.alike[number] for number in part))),
            function, cloud, part, *args)

    def _members(self, cloud, part):
        return sum(kind.is_member for number in part
                   for kind, _ in cloud.servers[number])

    def _room(self, cloud, part):
        return sum(self._count(number, cloud.free[number]) for number in part)

    def most(self, cloud, moves):
        """Return an upper bound for the amount of the goal that can be reached
        by a number of moves."""
        return max((self._of_alike(self._most, cloud, part, moves)
                    for part in self._parts.values()), default=0)

    def _most(self, cloud, part, moves):
        if not self._goal.wanted:
            return self._members(cloud, part) + moves
        # how many more fit if so many others disappeared
        best = [0] * (moves + 1)
        for number in part:
            gains = self._gained(number, cloud.free[number],
                                 cloud.servers[number], moves)
            if any(gains):
                best = [max(best[some - one] + gains[one]
                            for one in range(min(some + 1, len(gains))))
                        for some in range(moves + 1)]
        room = self._room(cloud, part)
        if not self._goal.members:
            return room + best[moves]
        return self._members(cloud, part) + max(
            min(moves - others, room + best[others])
            for others in range(moves + 1))

    def _gained(self, number, free, servers, moves):
        """Return how many more servers of the goal fit on a host if servers
        leave it: a list, at index n the gain if at most n servers leave."""
        kinds = tuple(sorted((kind.key for kind, _ in servers), key=hash))
        return self._once(
            ('gains', self._hosts[number].kind, free, kinds, moves),
            self._gains, number, free, servers, moves)

    def _gains(self, number, free, servers, moves):
        before = self._count(number, free)
        gains, now = [0], {(free, tuple(k for k, _ in servers))}
        for _ in range(min(moves, len(servers))):
            now = {(_freed(free_, kind), left[:i] + left[i + 1:])
                   for free_, left in now for i, kind in enumerate(left)
                   if kind not in left[:i]}
            gains.append(max(
                [gains[-1], *(self._count(number, free_) - before
                              for free_, _ in now)]))
        return gains

    def within(self, start, moves):
        """Search for a plan with at most the given number of moves. Return
        (moves, cloud after them), or None if no plan was found."""
        self.looked_at = 0
        self.is_cut = False
        self._seen: set = set()
        return self._found(start, moves, [])

    def _found(self, cloud, moves, path):
        if self.fitting(cloud) >= self._goal.amount:
            return path, cloud
        if not moves or self.most(cloud, moves) < self._goal.amount:
            return None
        key = moves, tuple(sorted(cloud.alike))
        if key in self._seen:
            return None
        self._seen.add(key)
        if self.looked_at >= self._states:
            self.is_cut = True
            return None
        self.looked_at += 1
        for move, after in self._ordered(cloud):
            found = self._found(after, moves - 1, [*path, move])
            if found is not None:
                return found
        return None

    def _ordered(self, cloud):
        """Yield (move, state after it) for each possible migration. States
        that reach more of the goal come first.

        Hosts that are alike are interchangeable: a server moves from the first
        of them, and to the first one that it is not on.
        """
        alike: dict[int, list[int]] = {}
        for number, what in enumerate(cloud.alike):
            alike.setdefault(what, []).append(number)
        reached = self._of_parts(cloud)
        result: list[tuple] = []
        for source, *_ in alike.values():
            there = cloud.servers[source]
            for index, (kind, _) in enumerate(there):
                if any(kind == other for other, _ in there[:index]):
                    continue
                for numbers in alike.values():
                    target = next((n for n in numbers if n != source), source)
                    if target == source or not self._may_move(
                            kind, source, target, cloud):
                        continue
                    free = cloud.free[target]
                    placed = self._place(kind, target, free)
                    if placed is not None:
                        result.append((
                            -self._after_move(reached, cloud, kind, source,
                                              target, placed),
                            self._hosts[target].devices(free),
                            len(result), source, index, target, placed))
        for *_, source, index, target, placed in sorted(
                result, key=lambda one: one[:3]):
            yield Move(cloud.servers[source][index][1], self._names[source],
                       self._names[target]), self._after(
                           cloud, source, index, target, placed)

    def _after_move(self, reached, cloud, kind, source, target, placed):
        """Return how much of the goal is reached after a move.

        :param reached: domain -> how much of the goal is reached before.
        """
        now = dict(reached)
        for number, free, members in (
                (source, _freed(cloud.free[source], kind), -kind.is_member),
                (target, placed, kind.is_member)):
            domain = self._part_of[number]
            if domain in now:
                now[domain] += members if self._goal.members else (
                    self._count(number, free)
                    - self._count(number, cloud.free[number]))
        return max(now.values(), default=0)

    def _may_move(self, kind, source, target, cloud):
        if kind.is_member:
            return not (self._goal.is_apart
                        and self._members(cloud, [target]))
        return all(self._domains[source].get(level.name)
                   == self._domains[target].get(level.name)
                   for level in kind.wanted.affinity.levels if level.required)

    def done(self, cloud, move):
        """Return the state after a migration."""
        if not {move.source, move.target} <= set(self._names):
            raise Changed(move.server)
        source, target = map(self._names.index, (move.source, move.target))
        for index, (kind, uuid) in enumerate(cloud.servers[source]):
            placed = uuid == move.server and self._place(
                kind, target, cloud.free[target])
            if placed:
                return self._after(cloud, source, index, target, placed)
        raise Changed(move.server)

    def _after(self, cloud, source, index, target, placed):
        kind, uuid = cloud.servers[source][index]
        host, free = self._hosts[target], list(cloud.free)
        held = Server(uuid, kind.wanted, {
            p.uuid: {name: before - now for name, before, now
                     in zip(names, was, has) if before != now}
            for p, names, was, has in zip(
                host.providers, host.classes, free[target], placed)})
        free[target] = placed
        free[source] = _freed(free[source], kind)
        servers = list(cloud.servers)
        servers[source] = (servers[source][:index]
                           + servers[source][index + 1:])
        servers[target] = (*servers[target],
                           (_Kind(held, host, self._goal), uuid))
        alike = list(cloud.alike)
        for number in source, target:
            alike[number] = self._alike(number, free[number], servers[number])
        return _Cloud(tuple(free), tuple(servers), tuple(alike))


def _freed(free, kind):
    return tuple(tuple(map(sum, zip(has, held)))
                 for has, held in zip(free, kind.held))
