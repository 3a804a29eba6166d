# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel providers purge: remove a host's providers from Placement."""

from keystoneauth1 import exceptions as keystone
from oslo_config import cfg

from nova_accel.cmd import cloud
from nova_accel.cmd import configuration
from nova_accel.cmd import output
from nova_accel import conf
from nova_accel import exception
from nova_accel import naming
from nova_accel.planning import reasons

CONF = conf.CONF

_DRIVER = 'accel.AccelLibvirtDriver'
#: maximum number of attempts, each after a change of the tree
_ATTEMPTS = 5


class PurgeProviders(cloud.Asks, output.Table):
    """Remove the resource providers of nova_accel of a host from Placement.

    Use it for a host that is removed, or that returns to Nova's own driver.
    The command removes only providers that nova_accel created. It removes none
    of them while a consumer has an allocation from one. Queries Placement and
    Nova with the credentials of the environment or of clouds.yaml.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        configuration.add_argument(parser)
        self.add_cloud_arguments(parser)
        parser.add_argument(
            'host', metavar='HOST',
            help='name of the host in "openstack hypervisor list"')
        parser.add_argument(
            '--dry-run', action='store_true',
            help='show what would be removed, and remove nothing')
        return parser

    COLUMNS = ('Provider', 'UUID', 'Result')

    def take_action(self, parsed_args):
        self.check_columns(parsed_args, self.COLUMNS)
        configuration.read(parsed_args.config_file)
        refuse_own_host(parsed_args.host)
        service = self.cloud(parsed_args)
        try:
            found = purge(service, parsed_args.host, parsed_args.dry_run)
            running = is_running(service, parsed_args.host)
        except (keystone.ClientException,
                exception.ServiceUnavailable) as error:
            raise exception.PlacementUnavailable(
                f'The providers of {parsed_args.host} are not removed, '
                f'because a service did not answer ({str(error).rstrip(".")}): '
                f'try again when it does; what is removed already stays so.'
            ) from error
        if running:
            self.app.stderr.write(
                f'nova-compute of {parsed_args.host} runs. If it runs the '
                f'driver {_DRIVER} it creates these providers again within '
                f'minutes: set its [DEFAULT] compute_driver and restart it.\n')
        done = 'would be removed' if parsed_args.dry_run else 'removed'
        return (self.COLUMNS,
                [(p.name, p.uuid, done) for p in found])


def refuse_own_host(host: str) -> None:
    """Refuse a purge if the nova-compute of this host would create the
    providers again.

    :raises ConfigurationError: compute_driver is the driver of nova_accel.
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


def purge(service: cloud.Cloud, host: str, dry_run: bool = False,
          ) -> list[reasons.Provider]:
    """Remove the providers of nova_accel below a root provider.

    :param host: name of the root provider.
    :param dry_run: whether to remove nothing, and only return the providers.
    :returns: the removed providers, children first.
    :raises DeviceUnavailable: a provider has an allocation. If the allocation
        was made during the call, some providers have been removed before.
    :raises PlacementUnavailable: Placement refused to remove a provider.
    :raises NotThere: Placement does not know the root provider.
    """
    removed: list[reasons.Provider] = []
    answer = ''
    for _ in range(_ATTEMPTS):
        found = _providers(service, host)
        _refuse_in_use(host, found)
        if dry_run:
            return found
        for provider in found:
            try:
                service.adapter('placement').delete(
                    f'/resource_providers/{provider.uuid}')
            except keystone.NotFound:
                pass
            except keystone.Conflict as error:
                # an allocation or a child was added meanwhile
                answer = getattr(error.response, 'text', '')
                break
            removed.append(provider)
        else:
            return removed
    raise exception.PlacementUnavailable(
        f'The providers of {host} are not removed, because Placement refused '
        f'it {_ATTEMPTS} times ({" ".join(answer.split())}): stop '
        f'nova-compute of the host, and try again.')


def is_running(service: cloud.Cloud, host: str) -> bool:
    """Return whether nova-compute of a host runs, according to Nova."""
    return any(node['hypervisor_hostname'] == host and node['state'] == 'up'
               for node in service.hypervisors().values())


def _providers(service: cloud.Cloud, host: str) -> list[reasons.Provider]:
    """Return nova_accel's providers on a host, children before parents."""
    (_, *others), = service.trees([host])
    ours = {p.uuid: p for p in service.read(
        (p for p in others if naming.part_of_provider(host, p.name)),
        ('traits', 'allocations')) if CONF.accel.owner_trait in p.traits}

    def depth(provider):
        parent = ours.get(provider.parent)
        return 1 + depth(parent) if parent else 0
    return sorted(ours.values(), key=lambda p: (-depth(p), p.name))


def _refuse_in_use(host, found):
    held = [f'{", ".join(sorted(p.allocations))} from {p.name}'
            for p in found if p.allocations]
    if held:
        raise exception.DeviceUnavailable(
            f'The providers of {host} cannot be removed while servers have '
            f'accelerators there ({"; ".join(held)}): delete, shelve or '
            f'resize these servers; where one does not exist, delete its '
            f'allocation with openstack resource provider allocation delete '
            f'<its id>.')
