# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The DFL driver on a real kernel: one step of the trial, as a transcript.

Runs as root on a machine whose DFL card may be programmed at will.
trials/drivers.py has the steps in order, and the faults that the emulated
card is given between them.

    dfl_on_kernel.py discover
    dfl_on_kernel.py program REGION FUNCTION [--interface UUID]
        [--payload-interface UUID] [--size BYTES] [--expect OUTCOME]
    dfl_on_kernel.py guest
    dfl_on_kernel.py release REGION FUNCTION
    dfl_on_kernel.py stuck REGION FUNCTION
    dfl_on_kernel.py privileged
    dfl_on_kernel.py reset REGION

The exit status is 1 when the outcome is not the expected one.
"""

import argparse
import contextlib
import fcntl
import glob
import mmap
import os
import pwd
import struct
import sys
import threading
import time

from oslo_config import cfg

from nova_accel.drivers import dfl
from nova_accel import exception
from nova_accel.host import kernel as host_kernel
from nova_accel.host import privileged
from nova_accel import privsep  # noqa: F401 (registers its options)
from nova_accel import sim

ROOM = '/var/tmp/nova_accel'
#: of include/uapi/linux/fpga-dfl.h: DFL_FPGA_PORT_GET_REGION_INFO, and its
#: argsz, flags, index, padding, size, offset
REGION_INFO, REGION = 0xb642, struct.Struct('=IIIIQQ')
#: words of the emulated card's AFU: a register, and the card's memory
REGISTER, MEMORY = 0x18 // 8, 0x20 // 8


def show(devices):
    for address, device in devices.items():
        print(f'  {address} {device.vendor} {device.product} '
              f'shell {device.shell_id} numa {device.numa_node} '
              f'{device.health.value} {device.reason}')
        for region in device.regions:
            handles = ','.join(h.key for h in region.handles) or '-'
            print(f'    {region.name} type {region.region_type_uuid} '
                  f'function {region.function_uuid} {handles} '
                  f'{region.health.value} {region.reason}')


def discover(driver, args):
    show(driver.discover())


def bitstream_of_nova(driver, args, interface):
    """A file that only another user may read, as nova's cache is."""
    path = os.path.join(ROOM, 'nobody', 'a.gbs')
    owner = pwd.getpwnam('nobody').pw_uid
    os.makedirs(os.path.dirname(path), exist_ok=True)
    sim.make_gbs(path, args.function, interface, size=args.size,
                 payload_interface=args.payload_interface)
    parsed = driver.read_bitstream(path, path)
    os.chown(path, owner, -1)
    os.chmod(path, 0o600)
    os.chown(os.path.dirname(path), owner, -1)
    os.chmod(os.path.dirname(path), 0o700)
    return parsed


def program(driver, args):
    device, = driver.discover().values()
    region = device.region(args.region)
    interface = args.interface or region.region_type_uuid
    parsed = bitstream_of_nova(driver, args, interface)
    seen, done = set(), threading.Event()
    watcher = threading.Thread(target=watch, args=(driver, args.region, seen,
                                                   done))
    watcher.start()
    began = time.monotonic()
    try:
        outcome = driver.program(device, region, parsed)
    except exception.AcceleratorError as e:
        outcome = type(e).__name__
        print(f'  {outcome}: {e}')
    took = time.monotonic() - began
    done.set()
    watcher.join()
    print(f'  outcome {outcome} after {took:.1f} s; meanwhile the region was '
          f'seen as: {"; ".join(sorted(seen))}')
    show(driver.discover())
    return args.expect in (None, outcome)


def watch(driver, index, seen, done):
    while not done.wait(0.2):
        for device in driver.discover().values():
            found = [r for r in device.regions if r.index == index]
            what = found[0] if found else device
            seen.add(f'{what.health.value} {what.reason}'.strip())


def guest(driver, args):
    """What libvirt does for a managed hostdev."""
    before = driver.discover()
    address, = before
    mark = driver.fingerprint()
    driver.kernel.rebind(address, 'vfio-pci')
    print('  bound to vfio-pci, known:')
    show(driver.discover(before))
    print('  bound to vfio-pci, not known:')
    show(driver.discover())
    same = driver.discover(before) == before
    moved = driver.fingerprint() != mark
    driver.kernel.rebind(address, 'dfl-pci')
    time.sleep(2)
    print('  bound to dfl-pci again:')
    after = driver.discover()
    show(after)
    return same and moved and after == before


def privileged_checks(driver, args):
    """Arguments that the privileged process has to refuse, and its powers."""
    address, = driver.discover()
    ok = True
    fifo = os.path.join(ROOM, 'fifo')
    if not os.path.exists(fifo):
        os.mkfifo(fifo)
    for name, call in (
            ('a FIFO', lambda: privileged.program_dfl_port(
                address, 0, fifo, 0, 32)),
            ('a symbolic link', lambda: privileged.program_dfl_port(
                address, 0, '/proc/self/exe', 0, 32)),
            ('more than the file has', lambda: privileged.program_dfl_port(
                address, 0, '/etc/hostname', 0, 1 << 20)),
            ('a port that is not there', lambda: privileged.program_dfl_port(
                address, 3, '/etc/passwd', 0, 32)),
            ('no PCI address', lambda: privileged.rebind('../x', 'dfl-pci')),
            ('another driver', lambda: privileged.rebind(address, 'igb')),
            ('VFs without SR-IOV', lambda: privileged.set_numvfs(address, 1)),
            ('a release of port 3', lambda: privileged.release_dfl_port(
                address, 3)),
            ('an assign of port 0', lambda: privileged.assign_dfl_port(
                address, 0))):
        try:
            call()
            print(f'  {name}: done, and should not be')
            ok = False
        except OSError as e:
            print(f'  {name}: {type(e).__name__} {e}')
    return ok


