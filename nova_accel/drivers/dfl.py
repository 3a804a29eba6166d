# Licensed under the Apache License, Version 2.0. See LICENSE.
"""FPGAs on the DFL drivers of Linux: Intel PAC, Silicom N5010.

A card is a PCI function with an FME (the management engine) and up to four
ports. Each port is a region, programmed alone. A port can be assigned to a VF,
which has a port but no FME. Guests get only VFs, because the PF has the FME,
which programs every port, and the controller of the card's flash. A guest gets
the PF only if [accel] whole_cards has its address.

A board of OFS has a *slot*. The port of the slot stays with the PF and has no
AFU. The AFU of the slot has a VF for each of its interfaces. The registers of
the first VF show the function. A guest gets all VFs as one accelerator. The
further physical functions of the board are parts of it; the first one has the
FME.

Sources: drivers/fpga/dfl*.c and Documentation/fpga/dfl.rst of Linux, the same
files of OFS/linux-dfl for slots, and trials on a 6.12 kernel. The numbers in
names like dfl-port.0 change whenever a driver is bound. Hence cards are
identified by PCI address, and ports by id only.
"""

import contextlib
import dataclasses
import errno
import functools
import re
import time

from nova_accel.bitstream import gbs
from nova_accel import conf
from nova_accel.drivers import base
from nova_accel.drivers import pci_rule
from nova_accel.drivers import sriov
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.host import limited
from nova_accel.host import pci
from nova_accel import log as logging
from nova_accel import model

CONF = conf.CONF
LOG = logging.getLogger(__name__)

KERNEL_DRIVER = 'dfl-pci'
#: seconds to wait for the FME and its ports after the driver is bound
REBIND_SECONDS = 15
#: seconds to wait for another process that programs the card
BUSY_SECONDS = 10

VFIO = base.VFIO
_Defect = base.Defect
_FME_ERRORS = ('fme_errors', 'pcie0_errors', 'pcie1_errors', 'nonfatal_errors',
               'catfatal_errors')
#: states of the manager (fpga_mgr_states of Linux)
_PROGRAMMING = ('write init', 'write', 'write complete')
_FME_ALARMS = ('temp1_max_alarm', 'temp1_crit_alarm')
#: FME_CAP_NUM_PORTS has 3 bits (drivers/fpga/dfl.h of Linux 7.2)
_MOST_PORTS = 7
_ALL_ONES = 'f' * 32
_ALL_ZEROS = '0' * 32
#: errno of an ioctl that was refused before the hardware was touched
_UNTOUCHED = frozenset((errno.EACCES, errno.EBUSY, errno.EFAULT, errno.EINVAL,
                        errno.ENODEV, errno.ENOENT, errno.ENOMEM,
                        errno.EPERM, errno.ELOOP))

_INTEL = 'INTEL'
_SILICOM = 'SILICOM'
#: (vendor, device) of the PF -> vendor, product, family; from dfl-pci.c
_PRODUCTS = {
    ('8086', 'bcbd'): (_INTEL, 'INTEGRATED_5', None),
    ('8086', 'bcc0'): (_INTEL, 'INTEGRATED_6', None),
    ('8086', '09c4'): (_INTEL, 'PAC_ARRIA10', 'ARRIA10'),
    ('8086', '0b30'): (_INTEL, 'PAC_N3000', 'ARRIA10'),
    ('8086', '0b2b'): (_INTEL, 'PAC_D5005', 'STRATIX10'),
    ('8086', 'bcce'): (_INTEL, 'DFL', None),
    ('1c2c', '1000'): (_SILICOM, 'N5010', 'STRATIX10'),
    ('1c2c', '1001'): (_SILICOM, 'N5011', 'STRATIX10'),
}
#: subsystem device of 8086:bcce -> product, family
_BOARDS = {
    '138d': ('PAC_D5005', 'STRATIX10'),
    '1770': ('N6000', 'AGILEX'),
    '1771': ('N6001', 'AGILEX'),
    '17d4': ('C6100', None),
}
#: OFS boards, which have a slot: the list of features of the FME shows its port
#: without an AFU (FME_PORT_OFST_BAR_SKIP in dfl-pci.c of Linux, 5.19)
_OFS = ('8086', 'bcce')
#: product -> its memory, which no attribute shows; from Intel's product briefs
_MEMORY = {'PAC_ARRIA10': (('DDR', 8192),), 'PAC_D5005': (('DDR', 32768),)}


