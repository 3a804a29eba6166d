# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The command openstack, with the clients that are installed."""

import contextlib
import io

from openstackclient import shell
from osc_lib import clientmanager


def run(*arguments: str) -> tuple[int, str, str]:
    """Run a command in this process.

    :returns: (status, what it writes to stdout, what to stderr).
    """
    for one in vars(clientmanager.ClientManager).values():
        if isinstance(one, clientmanager.ClientCache):
            # it has the endpoints of the first command of a process
            one._handle = None
    with (contextlib.redirect_stdout(io.StringIO()) as stdout,
          contextlib.redirect_stderr(io.StringIO()) as stderr):
        status = shell.OpenStackShell().run([*arguments])
    return status, stdout.getvalue(), stderr.getvalue()
