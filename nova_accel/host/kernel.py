# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Access this machine's kernel, for drivers.

Drivers reach the host only through the class Kernel. Hence a simulated host
(nova_accel.sim) can replace it. Reads run in the calling process, and
operations in the privileged process. Both raise OSError with the kernel's
errno.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import errno
import functools
import os
import re
import socket
import stat
import threading
import typing

from nova_accel.host import devlink
from nova_accel.host import firmware
from nova_accel.host import limited
from nova_accel.host import nvidia
from nova_accel.host import nvme_admin
from nova_accel.host import pci
from nova_accel.host import privileged
from nova_accel.host import usage
from nova_accel.host import vfio

#: include/uapi/linux/netlink.h
_NETLINK_KOBJECT_UEVENT = 15
#: multicast group of the kernel's messages; udev repeats them in another one
_KERNEL_GROUP = 1
#: keys of messages about the health of a device, by subsystem. Sources, of
#: Linux: pci_uevent_ers() in pci/pci-driver.c (4.15), "Device Wedging" in
#: drm-uapi.rst (6.15), nvme_aen_uevent() in nvme/host/core.c (4.16)
_ON_HEALTH = {'pci': 'ERROR_EVENT', 'drm': 'WEDGED', 'nvme': 'NVME_AEN'}
#: bytes of an attribute of sysfs
_PAGE = 4096


class Change(typing.NamedTuple):
    """A message of the kernel about a device."""

    #: '' if messages were lost
    subsystem: str
    #: PCI address of the device, or of the device that it belongs to
    function: str = ''
    #: the text about its health, 'ERROR_EVENT=FAILED_RECOVERY'; '' if the
    #: device was added or removed
    said: str = ''


