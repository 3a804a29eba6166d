# Licensed under the Apache License, Version 2.0. See LICENSE.
"""xclbin, the file format of functions for FPGAs of AMD (Xilinx) under XRT.

Layout, from xclbin.h of XRT: a header of 456 bytes (struct axlf) with the
number of sections, a section header of 40 bytes for each section, and the
sections. Numbers are little-endian, and UUIDs have the byte order in which
they are printed. This module checks every offset, because the driver xclmgmt
follows the offsets in a file without comparing them with its length.
"""

import os
import struct

from nova_accel import bitstream
from nova_accel import exception
from nova_accel import model

HEADER_SIZE = 456
SECTION_SIZE = 40
#: maximum number of sections, as in XRT's own tools
MAX_SECTIONS = 0x10000
#: maximum length in bytes; the driver refuses longer files
MAX_LENGTH = 1 << 30
#: maximum bytes of an IP_LAYOUT, more than 10000 IPs
MAX_LAYOUT = 1 << 20

#: kinds of sections
BITSTREAM, FIRMWARE, SCHED_FIRMWARE, IP_LAYOUT = 0, 3, 5, 8
MCS, BMC, PDI, PARTIAL_PDI, ASK_FLASH = 12, 13, 18, 19, 24
#: sections that program the hardware
_PAYLOADS = (BITSTREAM, PDI, PARTIAL_PDI)
#: sections that only shells and flash images have
_SHELL = {FIRMWARE: 'FIRMWARE', SCHED_FIRMWARE: 'SCHED_FIRMWARE', MCS: 'MCS',
          BMC: 'BMC', ASK_FLASH: 'ASK_FLASH'}
#: modes in which the driver programs a region: PR, TANDEM_STAGE2, both
_MODES = (1, 2, 3)
_OTHER_MODES = {0: 'flat, which is flashed with the card\'s shell',
                4: 'hardware emulation', 5: 'software emulation',
                6: 'hardware emulation'}
_NULL = bytes(16)
_IP = struct.Struct('<IIQ64s')
#: type of an IP that is a kernel
_KERNEL = 1


def parse(path: str, name: str | None = None) -> model.Bitstream:
    """Read the header and the section list of an xclbin file.

    The payload is the whole file; the bitstream in it is not read.

    :param path: the file.
    :param name: name of the file in errors, for example 'image <uuid>'; by
        default the path.
    :raises BitstreamError: the file is not an xclbin that can be programmed;
        the error has the offset and the reason.
    :raises IncompatibleBitstream: the file is for FPGAs of another vendor.
    """
    return _parse(path, name or path)[0]


def layout(path: str) -> bytes:
    """Return the IP_LAYOUT section of a file, or b'' if it has none.

    While the function is loaded, the driver shows this section in sysfs. For
    errors see parse().
    """
    return _parse(path, path)[1]


def kernels(ip_layout: bytes) -> tuple[str, ...]:
    """Return the names of the kernels in an IP_LAYOUT, such as 'vadd:vadd_1'.

    An entry cut off at the end is left out: sysfs shows one page.
    """
    names = []
    for at in range(8, len(ip_layout) - _IP.size + 1, _IP.size):
        kind, _, _, text = _IP.unpack_from(ip_layout, at)
        if kind == _KERNEL:
            names.append(text.split(b'\0')[0].decode('ascii', 'replace'))
    return tuple(names)


def _parse(path, name):
    try:
        with open(path, 'rb') as file:
            return _read(file, path, name)
    except OSError as e:
        raise exception.BitstreamError(
            f'{name} cannot be read as an xclbin file ({e.strerror}): upload '
            f'the bitstream again.') from None


