# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel verify: check the signatures of a journal of hand-overs."""

from collections.abc import Iterable, Sequence
import dataclasses
import json
import re

from nova_accel.cmd import handovers as exported
from nova_accel.cmd import output
from nova_accel import exception
from nova_accel.store import chain
from nova_accel.store import journal
from nova_accel.store import keys
from nova_accel.store import values
from nova_accel import text

_COLUMNS = {field.name.capitalize(): field.name
            for field in dataclasses.fields(values.Handover)}
_UNCONNECTED = 'does not follow the one before it'
#: result of a certificate that is not 'signed'
_FORGED = 'it is not as it was signed, or of another host'


class Verify(output.Lister):
    """Check the signatures and the chain of exported hand-overs, offline.

    Prints a row for each device: the number of its hand-overs, and the newest
    hand-over. The exit status is 1 if a hand-over was changed, removed, added
    or moved. If the newest hand-overs were cut off, only --hash detects this.
    Needs neither nova.conf nor the host.
    """

    COLUMNS = ('Device', 'Hand-overs', 'Since', 'Until', 'Result', 'Hash',
               'Key')
    STACKS = {
        'Device': ('{Device}', '{Hand-overs} hand-overs', '{Since}',
                   '{Until}'),
        'Result': ('{Result}', 'hash {Hash}', 'key {Key}')}
    nothing = 'The files have no hand-overs.'

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument(
            'files', metavar='FILE', nargs='+',
            help='a file from nova-accel handovers -f json (several files of '
                 'one host are joined), or a certificate from the metadata of '
                 'a server')
        parser.add_argument(
            '--key', metavar='KEY',
            help='the public key of the host, from nova-accel handovers --key; '
                 'without it any key is accepted')
        parser.add_argument(
            '--hash', metavar='HASH', action='append', default=[],
            help='hash of a hand-over that must be in the files, for example '
                 'from the metadata of a server; may be given many times')
        return parser

    def take_action(self, parsed_args):
        journals, certificates = [], []
        for path in parsed_args.files:
            content = _read(path)
            if isinstance(content, dict):
                certificates.append(content)
            else:
                journals.append(content)
        if certificates and not (journals or parsed_args.key):
            raise exception.InvalidRequest(
                f'{text.some(parsed_args.files)} must be verified, and the '
                f'certificate of a server has no key: give that of its host '
                f'by --key, or a journal of its host.')
        found = [handover for handovers in journals for handover in handovers]
        public = {parsed_args.key, *(one.key for one in found)} - {None}
        if parsed_args.key and found and not any(
                parsed_args.key in (handover.key, chain.key_after(handover))
                for handover in found):
            raise exception.InvalidRequest(
                f'{text.some(parsed_args.files)} must be signed by the key '
                f'{text.printable(parsed_args.key)}, and no hand-over is: name '
                f'the key and the files of one host.')
        cards = {handover.card: _Chain() for handover in found}
        for handovers in journals:
            for name, its in cards.items():
                its.join([one for one in handovers if one.card == name])
        known = {hash_ for its in cards.values() for hash_ in its.hashes}
        for hash_ in [*parsed_args.hash, *(
                one['hash'] for one in certificates if journals)]:
            if hash_ not in known:
                raise exception.NotThere(
                    f'{text.some(parsed_args.files)} must have the hand-over '
                    f'{text.printable(hash_, 80)}, and it is missing: its end '
                    f'was cut off, the host has an older copy of its claim '
                    f'store, or another host wrote the hand-over.')
        rows = [(name, *its.row(parsed_args.key or ''))
                for name, its in sorted(cards.items())]
        rows += [('', 1, one.get('time', ''), one.get('time', ''),
                  _checked(one, public), one['hash'], '')
                 for one in certificates]
        if any(its.fault for its in cards.values()) or any(
                row[4] == _FORGED for row in rows):
            self.status = 1
        # the host may have signed any text
        return self.COLUMNS, [
            [cell if isinstance(cell, int) else output.clean(cell)
             for cell in row] for row in rows]


