# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Define all privileged functions of nova_accel, and helpers with which other
packages define theirs.

Each function checks its arguments itself, because the calling process may be
compromised. A caller names hardware by PCI address and number only; the
function finds the device node or the attribute to write. The kernel's errno is
raised as OSError. Numbers and structures: include/uapi/linux/fpga-dfl.h of
Linux, mgmt-ioctl.h of XRT.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import glob
import mmap
import os
import re
import stat
import struct
import subprocess

from oslo_config import cfg

from nova_accel import conf
from nova_accel.host import firmware
from nova_accel.host import nvidia
from nova_accel.host import nvme_admin
from nova_accel.host import pci
from nova_accel import privsep

CONF = conf.CONF

SYS = '/sys'
DEV = '/dev'
PROC = '/proc'
#: drivers that a function may be bound to
DRIVERS = frozenset(('dfl-pci', 'nvme', 'vfio-pci', 'xocl'))
#: sriov_totalvfs is a 16-bit register
MAX_VFS = 0xffff
#: the DFL driver supports this number of ports per FME
MAX_PORTS = 4

#: attributes of PCI functions that may be written -> pattern of their values.
#: Source: sysfs-bus-pci, sysfs-driver-qat and sysfs-driver-intel-xe-sriov in
#: Documentation/ABI/testing of Linux; NVIDIA's vGPU user guide for the VFIO
#: framework of the vendor; mgmt-sysfs.c of XRT
WRITABLE = {
    'reset_method': 'bus|default',
    'qat/cfg_services': '[a-z]+(;[a-z]+){0,3}',
    'qat/state': 'up|down',
    'nvidia/current_vgpu_type': '[0-9]{1,6}',
    'sriov_admin/.bulk_profile/vram_quota': '[0-9]{1,15}',
    'sriov_admin/.bulk_profile/exec_quantum_ms': '[0-9]{1,15}',
    'sriov_admin/.bulk_profile/preempt_timeout_us': '[0-9]{1,15}',
    'mgmt_reset': '2',
    'config_xclbin_change': '1',
}

#: bytes of the configuration space of PCI Express, and where its extended
#: capabilities begin; ids of those: Device Serial Number, and Access Control
#: Services. Source: PCI Express Base Specification, include/uapi/linux/
#: pci_regs.h of Linux
_CONFIG_SPACE, _EXTENDED = 4096, 0x100
_DEVICE_SERIAL, _ACS = 0x0003, 0x000d

_PARENT = re.compile('[A-Za-z0-9_][A-Za-z0-9_.:-]*')
_MDEV_TYPE = re.compile('[A-Za-z0-9_][A-Za-z0-9_.-]*')
_UUID = re.compile('[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}')
_FME = re.compile('dfl-fme[.][0-9]+')
_XCLMGMT = re.compile('xclmgmt[0-9]+')
_XCLBIN = re.compile('[0-9a-f-]{36}_[0-9A-Za-z-]{1,64}[.]xclbin')
_PATH = re.compile('^(nvme[0-9]+)c[0-9]+(n[0-9]+)$')
_PORT = re.compile('dfl-port[.][0-9]+')
_PORT_RESET = 0xb640
#: type of a Device Feature Header (drivers/fpga/dfl.h of Linux)
_DFH_TYPE_AFU = 1
_NVME = re.compile('nvme[0-9]+')
_TIMECARD = re.compile('ocp[0-9]+')
_METHOD = re.compile('crypto|block|overwrite')
_NAMESPACE = re.compile('[0-9]{1,19}x[0-9]{3,10}([+][0-9]{1,5})?')
#: seconds for reading a few blocks; a disk may need as long to fail
_WIPEFS_SECONDS = 60
#: bytes at both ends of a disk, number of places between them, and bytes at
#: each, that are read to see whether the disk is blank
_END, _SAMPLES, _SAMPLE = 1 << 20, 254, 4096
#: more than a controller can have attached in practice
_MAX_NAMESPACES = 1024
#: maximum of one type for a controller
_MAX_RESOURCES = 0xffff
#: ida_alloc() of Linux gives groups their numbers
_MAX_GROUP = 0x7fffffff
#: errors of a disk whose controller failed, which a reset may recover, and of
#: one without a node
_DEAD = errno.ENXIO, errno.ENODEV, errno.ENOENT, errno.EIO
#: milliseconds, an hour
_LONGEST_WATCH = 3_600_000
#: device number of /dev/nvidia<minor>
_NVIDIA_MAJOR = 195
_FME_PORT_PR = 0xb680
_FME_PORT_RELEASE = 0x4004b681
_FME_PORT_ASSIGN = 0x4004b682
_ICAP_DOWNLOAD_AXLF = 0x40085806


@privsep.ctx.entrypoint
def credentials() -> tuple:
    return credentials_here()


@privsep.disks.entrypoint
def credentials_for_disks() -> tuple:
    return credentials_here()


@privsep.processes.entrypoint
def credentials_for_processes() -> tuple:
    return credentials_here()


def credentials_here() -> tuple[int, int]:
    """Return the effective user id and the capabilities (a bit mask) of this
    thread, with which privileged calls run. Source: proc(5)."""
    with open('/proc/thread-self/status', encoding='ascii') as file:
        mask, = [int(line.split()[1], 16) for line in file
                 if line.startswith('CapEff:')]
    return os.geteuid(), mask


