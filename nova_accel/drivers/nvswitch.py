# Licensed under the Apache License, Version 2.0. See LICENSE.
"""GPUs of NVIDIA that NVSwitches join.

A guest can use such a GPU only as Fabric Manager has set it up, and over
NVLink a GPU reaches the others of its partition. Which GPUs are given
together, or one without NVLink, is therefore the operator's word, device by
device. Source: NVIDIA's Fabric Manager user guide.
"""

from collections.abc import Iterable

from nova_accel.drivers import rules
from nova_accel.drivers import sets
from nova_accel.host import pci
from nova_accel import model

#: what NVSwitches are: other bridges
_SWITCH = 0x0680
_NVIDIA = '10de'
#: modules whose NVSwitches show no PCI function, by the id of the device
_UNDER_HIDDEN_SWITCHES = {'2901': 'B200', '3182': 'B300'}


def obstacle(kernel, device: model.Device, option: str,
             found: Iterable[rules.Rule]) -> str:
    """Return why a device is not to be offered, as a clause, or ''.

    :param kernel: nova_accel.host.kernel, or a simulated one.
    :param option: that has the rules, ``[accel] include_devices``.
    :param found: its rules. A rule names a device by the whole address only: a
        wildcard includes GPUs that the operator did not think of.
    :raises OSError: sysfs cannot be read.
    """
    address = device.address
    if (device.vendor_id != _NVIDIA
            or pci.class_code(kernel, address) >> 8 not in pci.DISPLAYS
            or any(rule.pairs.get('address') == address and rule.matches(
                {'vendor': device.vendor_id, 'product': device.product_id})
                for rule in found)
            or sets.of(address)):
        return ''
    switch = _switch(kernel, device)
    return switch and (
        f'NVSwitches join it with other GPUs ({switch}), and a guest can only '
        f'use what Fabric Manager has set up for it: do that, and name the '
        f'GPUs of a partition in {sets.OPTION}, or this GPU by '
        f'address={address}, without wildcards, in {option}')


def _switch(kernel, device) -> str:
    """An NVSwitch that joins the GPU with others, '' where none does."""
    for function in kernel.listdir(pci.DEVICES):
        if (pci.class_code(kernel, function) >> 8 == _SWITCH
                and pci.identifier(kernel, function, 'vendor') == _NVIDIA):
            return function
    module = _UNDER_HIDDEN_SWITCHES.get(device.product_id)
    return f'all {module} have them' if module else ''
