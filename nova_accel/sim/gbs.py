# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Bitstream files for cards that are not there."""

import json
import struct
import uuid

GUID = b'XeonFPGA\xb7GBSv001'


def make_gbs(path: str, function: str, interface: str, size: int = 4096,
             payload_function: str | None = None,
             payload_interface: str | None = None,
             name: str = 'simulated') -> None:
    """Write a GBS file that a simulated card can be programmed with.

    The payload is what simulated cards understand: the function and the
    interface, 16 bytes little-endian each, then padding. A real card refuses
    it.

    :param function: UUID of the function that the metadata names.
    :param interface: UUID of the region type that the metadata names.
    :param size: length of the payload in bytes.
    :param payload_function: the function in the payload, when it is to differ.
    :param payload_interface: the region type in the payload likewise.
    :raises ValueError: when a UUID is none.
    """
    metadata = json.dumps({'version': 1, 'afu-image': {
        'magic-no': 488605312,
        'interface-uuid': str(uuid.UUID(interface)),
        'power': 0,
        'afu-top-interface': {'class': 'ccip_std_afu'},
        'accelerator-clusters': [{
            'name': name, 'total-contexts': 1,
            'accelerator-type-uuid': str(uuid.UUID(function))}],
    }}).encode()
    payload = (uuid.UUID(payload_function or function).bytes_le
               + uuid.UUID(payload_interface or interface).bytes_le)
    with open(path, 'wb') as file:
        file.write(GUID + struct.pack('<I', len(metadata)) + metadata)
        file.write(payload.ljust(size, b'\xa5'))