@privsep.ctx.entrypoint
def program_dfl_port(pf: str, port: int, path: str, offset: int,
                     size: int) -> None:
    """Reconfigure a port with the bitstream in a part of a file. Blocks until
    the end.

    :param pf: PCI address of the function with the FME.
    :param port: the id of the port.
    :param path: absolute path of the bitstream file.
    :param offset: start of the bitstream in the file, bytes.
    :param size: length of the bitstream, bytes.
    :raises OSError: EIO if the hardware refused (the manager's status has the
        cause), ETIMEDOUT if it did not finish, EBUSY if another process
        programs the card, ENODEV if the function has no FME.
    """
    check_function(pf)
    check_number('port', port, MAX_PORTS - 1)
    with mapped(path, offset, size) as start, _fme(pf) as fme:
        # argsz, flags, port_id, buffer_size, buffer_address
        fcntl.ioctl(fme, _FME_PORT_PR,
                    struct.pack('=IIIIQ', 24, 0, port, size, start))


def _check_cached(path):
    """Check that a path is a file of the bitstream cache.

    :raises OSError: EINVAL if not.
    """
    if not isinstance(path, str) or os.path.dirname(path) != _cache():
        raise _invalid('path', path)


def _cache() -> str:
    """Return the directory of the bitstream cache, from the configuration that
    this process has read itself."""
    try:
        found = CONF.accel.bitstream_cache
    except cfg.NoSuchOptError:
        # its default is below state_path, an option of Nova that the
        # privileged process does not load
        conf.register_novas()
        found = CONF.accel.bitstream_cache
    return os.path.abspath(found)


@privsep.ctx.entrypoint
def release_dfl_port(pf: str, port: int) -> None:
    """Release a port of the PF, so a VF can get it."""
    _move_port(_FME_PORT_RELEASE, pf, port)


@privsep.ctx.entrypoint
def assign_dfl_port(pf: str, port: int) -> None:
    """Assign a released port to the PF again."""
    _move_port(_FME_PORT_ASSIGN, pf, port)


def _move_port(request, pf, port):
    check_function(pf)
    check_number('port', port, MAX_PORTS - 1)
    with _fme(pf) as fme:
        fcntl.ioctl(fme, request, struct.pack('=i', port))


@privsep.ctx.entrypoint
def reset_dfl_port(function: str, port: int) -> None:
    """Reset the user logic of a port. The reset clears registers and ends
    running operations, but keeps the port's function and the memory of the
    card.

    Source: DFL_FPGA_PORT_RESET in include/uapi/linux/fpga-dfl.h of Linux.

    :param function: PCI address of the function that shows the port.
    :param port: the id of the port.
    :raises OSError: ENODEV when the function does not show that port, EBUSY
        when another process programs it, ETIMEDOUT if the port does not end
        its operations.
    """
    check_function(function)
    check_number('port', port, MAX_PORTS - 1)
    for found in _ports(function, port):
        with device_node(found, _PORT, function) as node:
            fcntl.ioctl(node, _PORT_RESET)
        return
    raise OSError(errno.ENODEV, f'{function} shows no port {port}')


def _ports(function, port) -> list[str]:
    return [path for path in glob.glob(
        f'{SYS}/bus/pci/devices/{function}/fpga_region/region*/dfl-port.*')
        if _read(f'{path}/id') == str(port)]


@privsep.ctx.entrypoint
def read_afu(function: str) -> str:
    """Return the id of the AFU in a function, from the AFU's registers.

    For a function that no driver shows as a port. Source: DFH, GUID_L and
    GUID_H at the begin of memory region 0, in drivers/fpga/dfl.h of Linux;
    resource0 in Documentation/PCI/sysfs-pci.rst.

    :returns: 32 hex digits.
    :raises OSError: ENODEV when the registers are not those of an AFU, or do
        not answer; EPERM when the kernel is locked down.
    """
    check_function(function)
    fd = os.open(f'{SYS}/bus/pci/devices/{function}/resource0',
                 os.O_RDONLY | os.O_CLOEXEC)
    try:
        with (mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ)
              as page, memoryview(page).cast('Q') as registers):
            # each register is read once, as a whole
            header, low, high = (registers[n] for n in range(3))
    finally:
        os.close(fd)
    if header >> 60 != _DFH_TYPE_AFU:
        raise OSError(errno.ENODEV, f'{function} shows no AFU')
    return f'{high:016x}{low:016x}'


@privsep.ctx.entrypoint
def clear_dfl_port_errors(function: str, port: int) -> None:
    """Clear the attribute errors of a port, if it has one."""
    check_function(function)
    check_number('port', port, MAX_PORTS - 1)
    for found in _ports(function, port):
        errors = f'{found}/errors/errors'
        # a port without the error feature has the directory, but empty
        if os.path.exists(errors):
            _write(errors, _read(errors))