class _Chain:
    """The hand-overs of one card, from all files."""

    def __init__(self) -> None:
        #: the first problem, a clause
        self.fault = ''
        #: number of a hand-over in the chain -> the hand-over
        self._by_place: dict[int, values.Handover] = {}

    @property
    def hashes(self) -> set[str]:
        return {*map(chain.digest, self._by_place.values())}

    def join(self, handovers: Sequence[values.Handover]) -> None:
        """Add the hand-overs of one file."""
        previous = None
        for one in handovers:
            if one.version not in ('', chain.VERSION):
                self._fail(one, 'is of a later release: verify it by that')
            elif not keys.is_signed(
                    one.key, chain.spelled(chain.statement(one)),
                    one.signature):
                self._fail(one, 'is not as it was signed')
            elif previous is not None and one.previous != previous:
                self._fail(one, _UNCONNECTED)
            previous = one.previous
            if one.place:
                previous = chain.digest(one)
                self._place(one)

    def _place(self, one):
        # Python refuses to read a number of thousands of digits
        place = int(one.place) if re.fullmatch('[0-9]{1,18}', one.place) else 0
        if place < 1 or (place == 1) != (not one.previous):
            self._fail(one, 'has a wrong place')
        if self._by_place.setdefault(place, one) != one:
            self._fail(one, 'has a twin: the host has used an older copy of '
                            'its claim store, or none')

    def row(self, key: str) -> tuple[str | int, ...]:
        """Check the chain, and return the cells of its row after the device.

        :param key: key that must sign the newest hand-over, or '' for any key.
        """
        handovers = [one for _, one in sorted(self._by_place.items())]
        if not handovers:
            return 0, '', '', self.fault or 'no hand-over has ended', '', ''
        key_changes = []
        for before, one in zip(handovers, handovers[1:]):
            if one.previous != chain.digest(before):
                self._fail(one, _UNCONNECTED)
            if one.key != chain.key_after(before):
                key_changes.append(one.time)
                if not one.is_key or one.key != chain.key_after(one):
                    self._fail(one, 'is signed by another key, which no '
                                    'hand-over announces')
        first, last = handovers[0], handovers[-1]
        is_whole = first.place == '1'
        if key and chain.key_after(last) != key:
            self._fail(last, 'is the newest, and another key signed it')
        if not is_whole and len(handovers) < journal.MOST_HANDOVERS:
            # nova-compute never removes the beginning of a chain
            self._fail(first, f'has number {first.place}, and those before '
                              f'it are missing')
        return (len(handovers), first.time, last.time, self.fault or '; '.join([
            'complete' if is_whole else
            f'complete from number {first.place} on',
            *(f'the key was lost before {text.printable(time)}: see that the '
              f'new one is of the host' for time in key_changes)]),
            chain.digest(last), chain.key_after(last))

    def _fail(self, one, clause):
        self.fault = self.fault or (
            f'the hand-over of {text.printable(one.time)} {clause}')


def _checked(certificate: dict[str, str], public: Iterable[str]) -> str:
    """Return the word of the table for a certificate: 'signed' if the host
    signed it, otherwise the word for a forged one.

    :param public: public keys of the host.
    """
    message = chain.spelled({name: value for name, value in certificate.items()
                             if name not in ('hash', 'signature')})
    is_good = certificate['hash'] == chain.hashed(message) and any(
        keys.is_signed(key, message, certificate['signature'])
        for key in public)
    return 'signed' if is_good else _FORGED


def _read(path: str) -> list[values.Handover] | dict[str, str]:
    """Return the hand-overs, or the certificate, in a file.

    :raises InvalidRequest: the file cannot be read, or has other content.
    """
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
        if isinstance(content, list):
            return [_handover(row) for row in content]
        if all(isinstance(content[name], str)
               for name in ('hash', 'signature', *content)):
            return content
        why = 'a value is not a text'
    except OSError as error:
        why = error.strerror or ''
    except exception.MALFORMED as error:
        why = f'{type(error).__name__}: {error}'
    raise exception.InvalidRequest(
        f'{path} must have hand-overs as nova-accel handovers -f json of this '
        f'release writes them, and it has something else ({why}): name such a '
        f'file.')


def _handover(row):
    handover = exported.parsed(row, [_COLUMNS[column] for column in row])
    return dataclasses.replace(handover, before=_function(handover.before),
                               after=_function(handover.after))


def _function(value):
    """Return the UUID of a function without hyphens, as the journal has it.
    Return any other value unchanged."""
    plain = value.replace('-', '')
    try:
        return plain if output.identifier(plain) == value else value
    except ValueError:
        return value
