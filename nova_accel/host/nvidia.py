# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Read the state of GPUs of NVIDIA from BAR0, without a driver.

A GPU clears its memory while it boots. One word of BAR0 shows whether the GPU
has booted, and another one whether the clearing has ended. Further words show
modes that survive a reset, such as ECC. Source of all offsets and values, but
of no code: NVIDIA/gpu-admin-tools of 2025-10-21 (82422cc, MIT),
wait_for_boot(), wait_for_memory_clear(), get_ecc_state(), query_cc_mode_*()
and query_mig_mode() in nvidia_gpu_tools.py, gpu/regs/*/therm.py, and
gpu/devid_chips.py. This was not tried with a card.

by_vfio() reads BAR0 by VFIO, which resets the function at opening and closing.
by_sysfs() uses sysfs, which a locked down kernel does not allow. Both
functions read four bytes at a time, and never write to BAR0. Sources:
include/uapi/linux/vfio.h, vfio_pci_core.c and pci-sysfs.c of Linux.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import errno
import fcntl
import mmap
import os
import struct
import time
import typing

#: seconds between two readings
_PAUSE = 0.005
#: maximum number of different readings that are kept
_MOST = 64
#: value that is read from a device that does not answer
_ONES = 0xffffffff
#: upper half of the value of a register that the GPU does not show now
_NO_REGISTER = 0xbadf
#: _IO(VFIO_TYPE, VFIO_BASE)
_VFIO = ord(';') << 8 | 100
_SET_IOMMU, _SET_CONTAINER, _GET_DEVICE, _REGION_INFO, _HOT_RESET, _BIND = (
    _VFIO + number for number in (2, 4, 6, 8, 13, 18))
_TYPE1_IOMMU = 1
#: argsz, flags, index, cap_offset, size, offset
_REGION = struct.Struct('=IIIIQQ')
#: argsz, flags, iommufd, out_devid
_BINDING = struct.Struct('=IIiI')

#: reads the four bytes at an offset
Read = Callable[[int], int]
Reset = Callable[[], None]


class Word(typing.NamedTuple):
    name: str
    offset: int
    #: its value when the reported work has ended
    value: int


class Mode(typing.NamedTuple):
    offset: int
    shift: int
    #: value of the bits from shift on -> name of the mode
    values: Mapping[int, str]


class Watched(typing.NamedTuple):
    """The readings of watch()."""

    #: value of each word before the reset
    before: list[int]
    #: [milliseconds since the reset began, value of each word, ...] at each
    #: change of a value
    seen: list[list[int]]
    #: value of the word of each mode, when all work had ended
    modes: list[int]


@dataclasses.dataclass(frozen=True)
class Registers:
    words: tuple[Word, ...]
    modes: Mapping[str, Mode]


_TURING_ON = (Word('boot complete', 0x118234, 0x3ff),
              Word('memory clear finished', 0x100b20, 1))
_HOPPER = (Word('boot complete', 0x200bc, 0xff), _TURING_ON[1])
_CLEARED_BLACKWELL = Word('memory clear finished', 0x8a004c, 1)
_OFF_ON = {0: 'off', 1: 'on'}
_ECC = {'ECC': Mode(0x9a0470, 0, _OFF_ON)}
_CC = {0: 'off', 1: 'on', 3: 'devtools'}
_BLACKWELL = {'CC': Mode(0x590, 0, _CC), **_ECC}

#: by family(). ECC is the last mode, because it is not valid while CC is on
REGISTERS = {
    'turing': Registers(_TURING_ON, _ECC),
    'ga100': Registers(
        _TURING_ON, {'MIG': Mode(0x1404, 15, _OFF_ON), **_ECC}),
    'ampere': Registers(_TURING_ON, _ECC),
    'ada': Registers(_TURING_ON, _ECC),
    'hopper': Registers(_HOPPER, {'CC': Mode(0x1182cc, 0, _CC), **_ECC}),
    'gb100': Registers((_HOPPER[0], _CLEARED_BLACKWELL), _BLACKWELL),
    'gb202': Registers((Word('boot complete', 0xad00bc, 0xff),
                        _CLEARED_BLACKWELL), _BLACKWELL),
}
#: first and last device id of chips of Blackwell
_CHIPS = (('gb100', 0x2900, 0x29ff), ('gb100', 0x3180, 0x327f),
          ('gb202', 0x2b80, 0x2bff), ('gb202', 0x2c00, 0x2c7f),
          ('gb202', 0x2d00, 0x2dff), ('gb202', 0x2f00, 0x2f7f))


def family(vendor: str, name: str | None, product: str) -> str:
    """Return the key of REGISTERS for a GPU, or '' if the GPU is unknown.

    :param name: Device.family, for example BLACKWELL.
    :param product: device id, four hex digits.
    """
    if vendor != '10de' or not name:
        return ''
    if name == 'BLACKWELL':
        return next((chip for chip, first, last in _CHIPS
                     if first <= int(product, 16) <= last), '')
    if name == 'AMPERE' and product.startswith('20'):
        return 'ga100'
    return name.lower() if name.lower() in REGISTERS else ''


@contextlib.contextmanager
def by_vfio(sys: str, dev: str, function: str,
            ) -> Iterator[tuple[Read, Reset]]:
    """Open a function that is bound to vfio-pci, and yield functions to read
    its BAR0 and to reset its bus. On kernels without VFIO groups, the node of
    the function is opened in place of the node of its group.

    :param sys: directory of sysfs.
    :param dev: directory of device nodes.
    :raises OSError: EBUSY: a process has it open.
    """
    device = f'{sys}/bus/pci/devices/{function}'
    with contextlib.ExitStack() as stack:
        def opened(path, flags=os.O_RDONLY):
            # the node of a group may be another user's, and is not written
            fd = os.open(path, flags | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            return fd
        group = os.path.basename(os.readlink(f'{device}/iommu_group'))
        groups = []
        try:
            groups.append(opened(f'{dev}/vfio/{group}'))
        except FileNotFoundError:
            name, = os.listdir(f'{device}/vfio-dev')
            fd = opened(f'{dev}/vfio/devices/{name}', os.O_RDWR)
            fcntl.ioctl(fd, _BIND, _BINDING.pack(
                _BINDING.size, 0, opened(f'{dev}/iommu', os.O_RDWR), 0))
        else:
            container = opened(f'{dev}/vfio/vfio', os.O_RDWR)
            fcntl.ioctl(groups[0], _SET_CONTAINER,
                        struct.pack('=i', container))
            fcntl.ioctl(container, _SET_IOMMU, _TYPE1_IOMMU)
            # with a mutable buffer, the result is that of the call
            fd = fcntl.ioctl(groups[0], _GET_DEVICE,
                             bytearray(function.encode('ascii') + b'\0'))
            stack.callback(os.close, fd)
        *_, size, begin = _REGION.unpack(fcntl.ioctl(
            fd, _REGION_INFO, _REGION.pack(_REGION.size, 0, 0, 0, 0, 0)))

        def read(offset):
            check_size(size, offset)
            return int.from_bytes(os.pread(fd, 4, begin + offset), 'little')

        def reset():
            # for a reset of the bus the kernel demands the groups of all its
            # functions or, without groups, that this process has their nodes
            # open
            fcntl.ioctl(fd, _HOT_RESET, struct.pack(
                f'=III{len(groups)}i', 12 + 4 * len(groups), 0, len(groups),
                *groups))
        yield read, reset


@contextlib.contextmanager
def by_sysfs(sys: str, function: str, write: Callable[[str, str], None],
             ) -> Iterator[tuple[Read, Reset]]:
    """Map BAR0 of a function without a driver, and yield functions to read it
    and to reset the bus. The reset_method of the function must be bus.

    If the function does not answer, reads return only ones, after the
    completion timeout of PCI Express.

    :param write: writes an attribute.
    :raises OSError: EPERM: the kernel is locked down.
    """
    device = f'{sys}/bus/pci/devices/{function}'
    with contextlib.ExitStack() as stack:
        write(f'{device}/enable', '1')
        stack.callback(write, f'{device}/enable', '0')
        fd = os.open(f'{device}/resource0',
                     os.O_RDONLY | os.O_SYNC | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        size = os.fstat(fd).st_size
        area = stack.enter_context(mmap.mmap(
            fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
        # one access of four bytes for each item
        items = stack.enter_context(
            stack.enter_context(memoryview(area)).cast('I'))

        def read(offset):
            check_size(size, offset)
            return items[offset // 4]
        yield read, lambda: write(f'{device}/reset', '1')


def check_size(size: int, offset: int) -> None:
    """Raise ERANGE if four bytes at offset exceed a BAR0 of this size."""
    if offset + 4 > size:
        raise OSError(errno.ERANGE, f'its BAR0 has {size} bytes, and no word '
                                    f'at {offset:#x}')


def watch(read: Read, reset: Reset, key: str, seconds: float) -> Watched:
    """Reset a GPU, and read its words until all of them have their final
    values: the GPU has booted, and has cleared its memory.

    :param read: reads the four bytes at an offset of BAR0.
    :param key: a key of REGISTERS.
    :param seconds: time limit, including the reset.
    :raises OSError: as read() and reset() do.
    """
    registers = REGISTERS[key]

    def now():
        return [read(word.offset) for word in registers.words]
    before = now()
    seen: list[list[int]] = []
    ended = [word.value for word in registers.words]
    began = time.monotonic()
    reset()
    while True:
        found, passed = now(), time.monotonic() - began
        if not seen or seen[-1][1:] != found:
            del seen[_MOST - 1:]
            seen.append([int(passed * 1000), *found])
        if found == ended:
            return Watched(before, seen, [
                read(mode.offset) for mode in registers.modes.values()])
        if passed > seconds:
            return Watched(before, seen, [])
        time.sleep(_PAUSE)


def failure(key: str, watched: Watched) -> str:
    """Return a clause with the reason why the memory of a GPU is not clear.
    Return '' if the words of BAR0 show that it is clear."""
    milliseconds, *last = watched.seen[-1]
    for word, value in zip(REGISTERS[key].words, last):
        if not _is_read(value):
            return f'its word "{word.name}" reads as {value:#x}'
    for word, value in zip(REGISTERS[key].words, last):
        if value != word.value:
            return (f'its word "{word.name}" did not change as expected '
                    f'({value:#x} in place of {word.value:#x})')
    return ''


def doubt(key: str, watched: Watched) -> str:
    """Return a clause with a reason to doubt that a GPU has cleared its
    memory. Return '' if the words of BAR0 prove that it has.

    If a word has its final value in every reading, the value may be that of
    the boot before the reset.
    """
    for word, values in zip(REGISTERS[key].words, _by_word(watched)):
        if all(value == word.value or not _is_read(value)
               for value in values):
            return (f'its word "{word.name}" was set at the first reading '
                    f'after the reset, and may be that of the boot before')
    return ''


def words(key: str, watched: Watched) -> dict[str, list[str]]:
    """Return name of a word -> its values before and after the reset."""
    return {f'{word.name} at {word.offset:#x}': [
        hex(value) for value in (before, *_changes(values))]
        for word, before, values in zip(
            REGISTERS[key].words, watched.before, _by_word(watched))}


def modes(key: str, watched: Watched) -> dict[str, str]:
    """Return name -> value of those modes that could be read."""
    found: dict[str, str] = {}
    for (name, mode), value in zip(REGISTERS[key].modes.items(),
                                   watched.modes):
        if _is_read(value) and not (
                name == 'ECC' and found.get('CC', 'off') != 'off'):
            bits = value >> mode.shift & (3 if mode.values is _CC else 1)
            found[name] = mode.values.get(bits, f'invalid ({bits})')
    return found


def _is_read(value: int) -> bool:
    return value != _ONES and value >> 16 != _NO_REGISTER


def _by_word(watched) -> Iterable[tuple[int, ...]]:
    return list(zip(*watched.seen))[1:]


def _changes(values) -> list[int]:
    return [value for number, value in enumerate(values)
            if not number or value != values[number - 1]]
