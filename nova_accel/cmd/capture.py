# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel capture: write a host's accelerators into a file, for a bug
report.
"""

import contextlib
import io
import os
import platform
import re
import socket
import sys


from nova_accel.cmd import configuration
from nova_accel.cmd import output
from nova_accel import conf
from nova_accel import drivers
from nova_accel import exception
from nova_accel import files
from nova_accel.host import pci
from nova_accel import inventory
from nova_accel import machine
from nova_accel.sim import captured
from nova_accel.store import claim_store

CONF = conf.CONF

_HEADER = """\
# A capture of the accelerators of a host, by nova-accel capture. To play it,
# set [accel] simulated_host to this file, and the options below, or run
#   nova-accel discover --simulated-host THIS_FILE
# Serial numbers, MAC addresses, mount points and names of the host are
# stand-ins.
"""
#: attributes to read for each accelerator besides those that its driver reads:
#: the kernel has them in memory or in configuration space
_ALSO = ('vendor', 'device', 'subsystem_vendor', 'subsystem_device', 'class',
         'revision', 'numa_node', 'reset_method', 'sriov_totalvfs',
         'sriov_numvfs', 'sriov_drivers_autoprobe', 'current_link_speed',
         'current_link_width', 'max_link_speed', 'max_link_width',
         'power_state', 'd3cold_allowed', 'driver_override')


class Capture(output.Status):
    """Write the devices of this host, as drivers read them, into a file.

    With the file as [accel] simulated_host or --simulated-host, "nova-accel
    discover" shows on any machine what it shows on this host. The file has
    stand-ins in place of serial numbers, MAC addresses, mount points and names
    of the host. Changes nothing on the host. If the command has no permission
    to read some attributes, stderr names them, and the exit status is 1.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        configuration.add_argument(parser)
        parser.add_argument('file', metavar='FILE', nargs='?', default='-',
                            help='file to write (default: standard output)')
        configuration.add_driver_argument(parser)
        return parser

    def take_action(self, parsed_args):
        configuration.read(parsed_args.config_file)
        names = configuration.drivers(parsed_args)
        kernel = machine.open_kernel(CONF.host, writes=False)
        recorded = record(kernel, names, self._warn)
        text = io.StringIO()
        write(recorded, names, text)
        try:
            if parsed_args.file == '-':
                self.app.stdout.write(text.getvalue())
            else:
                files.create(parsed_args.file, text.getvalue())
        except FileExistsError as error:
            raise exception.ConfigurationError(
                f'The capture is not written to {parsed_args.file}, which '
                f'exists: give another name, or remove it.') from error
        except OSError as error:
            raise exception.ConfigurationError(
                f'The capture cannot be written to {parsed_args.file} '
                f'({error.strerror}): give another name.') from error
        if recorded.denied:
            self._warn(
                f'The file lacks attributes that user {os.geteuid()} may not '
                f'read: run this as the user of nova-compute, with its '
                f'nova.conf, or as root, to have all of: '
                f'{", ".join(sorted(recorded.denied))}.')

    def _warn(self, text):
        self.status = 1
        self.app.stderr.write(f'{text}\n')


def record(kernel, names, warn) -> captured.Recorder:
    """Let drivers read a host, and return a recorder of all answers of the
    kernel.

    :param kernel: the kernel of the machine, or a simulated one.
    :param names: names of the drivers.
    :param warn: function to call with a sentence for each failure of a driver.
    :raises ConfigurationError: no driver can be loaded.
    """
    recorded = captured.Recorder(kernel)
    loaded = {}
    for name in names:
        try:
            loaded.update(drivers.load([name], recorded))
        except Exception as error:
            # the other drivers may be the subject of the report
            warn(f'driver {name}: {error}')
    if not loaded:
        raise exception.ConfigurationError(
            'Nothing was captured, because none of the drivers can be loaded: '
            'correct --driver or [accel] enabled_drivers.')
    found = inventory.Inventory(
        loaded, claim_store.ClaimStore(claim_store.MEMORY),
        reads_serials=False)
    # its warnings appear when drivers read the capture
    with output.quiet(inventory.__name__):
        found.scanner.scan()
    for what, why in found.failures().items():
        warn(f'{what}: {why}')
    for address, device in found.devices.items():
        handles = [*device.handles, *(
            handle for region in device.regions for handle in region.handles)]
        for function in {address, *(handle.address for handle in handles)}:
            if pci.ADDRESS.fullmatch(function):
                _read_also(recorded, function)
    return recorded


def _read_also(recorded, function):
    for name in _ALSO:
        with contextlib.suppress(OSError):
            recorded.read(pci.path(function, name))
    pci.driver(recorded, function)
    with contextlib.suppress(OSError):
        pci.group_members(recorded, function)


def write(recorded: captured.Recorder, names, file) -> None:
    stand_ins = captured.Redaction(
        (CONF.host, socket.gethostname(), socket.getfqdn()))
    answers = sorted(recorded.answers.values(),
                     key=lambda a: (a.operation, a.arguments))
    stand_ins.learn(recorded.tree, answers)
    file.write(_HEADER)
    captured.dump(
        stand_ins.tree(recorded.tree),
        [captured.Answer(a.operation, a.arguments, stand_ins.value(
            captured.plain(_of_tree(a, recorded))), a.error) for a in answers],
        {'made_by': f'Linux {platform.release()}, Python '
                    f'{".".join(map(str, sys.version_info[:3]))}',
         'options': stand_ins.value({
             'enabled_drivers': list(names), **_options()}),
         'denied': sorted(map(stand_ins.text, recorded.denied))}, file)


def _of_tree(answer, recorded):
    """Return the value of a recorded answer for the capture. In a list of
    mounts, omit disks outside the capture, and replace the mount points."""
    if answer.operation != 'mounted_devices' or not answer.value:
        return answer.value
    disks = recorded.tree.get('class', {}).get('block', {})
    numbers = set()
    for name in disks:
        with contextlib.suppress(OSError):
            numbers.add(recorded.read(f'class/block/{name}/dev'))
    return {number: re.sub(r'^mounted at .*', 'mounted at /mnt', use)
            for number, use in answer.value.items() if number in numbers}


def _options():
    found = {}
    for option in conf.CAPTURED_OPTS:
        value = CONF.accel[option.dest]
        if value != option.default and option.dest != 'enabled_drivers':
            found[option.dest] = value
    return found
