# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Whole GPUs: NVIDIA, AMD, Intel.

A GPU goes to one guest by its PCI function, whatever driver the host has for
it. GPUs that are shared out, by VFs or as mediated devices, are left to the
driver vgpu. Sources: the PCI ID repository for names; the id tables of amdgpu,
i915 and xe in Linux for classes; Documentation/ABI/testing/sysfs-bus-pci and
pci-sysfs.c of Linux for boot_vga.
"""

import dataclasses

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import fabric
from nova_accel.drivers import rules
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

#: (vendor, device) -> product, family; others go by their id
_PRODUCTS = {
    **{('10de', device): names for device, names in {
        '1b38': ('TESLA_P40', 'PASCAL'), '1bb3': ('TESLA_P4', 'PASCAL'),
        '15f7': ('TESLA_P100', 'PASCAL'), '15f8': ('TESLA_P100', 'PASCAL'),
        '15f9': ('TESLA_P100', 'PASCAL'),
        '1db1': ('TESLA_V100', 'VOLTA'), '1db4': ('TESLA_V100', 'VOLTA'),
        '1db5': ('TESLA_V100', 'VOLTA'), '1db6': ('TESLA_V100', 'VOLTA'),
        '1db8': ('TESLA_V100', 'VOLTA'), '1df6': ('TESLA_V100S', 'VOLTA'),
        '1eb8': ('TESLA_T4', 'TURING'),
        '20b0': ('A100', 'AMPERE'), '20b1': ('A100', 'AMPERE'),
        '20b2': ('A100', 'AMPERE'), '20b5': ('A100', 'AMPERE'),
        '20f1': ('A100', 'AMPERE'), '20b7': ('A30', 'AMPERE'),
        '20bd': ('A800', 'AMPERE'), '20f3': ('A800', 'AMPERE'),
        '20f5': ('A800', 'AMPERE'), '20f6': ('A800', 'AMPERE'),
        '2235': ('A40', 'AMPERE'), '2236': ('A10', 'AMPERE'),
        '2237': ('A10G', 'AMPERE'),
        '26b5': ('L40', 'ADA'), '26b7': ('L20', 'ADA'),
        '26b9': ('L40S', 'ADA'), '26ba': ('L20', 'ADA'),
        '27b6': ('L2', 'ADA'), '27b8': ('L4', 'ADA'),
        '2321': ('H100L', 'HOPPER'), '2322': ('H800', 'HOPPER'),
        '2324': ('H800', 'HOPPER'), '2329': ('H20', 'HOPPER'),
        '2330': ('H100', 'HOPPER'), '2331': ('H100', 'HOPPER'),
        '2335': ('H200', 'HOPPER'), '233b': ('H200_NVL', 'HOPPER'),
        '2901': ('B200', 'BLACKWELL'), '3182': ('B300', 'BLACKWELL'),
        '2bb5': ('RTX_PRO_6000', 'BLACKWELL'),
    }.items()},
    **{('1002', device): names for device, names in {
        '66a1': ('MI50', 'INSTINCT'), '738c': ('MI100', 'INSTINCT'),
        '738e': ('MI100', 'INSTINCT'), '7408': ('MI250X', 'INSTINCT'),
        '740c': ('MI250', 'INSTINCT'), '740f': ('MI210', 'INSTINCT'),
        '74a1': ('MI300X', 'INSTINCT'), '74a2': ('MI308X', 'INSTINCT'),
        '74a5': ('MI325X', 'INSTINCT'), '75a0': ('MI350X', 'INSTINCT'),
        '75a3': ('MI355X', 'INSTINCT'),
        '73a1': ('V620', 'RADEON_PRO'), '7460': ('V710', 'RADEON_PRO'),
        '7461': ('V710', 'RADEON_PRO'),
    }.items()},
    **{('8086', device): names for device, names in {
        '56c0': ('FLEX_170', 'FLEX'), '56c1': ('FLEX_140', 'FLEX'),
        '0bd5': ('MAX_1550', 'MAX'), '0bd6': ('MAX_1550', 'MAX'),
        '0bd9': ('MAX_1100', 'MAX'), '0bda': ('MAX_1100', 'MAX'),
        '0bdb': ('MAX_1100', 'MAX'),
    }.items()},
}


class GpuDriver(slot.SlotDriver):

    CONTRACT = base.CONTRACT
    NAME = 'gpu'
    POOLED = True
    NEEDS_RULE = True

    # Discovery

    def fingerprint(self):
        return (*super().fingerprint(), self.names('class/mdev_bus'))

    def identify(self, address):
        vendor = pci.identifier(self.kernel, address, 'vendor')
        if (vendor not in VENDORS or self._is_shared(address)
                or not has_class(self.kernel, address, vendor)):
            return None
        device = pci.identifier(self.kernel, address, 'device')
        by_id = naming.device_trait('GPU', VENDORS[vendor], device,
                                    f'device {address}')
        product, family = _PRODUCTS.get((vendor, device), (device, None))
        return model.Device(
            address=address, type='GPU', vendor=VENDORS[vendor],
            product=product, family=family, vendor_id=vendor,
            product_id=device, driver=self.NAME, traits=(by_id,))

    def recognize(self, address, before):
        device = self.identify(address)
        return device and fabric.recorded(self.kernel, device, before)

    def _is_shared(self, address):
        """Return whether it is, or will be, made into vGPUs."""
        return (address in sriov.wanted()
                or self.kernel.exists(pci.path(address,
                                               'mdev_supported_types'))
                or bool(pci.virtual_functions(self.kernel, address)))

    def _may_be_shared_soon(self, address, vendor):
        """Whether nova-compute is earlier than what makes a card's VFs.

        nvidia_vgpu_vfio is the module of NVIDIA's vGPU manager for cards with
        SR-IOV (user guide of NVIDIA vGPU).
        """
        return (vendor == '10de' and 'vgpu' in CONF.accel.enabled_drivers
                and self.kernel.exists('module/nvidia_vgpu_vfio')
                and pci.driver(self.kernel, address) == 'nvidia'
                and self.kernel.exists(pci.path(address, 'sriov_totalvfs')))

    def look(self, device, before):
        address = device.address
        if self._is_display(address):
            raise base.Defect('it is the display of this host (boot_vga)')
        if self._may_be_shared_soon(address, device.vendor_id):
            raise base.Defect(
                f'the vGPU manager of NVIDIA has it, and has made no VFs yet: '
                f'have "sriov-manage -e {address}" run, or bind it to '
                f'{base.VFIO} if servers must have it whole')
        joined = fabric.obstacle(
            self.kernel, device, rules.INCLUDE, rules.DeviceRules().include,
        ) or fabric.memory_obstacle(self.kernel, device)
        if joined:
            raise base.Defect(joined)
        company, companions = self.checked_company(address)
        return dataclasses.replace(
            device, company=company,
            handles=self.function_handles(address, companions))

    def _is_display(self, address):
        try:
            return self.kernel.read(pci.path(address, 'boot_vga')) == '1'
        except FileNotFoundError:
            # only VGA devices have it
            return False

    def goes_along(self, address, function):
        return (pci.class_code(self.kernel, function) >> 8
                in slot.COMPANIONS)


def has_class(kernel, address: str, vendor: str) -> bool:
    """Whether the class of a function is that of the GPUs of a vendor.

    :raises OSError: it cannot be read.
    """
    return (pci.class_code(kernel, address) >> 8
            in _CLASSES.get(vendor, pci.DISPLAYS))
