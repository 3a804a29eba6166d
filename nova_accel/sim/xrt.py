# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Cards under XRT, from the sources of its drivers (2026), without hardware.

Sources below src/runtime_src/core/pcie/driver/linux/xocl. Attributes:
mgmt-sysfs.c and xocl_sysfs.c. Loss of state when a driver is bound:
xclmgmt_probe() in mgmt-core.c, and xocl_drv.c. Programming and its errors:
mgmt-ioctl.c and icap.c. The reset: icap.c.
"""

import dataclasses
import errno
import struct
import time
from typing import ClassVar
import uuid

from nova_accel.host import firmware
from nova_accel import model
from nova_accel.sim import card
from nova_accel.sim import reader
from nova_accel.sim import tree as sysfs

#: product -> device ids of management and user function
PRODUCTS = {
    'U200': ('5000', '5001'), 'U250': ('5004', '5005'),
    'U280': ('500c', '500d'), 'U50': ('5020', '5021'), 'U55C': ('505c', '505d'),
    'V70': ('5094', '5095'),
}
#: products whose driver does not record the loaded function
VERSAL = frozenset(('V70',))
#: interface UUIDs of the base and the shell of a U250
DEFAULT_INTERFACES = ('d5a7ee9a4b5c4e6b8a6c3f1f2b0c9d10',
                      '862c7020a250293e32036f19956669e5')
_MAILBOX = 'config_mailbox_channel_disable'
_FETCH = 'config_xclbin_change'
#: errno of programmings that leave the card unchanged
_REFUSALS = ('EBUSY', 'EINVAL', 'ENOENT', 'EOPNOTSUPP')

#: magic number and size of the header of an xclbin file, kinds of its sections
_MAGIC = b'xclbin2\0'
_HEADER_SIZE = 456
_BITSTREAM, _IP_LAYOUT, _PDI, _PARTITION_METADATA = 0, 8, 18, 20


def _errno_name(value):
    if getattr(errno, str(value), None) is None:
        raise ValueError('it has to be an errno like EIO')
    return value


def _bits(value):
    return int(reader.text(value), 16)


@dataclasses.dataclass(frozen=True)
class XrtCard(card.Card):
    """A management function and a user function at the next address."""

    class_code: str = '0x120000'
    driver: str | None = 'xclmgmt'
    #: driver of the user function, initially and after a guest
    vf_driver: str | None = 'xocl'
    versal: bool = False
    #: whether the card has an XRT shell
    flashed: bool = True
    interfaces: tuple[str, ...] = DEFAULT_INTERFACES
    #: function that xocl has loaded initially
    function: str | None = None
    #: requests that the mailbox refuses after xclmgmt was bound
    mailbox_disabled: int = 0
    user_iommu_group: int | None = None
    programming_seconds: float = 1.0
    #: seconds from binding xocl until it finds the management function
    ready_seconds: float = 0

    KEYS: ClassVar[dict] = {
        'flashed': reader.boolean, 'interfaces': reader.uuids,
        'function': model.uuid_hex, 'mailbox_disabled': _bits,
        'user_iommu_group': reader.natural,
        'programming_seconds': reader.seconds,
        'ready_seconds': reader.seconds}
    FAULTS: ClassVar[dict] = {
        **card.Card.FAULTS,
        'hang': reader.one_of('read', 'program'),
        #: errno of closing the mailbox for requests, or it has no effect
        'mailbox': reader.one_of('EACCES', 'EIO', 'ignored'),
        'program_error': _errno_name,
        #: errno of placing files for guests
        'firmware': _errno_name,
        'reset_kills': reader.boolean,
        #: icap considers the function in use, and mgmt_reset does nothing
        'locked': reader.boolean,
    }

    @classmethod
    def describe(cls, item):
        product = item.take('product', reader.one_of(*PRODUCTS), 'U250')
        device, user = PRODUCTS[product]
        return dict(
            cls.describe_any(item),
            ids=('10ee', device, '10ee', '000e'), vf_device=user,
            versal=product in VERSAL,
            vf_driver=item.take('user_driver', reader.one_of(
                'xocl', 'vfio-pci'), 'xocl'))

    def addresses(self):
        return [self.address, self.vf_address(0)]

    # State

    def fresh(self, state):
        # the user function is treated like the VFs of other kinds
        return {**super().fresh(state), 'loaded': None, 'shown': None,
                'program': None, 'mailbox': self.mailbox_disabled,
                'fetches': False,
                'vfs': [{'driver': self.vf_driver,
                         'number': card.number(state)}]}

    def at_first(self, state):
        mine = self.fresh(state)
        if self.function and self.vf_driver == 'xocl':
            mine['shown'] = [mine['vfs'][0]['number'], self.function]
            mine['loaded'] = {'function': self.function, 'layout': '01'}
        return mine

    def settle(self, mine):
        program = mine['program']
        if program and time.time() >= program['until']:
            mine.update(program=None, loaded=program['loaded'])
            if program['loaded']:
                card.forget(mine, 0, 'registers')

    def write(self, mine, vf, attribute, value):
        if (vf is not None or attribute not in ('mgmt_reset', _FETCH)
                or mine['driver'] != 'xclmgmt'):
            return super().write(mine, vf, attribute, value)
        if attribute == _FETCH:
            if (self.faulty(mine).get('attributes') or {}).get(
                    _FETCH) == 'missing':
                raise sysfs.error(errno.ENOENT, attribute)
            mine['fetches'] = value != '0'
            return None
        # icap's platform_reset_axi_gate() does not report its result, does
        # nothing while a bitstream is locked, and is missing on Versal
        # (xclmgmt_ocl_reset() in mgmt-core.c)
        if not self.versal and not self.faulty(mine).get('locked'):
            card.forget(mine, 0, 'registers')
        if self.faulty(mine).get('reset_kills'):
            mine['faults']['dead'] = True

    # Operations

    def drivers(self):
        return {'xclmgmt', 'xocl', 'vfio-pci'}

    def bound(self, state, mine, driver):
        user = mine['vfs']
        super().bound(state, mine, driver)
        mine.update(vfs=user, loaded=None, mailbox=self.mailbox_disabled,
                    fetches=False)

    def is_busy(self, mine):
        return bool(mine['program']) or not self.is_ready(mine)

    def is_ready(self, mine):
        return (time.time() - mine['vfs'][0].get('since', 0)
                >= self.ready_seconds)

    # Sysfs

    def add(self, tree, mine, group):
        faults = self.faulty(mine)
        if faults.get('vanish'):
            return
        own = user_group = None
        if group is not None:
            own = group if self.iommu_group is None else self.iommu_group
            user_group = (group + 1 if self.user_iommu_group is None
                          else self.user_iommu_group)
        user, = mine['vfs']
        functions = (
            sysfs.add_function(tree, self.place(), self.ids, self.class_code,
                               mine['driver'], own),
            sysfs.add_function(
                tree, self.place(self.vf_address(0)),
                (self.ids[0], self.vf_device, *self.ids[2:]), self.class_code,
                user['driver'], user_group))
        if mine['driver'] == 'xclmgmt':
            functions[0].update(self._management(mine))
        if user['driver'] == 'xocl':
            functions[1].update(self._user(mine))
        for made in functions:
            made['numa_node'] = str(self.numa_node)
            if faults.get('dead'):
                made['config'] = b'\xff' * 64
            sysfs.spoil(made, faults.get('attributes') or {})

    def _management(self, mine):
        number = mine['number']
        made: sysfs.Directory = {
            'xrt_mgmt': {f'xclmgmt{number}': {'dev': f'240:{number}'}}}
        if not self.flashed:
            return made
        made.update({
            'mgmt_pf': '', 'ready': '1', 'dev_offline': '0', 'mfg': '0',
            'recovery': '0', 'instance': str(number),
            'versal': str(int(self.versal)), 'rp_program': '0',
            _MAILBOX: hex(mine['mailbox']), _FETCH: str(int(mine['fetches'])),
            'interface_uuids': '\n'.join(self.interfaces),
            'logic_uuids': '\n'.join(
                uuid.uuid5(uuid.UUID(i), 'logic').hex
                for i in self.interfaces),
        })
        if mine['device_serial']:
            made[f'xmc.m.{number}'] = {'serial_num': mine['device_serial']}
        if not self.versal:
            made[f'firewall.m.{number}'] = {'detected_level': '0'}
            loaded = mine['loaded']
            made[f'icap.m.{number}'] = {
                'sec_level': '0', 'idcode': '0x4b57093',
                'ip_layout': bytes.fromhex(loaded['layout'])
                if loaded else b''}
        return made

    def _user(self, mine):
        if not self.flashed:
            return {}
        shown = mine['shown']
        if not shown or shown[0] != mine['vfs'][0]['number']:
            # xocl forgets the function when it is bound again
            shown = None
        return {
            'user_pf': '', 'dev_offline': '0',
            'ready': '0x1' if self.is_ready(mine) else '0x0',
            'device_bad_state': '0', 'interface_uuids': self.interfaces[-1],
            'mailbox_connect_state': '0x3',
            'xclbinuuid': str(uuid.UUID(shown[1])) if shown else ''}


class XrtOperations(card.Operations):
    """Operations of a simulated kernel on XRT cards."""

    def program_xclbin(self, function, path, size):
        with open(path, 'rb') as file:
            data = file.read(size)
        self._load_xclbin(function, data)

    def _xclbins(self):
        """Return the path of the stand-in for /lib/firmware/xilinx/xclbins."""
        return f'{self.path}.xclbins'

    def offer_xclbin(self, function, path, size, function_uuid, interface,
                     layout):
        found, mine, _ = self._owner(*self._look(), function)
        fault = found.faulty(mine).get('firmware')
        if fault:
            raise sysfs.error(getattr(errno, fault), self._xclbins())
        with open(path, 'rb') as file:
            firmware.offer(
                self._xclbins(), function,
                firmware.file_name(function_uuid, interface),
                file.read(size), layout)

    def withdraw_xclbin(self, function):
        firmware.withdraw(self._xclbins(), function)

    def offers_xclbin(self, function_uuid, interface):
        return firmware.is_offered(self._xclbins(), firmware.file_name(
            function_uuid, interface))

    def xclbin_layout(self, function):
        return firmware.layout(self._xclbins(), function)

    def close_mailbox(self, function, requests):
        with self._update() as (host, state):
            found, mine, _ = self._owner(host, state, function)
            faults = found.faulty(mine)
            fault = faults.get('mailbox')
            if (mine['driver'] != 'xclmgmt' or (faults.get('attributes') or {}
                                                ).get(_MAILBOX) == 'missing'):
                fault = 'ENOENT'
            if fault == 'ignored':
                return
            if fault:
                raise sysfs.error(getattr(errno, fault), function)
            mine['mailbox'] |= requests

    def _load_xclbin(self, function, data):
        if (len(data) < _HEADER_SIZE
                or not data.startswith(_MAGIC)
                or struct.unpack_from('<Q', data, 304)[0] != len(data)):
            raise sysfs.error(errno.EINVAL, function)
        found, error = self._begin_xclbin(function, *_read_xclbin(data))
        self._await_program(found, found.programming_seconds)
        if error:
            raise sysfs.error(getattr(errno, error), function)

    @card.blocking
    def _begin_xclbin(self, host, state, function, uuid_, interface, layout,
                      payload):
        """Begin to program. Return the card and the error with which
        programming will end, or None if it will succeed.

        :raises OSError: the file is refused before the card is touched.
        """
        found, mine, vf = self._owner(host, state, function)
        if (not isinstance(found, XrtCard) or not found.flashed
                or vf is not None or mine['driver'] != 'xclmgmt'):
            raise sysfs.error(errno.ENODEV, function)
        if mine['program']:
            # the driver holds a mutex of the card during a programming
            raise BlockingIOError
        faults = found.faulty(mine)
        name = faults.get('program_error')
        # the kernel accepts files without an interface and ignores files
        # without a payload; the driver of nova_accel checks for both
        if interface and interface not in found.interfaces:
            name = 'EINVAL'
        if name in _REFUSALS:
            raise sysfs.error(getattr(errno, name), found.address)
        if faults.get('dead'):
            name = 'ETIMEDOUT'
        hangs = faults.get('hang') == 'program'
        if hangs:
            name = 'ETIMEDOUT'
        mine['loaded'] = None
        mine['program'] = {
            'until': card.NEVER if hangs
            else time.time() + found.programming_seconds,
            'loaded': None if name or not payload else {
                'function': uuid_, 'layout': layout.hex()}}
        return found, name


def make_xclbin(path: str, function: str, interface: str, size: int = 4096,
                kernels: tuple[str, ...] = ('vadd',),
                payload_interface: str | None = None,
                stripped: bool = False, versal: bool = False,
                platform: str = 'xilinx:u250:gen3x16:1.0') -> None:
    """Write an xclbin file for programming a simulated card.

    Only the section IP_LAYOUT is realistic. PARTITION_METADATA, a device tree
    in real files, contains only the interface UUID.

    :param function: UUID of the xclbin.
    :param interface: UUID of the shell, in the header.
    :param size: length of the part for the hardware, in bytes.
    :param kernels: names of kernels, each with one instance.
    :param payload_interface: UUID in PARTITION_METADATA, if it differs.
    :param stripped: whether to omit the part for the hardware.
    :param versal: whether the part for the hardware is a PDI.
    :raises ValueError: a UUID is malformed.
    """
    layout = struct.pack('<i4x', len(kernels)) + b''.join(
        struct.pack('<IIQ64s', 1, 0, 0x1000 * n, f'{name}:{name}_1'.encode())
        for n, name in enumerate(kernels))
    sections = [(_IP_LAYOUT, b'', layout),
                (_PARTITION_METADATA, b'',
                 uuid.UUID(payload_interface or interface).bytes)]
    if not stripped:
        sections.insert(0, (_PDI if versal else _BITSTREAM, b'primary',
                            b'\xa5' * size))
    at = _HEADER_SIZE + 40 * len(sections)
    headers = contents = b''
    for kind, name, content in sections:
        headers += struct.pack('<I16s4xQQ', kind, name, at, len(content))
        # sections begin at multiples of eight
        contents += content + bytes(-len(content) % 8)
        at += len(content) + -len(content) % 8
    header = struct.pack(
        '<8si28s256sQQQQHBBHH16s64s16s16sI4x', _MAGIC, -1, b'\xff' * 28, b'',
        0, at, 1700000000, 0, 0, 2, 16, 1, 0, uuid.UUID(interface).bytes,
        platform.encode(), uuid.UUID(function).bytes, b'', len(sections))
    with open(path, 'wb') as file:
        file.write(header + headers + contents)


def _read_xclbin(data: bytes) -> tuple[str, str, bytes, bytes]:
    """Return the parts of a file of make_xclbin() that drivers read.

    :returns: UUID, interface in PARTITION_METADATA, IP_LAYOUT, part for the
        hardware.
    """
    sections: dict[int, bytes] = {}
    for number in range(struct.unpack_from('<I', data, 448)[0]):
        kind, offset, size = struct.unpack_from(
            '<I20xQQ', data, _HEADER_SIZE + 40 * number)
        sections.setdefault(kind, data[offset:offset + size])
    return (uuid.UUID(bytes=data[416:432]).hex,
            sections.get(_PARTITION_METADATA, b'').hex(),
            sections.get(_IP_LAYOUT, b''),
            sections.get(_BITSTREAM) or sections.get(_PDI) or b'')
