# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel tree: show the accelerators of hosts, as Placement has them."""

import collections
from collections.abc import Iterable, Mapping
import contextlib
import dataclasses
import re
from urllib import parse
import uuid

from nova_accel.cmd import cloud
from nova_accel.cmd import output
from nova_accel import exception
from nova_accel import naming
from nova_accel import near
from nova_accel.planning import reasons

#: a time as text.now() writes it
_TIME = re.compile(r'[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\+00:00')
#: columns of the table for people
_COLUMNS = 'Provider', 'What', 'Used', 'Held by', 'Health'


@dataclasses.dataclass
class Provider:
    """A provider of nova_accel, as Placement shows it."""

    host: str
    uuid: str
    name: str
    parent: str
    depth: int = 0
    #: class of the accelerator, '' if it has none
    resource_class: str = ''
    total: int = 0
    reserved: int = 0
    traits: frozenset[str] = frozenset()
    #: consumer -> number of accelerators
    held: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def image(self) -> str | None:
        """Return the id of the image from which the region was programmed."""
        return self._first(naming.bitstream_of)

    @property
    def function(self) -> str | None:
        return self._first(naming.function_of)

    @property
    def function_name(self) -> str | None:
        return self._first(naming.function_name_of)

    def _first(self, of):
        return next(filter(None, map(of, sorted(self.traits))), None)


class Tree(cloud.Asks, output.Lister):
    """Show the accelerators of hosts, as Placement has them.

    A line for each provider: its type, the function of an FPGA region, the
    number of its accelerators, their holders, and whether they are fenced or
    may be programmed. The formats for programs have the host, the UUID and the
    class of each provider as well. Uses the credentials of the openstack
    command. Changes nothing.
    """

    COLUMNS: tuple[str, ...] = (
        'Host', 'Provider', 'UUID', 'Class', 'What', 'Function', 'Function ID',
        'Total', 'Used', 'Reserved', 'Held by', 'Health')

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        self.add_cloud_arguments(parser)
        parser.add_argument(
            '--evacuation-list', action='store_true',
            help='print only the UUIDs, one per line, of servers whose '
                 'metadata report a problem of an accelerator (nova-compute '
                 'writes it with [accel] health = act) or a planned drain '
                 '(nova-accel drain --at), whose time follows the UUID')
        parser.add_argument(
            'hosts', metavar='HOST', nargs='*',
            help='name of a compute node, or of a provider below it, as '
                 'Placement has it (default: all)')
        return parser

    def take_action(self, parsed_args):
        self._names_columns = bool(parsed_args.columns)
        known = self.cloud(parsed_args)
        hosts = dict.fromkeys(parsed_args.hosts)
        self.is_search = bool(hosts)
        found = providers(known, hosts)
        shown = [p for providers in found.values() for p in providers]
        in_use = {host for host, providers in found.items()
                  if any(p.held for p in providers)}
        if parsed_args.evacuation_list:
            held = {consumer for p in shown for consumer in p.held}
            return None, sorted({
                ' '.join(filter(None, (server['id'], _drained_at(server))))
                for host in in_use
                for server in known.servers(node=_just(host))
                if server['id'] in held
                and any(map(naming.is_for_owner, server['metadata']))})
        servers = server_names(known, in_use)
        functions = function_names(known, shown)
        self.nothing = (
            f'Placement shows no accelerators of {", ".join(hosts)}.' if hosts
            else 'Placement shows no accelerators.')
        return self.rows(found, servers, functions)

    def produce_output(self, parsed_args, column_names, data):
        if column_names is not None:
            return super().produce_output(parsed_args, column_names, data)
        self.app.stdout.writelines(f'{server}\n' for server in data)
        return 0

    def rows(self, found, servers, functions):
        """Return (names of columns, rows) of the table.

        :param found: host -> its providers, parents before children.
        :param servers: UUID of a server -> name.
        :param functions: UUID of a provider -> name of its function.
        """
        if not self.for_people or self._names_columns:
            return self.COLUMNS, [
                self._all_of(p, providers, servers, functions)
                for providers in found.values() for p in providers]
        rows = []
        for host, providers in found.items():
            if providers:
                rows.append((host, *('' for _ in _COLUMNS[1:])))
            rows += [self._row(p, providers, servers, functions)
                     for p in providers]
        return _COLUMNS, rows

    def _row(self, provider, providers, servers, functions):
        """Return the row of a provider in a table for people."""
        name = '  ' * provider.depth + _short_name(provider, providers)
        # the row of the card shows it
        what = '' if provider.resource_class and provider.depth > 1 else (
            what_is(provider, providers))
        if not provider.resource_class:
            return name, what, '', '', self._health(provider)
        function = (functions.get(provider.uuid)
                    or self.identifier(provider.function))
        return (name, ', '.join(filter(None, (what, function))),
                f'{sum(provider.held.values())} of {provider.total}'
                + (f', {provider.reserved} reserved' if provider.reserved
                   else ''),
                self.several([
                    servers.get(consumer, consumer)
                    + (f' ({amount})' if amount > 1 else '')
                    for consumer, amount in sorted(provider.held.items())]),
                self._health(provider))

    def _all_of(self, provider, providers, servers, functions):
        """Return the row of a provider in a format for programs."""
        offers = bool(provider.resource_class)
        return (
            provider.host, provider.name, provider.uuid,
            provider.resource_class, what_is(provider, providers),
            functions.get(provider.uuid, ''),
            self.identifier(provider.function),
            *((provider.total, sum(provider.held.values()), provider.reserved)
              if offers else ('', '', '')),
            [{'id': consumer, 'name': servers.get(consumer), 'amount': amount}
             for consumer, amount in sorted(provider.held.items())]
            if self.structured else ', '.join(
                f'{servers.get(consumer, "")} {consumer}'.strip()
                + (f' ({amount})' if amount > 1 else '')
                for consumer, amount in sorted(provider.held.items())),
            self._health(provider))

    def _health(self, provider):
        if naming.FENCED in provider.traits:
            return self.colored('fenced', output.RED)
        if naming.SUSPECT in provider.traits:
            return self.colored('suspect', output.YELLOW)
        # nova-compute removes this trait from held devices with its next report
        if naming.PROGRAMMABLE in provider.traits and not provider.held:
            return self.colored('programmable', output.GREEN)
        return 'ok' if provider.resource_class else ''


