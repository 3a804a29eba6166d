# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Print the NVLink domain of this host's GPUs, by NVIDIA's management library.

host.domains runs this module as a program, because the library's calls have no
time limit, and because a fault in the vendor's code ends only this process. A
domain is the UUID of a cluster and the number of a clique, in which all GPUs
reach each other by NVLink.

Source: nvml.h of CUDA 12.4 and later (nvmlDeviceGetGpuFabricInfoV).
"""

import ctypes
import sys
from typing import Any, NoReturn
import uuid

LIBRARY = 'libnvidia-ml.so.1'
#: NVML_GPU_FABRIC_STATE_COMPLETED
_COMPLETED = 3


class _Fabric(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t."""

    VERSION = 2
    _fields_ = [('version', ctypes.c_uint), ('cluster', ctypes.c_ubyte * 16),
                ('status', ctypes.c_int), ('clique', ctypes.c_uint),
                ('state', ctypes.c_ubyte), ('health', ctypes.c_uint)]


class Failed(Exception):
    """A failure, with the reason as a clause."""


def domains(library: Any) -> set[str]:
    """Return the NVLink domains of all GPUs of this host.

    :param library: libnvidia-ml.
    :raises Failed: a call of the library fails.
    """
    _check('nvmlInit_v2', library.nvmlInit_v2())
    try:
        count = ctypes.c_uint()
        _check('nvmlDeviceGetCount_v2',
               library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        return set(filter(None, (
            _domain(library, number) for number in range(count.value))))
    finally:
        library.nvmlShutdown()


def _domain(library, number):
    device = ctypes.c_void_p()
    _check('nvmlDeviceGetHandleByIndex_v2',
           library.nvmlDeviceGetHandleByIndex_v2(
               ctypes.c_uint(number), ctypes.byref(device)))
    # NVML_STRUCT_VERSION
    found = _Fabric(ctypes.sizeof(_Fabric) | _Fabric.VERSION << 24)
    _check('nvmlDeviceGetGpuFabricInfoV', library.nvmlDeviceGetGpuFabricInfoV(
        device, ctypes.byref(found)))
    cluster = bytes(found.cluster)
    if found.state != _COMPLETED or found.status or not any(cluster):
        return ''
    return f'{uuid.UUID(bytes=cluster)}-{found.clique}'


def _check(call, result):
    if result:
        raise Failed(f'{call} of {LIBRARY} answered {result}')


def main() -> NoReturn:
    """Print the only NVLink domain of this host, or an error, and exit."""
    try:
        found = domains(ctypes.CDLL(LIBRARY))
    except (OSError, AttributeError) as error:
        sys.exit(f'{LIBRARY} cannot be used ({error})')
    except Failed as error:
        sys.exit(str(error))
    if len(found) != 1:
        sys.exit(f'its GPUs are in {len(found) or "no"} NVLink '
                 f'domain{"s" * (len(found) > 1)}')
    print(*found)
    sys.exit(0)


if __name__ == '__main__':
    main()
