# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The privileged processes of nova_accel.

They run as root, which owns every sysfs attribute and device node that they
write. One process therefore keeps a single capability, to read a bitstream in
nova's own directory. The other starts only to erase disks, for which the
kernel demands CAP_SYS_ADMIN. The entry points are in
nova_accel.host.privileged.
"""

import errno

from oslo_privsep import capabilities
from oslo_privsep import daemon
from oslo_privsep import priv_context


class Context(priv_context.PrivContext):
    """One of the processes, which says itself that it cannot be started: the
    missing file would be sudo, and not one of the device."""

    def start(self, method=priv_context.Method.ROOTWRAP):
        """:raises OSError: ENOEXEC, with the reason."""
        try:
            super().start(method)
        except (OSError, daemon.FailedToDropPrivileges) as error:
            raise OSError(
                errno.ENOEXEC,
                f'the privileged process of [{self.cfg_section}] does not '
                f'start, {error}') from error


ctx = Context(
    'nova_accel',
    cfg_section='nova_accel_privileged',
    pypath='nova_accel.privsep.ctx',
    capabilities=[capabilities.CAP_DAC_READ_SEARCH])

disks = Context(
    'nova_accel',
    cfg_section='nova_accel_privileged_disks',
    pypath='nova_accel.privsep.disks',
    capabilities=[capabilities.CAP_SYS_ADMIN])
