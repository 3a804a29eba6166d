# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Sysfs as nested dictionaries: attributes are str, bytes or Errno."""

import contextlib
import errno
import os
import typing

from nova_accel.sim import reader

#: name -> str, bytes, Errno, Link or Directory
Directory = dict[str, typing.Any]


class Link(str):
    """A symbolic link: the path of its target below /sys."""


class Errno(int):
    """The errno of reading an attribute."""


def error(number: int, of: str) -> OSError:
    """Return the error that the kernel raises about a file name ``of``."""
    return OSError(int(number), os.strerror(number), of)


def find(tree: Directory, path: str, follow_last: bool = True,
         ) -> tuple[typing.Any, str]:
    """Return (node, path of the node without links) of a path.

    :raises OSError: ENOENT, ENOTDIR or ELOOP.
    """
    parts = [part for part in path.split('/') if part]
    node: typing.Any = tree
    at: list[str] = []
    links = 0
    while parts:
        name = parts.pop(0)
        if not isinstance(node, dict):
            raise error(errno.ENOTDIR, path)
        if name not in node:
            raise error(errno.ENOENT, path)
        node = node[name]
        at.append(name)
        if isinstance(node, Link) and (parts or follow_last):
            links += 1
            if links > 40:
                raise error(errno.ELOOP, path)
            parts = node.split('/') + parts
            node, at = tree, []
    return node, '/'.join(at)


class Reads:
    """The reading methods of host.kernel.Kernel, for a simulated tree."""

    def _tree(self) -> Directory:
        """Return the present /sys."""
        raise NotImplementedError

    def _reads(self, place: str) -> None:
        """Simulate a fault of reading an attribute: wait, or raise OSError."""

    def read(self, path):
        node = self._attribute(path)
        if isinstance(node, bytes):
            return node.decode(errors='replace')
        return node

    def read_bytes(self, path, size):
        node = self._attribute(path)
        return (node if isinstance(node, bytes) else f'{node}\n'.encode()
                )[:size]

    def read_some(self, path, names):
        # raises if the directory does not exist
        self.listdir(path)
        found = {}
        for name in names:
            with contextlib.suppress(OSError):
                found[name] = self.read(f'{path}/{name}')
        return found

    def listdir(self, path):
        node, _ = find(self._tree(), path)
        if not isinstance(node, dict):
            raise error(errno.ENOTDIR, path)
        return sorted(node)

    def exists(self, path):
        try:
            find(self._tree(), path)
        except OSError:
            return False
        return True

    def readlink(self, path):
        node, place = find(self._tree(), path, follow_last=False)
        if not isinstance(node, Link):
            raise error(errno.EINVAL, path)
        return os.path.relpath(node, os.path.dirname(place))

    def _attribute(self, path):
        node, place = find(self._tree(), path)
        self._reads(place)
        if isinstance(node, dict):
            raise error(errno.EISDIR, path)
        if isinstance(node, Errno):
            raise error(node, path)
        return node


#: attribute -> names of its counters, the total last, from
#: drivers/pci/pcie/aer.c of Linux 6.12
_ERROR_NAMES = {
    'aer_dev_correctable':
        'RxErr BadTLP BadDLLP Rollover Timeout NonFatalErr CorrIntErr HeaderOF '
        'TOTAL_ERR_COR',
    'aer_dev_fatal':
        'Undefined DLP SDES TLP FCP CmpltTO CmpltAbrt UnxCmplt RxOF MalfTLP '
        'ECRC UnsupReq ACSViol UncorrIntErr BlockedTLP AtomicOpBlocked '
        'TLPBlockedErr PoisonTLPBlocked TOTAL_ERR_FATAL',
    'aer_dev_nonfatal':
        'Undefined DLP SDES TLP FCP CmpltTO CmpltAbrt UnxCmplt RxOF MalfTLP '
        'ECRC UnsupReq ACSViol UncorrIntErr BlockedTLP AtomicOpBlocked '
        'TLPBlockedErr PoisonTLPBlocked TOTAL_ERR_NONFATAL',
}


def errors(attribute: str, **counts: int) -> str:
    """Return the text of an attribute with the counters of PCIe errors.

    :param attribute: aer_dev_correctable, aer_dev_fatal or aer_dev_nonfatal.
    :param counts: name of an error -> its counter; the others are 0.
    :raises KeyError: the kernel has no error of this name.
    """
    *names, total = _ERROR_NAMES[attribute].split()
    found = dict.fromkeys(names, 0)
    for name, count in counts.items():
        found[name] += count
    return '\n'.join(f'{name} {count}' for name, count in (
        *found.items(), (total, sum(found.values()))))


_ERRORS = {attribute: errors(attribute) for attribute in _ERROR_NAMES}


def is_for_vfio(driver: str | None) -> bool:
    """Return whether a driver is vfio-pci or a variant. All their names in
    drivers/vfio/pci of Linux 7.2 end in vfio-pci or vfio_pci."""
    return bool(driver) and str(driver).replace('_', '-').endswith('vfio-pci')


def add_function(tree, place, ids, class_code, driver, group):
    """Add a PCI function with the attributes that all functions have.

    :param place: directory of the function below /sys, which ends with the
        address.
    :param ids: vendor, device, subsystem vendor, subsystem device: four hex
        digits each.
    :param group: number of the function's IOMMU group, or None without IOMMU.
    :returns: the directory.
    """
    vendor, device, subsystem_vendor, subsystem = ids
    config = bytes.fromhex(vendor)[::-1] + bytes.fromhex(device)[::-1]
    made: Directory = {
        'vendor': f'0x{vendor}', 'device': f'0x{device}',
        'subsystem_vendor': f'0x{subsystem_vendor}',
        'subsystem_device': f'0x{subsystem}',
        'class': class_code, 'revision': '0x00', 'numa_node': '-1',
        'driver_override': 'vfio-pci' if driver == 'vfio-pci' else '(null)',
        # vfio-pci enables a function when a guest opens it
        'enable': '0' if driver is None or is_for_vfio(driver) else '1',
        'config': config.ljust(64, b'\0'),
        **_ERRORS, 'power_state': 'D0',
        'current_link_width': '16', 'max_link_width': '16',
        'current_link_speed': '16.0 GT/s PCIe',
        'max_link_speed': '16.0 GT/s PCIe'}
    *above, address = place.split('/')
    directory = tree
    for name in above:
        directory = directory.setdefault(name, {})
    directory[address] = made
    tree['bus']['pci']['devices'][address] = Link(place)
    if driver:
        made['driver'] = Link(f'bus/pci/drivers/{driver}')
        tree['bus']['pci']['drivers'].setdefault(driver, {})[address] = (
            Link(place))
    if is_for_vfio(driver):
        # vfio_device_fs_init() of Linux 6.1
        made['vfio-dev'] = {'vfio0': {}}
    if group is not None:
        made['iommu_group'] = Link(f'kernel/iommu_groups/{group}')
        tree['kernel']['iommu_groups'].setdefault(
            str(group), {'devices': {}})['devices'][address] = (
                Link(place))
    return made


def spoil(node, attributes):
    """Change attributes below a node, for the fault "attributes"."""
    for name in list(node):
        if isinstance(node[name], dict):
            spoil(node[name], attributes)
        elif name in attributes:
            value = reader.attribute_fault(attributes[name])
            if value is None:
                del node[name]
            else:
                node[name] = Errno(value) if isinstance(value, int) else value
