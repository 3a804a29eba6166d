# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel providers purge: removes a host's providers from Placement."""

from collections.abc import Mapping
import typing

from cliff import lister
from keystoneauth1 import exceptions as keystone
from oslo_config import cfg

from nova_accel.cmd import cloud
from nova_accel.cmd import configuration
from nova_accel import conf
from nova_accel import exception
from nova_accel import naming

CONF = conf.CONF

_DRIVER = 'accel.AccelLibvirtDriver'
#: in_tree, and the parent of each provider
_VERSION = '1.14'
#: hypervisors by name, with the state of nova-compute
_COMPUTE_VERSION = '2.53'
#: how often a purge begins again because the tree changed meanwhile
_ATTEMPTS = 5

Provider = Mapping[str, typing.Any]


class PurgeProviders(lister.Lister):
    """Remove the resource providers of nova_accel of a host from Placement.

    For a host that returns to Nova's own driver, or is removed. Only
    providers that nova_accel created are removed, and none while anything is
    allocated from one of them. Asks Placement and Nova with the credentials
    of the environment or of clouds.yaml.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        configuration.add_argument(parser)
        cloud.add_arguments(parser)
        parser.add_argument(
            'host', metavar='HOST',
            help='name of the host in "openstack hypervisor list"')
        parser.add_argument(
            '--dry-run', action='store_true',
            help='show what would be removed, and remove nothing')
        return parser

    def take_action(self, parsed_args):
        configuration.read(parsed_args.config_file)
        refuse_own_host(parsed_args.host)
        service = cloud.Cloud(parsed_args.os_cloud).adapter
        try:
            found = purge(service('placement'), parsed_args.host,
                          parsed_args.dry_run)
            running = is_running(service('compute'), parsed_args.host)
        except keystone.ClientException as error:
            raise exception.PlacementUnavailable(
                f'The providers of {parsed_args.host} were to be removed, and '
                f'a service did not answer ({error}): try again when it '
                f'does; what is removed already stays so.') from error
        if running:
            self.app.stderr.write(
                f'nova-compute of {parsed_args.host} runs. If it runs the '
                f'driver {_DRIVER} it creates these providers again within '
                f'minutes: set its [DEFAULT] compute_driver and restart it.\n')
        done = 'would be removed' if parsed_args.dry_run else 'removed'
        return (('Provider', 'UUID', 'Result'),
                [(p['name'], p['uuid'], done) for p in found])


def refuse_own_host(host: str) -> None:
    """Refuse to purge the host whose nova.conf this is, while its
    nova-compute is configured to create the providers again.

    :raises ConfigurationError: it is.
    """
    try:
        CONF.register_opt(cfg.StrOpt('compute_driver'))
    except cfg.DuplicateOptError:
        pass
    if host == CONF.host and CONF.compute_driver == _DRIVER:
        raise exception.ConfigurationError(
            f'The providers of {host} were not removed because nova-compute '
            f'of this host would create them again: its nova.conf has '
            f'compute_driver = {_DRIVER}; set the driver that the host gets, '
            f'restart nova-compute, and try again.')


def purge(placement, host: str, dry_run: bool = False) -> list[Provider]:
    """Remove the providers of nova_accel below a root provider.

    :param placement: keystoneauth1 Adapter.
    :param host: name of the root provider.
    :returns: those that were removed, or would be, children first.
    :raises DeviceUnavailable: something is allocated from one of them;
        nothing was removed, or less than all if the allocation is new.
    :raises PlacementUnavailable: Placement refused to remove one.
    :raises ConfigurationError: Placement does not know the root provider.
    """
    removed: list[Provider] = []
    answer = ''
    for _ in range(_ATTEMPTS):
        found = _providers(placement, host)
        _refuse_in_use(placement, host, found)
        if dry_run:
            return found
        for provider in found:
            try:
                placement.delete(f'/resource_providers/{provider["uuid"]}',
                                 microversion=_VERSION)
            except keystone.NotFound:
                pass
            except keystone.Conflict as error:
                # allocated from since, or it has a new child
                answer = getattr(error.response, 'text', '')
                break
            removed.append(provider)
        else:
            return removed
    raise exception.PlacementUnavailable(
        f'The providers of {host} were to be removed, and Placement refused '
        f'it {_ATTEMPTS} times ({" ".join(answer.split())}): stop '
        f'nova-compute of the host, and try again.')


def is_running(compute, host: str) -> bool:
    """Whether Nova sees that nova-compute of a host runs.

    :param compute: keystoneauth1 Adapter.
    """
    try:
        found = compute.get(
            '/os-hypervisors/detail', microversion=_COMPUTE_VERSION,
            params={'hypervisor_hostname_pattern': host}).json()
    except keystone.NotFound:
        return False
    return any(h['hypervisor_hostname'] == host and h['state'] == 'up'
               for h in found['hypervisors'])


def _providers(placement, host):
    """Those that are ours, children before their parents."""
    url = '/resource_providers'
    roots = _get(placement, url, name=host)['resource_providers']
    if not roots or roots[0]['parent_provider_uuid']:
        raise exception.ConfigurationError(
            f'Placement has no compute node {host!r}: give the name that '
            f'"openstack hypervisor list" shows.')
    ours = {}
    for provider in _get(placement, url, in_tree=roots[0]['uuid'],
                         )['resource_providers']:
        if naming.part_of_provider(host, provider['name']) and (
                CONF.accel.owner_trait in _get(
                    placement, f'{url}/{provider["uuid"]}/traits')['traits']):
            ours[provider['uuid']] = provider

    def depth(provider):
        parent = ours.get(provider['parent_provider_uuid'])
        return 1 + depth(parent) if parent else 0
    return sorted(ours.values(), key=lambda p: (-depth(p), p['name']))


def _refuse_in_use(placement, host, found):
    held = []
    for provider in found:
        consumers = _get(
            placement, f'/resource_providers/{provider["uuid"]}/allocations',
            )['allocations']
        if consumers:
            held.append(f'{", ".join(sorted(consumers))} from '
                        f'{provider["name"]}')
    if held:
        raise exception.DeviceUnavailable(
            f'The providers of {host} cannot be removed while servers have '
            f'accelerators there ({"; ".join(held)}): delete, shelve or '
            f'resize these servers, or see "nova-manage placement audit" for '
            f'allocations of servers that do not exist.')


def _get(placement, url, **params):
    return placement.get(url, params=params, microversion=_VERSION).json()