# Placement

def providers(service: cloud.Cloud, hosts: Iterable[str],
              ) -> dict[str, list[Provider]]:
    """Return the providers of nova_accel by host, parents before children.

    Sends one request for all hosts, or two for each named host. Then sends
    three requests for each provider without children, because providers with
    children have no inventory.

    :raises NotThere: a host has no provider.
    """
    found: dict[str, list[Provider]] = {}
    listed: dict[str, reasons.Provider] = {}
    for root, *others in service.trees(hosts, nested=True):
        listed.update((p.uuid, p) for p in others)
        ours = [Provider(root.name, p.uuid, p.name, p.parent or '')
                for p in others
                if naming.part_of_provider(root.name, p.name) is not None]
        if ours:
            found[root.name] = _in_order(ours, root.uuid)
    shown = {p.uuid: p for providers in found.values() for p in providers}
    parents = {p.parent for p in shown.values()}
    for read in service.read(
            listed[uuid] for uuid in shown if uuid not in parents):
        _fill(shown[read.uuid], read)
    return found


def domains(service: cloud.Cloud) -> dict[str, near.Domains]:
    """Return name of a host -> the domains of the host. Sends one request for
    the list of domains, and one more for each domain."""
    traits = collections.defaultdict(list)
    for trait in service.get('placement', '/traits?' + cloud.query(
            associated='true', name=f'startswith:{naming.NEAR_PREFIX}'),
            key='traits'):
        for root in service.get('placement', '/resource_providers?'
                                + cloud.query(required=trait),
                                key='resource_providers'):
            traits[root['name']].append(trait)
    return {host: naming.near_of(found) for host, found in traits.items()}


