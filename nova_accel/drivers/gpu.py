# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whole GPUs: NVIDIA, AMD, Intel.

A GPU goes to one guest by its PCI function, whatever driver the host has for
it. GPUs that are shared out, by VFs or as mediated devices, are left to the
driver vgpu; where that is not enabled, they are listed with the reason.
Sources: the id tables of amdgpu, i915 and xe in Linux for classes;
Documentation/ABI/testing/sysfs-bus-pci and pci-sysfs.c of Linux for boot_vga.
"""

import dataclasses

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import fabric
from nova_accel.drivers import gpu_products
from nova_accel.drivers import rules
from nova_accel.drivers import sharing
from nova_accel.drivers import slot
from nova_accel.drivers import sriov
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming

CONF = conf.CONF

VENDORS = {'10de': 'NVIDIA', '1002': 'AMD', '8086': 'INTEL'}
#: Instinct cards since MI300 are processing accelerators; with Intel that
#: class is of its FPGAs
_CLASSES = {'1002': pci.DISPLAYS | {0x1200}}


class GpuDriver(slot.SlotDriver):

    CONTRACT = base.CONTRACT
    NAME = 'gpu'
    POOLED = True
    NEEDS_RULE = True

    # Discovery

    def left_out(self, device):
        """See the base class; the GPU is shared out by now."""
        return ('it is shared out, and the driver vgpu has it'
                if self.is_there(device)
                and self.identify(device.address) is None else '')

    def fingerprint(self):
        return (*super().fingerprint(), self.names('class/mdev_bus'))

    def identify(self, address):
        vendor = pci.identifier(self.kernel, address, 'vendor')
        if (vendor not in VENDORS
                or not has_class(self.kernel, address, vendor)
                or 'vgpu' in CONF.accel.enabled_drivers
                and sharing.is_shared(self.kernel, address)):
            return None
        device = pci.identifier(self.kernel, address, 'device')
        by_id = naming.device_trait('GPU', VENDORS[vendor], device,
                                    f'device {address}')
        product, family = gpu_products.name(
            vendor, device, pci.subsystem(self.kernel, address))
        return model.Device(
            address=address, type='GPU', vendor=VENDORS[vendor],
            product=product, family=family, vendor_id=vendor,
            product_id=device, driver=self.NAME, traits=(by_id,))

    def recognize(self, address, before):
        device = self.identify(address)
        return device and fabric.recorded(self.kernel, device, before)

    def look(self, device, before):
        address = device.address
        if address in sriov.wanted() or pci.has_vfs(self.kernel, address):
            raise base.NotOffered(
                f'it is shared out by VFs: add vgpu to [accel] '
                f'enabled_drivers, or end that (see {sriov.OPTION}) if '
                f'servers must have it whole')
        if failure := sharing.failure(self.kernel, address):
            raise base.Defect(failure)
        obstacle = sharing.obstacle(
            self.kernel, address) or fabric.memory_obstacle(
                device) or fabric.obstacle(
            self.kernel, device, rules.INCLUDE, rules.DeviceRules().include)
        if obstacle:
            raise base.NotOffered(obstacle)
        company, companions = self.checked_company(address)
        return dataclasses.replace(
            device, company=company,
            handles=self.function_handles(address, companions))

    def state(self, address):
        """See the base class; what shares it out changes it as well."""
        try:
            return (*super().state(address),
                    sharing.failure(self.kernel, address),
                    sharing.obstacle(self.kernel, address))
        except (OSError, ValueError) as error:
            return (*super().state(address), str(error))

    def goes_along(self, address, function):
        return (pci.class_code(self.kernel, function) >> 8
                in slot.COMPANIONS)


def has_class(kernel, address: str, vendor: str) -> bool:
    """Whether the class of a function is that of the GPUs of a vendor.

    :raises OSError: it cannot be read.
    """
    return (pci.class_code(kernel, address) >> 8
            in _CLASSES.get(vendor, pci.DISPLAYS))
