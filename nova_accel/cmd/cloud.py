# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Placement, Nova and Glance, with the operator's own credentials.

openstacksdk reads the credentials like the command openstack: from --os-*,
OS_* in the environment, or an entry of clouds.yaml. A command that runs as a
subcommand of openstack (see openstack.py) uses its session.

A proxy, or another service, can return 200 with other JSON. Commands treat that
as if the service did not respond.
"""

import argparse
import collections
from collections.abc import Iterable, Iterator, Mapping
from concurrent import futures
import contextlib
import dataclasses
import functools
import textwrap
import typing
from urllib import parse

from glanceclient.v2 import client as glance_client
from keystoneauth1 import adapter as ks_adapter
from keystoneauth1 import exceptions as ks_exc

from nova_accel.bitstream import glance
from nova_accel import exception
from nova_accel import naming
from nova_accel.planning import reasons
from nova_accel import text

#: seconds to wait for each response
_TIMEOUT = 60
#: maximum number of simultaneous requests to Placement
_AT_ONCE = 8
#: the parts of a provider that can be read from Placement
PARTS = ('inventories', 'traits', 'allocations')
#: service type -> its name in errors, the version of its API if the catalog
#: omits it, and a microversion: for consumer_type (Placement), for extra specs
#: in flavors (Nova)
_SERVICES = {
    'placement': ('Placement', None, '1.38'),
    'compute': ('Nova', None, '2.61'),
    'image': ('Glance', '2', None),
    'identity': ('Keystone', None, None),
}
#: beginning of each refusal of Placement (HTTPBadRequest of WebOb)
_MALFORMED = ('The server could not comply with the request since it is either '
              'malformed or otherwise incorrect.')
#: in a form: key of every value, or of every item
_EACH = '*'
_AMOUNTS = {_EACH: int}
_SPECS = {_EACH: str}
_OF_FLAVOR = {'ram': int, 'vcpus': int, 'disk': int, 'swap': (int, str)}
_FLAVOR = {**_OF_FLAVOR, 'name': str, 'OS-FLV-EXT-DATA:ephemeral': int}
_NODE = {'id': str, 'hypervisor_hostname': str, 'state': str, 'status': str,
         'service': {'host': str}}
_SERVER = {'id': str, 'name': str}
_ENTRY = {**_SERVER, 'status': str, 'OS-EXT-STS:task_state': (str, type(None)),
          'OS-EXT-SRV-ATTR:hypervisor_hostname': (str, type(None))}
#: name of a part of a response -> its form: one or several types, [form of each
#: item], or {key: form}
_FORMS: Mapping[str, typing.Any] = {
    'resource_providers': [{
        'uuid': str, 'name': str, 'root_provider_uuid': str,
        'parent_provider_uuid': (str, type(None))}],
    'inventories': {_EACH: {
        'total': int, 'reserved': int, 'min_unit': int, 'max_unit': int,
        'step_size': int, 'allocation_ratio': (int, float)}},
    'traits': [str],
    'allocations': {_EACH: {'resources': _AMOUNTS}},
    'allocation_requests': [{
        'allocations': {_EACH: {'resources': _AMOUNTS}}, 'mappings': {
            _EACH: [str]}}],
    'provider_summaries': {_EACH: {
        'root_provider_uuid': str, 'traits': [str],
        'resources': {_EACH: {'capacity': int, 'used': int}}}},
    'flavor': _FLAVOR, 'flavors': [_FLAVOR],
    'hypervisor': _NODE, 'hypervisors': [_NODE],
    'server_group': {'members': [str], 'policies': [str]},
    'server': _ENTRY, 'servers': [_SERVER],
    # of /servers/detail
    'servers/detail': [{**_ENTRY, 'metadata': _SPECS, 'flavor': {
        **_OF_FLAVOR, 'original_name': str, 'ephemeral': int,
        'extra_specs': _SPECS}}],
}
#: arguments of the command openstack -> help
_ARGUMENTS = {
    'auth-type': 'kind of the credentials',
    'auth-url': 'URL of Keystone',
    'username': 'name of the user',
    'password': 'password of the user; better in clouds.yaml',
    'user-domain-name': 'domain of the user',
    'project-name': 'project of the token',
    'project-id': 'project of the token, by its id',
    'project-domain-name': 'domain of the project',
    'token': 'token in place of a password',
    'region-name': 'region of the services',
    'interface': 'public, internal or admin',
    'cacert': 'file of the CA of the services',
}


class Asks:
    """A command that queries the cloud, under nova-accel or openstack."""

    app: typing.Any

    @property
    def _openstack(self) -> typing.Any:
        """Return the client manager if the command runs under openstack, or
        None."""
        return getattr(self.app, 'client_manager', None)

    def add_cloud_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add --os-cloud and the usual --os-* to a command. Add nothing under
        openstack, which accepts these arguments before the command."""
        if self._openstack:
            return
        group = parser.add_argument_group('credentials and services')
        group.add_argument(
            '--os-cloud', metavar='NAME',
            help='the entry of clouds.yaml with your credentials (default: '
                 'OS_* of the environment, as for all of these)')
        for name, text_ in _ARGUMENTS.items():
            group.add_argument(f'--os-{name}', metavar='VALUE', help=text_)

    def cloud(self, parsed_args: argparse.Namespace) -> 'Cloud':
        """Return the cloud that the arguments of a command select.

        :raises ConfigurationError: the credentials are missing or unusable.
        """
        if self._openstack:
            return Cloud(config=self._openstack.sdk_connection.config)
        given = {name: getattr(parsed_args, f'os_{name}', None) for name in (
            argument.replace('-', '_') for argument in _ARGUMENTS)}
        return Cloud(parsed_args.os_cloud, **{
            f'os_{name}': value for name, value in given.items() if value})


