# Licensed under the Apache License, Version 2.0. See LICENSE.
"""NVMe disks: whole controllers, or their VFs.

A controller that the host uses itself is shown, and given to nobody. Sources:
the PCI code of the NVM Express interface (010802), drivers/nvme/host of Linux
for what is below a controller in sysfs, the PCI ID repository for vendors.
"""

import dataclasses
import errno
import time

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel.host import pci
from nova_accel.host import usage
from nova_accel import model

CONF = conf.CONF

_NVM_EXPRESS = 0x010802
_DRIVER = 'nvme'
#: in which the host's driver should know a disk after it is bound to it
_READY_SECONDS = 20
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

    PREPARES_EVERY_HANDLE = True

    def prepare(self, device, handle, created_type, fresh):
        """See the base class; nothing is made."""
        self.check_unused(handle)

    def release(self, device, handle, created_type):
        """Erase a whole disk.

        The host's driver has to have it for that, also where the operator has
        given it to VFIO.

        :raises DeviceError: it could not be erased.
        """
        address = handle.address
        if not CONF.accel.nvme_scrub or address != device.address:
            return None
        try:
            bound = pci.driver(self.kernel, address)
            if bound != _DRIVER:
                self.kernel.rebind(address, _DRIVER)
            try:
                self._await_controller(address)
                self.kernel.format_nvme(address)
            finally:
                if bound == base.VFIO:
                    self.kernel.rebind(address, base.VFIO)
        except OSError as error:
            raise exception.DeviceError(
                f'{address} was to be erased after its server, and that '
                f'failed ({error.strerror}): erase it with nvme format, or '
                f'free it, and it is tried again.') from error
        return 'format'

    def _await_controller(self, address):
        """The host's driver begins with a disk after it is bound to it."""
        top = pci.path(address, 'nvme')
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            states = [self.kernel.read(f'{top}/{name}/state')
                      for name in self.names(top)]
            if states == ['live']:
                return
            if time.monotonic() > deadline:
                raise OSError(errno.ENODEV, f'its controller is '
                                            f'{"".join(states) or "absent"}')
            time.sleep(0.1)
