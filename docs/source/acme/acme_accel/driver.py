"""Inference cards of ACME."""

import dataclasses
import re

from acme_accel import privileged
from nova_accel.drivers import base
from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model

KERNEL_DRIVER = 'acme'
POWER_LIMIT = 'acme/power_limit'


class AcmeDriver(base.PciDriver):

    CONTRACT = 2
    NAME = 'acme'
    KEYS = frozenset(('power_limit',))
    PROCESSES = {privileged.ctx: privileged.credentials}
    RESETS = True

    # Discovery

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
            # a guest has it, and the host cannot read it
            return dataclasses.replace(before, health=model.Health.OK,
                                       reason='')
        firmware = self.kernel.read(
            pci.path(device.address, 'acme/firmware'))
        if not re.fullmatch('[0-9]+', firmware):
            raise base.Defect(f'its firmware is {firmware!r}, which is not a '
                              f'number: update it with acme-flash')
        return dataclasses.replace(
            device, handles=self.function_handles(device.address),
            traits=(f'CUSTOM_ACME_FIRMWARE_{firmware}',))

    # What servers get

    def prepare(self, device, handle, created_type, fresh, use):
        """Limit the power of the card, where the flavor says so."""
        limit = use.keys.get('power_limit')
        if limit is None:
            return
        if not re.fullmatch('[0-9]{2,3}', limit):
            raise exception.InvalidRequest(
                f'driver_power_limit of the flavor is {limit!r}: write watts, '
                f'75 to 300.')
        address = device.address
        if use.memory is None:
            # before it is changed
            use.remember({'power_limit': self.kernel.read(
                pci.path(address, POWER_LIMIT))})
        self.kernel.write_attribute(address, POWER_LIMIT, limit,
                                    by=privileged.write_attribute)

    def release(self, device, handle, created_type, use):
        """Reset the card, scrub its memory, and undo prepare()."""
        done = super().release(device, handle, created_type, use)
        if done is None:
            # the operator wants it so
            return None
        address = device.address
        try:
            # the operator may keep the card for guests
            kept = pci.driver(self.kernel, address) == base.VFIO
            if kept:
                self.kernel.rebind(address, KERNEL_DRIVER,
                                   by=privileged.rebind)
            if use.memory:
                self.kernel.write_attribute(
                    address, POWER_LIMIT, use.memory['power_limit'],
                    by=privileged.write_attribute)
            if handover.policy(device) is handover.Policy.CLEAR:
                self.kernel.call(privileged.scrub, address)
                done += ', scrubbed'
            if kept:
                self.kernel.rebind(address, base.VFIO)
        except OSError as error:
            raise exception.DeviceError(
                f'{address} had to be scrubbed after its server, and that '
                f'failed ({error.strerror}): see the kernel log; it is tried '
                f'again.') from error
        return done
