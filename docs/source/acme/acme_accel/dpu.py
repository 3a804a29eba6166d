"""ACME's DPUs: function 0 goes to a guest, function 1 stays and resets it."""

import dataclasses

from acme_accel import privileged
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model


class AcmeDpuDriver(base.PciDriver):

    CONTRACT = 2
    NAME = 'acme_dpu'
    PROCESSES = {privileged.ctx: privileged.credentials}
    # release() does the same under the policies reset and clear
    RESET_IS_ALL = True

    def identify(self, address):
        ids = (pci.identifier(self.kernel, address, 'vendor'),
               pci.identifier(self.kernel, address, 'device'))
        if ids != ('1ac1', '0003'):
            return None
        return model.Device(
            address=address, type='DPU', vendor='ACME', product='D2',
            vendor_id=ids[0], product_id=ids[1], driver=self.NAME)

    def look(self, device, before):
        # the attributes of the management function can be read while a guest
        # has the other function
        management = privileged.management_of(device.address)
        state = self.kernel.read(pci.path(management, 'acme_dpu/state'))
        if state != 'ready':
            raise base.Defect(f'its management function {management} is '
                              f'{state!r}: see the kernel log')
        return dataclasses.replace(
            device, company=(management,),
            handles=self.function_handles(device.address))

    def release(self, device, handle, created_type, use):
        if not self.is_reset(device, handle):
            return None
        try:
            self.kernel.call(privileged.reset_dpu, device.address)
        except OSError as error:
            raise exception.DeviceError(
                f'{device.address} had to be reset by its management function '
                f'after its server, and that failed ({error.strerror}): it is '
                f'tried again.') from error
        return 'dpu reset'
