# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Define the health signals and their consequences for devices. Pure.

A guest can cause some signals. It can write the error masks and the error
status of its device, and provoke requests that the device refuses
(vfio_pci_config.c of Linux 6.12: the AER capability is not virtualized). A
guest with the whole device can also take the device's link down, for example
by a reset that the host does not see. Hence a finding of a signal that the
guest can cause (see Cause) is at most SUSPECT while the server has the device,
and ends with the reset after the server. Later readings show whether the
device is well.
"""

from collections.abc import Mapping
import enum
import functools
import typing

from nova_accel import conf
from nova_accel import exception

CONF = conf.CONF
OPTION = '[accel] health'
#: the signal of nova-accel drill, and the verb of its order
DRILL = 'drill'
#: the signal that notify.owners adds
PAUSED = 'guest_paused'
#: the signal of attach.owner_reports
REPORTED = 'owner_report'
#: signals that are stored as marks (store.values.Notes) and survive a restart:
#: a programming, or the start of a guest, failed, until the next one succeeds;
#: the device was recovered, until a server has had it
MARKS = PROGRAMMING, START, RECOVERED = 'programming', 'start', 'recovered'
#: a mark that is not a signal: the device is withheld because it is unhealthy
FENCED = 'fenced'


class State(enum.Enum):
    """The health of a device, from the best state to the worst."""

    OK = 'ok'
    #: no reading is available
    UNKNOWN = 'unknown'
    #: it may fail; servers get it last
    SUSPECT = 'suspect'
    #: no server gets it
    QUARANTINED = 'quarantined'
    #: its driver does not find it
    GONE = 'gone'

    @property
    def rank(self) -> int:
        """Return the position of the state, from 0 for the best state."""
        return _RANKS[self]


_RANKS = {state: rank for rank, state in enumerate(State)}


class Mode(enum.Enum):
    """The consequences of a signal's findings, by [accel] health."""

    #: it is ignored
    OFF = 'off'
    #: it is logged and shown to the operator, without further consequences
    OBSERVE = 'observe'
    #: reported to Placement and to owners as well, and devices are quarantined
    ACT = 'act'


class Cause(enum.Enum):
    """The guests that can cause a signal."""

    NONE = 'none'
    #: the guest of a server with the whole device: signals of the bus
    WHOLE = 'whole'
    #: also the guest of a server with only a VF, a region or a vGPU
    ANY = 'any'


class Reading(typing.NamedTuple):
    """One value of one signal of a device, as a driver reads it."""

    #: one of SIGNALS
    signal: str
    #: value of a counter, or number in the text of another signal
    value: int = 1
    #: the thing that was read, for the text: 'DLP', 'of port 0000:3a:00.0'
    about: str = ''


class Signal(typing.NamedTuple):
    """The definition of a health signal, a row of the table SIGNALS."""

    #: its text for people, a clause with {value} and {about}
    said: str
    #: the state while no server has the device
    free: State
    #: the state while a server has the device or a part of it
    held: State
    cause: Cause
    #: whether the value is a counter: any growth is a finding, which lasts
    #: until the next hand-over
    counts: bool = False
    #: the smallest growth between two looks that is a finding
    least: int = 1
    #: whether a quarantine lasts until the operator enables the device
    sticky: bool = False
    #: whether it is only observed by default ([accel] health)
    is_new: bool = False
    #: whether inventory.recovery may try to end it
    recovers: bool = False

    def state(self, is_held: bool, is_whole: bool) -> State:
        """Return the state that a finding of this signal gives a device.

        :param is_held: whether a server has the device or a part of it.
        :param is_whole: whether a server has a whole function of the slot, and
            hence may be the cause of the signal.
        """
        state = self.held if is_held else self.free
        if is_whole and self.cause is Cause.WHOLE:
            return min(state, State.SUSPECT, key=lambda s: s.rank)
        return state


_OK, _SUSPECT, _BAD = State.OK, State.SUSPECT, State.QUARANTINED
_NONE, _WHOLE, _ANY = Cause.NONE, Cause.WHOLE, Cause.ANY

