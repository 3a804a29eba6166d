# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Match devices with rules of the operator, and with sets of devices.

A rule is one line of ``key=value`` pairs. It matches a device if all pairs do.
Values may contain shell wildcards. The devices of a set, a line of addresses,
are allocated together.
"""

from collections.abc import Callable, Iterable, Mapping, Set
import contextlib
import dataclasses
import fnmatch
import re

from nova_accel import conf
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming

CONF = conf.CONF

INCLUDE = '[accel] include_devices'
EXCLUDE = '[accel] exclude_devices'
TRAITS = '[accel] device_traits'
SETS = '[accel] device_sets'
#: properties that a rule may name for any device
KEYS = ('address', 'vendor', 'product', 'subsystem')
#: keys whose values are case-sensitive names
_AS_WRITTEN = ('driver', 'type', 'traits', 'name', 'vfs')
#: hexadecimal digits of an identifier
_DIGITS = {'vendor': 4, 'product': 4, 'class': 6}
#: identifiers as lspci prints them
_IDS = re.compile('[0-9A-Fa-f]{4}:[0-9A-Fa-f]{4}')
_WILDCARD = re.compile('[*?[]')
_SUBSYSTEM = re.compile('[0-9a-f]{4}:[0-9a-f]{4}')


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule: one line of an option."""

    option: str
    text: str
    pairs: Mapping[str, str]

    def matches(self, values: Mapping[str, str]) -> bool:
        """Return whether the pairs of the rule match these values. Pairs whose
        key is not in the values are ignored."""
        return all(fnmatch.fnmatchcase(values[key], pattern)
                   for key, pattern in self.pairs.items() if key in values)

    def matches_device(self, device: model.Device, address: str = '') -> bool:
        """Return whether the rule matches a device. The rule may only have the
        keys in KEYS.

        :param address: address to compare, in place of the device's.
        """
        return self.matches({
            'address': address or device.address,
            **values_of(device)})

    def without_match(self, functions: Iterable['Function'] = (),
                      left_out: Set[str] = frozenset()) -> str:
        """Return a sentence why the rule matches no device of a driver.

        :param functions: PCI functions of the host.
        :param left_out: addresses of devices that drivers find but other rules
            leave out.
        """
        found = [f for f in functions if self.matches(f.values)]
        whole = [f.address for f in found if not f.pf]
        for address in left_out & {*whole}:
            return (f'{self} matches {address}, which {INCLUDE} and {EXCLUDE} '
                    f'leave out: include it, or remove the rule.')
        if whole:
            others = f' and {len(whole) - 1} others' * (len(whole) > 1)
            return (f'{self} matches {whole[0]}{others}, which no driver of '
                    f'[accel] enabled_drivers has: enable its driver, or name '
                    f'it in [accel] pci_devices.')
        if found:
            return (f'{self} matches only VFs, as {found[0].address} of '
                    f'{found[0].pf}: name the function that has them.')
        return (f'{self} matches no device that the drivers find: correct or '
                f'remove it.')

    def __str__(self) -> str:
        return f'{self.option} = {self.text}'


@dataclasses.dataclass(frozen=True)
class Function:
    """A PCI function of the host, with or without a nova_accel driver."""

    #: values that rules compare
    values: Mapping[str, str]
    #: its PF; '' if the function is not a VF
    pf: str

    @property
    def address(self) -> str:
        return self.values['address']


def functions(kernel) -> list[Function]:
    """Return the readable PCI functions of the host except bridges."""
    found: list[Function] = []
    addresses: list[str] = []
    with contextlib.suppress(OSError):
        addresses = kernel.listdir(pci.DEVICES)
    for address in addresses:
        with contextlib.suppress(OSError, ValueError):
            if pci.class_code(kernel, address) >> 16 == pci.BRIDGE:
                continue
            found.append(Function(
                values_at(kernel, address),
                pci.physical_function(kernel, address) or ''))
    return found


def values_at(kernel, address) -> dict[str, str]:
    """Return the values of a PCI function that rules compare.

    :raises OSError, ValueError: the values cannot be read.
    """
    vendor, product = pci.ids(kernel, address)
    return {'address': address, 'vendor': vendor, 'product': product,
            'subsystem': pci.subsystem(kernel, address)}


def values_of(device: model.Device) -> dict[str, str]:
    """Return the values of a device that rules compare, except its address."""
    return {'vendor': device.vendor_id, 'product': device.product_id,
            'subsystem': device.subsystem}


