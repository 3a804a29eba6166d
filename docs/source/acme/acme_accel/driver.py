"""Inference cards of ACME."""

import dataclasses
import re

from nova_accel.drivers import base
from nova_accel.host import pci
from nova_accel import model


class AcmeDriver(base.PciDriver):

    NAME = 'acme'
    # a server's data in the card's memory ends with a reset of its function
    PREPARES_EVERY_HANDLE = True
    RESETS = True

    def identify(self, address):
        ids = (pci.identifier(self.kernel, address, 'vendor'),
               pci.identifier(self.kernel, address, 'device'))
        if ids != ('1ac1', '0001'):
            return None
        return model.Device(
            address=address, type='AI', vendor='ACME', product='X1',
            vendor_id=ids[0], product_id=ids[1], driver=self.NAME)

    def look(self, device, before):
        if pci.driver(self.kernel, device.address) == base.VFIO and before:
            # a guest has it, and the host cannot look into it
            return dataclasses.replace(before, health=model.Health.OK,
                                       reason='')
        firmware = self.kernel.read(
            pci.path(device.address, 'acme/firmware'))
        if not re.fullmatch('[0-9]+', firmware):
            raise base.Defect(f'its firmware is {firmware!r}, which is no '
                              f'number: update it with acme-flash')
        return dataclasses.replace(
            device, handles=self.function_handles(device.address),
            traits=(f'CUSTOM_ACME_FIRMWARE_{firmware}',))
