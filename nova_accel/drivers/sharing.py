# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Detect GPUs that another program of the host divides, or is about to divide.

Such a GPU is not offered whole. Sources: the user guide of NVIDIA vGPU for
nvidia_vgpu_vfio, the module of its manager, and for sriov-manage, which
unbinds a GPU from its driver and binds it again; amd/MxGPU-Virtualization for
gim; Documentation/gpu/xe of Linux for survivability_mode.
"""

from nova_accel.drivers import sriov
from nova_accel.host import pci

_NVIDIA, _AMD = '10de', '1002'
#: vendor -> host driver and module of the program that divides GPUs
_MANAGER = {_NVIDIA: ('nvidia', 'module/nvidia_vgpu_vfio'),
            _AMD: ('gim', 'module/gim')}
_WAY_OUT = f'bind it to {pci.VFIO} if servers must have it whole'


def is_shared(kernel, address: str) -> bool:
    """Return whether a driver of the host divides a GPU, or is about to.

    :raises OSError: the function cannot be read.
    """
    return (address in sriov.wanted() or _has_types(kernel, address)
            or pci.has_vfs(kernel, address))


def is_display(kernel, address: str) -> bool:
    """Return whether the host has booted with a GPU as its display.

    :raises OSError: the GPU cannot be read.
    """
    try:
        return kernel.read(pci.path(address, 'boot_vga')) == '1'
    except FileNotFoundError:
        # only VGA devices have the attribute
        return False


def failure(kernel, address: str) -> str:
    """Return why a GPU does not work, as a clause, or ''.

    :raises OSError: the GPU cannot be read.
    """
    if pci.driver(kernel, address) == 'xe' and kernel.exists(
            pci.path(address, 'survivability_mode')):
        return ('it is in recovery mode (survivability_mode of xe): update '
                'its firmware, and power-cycle the host')
    return ''


def obstacle(kernel, address: str) -> str:
    """Return why a GPU must not be allocated whole, as a clause, or ''.

    :raises OSError: the GPU cannot be read.
    """
    if is_display(kernel, address):
        return 'it is the display of this host (boot_vga)'
    bound = pci.driver(kernel, address)
    if _has_types(kernel, address):
        return (f'it is shared out as mediated devices by {bound}: add vgpu '
                f'to [accel] enabled_drivers, or {_WAY_OUT}')
    manager = _manager(kernel, address, bound)
    if manager == 'nvidia':
        return (f'the vGPU manager of NVIDIA has it, and no VFs exist yet: '
                f'have "sriov-manage -e {address}" run, or {_WAY_OUT}')
    if manager:
        return (f'it belongs to the driver {manager} of AMD, which has '
                f'created no VFs yet: load it with vf_num, or {_WAY_OUT}')
    return ''


def _has_types(kernel, address) -> bool:
    return kernel.exists(pci.path(address, 'mdev_supported_types'))


def _manager(kernel, address, bound) -> str:
    """Return the host driver whose manager divides a GPU, or '' if none does.
    A GPU without a driver counts, because it may be between two drivers now.
    """
    driver, module = _MANAGER.get(
        pci.identifier(kernel, address, 'vendor'), ('', ''))
    if not driver or bound not in (None, driver) or not kernel.exists(module):
        return ''
    # other GPUs have no VFs, or show types when they are divided
    return driver if kernel.exists(pci.path(address, 'sriov_totalvfs')) else ''
