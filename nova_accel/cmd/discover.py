# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel discover: what nova-compute would report of this host."""

import collections
import contextlib
import json
import logging

from cliff import lister

from nova_accel.attach import claims
from nova_accel.cmd import configuration
from nova_accel import conf
from nova_accel import drivers
from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel import inventory
from nova_accel import model
from nova_accel import naming

CONF = conf.CONF

#: in place of the uuid of the compute node, which only nova-compute knows
_ROOT = '00000000-0000-0000-0000-000000000000'


class Discover(lister.Lister):
    """Show the accelerators that the enabled drivers find on this host.

    One row per resource provider: what it would offer in Placement, and its
    traits. With -f json, the devices themselves by PCI address. The exit
    status is 1 when a driver failed; what the others found is shown. Nothing
    is written, not even the state of a simulated host.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        configuration.add_argument(parser)
        parser.add_argument(
            '--simulated-host', metavar='FILE',
            help='look at the host that this file describes, in place of '
                 '[accel] simulated_host; it ends at Placement, because '
                 'libvirt refuses simulated devices')
        parser.add_argument(
            '--driver', action='append', metavar='NAME', dest='drivers',
            help='look with this driver, in place of [accel] enabled_drivers; '
                 'may be repeated')
        return parser

    def run(self, parsed_args):
        super().run(parsed_args)
        return 1 if self._failed else 0

    def take_action(self, parsed_args):
        found = self._discover(parsed_args)
        self._devices = found.devices
        providers = collections.defaultdict(list)
        for provider in found.providers_of(CONF.host, _ROOT).values():
            # a pool stands where its first device does
            for address in provider.addresses:
                providers[address].append(provider)
        rows = []
        for address, device in sorted(self._devices.items()):
            rows += [_row(p, [self._devices[a] for a in p.addresses])
                     for p in providers[address]
                     if p.addresses[0] == address
                     ] if providers[address] else [_unreported(device)]
        return (('Provider', 'NUMA', 'Resource class', 'Total', 'Reserved',
                 'Handles', 'Traits', 'Health'), rows)

    def produce_output(self, parsed_args, column_names, data):
        if parsed_args.formatter == 'json':
            json.dump({address: device.as_dict() for address, device
                       in sorted(self._devices.items())},
                      self.app.stdout, indent=2)
            self.app.stdout.write('\n')
        else:
            super().produce_output(parsed_args, column_names, data)

    def _discover(self, parsed_args):
        _configure(parsed_args)
        kernel = host_kernel.open_kernel(CONF.host, writes=False)
        names = CONF.accel.enabled_drivers
        if not names:
            raise exception.ConfigurationError(
                'No driver is enabled: set [accel] enabled_drivers or give '
                '--driver.')
        loaded, failed = {}, {}
        for name in names:
            try:
                loaded.update(drivers.load([name], kernel))
            except Exception as e:
                # one bad driver must not hide the devices of the others
                failed[f'driver {name}'] = str(e) or repr(e)
        # what nova-compute would know of servers is not looked at
        found = inventory.Inventory(loaded, claims.ClaimStore(claims.MEMORY),
                                    reads_serials=False)
        with _quiet(inventory.__name__):
            # what it would log is shown
            found.scan()
        failed.update(found.failures())
        for what, why in failed.items():
            self.app.stderr.write(f'WARNING: {what}: {why}\n')
        self._failed = bool(failed)
        return found


@contextlib.contextmanager
def _quiet(name):
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _configure(parsed_args):
    configuration.read(parsed_args.config_file)
    if parsed_args.simulated_host:
        CONF.set_override('simulated_host', parsed_args.simulated_host,
                          group='accel')
    if parsed_args.drivers:
        CONF.set_override('enabled_drivers', parsed_args.drivers,
                          group='accel')


def _row(provider, devices):
    """A provider as nova-compute would report it."""
    parts = [device if provider.region_index is None
             else device.region(provider.region_index) for device in devices]
    resource_class = naming.resource_class(devices[0].type)
    total = provider.inventory.get(resource_class, 0)
    reserved = total if provider.fenced else provider.unfit
    nodes = sorted({d.numa_node for d in devices if d.numa_node is not None})
    return (provider.name, ', '.join(map(str, nodes)),
            resource_class if total else '', total or '',
            reserved if total else '',
            '\n'.join(filter(None, map(_handles, parts))),
            '\n'.join(sorted(provider.traits - {naming.FENCED})),
            '\n'.join(_healths(devices, parts)))


def _healths(devices, parts):
    """One line, or one for each device of a pool that is not well."""
    lines = []
    for device, part in zip(devices, parts):
        sick = [p for p in (part, device) if p.health is not model.Health.OK]
        if sick or len(devices) == 1:
            found = (sick or [part])[0]
            lines.append(', '.join(filter(None, (
                found.health.value if len(devices) == 1
                else f'{device.address} {found.health.value}',
                found.reason))))
    return lines or [model.Health.OK.value]


def _unreported(device):
    """A device with a name that cannot be a trait."""
    try:
        why = f'no traits: {naming.device_traits(device)}'
    except exception.InvalidName as e:
        why = str(e)
    return (naming.device_provider_name(CONF.host, device.address),
            _numa(device), '', '', '', _handles(device), '',
            f'not reported: {why}')


def _numa(device):
    return '' if device.numa_node is None else device.numa_node


def _handles(part):
    return '\n'.join(handle.address for handle in part.handles)
