# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Bitstream files for simulated cards."""

import json
import struct
import uuid

GUID = b'XeonFPGA\xb7GBSv001'
#: marker in a payload, after the two UUIDs
CLEARS_MEMORY = b'clears memory'


def make_gbs(path: str, function: str, interface: str, size: int = 4096,
             payload_function: str | None = None,
             payload_interface: str | None = None,
             name: str = 'simulated', clears_memory: bool = False) -> None:
    """Write a GBS file for programming a simulated card.

    The payload has the format of simulated cards: UUIDs of function and region
    type, 16 bytes little-endian each, then padding. A real card refuses it.

    :param function: UUID of the function in the metadata.
    :param interface: UUID of the region type in the metadata.
    :param size: length of the payload in bytes.
    :param payload_function: function in the payload, if it differs.
    :param payload_interface: region type in the payload, if it differs.
    :param clears_memory: whether the bitstream clears the memory of the card.
    :raises ValueError: a UUID is malformed.
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
               + uuid.UUID(payload_interface or interface).bytes_le
               + CLEARS_MEMORY * clears_memory)
    with open(path, 'wb') as file:
        file.write(GUID + struct.pack('<I', len(metadata)) + metadata)
        file.write(payload.ljust(size, b'\xa5'))
