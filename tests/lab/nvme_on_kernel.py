# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The NVMe driver on a real kernel: each use of a disk, and its erasing.

Runs as root on a machine whose disk at the PCI address given may be erased:

    nvme_on_kernel.py 0000:02:00.0

The exit status is 1 when something is not as expected.
"""

import contextlib
import errno
import os
import subprocess
import sys
import time

from oslo_config import cfg

from nova_accel.drivers import nvme
from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel.host import pci
from nova_accel.host import privileged
from nova_accel.host import usage
from nova_accel import privsep

SECRET = b'a secret of the last server'
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


def main(address):
    cfg.CONF([], project='nova', default_config_files=[])
    for context in (privsep.ctx, privsep.disks):
        context.set_client_mode(False)
    kernel = host_kernel.Kernel()
    driver = nvme.NvmeDriver(kernel)
    device = driver.discover()[address]
    handle, = device.handles
    check('it is offered', device.reason, '')
    print('     ', device)
    for use, shown in ((swap, 'used as swap'), (mounted, 'mounted at /mnt'),
                       (held, '')):
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
            try:
                driver.prepare(device, handle, None, True)
                check(f'{use.__name__}: prepare', 'given', 'refused')
            except exception.DeviceUnavailable as error:
                print('     ', error)
        driver.prepare(device, handle, None, True)
    for bound in ('nvme', 'vfio-pci'):
        kernel.rebind(address, 'nvme')
        with open(head(kernel, address), 'r+b', buffering=0) as disk:
            disk.seek(1 << 20)
            disk.write(SECRET.ljust(4096, b'\0'))
            os.fsync(disk.fileno())
        if bound != 'nvme':
            kernel.rebind(address, bound)
        begun = time.monotonic()
        driver.release(device, handle, None)
        print(f'      erased in {time.monotonic() - begun:.1f} s')
        check('driver afterwards', pci.driver(kernel, address), bound)
        kernel.rebind(address, 'nvme')
        with open(head(kernel, address), 'rb', buffering=0) as disk:
            disk.seek(1 << 20)
            check(f'what is left, from {bound}', disk.read(len(SECRET)),
                  bytes(len(SECRET)))
    check('offered again', driver.discover(), {address: device})
    return failed


if __name__ == '__main__':
    sys.exit(main(sys.argv[1]))
