# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Change NVSwitch partitions by the library of NVIDIA's Fabric Manager.

drivers.fabric runs this module as a program, because the library's calls have
no time limit, and because a fault in the vendor's code ends only this process.

Sources: nv_fm_agent.h and nv_fm_types.h of the package
nvidia-fabricmanager-dev, releases 470 and 580; the Fabric Manager user guide
(Shared NVSwitch).
"""

import ctypes
import sys
from typing import Any, NamedTuple, NoReturn

from nova_accel.host import pci

LIBRARY = 'libnvfm.so.1'
#: where Fabric Manager listens (FM_CMD_PORT_NUMBER)
ADDRESS = '127.0.0.1:6666'
ACTIVATE, DEACTIVATE, LOOK = 'activate', 'deactivate', 'look'
_CONNECT_MILLISECONDS = 5000

#: fmReturn_t, without the prefix FM_ST_
_RETURNS = dict(enumerate((
    'SUCCESS', 'BADPARAM', 'GENERIC_ERROR', 'NOT_SUPPORTED', 'UNINITIALIZED',
    'TIMEOUT', 'VERSION_MISMATCH', 'IN_USE', 'NOT_CONFIGURED',
    'CONNECTION_NOT_VALID', 'NVLINK_ERROR', 'RESOURCE_BAD', 'RESOURCE_IN_USE',
    'RESOURCE_NOT_IN_USE', 'RESOURCE_EXHAUSTED', 'RESOURCE_NOT_READY',
    'PARTITION_EXISTS', 'PARTITION_ID_IN_USE', 'PARTITION_ID_NOT_IN_USE',
    'PARTITION_NAME_IN_USE', 'PARTITION_NAME_NOT_IN_USE',
    'PARTITION_ID_NAME_MISMATCH', 'NOT_READY',
    'RESOURCE_USED_IN_THIS_PARTITION', 'RESOURCE_USED_IN_ANOTHER_PARTITION')))
_SUCCESS, _VERSION_MISMATCH = 0, -6
_BY_INTERNET, _BY_SOCKET = 1, 2


class _Parameters1(ctypes.Structure):
    """fmConnectParams_v1, which a library of release 470 requires."""

    VERSION = 1
    _fields_ = [('version', ctypes.c_uint), ('address', ctypes.c_char * 256),
                ('milliseconds', ctypes.c_uint),
                ('is_socket', ctypes.c_uint)]


class _Parameters2(ctypes.Structure):
    """fmConnectParams_v2."""

    VERSION = 2
    _fields_ = [*_Parameters1._fields_, ('kind', ctypes.c_int)]


class _Gpu(ctypes.Structure):
    """fmFabricPartitionGpuInfo_t."""

    _fields_ = [('module', ctypes.c_uint), ('uuid', ctypes.c_char * 80),
                ('address', ctypes.c_char * 32), ('links', ctypes.c_uint),
                ('most_links', ctypes.c_uint), ('rate', ctypes.c_uint)]


class _Partition(ctypes.Structure):
    """fmFabricPartitionInfo_t."""

    _fields_ = [('number', ctypes.c_uint), ('is_active', ctypes.c_uint),
                ('count', ctypes.c_uint), ('gpus', _Gpu * 16)]

    def modules(self) -> dict[int, str]:
        """Return module -> address of its GPU as in sysfs. The address is ''
        if Fabric Manager does not see the GPU."""
        return {gpu.module: pci.as_in_sysfs(
            gpu.address.decode('ascii', 'replace'))
            for gpu in self.gpus[:self.count]}


class _Function(ctypes.Structure):
    """fmPciDevice_t."""

    _fields_ = [(part, ctypes.c_uint) for part in (
        'domain', 'bus', 'device', 'function')]


class _Partitions(ctypes.Structure):
    """fmFabricPartitionList_v2, whose version is 1."""

    VERSION = 1
    _fields_ = [('version', ctypes.c_uint), ('count', ctypes.c_uint),
                ('most', ctypes.c_uint), ('partitions', _Partition * 64)]


class Gpu(NamedTuple):
    """A GPU of a partition, by PCI addresses."""

    address: str
    #: VF by which its guest has it; '' if the guest has the whole GPU
    vf: str = ''


class Failed(Exception):
    """A failure, with the reason as a sentence."""


def change(library: Any, action: str, address: str, wanted: dict[int, Gpu],
           ) -> str:
    """Activate or deactivate the NVSwitch partition of some GPUs, or only read
    its state.

    A partition in the wanted state is not changed. After a change, the state
    is read again.

    :param library: libnvfm.
    :param action: ACTIVATE, DEACTIVATE or LOOK.
    :param address: address of Fabric Manager: <IPv4 address>:<port>, or the
        absolute path of its socket.
    :param wanted: each GPU by the number of its module.
    :returns: the present state of the partition, as a sentence.
    :raises Failed: the partition is not in the wanted state.
    """
    _check('fmLibInit', library.fmLibInit())
    try:
        handle = _connect(library, address)
        try:
            return _change(library, handle, action, wanted)
        finally:
            library.fmDisconnect(handle)
    finally:
        library.fmLibShutdown()


def _change(library, handle, action, wanted):
    partition, others = _find(library, handle, wanted)
    number, is_wanted = partition.number, action == ACTIVATE
    if action != LOOK and bool(partition.is_active) != is_wanted:
        overlapping = sorted(p.number for p in others
                             if p.is_active and p.modules().keys() & wanted)
        if is_wanted and overlapping:
            raise Failed(
                f'Partition {number} cannot be activated while partition '
                f'{overlapping[0]}, which has GPUs of it, is active: '
                f'deactivate that one (fmpm -d {overlapping[0]}), if no guest '
                f'has its GPUs.')
        # in the order of the partition's GPUs, one for each
        vfs = [wanted[module].vf for module in partition.modules()]
        function = ('fmDeactivateFabricPartition' if not is_wanted
                    else 'fmActivateFabricPartitionWithVFs' if any(vfs)
                    else 'fmActivateFabricPartition')
        result = getattr(library, function)(handle, ctypes.c_uint(number), *(
            ((_Function * len(vfs))(*map(_function, vfs)), len(vfs))
            if is_wanted and any(vfs) else ()))
        partition, _ = _find(library, handle, wanted)
        if bool(partition.is_active) != is_wanted:
            raise Failed(
                f'{function}({number}) answered {_name(result)}, and the '
                f'partition is {"in" * is_wanted}active: see the log of Fabric '
                f'Manager.')
    return (f'partition {number}, {"" if partition.is_active else "in"}active')


def _connect(library, address):
    """Connect to Fabric Manager.

    :returns: fmHandle_t.
    """
    handle = ctypes.c_void_p()
    is_socket = address.startswith('/')
    for kind in (_Parameters2, _Parameters1):
        parameters = kind(_version(kind), address.encode(),
                          _CONNECT_MILLISECONDS, is_socket)
        if kind is _Parameters2:
            parameters.kind = _BY_SOCKET if is_socket else _BY_INTERNET
        result = library.fmConnect(
            ctypes.byref(parameters), ctypes.byref(handle))
        if result != _VERSION_MISMATCH:
            break
    _check(f'fmConnect({address})', result)
    return handle


def _find(library, handle, wanted):
    """Find the partition that consists of exactly the wanted modules.

    :returns: (the partition, all other partitions).
    :raises Failed: not exactly one partition fits, or Fabric Manager reports
        another GPU for a module.
    """
    found = _Partitions(_version(_Partitions))
    _check('fmGetSupportedFabricPartitions',
           library.fmGetSupportedFabricPartitions(
               handle, ctypes.byref(found)))
    partitions = found.partitions[:found.count]
    mine = [p for p in partitions if p.modules().keys() == wanted.keys()]
    if len(mine) != 1:
        shown = '; '.join(
            f'{p.number}: {" ".join(map(str, sorted(p.modules())))}'
            for p in partitions if p.count > 1)
        raise Failed(
            f'Fabric Manager has {len(mine) or "no"} partitions of exactly the '
            f'modules {" ".join(map(str, sorted(wanted)))}; those of several '
            f'GPUs are {shown or "none"}: see [accel] device_sets and '
            f'gpu_modules.')
    for module, address in mine[0].modules().items():
        if address and address != wanted[module].address:
            raise Failed(
                f'[accel] gpu_modules has {wanted[module].address} for module '
                f'{module}, and Fabric Manager reports {address}: correct the '
                f'option.')
    return mine[0], [p for p in partitions if p.number != mine[0].number]


def _function(address):
    domain, bus, rest = address.split(':')
    return _Function(*(int(part, 16) for part in (
        domain, bus, *rest.split('.'))))


def _version(kind):
    # MAKE_FM_PARAM_VERSION
    return ctypes.sizeof(kind) | kind.VERSION << 24


def _name(result):
    return f'FM_ST_{_RETURNS[-result]}' if -result in _RETURNS else result


def _check(call, result):
    if result != _SUCCESS:
        raise Failed(f'{call} answered {_name(result)}: see that Fabric '
                     f'Manager runs with FABRIC_MODE=1, or 2 for vGPUs, and '
                     f'its log.')


def main(arguments: list[str]) -> NoReturn:
    """Run the action of the command line, print the result, and exit.

    :param arguments: action, address of Fabric Manager, then
        <module>=<PCI address> or <module>=<PCI address>/<VF> for each GPU.
    """
    action, address, *pairs = arguments
    wanted = {int(module): Gpu(*gpu.split('/')) for module, _, gpu in (
        pair.partition('=') for pair in pairs)}
    try:
        library = ctypes.CDLL(LIBRARY)
        print(change(library, action, address, wanted))
    except OSError as error:
        sys.exit(f'{LIBRARY} cannot be loaded ({error}): install '
                 f'nvidia-fabricmanager-dev in the release of Fabric Manager.')
    except Failed as error:
        sys.exit(str(error))
    sys.exit(0)


if __name__ == '__main__':
    main(sys.argv[1:])
