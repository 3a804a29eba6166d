# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Assign and reset functions in the slot of a device together with the device.

The functions are parts of one card: after a reset of only one function, data
in another would reach the next server. Hence all of them go to the same server
and are reset together, even if they are in different IOMMU groups. VFIO, too,
can reset a slot only if it has all functions of the slot.
"""

import abc

from nova_accel.drivers import base
from nova_accel.drivers import fabric
from nova_accel import exception
from nova_accel.host import pci
from nova_accel.host import usage
from nova_accel import log as logging

LOG = logging.getLogger(__name__)

#: classes of functions that belong to a card and are useless to the host
#: without it: sound, USB, and the USB type C controller
COMPANIONS = frozenset((0x0403, 0x0c03, 0x0c80))
#: host drivers that do not use a function
_IDLE = (None, 'pci-stub')


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