SIGNALS: Mapping[str, Signal] = {
    # Of the bus: host.bus
    'link_errors': Signal(
        'its PCIe link had {value} uncorrectable errors ({about})',
        _BAD, _BAD, _WHOLE, counts=True, sticky=True),
    'fatal_errors': Signal(
        'it had {value} fatal PCIe errors ({about})',
        _BAD, _SUSPECT, _ANY, counts=True, sticky=True),
    'nonfatal_errors': Signal(
        'it had {value} uncorrectable PCIe errors ({about})',
        _SUSPECT, _SUSPECT, _ANY, counts=True),
    'corrected_errors': Signal(
        'its PCIe link corrected {value} errors ({about})',
        _SUSPECT, _SUSPECT, _ANY, counts=True, least=100, is_new=True),
    'link_width': Signal(
        'its PCIe link has {value} lanes {about}', _SUSPECT, _SUSPECT, _WHOLE),
    'link_width_half': Signal(
        'its PCIe link has {value} lanes {about}', _BAD, _BAD, _WHOLE,
        recovers=True),
    'link_speed': Signal(
        # drivers in guests lower the link of an idle device
        'its PCIe link has {value} MT/s {about}', _SUSPECT, _OK, _WHOLE,
        is_new=True),
    'power': Signal('its power_state is error', _BAD, _BAD, _WHOLE,
                    recovers=True),
    # Events of the kernel: host.kernel.Kernel.changes
    'recovery_failed': Signal(
        'the kernel could not recover it from a PCIe error',
        _BAD, _SUSPECT, _ANY, counts=True, sticky=True),
    'wedged': Signal(
        'its driver has given it up (WEDGED)',
        _BAD, _SUSPECT, _ANY, counts=True, sticky=True),
    # Reported by a card while its physical function stays with the host:
    # drivers.*.health
    'card_failed': Signal('{about}', _BAD, _SUSPECT, _ANY, recovers=True),
    'card_errors': Signal(
        'it counted {value} errors ({about})',
        _SUSPECT, _SUSPECT, _ANY, counts=True),
    'card_warns': Signal('{about}', _SUSPECT, _SUSPECT, _ANY),
    'wear': Signal('{about}', _SUSPECT, _SUSPECT, _ANY),
    'temperature': Signal('it is too hot ({about})', _SUSPECT, _SUSPECT, _ANY,
                          is_new=True),
    # model.Device.failed, by inventory.conditions
    'failed': Signal('its driver says that it has failed', _BAD, _BAD, _WHOLE,
                     recovers=True),
    # inventory.recovery
    RECOVERED: Signal('it had failed and was recovered, and no server has had '
                      'it since', _SUSPECT, _SUSPECT, _NONE),
    # attach.programming. An image of a project does not count: it may be bad
    PROGRAMMING: Signal(
        'an image of the operator could not be programmed into it',
        _SUSPECT, _SUSPECT, _NONE),
    # attach.guests
    START: Signal('a guest with it could not be started, because of it',
                  _SUSPECT, _SUSPECT, _ANY),
    # notify.owners
    PAUSED: Signal(
        'QEMU has paused the guest of server {about} because of an error: hard '
        'reboot the server', _SUSPECT, _SUSPECT, _ANY),
    # attach.owner_reports
    REPORTED: Signal('the owner of a server has reported it ({about})',
                     _SUSPECT, _SUSPECT, _ANY),
    # admin.maintenance
    DRILL: Signal('the operator has a drill (nova-accel drill)',
                  _BAD, _SUSPECT, _NONE, recovers=True),
}


@functools.lru_cache(maxsize=8)
def _modes(items: tuple[str, ...]) -> Mapping[str, Mode]:
    every = Mode.OBSERVE
    named: dict[str, Mode] = {}
    for item in items:
        signal, equals, text = (part.strip() for part in item.rpartition('='))
        try:
            mode = Mode(text)
        except ValueError:
            raise exception.ConfigurationError(
                f'{OPTION} has {item!r}, and {text!r} is neither off nor '
                f'observe nor act: correct it.') from None
        if not equals:
            every = mode
        elif signal in SIGNALS:
            named[signal] = mode
        else:
            raise exception.ConfigurationError(
                f'{OPTION} has {item!r}, and {signal!r} is not a signal: the '
                f'signals are {", ".join(SIGNALS)}.')
    usual = {name: Mode.OBSERVE if row.is_new and every is Mode.ACT else every
             for name, row in SIGNALS.items()}
    return {**usual, **named}


def modes() -> Mapping[str, Mode]:
    """Return signal -> its mode, from [accel] health.

    :raises ConfigurationError: [accel] health cannot be read.
    """
    return _modes(tuple(CONF.accel.health))


def is_off() -> bool:
    """Return whether all signals are off, so nothing is read."""
    return all(mode is Mode.OFF for mode in modes().values())


def acts() -> bool:
    """Return whether findings of a signal change Placement and metadata."""
    return Mode.ACT in modes().values()


def state_of(is_gone: bool, is_withheld: bool, suspect: bool, is_read: bool,
             is_given_whole: bool) -> State:
    """Return the state of a device from its holds and findings.

    :param is_gone: whether the device's driver does not find it.
    :param is_withheld: whether the whole device has a hold.
    :param suspect: whether the device is suspect because of a finding.
    :param is_read: whether its signals could be read in the last round.
    :param is_given_whole: whether a server has the whole device, not only a
        VF, a region or a vGPU. Then only the bus can be read.
    """
    if is_gone:
        return State.GONE
    if is_withheld:
        return State.QUARANTINED
    if suspect:
        return State.SUSPECT
    return State.OK if is_read and not is_given_whole else State.UNKNOWN
