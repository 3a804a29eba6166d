# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The command nova-accel, which shows an operator a host's accelerators."""

import importlib.metadata
import sys

from cliff import app
from cliff import commandmanager


class NovaAccel(app.App):
    """The command nova-accel; its subcommands are entry points."""

    def __init__(self):
        super().__init__(
            description='The accelerators of a compute host.',
            version=importlib.metadata.version('nova_accel'),
            command_manager=commandmanager.CommandManager(
                'nova_accel.commands'),
            deferred_help=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return NovaAccel().run(sys.argv[1:] if argv is None else argv)


if __name__ == '__main__':
    sys.exit(main())
