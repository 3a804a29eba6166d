# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The privileged processes of nova_accel.

They run as root and therefore own the sysfs attributes and device nodes that
they write. Hence the main process keeps a single capability: to read a
bitstream in nova's own directory, and to open a VFIO group of another user. A
second process starts only to erase disks, for which the kernel requires
CAP_SYS_ADMIN, and a third one only to find the processes that have a device
open, which requires CAP_SYS_PTRACE (proc(5)). The entry points are in
nova_accel.host.privileged. Drivers of other packages have other contexts.
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

    If it cannot be started, the error states that: a missing file is then
    sudo, not a file of the device.
    """

    def __init__(self, prefix: str, cfg_section: str, pypath: str,
                 capabilities: Iterable[int]):
        """:param prefix: of the modules whose functions run in the process.
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
        """Return a function that runs in the process, with the name of
        ``func``; see the base class."""
        return functools.update_wrapper(super().entrypoint(func), func)

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

processes = Context(
    'nova_accel',
    cfg_section='nova_accel_privileged_processes',
    pypath='nova_accel.privsep.processes',
    capabilities=[capabilities.CAP_DAC_READ_SEARCH,
                  capabilities.CAP_SYS_PTRACE])