class Cloud:
    """A cloud as its operator sees it.

    :param name: entry of clouds.yaml, or None to use the environment.
    :param config: openstacksdk's configuration, in place of name.
    :param arguments: --os-* of a command, by their names in Python.
    :raises ConfigurationError: the credentials are missing or unusable.
    """

    def __init__(self, name: str | None = None, config: typing.Any = None,
                 **arguments: str):
        self._config = config or self._configured(name, arguments)
        self._session = self._config.get_session()
        self._session.timeout = self._session.timeout or _TIMEOUT

    @staticmethod
    def _configured(name, arguments):
        # imported late: it takes longer than everything else, and --help does
        # not need it
        from openstack import config
        from openstack import exceptions as sdk
        try:
            found = config.OpenStackConfig(app_name='nova-accel').get_one(
                name, argparse=argparse.Namespace(**arguments))
            found.get_session()
            return found
        except (sdk.SDKException, ks_exc.ClientException, OSError,
                ValueError) as error:
            raise exception.ConfigurationError(
                f'Credentials were read from the environment (OS_*) and '
                f'clouds.yaml, and they cannot be used ({_reason(error)}): '
                f'give --os-cloud, set OS_CLOUD, or source an openrc '
                f'file.') from error

    @property
    def project_id(self) -> str:
        """Return the project of the credentials, or '' if they have none."""
        with asking('identity', 'the project of your token'):
            return self._session.get_project_id() or ''

    def get(self, service: str, path: str, missing: typing.Any = None,
            what: str = '', key: str = '') -> typing.Any:
        """Return the body of a successful GET.

        :param service: 'placement' or 'compute'.
        :param missing: value to return for 404; by default an error is raised.
        :param what: noun for the errors, in place of the path.
        :param key: the part of the body to return, by default all of it.
        :raises: as asking().
        """
        with asking(service, what or path):
            try:
                body = self.adapter(service).get(path).json()
            except ks_exc.NotFound:
                if missing is None:
                    raise
                return missing
            if not isinstance(body, dict):
                raise ValueError('it is not an object of JSON')
            return part_of(body, key) if key else body

    def images(self) -> glance_client.Client:
        """Return a client of Glance.

        :raises: as asking(), if Keystone does not know the address of Glance.
        """
        with asking('image', 'its endpoint'):
            endpoint = self.adapter('image').get_endpoint()
            if not endpoint:
                raise ks_exc.EndpointNotFound()
        return glance_client.Client(
            session=self._session,
            endpoint_override=glance.without_version(endpoint))

    @functools.cache
    def adapter(self, service: str) -> ks_adapter.Adapter:
        """Return an adapter that sends requests to 'placement', 'compute' or
        'image'.

        Requests raise keystoneauth1.exceptions.ClientException, also if the
        service responds with a status from 400 on. Send them inside asking().
        """
        _, version, microversion = _SERVICES[service]
        return ks_adapter.Adapter(
            self._session, service_type=service,
            service_name=self._config.get_service_name(service),
            interface=self._config.get_interface(service),
            region_name=self._config.get_region_name(service),
            endpoint_override=self._config.get_endpoint(service),
            version=version, default_microversion=microversion,
            raise_exc=True)

    # The providers of hosts

    def trees(self, names: Iterable[str] = (), nested: bool = False,
              ) -> list[list[reasons.Provider]]:
        """Return the resource providers of compute nodes from Placement,
        without their contents; see read().

        Sends one request, or two for each name.

        :param names: names of compute nodes; empty for all nodes.
        :param nested: whether a name may also be that of a provider below a
            node.
        :returns: a list of providers for each node, in the order of the nodes'
            names: the root provider first, then its other providers by name.
        :raises NotThere: Placement has no compute node with one of the names.
        :raises: as asking().
        """
        names, listed = list(names), {}
        url = '/resource_providers'
        if not names:
            listed = {p['uuid']: p for p in self._listed(url)}
        for name in names:
            found = self._listed(f'{url}?{query(name=name)}')
            if not found or not nested and found[0]['parent_provider_uuid']:
                raise exception.NotThere(
                    f'Placement was asked for the compute node '
                    f'{text.printable(name)}, and has none with this name: '
                    f'give the name that openstack hypervisor list shows.')
            listed.update((p['uuid'], p) for p in self._listed(
                f'{url}?{query(in_tree=found[0]["root_provider_uuid"])}'))
        trees = collections.defaultdict(list)
        for item in sorted(listed.values(), key=lambda p: (
                bool(p['parent_provider_uuid']), p['name'])):
            if item['root_provider_uuid'] in listed:
                trees[item['root_provider_uuid']].append(reasons.Provider(
                    item['uuid'], item['name'], item['root_provider_uuid'],
                    parent=item['parent_provider_uuid']))
        return sorted(trees.values(), key=lambda tree: tree[0].name)

    def _listed(self, path):
        return self.get('placement', path, key='resource_providers')

    def read(self, providers: Iterable[reasons.Provider],
             parts: Iterable[str] = PARTS) -> list[reasons.Provider]:
        """Return providers with their contents: inventories, traits,
        allocations. If a provider is deleted during the call, its contents
        stay empty.

        Sends a request for each part of each provider, several at a time.
        Allocations are not requested for a provider without an inventory,
        because it cannot have any.

        :param parts: the contents to read, of PARTS.
        :raises: as asking().
        """
        with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(
                lambda provider: self._read(provider, parts), providers))

    def hosts(self, names: Iterable[str] = (),
              ) -> tuple[list[tuple[list[reasons.Provider], dict | None]],
                         list[str]]:
        """Return the compute nodes that have accelerators.

        Sends three requests for each provider of these nodes.

        :param names: names of compute nodes; empty for all nodes.
        :returns: (the providers of a node with their contents, the root
            provider first; Nova's entry of the node, or None), in the order of
            names; and the names of the nodes without accelerators.
        :raises: as trees().
        """
        trees, names, bare = [], [*names], []
        for tree in self.trees(names):
            if any(naming.part_of_provider(tree[0].name, p.name)
                   for p in tree):
                trees.append(tree)
            else:
                bare.append(tree[0].name)
        read = iter(self.read(p for tree in trees for p in tree))
        nodes = self.hypervisors(
            trees[0][0].uuid if len(names) == 1 else None) if trees else {}
        return [([next(read) for _ in tree], nodes.get(tree[0].uuid))
                for tree in trees], bare

    def _read(self, provider, parts):
        found: dict[str, typing.Any] = {}
        for part in parts:
            if part == 'allocations' and not found.get('inventories', True):
                continue
            found[part] = self.get(
                'placement', f'/resource_providers/{provider.uuid}/{part}',
                missing=False, key=part)
            if found[part] is False:
                return provider
        return dataclasses.replace(
            provider, inventories=found.get('inventories', {}),
            traits=frozenset(found.get('traits', ())), allocations={
                consumer: given['resources'] for consumer, given
                in found.get('allocations', {}).items()})

    # Flavors and images

    def flavor(self, name_or_id: str) -> dict:
        """Return a flavor, with its extra specs.

        :raises NotThere: Nova does not have the flavor.
        :raises ConfigurationError: Nova does not show extra specs to these
            credentials.
        :raises: as asking().
        """
        found = self.get('compute', f'/flavors/{_quoted(name_or_id)}',
                         missing={}, key='flavor')
        found = found or next((flavor for flavor in self._flavors()
                               if flavor['name'] == name_or_id), None)
        if found:
            _check_extra_specs([found])
            return found
        raise exception.NotThere(
            f'Nova has no flavor with the name or id '
            f'{text.printable(name_or_id)} that your credentials can see: '
            f'compare openstack flavor list --all.')

    def flavors(self) -> list[dict]:
        """Return the flavors that the credentials can see, with their extra
        specs.

        :raises ConfigurationError: Nova does not show extra specs to these
            credentials.
        :raises: as asking().
        """
        found = list(self._flavors())
        _check_extra_specs(found)
        return found

    def _flavors(self):
        return self._pages('/flavors/detail?is_public=None', 'flavors')

    def set_flavor(self, flavor: dict, specs: Mapping[str, str],
                   description: str | None = None) -> bool:
        """Change the extra specs and the description of a flavor if they
        differ from the given ones.

        :param flavor: an entry of the result of flavors().
        :param description: None keeps the present description.
        :returns: whether anything has changed.
        :raises: as asking().
        """
        new = {key: value for key, value in specs.items()
               if flavor['extra_specs'].get(key) != value}
        is_new = description not in (None, flavor.get('description'))
        path = f'/flavors/{_quoted(flavor["id"])}'
        with asking('compute', f'a change of the flavor {flavor["name"]}'):
            if new:
                self.adapter('compute').post(
                    f'{path}/os-extra_specs', json={'extra_specs': new})
            if is_new:
                self.adapter('compute').put(
                    path, json={'flavor': {'description': description}})
        return bool(new) or is_new

    def image(self, name_or_id: str) -> dict:
        """Return Glance's entry of an image, with its properties.

        :raises NotThere: no image, or more than one, has that name.
        :raises GlanceUnavailable: Glance did not answer.
        """
        found = glance.by_name_or_id(self.images(), name_or_id)
        if len(found) != 1:
            raise exception.NotThere(
                f'Glance has {len(found) or "no"} image'
                f'{"s" * bool(found)} with the name or id '
                f'{text.printable(name_or_id)} that your credentials can see: '
                f'give the id of one.')
        return found[0]

    def hypervisors(self, uuid: str | None = None) -> dict[str, dict]:
        """Return UUID -> Nova's entry of a compute node. The node's resource
        provider has the same UUID.

        :param uuid: UUID of the only node to query.
        :raises: as asking().
        """
        if uuid:
            found = self.get('compute', f'/os-hypervisors/{uuid}', missing={},
                             key='hypervisor')
            return {uuid: found} if found else {}
        return {node['id']: node for node in self._pages(
            '/os-hypervisors/detail?limit=1000', 'hypervisors')}

    def servers(self, path: str = '/servers/detail', **which: str,
                ) -> list[dict]:
        """Return Nova's entries of servers of all projects.

        :param path: '/servers' to get only ids and names.
        :param which: filters of Nova's API: host, node.
        :raises: as asking().
        """
        return list(self._pages(
            f'{path}?{query(all_tenants="1", limit="1000", **which)}',
            'servers', 'its servers', path.strip('/')))

    def server_group(self, uuid: str) -> dict:
        """Return Nova's entry of a server group.

        :raises NotThere: Nova does not have it.
        :raises: as asking().
        """
        found = self.get('compute', f'/os-server-groups/{_quoted(uuid)}',
                         missing={}, key='server_group')
        if not found:
            raise exception.NotThere(
                f'Nova has no server group with the id '
                f'{text.printable(uuid)}: compare openstack server group list '
                f'--all-projects.')
        return found

    def server_name(self, uuid: str) -> str | None:
        """Return the name of a server, or None if Nova does not have it."""
        server = self.get('compute', f'/servers/{uuid}', missing={},
                          key='server')
        return server['name'] if server else None

    def _pages(self, path, key, what='', form='') -> Iterator[dict]:
        start: str | None = path
        while start:
            body = self.get('compute', start, what=what or path)
            with asking('compute', what or path):
                found = part_of(body, key, form)
                more = any(link['rel'] == 'next'
                           for link in body.get(f'{key}_links', ()))
                after = f'{path}&marker={found[-1]["id"]}' if more else None
                if after == start:
                    raise ValueError('the list has no end')
            yield from found
            start = after


