# Licensed under the Apache License, Version 2.0. See LICENSE.
"""GBS, the file format of partial bitstreams of Intel FPGAs.

Layout, from OPAE's libbitstream and its packager: 16 bytes GUID, 4 bytes
little-endian length of the metadata, the metadata (JSON in UTF-8), and the RBF
for the hardware. The older form without metadata is a little-endian magic
number, the interface UUID in reversed byte order, and the RBF.
"""

import json
import os
import struct

from nova_accel import bitstream
from nova_accel import exception
from nova_accel import model
from nova_accel import text

GUID = bitstream.GBS
#: first four bytes of the form without metadata, little-endian
LEGACY_MAGIC = 0x1d1f8680
#: length of the fixed part in both forms
HEADER_SIZE = 20
#: bytes; Intel's own tools refuse metadata of this length and above
METADATA_LIMIT = 4096
#: versions of the metadata; early releases of the tools wrote 640 and 650 for 1
VERSIONS = (1, 640, 650)


def parse(path: str, name: str | None = None) -> model.Bitstream:
    """Read the header and the metadata of a GBS file, not its payload.

    If the file has no metadata, the function UUID is None.

    :param path: the file.
    :param name: name of the file in errors, for example 'image <uuid>'; by
        default the path.
    :raises BitstreamError: the file is not a usable GBS; the error has the
        offset and the reason.
    :raises IncompatibleBitstream: the file is for FPGAs of another vendor.
    """
    name = name or path
    try:
        with open(path, 'rb') as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER_SIZE + METADATA_LIMIT)
    except OSError as e:
        raise exception.BitstreamError(
            f'{name} cannot be read as a GBS file ({e.strerror}): upload the '
            f'bitstream again.') from None
    bitstream.check_format(head, GUID, name)
    if len(head) < HEADER_SIZE:
        raise _refusal(name, len(head), f'the file ends within the header of '
                                        f'{HEADER_SIZE} bytes')
    if head.startswith(GUID):
        start, region_type, function = _metadata(head, size, name)
    elif struct.unpack_from('<I', head)[0] == LEGACY_MAGIC:
        start, function = HEADER_SIZE, None
        region_type = head[4:HEADER_SIZE][::-1].hex()
    else:
        raise _refusal(name, 0, f'it begins with {head[:16].hex()} and not '
                                f'with the GUID {GUID.hex()}')
    if size <= start:
        raise _refusal(name, start, 'the file ends before the payload')
    return model.Bitstream(
        path=path, region_type_uuid=region_type, function_uuid=function,
        payload_offset=start, payload_size=size - start)


def _refusal(name, offset, reason) -> exception.BitstreamError:
    return exception.BitstreamError(
        f'{name} is not a usable GBS file: at offset {offset} {reason}; '
        f'upload the file that the packager of OPAE wrote.')


def _metadata(head, size, name) -> tuple[int, str, str]:
    """Return (offset of the payload, region type, function)."""
    length, = struct.unpack_from('<I', head, len(GUID))
    end = HEADER_SIZE + length
    if not 0 < length < METADATA_LIMIT:
        raise _refusal(name, len(GUID), f'the length of the metadata is '
                       f'{length} and has to be 1 to {METADATA_LIMIT - 1}')
    if end > min(size, len(head)):
        raise _refusal(name, size, f'the file ends within the metadata of '
                                   f'{length} bytes')
    try:
        decoded = head[HEADER_SIZE:end].decode()
        metadata = json.loads(decoded)
    except UnicodeDecodeError as e:
        raise _refusal(name, HEADER_SIZE + e.start,
                       'the metadata is not UTF-8') from None
    except json.JSONDecodeError as e:
        offset = HEADER_SIZE + len(decoded[:e.pos].encode())
        raise _refusal(name, offset,
                       f'the metadata is not JSON ({e.msg})') from None
    except (RecursionError, ValueError):
        # nested too deeply, or a number with too many digits
        raise _refusal(name, HEADER_SIZE,
                       'the metadata exceeds the limits of JSON') from None

    version = _item(metadata, 'version', object, '', name)
    if version not in VERSIONS:
        raise _refusal(name, HEADER_SIZE, f'the metadata has version '
                       f'{text.printable(version)}, and the known versions '
                       f'are {", ".join(map(str, VERSIONS))}')
    image = _item(metadata, 'afu-image', dict, '', name)
    clusters = _item(image, 'accelerator-clusters', list, 'afu-image.', name)
    if len(clusters) != 1:
        raise _refusal(name, HEADER_SIZE, f'the metadata has {len(clusters)} '
                       f'accelerator-clusters, and a region takes exactly one')
    return (end,
            _uuid(image, 'interface-uuid', 'afu-image.', name),
            _uuid(clusters[0], 'accelerator-type-uuid',
                  'afu-image.accelerator-clusters[0].', name))


def _item(of, key, kind, where, name):
    value = of.get(key) if isinstance(of, dict) else None
    if value is None or not isinstance(value, kind):
        found = 'lacks' if value is None else 'has a wrong'
        raise _refusal(name, HEADER_SIZE, f'the metadata {found} {where}{key}')
    return value


def _uuid(of, key, where, name) -> str:
    value = _item(of, key, str, where, name)
    try:
        return model.uuid_hex(value)
    except ValueError:
        raise _refusal(name, HEADER_SIZE, f'{where}{key} is '
                       f'{text.printable(value)} and not a UUID') from None
