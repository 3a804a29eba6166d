# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel: the accelerators of a host, for its operator."""

import importlib.metadata
import sys

from cliff import app
from cliff import commandmanager


class NovaAccel(app.App):

    def __init__(self):
        super().__init__(
            description='The accelerators of a compute host.',
            version=importlib.metadata.version('nova_accel'),
            command_manager=commandmanager.CommandManager(
                'nova_accel.commands'),
            deferred_help=True)


def main(argv=None):
    """Entry point; returns the exit status."""
    return NovaAccel().run(sys.argv[1:] if argv is None else argv)


if __name__ == '__main__':
    sys.exit(main())