def _check_extra_specs(flavors):
    if not all(_has_form(flavor.get('extra_specs'), {_EACH: str})
               for flavor in flavors):
        raise exception.ConfigurationError(
            'Nova was asked for its flavors, and does not show their extra '
            'specs to your credentials: use those of an administrator.')


def query(**fields: str) -> str:
    """Return a URL's query string of these fields."""
    return parse.urlencode(fields)


def _quoted(value: str) -> str:
    return parse.quote(value, safe='')


@contextlib.contextmanager
def asking(service: str, what: str) -> Iterator[None]:
    """Convert errors of a request into errors of nova_accel, inside the
    context. The context sends the request and reads the body of the response.

    :param service: type of the service.
    :param what: the requested thing, as a noun.
    :raises ConfigurationError: the credentials are refused, or no endpoint is
        known.
    :raises InvalidRequest: the service understood the request and refused it.
    :raises ServiceUnavailable: any other error.
    """
    asked = f'{_SERVICES[service][0]} was asked for {what}, and'
    try:
        yield
    except (ks_exc.Unauthorized, ks_exc.Forbidden) as error:
        if glance.rejects_credentials(error):
            raise exception.ConfigurationError(
                f'{asked} Keystone rejects the credentials '
                f'({_reason(error)}): correct OS_USERNAME and OS_PASSWORD, or '
                f'clouds.yaml.') from error
        raise exception.ConfigurationError(
            f'{asked} it refused ({_reason(error)}): use credentials of an '
            f'administrator.') from error
    except ks_exc.CatalogException as error:
        raise exception.ConfigurationError(
            f'{asked} its endpoint is not known ({_reason(error)}): correct '
            f'OS_REGION_NAME and OS_INTERFACE, or the catalog.') from error
    except ks_exc.BadRequest as error:
        raise exception.InvalidRequest(
            f'{asked} it refused ({_detail(error.response)}): correct the '
            f'request.') from error
    except (ks_exc.ClientException, OSError, *exception.MALFORMED) as error:
        where = glance.unreachable(error)
        if where.startswith('Keystone'):
            raise exception.ServiceUnavailable(
                f'{asked} {where} cannot be reached: correct OS_AUTH_URL or '
                f'clouds.yaml, or see that Keystone runs.') from error
        why = f'{where} cannot be reached' if where else _reason(error)
        raise exception.ServiceUnavailable(
            f'{asked} no response came ({why}): see the log of '
            f'the service and the network between.') from error


