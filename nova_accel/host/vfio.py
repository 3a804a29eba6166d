# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Determine which devices can move with a guest in a live migration.

QEMU asks the VFIO driver of a device two questions: whether it saves and loads
the state of the device (VFIO_DEVICE_FEATURE_MIGRATION), and whether it logs
which memory the device has written meanwhile
(VFIO_DEVICE_FEATURE_DMA_LOGGING). The IOMMU can log writes, too, for devices
that QEMU opens by iommufd (virt.live_migration). nova-compute cannot ask the
driver, because only a process that has opened the device gets an answer.
Opening resets the function, and is possible only while no guest has it (a vGPU
of NVIDIA even requires a guest). Hence this module contains the known answers
of each driver. If a driver answers differently, libvirt refuses the migration
before the guest moves.
"""

from collections.abc import Iterable
import contextlib
import fnmatch

from nova_accel.host import pci
from nova_accel import model

#: VFIO drivers that save the state of a device -> whether they log its writes.
#: Drivers that log them also stop accesses between devices
#: (VFIO_MIGRATION_P2P), which QEMU requires if there are several. Sources:
#: drivers/vfio/pci (7.2) and samples/vfio-mdev/mtty.c (6.7) of Linux; NVIDIA's
#: vGPU user guide. Names in the spelling of modules
_DRIVERS = {
    'mlx5_vfio_pci': True, 'mtty': True, 'nvidia': True, 'pds_vfio_pci': True,
    'hisi_acc_vfio_pci': False, 'qat_vfio_pci': False,
    'virtio_vfio_pci': False, 'xe_vfio_pci': False}
#: attribute of the IOMMU above a function -> bits that show that it logs the
#: function's writes. Intel: Scalable Mode and dirty bits of the second stage
#: (ssads_supported() in drivers/iommu/intel/iommu.h); AMD: FEATURE_HDSUP
#: (amd_iommu_types.h); of Linux 6.7. Arm shows nothing
_IOMMUS = {'iommu/intel-iommu/ecap': 1 << 43 | 1 << 45,
           'iommu/amd-iommu/features': 1 << 52}
#: the last word of migrates() if the IOMMU logs
_BY_IOMMU = 'iommufd'
#: versions of libvirt and QEMU that bind a function to the driver that saves
#: its state, and move the state. They are Nova's for its own PCI devices
#: (MIN_VFIO_PCI_VARIANT_..., 31 to 34)
VERSIONS = (10, 0, 0), (8, 2, 2)
#: versions that attach devices by iommufd, also to a running guest, and let
#: the IOMMU log (NEWS.rst of libvirt 12.1 and 12.2)
IOMMUFD_VERSIONS = (12, 2, 0), (9, 1, 0)
#: MiB/s of 10 Gb/s
_BANDWIDTH = 10 ** 10 / 8 / 2 ** 20


def migrates(kernel, handle: model.AttachHandle, device: str,
             ) -> tuple[str, str]:
    """Return by which driver the state of a handle can move to another host,
    or why it cannot.

    :param device: address of the device.
    :returns: (driver with version, ''), for example ('nvidia 550.54.16', ''),
        or ('', reason) if the state cannot move.
    """
    if len(handle.functions) > 1:
        return '', (f'it is {len(handle.functions)} functions, whose states '
                    f'are not saved together')
    try:
        name = _driver(kernel, handle, device)
        if name not in _DRIVERS:
            return '', (f'its VFIO driver is {name or "not known"}, which '
                        f'does not save its state')
        if not _DRIVERS[name] and not _iommu_logs(kernel, handle.address):
            return '', (f'its VFIO driver {name} does not log what it writes '
                        f'to memory, and neither does the IOMMU: that needs '
                        f'an IOMMU that can, and the module iommufd')
        if not kernel.has_iova_bitmap():
            return '', ('the kernel cannot log what it writes to memory (no '
                        'CONFIG_IOMMUFD_DRIVER)')
        return ' '.join(filter(None, (
            name, _version(kernel, name), *_firmware(kernel, device),
            '' if _DRIVERS[name] else _BY_IOMMU))), ''
    except OSError as error:
        return '', (f'its VFIO driver in a guest cannot be determined '
                    f'({error.strerror})')


def shared_groups(kernel, device: model.Device,
                  ) -> tuple[tuple[str, ...], ...]:
    """Return the members of each IOMMU group that a handle of a device shares
    with a function outside of the handle."""
    found = set()
    for own in _units(kernel, device):
        for function in own:
            with contextlib.suppress(OSError):
                members = pci.group_members(kernel, function) or ()
                if not own.issuperset(members):
                    found.add(tuple(members))
    return tuple(sorted(found))


def _units(kernel, device) -> list[set[str]]:
    """Return the sets of functions that are allocated together: the functions
    of a handle, or a single PF or VF without a handle."""
    found = [{*handle.addresses} for handle in device.all_handles
             if handle.type is model.HandleType.PCI]
    with contextlib.suppress(OSError):
        rest = {device.address, *pci.virtual_functions(kernel, device.address)}
        found += [{function} for function in rest.difference(*found)]
    return found


def is_by_iommu(migrates_by: str) -> bool:
    """Return whether a device can migrate only because the IOMMU logs its
    writes to memory.

    :param migrates_by: model.Device.migrates_by.
    """
    return migrates_by.endswith(f' {_BY_IOMMU}')


def versions(migrates_by: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the oldest versions of libvirt and QEMU that can move the state
    of a device."""
    return IOMMUFD_VERSIONS if is_by_iommu(migrates_by) else VERSIONS


