# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Ten hosts in odd states: which handles can servers get, and why not the rest?

The page "Ten hosts" has the answers. They follow from the table of
nova_accel.inventory.holds, which is the page "Why is this device withheld?".
"""

import json
import os
import pathlib
import re
import threading

import fixtures
from testtools import matchers

from nova_accel.cmd import discover
from nova_accel import conf
from nova_accel.store import claim_store
from tests.host import base
from tests.host import cloud as clouds
from tests.unit import commands
from tests.unit.host import A, FUNCTION, vf
from tests.unit import vgpus

ONE, TWO, THREE, FOUR = DISKS = [f'0000:0{n}:00.0' for n in range(2, 6)]
SSD = 'CUSTOM_ACCELERATOR_SSD'
PAGE = pathlib.Path(__file__).parents[2] / 'docs/source/operate/exam.rst'
_UUID = '[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}'
_TIME = '[0-9-]{10}T[0-9:]{8}[+]00:00'


def _answers(title):
    """Return the literal blocks of a section of the page, a line each."""
    section = re.search(
        rf'(?mi)^(?:An? |The )?{title}\n=+\n((?:(?!^=).*\n)*)',
        PAGE.read_text())[1]
    return [' '.join(block.split()) for block in re.findall(
        r'(?m)^::\n\n((?:   .*\n|\n)+)', section)]


class ExamTest(base.HostTestCase):

    def setUp(self):
        super().setUp()
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.cmd.configuration.read',
            lambda *arguments: conf.register_novas()))
        self.answers = iter(_answers(
            self._testMethodName.removeprefix('test_').replace('_', ' ')))
        self.addCleanup(lambda: self.assertEqual([], list(self.answers)))

    def start(self, pools='host', disks=DISKS, **more):
        self.POOLS = pools
        self.start_host(drivers=('nvme',),
                        nvmes=[{'address': d, **more} for d in disks])

    def boot(self, address=ONE, amount=1):
        return self.host.boot(
            {f'resources1:{SSD}': str(amount)},
            self.host.allocation(address, SSD, amount))

    def assertAnswer(self):
        """What is offered, and what ``nova-accel discover`` prints, is the
        next answer of the page in the section of this test."""
        found = sorted(self.host.inventory.table.offered().all(),
                       key=lambda offer: offer.handle.address)
        # which writes for commands what is withheld
        self.host.report()
        printed = self.discover()
        answer = []
        for offer in found:
            answer += [offer.handle.address, offer.state.value]
            for hold in offer.all_holds:
                answer.append(f'{hold.kind.value}: {hold.reason}')
                self.assertThat(printed, matchers.MatchesRegex(
                    rf'(?s).*{hold.kind.value} since {_TIME}: '
                    rf'{re.escape(hold.reason)}'))
        self.assertEqual(next(self.answers),
                         re.sub(_UUID, 'A', ' '.join(answer)))

    def discover(self):
        """The column Health of nova-accel discover, with the configuration of
        this process."""
        done = commands.run(
            'discover', '-f', 'json', '--store', os.path.join(
                self.directory, claim_store.file_name(clouds.NODE)),
            discover=discover.Discover)
        self.assertEqual('', done.stderr)
        return '\n'.join(row['Health'] for row in json.loads(done.stdout))

    def placement(self):
        """(total, reserved) of each provider with disks."""
        self.host.report()
        return sorted(
            (item['total'], item['reserved'])
            for provider in self.host.cloud.read()['providers'].values()
            for name, item in provider['inventory'].items() if name == SSD)

    def test_card_that_came_back(self):
        """Its server was deleted while it was away. It has the server's data,
        and is cleaned first."""
        self.start('none', [ONE, TWO])
        server = self.boot()
        self.host.cloud.stop_guest(server)
        self.host.kernel.set_fault(ONE, vanish=True)
        self.host.inventory.scanner.scan()
        self.assertAnswer()
        self.host.delete(server)
        self.host.kernel.set_fault(ONE, vanish=None)
        self.host.inventory.scanner.scan()
        self.assertAnswer()
        self.host.reconciler.run()
        self.host.settle()
        self.assertAnswer()

    def test_disk_in_another_slot(self):
        """Its server has it there; what is in its slot now is free."""
        self.start('none', [ONE, TWO, THREE])
        self.boot()
        self.host.parts.close()
        self.host.cloud.lose_power()
        self.host.kernel.exchange_cards(ONE, TWO)
        self.host.kernel.reboot()
        self.restart()
        self.assertAnswer()

    def test_stricter_policy(self):
        self.start(disks=[ONE, TWO])
        self.config.config(handover=['none'], group='accel')
        self.restart()
        self.host.delete(self.boot())
        self.assertAnswer()
        self.config.config(handover=['clear'], group='accel')
        self.restart()
        self.assertAnswer()
        self.assertEqual([(1, 0)], self.placement())

    def test_pool_with_a_bad_card(self):
        self.start()
        self.host.kernel.set_fault(TWO, dead=True)
        self.host.inventory.scanner.scan()
        self.assertAnswer()
        self.assertEqual([(3, 0)], self.placement())

    def test_set_with_a_missing_member(self):
        self.config.config(device_sets=[f'{ONE} 0000:77:00.0',
                                        f'{TWO} {THREE}'], group='accel')
        self.start()
        self.assertAnswer()
        self.assertEqual([(1, 0), (2, 0), (2, 2)], self.placement())

    def test_function_with_claims_on_its_vfs(self):
        """The VFs went at a boot of the host, and a server has one."""
        self.start('none', [ONE], total_vfs=4, vfs=2)
        server = self.boot()
        held, = self.host.devices_of(server)
        self.host.power_cut()
        self.restart()
        self.assertAnswer()
        self.assertEqual([(1, 1)], self.placement())

    def test_operator_reserves_one_of_four(self):
        """That is between the operator and Placement: no hold."""
        self.start()
        with self.host.cloud.state() as state:
            for provider in state['providers'].values():
                for item in provider['inventory'].values():
                    item['reserved'] = 1
        self.assertAnswer()
        self.assertEqual([(4, 1)], self.placement())

    def test_older_copy_of_the_store(self):
        """Of before a server came, whose guest carries its claim. Whose the
        rest is has to be found out."""
        self.start(disks=[ONE, TWO])
        path = os.path.join(self.directory,
                            claim_store.file_name(clouds.NODE))
        self.host.store._db.execute('VACUUM INTO ?', (f'{path}.copy',))
        self.boot()
        self.host.parts.close()
        for suffix in '', '-wal', '-shm':
            if os.path.exists(path + suffix):
                os.unlink(path + suffix)
        os.rename(f'{path}.copy', path)
        self.restart()
        self.assertAnswer()
        self.host.reconciler.run()
        self.host.settle()
        self.assertAnswer()

    def test_region_that_is_cleaned(self):
        """Placement counts it: the next server waits for it."""
        self.config.config(programming_timeout=600, group='accel')
        self.start_host({'address': A})
        self.host.upload(FUNCTION)
        server = self.host.boot(base.asks(FUNCTION), self.host.allocation(A))
        self.host.kernel.guest_writes(vf(A), registers='s', memory='s')
        began, goes_on = threading.Event(), threading.Event()
        self.addCleanup(goes_on.set)
        program = self.host.kernel.program_dfl_port

        def programs(*args):
            began.set()
            goes_on.wait(base.PATIENCE)
            return program(*args)
        self.host.kernel.program_dfl_port = programs
        self.host.delete(server, wait=False)
        self.assertTrue(began.wait(base.PATIENCE))
        self.assertAnswer()
        goes_on.set()
        self.host.settle()
        self.assertAnswer()

    def test_type_of_vgpus_that_is_exhausted(self):
        """The driver reports only what could be made: all is held, and there
        is nothing to withhold."""
        self.start_host(vgpus=[vgpus.gpu('mdev')], drivers=('vgpu',))
        part, = [(address, None) for address in self.host.inventory.devices]
        name = 'CUSTOM_ACCELERATOR_VGPU'
        specs = {f'resources1:{name}': '1'}
        count = len(self.host.inventory.table.offered().free(part))
        while self.host.inventory.table.offered().free(part):
            self.host.boot(specs, self.host.allocation(
                resource_class=name))
        self.assertGreater(count, 0)
        self.assertAnswer()
