# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The privileged processes of nova_accel.

The processes run as root, and hence own the sysfs attributes and device nodes
that they write. Therefore the main process of the three needs only one
capability: to read a bitstream in nova's own directory, and to open a VFIO
group of another user. The second process starts only when disks are erased,
for which the kernel requires CAP_SYS_ADMIN. The third one starts only to find
the processes that have a device open, which requires CAP_SYS_PTRACE (proc(5)).
The entry points are in nova_accel.host.privileged. Drivers of other packages
have other contexts.
"""

from collections.abc import Iterable
import errno
import functools

from oslo_config import cfg
from oslo_privsep import capabilities
from oslo_privsep import daemon
from oslo_privsep import priv_context

#: calls that a process runs concurrently; more than the cards of any host. A
#: call that hangs in the kernel occupies a thread for good. Threads are started
#: on demand
THREADS = 128


class Context(priv_context.PrivContext):
    """A privileged process, of nova_accel or of another package's driver.

    If the process cannot be started, start() raises an error that states this.
    Otherwise a missing sudo would look like a missing file of the device.
    """

    def __init__(self, prefix: str, cfg_section: str, pypath: str,
                 capabilities: Iterable[int]):
        """:param prefix: prefix of the names of modules whose functions run in
            the process.
        :param cfg_section: section of nova.conf with options of the process.
        :param pypath: import path of this object, for the privileged process.
        :param capabilities: the capabilities that the process keeps.
        """
        self.needs = tuple(capabilities)
        super().__init__(prefix, cfg_section=cfg_section, pypath=pypath,
                         capabilities=self.needs)
        # the default of oslo.privsep is the number of processors: as many
        # hanging cards would block all other calls
        cfg.CONF.set_default('thread_pool_size', THREADS, group=cfg_section)

    def entrypoint(self, func):
        """Decorate a function to run in the privileged process. The result
        keeps the name of ``func``; see the base class."""
        return functools.update_wrapper(super().entrypoint(func), func)

    def start(self, method=priv_context.Method.ROOTWRAP):
        """Start the process. The errno of an OSError is always ENOEXEC."""
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

processes = Context(
    'nova_accel',
    cfg_section='nova_accel_privileged_processes',
    pypath='nova_accel.privsep.processes',
    capabilities=[capabilities.CAP_DAC_READ_SEARCH,
                  capabilities.CAP_SYS_PTRACE])
