# Licensed under the Apache License, Version 2.0. See LICENSE.
"""FPGAs of AMD (Xilinx) under XRT: Alveo and Versal cards.

A card has two PCI functions. The management function identifies the card: it
can flash and program it, and stays on the host with the driver xclmgmt. The
user function goes to guests. There is one region, the user partition.

No attribute reliably reports the loaded function. xclbinuuid shows what the
driver xocl of the user function has loaded itself since it was bound; it does
not change if the card is programmed through the management function. The
management function shows no UUID, only the IP_LAYOUT of the function that it
programmed, until it is bound again or the card is reset. Therefore xclbinuuid
applies if it exists, and xocl is bound again before it would be wrong.
Otherwise the stored function applies while the management function shows that
a function is loaded.

A guest can have the card changed by requests to a mailbox between the two
functions. This driver lets the mailbox refuse these requests, unless [accel]
whole_cards has the card. It accepts only LOAD_XCLBIN and LOAD_SLOT_XCLBIN,
because since XRT 2.15 a guest has no compute unit before it has sent one of
them (__icap_peer_xclbin_download() in icap.c). With config_xclbin_change at 1,
xclmgmt uses only the UUID of the guest's data, and programs the host's file of
that UUID. This driver provides only the file of the loaded function
(nova_accel.host.firmware). xclmgmt loses the mask of refused requests and the
attribute config_xclbin_change when it is bound, so each examination checks
both. If they were lost, a guest may have changed the card. Hence confine()
closes the mailbox after the store has recorded that it was open.

Source: XRT's kernel drivers (mgmt-core.c, mgmt-utils.c, mgmt-sysfs.c,
xocl_sysfs.c, icap.c, mailbox.c, mailbox_proto.h), 2.21 of 2026, and its
documents on security and on cloud vendors.
"""

import contextlib
import dataclasses
import errno
import re
import time
import uuid

from nova_accel.bitstream import xclbin
from nova_accel.drivers import base
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import firmware
from nova_accel.host import limited
from nova_accel.host import pci
from nova_accel import model

MANAGEMENT_DRIVER = 'xclmgmt'
USER_DRIVER = 'xocl'
#: seconds until the two drivers are connected after xocl was bound
READY_SECONDS = 3
#: attribute of the management function: mask of refused requests
MAILBOX = 'config_mailbox_channel_disable'
#: attribute that makes xclmgmt load the host's file, not the guest's data
FETCH = 'config_xclbin_change'
#: requests from which xclmgmt uses only a UUID with FETCH: LOAD_XCLBIN and
#: LOAD_SLOT_XCLBIN of mailbox_proto.h
FETCHED_REQUESTS = 1 << 8 | 1 << 18
#: requests by which a guest loads another function or shell: these two,
#: LOAD_XCLBIN_KADDR, PROGRAM_SHELL, LOAD_XCLBIN_SLOT_KADDR. The KADDR requests
#: contain a memory address of the host, for xocl on the host; xclmgmt accepts
#: them from a guest if xocl had the card before (mgmt-core.c of XRT)
LOAD_REQUESTS = FETCHED_REQUESTS | 1 << 7 | 1 << 14 | 1 << 17
#: and HOT_RESET, RECLOCK, READ_P2P_BAR_ADDR, which writes the configuration
#: space of the management function
CHANGE_REQUESTS = LOAD_REQUESTS | 1 << 5 | 1 << 9 | 1 << 15