@privsep.ctx.entrypoint
def program_xclbin(function: str, path: str, size: int) -> None:
    """Program the user partition of a card under XRT. Blocks until the end.

    :param function: PCI address of the management function.
    :param path: absolute path of the xclbin file.
    :param size: size of the file according to its header, bytes.
    :raises OSError: the card or its driver refused. EINVAL or ENOENT: the file
        is for another shell. EOPNOTSUPP: the same, if the shell has no UUIDs.
        EKEYREJECTED: the signature is not accepted. EBUSY: the present
        function is in use. ENOTTY: the card is not ready. ENODEV: it has no
        device node. EIO and others: the card failed. Source: icap.c and
        mgmt-ioctl.c of XRT's xclmgmt.
    """
    check_function(function)
    with mapped(path, 0, size) as start:
        # the driver copies the number of bytes in the header
        if size < 312 or (ctypes.string_at(start + 304, 8)
                          != struct.pack('<Q', size)):
            raise _invalid('xclbin', path)
        with device_node(
                f'{SYS}/bus/pci/devices/{function}/xrt_mgmt/xclmgmt*',
                _XCLMGMT, function) as node:
            fcntl.ioctl(node, _ICAP_DOWNLOAD_AXLF, struct.pack('=Q', start))


@privsep.ctx.entrypoint
def rebind(function: str, driver: str) -> None:
    bind(function, driver, DRIVERS)


def bind(function: str, driver: str, drivers: Collection[str]) -> None:
    """Unbind a PCI function from its driver, and bind it to another one.

    :param drivers: the drivers that the caller allows.
    :raises OSError: EINVAL if the caller does not allow the driver, otherwise
        as the kernel does.
    """
    check_function(function)
    if driver not in drivers:
        raise _invalid('driver', driver)
    _unbind(function)
    # vfio-pci has no ids of its own; a bare newline clears the override
    _write(f'{SYS}/bus/pci/devices/{function}/driver_override',
           f'{driver if driver == "vfio-pci" else ""}\n')
    _write(f'{SYS}/bus/pci/drivers/{driver}/bind', function)


@privsep.ctx.entrypoint
def set_numvfs(pf: str, count: int, probe: bool = True) -> None:
    """Set the number of VFs of a PF. To change a number above 0, first set 0.

    :param count: number of VFs; 0 disables all.
    :param probe: whether the kernel binds VFs to a driver of the host: new
        VFs, and later VFs that a guest returns (sriov_drivers_autoprobe in
        Documentation/ABI/testing/sysfs-bus-pci of Linux).

    :raises OSError: EBUSY when another number is enabled, EINVAL when a DFL
        card has fewer released ports.
    """
    check_function(pf)
    check_number('count', count, MAX_VFS)
    device = f'{SYS}/bus/pci/devices/{pf}'
    with _disks_held(*(os.path.basename(os.path.realpath(vf)) for vf
                       in glob.glob(f'{device}/virtfn*')), skipped=_DEAD):
        if count:
            # Linux before 4.12 does not have it
            with contextlib.suppress(FileNotFoundError):
                _write(f'{device}/sriov_drivers_autoprobe',
                       '1' if probe else '0')
        _write(f'{device}/sriov_numvfs', str(count))


@privsep.ctx.entrypoint
def write_attribute(function: str, attribute: str, value: str) -> None:
    write(function, attribute, value, WRITABLE)


def write(function: str, attribute: str, value: str,
          writable: Mapping[str, str]) -> None:
    """Write an attribute of a PCI function.

    :param writable: attributes that the caller allows -> pattern of their
        values.
    :raises OSError: EINVAL for a value that the caller does not allow,
        otherwise as the kernel does.
    """
    check_function(function)
    _check_value(attribute, value, writable)
    _write(f'{SYS}/bus/pci/devices/{function}/{attribute}', value)


def _check_value(attribute, value, writable):
    if (attribute not in writable or not isinstance(value, str)
            or not re.fullmatch(writable[attribute], value)):
        raise _invalid(f'a value for {attribute!r}', value)


@privsep.ctx.entrypoint
def close_mailbox(function: str, requests: int) -> None:
    """Make the mailbox of an XRT card refuse requests of a guest.

    Requests that the mailbox already refuses stay refused.
    Source: mgmt-sysfs.c and req_is_disabled() in mailbox.c of XRT.

    :param function: PCI address of the management function.
    :param requests: bit mask; the numbers of its bits are in mailbox_proto.h.
    :raises OSError: ENOENT when the driver has no such setting.
    """
    check_function(function)
    check_number('set of requests', requests, (1 << 64) - 1)
    path = (f'{SYS}/bus/pci/devices/{function}/'
            f'config_mailbox_channel_disable')
    _write(path, f'{int(_read(path), 0) | requests:#x}')


@privsep.ctx.entrypoint
def offer_xclbin(function: str, path: str, size: int, name: str,
                 layout: bytes) -> None:
    check_function(function)
    check_text('name of an xclbin', name, _XCLBIN)
    if not isinstance(layout, bytes) or len(layout) > mmap.PAGESIZE:
        raise _invalid('layout', type(layout))
    # its firmware directory is in the host's own file system
    if not os.path.exists(f'{SYS}/bus/pci/devices/{function}'):
        raise OSError(errno.ENODEV, f'{function} is not there')
    with mapped(path, 0, size) as start:
        firmware.offer(firmware.XCLBINS, function, name,
                       ctypes.string_at(start, size), layout)


