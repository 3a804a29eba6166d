# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Match functions of a host with Nova's PCI options.

This calls Nova's own code as far as it works outside of a service. The rest of
this module follows nova.pci.devspec, nova.pci.request, nova.pci.stats and
nova.compute.pci_placement_translator of Nova 31 to 34.
"""

import dataclasses
import re
import typing

import os_resource_classes
import os_traits
from oslo_utils import strutils

_ANY = '*'
#: digits of the parts of a PCI address
_WIDTHS = {'domain': 4, 'bus': 2, 'slot': 2, 'func': 1}


@dataclasses.dataclass(frozen=True)
class Function:
    """A PCI function of the host."""

    address: str
    vendor: str
    product: str
    #: PCI base class
    kind: int
    #: address of its physical function, None if it is not a VF
    pf: str | None
    #: whether it supports VFs, even if it has none now
    is_pf: bool

    @property
    def card(self) -> str:
        """Return the address of the device that nova_accel sees: for a VF the
        address of its PF, otherwise that of the function."""
        return self.pf or self.address

    @property
    def type(self) -> str:
        """Return the device_type that Nova's libvirt driver determines."""
        if self.pf:
            return 'type-VF'
        return 'type-PF' if self.is_pf else 'type-PCI'


@dataclasses.dataclass
class Spec:
    """One device specification of [pci] device_spec."""

    text: str
    tags: dict
    #: nova.pci.devspec.PciDeviceSpec
    spec: typing.Any = None
    functions: list[Function] = dataclasses.field(default_factory=list)
    #: whether nova_accel takes over its devices
    moves: bool = False


def matches(spec, function) -> bool:
    """Return whether Nova would match a function with a device specification.

    A specification with the address of a PF also matches its VFs. Nova reads
    from the sysfs of this machine which PF a VF has. Here ``function`` has it.
    """
    seen = {'vendor_id': function.vendor, 'product_id': function.product,
            'address': function.address, 'parent_addr': function.pf}
    at = spec.address and spec.address.pci_address_spec
    return spec.match(seen) or bool(
        function.pf and at and at.is_single_address()
        and spec.match({**seen, 'address': function.pf, 'parent_addr': None}))


def is_of_network(tags) -> bool:
    return (tags.get('physical_network') is not None
            or strutils.bool_from_string(tags.get('remote_managed')))


def traits(text) -> set[str]:
    """Return the traits of a comma-separated text, see _normalized()."""
    return {_normalized(name.strip(), os_traits.get_traits(), os_traits)
            for name in (text or '').split(',') if name.strip()}


def _class_of(name, function) -> str:
    """Return a resource class in Nova's spelling. Without a name, the class is
    named after the ids of the function."""
    return _normalized(
        name or f'CUSTOM_PCI_{function.vendor}_{function.product}',
        os_resource_classes.STANDARDS, os_resource_classes)


def _normalized(name, standard, module):
    """Normalize a name as nova.compute.pci_placement_translator does.

    That module cannot be imported here, because it imports oslo.messaging and
    hence eventlet, which commands avoid.
    """
    name = name.upper()
    return name if name in standard or module.is_custom(name) else (
        module.normalize_name(name))


def pairs_of(spec, products: set[str]) -> str | None:
    """Translate a device specification of Nova into a rule of nova_accel.

    :param products: product ids of the PFs that the specification matches.
    :returns: the rule as text, or None if no rule has the same meaning.
    """
    pairs = []
    pattern = _pattern(spec.address.pci_address_spec)
    if pattern is None:
        return None
    if pattern != '*:*:*.*':
        pairs.append(f'address={pattern}')
    if spec.vendor_id != _ANY:
        pairs.append(f'vendor={spec.vendor_id.lower()}')
    if spec.product_id != _ANY and len(products) == 1:
        pairs.append(f'product={min(products)}')
    return ' '.join(pairs) or 'address=*'


def _pattern(spec) -> str | None:
    """Return the address of a device specification as a shell pattern.

    :returns: None if the address is a regular expression that a shell pattern
        cannot express.
    """
    parts = []
    for name, width in _WIDTHS.items():
        text = getattr(spec, name)
        if text in (_ANY, '.*'):
            parts.append(_ANY)
            continue
        units = re.findall(r'[0-9a-f]|\[[0-9a-f-]+\]', text)
        if ''.join(units) != text or len(units) != width:
            return None
        parts.append(text)
    return '{}:{}:{}.{}'.format(*parts)


def asks_for(wanted, spec, function) -> bool:
    """Return whether Nova would give a function to a request for an alias.

    :param wanted: one specification of the alias.
    :param spec: the device specification of the function.
    """
    return (wanted.get('dev_type', function.type) == function.type
            and is_like(wanted, spec, function))


def is_like(wanted, spec, function) -> bool:
    """Return the result of asks_for() without a check of the device_type."""
    name = wanted.get('resource_class')
    return (wanted.get('vendor_id', function.vendor).lower()
            == function.vendor
            and wanted.get('product_id', function.product).lower()
            == function.product
            and (not name or _class_of(name, function)
                 == _class_of(spec.tags.get('resource_class'), function))
            and traits(wanted.get('traits'))
            <= traits(spec.tags.get('traits')))
