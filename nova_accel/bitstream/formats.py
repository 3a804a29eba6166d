# Licensed under the Apache License, Version 2.0. See LICENSE.
"""How files of the known formats begin, to tell them apart."""

from nova_accel import exception

GBS = b'XeonFPGA\xb7GBSv001'
XCLBIN = b'xclbin2\0'

_NAMES = {GBS: 'a GBS file, for FPGAs of Intel',
          XCLBIN: 'an xclbin file, for FPGAs of AMD (Xilinx)'}


def check(head: bytes, wanted: bytes, name: str) -> None:
    """See that a file is not a good one of another format.

    :param head: its first bytes.
    :param wanted: what it is to begin with.
    :param name: what to call it in the error.
    :raises IncompatibleBitstream: another host may have the FPGA for it.
    """
    for magic, what in _NAMES.items():
        if magic != wanted and head.startswith(magic):
            raise exception.IncompatibleBitstream(
                f'{name} is {what}, and the allocated region is of another '
                f'vendor: require a vendor trait in the flavor.')
