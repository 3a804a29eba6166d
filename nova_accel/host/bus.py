# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Read the health of a function from the PCI bus.

This needs neither a driver nor privileges, and works while a guest has the
function. Sources, all of Linux 6.12: Documentation/ABI/testing/
sysfs-bus-pci-devices-aer_stats (aer_dev_*, since 4.19), sysfs-bus-pci
(power_state, since 5.12), pci-sysfs.c (current_link_*, max_link_*, since
4.13), drivers/pci/pcie/aer.c (the names of errors).

GPUs of AMD since Vega 10 and of Intel since Alchemist have a switch on the
card, above their function. The attributes of the function then show the link
inside the card, which never changes, or a meaningless value (2.5 GT/s, one
lane, with Intel). The upstream port of the switch shows the link of the slot.
Sources: the PCI ID repository, issue 512 of nokyan/resources, pull request 344
of Syllo/nvtop, and topologies of machines in ROCm/rccl.
"""

from collections.abc import Iterator, Mapping
import functools
import re

from nova_accel.health import signals
from nova_accel.host import pci

_NONFATAL, _FATAL = 'aer_dev_nonfatal', 'aer_dev_fatal'
_CORRECTED = 'aer_dev_correctable'
_WIDTH, _SPEED = 'current_link_width', 'current_link_speed'
_MOST_WIDTH, _MOST_SPEED = 'max_link_width', 'max_link_speed'
_POWER = 'power_state'
_LIMITS = {_WIDTH: _MOST_WIDTH, _SPEED: _MOST_SPEED}
_ERRORS = (_FATAL, _NONFATAL, _CORRECTED)
_LINK = (_WIDTH, _SPEED, _MOST_WIDTH, _MOST_SPEED)
_IDS = ('vendor', 'device')
#: attributes that rarely change while the function is present
_FIXED = (_MOST_WIDTH, _MOST_SPEED, 'vendor')
_VARIABLE = (*_ERRORS, _WIDTH, _SPEED, _POWER)
_ALL = (*_VARIABLE, *_FIXED)
#: vendor of a card -> (vendor, device) of the ports of its switch; a device of
#: '' stands for any
_SWITCHES = {
    '0x1002': frozenset((('0x1002', ''), ('0x1022', '0x1500'),
                         ('0x1022', '0x1501'))),
    '0x8086': frozenset(('0x8086', f'0x{device}') for device in (
        '4fa0', '4fa1', '4fa4', 'e2f0', 'e2f1', 'e2ff'))}
#: errors that the two ends of a link detect: data link protocol, surprise down,
#: receiver overflow. A guest that has the whole device can take the link down;
#: drivers that do so mask the error in the port first, as
#: myri10ge_mask_surprise_down() of Linux
_OF_LINK = frozenset(('DLP', 'SDES', 'RxOF'))
#: errors that any guest can provoke without harm: unsupported request,
#: completer abort, completion timeout
_HARMLESS = frozenset(('UnsupReq', 'CmpltAbrt', 'CmpltTO'))
#: corrected errors that report another one provoked by a guest (advisory
#: non-fatal)
_ADVISORY = frozenset(('NonFatalErr',))
#: a line of a counter that is not 0
_COUNTER = re.compile('^(.+) ([1-9][0-9]*)$', re.MULTILINE)
#: names of kernels before 5.3
_LONG_NAMES = {
    'Data Link Protocol': 'DLP', 'Surprise Down Error': 'SDES',
    'Receiver Overflow': 'RxOF', 'Unsupported Request': 'UnsupReq',
    'Completer Abort': 'CmpltAbrt', 'Completion Timeout': 'CmpltTO',
    'Advisory Non-Fatal': 'NonFatalErr', 'Advisory Non-Fatal Error':
    'NonFatalErr'}


#: signals of readings()
SIGNALS = frozenset((
    'link_errors', 'fatal_errors', 'nonfatal_errors', 'corrected_errors',
    'link_width', 'link_width_half', 'link_speed', 'power'))


def readings(kernel, function: str, bridges: tuple[str, ...],
             cache: dict[tuple, tuple] | None = None, is_glance: bool = False,
             ) -> tuple[signals.Reading, ...]:
    """Read the health signals of a physical function from the PCI bus.

    Blocks for up to a minute while the function is reset, and wakes a function
    that sleeps (pci_config_pm_runtime_get() of Linux). Hence it must run in
    the worker of the card. Opens two directories and reads 12 attributes, nine
    in a glance, and a few more if the card has a switch.

    :param bridges: the result of pci.bridges(). Errors of the ports at both
        ends of the slot's link count as well.
    :param cache: a cache by function and bridges, which is updated: the path to
        the slot, and the last values of attributes with their readings.
    :param is_glance: whether to take rarely changing attributes from the cache.
    :raises OSError: the function is absent.
    """
    cache = {} if cache is None else cache
    key = function, bridges
    fixed, path, before, found = cache.get(key, (None, (), None, ()))
    is_glance = is_glance and fixed is not None
    if is_glance:
        own = fixed | kernel.read_some(pci.path(function), _VARIABLE)
    else:
        last, own = fixed, kernel.read_some(pci.path(function), _ALL)
        fixed = {name: own[name] for name in _FIXED if name in own}
        if fixed != last:
            path = _to_the_slot(kernel, own.get('vendor', ''),
                                (*pci.below_root(bridges), function))
    *ports, at = path
    end = own if at == function else kernel.read_some(
        pci.path(at), (*_ERRORS, *_LINK))
    port = kernel.read_some(pci.path(ports[-1]), _ERRORS) if ports else {}
    if not is_glance or (own, end, port) != before:
        found = tuple(_meant(kernel, function, own, path, end, port))
    cache[key] = fixed, path, (own, end, port), found
    return found


def _meant(kernel, function, own, path, end, port,
           ) -> Iterator[signals.Reading]:
    """Yield the readings that follow from attributes of a function and of the
    link between its card and the slot.

    :param own: attributes of the function.
    :param path: the result of _to_the_slot().
    :param end: attributes of the end of that link on the card.
    :param port: attributes of the other end, the port of the slot.
    """
    *ports, at = path
    yield from _errors(own, '')
    if at != function:
        yield from _errors(end, f' at port {at}')
    if ports:
        yield from _errors(port, f' at port {ports[-1]}')
    if any(0 < _number(end, now) < _number(end, most)
           for now, most in _LIMITS.items()):
        yield from _link(end, kernel.read_some(
            pci.path(ports[-1]), _LIMITS.values()) if ports else end)
    if own.get(_POWER) == 'error':
        yield signals.Reading('power')


def of_the_slot(kernel, function: str, bridges: tuple[str, ...],
                ) -> tuple[int, int]:
    """Return the maximum (lanes, MT/s) of the link between a card and its
    slot.

    :param bridges: the result of pci.bridges().
    :raises OSError: one end of the link is absent.
    """
    vendor = kernel.read(pci.path(function, 'vendor'))
    *ports, at = _to_the_slot(
        kernel, vendor, (*pci.below_root(bridges), function))
    return most(kernel, at, ports[-1] if ports else at)


def _to_the_slot(kernel, vendor, path):
    """Return the path of ports to a card, without ports and functions that are
    behind a switch on the card. The last item is the card's end of the slot's
    link, and the item before it the other end.

    :param path: the ports above the function, and the function.
    """
    known = _SWITCHES.get(vendor, frozenset())
    # the two ports of one switch
    for _ in range(2 if known else 0):
        ids = kernel.read_some(pci.path(path[-2]), _IDS) if path[1:] else {}
        if not known & {(ids.get('vendor'), device)
                        for device in (ids.get('device'), '')}:
            break
        path = path[:-1]
    return path


def most(kernel, function: str, port: str) -> tuple[int, int]:
    """Return the maximum (lanes, MT/s) of a link, with 0 for unknown values.

    :param function: one end of the link.
    :param port: the other end.
    :raises OSError: one end is absent.
    """
    own, other = (kernel.read_some(pci.path(end), _LIMITS.values())
                  for end in (function, port))
    return _least(own, other, _MOST_WIDTH), _least(own, other, _MOST_SPEED)


def _errors(found, where) -> Iterator[signals.Reading]:
    fatal, nonfatal, corrected = (
        _counters(found.get(name, '')) for name in _ERRORS)
    if not (fatal or nonfatal or corrected):
        return
    for name in sorted(_OF_LINK & (fatal.keys() | nonfatal.keys())):
        yield signals.Reading(
            'link_errors', fatal.get(name, 0) + nonfatal.get(name, 0),
            f'{name}{where}')
    for signal, counters, others in (
            ('fatal_errors', fatal, _OF_LINK),
            ('nonfatal_errors', nonfatal, _OF_LINK | _HARMLESS)):
        for name in sorted(counters.keys() - others):
            yield signals.Reading(signal, counters[name], f'{name}{where}')
    total = sum(value for name, value in corrected.items()
                if name not in _ADVISORY)
    if total:
        # the number matters, whatever the errors are
        yield signals.Reading(
            'corrected_errors', total, f'of all kinds{where}')


@functools.lru_cache(maxsize=64)
def _counters(text: str) -> Mapping[str, int]:
    """Return name -> value for lines '<name> <count>' with counts above 0,
    except the total. Results are cached, because most texts are equal."""
    return {_LONG_NAMES.get(name, name): int(value)
            for name, value in _COUNTER.findall(text)
            if not name.startswith('TOTAL_')}


def _link(own, port) -> Iterator[signals.Reading]:
    """Yield a reading if a link has fewer lanes than both of its ends support,
    and another reading if the link is slower."""
    width, most = _number(own, _WIDTH), _least(own, port, _MOST_WIDTH)
    # 0, or another width, while the link state is unknown
    if width and most and width < most:
        yield signals.Reading(
            'link_width_half' if 2 * width < most else 'link_width', width,
            f'of {most}')
    speed, most = _number(own, _SPEED), _least(own, port, _MOST_SPEED)
    if speed and most and speed < most:
        yield signals.Reading('link_speed', speed, f'of {most}')


def _least(own, port, name) -> int:
    """Return the lower of the maxima of both ends of a link, in width or
    speed, or 0 if one is unknown."""
    return min(_number(own, name), _number(port, name))


def _number(found, name) -> int:
    """Return the number in an attribute of a link: the lanes, or the MT/s of a
    text like '16.0 GT/s PCIe'. Return 0 for any other text."""
    return _parsed(found.get(name, ''))


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> int:
    number = re.match('([0-9]+)(?:[.]([0-9]))?( GT/s)?', text)
    if not number:
        return 0
    if number[3]:
        return int(number[1]) * 1000 + int(number[2] or 0) * 100
    # a function that does not answer shows 255 lanes
    return int(number[1]) if int(number[1]) <= 32 else 0
