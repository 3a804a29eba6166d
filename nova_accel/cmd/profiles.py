# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel profile list, show and check: show profiles as nova-api reads
them.
"""

import importlib
import logging
import os

from nova_accel.cmd import configuration
from nova_accel.cmd import output
from nova_accel import conf
from nova_accel import exception
from nova_accel import naming
from nova_accel import profiles
from nova_accel import request

CONF = conf.CONF


class _Reads(configuration.Reader):
    """A command that reads profiles, and reports unusable files on stderr."""

    SERVICE = configuration.API

    def _load(self, path):
        files = profiles.load(path)
        for error in files.bad.values():
            self.status = 1
            self.app.stderr.write(f'{error}\n')
        return [p for found in files.good.values() for p in found]

    def _configured(self, parsed_args):
        configuration.read(parsed_args.config_file, self.SERVICE)
        return self._load(CONF.accel.device_profiles)


class ListProfiles(_Reads, output.Table):
    """Show the device profiles of [accel] device_profiles.

    If a file is malformed, stderr names it, and the exit status is 1.
    """

    COLUMNS = 'Name', 'Groups', 'Description', 'Where'

    def take_action(self, parsed_args):
        return (self.COLUMNS,
                [(p.name, len(p.groups), p.description, p.where)
                 for p in self._configured(parsed_args)])


class ShowProfile(_Reads, output.Table):
    """Show the extra specs that a flavor with a device profile gets.

    nova-api writes them into the flavor of a new server. With --memory on a
    compute host, the exit status is 1 if a guest could not start there, could
    not address each device, or had no port left for another device.
    """

    COLUMNS = 'Extra spec', 'Value'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument('name', metavar='NAME')
        parser.add_argument(
            '--memory', metavar='GIB', type=int,
            help='also check whether a guest with this much memory sees the '
                 'devices of this host, and has ports left; run it on a '
                 'compute host')
        return parser

    def take_action(self, parsed_args):
        if parsed_args.memory is not None:
            # importing it loads Nova, which takes seconds and needs its
            # options first
            importlib.import_module('nova_accel.cmd.checks')
        known = {p.name: p for p in self._configured(parsed_args)}
        if parsed_args.name not in known:
            raise exception.InvalidProfile(
                f'{CONF.accel.device_profiles} has no device profile '
                f'{parsed_args.name!r}: it has '
                f'{", ".join(sorted(known)) or "none"}.')
        specs = profiles.expand(
            {request.PROFILE_KEY: parsed_args.name}, known.__getitem__)
        if parsed_args.memory is not None:
            self._look(parsed_args, specs)
        return self.COLUMNS, sorted(specs.items())

    def _look(self, parsed_args, specs):
        """Write the problems of a guest with --memory to stderr."""
        from nova_accel.cmd import checks
        configuration.read(parsed_args.config_file, configuration.COMPUTE)
        # drivers would log devices that are not offered
        logging.disable(logging.CRITICAL)
        try:
            host = checks.Host([checks.COMPUTE])
        finally:
            logging.disable(logging.NOTSET)
        guests = host.guests
        if host.problem or not guests.offers(specs):
            raise exception.DeviceUnavailable(
                host.problem or f'This host does not have all that '
                f'{parsed_args.name!r} asks for: run it on one that has.')
        for why, remedy in guests.problems(specs, parsed_args.memory << 30):
            self.status = 1
            self.app.stderr.write(
                f'A guest with {parsed_args.memory} GiB {why}: {remedy}.\n')


class CheckProfiles(_Reads):
    """Check files of device profiles with the reader of nova-api.

    stderr names each malformed file, with the line and the remedy. The exit
    status is 1 if a file is malformed, or if another file of [accel]
    device_profiles has a profile of the same name. A warning names each
    profile that requests a function without a region type; it does not change
    the exit status.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            'files', metavar='FILE', nargs='*',
            help='file or directory (default: [accel] device_profiles)')
        return parser

    def take_action(self, parsed_args):
        configuration.read(parsed_args.config_file, self.SERVICE)
        for path in parsed_args.files or [CONF.accel.device_profiles]:
            found = self._load(os.path.abspath(path))
            for sentence in _taken(found):
                self.status = 1
                self.app.stderr.write(f'{sentence}\n')
            for sentence in _without_shell(found):
                self.app.stderr.write(f'{sentence}\n')
            self.app.stdout.write(
                f'{path}: {len(found)} profiles can be used\n')


def _without_shell(found):
    """Yield a warning for each profile that requests a function without the
    type of the region, because regions may have several types."""
    for profile in found:
        specs = profiles.expand({request.PROFILE_KEY: profile.name},
                                lambda name: profile)
        open_ = [wanted for wanted in request.parse(specs)
                 if wanted.programs
                 and not naming.region_type_of(wanted.required)
                 and not any(map(naming.is_content, wanted.required))]
        if open_:
            yield (f'WARNING: {profile.where}: {len(open_)} of the groups of '
                   f'{profile.name!r} request a function without the trait of '
                   f'a region type; if regions have several types, a server '
                   f'may get one without an image for it: add '
                   f'trait:CUSTOM_FPGA_<VENDOR>_REGION_<TYPE>: required.')


def _taken(found):
    """Yield a sentence for each profile whose name another file already uses.
    A file of the same name does not count, because it will be replaced."""
    for path, there in profiles.load(CONF.accel.device_profiles).good.items():
        where = {p.name: p.where for p in there}
        for profile in found:
            file = profile.where.rpartition(', line ')[0]
            if (profile.name in where
                    and os.path.basename(file) != os.path.basename(path)):
                yield (f'{profile.where}: the profile name {profile.name!r} '
                       f'is taken by {where[profile.name]}: rename one of the '
                       f'two.')
