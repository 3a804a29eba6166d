# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Graphics cards for passthrough of the whole card.

Sources: boot_vga_show(), resource_show() and pci_mmap_resource() in
drivers/pci/pci-sysfs.c of Linux 7.2; host.nvidia for the registers in BAR0. Not
compared with a real card.
"""

import dataclasses
import errno
import time
from typing import ClassVar

from nova_accel.host import nvidia
from nova_accel.sim import card
from nova_accel.sim import reader
from nova_accel.sim import tree as sysfs


@dataclasses.dataclass(frozen=True)
class GpuCard(card.Card):
    """A graphics card, which has the address of its graphics function. The
    field `others` has the other functions of the slot."""

    ids: tuple[str, str, str, str] = ('10de', '26b9', '10de', '0000')
    class_code: str = '0x030200'
    driver: str | None = 'nvidia'
    #: the attribute boot_vga; only VGA devices (0300) have it
    boot_vga: bool = False
    #: whether it has types of mediated devices, as under a vGPU host driver
    mdev: bool = False
    #: size of the largest memory region of each function in GiB; 0: `resource`
    #: lists none
    bar_gib: int = 0
    #: size of BAR0 in MiB; `resource` does not list it
    bar0_mib: int = 16
    #: seconds from the first read of all words after a bus reset to the end of
    #: the boot, and from there to the end of clearing the memory
    boot_seconds: float = 0.02
    clear_seconds: float = 0.02

    KEYS: ClassVar[dict] = {
        'boot_vga': reader.boolean, 'mdev': reader.boolean,
        'bar_gib': reader.natural, 'bar0_mib': reader.natural,
        'boot_seconds': reader.seconds, 'clear_seconds': reader.seconds}
    FAULTS: ClassVar[dict] = {
        **card.Card.FAULTS,
        #: the kernel maps no memory of devices
        'lockdown': reader.boolean,
        #: the clearing never ends; BAR0 reads as ones; registers show the
        #: previous boot
        'memory_clear': reader.one_of('never', 'ones', 'stale'),
        #: modes that a guest has set: name of nvidia.REGISTERS -> value
        'modes': reader.attributes,
        #: errno of opening it through VFIO
        'vfio': reader.one_of('EBUSY', 'EPERM', 'ENOENT'),
    }

    def reset(self, mine, vf):
        """Reset the GPU; see the base class. Only a reset of the bus boots it.
        """
        super().reset(mine, vf)
        if (mine.get('reset_method') or self.reset_method) == 'bus':
            mine['booted'] = None
            if self.faulty(mine).get('memory_clear') != 'never':
                card.forget(mine, 0, 'memory')

    def word(self, mine, family: str, offset: int) -> int:
        """Return the present value of the four bytes at an offset of BAR0.

        :raises OSError: ERANGE: BAR0 is too small.
        """
        nvidia.check_size(self.bar0_mib << 20, offset)
        fault = self.faulty(mine).get('memory_clear')
        if fault == 'ones':
            return 0xffffffff
        registers = nvidia.REGISTERS[family]
        booted = mine.get('booted', 0)
        passed = 0 if booted is None else time.time() - booted
        for number, word in enumerate(registers.words):
            if word.offset == offset:
                ended = (fault == 'stale' or passed > self.boot_seconds
                         + number * self.clear_seconds)
                return word.value * (
                    ended and not (number and fault == 'never'))
        name, mode = next((name, mode) for name, mode
                          in registers.modes.items() if mode.offset == offset)
        is_now = self.faulty(mine).get('modes', {}).get(name, 'off')
        return next(value for value, text in mode.values.items()
                    if text == is_now) << mode.shift

    def add_physical(self, tree, mine, function):
        if self.class_code.startswith('0x0300'):
            function['boot_vga'] = '1' if self.boot_vga else '0'
        self._add_region(function)
        if self.mdev and mine['driver'] == self.driver:
            function['mdev_supported_types'] = {}

    def add_virtual(self, tree, mine, n, function):
        self._add_region(function)

    def _add_region(self, function):
        if self.bar_gib:
            # start, end and flags: a 64-bit prefetchable memory region
            # (include/linux/ioport.h of Linux)
            start = 1 << 44
            function['resource'] = (
                f'0x{start:016x} 0x{start + (self.bar_gib << 30) - 1:016x} '
                f'0x{0x14220c:016x}')


class GpuOperations(card.Operations):
    """Operations of a simulated kernel on graphics cards."""

    def reset_gpu(self, function, by, family, milliseconds):
        host, state = self._look()
        found, mine, _ = self._owner(host, state, function)
        faults, bound = found.faulty(mine), mine['driver']
        if by == 'VFIO' and not sysfs.is_for_vfio(bound):
            raise sysfs.error(errno.ENODEV, function)
        if by == 'VFIO' and (function in state['guests'] or 'vfio' in faults):
            raise sysfs.error(getattr(errno, faults.get('vfio', 'EBUSY')),
                              function)
        if by == 'sysfs' and (bound or faults.get('lockdown')):
            # enable_store() and pci_mmap_resource()
            raise sysfs.error(errno.EBUSY if bound else errno.EPERM, function)

        def read(offset):
            mine = self._look()[1]['cards'][function]
            value = found.word(mine, family, offset)
            if mine.get('booted', 0) is None and (
                    offset == nvidia.REGISTERS[family].words[-1].offset):
                # a busy machine may read late, but sees each word change
                with self._update() as (_, state):
                    state['cards'][function]['booted'] = time.time()
            return value

        return nvidia.watch(
            read, lambda: self.reset_function(function, by == 'VFIO'), family,
            milliseconds / 1000)

    def reset_function(self, function, hot=False):
        raise NotImplementedError