def parse(option: str, lines: Iterable[str], keys: Iterable[str],
          ) -> list[Rule]:
    """Return the rules of an option.

    :param option: name of the option, as ``[accel] exclude_devices``.
    :param keys: permitted keys.
    :raises ConfigurationError: a rule cannot be read; names option, rule, key.
    """
    return [_rule(option, text, tuple(keys)) for text in lines]


def _rule(option, text, keys):
    pairs = {}
    for word in text.split():
        key, _, value = word.partition('=')
        if not value:
            problem = f'has no value: write {_instead_of(key)}'
        elif key not in keys:
            problem = f'is none of the keys {", ".join(keys)}'
        elif key in pairs:
            problem = 'is there twice: remove one'
        else:
            try:
                pairs[key] = _value(key, value)
                continue
            except ValueError as error:
                problem = f'is {value!r}, which {error}'
                if value.endswith((',', ';')):
                    problem = (f'is {value!r}: separate the parts of a rule '
                               f'by spaces alone')
        raise exception.ConfigurationError(
            f'{option} has {text!r}, in which {key!r} {problem}.')
    if not pairs:
        raise exception.ConfigurationError(
            f'{option} has an empty rule, which would match everything: '
            f'write key=value, or remove it.')
    return Rule(option, text, pairs)


def _instead_of(word):
    """Return the correct text for a word of a rule that is not key=value, for
    example for <vendor>:<product>, which other tools accept."""
    if _IDS.fullmatch(word):
        vendor, product = word.lower().split(':')
        return f'vendor={vendor} product={product}'
    if pci.ADDRESS.fullmatch(address := pci.as_in_sysfs(word)):
        return f'address={address}'
    return f'{word or "key"}=value'


def _value(key, value):
    if key in _AS_WRITTEN:
        return value
    value = value.lower()
    if key == 'address':
        return pci.as_in_sysfs(value)
    if key == 'subsystem':
        if not _WILDCARD.search(value) and not _SUBSYSTEM.fullmatch(value):
            raise ValueError('is not <vendor>:<device>, four hexadecimal '
                             'digits each, as 10de:1533')
        return value
    value = value.removeprefix('0x')
    digits = _DIGITS[key]
    if not _WILDCARD.search(value) and not re.fullmatch(
            f'[0-9a-f]{{{digits}}}', value):
        raise ValueError(f'is not {digits} hexadecimal digits: write all of '
                         f'them, or wildcards')
    return value


def numbers(option: str, items: Iterable[str]) -> dict[str, int]:
    """Return PCI address -> number, from items ``<PCI address>=<number>``.

    :param option: name of the option in errors.
    :raises ConfigurationError: an item cannot be read.
    """
    result = {}
    for item in items:
        address, _, number = (part.strip() for part in item.partition('='))
        try:
            if not re.fullmatch('[0-9]{1,5}', number):
                raise ValueError(number)
            address = pci.address(address)
        except (exception.ConfigurationError, ValueError):
            raise exception.ConfigurationError(
                f'{option} has {item!r}, which is not <PCI address>=<number>: '
                f'correct it.') from None
        if address in result:
            raise exception.ConfigurationError(
                f'{option} has {address} twice: remove one of the two.')
        result[address] = int(number)
    return result


#: sorted addresses of the devices
DeviceSet = tuple[str, ...]


def sets() -> list[DeviceSet]:
    """Return the sets of this host.

    :raises ConfigurationError: the option cannot be read, or a device is in
        two sets.
    """
    result: list[DeviceSet] = []
    owner: dict[str, str] = {}
    for line in CONF.accel.device_sets:
        try:
            addresses = [pci.address(word) for word in line.split()]
        except exception.ConfigurationError as error:
            raise exception.ConfigurationError(
                f'{SETS} has the set {line!r}, and {error}') from None
        if len(addresses) < 2:
            raise exception.ConfigurationError(
                f'{SETS} has the set {line!r}, which is not two or more PCI '
                f'addresses with spaces between them: correct it.')
        for address in addresses:
            if address in owner:
                raise exception.ConfigurationError(
                    f'{SETS} has {address} twice, in {owner[address]!r} and '
                    f'in {line!r}: a device can be in one set only.')
            owner[address] = line
        result.append(tuple(sorted(addresses)))
    return result


def set_of(address: str) -> DeviceSet | None:
    """Return the set of a device, or None if the device is in no set.

    :raises ConfigurationError: the option cannot be read.
    """
    return next((found for found in sets() if address in found), None)


def traits_of(rule: Rule) -> tuple[str, ...]:
    """Return the traits that a rule of device_traits assigns.

    :raises ConfigurationError: the rule has no traits, or one that is not a
        custom trait.
    """
    found = tuple(rule.pairs.get('traits', '').split(','))
    for trait in found:
        if not naming.is_custom(trait):
            raise exception.ConfigurationError(
                f'{rule} has {trait!r} among its traits, which is not a custom '
                f'trait: write traits=CUSTOM_..., several with "," between '
                f'them, of A-Z, 0-9 and "_".')
    return found


