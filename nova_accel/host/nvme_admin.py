# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Send admin commands to NVMe controllers.

The functions take the file descriptor of a controller's device node, and send
each command with a time limit by the ioctl of Linux. Sources:
NVME_IOCTL_ADMIN_CMD, NVME_IOCTL_RESCAN and struct nvme_passthru_cmd of
include/uapi/linux/nvme_ioctl.h; NVM Express Base Specification 2.0 and NVM
Command Set Specification 1.0, which use the same names for commands and data
structures.
"""

import ctypes
import dataclasses
import errno
import fcntl
import re
import struct

#: stands for the type of a signature if a disk has none and is not blank
UNSIGNED = 'data without a signature'
ADMIN = 0xc0484e41
RESCAN = 0x4e46
COMMAND = struct.Struct('=BBHIIIQQII6III')

_GET_LOG_PAGE, _IDENTIFY = 0x02, 0x06
_NAMESPACE_MANAGEMENT, _NAMESPACE_ATTACHMENT = 0x0d, 0x15
_VIRTUALIZATION, _FORMAT, _SANITIZE = 0x1c, 0x80, 0x84
#: objects that Identify returns: a namespace, the controller, the attached
#: namespaces, all allocated namespaces, an allocated namespace, the
#: controllers to which a namespace is attached, the secondary controllers
_CNS_NAMESPACE, _CNS_CONTROLLER, _CNS_ACTIVE = 0, 1, 2
_CNS_ALLOCATED, _CNS_ALLOCATED_NAMESPACE = 0x10, 0x11
_CNS_ATTACHED, _CNS_SECONDARY = 0x12, 0x15
#: Optional Admin Command Support
_OACS_FORMAT, _OACS_NAMESPACES, _OACS_VIRTUALIZATION = 1 << 1, 1 << 3, 1 << 7
#: Format NVM Attributes: formatting, or erasing, one namespace affects all of
#: the NVM subsystem; cryptographic erase
_FNA_ALL, _FNA_CRYPTOGRAPHIC = 1 << 0 | 1 << 1, 1 << 2
#: Secure Erase Settings of Format NVM
_USER_DATA_ERASE, _CRYPTOGRAPHIC_ERASE = 1, 2
_HEALTH_LOG, _SANITIZE_LOG = 0x02, 0x81
#: Sanitize Action -> bit of SANICAP, the best method first
_METHODS = {'crypto': (4, 1 << 0), 'block': (2, 1 << 1),
            'overwrite': (3, 1 << 2)}
#: Write Zeroes, of Optional NVM Command Support
_ONCS_ZEROES = 1 << 3
_EXIT_FAILURE_MODE = 1
#: Allow Unrestricted Sanitize Exit: a controller in failure mode may leave it.
#: Otherwise only a successful sanitize operation ends the failure mode
_UNRESTRICTED = 1 << 3
_ONE_PASS = 1 << 4
#: Sanitize Status; 4 is "completed, and deallocated although not asked"
_STATES = {0: 'never', 1: 'done', 2: 'running', 3: 'failed', 4: 'done'}
_CREATE, _DELETE, _ATTACH, _DETACH = 0, 1, 0, 1
_OFFLINE, _ASSIGN, _ONLINE = 7, 8, 9
#: types of the flexible resources of controllers
_QUEUES, _INTERRUPTS = 0, 1
_ALL = 0xffffffff
#: milliseconds. Format NVM cannot be polled, and an erase of the user data of
#: a large disk takes minutes
_SHORT_MS, _FORMAT_MS = 60_000, 3_600_000
#: maximum number of namespaces of a controller; a longer list does not end
_MOST = 1 << 16


@dataclasses.dataclass(frozen=True)
class Namespace:
    """Size and block format of a namespace."""

    blocks: int
    #: bytes
    block_size: int
    #: bytes for each block; None if unknown
    metadata: int | None

    def __str__(self):
        metadata = '' if self.metadata is None else f'+{self.metadata}'
        return f'{self.blocks}x{self.block_size}{metadata}'

    @classmethod
    def parse(cls, text: str) -> 'Namespace':
        """Parse the text of a Namespace, as str() returns it.

        :raises ValueError: the text is malformed.
        """
        found = re.fullmatch('([0-9]+)x([0-9]+)(?:[+]([0-9]+))?', text)
        if not found:
            raise ValueError(f'{text!r} is not a namespace')
        blocks, size, metadata = found.groups()
        return cls(int(blocks), int(size),
                   None if metadata is None else int(metadata))

    def has_format_of(self, other: 'Namespace') -> bool:
        """Return whether the known parts of two block formats are equal."""
        return (self.block_size == other.block_size and (
            None in (self.metadata, other.metadata)
            or self.metadata == other.metadata))

    def is_like(self, other: 'Namespace') -> bool:
        """Return whether two namespaces have the same size, and equal block
        formats as in has_format_of()."""
        return self.blocks == other.blocks and self.has_format_of(other)


@dataclasses.dataclass(frozen=True)
class Controller:
    """What a controller reports about itself and its namespaces."""

    serial: str
    firmware: str
    #: the best supported method of Sanitize: crypto, block, overwrite or None
    sanitize: str | None
    has_format: bool
    #: whether it supports Namespace Management
    has_management: bool
    #: namespaces attached to the controller, in the order of their numbers
    namespaces: tuple[Namespace, ...]
    #: number of namespaces that are not attached to the controller
    detached: int
    #: bytes that belong to no namespace; 0 without Namespace Management
    unallocated: int
    #: whether Format NVM of one namespace erases others
    formats_all: bool = False
    #: its methods of erasure, as the traits HW_NVME_* of os-traits: CES
    #: (Sanitize by Crypto Erase), BES (by Block Erase), WZS (Write Zeroes)
    erases: tuple[str, ...] = ()

    @classmethod
    def from_tuple(cls, fields) -> 'Controller':
        """Create a Controller from the result of dataclasses.astuple()."""
        found = cls(*fields)
        return dataclasses.replace(
            found, erases=tuple(found.erases), namespaces=tuple(
                Namespace(*n) for n in fields[5]))


@dataclasses.dataclass(frozen=True)
class HealthLog:
    """The SMART / Health Information log page."""

    #: bits of Critical Warning: 0 spare blocks below their threshold, 1
    #: temperature, 2 reliability degraded, 3 read-only, 4 the backup of
    #: volatile memory failed
    warning: int
    #: percent of the spare blocks that are left, and their threshold
    spare: int
    least_spare: int
    #: percent of its life that is used, by its vendor's estimate; may exceed
    #: 100
    used: int


@dataclasses.dataclass(frozen=True)
class SanitizeStatus:
    """The Sanitize Status log page."""

    #: of the last sanitize operation: never, running, done or failed
    state: str
    #: progress of the running operation, percent
    progress: int
    #: the method of the last operation if start_sanitize() begins such ones,
    #: otherwise None
    method: str | None


@dataclasses.dataclass(frozen=True)
class Secondary:
    """A secondary controller: the controller of a VF."""

    #: number of the VF, from 1
    vf: int
    #: controller identifier
    id: int
    online: bool
    #: identifiers of its namespaces; None if the primary controller does
    #: not report them, because it has no Namespace Management
    namespaces: tuple[int, ...] | None = None
    #: identifiers of all controllers that share a namespace with it, including
    #: the primary one
    others: tuple[int, ...] = ()
    #: flexible resources that the primary controller has assigned to it, 0 if
    #: none
    queues: int = 0
    interrupts: int = 0

    @classmethod
    def from_tuple(cls, fields) -> 'Secondary':
        """Create a Secondary from the result of dataclasses.astuple(). A
        conversion to JSON and back may have changed its types."""
        found = cls(*fields)
        return dataclasses.replace(
            found, others=tuple(found.others),
            namespaces=(None if found.namespaces is None
                        else tuple(found.namespaces)))


def read_controller(fd: int) -> Controller:
    """Return the properties of a controller and its namespaces.

    :raises OSError: EIO when the controller refuses.
    """
    about = _identify(fd, _CNS_CONTROLLER)
    supported, = struct.unpack_from('<H', about, 256)
    methods, = struct.unpack_from('<I', about, 328)
    commands, = struct.unpack_from('<H', about, 520)
    active = _namespaces(fd, _CNS_ACTIVE)
    managed = bool(supported & _OACS_NAMESPACES)
    return Controller(
        _text(about[4:24]), _text(about[64:72]),
        next((name for name, (_, bit) in _METHODS.items() if methods & bit),
             None),
        bool(supported & _OACS_FORMAT), managed,
        tuple(_namespace(_identify(fd, _CNS_NAMESPACE, n)) for n in active),
        len(set(_namespaces(fd, _CNS_ALLOCATED)) - set(active))
        if managed else 0,
        int.from_bytes(about[296:312], 'little') if managed else 0,
        bool(about[524] & _FNA_ALL), tuple(
            name for name, is_there in (
                ('CES', methods & _METHODS['crypto'][1]),
                ('BES', methods & _METHODS['block'][1]),
                ('WZS', commands & _ONCS_ZEROES)) if is_there))


def read_health(fd: int) -> HealthLog:
    """Return the SMART / Health Information log page of a controller."""
    page = ctypes.create_string_buffer(512)
    _command(fd, _GET_LOG_PAGE, _ALL, _HEALTH_LOG | (512 // 4 - 1) << 16,
             page=page)
    warning, _, spare, least, used = struct.unpack_from('<BHBBB', page.raw)
    return HealthLog(warning, spare, least, used)


def read_sanitize_status(fd: int) -> SanitizeStatus:
    """Return the Sanitize Status log page of a controller.

    :raises OSError: EIO when the controller has none.
    """
    page = ctypes.create_string_buffer(512)
    _command(fd, _GET_LOG_PAGE, _ALL, _SANITIZE_LOG | (512 // 4 - 1) << 16,
             page=page)
    progress, status, command = struct.unpack_from('<HHI', page.raw)
    return SanitizeStatus(
        _STATES.get(status & 7, 'failed'), progress * 100 // 65536,
        next((m for m in _METHODS if _sanitize_word(m) == command), None))


def start_sanitize(fd: int, method: str) -> None:
    """Begin to sanitize a disk: all namespaces, caches and other capacity.

    The operation continues in the controller, even after a reset.

    :param method: see Controller.sanitize.
    :raises OSError: EIO when the controller refuses.
    """
    # the pattern of an overwrite is CDW11: zeros
    _command(fd, _SANITIZE, 0, _sanitize_word(method))


def exit_sanitize_failure(fd: int) -> None:
    """End the failure mode in which a failed sanitize operation leaves a disk.

    :raises OSError: EIO if the controller refuses, for example after an
        operation that was begun without Allow Unrestricted Sanitize Exit.
    """
    _command(fd, _SANITIZE, 0, _EXIT_FAILURE_MODE)


def _sanitize_word(method):
    return (_METHODS[method][0] | _UNRESTRICTED
            | (_ONE_PASS if method == 'overwrite' else 0))


def format_namespaces(fd: int, of: str, formats: list[Namespace]) -> None:
    """Erase all namespaces that are attached to a controller.

    :param of: the PCI function, for errors.
    :param formats: the block format of each namespace after the erase, in the
        order of their numbers, or [] to keep the present formats.
    :raises OSError: EOPNOTSUPP if the controller has no Format NVM or no such
        block format, EBUSY if a namespace is not attached, EINVAL if formats
        has another length, EIO if the controller refuses.
    """
    about = _able(fd, of, _OACS_FORMAT, 'Format NVM')
    supported, = struct.unpack_from('<H', about, 256)
    numbers = _namespaces(fd, _CNS_ACTIVE)
    hidden = (set(_namespaces(fd, _CNS_ALLOCATED)) - set(numbers)
              if supported & _OACS_NAMESPACES else ())
    if hidden:
        raise OSError(errno.EBUSY,
                      f'namespace {min(hidden)} of {of} is not attached')
    if formats and len(formats) != len(numbers):
        raise OSError(errno.EINVAL, f'{of} has {len(numbers)} namespaces')
    for position, number in enumerate(numbers):
        page = _identify(fd, _CNS_NAMESPACE, number)
        wanted = formats[position] if formats else None
        _format(fd, number, page, about, _format_index(page, wanted, of)
                if wanted and not _namespace(page).has_format_of(wanted)
                else _used_index(page))


def restore_namespaces(fd: int, of: str, wanted: list[Namespace]) -> None:
    """Delete all namespaces, then create and attach new ones.

    :param of: the PCI function, for errors.
    :param wanted: the new namespaces. If empty, create one of the full
        capacity, with the block format of the previous first namespace.
    :raises OSError: EOPNOTSUPP if the controller has no Namespace Management
        or no such block format, EIO if the controller refuses.
    """
    controller, = struct.unpack_from('<H', _able(
        fd, of, _OACS_NAMESPACES, 'Namespace Management'), 78)
    there = _namespaces(fd, _CNS_ALLOCATED)
    # properties that all namespaces share, such as the table of block formats
    common = _identify(fd, _CNS_NAMESPACE, _ALL)
    first = (_used_index(_identify(fd, _CNS_ALLOCATED_NAMESPACE, there[0]))
             if there else 0)
    chosen = [(n.blocks, _format_index(common, n, of)) for n in wanted]
    if there:
        _command(fd, _NAMESPACE_MANAGEMENT, _ALL, _DELETE)
    if not wanted:
        free = int.from_bytes(
            _identify(fd, _CNS_CONTROLLER)[296:312], 'little')
        chosen = [(free // _block_format(common, first)[0], first)]
    for blocks, index in chosen:
        page = ctypes.create_string_buffer(4096)
        struct.pack_into('<QQ', page, 0, blocks, blocks)
        struct.pack_into('<B', page, 26, _index_bits(index))
        number = _command(fd, _NAMESPACE_MANAGEMENT, 0, _CREATE, page=page)
        _attach(fd, number, controller, _ATTACH)
    # the Linux driver reads the list of namespaces again
    fcntl.ioctl(fd, RESCAN)


# VFs

def read_secondaries(fd: int, of: str) -> list[Secondary]:
    """Return the secondary controllers of VFs, in the order of the primary
    controller's list.

    :param of: the PCI function, for errors.
    :raises OSError: EOPNOTSUPP if the controller has no Virtualization
        Management, EIO if it refuses or lists a controller twice.
    """
    supported, = struct.unpack_from('<H', _able(
        fd, of, _OACS_VIRTUALIZATION, 'Virtualization Management'), 256)
    attached = ({number: _attached(fd, number)
                 for number in _namespaces(fd, _CNS_ALLOCATED)}
                if supported & _OACS_NAMESPACES else None)
    found: list[Secondary] = []
    begin = 0
    while True:
        page = _identify(fd, _CNS_SECONDARY, word=begin)
        count = min(page[0], 127)
        for number in range(count):
            at = 32 + 32 * number
            id_, _, state, vf, queues, interrupts = struct.unpack_from(
                '<HHB3xHHH', page, at)
            if id_ < begin:
                _check_order([begin, id_], 'secondary controllers')
            begin = id_ + 1
            if vf:
                mine, others = _namespaces_of(id_, attached)
                found.append(Secondary(vf, id_, bool(state & 1), mine, others,
                                       queues, interrupts))
        if count < 127:
            return found


def _namespaces_of(controller, attached):
    """Return the namespaces of a controller, and the other controllers that
    share a namespace with it. The namespaces are None if they are unknown.

    :param attached: number of a namespace -> the controllers to which it is
        attached, or None if unknown.
    """
    if attached is None:
        return None, ()
    mine = {number: controllers for number, controllers in attached.items()
            if controller in controllers}
    return (tuple(sorted(mine)),
            tuple(sorted({c for controllers in mine.values()
                          for c in controllers} - {controller})))


def set_offline(fd: int, controller: int) -> None:
    """Take a secondary controller offline, which resets it and removes its
    flexible resources. This also succeeds if it is offline already.

    Source: action 7h of Virtualization Management, NVM Express Base
    Specification 1.4, and QEMU's controller.

    :raises OSError: EIO when the primary controller refuses.
    """
    _command(fd, _VIRTUALIZATION, 0, _OFFLINE | controller << 16)


def set_online(fd: int, controller: int, queues: int,
               interrupts: int) -> None:
    """Bring an offline secondary controller online.

    :param queues: number of flexible queues to assign first.
    :param interrupts: number of flexible interrupts to assign first.
    :raises OSError: EIO if the primary controller refuses, for example
        because the secondary controller needs more resources.
    """
    for resource, number in ((_QUEUES, queues), (_INTERRUPTS, interrupts)):
        if number:
            _command(fd, _VIRTUALIZATION, 0,
                     _ASSIGN | resource << 8 | controller << 16, cdw11=number)
    _command(fd, _VIRTUALIZATION, 0, _ONLINE | controller << 16)


def private_namespaces(fd: int, of: str, controller: int) -> list[int]:
    """Return the numbers of a secondary controller's namespaces. The primary
    controller may share a namespace, but no other controller may.

    :param of: the PCI function, for errors.
    :raises OSError: EOPNOTSUPP if the primary controller has no Namespace
        Management, EBUSY if another secondary controller shares one of the
        namespaces, EIO if the primary controller refuses.
    """
    own, = struct.unpack_from('<H', _able(
        fd, of, _OACS_NAMESPACES, 'Namespace Management'), 78)
    found = []
    for number in _namespaces(fd, _CNS_ALLOCATED):
        controllers = set(_attached(fd, number))
        if controller not in controllers:
            continue
        if controllers - {own, controller}:
            raise OSError(errno.EBUSY, f'namespace {number} of {of} is shared '
                                       f'with another controller')
        found.append(number)
    return found


def format_of_secondary(fd: int, of: str, namespaces: list[int]) -> None:
    """Erase namespaces of a secondary controller by its primary controller.

    Some primary controllers accept the command only for their own namespaces.
    Then each namespace is attached to the primary controller meanwhile, which
    the namespace must permit (NMIC). The namespace always stays attached to
    the secondary controller, even if the process is killed.

    :param of: the PCI function, for errors.
    :raises OSError: EOPNOTSUPP if the primary controller has no Format NVM or
        would erase other namespaces as well, EIO if it refuses.
    """
    about = _able(fd, of, _OACS_FORMAT, 'Format NVM')
    if about[524] & _FNA_ALL:
        raise OSError(errno.EOPNOTSUPP,
                      f'{of} formats all namespaces at once')
    own, = struct.unpack_from('<H', about, 78)
    for number in namespaces:
        page = _identify(fd, _CNS_ALLOCATED_NAMESPACE, number)
        is_mine = own in _attached(fd, number)
        if not is_mine:
            try:
                _format(fd, number, page, about, _used_index(page))
                continue
            except OSError:
                _attach(fd, number, own, _ATTACH)
        try:
            _format(fd, number, page, about, _used_index(page))
        finally:
            _attach(fd, number, own, _DETACH)


# Commands

def _able(fd, of, bit, what) -> bytes:
    """Return the Identify data of a controller that has an optional command.

    :param bit: the bit of the command in OACS.
    :param what: name of the command, for the error.
    :raises OSError: EOPNOTSUPP if the controller lacks the command.
    """
    about = _identify(fd, _CNS_CONTROLLER)
    supported, = struct.unpack_from('<H', about, 256)
    if not supported & bit:
        raise OSError(errno.EOPNOTSUPP, f'{of} has no {what}')
    return about


def _format(fd, number, page, about, index):
    """Erase a namespace with Format NVM. If the block format stays the same,
    so does the protection information of the namespace."""
    erase = (_CRYPTOGRAPHIC_ERASE if about[524] & _FNA_CRYPTOGRAPHIC
             else _USER_DATA_ERASE)
    used = _used_index(page)
    # bit 4 of FLBAS: metadata at the end of the data
    extended = page[26] >> 4 & 1 if index == used else 0
    protection = page[29] & 0xf if index == used else 0
    _command(fd, _FORMAT, number, (
        index & 0xf | extended << 4 | (protection & 7) << 5
        | (protection >> 3) << 8 | erase << 9 | (index >> 4) << 12),
        _FORMAT_MS)


def _attach(fd, number, controller, select):
    page = ctypes.create_string_buffer(4096)
    struct.pack_into('<HH', page, 0, 1, controller)
    _command(fd, _NAMESPACE_ATTACHMENT, number, select, page=page)


def _attached(fd, number) -> list[int]:
    """Return the controllers to which a namespace is attached."""
    page = _identify(fd, _CNS_ATTACHED, number)
    count, = struct.unpack_from('<H', page)
    return list(struct.unpack_from(f'<{min(count, 2047)}H', page, 2))


def _namespace(page) -> Namespace:
    blocks, = struct.unpack_from('<Q', page)
    return Namespace(blocks, *_block_format(page, _used_index(page)))


def _used_index(page) -> int:
    """Return the index of a namespace's present block format (FLBAS)."""
    return page[26] & 0xf | (page[26] >> 5 & 3) << 4