def _read(file, path, name):
    size = os.fstat(file.fileno()).st_size
    head = file.read(HEADER_SIZE)
    bitstream.check_format(head, bitstream.XCLBIN, name)
    if not head.startswith(bitstream.XCLBIN):
        raise _refusal(name, 0, f'it begins with {head[:8].hex()} and not '
                                f'with {bitstream.XCLBIN.hex()}')
    if len(head) < HEADER_SIZE:
        raise _refusal(name, len(head), f'the file ends within the header of '
                                        f'{HEADER_SIZE} bytes')
    length, = struct.unpack_from('<Q', head, 304)
    count, = struct.unpack_from('<I', head, 448)
    if not 1 <= count <= MAX_SECTIONS:
        raise _refusal(name, 448, f'the number of sections is {count} and has '
                                  f'to be 1 to {MAX_SECTIONS}')
    start = HEADER_SIZE + SECTION_SIZE * count
    if not start <= length <= MAX_LENGTH:
        raise _refusal(name, 304, f'the length is {length} and has to be '
                                  f'{start} to {MAX_LENGTH}')
    if length > size:
        raise _refusal(name, size, f'the file ends before its length of '
                                   f'{length} bytes')
    signature, = struct.unpack_from('<i', head, 8)
    if signature != -1 and not 0 < signature <= length - start:
        raise _refusal(name, 8, f'the length of the signature is {signature}')
    mode, = struct.unpack_from('<H', head, 332)
    if mode not in _MODES:
        raise _refusal(name, 332, f'the mode is '
                       f'{_OTHER_MODES.get(mode, mode)}, and a region is '
                       f'programmed in mode PR')
    interface = _uuid(head, 336, name, 'the interface UUID is zero, as in '
                                       'files for older shells')
    function = _uuid(head, 416, name, 'the UUID of the file is zero')
    sections = _sections(file, count, start, length, name)
    for kind, what in _SHELL.items():
        if kind in sections:
            raise _refusal(name, sections[kind][2], f'it has the section '
                           f'{what}, which only shells and flash images have')
    if not any(sections.get(kind, (0, 0))[1] for kind in _PAYLOADS):
        raise _refusal(name, HEADER_SIZE, 'it has neither BITSTREAM nor PDI, '
                                          'like a stripped file')
    return (model.Bitstream(path=path, region_type_uuid=interface.hex(),
                            function_uuid=function.hex(), payload_offset=0,
                            payload_size=length),
            _layout(file, sections, name))


def _uuid(head, offset, name, problem) -> bytes:
    value = head[offset:offset + 16]
    if value == _NULL:
        raise _refusal(name, offset, problem)
    return value


def _sections(file, count, start, length, name):
    """Return kind -> (offset, size, offset of the section header).

    If several sections have the same kind, the first one counts.
    """
    found: dict[int, tuple[int, int, int]] = {}
    headers = file.read(SECTION_SIZE * count)
    for number in range(count):
        kind, = struct.unpack_from('<I', headers, number * SECTION_SIZE)
        offset, size = struct.unpack_from(
            '<QQ', headers, number * SECTION_SIZE + 24)
        at = HEADER_SIZE + number * SECTION_SIZE
        if offset + size > length or size and offset < start:
            raise _refusal(name, at, f'section {number} of kind {kind} is '
                           f'{size} bytes from {offset}, and has to be within '
                           f'{start} to {length}')
        found.setdefault(kind, (offset, size, at))
    return found


def _layout(file, sections, name) -> bytes:
    offset, size, _ = sections.get(IP_LAYOUT, (0, 0, 0))
    if not size:
        return b''
    if not 8 <= size <= MAX_LAYOUT:
        raise _refusal(name, offset, f'IP_LAYOUT has {size} bytes')
    file.seek(offset)
    found = file.read(size)
    count, = struct.unpack_from('<i', found)
    if not 0 <= count <= (size - 8) // _IP.size:
        raise _refusal(name, offset, f'IP_LAYOUT has {count} IPs in {size} '
                                     f'bytes')
    return found[:8 + count * _IP.size]


def _refusal(name, offset, reason) -> exception.BitstreamError:
    return exception.BitstreamError(
        f'{name} is not an xclbin that can be programmed: at offset {offset} '
        f'{reason}; upload the file that v++ linked.')
