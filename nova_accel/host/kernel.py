# Licensed under the Apache License, Version 2.0. See LICENSE.
"""This machine's kernel, as the drivers see it.

Drivers reach the host through the class Kernel only, which lets a simulated
host (nova_accel.sim) replace it. Reads run in this process, operations in the
privileged one. Both raise OSError as the kernel does.
"""

from collections.abc import Iterator
import contextlib
import errno
import os
import socket
import stat
import typing

from nova_accel import conf
from nova_accel.host import limited
from nova_accel.host import privileged

if typing.TYPE_CHECKING:
    from nova_accel import sim

CONF = conf.CONF

#: include/uapi/linux/netlink.h
_NETLINK_KOBJECT_UEVENT = 15
#: multicast group of the kernel's messages; udev repeats them in another one
_KERNEL_GROUP = 1


def open_kernel(host: str) -> 'Kernel | sim.SimulatedKernel':
    """Return the kernel that the drivers of this host work with.

    :param host: [DEFAULT] host, which chooses the file if [accel]
        simulated_host is a directory.
    :returns: a SimulatedKernel if [accel] simulated_host is set, otherwise
        the machine's own Kernel.
    :raises InvalidSimulation: the description cannot be used.
    """
    path = CONF.accel.simulated_host
    if not path:
        return Kernel()
    # the simulator stands above this module and is loaded only on demand
    from nova_accel import sim
    if os.path.isdir(path):
        path = os.path.join(path, f'{host}.yaml')
    return sim.SimulatedKernel(path)


