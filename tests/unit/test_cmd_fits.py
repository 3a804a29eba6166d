# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel fits and defrag, with Placement itself.

Migrations are carried out in tests/functional/test_defrag.py, by Nova.
"""

import json
import logging

import testtools

from nova_accel.cmd import defrag
from nova_accel.cmd import fits
from nova_accel import conf
from tests.unit import commands
from tests.unit import placement

GPU = 'CUSTOM_ACCELERATOR_GPU'
L40S = 'CUSTOM_GPU_NVIDIA_L40S'


def flavor(name, gpus, **more):
    return {'id': name, 'name': name, 'vcpus': 1, 'ram': 64, 'disk': 0,
            'OS-FLV-EXT-DATA:ephemeral': 0, 'swap': '',
            'extra_specs': {f'resources1:{GPU}': str(gpus), **more}}


class CloudTestCase(testtools.TestCase):

    def setUp(self):
        super().setUp()
        logging.disable(logging.WARNING)
        self.addCleanup(logging.disable, logging.NOTSET)
        self.addCleanup(conf.CONF.reset)
        self.services = self.useFixture(placement.Services())
        self.pools, self.nodes = {}, []
        self.there = {name: [] for name in ('compute1', 'compute2')}
        for name in self.there:
            root = self.services.provider(
                name, inventory={'VCPU': 8, 'MEMORY_MB': 4096})
            self.pools[name] = self.services.provider(
                f'{name}_accel_pool_GPU', root, {GPU: 4}, [L40S])
            self.nodes.append({
                'id': root, 'hypervisor_hostname': name, 'state': 'up',
                'status': 'enabled',
                'service': {'host': f'{name}.example',
                            'disabled_reason': None}})
        # without accelerators
        self.services.provider('compute3', inventory={'VCPU': 8})
        self.services.answer('/os-hypervisors/detail', {
            'hypervisors': self.nodes})
        self.flavors = [flavor('one', 1), flavor('four', 4), {
            **flavor('plain', 0), 'extra_specs': {}}]
        # in two pages
        self.services.answer('/flavors/detail?is_public=None&marker=one', {
            'flavors': self.flavors[1:]})
        self.services.answer('/flavors/detail', {
            'flavors': self.flavors[:1], 'flavors_links': [
                {'rel': 'next', 'href': 'http://next/'}]})
        for one in self.flavors:
            self.services.answer(f'/flavors/{one["name"]}', {'flavor': one})

    def run_command(self, name, *arguments):
        command = {'fits': fits.Fits, 'defrag': defrag.Defrag}[name]
        done = commands.run(
            name, *arguments, '--config-file', '/dev/null', '-f', 'json',
            **{name: command})
        self.assertNotIn('Traceback', done.stderr)
        return done

    def rows(self, *arguments):
        done = self.run_command(*arguments)
        self.assertEqual(0, done.returncode, done.stderr)
        return [tuple(row.values()) for row in json.loads(done.stdout)]

    def server(self, uuid, host, gpus=1, **more):
        self.services.allocate(uuid, self.pools[host], **{GPU: gpus})
        self.there[host].append({
            **placement.SERVER, 'id': uuid, 'name': f'server-{uuid[:1]}',
            'OS-EXT-SRV-ATTR:hypervisor_hostname': host,
            'flavor': {**placement.SERVER['flavor'], 'extra_specs': {
                f'resources1:{GPU}': str(gpus)}}, **more})
        for name, servers in self.there.items():
            path = f'/servers/detail?all_tenants=1&limit=1000&host={name}' \
                   f'.example'
            self.services.answer(path, {'servers': servers})


A, B = (f'{n}' * 8 + '-1111-4222-8333-444444444444' for n in 'ab')


class FitsTest(CloudTestCase):

    def test_all_flavors(self):
        self.services.allocate(A, self.pools['compute1'], **{GPU: 1})
        self.assertEqual([
            ('one', '(all)', 7, f'{GPU} (on 2 of 2 hosts)'),
            ('four', '(all)', 1, f'{GPU} (on 2 of 2 hosts)'),
        ], self.rows('fits'))

    def test_list_without_end(self):
        """Nova gives one page again and again."""
        self.services.answer('/flavors/detail?is_public=None&marker=one', {
            'flavors': self.flavors[:1], 'flavors_links': [
                {'rel': 'next', 'href': 'http://next/'}]})
        done = self.run_command('fits')
        self.assertEqual(1, done.returncode)
        self.assertIn('the list has no end', done.stderr)

    def test_by_host(self):
        self.services.allocate(A, self.pools['compute1'], **{GPU: 1})
        self.nodes[1]['state'] = 'down'
        down = ('its nova-compute is down: see that it runs and reaches the '
                'message bus, and that the clocks of the hosts agree')
        self.assertEqual([
            ('four', '(all)', 0, f'{GPU} (on 1 of 2 hosts)'),
            ('four', 'compute1', 0, f'4 {GPU} for each, 3 free of 4'),
            ('four', 'compute2', 0, down),
        ], self.rows('fits', 'four', '--by-host'))
        self.assertEqual([
            ('one', '(all)', 3, f'{GPU} (on 1 of 1 hosts)'),
            ('one', 'compute1', 3, f'1 {GPU} for each, 3 free of 4'),
        ], self.rows('fits', 'one', '--host', 'compute1', '--by-host'))

    def test_places_that_placement_does_not_show(self):
        """A pool on several nodes; one device is on one node anyway."""
        for gpus, hides in (4, True), (1, False):
            self.services.answer('/flavors/four', {'flavor': flavor(
                'four', gpus, **{'accel:same': 'numa'})})
            for row in self.rows('fits', 'four', '--by-host'):
                self.assertEqual(
                    hides, 'fewer if they are not on one NUMA node, which '
                    'Placement shows with [accel] pools = numa_node'
                    in row[3], row)

    def test_flavor_that_nova_api_refuses(self):
        self.flavors[0]['extra_specs'] = {f'resources1:{GPU}': 'many'}
        [(name, host, number, limit)] = self.rows('fits', 'one')
        self.assertEqual(('one', '(all)', 0), (name, host, number))
        self.assertIn('nova-api refuses the flavor: resources1', limit)

    def test_bad_input(self):
        for arguments, text in (
                (('nope',), 'Nova has no flavor with the name or id \'nope\''),
                (('plain',), 'The flavor plain asks for no accelerator'),
                (('one', '--host', 'nope'), 'has none with this name')):
            with self.subTest(arguments):
                done = self.run_command('fits', *arguments)
                self.assertEqual((1, ''), (done.returncode, done.stdout))
                self.assertIn(text, done.stderr)
                self.assertEqual(1, len(done.stderr.splitlines()))


class DefragTest(CloudTestCase):

    def setUp(self):
        super().setUp()
        self.server(A, 'compute1')
        self.server(B, 'compute2')

    def test_plan(self):
        done = self.run_command('defrag', '--for', 'four')
        self.assertEqual(0, done.returncode)
        [row] = json.loads(done.stdout)
        self.assertEqual((1, 'server-a', A, 'compute1', 'compute2', 'planned'),
                         tuple(row.values()))
        self.assertIn(
            '0 of four fit now; after 1 migration 1 fits. To carry them out: '
            'nova-accel defrag --for four -n 1 --do ', done.stderr)

    def test_nothing_to_do(self):
        done = self.run_command('defrag', '--for', 'one', '-n', '2')
        self.assertEqual((0, []), (done.returncode, json.loads(done.stdout)))
        self.assertIn('6 of one fit now, and nothing has to move for 2.',
                      done.stderr)

    def test_no_room(self):
        done = self.run_command('defrag', '--for', 'four', '-n', '2')
        self.assertEqual((1, []), (done.returncode, json.loads(done.stdout)))
        self.assertIn('No migrations were found after which 2 of four fit',
                      done.stderr)

    def test_servers_that_stay(self):
        for change in ({'status': 'RESCUE'}, {'locked': True},
                       {'OS-EXT-STS:task_state': 'rebooting'}):
            for servers in self.there.values():
                servers[0].update(status='ACTIVE', locked=False, **{
                    'OS-EXT-STS:task_state': None})
            self.there['compute1'][0].update(change)
            done = self.run_command('defrag', '--for', 'four')
            [row] = json.loads(done.stdout)
            self.assertEqual(B, row['Server ID'])

    def test_plan_that_changed(self):
        done = self.run_command('defrag', '--for', 'four')
        plan = done.stderr.split()[-1]
        self.there['compute1'][0]['locked'] = True
        done = self.run_command('defrag', '--for', 'four', '--do', plan)
        self.assertEqual((1, ''), (done.returncode, done.stdout))
        self.assertEqual(
            f'Plan {plan} was not carried out, because it is not what would '
            f'be done now: nothing was moved; give the command without --do, '
            f'and read the plan again.\n', done.stderr)
        self.assertEqual([], [path for _, path in self.services.asked
                              if path.endswith('/action')])

    def test_bad_input(self):
        for arguments, text in (
                (('--for', 'nope'), 'no flavor with the name or id \'nope\''),
                (('--for', 'plain'), 'asks for no accelerator'),
                (('--for', 'one', '-n', '0'), '-n 0 was given')):
            done = self.run_command('defrag', *arguments)
            self.assertEqual((1, ''), (done.returncode, done.stdout))
            self.assertIn(text, done.stderr)
            self.assertEqual(1, len(done.stderr.splitlines()))