def _detail(response) -> str:
    """Return the reason with which Placement or Nova refuses a request."""
    try:
        error = response.json()
        found = (error['errors'][0]['detail'] if 'errors' in error
                 else next(iter(error.values()))['message'])
    except (*exception.MALFORMED, StopIteration):
        found = response.text if response is not None else ''
    return ' '.join(str(found).split()).removeprefix(
        _MALFORMED).strip()[:300].rstrip('.')


def _reason(error) -> str:
    return (textwrap.shorten(str(error), 200, placeholder=' ...').rstrip('.')
            or type(error).__name__)


# The form of responses

def _has_form(found: typing.Any, form: typing.Any) -> bool:
    """Return whether a JSON value has a form, written as a value of _FORMS."""
    if isinstance(form, list):
        return isinstance(found, list) and all(
            _has_form(one, form[0]) for one in found)
    if not isinstance(form, dict):
        return isinstance(found, form)
    return isinstance(found, dict) and all(
        all(_has_form(one, part) for one in found.values()) if key == _EACH
        else key in found and _has_form(found[key], part)
        for key, part in form.items())


def part_of(body: typing.Any, name: str, form: str = '') -> typing.Any:
    """Return a part of the body of a response, after a check of its form.

    :param form: key of the part's form in _FORMS, if it differs from name.
    :raises ValueError: the part is missing or has another form.
    """
    if not _has_form(body, {name: _FORMS[form or name]}):
        raise ValueError(f'{name!r} is missing or malformed')
    return body[name]
