# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel disable, drain, undrain, enable: take devices out of service.

These commands write into the claim store, whether nova-compute runs or not.
nova-compute notices the change (admin/orders.py), or reads it at its start.
"""

from cliff import command

from nova_accel.cmd import handovers
from nova_accel.cmd import orders
from nova_accel.cmd import output
from nova_accel.cmd import store
from nova_accel import exception
from nova_accel.inventory import identity
from nova_accel.store import values
from nova_accel import text

#: exit status of drain while servers still have the device
LEFT = 3


class _OfDevice(command.Command):

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        store.add_arguments(parser)
        store.add_device_argument(parser)
        return parser


class _Disables(_OfDevice):

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--reason', metavar='TEXT', default='',
            help='reason, for other operators; tenants do not see it')
        return parser

    def _disable(self, parsed_args) -> str:
        """Disable the device that the operator named. Return its address."""
        reason = _line('--reason', parsed_args.reason)
        known = store.to_write(parsed_args)
        devices = known.devices()
        address = identity.named(parsed_args.device, devices)
        before = [row for row in _about(address, known) if not row.of_health]
        known.disable(values.Disabled(
            address, identity.serial_for_claim(address, devices, known.gone()),
            reason or next((row.reason for row in before), ''),
            next((row.since for row in before), text.now())), before)
        return address


def _line(option: str, value: str) -> str:
    """Return the value of an option that takes a reason.

    :param option: name of the option, for the error.
    :raises InvalidRequest: the reason is too long, or has more than one line.
    """
    if len(value) > values.LONGEST_REASON or not (
            value.isprintable() or not value):
        raise exception.InvalidRequest(
            f'{option} must be one line of at most {values.LONGEST_REASON} '
            f'characters: shorten it.')
    return value


class Disable(_Disables):
    """Take a device out of service, until nova-accel enable.

    The device is withheld in Placement within seconds if nova-compute runs,
    otherwise when it starts. A server that has the device keeps it, and may be
    started again. The device stays disabled after a restart of nova-compute or
    the host and, if it has a serial number, at another address.
    """

    def take_action(self, parsed_args):
        address = self._disable(parsed_args)
        self.app.stdout.write(
            f'{address} is disabled; nova-compute reserves it in Placement '
            f'within seconds, or when it starts\n')


class Drain(_Disables, output.Table):
    """Take a device out of service, and show the servers that still use it.

    Prints a row for each claim of a server on the device. Move or delete these
    servers, and run the command again. The exit status is 3 while a claim is
    left, and 0 when no server has the device or can get it.

    With --at, the device is taken out of service at that time. Until then, the
    metadata of servers with the device show the time and --because to their
    owners. A new server does not get the device if accel:max_hours of its
    flavor permits a life beyond that time. nova-accel undrain cancels the
    plan.
    """

    COLUMNS = ('Device', 'Handle', 'Server', 'State', 'Error')

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--at', metavar='TIME', type=handovers.time,
            help='time of the drain, for example 2026-12-01T06:00 (UTC) or '
                 '2026-12-01T06:00+01:00')
        parser.add_argument(
            '--because', metavar='TEXT', default='',
            help='with --at: reason, which owners of the servers see too')
        return parser

    def _plan(self, parsed_args) -> str:
        """Plan to disable the named device at a time. Return its address."""
        at, why = parsed_args.at, _line('--because', parsed_args.because)
        if not why or parsed_args.reason:
            raise exception.InvalidRequest(
                'A drain at a time needs a reason that owners may read: give '
                '--because TEXT, and no --reason.')
        if at <= text.now():
            raise exception.InvalidRequest(
                f'--at {at} is in the past, because it is {text.now()} now: '
                f'give a later time, or no --at to drain the device now.')
        known = store.to_write(parsed_args)
        devices = known.devices()
        address = identity.named(parsed_args.device, devices)
        if any(not row.of_health for row in _about(address, known)):
            raise exception.InvalidRequest(
                f'{address} cannot be drained at a time, because it is '
                f'disabled already: nova-accel enable {address} first.')
        known.disable(values.Disabled(
            address, identity.serial_for_claim(address, devices, known.gone()),
            why, text.now(), at=at), _planned(address, known))
        return address

    def take_action(self, parsed_args):
        self.check_columns(parsed_args, self.COLUMNS)
        at = parsed_args.at
        if parsed_args.because and not at:
            raise exception.InvalidRequest(
                '--because is for planned work: add --at TIME, or give '
                '--reason, which owners do not read.')
        address = (self._plan if at else self._disable)(parsed_args)
        # read after the device is disabled, because the store then refuses new
        # claims
        known = store.read(parsed_args)
        rows = (_planned if at else _about)(address, known)
        left = sorted(
            (claim.device_address, claim.handle.address, claim.holder,
             output.state(claim), claim.error)
            for claim in known.claims()
            if any(row.card.means(claim.card) for row in rows))
        if at:
            self.app.stderr.write(
                f'{address} is drained at {at}; nova-compute informs the '
                f'owners of these servers within a minute\n')
        elif left:
            self.status = LEFT
        else:
            self.app.stderr.write(
                f'{address} is disabled, and no server has it\n')
        return self.COLUMNS, left


class Undrain(_OfDevice):
    """Cancel nova-accel drain --at of a device, before its time.

    After that time the device is disabled: use nova-accel enable.
    """

    def take_action(self, parsed_args):
        known = store.to_write(parsed_args)
        address = identity.named(parsed_args.device, known.devices())
        rows = _planned(address, known)
        if not rows:
            raise exception.InvalidRequest(
                f'No drain of {address} is planned: see nova-accel claims; '
                f'nova-accel enable ends one whose time has come.')
        known.enable(rows)
        self.app.stdout.write(
            f'{address} is not drained; nova-compute informs the owners of '
            f'its servers within a minute\n')


class Enable(_OfDevice):
    """Undo nova-accel disable or drain, and end owners' reports of the device.

    The command is refused while nova-accel prove, clean, program or drill
    works on the device.
    """

    def take_action(self, parsed_args):
        known = store.to_write(parsed_args)
        disabled = known.disabled()
        try:
            address = identity.named(parsed_args.device, known.devices())
            mine = _about(address, known)
        except exception.DeviceUnavailable:
            # a device that was removed
            mine = [row for row in disabled if parsed_args.device in (
                row.serial or row.device_address, row.device_address)]
            if not mine:
                raise
            address = parsed_args.device
        keys = known.keys()
        orders.check_idle(known, address)
        known.enable(mine)
        reports = [row.number for row in known.owner_reports()
                   if not row.ended and (
                       row.device == address if address not in keys
                       else row.card.means(keys[address]))]
        known.end_owner_reports(reports)
        if reports:
            self.app.stdout.write(
                f'The reports of owners about {address} are ended\n')
        self.app.stdout.write(
            f'{address} is enabled; nova-compute offers it within seconds, or '
            f'when it starts, if nothing else is in the way\n'
            if mine else f'{address} was not disabled\n')


def _about(address, known) -> list[values.Disabled]:
    return _of(address, known, known.disabled())


def _planned(address, known) -> list[values.Disabled]:
    return _of(address, known, known.planned())


def _of(address, known, rows):
    devices, gone = known.devices(), known.gone()
    return [row for row in rows
            if address in identity.disabled(devices, [row], gone)]
