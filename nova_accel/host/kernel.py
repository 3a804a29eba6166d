# Licensed under the Apache License, Version 2.0. See LICENSE.
"""This machine's kernel, as the drivers see it.

Drivers reach the host through the class Kernel only, which lets a simulated
host (nova_accel.sim) replace it. Reads run in this process, operations in the
privileged one. Both raise OSError as the kernel does.
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
from nova_accel.host import nvme_admin
from nova_accel.host import pci
from nova_accel.host import privileged
from nova_accel.host import processes as host_processes
from nova_accel.host import vfio

#: include/uapi/linux/netlink.h
_NETLINK_KOBJECT_UEVENT = 15
#: multicast group of the kernel's messages; udev repeats them in another one
_KERNEL_GROUP = 1
#: what a message says of the health of a device, by subsystem. Sources, of
#: Linux: pci_uevent_ers() in pci/pci-driver.c (4.15), "Device Wedging" in
#: drm-uapi.rst (6.15), nvme_aen_uevent() in nvme/host/core.c (4.16)
_ON_HEALTH = {'pci': 'ERROR_EVENT', 'drm': 'WEDGED', 'nvme': 'NVME_AEN'}
#: bytes of an attribute of sysfs
_PAGE = 4096


class Change(typing.NamedTuple):
    """A message of the kernel about a device."""

    #: '' when messages were lost
    subsystem: str
    #: PCI address of the device, or of the one that it is a part of
    function: str = ''
    #: what it says of the health of the device, 'ERROR_EVENT=FAILED_RECOVERY';
    #: '' of a device that is added or removed
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
        """Return an attribute without the newline at its end."""
        return _read(self._at(path), None)

    @limited.blocking
    def read_bytes(self, path: str, size: int) -> bytes:
        """Return at most size bytes of a binary attribute."""
        with open(self._at(path), 'rb', buffering=0) as file:
            return file.read(size)

    @limited.blocking
    def read_some(self, path: str, names: Iterable[str]) -> dict[str, str]:
        """Return the readable attributes of a directory, by name.

        Faster than read() for each, above all under eventlet.

        :raises OSError: the directory does not exist.
        """
        found = {}
        directory = os.open(self._at(path), os.O_PATH | os.O_DIRECTORY)
        try:
            for name in names:
                with contextlib.suppress(OSError):
                    found[name] = _read(name, directory)
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
        """Yield what the kernel says of devices that are added or removed, or
        that are not well.

        Ends within a second after ``over`` is set. Yields None after a second
        without a message. Source: kobject_uevent of Linux, which needs no
        privileges.

        :raises OSError: the kernel sends no events, as inside a container.
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
        """Return the block devices in use and their uses.

        Covers swap and the mounts of this process and of the host, which
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
        """Return how many bits a physical address of this machine has.

        Source: 'address sizes' of /proc/cpuinfo, x86 only.

        :returns: None where the kernel does not tell.
        :raises OSError: procfs cannot be read.
        """
        for line in self._lines('cpuinfo'):
            if found := re.match(r'address sizes\s*: (\d+) bits physical',
                                 line):
                return int(found[1])
        return None

    @limited.blocking
    def vfio_module(self, function: str) -> str | None:
        """Return the module of the VFIO driver that libvirt binds a PCI
        function to, for example 'mlx5_vfio_pci'.

        Source: modules.alias, as libvirt reads it.

        :returns: None where no module is for it.
        :raises OSError: the modules of the kernel cannot be read.
        """
        path = f'/lib/modules/{os.uname().release}/modules.alias'
        return vfio.best_variant(
            _vfio_aliases(path, os.stat(path).st_mtime_ns),
            self.read(pci.path(function, 'modalias')))

    @limited.blocking
    def has_iova_bitmap(self) -> bool:
        """Return whether the kernel can report to QEMU what a device has
        written.

        VFIO needs functions for this that are left out without
        CONFIG_IOMMUFD_DRIVER (include/linux/iova_bitmap.h of Linux). Without
        them QEMU begins a migration, and fails.
        """
        # a module can bring the function
        return _has_iova_bitmap(
            os.path.join(self._proc, 'kallsyms'),
            tuple(sorted(os.listdir(self._at('module')))))

    # Operations; functions are given by their PCI addresses

    def program_dfl_port(self, pf: str, port: int, path: str, offset: int,
                         size: int) -> None:
        """Reconfigure a port from a part of a file; block until done.

        :param pf: PCI address of the function with the FME.
        :param port: the id of the port.
        :param path: absolute path of the bitstream file.
        :param offset: start of the part for the hardware, bytes.
        :param size: length of that part, bytes.
        :raises OSError: EIO when the hardware refused (the cause is in the
            manager's status), ETIMEDOUT when it did not finish, EBUSY when
            another process programs the card, ENODEV when the function has no
            FME.
        """
        privileged.program_dfl_port(pf, port, path, offset, size)

    def reset_dfl_port(self, function: str, port: int) -> None:
        """Reset the user logic of a port: its registers and what is under
        way, neither its function nor the memory of the card.

        Source: DFL_FPGA_PORT_RESET in include/uapi/linux/fpga-dfl.h of Linux.

        :param function: PCI address of the function that shows the port.
        :param port: the id of the port.
        :raises OSError: ENODEV when the function does not show that port,
            EBUSY when another process programs it, ETIMEDOUT when the port
            does not end what it is doing.
        """
        privileged.reset_dfl_port(function, port)

    def read_afu(self, function: str) -> str:
        """Return the id of the AFU whose registers a function has.

        For a function that no driver shows as a port. Source: DFH, GUID_L and
        GUID_H at the begin of memory region 0, in drivers/fpga/dfl.h of Linux;
        resource0 in Documentation/PCI/sysfs-pci.rst.

        :returns: 32 hex digits.
        :raises OSError: ENODEV when no AFU is there, or it does not answer;
            EPERM when the kernel is locked down.
        """
        return privileged.read_afu(function)

    def clear_dfl_port_errors(self, function: str, port: int) -> None:
        """Clear the attribute errors of a port, if it has one."""
        privileged.clear_dfl_port_errors(function, port)

    def release_dfl_port(self, pf: str, port: int) -> None:
        """Release a port of the PF for a VF."""
        privileged.release_dfl_port(pf, port)

    def assign_dfl_port(self, pf: str, port: int) -> None:
        """Give a released port back to the PF."""
        privileged.assign_dfl_port(pf, port)

    def program_xclbin(self, function: str, path: str, size: int) -> None:
        """Program the user partition of a card under XRT; block until done.

        :param function: PCI address of the management function.
        :param path: absolute path of the xclbin file.
        :param size: its length according to its header, bytes.
        :raises OSError: EINVAL or ENOENT when the file is for another shell,
            EOPNOTSUPP for the same with a shell without UUIDs, EKEYREJECTED
            for its signature, EBUSY while the present function is in use,
            ENOTTY when the card is not ready, ENODEV when it has no device
            node, EIO and others when the card failed. Source: icap.c and
            mgmt-ioctl.c of XRT's xclmgmt.
        """
        privileged.program_xclbin(function, path, size)

    def call(self, operation: Callable, function: str, *args):
        """Call an operation of a driver's own package.

        :param operation: a privileged function of that package; its first
            parameter is the PCI address of a function. A simulated host has
            the device play it (sim.card.Card.OPERATIONS).
        :returns: what it returns.
        :raises OSError: as the operation does.
        """
        return operation(function, *args)

    def rebind(self, function: str, driver: str,
               by: Callable[[str, str], None] = privileged.rebind) -> None:
        """Bind a function to driver; unbind it from its driver before.

        :param by: the privileged function that does it: the default knows
            privileged.DRIVERS, that of a driver's own package others.
        """
        by(function, driver)

    def unbind(self, function: str) -> None:
        """Take a function from its driver, if it has one."""
        privileged.unbind(function)

    def probe(self, function: str) -> None:
        """Have the kernel choose the driver of a function.

        Source: drivers_probe in Documentation/ABI/testing/sysfs-bus-pci.
        """
        privileged.probe(function)

    def read_device_serial(self, function: str) -> str:
        """Return the Device Serial Number of a PCI function.

        :returns: 16 hex digits; '' when it has none.
        :raises OSError: its configuration space cannot be read.
        """
        return privileged.read_device_serial(function)

    def read_acs(self, function: str) -> int | None:
        """Return how a port treats traffic that passes it on its way to
        another port.

        :returns: the control register of ACS; None where it has no ACS.
        :raises OSError: its configuration space cannot be read.
        """
        return privileged.read_acs(function)

    def is_group_open(self, function: str) -> bool:
        """Whether a process has a device of a function's IOMMU group open by
        VFIO.

        Waits while a process opens one, which resets the device.

        :raises OSError: ENOENT when the group has no node.
        """
        return privileged.is_group_open(function)

    def processes(self, functions: Iterable[str],
                  ) -> list[host_processes.Process]:
        """Return which processes have device nodes of functions open, also
        those of their VFIO groups.

        Takes some milliseconds for each hundred processes.

        :raises OSError: that cannot be read, as in a container without
            CAP_SYS_PTRACE.
        """
        return [host_processes.Process(*found)
                for found in privileged.processes(list(functions))]

    def reset_function(self, function: str) -> None:
        """Reset a PCI function by the first of its methods that works.

        Blocks until the function answers, up to a minute. Source: reset in
        Documentation/ABI/testing/sysfs-bus-pci, pci_reset_function() of Linux.

        :raises OSError: ENOENT or ENOTTY when no method works, EIO and others
            when the device failed.
        """
        privileged.reset_function(function)

    def write_timecard(self, function: str, attribute: str, value: str,
                       ) -> None:
        """Write an attribute of the time card of a function.

        :param attribute: one of privileged.TIMECARD_WRITABLE.
        :raises OSError: EINVAL for a value that the card does not have,
            EOPNOTSUPP for a connector that cannot be changed.
        """
        privileged.write_timecard(function, attribute, value)

    @limited.blocking
    def read_firmware(self, function: str) -> dict[str, str]:
        """Return the versions that devlink shows for a function.

        :returns: name -> version, for example {'fw': '32771'}; empty when its
            driver tells none.
        :raises OSError: the kernel does not answer.
        """
        return devlink.versions(function)

    def set_numvfs(self, pf: str, count: int, probe: bool = True) -> None:
        """Enable count VFs; 0 disables all.

        :param probe: whether the kernel binds the VFs to a driver of the host,
            also when a guest returns one (sriov_drivers_autoprobe in
            Documentation/ABI/testing/sysfs-bus-pci of Linux).

        :raises OSError: EBUSY when another number is enabled, EINVAL when a
            DFL card has fewer released ports.
        """
        privileged.set_numvfs(pf, count, probe)

    def write_attribute(self, function: str, attribute: str, value: str,
                        by: Callable[[str, str, str], None]
                        = privileged.write_attribute) -> None:
        """Write an attribute of a PCI function.

        :param by: the privileged function that does it: the default knows
            privileged.WRITABLE, that of a driver's own package others.
        """
        by(function, attribute, value)

    def close_mailbox(self, function: str, requests: int, opens: int = 0,
                      ) -> None:
        """Have the mailbox of a card under XRT refuse requests of a guest.

        Those that it refuses already stay refused, but for those of `opens`.
        Source: mgmt-sysfs.c and req_is_disabled() in mailbox.c of XRT.

        :param function: PCI address of the management function.
        :param requests: a bit for each, by the numbers of mailbox_proto.h.
        :param opens: privileged.FETCHED_REQUESTS, or none; only where
            xclmgmt ignores what else a guest sends with them.
        :raises OSError: ENOENT when its driver has no such setting.
        """
        privileged.close_mailbox(function, requests, opens)

    def offer_xclbin(self, function: str, path: str, size: int,
                     function_uuid: str, interface: str, layout: bytes,
                     ) -> None:
        """Place the file that the guest of a card under XRT may load, in place
        of the one before: see nova_accel.host.firmware.

        :param function: PCI address of the management function.
        :param path: as for program_xclbin().
        :param size: the same.
        :param function_uuid: that of the file.
        :param interface: as the card's shell spells it.
        :param layout: the IP_LAYOUT of the file, at most a page.
        :raises OSError: it cannot be written; ValueError: no such names.
        """
        privileged.offer_xclbin(
            function, path, size,
            firmware.file_name(function_uuid, interface), layout)

    def withdraw_xclbin(self, function: str) -> None:
        """Remove the file that offer_xclbin() placed for a card.

        :raises OSError: it cannot be removed.
        """
        privileged.withdraw_xclbin(function)

    def offers_xclbin(self, function_uuid: str, interface: str) -> bool:
        """Whether guests can load a function, as nova-compute or the operator
        has placed its file; see offer_xclbin()."""
        return firmware.is_offered(
            firmware.XCLBINS, firmware.file_name(function_uuid, interface))

    def xclbin_layout(self, function: str) -> bytes | None:
        """Return the layout that offer_xclbin() got for a card, None if no
        file is placed for it."""
        return firmware.layout(firmware.XCLBINS, function)

    def read_qat_heartbeat(self, pf: str) -> int:
        """Return the heartbeat of a QAT card in debugfs, readable by root.

        Source: adf_heartbeat.c of Linux.

        :returns: 0 when the engines respond, otherwise -1; also -1 when the
            last read was less than the card's timer (200 or 500 ms) ago.
        :raises OSError: ENOENT when the card is down or debugfs is not
            mounted, EPERM when the kernel is locked down.
        """
        return privileged.read_qat_heartbeat(pf)

    def check_disks(self, function: str) -> None:
        """Check that no disk of a function is mounted or otherwise held.

        Also detects uses without an attribute: ZFS, and mounts of containers.
        Source: O_EXCL in open(2) for block devices.

        :raises OSError: EBUSY when a disk is held.
        """
        privileged.check_disks(function)

    def read_signatures(self, function: str) -> list[tuple[str, str]]:
        """Return what is on the disks of a function, as wipefs(8) finds it:
        file systems, partition tables, and members of RAID, LVM, ZFS, LUKS
        and Ceph, swap; of a disk without them samples are read.

        :returns: (name of the disk, type), for example ('nvme0n1', 'ext4') or
            ('nvme0n1', nvme_admin.UNSIGNED); empty for blank disks.
        :raises OSError: ENOENT without wipefs, EIO when it fails, ETIMEDOUT.
        """
        return [(disk, kind) for disk, kind
                in privileged.read_signatures(function)]

    def reset_nvme(self, function: str) -> None:
        """Reset an NVMe controller; block until the driver has it again.

        Source: nvme_sysfs_reset of drivers/nvme/host/sysfs.c of Linux. With a
        primary controller all its secondary ones go offline.

        :raises OSError: ENODEV when the host's driver has no controller,
            EBUSY or ENETRESET when it does not come back.
        """
        privileged.reset_nvme(function)

    def read_nvme(self, function: str) -> nvme_admin.Controller:
        """Return what an NVMe controller reports.

        :raises OSError: ENODEV when the host's driver has no controller, EIO
            when it refuses.
        """
        return nvme_admin.Controller.from_tuple(privileged.read_nvme(function))

    def read_nvme_health(self, function: str) -> nvme_admin.HealthLog:
        """Return what an NVMe controller reports of its health.

        :raises OSError: see read_nvme().
        """
        return nvme_admin.HealthLog(*privileged.read_nvme_health(function))

    def read_nvme_sanitize(self, function: str) -> nvme_admin.SanitizeStatus:
        """Return how far the last sanitize operation is.

        :raises OSError: see read_nvme().
        """
        return nvme_admin.SanitizeStatus(
            *privileged.read_nvme_sanitize(function))

    def start_nvme_sanitize(self, function: str, method: str) -> None:
        """Begin to sanitize a disk, and return at once.

        :param method: crypto, block or overwrite.
        :raises OSError: EBUSY when the host uses a namespace, EIO when the
            controller refuses, ENODEV without controller.
        """
        privileged.start_nvme_sanitize(function, method)

    def exit_nvme_sanitize_failure(self, function: str) -> None:
        """End the failure mode that follows a failed sanitize operation.

        :raises OSError: EIO when the controller refuses, ENODEV without
            controller.
        """
        privileged.exit_nvme_sanitize_failure(function)

    def format_nvme(self, function: str,
                    formats: Sequence[nvme_admin.Namespace] = ()) -> None:
        """Erase all namespaces of an NVMe controller; may take an hour.

        Uses Format NVM with a cryptographic erase if the controller supports
        it, otherwise with an erase of the user data.

        :param formats: the block format of each namespace afterwards; by
            default they keep theirs.
        :raises OSError: EBUSY when a namespace is held or not attached,
            ENODEV when the host's driver has no controller, EOPNOTSUPP when
            the controller has no Format NVM, EIO when it refused.
        """
        privileged.format_nvme(function, [str(n) for n in formats])

    def restore_nvme_namespaces(
            self, function: str, namespaces: Sequence[nvme_admin.Namespace],
            ) -> None:
        """Delete all namespaces, and create and attach these.

        :param namespaces: none for one of the full capacity.
        :raises OSError: EOPNOTSUPP when the controller has no Namespace
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

    def format_nvme_vf(self, pf: str, vf: int) -> int:
        """Take the controller of a VF offline, and erase its namespaces.

        It has no queues and interrupts then: reset_nvme_vf() gives it some.

        :param vf: its number, from 1.
        :returns: how many namespaces it has.
        :raises OSError: EBUSY when another VF has one of them as well,
            EOPNOTSUPP when the PF has no Format NVM, Namespace Management or
            Virtualization Management, or formats all namespaces at once,
            otherwise as read_nvme().
        """
        return privileged.format_nvme_vf(pf, vf)

    def reset_nvme_vf(self, pf: str, vf: int, queues: int, interrupts: int,
                      ) -> None:
        """Take the controller of a VF offline, and bring it online.

        :param vf: its number, from 1.
        :param queues: flexible resources that it needs, which going offline
            takes away; 0 where it needs none.
        :param interrupts: the same.
        :raises OSError: as format_nvme_vf(); EIO without resources where it
            needs them.
        """
        privileged.reset_nvme_vf(pf, vf, queues, interrupts)

    def create_mdev(self, parent: str, type_name: str, uuid: str) -> None:
        """Create a mediated device.

        Source: Documentation/driver-api/vfio-mediated-device.rst of Linux.

        :param parent: name of the parent in class/mdev_bus.
        :param type_name: name of the type below mdev_supported_types.
        :raises OSError: ENOSPC or EUSERS when the parent has no room, EEXIST
            when the uuid is in use, ENOENT when the type is unknown.
        """
        privileged.create_mdev(parent, type_name, uuid)

    def remove_mdev(self, uuid: str) -> None:
        """Remove a mediated device; block while it is open.

        :raises OSError: ENOENT when it does not exist.
        """
        privileged.remove_mdev(uuid)


def _read(path: str, directory: int | None) -> str:
    """Return an attribute of a directory, by a third of the calls of open().

    :param directory: its file descriptor; None where the path is absolute.
    """
    file = os.open(path, os.O_RDONLY, dir_fd=directory)
    try:
        value = os.read(file, _PAGE)
    finally:
        os.close(file)
    return value.decode(errors='replace').removesuffix('\n')


def change_of(message: bytes) -> Change | None:
    """Return the change that a message of the kernel (kobject_uevent) reports;
    None if it is of no interest."""
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
    """Return the lines of modules.alias for VFIO drivers; the file has some
    ten thousand lines.

    :param changed: when the file was changed.
    """
    with open(path, encoding='ascii', errors='replace') as file:
        return tuple(line for line in file
                     if line.startswith('alias vfio_pci:'))


@functools.lru_cache(maxsize=1)
def _has_iova_bitmap(path, modules):
    """See Kernel.has_iova_bitmap().

    :param path: of kallsyms, which has some 200,000 lines.
    :param modules: names of those that are loaded.
    """
    with open(path, 'rb') as file:
        return any(b' iova_bitmap_for_each' in line for line in file)


def _number(path):
    """Return '<major>:<minor>' of a block device node, None for others."""
    try:
        node = os.stat(path) if os.path.isabs(path) else None
    except OSError:
        node = None
    if node is None or not stat.S_ISBLK(node.st_mode):
        return None
    return f'{os.major(node.st_rdev)}:{os.minor(node.st_rdev)}'
