# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The NVMe driver on a real kernel: each use of a disk, and its erasing.

Runs as root on a machine whose disk at the PCI address given may be erased:

    nvme_on_kernel.py 0000:02:00.0

Where it has VFs and a second namespace that may be shared, that one is given
to a VF, and erased by the PF.

    nvme_on_kernel.py 0000:02:00.0 give
    nvme_on_kernel.py 0000:02:00.0 take

only make two VFs, the first one with the second namespace, as an operator does
with nvme-cli, and undo it.

The exit status is 1 when something is not as expected.
"""

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
import sys
import time

from oslo_config import cfg

from nova_accel.drivers import base
from nova_accel.drivers import nvme
from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel.host import nvme_admin
from nova_accel.host import pci
from nova_accel.host import privileged
from nova_accel.host import usage
from nova_accel import privsep

SECRET = b'a secret of the last server'
#: linux/fs.h
_BLKFLSBUF = 0x1261
failed = False


def check(what, found, expected):
    global failed
    well = found == expected
    failed = failed or not well
    print(f'{"ok   " if well else "WRONG"} {what}: {found!r}'
          + ('' if well else f', expected {expected!r}'))


def number(call, *args):
    try:
        call(*args)
    except OSError as error:
        return errno.errorcode[error.errno]


def head(kernel, address):
    """The node of the disk, once the kernel has it."""
    for _ in range(100):
        names = [name for name in usage.disks(kernel, address)
                 if os.path.exists(f'/dev/{name}')]
        if names:
            return f'/dev/{names[0]}'
        time.sleep(0.1)
    raise SystemExit('the kernel shows no disk')


def run(*command):
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def swap(node):
    run('mkswap', node)
    run('swapon', node)
    try:
        yield
    finally:
        run('swapoff', node)


@contextlib.contextmanager
def mounted(node):
    run('mkfs.ext4', '-q', '-F', node)
    run('mount', node, '/mnt')
    try:
        yield
    finally:
        run('umount', '/mnt')


@contextlib.contextmanager
def held(node):
    """As ZFS does."""
    fd = os.open(node, os.O_RDONLY | os.O_EXCL)
    try:
        yield
    finally:
        os.close(fd)


def main(address, what=None):
    cfg.CONF([], project='nova', default_config_files=[])
    for context in (privsep.ctx, privsep.disks, privsep.processes):
        context.set_client_mode(False)
    kernel = host_kernel.Kernel()
    cfg.CONF.set_override('include_devices', [f'address={address}'], 'accel')
    driver = nvme.NvmeDriver(kernel)
    if what:
        {'give': give, 'take': take}[what](kernel, driver, address)
        return failed
    # from an earlier run
    run('wipefs', '--all', head(kernel, address))
    run('blkdiscard', '--zeroout', head(kernel, address))
    device = driver.discover()[address]
    handle, = device.handles
    check('it is offered', device.reason + device.foreign, '')
    print('     ', device)

    def refused(why):
        try:
            driver.prepare(device, handle, None, True, base.Use())
            check(f'{why}: prepare', 'given', 'refused')
        except exception.DeviceUnavailable as error:
            print('     ', error)

    for use, shown, left in ((swap, 'used as swap', 'swap'),
                             (mounted, 'mounted at /mnt', 'ext4'),
                             (held, '', 'ext4')):
        before = driver.fingerprint()
        node = head(kernel, address)
        with use(node):
            check(f'{use.__name__}: reason', shown in
                  driver.discover()[address].reason, True)
            check(f'{use.__name__}: fingerprint',
                  driver.fingerprint() != before, bool(shown))
            check(f'{use.__name__}: check_disks',
                  number(privileged.check_disks, address), 'EBUSY')
            check(f'{use.__name__}: format_nvme',
                  number(privileged.format_nvme, address), 'EBUSY')
            refused(use.__name__)
        check(f'{use.__name__}: signatures', [
            kind for _, kind in kernel.read_signatures(address)], [left])
        refused(f'after {use.__name__}')
    check('a new disk with ext4', 'it has ext4 on nvme' in
          driver.discover()[address].foreign, True)
    check('a disk that was offered',
          driver.discover({address: device})[address], device)
    run('wipefs', '--all', head(kernel, address))
    driver.prepare(device, handle, None, True, base.Use())
    for bound in ('nvme', 'vfio-pci'):
        kernel.rebind(address, 'nvme')
        with open(head(kernel, address), 'r+b', buffering=0) as disk:
            disk.seek(1 << 20)
            disk.write(SECRET.ljust(4096, b'\0'))
            os.fsync(disk.fileno())
        if bound != 'nvme':
            kernel.rebind(address, bound)
        begun = time.monotonic()
        driver.release(device, handle, None, base.Use())
        print(f'      erased in {time.monotonic() - begun:.1f} s')
        check('driver afterwards', pci.driver(kernel, address), bound)
        kernel.rebind(address, 'nvme')
        with open(head(kernel, address), 'rb', buffering=0) as disk:
            disk.seek(1 << 20)
            check(f'what is left, from {bound}', disk.read(len(SECRET)),
                  bytes(len(SECRET)))
    check('offered again', driver.discover()[address], device)
    found = kernel.read_nvme(address)
    check('record', device.record, (
        ('serial number', found.serial), ('firmware', found.firmware),
        *(('namespace', str(n)) for n in found.namespaces)))
    check('serial number', driver.serial(address), found.serial)
    if (os.path.exists(f'/sys/bus/pci/devices/{address}/sriov_numvfs')
            and len(found.namespaces) > 1):
        virtual_functions(kernel, driver, address)
    return failed


def assign(address, action, controller, resource, number):
    """Virtualization Management for queues (0) or interrupts (1)."""
    with privileged._controller(address) as fd:
        command = bytearray(nvme_admin.COMMAND.pack(
            0x1c, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            action | resource << 8 | controller << 16, number, 0, 0, 0, 0,
            60_000, 0))
        status = fcntl.ioctl(fd, nvme_admin.ADMIN, command)
    check(f'virt-mgmt {action} of controller {controller:#x}', status, 0)


def attach(address, namespace, controllers):
    """Attach a namespace to these controllers only; None is the PF."""
    with privileged._controller(address) as fd:
        about = nvme_admin._identify(fd, 1)
        own, = struct.unpack_from('<H', about, 78)
        wanted = {own if c is None else c for c in controllers}
        there = set(nvme_admin._attached(fd, namespace))
        for controller in there - wanted:
            nvme_admin._attach(fd, namespace, controller, 1)
        for controller in wanted - there:
            nvme_admin._attach(fd, namespace, controller, 0)
        fcntl.ioctl(fd, nvme_admin.RESCAN)
    return own


def second(kernel, address):
    """The node of the second namespace, once the kernel has it."""
    for _ in range(100):
        for name in usage.disks(kernel, address):
            if name.endswith('n2') and os.path.exists(f'/dev/{name}'):
                return f'/dev/{name}'
        time.sleep(0.1)
    raise SystemExit('the kernel shows no second namespace')


def make_vfs(kernel, driver, address):
    """Make two VFs; their secondary controllers, which are offline."""
    own = attach(address, 2, {None})
    # the PF gives its flexible resources away at a reset of the function
    for resource in (0, 1):
        assign(address, 1, own, resource, 0)
    with open(f'/sys/bus/pci/devices/{address}/reset', 'w') as file:
        file.write('1')
    driver._await_controller(address)
    with open(f'/sys/bus/pci/devices/{address}/sriov_drivers_autoprobe',
              'w') as file:
        file.write('0')
    kernel.set_numvfs(address, 2)
    return [found for found in kernel.read_nvme_vfs(address)
            if found.vf in (1, 2)]


def bring_online(address, one):
    """Give the second namespace to a secondary controller."""
    # the first namespace stays with the PF
    attach(address, 1, {None})
    attach(address, 2, {one.id})
    for resource, count in ((0, 3), (1, 2)):
        assign(address, 8, one.id, resource, count)
    assign(address, 9, one.id, 0, 0)


def give(kernel, driver, address):
    kernel.set_numvfs(address, 0)
    one, _two = make_vfs(kernel, driver, address)
    bring_online(address, one)


def take(kernel, driver, address):
    kernel.set_numvfs(address, 0)
    attach(address, 2, {None})


def virtual_functions(kernel, driver, address):
    """The second namespace is a VF's, and is erased by the PF."""
    attach(address, 2, {None})
    with open(second(kernel, address), 'r+b', buffering=0) as disk:
        disk.seek(1 << 20)
        disk.write(SECRET.ljust(4096, b'\0'))
        os.fsync(disk.fileno())
    one, two = make_vfs(kernel, driver, address)
    check('VFs that are offline', driver.discover()[address].handles, ())
    bring_online(address, one)
    device = driver.discover()[address]
    vf = pci.virtual_functions(kernel, address)[0]
    check('VFs that are online', [h.address for h in device.handles], [vf])
    # what a server writes there the host or another VF would read
    for other in (None, two.id):
        attach(address, 2, {one.id, other})
        check('shared VF', driver.discover()[address].handles, ())
    attach(address, 2, {one.id})
    driver.release(device, device.handles[0], None, base.Use())
    check('secondary controllers', [
        (found.vf, found.online, found.queues, found.interrupts)
        for found in kernel.read_nvme_vfs(address) if found.vf in (1, 2)],
        [(1, True, 3, 2), (2, False, 0, 0)])
    # a namespace of two VFs is neither erased nor given on
    attach(address, 2, {one.id, two.id})
    check('shared namespace', number(kernel.format_nvme_vf, address, 1),
          'EBUSY')
    attach(address, 2, {None})
    with open(second(kernel, address), 'rb', buffering=0) as disk:
        # a kernel that was slow to look has the same disk as at the start, and
        # what it has read of it in memory
        fcntl.ioctl(disk, _BLKFLSBUF)
        disk.seek(1 << 20)
        check('what is left by the VF', disk.read(len(SECRET)),
              bytes(len(SECRET)))
    kernel.set_numvfs(address, 0)


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
