# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The command nova-accel, which shows operators the accelerators of a host."""

import importlib.metadata
import importlib.util
import logging
import re
import sys
import warnings

from cliff import app
from cliff import commandmanager
from cliff import help as cliff_help

#: finds the first line of a class's docstring in the source of its module
_DOCSTRING = r'^class {}\b[^"]*"""(.+?)\.?(?:"""|$)'


class Commands(commandmanager.CommandManager):
    """The commands. Only the module of the command that runs is imported.

    cliff's own manager (4.17) imports the modules of all commands. Then each
    command would need as much time to start as all of them together.
    """

    def load_commands(self, namespace):
        self.group_list.append(namespace)
        for entry_point in importlib.metadata.entry_points(group=namespace):
            self.commands[entry_point.name.replace('_', ' ')] = entry_point


def _description(entry_point) -> str:
    """Return the first line of a command's docstring. Read it from the source
    file if possible, because an import of the module takes longer."""
    # cliff before 4.17 passes other objects
    module, _, name = getattr(entry_point, 'value', '').partition(':')
    spec = importlib.util.find_spec(module) if module else None
    if spec is not None and spec.has_location and spec.origin is not None:
        with open(spec.origin, 'rb') as file:
            source = file.read().decode(errors='replace')
        if found := re.search(_DOCSTRING.format(re.escape(name)), source,
                              re.MULTILINE):
            return found[1]
    return (entry_point.load().__doc__ or '').partition('\n')[0].rstrip('.')


class _Sentences(logging.LoggerAdapter):
    """Logs a malformed value of an option as a sentence, as nova-compute does.

    oslo.config checks a value when it is used, and the text of its error
    contains internal objects.
    """

    def process(self, msg, kwargs):
        if isinstance(msg, Exception):
            # imported late: some commands end before they read options
            from nova_accel import conf
            if isinstance(msg, conf.cfg.Error):
                msg = ' '.join(conf.malformed()) or msg
        return msg, kwargs


class NovaAccel(app.App):
    """The command nova-accel; its subcommands are entry points."""

    LOG = _Sentences(app.App.LOG)  # type: ignore[assignment]

    def __init__(self):
        super().__init__(
            description='Show and manage the accelerators of hosts and clouds.',
            version=importlib.metadata.version('nova_accel'),
            command_manager=Commands('nova_accel.commands'),
            deferred_help=True)

    def print_help_if_requested(self):
        """Print the help without importing all commands, unlike cliff (4.17).
        """
        if not self.options.deferred_help:
            return
        self.parser.print_help(self.stdout)
        print('\nCommands:', file=self.stdout)
        for name, entry_point in sorted(self.command_manager):
            print(f'  {name:13}  {_description(entry_point)}',
                  file=self.stdout)
        raise cliff_help.HelpExit()

    def configure_logging(self):
        super().configure_logging()
        if self.options.verbose_level <= self.DEFAULT_VERBOSE_LEVEL:
            # suppresses five lines about its start before each response; the
            # name is that of oslo_log.log.getLogger('oslo_privsep')
            logging.getLogger('oslo.privsep').setLevel(logging.WARNING)
            # Keystone's failure is reported once, by the command
            logging.getLogger('keystoneauth').setLevel(logging.ERROR)


def _do_without_eventlet():
    """Keep oslo.privsep from importing eventlet, if eventlet is installed.

    Commands have no green threads. The import would take half a second, and
    print a warning of nine lines.
    """
    if _privsep_needs_eventlet():
        warnings.filterwarnings('ignore', r'\s*Eventlet is deprecated')
    else:
        # None makes the import raise ImportError (Python's reference, 5.3.1),
        # which oslo.privsep handles
        sys.modules.setdefault('eventlet', None)  # type: ignore


def _privsep_needs_eventlet() -> bool:
    """Return whether oslo.privsep imports eventlet unconditionally, as all
    releases before 3.11 do (Nova 31 comes with 3.6)."""
    release = importlib.metadata.version('oslo.privsep').split('.')
    return [int(part) for part in release[:2]] < [3, 11]


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status.

    :param argv: arguments, in place of those of the process.
    """
    if argv is None:
        _do_without_eventlet()
    return NovaAccel().run(sys.argv[1:] if argv is None else argv)


if __name__ == '__main__':
    sys.exit(main())
