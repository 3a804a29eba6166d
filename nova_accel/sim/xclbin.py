# Licensed under the Apache License, Version 2.0. See LICENSE.
"""xclbin files for simulated cards."""

import struct
import uuid

MAGIC = b'xclbin2\0'
HEADER_SIZE = 456
BITSTREAM, IP_LAYOUT, PDI, PARTITION_METADATA = 0, 8, 18, 20


def make_xclbin(path: str, function: str, interface: str, size: int = 4096,
                kernels: tuple[str, ...] = ('vadd',),
                payload_interface: str | None = None,
                stripped: bool = False, versal: bool = False,
                platform: str = 'xilinx:u250:gen3x16:1.0') -> None:
    """Write an xclbin file for programming a simulated card.

    Only the section IP_LAYOUT is realistic. PARTITION_METADATA, a device tree
    in real files, contains only the interface UUID.

    :param function: UUID of the xclbin.
    :param interface: UUID of the shell, in the header.
    :param size: length of the part for the hardware, in bytes.
    :param kernels: names of kernels, each with one instance.
    :param payload_interface: UUID in PARTITION_METADATA, if it differs.
    :param stripped: whether to omit the part for the hardware.
    :param versal: whether the part for the hardware is a PDI.
    :raises ValueError: a UUID is malformed.
    """
    layout = struct.pack('<i4x', len(kernels)) + b''.join(
        struct.pack('<IIQ64s', 1, 0, 0x1000 * n, f'{name}:{name}_1'.encode())
        for n, name in enumerate(kernels))
    sections = [(IP_LAYOUT, b'', layout),
                (PARTITION_METADATA, b'',
                 uuid.UUID(payload_interface or interface).bytes)]
    if not stripped:
        sections.insert(0, (PDI if versal else BITSTREAM, b'primary',
                            b'\xa5' * size))
    at = HEADER_SIZE + 40 * len(sections)
    headers = contents = b''
    for kind, name, content in sections:
        headers += struct.pack('<I16s4xQQ', kind, name, at, len(content))
        # sections begin at multiples of eight
        contents += content + bytes(-len(content) % 8)
        at += len(content) + -len(content) % 8
    header = struct.pack(
        '<8si28s256sQQQQHBBHH16s64s16s16sI4x', MAGIC, -1, b'\xff' * 28, b'',
        0, at, 1700000000, 0, 0, 2, 16, 1, 0, uuid.UUID(interface).bytes,
        platform.encode(), uuid.UUID(function).bytes, b'', len(sections))
    with open(path, 'wb') as file:
        file.write(header + headers + contents)


def read(data: bytes) -> tuple[str, str, bytes, bytes]:
    """Return the parts of a file of make_xclbin() that drivers read.

    :returns: UUID, interface in PARTITION_METADATA, IP_LAYOUT, part for the
        hardware.
    """
    sections: dict[int, bytes] = {}
    for number in range(struct.unpack_from('<I', data, 448)[0]):
        kind, offset, size = struct.unpack_from(
            '<I20xQQ', data, HEADER_SIZE + 40 * number)
        sections.setdefault(kind, data[offset:offset + size])
    return (uuid.UUID(bytes=data[416:432]).hex,
            sections.get(PARTITION_METADATA, b'').hex(),
            sections.get(IP_LAYOUT, b''),
            sections.get(BITSTREAM) or sections.get(PDI) or b'')
