# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Offer any PCI function that the operator names in [accel] pci_devices.

This driver is for devices without a driver of their own in nova_accel: NPUs,
Gaudi and other AI cards, cryptography. A rule states type, vendor and product.
Source of vendors: the PCI ID repository.
"""

import contextlib
import dataclasses
import functools
import re

from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import fabric
from nova_accel.drivers import handover
from nova_accel.drivers import rules
from nova_accel.drivers import slot
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.host import pci
from nova_accel.host import usage
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming

CONF = conf.CONF
LOG = logging.getLogger(__name__)

OPTION = '[accel] pci_devices'
_KEYS = ('vendor', 'product', 'subsystem', 'class', 'address', 'driver',
         'type', 'traits', 'name', 'vfs')
#: value of the key vfs: all VFs of a function are one accelerator
_TOGETHER = 'together'
#: vendor id -> name; for other vendors the id is the name
_VENDORS = {
    '1002': 'AMD', '10de': 'NVIDIA', '10ee': 'XILINX', '15b3': 'MELLANOX',
    '177d': 'CAVIUM', '19e5': 'HUAWEI', '1d22': 'BAIDU', '1da3': 'HABANA',
    '1e36': 'ENFLAME', '1e3e': 'ILUVATAR', '1e52': 'TENSTORRENT',
    '1ed2': 'FURIOSA', '1ed5': 'MOORE_THREADS', '1eff': 'REBELLIONS',
    '8086': 'INTEL', 'cabc': 'CAMBRICON',
}


class PciRuleDriver(slot.SlotDriver):

    #: the function of some devices can write their flash
    SERVER_CAN_CHANGE_SERIAL = True
    #: use by the host, and changes of VFs, are visible in attributes only
    POLLED = True
    CONTRACT = base.CONTRACT
    NAME = 'pci'
    POOLED = True

    def configure(self):
        """Log rules without effect; see the base class."""
        for sentence in self._ineffective():
            LOG.warning('%s', sentence)
        super().configure()

    def set_up(self, address):
        """Create the VFs of a function; see the base class."""
        self.make_virtual_functions(address)

    def _ineffective(self):
        """Yield a sentence for each rule that matches no usable function, and
        for each function that several rules match."""
        there = []
        for address in self.names(pci.DEVICES):
            with contextlib.suppress(OSError, ValueError):
                there.append(rules.Function(
                    self._values(address),
                    pci.physical_function(self.kernel, address) or ''))
        for rule in wanted():
            found = [f for f in there if not f.pf and rule.matches(f.values)]
            bridges = [f for f in found if _is_bridge(f.values)]
            if bridges:
                yield (f'{rule} matches the bridge {bridges[0].address}, '
                       f'which no guest can have: narrow the rule.')
            elif not found:
                yield self._without_match(rule, there)
        for function in there:
            matching = [r for r in wanted() if r.matches(function.values)]
            if len(matching) > 1 and not (
                    function.pf or _is_bridge(function.values)):
                yield (f'{function.address} is matched by '
                       f'"{matching[0].text}" and by "{matching[1].text}" of '
                       f'{OPTION}: the first one applies.')

    @staticmethod
    def _without_match(rule, there):
        without_driver = dataclasses.replace(rule, pairs={
            key: value for key, value in rule.pairs.items()
            if key != 'driver'})
        found = [f for f in there if without_driver.matches(f.values)]
        for function in found:
            if not function.pf:
                return (f'{rule} matches {function.address} but for its '
                        f'driver, which is '
                        f'{function.values["driver"] or "none"}: bind the '
                        f'other one, or correct the rule.')
        if found:
            return (f'{rule} matches only VFs, as {found[0].address} of '
                    f'{found[0].pf}: name the function that has them.')
        return f'{rule} matches no device of this host: correct or remove it.'

    # Discovery

    def left_out(self, device):
        """Return the reason if no rule names the function any more; see the
        base class."""
        return (f'no rule of {OPTION} names it' if self.is_there(device)
                and not self.may_be_mine(device.address) else '')

    def fingerprint(self):
        return (*super().fingerprint(), usage.fingerprint(self.kernel))

    def identify(self, address):
        return self.recognize(address, None)

    def may_be_mine(self, address):
        # read the vendor first: it excludes most functions of a host
        vendor = pci.identifier(self.kernel, address, 'vendor')
        if not any(rule.matches({'address': address, 'vendor': vendor})
                   for rule in wanted()):
            return False
        values = self._values(address)
        if self._may_be_a_guests(address):
            # see recognize()
            del values['driver']
        return not _is_bridge(values) and any(
            rule.matches(values) for rule in wanted())

    def recognize(self, address, before):
        """Return a function that a rule matches; see the base class.

        While a guest may have the function, its host driver is not compared
        with the rule if the function was reported before. It then has
        vfio-pci, a variant that libvirt 10.0 and later choose, or no driver
        during a reset.
        """
        values = self._values(address)
        if _is_bridge(values):
            return None
        pairs = self._pairs(address, values, before)
        return pairs and fabric.recorded(
            self.kernel, self._device(address, values, pairs), before)

    def _pairs(self, address, values, before):
        """Return the keys and values of the first rule that matches, or None.
        """
        found = [r for r in wanted() if r.matches(values)]
        if not found and before and self._may_be_a_guests(address):
            found = [r for r in wanted() if r.matches(
                {k: v for k, v in values.items() if k != 'driver'})]
        return found[0].pairs if found else None

    def _may_be_a_guests(self, function) -> bool:
        """Return whether a guest may have the function, or may just have
        released it."""
        return (pci.driver(self.kernel, function) is None
                or pci.is_for_vfio(self.kernel, function))

    def _values(self, address):
        return {
            **rules.values_at(self.kernel, address),
            'class': f'{pci.class_code(self.kernel, address):06x}',
            'driver': pci.driver(self.kernel, address) or ''}

    def _device(self, address, values, pairs):
        vendor, product = values['vendor'], values['product']
        return model.Device(
            address=address, type=pairs['type'],
            vendor=_VENDORS.get(vendor, vendor),
            product=pairs.get('name', product), vendor_id=vendor,
            product_id=product, driver=self.NAME,
            traits=tuple(filter(None, pairs.get('traits', '').split(','))))

    def look(self, device, before):
        self.check_whole(device, OPTION, wanted())
        pairs = self._pairs(
            device.address, self._values(device.address), before)
        if pairs and 'vfs' in pairs:
            return dataclasses.replace(
                device, handles=(self._together(device.address),))
        company, companions = self.checked_company(device.address)
        return dataclasses.replace(
            device, company=company,
            handles=self.unused_handles(device.address, companions))

    def _together(self, address) -> model.AttachHandle:
        """Return the handle that has all VFs of a function as one accelerator.

        :raises Defect: a VF is missing or unusable.
        """
        vfs = pci.virtual_functions(self.kernel, address)
        if not vfs:
            if address in sriov.wanted():
                raise base.Defect(sriov.NONE)
            raise base.NotOffered(
                f'{OPTION} gives its VFs together, and it has none: have them '
                f'created by its driver or by {sriov.OPTION}')
        for vf in vfs:
            problem = (pci.obstacle(self.kernel, vf, vfs)
                       or usage.usage(self.kernel, vf))
            if problem:
                raise base.Defect(f'its VFs are given together, and of {vf} '
                                  f'{problem}')
        return model.AttachHandle(model.HandleType.PCI, vfs[0],
                                  companions=tuple(vfs[1:]), parent=address)

    def company(self, address):
        """Return the company of a function; see the base class.

        VFs, functions with VFs, and functions under another policy than clear
        have no company.
        """
        company = super().company(address)
        # the function may match no rule any more
        if company and (
                handover.policy(self._device(
                    address, self._values(address), {'type': ''})
                ) is not handover.Policy.CLEAR
                or pci.physical_function(self.kernel, address)
                or pci.has_vfs(self.kernel, address)):
            return ()
        return company

    def goes_along(self, address, function):
        """Return True for each function of the slot, except bridges and
        functions that a rule matches; see the base class."""
        values = self._values(function)
        if self._may_be_a_guests(function):
            # see recognize()
            del values['driver']
        return not _is_bridge(values) and not any(
            rule.matches(values) for rule in wanted())

    def way_out(self, address):
        return (f': end that, or set {handover.OPTION} to {address}=reset, '
                f'which leaves the rest of the slot as it is')

    # What servers get

    def prepare(self, device, handle, created_type, fresh, use):
        self.check_unused(handle)
        super().prepare(device, handle, created_type, fresh, use)


def _is_bridge(values):
    return int(values['class'], 16) >> 16 == pci.BRIDGE


def wanted() -> list[rules.Rule]:
    """Return the rules of [accel] pci_devices.

    :raises ConfigurationError: a rule cannot be read.
    """
    return _parsed(tuple(CONF.accel.pci_devices))


@functools.lru_cache(maxsize=1)
def _parsed(lines) -> list[rules.Rule]:
    found = rules.parse(OPTION, lines, _KEYS)
    for rule in found:
        pairs = rule.pairs
        problem = ''
        if not re.fullmatch('[A-Z0-9_]+', pairs.get('type', '')):
            problem = ('type, which every rule needs, may have A-Z, 0-9 and _')
        elif pairs.get('vfs', _TOGETHER) != _TOGETHER:
            problem = f'vfs can only be {_TOGETHER}'
        elif not pairs.keys() - {'type', 'traits', 'name', 'vfs'}:
            problem = 'no key says which devices it is for'
        else:
            try:
                for trait in pairs.get('traits', '').split(','):
                    if trait and not re.fullmatch('CUSTOM_[A-Z0-9_]{1,248}',
                                                  trait):
                        problem = f'{trait!r} is not a trait CUSTOM_<NAME>'
                naming.normalize(pairs.get('name', 'x'), 'it')
            except exception.InvalidName:
                problem = (f'the name {pairs["name"]!r} may have letters, '
                           f'digits, - and _')
        if problem:
            raise exception.ConfigurationError(
                f'{OPTION} has {rule.text!r}, in which {problem}: correct the '
                f'rule.')
    return found