@privsep.ctx.entrypoint
def withdraw_xclbin(function: str) -> None:
    """Remove the file that offer_xclbin() placed for a card.

    :raises OSError: it cannot be removed.
    """
    check_function(function)
    firmware.withdraw(firmware.XCLBINS, function)


@privsep.ctx.entrypoint
def read_qat_heartbeat(pf: str) -> int:
    """Return the heartbeat of a QAT card, which root can read in debugfs.

    Source: adf_heartbeat.c of Linux.

    :returns: 0 if the engines respond, otherwise -1. Also -1 if the previous
        read was less than the card's timer (200 or 500 ms) ago.
    :raises OSError: ENOENT when the card is down or debugfs is not mounted,
        EPERM when the kernel is locked down.
    """
    check_function(pf)
    # qat_<class of device>_<address>; source: adf_dbgfs.c of Linux
    found = glob.glob(f'{SYS}/kernel/debug/qat_*_{pf}/heartbeat/status')
    if len(found) != 1:
        raise OSError(errno.ENOENT, f'{pf} shows no heartbeat in debugfs')
    # the kernel ends the text with a zero byte
    return int(_read(found[0]).rstrip('\0'))


@privsep.ctx.entrypoint
def create_mdev(parent: str, type_name: str, uuid: str) -> None:
    """Create a mediated device.

    Source: Documentation/driver-api/vfio-mediated-device.rst of Linux.

    :param parent: name of the parent in class/mdev_bus.
    :param type_name: name of the type below mdev_supported_types.
    :raises OSError: ENOSPC or EUSERS when the parent has no room, EEXIST
        when the uuid is in use, ENOENT when the type is unknown.
    """
    check_text('parent', parent, _PARENT)
    check_text('type of mediated device', type_name, _MDEV_TYPE)
    check_text('UUID', uuid, _UUID)
    _write(f'{SYS}/class/mdev_bus/{parent}/mdev_supported_types/{type_name}'
           f'/create', uuid)


@privsep.ctx.entrypoint
def remove_mdev(uuid: str) -> None:
    """Remove a mediated device. Blocks while a process has it open.

    :raises OSError: ENOENT when it does not exist.
    """
    check_text('UUID', uuid, _UUID)
    _write(f'{SYS}/bus/mdev/devices/{uuid}/remove', '1')


@privsep.ctx.entrypoint
def check_disks(function: str) -> None:
    """Check that no disk of a function is mounted or otherwise held.

    This also detects uses that no attribute shows: ZFS, and mounts of
    containers. Source: O_EXCL in open(2) for block devices.

    :raises OSError: EBUSY when a disk is held.
    """
    check_function(function)
    with _disks_held(function):
        pass


@privsep.ctx.entrypoint
def read_signatures(function: str) -> list:
    check_function(function)
    with contextlib.ExitStack() as stack:
        return [(name, kind) for name, fd in
                _open_disks(function, stack, os.O_RDONLY).items()
                for kind in _signatures(fd) or (
                    [nvme_admin.UNSIGNED] if _has_data(fd) else [])]


