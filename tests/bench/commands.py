# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What the commands of nova-accel cost on a host with 64 devices.

Half of the devices, FPGA cards of a region each, are held, and are in
Placement. Each command runs in this process, with its modules loaded, and the
fastest of some runs counts. Run with ``python -m tests.bench.commands [runs]``.

"ours" are seconds of the processor without those of the simulated kernel, of
Placement, which runs in the same process, and of the libraries that send
requests: what those cost goes with the number of requests. "sysfs" are reads
of attributes, directories and links, "files" are files that are opened beside
them, and "requests" go to Placement, Nova and Glance. The last lines are
processes of their own with all that they import: Python with the command, the
list of commands, discover on a host with one card, and a library that only
some commands load.
"""

import configparser
import contextlib
import functools
import importlib.metadata
import os
import pathlib
import resource
import subprocess
import sys
import threading
import time
import uuid

import fixtures
from keystoneauth1 import session

from nova_accel.cmd import main
from nova_accel import conf
from nova_accel import model
from nova_accel import naming
from nova_accel import sim
from nova_accel.store import claim_store
from nova_accel.store import values
from tests.unit import commands
from tests.unit import host
from tests.unit import placement

DEVICES = 64
FPGA = 'CUSTOM_ACCELERATOR_FPGA'
COMMANDS = ('check', 'why 7', 'tree compute1', 'claims', 'discover',
            'discover --long', 'handovers', 'profile list', 'disable {first}',
            'capture {capture}')
PROFILE = f"""\
name: profile{{}}
groups:
- resources:{FPGA}: '1'
"""


def address(number):
    return f'0000:{number:02x}:00.0'


def command_classes(line):
    """The class of the command in a line, by its name: that of this tree,
    which may not be the installed one."""
    parser = configparser.ConfigParser()
    parser.read(pathlib.Path(__file__).parents[2] / 'setup.cfg')
    for item in parser['options.entry_points'][
            'nova_accel.commands'].strip().splitlines():
        name, _, value = (part.strip() for part in item.partition('='))
        name = name.replace('_', ' ')
        if f'{line} '.startswith(f'{name} '):
            yield name, importlib.metadata.EntryPoint(
                name, value, '').load()


class Meter:
    """Counts what others do for a command, and takes off their time."""

    def __init__(self):
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._elsewhere = 0.0
        self.sysfs = self.files = 0
        sys.addaudithook(self._opened)

    def _opened(self, event, arguments):
        if event == 'open' and not getattr(self._inside, 'depth', 0):
            self.files += 1

    def elsewhere(self, function, reads_sysfs=False):
        """The function, whose time is not ours."""
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            depth = getattr(self._inside, 'depth', 0)
            self._inside.depth = depth + 1
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside.depth = depth
                if not depth:
                    with self._lock:
                        self._elsewhere += time.thread_time() - start
                        self.sysfs += reads_sysfs
        return wrapped

    @contextlib.contextmanager
    def measuring(self):
        """Yields a list that is filled with the seconds that were ours."""
        found: list[float] = []
        self._elsewhere, self.sysfs, self.files = 0.0, 0, 0
        start = time.process_time()
        yield found
        found.append(time.process_time() - start - self._elsewhere)


class Bench(fixtures.Fixture):

    def __init__(self, meter):
        self.meter = meter

    def _setUp(self):
        self.host = self.useFixture(host.SimulatedHost(*(
            {'address': address(n), 'vfs': 1} for n in range(DEVICES))))
        self.directory = self.host.directory
        self.config = os.path.join(self.directory, 'nova.conf')
        profiles = os.path.join(self.directory, 'profiles')
        os.mkdir(profiles)
        for number in range(DEVICES):
            with open(f'{profiles}/{number}.yaml', 'w') as file:
                file.write(PROFILE.format(number))
        with open(self.config, 'w') as file:
            file.write(f'[DEFAULT]\nhost = compute1\n'
                       f'state_path = {self.directory}\n[accel]\n'
                       f'enabled_drivers = dfl\n'
                       f'device_profiles = {profiles}\n'
                       f'simulated_host = {self.host.path}\n')
        self._fill_store()
        self.services = self.useFixture(placement.Services())
        self._fill_placement()
        self._watch()

    def _fill_store(self):
        store = claim_store.ClaimStore(os.path.join(
            self.directory, claim_store.file_name('compute1')))
        store.settle(done=[values.EVERYTHING])
        for number in range(0, DEVICES, 2):
            server = str(uuid.uuid4())
            store.add([model.Claim(
                str(uuid.uuid4()), server, str(uuid.uuid4()),
                FPGA, '1', address(number), 0,
                model.AttachHandle(model.HandleType.PCI,
                                   host.vf(address(number))),
                server, state=model.ClaimState.BOUND)])
        store.set_devices({address(n): self._device(n)
                           for n in range(DEVICES)})

    def _device(self, number):
        at = address(number)
        return model.Device(
            at, 'FPGA', 'INTEL', 'PAC_ARRIA10', '8086', '09c4', 'dfl',
            regions=(model.Region(
                0, host.plain(host.INTERFACE), host.plain(host.FIRST),
                function_name='nlb0', handles=(model.AttachHandle(
                    model.HandleType.PCI, host.vf(at), parent=at),)),))

    def _fill_placement(self):
        root = self.services.provider('compute1', inventory={
            'VCPU': 8, 'MEMORY_MB': 8192, 'DISK_GB': 100})
        for number in range(DEVICES):
            device = self._device(number)
            card = self.services.provider(
                f'compute1_accel_{device.address}', root,
                traits=naming.device_traits(device))
            region = self.services.provider(
                f'compute1_accel_{device.address}_region0', card, {FPGA: 1},
                naming.region_traits(device, device.regions[0]))
            if number % 2 == 0:
                self.services.allocate(str(uuid.uuid4()), region, **{FPGA: 1})
        self.services.answer('/servers/', {'server': placement.SERVER})
        node = {'id': root, 'hypervisor_hostname': 'compute1', 'state': 'up',
                'status': 'enabled', 'service': {
                    'host': 'compute1', 'disabled_reason': None}}
        self.services.answer('/os-hypervisors/', {
            'hypervisors': [node], 'hypervisor': node})
        self.services.answer('/flavors/7', {'flavor': {
            'id': '7', 'name': 'f', 'vcpus': 1, 'ram': 512, 'disk': 1,
            'swap': '', 'OS-FLV-EXT-DATA:ephemeral': 0,
            'extra_specs': {f'resources1:{FPGA}': '1'}}})

    def _watch(self):
        for name in dir(sim.SimulatedKernel):
            value = getattr(sim.SimulatedKernel, name)
            if not name.startswith('_') and callable(value):
                self.useFixture(fixtures.MonkeyPatch(
                    f'nova_accel.sim.SimulatedKernel.{name}',
                    self.meter.elsewhere(value, name in (
                        'read', 'read_bytes', 'listdir', 'readlink',
                        'exists'))))
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.sim.SimulatedKernel.__init__',
            self.meter.elsewhere(sim.SimulatedKernel.__init__)))
        self.useFixture(fixtures.MonkeyPatch(
            'keystoneauth1.session.Session.request',
            self.meter.elsewhere(session.Session.request)))

    def run(self, command):
        """(seconds, reads of sysfs, files, requests) of a command."""
        words = command.format(
            first=address(1), capture=os.path.join(
                self.directory, f'{uuid.uuid4()}.yaml')).split()
        if words[0] != 'tree':
            words += ['--config-file', self.config]
        self.services.asked.clear()
        with self.meter.measuring() as found:
            try:
                done = commands.run('-q', *words,
                                    **dict(command_classes(command)))
            finally:
                conf.CONF.reset()
        if not done.stdout and words[0] not in ('handovers', 'capture'):
            raise RuntimeError(f'{command}: {done.stderr}')
        return (found[0], self.meter.sysfs, self.meter.files,
                len(self.services.asked))


def process(*arguments):
    """Seconds of a process of its own."""
    def spent():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime
    before = spent()
    subprocess.run([sys.executable, *arguments], check=True,
                   capture_output=True)
    return spent() - before


def run():
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f'{DEVICES} devices, seconds of the processor, the fastest of '
          f'{runs} runs\n'
          f'{"command":24}{"ours":>8}{"sysfs":>8}{"files":>8}{"requests":>10}')
    with Bench(Meter()) as bench:
        for command in COMMANDS:
            # the first run loads modules
            bench.run(command)
            ours, sysfs, files, requests = min(
                bench.run(command) for _ in range(runs))
            name = command.partition(' {')[0]
            print(f'{name:24}{ours:8.2f}{sysfs:8}{files:8}{requests:10}',
                  flush=True)
    with host.SimulatedHost({'address': address(0)}) as small:
        for what, arguments in (
                ('start of a command', ('-m', main.__name__, '--version')),
                ('--help', ('-m', main.__name__, '--help')),
                ('discover, one card', (
                    '-m', main.__name__, 'discover', '--driver', 'dfl',
                    '--simulated-host', small.path)),
                ('openstacksdk', ('-c', 'import openstack'))):
            fastest = min(process(*arguments) for _ in range(runs))
            print(f'{what:24}{fastest:8.2f}', flush=True)


if __name__ == '__main__':
    run()