def named(both: Iterable[Iterable[int]]) -> str:
    """Return the versions as text, like 'libvirt 10.0.0 and QEMU 9.1.0'."""
    return ' and '.join(
        f'{name} {".".join(map(str, version))}' for name, version
        in zip(('libvirt', 'QEMU'), both))


def seconds_to_copy(memory: int, bandwidth: int) -> float:
    """Return for how many seconds a guest may be paused while the memory of
    its devices is copied.

    :param memory: MiB.
    :param bandwidth: MiB/s, as [libvirt] live_migration_bandwidth; 0 means no
        limit, and a network of 10 Gb/s is assumed.
    """
    return memory / (bandwidth or _BANDWIDTH)


def _driver(kernel, handle, device) -> str:
    if handle.type is model.HandleType.MDEV:
        parent = handle.parent or device
        if pci.ADDRESS.fullmatch(parent):
            return pci.driver(kernel, parent) or ''
        return driver_of_types(kernel.listdir(
            f'class/mdev_bus/{parent}/mdev_supported_types'))
    found = pci.driver(kernel, handle.address)
    if handle.managed and not pci.is_for_vfio(kernel, handle.address):
        found = kernel.vfio_module(handle.address)
    return (found or '').replace('-', '_')


def driver_of_types(names: Iterable[str]) -> str:
    """Return the kernel module that creates mediated devices of these types,
    or '' without types.

    The name of a type begins with the name of the module (mdev_type_add() in
    drivers/vfio/mdev/mdev_sysfs.c of Linux).
    """
    return min(names, default='').partition('-')[0]


def _iommu_logs(kernel, function) -> bool:
    """Return whether the IOMMU can log a function's writes for QEMU."""
    # the device that QEMU opens, /dev/iommu
    if not kernel.exists('class/misc/iommu'):
        return False
    for attribute, bits in _IOMMUS.items():
        with contextlib.suppress(FileNotFoundError):
            # the second one of AMD's two words, 'efr2:efr'
            shown = kernel.read(pci.path(function, attribute))
            return not bits & ~int(shown.rpartition(':')[2], 16)
    return False


def _version(kernel, driver) -> str:
    try:
        return kernel.read(f'module/{driver}/version')
    except FileNotFoundError:
        # it is part of the kernel
        return ''


def _firmware(kernel, device) -> list[str]:
    """Return the versions of the firmware from devlink, which mlx5 supports."""
    if not pci.ADDRESS.fullmatch(device):
        return []
    found = kernel.read_firmware(device)
    return [f'{name} {found[name]}' for name in sorted(found)
            if name.startswith('fw')]


def best_variant(lines: Iterable[str], modalias: str) -> str | None:
    """Return the most specific VFIO driver that supports a function. libvirt
    10.0 and later loads this module in place of vfio-pci
    (virPCIDeviceFindBestVFIOVariant in virpci.c).

    :param lines: lines of modules.alias.
    :param modalias: modalias of the function, 'pci:v000015B3d...'.
    """
    found = []
    for line in lines:
        # alias vfio_pci:v000015B3d0000101Esv*sd*bc*sc*i* mlx5_vfio_pci
        _, pattern, module = line.split()
        if fnmatch.fnmatchcase(f'vfio_{modalias}', pattern):
            found.append((pattern.count('*'), module))
    return min(found)[1] if found else None
