# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel clean, program, drill and release: orders to nova-compute.

Only nova-compute changes claims and devices. Hence it carries out the orders
(admin/orders.py, admin/maintenance.py), and the commands are refused if it does
not run. nova-accel prove works on a device without nova-compute: it locks a
file beside the claim store. The kernel ends the lock with the process, also
after SIGKILL. A file without a lock has no meaning.
"""

import argparse
from collections.abc import Iterator
import contextlib
import fcntl
import os
import time
import typing

from cliff import command

from nova_accel.cmd import output
from nova_accel.cmd import store
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import pci
from nova_accel.inventory import identity
from nova_accel.store import claim_store
from nova_accel.store import journal
from nova_accel.store import values

_State = values.OrderState
#: verbs of orders whose argument begins with a device
_OF_DEVICES = 'clean', 'program', signals.DRILL
#: seconds between two reads of the response
_PAUSE = 0.2
_ENDED = _State.DONE, _State.REFUSED
#: default seconds to wait for the response
_PATIENCE = 600
#: seconds after which nova-compute no longer begins an order
_TAKEN_ON = journal.ORDER_SECONDS + 1
#: seconds that a drill lasts: default and maximum
_STAY, _LONGEST_STAY = 120, 3600


class _Order(command.Command):

    VERB = ''

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        store.add_arguments(parser)
        parser.add_argument(
            '--timeout', metavar='SECONDS', type=int, default=_PATIENCE,
            help=f'how long to wait for the response (default: {_PATIENCE}); '
                 f'nova-compute continues its work after this time')
        return parser

    def _give(self, parsed_args, known, argument):
        self.app.stdout.write(carry_out(
            known, self.VERB, argument, parsed_args.timeout,
            self.app.stderr) + '\n')


class _OfDevice(_Order):

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            'device', metavar='DEVICE',
            help='address, serial number, or name of its resource provider; '
                 'for one region of an FPGA, the name of its provider')
        return parser

    def _order(self, parsed_args, *words):
        known = store.to_write(parsed_args)
        part = identity.named_part(parsed_args.device, known.devices())
        self._give(parsed_args, known, ' '.join((part, *words)))


def _seconds(value: str) -> int:
    if not value.isdecimal() or int(value) > _LONGEST_STAY:
        raise argparse.ArgumentTypeError(
            f'{value!r} is not a number of seconds up to {_LONGEST_STAY}: '
            f'write it like 300')
    return int(value)


class Clean(_OfDevice):
    """Clean a device that no server has, as after a server.

    nova-compute, which must run, follows the policy of [accel] handover: by
    default it resets the device and erases data that a server may have left.
    No server gets the device before it is clean. If a server has the device,
    the command refuses, with exit status 1.
    """

    VERB = 'clean'

    def take_action(self, parsed_args):
        self._order(parsed_args)


class Program(_OfDevice):
    """Program a free region of an FPGA with an image of the operator.

    nova-compute, which must run, downloads the image from Glance. The image
    must be public or belong to a project of [accel] bitstream_owners. Disable
    the device first (nova-accel disable); otherwise the command is refused,
    with exit status 1. A region of [accel] fixed_devices is not programmed. If
    such a region carries the function of the image already, nova-compute only
    stores the name of the function.
    """

    VERB = 'program'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            'wanted', metavar='FUNCTION-OR-IMAGE',
            help='id of the image, or id or name of the function in it '
                 '(accel:function_id, accel:function_name)')
        return parser

    def take_action(self, parsed_args):
        self._order(parsed_args, parsed_args.wanted)


class Drill(_OfDevice):
    """Simulate a fault of a device, to test your alerts.

    nova-compute treats the finding like any other: it logs, notifies and
    writes metrics. With [accel] health = act it also changes Placement. If
    servers have the device, it changes their metadata, otherwise it resets the
    device. Check that your alert arrives. Disable the device first (nova-accel
    disable); nova-compute must run. Otherwise the exit status is 1.
    """

    VERB = signals.DRILL

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--stay', metavar='SECONDS', type=_seconds, default=_STAY,
            help=f'how long the finding lasts, up to an hour (default: '
                 f'{_STAY}); long enough that Prometheus reads it and an '
                 f'alert reaches you')
        return parser

    def take_action(self, parsed_args):
        parsed_args.timeout += parsed_args.stay
        self._order(parsed_args, str(parsed_args.stay))


class Release(_Order):
    """Release a claim whose server does not exist, or that waits for you.

    nova-compute must be running. It checks whether a guest, an allocation in
    Placement or a server in Nova needs the claim. If so, the command is
    refused, with exit status 1. Otherwise nova-compute cleans the device, and
    other servers can get it. With the policy operator of [accel] handover, the
    handle of a deleted server waits until you release it with this command,
    which does not clean it: clean the device first.
    """

    VERB = 'release'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            'claim', metavar='CLAIM', type=pci.from_lspci,
            help='the handle, as nova-accel claims shows it')
        return parser

    def take_action(self, parsed_args):
        known = store.to_write(parsed_args)
        if not any(parsed_args.claim in (c.uuid, c.handle.address)
                   for c in known.all_claims()):
            raise exception.DeviceUnavailable(
                f'No claim on this host is called {parsed_args.claim!r}: name '
                f'a handle that nova-accel claims shows.')
        self._give(parsed_args, known, parsed_args.claim)


def carry_out(known: claim_store.ClaimStore, verb: str, argument: str,
              seconds: int, stderr: typing.TextIO) -> str:
    """Send an order to nova-compute, and return the response.

    :param seconds: time limit for the response.
    :param stderr: stream that shows the wait, if it is a terminal.
    :raises DeviceUnavailable: nova-compute refuses, or does not respond.
    """
    with output.waiting(
            stderr, f'waiting for nova-compute: {verb} {argument}', seconds):
        order = _answered(known, verb, argument, seconds)
    if order is None or order.state is _State.NEW:
        raise exception.DeviceUnavailable(
            f'nova-compute of this host did not begin the order within '
            f'{min(seconds, _TAKEN_ON)} s, and it is withdrawn: see that '
            f'nova-compute runs, and is of the release of this command.')
    if order.state is _State.REFUSED:
        raise exception.DeviceUnavailable(order.answer)
    if order.state not in _ENDED:
        raise exception.DeviceUnavailable(
            f'nova-compute has not finished within {seconds} s, and continues: '
            f'see nova-accel claims and its log.')
    return order.answer


def _answered(known, verb, argument, seconds):
    """Give an order, and wait until nova-compute has ended it. Return the
    order, also after the time limit, or None if the store no longer has it."""
    began = time.monotonic()
    number = known.give_order(verb, argument)
    try:
        while True:
            known.refresh()
            order = next((o for o in known.orders() if o.number == number),
                         None)
            if order is None or order.state in _ENDED:
                break
            limit = (min(seconds, _TAKEN_ON) if order.state is _State.NEW
                     else seconds)
            if time.monotonic() - began > limit:
                # nova-compute may have begun the order meanwhile: read its
                # state
                order = known.withdraw_order(number, (_State.NEW, *_ENDED))
                break
            time.sleep(_PAUSE)
    finally:
        # also if the operator interrupts the command
        known.withdraw_order(number, (_State.NEW, *_ENDED))
    return order


# nova-accel prove

@contextlib.contextmanager
def proving(path: str, address: str) -> Iterator[None]:
    """Lock a device for nova-accel prove inside the context. Other processes of
    nova-accel prove, and nova-accel enable, then refuse the device.

    :param path: path of the claim store.
    :raises InvalidRequest: another process works on the device, or the file
        cannot be written.
    """
    path = _path(path, address)
    try:
        file = _locked(path, address)
    except OSError as error:
        raise exception.InvalidRequest(
            f'{address} cannot be worked on, because {path} cannot be written '
            f'({error.strerror}): run the command as the user of nova-compute.'
            ) from error
    try:
        os.write(file, f'nova-accel prove (process {os.getpid()})'.encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(file)


def check_idle(known: claim_store.ClaimStore, address: str) -> None:
    """Check that neither nova-accel prove nor an order works on a device.

    :raises InvalidRequest: one of them does.
    """
    _check_unlocked(_path(known.path, address), address)
    for order in known.orders():
        name, _, _ = order.argument.partition(' ')
        # an order about a region contains the region's name
        if order.state is _State.BEGUN and order.verb in _OF_DEVICES and (
                name.partition('_')[0] == address):
            raise exception.InvalidRequest(
                f'{address} is not enabled, because nova-compute carries out '
                f'nova-accel {order.verb} {name}: wait for its end, or start '
                f'nova-compute if it does not run.')


def _check_unlocked(path, address):
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        _lock(file, fcntl.LOCK_SH, address)
        # the file of a process that was killed
        with contextlib.suppress(OSError):
            os.unlink(path)
    finally:
        os.close(file)


def _locked(path, address) -> int:
    while True:
        file = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            _lock(file, fcntl.LOCK_EX, address)
            # check_idle() may have removed the file meanwhile
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.lstat(path)):
                    os.truncate(file, 0)
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _lock(file, how, address) -> None:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 200, 0).decode(errors='replace')
        raise exception.InvalidRequest(
            f'{address} cannot be enabled or worked on while '
            f'{holder or "another command"} works on it: wait for its end, '
            f'or stop it.') from None


def _path(path, address) -> str:
    return f'{os.path.abspath(path)}.{address}.working'
