# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Assign and reset functions in the slot of a device together with the device.

The functions are parts of one card: after a reset of only one function, data
in another would reach the next server. Hence all of them go to the same server
and are reset together, even if they are in different IOMMU groups. VFIO, too,
can reset a slot only if it has all functions of the slot.

GPUs that another program of the host divides, or is about to divide, are not
offered whole. Sources: the user guide of NVIDIA vGPU for nvidia_vgpu_vfio, the
module of its manager, and for sriov-manage, which unbinds a GPU from its driver
and binds it again; amd/MxGPU-Virtualization for gim; Documentation/gpu/xe of
Linux for survivability_mode.
"""

import abc
from collections.abc import Iterable
import contextlib

from nova_accel.drivers import base
from nova_accel.drivers import fabric
from nova_accel.drivers import rules
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.host import pci
from nova_accel.host import usage
from nova_accel import log as logging
from nova_accel import model

LOG = logging.getLogger(__name__)

#: classes of functions that belong to a card and are useless to the host
#: without it: sound, USB, and the USB type C controller
COMPANIONS = frozenset((0x0403, 0x0c03, 0x0c80))
#: host drivers that do not use a function
_IDLE = (None, 'pci-stub')
_NVIDIA, _AMD = '10de', '1002'
#: vendor -> host driver and module of the program that divides GPUs
_MANAGER = {_NVIDIA: ('nvidia', 'module/nvidia_vgpu_vfio'),
            _AMD: ('gim', 'module/gim')}
#: classes of GPUs
_GPUS = frozenset((*pci.DISPLAYS, fabric.INSTINCT))
_WAY_OUT = f'bind it to {pci.VFIO} if servers must have it whole'


class SlotDriver(base.PciDriver):
    """A driver that assigns and resets a function together with its company().
    """

    RESETS = True
    RESET_IS_ALL = True

    @abc.abstractmethod
    def goes_along(self, address: str, function: str) -> bool:
        """Return whether a function goes to the same server as a device.

        :param function: a function of the slot of the device, not a VF.
        """

    def company(self, address: str) -> tuple[str, ...]:
        """Return the *company* of a device: the functions of its slot, of any
        IOMMU group, that go to the same server."""
        return tuple(
            function for function in pci.siblings(self.kernel, address)
            if not pci.physical_function(self.kernel, function)
            and self.goes_along(address, function))

    def checked_company(self, address: str,
                        ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the company of a device, and its companions. The companions
        are the part of the company in the IOMMU group of the device: the guest
        gets them.

        :raises Defect: the host or a guest uses a function of the company.
        """
        company = self.company(address)
        for function in company:
            used = self._use(address, function)
            if used:
                raise base.Defect(f'{function} of the same slot goes with it, '
                                  f'and {used}{self.way_out(address)}')
        return company, self._companions(address, company)

    def check_whole(self, device: model.Device, option: str,
                    found: Iterable[rules.Rule]) -> None:
        """Check that a device can be allocated as a whole.

        :param option: see fabric.obstacle().
        :param found: see fabric.obstacle().
        :raises Defect: the device does not work.
        :raises NotOffered: another program divides it, or its memory is not
            isolated.
        """
        address = device.address
        if why := failure(self.kernel, address):
            raise base.Defect(why)
        is_whole_gpu = (
            pci.class_code(self.kernel, address) >> 8 in _GPUS
            and not pci.has_vfs(self.kernel, address))
        if why := ((obstacle(self.kernel, address) if is_whole_gpu else '')
                   or fabric.memory_obstacle(device)
                   or fabric.obstacle(self.kernel, device, option, found)):
            raise base.NotOffered(why)

    def way_out(self, address: str) -> str:
        """Return what the operator can do if a function of the company is in
        use, as the end of a sentence."""
        return ': end that'

    def _companions(self, address, company):
        members = pci.group_members(self.kernel, address) or ()
        return tuple(f for f in company if f in members)

    def _use(self, address, function) -> str:
        """Return how the host or another guest uses a function of the slot, as
        a clause, or ''."""
        used = usage.usage(self.kernel, function)
        if used:
            return used
        if pci.has_vfs(self.kernel, function):
            return 'it has virtual functions'
        bound = pci.driver(self.kernel, function)
        if (bound not in _IDLE and not pci.is_for_vfio(self.kernel, function)
                and pci.class_code(self.kernel, function) >> 8
                not in COMPANIONS):
            return f'the driver {bound} of the host has it'
        # a guest with a function of the same IOMMU group has this device, too
        if (pci.is_open(self.kernel, function) and function
                not in self._companions(address, [function])):
            return 'a guest has it'
        return ''

    def state(self, address):
        """Return a value that also changes with the use of other functions of
        the slot, and with the XGMI hive; see the base class."""
        found = super().state(address)
        try:
            return (*found, fabric.hive(self.kernel, address), tuple(
                (function, self._use(address, function))
                for function in self.company(address)))
        except (OSError, ValueError) as error:
            return (*found, str(error))

    def check(self, device=None):
        """Check that Fabric Manager has the partition of a device's set; see
        the base class."""
        if device:
            yield from fabric.check(self.kernel, device)

    # What servers get

    def prepare(self, device, handle, created_type, fresh, use):
        """Bind the company to VFIO, and activate the partition of a set.

        A guest that starts gets all functions of an IOMMU group at once. A
        guest that runs, for example after a resume, gets them one by one, and
        the first one only if all functions of the group are bound to VFIO.
        Functions in other groups are bound to VFIO as well.

        :raises DeviceUnavailable: the host or another guest uses a function.
        :raises DeviceError: the kernel refused.
        """
        for function in self.company(handle.address):
            try:
                used = self._use(handle.address, function)
                if used:
                    LOG.warning('%s, which goes with %s, cannot be given to '
                                'a server: %s', function, handle.address, used)
                    raise exception.DeviceUnavailable(
                        f'{handle.address} was allocated, and {function}, '
                        f'which goes with it, is used by another process: the '
                        f'build is retried on another host.')
                if not pci.is_for_vfio(self.kernel, function):
                    self.kernel.rebind(function, base.VFIO)
            except OSError as error:
                raise exception.DeviceError(
                    f'{function}, which goes with {device.address}, had to be '
                    f'bound to {base.VFIO}, and the kernel refused '
                    f'({error.strerror}): see whether that module is loaded, '
                    f'and the kernel log.') from error
        fabric.activate(self.kernel, device)

    def release(self, device, handle, created_type, use):
        """Deactivate the partition of a set, and reset the function and its
        company.

        :raises DeviceError: a step failed, or the host or another guest uses a
            function that would be reset.
        """
        fabric.deactivate(self.kernel, device)
        if not self.is_reset(device, handle):
            return None
        try:
            company = self.company(handle.address)
            used = next(((f, used) for f in company
                         if (used := self._use(handle.address, f))), None)
        except OSError as error:
            raise exception.DeviceError(
                f'{handle.address} had to be reset after its server, and its '
                f'slot cannot be read ({error.strerror}): see the kernel log; '
                f'nova-compute tries again.') from error
        if used:
            raise exception.DeviceError(
                f'{handle.address} had to be reset after its server with '
                f'{used[0]} of the same slot, and {used[1]}: end that use; '
                f'nova-compute tries again.')
        return self.reset(device, handle, company)


def is_shared(kernel, address: str) -> bool:
    """Return whether a driver of the host divides a GPU, or is about to.

    :raises OSError: the function cannot be read.
    """
    return (address in sriov.wanted() or _has_types(kernel, address)
            or pci.has_vfs(kernel, address))


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
    # only VGA devices have the attribute
    with contextlib.suppress(FileNotFoundError):
        if kernel.read(pci.path(address, 'boot_vga')) == '1':
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
