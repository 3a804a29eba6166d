# Licensed under the Apache License, Version 2.0. See LICENSE.
"""All that runs with privileges.

Each function checks its arguments again, because the process that calls it may
have been taken over: it names hardware by PCI address and number only, and
finds the device node or attribute to write by itself. The kernel's errno comes
back as OSError. Numbers and structures: include/uapi/linux/fpga-dfl.h of Linux,
mgmt-ioctl.h of XRT.
"""

import contextlib
import ctypes
import errno
import fcntl
import glob
import mmap
import os
import re
import stat
import struct

from nova_accel import conf
from nova_accel import privsep

CONF = conf.CONF

SYS = '/sys'
DEV = '/dev'
#: drivers that a function may be bound to
DRIVERS = frozenset(('dfl-pci', 'vfio-pci', 'xocl'))
#: sriov_totalvfs is a 16-bit register
MAX_VFS = 0xffff
#: the DFL driver knows no more ports per FME
MAX_PORTS = 4

#: attributes of PCI functions that may be written -> pattern of their values.
#: Source: Documentation/ABI/testing/sysfs-driver-qat of Linux; NVIDIA's vGPU
#: user guide for the VFIO framework of the vendor
WRITABLE = {
    'qat/cfg_services': '[a-z]+(;[a-z]+){0,3}',
    'qat/state': 'up|down',
    'nvidia/current_vgpu_type': '[0-9]{1,6}',
}

_PARENT = re.compile('[A-Za-z0-9_][A-Za-z0-9_.:-]*')
_MDEV_TYPE = re.compile('[A-Za-z0-9_][A-Za-z0-9_.-]*')
_UUID = re.compile('[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}')
_ADDRESS = re.compile('[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f][.][0-7]')
_FME = re.compile('dfl-fme[.][0-9]+')
_XCLMGMT = re.compile('xclmgmt[0-9]+')
_FME_PORT_PR = 0xb680
_FME_PORT_RELEASE = 0x4004b681
_FME_PORT_ASSIGN = 0x4004b682
_ICAP_DOWNLOAD_AXLF = 0x40085806


@privsep.ctx.entrypoint
def program_dfl_port(pf: str, port: int, path: str, offset: int,
                     size: int) -> None:
    _check_function(pf)
    _check_number('port', port, MAX_PORTS - 1)
    limit = CONF.accel.bitstream_max_size << 20
    _check_number('offset', offset, limit)
    _check_number('size', size, min(limit, 0xffffffff))
    if not isinstance(path, str) or not os.path.isabs(path):
        raise _invalid('path', path)
    with _mapped(path, offset, size) as start, _fme(pf) as fme:
        # argsz, flags, port_id, buffer_size, buffer_address
        fcntl.ioctl(fme, _FME_PORT_PR,
                    struct.pack('=IIIIQ', 24, 0, port, size, start))


@privsep.ctx.entrypoint
def release_dfl_port(pf: str, port: int) -> None:
    _move_port(_FME_PORT_RELEASE, pf, port)


@privsep.ctx.entrypoint
def assign_dfl_port(pf: str, port: int) -> None:
    _move_port(_FME_PORT_ASSIGN, pf, port)


def _move_port(request, pf, port):
    _check_function(pf)
    _check_number('port', port, MAX_PORTS - 1)
    with _fme(pf) as fme:
        fcntl.ioctl(fme, request, struct.pack('=i', port))


@privsep.ctx.entrypoint
def clear_dfl_port_errors(function: str, port: int) -> None:
    _check_function(function)
    _check_number('port', port, MAX_PORTS - 1)
    for found in glob.glob(f'{SYS}/bus/pci/devices/{function}/fpga_region/'
                           f'region*/dfl-port.*'):
        errors = f'{found}/errors/errors'
        # a port without the error feature has the directory, but empty
        if _read(f'{found}/id') == str(port) and os.path.exists(errors):
            _write(errors, _read(errors))


@privsep.ctx.entrypoint
def program_xclbin(function: str, path: str, size: int) -> None:
    _check_function(function)
    _check_number('size', size, CONF.accel.bitstream_max_size << 20)
    if not isinstance(path, str) or not os.path.isabs(path):
        raise _invalid('path', path)
    with _mapped(path, 0, size) as start:
        # the driver copies as many bytes as the header says
        if size < 312 or (ctypes.string_at(start + 304, 8)
                          != struct.pack('<Q', size)):
            raise _invalid('xclbin', path)
        with _node(function, 'xrt_mgmt/xclmgmt*', _XCLMGMT) as node:
            fcntl.ioctl(node, _ICAP_DOWNLOAD_AXLF, struct.pack('=Q', start))