_Defect = base.Defect
_NULL = '0' * 32
#: maximum length of a read of a binary attribute
_PAGE = 4096
_ALVEO, _VERSAL = 'ALVEO', 'VERSAL'
#: product for AMD's AVED and its driver ami, not for XRT
_V80 = 'V80'
#: (vendor, device) of the management function -> product, family; devices.h
_PRODUCTS = {
    ('10ee', '5000'): ('U200', _ALVEO), ('10ee', '5004'): ('U250', _ALVEO),
    ('10ee', '5008'): ('U280', _ALVEO), ('10ee', '500c'): ('U280', _ALVEO),
    ('10ee', '5020'): ('U50', _ALVEO), ('10ee', '5050'): ('U25', _ALVEO),
    ('10ee', '5058'): ('U55N', _ALVEO), ('10ee', '5060'): ('U50LV', _ALVEO),
    ('10ee', '505c'): ('U55C', _ALVEO), ('10ee', '506c'): ('U50C', _ALVEO),
    ('10ee', '503c'): ('U30', _ALVEO), ('10ee', '504e'): ('U26Z', _ALVEO),
    ('10ee', '5028'): ('VERSAL_5028', _VERSAL),
    ('10ee', '5044'): ('VERSAL_5044', _VERSAL),
    ('10ee', '5094'): ('V70', _VERSAL), ('10ee', '50b0'): ('V70', _VERSAL),
    ('10ee', '50b4'): (_V80, _VERSAL),
    # named by their numbers in devices.h, whatever they are sold as
    ('10ee', '513c'): ('U30', _ALVEO),
    # named by its VBNV: xilinx_vck5000_gen3x16_xdma_base_1
    ('10ee', '5048'): ('VCK5000', _VERSAL),
    ('10ee', '5074'): ('X3522PV', _ALVEO),
    ('10ee', '5078'): ('VERSAL_5078', _VERSAL),
    ('10ee', '5700'): ('RAVE_5700', _VERSAL),
    ('10ee', '5710'): ('RAVE_5710', _VERSAL),
    ('10ee', '6098'): ('VCK190', _VERSAL),
    # device ids with the factory image
    ('10ee', 'd000'): ('U200', _ALVEO), ('10ee', 'd004'): ('U250', _ALVEO),
    ('10ee', 'd008'): ('U280', _ALVEO), ('10ee', 'd00c'): ('U280', _ALVEO),
    ('10ee', 'd020'): ('U50', _ALVEO), ('10ee', 'd03c'): ('U30', _ALVEO),
    ('10ee', 'd04c'): ('U25', _ALVEO),
}
#: the name of a card whose shell cannot be loaded (Xilinx/video-sdk issue 99,
#: of a U30)
_RECOVERY = ('10ee', 'abcd')
#: product -> its memory, which no attribute shows; from AMD's data sheets
_MEMORY = {'U200': (('DDR', 65536),), 'U250': (('DDR', 65536),),
           'U280': (('DDR', 32768), ('HBM', 8192)),
           'U50': (('HBM', 8192),), 'U55C': (('HBM', 16384),)}
#: (vendor, device) of the management function -> device of the user function,
#: if it is not the next number; devices.h
_USERS = {('13fe', '006c'): '0065', ('13fe', '0078'): '0077'}
#: errno of the ioctl -> its meaning; others are failures of the card
_REFUSALS = {
    errno.EACCES: 'its DNA certificate is not for this card',
    errno.EBUSY: 'the function that is loaded is in use',
    errno.EINVAL: 'it is not for the card\'s shell or this release of XRT',
    errno.EKEYREJECTED: 'its signature is missing or not trusted here, and '
                        'the sec_level of the card asks for one',
    errno.ENODEV: f'{MANAGEMENT_DRIVER} has no node in /dev for it',
    errno.ENOENT: 'its interface UUIDs are not those of the card\'s shell',
    errno.ENOTTY: 'the card is not ready',
    errno.EOPNOTSUPP: 'it is for a shell with another time stamp',
}


