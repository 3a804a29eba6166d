# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Find devices that options of Nova name, too. Both Nova and nova_accel could
give such a device to a server.
"""

import dataclasses

import nova.conf
from nova.pci import whitelist

from nova_accel import conf
from nova_accel.drivers import rules
from nova_accel.host import pci
from nova_accel import log as logging
from nova_accel import model

CONF = conf.CONF
LOG = logging.getLogger(__name__)


def of_options(kernel) -> 'Conflicts':
    """Return the Conflicts for a process without a LibvirtDriver, from the
    options of Nova.

    :raises PciConfigInvalidSpec: [pci] device_spec cannot be read.
    """
    nova.conf.devices.register_dynamic_opts(CONF)
    of_parent, default = {}, None
    # as LibvirtDriver._get_supported_vgpu_types() reads them
    for name in CONF.devices.enabled_mdev_types:
        addresses = CONF[f'mdev_{name}'].device_addresses
        of_parent.update(dict.fromkeys(addresses, name))
        if not addresses:
            default = default or name
    return Conflicts(kernel, of_parent, default)


class Conflicts:

    def __init__(self, kernel, type_of_parent, default_type):
        """:param type_of_parent: LibvirtDriver.pgpu_type_mapping: name of a
            parent device -> type of the vGPUs that Nova creates on it.
        :param default_type: LibvirtDriver.pgpu_type_default: the first type
            that Nova has without addresses.
        :raises PciConfigInvalidSpec: [pci] device_spec cannot be read.
        """
        self._kernel = kernel
        self._type_of_parent = type_of_parent
        self._default_type = default_type
        self._rules = rules.DeviceRules()
        self._specs = (whitelist.Whitelist(CONF.pci.device_spec)
                       if CONF.pci.device_spec else None)

    def taken_elsewhere(self, device: model.Device) -> str:
        """Return the option of Nova that also names a device or a part of it.

        :returns: a clause, '' if no option names it or the device cannot be
            read.
        """
        try:
            return self._matched(device)
        except (OSError, ValueError) as error:
            LOG.warning('Device %s is not compared with devices of Nova: %s',
                        device.address, error)
            return ''

    def _matched(self, device):
        for address in sorted(device.functions() | self._future(device)):
            option = (self._option_of_pci(address)
                      or self._option_of_vgpus(address))
            if option:
                return f'{address} is matched by {option}'
        return ''

    def _future(self, device):
        """Return the VFs of a GPU on which its vGPUs may be created later."""
        if device.type != 'VGPU' or not pci.ADDRESS.fullmatch(device.address):
            return set()
        left = self._rules.applied(dataclasses.replace(device, handles=tuple(
            model.AttachHandle(model.HandleType.PCI, vf) for vf
            in pci.virtual_functions(self._kernel, device.address))))
        return {h.address for h in left.handles} if left else set()

    def _option_of_pci(self, address):
        if not self._specs or not pci.ADDRESS.fullmatch(address):
            return None
        seen = {'address': address,
                'vendor_id': pci.identifier(self._kernel, address, 'vendor'),
                'product_id': pci.identifier(self._kernel, address, 'device'),
                'parent_addr': pci.physical_function(self._kernel, address)}
        return ('[pci] device_spec' if self._specs.device_assignable(seen)
                else None)

    def _option_of_vgpus(self, address):
        """Return the option by which Nova creates vGPUs on a PCI function, if
        any."""
        option = '[devices] enabled_mdev_types'
        type_, listed = self._vgpu_type(address)
        return type_ and (f'{option} (device_addresses of [mdev_{type_}])'
                          if listed else option)

    def vgpu_type(self, address: str) -> str | None:
        """Return the type of the vGPUs that Nova creates on a PCI function.

        Nova applies its first type without addresses to every PCI function
        that supports this type, unless another type lists the function. A
        parent that is not a PCI device must be listed, by the name that
        libvirt makes from its sysfs path.

        :param address: PCI address, or name of a parent without one.
        :returns: None if Nova creates no vGPUs there.
        :raises OSError: a parent that is not a PCI device cannot be read.
        """
        return self._vgpu_type(address)[0]

    def _vgpu_type(self, address):
        """Return (type or None, whether nova.conf lists the function)."""
        name, place = address, pci.path(address)
        if not pci.ADDRESS.fullmatch(address):
            place = f'class/mdev_bus/{address}'
            name = self._kernel.readlink(place).rpartition(
                'devices/virtual/')[2].replace('/', '_')
        if name in self._type_of_parent:
            return self._type_of_parent[name], True
        if (name == address and self._default_type and self._kernel.exists(
                f'{place}/mdev_supported_types/{self._default_type}')):
            return self._default_type, False
        return None, False
