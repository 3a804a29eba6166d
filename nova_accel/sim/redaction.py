# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Replace the identity of a host and its devices in a capture by stand-ins.

Within a capture, equal values have equal stand-ins, and different values have
different stand-ins. A stand-in has the form of the replaced value, because
drivers check the form: the letters and digits of a serial number become
digits.
"""

from collections.abc import Iterable, Iterator
import re
import typing

from nova_accel.sim import recorder
from nova_accel.sim import tree as sysfs

#: attributes of sysfs that identify a device: PCI and network devices, NVMe,
#: time cards, cards under XRT, AMD's GPUs
_ATTRIBUTES = frozenset((
    'serial', 'serialnum', 'serial_num', 'serial_number', 'unique_id',
    'subsysnqn', 'hostnqn', 'hostid', 'wwid', 'nguid', 'eui', 'uuid',
    'address', 'phys_switch_id', 'permaddr', 'board_id'))
_MAC = re.compile('(?<![0-9a-fA-F:])[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}'
                  '(?![0-9a-fA-F:])')
#: names of interfaces that systemd derives from the MAC address
_NAMED_BY_MAC = re.compile('(?<=en[xs])[0-9a-f]{12}|(?<=wlx)[0-9a-f]{12}')
#: minimum length of a value that is also replaced within other text
_LEAST = 6
_HOST = 'host'


class Redaction:
    """The stand-ins of one capture."""

    def __init__(self, hosts: Iterable[str]):
        """:param hosts: names of this host."""
        names = sorted({part for name in hosts if name
                        for part in (name, name.partition('.')[0])},
                       key=len, reverse=True)
        self._hosts = re.compile('(?<![A-Za-z0-9_])(?:%s)(?![A-Za-z0-9_])'
                                 % '|'.join(map(re.escape, names)
                                            )) if names else None
        #: value -> its stand-in
        self.stand_ins: dict[str, str] = {}

    def learn(self, tree: sysfs.Directory,
              answers: Iterable[recorder.Answer]) -> None:
        """Find the serial numbers of a capture, and choose their stand-ins."""
        for path, value in _attributes(tree):
            if path.rpartition('/')[2] in _ATTRIBUTES:
                self._stand_in(value.strip())
        for answer in answers:
            if answer.operation == 'read_device_serial' and answer.value:
                self._stand_in(answer.value)
            elif answer.operation == 'read_nvme' and answer.value:
                self._stand_in(answer.value.serial.strip())

    def _stand_in(self, value: str) -> str:
        """Return the stand-in of a serial number. If the value does not
        identify a device, for example only zeros, return the value itself."""
        places = sum(map(str.isalnum, value))
        if not re.search('[1-9]', value):
            # all zeros, or a word such as "unknown": not a serial number
            return value
        if value not in self.stand_ins:
            digits = iter(str(len(self.stand_ins) + 1).zfill(places))
            made = ''.join(next(digits) if c.isalnum() else c for c in value)
            self.stand_ins[value] = made + ''.join(digits)
        return self.stand_ins[value]

    def tree(self, node: typing.Any, name: str = '') -> typing.Any:
        if isinstance(node, dict):
            return {self.name(key): self.tree(value, key)
                    for key, value in node.items()}
        if isinstance(node, sysfs.Link):
            return sysfs.Link(self.name(node))
        if isinstance(node, str):
            if name in _ATTRIBUTES and node.strip() in self.stand_ins:
                return node.replace(node.strip(),
                                    self.stand_ins[node.strip()])
            return self.text(node)
        return node

    def name(self, path: str) -> str:
        """Return a path with stand-ins. No names of hosts are replaced,
        because paths of the kernel have none."""
        for value, stand_in in self._long():
            path = path.replace(value, stand_in)
        return _NAMED_BY_MAC.sub(lambda m: self._of_mac(m[0]), path)

    def text(self, text: str) -> str:
        """Return a text with stand-ins."""
        text = _MAC.sub(lambda m: self._stand_in(m[0]), self.name(text))
        return self._hosts.sub(_HOST, text) if self._hosts else text

    def value(self, value: typing.Any) -> typing.Any:
        """Return an answer (lists, mappings and texts) with stand-ins."""
        if isinstance(value, dict):
            return {self.value(k): self.value(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        if isinstance(value, str):
            return self.stand_ins.get(value) or self.text(value)
        return value

    def _of_mac(self, digits):
        """Return the stand-in for a MAC address without colons, in a name."""
        return self._stand_in(':'.join(
            digits[n:n + 2] for n in range(0, 12, 2))).replace(':', '')

    def _long(self):
        """Return (value, stand-in) of the values to replace in texts, the
        longest value first, because it may contain a shorter one."""
        return sorted(((v, s) for v, s in self.stand_ins.items()
                       if sum(map(str.isalnum, v)) >= _LEAST),
                      key=lambda item: -len(item[0]))


def _attributes(node, path='') -> Iterator[tuple[str, str]]:
    for name in sorted(node):
        value = node[name]
        if isinstance(value, dict):
            yield from _attributes(value, f'{path}/{name}')
        elif isinstance(value, str) and not isinstance(value, sysfs.Link):
            yield f'{path}/{name}', value