class XrtDriver(base.PciDriver):

    CONTRACT = base.CONTRACT
    NAME = 'xrt'

    def check(self, device=None):
        """Check that guests with XRT 2.15 or later can load the function of
        the card; see the base class."""
        if device is None or self._is_the_guests(device.address):
            return
        address = device.address
        if (self._number(address, FETCH) is None
                or self._refused(address) & FETCHED_REQUESTS):
            yield base.Finding(
                f'its mailbox refuses LOAD_XCLBIN or LOAD_SLOT_XCLBIN, or its '
                f'driver has no {FETCH}: guests with XRT 2.15 or later have no '
                f'compute units',
                f'update XRT, and write '
                f'{CHANGE_REQUESTS & ~FETCHED_REQUESTS:#x} to its {MAILBOX}',
                is_failure=False)
        for region in device.regions:
            interface = self._file_interface(address)
            if region.function_uuid and interface and (
                    not self.kernel.offers_xclbin(region.function_uuid,
                                                  interface)):
                name = firmware.file_name(region.function_uuid, interface)
                yield base.Finding(
                    f'guests with XRT 2.15 or later cannot load the function '
                    f'that {region.name} carries, as its file is not placed '
                    f'for {MANAGEMENT_DRIVER}',
                    f'copy the xclbin to {firmware.XCLBINS}/{name}',
                    is_failure=False)

    # Discovery

    def fingerprint(self):
        return (*super().fingerprint(), *(
            self.names(f'bus/pci/drivers/{name}')
            for name in (MANAGEMENT_DRIVER, USER_DRIVER)))

    def state(self, address):
        """Return a value that also changes with the mailbox and the loaded
        function; see the base class. While the mailbox must be closed, the
        value differs at each call, and the card is examined."""
        found = super().state(address)
        try:
            return (*found, self._refused(address), self._layout(address),
                    address not in base.whole_cards()
                    and self._takes(address, CHANGE_REQUESTS)
                    and time.monotonic())
        except (OSError, ValueError) as error:
            return *found, str(error)

    def identify(self, address):
        ids = pci.ids(self.kernel, address)
        product, family = _PRODUCTS.get(ids, (None, None))
        if product is None:
            # a card that is not in the table, or of another brand
            if ids != _RECOVERY and not self.kernel.exists(
                    pci.path(address, 'mgmt_pf')):
                return None
            product = f'XRT_{ids[1].upper()}'
        return model.Device(
            address=address, type='FPGA', vendor='XILINX', product=product,
            vendor_id=ids[0], product_id=ids[1], driver=self.NAME,
            family=family, memory=_MEMORY.get(product, ()))

    def look(self, device, before):
        address = device.address
        if (device.vendor_id, device.product_id) == _RECOVERY:
            raise _Defect(
                'it is in recovery mode (10ee:abcd), because its shell cannot '
                'be loaded: flash it as its maker says, and power-cycle the '
                'host')
        self._check_management(address, device.product)
        user = self._user_function(device)
        device = dataclasses.replace(device, shell_id=self._shell(address))
        obstacle = pci.obstacle(self.kernel, user)
        interface = self._interface(address)
        region = model.Region(
            index=0, region_type_uuid=interface,
            function_uuid=self._function(address, user, before),
            handles=() if obstacle else (
                model.AttachHandle(model.HandleType.PCI, user),),
            programmable=interface is not None and not base.is_fixed(address),
            guest_can_reprogram=self._takes(address, LOAD_REQUESTS),
            reason=obstacle)
        return dataclasses.replace(device, regions=(region,))

    def _quarantined(self, device, before, reason):
        """Return the quarantined device, with guest_can_reprogram as the
        mailbox permits; see the base class."""
        return self._with_mailbox(
            super()._quarantined(device, before, reason))

    def _with_mailbox(self, device):
        """Return the device with guest_can_reprogram as the mailbox permits.

        If the mailbox cannot be read, it counts as open. Without xclmgmt it
        counts as closed.
        """
        address = device.address
        try:
            is_open = (pci.driver(self.kernel, address) == MANAGEMENT_DRIVER
                       and self._takes(address, LOAD_REQUESTS))
        except (OSError, ValueError):
            is_open = True
        return dataclasses.replace(device, regions=tuple(
            dataclasses.replace(region, guest_can_reprogram=is_open)
            for region in device.regions))

    def confine(self, device):
        """Close the mailbox; see the base class."""
        problem = self._close_mailbox(device.address)
        device = self._with_mailbox(device)
        if not problem or device.health is not model.Health.OK:
            return device
        return dataclasses.replace(
            device, health=model.Health.QUARANTINED, reason=problem)

    def health(self, device):
        """Read the bus and the firewalls; see the base class. The management
        function shows the firewalls even while a server has the user function.

        A compute kernel of the server can trip a firewall. Programming clears
        it. Source: firewall.c of XRT's xclmgmt.
        """
        yield from super().health(device)
        for name in self.names(pci.path(device.address)):
            if name.startswith('firewall.m.'):
                level = self._number(device.address, f'{name}/detected_level')
                if level:
                    yield signals.Reading(
                        'card_warns', about=f'its AXI firewall of level '
                                            f'{level} has tripped')

    def _check_management(self, address, product=None):
        """Check the management function.

        :raises Defect: the function is not usable.
        """
        bound = pci.driver(self.kernel, address)
        if product == _V80 and bound != MANAGEMENT_DRIVER:
            raise _Defect(f'a {_V80} is sold with the driver ami, and has no '
                          f'region that XRT programs: it is not supported; '
                          f'give it with a fixed function by a rule of '
                          f'[accel] pci_devices')
        if bound != MANAGEMENT_DRIVER:
            raise _Defect(f'its management function is bound to '
                          f'{bound or "no driver"}: bind it to '
                          f'{MANAGEMENT_DRIVER}, and keep it there, as it can '
                          f'flash the card')
        if not self.kernel.exists(pci.path(address, 'mgmt_pf')):
            raise _Defect('it is not flashed with an XRT shell: flash one by '
                          'xbmgmt program --base')
        for name, bad, meaning in (
                ('mfg', 1, 'it has the image that it was sold with: flash a '
                           'shell by xbmgmt program --base'),
                ('recovery', 1, 'it runs its recovery image: flash a shell by '
                                'xbmgmt program --base'),
                ('dev_offline', 1, f'{MANAGEMENT_DRIVER} has it offline, as '
                                   f'while it is reset'),
                ('ready', 0, f'{MANAGEMENT_DRIVER} could not start it: read '
                             f'dmesg')):
            if self._number(address, name) == bad:
                raise _Defect(meaning)

    def _number(self, address, name) -> int | None:
        """Return the number (decimal or 0x...) in an attribute, or None."""
        text = self.attribute(address, name)
        return None if text is None else int(text, 0)

    def _user_function(self, device) -> str:
        """Return the PCI address of the user function of a card.

        :raises Defect: the function is missing or not usable.
        """
        head, number = device.address.split('.')
        user = f'{head}.{int(number) + 1}'
        if not self.kernel.exists(pci.path(user)):
            raise _Defect(f'its user function {user} is missing: flash '
                          f'a shell by xbmgmt program --base')
        bound = pci.driver(self.kernel, user)
        if bound != USER_DRIVER:
            # without its driver only the ids can be read
            ids = device.vendor_id, device.product_id
            wanted = (device.vendor_id, _USERS.get(
                ids, f'{int(device.product_id, 16) + 1:04x}'))
            found = pci.ids(self.kernel, user)
            if found != wanted:
                raise _Defect(f'{user} beside it is {":".join(found)} and not '
                              f'its user function {":".join(wanted)}')
            return user
        if not self.kernel.exists(pci.path(user, 'user_pf')):
            raise _Defect(f'its user function {user} has no user_pf, as '
                          f'without an XRT shell')
        if not limited.wait_until(
                lambda: self._number(user, 'ready') != 0, READY_SECONDS):
            raise _Defect(f'its user function {user} is not ready: the '
                          f'mailbox to {MANAGEMENT_DRIVER} does not work')
        for name, meaning in (('dev_offline', 'is offline'),
                              ('device_bad_state', 'is in a bad state')):
            if self._number(user, name):
                raise _Defect(f'its user function {user} {meaning}: reset the '
                              f'card by xbmgmt reset')
        return user

    def _shell(self, address) -> str | None:
        """Return the logic UUID of the partition directly below the user
        partition, or None if it cannot be read."""
        try:
            return self._last_uuid(address, 'logic_uuids')
        except OSError:
            return None

    def _interface(self, address) -> str | None:
        """Return the UUID of the interface that an xclbin must be built for,
        or None if the shell reports none.

        This interface is in the last line of the attribute. An earlier line
        has the interface of the base, for which the shell itself is built.
        """
        try:
            return self._last_uuid(address, 'interface_uuids')
        except OSError as e:
            # EINVAL, ENOENT: a shell without UUIDs; else the card is not ready
            if e.errno not in (errno.EINVAL, errno.ENOENT):
                raise
            return None

    def _last_uuid(self, address, name) -> str | None:
        lines = self.kernel.read(pci.path(address, name)).split()
        return model.uuid_hex(lines[-1]) if lines else None

    # The mailbox

    def _refused(self, address) -> int:
        """Return the mask of requests that the mailbox refuses."""
        return self._number(address, MAILBOX) or 0

    def _takes(self, address, requests) -> bool:
        """Return whether the mailbox accepts a harmful request of this mask.
        With FETCH, the FETCHED_REQUESTS are harmless, because xclmgmt loads
        only files of the host for them."""
        harmless = self._refused(address)
        if self._number(address, FETCH):
            harmless |= FETCHED_REQUESTS
        return harmless & requests != requests

    def _close_mailbox(self, address) -> str:
        """Close the mailbox for requests that change the card.

        :returns: why closing failed, as a clause, or '' if the mailbox is
            closed, or if the operator permits guests to change the card.
        """
        if address in base.whole_cards():
            return ''
        requests = CHANGE_REQUESTS
        try:
            if not self._takes(address, CHANGE_REQUESTS):
                return ''
            with contextlib.suppress(FileNotFoundError):
                # XRT before 2020 has no such attribute
                self.kernel.write_attribute(address, FETCH, '1')
                requests &= ~FETCHED_REQUESTS
            self.kernel.close_mailbox(address, requests)
            if not self._takes(address, CHANGE_REQUESTS):
                return ''
            problem = f'it is {self._refused(address):#x} after that'
        except OSError as error:
            problem = error.strerror or str(error)
        except ValueError as error:
            problem = str(error)
        return (f'a guest could program and reset it by the mailbox, and '
                f'{requests:#x} could not be written to its {MAILBOX} '
                f'({problem}): update XRT and read dmesg, or name it in '
                f'{base.WHOLE_CARDS}')

    # What servers get

    def prepare(self, device, handle, created_type, fresh, use):
        """Close the mailbox for a new server, because xclmgmt may have been
        bound again since the last examination; see the base class. If the
        server had the card before, confine() closes the mailbox."""
        problem = self._close_mailbox(device.address) if fresh else ''
        if problem:
            raise exception.DeviceUnavailable(
                f'{handle.address} was allocated, and {problem}: the build is '
                f'retried on another host.')

    # What is loaded

    def _function(self, address, user, before) -> str | None:
        shown = self._shown(user)
        if shown:
            return shown
        layout = self._layout(address)
        function = before and before.regions and (
            before.regions[0].function_uuid)
        if not layout or not function:
            return None
        if self._is_the_guests(address) or base.is_fixed(address):
            return function
        # a guest may have loaded the file of another card, but only an offered
        # one
        if (self.kernel.xclbin_layout(address) not in (None, layout)
                or not self.kernel.offers_xclbin(
                    function, self._file_interface(address) or '')):
            return None
        return function

    @staticmethod
    def _is_the_guests(address) -> bool:
        """Return whether guests may load any function into a card."""
        return address in base.whole_cards()

    def _file_interface(self, address) -> str | None:
        """Return the interface UUID in the names of files that xclmgmt loads.

        This is the second line of the attribute, the first interface of the
        shell. The first line has the interface of the base
        (interface_uuids_show() in mgmt-sysfs.c, xclmgmt_get_interface_uuid()
        in mgmt-utils.c).
        """
        try:
            lines = self.kernel.read(
                pci.path(address, 'interface_uuids')).split()
        except OSError:
            return None
        return lines[min(1, len(lines) - 1)] if lines else None

    def _shown(self, user) -> str | None:
        """Return the function that xocl has loaded, or None if it has loaded
        none, or is not bound.

        The attribute has a line for each slot. The first line is for the FPGA.
        """
        lines = (self.attribute(user, 'xclbinuuid') or '').split()
        function = model.uuid_hex(lines[0]) if lines else _NULL
        return None if function == _NULL else function

    def serial(self, address):
        """Return the serial number of the card's controller; see the base
        class.

        Source: serial_num in xmc.c of XRT.
        """
        for name in self.names(pci.path(address)):
            if re.fullmatch(
                    '(xmc[.](m|u2)|hwmon_sdm[.]m)[.][0-9]+', name):
                with contextlib.suppress(FileNotFoundError):
                    return self.kernel.read(
                        pci.path(address, name, 'serial_num')).strip()
        # the driver of the card may not be ready yet
        return None

    def _layout(self, address) -> bytes | None:
        """Return the first page of the loaded function's IP_LAYOUT, b''
        without a function, or None if the driver does not report it (Versal).
        """
        for name in self.kernel.listdir(pci.path(address)):
            if re.fullmatch('icap[.]m[.][0-9]+', name):
                try:
                    return self.kernel.read_bytes(
                        pci.path(address, name, 'ip_layout'), _PAGE)
                except FileNotFoundError:
                    return None
        return None

    # Programming

    def read_bitstream(self, path, name=None):
        return xclbin.parse(path, name)

    def program(self, device, region, bitstream):
        """Program the user partition; see the base class.

        :raises IncompatibleBitstream: the bitstream is for another shell than
            the card has now; nothing was changed.
        """
        address = device.address
        what = (f'{region.name} of {address} had to be programmed with '
                f'{uuid.UUID(bitstream.function_uuid)}')
        if base.is_fixed(address):
            raise exception.ProgrammingFailed(
                f'{what}, and [accel] fixed_devices has the card: request the '
                f'function that it carries, or remove it from there.')
        try:
            if not pci.answers(self.kernel, address):
                raise _Defect('it does not answer on the PCI bus')
            self._check_management(address)
            user = self._user_function(device)
            interface = self._interface(address)
        except (_Defect, OSError, ValueError) as e:
            raise exception.ProgrammingFailed(
                f'{what}, and nothing was done because {e}.') from e
        if interface != bitstream.region_type_uuid:
            raise exception.IncompatibleBitstream(
                f'{what}, and the bitstream is for regions of type '
                f'{bitstream.region_type_uuid} while this one has '
                f'{interface or "none"}: choose a bitstream made for it.')
        self._forget_shown(what, user, bitstream)
        self._offer(what, address, bitstream)
        try:
            self._load(what, address, bitstream)
            return self._read_back(what, address, user, bitstream)
        except exception.AcceleratorError:
            # an xclbin that cannot be removed is harmless: the layouts differ
            with contextlib.suppress(OSError):
                self.kernel.withdraw_xclbin(address)
            raise

    def _offer(self, what, address, bitstream):
        """Write the bitstream, before programming, to the file that a guest's
        request loads. Without the file no guest can use the function."""
        if self._is_the_guests(address):
            return
        try:
            self.kernel.offer_xclbin(
                address, bitstream.path, bitstream.payload_size,
                bitstream.function_uuid, self._file_interface(address) or '',
                xclbin.layout(bitstream.path)[:_PAGE])
        except (OSError, ValueError) as error:
            raise exception.ProgrammingFailed(
                f'{what}, and nothing was done because its file cannot be '
                f'placed in {firmware.XCLBINS} for its guest ({error}): make '
                f'that directory writable for nova-compute.') from error

    def reset_region(self, device, region):
        """Reset the dynamic region; see the base class.

        Source: mgmt_reset_store() in mgmt-sysfs.c of XRT. On Versal the reset
        silently does nothing: it calls functions of the ICAP, which these
        cards lack (xclmgmt_ocl_reset(), mgmt-core.c).
        """
        address = device.address
        what = f'{region.name} of {address} had to be reset'
        try:
            if not pci.answers(self.kernel, address):
                raise _Defect('it does not answer on the PCI bus')
            self._check_management(address)
            if self._is_versal(address):
                raise _Defect('xclmgmt cannot reset the region of a Versal: '
                              'upload a clearing image for its type')
            self.kernel.write_attribute(address, 'mgmt_reset', '2')
            # the reset does not report its result
            if not pci.answers(self.kernel, address):
                raise _Defect('it does not answer on the PCI bus')
            self._check_management(address)
            self._user_function(device)
        except (_Defect, OSError, ValueError) as error:
            raise exception.DeviceError(
                f'{what}, and that failed ({error}): read dmesg, and '
                f'reset the card by xbmgmt reset.') from error
        return 'reset of the dynamic region'

    def _is_versal(self, address) -> bool:
        return self.attribute(address, 'versal') not in (None, '0')

    def _forget_shown(self, what, user, bitstream):
        """Bind xocl again before programming, if it shows another function.
        Otherwise it would show this function afterwards, too."""
        try:
            if self._shown(user) not in (None, bitstream.function_uuid):
                self.kernel.rebind(user, USER_DRIVER)
        except (OSError, ValueError) as e:
            raise exception.ProgrammingFailed(
                f'{what}, and nothing was done because {USER_DRIVER} cannot '
                f'be bound to {user} again ({e}).') from e

    def _load(self, what, address, bitstream):
        try:
            self.kernel.program_xclbin(address, bitstream.path,
                                       bitstream.payload_size)
        except OSError as e:
            number = errno.errorcode.get(e.errno or 0, e.errno)
            meaning = _REFUSALS.get(e.errno or 0)
            if e.errno == errno.ENOENT:
                raise exception.IncompatibleBitstream(
                    f'{what}, and {MANAGEMENT_DRIVER} refuses it: {meaning}; '
                    f'choose a bitstream made for it.') from e
            if meaning:
                raise exception.ProgrammingFailed(
                    f'{what}, and {MANAGEMENT_DRIVER} refuses it ({number}): '
                    f'{meaning}; dmesg has the details.') from e
            raise exception.ProgrammingFailed(
                f'{what}, and the card failed ({number}): check the '
                f'bitstream, read dmesg, and reset the card by xbmgmt '
                f'reset if others fail as well.') from e

    def _read_back(self, what, address, user, bitstream) -> str:
        """Return the programmed function, after a comparison with what the
        drivers show.

        :raises ProgrammingFailed: the drivers show another function.
        """
        try:
            wanted = xclbin.layout(bitstream.path)
            layout, shown = self._layout(address), self._shown(user)
        except (OSError, ValueError) as e:
            raise exception.ProgrammingFailed(
                f'{what}, and afterwards the function could not be read back '
                f'({e}): read dmesg.') from e
        if shown not in (None, bitstream.function_uuid):
            raise exception.ProgrammingFailed(
                f'{what}, and the user function now shows {uuid.UUID(shown)}: '
                f'another program changed the card at the same time.')
        if layout is not None and layout != wanted[:_PAGE]:
            raise exception.ProgrammingFailed(
                f'{what}, and the card shows the kernels '
                f'{_listed(layout)}, the file has {_listed(wanted)}: '
                f'another program changed the card at the same time.')
        return bitstream.function_uuid


def _listed(layout) -> str:
    names = ', '.join(xclbin.kernels(layout))
    return names if len(names) <= 24 else names[:24] + '...'
