# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The virtual machine whose devices are emulated: the compute host "vm".

    00:0c.0  Intel PAC with Arria 10, 8086:09c4  emulators/dfl_card.py  dfl-pci
    00:0f.0  NVMe with Sanitize, 144d:a824       emulators/nvme_disk.py nvme
    01:00.0  network card, 8086:10c9, 7 VFs      QEMU                   igb
    02:00.0  NVMe, 1b36:0010, 4 VFs              QEMU                   nvme
    03:00.0  a network card that says it is a    QEMU, modules/idshift  stub
             QAT, 8086:37c8, VFs 8086:37c9
    04:00.0  OCP time card, 1d9b:0400            emulators/time_card.py ptp_ocp
    05:00.0  GPU, 10de:26b9                      emulators/gpu.py       none
    81:00.0  random numbers, 1af4:1044           QEMU                   virtio
    00:0a.0, 00:0b.0  edu, 1234:11e8             QEMU                   none
    mtty, mtty2, mdpy  mediated devices, samples of the kernel

mtty2, 00:0b.0 and 00:12.0, a second 8086:09c4, are those of the second compute
host of the machine (vm/host2); the kernel does not know 00:12.0 before.

All are behind an emulated IOMMU. The machine has two NUMA nodes, and 81:00.0
is on node 1; of the others nobody tells. By KVM if the processor and the host
have it; everything is interpreted otherwise.
"""

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time

from tests import lab
from tests.lab import processes

SHARE = processes.RUN / 'share'
CARD = processes.RUN / 'card.json'
OTHER_CARD = processes.RUN / 'card2.json'
DISK = processes.RUN / 'disk.json'
TIME_CARD = processes.RUN / 'timecard.json'
GPU = processes.RUN / 'gpu.json'
DEVICES = ('fpga', 'timecard', 'igb', 'nvme', 'mdev', 'qat', 'edu')
#: of each nova-compute that the machine can run, its unit of systemd
HOSTS = {'vm': 'nova-compute', 'vm2': 'nova-compute-vm2'}
_numbers = itertools.count(1)


def without_kvm(processor='/proc/cpuinfo', node='/dev/kvm') -> str:
    """Return why QEMU has to interpret the machine, a clause; '' with KVM."""
    with open(processor) as file:
        if {'vmx', 'svm'}.isdisjoint(file.read().split()):
            return 'the processor has neither vmx nor svm'
    try:
        os.close(os.open(node, os.O_RDWR))
    except OSError as error:
        return f'{node} does not open ({error.strerror})'
    return ''


def qemu(is_interpreted):
    """QEMU's command line.

    The root ports are always there, so that bus numbers never move.
    """
    def emulated(name, slot, bus='pcie.0'):
        return ['-device', json.dumps({
            'driver': 'vfio-user-pci', 'id': name, 'bus': bus, 'addr': slot,
            'socket': {'type': 'unix', 'path': f'/lab/{name}.sock'}})]
    command = [
        'qemu-system-x86_64', '-name', 'vm',
        *(('-accel', 'tcg,thread=multi,tb-size=512', '-machine', 'q35')
          if is_interpreted else
          # without "split" intel-iommu remaps no interrupts
          ('-accel', 'kvm', '-machine', 'q35,kernel-irqchip=split')),
        '-cpu', 'max', '-smp', '2', '-m', '3G',
        '-object', 'memory-backend-ram,id=m0,size=1536M',
        '-object', 'memory-backend-ram,id=m1,size=1536M',
        '-numa', 'node,nodeid=0,cpus=0,memdev=m0',
        '-numa', 'node,nodeid=1,cpus=1,memdev=m1',
        '-device', 'intel-iommu,intremap=on,caching-mode=on',
        '-nodefaults', '-no-user-config', '-display', 'none',
        '-qmp', 'unix:/lab/qmp.sock,server=on,wait=off',
        '-chardev', 'socket,id=con,path=/lab/serial.sock,server=on,wait=off,'
                    'logfile=/lab/log/console.log',
        '-serial', 'chardev:con',
        '-kernel', '/image/vmlinuz', '-initrd', '/image/initrd',
        '-append', 'console=ttyS0 root=/dev/vda rw intel_iommu=on iommu=nopt '
                   'mitigations=off numa_balancing=disable '
                   'quiet systemd.show_status=0 audit=0 '
                   # a busy host lets ticks be missed; a panic tries again
                   'no_timer_check panic=1 '
                   'net.ifnames=0',
        '-drive', 'if=none,id=d0,file=/lab/disk.qcow2,format=qcow2,'
                  'cache=unsafe',
        '-device', 'virtio-blk-pci,drive=d0,addr=0x3',
        '-fsdev', f'local,id=f0,path={SHARE},security_model=none',
        '-device', 'virtio-9p-pci,fsdev=f0,mount_tag=lab,addr=0x4',
        '-object', 'rng-builtin,id=r0',
        '-device', 'virtio-rng-pci,rng=r0,addr=0x5',
        '-netdev', 'user,id=net0,hostfwd=tcp:10.0.2.15:22-:22',
        '-device', 'virtio-net-pci,netdev=net0,addr=0x6']
    for i, slot in enumerate(('0x8', '0x9', '0xe', '0x11', '0x13'), 1):
        command += ['-device', f'pcie-root-port,id=rp{i},chassis={i},'
                               f'slot={i},addr={slot}']
    return command + [
        '-device', 'igb,bus=rp1,id=igb0',
        # VFs need a subsystem, and queues and vectors set aside for them
        '-device', 'nvme-subsys,id=ss0,nqn=lab0',
        '-device', 'nvme,id=nvme0,serial=lab0,bus=rp2,subsys=ss0,'
                   'sriov_max_vfs=4,max_ioqpairs=26,msix_qsize=27,'
                   'sriov_vq_flexible=16,sriov_vi_flexible=12,'
                   'sriov_max_vq_per_vf=4,sriov_max_vi_per_vf=3',
        '-drive', 'if=none,id=n0,file=/lab/nvme.raw,format=raw,cache=unsafe',
        '-device', 'nvme-ns,drive=n0,nsid=1,shared=on',
        '-drive', 'if=none,id=n1,file=/lab/nvme1.raw,format=raw,cache=unsafe',
        '-device', 'nvme-ns,drive=n1,nsid=2,shared=on',
        '-device', 'igb,bus=rp3,id=qat0',
        '-device', 'edu,addr=0xa', '-device', 'edu,addr=0xb',
        *emulated('fpga', '0xc'), *emulated('fpga2', '0x12'),
        *emulated('sanitize', '0xf'),
        *emulated('timecard', '0x0', 'rp4'), *emulated('gpu', '0x0', 'rp5'),
        # after devices without a bus, which would go below it
        '-device', 'pxb-pcie,id=far,bus_nr=0x80,numa_node=1,addr=0x10',
        '-device', 'pcie-root-port,id=rp6,chassis=6,slot=6,bus=far',
        '-object', 'rng-builtin,id=r1',
        '-device', 'virtio-rng-pci,rng=r1,bus=rp6']


def power_on() -> None:
    """Start QEMU and the emulators, on a disk as it was built."""
    shutil.rmtree(SHARE, ignore_errors=True)
    shutil.copytree(lab.LAB / 'vm', SHARE)
    (SHARE / 'queue').mkdir()
    shutil.copytree(lab.LAB / 'conf', SHARE / 'conf')
    shutil.copytree(processes.RUN / 'ssh', SHARE / 'ssh')
    card()
    disk()
    time_card()
    gpu()
    _tell(OTHER_CARD, {})
    (processes.RUN / 'disk.qcow2').unlink(missing_ok=True)
    processes.call('vm', 'qemu-img', 'create', '-q', '-f', 'qcow2', '-F',
                   'raw', '-b', '/image/disk.ext4', '/lab/disk.qcow2')
    for name in ('nvme.raw', 'nvme1.raw', 'sanitize.raw'):
        with open(processes.RUN / name, 'wb') as file:
            file.truncate(64 << 20)
    connect()


def connect() -> None:
    """Start QEMU on the disk as it is; FPGA cards lose what they carried."""
    (SHARE / 'booted').unlink(missing_ok=True)
    for name, emulator, *arguments in (
            ('fpga', 'dfl_card', CARD), ('fpga2', 'dfl_card', OTHER_CARD),
            ('timecard', 'time_card', TIME_CARD), ('gpu', 'gpu', GPU),
            ('sanitize', 'nvme_disk', processes.RUN / 'sanitize.raw', DISK)):
        if not processes.running(name):
            processes.start(
                name, sys.executable, lab.LAB / f'emulators/{emulator}.py',
                f'/lab/{name}.sock', *arguments)
        processes.wait(name, (processes.RUN / f'{name}.sock').exists)
    processes.start('vm', *qemu(without_kvm()))


def card(**faults) -> None:
    """Tell the FPGA card what to do wrong; emulators/dfl_card.py has the keys.

    Without any it works.
    """
    _tell(CARD, faults)


def disk(**faults) -> None:
    """Tell the disk with Sanitize what to do wrong; emulators/nvme_disk.py has
    the keys."""
    _tell(DISK, faults)


def time_card(**faults) -> None:
    """Tell the time card what to do wrong; emulators/time_card.py has the
    keys."""
    _tell(TIME_CARD, faults)


def gpu(**faults) -> None:
    """Tell the GPU what to do wrong; emulators/gpu.py has the keys."""
    _tell(GPU, faults)


def _tell(file, faults):
    new = file.with_suffix('.new')
    new.write_text(json.dumps(faults))
    new.rename(file)


def monitor(line) -> str:
    """Give a command to QEMU's monitor, for people; what it prints."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(60)
        channel.connect('/lab/qmp.sock')
        with channel.makefile('rw') as file:
            for command in (
                    {'execute': 'qmp_capabilities'},
                    {'execute': 'human-monitor-command',
                     'arguments': {'command-line': line}}):
                file.write(json.dumps(command))
                file.flush()
                # a greeting, and events, come before
                while 'return' not in (
                        answer := json.loads(file.readline())):
                    if 'error' in answer:
                        raise lab.Failed(f'QEMU refuses {line}: {answer}')
            return answer['return'].strip()


