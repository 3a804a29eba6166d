# Licensed under the Apache License, Version 2.0. See LICENSE.

import json
import re

from tests import lab
from tests.lab import cloud
from tests.lab import machine
from tests.lab import processes
from tests.lab.trials import base
from tests.lab.trials import kinds

DISK = '0000:00:0f.0'
NOTHING = [('00000000', '00000000')]
CLEARING = {'accel:clears': 'memory',
            'accel:region_type_id': cloud.INTERFACE}


def newest_record():
    """The newest hand-over."""
    found = json.loads(machine.check(
        '/opt/openstack/bin/nova-accel handovers -f json'))[-1]
    print(f'    {found}')
    return found


class Handover(base.Trial):
    """The guest leaves a secret in a register of its function and in the
    memory of the card."""

    def setUp(self):
        super().setUp()
        self.function = self.cloud.bitstream()
        self.flavor = self.cloud.fpga(self.function)

    def boot(self):
        server = self.cloud.boot(self.flavor)
        self.assertGuestHas(server, self.function)
        return server

    def found(self, server):
        """(register, memory) that the guest found, as it printed them."""
        return re.findall(r'^AFU register=([0-9a-f]{8}) memory=([0-9a-f]{8})$',
                          self.cloud.console(server), re.MULTILINE)

    def clearing_image(self):
        self.cloud.bitstream(clears_memory=True, properties=CLEARING)

    def test_1_registers_and_memory(self):
        """The next guest finds neither registers nor memory of the last one.

        The memory without a clearing image of the operator is found.
        """
        self.cloud.delete(self.boot())
        server = self.boot()
        register, memory = self.found(server)[0]
        self.assertEqual('00000000', register)
        self.assertNotEqual('00000000', memory)
        self.cloud.delete(server)
        self.wait_clean()
        self.clearing_image()
        self.cloud.delete(self.boot())
        self.assertEqual(NOTHING, self.found(self.boot()))
        self.assertIn('cleared with image', str(newest_record()))

    def test_2_clearing_that_fails(self):
        """A card that cannot be cleared is offered to no server until it is.

        The reason is in the log, and it is tried again.
        """
        self.clearing_image()
        server = self.boot()
        machine.card(pr_error='crc')
        self.cloud.delete(server)
        self.cloud.wait('a fence', lambda: 'CUSTOM_ACCELERATOR_FENCED' in
                        self.cloud.providers()[base.REGION]['traits'])
        self.assertIn('not given to another server', self.compute.log(200))
        _server, fault = self.cloud.refused(self.flavor, host=None)
        self.assertIn('No valid host', fault)
        machine.card()
        self.wait_clean()
        self.cloud.wait('an offer', lambda: 'CUSTOM_ACCELERATOR_FENCED' not in
                        self.cloud.providers()[base.REGION]['traits'])
        self.assertEqual(NOTHING, self.found(self.boot()))

    def test_3_killed_while_it_clears(self):
        """nova-compute is killed while the region is cleared: it goes on when
        it starts."""
        self.clearing_image()
        server = self.boot()
        machine.card(pr_seconds=6)
        before = self.programmings_begun()
        self.cloud.delete(server)
        self.cloud.wait('programming',
                        lambda: self.programmings_begun() > before)
        self.compute.kill()
        machine.card()
        self.compute.start()
        self.wait_clean()
        self.assertEqual(NOTHING, self.found(self.boot()))