def release(driver, args):
    """A port taken from the PF and assigned again."""
    address, = driver.discover()
    driver.kernel.release_dfl_port(address, args.region)
    print('  released:')
    released = driver.discover()
    show(released)
    print('  programmed while released, as for a VF:')
    region = released[address].region(args.region)
    args.size, args.payload_interface = 4096, None
    parsed = bitstream_of_nova(driver, args, region.region_type_uuid)
    try:
        driver.kernel.program_dfl_port(
            address, args.region, parsed.path, parsed.payload_offset,
            parsed.payload_size)
    except OSError as e:
        print(f'  {e}')
    driver.kernel.assign_dfl_port(address, args.region)
    print('  assigned:')
    time.sleep(1)
    show(driver.discover())
    driver.recover(address)
    print('  dfl-pci bound again:')
    show(driver.discover())
    return (driver.discover()[address].region(args.region).function_uuid
            == args.function.replace('-', ''))


@contextlib.contextmanager
def afu(address, index):
    """The 64-bit words of the function of a port, as the host sees them."""
    found, = (path for path in glob.glob(
        f'/sys/bus/pci/devices/{address}/fpga_region/region*/dfl-port.*')
        if open(f'{path}/id').read().strip() == str(index))
    info = bytearray(REGION.pack(REGION.size, 0, 0, 0, 0, 0))
    with open(f'/dev/{os.path.basename(found)}', 'r+b', buffering=0) as node:
        fcntl.ioctl(node, REGION_INFO, info)
        *_, size, offset = REGION.unpack(info)
        with mmap.mmap(node.fileno(), size, offset=offset) as pages:
            with memoryview(pages) as octets, octets.cast('Q') as words:
                yield words


def reset(driver, args):
    """What is left of a server's data by a reset of its port."""
    (address, device), = driver.discover().items()
    with afu(address, args.region) as words:
        words[REGISTER] = words[MEMORY] = 0x5ec2e7
        before = words[REGISTER], words[MEMORY]
    print('  ' + driver.reset_region(device, device.region(args.region)))
    with afu(address, args.region) as words:
        after = words[REGISTER], words[MEMORY]
    print(f'  register and memory: {before}, then {after}')
    return (before == (0x5ec2e7, 0x5ec2e7) and after == (0, 0x5ec2e7)
            and driver.discover()[address] == device)


def stuck(driver, args):
    """A failure without a recovery, as when nova-compute died."""
    (address, device), = driver.discover().items()
    region = device.region(args.region)
    args.size, args.payload_interface = 4096, None
    parsed = bitstream_of_nova(driver, args, region.region_type_uuid)
    try:
        driver.kernel.program_dfl_port(
            address, args.region, parsed.path, parsed.payload_offset,
            parsed.payload_size)
    except OSError as e:
        print(f'  {e}')
    fpga, = driver.kernel.listdir('class/fpga_manager')
    for attribute in ('state', 'status'):
        text = driver.kernel.read(f'class/fpga_manager/{fpga}/{attribute}')
        print(f'  manager {attribute}: {text!r}')
    show(driver.discover())
    print(f'  programmed again: {driver.program(device, region, parsed)}')
    show(driver.discover())
    return (driver.discover()[address].region(args.region).function_uuid
            == args.function.replace('-', ''))


def main():
    parser = argparse.ArgumentParser()
    steps = parser.add_subparsers(required=True)
    steps.add_parser('discover').set_defaults(step=discover)
    step = steps.add_parser('program')
    step.set_defaults(step=program)
    step.add_argument('region', type=int)
    step.add_argument('function')
    step.add_argument('--interface')
    step.add_argument('--payload-interface')
    step.add_argument('--size', type=int, default=4097)
    step.add_argument('--expect')
    steps.add_parser('guest').set_defaults(step=guest)
    steps.add_parser('privileged').set_defaults(step=privileged_checks)
    step = steps.add_parser('reset')
    step.set_defaults(step=reset)
    step.add_argument('region', type=int)
    for name, action in (('release', release), ('stuck', stuck)):
        step = steps.add_parser(name)
        step.add_argument('region', type=int)
        step.add_argument('function')
        step.set_defaults(step=action)
    args = parser.parse_args()
    os.makedirs(ROOM, exist_ok=True)
    settings = os.path.join(ROOM, 'nova.conf')
    with open(settings, 'w') as file:
        # the privileged process programs nothing from another directory
        file.write(f'[accel]\nbitstream_cache = {ROOM}/nobody\n')
    cfg.CONF([], project='nova', default_config_files=[settings])
    cfg.CONF.set_override(
        'helper_command', f'{sys.prefix}/bin/privsep-helper --config-file '
        f'{settings}', group='nova_accel_privileged')
    print(f'$ {" ".join(sys.argv[1:])}', flush=True)
    driver = dfl.DflDriver(host_kernel.Kernel())
    if args.step(driver, args) is False:
        print('  NOT AS EXPECTED', flush=True)
        os._exit(1)
    sys.stdout.flush()
    # the privileged process ends with its socket
    os._exit(0)


if __name__ == '__main__':
    main()