class DeviceRules:
    """The rules of [accel] include_devices, exclude_devices and device_traits.
    """

    def __init__(self):
        """:raises ConfigurationError: a rule cannot be read."""
        #: rules of include_devices
        self.include = parse(INCLUDE, CONF.accel.include_devices, KEYS)
        self._exclude = parse(EXCLUDE, CONF.accel.exclude_devices, KEYS)
        self._traits = [
            (rule, traits_of(rule)) for rule in parse(
                TRAITS, CONF.accel.device_traits, (*KEYS, 'traits'))]
        self._matched = set()
        self._both = set()
        #: drivers with a device that a rule of include_devices names: their
        #: other devices are left out
        self._limited: set[str] = set()
        #: addresses of devices that drivers find and that rules leave out
        self.left_out: set[str] = set()

    def found(self, driver: str, addresses: Iterable[str], kernel) -> None:
        """Note if a rule of include_devices names one of these devices of a
        driver: the driver's other devices are then left out. Call this before
        applied()."""
        for address in addresses if self.include else ():
            values = {'address': address}
            if pci.ADDRESS.fullmatch(address):
                # a device that cannot be read might match a rule
                with contextlib.suppress(OSError, ValueError):
                    values = values_at(kernel, address)
            else:
                values.update(vendor='', product='', subsystem='')
            if any(rule.matches(values) for rule in self.include):
                self._limited.add(driver)

    def known(self, devices: Iterable[model.Device]) -> None:
        """Note, like found(), devices that nova-compute found before its
        restart, even if they are absent now. Otherwise a restart would offer
        the devices that are left out because of them."""
        self._limited.update(
            device.driver for device in devices
            if any(rule.matches_device(device) for rule in self.include))

    def applied(self, device: model.Device) -> model.Device | None:
        """Return a device with the operator's traits and without excluded
        handles.

        :returns: None if the device is excluded, or if rules include other
            devices of its driver and not this device.
        """
        included = self._matching(self.include, device, device.address)
        excluded = self._matching(self._exclude, device, device.address)
        if included and excluded:
            self._both.add((device.address, included[0], excluded[0]))
        if excluded or device.driver in self._limited and not included:
            self.left_out.add(device.address)
            return None

        def left(handles):
            # the address of a mediated device is a UUID
            return tuple(h for h in handles if not any(
                self._matching(self._exclude, device, function)
                for function in {h.address, h.parent or h.address,
                                 *h.companions}))
        given = {trait for rule, traits in self._traits
                 if self._matching([rule], device, device.address)
                 for trait in traits}
        return dataclasses.replace(
            device, traits=tuple(sorted({*device.traits, *given}))
            if given else device.traits,
            handles=left(device.handles), regions=tuple(
                dataclasses.replace(region, handles=left(region.handles))
                for region in device.regions))

    def hides_others_of(self, device: model.Device) -> bool:
        """Return whether a device must be remembered while it is absent,
        because include_devices names it and other devices are left out.
        Otherwise a restart would offer the other devices of its driver."""
        return bool(self.left_out) and any(
            rule.matches_device(device) for rule in self.include)

    def includes(self, device: model.Device) -> bool:
        return bool(self._matching(self.include, device, device.address))

    def excludes(self, address: str) -> bool:
        """Return whether a rule of exclude_devices names only this address. If
        so, the device is excluded before it is read. Return False if
        include_devices has rules, because unused() reports devices that are
        included as well."""
        found = [str(rule) for rule in self._exclude
                 if rule.pairs.keys() == {'address'}
                 and rule.matches({'address': address})]
        self._matched.update(found)
        return bool(found) and not self.include

    def _matching(self, rules, device, address):
        found = [str(rule) for rule in rules
                 if rule.matches_device(device, address)]
        self._matched.update(found)
        return found

    def unused(self, functions: Callable[[], list[Function]] = list,
               ) -> list[str]:
        """Return a sentence for each rule without effect, and for each device
        that is both included and excluded.

        :param functions: returns the PCI functions of the host. Called only if
            a rule had no effect.
        """
        idle = [rule for rule in (*self.include, *self._exclude,
                                  *(rule for rule, _ in self._traits))
                if str(rule) not in self._matched]
        there = functions() if idle else []
        return [rule.without_match(there, self.left_out) for rule in idle] + [
            f'{address} is matched by {include} and by {exclude}: it is '
            f'excluded.' for address, include, exclude in sorted(self._both)]