def wait_booted() -> None:
    booted = SHARE / 'booted'
    processes.wait('vm', lambda: booted.exists() and booted.read_text(),
                   900)
    if booted.read_text().strip() != 'ok':
        raise lab.Failed(f'Drivers of the virtual machine did not come up: '
                         f'{booted.read_text()}')


def run(script, seconds=600, show=False):
    """Run a bash script in the machine.

    :returns: (exit status, standard output and error); 124: it ran out of
        time, and is left running.
    """
    name = f'{time.time_ns()}-{os.getpid()}-{next(_numbers)}'
    base = SHARE / 'queue' / name
    base.with_suffix('.new').write_text(script + '\n')
    base.with_suffix('.new').rename(base.with_suffix('.sh'))
    out, result = base.with_suffix('.out'), base.with_suffix('.rc')
    end = time.monotonic() + seconds
    shown = 0
    while True:
        done = result.exists()
        if show and out.exists():
            with open(out, 'rb') as file:
                file.seek(shown)
                data = file.read()
            shown += len(data)
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
        if done:
            break
        if not processes.running('vm'):
            raise lab.Failed(f'The virtual machine ended:\n'
                             f'{processes.tail("vm")}')
        if time.monotonic() > end:
            return 124, f'no end after {seconds} s'
        time.sleep(0.05)
    code, text = int(result.read_text()), out.read_text(errors='replace')
    for path in (base.with_suffix('.sh'), out, result):
        path.unlink(missing_ok=True)
    return code, text.strip()


