# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The YAML file that describes a simulated host; see the sample in etc."""

import dataclasses
import errno

import yaml

from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model

#: product -> vendor, device, subsystem device of the PF, device of its VFs
PRODUCTS = {
    'PAC_ARRIA10': ('8086', '09c4', '0000', '09c5'),
    'PAC_N3000': ('8086', '0b30', '0000', None),
    'PAC_D5005': ('8086', '0b2b', '0000', '0b2c'),
    'N6000': ('8086', 'bcce', '1770', 'bccf'),
    'N6001': ('8086', 'bcce', '1771', 'bccf'),
}
#: name of a fault of programming -> what the manager's status then says
PR_ERRORS = {
    'operation': 'reconfig operation error',
    'crc': 'reconfig CRC error',
    'incompatible': 'reconfig incompatible image',
    'protocol': 'reconfig IP protocol error',
    'fifo': 'reconfig fifo overflow error',
    'timeout': None,
}
#: what a card carries when nothing else is said: OPAE's loopback test
DEFAULT_FUNCTION = 'd8424dc4a4a3c413f89e433683f9040b'
DEFAULT_INTERFACE = '9926ab6d6c925a68aabca7d84c545738'


@dataclasses.dataclass(frozen=True)
class Card:
    address: str
    product: str
    numa_node: int
    ports: int
    interface: str
    #: function of each port when it was bought
    functions: tuple[str, ...]
    shell: str
    #: VFs that are enabled at the beginning
    vfs: int
    driver: str | None
    iommu_group: int | None
    programming_seconds: float
    timeout_seconds: float
    faults: dict

    @property
    def ids(self):
        return PRODUCTS[self.product]

    def vf_address(self, number: int) -> str:
        """VFs follow their PF in the space of bus, slot and function."""
        domain, bus, rest = self.address.split(':')
        slot, function = rest.split('.')
        at = (int(bus, 16) << 8) + (int(slot, 16) << 3) + int(function)
        at += 1 + number
        return f'{domain}:{at >> 8:02x}:{at >> 3 & 31:02x}.{at & 7}'


@dataclasses.dataclass(frozen=True)
class Other:
    """A function that is no accelerator, as company in an IOMMU group."""

    address: str
    vendor: str
    device: str
    class_code: str
    driver: str | None
    iommu_group: int | None


@dataclasses.dataclass(frozen=True)
class Host:
    iommu: bool
    cards: dict[str, Card]
    others: dict[str, Other]


