# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Bitstreams: their file formats, and how they are found in Glance."""

from nova_accel import exception

GBS = b'XeonFPGA\xb7GBSv001'
XCLBIN = b'xclbin2\0'

_NAMES = {GBS: 'a GBS file, for FPGAs of Intel',
          XCLBIN: 'an xclbin file, for FPGAs of AMD (Xilinx)'}


def check_format(head: bytes, wanted: bytes, name: str) -> None:
    """Check that a file does not have another known format.

    :param head: the first bytes of the file.
    :param wanted: GBS or XCLBIN, the format that the region accepts.
    :param name: name of the file for the error.
    :raises IncompatibleBitstream: the format is that of another vendor, whose
        FPGAs another host may have.
    """
    for magic, what in _NAMES.items():
        if magic != wanted and head.startswith(magic):
            raise exception.IncompatibleBitstream(
                f'{name} is {what}, and the allocated region is from another '
                f'vendor: require a vendor trait in the flavor.')