@privsep.ctx.entrypoint
def rebind(function: str, driver: str) -> None:
    _check_function(function)
    if driver not in DRIVERS:
        raise _invalid('driver', driver)
    device = f'{SYS}/bus/pci/devices/{function}'
    if os.path.exists(f'{device}/driver'):
        _write(f'{device}/driver/unbind', function)
    # vfio-pci knows no ids of its own; a bare newline clears the override
    _write(f'{device}/driver_override',
           f'{driver if driver == "vfio-pci" else ""}\n')
    _write(f'{SYS}/bus/pci/drivers/{driver}/bind', function)


@privsep.ctx.entrypoint
def set_numvfs(pf: str, count: int) -> None:
    _check_function(pf)
    _check_number('count', count, MAX_VFS)
    _write(f'{SYS}/bus/pci/devices/{pf}/sriov_numvfs', str(count))


@privsep.ctx.entrypoint
def write_attribute(function: str, attribute: str, value: str) -> None:
    _check_function(function)
    if (attribute not in WRITABLE or not isinstance(value, str)
            or not re.fullmatch(WRITABLE[attribute], value)):
        raise _invalid(f'a value for {attribute!r}', value)
    _write(f'{SYS}/bus/pci/devices/{function}/{attribute}', value)


@privsep.ctx.entrypoint
def read_qat_heartbeat(pf: str) -> int:
    _check_function(pf)
    # qat_<class of device>_<address>; source: adf_dbgfs.c of Linux
    found = glob.glob(f'{SYS}/kernel/debug/qat_*_{pf}/heartbeat/status')
    if len(found) != 1:
        raise OSError(errno.ENOENT, f'{pf} shows no heartbeat in debugfs')
    # the kernel ends the text with a zero byte
    return int(_read(found[0]).rstrip('\0'))


@privsep.ctx.entrypoint
def create_mdev(parent: str, type_name: str, uuid: str) -> None:
    _check_text('parent', parent, _PARENT)
    _check_text('type of mediated device', type_name, _MDEV_TYPE)
    _check_text('UUID', uuid, _UUID)
    _write(f'{SYS}/class/mdev_bus/{parent}/mdev_supported_types/{type_name}'
           f'/create', uuid)


@privsep.ctx.entrypoint
def remove_mdev(uuid: str) -> None:
    _check_text('UUID', uuid, _UUID)
    _write(f'{SYS}/bus/mdev/devices/{uuid}/remove', '1')


def _invalid(name, value) -> OSError:
    return OSError(errno.EINVAL, f'{name} {value!r} is not acceptable')


def _check_function(address):
    if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
        raise _invalid('PCI address', address)


def _check_text(name, text, pattern):
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise _invalid(name, text)


def _check_number(name, value, highest):
    # bool is an int
    if type(value) is not int or not 0 <= value <= highest:
        raise _invalid(name, value)


def _read(path) -> str:
    with open(path, encoding='ascii') as file:
        return file.read().strip()


def _write(path, text):
    # one write() without O_CREAT or O_TRUNC, as an attribute wants it
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode('ascii'))
    finally:
        os.close(fd)


def _fme(pf):
    return _node(pf, 'fpga_region/region*/dfl-fme.*', _FME)


@contextlib.contextmanager
def _node(function, pattern, name):
    """File descriptor of a device below a function.

    Its number changes whenever the driver is bound, so the node has to be the
    one whose device number sysfs shows below the function.

    :param pattern: where its directory is, of which there has to be one.
    :param name: what the name of the directory and of the node has to match.
    """
    found = glob.glob(f'{SYS}/bus/pci/devices/{function}/{pattern}')
    if len(found) != 1 or not name.fullmatch(os.path.basename(found[0])):
        raise OSError(errno.ENODEV, f'{function} shows no {pattern}')
    node = os.path.basename(found[0])
    fd = os.open(f'{DEV}/{node}', os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        opened = os.fstat(fd)
        number = f'{os.major(opened.st_rdev)}:{os.minor(opened.st_rdev)}'
        if (not stat.S_ISCHR(opened.st_mode)
                or number != _read(f'{found[0]}/dev')):
            raise OSError(errno.ENODEV, f'{DEV}/{node} is not the device of '
                                        f'{function}')
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _mapped(path, offset, size):
    """Address of a part of a file in memory, without a copy of it.

    The pages are those of the page cache, so a large bitstream costs nothing.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
                 | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, f'{path} is no regular file')
        if size == 0 or offset + size > found.st_size:
            raise OSError(errno.EINVAL, f'{path} has {found.st_size} bytes, '
                          f'asked are {size} from {offset}')
        begin = offset - offset % mmap.ALLOCATIONGRANULARITY
        # private and writable only because ctypes takes nothing else
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