def _in_order(providers: list[Provider], root: str) -> list[Provider]:
    children = collections.defaultdict(list)
    known = {p.uuid for p in providers}
    for provider in sorted(providers, key=lambda p: p.name):
        children[provider.parent if provider.parent in known else root].append(
            provider)
    result = []

    def add(parent, depth):
        for provider in children[parent]:
            provider.depth = depth
            result.append(provider)
            add(provider.uuid, depth + 1)
    add(root, 1)
    return result


def _fill(provider: Provider, read: reasons.Provider) -> None:
    provider.traits = read.traits
    for name, inventory in sorted(read.inventories.items()):
        if not naming.is_memory_class(name):
            provider.resource_class = name
            provider.total = inventory['total']
            provider.reserved = inventory['reserved']
            provider.held = {
                consumer: resources[name]
                for consumer, resources in read.allocations.items()
                if name in resources}


# Names

def server_names(service: cloud.Cloud, hosts: Iterable[str],
                 ) -> dict[str, str]:
    """Return UUID -> name of the servers on hosts. Sends one request per host.

    If Nova does not respond, names are missing, and commands show UUIDs.
    """
    names = {}
    with contextlib.suppress(exception.AcceleratorError, LookupError):
        for host in hosts:
            for server in service.servers('/servers', node=_just(host)):
                names[server['id']] = output.clean(server['name'])
    return names


def _drained_at(server: Mapping) -> str:
    """Return the earliest time at which a device of a server will be drained,
    or ''. It can be any text, because owners can change the metadata."""
    return min((found[0] for key, value in server['metadata'].items()
                if naming.is_maintenance_key(key)
                and (found := _TIME.match(value))), default='')


def _just(host: str) -> str:
    """Return a pattern for Nova's filter of servers by exactly this host."""
    return f'^{re.escape(host)}$'


def function_names(service: cloud.Cloud, providers: Iterable[Provider],
                   ) -> Mapping[str, str]:
    """Return UUID of a provider -> name of the function in the region.

    The name comes from a trait if there is one, otherwise from the image in
    Glance. Sends one request for each image or function. If only the UUID of
    the function is known, its image is searched among public images only,
    because any project can claim a function as its own.
    """
    names: dict[str, str] = {}
    known: dict[str, str | None] = {}
    for provider in providers:
        name = provider.function_name
        query = ''
        if provider.image:
            query = f'/images/{provider.image}'
        elif provider.function:
            query = '/images?' + parse.urlencode({
                'accel:function_id': str(uuid.UUID(provider.function)),
                'visibility': 'public', 'limit': 1})
        if not name and query:
            if query not in known:
                known[query] = _image_name(service, query)
            name = known[query]
        if name:
            names[provider.uuid] = name
    return names


def _image_name(service: cloud.Cloud, query: str) -> str | None:
    try:
        image = service.get('image', query)
        if 'images' in image:
            image = image['images'][0]
        return output.clean(image.get('accel:function_name') or image['name'])
    except (exception.AcceleratorError, *exception.MALFORMED):
        return None


# What providers are

def _short_name(provider: Provider, providers: Iterable[Provider]) -> str:
    names = {p.uuid: p.name for p in providers}
    if provider.parent in names:
        return provider.name.removeprefix(f'{names[provider.parent]}_')
    return naming.part_of_provider(provider.host, provider.name) or ''


def what_is(provider: Provider, providers: Iterable[Provider]) -> str:
    """Return type, vendor and product of a provider as text. For a card with
    regions, return those of its first region."""
    of = provider
    if not provider.resource_class:
        of = next((p for p in providers if p.parent == provider.uuid), provider)
    # a device that is not offered has no inventory
    type_ = (naming.type_of(of.resource_class) if of.resource_class
             else naming.type_in(of.traits))
    if not type_:
        return ''
    vendor, names = naming.product_of(type_, of.traits)
    return ' '.join(filter(None, (type_, vendor, *names)))
