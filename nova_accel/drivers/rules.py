# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Rules by which the operator picks devices.

A rule is one line of ``key=value`` pairs; a device matches when every pair
does, a value may have the wildcards of the shell.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import fnmatch

from nova_accel import conf
from nova_accel import exception
from nova_accel import model

CONF = conf.CONF

#: what a rule may ask of any device
KEYS = ('address', 'vendor', 'product')


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of an option."""

    option: str
    text: str
    pairs: Mapping[str, str]

    def matches(self, **values: str) -> bool:
        """Whether every pair whose key is in values fits the value there."""
        return all(fnmatch.fnmatchcase(values[key], pattern)
                   for key, pattern in self.pairs.items() if key in values)

    def __str__(self) -> str:
        return f'{self.option} = {self.text}'


def parse(option: str, lines: Iterable[str], keys: Iterable[str],
          ) -> list[Rule]:
    """The rules of an option.

    :param option: how errors name it, ``[accel] exclude_devices``.
    :param keys: that a rule may have.
    :raises ConfigurationError: naming option, rule and key.
    """
    keys = tuple(keys)
    rules = []
    for text in lines:
        pairs = {}
        for word in text.split():
            key, equals, value = word.partition('=')
            if key not in keys or not value or key in pairs:
                problem = ('is there twice' if key in pairs else
                           'is no key=value' if not equals or not value else
                           f'is none of the keys {", ".join(keys)}')
                raise exception.ConfigurationError(
                    f'{option} has {text!r}, in which {key!r} {problem}: '
                    f'correct the rule.')
            pairs[key] = value if key in ('type', 'traits', 'name') else (
                value.lower().removeprefix('0x'))
        if not pairs:
            raise exception.ConfigurationError(
                f'{option} has an empty rule, which would match everything: '
                f'write key=value, or remove it.')
        rules.append(Rule(option, text, pairs))
    return rules


class DeviceRules:
    """[accel] include_devices and exclude_devices."""

    def __init__(self):
        """:raises ConfigurationError: a rule cannot be read."""
        self._include = parse('[accel] include_devices',
                              CONF.accel.include_devices, KEYS)
        self._exclude = parse('[accel] exclude_devices',
                              CONF.accel.exclude_devices, KEYS)
        self._matched = set()
        self._both = set()

    def applied(self, device: model.Device) -> model.Device | None:
        """The device without the handles that are excluded.

        None where the device itself is, or is not among those included.
        """
        included = self._matching(self._include, device, device.address)
        excluded = self._matching(self._exclude, device, device.address)
        if included and excluded:
            self._both.add((device.address, included[0], excluded[0]))
        if excluded or self._include and not included:
            return None

        def left(handles):
            return tuple(h for h in handles if not self._matching(
                self._exclude, device, h.address))
        return dataclasses.replace(
            device, handles=left(device.handles), regions=tuple(
                dataclasses.replace(region, handles=left(region.handles))
                for region in device.regions))

    def _matching(self, rules, device, address):
        found = [str(rule) for rule in rules if rule.matches(
            address=address, vendor=device.vendor_id,
            product=device.product_id)]
        self._matched.update(found)
        return found

    def unused(self) -> list[str]:
        """A sentence for each rule that did nothing, or worked against
        another."""
        return [
            f'{rule} matches no device that the drivers find: correct or '
            f'remove it.' for rule in (*self._include, *self._exclude)
            if str(rule) not in self._matched] + [
            f'{address} is matched by {include} and by {exclude}: it is '
            f'excluded.' for address, include, exclude in sorted(self._both)]