def load(path: str) -> Host:
    """Read a description.

    :raises InvalidSimulation: naming file, line and key.
    """
    try:
        with open(path, encoding='utf-8') as file:
            node = yaml.compose(file, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as e:
        raise exception.InvalidSimulation(
            f'The simulated host {path} cannot be read ({e}): correct [accel] '
            f'simulated_host.') from e
    except yaml.YAMLError as e:
        mark = getattr(e, 'problem_mark', None)
        raise exception.InvalidSimulation(
            f'{path} line {mark.line + 1 if mark else "?"} is no YAML '
            f'({getattr(e, "problem", e)}): correct it.') from None
    return _host(_Mapping(path, node, 'the file'))


def fault(name, value):
    """A fault as it is kept, checked.

    :raises ValueError: saying what is wrong.
    """
    if value is None:
        return None
    if name not in _FAULTS:
        raise ValueError(f'is no fault; known are {", ".join(_FAULTS)}')
    return _FAULTS[name](value)


def _host(top):
    host = Host(iommu=top.take('iommu', _boolean, True), cards={}, others={})
    used = set()
    for item in top.sequence('cards'):
        card = _card(item)
        item.claim(used, [card.address] + [card.vf_address(n)
                                           for n in range(card.ports)])
        host.cards[card.address] = card
    for item in top.sequence('others'):
        other = Other(
            address=item.take('address', _address),
            vendor=item.take('vendor', _identifier, '8086'),
            device=item.take('device', _identifier, '0000'),
            class_code=item.take('class', _text, '0x010601'),
            driver=item.take('driver', _text, None),
            iommu_group=item.take('iommu_group', _natural, None))
        item.done()
        item.claim(used, [other.address])
        host.others[other.address] = other
    top.done()
    return host


def _card(item):
    ports = item.take('ports', _ports, 1)
    functions = tuple(item.take('functions', _uuids, [DEFAULT_FUNCTION]))
    faults = {}
    for name, value, where in item.pairs('faults'):
        try:
            faults[name] = fault(name, value)
        except ValueError as e:
            raise item.error(name, where, str(e)) from None
    card = Card(
        address=item.take('address', _address),
        product=item.take('product', _product, 'PAC_ARRIA10'),
        numa_node=item.take('numa_node', int, -1),
        ports=ports,
        interface=item.take('interface', model.uuid_hex, DEFAULT_INTERFACE),
        functions=tuple(functions[n % len(functions)] for n in range(ports)),
        shell=item.take('shell', _text, '0x123000200000185'),
        vfs=item.take('vfs', _vfs(ports), 0),
        driver=item.take('driver', _driver, 'dfl-pci'),
        iommu_group=item.take('iommu_group', _natural, None),
        programming_seconds=item.take('programming_seconds', _seconds, 1.0),
        timeout_seconds=item.take('timeout_seconds', _seconds, 8.0),
        faults=faults)
    item.done()
    return card


class _Mapping:
    """A mapping of the file that knows its lines."""

    def __init__(self, path, node, of):
        self.path, self.of = path, of
        self.line = node.start_mark.line + 1 if node else 1
        self.items = {}
        if node is None:
            return
        if not isinstance(node, yaml.MappingNode):
            raise exception.InvalidSimulation(
                f'{path} line {self.line}: {of} is no mapping of keys to '
                f'values: correct it.')
        for key, value in node.value:
            if key.value in self.items:
                raise self.error(key.value, key, 'is there twice')
            self.items[key.value] = value

    def error(self, key, node, problem):
        line = node.start_mark.line + 1 if node else self.line
        return exception.InvalidSimulation(
            f'{self.path} line {line}: {key} of {self.of} {problem}: correct '
            f'it.')

    def take(self, key, convert, *default):
        """The value of a key, converted; without default it is required."""
        node = self.items.pop(key, None)
        if node is None:
            if default:
                return default[0]
            raise self.error(key, None, 'is missing')
        value = _plain(node)
        if value is None and default and default[0] is None:
            return None
        try:
            return convert(value)
        except (exception.ConfigurationError, ValueError, TypeError,
                AttributeError) as e:
            raise self.error(key, node, f'is {value!r} ({e})') from None

    def sequence(self, key):
        """Mappings of a list."""
        node = self.items.pop(key, None)
        if node is None:
            return
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(key, node, 'is no list')
        for number, item in enumerate(node.value):
            yield _Mapping(self.path, item, f'{key}[{number}]')

    def pairs(self, key):
        """(name, value, node) of a mapping whose keys are free."""
        node = self.items.pop(key, None)
        if node is None:
            return
        if not isinstance(node, yaml.MappingNode):
            raise self.error(key, node, 'is no mapping of keys to values')
        for name, value in node.value:
            yield name.value, _plain(value), name

    def claim(self, used, addresses):
        for address in addresses:
            if address in used:
                raise self.error('address', None, f'needs {address}, which '
                                 f'another function of the file has')
            used.add(address)

    def done(self):
        for key, node in self.items.items():
            raise self.error(key, node, 'is no key that is known')


def _plain(node):
    loader = yaml.SafeLoader('')
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def _checked(test, what):
    def convert(value):
        if not test(value):
            raise ValueError(f'it has to be {what}')
        return value
    return convert


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_text = _checked(lambda v: isinstance(v, str), 'a text')
_boolean = _checked(lambda v: isinstance(v, bool), 'true or false')
_natural = _checked(lambda v: type(v) is int and v >= 0, '0 or more')
_ports = _checked(lambda v: type(v) is int and 1 <= v <= 4, '1 to 4')
_driver = _checked(lambda v: v in (None, 'dfl-pci', 'vfio-pci'),
                   'dfl-pci, vfio-pci or null')
_product = _checked(lambda v: v in PRODUCTS,
                    f'one of {", ".join(PRODUCTS)}')


def _seconds(value):
    if not _is_number(value) or value < 0:
        raise ValueError('it has to be seconds')
    return float(value)


def _address(value):
    return pci.address(_text(value))


def _identifier(value):
    return f'{int(_text(value), 16):04x}'


def _uuids(value):
    if not isinstance(value, list) or not value:
        raise ValueError('it has to be a list of UUIDs')
    return [model.uuid_hex(item) for item in value]


def _vfs(ports):
    return _checked(lambda v: type(v) is int and 0 <= v <= ports,
                    f'0 to {ports}')


def _attributes(value):
    if not isinstance(value, dict):
        raise ValueError('has to be a mapping of attributes')
    for name, text in value.items():
        if not isinstance(text, str):
            raise ValueError(f'has no text for {name}: missing, an errno like '
                             f'EIO, or the value in quotes')
    return value


def attribute_fault(text):
    """None for a missing attribute, a number for an errno, else the text."""
    if text == 'missing':
        return None
    return getattr(errno, text, text) if text.isupper() else text


_FAULTS = {
    'accept_id': model.uuid_hex,
    'attributes': _attributes,
    'busy': _boolean,
    'dead': _boolean,
    'hang': _checked(lambda v: v in ('read', 'program'), 'read or program'),
    'port_errors': _text,
    'pr_error': _checked(lambda v: v in PR_ERRORS,
                         f'one of {", ".join(PR_ERRORS)}'),
    'pr_error_count': _natural,
    'renumber': _boolean,
    'vanish': _boolean,
}