class Kernel:

    """The kernel of this machine."""

    def __init__(self, root: str = '/sys', proc: str = '/proc'):
        """:param root: directory of sysfs, or of a recorded tree.
        :param proc: directory of procfs."""
        self.root, self._proc = root, proc

    def _at(self, path: str) -> str:
        return os.path.join(self.root, path)

    # Reads; every path is relative to /sys

    @limited.blocking
    def read(self, path: str) -> str:
        """Return an attribute in sysfs, without the newline at its end."""
        return _read(self._at(path), None)

    @limited.blocking
    def read_bytes(self, path: str, size: int) -> bytes:
        """Return at most size bytes of a binary attribute."""
        return _read_bytes(self._at(path), None, size)

    @limited.blocking
    def read_some(self, path: str, names: Iterable[str]) -> dict[str, str]:
        """Return the readable attributes of a directory, by name.

        This is faster than read() of each name, above all under eventlet.

        :raises OSError: the directory does not exist.
        """
        found = {}
        directory = os.open(self._at(path), os.O_PATH | os.O_DIRECTORY)
        try:
            for name in names:
                # contextlib.suppress() would cost a fifth more
                try:
                    found[name] = _read(name, directory)
                except OSError:
                    continue
        finally:
            os.close(directory)
        return found

    @limited.blocking
    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(self._at(path)))

    @limited.blocking
    def exists(self, path: str) -> bool:
        return os.path.exists(self._at(path))

    @limited.blocking
    def readlink(self, path: str) -> str:
        """Return the target of a link as written, relative or absolute."""
        return os.readlink(self._at(path))

    def changes(self, over: threading.Event) -> Iterator[Change | None]:
        """Yield the kernel's messages about devices that are added, removed or
        unhealthy.

        Yield None after each second without a message, and Change('') if
        messages were lost. The iteration ends within a second after ``over``
        is set. Source: kobject_uevent of Linux, which needs no privileges.

        :raises OSError: the kernel sends no events, for example inside a
            container.
        """
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM,
                           _NETLINK_KOBJECT_UEVENT) as events:
            events.bind((0, _KERNEL_GROUP))
            events.settimeout(1)
            while not over.is_set():
                try:
                    message = events.recv(1 << 16)
                except TimeoutError:
                    yield None
                    continue
                except OSError as error:
                    if error.errno != errno.ENOBUFS:
                        raise
                    yield Change('')
                    continue
                change = change_of(message)
                if change:
                    yield change

    @limited.blocking
    def mounted_devices(self) -> dict[str, str]:
        """Return the block devices that this machine uses, with the kind of
        use.

        The uses are swap, and mounts of this process and of the host, which
        differ if nova-compute runs in a container. Source: proc(5).

        :returns: '<major>:<minor>' -> 'mounted at /srv' or 'used as swap'.
        """
        found: dict[str, str] = {}
        lines = self._lines('self/mountinfo')
        with contextlib.suppress(OSError):
            # a mount option of /proc can hide it
            lines += self._lines('1/mountinfo')
        for line in lines:
            fields, _, source = line.partition(' - ')
            number, _, where = fields.split()[2:5]
            if number.startswith('0:'):
                # btrfs and overlays have numbers of their own
                number = _number(source.split()[1])
            if number:
                found.setdefault(number, f'mounted at {where}')
        with contextlib.suppress(FileNotFoundError):
            # a kernel without swap has no such file
            for line in self._lines('swaps')[1:]:
                number = _number(line.split()[0])
                if number:
                    found.setdefault(number, 'used as swap')
        return found

    def _lines(self, path):
        with open(os.path.join(self._proc, path), encoding='utf-8',
                  errors='replace') as file:
            return file.read().splitlines()

    def physical_address_bits(self) -> int | None:
        """Return the number of bits of a physical address of this machine, or
        None if the kernel does not show it.

        Source: 'address sizes' of /proc/cpuinfo, x86 only.

        :raises OSError: procfs cannot be read.
        """
        for line in self._lines('cpuinfo'):
            if found := re.match(r'address sizes\s*: (\d+) bits physical',
                                 line):
                return int(found[1])
        return None

    @limited.blocking
    def vfio_module(self, function: str) -> str | None:
        """Return the module of the VFIO driver to which libvirt binds a PCI
        function, for example 'mlx5_vfio_pci'.

        Source: modules.alias, as libvirt reads it.

        :returns: None if no module supports the function.
        :raises OSError: the modules of the kernel cannot be read.
        """
        path = f'/lib/modules/{os.uname().release}/modules.alias'
        return vfio.best_variant(
            _vfio_aliases(path, os.stat(path).st_mtime_ns),
            self.read(pci.path(function, 'modalias')))

    @limited.blocking
    def has_iova_bitmap(self) -> bool:
        """Return whether the kernel can report to QEMU which memory a device
        has written.

        VFIO needs functions for this that the kernel lacks without
        CONFIG_IOMMUFD_DRIVER (include/linux/iova_bitmap.h of Linux). QEMU then
        begins a migration nevertheless, and the migration fails.
        """
        # a module can add the function
        return _has_iova_bitmap(
            os.path.join(self._proc, 'kallsyms'),
            tuple(sorted(os.listdir(self._at('module')))))

    # Operations, see nova_accel.host.privileged; functions are given by their
    # PCI addresses

    assign_dfl_port = staticmethod(privileged.assign_dfl_port)
    check_disks = staticmethod(privileged.check_disks)
    clear_dfl_port_errors = staticmethod(privileged.clear_dfl_port_errors)
    close_mailbox = staticmethod(privileged.close_mailbox)
    create_mdev = staticmethod(privileged.create_mdev)
    exit_nvme_sanitize_failure = staticmethod(
        privileged.exit_nvme_sanitize_failure)
    format_nvme_vf = staticmethod(privileged.format_nvme_vf)
    is_group_open = staticmethod(privileged.is_group_open)
    probe = staticmethod(privileged.probe)
    program_dfl_port = staticmethod(privileged.program_dfl_port)
    program_xclbin = staticmethod(privileged.program_xclbin)
    read_acs = staticmethod(privileged.read_acs)
    read_afu = staticmethod(privileged.read_afu)
    read_device_serial = staticmethod(privileged.read_device_serial)
    read_qat_heartbeat = staticmethod(privileged.read_qat_heartbeat)
    release_dfl_port = staticmethod(privileged.release_dfl_port)
    remove_mdev = staticmethod(privileged.remove_mdev)
    reset_dfl_port = staticmethod(privileged.reset_dfl_port)
    reset_function = staticmethod(privileged.reset_function)
    reset_nvme = staticmethod(privileged.reset_nvme)
    reset_nvme_vf = staticmethod(privileged.reset_nvme_vf)
    set_numvfs = staticmethod(privileged.set_numvfs)
    start_nvme_sanitize = staticmethod(privileged.start_nvme_sanitize)
    unbind = staticmethod(privileged.unbind)
    withdraw_xclbin = staticmethod(privileged.withdraw_xclbin)
    write_timecard = staticmethod(privileged.write_timecard)

    def call(self, operation: Callable, function: str, *args):
        """Call a privileged operation that a driver's own package defines.

        :param operation: a privileged function, whose first parameter is the
            PCI address of a function. On a simulated host, the simulated card
            replaces the operation (sim.card.Card.OPERATIONS).
        :param args: further arguments of the operation.
        :returns: the result of the operation.
        :raises OSError: as the operation does.
        """
        return operation(function, *args)

    def rebind(self, function: str, driver: str,
               by: Callable[[str, str], None] = privileged.rebind) -> None:
        """Unbind a function from its driver, and bind it to another one.

        :param by: the privileged function that does it. The default accepts
            only privileged.DRIVERS; a driver's own package can pass another
            function.
        """
        by(function, driver)

    def processes(self, functions: Iterable[str],
                  ) -> list[usage.Process]:
        """Return the processes that have functions open: their device nodes,
        or nodes of their VFIO groups.

        Takes some milliseconds for each hundred processes.

        :raises OSError: the processes cannot be read, for example in a
            container without CAP_SYS_PTRACE.
        """
        return [usage.Process(*found)
                for found in privileged.processes(list(functions))]

    @limited.blocking
    def read_firmware(self, function: str) -> dict[str, str]:
        """Return the versions that devlink shows for a function.

        :returns: name -> version, for example {'fw': '32771'}; empty if its
            driver reports none.
        :raises OSError: the kernel does not answer.
        """
        return devlink.versions(function)

    def write_attribute(self, function: str, attribute: str, value: str,
                        by: Callable[[str, str, str], None]
                        = privileged.write_attribute) -> None:
        """Write an attribute of a PCI function.

        :param by: the privileged function that does it. The default accepts
            only privileged.WRITABLE; a driver's own package can pass another
            function.
        """
        by(function, attribute, value)

    def offer_xclbin(self, function: str, path: str, size: int,
                     function_uuid: str, interface: str, layout: bytes,
                     ) -> None:
        """Place the xclbin file that the guest of an XRT card may load, and
        remove the card's earlier file; see nova_accel.host.firmware.

        :param function: PCI address of the management function.
        :param path: see program_xclbin().
        :param size: see program_xclbin().
        :param function_uuid: UUID of the xclbin file.
        :param interface: the interface UUID, spelled as in the card's shell.
        :param layout: the IP_LAYOUT of the file, at most a page.
        :raises OSError: the file cannot be written.
        :raises ValueError: a name is malformed.
        """
        privileged.offer_xclbin(
            function, path, size,
            firmware.file_name(function_uuid, interface), layout)

    def offers_xclbin(self, function_uuid: str, interface: str) -> bool:
        """Return whether guests can load a function: whether its file is
        there, from nova-compute or the operator. See offer_xclbin()."""
        return firmware.is_offered(
            firmware.XCLBINS, firmware.file_name(function_uuid, interface))

    def xclbin_layout(self, function: str) -> bytes | None:
        """Return the layout that offer_xclbin() stored for a card, or None if
        no file is placed for the card."""
        return firmware.layout(firmware.XCLBINS, function)

    def read_signatures(self, function: str) -> list[tuple[str, str]]:
        """Return the signatures on the disks of a function.

        wipefs(8) finds file systems, partition tables, swap, and members of
        RAID, LVM, ZFS, LUKS and Ceph. If a disk has none of these, but samples
        of it contain data, its type is nvme_admin.UNSIGNED.

        :returns: (name of the disk, type), for example ('nvme0n1', 'ext4').
            Blank disks are omitted.
        :raises OSError: ENOENT without wipefs, EIO if it fails, ETIMEDOUT.
        """
        return [(disk, kind) for disk, kind
                in privileged.read_signatures(function)]

    def reset_gpu(self, function: str, by: str, family: str,
                  milliseconds: int) -> nvidia.Watched:
        """Reset the bus of a GPU of NVIDIA, and read the words of BAR0 that
        show when the GPU has booted and cleared its memory.

        :param by: 'VFIO' for a GPU that is bound to vfio-pci. 'sysfs' for a
            GPU that is bound to no driver; its reset_method must be bus.
        :param family: a key of nvidia.REGISTERS.
        :param milliseconds: limit of reset and readings together.
        :raises OSError: the reset or a reading failed: EBUSY while a process
            has the GPU open, EPERM if the kernel is locked down, ERANGE if
            BAR0 is too small.
        """
        return nvidia.Watched(*(
            privileged.reset_gpu_by_vfio if by == 'VFIO'
            else privileged.reset_gpu_by_sysfs)(
                function, family, milliseconds))

    def read_nvme(self, function: str) -> nvme_admin.Controller:
        """Return what an NVMe controller reports.

        :raises OSError: ENODEV if the host's driver has no controller, EIO if
            the controller refuses.
        """
        return nvme_admin.Controller.from_tuple(privileged.read_nvme(function))

    def read_nvme_health(self, function: str) -> nvme_admin.HealthLog:
        """Return the health log of an NVMe controller.

        :raises OSError: see read_nvme().
        """
        return nvme_admin.HealthLog(*privileged.read_nvme_health(function))

    def read_nvme_sanitize(self, function: str) -> nvme_admin.SanitizeStatus:
        """Return the state of the last sanitize operation.

        :raises OSError: see read_nvme().
        """
        return nvme_admin.SanitizeStatus(
            *privileged.read_nvme_sanitize(function))

    def format_nvme(self, function: str,
                    formats: Sequence[nvme_admin.Namespace] = ()) -> None:
        """Erase all namespaces of an NVMe controller, which may take an hour.

        Uses Format NVM with a cryptographic erase if the controller supports
        it, otherwise with an erase of the user data.

        :param formats: the block format of each namespace afterwards. By
            default each namespace keeps its format.
        :raises OSError: EBUSY if a namespace is held or not attached, ENODEV
            if the host's driver has no controller, EOPNOTSUPP if the
            controller has no Format NVM, EIO if the controller refuses.
        """
        privileged.format_nvme(function, [str(n) for n in formats])

    def restore_nvme_namespaces(
            self, function: str, namespaces: Sequence[nvme_admin.Namespace],
            ) -> None:
        """Replace all namespaces of a controller by new ones, and attach
        these.

        :param namespaces: if empty, create one of the full capacity.
        :raises OSError: EOPNOTSUPP if the controller has no Namespace
            Management or no such block format, otherwise as format_nvme().
        """
        privileged.restore_nvme_namespaces(function,
                                           [str(n) for n in namespaces])

    def read_nvme_vfs(self, pf: str) -> list[nvme_admin.Secondary]:
        """Return the secondary controllers of the VFs of an NVMe controller.

        :raises OSError: EOPNOTSUPP when the controller has no Virtualization
            Management, otherwise as read_nvme().
        """
        return [nvme_admin.Secondary.from_tuple(found)
                for found in privileged.read_nvme_vfs(pf)]