class _Stuck(_Defect):
    """The defect of a port that is disabled until dfl-pci is bound again."""


@dataclasses.dataclass(frozen=True)
class _Port:
    """A port that the host sees now."""

    id: int
    #: the PF or VF that has the port
    function: str
    #: its directory in sysfs
    path: str
    #: the VFs that have the AFU of a slot; None for a port with its own AFU
    vfs: tuple[str, ...] | None = None


class DflDriver(base.PciDriver):

    #: a server with the whole card can write its flash
    SERVER_CAN_CHANGE_SERIAL = True
    CONTRACT = base.CONTRACT
    NAME = 'dfl'
    #: the state of ports and of the FME's manager is in attributes
    POLLED = True

    # Configuration

    def check_options(self):
        for address in sorted(sriov.wanted().keys() & base.whole_cards()):
            raise exception.ConfigurationError(
                f'{base.WHOLE_CARDS} has {address}, and so has '
                f'{sriov.OPTION}: remove it from one of the two.')

    def check(self, device=None):
        """Check that no server has a card that [accel] whole_cards no longer
        allows; see the base class."""
        if (device and pci.driver(self.kernel, device.address) == VFIO
                and device.address not in base.whole_cards()):
            yield base.Finding(
                f'a server has the whole card, and no other server gets it '
                f'afterwards: {base.WHOLE_CARDS} does not name it',
                f'name it there, or have VFs created by {sriov.OPTION} when '
                f'it is free', is_failure=False)

    def set_up(self, address):
        """Assign ports to VFs as [accel] virtual_functions requests.

        The first ports are assigned, one per VF. If there are fewer VFs than
        ports, no server can get the remaining ports.
        """
        try:
            if (address in sriov.wanted()
                    and self.kernel.exists(pci.path(address))
                    and self.identify(address)
                    and pci.driver(self.kernel, address) == KERNEL_DRIVER):
                self._hand_over_ports(address)
        except (_Defect, OSError, ValueError) as e:
            raise exception.DeviceError(
                f'{sriov.OPTION} requests VFs of {address}, which are not all '
                f'there ({e}): read dmesg.') from e

    def _hand_over_ports(self, address):
        count = sriov.missing(self.kernel, address)
        if not count:
            return
        implemented = self._implemented(address)
        ports = self._ports(address, [])
        if _have_slot(ports):
            self._enable_slot(address, count)
            return
        present = {port.id for port in ports}
        if not present.union(range(count)).issuperset(range(implemented)):
            # nova-compute was killed between releasing a port and creating
            # VFs; ports that are assigned to the PF again have no driver
            self.kernel.rebind(address, KERNEL_DRIVER)
            self._wait(address, implemented)
        self._enable_vfs(address, range(count), implemented)

    def _enable_vfs(self, address, ports, implemented):
        """Assign ports to new VFs.

        :param ports: the ports to assign. An interrupted call may have
            released some of them already.
        """
        present = {port.id for port in self._ports(address, [])}
        for port in sorted(present.intersection(ports)):
            self.kernel.release_dfl_port(address, port)
        self.kernel.set_numvfs(address, len(ports))
        self._wait(address, implemented)

    def _enable_slot(self, address, count):
        """Create the VFs of a slot without binding them to a host driver.

        :raises Defect: the kernel is not linux-dfl. In mainline Linux the
            number of VFs must equal that of released ports
            (dfl_fpga_cdev_config_ports_vf() in dfl.c), and released ports
            cannot be reset.
        """
        try:
            self.kernel.set_numvfs(address, count, probe=False)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise _Defect(
                    'it is a board of OFS, for whose slot mainline Linux '
                    'creates no VFs (EINVAL): use linux-dfl, the kernel of '
                    'its makers') from error
            raise

    def _implemented(self, address) -> int:
        """Return the number of the card's ports, including ports of VFs."""
        return sum(name.startswith('dfl-fme-region.')
                   for name in self.kernel.listdir(self._fme(address)))

    # Discovery

    def fingerprint(self):
        return (*super().fingerprint(), *(self.names(path) for path in (
            'class/fpga_region', f'bus/pci/drivers/{KERNEL_DRIVER}')))

    def identify(self, address):
        ids = pci.ids(self.kernel, address)
        if ids == _OFS and (self._is_for_rules(address)
                            or self._is_part(address)):
            return None
        return self._identity(address, ids) if ids in _PRODUCTS else None

    def _is_for_rules(self, address) -> bool:
        """Return whether a rule of the driver pci offers the board. This
        driver leaves such a board out."""
        return ('pci' in CONF.accel.enabled_drivers
                and pci_rule.PciRuleDriver(self.kernel).may_be_mine(address))

    def _is_part(self, address) -> bool:
        """Return whether a function is a secondary function of a board.
        """
        first = f'{address.rpartition(".")[0]}.0'
        try:
            return address != first and pci.ids(self.kernel, first) == _OFS
        except FileNotFoundError:
            return False

    def _identity(self, address, ids) -> model.Device:
        """Return the identity of a card, which is the same in every state."""
        vendor, product, family = _PRODUCTS[ids]
        if product == 'DFL':
            try:
                board = pci.identifier(self.kernel, address,
                                       'subsystem_device')
            except (OSError, ValueError):
                board = None
            product, family = _BOARDS.get(board or '', (product, family))
        return model.Device(
            address=address, type='FPGA', vendor=vendor, product=product,
            vendor_id=ids[0], product_id=ids[1], driver=self.NAME,
            family=family, memory=_MEMORY.get(product, ()))

    def look(self, device, before):
        bound = pci.driver(self.kernel, device.address)
        if bound == VFIO:
            if before is None:
                raise _Defect(
                    f'it is bound to {VFIO}, and its regions were never seen: '
                    f'if no guest has it, bind it to {KERNEL_DRIVER}')
            return dataclasses.replace(before, memory=device.memory)
        if bound != KERNEL_DRIVER:
            raise _Defect(f'it is bound to {bound or "no driver"}: bind it to '
                          f'{KERNEL_DRIVER}')
        fme = self._fme(device.address)
        device = dataclasses.replace(device, shell_id=self._shell(fme))
        device = dataclasses.replace(
            device, regions=self._regions(device, fme, before))
        reason = self._why_not_whole(device.address)
        # the server that has the card keeps it
        return dataclasses.replace(
            device, health=model.Health.QUARANTINED if reason
            else model.Health.OK, reason=reason, is_not_offered=bool(reason))

    def _why_not_whole(self, address) -> str:
        """Return why a card without VFs is not offered as a whole, or ''."""
        if pci.has_vfs(self.kernel, address):
            return ''
        if address in sriov.wanted():
            return sriov.NONE
        if _have_slot(self._ports(address, [])):
            return (f'it is a board of OFS, and guests get the VFs of its '
                    f'slot, of which it has none: have them created by '
                    f'{sriov.OPTION} = {address}=<number of VFs>, under '
                    f'linux-dfl (mainline Linux answers EINVAL)')
        if address not in base.whole_cards():
            return (f'it has no VFs, and its physical function can program '
                    f'and flash the card: have VFs created by {sriov.OPTION} '
                    f'= {address}=<number of ports>, or name it in '
                    f'{base.WHOLE_CARDS}')
        if self._implemented(address) > 1:
            return (f'{base.WHOLE_CARDS} has it, and it has several ports: '
                    f'name it in {sriov.OPTION} instead')
        return ''

    def serial(self, address):
        """Return the MAC address of the board's controller if the function has
        no Device Serial Number; see the base class.

        Source: Documentation/ABI/testing/sysfs-driver-intel-m10-bmc of Linux,
        since 5.12.
        """
        found = super().serial(address)
        if found:
            return found
        if pci.driver(self.kernel, address) == VFIO:
            # a guest has the card, or had it until now: the FME is not visible
            return None
        return next(filter(None, (
            self._mac_address(fme)
            for fme in self._children(address, 'dfl-fme'))), '')

    def _mac_address(self, directory) -> str:
        """Return the MAC address of a board, or '' if it is not unique.

        :param directory: directory to search, at first of the FME. The
            controller, which has the address, is a part of the FME, or behind
            an SPI bus of a part.
        """
        for name in self.names(directory):
            if name == 'mac_address':
                text = self.kernel.read(f'{directory}/{name}').lower()
                return text if _is_of_one_board(text) else ''
            if re.match('(dfl_dev|dfl-fme)[.][0-9]|spi', name):
                found = self._mac_address(f'{directory}/{name}')
                if found:
                    return found
        return ''

    def health(self, device):
        """Read the bus, and the errors and alarms of the FME; see the base
        class. The PF shows errors and alarms even while servers have the
        card's VFs.

        Source: Documentation/ABI/testing/sysfs-platform-dfl-fme of Linux:
        errors (5.4) and hwmon (5.5). A bitstream of a server can heat the
        card.
        """
        yield from super().health(device)
        for fme in self._children(device.address, 'dfl-fme')[:1]:
            try:
                found = self.kernel.read_some(f'{fme}/errors', _FME_ERRORS)
            except FileNotFoundError:
                found = {}
            for name, text in found.items():
                value = int(text, 0)
                if name == 'catfatal_errors':
                    if value:
                        yield signals.Reading('card_failed', about=(
                            f'its FME has catastrophic or fatal errors '
                            f'({text})'))
                else:
                    # each bit is a kind of error, and stays set until it is
                    # cleared
                    yield signals.Reading(
                        'card_errors', value.bit_count(), f'FME {name}')
            for sensor in self.names(f'{fme}/hwmon'):
                alarms = self.kernel.read_some(
                    f'{fme}/hwmon/{sensor}', _FME_ALARMS)
                for name, text in alarms.items():
                    if text != '0':
                        yield signals.Reading(
                            'temperature', about=f'FME {name}')

    def _fme(self, address) -> str:
        """Return the directory of the card's FME."""
        found = self._children(address, 'dfl-fme')
        if not found:
            raise _Defect(f'{KERNEL_DRIVER} shows no FME of it: look whether '
                          f'the module dfl-fme is loaded, and into dmesg')
        return found[0]

    def _children(self, address, kind) -> list[str]:
        """Return the directories <kind>.<n> of a function's base region.

        The class fpga_region also contains the regions of the FME. In the
        directory of the function itself, it contains only the base region.
        """
        top = pci.path(address, 'fpga_region')
        result = []
        try:
            for region in self.kernel.listdir(top):
                result += [f'{top}/{region}/{name}'
                           for name in self.kernel.listdir(f'{top}/{region}')
                           if re.fullmatch(f'{kind}[.][0-9]+', name)]
        except FileNotFoundError:
            # no tree, or it was removed during the walk
            pass
        return result

    def _shell(self, fme) -> str | None:
        try:
            return self.kernel.read(f'{fme}/bitstream_id').lower()
        except OSError:
            return None

    def _region_type(self, fme) -> str | None:
        """Return the compat_id that all regions of the FME share, or None.

        A region without a compat_id, such as the base region, has the
        attribute as well, but reading it gives ENOENT.
        """
        found = set()
        for name in self.kernel.listdir(fme):
            if not re.fullmatch('dfl-fme-region[.][0-9]+', name):
                continue
            top = f'{fme}/{name}/fpga_region'
            for region in self.kernel.listdir(top):
                try:
                    text = self.kernel.read(f'{top}/{region}/compat_id')
                except FileNotFoundError:
                    continue
                found.add(model.uuid_hex(text))
        if len(found) > 1:
            raise _Defect(f'its regions have different compat_id '
                          f'({", ".join(sorted(found))}) under one FME')
        return found.pop() if found else None

    def _ports(self, address, vfs) -> list[_Port]:
        """Return the ports that the host sees on the PF and its VFs."""
        result = []
        for function in (address, *vfs):
            for path in self._children(function, 'dfl-port'):
                try:
                    number = int(self.kernel.read(f'{path}/id'))
                except FileNotFoundError:
                    # no driver has it: still probing, or it was released and
                    # assigned again, after which a 6.12 kernel fails to probe
                    continue
                if not 0 <= number <= _MOST_PORTS:
                    raise _Defect(f'{path} has the port {number}, and a card '
                                  f'has at most {_MOST_PORTS}')
                result.append(_Port(number, function, path, self._slot(
                    address, path) if function == address else None))
        return result

    def _slot(self, address, path) -> tuple[str, ...] | None:
        """Return the VFs of the slot behind a port, or None if the port has an
        AFU."""
        if self.kernel.exists(f'{path}/afu_id') or _OFS != pci.ids(
                self.kernel, address):
            return None
        return tuple(pci.virtual_functions(self.kernel, address))

    def _regions(self, device, fme, before) -> tuple[model.Region, ...]:
        address = device.address
        vfs = pci.virtual_functions(self.kernel, address)
        ports = self._ports(address, vfs)
        region_type = self._region_type(fme)
        common: dict = {
            'region_type_uuid': region_type,
            'programmable': (region_type is not None
                             and not base.is_fixed(address)),
            # by the FME, which goes with the PF
            'guest_can_reprogram': not vfs}
        failed = self._manager(fme, 'state').endswith('error')
        regions = {}
        for port in ports:
            region = model.Region(index=port.id, function_uuid=None, **common)
            try:
                if failed and port.vfs is not None:
                    raise _Defect(_stuck(address))
                region = dataclasses.replace(
                    region, function_uuid=self._known_function(
                        port, fme, before))
                if failed and port.function != address:
                    # a VF reads the old function even from a disabled port
                    raise _Defect(_stuck(address))
            except _Defect as e:
                region = dataclasses.replace(
                    region, health=model.Health.QUARANTINED, reason=str(e))
            except (OSError, ValueError) as e:
                region = dataclasses.replace(
                    region, health=model.Health.QUARANTINED,
                    reason=f'its afu_id cannot be used ({e})')
            regions[port.id] = region
        lowest = min(regions, default=None)
        for port in ports:
            regions[port.id] = self._with_handle(
                regions[port.id], port, address, vfs, port.id == lowest)
        self._add_hidden(
            address, regions, fme, before, common, hidden=set(vfs).difference(
                *(port.vfs or (port.function,) for port in ports)))
        return tuple(regions[index] for index in sorted(regions))

    def _known_function(self, port, fme, before) -> str | None:
        """Return the function of a port, or the last known function while a
        guest may have the VFs of a slot."""
        if not any(pci.is_for_vfio(self.kernel, vf) for vf in port.vfs or ()):
            return self._function(port, fme)
        return next((region.function_uuid for region in
                     (before.regions if before else ())
                     if region.index == port.id), None)

    def _function(self, port, fme) -> str | None:
        """Return the UUID of the AFU that a port or its slot reports now, or
        None without an AFU.

        :raises Defect: the port is being programmed, stuck, or dead.
        """
        if port.vfs is not None:
            if self._manager(fme, 'state') in _PROGRAMMING:
                raise _Defect('it is being programmed')
            return self._function_of_slot(port.vfs)
        try:
            text = self.kernel.read(f'{port.path}/afu_id')
        except OSError as e:
            if e.errno != errno.EBUSY:
                raise
            if self._manager(fme, 'state') in _PROGRAMMING:
                raise _Defect('it is being programmed') from None
            raise _Stuck(_stuck(port.function)) from None
        function = model.uuid_hex(text)
        if function == _ALL_ONES:
            raise _Defect('its registers read as all ones, which is how a '
                          'dead card looks: power-cycle it')
        return None if function == _ALL_ZEROS else function

    def _function_of_slot(self, vfs) -> str | None:
        """Return the UUID of the AFU that the first VF reports, or None
        without a VF or an AFU.

        :raises Defect: a guest may have the VF, or the VF cannot be read.
        """
        if not vfs:
            return None
        self._check_readable(vfs)
        try:
            return model.uuid_hex(self.kernel.read_afu(vfs[0]))
        except Exception as error:
            # of privsep as well, which discover may not be able to start
            if getattr(error, 'errno', None) == errno.ENODEV:
                return None
            raise _Defect(f'the registers of {vfs[0]}, which say what '
                          f'function it has, cannot be read ({error})'
                          ) from error

    def _check_readable(self, vfs):
        """Check that no guest may have the first VF of a slot.

        :raises Defect: a guest may have the VF.
        """
        if vfs and pci.is_for_vfio(self.kernel, vfs[0]):
            raise _Defect(f'its function cannot be read, because {vfs[0]} is '
                          f'bound to {VFIO}: leave it without a driver')

    def _manager(self, fme, attribute) -> str:
        """Return an attribute of the FME's FPGA manager, or '' if it is
        missing."""
        try:
            for name in self.kernel.listdir(fme):
                if re.fullmatch('dfl-fme-mgr[.][0-9]+', name):
                    top = f'{fme}/{name}/fpga_manager'
                    for manager in self.kernel.listdir(top):
                        return self.kernel.read(f'{top}/{manager}/{attribute}')
        except OSError:
            pass
        return ''

    def _with_handle(self, region, port, address, vfs, lowest):
        if port.vfs is not None:
            return self._with_slot(region, address, port.vfs)
        if vfs and port.function == address:
            reason = 'it is not released to a VF while other ports are'
        elif not vfs and not lowest:
            reason = 'it goes with the whole card while that has no VFs'
        else:
            reason = pci.obstacle(self.kernel, port.function)
        if reason:
            return dataclasses.replace(region, reason=region.reason or reason)
        return dataclasses.replace(region, handles=(
            model.AttachHandle(model.HandleType.PCI, port.function),))

    def _with_slot(self, region, address, vfs):
        reason = next(filter(None, (
            pci.obstacle(self.kernel, vf, vfs) for vf in vfs)), '')
        if reason or not vfs:
            return dataclasses.replace(region, reason=region.reason or reason)
        return dataclasses.replace(region, handles=(model.AttachHandle(
            model.HandleType.PCI, vfs[0], companions=vfs[1:],
            parent=address),))

    def _add_hidden(self, address, regions, fme, before, common, hidden):
        """Add the regions whose port the host does not see now.

        The VF of such a port is bound to vfio-pci for a guest or has no
        driver, or the port was released and the VFs are not enabled.
        """
        for region in before.regions if before else ():
            held = {handle.address for handle in region.handles}
            if region.index not in regions and held & hidden:
                regions[region.index] = region
                hidden = hidden - held
        try:
            count = int(self.kernel.read(f'{fme}/ports_num'))
        except (OSError, ValueError):
            return
        implemented = self._implemented(address)
        if hidden:
            reason = (f'{", ".join(sorted(hidden))} may have it and is not '
                      f'bound to {KERNEL_DRIVER}: it was never seen')
        else:
            reason = (f'no function shows its port, which was released or has '
                      f'no driver: enable the VFs, or unbind {address} from '
                      f'{KERNEL_DRIVER} and bind it again')
        for index in range(min(count, _MOST_PORTS)):
            if len(regions) < implemented and index not in regions:
                regions[index] = model.Region(
                    index=index, function_uuid=None,
                    health=model.Health.QUARANTINED, reason=reason, **common)

    # Programming

    def read_bitstream(self, path, name=None):
        return gbs.parse(path, name)

    def program(self, device, region, bitstream):
        """Program a port; see the base class.

        After a failure the port stays disabled until dfl-pci is bound again.
        This method binds it again if no other port of the card is in use.

        :raises IncompatibleBitstream: the bitstream is for another compat_id
            than the card has now; nothing was changed.
        """
        address, index = device.address, region.index
        what = (f'{region.name} of {address} had to be programmed with '
                f'{bitstream.function_uuid or "a file without function id"}')
        if base.is_fixed(address):
            raise exception.ProgrammingFailed(
                f'{what}, and [accel] fixed_devices has the card: request the '
                f'function that it carries, or remove it from there.')
        try:
            fme, port = self._prepare(address, index)
            region_type = self._region_type(fme)
        except (_Defect, OSError, ValueError) as e:
            raise exception.ProgrammingFailed(
                f'{what}, and nothing was done because {e}.') from e
        if region_type is None or region_type != bitstream.region_type_uuid:
            raise exception.IncompatibleBitstream(
                f'{what}, and the bitstream is for regions of type '
                f'{bitstream.region_type_uuid} while this one has '
                f'{region_type or "none"}: choose a bitstream made for it.')
        self._load(what, address, port, fme, bitstream)
        function = self._read_back(what, address, index)
        if bitstream.function_uuid not in (None, function):
            raise exception.ProgrammingFailed(
                f'{what}, and the region now shows {function}: the file does '
                f'not hold what its header says, make it again.')
        return function

    def reset_region(self, device, region):
        """Reset the port; see the base class.

        If the reset takes more than a millisecond, the port stays disabled
        until dfl-pci is bound again (__afu_port_disable() in dfl-afu-main.c of
        Linux). This method then binds it again, and repeats the reset.
        """
        what = f'{region.name} of {device.address} had to be reset'
        try:
            try:
                self._reset_port(device.address, region.index)
            except (_Stuck, TimeoutError):
                self.recover(device.address)
                self._reset_port(device.address, region.index)
        except (_Defect, OSError, ValueError) as error:
            raise exception.DeviceError(
                f'{what}, and that failed ({error}): read dmesg, and '
                f'power-cycle the card if others fail as well.') from error
        return 'port reset'

    def _reset_port(self, address, index):
        fme, port = self._prepare(address, index)
        self.kernel.reset_dfl_port(port.function, port.id)
        self._function(port, fme)
        # errors that the server's guest has caused
        self._clear_errors(port)
        # the ids of a VF read as ones in every state
        if not pci.answers(self.kernel, address):
            raise _Defect('the card does not answer after it')

    def _clear_errors(self, port):
        """Log the errors of a port, and clear them."""
        with contextlib.suppress(OSError, ValueError):
            found = self.kernel.read(f'{port.path}/errors/errors')
            if int(found, 0):
                LOG.warning('Port %s of %s has the errors %s, which are '
                            'cleared now', port.id, port.function, found)
        try:
            self.kernel.clear_dfl_port_errors(port.function, port.id)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise OSError(
                errno.EBUSY, 'its power state may be AP6, in which it does '
                'nothing: let the card cool') from error

    def recover(self, address: str) -> None:
        """Bind dfl-pci again to enable ports that a failure disabled, and
        enable the VFs again.

        :raises DeviceError: a guest uses a port of the card, or the card does
            not return.
        """
        kernel = self.kernel
        try:
            vfs = pci.virtual_functions(kernel, address)
            taken = [vf for vf in vfs if pci.is_for_vfio(kernel, vf)]
            if taken:
                raise exception.DeviceError(
                    f'{address} needs {KERNEL_DRIVER} to be bound again, and '
                    f'{", ".join(taken)} of it may be in use: do so when its '
                    f'servers are gone.')
            ports = self._ports(address, vfs)
            is_slot = _have_slot(ports)
            released = sorted(port.id for port in ports
                              if port.function != address)
            if not is_slot and len(released) != len(vfs):
                raise exception.DeviceError(
                    f'{address} needs {KERNEL_DRIVER} to be bound again, and '
                    f'the ports of some of its VFs cannot be seen: bind all '
                    f'of {", ".join(vfs)} to {KERNEL_DRIVER} first.')
            implemented = self._implemented(address)
            kernel.rebind(address, KERNEL_DRIVER)
            # binding removes the VFs and assigns their ports to the PF
            self._wait(address, implemented)
            if is_slot and vfs:
                self._enable_slot(address, len(vfs))
            elif released:
                self._enable_vfs(address, released, implemented)
        except (_Defect, OSError, ValueError) as e:
            raise exception.DeviceError(
                f'{address} could not be recovered by binding '
                f'{KERNEL_DRIVER} again ({e}): read dmesg.') from e

    def steps(self, device):
        return {'driver rebind': functools.partial(
            self.recover, device.address)}

    def _prepare(self, address, index) -> tuple[str, _Port]:
        """Return the directory of the FME and the port of a region, as they
        are named now."""
        if not pci.answers(self.kernel, address):
            raise _Defect('the card does not answer on the PCI bus')
        bound = pci.driver(self.kernel, address)
        if bound != KERNEL_DRIVER:
            raise _Defect(f'the card is bound to {bound or "no driver"} and '
                          f'not to {KERNEL_DRIVER}')
        vfs = pci.virtual_functions(self.kernel, address)
        for port in self._ports(address, vfs):
            if port.id == index:
                self._check_readable(port.vfs)
                return self._fme(address), port
        raise _Defect(f'no function that is bound to {KERNEL_DRIVER} shows '
                      f'port {index}: the result could not be read')

    def _load(self, what, address, port, fme, bitstream):
        try:
            self._clear_errors(port)
        except OSError as e:
            raise exception.ProgrammingFailed(
                f'{what}, and nothing was done because the errors of the port '
                f'cannot be cleared ({e}).') from e
        end = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self.kernel.program_dfl_port(
                    address, port.id, bitstream.path,
                    bitstream.payload_offset, bitstream.payload_size)
                return
            except OSError as e:
                error = e
            if error.errno != errno.EBUSY or time.monotonic() > end:
                break
            time.sleep(0.2)
        if error.errno == errno.EBUSY:
            raise exception.ProgrammingFailed(
                f'{what}, and another process has programmed the card for '
                f'{BUSY_SECONDS} seconds: stop that or try again later.')
        if error.errno in _UNTOUCHED:
            raise exception.ProgrammingFailed(
                f'{what}, and the kernel refused it before it touched the '
                f'card ({error.strerror}): correct that and try again.')
        # rebinding clears the status, so it has to be read first
        cause = ', '.join(self._manager(fme, 'status').split('\n')).strip(', ')
        cause = (f'{errno.errorcode.get(error.errno or 0, error.errno)}'
                 f'{": " + cause if cause else ""}')
        try:
            self.recover(address)
        except exception.DeviceError as e:
            raise exception.ProgrammingFailed(
                f'{what}, and the card failed ({cause}); its port stays '
                f'disabled: {e}') from error
        raise exception.ProgrammingFailed(
            f'{what}, and the card failed ({cause}); it was recovered by '
            f'binding {KERNEL_DRIVER} again: check the bitstream, or examine '
            f'the card if others fail as well.') from error

    def _read_back(self, what, address, index) -> str | None:
        try:
            try:
                return self._read_function(address, index)
            except OSError as e:
                if e.errno != errno.EBUSY:
                    raise
            # an earlier failure still keeps the port disabled
            self.recover(address)
            return self._read_function(address, index)
        except exception.DeviceError as e:
            raise exception.ProgrammingFailed(
                f'{what}, and its port is still disabled after an earlier '
                f'failure: {e}') from e
        except (_Defect, OSError, ValueError) as e:
            raise exception.ProgrammingFailed(
                f'{what}, and afterwards the function could not be read back '
                f'({e}): read dmesg.') from e

    def _read_function(self, address, index) -> str | None:
        _, port = self._prepare(address, index)
        if port.vfs is not None:
            return self._function_of_slot(port.vfs)
        return model.uuid_hex(self.kernel.read(f'{port.path}/afu_id'))

    def _wait(self, address, count):
        """Wait until the FME and ``count`` ports exist, which the kernel
        probes in the background."""
        def are_there():
            vfs = pci.virtual_functions(self.kernel, address)
            # the kernel creates the directory before its attributes
            with contextlib.suppress(FileNotFoundError):
                return (self._children(address, 'dfl-fme')
                        and len(self._ports(address, vfs)) >= count)
        if not limited.wait_until(are_there, REBIND_SECONDS):
            raise _Defect(f'after {REBIND_SECONDS} seconds not all of its '
                          f'{count} ports are there')


def _have_slot(ports) -> bool:
    """Return whether a port of a PF is that of a slot."""
    return any(port.vfs is not None for port in ports)


def _stuck(function) -> str:
    return (f'its port is disabled since a programming or reset failed: unbind '
            f'{function} from {KERNEL_DRIVER} and bind it again when no server '
            f'uses the card')


def _is_of_one_board(mac: str) -> bool:
    """Return whether a MAC address identifies one board. An address that is 0,
    a group address or locally administered (IEEE 802) does not."""
    return bool(re.fullmatch('[0-9a-f]{2}(:[0-9a-f]{2}){5}', mac)
                and int(mac[:2], 16) & 3 == 0 and set(mac) != set('0:'))
