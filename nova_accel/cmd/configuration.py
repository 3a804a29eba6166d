# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The configuration of Nova's services, read by the commands."""

from collections.abc import Iterable
import shlex

from oslo_config import cfg

from nova_accel.cmd import output
from nova_accel import conf
from nova_accel import exception

CONF = conf.CONF

#: services, by the names under which oslo.config finds their files
COMPUTE, API = 'nova-compute', 'nova-api'


class Reader(output.Status):
    """A command with --config-file.

    The exit status is 1 if the command could not use a part of its input.
    """

    #: service whose configuration it reads
    SERVICE = COMPUTE

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        add_argument(parser, self.SERVICE)
        return parser


def add_argument(parser, service: str = COMPUTE) -> None:
    """Give a command the argument --config-file."""
    parser.add_argument(
        '--config-file', action='append', metavar='FILE',
        help=f'configuration of {service}; may be repeated (default: the '
             f'files that {service} reads)')


def read(files: Iterable[str] | None, service: str = COMPUTE) -> None:
    """Read the configuration as a service does.

    :param files: files to read in place of the service's own: nova.conf, and
        files with the name of the service, such as nova-compute.conf.
    :raises ConfigurationError: the configuration cannot be read.
    """
    conf.register_novas()
    arguments = [argument for file in files or ()
                 for argument in ('--config-file', file)]
    try:
        CONF(arguments, project='nova', prog=service)
    except cfg.ConfigFilesPermissionDeniedError as error:
        raise exception.ConfigurationError(
            f'The configuration cannot be read ({error}: Permission denied): '
            f'run the command as the user of Nova.') from error
    except (cfg.Error, OSError, UnicodeDecodeError) as error:
        raise exception.ConfigurationError(
            f'The configuration cannot be read ({error}): correct it or give '
            f'--config-file.') from error


def add_driver_argument(parser) -> None:
    """Give a command the argument --driver."""
    parser.add_argument(
        '--driver', action='append', metavar='NAME', dest='drivers',
        help='use this driver, in place of [accel] enabled_drivers; may be '
             'repeated')


def use_privileges() -> None:
    """Start privileged processes as nova-compute does, by the command of
    nova.utils.get_root_helper(). sudo -n never asks for a password."""
    # imported late: most commands do not need it
    from oslo_privsep import priv_context
    for option, group in (
            (cfg.StrOpt('rootwrap_config',
                        default='/etc/nova/rootwrap.conf'), None),
            (cfg.BoolOpt('disable_rootwrap', default=False), 'workarounds')):
        try:
            CONF.register_opt(option, group)
        except cfg.DuplicateOptError:
            # Nova has registered its own
            pass
    helper = 'sudo -n' if CONF.workarounds.disable_rootwrap else (
        f'sudo -n nova-rootwrap {CONF.rootwrap_config}')
    priv_context.init(root_helper=shlex.split(helper))


def drivers(parsed_args) -> list[str]:
    """Return the names of the drivers to use.

    :raises ConfigurationError: no driver is named.
    """
    names = parsed_args.drivers or CONF.accel.enabled_drivers
    if not names:
        raise exception.ConfigurationError(
            'No driver is enabled: set [accel] enabled_drivers or give '
            '--driver.')
    return names
