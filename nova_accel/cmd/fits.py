# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel fits: how many servers of each flavor fit now."""

import collections
from collections.abc import Iterable, Mapping
import dataclasses
import typing

from nova_accel.cmd import cloud as clouds
from nova_accel.cmd import configuration
from nova_accel.cmd import output
from nova_accel.cmd import why
from nova_accel import exception
from nova_accel import naming
from nova_accel.planning import capacity

ALL = '(all)'


@dataclasses.dataclass(frozen=True)
class Host:
    """A compute node that has accelerators."""

    name: str
    #: of Nova's entry; '' where it has none
    service: str
    known: capacity.Host
    #: why no server is built there; '' where nothing is known to be wrong
    wrong: str


def hosts(cloud: clouds.Cloud, names: Iterable[str] = (),
          ) -> list[Host]:
    """Return the compute nodes that have accelerators, in the order of their
    names.

    Three requests for each of their providers.

    :param names: of compute nodes; all of them, without any.
    :raises AcceleratorError: as clouds.asking(); a name is unknown.
    """
    trees = [tree for tree in cloud.trees(names) if any(
        naming.part_of_provider(tree[0].name, p.name) for p in tree)]
    read = iter(cloud.read(p for tree in trees for p in tree))
    nodes = cloud.hypervisors() if trees else {}
    found = []
    for tree in trees:
        providers = [next(read) for _ in tree]
        node = nodes.get(tree[0].uuid)
        found.append(Host(
            tree[0].name, node['service']['host'] if node else '',
            capacity.Host(providers), why.of_service(node, providers[0])))
    return found


def wanted(question: why.Question) -> capacity.Wanted:
    """Return what a server asks of a host."""
    return capacity.Wanted(question.groups, question.server.wanted,
                           question.policy, question.server.affinity)


class Fits(clouds.Asks, output.Lister):
    """Show how many servers of each flavor fit now, and what limits them.

    A line for each flavor with accelerators: how many servers of it fit if no
    other ones come, and the one thing that keeps more from fitting; with
    --by-host also for each host. Goes by Placement: zones, aggregates, the
    topology of guests and other filters of your Nova may leave less. Uses the
    credentials of the openstack command. Changes nothing. Run it where the
    device profiles are those of nova-api.
    """

    COLUMNS = 'Flavor', 'Host', 'Servers', 'Limit'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        configuration.add_argument(parser, configuration.API)
        self.add_cloud_arguments(parser)
        parser.add_argument(
            'flavors', metavar='FLAVOR', nargs='*',
            help='name or id (default: all that ask for accelerators)')
        parser.add_argument(
            '--host', metavar='HOST', action='append', default=[],
            help='only on this compute host; may be repeated')
        parser.add_argument(
            '--by-host', action='store_true', help='a line for each host, too')
        return parser

    def table(self, parsed_args):
        configuration.read(parsed_args.config_file, configuration.API)
        self.nothing = 'No flavor asks for accelerators.'
        return self.COLUMNS, rows(
            self.cloud(parsed_args), parsed_args.flavors, parsed_args.host,
            parsed_args.by_host)


def rows(cloud: clouds.Cloud, flavors: Iterable[str] = (),
         names: Iterable[str] = (), by_host: bool = False,
         ) -> list[tuple[str, str, int, str]]:
    """Return flavor, host or ALL, how many servers fit, and what limits them.

    :param flavors: names or ids; all that ask for accelerators, without any.
    :param names: of compute nodes; all of them, without any.
    :param by_host: whether there is a row for each host, too.
    :raises AcceleratorError: as hosts().
    """
    asked = _asked(cloud, flavors)
    there = hosts(cloud, names) if asked else []
    found: list[tuple[str, str, int, str]] = []
    for name, question in asked:
        if isinstance(question, exception.InvalidRequest):
            found.append((name, ALL, 0,
                          f'nova-api refuses the flavor: {question}'))
            continue
        of_hosts = [(host.name, *of_host(wanted(question), host))
                    for host in there]
        found.append((name, ALL, sum(n for _, n, _ in of_hosts),
                      most_common(of_hosts)))
        if by_host:
            found += [(name, host, number, limit.text)
                      for host, number, limit in of_hosts]
    return found


def _asked(cloud, names) -> list[tuple[str, typing.Any]]:
    """Return (name of a flavor, question); an error in place of the question
    if the flavor is malformed."""
    found: list[tuple[str, typing.Any]] = []
    for flavor in map(cloud.flavor, names) if names else cloud.flavors():
        try:
            found.append((flavor['name'], why.Question.of(flavor, {})))
        except exception.InvalidRequest as error:
            found.append((flavor['name'], error))
        except exception.NotThere:
            if names:
                raise
    return found


def of_host(asked: capacity.Wanted, host: Host) -> tuple[int, capacity.Limit]:
    """Return how many servers fit on a host, and what limits them."""
    if host.wrong:
        return 0, capacity.Limit(host.wrong, host.wrong)
    free = host.known.free
    number = capacity.count(asked, host.known, free)
    limit = capacity.limit(asked, host.known, free)
    if number and host.known.hides_places(asked):
        limit = capacity.Limit(*(
            f'{text}; fewer if they are not {asked.affinity}, which Placement '
            f'shows with [accel] pools = numa_node' for text in limit))
    return number, limit


def most_common(of_hosts: Iterable[tuple[str, int, capacity.Limit]]) -> str:
    count: Mapping[str, int] = collections.Counter(
        limit.what for _, _, limit in of_hosts)
    if not count:
        return 'no host has accelerators'
    what = max(count, key=count.__getitem__)
    return f'{what} (on {count[what]} of {sum(count.values())} hosts)'