class Sanitize(base.Trial):
    """The guest has a disk whole, and leaves a secret in a block of it."""

    SECRET = '5ec2e700'
    #: where the guest finds it, it deletes the namespaces
    DELETE = 0xde1e7e00

    def setUp(self):
        super().setUp()
        self.flavor = self.cloud.of_profile(self.group(
            'SSD', **{'trait:CUSTOM_SSD_SAMSUNG': 'required'}))

    def assertGuestFinds(self, expected):
        """Boot a server; it.

        :param expected: what its guest read from the block before it left the
            secret there.
        """
        server = self.cloud.boot(self.flavor)
        self.assertEqual({DISK: {'CUSTOM_ACCELERATOR_SSD': 1}},
                         self.cloud.allocations(server))
        self.assertIn(f'NVME status=0000 found={expected} left={self.SECRET}',
                      self.cloud.console(server))
        self.assertEqual(self.SECRET, self.block())
        return server

    def block(self):
        """What the medium has there, whatever the controller says."""
        with open(processes.RUN / 'sanitize.raw', 'rb') as medium:
            medium.seek(2048 * 512)
            return f'{int.from_bytes(medium.read(4), "little"):08x}'

    def put(self, number):
        """Write a number there, past the controller."""
        with open(processes.RUN / 'sanitize.raw', 'r+b') as medium:
            medium.seek(2048 * 512)
            medium.write(number.to_bytes(4, 'little'))

    def is_fenced(self):
        return 'CUSTOM_ACCELERATOR_FENCED' in self.cloud.providers()[DISK][
            'traits']

    def wait_offer(self):
        self.wait_clean()
        self.cloud.wait('an offer', lambda: not self.is_fenced())

    def operations(self):
        """What became of each sanitize operation since the lab began."""
        text = (processes.LOG / 'sanitize.log').read_text()
        return [line for line in text.splitlines()
                if line.startswith('Sanitize: ')]

    def test_1_next_guest(self):
        """The next guest reads zeros from the disk, which was sanitized."""
        machine.disk(sanitize_seconds=6)
        self.cloud.delete(self.assertGuestFinds('00000000'))
        self.wait_offer()
        self.assertEqual('00000000', self.block())
        self.assertEqual('sanitize crypto', newest_record()['Method'])
        self.assertGuestFinds('00000000')

    def test_2_that_fails(self):
        """A disk whose Sanitize fails is offered to no server until it works.

        It leaves the failure mode, and is sanitized again.
        """
        server = self.assertGuestFinds('00000000')
        begin = len(self.operations())
        machine.disk(sanitize_fails=True)
        self.cloud.delete(server)
        self.cloud.wait('a fence', self.is_fenced)
        self.cloud.wait('a failure', lambda: 'ended in failure mode'
                        in self.compute.log(200))
        self.assertEqual(self.SECRET, self.block())
        self.assertIn('ended in failure mode', newest_record()['Result'])
        _server, fault = self.cloud.refused(self.flavor, host=None)
        self.assertIn('No valid host', fault)
        machine.disk()
        self.wait_offer()
        self.assertEqual(
            ['Sanitize: crypto begins', 'Sanitize: failed',
             'Sanitize: failure mode ends'], self.operations()[begin:begin + 3])
        self.assertEqual('Sanitize: ok', self.operations()[-1])
        self.assertEqual('clean', newest_record()['Result'])
        self.assertGuestFinds('00000000')

    def test_3_guest_that_deletes_its_namespaces(self):
        """A guest deletes the namespaces: the next one has them again."""
        self.put(self.DELETE)
        server = self.cloud.boot(self.flavor)
        self.assertIn('NVME deletes, status=0000', self.cloud.console(server))
        self.assertEqual(f'{self.DELETE:08x}', self.block())
        self.cloud.delete(server)
        self.wait_offer()
        self.assertEqual('clean', newest_record()['Result'])
        self.assertGuestFinds('00000000')


class Format(base.Trial):
    """The guest has a VF of a disk, and leaves a secret in a block of the
    namespace that is its own."""

    def setUp(self):
        super().setUp()
        machine.put(lab.LAB / 'nvme_on_kernel.py',
                    '/var/tmp/nvme_on_kernel.py')
        self.addCleanup(self.operator, 'take', '')
        self.operator('give', f'[accel]\nhandover = {kinds.NVME}=clear\n')
        self.cloud.wait('an offer', self.is_offered)

    def is_offered(self):
        found = self.cloud.providers()[kinds.NVME]
        inventory = found['inventories'].get('CUSTOM_ACCELERATOR_SSD', {})
        return (inventory.get('total') == 1 and not inventory['reserved']
                and 'CUSTOM_ACCELERATOR_FENCED' not in found['traits'])

    def operator(self, what, configuration):
        self.cloud.clear()
        self.wait_clean()
        self.compute.stop()
        print('    ' + machine.check(
            '/opt/openstack/bin/python -W ignore /var/tmp/nvme_on_kernel.py '
            f'{kinds.NVME} {what}').replace('\n', '\n    '))
        self.compute.configure(configuration)
        self.compute.start()

    def test_1_next_guest(self):
        """The namespace of a VF is erased by the PF, and the VF is online
        for the next guest, which reads zeros."""
        flavor = self.cloud.of_profile(self.group('SSD', **kinds.OF_QEMU))
        for _ in range(2):
            server = self.cloud.boot(flavor)
            self.assertIn('NVME status=0000 found=00000000 left=5ec2e700',
                          self.cloud.console(server))
            self.cloud.delete(server)
            self.wait_clean()
            record = newest_record()
            self.assertEqual(('format by the PF', 'clean'),
                             (record['Method'], record['Result']))
            # the VF was offline meanwhile, as a look at it may have seen
            self.cloud.wait('an offer', self.is_offered)