class Kernel:

    def __init__(self, root: str = '/sys', proc: str = '/proc'):
        """:param root: where sysfs is; another place holds a recorded tree.
        :param proc: where procfs is."""
        self.root, self._proc = root, proc

    def _at(self, path: str) -> str:
        return os.path.join(self.root, path)

    # Reads; every path is relative to /sys

    @limited.blocking
    def read(self, path: str) -> str:
        """An attribute, without the newline at its end."""
        with open(self._at(path), encoding='utf-8', errors='replace') as file:
            return file.read().removesuffix('\n')

    @limited.blocking
    def read_bytes(self, path: str, size: int) -> bytes:
        """At most size bytes of a binary attribute."""
        with open(self._at(path), 'rb', buffering=0) as file:
            return file.read(size)

    @limited.blocking
    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(self._at(path)))

    @limited.blocking
    def exists(self, path: str) -> bool:
        return os.path.exists(self._at(path))

    @limited.blocking
    def readlink(self, path: str) -> str:
        """The target of a link as it is written there."""
        return os.readlink(self._at(path))

    def changes(self) -> Iterator[str | None]:
        """The subsystem of each device that comes or goes, as it happens.

        Never ends; None after a second without any, '' when some were missed.
        Source: kobject_uevent of Linux, which sends to whoever listens,
        without privileges.

        :raises OSError: the kernel does not say, as inside a container.
        """
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM,
                           _NETLINK_KOBJECT_UEVENT) as events:
            events.bind((0, _KERNEL_GROUP))
            events.settimeout(1)
            while True:
                try:
                    message = events.recv(1 << 16)
                except TimeoutError:
                    yield None
                    continue
                except OSError as error:
                    if error.errno != errno.ENOBUFS:
                        raise
                    yield ''
                    continue
                fields = dict(
                    line.split('=', 1) for line in message.decode(
                        errors='replace').split('\0') if '=' in line)
                if fields.get('ACTION') in ('add', 'remove'):
                    yield fields.get('SUBSYSTEM', '')

    @limited.blocking
    def mounted_devices(self) -> dict[str, str]:
        """'<major>:<minor>' of block devices in use -> 'mounted at /srv'.

        In this process's mounts and in those of the host, which are others
        where nova-compute runs in a container, and as swap. Source: proc(5).
        """
        found = {}
        lines = self._lines('self/mountinfo')
        with contextlib.suppress(OSError):
            # hidden where /proc is mounted so
            lines += self._lines('1/mountinfo')
        for line in lines:
            fields, _, source = line.partition(' - ')
            number, _, where = fields.split()[2:5]
            if number.startswith('0:'):
                # btrfs and overlays have numbers of their own
                number = _number(source.split()[1])
            found.setdefault(number, f'mounted at {where}')
        with contextlib.suppress(FileNotFoundError):
            # a kernel without swap has none
            for line in self._lines('swaps')[1:]:
                found.setdefault(_number(line.split()[0]), 'used as swap')
        found.pop(None, None)
        return found

    def _lines(self, path):
        with open(os.path.join(self._proc, path), encoding='utf-8',
                  errors='replace') as file:
            return file.read().splitlines()

    # Operations; each function is named by its PCI address

    def program_dfl_port(self, pf: str, port: int, path: str, offset: int,
                         size: int) -> None:
        """Reconfigure a port from a part of a file; blocks until done.

        :param pf: PCI address of the function that has the FME.
        :param port: the id of the port.
        :param path: absolute path of the bitstream file.
        :param offset: where in it the part for the hardware begins, bytes.
        :param size: its length, bytes.
        :raises OSError: EIO when the hardware refused (the cause is in the
            manager's status), ETIMEDOUT when it did not finish, EBUSY when
            somebody else programs the card, ENODEV when it has no such FME.
        """
        privileged.program_dfl_port(pf, port, path, offset, size)

    def clear_dfl_port_errors(self, function: str, port: int) -> None:
        """Clear what the port's errors attribute shows, if it has one."""
        privileged.clear_dfl_port_errors(function, port)

    def release_dfl_port(self, pf: str, port: int) -> None:
        """Take a port from the PF, for a VF to have."""
        privileged.release_dfl_port(pf, port)

    def assign_dfl_port(self, pf: str, port: int) -> None:
        """Give a released port back to the PF."""
        privileged.assign_dfl_port(pf, port)

    def program_xclbin(self, function: str, path: str, size: int) -> None:
        """Program the user partition of a card under XRT; blocks until done.

        :param function: PCI address of the management function.
        :param path: absolute path of the xclbin file.
        :param size: its length as its header says, bytes.
        :raises OSError: EINVAL or ENOENT when it is not for the card's shell,
            EOPNOTSUPP for a shell without UUIDs likewise, EKEYREJECTED for its
            signature, EBUSY while the present function is in use, ENOTTY when
            the card is not ready, ENODEV when there is no node of it, EIO and
            others when the card failed. Source: icap.c and mgmt-ioctl.c of
            XRT's xclmgmt.
        """
        privileged.program_xclbin(function, path, size)

    def rebind(self, function: str, driver: str) -> None:
        """Unbind a function from its driver, if any, and bind it to driver."""
        privileged.rebind(function, driver)

    def set_numvfs(self, pf: str, count: int) -> None:
        """Enable count VFs, or disable all with 0.

        :raises OSError: EBUSY when another number is enabled now, EINVAL when
            a DFL card has not as many released ports.
        """
        privileged.set_numvfs(pf, count)

    def write_attribute(self, function: str, attribute: str, value: str,
                        ) -> None:
        """Write one of privileged.WRITABLE of a PCI function."""
        privileged.write_attribute(function, attribute, value)

    def read_qat_heartbeat(self, pf: str) -> int:
        """What a QAT card says of itself in debugfs, which only root reads.

        0 when its engines respond; -1 when they do not, and also when
        somebody read it less than its timer (200 or 500 ms) before. Source:
        adf_heartbeat.c of Linux.

        :raises OSError: ENOENT when the card is down or debugfs is not
            mounted, EPERM where the kernel is locked down.
        """
        return privileged.read_qat_heartbeat(pf)

    def check_disks(self, function: str) -> None:
        """See that nobody holds a disk of a function, mounted or otherwise.

        Also finds what shows in no attribute: ZFS, and the mounts of
        containers. Source: O_EXCL in open(2) for block devices.

        :raises OSError: EBUSY when somebody does.
        """
        privileged.check_disks(function)

    def format_nvme(self, function: str) -> None:
        """Erase all namespaces of an NVMe controller; may take an hour.

        By Format NVM with a cryptographic erase where the controller has it,
        with an erase of the user data otherwise. The formats of the blocks
        stay.

        :raises OSError: EBUSY when somebody holds a namespace, or when one is
            not attached, ENODEV when the host's driver shows no controller,
            EOPNOTSUPP when it cannot be formatted, EIO when it refused.
        """
        privileged.format_nvme(function)

    def create_mdev(self, parent: str, type_name: str, uuid: str) -> None:
        """Make a mediated device; source:
        Documentation/driver-api/vfio-mediated-device.rst of Linux.

        :param parent: its name in class/mdev_bus.
        :param type_name: its name below mdev_supported_types.
        :raises OSError: ENOSPC or EUSERS when no more can be made, EEXIST
            when there is one of that uuid, ENOENT without such a type.
        """
        privileged.create_mdev(parent, type_name, uuid)

    def remove_mdev(self, uuid: str) -> None:
        """Remove a mediated device; blocks while it is open.

        :raises OSError: ENOENT when there is none.
        """
        privileged.remove_mdev(uuid)


def _number(path):
    """'<major>:<minor>' of a block device by its node, None for others."""
    try:
        node = os.stat(path) if os.path.isabs(path) else None
    except OSError:
        node = None
    if node is None or not stat.S_ISBLK(node.st_mode):
        return None
    return f'{os.major(node.st_rdev)}:{os.minor(node.st_rdev)}'