def _read(path: str, directory: int | None) -> str:
    """Return an attribute. This takes a third of the system calls of open().

    :param directory: file descriptor of the directory that the path is
        relative to, or None if the path is absolute.
    """
    return _read_bytes(path, directory, _PAGE).decode(
        errors='replace').removesuffix('\n')


def _read_bytes(path, directory, size):
    file = os.open(path, os.O_RDONLY, dir_fd=directory)
    try:
        return os.read(file, size)
    finally:
        os.close(file)


def change_of(message: bytes) -> Change | None:
    """Return the Change that a message of the kernel (kobject_uevent) reports,
    or None for messages that nova-compute does not need."""
    fields = dict(
        line.split('=', 1) for line in message.decode(
            errors='replace').split('\0') if '=' in line)
    subsystem, action = fields.get('SUBSYSTEM', ''), fields.get('ACTION')
    functions = list(filter(
        pci.ADDRESS.fullmatch, fields.get('DEVPATH', '').split('/')))
    function = functions[-1] if functions else ''
    if action in ('add', 'remove'):
        return Change(subsystem, function)
    key = _ON_HEALTH.get(subsystem, '')
    if action == 'change' and function and fields.get(key):
        return Change(subsystem, function, f'{key}={fields[key]}')
    return None


@functools.lru_cache(maxsize=1)
def _vfio_aliases(path, changed):
    """Return the lines of modules.alias for VFIO drivers. The result is
    cached, because the file has some ten thousand lines.

    :param changed: time of the file's last change. Another value invalidates
        the cache.
    """
    with open(path, encoding='ascii', errors='replace') as file:
        return tuple(line for line in file
                     if line.startswith('alias vfio_pci:'))


@functools.lru_cache(maxsize=1)
def _has_iova_bitmap(path, modules):
    """Return Kernel.has_iova_bitmap() from the list of kernel symbols. The
    result is cached, because the list has some 200,000 lines.

    :param modules: names of loaded modules, as a part of the cache's key.
    """
    with open(path, 'rb') as file:
        return any(b' iova_bitmap_for_each' in line for line in file)


def _number(path):
    """Return '<major>:<minor>' of a block device node, or None for any other
    path."""
    try:
        node = os.stat(path) if os.path.isabs(path) else None
    except OSError:
        node = None
    if node is None or not stat.S_ISBLK(node.st_mode):
        return None
    return f'{os.major(node.st_rdev)}:{os.minor(node.st_rdev)}'