def check(script, seconds=600) -> str:
    """Like run(), for scripts that must succeed."""
    code, text = run(script, seconds)
    if code:
        raise lab.Failed(f'In the virtual machine, exit status {code} of\n'
                         f'{script}\n{text}')
    return text


def check_compute(host='vm') -> None:
    """:raises Failed: nova-compute in the machine has ended by itself."""
    unit = HOSTS[host]
    if not run(f'systemctl -q is-failed {unit}', 300)[0]:
        raise lab.Failed(f'{unit} ended: ' + run(
            f'tail -n 20 /var/log/{unit}.log', 300)[1])


def put(source, target) -> None:
    box = SHARE / f'put-{time.time_ns()}'
    shutil.copy(source, box)
    try:
        check(f'mkdir -p $(dirname {shlex.quote(str(target))}); '
              f'cp /mnt/lab/{box.name} {shlex.quote(str(target))}')
    finally:
        box.unlink()


def reboot() -> None:
    """Ask the system to reboot; cards keep what they carry."""
    (SHARE / 'booted').unlink()
    run('sync; (sleep 0.5; systemctl reboot) > /dev/null 2>&1 &', 60)
    wait_booted()


def serial(command, seconds=60) -> str:
    """One command on the serial line, for when the runner does not answer."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect('/lab/serial.sock')
        line.settimeout(1)
        line.sendall(f"\n{command}; echo END''MARK $?\n".encode())
        data, end = b'', time.monotonic() + seconds
        while (time.monotonic() < end
               and not re.search(rb'ENDMARK \d+\r?\n', data)):
            with contextlib.suppress(TimeoutError):
                data += line.recv(65536)
    return re.sub(r'\x1b\[[?0-9;]*[a-zA-Z]|\r', '',
                  data.decode(errors='replace'))


def main():
    """lab-vm [COMMAND]: a command in the machine, or its serial line."""
    if len(sys.argv) > 1:
        sys.exit(run(' '.join(sys.argv[1:]), 86400, show=True)[0])
    print('the serial line of the virtual machine; Ctrl-] leaves it')
    sys.exit(subprocess.run(
        ['socat', '-,raw,echo=0,escape=0x1d',
         'UNIX-CONNECT:/lab/serial.sock']).returncode)


if __name__ == '__main__':
    main()