def _has_data(fd) -> bool:
    """Return whether a disk has data, according to samples.

    Blocks without data read as zeros or as ones (NVM Express NVM Command Set,
    DLFEAT). The samples are the first and the last MiB, where libblkid expects
    all signatures apart from copies (util-linux, libblkid/src/superblocks),
    and 4 KiB at 254 places between them.
    """
    size = os.lseek(fd, 0, os.SEEK_END)
    places = [(0, _END), (max(0, size - _END), _END)] + [
        (size * number // (_SAMPLES + 1) // _SAMPLE * _SAMPLE, _SAMPLE)
        for number in range(1, _SAMPLES + 1)]
    return any(data.strip(b'\0') and data.strip(b'\xff') for data in (
        os.pread(fd, length, offset) for offset, length in places))


def _signatures(fd) -> list[str]:
    # without --all wipefs only reads
    try:
        done = subprocess.run(
            ['wipefs', '--noheadings', '--output', 'TYPE', f'/dev/fd/{fd}'],
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            pass_fds=[fd], timeout=_WIPEFS_SECONDS, check=False,
            env={'LC_ALL': 'C', 'PATH': '/usr/sbin:/usr/bin:/sbin:/bin'})
    except FileNotFoundError:
        raise OSError(errno.ENOENT, 'wipefs is not installed') from None
    except subprocess.TimeoutExpired:
        raise OSError(errno.ETIMEDOUT, 'wipefs does not end') from None
    if done.returncode:
        raise OSError(errno.EIO, f'wipefs failed: '
                                 f'{done.stderr.strip()[:100]}')
    return list(dict.fromkeys(
        line.strip() for line in done.stdout.splitlines() if line.strip()))


@privsep.ctx.entrypoint
def reset_nvme(function: str) -> None:
    """Reset an NVMe controller. Blocks until its driver has it again.

    Source: nvme_sysfs_reset of drivers/nvme/host/sysfs.c of Linux. All
    secondary controllers of a primary controller go offline.

    :raises OSError: ENODEV when the host's driver has no controller, EBUSY or
        ENETRESET when the controller does not come back.
    """
    check_function(function)
    controller = _only(f'{SYS}/bus/pci/devices/{function}/nvme/nvme*', _NVME,
                       function)
    with _disks_held(function, skipped=_DEAD):
        _write(f'{controller}/reset_controller', '1')


@privsep.disks.entrypoint
def read_device_serial(function: str) -> str:
    """Return the Device Serial Number of a PCI function.

    :returns: 16 hex digits; '' when it has none.
    :raises OSError: its configuration space cannot be read.
    """
    found = _capability(function, _DEVICE_SERIAL)
    if not found:
        return ''
    low, high = struct.unpack('<II', found)
    serial = f'{high:08x}{low:08x}'
    # of a device without a number, or one that does not answer
    return '' if set(serial) in ({'0'}, {'f'}) else serial


@privsep.disks.entrypoint
def read_acs(function: str) -> int | None:
    """Return how a port treats requests from a device below it to another
    port.

    :returns: the control register of ACS, or None without ACS.
    :raises OSError: its configuration space cannot be read.
    """
    found = _capability(function, _ACS)
    # after the register of capabilities
    return struct.unpack_from('<H', found, 2)[0] if found else None


def _capability(function, number) -> bytes:
    """Return the first eight bytes of an extended capability, or b'' if the
    function does not have it.

    The kernel shows all but the first 64 bytes of the configuration space only
    to processes with CAP_SYS_ADMIN (pci_read_config() of Linux).
    """
    check_function(function)
    with open(f'{SYS}/bus/pci/devices/{function}/config', 'rb') as file:
        config = file.read(_CONFIG_SPACE)
    at = _EXTENDED
    # capabilities are at least 8 bytes apart, and no list is longer
    for _ in range((_CONFIG_SPACE - _EXTENDED) // 8):
        if at < _EXTENDED or at + 12 > len(config):
            break
        header, = struct.unpack_from('<I', config, at)
        if header & 0xffff == number and header != 0xffffffff:
            return config[at + 4:at + 12]
        at = header >> 20 & 0xffc
    return b''


@privsep.disks.entrypoint
def read_nvme(function: str) -> tuple:
    with _controller(function) as fd:
        return dataclasses.astuple(nvme_admin.read_controller(fd))


@privsep.disks.entrypoint
def read_nvme_health(function: str) -> tuple:
    with _controller(function) as fd:
        return dataclasses.astuple(nvme_admin.read_health(fd))


@privsep.disks.entrypoint
def read_nvme_sanitize(function: str) -> tuple:
    with _controller(function) as fd:
        return dataclasses.astuple(nvme_admin.read_sanitize_status(fd))


@privsep.disks.entrypoint
def start_nvme_sanitize(function: str, method: str) -> None:
    """Begin to sanitize a disk, and return at once.

    :param method: crypto, block or overwrite.
    :raises OSError: EBUSY when the host uses a namespace, EIO when the
        controller refuses, ENODEV without controller.
    """
    check_text('method of Sanitize', method, _METHOD)
    with _controller(function, hold=True) as fd:
        nvme_admin.start_sanitize(fd, method)


@privsep.disks.entrypoint
def exit_nvme_sanitize_failure(function: str) -> None:
    """End the failure mode that follows a failed sanitize operation.

    :raises OSError: EIO when the controller refuses, ENODEV without controller.
    """
    with _controller(function) as fd:
        nvme_admin.exit_sanitize_failure(fd)


@privsep.disks.entrypoint
def format_nvme(function: str, formats: Sequence[str] = ()) -> None:
    wanted = _check_namespaces(formats)
    with _controller(function, hold=True) as fd:
        nvme_admin.format_namespaces(fd, function, wanted)


@privsep.disks.entrypoint
def restore_nvme_namespaces(function: str, namespaces: Sequence[str]) -> None:
    wanted = _check_namespaces(namespaces)
    with _controller(function, hold=True) as fd:
        nvme_admin.restore_namespaces(fd, function, wanted)


@privsep.disks.entrypoint
def read_nvme_vfs(pf: str) -> list:
    with _controller(pf) as fd:
        return [dataclasses.astuple(secondary) for secondary
                in nvme_admin.read_secondaries(fd, pf)]


@privsep.disks.entrypoint
def format_nvme_vf(pf: str, vf: int) -> int:
    """Take the controller of a VF offline, and erase its namespaces.

    The controller has no queues and interrupts then; see reset_nvme_vf().

    :param vf: number of the VF, from 1.
    :returns: how many namespaces were erased.
    :raises OSError: EBUSY if another VF shares one of the namespaces,
        EOPNOTSUPP if the PF has no Format NVM, Namespace Management or
        Virtualization Management, or formats all namespaces at once, otherwise
        as read_nvme().
    """
    check_number('VF', vf, MAX_VFS)
    with _controller(pf) as fd:
        controller = _secondary(fd, pf, vf)
        namespaces = nvme_admin.private_namespaces(fd, pf, controller)
        # namespaces that are attached to the PF as well
        with _disks_held(pf, namespaces={str(n) for n in namespaces}):
            nvme_admin.set_offline(fd, controller)
            nvme_admin.format_of_secondary(fd, pf, namespaces)
        return len(namespaces)


@privsep.disks.entrypoint
def reset_nvme_vf(pf: str, vf: int, queues: int, interrupts: int) -> None:
    """Take the controller of a VF offline, and bring it online.

    :param vf: number of the VF, from 1.
    :param queues: number of flexible queues to assign, because going offline
        removes them.
    :param interrupts: number of flexible interrupts to assign.
    :raises OSError: as format_nvme_vf(), or EIO if the controller needs more
        resources.
    """
    check_number('VF', vf, MAX_VFS)
    check_number('queues', queues, _MAX_RESOURCES)
    check_number('interrupts', interrupts, _MAX_RESOURCES)
    with _controller(pf) as fd:
        controller = _secondary(fd, pf, vf)
        nvme_admin.set_offline(fd, controller)
        nvme_admin.set_online(fd, controller, queues, interrupts)


def _secondary(fd, pf, vf) -> int:
    for found in nvme_admin.read_secondaries(fd, pf):
        if found.vf == vf:
            return found.id
    raise OSError(errno.ENODEV, f'{pf} has no secondary controller for VF '
                                f'{vf}')


@contextlib.contextmanager
def _controller(function, hold=False):
    """Open the NVMe controller of a function, and yield its file descriptor.

    :param hold: whether to open its disks exclusively as well, which prevents
        other processes from using the disks.
    :raises OSError: EBUSY if a disk is used, otherwise as device_node().
    """
    check_function(function)
    with (_disks_held(*(function,) * hold),
          device_node(f'{SYS}/bus/pci/devices/{function}/nvme/nvme*', _NVME,
                      function) as fd):
        yield fd


def _check_namespaces(texts) -> list[nvme_admin.Namespace]:
    if not isinstance(texts, (list, tuple)) or len(texts) > _MAX_NAMESPACES:
        raise _invalid('list of namespaces', texts)
    for text in texts:
        check_text('namespace', text, _NAMESPACE)
    return [nvme_admin.Namespace.parse(text) for text in texts]


@contextlib.contextmanager
def _disks_held(*functions, namespaces=None, skipped=()):
    """Keep the disks of functions open exclusively, inside the context.

    The caller unbinds, resets or erases these functions. Hence not even
    a bug of nova-compute removes a disk under a file system.

    :param namespaces: see _open_disks().
    :param skipped: see _open_disks().
    :raises OSError: EBUSY if a disk, or a part of it, is mounted or otherwise
        held.
    """
    with contextlib.ExitStack() as stack:
        for function in functions:
            _open_disks(function, stack, os.O_RDONLY | os.O_EXCL, namespaces,
                        skipped)
        yield


def _open_disks(function, stack, flags, namespaces=None, skipped=(),
                ) -> dict[str, int]:
    """Open each disk of a function, until ``stack`` is closed.

    :param namespaces: numbers of the only NVMe namespaces whose disks are
        opened, or None for all disks.
    :param skipped: errno values of open(), with which a disk is left out.
    :returns: name of the disk -> file descriptor.
    """
    block = f'{SYS}/class/block'
    places = {name: f'{os.path.realpath(f"{block}/{name}")}/'
              for name in (os.listdir(block) if os.path.isdir(block) else ())}
    mine = {name for name, place in places.items() if f'/{function}/' in place}
    # of a disk with several paths only the head has a node
    mine = {_PATH.sub(r'\1\2', name) for name in mine}
    opened = {}
    for name in sorted(mine):
        if os.path.exists(f'{block}/{name}/partition') or (
                namespaces is not None
                and _read(f'{block}/{name}/nsid') not in namespaces):
            continue
        try:
            opened[name] = stack.enter_context(device_node(
                f'{block}/{name}', re.compile('[A-Za-z0-9_-]+'), function,
                stat.S_ISBLK, flags))
        except OSError as error:
            if error.errno not in skipped:
                raise
    return opened


def _invalid(name, value) -> OSError:
    return OSError(errno.EINVAL, f'{name} {value!r} is not acceptable')


def check_function(address: str) -> None:
    """Check that a text is a PCI address.

    :raises OSError: EINVAL if not.
    """
    if not isinstance(address, str) or not pci.ADDRESS.fullmatch(address):
        raise _invalid('PCI address', address)


def check_text(name: str, text: str, pattern: re.Pattern) -> None:
    """Check that a text matches a pattern.

    :raises OSError: EINVAL if not.
    """
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise _invalid(name, text)


def check_number(name: str, value: int, highest: int) -> None:
    """Check that a value is a number from 0 to highest.

    :raises OSError: EINVAL if not.
    """
    # bool is an int
    if type(value) is not int or not 0 <= value <= highest:
        raise _invalid(name, value)


def _read(path) -> str:
    with open(path, encoding='ascii') as file:
        return file.read().strip()


def _write(path, text):
    # an attribute needs one write(), without O_CREAT or O_TRUNC
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode('ascii'))
    finally:
        os.close(fd)


def _fme(pf):
    """Open the FME of a function, see device_node()."""
    return device_node(
        f'{SYS}/bus/pci/devices/{pf}/fpga_region/region*/dfl-fme.*', _FME, pf)


def _only(pattern, name, of) -> str:
    """Return the only path that matches; see device_node()."""
    found = [path for path in glob.glob(pattern)
             if name.fullmatch(os.path.basename(path))]
    if len(found) != 1:
        raise OSError(errno.ENODEV, f'{of} shows no such device')
    return found[0]


@contextlib.contextmanager
def device_node(pattern: str, name: re.Pattern, of: str,
                kind: Callable[[int], bool] = stat.S_ISCHR,
                flags: int = os.O_RDWR) -> Iterator[int]:
    """Open the device node of a function's only device of some kind, and yield
    the file descriptor.

    A driver numbers its devices again each time it is bound. Hence an old node
    may belong to another device, unless its major and minor numbers are those
    that sysfs has.

    :param pattern: path of the device in sysfs, with wildcards.
    :param name: regular expression for the name of the device.
    :param of: the function, for errors.
    :raises OSError: ENODEV when not exactly one device matches, or the node is
        that of another device.
    """
    found = _only(pattern, name, of)
    fd = os.open(f'{DEV}/{os.path.basename(found)}',
                 flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        node = os.fstat(fd)
        number = f'{os.major(node.st_rdev)}:{os.minor(node.st_rdev)}'
        if not kind(node.st_mode) or number != _read(f'{found}/dev'):
            raise OSError(errno.ENODEV, f'the node of a device of {of} is '
                                        f'another device')
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def mapped(path: str, offset: int, size: int):
    """Map a part of a bitstream file into memory, and yield its address.

    A large bitstream is not copied, because the mapping has the pages of the
    page cache. Privileged functions of other packages use this as well,
    because it checks the path.

    :param offset: start of the part in bytes. Offset and size are limited to
        [accel] bitstream_max_size, and must be below 4 GiB.
    :raises OSError: the file is not in [accel] bitstream_cache, cannot be
        opened, is a link, is not a regular file, or is too short; or a number
        is too large.
    """
    limit = min(CONF.accel.bitstream_max_size << 20, 0xffffffff)
    check_number('offset', offset, limit)
    check_number('size', size, limit)
    _check_cached(path)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                 | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, f'{path} is not a regular file')
        if size == 0 or offset + size > found.st_size:
            raise OSError(errno.EINVAL, f'{path} has {found.st_size} bytes, '
                          f'and {size} from {offset} were requested')
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        # private and writable because ctypes accepts no other mapping
        area = mmap.mmap(fd, offset - begin + size, access=mmap.ACCESS_COPY,
                         offset=begin)
    finally:
        os.close(fd)
    first = ctypes.c_char.from_buffer(area, offset - begin)
    try:
        yield ctypes.addressof(first)
    finally:
        del first
        area.close()


#: attributes of time cards that may be written -> pattern of their values.
#: Source: Documentation/ABI/testing/sysfs-timecard and ptp_ocp.c of Linux
TIMECARD_WRITABLE = {
    'clock_source': '[A-Za-z0-9_]{1,16}',
    'irig_b_mode': '[0-7]',
    'ts_window_adjust': '[0-9]{1,10}',
    'utc_tai_offset': '[0-9]{1,5}',
    'tod_correction': '-?[0-9]{1,10}',
    **{f'freq{number}/seconds': '[0-9]{1,3}' for number in range(1, 5)},
    # value that ends its signal
    **{f'gen{number}/signal': '0' for number in range(1, 5)},
    **{f'sma{number}': '(IN|OUT):( [A-Za-z0-9_]{1,16}){0,16}'
       for number in range(1, 5)},
}


@privsep.ctx.entrypoint
def is_group_open(function: str) -> bool:
    """Return whether a process has opened, by VFIO, a device in the IOMMU
    group of a function.

    If a process is opening a device, this waits for the reset of the device.

    :raises OSError: ENOENT if the group has no node.
    """
    check_function(function)
    group = os.path.basename(os.readlink(
        f'{SYS}/bus/pci/devices/{function}/iommu_group'))
    check_number('group', int(group), _MAX_GROUP)
    try:
        # the ioctl does not reach the device
        os.close(os.open(f'{DEV}/vfio/{group}', os.O_RDONLY))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return True
    return False


@privsep.processes.entrypoint
def processes(functions: Sequence[str]) -> list:
    for function in functions:
        check_function(function)
    nodes = {node: function for function in functions
             for node in _nodes(function)}
    found = []
    for pid, path, node in _open_nodes() if nodes else ():
        # a device that disappears meanwhile does not hide the others
        with contextlib.suppress(OSError):
            if node in nodes:
                found.append(
                    (nodes[node], pid, _read(f'{PROC}/{pid}/comm'), path))
    return found


#: whether a node is a block device, and its number
_Node = tuple[bool, str]


def _nodes(function) -> Iterator[_Node]:
    """Yield the nodes of all devices below a function in sysfs, and the node
    of the function's VFIO group."""
    device = f'{SYS}/bus/pci/devices/{function}'
    for directory, _, files in os.walk(os.path.realpath(device)):
        if 'dev' in files:
            kind = os.path.realpath(f'{directory}/subsystem')
            yield (os.path.basename(kind) == 'block',
                   _read(f'{directory}/dev'))
    with contextlib.suppress(OSError):
        group = os.path.basename(os.readlink(f'{device}/iommu_group'))
        yield False, _read(f'{SYS}/class/vfio/{group}/dev')
    with contextlib.suppress(OSError):
        # NVIDIA's driver creates no class devices; source: its README
        found = re.search(r'^Device Minor:\s*(\d+)', _read(
            f'{PROC}/driver/nvidia/gpus/{function}/information'), re.M)
        if found:
            yield False, f'{_NVIDIA_MAJOR}:{found[1]}'


def _open_nodes() -> Iterator[tuple[int, str, _Node]]:
    """Yield (pid, path, node) for each device node that a process has open."""
    for pid in filter(str.isdigit, os.listdir(PROC)):
        # processes may end meanwhile
        with contextlib.suppress(OSError):
            for name in os.listdir(f'{PROC}/{pid}/fd'):
                file = f'{PROC}/{pid}/fd/{name}'
                with contextlib.suppress(OSError):
                    path = os.readlink(file)
                    if path.startswith('/dev/'):
                        # skips files of a file system that does not answer
                        found = os.stat(file)
                        yield int(pid), path, (
                            stat.S_ISBLK(found.st_mode),
                            f'{os.major(found.st_rdev)}:'
                            f'{os.minor(found.st_rdev)}')


@privsep.ctx.entrypoint
def reset_function(function: str) -> None:
    """Reset a PCI function by the first of its methods that works.

    Blocks until the function answers, up to a minute. Source: reset in
    Documentation/ABI/testing/sysfs-bus-pci, pci_reset_function() of Linux.

    :raises OSError: ENOENT or ENOTTY when no method works, EIO and others
        when the device failed.
    """
    check_function(function)
    with _disks_held(function, skipped=_DEAD):
        _write(f'{SYS}/bus/pci/devices/{function}/reset', '1')


@privsep.ctx.entrypoint
def reset_gpu_by_vfio(function: str, family: str, milliseconds: int) -> tuple:
    """Reset the bus of a GPU that is bound to vfio-pci, and read words of
    BAR0; see nvidia.watch().

    :param family: a key of nvidia.REGISTERS.
    :param milliseconds: limit of reset and readings together.
    :returns: nvidia.Watched.
    :raises OSError: see nvidia.by_vfio(). EINVAL: the function is not a GPU of
        NVIDIA.
    """
    _check_gpu(function, family, milliseconds)
    with nvidia.by_vfio(SYS, DEV, function) as (read, reset):
        return nvidia.watch(read, reset, family, milliseconds / 1000)


# enabling a function takes CAP_SYS_ADMIN (enable_store() of Linux)
@privsep.disks.entrypoint
def reset_gpu_by_sysfs(function: str, family: str, milliseconds: int) -> tuple:
    """Do the same as reset_gpu_by_vfio(), for a GPU that has no driver and
    whose reset_method is bus."""
    _check_gpu(function, family, milliseconds)
    with nvidia.by_sysfs(SYS, function, _write) as (read, reset):
        return nvidia.watch(read, reset, family, milliseconds / 1000)


def _check_gpu(function, family, milliseconds):
    check_function(function)
    check_number('milliseconds', milliseconds, _LONGEST_WATCH)
    vendor = _read(f'{SYS}/bus/pci/devices/{function}/vendor')
    if family not in nvidia.REGISTERS or vendor != '0x10de':
        raise _invalid('family of GPUs', family)


@privsep.ctx.entrypoint
def unbind(function: str) -> None:
    """Unbind a function from its driver, if it has one.

    Blocks until the driver has released the function, also if another process
    has begun to unbind it.
    """
    check_function(function)
    _unbind(function)


def _unbind(function):
    """Do what unbind() does.

    While the driver's remove() runs, the function has no link to its driver,
    and the kernel holds the lock of the device (__device_release_driver() in
    drivers/base/dd.c of Linux 6.16). control_store() in
    drivers/base/power/sysfs.c takes this lock before it refuses the text.
    """
    device = f'{SYS}/bus/pci/devices/{function}'
    with _disks_held(function, skipped=_DEAD):
        if os.path.exists(f'{device}/driver'):
            _write(f'{device}/driver/unbind', function)
        else:
            with contextlib.suppress(OSError):
                _write(f'{device}/power/control', 'wait')


@privsep.ctx.entrypoint
def probe(function: str) -> None:
    """Let the kernel choose the driver of a function.

    Source: drivers_probe in Documentation/ABI/testing/sysfs-bus-pci.
    """
    check_function(function)
    _unbind(function)
    # a bare newline clears the override
    _write(f'{SYS}/bus/pci/devices/{function}/driver_override', '\n')
    _write(f'{SYS}/bus/pci/drivers_probe', function)


@privsep.ctx.entrypoint
def write_timecard(function: str, attribute: str, value: str) -> None:
    """Write an attribute of the time card of a function.

    :param attribute: one of privileged.TIMECARD_WRITABLE.
    :raises OSError: EINVAL for a value that the card does not have,
        EOPNOTSUPP for a connector that cannot be changed.
    """
    check_function(function)
    _check_value(attribute, value, TIMECARD_WRITABLE)
    # the number in ocp<n> changes each time the driver is bound
    card = _only(f'{SYS}/bus/pci/devices/{function}/timecard/ocp*',
                 _TIMECARD, function)
    _write(f'{card}/{attribute}', value)