def _index_bits(index) -> int:
    return index & 0xf | (index >> 4) << 5


def _block_format(page, index) -> tuple[int, int]:
    """Return the sizes of a block's data and metadata in bytes (LBAF)."""
    metadata, exponent = struct.unpack_from('<HB', page, 128 + 4 * index)
    if not 9 <= exponent <= 31:
        raise OSError(errno.EIO, f'block format {index} has blocks of '
                                 f'2^{exponent} bytes')
    return 1 << exponent, metadata


def _format_index(page, wanted, of) -> int:
    """Return the index of a block format in the Identify data of a namespace.
    If the wanted size of metadata is unknown, it counts as 0."""
    for index in range(min(page[25], 63) + 1):
        metadata, exponent = struct.unpack_from('<HB', page, 128 + 4 * index)
        if (1 << exponent, metadata) == (wanted.block_size,
                                         wanted.metadata or 0):
            return index
    raise OSError(errno.EOPNOTSUPP,
                  f'{of} has no block format of {wanted.block_size} bytes')


def _namespaces(fd, cns) -> list[int]:
    """Return the numbers of namespaces, in ascending order. Several lists of
    up to 1024 numbers are read if needed."""
    found: list[int] = []
    while True:
        last = found[-1] if found else 0
        numbers = [n for n in struct.unpack('<1024I', _identify(
            fd, cns, last)) if n]
        _check_order([last, *numbers], 'namespaces')
        found += numbers
        if len(found) > _MOST:
            raise OSError(errno.EIO, f'more than {_MOST} namespaces')
        if len(numbers) < 1024:
            return found


def _check_order(numbers, what):
    """Check that the numbers in a list ascend, as NVM Express Base 2.0
    requires."""
    if sorted(set(numbers)) != numbers:
        raise OSError(errno.EIO, f'the controller lists its {what} twice or '
                                 f'out of order')


def _identify(fd, cns, namespace=0, word=0) -> bytes:
    page = ctypes.create_string_buffer(4096)
    _command(fd, _IDENTIFY, namespace, cns | word << 16, page=page)
    return page.raw


def _text(field) -> str:
    return field.decode('ascii', 'replace').rstrip(' \0').strip()


def _command(fd, opcode, namespace, cdw10, timeout=_SHORT_MS,
             page=None, cdw11=0) -> int:
    """Send a command, and return dword 0 of its completion."""
    command = bytearray(COMMAND.pack(
        opcode, 0, 0, namespace, 0, 0, 0,
        ctypes.addressof(page) if page else 0, 0, len(page) if page else 0,
        cdw10, cdw11, 0, 0, 0, 0, timeout, 0))
    status = fcntl.ioctl(fd, ADMIN, command)
    if status:
        raise OSError(errno.EIO, f'the disk answers command {opcode:#x} with '
                                 f'status {status:#x}')
    return COMMAND.unpack(command)[-1]
