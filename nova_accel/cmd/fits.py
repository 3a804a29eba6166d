# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel fits: how many servers of each flavor fit now; and nova-accel
profile describe: describe accelerators of flavors for dashboards.
"""

import collections
from collections.abc import Iterable, Mapping
import dataclasses
import json
import typing

from nova_accel.cmd import cloud as clouds
from nova_accel.cmd import configuration
from nova_accel.cmd import output
from nova_accel.cmd import why
from nova_accel import exception
from nova_accel import files
from nova_accel import naming
from nova_accel import near
from nova_accel.planning import capacity
from nova_accel import request
from nova_accel import text

ALL = '(all)'


@dataclasses.dataclass(frozen=True)
class Host:
    """A compute node that has accelerators."""

    name: str
    #: name in Nova's entry; '' if it has no entry
    service: str
    known: capacity.Host
    #: why no server can be built there; '' if no reason is known
    wrong: str


def hosts(cloud: clouds.Cloud, names: Iterable[str] = (),
          ) -> list[Host]:
    """Return the compute nodes that have accelerators, in the order of names.

    Sends three requests for each provider of these nodes.

    :param names: names of compute nodes; empty for all nodes.
    :raises AcceleratorError: as Cloud.asking(), or if a name is unknown.
    """
    found, _ = cloud.hosts(names)
    return [Host(providers[0].name, node['service']['host'] if node else '',
                 capacity.Host(providers), why.of_service(node, providers[0]))
            for providers, node in found]


class _OfFlavors(clouds.Asks, output.Lister):
    """A command that counts servers of flavors, see questions()."""

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        configuration.add_argument(parser, configuration.API)
        self.add_cloud_arguments(parser)
        parser.add_argument(
            'flavors', metavar='FLAVOR', nargs='*',
            help='name or id (default: all flavors that request '
                 'accelerators)')
        return parser


class Fits(_OfFlavors):
    """Show how many servers of each flavor fit now, and what limits them.

    Prints a line for each flavor with accelerators: how many servers of the
    flavor fit now, and the resource that limits their number. With --by-host,
    also prints a line for each host. The numbers are based on Placement. Fewer
    servers may fit because of zones, aggregates, the topology of guests and
    other filters of your Nova. Uses the credentials of the openstack command.
    Changes nothing except the file of --public and the property of --property.
    Run it on a host with the device profiles of nova-api.
    """

    COLUMNS = 'Flavor', 'Host', 'Servers', 'Limit'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--host', metavar='HOST', action='append', default=[],
            help='only on this compute host; may be repeated')
        parser.add_argument(
            '--by-host', action='store_true',
            help='also show a line for each host')
        parser.add_argument(
            '--near', metavar='LEVEL',
            help='show how many servers of a job fit into one domain of this '
                 'level of [accel] near, with a line for each domain')
        parser.add_argument(
            '--public', metavar='FILE',
            help='write a file for tenants, which shows whether none, few or '
                 'many servers of each public flavor fit, as JSON, without '
                 'names of hosts, projects or servers')
        parser.add_argument(
            '--property', action='store_true',
            help='with --public: also write the value of the file into the '
                 f'property {request.AVAILABLE_KEY} of each of these flavors, '
                 'if the value has changed')
        parser.add_argument(
            '--few', metavar='NUMBER', type=int, default=5,
            help='maximum number of servers that counts as few (default: 5)')
        parser.add_argument(
            '--numbers', action='store_true',
            help='with --public: write the number in place of none, few or '
                 'many')
        return parser

    def take_action(self, parsed_args):
        configuration.read(parsed_args.config_file, configuration.API)
        if parsed_args.public:
            self.nothing = self._publish(parsed_args)
            return self.COLUMNS, ()
        if parsed_args.property:
            raise exception.InvalidRequest(
                '--property needs --public FILE, which is not given: name a '
                'file.')
        self.nothing = 'No flavor asks for accelerators.'
        return self.COLUMNS, rows(
            self.cloud(parsed_args), parsed_args.flavors, parsed_args.host,
            parsed_args.by_host, parsed_args.near)

    def _publish(self, parsed_args) -> str:
        """Write how often each public flavor fits: into the file of --public,
        and into properties of flavors. Return a sentence about the result."""
        cloud = self.cloud(parsed_args)
        found = [(flavor, str(number) if parsed_args.numbers
                  else 'none' if not number
                  else 'few' if number <= parsed_args.few else 'many')
                 for flavor, number in public(
                     cloud, parsed_args.flavors, parsed_args.host)]
        try:
            files.replace(parsed_args.public, json.dumps({
                'time': text.now(), 'flavors': [
                    {'id': flavor['id'], 'name': flavor['name'],
                     'servers': said} for flavor, said in found]},
                indent=1) + '\n', 0o644)
        except OSError as error:
            raise exception.ConfigurationError(
                f'The numbers cannot be written to {parsed_args.public}: '
                f'{error.strerror}: name another file.')
        changed = parsed_args.property and sum(
            cloud.set_flavor(flavor, {request.AVAILABLE_KEY: said})
            for flavor, said in found)
        return f'{parsed_args.public}: {len(found)} flavors' + (
            f', the property of {changed} has changed.'
            if parsed_args.property else '.')


def public(cloud: clouds.Cloud, flavors: Iterable[str] = (),
           names: Iterable[str] = ()) -> list[tuple[dict, int]]:
    """Return (flavor, number of servers that fit) for public flavors with
    accelerators, without disabled flavors. Parameters: see rows()."""
    asked = [(flavor, question)
             for flavor, question in questions(cloud, flavors)
             if flavor.get('os-flavor-access:is_public')
             and not flavor.get('OS-FLV-DISABLED:disabled')]
    there = hosts(cloud, names) if asked else []
    return [(flavor, 0 if isinstance(question, exception.InvalidRequest)
             else sum(of_host(question, host)[0] for host in there))
            for flavor, question in asked]


def rows(cloud: clouds.Cloud, flavors: Iterable[str] = (),
         names: Iterable[str] = (), by_host: bool = False,
         level: str | None = None) -> list[tuple[str, str, int, str]]:
    """Return how many servers of each flavor fit, as rows of (flavor, host or
    domain or ALL, number of servers, limit).

    :param flavors: names or ids; empty for all that request accelerators.
    :param names: names of compute nodes; empty for all nodes.
    :param by_host: whether to add a row for each host.
    :param level: if given, add a row for each domain of this level. The number
        in the row ALL is then that of the domain into which most servers fit.
    :raises AcceleratorError: as hosts(), or no host has a domain of the level.
    """
    asked = questions(cloud, flavors)
    there = hosts(cloud, names) if asked else []
    domains = {host.name: naming.near_of(host.known.providers[0].traits)
               for host in there}
    if level and there:
        check_level(level, domains.values())
    found: list[tuple[str, str, int, str]] = []
    for flavor, question in asked:
        name = flavor['name']
        if isinstance(question, exception.InvalidRequest):
            found.append((name, ALL, 0,
                          f'nova-api refuses the flavor: {question}'))
            continue
        limits = near.unreported(question.affinity.levels,
                                 domains.values()) if there else {}
        of_hosts = [(host.name, *of_host(question, host))
                    for host in there]
        if level:
            room = near.room(level, {host: number for host, number, _
                                     in of_hosts}, domains,
                             question.affinity.levels)
            found += [(name, ALL, max(room.values(), default=0),
                       '; '.join((f'the most in one {level}',
                                  *limits.values()))), *(
                (name, domain, number, most_common(
                    one for one in of_hosts
                    if domains[one[0]].get(level) == domain))
                for domain, number in sorted(
                    room.items(), key=lambda one: (-one[1], one[0])))]
        else:
            found.append((name, ALL, sum(n for _, n, _ in of_hosts),
                          '; '.join((most_common(of_hosts),
                                     *limits.values()))))
        if by_host:
            found += [(name, host, number, limit.text)
                      for host, number, limit in of_hosts]
    return found


def check_level(level: str, domains: Iterable[near.Domains]) -> None:
    """Check that a host has a domain of a level.

    :raises NotThere: no host has a domain of this level.
    """
    known = sorted(set().union(*domains))
    if level not in known:
        raise exception.NotThere(
            f'No host reports a domain of the level {text.printable(level)}: '
            f'set [accel] near of nova-compute, or name one of the levels '
            f'{", ".join(known) or "that it reports"}.')


def questions(cloud, names) -> list[tuple[dict, typing.Any]]:
    """Return the flavors with their questions to Placement (cmd.why.Question):
    (flavor, question), or (flavor, error) if a flavor is malformed."""
    found: list[tuple[dict, typing.Any]] = []
    for flavor in map(cloud.flavor, names) if names else cloud.flavors():
        try:
            found.append((flavor, why.Question.of(flavor, {})))
        except exception.InvalidRequest as error:
            found.append((flavor, error))
        except exception.NotThere:
            if names:
                raise
    return found


def of_host(asked: capacity.Wanted, host: Host) -> tuple[int, capacity.Limit]:
    """Return how many servers fit on a host, and what limits their number."""
    wrong = host.wrong or why.of_levels(
        asked.affinity.levels, host.known.providers[0])
    if wrong:
        return 0, capacity.Limit(wrong, wrong)
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


class DescribeFlavors(_OfFlavors):
    """Describe the accelerators of flavors, for Horizon and Skyline.

    Writes the description that Horizon and openstack flavor show, and the extra
    specs :architecture and :category by which Skyline sorts flavors, if they
    are missing; --replace also replaces present ones. Uses the credentials of
    the openstack command. Run it on a host with the device profiles of
    nova-api.
    """

    COLUMNS = 'Flavor', 'Description', 'Category', 'Result'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--replace', action='store_true',
            help='also replace existing descriptions and categories')
        parser.add_argument(
            '--dry-run', action='store_true', help='change nothing')
        return parser

    def take_action(self, parsed_args):
        configuration.read(parsed_args.config_file, configuration.API)
        self.nothing = 'No flavor asks for accelerators.'
        cloud, found = self.cloud(parsed_args), []
        for flavor, question in questions(cloud, parsed_args.flavors):
            if isinstance(question, exception.InvalidRequest):
                found.append((flavor['name'], '', '',
                              f'nova-api refuses it: {question}'))
                continue
            wanted = question.requests
            description, specs = _described(
                wanted, question.affinity.levels), {
                ':architecture': 'heterogeneous_computing',
                ':category': _category(wanted)}
            if not parsed_args.replace:
                description = flavor.get('description') or description
                specs = {**specs, **{
                    key: value for key, value in flavor['extra_specs'].items()
                    if key in specs}}
            result = 'planned'
            if not parsed_args.dry_run:
                result = ('written' if cloud.set_flavor(
                    flavor, specs, description) else 'was so')
            found.append((flavor['name'], description, specs[':category'],
                          result))
        return self.COLUMNS, found


def _described(wanted: Iterable[request.AcceleratorRequest],
               levels: Iterable[near.Level]) -> str:
    """Return the devices of a flavor as text, such as 2 GPU NVIDIA H200."""
    found: collections.Counter[str] = collections.Counter()
    for one in wanted:
        type_ = naming.type_of(one.resource_class)
        prefix = f'CUSTOM_{type_}_'
        names = sorted(trait.removeprefix(prefix).replace('_', ' ')
                       for trait in one.required if trait.startswith(prefix)
                       and not naming.is_volatile(trait))
        functions = [choice.function_name or choice.function_id
                     for choice in one.choices if choice.programs]
        found[' '.join(filter(None, (
            type_, *names, 'with ' + ' or '.join(map(str, functions))
            if any(functions) else '')))] += one.amount
    wishes = ', '.join(
        f'{level.name} {"required" if level.required else "preferred"}'
        for level in levels)
    return ', '.join(f'{amount} {what}' for what, amount in found.items()) + (
        f'; servers near each other: {wishes}' if wishes else '')


def _category(wanted: Iterable[request.AcceleratorRequest]) -> str:
    """Return the category of a flavor in Skyline (flavorCategoryList of
    skyline-console)."""
    types = {naming.type_of(one.resource_class) for one in wanted}
    if 'VGPU' in types:
        return 'visualization_compute_optimized_type_with_gpu'
    return ('compute_optimized_type_with_gpu' if types & {'GPU', 'PGPU'}
            else 'compute_optimized_type')
