# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Bitstreams in the format GBS."""

import json
import struct

# Arria 10 PAC 1.1, and the loopback function NLB0
INTERFACE = '9926ab6d-6c92-5a68-aabc-a7d84c545738'
NLB0 = 'd8424dc4-a4a3-c413-f89e-433683f9040b'
HEX = {u: u.replace('-', '') for u in (INTERFACE, NLB0)}


def manifest(**changes):
    """The metadata as the packager writes it; a change to None removes."""
    image = {
        'magic-no': 488605312,
        'interface-uuid': INTERFACE,
        'power': 0,
        'clock-frequency-high': 'auto-300',
        'afu-top-interface': {'class': 'ccip_std_afu'},
        'accelerator-clusters': [{
            'name': 'nlb0', 'total-contexts': 1,
            'accelerator-type-uuid': NLB0}],
    }
    version = changes.pop('version', 1)
    image.update((k.replace('_', '-'), v) for k, v in changes.items())
    image = {k: v for k, v in image.items() if v is not None}
    return {'version': version, 'platform-name': 'DCP', 'afu-image': image}


def make(metadata=None, payload=b'\x5a' * 64, length=None):
    """A GBS file; metadata is JSON-able or bytes."""
    if metadata is None:
        metadata = manifest()
    if not isinstance(metadata, bytes):
        metadata = json.dumps(metadata).encode()
    length = len(metadata) if length is None else length
    return (bytes.fromhex('58656f6e46504741b747425376303031')
            + struct.pack('<I', length) + metadata + payload)