class Gpu(base.Trial):
    """A GPU that is alone below its port clears its memory as it boots."""

    GPU = '0000:05:00.0'

    def setUp(self):
        super().setUp()
        self.addCleanup(machine.gpu)
        self.addCleanup(self.restart, '')
        self.restart('[accel]\nenabled_drivers = '
                     'dfl,nvme,pci,qat,timecard,vgpu,gpu\n'
                     f'handover = 0000:02:00.0=none,{self.GPU}=shown\n')
        self.cloud.wait('an offer', self.is_offered)
        self.flavor = self.cloud.of_profile(self.group('GPU'))

    def is_offered(self):
        found = self.cloud.providers().get(self.GPU, {})
        return ('CUSTOM_ACCELERATOR_GPU' in found.get('inventories', ())
                and 'CUSTOM_ACCELERATOR_FENCED' not in found['traits'])

    def boot(self):
        server = self.cloud.boot(self.flavor)
        self.assertIn(' 10de:26b9 class=030200', self.cloud.console(server))
        return server

    def resets(self):
        """What was done with the GPU since the lab began."""
        text = (processes.LOG / 'gpu.log').read_text()
        return [line for line in text.splitlines() if line.endswith('reset')
                or line.startswith('write')]

    def shown(self):
        return json.loads(newest_record()['Shown'])

    def test_1_cleared(self):
        """The bus of a GPU is reset through VFIO, and it is read that it has
        booted and cleared its memory; nothing is written to it."""
        server = self.boot()
        begin = len(self.resets())
        self.cloud.delete(server)
        self.wait_clean()
        self.assertIn('bus reset', self.resets()[begin:])
        self.assertNotIn('write', ''.join(self.resets()[begin:]))
        record, shown = newest_record(), self.shown()
        self.assertEqual(('reset bus', 'clean'),
                         (record['Method'], record['Result']))
        self.assertEqual(
            ('cleared', 'VFIO', {'ECC': 'off'}),
            (shown['memory'], shown['read_by'], shown['modes']))
        self.assertEqual(
            [['0x0', '0x3ff'], ['0x0', '0x1']],
            [values[-2:] for values in shown['words'].values()])
        self.boot()

    def test_2_clearing_that_does_not_end(self):
        """A GPU whose clearing does not end is offered to no server until it
        does."""
        server = self.boot()
        machine.gpu(clears=False)
        self.cloud.delete(server)
        self.cloud.wait('a fence', lambda: not self.is_offered())
        self.cloud.wait('a reason', lambda: 'did not change as expected'
                        in self.compute.log(200))
        _server, fault = self.cloud.refused(self.flavor, host=None)
        self.assertIn('No valid host', fault)
        machine.gpu()
        self.wait_clean()
        self.cloud.wait('an offer', self.is_offered)
        self.assertEqual('cleared', self.shown()['memory'])

    def test_3_mode_that_a_guest_has_set(self):
        """A GPU with another mode than after its last server is offered to no
        server until it is restored."""
        self.cloud.delete(self.boot())
        self.wait_clean()
        server = self.boot()
        machine.gpu(mode=1)
        self.cloud.delete(server)
        self.cloud.wait('a reason', lambda: 'left ECC on in place of off'
                        in self.compute.log(200))
        machine.gpu()
        self.wait_clean()
        self.assertEqual({'ECC': 'off'}, self.shown()['modes'])


class Reset(base.Trial):
    """A function that a server had is reset before the next one gets it."""

    EDU = '0000:00:0a.0'

    def test_1_function_with_a_reset(self):
        """A VF of a network card is reset after its server."""
        self.cloud.delete(self.cloud.boot(
            self.cloud.of_profile(self.group('NIC'))))
        self.wait_clean()
        record = newest_record()
        self.assertEqual(('reset', 'clean'),
                         (record['Method'].split()[0], record['Result']))

    def test_2_function_without_a_reset(self):
        """A function that cannot be reset is offered only where the operator
        says so."""
        rule = ('[accel]\n'
                'pci_devices = vendor=8086 product=10c9 type=NIC\n'
                f'pci_devices = address={self.EDU} type=EDU\n')
        self.addCleanup(self.restart, '')
        self.restart(rule)
        self.cloud.wait('the function', lambda: (
            'cannot be reset between two servers' in machine.check(
                '/opt/openstack/bin/nova-accel discover --driver pci '
                '-f value -c Health')))
        flavor = self.cloud.of_profile(self.group('EDU'))
        _server, fault = self.cloud.refused(flavor, host=None)
        self.assertIn('No valid host', fault)
        self.restart(f'{rule}handover = 0000:02:00.0=none,{self.EDU}=none\n')
        self.cloud.wait('an offer', self.is_offered)
        for _ in range(2):
            server = self.cloud.boot(flavor)
            self.assertIn('EDU id=010000ed inv=edcba987',
                          self.cloud.console(server))
            self.cloud.delete(server)
        self.wait_clean()

    def is_offered(self):
        found = self.cloud.providers().get(self.EDU, {})
        return ('CUSTOM_ACCELERATOR_EDU' in found.get('inventories', ())
                and 'CUSTOM_ACCELERATOR_FENCED' not in found['traits'])

    def restart(self, text):
        self.compute.stop()
        self.compute.configure(text)
        self.compute.start()
