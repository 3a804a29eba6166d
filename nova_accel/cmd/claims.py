# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel claims: show the devices of servers, and the content of regions.
"""

import uuid

from nova_accel.cmd import output
from nova_accel.cmd import store
from nova_accel.host import pci
from nova_accel.inventory import holds
from nova_accel.inventory import identity
from nova_accel.inventory import offers
from nova_accel.inventory import shown
from nova_accel import model
from nova_accel import text


class Claims(output.Lister):
    """Show the devices that servers hold, and the contents of FPGA regions.

    There is a row for each claim, for each free region that nova_accel
    programmed, and for each device that is disabled or defective. A handle
    that waits for the operator has a claim without a server. The column Since
    shows the time (UTC) when the server got the device, the handle began to
    wait, or the device was disabled. The column Error shows the error of a
    claim, or why nova-compute withholds the handle. Reads the claim store of
    nova-compute and changes nothing.
    """

    COLUMNS = ('Device', 'Region', 'Handle', 'Server', 'Group', 'State',
               'Since', 'Function', 'Image', 'Origin', 'Error')
    STACKS = {
        'Device': ('{Device}', '{Handle}', 'region {Region}'),
        'Server, group and function': (
            '{Server}', 'group {Group}', 'function {Function}', 'image {Image}',
            'programmed by {Origin}'),
        'State': ('{State}', 'since {Since}', '{Error}')}

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        store.add_arguments(parser)
        parser.add_argument('--device', metavar='ADDRESS',
                            type=pci.from_lspci,
                            help='only this device, or this handle')
        parser.add_argument('--server', metavar='UUID', type=store.server,
                            help='only the devices of this server')
        return parser

    def take_action(self, parsed_args):
        self.is_search = bool(parsed_args.device or parsed_args.server)
        self.nothing = (
            f'No claim matches: {output.NAMES}.' if self.is_search
            else 'No server holds a device, and nothing waits for you, is '
                 'programmed or disabled.')
        known = store.read(parsed_args)
        loaded, withheld = known.loaded(), shown.listed(known)
        rows, held = [], set()
        for claim in known.all_claims():
            held.add(claim.part)
            if (parsed_args.device in (None, claim.device_address,
                                       claim.handle.address)
                    and parsed_args.server in (None, claim.instance_uuid)):
                rows.append((
                    claim.device_address, _region(claim.region_index),
                    claim.handle.address, self._holder(claim), claim.group,
                    output.state(claim), text.to_second(claim.since), *_content(
                        loaded, claim.device_address, claim.region_index),
                    _why(claim, withheld)))
        for address, index in sorted(loaded):
            if ((address, index) not in held and not parsed_args.server
                    and parsed_args.device in (None, address)):
                rows.append((address, _region(index), '', '', '', 'free', '',
                             *_content(loaded, address, index), ''))
        if not parsed_args.server:
            devices, gone = known.devices(), known.gone()
            rows += [
                (address, '', '', '', '', holds.of_disabled(row).value,
                 row.at or row.since, '', '', '',
                 row.reason or 'no reason given')
                for row in (*known.disabled(), *known.planned())
                # the present address, or the last one of an absent device
                for address in identity.disabled(
                    devices, [row], gone) or [
                    row.device_address]
                if parsed_args.device in (None, address)]
        return (self.COLUMNS,
                sorted(rows, key=lambda row: list(map(str, row))))

    def _holder(self, claim):
        return (claim.instance_uuid if self.structured or claim.waits
                else claim.holder)


def _why(claim, withheld):
    """Return why nova-compute withholds the handle of a claim, according to
    its last report, or the error of the claim."""
    return holds.reasons((
        *offers.of_claims({}, [claim]),
        *(hold for hold in withheld
          if hold.applies_to(claim.part, claim.handle)))) or claim.error


def _region(index):
    return '' if index is None else index


def _content(loaded, address, index):
    """Return (function, image, origin) of a region's content. Unknown values
    are ''. If the device has no regions, all three are ''."""
    if index is None:
        return '', '', ''
    if (address, index) not in loaded:
        return '', '', model.OPERATOR
    content = loaded[address, index]
    if content.content is None:
        return 'unknown', '', content.origin or 'unknown'
    function = content.function_name or content.function_uuid
    if function and not content.function_name:
        function = str(uuid.UUID(function))
    return (function or '', content.bitstream_id or '',
            content.origin or 'unknown')
