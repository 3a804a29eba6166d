# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel check: find problems that would stop nova_accel on this host."""

import collections
import dataclasses
import logging

from nova_accel.cmd import check_services
from nova_accel.cmd import checks
from nova_accel.cmd import configuration
from nova_accel.cmd import output
from nova_accel import conf
from nova_accel import exception

#: exit statuses, as in nova-status (nova/cmd/status.py)
_STATUS = {check_services.OK: 0, check_services.WARNING: 1,
           check_services.FAILURE: 2}
_NOT_RUN = 255

#: sections of nova.conf that only hosts of one service have; the sample
#: nova.conf of Nova says which service reads them
_SECTIONS = {checks.COMPUTE: {'libvirt'},
             checks.SCHEDULER: {'scheduler', 'filter_scheduler'},
             checks.API: {'api', 'api_database'}}


class Check(output.Table):
    """Show what would stop nova_accel from working on this host.

    Prints a line for each check and for each device, with the finding and the
    remedy. Failures come first. A table ends with the number of lines of each
    result. Run it as the user of nova-compute. The exit status is 0 if all is
    well, 1 with warnings, 2 with failures, 255 if the checks could not run.
    """

    COLUMNS = 'Check', 'Result', 'Found', 'What to do'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--config-file', action='append', metavar='FILE',
            help='configuration of the services; may be repeated (default: '
                 'the files that each service reads)')
        parser.add_argument(
            '--service', action='append', choices=checks.SERVICES,
            help='run the checks for this service; may be repeated '
                 '(default: services for which nova.conf has sections)')
        return parser

    def run(self, parsed_args):
        # warnings are lines of the table; the command does not wait for calls
        # that exceed the time limit
        if not self.app.options.debug:
            logging.disable(logging.CRITICAL)
        try:
            return super().run(parsed_args)
        except exception.ConfigurationError as error:
            self.app.stderr.write(f'{error}\n')
            return _NOT_RUN
        except Exception as error:
            self.app.stderr.write(
                f'The check could not be run ({type(error).__name__}: '
                f'{check_services.short(error)}): report it.\n')
            return _NOT_RUN
        finally:
            logging.disable(logging.NOTSET)

    def take_action(self, parsed_args):
        lines = sorted(_lines(parsed_args),
                       key=lambda line: -_STATUS[line[1].result])
        self.status = max(_STATUS[found.result] for _, found in lines)
        self._counts = collections.Counter(
            found.result for _, found in lines)
        return (self.COLUMNS,
                [(name, *dataclasses.astuple(found))
                 for name, found in lines])

    def produce_output(self, parsed_args, column_names, data):
        """Print the lines. Below a table, print the number of lines of each
        result."""
        status = super().produce_output(parsed_args, column_names, data)
        if parsed_args.formatter == 'table':
            self.app.stdout.write(_summary(self._counts))
        return status


def _summary(counts) -> str:
    """Return the last line of a table: the number of lines of each result."""
    bad = [f'{counts[result]} {result}{"s" * (counts[result] > 1)}'
           for result in (check_services.FAILURE, check_services.WARNING)
           if counts[result]]
    ok = f'{counts[check_services.OK]} ok'
    if bad:
        return f'{", ".join((*bad, ok))}.\n'
    return f'All is well: {ok}.\n'


def _lines(parsed_args) -> list[tuple[str, check_services.Line]]:
    """Run all checks, and return (name of the check, line) for each result.
    The configuration of a service is read before the service is checked."""
    # configuration files -> services that read them
    groups: dict[tuple[str, ...], list[str]] = {}
    for service in checks.SERVICES:
        # the name under which oslo.config finds its files
        configuration.read(parsed_args.config_file, f'nova-{service}')
        if (service in parsed_args.service if parsed_args.service
                else _is_here(service)):
            groups.setdefault(tuple(conf.files()), []).append(service)
    if not groups:
        raise exception.ConfigurationError(
            'nova.conf does not show which services this host runs: give '
            '--service.')
    lines: list[tuple[str, check_services.Line]] = []
    for number, services in enumerate(groups.values()):
        if number:
            # discard the credentials of the previous services' files
            check_services.forget_credentials()
        configuration.read(parsed_args.config_file, f'nova-{services[0]}')
        lines += checks.lines(checks.Host(services))
    # a line that applies to several services appears once
    return list(dict.fromkeys(lines))


def _is_here(service: str) -> bool:
    """Return whether a service runs on this host: the configuration has
    options that no other service reads."""
    there = conf.sections()
    return bool(_SECTIONS[service] & there.keys()) or (
        service == checks.COMPUTE and (
            'compute_driver' in there.get('DEFAULT', {})
            or 'enabled_drivers' in there.get('accel', {})))
