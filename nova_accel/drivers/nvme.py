# Licensed under the Apache License, Version 2.0. See LICENSE.
"""NVMe disks: whole controllers, or their VFs.

A controller that the host uses itself is shown, and given to nobody. Sources:
the PCI code of the NVM Express interface (010802), drivers/nvme/host of Linux
for what is below a controller in sysfs, the PCI ID repository for vendors.
"""

import dataclasses

from nova_accel.drivers import base
from nova_accel.host import pci
from nova_accel.host import usage
from nova_accel import model

_NVM_EXPRESS = 0x010802
#: others go by their id
_VENDORS = {
    '025e': 'SOLIDIGM', '1179': 'TOSHIBA', '1344': 'MICRON',
    '144d': 'SAMSUNG', '15b7': 'SANDISK', '1987': 'PHISON', '19e5': 'HUAWEI',
    '1bb1': 'SEAGATE', '1b36': 'QEMU', '1c58': 'HGST', '1c5c': 'SK_HYNIX',
    '1e0f': 'KIOXIA', '8086': 'INTEL', 'cc53': 'SCALEFLUX',
}


class NvmeDriver(base.PciDriver):

    NAME = 'nvme'

    def configure(self):
        """See the base class; makes VFs."""
        self.make_virtual_functions()

    def fingerprint(self):
        return (*super().fingerprint(), usage.fingerprint(self.kernel))

    def identify(self, address):
        if pci.class_code(self.kernel, address) != _NVM_EXPRESS:
            return None
        vendor = pci.identifier(self.kernel, address, 'vendor')
        product = pci.identifier(self.kernel, address, 'device')
        return model.Device(
            address=address, type='SSD', vendor=_VENDORS.get(vendor, vendor),
            product=product, vendor_id=vendor, product_id=product,
            driver=self.NAME, numa_node=pci.numa_node(self.kernel, address))

    def look(self, device, before):
        return dataclasses.replace(
            device, handles=self.unused_handles(device.address))

    # What servers get

    ATTENDS = True

    def prepare(self, device, handle, created_type):
        """See the base class; nothing is made."""
        self.check_unused(handle)
