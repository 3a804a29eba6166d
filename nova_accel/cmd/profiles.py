# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel profile list, show and check: what nova-api makes of profiles."""

import os

from cliff import lister

from nova_accel.cmd import configuration
from nova_accel import conf
from nova_accel import exception
from nova_accel import profiles
from nova_accel import request

CONF = conf.CONF


class _Reads(configuration.Reader):
    """Names the files that cannot be used on stderr."""

    SERVICE = configuration.API

    def _load(self, path):
        files = profiles.load(path)
        for error in files.bad.values():
            self.app.stderr.write(f'{error}\n')
        self.left_out = self.left_out or bool(files.bad)
        return [p for found in files.good.values() for p in found]

    def _configured(self, parsed_args):
        configuration.read(parsed_args.config_file, self.SERVICE)
        return self._load(CONF.accel.device_profiles)


class ListProfiles(_Reads, lister.Lister):
    """Show the device profiles of [accel] device_profiles.

    A file that is malformed is named on stderr, and the exit status is 1.
    """

    def take_action(self, parsed_args):
        return (('Name', 'Groups', 'Description', 'Where'),
                [(p.name, len(p.groups), p.description, p.where)
                 for p in self._configured(parsed_args)])


class ShowProfile(_Reads, lister.Lister):
    """Show the extra specs that a flavor with a device profile gets.

    They are what nova-api writes into the flavor of a new server.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument('name', metavar='NAME')
        return parser

    def take_action(self, parsed_args):
        known = {p.name: p for p in self._configured(parsed_args)}
        if parsed_args.name not in known:
            raise exception.InvalidProfile(
                f'{CONF.accel.device_profiles} has no device profile '
                f'{parsed_args.name!r}: it has '
                f'{", ".join(sorted(known)) or "none"}.')
        specs = profiles.expand(
            {request.PROFILE_KEY: parsed_args.name}, known.__getitem__)
        return ('Extra spec', 'Value'), sorted(specs.items())


class CheckProfiles(_Reads):
    """Check files of device profiles, as nova-api would read them.

    Each malformed file is named on stderr with the line and what to do. The
    exit status is 1 when there is one.
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
            self.app.stdout.write(
                f'{path}: {len(found)} profiles can be used\n')
