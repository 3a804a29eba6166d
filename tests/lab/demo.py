# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The story of make demo on the kernel of the lab: python -m tests.lab.demo.

In the room of a lab that is up; make lab DEMO=1 calls it. One host, whose card
is emulated and whose kernel, drivers, libvirt, QEMU and nova-compute are real.
What a card carries is read by the guest itself, from the registers of the card.
As in make demo, each line was checked before it is printed.
"""

import sys
import time
import unittest
import uuid

from tests.demo import page
from tests.demo import screen
from tests.lab import machine
from tests.lab import processes
from tests.lab.trials import base

SCREEN = screen.Screen(wait=screen.wanted())
INTRODUCTION = (
    'Written by <code>make lab DEMO=1</code> from what Nova, Placement and the '
    'guests answered. Real Nova, Placement, Glance, keystone, kernel, drivers, '
    'libvirt and QEMU; the card is emulated. Each statement was checked before '
    'it was written.')


class Story(base.Trial):

    def setUp(self):
        SCREEN.say(SCREEN.paint('nova_accel', '1')
                   + ': an FPGA function reaches a guest on a real kernel')
        SCREEN.say('Each line was checked before it was printed. The machine '
                   'is interpreted: seconds mean nothing.')
        super().setUp()
        #: function -> what the story calls it
        self.names = {}
        self.servers = {}

    def runTest(self):
        SCREEN.step('A host with an FPGA card, in Placement',
                    'lab-vm lspci -n -s 00:0c.0',
                    'lab-vm nova-accel discover --driver dfl')
        self.assertIn(base.FPGA, machine.check('lspci -n -s 00:0c.0'))
        self.show()
        SCREEN.line(f'Linux {machine.check("uname -r")}; the card is '
                    f'{base.FPGA}, a PAC with Arria 10, and its driver '
                    f'dfl-pci.')
        crypto = self.offer('crypto')
        self.first(crypto)
        self.warm(crypto)
        self.other()
        self.refused(crypto)
        self.operations()
        SCREEN.step('All servers are deleted', 'openstack server delete three')
        self.delete('three')
        self.assertNothingInUse()
        self.show()
        SCREEN.line('Nothing is in use in Placement. The function stays loaded '
                    'for the next server.')

    def offer(self, name):
        SCREEN.step('The operator offers a function: an image in Glance, a '
                    'device profile, a flavor',
                    f'openstack image create {name} --file {name}.gbs '
                    f'--public \\\n  --property accel:function_id=<function>',
                    'vi /etc/nova/device_profiles/crypto.yaml',
                    f'openstack flavor create small-{name} ... \\\n'
                    f'  --property accel:device_profile={name}')
        flavor = self.cloud.fpga(self.function(name))
        SCREEN.line(f'Tenants see the flavor small-{name}: a server with one '
                    f'FPGA that carries the function {name}.')
        return flavor

    def function(self, name):
        function = str(uuid.uuid4())
        self.names[function] = name
        return self.cloud.bitstream(function)

    def first(self, flavor):
        SCREEN.step('Server one wants crypto. The card does not carry it, and '
                    'is programmed',
                    'openstack server create one --flavor small-crypto ...')
        before = len(self.programmings())
        self.create('one', flavor, 'crypto')
        self.assertEqual(['PR of port 0, 4096 bytes: ok'],
                         self.programmings()[before:])
        self.show()
        SCREEN.line('The kernel\'s own ioctl programmed the card. The guest '
                    'read the function crypto from the registers of its card.')

        SCREEN.step('Server one is deleted. Its card is cleaned and keeps the '
                    'function', 'openstack server delete one')
        self.delete('one')
        self.show()
        SCREEN.line('The guest had the whole card and may have changed it: the '
                    'card was programmed again.')

    def warm(self, flavor):
        SCREEN.step('Server two wants crypto, too. It is loaded: nothing is '
                    'programmed',
                    'openstack server create two --flavor small-crypto ...')
        before = len(self.programmings())
        self.create('two', flavor, 'crypto')
        self.assertEqual(before, len(self.programmings()))
        self.show()
        SCREEN.step('Server two is deleted', 'openstack server delete two')
        self.delete('two')
        self.show()

    def other(self):
        SCREEN.step('Server three wants zip, in place of crypto',
                    'openstack server create three --flavor small-zip ...')
        self.create('three', self.cloud.fpga(self.function('zip')), 'zip')
        self.show()

    def refused(self, flavor):
        SCREEN.step('A request that fails says why, to the one who asks',
                    'openstack server show four -c fault')
        four, fault = self.cloud.refused(flavor, host=None)
        self.assertIn('No valid host', fault)
        SCREEN.line(f'The only card is in use: "{fault}"')
        self.cloud.delete(four)

    def operations(self):
        SCREEN.step('Operations of a server: it keeps its card',
                    *(f'openstack server {operation} three' for operation in (
                        'stop', 'start', 'reboot --hard', 'rescue', 'unrescue',
                        'rebuild', 'shelve', 'unshelve')))
        api, server = self.cloud.compute, self.servers['three']
        image = self.cloud.probe().id
        for text, steps in (
                ('stop, start', [(api.stop_server, (), 'SHUTOFF'),
                                 (api.start_server, (), 'ACTIVE')]),
                ('hard reboot', [(api.reboot_server, ('HARD',), 'ACTIVE')]),
                ('rescue, unrescue', [
                    (api.rescue_server, (None, image), 'RESCUE'),
                    (api.unrescue_server, (), 'ACTIVE')]),
                ('rebuild', [(api.rebuild_server, (image,), 'ACTIVE')])):
            with SCREEN.timed(text) as line:
                for call, arguments, status in steps:
                    call(server, *arguments)
                    self.cloud.settled(server, status)
                self.assertGuestHas(server, self.carried())
                line.result = 'as before: card A of vm, zip'
        with SCREEN.timed('shelve, unshelve') as line:
            api.shelve_server(server)
            self.cloud.wait('the server offloaded', lambda: api.get_server(
                server.id).status == 'SHELVED_OFFLOADED')
            self.assertEqual({}, self.cloud.in_use())
            api.unshelve_server(server)
            self.cloud.settled(server, 'ACTIVE')
            self.assertGuestHas(server, self.carried())
            line.result = 'released, and given again: card A of vm, zip'
        self.show()

    # What a user does and sees

    def create(self, name, flavor, function):
        began = time.monotonic()
        server = self.servers[name] = self.cloud.boot(flavor)
        seconds = time.monotonic() - began
        carried, = self.cloud.guest_function(server)
        self.assertEqual(function, self.names[carried])
        SCREEN.line(f'ACTIVE after {seconds:.0f} s.')

    def delete(self, name):
        """Until the card is clean, which the user does not wait for."""
        self.cloud.delete(self.servers.pop(name))
        self.wait_clean()

    def carried(self):
        """The function of the card, as Placement shows it."""
        function, = self.cloud.functions(base.REGION)
        return function

    def show(self):
        found = [self.names.get(function, 'another')
                 for function in self.cloud.functions(base.REGION)]
        used = [name for name, server in self.servers.items()
                if base.REGION in self.cloud.allocations(server)]
        SCREEN.cards([screen.Card('A', 'vm', *(found or ['empty']),
                                  *used[:1])])


def main():
    result = unittest.TestResult()
    Story().run(result)
    for _, trace in result.errors + result.failures:
        SCREEN.say(SCREEN.paint(trace, 31))
    if result.wasSuccessful():
        page.write(SCREEN.steps, processes.RUN, INTRODUCTION)
    return not result.wasSuccessful()


if __name__ == '__main__':
    sys.exit(main())
