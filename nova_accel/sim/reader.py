# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Read the description of a simulated host. Errors have line numbers."""

import errno
import re
import typing

import yaml

from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model

#: ten times as fast if PyYAML was built with libyaml
_Loader = getattr(yaml, 'CSafeLoader', yaml.SafeLoader)


def compose(path: str) -> 'Mapping':
    """Read a YAML file whose top is a mapping.

    :raises InvalidSimulation: the file is malformed; the error names file
        and line.
    """
    try:
        with open(path, encoding='utf-8') as file:
            node = yaml.compose(file, Loader=_Loader)
    except (OSError, UnicodeDecodeError) as e:
        raise exception.InvalidSimulation(
            f'The simulated host {path} cannot be read ({e}): correct [accel] '
            f'simulated_host.') from e
    except yaml.YAMLError as e:
        mark = getattr(e, 'problem_mark', None)
        raise exception.InvalidSimulation(
            f'{path} line {mark.line + 1 if mark else "?"} is not YAML '
            f'({getattr(e, "problem", e)}): correct it.') from None
    return Mapping(path, node, 'the file')


class Mapping:
    """A mapping in the file, which knows the line of each key for errors."""

    def __init__(self, path, node, of):
        self.path, self.of = path, of
        self.line = node.start_mark.line + 1 if node else 1
        self.items: dict[str, typing.Any] = {}
        if node is None:
            return
        if not isinstance(node, yaml.MappingNode):
            raise exception.InvalidSimulation(
                f'{path} line {self.line}: {of} is not a mapping of keys to '
                f'values: correct it.')
        for key, value in node.value:
            if key.value in self.items:
                raise self.error(key.value, key, 'is a duplicate key')
            self.items[key.value] = value

    def error(self, key, node, problem):
        line = node.start_mark.line + 1 if node else self.line
        return exception.InvalidSimulation(
            f'{self.path} line {line}: {key} of {self.of} {problem}: correct '
            f'it.')

    def take(self, key, convert, *default):
        """Remove a key, and return its value after conversion.

        :param convert: converts the value, or raises ValueError.
        :param default: result if the key is missing. Without a default, the
            key is required.
        """
        node = self.items.pop(key, None)
        if node is None:
            if default:
                return default[0]
            raise self.error(key, None, 'is missing')
        value = plain(node)
        if value is None and default and default[0] is None:
            return None
        try:
            return convert(value)
        except (exception.ConfigurationError, ValueError, TypeError,
                AttributeError) as e:
            raise self.error(key, node, f'is {value!r} ({e})') from None

    def sequence(self, key):
        """Remove a key with a list of mappings, and yield the mappings."""
        for number, item in enumerate(self._pop(
                key, yaml.SequenceNode, 'is not a list')):
            yield Mapping(self.path, item, f'{key}[{number}]')

    def pairs(self, key):
        """Remove a key whose value is a mapping with any keys. Yield (name,
        value, YAML node of the name) for each."""
        for name, value in self._pop(key, yaml.MappingNode,
                                     'is not a mapping of keys to values'):
            yield name.value, plain(value), name

    def _pop(self, key, kind, problem):
        node = self.items.pop(key, None)
        if node is not None and not isinstance(node, kind):
            raise self.error(key, node, problem)
        return node.value if node else ()

    def claim(self, used, addresses):
        for address in addresses:
            if address in used:
                raise self.error('address', None, f'needs {address}, which '
                                 f'another function of the file has')
            used.add(address)

    def done(self):
        for key, node in self.items.items():
            raise self.error(key, node, 'is an unknown key')


def plain(node):
    loader = yaml.SafeLoader('')
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def checked(test, what):
    def convert(value):
        if not test(value):
            raise ValueError(f'it has to be {what}')
        return value
    return convert


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


text = checked(lambda v: isinstance(v, str), 'a string')
boolean = checked(lambda v: isinstance(v, bool), 'true or false')


def one_of(*values):
    return checked(lambda v: v in values, f'one of {", ".join(values)}')


natural = checked(lambda v: type(v) is int and v >= 0, '0 or more')


def seconds(value):
    if not is_number(value) or value < 0:
        raise ValueError('it has to be seconds, 0 or more')
    return float(value)


def address(value):
    return pci.address(text(value))


def bridges(value):
    if (not isinstance(value, list) or not value
            or not re.fullmatch('pci[0-9a-f]{4,8}:[0-9a-f]{2}',
                                text(value[0]))):
        raise ValueError('it has to be a list of a root complex, as '
                         'pci0000:3a, and of the bridges below it')
    return (value[0], *map(address, value[1:]))


def identifier(value):
    return f'{int(text(value), 16):04x}'


def uuids(value):
    if not isinstance(value, list) or not value:
        raise ValueError('it has to be a list of UUIDs')
    return tuple(map(model.uuid_hex, value))


def attributes(value):
    if not isinstance(value, dict):
        raise ValueError('it has to be a mapping of attributes')
    for name, given in value.items():
        if not isinstance(given, str):
            raise ValueError(f'{name} has to be missing, an errno like EIO, '
                             f'or the value in quotes')
    return value


def counts(value):
    if not isinstance(value, dict) or not all(
            isinstance(numbers, list) and all(
                type(number) is int and number >= 0
                for number in (key, *numbers))
            for key, numbers in value.items()):
        raise ValueError('it has to be a mapping of numbers to lists of '
                         'numbers')
    return value


def attribute_fault(value):
    """Convert the fault of an attribute: "missing" to None, and the name of an
    errno to its number. Return any other text unchanged."""
    if value == 'missing':
        return None
    return getattr(errno, value, value) if value.isupper() else value


def up_to(most):
    """Return a converter for integers from 0 to most."""
    return checked(lambda v: type(v) is int and 0 <= v <= most,
                   f'0 to {most}')
