# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Devices with serial numbers, and claims on them."""

import uuid

from nova_accel import model
from tests.unit.host import A


def device(address, serial, ids='1234:5678', **more):
    ids, _, subsystem = ids.partition(' ')
    vendor, _, product = ids.partition(':')
    return model.Device(
        address=address, type='SSD', vendor='V', product='P',
        vendor_id=vendor, product_id=product, subsystem=subsystem,
        driver='nvme', serial=serial, **more)


def claim(serial, address=A, ids=''):
    return model.Claim(
        uuid=str(uuid.uuid4()), instance_uuid='', consumer_uuid='',
        provider_uuid='', resource_class='',
        group='', device_address=address, region_index=None,
        handle=model.AttachHandle(model.HandleType.PCI, address),
        serial=serial, ids=ids)
