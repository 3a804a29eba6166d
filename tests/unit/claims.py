# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A claim, its handle and its device, for tests of what the store has."""

import uuid

from nova_accel import model
from nova_accel.store import values

HANDLE = model.AttachHandle(model.HandleType.PCI, '0000:5e:00.0')
DEVICE = model.Device(
    address='0000:5e:00.0', type='FPGA', vendor='INTEL',
    product='PAC_ARRIA10', vendor_id='8086', product_id='09c4',
    driver='dfl', traits=('CUSTOM_X',),
    creatable=(model.CreatableType('nvidia-558', 'CUSTOM_Y', 3),),
    regions=(model.Region(
        index=0, region_type_uuid='a' * 32, function_uuid=None,
        handles=(HANDLE,), health=model.Health.QUARANTINED, reason='so'),))

DISABLED = values.Disabled('0000:5e:00.0', 'S1', 'it is hot',
                           '2026-11-22T02:17:43+00:00')


def claim(instance=None, handle=HANDLE, **more):
    instance = instance or str(uuid.uuid4())
    return model.Claim(**{
        'uuid': str(uuid.uuid4()), 'instance_uuid': instance,
        'consumer_uuid': instance,
        'provider_uuid': str(uuid.uuid4()),
        'resource_class': 'CUSTOM_ACCELERATOR_FPGA', 'group': '1',
        'device_address': '0000:5e:00.0', 'region_index': 0,
        'handle': handle, **more})


def handle(number):
    return model.AttachHandle(model.HandleType.PCI, f'0000:af:00.{number}')


def serials(store):
    """The serial numbers of cards at their addresses, as the store has them.
    """
    return {address: key.serial for address, key in store.keys().items()
            if key.serial}
