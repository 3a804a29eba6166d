# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel check: what would stop nova_accel from working on this host."""

import dataclasses
import logging

from cliff import lister

from nova_accel.cmd import checks
from nova_accel.cmd import configuration
from nova_accel import conf
from nova_accel import exception

#: exit status; those of nova-status (nova/cmd/status.py)
_STATUS = {checks.OK: 0, checks.WARNING: 1, checks.FAILURE: 2}
_UNEXPECTED = 255

#: sections of nova.conf that only hosts of a service have; Nova's own sample
#: of nova.conf says which service reads them
_SECTIONS = {checks.COMPUTE: {'libvirt'},
             checks.SCHEDULER: {'scheduler', 'filter_scheduler'},
             checks.API: {'api', 'api_database'}}


class Check(lister.Lister):
    """Show what would stop nova_accel from working on this host.

    One line for each check and for each device: what was found and what to
    do. Run it as the user of nova-compute. The exit status is 0 when all is
    well, 1 with warnings, 2 with failures, 255 when it could not be run.
    """

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        configuration.add_argument(parser)
        parser.add_argument(
            '--service', action='append', choices=checks.SERVICES,
            help='check what concerns this service; may be repeated '
                 '(default: those for which nova.conf has sections)')
        return parser

    def run(self, parsed_args):
        self._status = 0
        # what would be logged is shown, and what ends late is not waited for
        logging.disable(logging.CRITICAL)
        try:
            super().run(parsed_args)
        except exception.ConfigurationError as error:
            self.app.stderr.write(f'{error}\n')
            return _STATUS[checks.FAILURE]
        except Exception as error:
            self.app.stderr.write(
                f'The check could not be run ({type(error).__name__}: '
                f'{checks.short(error)}): report it, with nova.conf.\n')
            return _UNEXPECTED
        finally:
            logging.disable(logging.NOTSET)
        return self._status

    def take_action(self, parsed_args):
        configuration.read(parsed_args.config_file)
        services = parsed_args.service or _services()
        lines = list(checks.lines(checks.Host(services)))
        self._status = max(_STATUS[line.result] for _, line in lines)
        return (('Check', 'Result', 'Found', 'What to do'),
                [(name, *dataclasses.astuple(line)) for name, line in lines])


def _services() -> list[str]:
    """Those for which nova.conf has something.

    :raises ConfigurationError: it does not tell.
    """
    there = conf.sections()
    found = [service for service, names in _SECTIONS.items()
             if names & there.keys()]
    if checks.COMPUTE not in found and (
            'compute_driver' in there.get('DEFAULT', {})
            or 'enabled_drivers' in there.get('accel', {})):
        found.append(checks.COMPUTE)
    if not found:
        raise exception.ConfigurationError(
            'nova.conf does not say which services this host runs: give '
            '--service.')
    return found
