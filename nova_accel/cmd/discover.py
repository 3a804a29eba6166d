# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel discover: what nova-compute would report of this host."""

import json
import socket

from cliff import lister
from oslo_config import cfg

from nova_accel import conf
from nova_accel import drivers
from nova_accel.drivers import rules
from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel import model
from nova_accel import naming

CONF = conf.CONF


class Discover(lister.Lister):
    """Show the accelerators that the enabled drivers find on this host.

    One row per resource provider: what it would offer in Placement, and its
    traits. With -f json, the devices themselves by PCI address. The exit
    status is 1 when a driver failed; what the others found is shown.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--config-file', action='append', metavar='FILE',
            help='configuration of nova-compute, may be repeated (default: '
                 'as nova-compute finds it)')
        parser.add_argument(
            '--simulated-host', metavar='FILE',
            help='look at the host that this file describes, in place of '
                 '[accel] simulated_host')
        parser.add_argument(
            '--driver', action='append', metavar='NAME', dest='drivers',
            help='look with this driver, in place of [accel] enabled_drivers; '
                 'may be repeated')
        return parser

    def run(self, parsed_args):
        super().run(parsed_args)
        return 1 if self._failed else 0

    def take_action(self, parsed_args):
        devices = self._discover(parsed_args)
        self._devices = devices
        rows = []
        for address in sorted(devices):
            rows += _rows(devices[address])
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
        kernel = host_kernel.open_kernel(CONF.host)
        names = CONF.accel.enabled_drivers
        if not names:
            raise exception.ConfigurationError(
                'No driver is enabled: set [accel] enabled_drivers or give '
                '--driver.')
        devices, self._failed = {}, False
        chosen = rules.DeviceRules()
        for name in names:
            try:
                driver = drivers.load([name], kernel)[name]
                for device in driver.discover().values():
                    device = chosen.applied(device)
                    if device:
                        devices[device.address] = device
            except Exception as e:
                # one bad driver must not hide the devices of the others
                self._failed = True
                self.app.stderr.write(
                    f'WARNING: driver {name}: {str(e) or repr(e)}\n')
        return devices


def _configure(parsed_args):
    try:
        # Nova registers it likewise
        CONF.register_opt(cfg.StrOpt('host', default=socket.gethostname()))
    except cfg.DuplicateOptError:
        pass
    files = [argument for file in parsed_args.config_file or ()
             for argument in ('--config-file', file)]
    try:
        CONF(files, project='nova', prog='nova-compute')
    except cfg.Error as e:
        raise exception.ConfigurationError(
            f'The configuration cannot be read ({e}): correct it or give '
            f'--config-file.') from e
    if parsed_args.simulated_host:
        CONF.set_override('simulated_host', parsed_args.simulated_host,
                          group='accel')
    if parsed_args.drivers:
        CONF.set_override('enabled_drivers', parsed_args.drivers,
                          group='accel')


def _rows(device):
    """The providers of a device, as nova-compute would make them."""
    rows = [_row(naming.device_provider_name(CONF.host, device.address),
                 device, device, naming.device_traits)]
    for region in device.regions:
        def traits(device, region=region):
            found = naming.region_traits(device, region)
            return (found | {naming.PROGRAMMABLE} if region.programmable
                    else found)
        rows.append(_row(naming.region_provider_name(
            CONF.host, device.address, region.index), device, region, traits))
    return rows


def _row(name, device, part, traits):
    total = len(part.handles)
    sick = [p for p in (part, device) if p.health is not model.Health.OK]
    health = ', '.join(filter(None, (
        (sick or [part])[0].health.value, (sick or [part])[0].reason)))
    try:
        shown = '\n'.join(sorted(traits(device)))
    except exception.InvalidName as e:
        shown, health = '', f'not reported: {e}'
    numa = '' if device.numa_node is None else device.numa_node
    return (name, numa, naming.resource_class(device.type) if total else '',
            total or '', (total if sick else 0) if total else '',
            '\n'.join(handle.address for handle in part.handles), shown,
            health)
