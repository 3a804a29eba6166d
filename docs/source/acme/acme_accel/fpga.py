"""ACME's FPGA cards: one region, which is programmed and reset by ioctls."""

import dataclasses
import struct

from acme_accel import privileged
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model

#: magic number, region type, function, bytes of what follows
HEADER = struct.Struct('<8s16s16sI')
MAGIC = b'ACMEBIT1'


class AcmeFpgaDriver(base.PciDriver):

    CONTRACT = 2
    NAME = 'acme_fpga'
    PROCESSES = {privileged.ctx: privileged.credentials}

    def set_up(self, address):
        """Without this [accel] virtual_functions has no effect."""
        self.make_virtual_functions(address)

    def check(self, device=None):
        """Tell nova-accel check what would fail later."""
        if device is None:
            return
        if self._attribute(device.address, 'temperature') == 'hot':
            yield base.Finding('the card is too hot to be programmed',
                               'check its fan', is_failure=False)

    def identify(self, address):
        ids = (pci.identifier(self.kernel, address, 'vendor'),
               pci.identifier(self.kernel, address, 'device'))
        if ids != ('1ac1', '0002'):
            return None
        return model.Device(
            address=address, type='FPGA', vendor='ACME', product='F1',
            vendor_id=ids[0], product_id=ids[1], driver=self.NAME)

    def look(self, device, before):
        address = device.address
        # 32 hex digits, as all UUIDs inside nova_accel; None for an empty one
        function = self._attribute(address, 'function')
        return dataclasses.replace(device, regions=(model.Region(
            index=0,
            region_type_uuid=model.uuid_hex(
                self._attribute(address, 'region_type')),
            function_uuid=model.uuid_hex(function) if function else None,
            # what of a region goes to guests is the region's, not the device's
            handles=self.function_handles(address)),))

    def _attribute(self, address, name):
        return self.kernel.read(pci.path(address, f'acme_fpga/{name}'))

    def read_bitstream(self, path, name=None):
        name = name or path
        with open(path, 'rb') as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise exception.IncompatibleBitstream(
                f'{name} is not a bitstream of ACME, and the allocated region '
                f'is one of ACME: require the trait of the vendor in the '
                f'flavor.')
        _, region_type, function, size = HEADER.unpack(head)
        return model.Bitstream(path, region_type.hex(), function.hex(),
                               HEADER.size, size)

    def program(self, device, region, bitstream):
        try:
            self.kernel.call(
                privileged.program, device.address, bitstream.path,
                bitstream.payload_offset, bitstream.payload_size)
        except OSError as error:
            raise exception.ProgrammingFailed(
                f'{region.name} of {device.address} had to be programmed, and '
                f'the card refused ({error.strerror}): see the kernel log.'
            ) from error
        return model.uuid_hex(self._attribute(device.address, 'function'))

    def reset_region(self, device, region):
        """After each server: its function stays, its registers do not."""
        try:
            self.kernel.call(privileged.reset_region, device.address)
        except OSError as error:
            raise exception.DeviceError(
                f'{region.name} of {device.address} had to be reset after its '
                f'server, and that failed ({error.strerror}): it is tried '
                f'again.') from error
        return 'region reset'
