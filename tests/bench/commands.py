# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the commands of nova-accel cost on a host with 64 devices.

Half of the devices, FPGA cards of a region each, are held. Times are of the
processor, and of the fastest of some runs, so that they can be compared where
other processes run. Those of ``tree`` are without Placement, which runs in the
same process here, and without loading openstacksdk, which stands beside it.
Run with ``python -m tests.bench.commands [runs]``.
"""

import contextlib
import io
import logging
import os
import resource
import subprocess
import sys
import threading
import time
import uuid

import fixtures

from nova_accel.attach import claims
from nova_accel.cmd import main
from nova_accel.cmd import tree
from nova_accel import model
from nova_accel import naming
from tests.unit import host
from tests.unit import placement

DEVICES = 64
FPGA = 'CUSTOM_ACCELERATOR_FPGA'


def address(number):
    return f'0000:{number:02x}:00.0'


def processor(*arguments):
    """Seconds of a process of its own."""
    def spent():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime
    before = spent()
    subprocess.run([sys.executable, *arguments], check=True,
                   capture_output=True)
    return spent() - before


class Bench(fixtures.Fixture):

    def _setUp(self):
        simulated = self.useFixture(host.SimulatedHost(*(
            {'address': address(n), 'vfs': 1} for n in range(DEVICES))))
        self.config = os.path.join(simulated.directory, 'nova.conf')
        with open(self.config, 'w') as file:
            file.write(f'[DEFAULT]\nhost = compute1\n'
                       f'state_path = {simulated.directory}\n[accel]\n'
                       f'enabled_drivers = dfl\n'
                       f'simulated_host = {simulated.path}\n')
        store = claims.ClaimStore(os.path.join(
            simulated.directory, claims.file_name('compute1')))
        store.settle(done=[model.EVERYTHING])
        for number in range(0, DEVICES, 2):
            server = str(uuid.uuid4())
            store.add([model.Claim(
                str(uuid.uuid4()), server, model.Role.CURRENT,
                str(uuid.uuid4()), FPGA, '1', address(number), 0,
                model.AttachHandle(model.HandleType.PCI,
                                   host.vf(address(number))),
                server, state=model.ClaimState.BOUND)])

    def local(self, *command):
        return processor('-m', main.__name__, *command, '--config-file',
                         self.config)


class TreeBench(fixtures.Fixture):
    """The same devices in Placement."""

    def _setUp(self):
        logging.disable(logging.WARNING)
        self.addCleanup(logging.disable, logging.NOTSET)
        self.services = self.useFixture(placement.Services())
        root = self.services.provider('compute1', inventory={'VCPU': 8})
        for number in range(DEVICES):
            device = model.Device(
                address(number), 'FPGA', 'INTEL', 'PAC_ARRIA10', '8086',
                '09c4', 'dfl')
            card = self.services.provider(
                f'compute1_accel_{device.address}', root,
                traits=naming.device_traits(device))
            region = self.services.provider(
                f'compute1_accel_{device.address}_region0', card, {FPGA: 1},
                naming.region_traits(device, model.Region(
                    0, host.plain(host.INTERFACE), host.plain(host.FIRST),
                    function_name='nlb0')))
            if number % 2 == 0:
                self.services.allocate(str(uuid.uuid4()), region, **{FPGA: 1})

    def measure(self):
        """(seconds of ours, requests)."""
        elsewhere, lock = [0.0], threading.Lock()
        answer = self.services._answer

        def timed(*arguments):
            start = time.thread_time()
            try:
                return answer(*arguments)
            finally:
                with lock:
                    elsewhere[0] += time.thread_time() - start
        self.services._answer = timed
        self.services.asked.clear()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                command = main.NovaAccel()
                command.command_manager.add_command('tree', tree.Tree)
                start = time.process_time()
                command.run(['-q', 'tree', 'compute1'])
                spent = time.process_time() - start
        finally:
            self.services._answer = answer
        return spent - elsewhere[0], len(self.services.asked)


def run():
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5

    def show(what, measure, more=''):
        fastest = min(measure() for _ in range(runs))
        print(f'{what:24} {fastest:6.2f}{more}', flush=True)

    print(f'{DEVICES} devices, seconds of the processor, the fastest of '
          f'{runs} runs')
    show('--version', lambda: processor('-m', main.__name__, '--version'))
    with Bench() as bench:
        for command in ('claims', 'discover', 'discover --long'):
            show(command, lambda: bench.local(*command.split()))
    show('loading openstacksdk', lambda: processor('-c', 'import openstack'))
    with TreeBench() as bench:
        # loads it
        _, requests = bench.measure()
        show('tree, ours', lambda: bench.measure()[0],
             f', {requests} requests')


if __name__ == '__main__':
    run()
